"""`python -m services.router`"""

from services.router.config import RouterConfig
from services.router.service import RouterService
from shared.service import main

if __name__ == "__main__":
    main(RouterService, RouterConfig)

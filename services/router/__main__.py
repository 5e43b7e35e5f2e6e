"""`python -m services.router`"""

import gc

from services.router.config import RouterConfig
from services.router.service import RouterService
from shared.service import main

if __name__ == "__main__":
    gc.freeze()  # what was imported stays: a full collection need not look at it while requests wait
    main(RouterService, RouterConfig)

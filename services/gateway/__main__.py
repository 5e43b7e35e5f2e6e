"""`python -m services.gateway`"""

from services.gateway.config import GatewayConfig
from services.gateway.service import GatewayService
from shared.service import main

if __name__ == "__main__":
    main(GatewayService, GatewayConfig)

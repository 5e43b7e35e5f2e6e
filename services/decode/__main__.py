"""`python -m services.decode`"""

from services.decode.config import DecodeConfig
from services.decode.service import DecodeService
from shared.service import main

if __name__ == "__main__":
    main(DecodeService, DecodeConfig)

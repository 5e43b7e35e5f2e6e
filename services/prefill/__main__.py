"""`python -m services.prefill`"""

from services.prefill.config import PrefillConfig
from services.prefill.service import PrefillService
from shared.service import main

if __name__ == "__main__":
    main(PrefillService, PrefillConfig)

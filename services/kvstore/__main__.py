"""`python -m services.kvstore`."""

from services.kvstore.config import KvStoreConfig
from services.kvstore.service import KvStoreService
from shared.service import main

if __name__ == "__main__":
    main(KvStoreService, KvStoreConfig)

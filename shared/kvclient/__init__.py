"""A worker's side of the KV store: load blocks into the device pool, store blocks from it.

Every fault (no store, no answer, evicted, expired, corrupt) means fewer blocks and a reason, never an exception: the worker computes
what it did not get. Copies run in threads, and a lease is released only after the thread that copies under it is done.
"""

from shared.kvclient.client import KvClient, LoadResult, StoreResult

__all__ = ["KvClient", "LoadResult", "StoreResult"]

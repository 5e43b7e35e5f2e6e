"""What fails in the cache: to a request a miss."""

from __future__ import annotations

from shared.errors.root import SlipstreamError


class KvError(SlipstreamError):
    """A fault in the cache. To a request it is a miss, never an error."""

    code = "kv_error"


class OutOfBlocks(KvError):
    """Fewer blocks are free than asked for. Nothing was allocated."""

    code = "out_of_blocks"

    def __init__(self, num_requested: int, num_free: int) -> None:
        super().__init__(f"{num_requested} blocks asked for, {num_free} free")
        self.num_requested = num_requested
        self.num_free = num_free


class LeaseExpired(KvError):
    """A lease that was never given, has run out, or was used already."""

    code = "lease_expired"

    def __init__(self, lease_id: int) -> None:
        super().__init__(f"lease {lease_id:x} is not held")
        self.lease_id = lease_id


class LayoutMismatch(KvError):
    """Blocks of another layout, model or format."""

    code = "layout_mismatch"

    def __init__(self, ours: str, theirs: str) -> None:
        super().__init__(f"blocks of layout {theirs}, this is {ours}")
        self.ours = ours
        self.theirs = theirs


class StoreAbsent(KvError):
    """The host's KV store does not answer, or there is none."""

    code = "store_absent"

    def __init__(self, host: str) -> None:
        super().__init__(f"the KV store of host {host or '(none)'} does not answer")
        self.host = host


class TransferFailed(KvError):
    """A copy between hosts did not arrive whole."""

    code = "transfer_failed"

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"transfer with {peer} failed: {reason}")
        self.peer = peer

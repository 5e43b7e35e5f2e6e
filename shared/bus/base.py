"""What Slipstream needs of a broker. `nats.NatsBus` and `memory.MemoryBus` pass the same contract suite (tests/contract/test_bus.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from shared.bus.spec import StreamSpec

Headers = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Message:
    """A core message as it arrived. Header names are looked up in lower case."""

    subject: str
    payload: bytes
    reply: str = ""
    headers: Headers = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of a bucket. `value` None: the key was deleted or expired."""

    key: str
    value: bytes | None
    revision: int


class Subscription(ABC):
    """`async for message in subscription`.

    Messages beyond the pending limits are dropped and counted (`num_dropped`), never queued without bound.
    """

    num_dropped: int = 0

    @abstractmethod
    def __aiter__(self) -> AsyncIterator[Message]: ...

    @abstractmethod
    async def close(self) -> None:
        """Unsubscribe; the iteration ends after the messages that are here already. Idempotent."""


class Delivery(ABC):
    """One message of a work queue. Until `ack` or `term`, it comes back when ack_wait passes without `in_progress`."""

    message: Message
    num_delivered: int
    """1 at first; more: it was delivered before and not acked."""
    stream_sequence: int
    age_s: float
    """Time since it was stored, by the server's clock."""

    @abstractmethod
    async def ack(self) -> None:
        """The work is done (or handed on): delete the message. Raises nothing while disconnected: a redelivery is filtered by `wanted`."""

    @abstractmethod
    async def in_progress(self) -> None:
        """Still at it: start ack_wait again."""

    @abstractmethod
    async def term(self) -> None:
        """Never deliver again (malformed)."""


class Consumer(ABC):
    """A pull consumer with its own pull loop: `window` messages at most are asked for and not yet taken by `next`."""

    @abstractmethod
    async def next(self) -> Delivery:
        """The next message; waits as long as it takes, across reconnects and wiped streams. Raises BusClosed after `close`."""

    @abstractmethod
    def pause(self) -> None:
        """Ask for no more until `resume`; what was asked for already may still come."""

    @abstractmethod
    def resume(self) -> None: ...

    @abstractmethod
    async def close(self, *, delete: bool = False) -> None:
        """Stop pulling; with `delete`, delete the durable too. Idempotent."""


class Bucket(ABC):
    """A key-value bucket. Wiped buckets are made again, empty."""

    @abstractmethod
    async def get(self, key: str) -> Entry | None:
        """None if the key is absent, deleted or expired."""

    @abstractmethod
    async def put(self, key: str, value: bytes) -> int:
        """Returns the revision."""

    @abstractmethod
    async def create(self, key: str, value: bytes) -> int:
        """Only if the key is absent, else RevisionConflict."""

    @abstractmethod
    async def update(self, key: str, value: bytes, revision: int) -> int:
        """Only if the key still has this revision, else RevisionConflict."""

    @abstractmethod
    async def delete(self, key: str) -> None: ...

    @abstractmethod
    async def entries(self) -> list[Entry]:
        """All present keys with their values."""

    @abstractmethod
    def watch(self) -> AsyncIterator[Entry]:
        """First every present key, then each change, across reconnects (after which every present key is repeated).

        Silent when a TTL expires: a reader of leases expires them by its own clock.
        """


Handler = Callable[[Message], Awaitable[bytes]]
DeadLetterHandler = Callable[[bytes, str], Awaitable[None]]
"""Called with the payload and the subject of a message that was delivered max_deliver times and never acked."""


class LinkClock:
    """Monotonic seconds that stand still while the connection is down and for `grace_s` after it is back.

    Leases and lost-request clocks are read off it: a worker is not lost because *we* could not hear it. With `patience_s` the clock also
    stops by itself when `heard` was not called for so long: a link that is dead and not yet known to be, or a process that was stopped.
    """

    def __init__(self, monotonic: Callable[[], float], grace_s: float = 2.0, patience_s: float | None = None) -> None:
        self._monotonic = monotonic
        self._grace_s = grace_s
        self._patience_s = patience_s
        self._heard_at: float | None = None
        self._is_cut = False
        self._stopped_s = 0.0
        self._down_since: float | None = None
        self._up_since: float | None = None

    def now(self) -> float:
        """Seconds, never going back."""
        self._settle()
        now = self._monotonic() if self._down_since is None else self._down_since
        return now - self._stopped_s

    def heard(self) -> None:
        """The server answered just now."""
        self._settle()
        self._heard_at = self._monotonic()
        if self._down_since is not None and not self._is_cut:
            self._rise()

    def link_down(self) -> None:
        """The connection was lost. A loss within the grace period extends the stop."""
        self._settle()
        self._is_cut = True
        if self._down_since is None:
            self._down_since = self._monotonic()
        self._up_since = None

    def link_up(self) -> None:
        """The connection is back."""
        self._settle()
        self._is_cut = False
        self._heard_at = self._monotonic()
        self._rise()

    def _rise(self) -> None:
        if self._down_since is not None and self._up_since is None:
            self._up_since = self._monotonic()

    def _settle(self) -> None:
        """Stop if the server was silent for too long; fold a finished stop into the total."""
        now = self._monotonic()
        if self._patience_s is not None and self._heard_at is not None and not self._is_cut:
            silent_since = self._heard_at + self._patience_s
            if now > silent_since:
                self._down_since = silent_since if self._down_since is None else self._down_since
                self._up_since = None
        if self._down_since is None or self._up_since is None:
            return
        end = self._up_since + self._grace_s
        if now >= end:
            self._stopped_s += end - self._down_since
            self._down_since = self._up_since = None


class Bus(ABC):
    """One connection. All methods raise errors of shared.errors only."""

    clock: LinkClock
    counts: Counter[str]
    """What went otherwise than hoped, by event: `publish_dropped`, `reconnect`, `permission_denied`, ... (see `wire.EVENTS`)."""
    max_message_bytes: int
    """0.9 × the server's max_payload. Larger messages, headers included, raise PayloadTooLarge before they reach the wire."""

    @property
    @abstractmethod
    def is_connected(self) -> bool: ...

    @abstractmethod
    async def publish(self, subject: str, payload: bytes, *, reply: str = "", headers: Headers | None = None) -> None:
        """Core publish, at most once. While disconnected the message is dropped and counted, never sent late."""

    @abstractmethod
    async def request(self, subject: str, payload: bytes, *, timeout_s: float, headers: Headers | None = None) -> Message:
        """One reply. Raises NoResponders at once if nobody listens, BusTimeout after `timeout_s`."""

    @abstractmethod
    def request_many(self, subject: str, payload: bytes, *, stall_s: float, headers: Headers | None = None) -> AsyncIterator[Message]:
        """Many replies on one inbox, until an empty payload (which is yielded too, for its headers).

        BusTimeout after `stall_s` of silence.
        """

    @abstractmethod
    async def subscribe(self, subject: str, *, queue: str = "", max_messages: int = 65_536, max_bytes: int = 64 * 2**20) -> Subscription:
        """Listen; when this returns, the server knows. Raises PermissionDenied."""

    @abstractmethod
    async def serve(self, subject: str, handler: Handler, *, queue: str = "", concurrency: int = 256) -> Subscription:
        """Answer requests: a task a request, at most `concurrency` at once. The handler's bytes are the reply.

        A SlipstreamError that it raises is answered with headers `Nats-Service-Error` and `Nats-Service-Error-Code`; anything else is
        logged, counted and answered as internal_error.
        """

    @abstractmethod
    async def enqueue(self, subject: str, payload: bytes, *, msg_id: str, headers: Headers | None = None) -> bool:
        """Publish to the stream behind `subject` and wait until it is stored; retried with the same id.

        False: it was there already, perhaps by an attempt of this very call whose answer was lost.
        Raises QueueFull; BusTimeout when it could not be stored within 5 s; StreamMissing if no stream of ours stores the subject.
        """

    @abstractmethod
    async def consume(self, stream: str, durable: str, subject: str, *, window: int, max_deliver: int | None = None) -> Consumer:
        """Pull from `stream` by a durable that is made if it is not there (and again after a wipe): explicit ack, ack_wait 5 s.

        What was asked for and waits for `next` is kept `in_progress` here. `max_deliver` None: the stream's own rule (`streams`).
        """

    @abstractmethod
    async def delete_durable(self, stream: str, durable: str, purge_subject: str = "") -> None:
        """Delete a dead worker's durable and what is queued for it. Absent is fine."""

    @abstractmethod
    async def on_dead_letter(self, stream: str, callback: DeadLetterHandler) -> None:
        """Take care of what `stream` gave up on (max_deliver): write it to SS_DEAD, delete it from the stream, then call `callback`.

        Of all processes that ask for this, one does it for each message.
        """

    @abstractmethod
    async def add_stream(self, spec: StreamSpec) -> None:
        """Make the stream (or bucket), or bring it to `spec` if it exists. Idempotent."""

    @abstractmethod
    async def bucket(self, name: str) -> Bucket:
        """The bucket, made if it is not there."""

    @abstractmethod
    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Call `callback` each time the connection is back."""

    @abstractmethod
    def on_closed(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the connection is lost for good without `close`: the process must end with BusClosed.exit_code."""

    @abstractmethod
    async def close(self) -> None:
        """Flush, then close; bounded in time. Idempotent."""

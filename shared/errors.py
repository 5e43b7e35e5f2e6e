"""Every error that Slipstream raises, in one tree.

SlipstreamError                      code, message, remedy
├─ ConfigError                       variable, value                    exit 2
├─ EnvironmentFault                  port taken, no JetStream, no room  exit 3
│  └─ ModelFault                     a model that is absent, corrupt or unknown
├─ BusError
│  ├─ BusTimeout                     subject, timeout_s
│  │  └─ LinkDown                    our own connection is down: says nothing about the peer
│  ├─ PermissionDenied               subject
│  ├─ NoResponders                   subject
│  ├─ QueueFull                      subject
│  ├─ StreamMissing                  stream
│  ├─ RevisionConflict               key
│  ├─ PayloadTooLarge                num_bytes, max_bytes
│  ├─ MalformedMessage               type_name
│  └─ BusClosed                                                         exit 70
├─ KvError
│  ├─ OutOfBlocks                    num_requested, num_free
│  ├─ LeaseExpired                   lease_id
│  ├─ LayoutMismatch                 ours, theirs
│  ├─ StoreAbsent                    host
│  └─ TransferFailed                 peer
├─ RequestError                      a client's fault or fate: becomes an HTTP status
│  ├─ BadRequest                     param                              400
│  ├─ PromptTooLong                  num_tokens, max_model_len          400
│  ├─ Unauthorized                                                      401
│  ├─ ModelNotFound                  model, served                      404
│  ├─ BodyTooLarge                   num_bytes, max_bytes               413
│  ├─ SlowRequest                                                       408
│  ├─ WrongMediaType                                                    415
│  ├─ HeadTooLarge                                                      431
│  ├─ Overloaded                     retry_after_s                      429
│  ├─ NoCapacity                     retry_after_s                      503
│  ├─ RequestCancelled                                                  499
│  ├─ DeadlineExceeded                                                  504
│  └─ WorkerLost                     attempts                           500
└─ EngineError                       a forward pass failed              500

Foreign exceptions are translated where their library is imported, nowhere else. `assert` is for "cannot happen".
"""

from __future__ import annotations

from typing import ClassVar


class SlipstreamError(Exception):
    """The root. `code` is the stable word on wires and in logs; `remedy` says what a person can do."""

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy


class ConfigError(SlipstreamError):
    """A setting that cannot be used. Names the variable, not only the value."""

    code = "bad_config"
    exit_code = 2

    def __init__(self, variable: str, value: object, reason: str, *, remedy: str = "") -> None:
        super().__init__(f"{variable}={value!r}: {reason}", remedy=remedy)
        self.variable = variable
        self.value = value


class EnvironmentFault(SlipstreamError):
    """The machine is not as it must be: a port taken, NATS without JetStream, no room on a disk."""

    code = "environment"
    exit_code = 3


class ModelFault(EnvironmentFault):
    """A model that is absent, truncated, corrupt, or of an architecture that is not served."""

    code = "model_fault"


class BusError(SlipstreamError):
    """Something between two processes failed."""

    code = "bus_error"
    status = 503


class BusTimeout(BusError):
    """No answer in time. The message may have arrived all the same."""

    code = "bus_timeout"

    def __init__(self, subject: str, timeout_s: float) -> None:
        super().__init__(f"no answer on {subject} within {timeout_s:g} s")
        self.subject = subject
        self.timeout_s = timeout_s


class LinkDown(BusTimeout):
    """No answer because our own connection is, or went, down. Says nothing about the peer; the message may have arrived all the same."""

    code = "link_down"

    def __init__(self, subject: str, timeout_s: float = 0.0) -> None:
        BusError.__init__(self, f"no connection to NATS while asking {subject}")
        self.subject = subject
        self.timeout_s = timeout_s


class PermissionDenied(BusError):
    """The broker's user may not use the subject."""

    code = "permission_denied"

    def __init__(self, subject: str) -> None:
        super().__init__(f"NATS denies {subject} to this user", remedy="compare the user's permissions with shared/bus/permissions.py")
        self.subject = subject


class NoResponders(BusError):
    """Nobody listens on the subject: known at once, without a time-out."""

    code = "no_responders"

    def __init__(self, subject: str) -> None:
        super().__init__(f"nobody listens on {subject}")
        self.subject = subject


class QueueFull(BusError):
    """A stream refused a message because it, or the subject's share of it, is full (discard=new)."""

    code = "queue_full"
    status = 429

    def __init__(self, subject: str) -> None:
        super().__init__(f"the queue behind {subject} is full")
        self.subject = subject


class StreamMissing(BusError):
    """A stream, durable or bucket is gone (wiped or expired) and could not be made again."""

    code = "stream_missing"

    def __init__(self, stream: str) -> None:
        super().__init__(f"{stream} does not exist")
        self.stream = stream


class RevisionConflict(BusError):
    """A bucket key changed between read and write, or exists already."""

    code = "revision_conflict"

    def __init__(self, key: str) -> None:
        super().__init__(f"{key} was changed by somebody else")
        self.key = key


class PayloadTooLarge(BusError):
    """A message above 0.9 of the server's max_payload: refused here, because the server would cut the connection."""

    code = "payload_too_large"
    status = 400

    def __init__(self, num_bytes: int, max_bytes: int) -> None:
        super().__init__(f"the message has {num_bytes} bytes, the limit is {max_bytes}")
        self.num_bytes = num_bytes
        self.max_bytes = max_bytes


class MalformedMessage(BusError):
    """Bytes that are not the message that the subject promises."""

    code = "malformed_message"
    status = 400

    def __init__(self, type_name: str, reason: str) -> None:
        super().__init__(f"not a {type_name}: {reason}")
        self.type_name = type_name


class BusClosed(BusError):
    """The connection is closed for good; the process must be started again."""

    code = "bus_closed"
    exit_code = 70


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


class RequestError(SlipstreamError):
    """A request that ends without its text. `status` is the HTTP status; `param` names the field at fault."""

    code = "request_error"
    status = 400

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.retry_after_s = retry_after_s


class BadRequest(RequestError):
    """A body or field that cannot be served as it stands."""

    code = "invalid_request"


class PromptTooLong(RequestError):
    """More tokens than the model's context, or than a message may carry."""

    code = "context_length_exceeded"

    def __init__(self, num_tokens: int, max_model_len: int, *, is_whole: bool = True) -> None:
        count = f"{num_tokens}" if is_whole else f"more than {num_tokens}"
        super().__init__(
            f"the prompt has {count} tokens and at least one must be generated; the limit is {max_model_len}", param="messages"
        )
        self.num_tokens = num_tokens
        self.max_model_len = max_model_len


class Unauthorized(RequestError):
    """No API key, or one that is not known."""

    code = "invalid_api_key"
    status = 401


class ModelNotFound(RequestError):
    """A model that is not served. Names those that are."""

    code = "model_not_found"
    status = 404

    def __init__(self, model: str, served: list[str]) -> None:
        super().__init__(f"model {model[:64]!r} is not served; served: {', '.join(served) or 'none yet'}", param="model")
        self.model = model
        self.served = served


class BodyTooLarge(RequestError):
    """A body above the limit."""

    code = "body_too_large"
    status = 413


class SlowRequest(RequestError):
    """It did not come to its end in time."""

    code = "request_timeout"
    status = 408


class WrongMediaType(RequestError):
    """A body that does not say that it is JSON, or that is compressed."""

    code = "unsupported_content_type"
    status = 415


class HeadTooLarge(RequestError):
    """A target and headers above the limit."""

    code = "head_too_large"
    status = 431


class Overloaded(RequestError):
    """Capacity exists but is contended: come back later."""

    code = "overloaded"
    status = 429


class NoCapacity(RequestError):
    """No worker serves the model now."""

    code = "no_workers"
    status = 503


class RequestCancelled(RequestError):
    """The client went away or cancelled."""

    code = "cancelled"
    status = 499


class DeadlineExceeded(RequestError):
    """The request's own deadline passed."""

    code = "deadline_exceeded"
    status = 504


class WorkerLost(RequestError):
    """The workers that served the request died, more often than a request is moved."""

    code = "worker_lost"
    status = 500


class EngineError(SlipstreamError):
    """A forward pass failed. Only the requests of that batch are affected."""

    code = "engine_error"


def _family(root: type[SlipstreamError]) -> list[type[SlipstreamError]]:
    return [root, *(error for child in root.__subclasses__() for error in _family(child))]


STATUS_BY_CODE: dict[str, int] = {error.code: error.status for error in _family(SlipstreamError)}
"""Error code on the wire → HTTP status. An unknown code is a 500."""

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

from shared.errors.bus import (
    BusClosed,
    BusError,
    BusTimeout,
    LinkDown,
    MalformedMessage,
    NoResponders,
    PayloadTooLarge,
    PermissionDenied,
    QueueFull,
    RevisionConflict,
    StreamMissing,
)
from shared.errors.kv import KvError, LayoutMismatch, LeaseExpired, OutOfBlocks, StoreAbsent, TransferFailed
from shared.errors.request import (
    BadRequest,
    BodyTooLarge,
    DeadlineExceeded,
    HeadTooLarge,
    ModelNotFound,
    NoCapacity,
    Overloaded,
    PromptTooLong,
    RequestCancelled,
    RequestError,
    SlowRequest,
    Unauthorized,
    WorkerLost,
    WrongMediaType,
)
from shared.errors.root import ConfigError, EngineError, EnvironmentFault, ModelFault, SlipstreamError

__all__ = [
    "STATUS_BY_CODE",
    "BadRequest",
    "BodyTooLarge",
    "BusClosed",
    "BusError",
    "BusTimeout",
    "ConfigError",
    "DeadlineExceeded",
    "EngineError",
    "EnvironmentFault",
    "HeadTooLarge",
    "KvError",
    "LayoutMismatch",
    "LeaseExpired",
    "LinkDown",
    "MalformedMessage",
    "ModelFault",
    "ModelNotFound",
    "NoCapacity",
    "NoResponders",
    "OutOfBlocks",
    "Overloaded",
    "PayloadTooLarge",
    "PermissionDenied",
    "PromptTooLong",
    "QueueFull",
    "RequestCancelled",
    "RequestError",
    "RevisionConflict",
    "SlipstreamError",
    "SlowRequest",
    "StoreAbsent",
    "StreamMissing",
    "TransferFailed",
    "Unauthorized",
    "WorkerLost",
    "WrongMediaType",
]


def _family(root: type[SlipstreamError]) -> list[type[SlipstreamError]]:
    return [root, *(error for child in root.__subclasses__() for error in _family(child))]


STATUS_BY_CODE: dict[str, int] = {error.code: error.status for error in _family(SlipstreamError)}
"""Error code on the wire → HTTP status. An unknown code is a 500."""

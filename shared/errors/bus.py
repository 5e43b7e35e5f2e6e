"""What fails between two processes."""

from __future__ import annotations

from shared.errors.root import SlipstreamError


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

"""A client's fault or fate: what becomes an HTTP status."""

from __future__ import annotations

from shared.errors.root import SlipstreamError


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
        super().__init__(f"model {model[:64]!r} is not served; served: {', '.join(served)}", param="model")
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

"""A request's body, as far as it may be read."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from shared.errors import BodyTooLarge, RequestCancelled, SlowRequest, WrongMediaType


async def read_body(request: Request, max_bytes: int, read_s: float) -> bytes:
    """What is larger is not read to its end. Raises a RequestError if it is no JSON by its own word, too large, too slow, or cut off."""
    _check_media_type(request)
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        raise BodyTooLarge(f"the body has {length} bytes, the limit is {max_bytes}")
    body = bytearray()
    try:
        async with asyncio.timeout(read_s):
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    raise BodyTooLarge(f"the body has more than {max_bytes} bytes")
    except TimeoutError as error:
        raise SlowRequest(f"the request did not come to its end within {read_s:g} s") from error
    except ClientDisconnect as error:
        raise RequestCancelled("the client went away before its request was whole") from error
    return bytes(body)


def _check_media_type(request: Request) -> None:
    """A page of another site can make a browser send anything but JSON that says so: then the browser asks first, and is refused."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise WrongMediaType("send the body as JSON, with the header content-type: application/json")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity" or request.headers.get("transfer-encoding", "chunked").strip().lower() != "chunked":
        raise WrongMediaType("send the body as it is, not compressed")

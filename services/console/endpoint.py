"""A running gateway as a client sees it: JSON and server-sent events over HTTP, with the standard library alone."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from services.console.run_folder import find_run, state_dir
from shared.errors import ConfigError, EnvironmentFault, SlipstreamError

DEFAULT_URL = "http://127.0.0.1:8000"


class Refused(SlipstreamError):
    """The gateway answered with an error. `status` is the HTTP status."""

    code = "refused"

    def __init__(self, http_status: int, message: str, *, remedy: str = "") -> None:
        super().__init__(f"{message} (HTTP {http_status})", remedy=remedy)
        self.http_status = http_status


class Endpoint:
    """One gateway. A connection a call: a stack may be restarted between two questions."""

    def __init__(self, url: str, api_key: str = "", timeout_s: float = 120.0) -> None:
        self.host, self.port = _address(url)
        if not re.fullmatch(r"[ -~]*", api_key):
            raise ConfigError("SS_API_KEY", "•••", "holds characters that no key has", remedy="Make a key: slipstream keys new")
        self._headers = {"content-type": "application/json", **({"authorization": f"Bearer {api_key}"} if api_key else {})}
        self._timeout_s = timeout_s

    def get(self, path: str) -> Any:
        """The JSON at `path`."""
        with self._open("GET", path, None) as response:
            return _json(response.read())

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON answer to `body`."""
        with self._open("POST", path, body) as response:
            return _json(response.read())

    def model(self) -> str:
        """The first model served. EnvironmentFault if there is none yet."""
        served = self.get("/v1/models")["data"]
        if not served:
            raise EnvironmentFault("no model is served yet", remedy="See: slipstream status")
        name: str = served[0]["id"]
        return name

    @contextlib.contextmanager
    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, str], Iterator[dict[str, Any]]]]:
        """Headers (lower case) and the events of a streamed answer. Leaving the block early closes the connection, which cancels.

        An `error` event raises Refused.
        """
        with self._open("POST", path, {**body, "stream": True}) as response:
            yield {name.lower(): value for name, value in response.getheaders()}, _events(response)

    @contextlib.contextmanager
    def _open(self, method: str, path: str, body: Mapping[str, Any] | None) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=self._timeout_s)
        try:
            connection.request(method, path, None if body is None else msgspec.json.encode(body), self._headers)
            response = connection.getresponse()
            if response.status >= 400:
                raise _refusal(response.status, response.read(65_536))
            yield response
        except TimeoutError as error:
            raise EnvironmentFault(f"{self.host}:{self.port} does not answer within {self._timeout_s:g} s") from error
        except http.client.BadStatusLine as error:
            answers = f"{self.host}:{self.port} answers, but not as a gateway does"
            raise EnvironmentFault(answers, remedy=f"Is the port right? For example: --url {DEFAULT_URL}") from error
        except (OSError, http.client.HTTPException) as error:
            cause = error.strerror if isinstance(error, OSError) and error.strerror else (str(error) or type(error).__name__)
            raise EnvironmentFault(f"no gateway at {self.host}:{self.port}: {cause}", remedy="Start one: slipstream up") from error
        finally:
            if connection.sock:
                # A response that still streams keeps the socket open past close(): say goodbye explicitly.
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)
            connection.close()


def _address(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = (parts.hostname if parts.scheme == "http" else None), 80 if parts.port is None else parts.port
    except ValueError:  # a port beyond 65535, an unclosed bracket
        host, port = None, 0
    with contextlib.suppress(UnicodeError):
        if host and port and not re.search(r"\s", host) and host.encode("idna"):
            return host, port
    raise ConfigError("--url", url, "not an http:// address", remedy=f"For example: --url {DEFAULT_URL}")


def find_endpoint(
    url: str, root: Path | None, wanted: str = "", timeout_s: float = 120.0, environ: Mapping[str, str] = os.environ
) -> Endpoint:
    """`url`, else SS_URL, else the gateway of the run found in the state folder (called `wanted`). The key is SS_API_KEY."""
    url = url or environ.get("SS_URL", "")
    if not url:
        run = find_run(state_dir(root, environ), wanted)
        if not run.http_url:
            raise EnvironmentFault("the running stack has no gateway", remedy="Name one: --url http://HOST:PORT")
        url = run.http_url
    return Endpoint(url, environ.get("SS_API_KEY", ""), timeout_s)


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        field, _, value = line.strip().partition(b":")
        if field != b"data":
            continue  # blank separators and keep-alive comments
        if value.strip() == b"[DONE]":
            return
        event: dict[str, Any] = _json(value)
        if event.get("error"):
            raise Refused(200, str(event["error"].get("message", "the stream broke off")))
        yield event


def _json(text: bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.MsgspecError as error:
        raise EnvironmentFault("the gateway's answer is not JSON", remedy="Is something else listening there?") from error


def _refusal(status: int, body: bytes) -> Refused:
    remedy = "Set the key: SS_API_KEY=…" if status == 401 else ""
    try:
        return Refused(status, str(msgspec.json.decode(body)["error"]["message"]), remedy=remedy)
    except (msgspec.MsgspecError, KeyError, TypeError):
        return Refused(status, "refused", remedy=remedy)

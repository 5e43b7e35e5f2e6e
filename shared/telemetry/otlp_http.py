"""Bytes to an OpenTelemetry collector over HTTP, as the OTEL_EXPORTER_OTLP_* variables say."""

from __future__ import annotations

import gzip
import ssl
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Mapping
from urllib.parse import unquote, urlsplit, urlunsplit

EXPORT_TIMEOUT_S = 2.0
_AGAIN = (429, 502, 503, 504)
"""Answers that mean: later, perhaps."""
_FIRST_PAUSE_S = 0.1


class OtlpHttp:
    """One collector. Endpoint, headers, gzip and certificates come from the environment, those for traces before those for all signals.

    Raises ValueError for an endpoint that is no HTTP address, OSError for certificates that cannot be read.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        def setting(name: str) -> str:
            return environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or environ.get(f"OTEL_EXPORTER_OTLP_{name}", "")

        whole = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
        parts = urlsplit(whole or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").rstrip("/") + "/v1/traces")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("OTEL_EXPORTER_OTLP_ENDPOINT is no http:// or https:// address")
        login, _, host = parts.netloc.rpartition("@")
        self.address = f"{parts.scheme}://{host}"
        """Without a login."""
        self._url = urlunsplit(parts._replace(netloc=host))
        self._headers = {"content-type": "application/x-protobuf", "user-agent": "slipstream", **pairs(setting("HEADERS"))}
        if login:
            self._headers.setdefault("authorization", "Basic " + b64encode(unquote(login).encode()).decode())
        self._gzips = setting("COMPRESSION").lower() == "gzip"
        if self._gzips:
            self._headers["content-encoding"] = "gzip"
        context = ssl.create_default_context(cafile=setting("CERTIFICATE") or None) if parts.scheme == "https" else None
        if context and setting("CLIENT_CERTIFICATE"):
            context.load_cert_chain(setting("CLIENT_CERTIFICATE"), setting("CLIENT_KEY") or None)
        self._opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context))

    def post(self, body: bytes) -> None:
        """Until the collector has taken it, for EXPORT_TIMEOUT_S at most. Raises OSError."""
        request = urllib.request.Request(self._url, gzip.compress(body, 1) if self._gzips else body, self._headers)
        until_s = time.monotonic() + EXPORT_TIMEOUT_S
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                with self._opener.open(request, timeout=max(until_s - time.monotonic(), 0.01)):
                    return
            except urllib.error.HTTPError as answer:
                answer.close()
                fault = OSError(f"{self.address} answers HTTP {answer.code}")
                if answer.code not in _AGAIN:
                    raise fault from None
            except TimeoutError:
                raise OSError(f"{self.address} does not answer within {EXPORT_TIMEOUT_S:g} s") from None
            except OSError as error:
                reason = getattr(error, "reason", error)
                fault = OSError(f"{self.address} cannot be reached: {getattr(reason, 'strerror', None) or reason}")
            if time.monotonic() + pause_s >= until_s:
                raise fault
            time.sleep(pause_s)
            pause_s *= 2


def pairs(text: str) -> dict[str, str]:
    """`a=b,c=d%20e` → names (lower case) and values, as the variables of OpenTelemetry are written."""
    found = {}
    for pair in text.split(","):
        name, equals, value = pair.partition("=")
        if equals and name.strip():
            found[unquote(name).strip().lower()] = unquote(value).strip()
    return found

"""The last phase of a start: one real token, through every service."""

from __future__ import annotations

import os
import time

from services.console.endpoint import Endpoint, Refused
from shared.errors import EnvironmentFault

_PATIENCE_S = 20.0
_RETRY_S = 0.05


def self_test(url: str) -> str:
    """Generate one token. Returns the detail to show; EnvironmentFault if none comes within 20 s of asking."""
    endpoint = Endpoint(url, os.environ.get("SS_API_KEY", ""), timeout_s=_PATIENCE_S)
    deadline_s = time.monotonic() + _PATIENCE_S
    while True:
        began_s = time.monotonic()
        try:
            model = endpoint.model()
            endpoint.post("/v1/completions", {"model": model, "prompt": "Hello", "max_tokens": 1, "temperature": 0})
        except Refused as refusal:
            if refusal.http_status == 401:
                return "needs a key; self-test left out (SS_API_KEY is not set to one)"
            # Until the routers have seen the workers' leases there is nobody to ask: 503, for less than a second.
            if refusal.http_status != 503 or time.monotonic() > deadline_s:
                raise
        except EnvironmentFault:
            if time.monotonic() > deadline_s:
                raise
        else:
            return f"serves {model} · self-test: 1 token in {(time.monotonic() - began_s) * 1e3:.0f} ms"
        time.sleep(_RETRY_S)

"""/openapi.json, made from the structs that decode the bodies: it cannot differ from what is served."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from services.gateway.openai import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

PATHS: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
_ERRORS = {
    "400": "not valid",
    "401": "no valid key",
    "404": "no such model",
    "408": "too slow",
    "413": "too large",
    "415": "not JSON",
    "429": "overloaded",
    "431": "too large a head",
    "503": "no workers",
}


@cache
def openapi() -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    schemas, components = msgspec.json.schema_components(list(PATHS.values()), ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {}
    for (path, body_type), schema in zip(PATHS.items(), schemas, strict=True):
        paths[path] = {
            "post": {
                "summary": (body_type.__doc__ or "").strip().splitlines()[0],
                "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
                "responses": {"200": {"description": "the reply"}} | {code: {"description": text} for code, text in _ERRORS.items()},
            }
        }
    for path, summary in (("/v1/models", "the models served"), ("/health", "ready to serve"), ("/live", "the process lives")):
        paths[path] = {"get": {"summary": summary, "responses": {"200": {"description": summary}}}}
    return {"openapi": "3.1.0", "info": {"title": "Slipstream", "version": "1"}, "paths": paths, "components": {"schemas": components}}

"""The HTTP front door: the OpenAI API over Starlette."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.admission import Client, Unsupported, check_token_ids, mint_request_id
from services.gateway.auth import Keys
from services.gateway.body import read_body
from services.gateway.desk import Desk
from services.gateway.generation import Generation
from services.gateway.models import Models
from services.gateway.openai import IGNORED, ChatBody, CompletionBody, DetokenizeBody, GenerationBody, TokenizeBody, parse_body
from services.gateway.reply import Reply, error_body, make_reply
from services.gateway.schema import openapi
from services.gateway.sse import EventStream, leaving
from shared.errors import BadRequest, NoCapacity, RequestError, SlipstreamError
from shared.telemetry import Telemetry

PUBLIC = frozenset({"/health", "/live"})
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NO_HEADER = re.compile(r"[^ -~]")
"""What a client wrote and a header must not hold."""

log = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response]]


class HttpDoor:
    """Routes and their handlers. `metrics` gives the text of /metrics."""

    def __init__(
        self, desk: Desk, models: Models, keys: Keys, telemetry: Telemetry, *, max_body: int, read_s: float, strict_params: bool
    ) -> None:
        self._desk = desk
        self._models = models
        self._keys = keys
        self._telemetry = telemetry
        self._max_body = max_body
        self._read_s = read_s
        self._strict_params = strict_params

    def app(self) -> ASGIApp:
        posts: dict[str, Handler] = {
            "/v1/chat/completions": lambda request: self._generate(request, ChatBody),
            "/v1/completions": lambda request: self._generate(request, CompletionBody),
            "/tokenize": self._tokenize,
            "/v1/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
            "/v1/detokenize": self._detokenize,
        }
        gets: dict[str, Handler] = {
            "/v1/models": self._list_models,
            "/v1/models/{name:path}": self._show_model,
            "/health": self._health,
            "/live": self._live,
            "/openapi.json": self._openapi,
        }
        later = ("/v1/embeddings", "/v1/responses", "/v1/messages", "/rerank", "/score")
        routes = [Route(path, self._guard(handler), methods=["POST"]) for path, handler in posts.items()]
        routes += [Route(path, self._guard(handler), methods=["GET"]) for path, handler in gets.items()]
        routes += [Route(path, self._guard(self._not_built), methods=["POST"]) for path in later]
        handlers: dict[Any, Any] = {404: self._no_route, 405: self._no_method, Exception: self._broken}
        app = Starlette(routes=routes, exception_handlers=handlers)
        app.router.redirect_slashes = False  # a redirect goes to the host that the client names
        return RequestIds(app)

    # -- every request -----------------------------------------------------------------------------------------------------------
    def _guard(self, handler: Handler) -> Handler:
        """Errors become the API's error object; nothing else of them leaves the process."""

        async def guarded(request: Request) -> Response:
            try:
                if request.scope["path"] not in PUBLIC:
                    self._tenant(request)
                return await handler(request)
            except SlipstreamError as error:
                response = self.failure(error)
                if hasattr(request.state, "traceparent"):
                    response.headers["traceparent"] = request.state.traceparent
                return response

        return guarded

    def _tenant(self, request: Request) -> str:
        return self._keys.tenant(request.headers.get("authorization", ""))

    def failure(self, error: SlipstreamError) -> Response:
        headers = {}
        if isinstance(error, RequestError) and error.retry_after_s is not None:
            headers = {"retry-after": str(max(round(error.retry_after_s), 1)), "retry-after-ms": str(int(error.retry_after_s * 1000))}
        if error.status == 401:
            headers["www-authenticate"] = "Bearer"
        return respond(self.shown(error), error.status, headers)

    async def _no_route(self, request: Request, _error: Exception) -> Response:
        try:
            self._tenant(request)
        except SlipstreamError as error:
            return self.failure(error)
        return respond(error_body(_as_error(404, "not_found", f"there is no {request.method} {request.scope['path'][:128]}")), 404)

    async def _no_method(self, request: Request, _error: Exception) -> Response:
        allow = getattr(_error, "headers", None) or {}
        return respond(error_body(_as_error(405, "method_not_allowed", f"{request.method} is not served here")), 405, dict(allow))

    async def _broken(self, _request: Request, error: Exception) -> Response:
        log.error("a request failed inside the gateway", exc_info=error)
        return self.failure(_as_error(500, "internal_error", "internal error"))

    async def _body(self, request: Request) -> bytes:
        return await read_body(request, self._max_body, self._read_s)

    # -- generating ----------------------------------------------------------------------------------------------------------------
    async def _generate(self, request: Request, body_type: type[ChatBody] | type[CompletionBody]) -> Response:
        body, ignored = parse_body(body_type, await self._body(request))
        unknown = [field for field in ignored if field not in IGNORED]
        if unknown and self._strict_params:
            raise BadRequest(f"unknown parameters: {', '.join(unknown)}", param=unknown[0])
        caller = request.headers.get("traceparent", "")
        explain = request.headers.get("x-slipstream-explain", "") not in ("", "0")
        client = Client(self._tenant(request), self._telemetry.mint_traceparent(caller), caller, explain)
        request.state.traceparent = client.traceparent
        admitted = await self._desk.admit(body, client)
        answer = Answer(self, body, client.traceparent, ignored)
        opened = self._desk.generation(admitted, body, client, "http")
        if body.stream:
            return EventStream(opened, answer)
        async with opened as generation:
            reply = answer.reply(generation)
            with leaving(request.receive, generation.close):
                async for pieces in generation.pieces():
                    for piece in pieces:
                        reply.add(piece)
        return respond(reply.whole(), 200, answer.headers(generation))

    def shown(self, error: SlipstreamError) -> dict[str, Any]:
        """Count an error; what its client may see of it."""
        self._telemetry.count("http_errors", code=error.code)
        return error_body(error if error.status < 500 or isinstance(error, RequestError | Unsupported) else _hidden(error))

    # -- the rest ------------------------------------------------------------------------------------------------------------------
    async def _tokenize(self, request: Request) -> Response:
        body, ignored = parse_body(TokenizeBody, await self._body(request))
        model = self._models.get(body.model) if body.model else self._models.default()
        if body.messages is not None:
            chat = ChatBody(
                model=model.card.name,
                messages=body.messages,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
            )
            tokens = await self._desk.admission.chat_prompt(model, chat)
        elif body.prompt is not None:
            tokens = await model.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
        else:
            raise BadRequest("give prompt or messages", param="prompt")
        answer = {"tokens": tokens, "count": len(tokens), "max_model_len": model.card.max_model_len}
        return respond(answer, headers=without_effect(ignored))

    async def _detokenize(self, request: Request) -> Response:
        body, ignored = parse_body(DetokenizeBody, await self._body(request))
        model = self._models.get(body.model) if body.model else self._models.default()
        check_token_ids(body.tokens, model.card.vocab_size, "tokens")
        return respond({"prompt": model.tokenizer.decode(body.tokens)}, headers=without_effect(ignored))

    async def _list_models(self, _request: Request) -> Response:
        return respond({"object": "list", "data": self.model_list()})

    def model_list(self) -> list[dict[str, Any]]:
        return [
            {
                "id": model.card.name,
                "object": "model",
                "created": 0,
                "owned_by": "slipstream",
                "root": model.card.name,
                "max_model_len": model.card.max_model_len,
            }
            for model in self._models.served()
        ]

    async def _show_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._models.get(name)
        return respond(next(entry for entry in self.model_list() if entry["id"] == name))

    async def _health(self, _request: Request) -> Response:
        if self._desk.is_draining:
            return respond({"status": "draining"}, 503)
        served = [entry["id"] for entry in self.model_list()]
        if not served:
            return respond({"status": "starting", "phase": "waiting for a decode worker"}, 503)
        return respond({"status": "ok", "models": served, "requests": self._desk.num_open})

    async def _live(self, _request: Request) -> Response:
        return respond({"status": "ok"})

    async def _openapi(self, _request: Request) -> Response:
        return respond(openapi())

    async def _not_built(self, request: Request) -> Response:
        raise Unsupported(f"{request.scope['path']} is not served yet")


class Answer:
    """What is common to an answer's two forms, streamed and whole."""

    def __init__(self, door: HttpDoor, body: GenerationBody, traceparent: str, ignored: list[str]) -> None:
        self._body = body
        self._headers = {"traceparent": traceparent, **without_effect(ignored)}
        self._door = door
        self.shown = door.shown

    def reply(self, generation: Generation) -> Reply:
        return make_reply(generation, self._body)

    def refusal(self, error: SlipstreamError) -> Response:
        response = self._door.failure(error)
        response.headers["traceparent"] = self._headers["traceparent"]
        return response

    def headers(self, generation: Generation) -> dict[str, str]:
        return self._headers | told(generation)


class RequestIds:
    """Every response carries `x-request-id`: the client's if it is harmless, else one of ours."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        from_client = _REQUEST_ID.fullmatch(given) is not None
        request_id = given if from_client else mint_request_id()

        async def with_id(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        await self._app(scope, receive, with_id)


def without_effect(ignored: list[str]) -> dict[str, str]:
    """The header that names the fields of a body which nothing was made of."""
    return {"x-slipstream-ignored": _NO_HEADER.sub("?", ", ".join(ignored)[:1024])} if ignored else {}


def told(generation: Generation) -> dict[str, str]:
    """Where it ran, and why if that was asked for, as response headers."""
    prefill, decode = generation.worker_names()
    headers = {"x-slipstream-cached-tokens": str(generation.num_cached_tokens)}
    explanation = generation.choices[0].stream.session.explanation if generation.choices else ""
    more = {"x-slipstream-decode": decode, "x-slipstream-prefill": prefill, "x-slipstream-explanation": explanation}
    return headers | {name: value for name, value in more.items() if value}


def respond(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def _hidden(error: SlipstreamError) -> SlipstreamError:
    """Inside faults keep their code, not their words."""
    return _as_error(error.status, error.code, "the request failed inside the system; see its logs")


def _as_error(status: int, code: str, message: str) -> SlipstreamError:
    error = NoCapacity(message) if status == 503 else SlipstreamError(message)
    error.status, error.code = status, code  # type: ignore[misc]
    return error

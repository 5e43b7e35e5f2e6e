"""`slipstream chat`: one question, or a conversation, streamed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from services.console.endpoint import Endpoint, find_endpoint
from services.console.run_folder import add_run_flags
from services.console.terminal import Terminal
from services.console.usage import Parser, number, whole_number
from shared.errors import SlipstreamError

_HELP = "/system TEXT   /set NAME VALUE (temperature, max_tokens, …)   /stats   /clear   /bye"


@dataclass
class Stats:
    """What one answer took, as the client saw it."""

    ttft_s: float = 0.0
    total_s: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)

    def line(self) -> str:
        """`ttft 48 ms · 23.1 tok/s · prompt 41 (32 cached) · prefill-0 → decode-0 · trace 4bf92f35`."""
        parts = [f"ttft {self.ttft_s * 1e3:.0f} ms"]
        num_output = self.usage.get("completion_tokens", 0)
        if num_output > 1 and self.total_s > self.ttft_s:
            parts.append(f"{(num_output - 1) / (self.total_s - self.ttft_s):.1f} tok/s")
        if "prompt_tokens" in self.usage:
            cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            parts.append(f"prompt {self.usage['prompt_tokens']} ({cached} cached)")
        workers = [self.headers[name] for name in ("x-slipstream-prefill", "x-slipstream-decode") if self.headers.get(name)]
        if workers:
            parts.append(" → ".join(workers))
        trace = self.headers.get("traceparent", "").split("-")
        if len(trace) == 4:
            parts.append(f"trace {trace[1][:8]}")
        return " · ".join(parts)


class Conversation:
    """The messages so far, and how to ask."""

    def __init__(self, endpoint: Endpoint, model: str, parameters: dict[str, Any], monotonic: Callable[[], float] = time.monotonic) -> None:
        self.messages: list[dict[str, str]] = []
        self.parameters = parameters
        self.stats = Stats()
        self._endpoint = endpoint
        self._model = model
        self._monotonic = monotonic

    def ask(self, text: str, show: Callable[[str], None]) -> None:
        """Ask, `show` each piece of the answer, keep both in the conversation. A failed question is forgotten."""
        question = {"role": "user", "content": text}
        body = {
            "model": self._model,
            "messages": [*self.messages, question],
            "stream_options": {"include_usage": True},
            **self.parameters,
        }
        pieces: list[str] = []
        stats = Stats()
        began_s = self._monotonic()
        try:
            with self._endpoint.stream("/v1/chat/completions", body) as (headers, events):
                stats.headers = dict(headers)
                for event in events:
                    stats.usage = event.get("usage") or stats.usage
                    for choice in event.get("choices", []):
                        piece = choice.get("delta", {}).get("content") or ""
                        if piece and not pieces:
                            stats.ttft_s = self._monotonic() - began_s
                        if piece:
                            pieces.append(piece)
                            show(piece)
        finally:
            stats.total_s = self._monotonic() - began_s
            self.stats = stats
            if pieces:
                self.messages += [question, {"role": "assistant", "content": "".join(pieces)}]

    def system(self, text: str) -> None:
        """Set the system message (empty: none); the conversation starts anew."""
        self.messages = [{"role": "system", "content": text}] if text else []

    def clear(self) -> None:
        """Forget all but the system message."""
        self.messages = [message for message in self.messages if message["role"] == "system"]


def run(argv: Sequence[str]) -> int:
    """The command. Exit 0; 130 when interrupted; else the error's code."""
    options = _parser().parse_args(argv)
    terminal = Terminal()
    endpoint = find_endpoint(options.url, options.state_dir, options.run)
    parameters: dict[str, Any] = {"max_tokens": options.max_tokens, "temperature": options.temperature}
    if options.seed is not None:
        parameters["seed"] = options.seed
    conversation = Conversation(endpoint, options.model or endpoint.model(), parameters)
    conversation.system(options.system)
    if options.question:
        _answer(conversation, " ".join(options.question), terminal)
        terminal.say("\n  " + terminal.paint(conversation.stats.line(), "dim"))
        return 0
    return _talk(conversation, terminal)


def _parser() -> Parser:
    parser = Parser(prog="slipstream chat", description="Ask one question, or, without one, talk.", epilog=f"While talking: {_HELP}")
    parser.add_argument("question", nargs="*", help="the question; without one, a conversation")
    parser.add_argument("--model", default="", help="default: the first that is served")
    parser.add_argument("--system", default="", metavar="TEXT", help="a system message")
    parser.add_argument("--max-tokens", type=whole_number(1, 2**20), default=512, metavar="N", help="at most so many (default 512)")
    parser.add_argument("--temperature", type=number(0, 2), default=0.0, metavar="T", help="default 0: the likeliest token each time")
    parser.add_argument("--seed", type=int, metavar="N", help="the same text again at a temperature above 0")
    parser.add_argument("--url", default="", help="default: SS_URL, else the running stack's. SS_API_KEY is the key, where one is needed")
    add_run_flags(parser)
    return parser


def _answer(conversation: Conversation, text: str, terminal: Terminal) -> None:
    def show(piece: str) -> None:
        terminal.stream.write(piece)
        terminal.stream.flush()

    conversation.ask(text, show)
    terminal.say()


def _talk(conversation: Conversation, terminal: Terminal) -> int:
    """Until /bye or end of input. Ctrl-C stops the answer, not the conversation; errors are shown and talking goes on."""
    if terminal.is_live:
        terminal.say(terminal.paint(_HELP, "dim"))
    while True:
        try:
            text = input(">>> " if terminal.is_live else "").strip()
        except (EOFError, KeyboardInterrupt):
            return 0
        if text == "/bye":
            return 0
        try:
            if text.startswith("/"):
                terminal.say(_order(conversation, text))
            elif text:
                _answer(conversation, text, terminal)
        except KeyboardInterrupt:
            terminal.say()
        except SlipstreamError as error:
            print(f"\n{terminal.mark('failed')} {error.message}", file=sys.stderr)


def _order(conversation: Conversation, text: str) -> str:
    """Carry out a /command; returns what to say."""
    verb, _, rest = text.partition(" ")
    match verb:
        case "/clear":
            conversation.clear()
            return "cleared"
        case "/system":
            conversation.system(rest.strip())
            return "system message set" if rest.strip() else "no system message"
        case "/set":
            return _set(conversation, rest)
        case "/stats":
            return conversation.stats.line()
        case "/help":
            return _HELP
        case _:
            return f"no {verb} here: {_HELP}"


def _set(conversation: Conversation, rest: str) -> str:
    name, _, value = rest.strip().partition(" ")
    if not name or not value:
        return " · ".join(f"{name} {value}" for name, value in conversation.parameters.items())
    try:
        conversation.parameters[name] = msgspec.json.decode(value)
    except msgspec.MsgspecError:
        conversation.parameters[name] = value
    return f"{name} {conversation.parameters[name]}"

"""`chat` against a gateway of a few lines."""

import io
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from services.console import chat
from services.console.__main__ import main
from services.console.endpoint import Endpoint, Refused
from shared.errors import EnvironmentFault


class Gateway(BaseHTTPRequestHandler):
    """Answers with the last message, a word an event. `asked` holds the bodies."""

    asked: ClassVar[list[dict[str, Any]]] = []
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._json(200, {"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append(body)
        if body["model"] == "absent":
            self._json(404, {"error": {"message": "model 'absent' is not served", "type": "t", "param": None, "code": "model_not_found"}})
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.send_header("x-slipstream-decode", "decode-0")
        self.end_headers()
        words = body["messages"][-1]["content"].split(" ")
        for word in words:
            self._event({"choices": [{"delta": {"content": word + " "}}]})
            self.wfile.write(b": keep-alive\n\n")
        if "break" in words:
            self._event({"error": {"message": "worker_lost"}})
            return
        usage = {"prompt_tokens": 9, "completion_tokens": len(words), "prompt_tokens_details": {"cached_tokens": 4}}
        self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        pass

    def _event(self, message: object) -> None:
        self.wfile.write(b"data: " + json.dumps(message).encode() + b"\n\n")

    def _json(self, status: int, message: object) -> None:
        payload = json.dumps(message).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    Gateway.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setenv("SS_URL", address)
        yield address
        server.shutdown()
        thread.join()


@pytest.mark.usefixtures("url")
def test_one_question_prints_the_answer_and_what_it_took(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "why", "is the sky blue"]) == 0
    answer, stats = capsys.readouterr().out.strip().split("\n\n")
    assert answer.strip() == "why is the sky blue"
    assert "ttft " in stats
    assert "prompt 9 (4 cached) · decode-0" in stats
    assert Gateway.asked[0]["model"] == "tiny"


@pytest.mark.usefixtures("url")
def test_a_conversation_remembers_sets_and_forgets(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        "/system be brief",
        "hello you",
        "/set temperature 0.5",
        "again",
        "break now",
        "/clear",
        "fresh",
        "/stats",
        "/what",
        "/bye",
        "unread",
    ]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    assert chat.run([]) == 0
    shown = capsys.readouterr()
    roles = [[message["role"] for message in body["messages"]] for body in Gateway.asked]
    assert roles[0] == ["system", "user"]
    assert roles[1] == ["system", "user", "assistant", "user"]
    assert roles[3] == ["system", "user"], "/clear keeps the system message alone"
    assert Gateway.asked[1]["temperature"] == 0.5
    assert "worker_lost" in shown.err
    assert "/bye" in shown.out, "an unknown order shows the known ones"


@pytest.mark.usefixtures("url")
def test_a_refusal_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--model", "absent", "x"]) == 1
    assert capsys.readouterr().err == "✘ model 'absent' is not served (HTTP 404)\n"


def test_no_gateway_is_one_line_with_a_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--state-dir", str(tmp_path), "x"]) == 3
    assert "Start one: slipstream up" in capsys.readouterr().err
    with pytest.raises(EnvironmentFault, match="no gateway at"):
        Endpoint("http://127.0.0.1:1").model()


def test_an_error_event_ends_the_stream(url: str) -> None:
    body = {"model": "tiny", "messages": [{"content": "a break"}]}
    with Endpoint(url).stream("/v1/chat/completions", body) as (_, events), pytest.raises(Refused, match="worker_lost"):
        list(events)

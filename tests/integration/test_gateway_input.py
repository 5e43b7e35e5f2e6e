"""Bodies that the HTTP door refuses, each with the field at fault."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec
import pytest

from tests.support.door import CHAT, TEXT, Door, chat, text
from tests.support.model_fixture import MODEL

pytestmark = [pytest.mark.timeout(60), pytest.mark.asyncio(loop_scope="module")]

BAD: list[tuple[str, bytes | dict[str, Any], int, str | None]] = [
    (CHAT, b"{", 400, None),
    (CHAT, b"[]", 400, None),
    (CHAT, b"", 400, None),
    (CHAT, b'{"a":' * 100_000, 400, None),
    (CHAT, b"\xff\xfe", 400, None),
    (CHAT, chat(model="gpt-4"), 404, "model"),
    (CHAT, {"messages": [{"role": "user", "content": "x"}]}, 400, "model"),
    (CHAT, chat(messages=[]), 400, "messages"),
    (CHAT, chat(messages="hi"), 400, "messages"),
    (CHAT, chat(messages=[{"role": "robot", "content": "x"}]), 400, "messages[0].role"),
    (CHAT, chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]), 400, None),
    (CHAT, chat(max_tokens=0), 400, "max_tokens"),
    (CHAT, chat(max_tokens=-1), 400, "max_tokens"),
    (CHAT, chat(max_tokens=10**9), 400, "max_tokens"),
    (CHAT, chat(max_tokens=100_000), 400, "max_tokens"),
    (CHAT, chat(max_tokens=2**63), 400, None),
    (CHAT, chat(max_tokens="three"), 400, "max_tokens"),
    (CHAT, b'{"model":"m","messages":[{"role":"user","content":"x"}],"temperature":NaN}', 400, None),
    (CHAT, b'{"model":"m","messages":[{"role":"user","content":"x"}],"temperature":1e999}', 400, None),
    (CHAT, chat(temperature=-1), 400, "temperature"),
    (CHAT, chat(temperature=3), 400, "temperature"),
    (CHAT, chat(top_p=0), 400, "top_p"),
    (CHAT, chat(n=10**9), 400, "n"),
    (CHAT, chat(n=0), 400, "n"),
    (CHAT, chat(stop=["x"] * 100_000), 400, "stop"),
    (CHAT, chat(stop=""), 400, "stop"),
    (CHAT, chat(logprobs=True, top_logprobs=10**6), 400, "top_logprobs"),
    (CHAT, chat(top_logprobs=2), 400, "top_logprobs"),
    (CHAT, chat(logit_bias={"x": 1}), 400, "logit_bias"),
    (CHAT, chat(logit_bias={"999999": 1}), 400, "logit_bias"),
    (CHAT, chat(logit_bias={"1" * 5000: 1}), 400, "logit_bias"),
    (CHAT, chat(logit_bias={"١": 1}), 400, "logit_bias"),
    (CHAT, chat(logit_bias={str(number): 1 for number in range(2000)}), 400, "logit_bias"),
    (CHAT, chat(stream_options={"include_usage": True}), 400, "stream_options"),
    (CHAT, chat(slipstream={"deadline_ms": 0}), 400, "slipstream.deadline_ms"),
    (CHAT, chat(slipstream={"deadline_ms": 10**9}), 400, "slipstream.deadline_ms"),
    (CHAT, chat(slipstream="now"), 400, "slipstream"),
    (CHAT, chat(chat_template_kwargs={"messages": 1}), 400, "chat_template_kwargs"),
    (CHAT, chat(tools=[{"type": "function"}], tool_choice="required"), 501, None),
    (CHAT, chat(response_format={"type": "json_object"}), 501, None),
    (CHAT, b'{"model":"' + MODEL.encode() + b'","messages":[{"role":"user","content":"\\ud800"}]}', 400, None),
    (TEXT, text(prompt=""), 400, "prompt"),
    (TEXT, text(prompt=[]), 400, "prompt"),
    (TEXT, text(prompt=[[]]), 400, "prompt"),
    (TEXT, text(prompt=["a", 1]), 400, "prompt"),
    (TEXT, text(prompt=[10**7]), 400, "prompt"),
    (TEXT, text(prompt=[-1]), 400, "prompt"),
    (TEXT, text(prompt=[1000, 2**70]), 400, "prompt"),
    (TEXT, text(prompt=[[1000], [49_152]]), 400, "prompt"),
    (TEXT, text(stop_token_ids=[49_152]), 400, "stop_token_ids"),
    (TEXT, text(stop_token_ids=[-1]), 400, "stop_token_ids"),
    (CHAT, chat(tools=[{}]), 501, None),
    (CHAT, chat(tools=[{"type": "function"}], tool_choice="auto"), 501, None),
    (TEXT, text(prompt=[1000] * 9000), 400, "messages"),
    (TEXT, text(prompt=5), 400, "prompt"),
    (TEXT, text(logprobs=21), 400, "logprobs"),
    (TEXT, text(best_of=3), 400, "best_of"),
    (TEXT, text(suffix="x"), 400, "suffix"),
    (TEXT, text(echo=True, logprobs=1), 501, None),
    ("/v1/embeddings", {"model": MODEL, "input": "x"}, 501, None),
    ("/tokenize", {}, 400, "prompt"),
    ("/detokenize", {"tokens": [10**7]}, 400, "tokens"),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), BAD)
async def test_bad_input_is_refused_by_name(door: Door, path: str, body: Any, status: int, param: str | None) -> None:
    reply = await door.web.post(path, body)
    assert reply.status == status, reply.body[:300]
    if param is not None:
        assert reply.error["param"] == param
    assert reply.error["code"]
    assert len(door.gateway.sessions) == 0
    await door.is_unharmed()


async def test_a_text_that_is_far_too_long_holds_up_nobody(door: Door) -> None:
    """It is refused before all of it is tokenised, and while that goes on, other threads and the event loop run."""
    num_turns = 0

    async def turn() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    turning = asyncio.create_task(turn())
    long = "The quick brown fox jumps over the lazy dog. " * 80_000
    refused = [door.web.post(CHAT, chat(messages=[{"role": "user", "content": long}])), door.web.post(TEXT, text(prompt=long))]
    for reply in await asyncio.gather(*refused):
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded"), reply.body[:300]
        assert "more than" in reply.error["message"]
    turning.cancel()
    fits = await door.web.post(TEXT, text(prompt="The quick brown fox jumps over the lazy dog. " * 500, max_tokens=1))
    assert fits.status == 200 and 4500 < fits.json["usage"]["prompt_tokens"] < 6000
    assert num_turns > 200


async def test_an_unknown_model_names_those_that_are_served(door: Door) -> None:
    error = (await door.web.post(CHAT, chat(model="gpt-4"))).error
    assert error["code"] == "model_not_found"
    assert MODEL in error["message"]


async def test_too_long_a_prompt_names_both_numbers(door: Door) -> None:
    error = (await door.web.post(TEXT, text(prompt=[1000] * 9000))).error
    assert error["code"] == "context_length_exceeded"
    assert "9000" in error["message"]
    assert "8192" in error["message"]


@pytest.mark.parametrize("encoding", ["gzip", "br, gzip"])
async def test_a_compressed_body_is_refused(door: Door, encoding: str) -> None:
    reply = await door.web.post(CHAT, chat(), content_encoding=encoding)
    assert (reply.status, reply.error["code"]) == (415, "unsupported_content_type")


@pytest.mark.parametrize("media_type", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "json"])
async def test_a_body_that_does_not_say_that_it_is_json_is_refused(door: Door, media_type: str) -> None:
    """As at OpenAI's. A page of another site can make a browser send these without being asked first."""
    reply = await door.web.post(TEXT, text(), content_type=media_type)
    assert (reply.status, reply.error["code"]) == (415, "unsupported_content_type")
    assert "content-type: application/json" in reply.error["message"]


@pytest.mark.parametrize("media_type", ["application/json", "Application/JSON; charset=utf-8", "application/json;charset=UTF-8"])
async def test_json_may_name_its_charset(door: Door, media_type: str) -> None:
    assert (await door.web.post(TEXT, text(), content_type=media_type)).status == 200


@pytest.mark.parametrize("name", ["a\r\nset-cookie: x", "a\0b", "ü\u2028", "\x7f"])
async def test_a_name_of_an_unknown_field_makes_no_header(door: Door, name: str) -> None:
    reply = await door.web.post(TEXT, text(**{name: 1}))
    assert reply.status == 200
    assert reply.headers["x-slipstream-ignored"].startswith(re.sub("[^ -~]", "?", name))
    assert "set-cookie" not in reply.headers


@pytest.mark.parametrize(
    "text",
    [b"\\ud800", b"\\udc00x", b"\\udc00\\ud800", b"a\0b", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"a\nb"],
)  # fmt: skip
async def test_what_is_no_unicode_is_no_json(door: Door, text: bytes) -> None:
    body = msgspec.json.encode(chat(messages=[{"role": "user", "content": "MARK"}]))
    reply = await door.web.post(CHAT, body.replace(b"MARK", text))
    assert (reply.status, reply.error["code"]) == (400, "invalid_request")


async def test_of_a_field_that_comes_twice_the_last_is_taken(door: Door) -> None:
    """The same for what decides and for what is shown."""
    body = msgspec.json.encode(text(max_tokens=5, ignore_eos=True))
    reply = await door.web.post(TEXT, body[:-1] + b',"max_tokens":2,"stream":true,"stream":false}')
    assert reply.json["usage"]["completion_tokens"] == 2

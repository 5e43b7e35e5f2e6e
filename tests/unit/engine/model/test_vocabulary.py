"""Tokenizers built from GGUF metadata give what transformers' give."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer

from shared.engine.model.loader import KNOWN_MODELS, ModelFolder
from shared.engine.model.vocabulary import build_tokenizer
from shared.errors import ModelFault
from tests.support.models import TinyGguf, gpt2_alphabet

TEXTS = [
    "Hello world",
    "It's 2024-05-17, isn't it? We'LL pay 1,234.56 € (≈ $1,300).",
    "Größe, naïve café — “quotes”, Straße",
    "Привет, мир! Как дела?",
    "日本語のテキストと漢字。",
    "中文字符，标点。",
    "한국어 문장입니다.",
    "مرحبا بالعالم",
    "हिन्दी में पाठ",
    "Tiếng Việt có dấu",
    "🙂🚀👩‍👩‍👧 emoji 🇫🇷",
    "def f(x):\n    return x**2  # square\n\n\tif True:\n\t\tpass\n",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "a  b   c    d\n\n\n  trailing   ",
    "\t\n\r\n \x00\x7f",
    "x" * 300,
    "",
    " ",
]


def tokenizer_of(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(build_tokenizer(metadata, "a.gguf")[0]))


def transformers_tokenizer(tiny: TinyGguf, tmp_path: Path) -> Any:
    tiny.write(tmp_path / "tiny.gguf")
    return AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")


@pytest.fixture(scope="module")
def both(smollm2_folder: ModelFolder) -> tuple[Tokenizer, Any]:
    bundle = KNOWN_MODELS["smollm2-135m"]
    files = importlib.metadata.distribution(bundle.distribution).files or []
    path = next(Path(str(file.locate())) for file in files if file.name == bundle.file)
    return Tokenizer.from_file(str(smollm2_folder.path / "tokenizer.json")), AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_equals_transformers(both: tuple[Tokenizer, Any], text: str) -> None:
    ours, theirs = both
    ids = ours.encode(text).ids
    assert ids == theirs(text)["input_ids"]
    assert ours.decode(ids, skip_special_tokens=False) == text
    stream = DecodeStream(skip_special_tokens=False)
    assert "".join(filter(None, (stream.step(ours, token_id) for token_id in ids))) == text


def test_smollm2_template_and_ends(both: tuple[Tokenizer, Any], smollm2_folder: ModelFolder) -> None:
    config = json.loads((smollm2_folder.path / "tokenizer_config.json").read_text())
    assert config["chat_template"] == both[1].chat_template
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert smollm2_folder.eos_token_ids == [2]


def test_smollm2_splits_every_digit_as_it_was_trained(both: tuple[Tokenizer, Any]) -> None:
    """Here transformers' reading of a GGUF differs from the model's own tokenizer: it does not know the pre-tokenizer `smollm`."""
    assert both[0].encode("½ ٣٤").tokens == ["Â½", "Ġ", "Ù", "£", "Ù", "¤"]


def byte_level(pre: str, *extra: str) -> TinyGguf:
    tiny = TinyGguf()
    words = ["<|endoftext|>", "<|user|>", *gpt2_alphabet(), "th", "the", "Ġt", "Ġthe", "12", "123", "Ċ", *extra]
    tiny.fields |= {
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": list(dict.fromkeys(words)),
        "tokenizer.ggml.merges": ["t h", "th e", "Ġ the", "Ġ t", "1 2", "12 3"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
    }
    tiny.fields["tokenizer.ggml.token_type"] = [3, 4] + [1] * (len(tiny.fields["tokenizer.ggml.tokens"]) - 2)
    return tiny


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "gpt-2"])
def test_byte_level_equals_transformers(pre: str, tmp_path: Path) -> None:
    tiny = byte_level(pre)
    tiny.fields["tokenizer.ggml.add_bos_token"] = False
    theirs = transformers_tokenizer(tiny, tmp_path)
    ours = tokenizer_of(tiny.fields)
    for text in [*TEXTS, "the 12345 the\n\nthe", "<|user|>the<|endoftext|>", "THE'S the's"]:
        assert ours.encode(text).ids == theirs(text)["input_ids"], text


@pytest.mark.parametrize(
    ("pre", "numbers"), [("smollm", ["1", "2", "3"]), ("qwen2", ["1", "2", "3"]), ("llama-bpe", ["123"]), ("gpt-2", ["123"])]
)
def test_numbers_are_split_as_the_family_does(pre: str, numbers: list[str]) -> None:
    tiny = byte_level(pre)
    tiny.fields["tokenizer.ggml.add_bos_token"] = False
    assert tokenizer_of(tiny.fields).encode("123").tokens == numbers


def test_llama3_takes_whole_words_from_the_vocabulary_and_begins_with_bos() -> None:
    """Its merges do not spell every token: a word that is a token is taken whole (ignore_merges)."""
    ours = tokenizer_of(byte_level("llama-bpe", "Ġwhole").fields)
    assert ours.encode("the whole").tokens == ["<|endoftext|>", "the", "Ġwhole"]
    assert ours.encode("the", add_special_tokens=False).tokens == ["the"]


def sentencepiece() -> TinyGguf:
    tiny = TinyGguf()
    tiny.fields = {key: value for key, value in tiny.fields.items() if not key.startswith("tokenizer.")}
    pieces = ["▁the", "th", "▁t", "he", "▁th", "in", "▁", "t", "h", "e", "i", "n", "▁▁", "s", "é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    tiny.fields |= {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(index) for index in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return tiny


def test_sentencepiece_equals_transformers(tmp_path: Path) -> None:
    tiny = sentencepiece()
    theirs = transformers_tokenizer(tiny, tmp_path)
    ours = tokenizer_of(tiny.fields)
    for text in ("the", "the thin thé", "then  the  🙂 ü", "s", "the\nin", "日本"):
        assert ours.encode(text).ids == theirs(text)["input_ids"], text
        assert ours.decode(ours.encode(text).ids) == text


def test_sentencepiece_joins_the_best_pair_first() -> None:
    ours = tokenizer_of(sentencepiece().fields)
    assert ours.encode("the thin").tokens == ["<s>", "▁the", "▁th", "in"]
    assert ours.encode(" the").tokens == ["<s>", "▁", "▁the"]


@pytest.mark.parametrize(("changes", "reason"), [
    ({"tokenizer.ggml.tokens": []}, "no vocabulary"),
    ({"tokenizer.ggml.tokens": ["a", "a"]}, "listed twice"),
    ({"tokenizer.ggml.model": "bert"}, "'bert'"),
    ({"tokenizer.ggml.pre": "brand-new"}, "'brand-new' is not known"),
    ({"tokenizer.ggml.merges": ["h e", "he zz"]}, "merge"),
    ({"tokenizer.ggml.merges": ["he"]}, "merge"),
    ({"tokenizer.ggml.eos_token_id": 10**6}, "eos_token_id"),
])  # fmt: skip
def test_metadata_that_gives_no_tokenizer(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelFault, match=f"^a.gguf: no tokenizer can be built: .*{reason}") as fault:
        build_tokenizer(TinyGguf().fields | changes, "a.gguf")
    assert "safetensors" in fault.value.remedy

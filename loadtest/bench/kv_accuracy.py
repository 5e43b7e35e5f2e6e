"""What compressing the lower tiers costs in quality, on real text:   slipstream bench kv-accuracy [--tokens N] [--text FILE] [--json]

Each window of text is a restored prefix and a continuation. The prefix's blocks are computed once, go through the format and back into the
pool, as after a load from DRAM or SSD; then the continuation is scored. Perplexity is over the continuation's tokens; top-1 agreement is
with the native blocks. The text is the Python language reference that comes with Python (pydoc_data), or any file.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence as ListLike
from pathlib import Path
from pydoc_data import topics

import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from shared.config import read_config
from shared.engine.batch import BatchItem
from shared.engine.compress import Codec, make_codec
from shared.engine.config import EngineConfig
from shared.engine.sequence import Sequence
from shared.engine.torch_engine import TorchEngine
from shared.engine.torch_engine import load as load_engine
from shared.errors import SlipstreamError
from shared.kv.layout import LowerFormat, stored_layout
from shared.types import SamplingParams

PREFIX_TOKENS = 512
SCORED_TOKENS = 256
FORMATS: tuple[LowerFormat, ...] = ("native", "int8", "fp8")


class Row(msgspec.Struct, frozen=True):
    name: str
    value: float
    unit: str


class Tally:
    """Sums over all windows of one format."""

    def __init__(self) -> None:
        self.log_likelihood = 0.0
        self.num_tokens = 0
        self.num_agreeing = 0

    @property
    def perplexity(self) -> float:
        return math.exp(-self.log_likelihood / self.num_tokens)

    @property
    def agreement(self) -> float:
        return self.num_agreeing / self.num_tokens


class Judge:
    """One engine and one window at a time."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self._size = engine.spec.layout.block_size
        self._num_prefix_blocks = PREFIX_TOKENS // self._size
        num_blocks = -(-(PREFIX_TOKENS + SCORED_TOKENS + 1) // self._size)
        self._table = list(range(num_blocks))
        layout = engine.spec.layout
        self._codecs: dict[LowerFormat, Codec] = {"int8": make_codec(layout, "int8"), "fp8": make_codec(layout, "fp8")}

    def judge(self, window: list[int], tallies: dict[LowerFormat, Tally]) -> None:
        """Score one window in every format."""
        sequence = Sequence("window", window, len(window), SamplingParams(), block_table=self._table)
        self._engine.score(BatchItem(sequence, PREFIX_TOKENS, False))
        prefix = list(range(self._num_prefix_blocks))
        native = [np.empty(self._engine.spec.layout.block_bytes, dtype=np.uint8) for _ in prefix]
        self._engine.export_blocks(prefix, [block.data for block in native])
        best: list[int] = []
        for name, tally in tallies.items():
            restored = native if name == "native" else [self._through(name, block) for block in native]
            self._engine.import_blocks(prefix, [block.data for block in restored])
            sequence.num_computed_tokens = PREFIX_TOKENS
            logprobs, likeliest = self._engine.score(BatchItem(sequence, len(window) - 1 - PREFIX_TOKENS, False))
            best = best or likeliest
            tally.log_likelihood += sum(logprobs)
            tally.num_tokens += len(logprobs)
            tally.num_agreeing += sum(one == other for one, other in zip(best, likeliest, strict=True))

    def _through(self, name: LowerFormat, block: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """There and back."""
        codec = self._codecs[name]
        stored = np.empty(stored_layout(self._engine.spec.layout, name).block_bytes, dtype=np.uint8)
        back = np.empty_like(block)
        codec.encode(block, stored)
        codec.decode(stored, back)
        return back


def windows_of(text: str, tokenizer: Tokenizer, num_scored: int) -> list[list[int]]:
    """As many windows as it takes, from all over the text. Raises ValueError if the text is too short."""
    token_ids = tokenizer.encode(text).ids
    length = PREFIX_TOKENS + SCORED_TOKENS + 1
    count = -(-num_scored // SCORED_TOKENS)
    if len(token_ids) < count * length:
        raise ValueError(f"{num_scored} tokens to score need a text of {count * length} tokens; this one has {len(token_ids)}")
    stride = (len(token_ids) - length) // max(count - 1, 1)
    return [token_ids[index * stride : index * stride + length] for index in range(count)]


def measure(engine: TorchEngine, windows: ListLike[list[int]]) -> list[Row]:
    """All rows."""
    judge, tallies = Judge(engine), {name: Tally() for name in FORMATS}
    for number, window in enumerate(windows, 1):
        judge.judge(window, tallies)
        print(f"window {number} of {len(windows)}…", end="\r", file=sys.stderr, flush=True)
    native, layout = tallies["native"], engine.spec.layout
    rows = [Row("scored_tokens", native.num_tokens, "tokens"), Row("native_ppl", native.perplexity, "perplexity")]
    for name in FORMATS[1:]:
        rows += [
            Row(f"{name}_ppl", tallies[name].perplexity, "perplexity"),
            Row(f"{name}_ppl_ratio", tallies[name].perplexity / native.perplexity, "of native"),
            Row(f"{name}_top1_agreement", tallies[name].agreement, "of native"),
            Row(f"{name}_bytes_ratio", stored_layout(layout, name).block_bytes / _bf16_bytes(engine), "of bfloat16"),
        ]
    return rows


def _bf16_bytes(engine: TorchEngine) -> int:
    return msgspec.structs.replace(engine.spec.layout, dtype="bfloat16").block_bytes


def main(argv: ListLike[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="slipstream bench kv-accuracy", description="Quality of compressed KV blocks on real text.")
    parser.add_argument("--tokens", type=int, default=20_480, metavar="N", help="tokens to score (default %(default)s)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="a text (default: Python's own language reference)")
    parser.add_argument("--json", action="store_true", help='print rows {"name", "value", "unit"}')
    arguments = parser.parse_args(argv)
    if arguments.tokens < 1:
        parser.error("--tokens: at least 1")
    try:
        engine = load_engine(read_config(EngineConfig, {"SS_KV_DEVICE": "128M"}), lambda text, _: None)
        text = arguments.text.read_text() if arguments.text else "\n\n".join(topics.topics.values())
        tokenizer = Tokenizer.from_file(str(Path(engine.spec.model_path) / "tokenizer.json"))
        rows = measure(engine, windows_of(text, tokenizer, arguments.tokens))
    except (SlipstreamError, OSError, ValueError) as error:
        print(f"✘ kv-accuracy  {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(msgspec.json.encode(rows).decode())
    else:
        print(f"{engine.spec.model_name} {engine.spec.dtype} · prefixes of {PREFIX_TOKENS} tokens restored from each format")
        for row in rows:
            print(f"  {row.name:22} {row.value:12.5f} {row.unit}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How good the router's similarity is on real prompts.   python -m loadtest.similarity FILE… [--system-prompt FILE] [--json]

A file holds one JSON object a line with `input`, a prompt as text, and maybe `session_id` (else a file is a session). Prompts are looked up
in the order of the files among all before them, with the router's own sketches, index and terms, the terms learned from these very prompts.

match_rate         share of prompts with a neighbour within 90 % (whole or longest span) that shares a block: the router drops others
half_prefix_share  of these, those that share at least half of the prompt with the neighbour as exact prefix
raw_…              the same before the router drops neighbours that share no block
stranger_share     with --system-prompt: the first 2,000 characters of that file go before one prompt of each session; the share of pairs of
                   such strangers that are taken for similar

Tokens are made by splitting words into short pieces: about as many as a model's tokenizer makes, without needing one.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from services.router.similarity import MAX_DISTANCE, Remembered, SimilarityIndex
from services.router.sketch import Sketch, Sketcher
from services.router.terms import TermCounts
from shared.kv.hashing import block_hashes, keys
from shared.types import pack_tokens

BLOCK_SIZE = 16
SYSTEM_CHARACTERS = 2000
TENANT, MODEL = "0" * 16, "0" * 16
PIECE = re.compile(r"\s?\w{1,6}|\s?[^\w\s]|\s+")


class Row(msgspec.Struct, frozen=True):
    name: str
    value: float
    unit: str


class Line(msgspec.Struct):
    input: str
    session_id: str = ""


class Prompt(NamedTuple):
    session: str
    packed: bytes
    block_keys: bytes


def prompt_of(session: str, text: str) -> Prompt:
    packed = pack_tokens(zlib.crc32(piece.encode()) for piece in PIECE.findall(text))
    return Prompt(session, packed, keys(block_hashes(bytes(32), packed, BLOCK_SIZE)))


def read_lines(paths: Iterable[Path]) -> list[Line]:
    """Raises ValueError naming the file and line that are no prompt."""
    decoder, lines = msgspec.json.Decoder(Line), []
    for path in paths:
        for number, text in enumerate(path.read_bytes().splitlines(), 1):
            if not text.strip():
                continue
            try:
                line = decoder.decode(text)
            except msgspec.MsgspecError as error:
                raise ValueError(f"{path}:{number}: {error}") from error
            line.session_id = line.session_id or path.name
            lines.append(line)
    return lines


def sketcher_of(prompts: Sequence[Prompt]) -> Sketcher:
    """With the terms that a router has learned from these prompts."""
    counts = TermCounts()
    for prompt in prompts:
        counts.see(prompt.packed, prompt.block_keys)
    return Sketcher(counts.snapshot(1) if prompts else None)


def matches(prompts: Sequence[Prompt], num_known: int) -> tuple[int, int]:
    """Prompts with a neighbour of more than `num_known` blocks among those before; and those of them that share half with it."""
    sketcher, index = sketcher_of(prompts), SimilarityIndex(capacity=65_536)
    index.begin(sketcher.version)
    num_matches = num_half = 0
    for number, prompt in enumerate(prompts):
        sketches = sketcher.sketch(prompt.packed, prompt.block_keys, BLOCK_SIZE)
        found = index.find(TENANT, MODEL, sketches, prompt.block_keys, num_known)
        if found is not None:
            num_matches += 1
            other = prompts[int(found.prompt.decode_worker)]
            num_half += 2 * common_tokens(prompt.packed, other.packed) >= len(prompt.packed) // 4
        index.add(TENANT, MODEL, sketches, sketcher.version, Remembered(prompt.block_keys, str(number), None))
    return num_matches, num_half


def common_tokens(ours: bytes, theirs: bytes) -> int:
    """Length of the exact common prefix."""
    count = min(len(ours), len(theirs)) // 4
    differs = np.frombuffer(ours, dtype="<u4", count=count) != np.frombuffer(theirs, dtype="<u4", count=count)
    return int(differs.argmax()) if differs.any() else count


def strangers(lines: Sequence[Line], system_prompt: str) -> tuple[int, int]:
    """Pairs of prompts of different sessions behind one system prompt; and those taken for similar."""
    longest: dict[str, str] = {}
    for line in lines:
        longest[line.session_id] = max(longest.get(line.session_id, ""), line.input, key=len)
    prompts = [prompt_of(session, system_prompt[:SYSTEM_CHARACTERS] + "\n" + text) for session, text in longest.items()]
    sketcher = sketcher_of(prompts)
    sketches = [sketcher.sketch(prompt.packed, prompt.block_keys, BLOCK_SIZE) for prompt in prompts]
    pairs = list(itertools.combinations(sketches, 2))
    return len(pairs), sum(alike(*pair) for pair in pairs)


def alike(ours: Sequence[Sketch], theirs: Sequence[Sketch]) -> bool:
    """As a look-up of ours among theirs would say."""
    codes = dict(theirs)
    return any(span in codes and (codes[span] ^ code).bit_count() <= MAX_DISTANCE for span, code in ours[-2:])


def measure(lines: Sequence[Line], system_prompt: str | None) -> list[Row]:
    prompts = [prompt_of(line.session_id, line.input) for line in lines]
    rows = [Row("num_prompts", len(prompts), "prompts")]
    for prefix, num_known in (("", 0), ("raw_", -1)):
        num_matches, num_half = matches(prompts, num_known)
        rows.append(Row(f"{prefix}match_rate", num_matches / max(len(prompts), 1), "share"))
        rows.append(Row(f"{prefix}half_prefix_share", num_half / max(num_matches, 1), "share"))
    if system_prompt is not None:
        num_pairs, num_alike = strangers(lines, system_prompt)
        rows += [Row("num_pairs", num_pairs, "pairs"), Row("stranger_share", num_alike / max(num_pairs, 1), "share")]
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.similarity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--system-prompt", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    try:
        system_prompt = options.system_prompt.read_text() if options.system_prompt else None
        rows = measure(read_lines(options.files), system_prompt)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        print(msgspec.json.encode(rows).decode())
    else:
        print("\n".join(f"{row.name:<24}{row.value:>10.4g} {row.unit}" for row in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

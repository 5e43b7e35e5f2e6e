"""What transformers says, greedy and in float32, to 24 prompts of the bundled model: oracle.json, and how it was made.

    python -m tests.support.oracle          writes oracle.json anew
    python -m tests.support.oracle --gguf   the same, weights and tokenizer read from the GGUF by transformers itself (needs accelerate)

The tokens hold on any machine, because no step was a near tie: `margin` is the least distance between the two best logits of a prompt's
answer, and a prompt below MIN_MARGIN is cut before that token.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.engine.config import EngineConfig
from shared.engine.model.loader import KNOWN_MODELS, resolve_model
from tests.support.model_fixture import MODEL

PATH = Path(__file__).with_name("oracle.json")
NUM_TOKENS = 12
MIN_MARGIN = 5e-3
"""Float32 logits of this model agree within about 1e-4 between implementations."""

RAW_LENGTHS = (1, 15, 16, 17, 31, 512, 1500)
RAW = (
    "The three primary colours are",
    "La capitale de la France est",
    "Der Fluss fließt durch die Stadt und",
    "def mean(values):\n    return",
    "日本の首都は",
    "Привет, как",
    "Ingredients: 2 eggs, 300 g flour,\n\n- ",
)
CHAT = (
    "What is the capital of France?",
    "Name the planets of the solar system.",
    "Write one sentence about the sea.",
    "¿Cuál es la capital de España?",
    "Was ist die Hauptstadt von Deutschland?",
    "Explain what a stack is, in Python. 🙂",
    "2 + 2 = ?",
)
LONG_CHAT_TOKENS = (16, 200, 700)
"""Tokens of long text inside a chat question."""

_SUBJECTS = ("The miller", "Her brother", "A tall stranger", "The old ferry", "Nobody in town", "The youngest child", "A flock of geese")
_VERBS = ("waited beside", "had forgotten", "walked slowly past", "sold", "could hear", "painted", "never spoke of")
_OBJECTS = ("the stone bridge", "a basket of pears", "the night train", "three silver coins", "the garden wall")
_ENDS = ("until the rain stopped.", "while the bells rang.", "before anyone woke.", "and said nothing about it.")


@dataclass(frozen=True)
class OraclePrompt:
    """One prompt and transformers' answer."""

    name: str
    messages: list[dict[str, str]]
    """The chat, or empty for a raw prompt."""
    text: str
    """The raw prompt, or empty for a chat. Tokenising it gives token_ids."""
    token_ids: list[int]
    output: list[int]
    margin: float


def load_oracle() -> list[OraclePrompt]:
    """The recorded prompts and answers."""
    return [OraclePrompt(**entry) for entry in json.loads(PATH.read_text(encoding="utf-8"))]


def long_text(num_sentences: int) -> str:
    """Sentences that do not repeat in the same order."""
    parts = (_SUBJECTS, _VERBS, _OBJECTS, _ENDS)
    steps = (1, 3, 2, 3)
    return " ".join(
        " ".join(words[(index * step + index // len(words)) % len(words)] for words, step in zip(parts, steps, strict=True))
        for index in range(num_sentences)
    )


class Oracle:
    """transformers over the bundled model."""

    def __init__(self, *, from_gguf: bool = False) -> None:
        place: dict[str, Any] = {}
        if from_gguf:
            bundle = KNOWN_MODELS[MODEL]
            files = importlib.metadata.distribution(bundle.distribution).files or []
            path = next(Path(str(file.locate())) for file in files if file.name == bundle.file)
            folder, place = path.parent, {"gguf_file": path.name}
        else:
            folder = resolve_model(MODEL, EngineConfig().cache_dir, lambda text, fraction: None).path
        self.tokenizer = AutoTokenizer.from_pretrained(folder, **place)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **place).eval()
        self._ends = {self.tokenizer.eos_token_id}

    def answer(self, name: str, *, text: str = "", messages: list[dict[str, str]] | None = None) -> OraclePrompt:
        """Tokenise, then generate greedily, one token at a time."""
        if messages:
            token_ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        else:
            token_ids = self.tokenizer(text)["input_ids"]
        output, margin = self.continue_greedily(token_ids, NUM_TOKENS)
        return OraclePrompt(name, messages or [], text, token_ids, output, round(margin, 4))

    def continue_greedily(self, token_ids: list[int], num_tokens: int) -> tuple[list[int], float]:
        """(the next tokens, ended by an end token or before the first near tie; the least distance between the two best logits)."""
        output: list[int] = []
        margin = float("inf")
        cache, new = None, torch.tensor([token_ids])
        with torch.inference_mode():
            while len(output) < num_tokens and (not output or output[-1] not in self._ends):
                result = self.model(new, cache=cache, use_cache=True, logits_to_keep=1)
                best = result.logits[0, -1].topk(2)
                distance = float(best.values[0] - best.values[1])
                if distance < MIN_MARGIN:
                    break
                margin = min(margin, distance)
                output.append(int(best.indices[0]))
                cache, new = result.cache, best.indices[None, :1]
        return output, margin


def ask_everything(oracle: Oracle) -> list[OraclePrompt]:
    """All 24 prompts."""
    ids = oracle.tokenizer(long_text(200))["input_ids"]
    prompts = [oracle.answer(f"raw-{length}", text=oracle.tokenizer.decode(ids[:length])) for length in RAW_LENGTHS]
    assert [len(prompt.token_ids) for prompt in prompts] == list(RAW_LENGTHS), "decoding and tokenising gave other lengths"
    prompts += [oracle.answer(f"raw-{index}", text=text) for index, text in enumerate(RAW, start=len(prompts))]
    questions = [*CHAT, *(f"Summarise: {oracle.tokenizer.decode(ids[:length])}" for length in LONG_CHAT_TOKENS)]
    for index, question in enumerate(questions):
        prompts.append(oracle.answer(f"chat-{index}", messages=[{"role": "user", "content": question}]))
    return prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", action="store_true")
    prompts = ask_everything(Oracle(from_gguf=parser.parse_args().gguf))
    lines = ",\n".join(json.dumps(asdict(prompt), ensure_ascii=False) for prompt in prompts)
    PATH.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    for prompt in prompts:
        print(f"{prompt.name:10} {len(prompt.token_ids):5} tokens → {len(prompt.output):3}, margin {prompt.margin}")


if __name__ == "__main__":
    main()

"""GGUF metadata → tokenizer.json and tokenizer_config.json, as the `tokenizers` library reads them.

A GGUF names its pre-tokenizer (`tokenizer.ggml.pre`) but does not spell it out: the rules below are those of the models that it names.
One that is not listed is refused, because a wrong split gives wrong tokens without any error.
"""

from __future__ import annotations

from typing import Any

from shared.errors import ModelFault

Json = dict[str, Any]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
"""tokenizer.ggml.token_type"""

_LLAMA3_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _byte_level(*, use_regex: bool) -> Json:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> Json:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(use_regex=False)]}


_DIGITS = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)]}

PRE_TOKENIZERS: dict[str, Json] = {
    "gpt-2": _byte_level(use_regex=True),
    "smollm": _DIGITS,
    "llama-bpe": _split(_LLAMA3_SPLIT),
    "llama3": _split(_LLAMA3_SPLIT),
    "llama-v3": _split(_LLAMA3_SPLIT),
    "qwen2": _split(_QWEN2_SPLIT),
    "deepseek-r1-qwen": _split(_QWEN2_SPLIT),
}
"""tokenizer.ggml.pre → the pre-tokenizer of byte-level vocabularies."""

_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_NFC = ("qwen2", "deepseek-r1-qwen")


def build_tokenizer(metadata: Json, source: str) -> tuple[Json, Json]:
    """(tokenizer.json, tokenizer_config.json). Raises ModelFault, naming `source`."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise _unusable(source, "it holds no vocabulary")
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise _unusable(source, "a token is listed twice")
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer, adds_bos = _byte_level_bpe(metadata, vocab, source)
    elif kind == "llama":
        tokenizer, adds_bos = _sentencepiece_bpe(metadata, vocab, source)
    else:
        raise _unusable(source, f"a vocabulary of kind {kind!r} is not supported")
    tokenizer["added_tokens"] = _added_tokens(metadata, tokens)
    adds_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos))
    special = _special_tokens(metadata, tokens, source)
    if adds_bos and "bos_token" in special:
        tokenizer["post_processor"] = _prepend_token(special["bos_token"], vocab[special["bos_token"]])
    config: Json = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": adds_bos,
        **special,
    }
    if isinstance(metadata.get("tokenizer.chat_template"), str):
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return tokenizer, config


def _unusable(source: str, what: str) -> ModelFault:
    return ModelFault(f"{source}: no tokenizer can be built: {what}", remedy="Use the model's safetensors folder, which has tokenizer.json")


def _byte_level_bpe(metadata: Json, vocab: dict[str, int], source: str) -> tuple[Json, bool]:
    """GPT-2's kind: tokens spelled in its byte alphabet, merges in the file. Returns also whether text begins with bos by default."""
    pre = metadata.get("tokenizer.ggml.pre", "")
    if pre not in PRE_TOKENIZERS:
        raise _unusable(source, f"the pre-tokenizer {str(pre)[:32]!r} is not known (known: {', '.join(PRE_TOKENIZERS)})")
    merges = [merge.split(" ") for merge in metadata.get("tokenizer.ggml.merges", ())]
    for merge in merges:
        if len(merge) != 2 or merge[0] not in vocab or merge[1] not in vocab or merge[0] + merge[1] not in vocab:
            raise _unusable(source, "a merge names tokens that are not in the vocabulary")
    tokenizer = _tokenizer(
        normalizer={"type": "NFC"} if pre in _NFC else None,
        pre_tokenizer=PRE_TOKENIZERS[pre],
        post_processor=_byte_level(use_regex=True),
        decoder=_byte_level(use_regex=True),
        model=_bpe(vocab, merges, ignore_merges=pre in _LLAMA3),
    )
    return tokenizer, pre in _LLAMA3


def _sentencepiece_bpe(metadata: Json, vocab: dict[str, int], source: str) -> tuple[Json, bool]:
    """Llama 2's kind: tokens with scores, spaces as ▁, unknown characters as bytes."""
    scores, types = metadata.get("tokenizer.ggml.scores", ()), metadata.get("tokenizer.ggml.token_type", ())
    if len(scores) != len(vocab) or len(types) != len(vocab):
        raise _unusable(source, "scores or token types are missing")
    steps: list[Json] = [{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    decoder: list[Json] = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, {"type": "Prepend", "prepend": "▁"})
        decoder.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = next((token for token, kind in zip(vocab, types, strict=True) if kind == _UNKNOWN), None)
    tokenizer = _tokenizer(
        normalizer={"type": "Sequence", "normalizers": steps},
        pre_tokenizer=None,
        post_processor=None,
        decoder={"type": "Sequence", "decoders": decoder},
        model=_bpe(vocab, _merges_of_scores(vocab, scores, types), unk_token=unknown, fuse_unk=True, byte_fallback=True),
    )
    return tokenizer, True


def _merges_of_scores(vocab: dict[str, int], scores: list[float], types: list[int]) -> list[list[str]]:
    """SentencePiece always joins the pair whose union scores highest: as a list of merges, best first."""
    merges: list[tuple[float, int, int, str, str]] = []
    plain = {token for token, kind in zip(vocab, types, strict=True) if kind in (_NORMAL, _USER_DEFINED)}
    for token in plain:
        score = scores[vocab[token]]
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in plain and right in plain:
                merges.append((-score, vocab[left], vocab[right], left, right))
    return [[left, right] for *_, left, right in sorted(merges)]


def _tokenizer(**parts: Json | None) -> Json:
    return {"version": "1.0", "truncation": None, "padding": None, **parts}


def _bpe(vocab: dict[str, int], merges: list[list[str]], **options: Any) -> Json:
    plain = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False}
    return {"type": "BPE", **plain, "byte_fallback": False, "ignore_merges": False, **options, "vocab": vocab, "merges": merges}


def _added_tokens(metadata: Json, tokens: list[str]) -> list[Json]:
    """Control tokens (special) and user-defined ones (plain): both are found in text before anything is split."""
    types = metadata.get("tokenizer.ggml.token_type", ())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": index, "content": token, **flags, "special": kind != _USER_DEFINED}
        for index, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind in (_CONTROL, _USER_DEFINED) or (kind == _UNKNOWN and metadata.get("tokenizer.ggml.model") == "llama")
    ]


def _special_tokens(metadata: Json, tokens: list[str], source: str) -> Json:
    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and token_id != 2**32 - 1:  # llama.cpp writes -1 for none
            if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
                raise _unusable(source, f"{key}_token_id {token_id!r} is not in the vocabulary")
            special[f"{name}_token"] = tokens[token_id]
    return special


def _prepend_token(token: str, token_id: int) -> Json:
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    pair = {"Sequence": {"id": "B", "type_id": 1}}
    bos = {"SpecialToken": {"id": token, "type_id": 0}}
    named = {token: {"id": token, "ids": [token_id], "tokens": [token]}}
    return {"type": "TemplateProcessing", "single": [bos, sequence], "pair": [bos, sequence, bos, pair], "special_tokens": named}

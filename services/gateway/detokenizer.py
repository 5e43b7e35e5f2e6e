"""Tokens to text while they come. Never half a character: what is not whole yet is held back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from codecs import utf_8_decode
from collections.abc import Sequence

from tokenizers import Tokenizer as HfTokenizer
from tokenizers.decoders import ByteLevel, DecodeStream


class TextStream(ABC):
    """Tokens in, text out: all pieces together are the plain decode of all tokens, special ones left out."""

    @abstractmethod
    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became whole."""

    @abstractmethod
    def rest(self) -> str:
        """At the end: what never became a whole character shows as U+FFFD."""


class DecodedStream(TextStream):
    """Of any tokenizer: its own decoder is asked for each token."""

    def __init__(self, tokenizer: HfTokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._unfinished: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        pieces = []
        for token_id in token_ids:
            piece = self._stream.step(self._tokenizer, token_id)
            if piece is None:
                self._unfinished.append(token_id)
            else:
                self._unfinished.clear()
                pieces.append(piece)
        return "".join(pieces)

    def rest(self) -> str:
        text = str(self._tokenizer.decode(self._unfinished, skip_special_tokens=True)) if self._unfinished else ""
        self._unfinished.clear()
        return text


class ByteStream(TextStream):
    """Of a byte-level tokenizer, where a token is its bytes whatever stands around it."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._bytes = token_bytes
        self._unfinished = b""

    def push(self, token_ids: Sequence[int]) -> str:
        known = self._bytes
        data = self._unfinished + b"".join([known[token_id] for token_id in token_ids])
        text, num_whole = utf_8_decode(data, "replace", False)
        self._unfinished = data[num_whole:]
        return text

    def rest(self) -> str:
        text, self._unfinished = self._unfinished.decode(errors="replace"), b""
        return text


class TokenBytes(dict[int, bytes]):
    """Token id → the bytes that it shows, found out when it is first seen. Special tokens and unknown ids show none."""

    def __init__(self, tokenizer: HfTokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._special else self._tokenizer.id_to_token(token_id)
        shown = self[token_id] = b"" if token is None else _bytes_of(token)
        return shown


def is_byte_level(tokenizer: HfTokenizer) -> bool:
    """Whether its decoder does nothing but to turn characters that stand for bytes into these bytes."""
    return isinstance(tokenizer.decoder, ByteLevel)


def _bytes_of(token: str) -> bytes:
    """A token with any character that stands for no byte is taken as it is written."""
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode()


def _byte_of_character() -> dict[str, int]:
    """Byte-level vocabularies write a printable Latin-1 character for its own byte, and the characters from U+0100 on, in order, for the
    bytes that are none."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF = _byte_of_character()

"""The text of one choice as it grows: detokenised, cut at stop strings, logprobs beside it."""

from __future__ import annotations

from collections.abc import Sequence

from services.gateway.detokenizer import TextStream


class ChoiceText:
    """What may be shown is shown at once; what might be the beginning of a stop string is held back until it is decided."""

    def __init__(self, stream: TextStream, stop: Sequence[str], end_token_ids: frozenset[int], *, keep_stop: bool) -> None:
        self._stream = stream
        self._stop = [text for text in stop if text]
        self._end_token_ids = end_token_ids
        """A sequence that ends with one of these does not show it."""
        self._keep_stop = keep_stop
        self._held = ""
        self._pending: list[int] = []
        self.is_stopped = False
        self.stop_reason: str | None = None

    def push(self, token_ids: Sequence[int], *, is_last: bool, ended_by_token: bool) -> str:
        """New text to show. `is_last`: nothing follows, show everything. `ended_by_token`: the last token is the end token itself."""
        if self.is_stopped:
            return ""
        token_ids = [*self._pending, *token_ids]
        self._pending = []
        if token_ids and token_ids[-1] in self._end_token_ids and not self._keep_stop and (ended_by_token or not is_last):
            self._pending = [token_ids.pop()]  # dropped if this was the end, shown if more follows
        text = self._held + self._stream.push(token_ids)
        self._held = ""
        if is_last:
            text += self._stream.rest()
        if not self._stop:
            return text
        found = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda one: (one[0], -len(one[1])))
            self.is_stopped, self.stop_reason = True, stop
            return text[: at + len(stop)] if self._keep_stop else text[:at]
        if is_last:
            return text
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0

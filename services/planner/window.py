"""What happened in the last so many seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_ITEMS = 20_000


class Window(Generic[T]):
    """Items not older than `window_s`. At most `max_items`: beyond that the window covers less time, and `covered_s` says how much."""

    def __init__(self, monotonic: Callable[[], float], window_s: float, max_items: int = MAX_ITEMS) -> None:
        self._monotonic = monotonic
        self._window_s = window_s
        self._begun_s = monotonic()
        self._items: deque[tuple[float, T]] = deque(maxlen=max_items)

    def add(self, item: T) -> None:
        if len(self._items) == self._items.maxlen:
            self._begun_s = self._items[0][0]
        self._items.append((self._monotonic(), item))

    def __iter__(self) -> Iterator[T]:
        self._forget()
        return iter([item for _, item in self._items])  # a copy: list() asks for the length too, which forgets what has become too old

    def __len__(self) -> int:
        self._forget()
        return len(self._items)

    @property
    def covered_s(self) -> float:
        """The time that the items come from: what a rate is divided by. Never 0."""
        return max(min(self._monotonic() - self._begun_s, self._window_s), 1e-3)

    def _forget(self) -> None:
        oldest_s = self._monotonic() - self._window_s
        while self._items and self._items[0][0] < oldest_s:
            self._items.popleft()

"""Small copies between memory and memory run on the loop; every other one runs in a copy thread."""

from __future__ import annotations

import threading

import pytest

from shared.kvclient.link import INLINE_BLOCKS, INLINE_BYTES, StoreLink


@pytest.mark.parametrize(
    ("num_blocks", "num_bytes", "in_memory", "is_inline"),
    [
        (1, 1024, True, True),
        (INLINE_BLOCKS, INLINE_BYTES, True, True),
        (INLINE_BLOCKS + 1, 1024, True, False),
        (1, INLINE_BYTES + 1, True, False),
        (1, 1024, False, False),
    ],
)
async def test_only_what_is_little_and_in_memory_is_copied_on_the_loop(
    num_blocks: int, num_bytes: int, in_memory: bool, is_inline: bool
) -> None:
    link = StoreLink(None, None, None, "worker", None)  # type: ignore[arg-type]
    try:
        thread = await link.copy(threading.get_ident, num_blocks, num_bytes, in_memory=in_memory)
    finally:
        await link.close()
    assert (thread == threading.get_ident()) is is_inline

"""Kill a process -9 in the middle of writing blocks to the SSD, again and again, and read what it left.

A process of its own, because it forks: the child writes until it is killed, the parent checks. Prints blocks checked and blocks damaged.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from services.kvstore.tiers.slab import aligned_buffer
from tests.support.kvssd import Ssd
from tests.support.kvstore import Chain, Store


async def write_for_ever(arena: Path, folder: Path, first_token: int, ready: int) -> None:
    ssd = Ssd(folder, Store(arena, num_bytes=2**20), num_bytes=2**19)
    os.write(ready, b"1")
    while True:
        await ssd.put(Chain(4, first_token=first_token))
        first_token += 100


async def check(arena: Path, folder: Path) -> tuple[int, int]:
    ssd = Ssd(folder, Store(arena, num_bytes=2**20), num_bytes=2**19)
    blocks = list(ssd.tier.index.blocks.values())
    good = [await ssd.tier.load(block, aligned_buffer(block.size_class.slot_bytes)) for block in blocks]
    ssd.tier.check_integrity()
    ssd.tier.close()
    return len(good), good.count(False)


def main(arena: Path, folder: Path, rounds: int) -> None:
    rng = random.Random(29)
    num_checked = num_damaged = 0
    for number in range(rounds):
        shutil.rmtree(arena, ignore_errors=True)
        arena.mkdir(mode=0o700)
        ready, told = os.pipe()
        child = os.fork()
        if child == 0:
            asyncio.run(write_for_ever(arena, folder, 1_000_000 * number, told))
        os.close(told)
        assert os.read(ready, 1) == b"1"
        os.close(ready)
        time.sleep(rng.random() * 0.03)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        shutil.rmtree(arena)
        arena.mkdir(mode=0o700)
        checked, damaged = asyncio.run(check(arena, folder))
        num_checked, num_damaged = num_checked + checked, num_damaged + damaged
    print(num_checked, num_damaged)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))

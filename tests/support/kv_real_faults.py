"""An SSD tier on a disk that is really full, or whose system calls really fail; told as JSON. Run by tests/fault/test_kv_real_faults.py."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.kvssd import Ssd
from tests.support.kvstore import Chain, Store


def chain(number: int) -> Chain:
    return Chain(8, first_token=1000 * number)


async def small(folder: Path, store: Store) -> dict[str, Any]:
    """`folder` is a tmpfs of 12 MiB, most of it taken by somebody else, who then goes."""
    filler = folder / "filler"
    filler.write_bytes(b"x" * (10 * 2**20))
    ssd = Ssd(folder / "ssd", store, num_bytes=8 * 2**20)
    number = 0
    while not ssd.counts["kv_ssd_full"]:
        await ssd.put(chain(number))
        number += 1
    held = len(ssd.tier.index)
    told = {"held_while_full": held, "newest_readable": await ssd.num_readable(chain(number - 1))}
    filler.unlink()
    until = number + 200
    while len(ssd.tier.index) <= held and number < until:
        await ssd.put(chain(number))
        number += 1
    told["held_after"] = len(ssd.tier.index)
    told["io_faults"] = ssd.counts["kv_ssd_io_faults"]
    ssd.tier.check_integrity()
    ssd.tier.close()
    return told


async def broken(folder: Path, store: Store) -> dict[str, Any]:
    """The kernel's answers are those of `faulty_disk.c`, loaded before this began."""
    faults = Path(os.environ["FAULTS"])
    ssd = Ssd(folder / "ssd", store, num_bytes=4 * 2**20, deadline_s=0.05)
    told: dict[str, Any] = {"put": await ssd.put(chain(0)), "readable": await ssd.num_readable(chain(0))}
    (faults / "read_eio").touch()
    told["read_while_broken"] = [await ssd.get(chain(0), index) is None for index in range(3)]
    told["breaker"] = ssd.counts["kv_ssd_breaker_opened"]
    (faults / "read_eio").unlink()
    store.clock.now_s += 6
    told["readable_again"] = await ssd.num_readable(chain(0))
    (faults / "write_eio").touch()
    told["put_while_broken"] = await ssd.put(chain(1))
    (faults / "write_eio").unlink()
    store.clock.now_s += 6
    told["put_again"] = await ssd.put(chain(2))
    num_opened = ssd.counts["kv_ssd_breaker_opened"]
    (faults / "hang").touch()
    reads = [asyncio.create_task(ssd.get(chain(0), index)) for index in range(4)]
    while ssd.counts["kv_ssd_breaker_opened"] == num_opened:
        await asyncio.sleep(0.001)
    told["while_hanging"] = await ssd.get(chain(0), 5) is None
    (faults / "hang").unlink()
    told["after_hanging"] = [read is None for read in await asyncio.gather(*reads)]
    store.clock.now_s += 6
    told["readable_at_last"] = await ssd.num_readable(chain(0))
    ssd.tier.check_integrity()
    ssd.tier.close()
    return told


def main() -> None:
    what, folder = sys.argv[1], Path(sys.argv[2])
    memory = Path(tempfile.mkdtemp(prefix="ss-test-kv-", dir="/dev/shm"))
    store = Store(memory, num_bytes=4 * 2**20)
    try:
        print(json.dumps(asyncio.run({"small": small, "broken": broken}[what](folder, store))))
    finally:
        store.close()
        shutil.rmtree(memory)


if __name__ == "__main__":
    main()

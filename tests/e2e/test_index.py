"""A worker that goes takes its blocks out of the index, whether it is seen to die (SIGKILL) or only its lease ends (SIGSTOP)."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from loadtest.client import Client
from loadtest.local_stack import LocalStack
from services.console.fleet_view import read_leases, visit
from services.console.run_folder import find_run
from shared.bus.base import Bus
from shared.messages.fleet import WorkerLease
from shared.messages.subjects import Subjects
from tests.support.stack import SIM, checked_stack
from tests.support.waiting import until_true

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    with checked_stack(tmp_path_factory.mktemp("index"), *SIM, "--decode", "1", "--prefill", "1") as stack:
        yield stack


class Look:
    """At a stack's leases and its router's index."""

    def __init__(self, bus: Bus, subjects: Subjects) -> None:
        self._bus, self._subjects = bus, subjects

    async def worker(self) -> WorkerLease | None:
        """The decode worker, if it is ready."""
        leases = await read_leases(self._bus, self._subjects)
        return next((lease for lease in leases if lease.role == "decode" and lease.state == "ready"), None)

    async def num_blocks(self, source: str) -> int | None:
        """What the index says a source's own pool has. None: it does not know the source."""
        router = next(lease for lease in await read_leases(self._bus, self._subjects) if lease.role == "router")
        answer = await self._bus.request(self._subjects.router(router.instance, "index"), b"", timeout_s=2)
        known = msgspec.json.decode(answer.payload, type=dict[str, dict[str, int]])
        return known[source].get("device", 0) if source in known else None


@asynccontextmanager
async def looking(stack: LocalStack) -> AsyncIterator[Look]:
    async with visit(find_run(stack.state_dir)) as (bus, subjects):
        yield Look(bus, subjects)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_the_blocks_of_a_worker_that_goes_leave_the_index(stack: LocalStack, how: signal.Signals) -> None:
    client = Client(stack.url)
    model = (await client.get("/v1/models"))["data"][0]["id"]
    async with looking(stack) as look:
        await until_true(look.worker)
        worker = await look.worker()
        assert worker is not None
        body = {"model": model, "prompt": list(range(5_000, 5_400)), "max_tokens": 4, "ignore_eos": True, "stream": True}
        assert (await client.generate("/v1/completions", body)).is_ok

        async def is_known() -> bool:
            return bool(await look.num_blocks(worker.instance))

        async def is_gone() -> bool:
            return await look.num_blocks(worker.instance) is None

        await until_true(is_known)
        pid = stack.kill("decode-0", how)
        await until_true(is_gone)
        if how == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)

        async def is_another_there() -> bool:
            now = await look.worker()
            return now is not None and now.instance != worker.instance

        await until_true(is_another_there)
        assert (await client.generate("/v1/completions", body)).is_ok
    await client.close()

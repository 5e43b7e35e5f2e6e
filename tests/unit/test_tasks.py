"""Tasks end, however they take their cancellation."""

import asyncio

import pytest

from shared.tasks import cancel_all


async def swallow(times: int) -> None:
    for _ in range(times):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue
    await asyncio.Event().wait()


@pytest.mark.parametrize("times", [0, 1, 3])
async def test_a_cancellation_that_got_lost_is_repeated(times: int) -> None:
    task = asyncio.create_task(swallow(times))
    await asyncio.sleep(0)
    await cancel_all([task])
    assert task.cancelled()


async def test_what_does_not_end_is_named_and_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    task = asyncio.create_task(swallow(3), name="stubborn")
    await asyncio.sleep(0)
    await cancel_all([task], limit_s=0.1)
    assert "stubborn" in caplog.text
    await cancel_all([task])


async def test_the_caller_is_left_out_and_the_ended_are_no_matter() -> None:
    current = asyncio.current_task()
    assert current
    done = asyncio.create_task(asyncio.sleep(0))
    await done
    await cancel_all([current, done])
    assert not current.cancelling()

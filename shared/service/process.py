"""One service as a process: settings, signals, exit codes."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Coroutine, Mapping
from typing import Any, NoReturn, Protocol, TypeVar

import uvloop

from shared.bus.nats import connect
from shared.config import ServiceConfig, read_config
from shared.errors import BusClosed, SlipstreamError
from shared.service.life import Life
from shared.service.service import VERSION, Service, mint_instance
from shared.service.status import StatusPipe
from shared.telemetry.logs import set_up_logs
from shared.telemetry.setup import open_telemetry
from shared.types import InstanceId

EXIT_CRASH = 1
EXIT_SECOND_SIGNAL = 130
THREADS_S = 1.0
"""How long threads of the executor may go on at the end: a model that is being loaded does not keep the process."""

_PR_SET_PDEATHSIG = 1

log = logging.getLogger(__name__)

T = TypeVar("T")


class ConfigWithService(Protocol):
    """A service's own frozen struct."""

    @property
    def service(self) -> ServiceConfig: ...


def main(service_type: type[Service], config_type: type[Any]) -> NoReturn:
    """Run one service until a signal, and exit with the documented code. `config_type` is read from the environment once."""
    status = StatusPipe.of(os.environ)
    instance = mint_instance()
    set_up_logs(service_type.role, instance, "info")
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        config: ConfigWithService = read_config(config_type, os.environ)
        set_up_logs(config.service.name or service_type.role, instance, config.service.log_level)
        if config.service.parent_death:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        code = loop.run_until_complete(_live(service_type, config, instance, status, os.environ))
    except SlipstreamError as error:
        log.error("%s", error.message, extra={"code": error.code, "remedy": error.remedy})
        status.failed(error)
        code = error.exit_code
    except Exception as error:
        log.exception("the process failed")
        status.failed(_as_failure(error))
        code = EXIT_CRASH
    _exit(loop, code)


async def _live(
    service_type: type[Service], config: ConfigWithService, instance: InstanceId, status: StatusPipe, environ: Mapping[str, str]
) -> int:
    """The exit code of a life that began. Raises what kept it from beginning."""
    stopping = asyncio.Event()
    _on_signals(stopping)
    name = config.service.name or service_type.role
    telemetry = open_telemetry(config.service, service_type.role, instance, VERSION, environ)
    try:
        status.phase("connecting to NATS")
        bus = await _unless(connect(config.service, name=name), stopping)
        try:
            own_config: Any = config  # each service's constructor takes its own struct
            service = service_type(own_config, bus, telemetry, instance)
            service.on_report = status.phase
            bus.on_closed(lambda: service.fail(BusClosed("the connection to NATS is closed for good")))
            return await _serve(service, stopping, status)
        finally:
            await telemetry.close()
            await bus.close()
    except _Stopped:
        return 0
    finally:
        await telemetry.close()


async def _serve(service: Service, stopping: asyncio.Event, status: StatusPipe) -> int:
    life = Life(service)
    try:
        await _unless(life.begin(), stopping, service.crashed)
    except _Stopped:
        return _outcome(service, status)
    detail = service.detail()
    log.info("ready%s", f": {detail}" if detail else "")
    status.ready(detail)
    await _first(stopping, service.leaving, service.crashed)
    await (life.end() if service.crash is None else life.abandon())
    return _outcome(service, status)


class _Stopped(Exception):  # no fault
    """Something that was awaited was given up, because the process is to end."""


async def _first(*events: asyncio.Event) -> None:
    """Until one of `events` is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def _unless(work: Coroutine[Any, Any, T], *events: asyncio.Event) -> T:
    """The result of `work`; if one of `events` is set before, `work` is cancelled and _Stopped raised."""
    task, ended = asyncio.create_task(work), asyncio.create_task(_first(*events))
    try:
        await asyncio.wait([task, ended], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise _Stopped
    finally:
        task.cancel()
        ended.cancel()
        await asyncio.gather(task, ended, return_exceptions=True)


def _as_failure(error: BaseException) -> SlipstreamError:
    """For the supervisor. The text of a foreign error stays in the log: it may quote what users sent."""
    if isinstance(error, SlipstreamError):
        return error
    return SlipstreamError(f"a bug: {type(error).__name__}", remedy="Its log has the traceback")


def _outcome(service: Service, status: StatusPipe) -> int:
    """The exit code, and why, if a task failed."""
    if service.crash is None:
        return 0
    status.failed(_as_failure(service.crash))
    return service.crash.exit_code if isinstance(service.crash, SlipstreamError) else EXIT_CRASH


def _on_signals(stopping: asyncio.Event) -> None:
    """The first signal drains, the second one ends the process at once."""

    def on_signal() -> None:
        if stopping.is_set():
            log.warning("second signal: not drained")
            os._exit(EXIT_SECOND_SIGNAL)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)


def _exit(loop: asyncio.AbstractEventLoop, code: int) -> NoReturn:
    """Leave, with threads that go on or without them. (The loop's own way to end its executor waits for them without limit.)"""
    loop.close()
    deadline_s = time.monotonic() + THREADS_S
    threads = [thread for thread in threading.enumerate() if thread is not threading.current_thread() and not thread.daemon]
    for thread in threads:
        thread.join(max(deadline_s - time.monotonic(), 0.0))
    if any(thread.is_alive() for thread in threads):
        log.info("left behind: %s", ", ".join(thread.name for thread in threads if thread.is_alive()))
        logging.shutdown()
        os._exit(code)
    sys.exit(code)

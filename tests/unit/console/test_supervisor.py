"""The supervisor against small programs that speak the status protocol."""

import asyncio
import io
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.console import supervisor as supervisor_module
from services.console.board import Board
from services.console.child import ChildSpec
from services.console.run_folder import process_start
from services.console.supervisor import ChildFault, Supervisor
from services.console.terminal import Terminal

PRELUDE = """
import json, os, signal, sys, time
status = os.fdopen(int(os.environ["SS_STATUS_FD"]), "w", buffering=1)
def say(**line): print(json.dumps(line), file=status)
"""
READY = "say(state='phase', text='warming', fraction=0.5); say(state='ready', detail='warm'); "


class Stage:
    """A supervisor and what it printed."""

    def __init__(self, folder: Path) -> None:
        self.screen = io.StringIO()
        self.folder = folder
        self.supervisor = Supervisor(
            Board(Terminal(self.screen, {}), lambda: asyncio.get_running_loop().time()),
            folder,
            on_change=self._changed,
            on_death=lambda spec: self.deaths.append(spec.name),
        )
        self.deaths: list[str] = []
        self.changed = asyncio.Event()

    def _changed(self) -> None:
        self.changed.set()

    def spec(self, name: str, body: str, role: str = "decode") -> ChildSpec:
        return ChildSpec(name, role, (sys.executable, "-c", PRELUDE + body), dict(os.environ), detail="1 thread")

    async def until(self, text: str) -> None:
        """Until `text` was printed; the test's own time limit bounds it."""
        while text not in self.screen.getvalue():
            await asyncio.sleep(0.01)


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.supervisor.kill()
    await stage.supervisor.drain(5)
    assert stage.supervisor.pids == {}


async def test_all_start_together_and_are_ready_with_their_details(stage: Stage) -> None:
    body = READY + "signal.pause()"
    await stage.supervisor.start([stage.spec("decode-0", body), stage.spec("prefill-0", body, "prefill")])
    assert set(stage.supervisor.pids) == {"decode-0", "prefill-0"}
    assert "✔ decode-0   1 thread · warm" in stage.screen.getvalue()


async def test_a_child_that_reports_a_failure_gives_cause_remedy_and_exit_code(stage: Stage) -> None:
    body = "say(state='failed', code='model_fault', message='nope.gguf: no such file', remedy='Give a .gguf', exit=3); sys.exit(3)"
    with pytest.raises(ChildFault) as caught:
        await stage.supervisor.start([stage.spec("decode-0", body), stage.spec("prefill-0", READY + "signal.pause()")])
    assert (caught.value.name, caught.value.cause) == ("decode-0", "nope.gguf: no such file")
    assert (caught.value.remedy, caught.value.exit_code) == ("Give a .gguf", 3)


async def test_a_child_that_dies_without_a_word_is_quoted_from_its_log(stage: Stage) -> None:
    with pytest.raises(ChildFault) as caught:
        await stage.supervisor.start([stage.spec("decode-0", "print('cannot map memory', file=sys.stderr); sys.exit(7)")])
    assert "exited (code 7) before it was ready: cannot map memory" in caught.value.message
    assert "decode-0.log" in caught.value.remedy


async def test_a_dead_child_is_restarted_under_its_name_with_a_new_pid(stage: Stage) -> None:
    await stage.supervisor.start([stage.spec("decode-0", READY + "signal.pause()")])
    first = stage.supervisor.pids["decode-0"]
    os.kill(first, signal.SIGKILL)
    await stage.until("! decode-0  exited (SIGKILL) · restarting in 0.5 s (restart 1)")
    await stage.until("decode-0  ready again after")
    assert stage.supervisor.pids["decode-0"] != first
    assert stage.deaths == ["decode-0"]


async def test_lines_that_are_no_status_are_left_out(stage: Stage) -> None:
    await stage.supervisor.start(
        [stage.spec("decode-0", "status.write('a library prints\\n'); status.write('{}\\n'); " + READY + "signal.pause()")]
    )
    assert "decode-0" in stage.supervisor.pids


async def test_drain_goes_stage_by_stage(stage: Stage, tmp_path: Path) -> None:
    order = tmp_path / "order"
    body = f"""
def leave(*_):
    time.sleep(0.05)
    open({str(order)!r}, "a").write(sys.argv[-1] + " " if len(sys.argv) > 1 else os.environ["ROLE"] + " ")
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
{READY}
while True: signal.pause()
"""
    specs = [stage.spec(role, body, role) for role in ("nats", "kvstore", "decode", "router", "gateway")]
    for spec in specs:
        spec.environ["ROLE"] = spec.role
    await stage.supervisor.start(specs)
    await stage.supervisor.drain(10)
    assert order.read_text().split() == ["gateway", "router", "decode", "kvstore", "nats"]
    assert stage.supervisor.pids == {}


async def test_what_does_not_drain_in_time_is_killed(stage: Stage) -> None:
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN); " + READY + "\nwhile True: signal.pause()"
    await stage.supervisor.start([stage.spec("decode-0", body)])
    await stage.supervisor.drain(0.1)
    assert "did not stop within 0.1 s, killed" in stage.screen.getvalue()
    assert stage.supervisor.pids == {}


async def test_drain_does_not_wait_for_a_restart(stage: Stage) -> None:
    await stage.supervisor.start([stage.spec("decode-0", READY + "signal.pause()")])
    os.kill(stage.supervisor.pids["decode-0"], signal.SIGKILL)
    await stage.until("restarting in")
    await stage.supervisor.drain(5)
    assert "ready again" not in stage.screen.getvalue()


async def test_silence_while_starting_is_a_failure_that_names_what_it_was_at(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "SILENCE_S", 0.3)
    with pytest.raises(ChildFault, match=r"said nothing for 0\.3 s while: (mapping|starting)"):
        await stage.supervisor.start([stage.spec("decode-0", "say(state='phase', text='mapping'); signal.pause()")])


async def test_a_probe_stands_in_for_a_program_that_reports_nothing(stage: Stage) -> None:
    async def probe() -> str:
        return "probed"

    spec = ChildSpec("nats", "nats", (sys.executable, "-c", "import signal; signal.pause()"), dict(os.environ), probe)
    await stage.supervisor.start([spec])
    assert "probed" in stage.screen.getvalue()


async def test_children_die_with_their_supervisor(tmp_path: Path) -> None:
    """kill -9 of the supervisor leaves nobody behind."""
    program = f"""
import asyncio, io, os, sys, time
from pathlib import Path
from services.console.board import Board
from services.console.child import ChildSpec
from services.console.supervisor import Supervisor
from services.console.terminal import Terminal
async def main():
    supervisor = Supervisor(Board(Terminal(io.StringIO(), {{}}), time.monotonic), Path({str(tmp_path)!r}), lambda: None, lambda spec: None)
    body = {PRELUDE!r} + {READY!r} + "signal.pause()"
    await supervisor.start([ChildSpec("decode-0", "decode", (sys.executable, "-c", body), dict(os.environ))])
    print(supervisor.pids["decode-0"], flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout
    pid = int(await parent.stdout.readline())
    assert process_start(pid)
    parent.kill()
    await parent.wait()
    while process_start(pid):
        await asyncio.sleep(0.01)

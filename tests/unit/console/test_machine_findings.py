import socket
from pathlib import Path
from threading import Thread

import pytest

from services.console import machine_findings
from services.console.findings import Finding
from services.console.machine_findings import container_findings, environment_findings
from tests.support.otlp import Collector

pytestmark = pytest.mark.usefixtures("no_settings")


def texts(found: list[Finding], state: str) -> list[str]:
    return [one.text for one in found if one.state == state]


def test_a_store_folder_on_a_disk_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_findings, "file_system", lambda _: "ext4")
    found = environment_findings(tmp_path)
    assert any("not on tmpfs" in text for text in texts(found, "failed"))
    assert all(one.remedy for one in found if one.state != "done"), "every finding has its remedy"


def test_little_room_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_findings, "LITTLE_BYTES", 2**60)
    assert len(texts(environment_findings(tmp_path), "warning")) >= 3


@pytest.mark.parametrize(("mode", "state"), [(0o600, "done"), (0o644, "warning")])
def test_a_secret_that_others_can_read(tmp_path: Path, mode: int, state: str) -> None:
    (tmp_path / "cluster.secret").write_text("x")
    (tmp_path / "cluster.secret").chmod(mode)
    [secret] = [one for one in environment_findings(tmp_path) if "cluster's secret" in one.text]
    assert secret.state == state
    assert state == "done" or secret.remedy == f"chmod 600 {tmp_path / 'cluster.secret'}"


def test_a_secret_that_is_named_and_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SS_CLUSTER_SECRET_FILE", str(tmp_path / "nowhere"))
    assert any("SS_CLUSTER_SECRET_FILE" in text for text in texts(environment_findings(tmp_path), "failed"))


def test_a_collector_is_tried_and_its_login_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def collector(endpoint: str) -> Finding:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        found = environment_findings(tmp_path)
        assert not any("hunter2" in one.text for one in found)
        return next(one for one in found if one.text.startswith(("the collector", "OTEL")))

    with Collector() as sound:
        answers = collector(sound.url.replace("//", "//bob:hunter2@"))
        assert (answers.state, sound.spans) == ("done", []) and answers.text.endswith("answers"), answers.text
        sound.status = 401
        assert collector(sound.url).state == "done", "it wants a header, which the exporter may have"
    monkeypatch.setattr(machine_findings, "COLLECTOR_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        silent = collector(f"http://bob:hunter2@127.0.0.1:{hanging.getsockname()[1]}")
    assert silent.state == "warning" and "does not answer" in silent.text and silent.remedy
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))  # and does not listen
        away = collector(f"http://bob:hunter2@127.0.0.1:{deaf.getsockname()[1]}")
    assert away.state == "warning" and "cannot be reached" in away.text
    assert "is no address" in collector("127.0.0.1:4318").text


def test_something_else_where_the_collector_should_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The port of OTLP over gRPC, for one."""
    with socket.create_server(("127.0.0.1", 0)) as other:

        def greet() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"\x00\x00\x12\x04 no HTTP/1.1\r\n\r\n")

        Thread(target=greet, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{other.getsockname()[1]}")
        [found] = [one for one in environment_findings(tmp_path) if "does not speak HTTP" in one.text]
    assert "4318" in found.remedy


def test_a_container_is_not_taken_for_the_machine() -> None:
    """It has no nats-server, no compiler, no model and little shared memory, and none of that is a fault."""
    assert [one for one in container_findings() if one.state != "done"] == []

from pathlib import Path

import msgspec

from loadtest.bench.hops import hop_lines, read_hops


def write(folder: Path, service: str, *spans: tuple[str, str, float, float]) -> None:
    """(trace, name, start ms, end ms) each."""
    lines = [
        msgspec.json.encode(
            {
                "trace_id": trace,
                "name": name,
                "start_ns": int(start * 1e6),
                "end_ns": int(end * 1e6),
                "attributes": {"num_blocks": 3} if name == "load" else {},
                "more": {"x": 1},
            }
        )
        for trace, name, start, end in spans
    ]
    (folder / f"{service}.jsonl").write_bytes(b"\n".join(lines) + b"\n")


def test_stages_in_order_of_their_start_and_only_of_the_measured_requests(tmp_path: Path) -> None:
    write(tmp_path, "gateway", ("a", "chat", 100, 110), ("b", "chat", 200, 214), ("warm-up", "chat", 1, 99))
    write(tmp_path, "router", ("a", "route", 101, 102), ("b", "route", 202, 205), ("warm-up", "route", 150, 199))
    write(tmp_path, "decode", ("a", "load", 103, 104), ("b", "load", 206, 209))
    hops = read_hops(tmp_path, since_ns=int(50e6))
    assert [(hop.service, hop.name, hop.num, hop.starts_ms, hop.p50_ms, hop.p99_ms) for hop in hops] == [
        ("gateway", "chat", 2, 0, 10, 14),
        ("router", "route", 2, 1, 1, 3),
        ("decode", "load", 2, 3, 1, 3),
    ]
    assert [hop.num_blocks for hop in hops] == [0, 0, 6]
    assert len({line.index("gateway") for line in hop_lines(hops) if "gateway" in line}) == 1


def test_no_traces_no_hops(tmp_path: Path) -> None:
    assert read_hops(tmp_path, 0) == []

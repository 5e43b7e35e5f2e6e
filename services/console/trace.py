"""`slipstream trace`: one request's way through the services, drawn."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from services.console.cache_findings import KINDS
from services.console.fleet_view import read_leases, visit
from services.console.run_folder import Run, add_run_flags, find_run_or_last, state_dir
from services.console.terminal import Terminal, counted, folded, narrowed
from services.console.usage import Parser
from shared.errors import EnvironmentFault, SlipstreamError
from shared.messages.fleet import WorkerLease
from shared.telemetry.trace_file import TraceLine

BAR = 40
LEAST_BAR = 12
_ARRIVE_S = 2.0
_WRITTEN_S = 0.7
"""Spans are written a quarter of a second after their end, a busy service's later: of a request that has just ended they are waited for."""

Spans = list[TraceLine]


def run(argv: Sequence[str]) -> int:
    """The command. Exit 1 if there is no such trace."""
    parser = Parser(
        prog="slipstream trace", description="One request's way through the services: stages, times, where it was routed and why."
    )
    parser.add_argument("id", nargs="?", default="last", help="a trace id or its beginning, a request id, or last (default)")
    parser.add_argument("--list", action="store_true", help="the latest traces, a line each")
    parser.add_argument("--json", action="store_true", help="the spans, for scripts")
    add_run_flags(parser)
    options = parser.parse_args(argv)
    stack = find_run_or_last(state_dir(options.state_dir), options.run)
    folder = _folder(stack)
    terminal = Terminal()
    if options.list:
        calls = latest_calls(list(read_spans(folder)))
        for line in [msgspec.json.encode(calls).decode()] if options.json else listed(calls, terminal.columns):
            terminal.say(line)
        return 0
    spans = find_trace(folder, options.id)
    if not spans:
        if options.id == "last":
            raise SlipstreamError(
                f"no request has been traced in {folder.parent}", remedy='slipstream chat "What is the capital of France?"'
            )
        raise SlipstreamError(f"no trace {options.id} in {folder}", remedy="slipstream trace --list shows the latest")
    if options.json:
        sys.stdout.write(msgspec.json.encode(spans).decode() + "\n")
    else:
        for line in draw(spans, _names(stack, folder), terminal):
            terminal.say(line)
    return 0


def _folder(stack: Run) -> Path:
    """Where its traces lie."""
    folder = stack.folder / "traces"
    if not folder.is_dir():
        raise EnvironmentFault(
            f"no trace files in {folder.parent}", remedy="With a collector, traces are there: OTEL_EXPORTER_OTLP_ENDPOINT"
        )
    return folder


def read_spans(folder: Path) -> Iterator[TraceLine]:
    """Of all services. A line that is being written is left out."""
    decode = msgspec.json.Decoder(TraceLine).decode
    for file in sorted(folder.glob("*.jsonl.1")) + sorted(folder.glob("*.jsonl")):
        for line in file.read_bytes().splitlines():
            try:
                yield decode(line)
            except msgspec.MsgspecError:
                continue


def _names(stack: Run, folder: Path) -> dict[str, str]:
    """Instance → what people call it: from spans and logs; of a stack elsewhere, whose logs are not here, also from who is there now."""
    names = {span.instance: span.service for span in read_spans(folder)} | read_names(folder.parent)
    if not stack.is_elsewhere:
        return names
    try:
        return names | {lease.instance: lease.name for lease in asyncio.run(_leases(stack))}
    except SlipstreamError:
        return names  # an id says less than a name, and is no fault of the trace


async def _leases(stack: Run) -> list[WorkerLease]:
    async with visit(stack) as (bus, subjects):
        return await read_leases(bus, subjects)


class _Speaker(msgspec.Struct, frozen=True):
    """Who wrote a line of a log."""

    service: str
    instance: str


def read_names(folder: Path) -> dict[str, str]:
    """Instance → what people call it, of every process that a run has had: each says in its log that it is ready."""
    decode = msgspec.json.Decoder(_Speaker).decode
    names = {}
    for file in folder.glob("*.log"):
        for line in file.read_bytes().splitlines():
            try:
                speaker = decode(line)
            except msgspec.MsgspecError:
                continue  # a library's words
            names[speaker.instance] = speaker.service
    return names


def find_trace(folder: Path, asked: str) -> Spans:
    """Its spans by their beginning; waits a little for those of a request that has just ended."""
    until_s = time.monotonic() + _ARRIVE_S
    trace_id: str | None = None
    while True:
        spans = list(read_spans(folder))
        trace_id = trace_id or _trace_id(spans, asked)  # `last` stays the last of now: under load there is always a newer one
        found = sorted((span for span in spans if span.trace_id == trace_id), key=lambda span: span.start_ns)
        if _is_whole(found) or time.monotonic() > until_s:
            return found
        time.sleep(0.1)


def _is_whole(spans: Spans) -> bool:
    """The call has ended long enough ago for all others to be written, and who generated its tokens has told."""
    call = next((span for span in spans if is_call(span)), None)
    if call is None or time.time_ns() - call.end_ns < _WRITTEN_S * 1e9:
        return False
    return not call.attributes.get("gen_ai.usage.output_tokens") or any(span.name == "decode generate" for span in spans)


def _trace_id(spans: Iterable[TraceLine], asked: str) -> str | None:
    if asked == "last":
        calls = [span for span in spans if is_call(span)]
        return max(calls, key=lambda span: span.end_ns).trace_id if calls else None
    return next((span.trace_id for span in spans if span.trace_id.startswith(asked) or span.attributes.get("request_id") == asked), None)


def is_call(span: TraceLine) -> bool:
    """The gateway's span, of the whole."""
    return "gen_ai.operation.name" in span.attributes


_NUMBERS = {"ms": 8, "prompt": 0, "cached": 0, "out": 0, "first ms": 0}


def latest_calls(spans: Spans, limit: int = 20) -> Spans:
    """The root spans of the latest traces, newest last."""
    return sorted((span for span in spans if is_call(span)), key=lambda span: span.end_ns)[-limit:]


def listed(calls: Spans, columns: int) -> list[str]:
    """A line each."""
    rows: list[Sequence[str]] = [("trace", "at", "call", "ended", *_NUMBERS)]
    for span in calls:
        told = span.attributes
        numbers = (told.get(f"gen_ai.usage.{name}_tokens", "–") for name in ("input", "cache_read.input", "output"))
        first_ms = f"{float(told['ttft_ms']):.1f}" if told.get("ttft_ms") else "–"
        began = time.strftime("%H:%M:%S", time.localtime(span.start_ns / 1e9))
        outcome = str(told.get("outcome")) + ("" if "gen_ai.usage.input_tokens" in told else " (refused)")
        rows.append((span.trace_id[:8], began, span.name, outcome, f"{_ms(span):.1f}", *map(str, numbers), first_ms))
    return narrowed(rows, columns, ("at", "cached"), _NUMBERS)


def draw(spans: Spans, names: Mapping[str, str], terminal: Terminal) -> list[str]:
    """The waterfall, then the routing. `names`: instance → what people call it."""
    call = next((span for span in spans if is_call(span)), spans[0])
    start_ns, end_ns = min(span.start_ns for span in spans), max(span.end_ns for span in spans)
    lines = [*folded(f"trace {call.trace_id}  {_summary(call)}", terminal.columns, 6), ""]
    service = max(len(span.service) for span in spans)
    rows = list(_in_order(spans))
    stage = max(depth + len(_stage(span)) for depth, span in rows)
    room = terminal.columns - (service + stage + 28)
    told = max(len(_told(span)) for span in spans)
    is_narrow = room - told < LEAST_BAR  # what stages did stands below them then
    width = min(max(room if is_narrow else room - told, LEAST_BAR), BAR)
    lines.append(f"  {'service':<{service}}  {'stage':<{stage}}  {'starts':>8}  {'ms':>8}")
    for depth, span in rows:
        begins, ends = ((at_ns - start_ns) / (end_ns - start_ns or 1) for at_ns in (span.start_ns, span.end_ns))
        starts_ms = (span.start_ns - start_ns) / 1e6
        line = f"  {span.service:<{service}}  {' ' * depth + _stage(span):<{stage}}  {starts_ms:>8.1f}  {_ms(span):>8.1f}  "
        line += terminal.paint(_bar(begins, ends, width), "green")
        if is_narrow:
            lines.append(line.rstrip())
            indent = 4 + service + depth
            below = folded(" " * indent + _told(span), terminal.columns, indent) if _told(span) else []
            lines += [terminal.paint(words, "dim") for words in below]
        else:
            lines.append(f"{line}  {terminal.paint(_told(span), 'dim')}".rstrip())
    for span in spans:
        if span.name == "router route":
            lines += ["", *_routing(span, names, terminal)]
    if "diverged_at" in call.attributes:
        stands = KINDS.get(str(call.attributes.get("diverged_kind")), "other text")
        lines.append(f"the prompt leaves the earlier ones at token {call.attributes['diverged_at']}: there stands {stands}")
    return lines


def _in_order(spans: Spans) -> Iterator[tuple[int, TraceLine]]:
    """(depth, span): children behind their parents, by their beginning."""
    ids = {span.span_id for span in spans}

    def below(parent_id: str, depth: int) -> Iterator[tuple[int, TraceLine]]:
        for span in spans:
            if span.parent_id == parent_id:
                yield depth, span
                yield from below(span.span_id, depth + 1)

    for span in spans:
        if span.parent_id not in ids:
            yield 0, span
            yield from below(span.span_id, 1)


def _bar(begins: float, ends: float, width: int) -> str:
    """From `begins` to `ends`, both from 0 to 1. What is shorter than a character is a thin one."""
    first = min(int(begins * width), width - 1)
    length = round((ends - begins) * width)
    return (" " * first + ("█" * length if length else "▏"))[:width].ljust(width)


def _ms(span: TraceLine) -> float:
    return (span.end_ns - span.start_ns) / 1e6


def _stage(span: TraceLine) -> str:
    """`chat` of `chat smollm2-135m` (the head tells the model), `route` of `router route`."""
    return span.name.split(" ", 1)[0 if is_call(span) else -1]


def _summary(call: TraceLine) -> str:
    told = call.attributes
    if not is_call(call):
        return "its call has not ended, or its gateway is gone"
    if "gen_ai.usage.input_tokens" not in told:
        return f"{call.name} · refused: {told.get('outcome')}"
    moved = f" · moved {told['num_migrations']} times" if told.get("num_migrations") else ""
    return (
        f"{call.name} · {told.get('outcome')} · {counted(float(told['gen_ai.usage.input_tokens']), 'prompt token')} "
        f"({told.get('gen_ai.usage.cache_read.input_tokens')} cached) · {told.get('gen_ai.usage.output_tokens')} out · "
        f"first after {float(told.get('ttft_ms') or 0):.1f} ms{moved}"
    )


def _told(span: TraceLine) -> str:
    """What a stage did, in a few words."""
    numbers = {name.removeprefix("num_").replace("_", " "): value for name, value in span.attributes.items() if name.startswith("num_")}
    if is_call(span) or span.name == "router route":
        return ""
    words = [f"{value} {name.removesuffix('s') if value == 1 else name}" for name, value in numbers.items() if value]
    reason = span.attributes.get("reason")
    return ", ".join([*words, *([str(reason)] if reason else [])])


def _routing(span: TraceLine, names: Mapping[str, str], terminal: Terminal) -> list[str]:
    """Where to, why, and what the others looked like."""
    told = span.attributes
    decode, prefill = str(told.get("decode_worker")), str(told.get("prefill_worker") or "")
    way = " → ".join(names.get(worker, worker) for worker in (prefill, decode) if worker)
    found = f"  {told.get('num_overlap_tokens')} prompt tokens are there, {told.get('num_uncached_tokens')} to compute"
    found += f" ({told['miss']})" if told.get("miss") else ""
    found += f" · a similar prompt has {told['similar_blocks']} blocks" if told.get("similar_blocks") else ""
    lines = [f"routed to {way}: {told.get('reason')}", *folded(found, terminal.columns, 4)]
    candidates = [one.rstrip(")") for one in str(told.get("candidates", "")).split(") ") if one]
    if candidates:
        lines.append("  the lowest score is chosen, ties by chance:")
    width = max((len(names.get(worker, worker)) for worker in (one.partition(":")[0] for one in candidates)), default=0)
    for candidate in candidates:
        worker, _, scored = candidate.partition(":")
        score, _, features = scored.partition("(")
        mark = terminal.mark("done") if worker == decode else " "
        head = f"    {names.get(worker, worker):<{width}} {score:>8}   "
        first, *rest = folded(head + _short(features), terminal.columns, len(head))
        lines += [f"  {mark} {first[4:]}", *rest]
    return lines


def _short(features: str) -> str:
    """`memory_used=0.000793457 utilisation=0.75` with three digits each: --json has them all."""
    pairs = (feature.partition("=") for feature in features.split())
    return " ".join(f"{name}={float(value):.3g}" for name, _, value in pairs)

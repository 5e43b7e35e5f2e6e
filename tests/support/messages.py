"""One example of every message, with every field set to something else than its default."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import msgspec

import shared.messages
import shared.types
from shared.messages import fleet, kv, request, router, session
from shared.types import SamplingParams, TokenLogprob, Usage, pack_tokens

REQUEST_ID = "0192f3a4b5c6d7e8f9a0b1c2d3e4f5a6"
MODEL = "0123456789abcdef"
HOST = "00c0ffee"
LAYOUT = "fedcba9876543210"
DIGEST = bytes(range(32))
HASHES = bytes(range(64))
KEYS = bytes(range(32, 64))

SAMPLING = SamplingParams(
    max_tokens=64,
    temperature=0.5,
    top_k=40,
    top_p=0.9,
    min_p=0.05,
    presence_penalty=0.25,
    frequency_penalty=-0.5,
    repetition_penalty=1.1,
    logit_bias={7: -1.5, 9: 2.0},
    seed=2**62 + 1,
    stop_token_ids=[2, 3],
    ignore_eos=True,
    min_tokens=4,
    num_logprobs=3,
)
LOGPROB = TokenLogprob(-0.125, [5, 6], [-0.125, -2.5])
USAGE = Usage(10, 20, 3, 7, 2, 4096, 12.5, 1.25, 300.5)
REQUEST = request.GenerateRequest(
    request_id=REQUEST_ID,
    epoch=2,
    gateway="0a0b0c0d",
    model=MODEL,
    request_class="high",
    token_ids=pack_tokens([1, 2, 70_000]),
    num_emitted=1,
    sampling=SAMPLING,
    salt=DIGEST,
    partition=LAYOUT,
    block_keys=KEYS,
    deadline_ms=30_000,
    sent_at_ns=1_700_000_000_123_456_789,
    traceparent="00-0123456789abcdef0123456789abcdef-0123456789abcdef-01",
    priority=-5,
    explain=True,
)
DELTA = session.TokenDelta(REQUEST_ID, 2, 17, [5, 70_000], [LOGPROB, LOGPROB], 16)
HELD = session.HeldRequest(REQUEST_ID, 2, "decode", 17)
SLOT = kv.Slot(4096, 2**62, True)
STORED = kv.BlocksStored("dram", DIGEST[:16], KEYS)
OFFER = kv.BlockOffer(DIGEST, LAYOUT, 368_640, HASHES, HASHES, ["a", "b"], True)
ENDED = fleet.EndedRequest(REQUEST_ID, 2)

EXAMPLES: list[msgspec.Struct] = [
    SAMPLING,
    LOGPROB,
    USAGE,
    REQUEST,
    request.PrefillTask(REQUEST, "aaaaaaaa", "bbbbbbbb", "cccccccc", HOST, 12.5, False),
    request.DecodeTask(REQUEST, "aaaaaaaa", "cccccccc", "bbbbbbbb", 32, 16, 12.5, 50.25, False),
    request.Cancel(REQUEST_ID, 2, "cccccccc"),
    DELTA,
    session.TokenBatch("cccccccc", [DELTA]),
    HELD,
    session.Progress("cccccccc", "decode", [HELD]),
    session.Routed(REQUEST_ID, 2, "decode-0 (little left to compute)"),
    session.Finish(
        REQUEST_ID,
        2,
        "cccccccc",
        "stop",
        17,
        0xDEADBEEF,
        pack_tokens([5, 70_000]),
        [LOGPROB, LOGPROB],
        USAGE,
        "overloaded",
        "come back later",
        1.5,
        "cccccccc",
        "bbbbbbbb",
    ),
    session.FinishReply(True, 9),
    session.Wanted(REQUEST_ID, 2),
    session.WantedReply(True),
    session.Resend(REQUEST_ID, 2, 9),
    session.ResendReply(DELTA),
    fleet.WorkerLease(
        instance="cccccccc",
        role="decode",
        name="decode-0",
        state="ready",
        sequence=3,
        version="0.1.0",
        started_at_ns=1_700_000_000_000_000_000,
        host=HOST,
        model=MODEL,
        device="cpu",
        max_num_seqs=8,
        num_blocks=512,
        block_size=16,
        prefill_budget=32,
        kv_address="127.0.0.1:4000",
        metrics_address="127.0.0.1:4001",
        http_address="127.0.0.1:8000",
        pid=4711,
    ),
    fleet.ModelCard("smollm2-135m", DIGEST, "/models/smollm2", 16, 2048, 49_152, [0, 2], "exact", "float32", LAYOUT, 368_640, [[1, 2, 3]]),
    ENDED,
    fleet.WorkerLoad("cccccccc", "decode", MODEL, 3, 2, 1, 100, 512, 64, 25.5, 1000.5, 2e9, 0.75, [ENDED]),
    fleet.DrainReply(3),
    fleet.Route("aaaaaaaa", 3, REQUEST_ID, 2, MODEL, "cccccccc", "bbbbbbbb", 100, 36, 8, 4, LAYOUT, 5, [2**63 + 1], KEYS),
    fleet.UsageRecord(
        request_id=REQUEST_ID,
        tenant="local",
        model="smollm2-135m",
        door="http",
        outcome="stop",
        num_prompt_tokens=100,
        num_output_tokens=17,
        num_cached_tokens=64,
        num_migrations=1,
        ttft_ms=50.5,
        e2e_ms=500.25,
        started_at_ns=1_700_000_000_000_000_000,
        gateway="0a0b0c0d",
        decode_worker="cccccccc",
        prefill_worker="bbbbbbbb",
    ),
    fleet.Plan(3, 1, 2, 8, "steady", {"rate": 1.5}),
    SLOT,
    kv.KvLookup(DIGEST, HASHES),
    kv.KvLookupReply(2, ["dram", "ssd"]),
    kv.KvReserve("cccccccc", DIGEST, LAYOUT, 368_640, HASHES, HASHES, ["a", "b"], True, 7, 5),
    kv.KvReserveReply(2**62, [SLOT], 10.5, "full"),
    kv.KvCommit("cccccccc", 2**62, HOST, REQUEST_ID),
    kv.KvCommitReply(2),
    kv.KvAcquire("cccccccc", DIGEST, LAYOUT, HASHES, 20.5, REQUEST_ID, 1.25),
    kv.KvAcquireReply(2**62, [SLOT], ["dram"], "cold"),
    kv.KvRelease("cccccccc", 2**62, HASHES),
    kv.KvReleaseReply(2),
    kv.KvPrefetch(DIGEST, KEYS, [HOST], True),
    kv.KvSnapshotRequest(9),
    kv.KvSnapshot(HOST, 2**62, 3, [STORED], 9),
    STORED,
    kv.BlocksRemoved("ssd", KEYS),
    kv.BlocksCleared(),
    kv.KvEventBatch(HOST, "host", MODEL, 2**62, 3, [STORED, kv.BlocksRemoved("ssd", KEYS), kv.BlocksCleared()]),
    kv.KvError("lease_expired", "the lease is not held"),
    kv.PeerChallenge(HOST, DIGEST),
    kv.PeerProof(HOST, DIGEST, DIGEST),
    kv.PeerWelcome(DIGEST),
    OFFER,
    kv.BlocksWanted([0, 2]),
    kv.BlockHead(1, "native", 368_640, 2**63 + 5, pack_tokens(range(16))),
    kv.BlocksTaken(2),
    kv.BlockPull(DIGEST, KEYS),
    router.BookedRequest(REQUEST_ID, 1, "0a1b2c3d", 7, 99, 0.5),
    router.RouterSnapshotRequest("c0ffee", 3),
    router.RouterSnapshot(
        "c0ffee",
        [router.BookedRequest(REQUEST_ID, 1, "0a1b2c3d", 7, 99, 0.5)],
        [kv.KvSnapshot("0a1b2c3d", 5, 6, [kv.BlocksStored("device", b"", KEYS)], 1)],
        4,
    ),
]


def message_types() -> list[type[msgspec.Struct]]:
    """Every struct that travels: those of shared.messages, and the plain ones that they contain."""
    modules = [shared.types] + [
        importlib.import_module(f"shared.messages.{module.name}") for module in pkgutil.iter_modules(shared.messages.__path__)
    ]
    return [
        value
        for module in modules
        for _, value in inspect.getmembers(module, inspect.isclass)
        if issubclass(value, msgspec.Struct) and value.__module__ == module.__name__
    ]

"""Heads come, change and go wrong under a running engine, and its tokens never show it. Tiny model, float32, greedy."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import shutil
from dataclasses import replace

import psutil
import pytest
import torch

from services.common.artifacts import MANIFEST, ArtifactStore
from services.common.embedded_redis import EmbeddedRedis
from services.common.keys import RunKeys
from services.common.redis_client import connect
from services.common.row_frames import RowFrame, prompt_name
from services.common.row_stream import RowStream
from services.common.streams import StreamConsumer
from services.config import EngineConfig, SpeculationConfig, WatcherConfig
from services.heads.artifact import HeadsManifest, TrainedOn, publish_heads
from services.heads.fingerprint import ModelFingerprint
from services.rollout.completion import SpeculationOverride
from services.rollout.engine import RolloutEngine
from services.rollout.heads_control import HeadsRefused
from services.rollout.heads_feedback import FEEDBACK_LIMITS, FeedbackForwarder
from services.rollout.heads_file import HEADS_FILE, read_heads, save_heads, weights_checksum
from services.rollout.sglang_plugin import feedback as plugin_feedback
from specroll.v1 import feedback_pb2
from specroll_core.contracts import SamplingParams
from specroll_core.heads import FutureTokenHeads, HeadsSpec
from tests.services.rollout.test_engine import PROMPTS, greedy, load, sample
from tests.tiny_heads import make_tiny_heads

KEYS = RunKeys("swap")
_ids = itertools.count()


@pytest.fixture(scope="module")
def model(tiny_dir):
    return load(tiny_dir)


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        client = connect(server.url, password=server.password)
        yield client
        client.close()


@pytest.fixture(scope="module")
def store(tmp_path_factory, tiny_dir, model):
    """Version 1: heads that know the prompts' continuations; 2: heads that know nothing."""
    good = read_heads(make_tiny_heads(model, PROMPTS, tmp_path_factory.mktemp("heads") / "heads.safetensors"))
    torch.manual_seed(1)
    bad = FutureTokenHeads(good.spec)
    torch.nn.init.normal_(bad.up, std=0.3)
    store = ArtifactStore(tmp_path_factory.mktemp("store"))
    manifest = HeadsManifest(ModelFingerprint.of(tiny_dir), TrainedOn(64, 2, "test"))
    publish_heads(store, 1, good, manifest)
    publish_heads(store, 2, bad, replace(manifest, parent=1))
    return store


@pytest.fixture(scope="module")
def forwarder(client):
    config = WatcherConfig(row_fraction=1.0, rows_per_second=1e6)
    forwarder = FeedbackForwarder(client, KEYS, config, worker_id="w")
    yield forwarder
    forwarder.close()


@pytest.fixture(scope="module")
def engine(tiny_dir, forwarder):
    config = EngineConfig(
        threads=1,
        context_length=1024,
        max_total_tokens=8192,
        max_running_requests=16,
        speculation=SpeculationConfig(enabled=True, nodes=6, max_nodes=8),
    )
    engine = RolloutEngine.start(config=config, dtype="float32", model_dir=tiny_dir, policy_version=0, seed=0)
    engine.observer = forwarder.note
    yield engine
    engine.close()


async def swap(engine, store, version):
    artifact = store.open(version)
    await engine.heads.prepare(artifact.path, version, artifact.digest)
    return await engine.heads.commit(version, artifact.digest)


@pytest.fixture
def serving(engine, store, run):
    """Version 1 serves at the start of the test."""
    run(swap(engine, store, 1))
    return engine


def test_from_no_heads_to_a_first_version(engine, store, run, model):
    assert run(engine.heads.state()).version == 0
    plain = run(sample(engine, PROMPTS[0], temperature=0, max_new_tokens=40))
    assert plain.token_ids == greedy(model, PROMPTS[0], 40)
    assert plain.spec.accepted == 0
    assert [(s.version, s.start, s.end) for s in plain.head_version_spans] == [(0, 0, len(plain.token_ids))]

    served = run(swap(engine, store, 1))
    assert served.version == 1
    assert served.digest == store.open(1).digest
    heads = read_heads(store.open(1).path / HEADS_FILE)
    assert served.checksum == weights_checksum(heads.state_dict(), torch.float32)
    drafted = run(sample(engine, PROMPTS[0], temperature=0, max_new_tokens=40))
    assert drafted.token_ids == plain.token_ids
    assert drafted.spec.verify_steps < plain.spec.verify_steps
    assert [s.version for s in drafted.head_version_spans] == [1]


def test_what_is_proposed_follows_the_heads_that_serve(serving, store, run):
    """Version 2 replaces the values of version 1 in place: no copy of them may go on proposing."""

    def steps(version):
        run(swap(serving, store, version))
        request = serving.generate(
            PROMPTS[0],
            SamplingParams(temperature=0, max_new_tokens=60),
            request_id=f"proposes-{next(_ids)}",
            speculation=SpeculationOverride(parts=("heads",)),
        )
        return run(request).spec.verify_steps

    good, bad, again = steps(1), steps(2), steps(1)
    assert good < 0.8 * bad
    assert again == pytest.approx(good, abs=2)  # the scorer has learned in between


def test_swaps_under_load_change_no_token(serving, store, run, model):
    async def go():
        tasks = [
            asyncio.create_task(sample(serving, PROMPTS[i % len(PROMPTS)], temperature=0, max_new_tokens=120))
            for i in range(32)
        ]
        versions = itertools.cycle((2, 1))
        while not all(task.done() for task in tasks):
            await swap(serving, store, next(versions))
        return await asyncio.gather(*tasks)

    completions = run(go(), timeout=200)
    expected = [greedy(model, prompt, 120) for prompt in PROMPTS]
    for i, completion in enumerate(completions):
        assert completion.token_ids == expected[i % len(PROMPTS)]
        spans = completion.head_version_spans
        assert spans[0].start == 0
        assert spans[-1].end == len(completion.token_ids)
        assert all(a.end == b.start and a.version != b.version for a, b in itertools.pairwise(spans))
    assert any(len(completion.head_version_spans) > 1 for completion in completions)
    assert run(serving.heads.state()).commit_seconds < 1


def test_policy_and_heads_do_not_touch_each_other(serving, store, run, tiny_dir, other_tiny_dir):
    heads, policy = run(serving.heads.checksums())
    run(serving.update_policy(other_tiny_dir, 1, pause_mode="retract"))
    heads_after, other_policy = run(serving.heads.checksums())
    assert heads_after == heads == run(serving.heads.state()).checksum
    assert other_policy != policy
    run(swap(serving, store, 2))
    assert run(serving.heads.checksums())[1] == other_policy
    run(serving.update_policy(tiny_dir, 0, pause_mode="retract"))
    assert run(serving.heads.checksums())[1] == policy


def test_disturbed_heads_are_seen_and_put_right(serving, store, run):
    before = run(serving.heads.state()).checksum
    run(serving.heads.disturb(1.0, seed=3))
    assert run(serving.heads.checksums())[0] != before
    run(swap(serving, store, 1))
    assert run(serving.heads.checksums())[0] == before


def damaged(kind, store, tmp_path):
    """A copy of version 2 as version 3, with one thing wrong."""
    target = tmp_path / "v00000003"
    shutil.copytree(store.open(2).path, target)
    manifest = json.loads((target / MANIFEST).read_text()) | {"version": 3}
    file = target / HEADS_FILE
    heads = read_heads(file)
    relist = True
    match kind:
        case "truncated":
            file.write_bytes(file.read_bytes()[:-100])
            relist = False
        case "wrong hash":
            data = bytearray(file.read_bytes())
            data[-5] ^= 1
            file.write_bytes(bytes(data))
            relist = False
        case "mis-shaped":
            other = FutureTokenHeads(HeadsSpec(heads.spec.heads, heads.spec.hidden, 32, heads.spec.vocab))
            save_heads(other, file)
            manifest["rank"] = 32
        case "not finite":
            with torch.no_grad():
                heads.up[0, 0, 0] = torch.nan
            save_heads(heads, file)
        case "wrong model":
            manifest["base_config_sha256"] = "0" * 64
        case "future format":
            manifest["heads_format"] = 99
        case "no manifest":
            (target / MANIFEST).unlink()
            return target, "d"
    if relist:
        data = file.read_bytes()
        manifest["files"][HEADS_FILE] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    raw = json.dumps(manifest).encode()
    (target / MANIFEST).write_bytes(raw)
    return target, hashlib.sha256(raw).hexdigest()


@pytest.mark.parametrize(
    "kind",
    ["truncated", "wrong hash", "mis-shaped", "not finite", "wrong model", "future format", "no manifest"],
)
def test_a_bad_artifact_is_refused_and_the_old_heads_serve(serving, store, run, tmp_path, model, kind):
    directory, digest = damaged(kind, store, tmp_path)
    before = run(serving.heads.state())
    refused = serving.heads.refused.total()
    with pytest.raises(HeadsRefused):
        run(serving.heads.prepare(directory, 3, digest))
    with pytest.raises(HeadsRefused, match="not prepared"):
        run(serving.heads.commit(3, digest))
    assert serving.heads.refused.total() == refused + 2
    after = run(serving.heads.state())
    assert (after.version, after.digest, after.checksum) == (before.version, before.digest, before.checksum)
    assert run(serving.heads.checksums())[0] == before.checksum
    got = run(sample(serving, PROMPTS[0], temperature=0, max_new_tokens=20))
    assert got.token_ids == greedy(model, PROMPTS[0], 20)


def test_a_hundred_swaps_leave_memory_flat(serving, store, run):
    def held():
        return sum(psutil.Process(p.pid).memory_info().rss for p in serving._processes)

    async def many(count):
        for i in range(count):
            await swap(serving, store, 1 + i % 2)

    run(many(20))
    before = held()
    run(many(80), timeout=120)
    assert held() - before < 8 * 2**20


def test_rows_and_statistics_reach_redis(serving, run, client, forwarder, model):
    prompts = PROMPTS[:3]

    async def go():
        return await asyncio.gather(*(sample(serving, p, temperature=0.8, max_new_tokens=60) for p in prompts))

    completions = run(go())
    rows = RowStream(client, KEYS.feedback_rows, 2**26)

    async def until(predicate):
        while not (found := predicate()):
            await asyncio.sleep(0.05)
        return found

    def frames():
        found = [RowFrame.from_bytes(data) for _, data in rows.read("0", 10_000)]
        mine = {f.prompt: f for f in found if f.temperature == pytest.approx(0.8)}
        return mine if {prompt_name(p) for p in prompts} <= mine.keys() else None

    mine = run(until(frames))
    for prompt, completion in zip(prompts, completions, strict=True):
        frame = mine[prompt_name(prompt)]
        assert frame.tokens.tolist() == list(completion.token_ids)[: len(frame.tokens)]
        assert len(frame.tokens) >= len(completion.token_ids) - 1
        with torch.no_grad():
            whole = torch.tensor([[*prompt, *completion.token_ids]])
            states = model(whole, output_hidden_states=True).hidden_states[-1][0]
        expected = states[len(prompt) - 1 : len(prompt) - 1 + len(frame.tokens)]
        assert torch.allclose(frame.hidden.float(), expected, atol=0.05, rtol=0.02)
        assert frame.policy == 0

    consumer = StreamConsumer(client, KEYS.feedback, FEEDBACK_LIMITS, "test")
    seen = {}

    def statistics():
        for delivery in consumer.read(100, 0.0):
            for t in feedback_pb2.FeedbackBatch.FromString(delivery.payload).trajectories:
                seen[t.prompt, round(t.temperature, 3), t.tokens] = t
            delivery.ack()
        wanted = [(prompt_name(p), 0.8, len(c.token_ids)) for p, c in zip(prompts, completions, strict=True)]
        return [seen[key] for key in wanted] if all(key in seen for key in wanted) else None

    for found, completion in zip(run(until(statistics)), completions, strict=True):
        assert sum(sum(r.accepted) for r in found.rounds) == sum(1 for r in completion.rounds if r.drafted)
        accepted = sum(n * count for r in found.rounds for n, count in enumerate(r.accepted))
        assert accepted == sum(r.accepted for r in completion.rounds)
        assert {r.heads_version for r in found.rounds} == {1}
    assert forwarder.counters["dropped_statistics"] == 0


def test_the_allowance_is_a_rate_with_a_burst():
    now = 0.0
    allowance = plugin_feedback.Allowance(10.0, lambda: now)
    taken = 0
    for step in range(1000):
        now = 0.1 * step
        if allowance.left():
            allowance.take(7)
            taken += 7
    assert 200 + 990 <= taken <= 200 + 1000 + 7


def test_a_full_socket_drops_frames_and_never_waits(tmp_path):
    sender = plugin_feedback.RowSender(f"ipc://{tmp_path}/nobody", 1.0, queue=2, rate=100.0)

    class Params:
        temperature, top_p, top_k, min_p = 1.0, 1.0, -1, 0.0

    class Request:
        sampling_params, origin_input_ids = Params, (1, 2)

    for _ in range(5):
        rows = plugin_feedback._Open(Request, "0:0", 0)
        sender._append(rows, torch.arange(3), torch.zeros(3, 8))
        sender._send(rows)
    assert sender.sent + sender.dropped == 5
    assert sender.dropped >= 3

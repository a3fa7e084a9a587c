"""Generate, SampleGroup and the transfers as a client of a worker sees them; the engine is a real one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import grpc
import pytest

from services.common import grpc_setup
from services.common.wire import (
    finish_reason_from_proto,
    prompt_group_to_proto,
    sampling_to_proto,
    trajectory_group_from_proto,
)
from services.config import SecurityConfig
from services.rollout.grading import Grade
from services.rollout.group_runner import GroupRunner
from services.rollout.grpc_server import RolloutServicer
from services.rollout.policy import Served, ServedPolicy
from services.rollout.policy_store import PolicyStore
from specroll.v1 import artifact_pb2, rollout_pb2, rollout_pb2_grpc
from specroll_core.contracts import PromptGroup, RewardStatus, SamplingParams
from tests.services.rollout.test_engine import greedy, load

pytestmark = pytest.mark.engine
PROMPT = [1, 87, 307, 84, 201]


class Grader:
    """Rewards the number of characters."""

    async def grade(self, completion, _answer):
        return Grade(float(len(completion)), RewardStatus.OK)


class Decoder:
    def decode(self, token_ids, *, skip_special_tokens):
        assert skip_special_tokens
        return "x" * len(token_ids)


@pytest.fixture
def stub(engine, run, tmp_path):
    """Of a worker without heads and prompt loop, on the loop that the engine lives on."""
    security = SecurityConfig()
    policy = ServedPolicy(engine, Served(0, "d"), pause_mode="retract")
    runner = GroupRunner(engine, Grader(), Decoder(), worker_id="w")

    async def begin():
        server = grpc_setup.aio_server("127.0.0.1", 0, security=security)
        nothing = SimpleNamespace()
        servicer = RolloutServicer(
            engine, runner, policy, PolicyStore(tmp_path / "cache"), nothing, nothing, worker_id="w"
        )
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(servicer, server.grpc)
        await server.start()
        return server, grpc_setup.aio_channel(f"127.0.0.1:{server.port}", security=security)

    async def end():
        await channel.close()
        await server.stop(0)

    server, channel = run(begin())
    yield rollout_pb2_grpc.RolloutServiceStub(channel)
    run(end())


def request(prompt=PROMPT, **sampling):
    return rollout_pb2.GenerateRequest(prompt_ids=prompt, sampling=sampling_to_proto(SamplingParams(**sampling)))


async def received(call):
    return [message async for message in call]


def refused(run, call):
    """(code, reason) of a call that fails."""
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        run(call)
    return failed.value.code(), failed.value.details()


def test_a_stream_brings_what_transformers_would_write(stub, run, tiny_dir):
    got = run(received(stub.Generate(request(temperature=0, max_new_tokens=20, ignore_eos=True))))
    tokens = tuple(t for message in got for t in message.token_ids)
    assert tokens == greedy(load(tiny_dir), PROMPT, 20)
    assert [len(message.token_ids) == len(message.logprobs) for message in got] == [True] * len(got)
    assert [bool(message.policy_version_spans) for message in got] == [False] * (len(got) - 1) + [True]
    (span,) = got[-1].policy_version_spans
    assert (span.version, span.start, span.end) == (0, 0, 20)
    assert finish_reason_from_proto(got[-1].finish_reason).value == "length"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sampling": {"top_p": 0.0}}, "top_p must be above 0"),
        ({"sampling": {"temperature": -1.0}}, "temperature must be 0 or more"),
        ({"prompt_ids": []}, "prompt"),
        ({"prompt_ids": [5] * 1100}, "exceeds the 0 tokens that the prompt of 1100 leaves free"),
        ({"prompt_ids": [10_000_000]}, "prompt_id"),
    ],
)
def test_what_cannot_be_sampled_is_refused_with_the_reason(stub, run, changes, reason):
    asked = request(max_new_tokens=4)
    for name, value in changes.get("sampling", {}).items():
        setattr(asked.sampling, name, value)
    if "prompt_ids" in changes:
        del asked.prompt_ids[:]
        asked.prompt_ids.extend(changes["prompt_ids"])
    code, said = refused(run, received(stub.Generate(asked)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert reason in said

    group = group_request(asked)
    code, said = refused(run, sampled(stub, group))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert reason in said
    assert len(run(received(stub.Generate(request(max_new_tokens=4)))))  # and it goes on


def group_request(asked):
    made = prompt_group_to_proto(
        PromptGroup(
            group_id="g",
            lease_id="l",
            prompt_index=3,
            epoch=0,
            policy_version=0,
            prompt_ids=tuple(PROMPT),
            answer="",
            group_size=2,
            sampling=SamplingParams(),
            deadline=0.0,
        )
    )
    del made.prompt_ids[:]
    made.prompt_ids.extend(asked.prompt_ids)
    made.sampling.CopyFrom(asked.sampling)
    return made


async def sampled(stub, group):
    return await stub.SampleGroup(group)


def test_a_group_comes_back_graded(stub, run, tiny_dir):
    asked = request(temperature=0, max_new_tokens=7, ignore_eos=True)
    group = trajectory_group_from_proto(run(sampled(stub, group_request(asked))))
    assert (group.group_id, group.prompt_index) == ("g", 3)
    expected = greedy(load(tiny_dir), PROMPT, 7)
    assert [(t.sample_index, t.token_ids, t.reward) for t in group.trajectories] == [(i, expected, 7.0) for i in (0, 1)]


def test_a_client_that_goes_away_leaves_nothing_running(stub, run, engine):
    async def go():
        call = stub.Generate(request(max_new_tokens=900, ignore_eos=True))
        await anext(aiter(call))
        assert (await engine.status()).running == 1
        call.cancel()
        for _ in range(500):
            if not (await engine.status()).running:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("the request still runs")

    run(go())


@pytest.mark.parametrize("kind", ["nothing", "no digest", "a chunk first"])
@pytest.mark.parametrize("method", ["UpdatePolicy", "SwapHeads"])
def test_a_transfer_that_does_not_begin_with_a_header_is_refused(stub, run, method, kind):
    update = method == "UpdatePolicy"
    message = rollout_pb2.UpdatePolicyRequest if update else rollout_pb2.SwapHeadsRequest
    empty = artifact_pb2.ArtifactRef(version=3)
    header = {"policy": empty} if update else {"heads": empty}
    kinds = {
        "nothing": [],
        "no digest": [message(header=header)],
        "a chunk first": [message(chunk=artifact_pb2.ArtifactChunk())],
    }

    async def go():
        return await getattr(stub, method)(iter(kinds[kind]))

    code, said = refused(run, go())
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "first message must be a header" in said

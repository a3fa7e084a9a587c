from __future__ import annotations

import itertools
import random
import struct
from dataclasses import replace

import pytest

from services.common import wire
from specroll.v1 import trajectory_pb2 as pb
from specroll_core.contracts import (
    ContractError,
    FinishReason,
    PromptGroup,
    RewardStatus,
    SamplingParams,
    SpecCounters,
    Trajectory,
    TrajectoryGroup,
    VersionSpan,
)


def float32(value):
    return struct.unpack("f", struct.pack("f", value))[0]


def sampling(rng):
    return SamplingParams(
        temperature=rng.choice([0.0, rng.uniform(0.1, 2)]),
        top_p=rng.choice([1.0, rng.uniform(0.1, 1)]),
        top_k=rng.choice([-1, rng.randint(1, 100)]),
        min_p=rng.random(),
        max_new_tokens=rng.randint(1, 10_000),
        repetition_penalty=rng.uniform(0.5, 2),
        frequency_penalty=rng.uniform(-2, 2),
        presence_penalty=rng.uniform(-2, 2),
        stop=tuple(rng.sample(["\n", "###", "ä\u200b", "\N{PILE OF POO}"], rng.randint(0, 4))),
        stop_token_ids=tuple(rng.randrange(2**31) for _ in range(rng.randint(0, 4))),
        ignore_eos=rng.random() < 0.5,
        seed=rng.choice([None, 0, rng.randrange(2**63)]),
        logit_bias=tuple((token, rng.uniform(-9, 9)) for token in sorted(rng.sample(range(2**31), rng.randint(0, 5)))),
    )


def spans(rng, length):
    cuts = [0, *sorted(rng.sample(range(1, length), rng.randint(0, min(3, length - 1)))), length]
    return tuple(VersionSpan(rng.randrange(2**40), a, b) for a, b in itertools.pairwise(cuts))


def trajectory(rng, index, group_id, prompt_ids):
    length = rng.randint(1, 50)
    by_depth = tuple(rng.randrange(9) for _ in range(rng.randrange(5)))
    by_source = rng.choice([(), (sum(by_depth), 0, 0, 0), (0, 0, 0, sum(by_depth))])
    return Trajectory(
        trajectory_id=f"{group_id}-{index}",
        group_id=group_id,
        sample_index=index,
        prompt_ids=prompt_ids,
        token_ids=tuple(rng.randrange(200_000) for _ in range(length)),
        logprobs=tuple(float32(-rng.expovariate(1)) for _ in range(length)),
        policy_version_spans=spans(rng, length),
        head_version_spans=spans(rng, length) if rng.random() < 0.5 else (),
        finish_reason=rng.choice(list(FinishReason)),
        reward=rng.uniform(-1, 1),
        reward_status=rng.choice(list(RewardStatus)),
        spec=SpecCounters(rng.randrange(100), sum(by_depth) + rng.randrange(9), sum(by_depth), by_depth, by_source),
        worker_id="worker",
        started_at=rng.uniform(0, 2e9),
        finished_at=rng.uniform(0, 2e9),
    )


def group(rng):
    group_id = f"g{rng.randrange(10**9)}"
    prompt_ids = tuple(rng.randrange(200_000) for _ in range(rng.randint(1, 30)))
    return TrajectoryGroup(
        group_id=group_id,
        lease_id=f"l{rng.randrange(10**9)}",
        prompt_index=rng.randrange(2**40),
        epoch=rng.randrange(100),
        policy_version=rng.randrange(2**40),
        trajectories=tuple(trajectory(rng, i, group_id, prompt_ids) for i in range(rng.randint(1, 6))),
        metrics={"seconds/grade": rng.random(), "x": -1.0},
    )


@pytest.mark.parametrize("seed", range(25))
def test_records_survive_the_round_trip(seed):
    rng = random.Random(seed)
    made = group(rng)
    assert wire.parse_trajectory_group(wire.serialize_trajectory_group(made)) == made
    prompt = PromptGroup("g", "l", rng.randrange(2**40), 3, 5, (1, 2), "42", 8, sampling(rng), rng.uniform(0, 2e9))
    message = pb.PromptGroup.FromString(wire.prompt_group_to_proto(prompt).SerializeToString())
    assert wire.prompt_group_from_proto(message) == prompt


def test_a_seed_of_zero_is_not_an_absent_seed():
    for seed in (None, 0):
        message = wire.sampling_to_proto(SamplingParams(seed=seed))
        assert wire.sampling_from_proto(pb.SamplingParams.FromString(message.SerializeToString())).seed == seed


def test_log_probabilities_are_float32_on_the_wire():
    made = group(random.Random(0))
    exact = replace(made.trajectories[0], logprobs=(-0.1,) * len(made.trajectories[0].token_ids))
    back = wire.parse_trajectory_group(wire.serialize_trajectory_group(replace(made, trajectories=(exact,))))
    assert set(back.trajectories[0].logprobs) == {float32(-0.1)} != {-0.1}


def test_every_name_has_its_number():
    for reason in FinishReason:
        assert wire.finish_reason_from_proto(wire.finish_reason_to_proto(reason)) is reason
    for unknown in (0, 99):
        with pytest.raises(ContractError, match="not a known"):
            wire.finish_reason_from_proto(unknown)
        with pytest.raises(ContractError, match="not a known"):
            wire.reward_status_from_proto(unknown)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda m: m.trajectories[0].logprobs.pop(), "logprobs for"),
        (lambda m: m.trajectories[0].logprobs.__setitem__(0, float("nan")), "not a number"),
        (lambda m: m.trajectories[0].ClearField("token_ids"), "token_ids must not be empty"),
        (lambda m: m.ClearField("prompt_ids"), "prompt_ids must not be empty"),
        (lambda m: m.ClearField("group_id"), "ids must not be empty"),
        (lambda m: m.ClearField("trajectories"), "no trajectories"),
        (lambda m: m.trajectories[0].ClearField("finish_reason"), "finish_reason 0"),
        (lambda m: m.trajectories[0].ClearField("reward_status"), "reward_status 0"),
        (lambda m: m.trajectories[0].policy_version_spans.pop(), "policy spans"),
        (lambda m: m.trajectories[0].token_ids.__setitem__(0, -1), "negative token id"),
        (lambda m: setattr(m.trajectories[0].spec, "accepted", 10**6), "accepted"),
    ],
)
def test_malformed_messages_are_refused(damage, message):
    made = wire.trajectory_group_to_proto(group(random.Random(1)))
    damage(made)
    with pytest.raises(ContractError, match=message):
        wire.parse_trajectory_group(made.SerializeToString())


@pytest.mark.parametrize("payload", [b"", b"\xff\xff\xff", b"not a message"])
def test_other_bytes_are_refused(payload):
    with pytest.raises(ContractError):
        wire.parse_trajectory_group(payload)


def test_what_the_wire_cannot_carry_is_refused():
    made = group(random.Random(2))
    other = replace(made.trajectories[0], worker_id="another")
    with pytest.raises(ContractError, match="several workers"):
        wire.trajectory_group_to_proto(replace(made, trajectories=(*made.trajectories, other)))
    with pytest.raises(ContractError, match="twice"):
        wire.sampling_to_proto(SamplingParams(logit_bias=((1, 1.0), (1, 2.0))))
    for bad in (SamplingParams(max_new_tokens=2**31), SamplingParams(stop_token_ids=(2**40,))):
        with pytest.raises(ContractError, match="sampling parameters"):
            wire.sampling_to_proto(bad)
    with pytest.raises(ContractError, match=f"group {made.group_id}"):
        wire.trajectory_group_to_proto(replace(made, epoch=2**40))


def test_unset_sampling_fields_are_refused_and_not_read_as_defaults():
    with pytest.raises(ContractError, match="top_p"):
        wire.sampling_from_proto(pb.SamplingParams(temperature=1.0))

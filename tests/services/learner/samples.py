"""Trajectory groups and trainers for the tests of this folder."""

from __future__ import annotations

import random

import torch

from services.config import Config
from specroll_core.contracts import (
    FinishReason,
    RewardStatus,
    SpecCounters,
    Trajectory,
    TrajectoryGroup,
    VersionSpan,
)
from tests.tiny import VOCAB_SIZE


def make_config(**sections) -> Config:
    """A float32 configuration on one thread; `learner` and others are merged over it."""
    learner = {"threads": 1, "device": "cpu", "learning_rate": 1e-3} | sections.pop("learner", {})
    values = {"model": {"dtype": "float32"}, "sampling": {"max_new_tokens": 8}, "learner": learner}
    return Config.model_validate(values | sections)


def make_trajectory(group_id, index, prompt, ids, *, reward=0.0, logprobs=None, version=0, **fields) -> Trajectory:
    values = {
        "trajectory_id": f"{group_id}-{index}",
        "group_id": group_id,
        "sample_index": index,
        "prompt_ids": tuple(prompt),
        "token_ids": tuple(ids),
        "logprobs": tuple(logprobs if logprobs is not None else (-3.0,) * len(ids)),
        "policy_version_spans": (VersionSpan(version, 0, len(ids)),),
        "head_version_spans": (),
        "finish_reason": FinishReason.STOP,
        "reward": reward,
        "reward_status": RewardStatus.OK,
        "spec": SpecCounters(),
        "worker_id": "worker",
        "started_at": 0.0,
        "finished_at": 1.0,
    }
    return Trajectory(**values | fields)


def make_group(group_id, trajectories) -> TrajectoryGroup:
    return TrajectoryGroup(group_id, f"lease-{group_id}", 0, 0, 0, tuple(trajectories))


def random_groups(seed=0, count=3, size=4, logprobs=None) -> list[TrajectoryGroup]:
    """Ragged groups; logprobs: a function of prompt and completion that gives the behaviour's, random by default."""
    rng = random.Random(seed)
    ids = lambda low, high: [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(low, high))]  # noqa: E731
    groups = []
    for g in range(count):
        prompt = ids(2, 9)
        rows = [ids(1, 8) for _ in range(size)]
        behaviour = [logprobs(prompt, row) if logprobs else [-4 - 3 * rng.random() for _ in row] for row in rows]
        groups.append(
            make_group(
                f"g{g}",
                [
                    make_trajectory(f"g{g}", i, prompt, row, reward=rng.choice([0.0, 0.5, 1.0]) + i, logprobs=lp)
                    for i, (row, lp) in enumerate(zip(rows, behaviour, strict=True))
                ],
            )
        )
    return groups


def capture_gradient(trainer, monkeypatch) -> dict[str, torch.Tensor]:
    """Makes the trainer's next updates record their gradient, by parameter name, before the optimiser uses it."""
    found: dict[str, torch.Tensor] = {}
    original = trainer.optimizer.step

    def step(rate, scale=1.0):
        found.update({n: p.grad.clone() * scale for n, p in trainer.policy.model.named_parameters()})
        return original(rate, scale)

    monkeypatch.setattr(trainer.optimizer, "step", step)
    return found


def simple_group(group_id: str, *, lease_id: str = "", version: int = 0, samples: int = 2, **fields) -> TrajectoryGroup:
    """Two-token completions, all sampled from one version, as the queue carries them."""
    rows = [make_trajectory(group_id, i, (5, 6), (7, 8), version=version, **fields) for i in range(samples)]
    return TrajectoryGroup(group_id, lease_id or f"lease-{group_id}", int(group_id), 0, version, tuple(rows))

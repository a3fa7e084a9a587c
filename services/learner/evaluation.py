"""Accuracy on held-out prompts, sampled and graded by the rollout workers outside the queue."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from services.common.wire import prompt_group_to_proto, trajectory_group_from_proto
from services.config import Config
from services.learner.prompts import Prompt
from services.learner.workers import Worker
from specroll_core.contracts import PromptGroup, RewardStatus, TrajectoryGroup

# One completion may wait for its turn behind all others of the evaluation.
_SAMPLE_DEADLINE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Mean reward over held-out prompts. low, high: 95 % Wilson interval, meant for rewards of 0 and 1."""

    step: int
    prompts: int
    reward: float
    low: float
    high: float
    mean_tokens: float
    failed: int


class Stopped(Exception):
    """The run is being stopped; the evaluation has no result."""


def evaluate(
    config: Config, prompts: Sequence[Prompt], workers: Sequence[Worker], *, step: int, stop: threading.Event
) -> Evaluation:
    """Samples one completion per prompt at `eval.temperature`, spread over the workers.

    Samples whose grading failed are left out and counted in `failed`, never taken as 0.
    Raises grpc.RpcError when a worker fails, Stopped when `stop` is set.
    """
    sampling = replace(config.sampling.to_params(), temperature=config.eval.temperature)
    lanes = max(1, config.rollout.engine.max_running_requests)

    def sample(position: int) -> TrajectoryGroup:
        if stop.is_set():
            raise Stopped
        prompt, worker = prompts[position], workers[position % len(workers)]
        group = PromptGroup(
            group_id=f"eval-{step}-{position}",
            lease_id=f"eval-{step}-{position}",
            prompt_index=prompt.index,
            epoch=0,
            policy_version=step,
            prompt_ids=prompt.ids,
            answer=prompt.answer,
            group_size=1,
            sampling=sampling,
        )
        return trajectory_group_from_proto(
            worker.stub.SampleGroup(prompt_group_to_proto(group), timeout=_SAMPLE_DEADLINE_SECONDS)
        )

    pool = ThreadPoolExecutor(lanes * len(workers), thread_name_prefix="eval")
    try:
        samples = [group.trajectories[0] for group in pool.map(sample, range(len(prompts)))]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    graded = [s for s in samples if s.reward_status is RewardStatus.OK]
    if not graded:
        raise RuntimeError(f"none of {len(samples)} evaluation samples could be graded; see the rollout's log")
    reward = sum(s.reward for s in graded) / len(graded)
    low, high = wilson_interval(reward, len(graded))
    tokens = sum(len(s.token_ids) for s in graded) / len(graded)
    return Evaluation(step, len(graded), reward, low, high, tokens, len(samples) - len(graded))


def wilson_interval(rate: float, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's score interval for a proportion `rate` of n draws; z: normal quantile (95 % by default)."""
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(max(0.0, rate * (1 - rate)) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)

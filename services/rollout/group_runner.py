"""One prompt group: sampled, graded, made into a record."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import replace
from typing import Protocol

from services.rollout.completion import Completion, SpeculationOverride
from services.rollout.grading import Grade
from specroll_core.contracts import FinishReason, PromptGroup, SamplingParams, Trajectory, TrajectoryGroup

log = logging.getLogger(__name__)


class Engine(Protocol):
    async def generate(
        self, prompt_ids, sampling: SamplingParams, *, request_id: str, speculation: SpeculationOverride | None = None
    ) -> Completion: ...
    async def abort(self, request_id: str) -> None: ...


class Grader(Protocol):
    async def grade(self, completion: str, answer: str) -> Grade: ...


class Decoder(Protocol):
    def decode(self, token_ids, *, skip_special_tokens: bool) -> str: ...


class GroupRunner:
    """Samples `group_size` completions of a prompt at once and grades each as soon as it is there."""

    def __init__(self, engine: Engine, grader: Grader, decoder: Decoder, *, worker_id: str) -> None:
        self._engine = engine
        self._grader = grader
        self._decoder = decoder
        self._worker_id = worker_id
        self.counters: Counter[str] = Counter()

    async def run(self, group: PromptGroup) -> TrajectoryGroup:
        """The group's trajectories.

        Raises what the engine raises: a failed sample fails its group, whose lease then goes back. When it is
        cancelled, every sample in flight is aborted in the engine.
        """
        async with asyncio.TaskGroup() as tasks:
            samples = [tasks.create_task(self._sample(group, i)) for i in range(group.group_size)]
        trajectories = tuple(task.result() for task in samples)
        self.counters["tokens"] += sum(len(t.token_ids) for t in trajectories)
        self.counters["groups"] += 1
        return TrajectoryGroup(
            group_id=group.group_id,
            lease_id=group.lease_id,
            prompt_index=group.prompt_index,
            epoch=group.epoch,
            policy_version=group.policy_version,
            trajectories=trajectories,
        )

    async def _sample(self, group: PromptGroup, index: int) -> Trajectory:
        trajectory_id = f"{group.lease_id}/{index}"
        sampling = group.sampling
        if sampling.seed is not None:
            # Siblings with one seed would all be the same completion.
            sampling = replace(sampling, seed=sampling.seed + index)
        started_at = time.time()
        try:
            completion = await self._engine.generate(
                group.prompt_ids,
                sampling,
                request_id=trajectory_id,
                speculation=SpeculationOverride(group=group.lease_id),
            )
        except asyncio.CancelledError:
            await self._engine.abort(trajectory_id)
            raise
        finished_at = time.time()
        if completion.finish_reason is FinishReason.ABORT:
            raise RuntimeError(f"sample {trajectory_id} was aborted by the engine")
        text = self._decoder.decode(list(completion.token_ids), skip_special_tokens=True)
        grade = await self._grader.grade(text, group.answer)
        self.counters[f"reward/{grade.status.value}"] += 1
        return Trajectory(
            trajectory_id=trajectory_id,
            group_id=group.group_id,
            sample_index=index,
            prompt_ids=group.prompt_ids,
            token_ids=tuple(completion.token_ids),
            logprobs=tuple(completion.logprobs),
            policy_version_spans=tuple(completion.policy_version_spans),
            head_version_spans=tuple(completion.head_version_spans),
            finish_reason=completion.finish_reason,
            reward=grade.reward,
            reward_status=grade.status,
            spec=completion.spec,
            worker_id=self._worker_id,
            started_at=started_at,
            finished_at=finished_at,
        )

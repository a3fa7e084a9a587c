"""From trajectory groups to what a step trains on: advantages, which samples count, and what to report of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

import torch
from torch import Tensor

from services.config import Config
from specroll_core.advantage import GroupAdvantages, group_advantages, overlong_penalty
from specroll_core.contracts import FinishReason, RewardStatus, Trajectory, TrajectoryGroup
from specroll_core.packing import PromptCompletions
from specroll_core.sources import Source


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """What is trained on. S samples over all groups, in order; every group here has a signal.

    groups: prompts and their completions. trajectories, advantages: one per sample. metrics: of the whole batch, with
    the groups and samples that are left out counted.
    """

    groups: tuple[PromptCompletions, ...]
    trajectories: tuple[Trajectory, ...]
    advantages: tuple[float, ...]
    metrics: dict[str, float]

    def behaviour(self, samples: Sequence[int], mask: Tensor) -> Tensor:
        """float32 [len(samples), T] behaviour log-probabilities where `mask` is set, 0 elsewhere."""
        values = [lp for s in samples for lp in self.trajectories[s].logprobs]
        return torch.zeros(mask.shape).masked_scatter_(mask, torch.tensor(values, dtype=torch.float32))

    def on_version(self, samples: Sequence[int], mask: Tensor, version: int) -> Tensor:
        """bool [len(samples), T]: tokens that policy `version` sampled."""
        flags = torch.zeros(mask.shape, dtype=torch.bool)
        for row, sample in enumerate(samples):
            for span in self.trajectories[sample].policy_version_spans:
                flags[row, span.start : span.end] = span.version == version
        return flags


def build(groups: Sequence[TrajectoryGroup], config: Config, version: int) -> TrainingBatch:
    """Advantages per group, and the groups without any signal left out.

    A sample that was aborted or has no verdict is excluded from the mean and from the loss. A group whose rewards are
    all equal has advantage 0 everywhere: it leaves the step entirely, its forward pass, its KL term and its place in
    the denominator (the filter of DAPO's dynamic sampling). version: the policy about to be trained.
    """
    loss = config.learner.loss
    normalise = "none" if loss.kind == "dr_grpo" else loss.normalise
    kept: list[PromptCompletions] = []
    trajectories: list[Trajectory] = []
    advantages: list[float] = []
    results: list[GroupAdvantages] = []
    for group in groups:
        included = [_counts(t) for t in group.trajectories]
        result = group_advantages([_shaped_reward(t, config) for t in group.trajectories], included, normalise)
        results.append(result)
        if result.zero_variance:
            continue
        chosen = [(t, a) for t, a, keep in zip(group.trajectories, result.values, included, strict=True) if keep]
        kept.append(PromptCompletions(group.trajectories[0].prompt_ids, tuple(t.token_ids for t, _ in chosen)))
        trajectories.extend(t for t, _ in chosen)
        advantages.extend(a for _, a in chosen)
    metrics = _metrics([t for g in groups for t in g.trajectories], results, version)
    return TrainingBatch(tuple(kept), tuple(trajectories), tuple(advantages), metrics)


def _counts(trajectory: Trajectory) -> bool:
    return trajectory.reward_status is RewardStatus.OK and trajectory.finish_reason is not FinishReason.ABORT


def _shaped_reward(trajectory: Trajectory, config: Config) -> float:
    loss = config.learner.loss
    if loss.kind != "dapo":
        return trajectory.reward
    length = len(trajectory.token_ids)
    return trajectory.reward + overlong_penalty(length, config.sampling.max_new_tokens, loss.overlong_buffer)


def _metrics(trajectories: list[Trajectory], results: list[GroupAdvantages], version: int) -> dict[str, float]:
    """Rewards are the verifier's, before any shaping. A figure without data is left out, never reported as 0."""
    counted = [t for t in trajectories if _counts(t)]
    staleness = [version - t.oldest_policy_version for t in trajectories]
    metrics = {
        "batch/groups": float(len(results)),
        "batch/samples": float(len(trajectories)),
        "batch/tokens": float(sum(len(t.token_ids) for t in trajectories)),
        "zero_std/frac": sum(r.zero_variance for r in results) / len(results),
        "excluded/reward": float(sum(t.reward_status is not RewardStatus.OK for t in trajectories)),
        "excluded/aborted": float(sum(t.finish_reason is FinishReason.ABORT for t in trajectories)),
        "off_policy/staleness/mean": fmean(staleness),
        "off_policy/staleness/max": float(max(staleness)),
        "completion/length/mean": fmean(len(t.token_ids) for t in trajectories),
        "completion/length/max": float(max(len(t.token_ids) for t in trajectories)),
        "completion/truncated/frac": fmean(t.finish_reason is FinishReason.LENGTH for t in trajectories),
    }
    steps = sum(t.spec.verify_steps for t in trajectories)
    if steps:
        metrics["speculation/tokens_per_step"] = 1 + sum(t.spec.accepted for t in trajectories) / steps
        told = [t.spec for t in trajectories if t.spec.accepted_by_source or not t.spec.accepted]
        if steps := sum(spec.verify_steps for spec in told):
            for source in Source:
                accepted = sum(spec.accepted_by_source[source] for spec in told if spec.accepted_by_source)
                metrics[f"speculation/accepted/{source.name.lower()}"] = accepted / steps
    if counted:
        rewards = [t.reward for t in counted]
        metrics |= {"reward/mean": fmean(rewards), "reward/std": pstdev(rewards)}
        metrics["reward/group_std/mean"] = fmean(r.std for r in results if any(r.included))
        values = [v for r in results for v, keep in zip(r.values, r.included, strict=True) if keep]
        metrics |= {
            "advantage/abs/mean": fmean(map(abs, values)),
            "advantage/max": max(values),
            "advantage/min": min(values),
        }
    return metrics

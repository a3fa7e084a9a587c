"""The rollouts that heads are trained on and measured with: one set per temperature, of the same prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from services.common.holdout import is_held_out
from services.common.row_frames import prompt_name
from services.config import Config
from services.heads.collect import join, sample_completions
from services.heads.parallel import WORTH_A_PROCESS, sample_in_processes
from services.heads.target import TargetModel
from services.machine import cores
from specroll_core.head_training import HeadRows

# Temperatures that heads are made and measured for beside the configuration's own: the two that are in common use.
TEMPERATURES = (1.0, 0.6)


def temperatures(config: Config) -> tuple[float, ...]:
    """Those of the rollouts, falling."""
    return tuple(sorted({config.sampling.temperature, *TEMPERATURES}, reverse=True))


def to_learn_from(prompts: Sequence[Sequence[int]], share: float) -> list[Sequence[int]]:
    """Without those that a run's watcher judges heads on, `watcher.holdout` of them; all where no others are left."""
    return [prompt for prompt in prompts if not is_held_out(prompt_name(prompt), share)] or list(prompts)


def sample_rollouts(
    config: Config,
    target: TargetModel,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    threads: int = 0,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> dict[float, HeadRows]:
    """Completions of `prompts`, each at every temperature, until they hold `tokens` tokens together.

    `HeadRows.prompt` is the position in `prompts`, in all of them. threads: on a CPU one process each samples where
    that is worth starting it; 0 for all cores.
    """
    laws = [replace(config.sampling.to_params(), temperature=t) for t in temperatures(config)]
    processes = min(threads or len(cores()), tokens // WORTH_A_PROCESS)
    if target.device.type == "cpu" and processes > 1:
        made = sample_in_processes(
            target.directory,
            config.model.dtype,
            prompts,
            laws,
            tokens=tokens,
            processes=processes,
            seed=seed,
            progress=progress,
        )
    else:
        made = sample_completions(target, prompts, laws, tokens=tokens, seed=seed, progress=progress)
    return {
        law.temperature: join([one for one in made if one.law == index], target.device)
        for index, law in enumerate(laws)
    }


def hold_out(
    rollouts: Mapping[float, HeadRows], share: float, seed: int
) -> tuple[dict[float, HeadRows], dict[float, HeadRows]]:
    """Rollouts to train on and to measure with: whole prompts, the same ones at every temperature."""
    together = chain(rollouts)
    held = together.split_by_prompt(share, seed)[1].prompt.unique()
    is_held = {t: torch.isin(rows.prompt, held) for t, rows in rollouts.items()}
    return (
        {t: rows.select(~is_held[t]) for t, rows in rollouts.items()},
        {t: rows.select(is_held[t]) for t, rows in rollouts.items()},
    )


def chain(rollouts: Mapping[float, HeadRows]) -> HeadRows:
    """All rows, one temperature after the other; sequences are numbered on."""
    parts = list(rollouts.values())
    first = 0
    sequences = []
    for rows in parts:
        sequences.append(rows.sequence + first)
        first += int(rows.sequence.max()) + 1 if len(rows) else 0
    return HeadRows(
        torch.cat([rows.tokens for rows in parts]),
        torch.cat([rows.hidden for rows in parts]),
        torch.cat([rows.target_ids for rows in parts]),
        torch.cat([rows.target_logprobs for rows in parts]),
        torch.cat(sequences),
        torch.cat([rows.prompt for rows in parts]),
    )


def first_rows(rows: HeadRows, tokens: int) -> HeadRows:
    """The first trajectories, whole, that hold `tokens` tokens; all of them where they hold fewer."""
    if len(rows) <= tokens:
        return rows
    return rows.select(rows.sequence <= rows.sequence[tokens - 1])

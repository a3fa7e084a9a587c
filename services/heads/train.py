"""Trains heads on collected rows, against the tokens that matter there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specroll_core.head_training import HeadRows, HeadTrainConfig, HeadTrainReport, evaluate_heads, train_heads
from specroll_core.heads import FutureTokenHeads, HeadsSpec

# Rows of the LM head that training multiplies with, most of its cost. On rollouts of word problems they carry 99.7 % of
# the mass that is trained on and 98 % of that of other prompts, with an eighth of a vocabulary of 49,152.
FREQUENT = 6144
_EVAL_ROWS = 32


@dataclass(frozen=True, slots=True)
class TrainedHeads:
    """kept: tokens that training ranked. coverage: the share of the target's stored mass that they carry. The report's
    held-out losses are over the whole vocabulary."""

    heads: FutureTokenHeads
    report: HeadTrainReport
    kept: int
    coverage: float


def train(
    rows: HeadRows,
    held_out: HeadRows,
    lm_head: Tensor,
    embedding: Tensor,
    *,
    heads: int = 3,
    rank: int = 256,
    config: HeadTrainConfig | None = None,
    frequent: int = FREQUENT,
    progress: Callable[[int, int, float], None] | None = None,
) -> TrainedHeads:
    """Trains fresh heads on `rows` and measures their loss on `held_out`, which shares no prompt with them.

    The heads carry the vocabulary of `rows`. lm_head, embedding: [V, H] of the target, frozen. progress(step, steps,
    loss) after each step.
    """
    config = replace(config or HeadTrainConfig(), holdout=0.0)
    spec = HeadsSpec(heads, lm_head.shape[1], rank, lm_head.shape[0])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        made = FutureTokenHeads(spec).to(lm_head.device)
    ids = frequent_tokens(rows, lm_head.shape[0], frequent)
    kept, coverage = restrict(rows, ids, lm_head.shape[0])
    # Over the whole vocabulary logits are large, and more of them at a time only cost memory.
    before = evaluate_heads(made, held_out, lm_head, embedding, _EVAL_ROWS)
    report = train_heads(made, kept, lm_head[ids.to(lm_head.device)], embedding, config, progress)
    after = evaluate_heads(made, held_out, lm_head, embedding, _EVAL_ROWS)
    made.vocabulary = by_frequency(rows, lm_head.shape[0]).to(lm_head.device)
    report = replace(report, heldout_rows=len(held_out), heldout_before=before, heldout_after=after)
    return TrainedHeads(made, report, int(ids.numel()), coverage)


def by_frequency(rows: HeadRows, vocab: int) -> Tensor:
    """The tokens that the target's laws give any stored mass, [M] int64 on the CPU, by falling expected frequency: a
    less noisy order than that of the tokens drawn."""
    mass = _mass(rows, vocab)
    order = mass.sort(descending=True, stable=True).indices
    return order[: int((mass > 0).sum())].clone()


def frequent_tokens(rows: HeadRows, vocab: int, size: int) -> Tensor:
    """The tokens that training ranks, [M] int64 ascending: the `size` with the largest mass under the target's laws,
    and the most likely token of each law, so that every law has something left."""
    best = rows.target_ids.gather(1, rows.target_logprobs.argmax(1, keepdim=True)).flatten().cpu()
    largest = _mass(rows, vocab).topk(min(size, vocab)).indices
    return torch.cat([largest, best]).unique()


def _mass(rows: HeadRows, vocab: int) -> Tensor:
    mass = torch.zeros(vocab, dtype=torch.float64)
    return mass.index_add_(0, rows.target_ids.flatten().cpu(), rows.target_logprobs.flatten().double().exp().cpu())


def restrict(rows: HeadRows, ids: Tensor, vocab: int) -> tuple[HeadRows, float]:
    """The rows with columns of `lm_head[ids]` as targets, and the share of the stored mass that is kept.

    A target outside gets log-probability -inf, which training takes for padding; the rest is renormalised there.
    """
    column = torch.full((vocab,), -1)
    column[ids] = torch.arange(ids.numel())
    columns = column.to(rows.target_ids.device)[rows.target_ids]
    logprobs = torch.where(columns >= 0, rows.target_logprobs, -torch.inf)
    share = float(logprobs.double().exp().sum() / rows.target_logprobs.double().exp().sum())
    return replace(rows, target_ids=columns.clamp_min(0), target_logprobs=logprobs), share

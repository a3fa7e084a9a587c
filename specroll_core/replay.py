"""Predicting tokens per step by replaying recorded trajectories, without running the model again.

Where a round starts at token i, the walk follows the tokens that the target really emitted next. On the realised
path the rules of `verify.py` are known exactly: a deterministic child is descended into where it carries the next
token x, and a sampled child, given that x is what comes out, was accepted with probability `min(1, q_S(x) / p(x))`. So
the law of the accepted length at every start is known, and dynamic programming from the trajectory's end gives the
expected number of rounds with no simulation noise. Its average over trajectories drawn from p is the true number.

The trajectories must come from the same law (model, temperature, filters) that `params` describes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specroll_core.growth import TreeOptions
from specroll_core.head_training import HeadRows
from specroll_core.heads import FutureTokenHeads, ProposalVocabulary
from specroll_core.law import LawParams, token_logprobs
from specroll_core.proposal import propose_from_logits
from specroll_core.scorer import CountTableScorer
from specroll_core.tree import DraftTree, build_tree
from specroll_core.verify import slot_law


@dataclass(frozen=True, slots=True)
class AcceptanceReport:
    """tokens / steps is the acceptance length, bonus included. by_prompt: prompt -> (tokens, expected steps).

    accepted_at[d]: mean probability, over all starts, of accepting at least d + 1 tokens.
    """

    tokens: int
    steps: float
    by_prompt: Mapping[int, tuple[int, float]]
    accepted_at: tuple[float, ...]

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps if self.steps else float("nan")


@torch.no_grad()
def predicted_acceptance(
    heads: FutureTokenHeads,
    rows: HeadRows,
    lm_head: Tensor,
    embedding: Tensor,
    *,
    nodes: int,
    temperature: float = 1.0,
    top_k: int = -1,
    top_p: float = 1.0,
    min_p: float = 0.0,
    options: TreeOptions | None = None,
    scorer: CountTableScorer | None = None,
    batch_rows: int = 64,
) -> AcceptanceReport:
    """Expected tokens per step with `nodes` nodes per round (root included) on the trajectories of `rows`.

    scorer: starts from it and updates it as serving would, each start scored before it is learned from.
    """
    scorer = scorer or CountTableScorer()
    options = options or TreeOptions()
    vocabulary = ProposalVocabulary(lm_head)
    K = heads.spec.heads
    reach = torch.zeros(len(rows), K + 1, dtype=torch.float64)
    log_p = torch.zeros(len(rows))
    starts = torch.arange(len(rows), device=rows.tokens.device)
    for index in starts.split(batch_rows):
        params = LawParams.build(
            [temperature] * len(index), [top_k] * len(index), [top_p] * len(index), [min_p] * len(index), index.device
        )
        logits = torch.nn.functional.linear(rows.hidden[index].to(lm_head.dtype), lm_head)
        log_p[index.cpu()] = token_logprobs(logits, rows.tokens[index], params).cpu()
    for index in starts.split(batch_rows):
        n = len(index)
        params = LawParams.build([temperature] * n, [top_k] * n, [top_p] * n, [min_p] * n, index.device)
        dtype = lm_head.dtype
        z = heads(rows.hidden[index].to(dtype), embedding[rows.tokens[index]].to(dtype))
        proposal = propose_from_logits(vocabulary.logits(z), params, vocabulary)
        uniforms = torch.full((n, nodes), 0.5, dtype=torch.float64, device=index.device)
        greedy = [temperature == 0] * n
        tree = build_tree(rows.tokens[index].tolist(), proposal, scorer, [nodes] * n, uniforms, greedy, options)
        assert proposal.laws is not None
        reach[index.cpu()] = _walk(tree, rows, index, log_p.to(index.device), proposal.laws.probs, scorer, K).cpu()
    return _expected_steps(rows, reach)


def _walk(
    tree: DraftTree, rows: HeadRows, index: Tensor, log_p: Tensor, probs: Tensor, scorer: CountTableScorer, depth: int
) -> Tensor:
    """[n, depth + 1] float64: probability that a round from row `index` accepts at least d tokens."""
    n = len(index)
    out = torch.zeros(n, depth + 1, dtype=torch.float64, device=index.device)
    out[:, 0] = 1.0
    node = torch.zeros(n, dtype=torch.int64, device=index.device)
    weight = torch.ones(n, dtype=torch.float64, device=index.device)
    for d in range(1, depth + 1):
        at = index + d
        inside = at < len(rows)
        at = at.clamp_max(len(rows) - 1)
        inside &= rows.sequence[at] == rows.sequence[index]
        x = rows.tokens[at]
        children = (tree.parents == node[:, None]) & tree.valid & (inside & (weight > 0))[:, None]
        slots = children & tree.sampled
        hits = children & ~slots & (tree.tokens == x[:, None])
        in_s, has_slot = hits.any(-1), slots.any(-1)
        q_x = slot_law(tree, children, slots, probs[:, d - 1], x)
        accept = torch.where(has_slot & ~in_s, (q_x / log_p[at].double().exp()).clamp(0, 1), 0.0)
        deterministic = children & ~slots
        scorer.update(tree.cells[deterministic], hits[deterministic].double())
        scorer.update_tails(tree.tail_cells[slots], accept[has_slot], (~in_s)[has_slot].double())
        weight = torch.where(in_s, weight, weight * accept)
        node = torch.where(in_s, hits.long().argmax(-1), slots.long().argmax(-1))
        node = torch.where(in_s | has_slot, node, -9)
        out[:, d] = weight
    return out


def _expected_steps(rows: HeadRows, reach: Tensor) -> AcceptanceReport:
    sequence, prompt = rows.sequence.tolist(), rows.prompt.tolist()
    exactly = (reach - torch.nn.functional.pad(reach[:, 1:], (0, 1))).tolist()
    steps = [0.0] * len(sequence)
    by_prompt: dict[int, tuple[int, float]] = {}
    last = len(sequence) - 1
    for i in range(len(sequence) - 1, -1, -1):
        if i == len(sequence) - 1 or sequence[i + 1] != sequence[i]:
            last = i
        else:
            steps[i] = 1.0 + sum(p * steps[min(i + a + 1, last)] for a, p in enumerate(exactly[i]) if p)
        if i == 0 or sequence[i - 1] != sequence[i]:
            tokens, total = by_prompt.get(prompt[i], (0, 0.0))
            by_prompt[prompt[i]] = tokens + last - i, total + steps[i]
    return AcceptanceReport(
        sum(t for t, _ in by_prompt.values()),
        sum(s for _, s in by_prompt.values()),
        by_prompt,
        tuple(reach.mean(0)[1:].tolist()),
    )


def gain_interval(
    new: AcceptanceReport, old: AcceptanceReport, *, draws: int = 2000, level: float = 0.95, seed: int = 0
) -> tuple[float, float, float]:
    """Difference of tokens per step, new minus old, and a bootstrap interval over prompts: (difference, low, high)."""
    prompts = sorted(new.by_prompt)
    if prompts != sorted(old.by_prompt):
        raise ValueError("The two reports must be on the same prompts.")
    table = torch.tensor([[*new.by_prompt[p], *old.by_prompt[p]] for p in prompts], dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(prompts), (draws, len(prompts)), generator=generator)
    sums = table[chosen].sum(1)
    differences = sums[:, 0] / sums[:, 1] - sums[:, 2] / sums[:, 3]
    low, high = differences.quantile(torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)).tolist()
    return new.tokens_per_step - old.tokens_per_step, low, high

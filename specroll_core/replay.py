"""Predicting tokens per step by replaying recorded trajectories, without running the model again.

Where a round starts at token i, the walk follows the tokens that the target really emitted next. On the realised
path the rules of `verify.py` are known exactly: a deterministic child is descended into where it carries the next
token x, and a sampled child, given that x is what comes out, was accepted with probability `min(1, q_S(x) / p(x))`. So
the law of the accepted length at every start is known, and dynamic programming from the trajectory's end gives the
expected number of rounds with no simulation noise. Its average over trajectories drawn from p is the true number.

The trajectories must come from the same law (model, temperature, filters) that `params` describes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specroll_core.growth import TreeOptions
from specroll_core.head_training import HeadRows
from specroll_core.heads import FutureTokenHeads, ProposalVocabulary
from specroll_core.proposal import PathProposer
from specroll_core.reflex import Reflex
from specroll_core.replay_correction import CorrectedGuesses
from specroll_core.replay_guesses import HeadGuesses, RealisedDraws, head_guesses
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
    vocabulary: ProposalVocabulary | None = None,
    batch_rows: int = 64,
) -> AcceptanceReport:
    """Expected tokens per step of heads alone with `nodes` nodes per round, root included, on recorded trajectories.

    scorer: starts from it and updates it as serving would, each start scored before it is learned from. vocabulary:
    that proposals are ranked over, all tokens where None.
    """
    guesses = head_guesses(
        heads,
        rows,
        lm_head,
        embedding,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        vocabulary=vocabulary,
        batch_rows=batch_rows,
    )
    return replay(guesses, rows, nodes=nodes, options=options, scorer=scorer, batch_rows=batch_rows)


@torch.no_grad()
def replay(
    guesses: HeadGuesses | CorrectedGuesses,
    rows: HeadRows,
    *,
    nodes: int,
    options: TreeOptions | None = None,
    scorer: CountTableScorer | None = None,
    reflex: Reflex | None = None,
    prompts: Mapping[int, Sequence[int]] | None = None,
    batch_rows: int = 64,
) -> AcceptanceReport:
    """Expected tokens per step of heads, with Reflex where it is given.

    reflex: opened, fed and closed as serving would; trajectories of one prompt are generated side by side, one token
    each at a time, with the prompt as their group's key. prompts: token ids by `rows.prompt`, needed with reflex.
    """
    scorer = scorer or CountTableScorer()
    options = options or TreeOptions()
    assert reflex is None or prompts is not None
    depth = options.max_depth if reflex is not None else min(options.max_depth, guesses.depth)
    reach = torch.zeros(len(rows), depth + 1, dtype=torch.float64)
    in_turn = reflex is not None or isinstance(guesses, CorrectedGuesses)
    batches = _by_prompt(rows) if in_turn else torch.arange(len(rows)).split(batch_rows)
    ahead, inside = _ahead(rows, depth)
    for index in batches:
        n = len(index)
        paths: Sequence[PathProposer | None] = ()
        if reflex is not None and prompts is not None:
            paths = _advance(reflex, rows, index, prompts)
        proposal, draws = guesses.proposal(index, ahead[index], paths)
        uniforms = torch.full((n, nodes), 0.5, dtype=torch.float64, device=ahead.device)
        greedy = [guesses.temperature == 0] * n
        tree = build_tree(rows.tokens[index].tolist(), proposal, scorer, [nodes] * n, uniforms, greedy, options)
        reach[index] = _walk(tree, index, ahead[index], inside[index], guesses.log_p, draws, scorer).cpu()
        if reflex is not None:
            for i in index[~inside[index, 0].cpu()].tolist():
                reflex.close(int(rows.sequence[i]))
    return _expected_steps(rows, reach)


def _by_prompt(rows: HeadRows) -> Iterator[Tensor]:
    """Positions of the trajectories of one prompt after another: their first tokens, their second ones, ..."""
    firsts = torch.ones(len(rows), dtype=torch.bool)
    firsts[1:] = (rows.sequence[1:] != rows.sequence[:-1]).cpu()
    starts = firsts.nonzero().squeeze(1)
    lengths = torch.diff(torch.cat([starts, torch.tensor([len(rows)])]))
    prompts = rows.prompt.cpu()[starts]
    for prompt in prompts.unique():
        mine = prompts == prompt
        for place in range(int(lengths[mine].max())):
            yield starts[mine][lengths[mine] > place] + place


def _advance(
    reflex: Reflex, rows: HeadRows, index: Tensor, prompts: Mapping[int, Sequence[int]]
) -> list[PathProposer | None]:
    """Tells Reflex the pending tokens at `index`, one more of each trajectory, and returns what proposes there."""
    slots = rows.sequence[index].tolist()
    begin = (index == 0) | (rows.sequence[index - 1] != rows.sequence[index]).cpu()
    where = zip(slots, rows.prompt[index].tolist(), rows.tokens[index].tolist(), begin.tolist(), strict=True)
    for slot, prompt, token, first in where:
        if first:
            reflex.open(slot, prompts[prompt], group_key=prompt)
        reflex.observe(slot, [token])
    return [reflex.proposer(slot) for slot in slots]


def _ahead(rows: HeadRows, depth: int) -> tuple[Tensor, Tensor]:
    """[P, depth] the tokens that follow each position, and whether they belong to its trajectory."""
    device = rows.tokens.device
    at = torch.arange(len(rows), device=device)[:, None] + torch.arange(1, depth + 1, device=device)
    inside = at < len(rows)
    at = at.clamp_max(len(rows) - 1)
    inside &= rows.sequence[at] == rows.sequence[:, None]
    return rows.tokens[at], inside


def _walk(
    tree: DraftTree,
    index: Tensor,
    ahead: Tensor,
    inside: Tensor,
    log_p: Tensor,
    draws: RealisedDraws,
    scorer: CountTableScorer,
) -> Tensor:
    """[n, D + 1] float64: probability that a round from row `index` accepts at least d tokens."""
    n, depth = ahead.shape
    device = ahead.device
    out = torch.zeros(n, depth + 1, dtype=torch.float64, device=device)
    out[:, 0] = 1.0
    node = torch.zeros(n, dtype=torch.int64, device=device)
    weight = torch.ones(n, dtype=torch.float64, device=device)
    index, request = index.to(device), torch.arange(n, device=device)
    for d in range(1, min(depth, tree.depth) + 1):
        x = ahead[:, d - 1]
        children = (tree.parents == node[:, None]) & tree.valid & (inside[:, d - 1] & (weight > 0))[:, None]
        slots = children & tree.sampled
        deterministic = children & ~slots
        hits = deterministic & (tree.tokens == x[:, None])
        in_s, has_slot = hits.any(-1), slots.any(-1)
        accept = torch.zeros(n, dtype=torch.float64, device=device)
        if d <= draws.depth and bool(has_slot.any()):
            q = draws.q(request, torch.full_like(request, d), x[:, None]).squeeze(1)
            p = log_p[(index + d).clamp_max(len(log_p) - 1)].double().exp()
            accept = (slot_law(tree, children, slots, q, x) / p).clamp(0, 1)
            accept = torch.where(has_slot & ~in_s, accept, 0.0)
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

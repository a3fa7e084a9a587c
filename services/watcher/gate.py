"""May new heads replace those that serve? Only where they are better on text that neither has learned from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from specroll_core.growth import TreeOptions
from specroll_core.head_training import HeadRows
from specroll_core.heads import FutureTokenHeads, ProposalVocabulary
from specroll_core.replay import AcceptanceReport, gain_interval, predicted_acceptance

# Fewer held-out prompts than this give an interval that means nothing.
MIN_PROMPTS = 4


@dataclass(frozen=True, slots=True)
class GateReport:
    """Predicted tokens per step on held-out prompts, of new heads and of those that serve (1 where none do).

    low, high: 95 % bootstrap interval of the difference, over prompts. prompts: (tokens, steps of the new, steps of
    the old) of each, from which all else follows. nodes: in a tree, root included.
    """

    new: float
    old: float
    difference: float
    low: float
    high: float
    nodes: int
    temperature: float
    prompts: tuple[tuple[int, float, float], ...]

    @property
    def passed(self) -> bool:
        return len(self.prompts) >= MIN_PROMPTS and self.low > 0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


def decide(prompts: Sequence[Sequence[float]], *, nodes: int, temperature: float) -> GateReport:
    """The report from what was measured on each prompt: (tokens, steps of the new heads, steps of the old ones)."""
    table = tuple((int(tokens), float(new), float(old)) for tokens, new, old in prompts)
    new = _report(dict(enumerate((t, n) for t, n, _ in table)))
    old = _report(dict(enumerate((t, o) for t, _, o in table)))
    difference, low, high = gain_interval(new, old) if table else (0.0, 0.0, 0.0)
    return GateReport(new.tokens_per_step, old.tokens_per_step, difference, low, high, nodes, temperature, table)


def shadow_evaluation(
    new: FutureTokenHeads,
    old: FutureTokenHeads | None,
    rows: HeadRows,
    lm_head: Tensor,
    embedding: Tensor,
    *,
    nodes: int,
    law: Mapping[str, Any],
    sampled_children: bool,
    proposed: Tensor | None = None,
) -> GateReport:
    """Replays held-out trajectories with both. law: temperature, top_k, top_p and min_p that they were sampled with.
    proposed: [M] int64 ascending, the tokens that both may propose, None for all."""
    vocabulary = ProposalVocabulary(lm_head, proposed)

    def measure(heads: FutureTokenHeads) -> AcceptanceReport:
        options = TreeOptions(sampled_children=sampled_children)
        return predicted_acceptance(
            heads, rows, lm_head, embedding, nodes=nodes, options=options, vocabulary=vocabulary, **law
        )

    theirs = measure(new).by_prompt
    # Without heads every token but a trajectory's first, which the prefill gives, takes a step.
    ours = measure(old).by_prompt if old is not None else {p: (t, float(t)) for p, (t, _) in theirs.items()}
    table = [(theirs[p][0], theirs[p][1], ours[p][1]) for p in sorted(theirs) if theirs[p][0]]
    return decide(table, nodes=nodes, temperature=float(law["temperature"]))


def _report(by_prompt: dict[int, tuple[int, float]]) -> AcceptanceReport:
    return AcceptanceReport(sum(t for t, _ in by_prompt.values()), sum(s for _, s in by_prompt.values()), by_prompt, ())

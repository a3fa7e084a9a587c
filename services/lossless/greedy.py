"""At temperature 0 the tokens themselves must be those of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.heads.target import TargetModel
from services.lossless.exact import Text, hidden_states, logits_of
from services.rollout.completion import Completion

# Two logits that differ by less are equal up to rounding: a step over one token and a step over a tree add the same
# numbers in another order.
TIE = 1e-4


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a completion first differs from plain decoding. gap: between the two best exact logits there.

    tie: the two tokens are those two, and their gap is below `TIE`. What follows a tie is not compared.
    """

    prompt: int
    position: int
    plain: int
    speculative: int
    gap: float
    tie: bool


@torch.inference_mode()
def divergences(
    target: TargetModel,
    prompts: Sequence[tuple[int, ...]],
    plain: Sequence[Completion],
    speculative: Sequence[Completion],
) -> list[Divergence]:
    """First differences, prompt by prompt; a completion that goes on where the other ended differs too, by token -1."""
    texts, pairs = [], {}
    for i, (prompt, one, other) in enumerate(zip(prompts, plain, speculative, strict=True)):
        at = first_difference(one.token_ids, other.token_ids)
        if at is not None:
            texts.append(Text(prompt, one.token_ids[:at], i))
            pairs[i] = tuple(c.token_ids[at] if at < len(c.token_ids) else -1 for c in (one, other))
    found = []
    for text, states in hidden_states(target, texts):
        best = logits_of(target, states[-1:])[0].topk(2)
        gap = float(best.values[0] - best.values[1])
        ours, theirs = pairs[text.name]
        tie = gap < TIE and {ours, theirs} == set(best.indices.tolist())
        found.append(Divergence(text.name, len(text.tokens), ours, theirs, gap, tie))
    return sorted(found, key=lambda d: d.prompt)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first position where two texts differ; the shorter one's length where it is the start of the other."""
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return None if len(one) == len(other) else min(len(one), len(other))

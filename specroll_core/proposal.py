"""What proposers hand to the tree: ranked candidates, their features, and the laws that draws are made from.

Two kinds of proposers exist. Heads give one ranked list per depth, shared by all nodes of that depth.
A *path proposer* (a memory of the trajectory) gives children that depend on the path drafted so far. The tree
merges both, the scorer makes their scores comparable, and the verifier is exact whatever they say: nothing
outside this interface needs to change for a new proposer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from specroll_core.heads import ProposalVocabulary
from specroll_core.law import LawParams, draw_outside, final_probs

# The tree rarely takes more than six children of one node; a few more cost nothing.
DEFAULT_WIDTH = 12

# A probability that has become 0 in float32 keeps a finite logarithm.
_SMALLEST = torch.finfo(torch.float32).tiny


class PathCandidate(NamedTuple):
    """A child that a path proposer suggests: its probability and the longest matching order that saw it."""

    token: int
    prob: float
    order: int


class PathProposer(Protocol):
    """Proposes children of one request's nodes from the path drafted so far.

    States are opaque to the tree, and hashable: equal ones have the same children for as long as the round lasts.
    `root` is the state at the pending token; `descend` follows one drafted token; `children` may suggest any tokens,
    in any order, each once, as the fields of a `PathCandidate`. `max_depth`: deepest useful child.
    """

    max_depth: int

    def root(self) -> Any: ...

    def descend(self, state: Any, token: int) -> Any: ...

    def children(self, state: Any) -> Sequence[tuple[int, float, int]]: ...


class DepthLaws:
    """The proposers' laws q_d, one per request and depth, that sampled children are drawn from.

    probs: [B, D, M] float32 over the columns of `vocabulary`, rows summing to 1; `probs[b, d - 1]` is the law at
    depth d.
    """

    def __init__(self, probs: Tensor, vocabulary: ProposalVocabulary) -> None:
        self.probs = probs
        self.vocabulary = vocabulary
        self._flat = probs.view(-1, probs.shape[-1])
        self._blocks: Tensor | None = None

    @property
    def depth(self) -> int:
        return self.probs.shape[1]

    def row_index(self, request: Tensor, depth: Tensor) -> Tensor:
        return request * self.depth + depth - 1

    def at_depth(self, depth: int) -> Tensor:
        """[B, M] probabilities of every request's law at one depth."""
        return self.probs[:, depth - 1]

    def draw(self, request: Tensor, depth: Tensor, excluded: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Draws one token each from q_d renormalised outside a set.

        request, depth: [n] int64; excluded: [n, m] token ids, unique per row, -1 for none; uniforms: [n] float64.
        Returns tokens [n] int64 and the mass of q_d outside the set [n] float64. Where that mass is 0 the token means
        nothing, and the verifier must never accept it.
        """
        columns, mass = draw_outside(
            self._flat, self.row_index(request, depth), self.vocabulary.to_column(excluded), uniforms
        )
        return self.vocabulary.to_token(columns), mass


@dataclass(frozen=True)
class Proposal:
    """All that is proposed for B requests in one round.

    tokens: [B, D, M] int64, candidates by depth, best first; log_q: [B, D, M] float32, their log-probabilities at
    the request's temperature. laws: what sampled children are drawn from, None where only deterministic
    children are wanted. paths: a path proposer per request, or None.
    """

    tokens: Tensor
    log_q: Tensor
    laws: DepthLaws | None = None
    paths: Sequence[PathProposer | None] = field(default_factory=tuple)

    @staticmethod
    def of_paths(paths: Sequence[PathProposer | None], device: torch.device | str = "cpu") -> Proposal:
        """What path proposers alone propose, without heads."""
        none = torch.zeros(len(paths), 0, 1, device=device)
        return Proposal(none.to(torch.int64), none, None, paths)

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    def path(self, row: int) -> PathProposer | None:
        return self.paths[row] if self.paths else None


def propose_from_logits(
    logits: Tensor,
    params: LawParams,
    vocabulary: ProposalVocabulary,
    *,
    width: int = DEFAULT_WIDTH,
    with_laws: bool = True,
    filtered: bool = False,
    paths: Sequence[PathProposer | None] = (),
) -> Proposal:
    """Turns the heads' logits into ranked candidates and laws.

    logits: [B, K, M] over the vocabulary's columns. The law is taken at 1.0 times the request's temperature (1
    where it is greedy), since sampled children must be drawn from it; the scorer does any tempering. `filtered`
    applies the request's top-k, top-p and min-p to q too, so that no draw is wasted outside the target's
    support: ranking costs more than it brings where the filters are weak.
    """
    B, K, M = logits.shape
    flat = params.select(torch.arange(B, device=logits.device).repeat_interleave(K))
    flat = flat.without_greedy() if filtered else flat.without_greedy().without_filters()
    q = final_probs(logits.reshape(B * K, M), flat)
    top = q.topk(min(width, M), dim=-1)
    shape = (B, K, top.values.shape[-1])
    log_q = top.values.clamp_min(_SMALLEST).log()
    laws = DepthLaws(q.view(B, K, M), vocabulary) if with_laws else None
    return Proposal(vocabulary.to_token(top.indices).view(shape), log_q.view(shape), laws, paths)

"""What a walk has seen of the target's laws: the likely tokens at the nodes that it visited, for those who learn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specroll_core.heads import ProposalVocabulary
from specroll_core.pending import TOP
from specroll_core.verified import NodeLogits, Verified


@dataclass(frozen=True, slots=True)
class Laws:
    """n verified positions, each request's in order. request: [n] int64; ahead: [n] int64, places after the pending
    token, from 1; tokens, p: [n, C], likely tokens and their probabilities before filters."""

    request: Tensor
    ahead: Tensor
    tokens: Tensor
    p: Tensor


class SeenLaws:
    """Stands in front of `NodeLogits` during one walk, which evaluates the nodes of one level after another.

    Proposals are compared with the law before top-k, top-p and min-p, as their own is, over the tokens that could have
    been proposed.
    """

    def __init__(
        self, node_logits: NodeLogits, temperature: Tensor, wanted: Tensor, vocabulary: ProposalVocabulary
    ) -> None:
        """temperature: [B], above 0; wanted: [B] bool, the requests that anybody learns from."""
        self._node_logits = node_logits
        self._temperature = temperature
        self._wanted = wanted
        self._all = bool(wanted.all())
        self._vocabulary = vocabulary
        self._seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def __call__(self, request: Tensor, node: Tensor) -> Tensor:
        logits = self._node_logits(request, node)
        rows, some = request, logits
        if not self._all:
            wanted = self._wanted[request]
            rows, some = request[wanted], logits[wanted]
        scaled = some / self._temperature[rows, None]
        ids = self._vocabulary.ids
        possible = scaled if ids is None else scaled.index_select(1, ids)
        top = possible.topk(min(TOP, possible.shape[1]), dim=-1)
        p = (top.values - scaled.logsumexp(-1, keepdim=True)).exp()
        self._seen.append((rows, self._vocabulary.to_token(top.indices), p))
        return logits

    def laws(self, verified: Verified) -> Laws:
        """Of all positions that were verified; the walk on a device evaluates more."""
        request, tokens, p = (torch.cat(some) for some in zip(*self._seen, strict=True))
        level = torch.cat([torch.full_like(rows, i) for i, (rows, _, _) in enumerate(self._seen)])
        order = (request * len(self._seen) + level).argsort()
        order = order[verified.nodes[request[order], level[order]] >= 0]
        return Laws(request[order], level[order] + 1, tokens[order], p[order])

"""What a walk has seen of the target's laws: the likely tokens at the nodes that it visited, for those who learn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specroll_core.heads import ProposalVocabulary
from specroll_core.law import LawParams
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
        self, node_logits: NodeLogits, params: LawParams, wanted: Tensor, vocabulary: ProposalVocabulary
    ) -> None:
        """params: of the B requests; wanted: [B] bool, those that anybody learns from."""
        self._node_logits = node_logits
        self._temperature = params.without_greedy().temperature
        self._wanted = wanted
        self._all = bool(wanted.all())
        self._vocabulary = vocabulary
        # The walk reports the probability of each token that it emits, and with it the law's total: summing over the
        # vocabulary again would take longer than all else here. It needs the logits until the walk has ended, which a
        # CPU's walk, over the nodes that it visits, has room for.
        self._late = wanted.device.type == "cpu" and not (params.needs_filter or params.any_greedy)
        self._seen: list[tuple[Tensor, Tensor, Tensor]] = []
        self._logits: list[Tensor] = []

    def __call__(self, request: Tensor, node: Tensor) -> Tensor:
        logits = self._node_logits(request, node)
        rows, some = request, logits
        if not self._all:
            wanted = self._wanted[request]
            rows, some = request[wanted], logits[wanted]
        temperature = self._temperature[rows, None]
        ids = self._vocabulary.ids
        possible = some if ids is None else some.index_select(1, ids)
        top = possible.topk(min(TOP, possible.shape[1]), dim=-1)
        scaled = top.values / temperature
        if self._late:
            self._logits.append(some)
        else:
            scaled = scaled - (some / temperature).logsumexp(-1, keepdim=True)
        self._seen.append((rows, self._vocabulary.to_token(top.indices), scaled))
        return logits

    def laws(self, verified: Verified) -> Laws:
        """Of all positions that were verified; the walk on a device evaluates more."""
        logged = [scaled for _, _, scaled in self._seen]
        if self._late:
            logged = [
                scaled - self._totals(rows, some, verified.tokens[rows, level], verified.logprobs[rows, level])
                for level, ((rows, _, scaled), some) in enumerate(zip(self._seen, self._logits, strict=True))
            ]
            self._logits.clear()
        request = torch.cat([rows for rows, _, _ in self._seen])
        tokens, logp = torch.cat([tokens for _, tokens, _ in self._seen]), torch.cat(logged)
        level = torch.cat([torch.full_like(rows, i) for i, (rows, _, _) in enumerate(self._seen)])
        order = (request * len(self._seen) + level).argsort()
        order = order[verified.nodes[request[order], level[order]] >= 0]
        return Laws(request[order], level[order] + 1, tokens[order], logp[order].exp())

    def _totals(self, rows: Tensor, logits: Tensor, tokens: Tensor, logprobs: Tensor) -> Tensor:
        """[n, 1]: logarithms of the laws' totals. tokens, logprobs: [n], what was emitted there."""
        scaled = logits.gather(1, tokens.clamp_min(0)[:, None]) / self._temperature[rows, None]
        return scaled - logprobs[:, None]

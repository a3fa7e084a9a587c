"""What a verification returns, and what its two walks share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specroll_core.proposal import DepthLaws

# Returns the logits [n, V] of nodes: (request [n], node [n]) -> [n, V]. Penalties and logit bias are applied here.
NodeLogits = Callable[[Tensor, Tensor], Tensor]

# Below this a slot's mass outside S is rounding of the head's law.
MIN_MASS = 1e-9


@dataclass(frozen=True)
class Verified:
    """What B requests emit this round. L is one more than the deepest node of the batch.

    tokens: [B, L] int64, accepted tokens and then the next pending token, -1 beyond. logprobs: [B, L] float32, log p
    of the final law at each token's node, 0 beyond. lengths: [B] int64, emitted tokens: accepted + 1.
    nodes: [B, L] int64, the nodes on the walk from the root 0 on; entry i is where token i was decided, so the KV of
    nodes[:, :lengths] is kept and token i < lengths - 1 is that of nodes[:, i + 1]; -1 beyond.
    child_probs: [B, N] float32, the target's probability of each deterministic node whose parent was visited, NaN
    elsewhere. slot_accept, slot_remainder: [B, N] float32, for slots whose parent was visited the exact probability of
    acceptance and the target's mass outside S, NaN elsewhere. All three feed the scorer.
    """

    tokens: Tensor
    logprobs: Tensor
    lengths: Tensor
    nodes: Tensor
    child_probs: Tensor
    slot_accept: Tensor
    slot_remainder: Tensor

    @property
    def pending(self) -> Tensor:
        """[B] int64: the last emitted token, which starts the next round."""
        return self.tokens.gather(1, self.lengths[:, None] - 1).squeeze(1)

    @property
    def last_nodes(self) -> Tensor:
        """[B] int64: the node at which the pending token was decided, whose hidden state precedes it."""
        return self.nodes.gather(1, self.lengths[:, None] - 1).squeeze(1)

    def walked_first(self, count: int, on_host: bool | None = None) -> Tensor:
        """[B, count] int64: of each request the nodes of its walk, then its others, both in ascending order.

        on_host: as Python's numbers, so few that a tensor operation takes longer; None where they lie on a CPU.
        """
        if on_host if on_host is not None else self.nodes.device.type == "cpu":
            walks = [[node for node in walk if node >= 0] for walk in self.nodes.tolist()]
            return torch.tensor([walk + [n for n in range(count) if n not in walk] for walk in walks])
        walked = torch.zeros(len(self.nodes), count, dtype=torch.bool, device=self.nodes.device)
        walked.scatter_(1, self.nodes.clamp_min(0), True)  # every walk holds node 0
        return walked.logical_not().sort(dim=1, stable=True).indices


def subtract(p: Tensor, q: Tensor, laws: DepthLaws) -> Tensor:
    """p [n, V] becomes p - min(p, q), q [n, M] over the proposal vocabulary's columns. Returns what p was there."""
    ids = laws.vocabulary.ids
    if ids is None:
        kept = p.clone()
        p.sub_(q).clamp_min_(0)
        return kept
    kept = p[:, ids]
    p[:, ids] = (kept - q).clamp_min_(0)
    return kept

"""Exact verification: walk the tree so that the emitted tokens have the target's law, whatever was proposed.

At a node let p be the target's **final** law (`law.py`) and S the tokens of its deterministic children.

- *Target-match*, where no child was sampled: draw y from p. If a child carries y, descend; otherwise y is the next
  pending token. Exact for any children that were chosen without knowledge of the draw. The walk goes on with
  probability `sum_S p`. At temperature 0 it is the argmax walk.
- *One sampled child*: the last child carries X, drawn from q_S, the head's law renormalised outside S. Accept X with
  probability `min(1, p(X) / q_S(X))`; otherwise draw y from the residual, proportional to `p(y)` on S and to
  `p(y) - min(p(y), q_S(y))` elsewhere; descend where y is in S, else y is the next pending token. The emitted token
  has law p: acceptance gives `min(p, q_S)`, and the residual's total is just the probability of rejection,
  `1 - sum min(p, q_S)`. The walk goes on with probability `sum_S p + sum_{y not in S} min(p(y), q_S(y))`.
  This is speculative sampling (arXiv 2211.17192) with a deterministic part in front, as in 2502.18779.

The rule needs that nothing decided at the node depends on X; `tree.py` guarantees it. A slot without mass outside S is
never accepted, which is target-match on S.

The behaviour log-probability of an emitted token is log p at its node, however it came about: its marginal
law given what precedes it is p.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specroll_core.device_walk import walk_on_device
from specroll_core.host_walk import walk_on_host
from specroll_core.law import LawParams
from specroll_core.proposal import DepthLaws
from specroll_core.scorer import CountTableScorer
from specroll_core.tree import DraftTree
from specroll_core.verified import MIN_MASS, NodeLogits, Verified


def verify(
    tree: DraftTree,
    logits: Tensor | NodeLogits,
    params: LawParams,
    uniforms: Tensor,
    laws: DepthLaws | None = None,
    *,
    planted_bias: float = 0.0,
    on_host: bool | None = None,
) -> Verified:
    """Walks B trees at once, evaluating the final law at visited nodes only.

    logits: [B, N, V] or a function that gathers rows. uniforms: [B, >= depth + 1, 2] float64 in [0, 1), for the coin
    and for the draw at each level, independent of those the tree was built with. laws: those that sampled
    children were drawn from, needed where the tree has any.
    planted_bias: makes the walk wrong on purpose, to test tests: with this probability a sampled request's walk
    that would end at a node with children accepts the last of them. 0 outside of tests.

    on_host: which of the two walks, which agree to rounding; None takes the one made for the tree's device. On a CPU
    requests leave when they have ended, and decide in Python; on a GPU all rows walk to the deepest level and nothing
    waits for the device.
    """
    assert uniforms.shape[0] == tree.tokens.shape[0] == params.rows
    assert uniforms.shape[1] > tree.depth
    assert laws is not None or not tree.any_sampled
    node_logits = _gather_from(logits) if isinstance(logits, Tensor) else logits
    if on_host is None:
        on_host = tree.tokens.device.type == "cpu"
    walk = walk_on_host if on_host else walk_on_device
    return walk(tree, node_logits, params, uniforms, laws, planted_bias)


def credit(scorer: CountTableScorer, tree: DraftTree, verified: Verified) -> None:
    """Tells the scorer what the target thought of the children of visited nodes."""
    scorer.update(tree.cells.flatten(), verified.child_probs.flatten())
    if tree.any_sampled:
        scorer.update_tails(
            tree.tail_cells.flatten(), verified.slot_accept.flatten(), verified.slot_remainder.flatten()
        )


def slot_law(tree: DraftTree, children: Tensor, slots: Tensor, q: Tensor, token: Tensor) -> Tensor:
    """q_S(token) [n] float64 at the slots of one node per row; 0 on S and without a live slot.

    children, slots: [n, N] bool; token: [n]; q: [n], the head's probability of the token.
    """
    slot = slots.to(torch.int64).argmax(-1, keepdim=True)
    mass = torch.where(slots.any(-1), tree.slot_mass.gather(1, slot).squeeze(1), 0.0)
    in_s = (children & ~slots & (tree.tokens == token[:, None])).any(-1)
    return torch.where((mass > MIN_MASS) & ~in_s, q.double() / mass.clamp_min(MIN_MASS), 0.0)


def _gather_from(logits: Tensor) -> NodeLogits:
    return lambda request, node: logits[request, node]

"""The walk of `verify.py` for a GPU: all requests at once, level by level, and the host waits for nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specroll_core.law import LawParams, final_probs, sample, sample_and_sum
from specroll_core.proposal import DepthLaws
from specroll_core.tree import DraftTree
from specroll_core.verified import MIN_MASS, NodeLogits, Verified, subtract


@dataclass
class _Slots:
    """The sampled children of the nodes that B requests stand at. node: [B] int64, meaningless where there is none;
    there: [B] bool; accept, remainder: [B] float32, the exact probability of acceptance and the target's mass
    outside S."""

    node: Tensor
    there: Tensor
    accept: Tensor
    remainder: Tensor


@dataclass
class _Level:
    """What was seen at one depth: where B requests stand, which of them still walk, the token drawn and its
    probability, the node's children [B, N], and the target's probability of every node's token there [B, N]."""

    node: Tensor
    alive: Tensor
    y: Tensor
    p_y: Tensor
    children: Tensor
    p_child: Tensor
    slots: _Slots | None


def walk_on_device(
    tree: DraftTree,
    node_logits: NodeLogits,
    params: LawParams,
    uniforms: Tensor,
    laws: DepthLaws | None,
    planted_bias: float,
) -> Verified:
    """The arguments of `verify`."""
    B, device = tree.tokens.shape[0], tree.tokens.device
    request = torch.arange(B, device=device)
    parents = torch.where(tree.valid, tree.parents, -1)
    node = torch.zeros(B, dtype=torch.int64, device=device)
    alive = torch.ones(B, dtype=torch.bool, device=device)
    seen: list[_Level] = []
    for level in range(tree.depth + 1):
        p = final_probs(node_logits(request, node), params)
        children = parents == node[:, None]
        p_child = p.gather(1, tree.tokens)
        coin, draw = uniforms[:, level].unbind(-1)
        slots = None
        # Deeper than the laws there are nodes of path proposers only, none of which is drawn.
        if laws is not None and tree.any_sampled and level < min(tree.depth, laws.depth):
            y, p_y, slots = _draw_with_slots(p, p_child, tree, laws, level + 1, children, coin, draw)
        else:
            y = p.argmax(-1) if params.all_greedy else sample(p, draw)
            p_y = p.gather(1, y[:, None]).squeeze(1)
        hit = children & (tree.tokens == y[:, None])
        if planted_bias:
            may = params.temperature > 0
            y, hit = _accept_wrongly(y, hit, children, tree.tokens, may, draw, planted_bias)
            # What the fault takes for the law's: it does not know of itself.
            p_y = torch.where(hit.any(-1), torch.where(hit, p_child, 0.0).sum(-1), p_y)
        seen.append(_Level(node, alive, y, p_y, children, p_child, slots))
        going, child = hit.max(-1)
        alive = alive & going
        node = torch.where(alive, child, node)
    return _gathered(tree, seen)


def _gathered(tree: DraftTree, seen: Sequence[_Level]) -> Verified:
    """Puts what the levels saw where it belongs. A node is met by one level at most: the one where its parent stood."""
    B, N = tree.tokens.shape
    alive = torch.stack([s.alive for s in seen], dim=1)
    y, node, p_y = (torch.stack(x, dim=1) for x in zip(*((s.y, s.node, s.p_y) for s in seen), strict=True))
    child_probs = torch.full((B, N), torch.nan, device=tree.tokens.device)
    # A column more, for those that have no slot.
    accept, remainder = torch.full((2, B, N + 1), torch.nan, device=tree.tokens.device)
    for s in seen:
        met = s.children & ~tree.sampled & s.alive[:, None]
        child_probs = torch.where(met, s.p_child, child_probs)
        if s.slots is not None:
            at = torch.where(s.slots.there & s.alive, s.slots.node, N)[:, None]
            accept.scatter_(1, at, s.slots.accept[:, None])
            remainder.scatter_(1, at, s.slots.remainder[:, None])
    return Verified(
        tokens=torch.where(alive, y, -1),
        logprobs=torch.where(alive, p_y, 1.0).log(),
        lengths=alive.sum(-1),
        nodes=torch.where(alive, node, -1),
        child_probs=child_probs,
        slot_accept=accept[:, :N],
        slot_remainder=remainder[:, :N],
    )


def _draw_with_slots(
    p: Tensor,
    p_child: Tensor,
    tree: DraftTree,
    laws: DepthLaws,
    depth: int,
    children: Tensor,
    coin: Tensor,
    draw: Tensor,
) -> tuple[Tensor, Tensor, _Slots]:
    """One emitted token per row, with the sampled-child rule where a row has a slot and target-match elsewhere.

    p becomes the residual. Returns the tokens [B], their probabilities under p [B], and what is to be known of slots.
    """
    there, slot = (children & tree.sampled).max(-1)
    at_slot = slot[:, None]
    mass = torch.where(there, tree.slot_mass.gather(1, at_slot).squeeze(1), 0.0)
    live = mass > MIN_MASS
    q = laws.at_depth(depth)
    # q_S as if S were empty; S is put right below. Rows without a live slot get the zero law.
    scale = torch.where(live, 1.0 / mass.clamp_min(MIN_MASS), 0.0).to(q.dtype)
    kept = subtract(p, q * scale[:, None], laws)
    residual = p
    # On S the residual is p itself. S holds each token once, so adding the difference sets the value.
    on_s = torch.where(children & ~tree.sampled, p_child, 0.0)
    residual.scatter_add_(1, tree.tokens, torch.where(on_s > 0, on_s - residual.gather(1, tree.tokens), 0.0))
    other, total = sample_and_sum(residual, draw)
    # Where nothing is left to draw from, rejection has probability 0 up to rounding, and what is drawn is not used.
    empty = total <= 0

    x = tree.tokens.gather(1, at_slot)
    column = laws.vocabulary.to_column(x)
    q_x = torch.where(column >= 0, q.gather(1, column.clamp_min(0)), 0.0).squeeze(1) * scale
    p_x = p_child.gather(1, at_slot).squeeze(1)
    accepted = live & ((coin * q_x < p_x) | empty)
    y = torch.where(accepted, x.squeeze(1), other)
    column = laws.vocabulary.to_column(y)[:, None]
    p_y = torch.where(column >= 0, kept.gather(1, column.clamp_min(0)), residual.gather(1, y[:, None])).squeeze(1)
    accept = (1 - total.float()).clamp(0, 1)
    return y, p_y, _Slots(slot, there, accept, (1 - on_s.sum(-1)).clamp(0, 1))


def _accept_wrongly(
    y: Tensor, hit: Tensor, children: Tensor, tokens: Tensor, may: Tensor, draw: Tensor, probability: float
) -> tuple[Tensor, Tensor]:
    """A fault to find: of rows that hit no child, some take their last child all the same."""
    # Far digits of the draw: as good as a number of its own, and no other draw changes because of the fault.
    unlucky = (draw * 2.0**24).frac() < probability
    wrong = may & children.any(-1) & ~hit.any(-1) & unlucky
    places = torch.arange(children.shape[1], device=y.device)
    last = torch.where(children, places, -1).argmax(-1, keepdim=True)
    y = torch.where(wrong, tokens.gather(1, last).squeeze(1), y)
    return y, hit | (wrong[:, None] & children & (places == last))

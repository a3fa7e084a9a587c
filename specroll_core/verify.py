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

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specroll_core.law import LawParams, final_probs, sample, sample_and_sum
from specroll_core.proposal import DepthLaws
from specroll_core.scorer import CountTableScorer
from specroll_core.tree import DraftTree

# Returns the logits [n, V] of nodes: (request [n], node [n]) -> [n, V]. Penalties and logit bias are applied here.
NodeLogits = Callable[[Tensor, Tensor], Tensor]

# Below this a slot's mass outside S is rounding of the head's law.
_MIN_MASS = 1e-9


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


def verify(
    tree: DraftTree,
    logits: Tensor | NodeLogits,
    params: LawParams,
    uniforms: Tensor,
    laws: DepthLaws | None = None,
    *,
    planted_bias: float = 0.0,
) -> Verified:
    """Walks B trees at once, evaluating the final law at visited nodes only.

    logits: [B, N, V] or a function that gathers rows. uniforms: [B, >= depth + 1, 2] float64 in [0, 1), for the coin
    and for the draw at each level, independent of those the tree was built with. laws: those that sampled
    children were drawn from, needed where the tree has any.
    planted_bias: makes the walk wrong on purpose, to test tests: with this probability a sampled request's walk
    that would end at a node with children accepts the last of them. 0 outside of tests.

    On a CPU finished requests leave the batch after each level; on a GPU all rows walk to the deepest level
    and nothing waits for the device.
    """
    B = tree.tokens.shape[0]
    levels = tree.depth + 1
    assert uniforms.shape[0] == B == params.rows
    assert uniforms.shape[1] >= levels
    assert laws is not None or not tree.any_sampled
    node_logits = _gather_from(logits) if isinstance(logits, Tensor) else logits

    walk = _Walk.start(tree, params, uniforms)
    levels_seen: list[_Level] = []
    for level in range(levels):
        p = final_probs(node_logits(walk.request, walk.node), walk.params)
        children = walk.parents == walk.node[:, None]
        p_child = p.gather(1, walk.tokens)

        coin, draw = walk.uniforms[:, level].unbind(-1)
        slot = None
        # Deeper than the laws there are nodes of path proposers only, none of which is drawn.
        if laws is not None and tree.any_sampled and level < min(levels - 1, laws.depth):
            y, p_y, slot = _draw_with_slots(p, p_child, walk, laws, level + 1, children, coin, draw)
        else:
            y = p.argmax(-1) if params.all_greedy else sample(p, draw)
            p_y = p.gather(1, y[:, None]).squeeze(1)

        hit = children & (walk.tokens == y[:, None])
        if planted_bias:
            may = walk.params.temperature > 0
            y, hit = _accept_wrongly(y, hit, children, walk.tokens, may, draw, planted_bias)
            # What the fault takes for the law's: it does not know of itself.
            p_y = torch.where(hit.any(-1), torch.where(hit, p_child, 0.0).sum(-1), p_y)
        levels_seen.append(_Level(walk.request, walk.node, walk.alive, y, p_y, children, p_child, slot))
        if not walk.descend(hit):
            break
    return _gathered(tree, levels, levels_seen)


@dataclass
class _Slots:
    """The sampled children of the walkers' nodes. node: [n] int64, meaningless where there is none; there: [n] bool;
    accept, remainder: [n] float32, the exact probability of acceptance and the target's mass outside S."""

    node: Tensor
    there: Tensor
    accept: Tensor
    remainder: Tensor


@dataclass
class _Level:
    """What was seen at one depth, a row for each walker: who, where, whether it counts (None: all do), the token drawn
    and its probability, the node's children [n, N], and the target's probability of every node's token there."""

    request: Tensor
    node: Tensor
    alive: Tensor | None
    y: Tensor
    p_y: Tensor
    children: Tensor
    p_child: Tensor
    slots: _Slots | None


def _gathered(tree: DraftTree, levels: int, seen: Sequence[_Level]) -> Verified:
    """All levels' rows put where they belong, in one go: each pair of request and level, and each node, is met once."""
    B, N = tree.tokens.shape
    device = tree.tokens.device
    request = torch.cat([s.request for s in seen])
    node, y, p_y = (torch.cat(x) for x in zip(*((s.node, s.y, s.p_y) for s in seen), strict=True))
    children, p_child = (torch.cat(x) for x in zip(*((s.children, s.p_child) for s in seen), strict=True))
    level = torch.tensor([i for i, s in enumerate(seen) for _ in range(len(s.request))], device=device)
    if any(s.alive is not None for s in seen):
        alive = torch.cat([torch.ones_like(s.node, dtype=torch.bool) if s.alive is None else s.alive for s in seen])
        node, y = torch.where(alive, node, -1), torch.where(alive, y, -1)
        p_y, children = torch.where(alive, p_y, 1.0), children & alive[:, None]
    tokens, nodes = torch.full((2, B, levels), -1, dtype=torch.int64, device=device)
    logprobs = torch.zeros(B, levels, dtype=torch.float32, device=device)
    tokens[request, level], nodes[request, level], logprobs[request, level] = y, node, p_y.log()

    # By node, a column more for those that there are none of. A node's parent is visited by one row at most.
    probs, met = torch.zeros(2, B, N, device=device)
    sampled = tree.sampled[request]
    plain = children & ~sampled
    probs.index_add_(0, request, torch.where(plain, p_child, 0.0))
    met.index_add_(0, request, plain.float())
    slot_accept, slot_remainder = torch.full((2, B, N + 1), torch.nan, device=device)
    for s in seen:
        if s.slots is not None:
            there = s.slots.there if s.alive is None else s.slots.there & s.alive
            at = torch.where(there, s.slots.node, N)
            slot_accept[s.request, at], slot_remainder[s.request, at] = s.slots.accept, s.slots.remainder
    return Verified(
        tokens,
        logprobs,
        (nodes >= 0).sum(-1),
        nodes,
        torch.where(met > 0, probs, torch.nan),
        slot_accept[:, :N],
        slot_remainder[:, :N],
    )


@dataclass
class _Walk:
    """Who walks, and what of the tree they look at, row by row. On a CPU who has ended leaves; on a GPU all stay, and
    `alive` says who counts.

    request, node: [n] int64; alive: [n] bool, None where it is known that all are. parents: [n, N], of valid nodes.
    mass: [n, N], of the head's law outside a slot's siblings.
    """

    request: Tensor
    node: Tensor
    alive: Tensor | None
    params: LawParams
    uniforms: Tensor
    parents: Tensor
    tokens: Tensor
    sampled: Tensor
    mass: Tensor
    everyone: bool = True

    @staticmethod
    def start(tree: DraftTree, params: LawParams, uniforms: Tensor) -> _Walk:
        B, device = tree.tokens.shape[0], tree.tokens.device
        return _Walk(
            request=torch.arange(B, device=device),
            node=torch.zeros(B, dtype=torch.int64, device=device),
            alive=None,
            params=params,
            uniforms=uniforms,
            parents=torch.where(tree.valid, tree.parents, -1),
            tokens=tree.tokens,
            sampled=tree.sampled,
            mass=tree.slot_mass,
        )

    def descend(self, hit: Tensor) -> bool:
        """hit: [n, N], the child that carries the drawn token, if any. Returns whether anybody walks on."""
        going, node = hit.max(-1)
        if node.device.type != "cpu":
            self.alive = going if self.alive is None else self.alive & going
            self.node = torch.where(self.alive, node, self.node)
            return True
        left = int(going.sum())
        if left == len(going):
            self.node = node
        elif left:
            self.everyone = False
            index = going.nonzero().squeeze(1)
            self.request, self.node, self.uniforms, self.parents, self.tokens, self.sampled, self.mass = (
                x.index_select(0, index)
                for x in (self.request, node, self.uniforms, self.parents, self.tokens, self.sampled, self.mass)
            )
            self.params = self.params.select(index)
        return left > 0


def credit(scorer: CountTableScorer, tree: DraftTree, verified: Verified) -> None:
    """Tells the scorer what the target thought of the children of visited nodes."""
    seen = ~verified.child_probs.isnan()
    scorer.update(tree.cells[seen], verified.child_probs[seen])
    if tree.any_sampled:
        seen = ~verified.slot_accept.isnan()
        scorer.update_tails(tree.tail_cells[seen], verified.slot_accept[seen], verified.slot_remainder[seen])


def _draw_with_slots(
    p: Tensor,
    p_child: Tensor,
    walk: _Walk,
    laws: DepthLaws,
    depth: int,
    children: Tensor,
    coin: Tensor,
    draw: Tensor,
) -> tuple[Tensor, Tensor, _Slots]:
    """One emitted token per row, with the sampled-child rule where a row has a slot and target-match elsewhere.

    p becomes the residual. Returns the tokens [n], their probabilities under p [n], and what is to be known of slots.
    """
    there, slot = (children & walk.sampled).max(-1)
    at_slot = slot[:, None]
    mass = torch.where(there, walk.mass.gather(1, at_slot).squeeze(1), 0.0)
    live = mass > _MIN_MASS
    q = laws.at_depth(depth) if walk.everyone else laws.at_depth(depth)[walk.request]
    # q_S as if S were empty; S is put right below. Rows without a live slot get the zero law.
    scale = torch.where(live, 1.0 / mass.clamp_min(_MIN_MASS), 0.0).to(q.dtype)
    kept = _subtract(p, q * scale[:, None], laws)
    residual = p
    # On S the residual is p itself. S holds each token once, so adding the difference sets the value.
    on_s = torch.where(children & ~walk.sampled, p_child, 0.0)
    residual.scatter_add_(1, walk.tokens, torch.where(on_s > 0, on_s - residual.gather(1, walk.tokens), 0.0))
    other, total = sample_and_sum(residual, draw)
    # Where nothing is left to draw from, rejection has probability 0 up to rounding, and what is drawn is not used.
    empty = total <= 0

    x = walk.tokens.gather(1, at_slot)
    column = laws.vocabulary.to_column(x)
    q_x = torch.where(column >= 0, q.gather(1, column.clamp_min(0)), 0.0).squeeze(1) * scale
    p_x = p_child.gather(1, at_slot).squeeze(1)
    accepted = live & ((coin * q_x < p_x) | empty)
    y = torch.where(accepted, x.squeeze(1), other)
    column = laws.vocabulary.to_column(y)[:, None]
    p_y = torch.where(column >= 0, kept.gather(1, column.clamp_min(0)), residual.gather(1, y[:, None])).squeeze(1)
    accept = (1 - total.float()).clamp(0, 1)
    return y, p_y, _Slots(slot, there, accept, (1 - on_s.sum(-1)).clamp(0, 1))


def slot_law(tree: DraftTree, children: Tensor, slots: Tensor, q: Tensor, token: Tensor) -> Tensor:
    """q_S(token) [n] float64 at the slots of one node per row; 0 on S and without a live slot.

    children, slots: [n, N] bool; token: [n]; q: [n], the head's probability of the token.
    """
    slot = slots.to(torch.int64).argmax(-1, keepdim=True)
    mass = torch.where(slots.any(-1), tree.slot_mass.gather(1, slot).squeeze(1), 0.0)
    in_s = (children & ~slots & (tree.tokens == token[:, None])).any(-1)
    return torch.where((mass > _MIN_MASS) & ~in_s, q.double() / mass.clamp_min(_MIN_MASS), 0.0)


def _accept_wrongly(
    y: Tensor, hit: Tensor, children: Tensor, tokens: Tensor, may: Tensor, draw: Tensor, probability: float
) -> tuple[Tensor, Tensor]:
    """A fault to find: of rows that hit no child, some take their last child all the same."""
    # Far digits of the draw: as good as a number of its own, and no other draw changes because of the fault.
    unlucky = (draw * 2.0**24).frac() < probability
    wrong = may & children.any(-1) & ~hit.any(-1) & unlucky
    last = torch.where(children, torch.arange(children.shape[1], device=y.device), -1).argmax(-1, keepdim=True)
    y = torch.where(wrong, tokens.gather(1, last).squeeze(1), y)
    return y, hit | (wrong[:, None] & children & (torch.arange(children.shape[1], device=y.device) == last))


def _subtract(p: Tensor, q: Tensor, laws: DepthLaws) -> Tensor:
    """p [n, V] becomes p - min(p, q), q [n, M] over the proposal vocabulary's columns. Returns what p was there."""
    ids = laws.vocabulary.ids
    if ids is None:
        kept = p.clone()
        p.sub_(q).clamp_min_(0)
        return kept
    kept = p[:, ids]
    p[:, ids] = (kept - q).clamp_min_(0)
    return kept


def _gather_from(logits: Tensor) -> NodeLogits:
    return lambda request, node: logits[request, node]

"""The walk of `verify.py` for a CPU.

There a tensor operation on a few numbers takes as long as a pass over a row of the vocabulary. So tensors hold what is
as long as the vocabulary, and each request's few numbers are Python's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from specroll_core.law import LawParams, final_probs, sample, sample_and_sum
from specroll_core.proposal import DepthLaws
from specroll_core.tree import DraftTree
from specroll_core.verified import MIN_MASS, NodeLogits, Verified, subtract


def walk_on_host(
    tree: DraftTree,
    node_logits: NodeLogits,
    params: LawParams,
    uniforms: Tensor,
    laws: DepthLaws | None,
    planted_bias: float,
) -> Verified:
    """The arguments of `verify`. Requests leave when they have ended."""
    B, N = tree.tokens.shape
    tokens, numbers = tree.tokens.tolist(), uniforms.tolist()
    sampled, masses = tree.sampled.tolist(), tree.slot_mass.tolist()
    children = [_by_parent(*row) for row in zip(tree.parents.tolist(), tree.valid.tolist(), strict=True)]
    out = _Out(B, N, tree.depth + 1)
    rows, at = list(range(B)), [0] * B
    for level in range(tree.depth + 1):
        request, node = torch.tensor([rows, at])
        here = params if len(rows) == B else params.select(request)
        p = final_probs(node_logits(request, node), here)
        below = [children[row].get(n, ()) for row, n in zip(rows, at, strict=True)]
        p_below = _probabilities(p, [[tokens[row][c] for c in some] for row, some in zip(rows, below, strict=True)])
        draw = uniforms[:, level, 1] if len(rows) == B else uniforms[request, level, 1]
        slots = [_slot(some, sampled[row], masses[row]) for row, some in zip(rows, below, strict=True)]
        drawn: list[tuple[int, float]]
        # Deeper than the laws there are nodes of path proposers only, none of which is drawn.
        if laws is not None and level < laws.depth and any(slots):
            siblings = [
                [(tokens[row][c], pc) for c, pc in zip(some, probs, strict=True) if not sampled[row][c]]
                for row, some, probs in zip(rows, below, p_below, strict=True)
            ]
            q = laws.at_depth(level + 1)
            q = q if len(rows) == B else q.index_select(0, request)
            xs = [tokens[row][slot[0]] if slot else 0 for row, slot in zip(rows, slots, strict=True)]
            drawn, total = _draw_with_slots(p, q, laws, slots, xs, siblings, [numbers[r][level][0] for r in rows], draw)
            for row, slot, left, beside in zip(rows, slots, total, siblings, strict=True):
                if slot:
                    out.slot(row, slot[0], 1 - left, 1 - sum(value for _, value in beside))
        else:
            y = p.argmax(-1) if params.all_greedy else sample(p, draw)
            drawn = list(zip(y.tolist(), p.gather(1, y[:, None]).squeeze(1).tolist(), strict=True))
        may_err = (here.temperature > 0).tolist() if planted_bias else [False] * len(rows)
        going: list[tuple[int, int]] = []
        for i, (row, some, probs) in enumerate(zip(rows, below, p_below, strict=True)):
            known = tokens[row]
            token, p_token = drawn[i]
            hit = next((child for child in some if known[child] == token), None)
            if planted_bias and some:
                if hit is None and may_err[i] and _errs(numbers[row][level][1], planted_bias):
                    hit = some[-1]
                    token = known[hit]
                if hit is not None:
                    p_token = probs[some.index(hit)]  # what the fault takes for the law's: it does not know of itself
            out.step(row, at[i], token, p_token)
            for child, value in zip(some, probs, strict=True):
                if not sampled[row][child]:
                    out.child(row, child, value)
            if hit is not None:
                going.append((row, hit))
        if not going:
            break
        rows, at = [row for row, _ in going], [node for _, node in going]
    return out.verified()


class _Out:
    """`Verified` while it is made."""

    def __init__(self, rows: int, nodes: int, levels: int) -> None:
        self._levels = levels
        self._tokens: list[list[int]] = [[] for _ in range(rows)]
        self._nodes: list[list[int]] = [[] for _ in range(rows)]
        self._logprobs: list[list[float]] = [[] for _ in range(rows)]
        self._probs = [[math.nan] * nodes for _ in range(rows)]
        self._accept = [[math.nan] * nodes for _ in range(rows)]
        self._remainder = [[math.nan] * nodes for _ in range(rows)]

    def step(self, row: int, node: int, token: int, p: float) -> None:
        self._tokens[row].append(token)
        self._nodes[row].append(node)
        self._logprobs[row].append(math.log(p) if p > 0 else -math.inf)

    def child(self, row: int, node: int, p: float) -> None:
        self._probs[row][node] = p

    def slot(self, row: int, node: int, accept: float, remainder: float) -> None:
        self._accept[row][node] = min(max(accept, 0.0), 1.0)
        self._remainder[row][node] = min(max(remainder, 0.0), 1.0)

    def verified(self) -> Verified:
        lengths = [len(row) for row in self._tokens]
        missing = [[-1] * (self._levels - n) for n in lengths]
        pairs = zip(self._tokens, self._nodes, missing, strict=True)
        tokens, nodes = torch.tensor([(given + none, met + none) for given, met, none in pairs]).unbind(1)
        logprobs = [row + [0.0] * (self._levels - len(row)) for row in self._logprobs]
        probs, accept, remainder = torch.tensor([self._probs, self._accept, self._remainder], dtype=torch.float32)
        return Verified(
            tokens=tokens,
            logprobs=torch.tensor(logprobs, dtype=torch.float32),
            lengths=torch.tensor(lengths),
            nodes=nodes,
            child_probs=probs,
            slot_accept=accept,
            slot_remainder=remainder,
        )


def _by_parent(parents: Sequence[int], valid: Sequence[bool]) -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for node in range(1, len(parents)):
        if valid[node]:
            children.setdefault(parents[node], []).append(node)
    return children


def _errs(draw: float, probability: float) -> bool:
    """A fault to find. Far digits of the draw are as good as a number of its own, and no other draw changes with it."""
    return math.modf(draw * 2.0**24)[0] < probability


def _slot(children: Sequence[int], sampled: Sequence[bool], masses: Sequence[float]) -> tuple[int, float] | None:
    """The sampled one of a node's children and the head's mass outside its siblings; None where there is none."""
    return next(((c, masses[c]) for c in children if sampled[c]), None)


def _probabilities(p: Tensor, tokens: Sequence[Sequence[int]]) -> list[list[float]]:
    """p: [n, V]. Of some tokens of each row."""
    most = max(map(len, tokens))
    if not most:
        return [[] for _ in tokens]
    columns = torch.tensor([[*row, *[0] * (most - len(row))] for row in tokens])
    return [found[: len(row)] for found, row in zip(p.gather(1, columns).tolist(), tokens, strict=True)]


def _draw_with_slots(
    p: Tensor,
    q: Tensor,
    laws: DepthLaws,
    slots: Sequence[tuple[int, float] | None],
    xs: Sequence[int],
    siblings: Sequence[Sequence[tuple[int, float]]],
    coins: Sequence[float],
    draw: Tensor,
) -> tuple[list[tuple[int, float]], list[float]]:
    """One emitted token per row and its probability under p, and what is left of p: 1 - P(slot accepted).

    The sampled-child rule where a row has a slot, target-match elsewhere. p [n, V] becomes the residual; q: [n, M];
    xs: the slots' tokens; siblings: the deterministic children's tokens and their probabilities.
    """
    live = [slot is not None and slot[1] > MIN_MASS for slot in slots]
    scale = [1.0 / slot[1] if slot is not None and alive else 0.0 for slot, alive in zip(slots, live, strict=True)]
    # q_S as if S were empty; S is put right below. Rows without a live slot get the zero law.
    kept = subtract(p, q * torch.tensor(scale, dtype=q.dtype)[:, None], laws)
    flat = [(i, token, value) for i, some in enumerate(siblings) if live[i] for token, value in some]
    if flat:
        index, token, value = zip(*flat, strict=True)
        p[list(index), list(token)] = torch.tensor(value, dtype=p.dtype)  # on S the residual is p itself
    other, total = sample_and_sum(p, draw)
    pair = torch.stack((torch.tensor(xs), other), dim=1)
    columns = laws.vocabulary.to_column(pair)
    inside = columns.clamp_min(0)
    q_x = q.gather(1, inside[:, :1]).squeeze(1).tolist()
    p_pair = torch.where(columns >= 0, kept.gather(1, inside), p.gather(1, pair)).tolist()
    left, of_x = total.tolist(), columns[:, 0].tolist()
    drawn = []
    for i, (x, y) in enumerate(pair.tolist()):
        # Where nothing is left to draw from, rejection has probability 0 up to rounding: what was drawn is not used.
        q_s = q_x[i] * scale[i] if of_x[i] >= 0 else 0.0
        if live[i] and (coins[i] * q_s < p_pair[i][0] or left[i] <= 0):
            drawn.append((x, p_pair[i][0]))
        else:
            drawn.append((y, p_pair[i][1]))
    return drawn, left

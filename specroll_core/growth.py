"""Growing one request's tree best-first, before anything random happens to it.

`tree.py` explains the order of steps that keeps verification exact and calls this in that order.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from specroll_core.proposal import PathProposer
from specroll_core.scorer import NO_LOG_Q, Scorer

# Parent of the root, and of a node number that is not in use.
ROOT, UNUSED = -1, -2


@dataclass(frozen=True, slots=True)
class TreeOptions:
    """max_depth: deepest node. sampled_children: draw last children where it pays. chain: so many nodes of the top-1
    chain are taken before anything else. min_tail: smallest predicted acceptance that makes a sampled child."""

    max_depth: int = 8
    sampled_children: bool = True
    chain: int = 0
    min_tail: float = 0.02


class Child(NamedTuple):
    """One candidate: c = P(it is emitted | its parent was), the scorer's cell, and the head's log q."""

    token: int
    c: float
    cell: int
    log_q: float


class Sketch:
    """One request's tree while it is made: a column per property, an entry per node number.

    Node 0 is the pending token. Parents have smaller numbers than their children, and siblings are numbered in
    the order of their rank.
    """

    def __init__(self, pending: int, nodes: int) -> None:
        self.tokens = [pending] * nodes
        self.parents = [ROOT] + [UNUSED] * (nodes - 1)
        self.depths = [0] * nodes
        self.steps = [1.0] * nodes
        self.cells = [-1] * nodes
        self.log_q = [NO_LOG_Q] * nodes
        self.sampled = [False] * nodes
        self.tail_cells = [-1] * nodes
        self.masses = [0.0] * nodes
        self.states: list[Hashable] = [None] * nodes

    def __len__(self) -> int:
        return len(self.tokens)

    def children(self, parent: int) -> list[int]:
        return [node for node in range(parent + 1, len(self)) if self.parents[node] == parent]

    def below(self, top: int) -> list[int]:
        """The numbers of all nodes under `top`, ascending."""
        inside = {top}
        for node in range(top + 1, len(self)):
            if self.parents[node] in inside:
                inside.add(node)
        return sorted(inside - {top})


class Grower:
    """Grows one request's tree from the shared list of each depth and, where there is one, a path proposer.

    lists[d]: candidates at depth d + 1, best first. law_depth: deepest level that has a law to draw from.
    """

    def __init__(
        self,
        lists: Sequence[Sequence[Child]],
        scorer: Scorer,
        path: PathProposer | None,
        law_depth: int,
        options: TreeOptions,
    ) -> None:
        self._lists = lists
        self._scorer = scorer
        self._law_depth = law_depth
        self._options = options
        self._max_depth = min(options.max_depth, max(len(lists), path.max_depth if path else 0))
        self.path = path

    def grow(self, sketch: Sketch, top: int, numbers: Sequence[int]) -> None:
        """Puts the best nodes below `top` under the given ascending node numbers, as many as there are.

        What those numbers held before is forgotten; numbers without a candidate become unused.
        """
        if self.path is not None and top == 0:
            sketch.states[0] = self.path.root()
        chain = self._options.chain if top == 0 else 0
        scores = {top: 1.0}
        candidates: dict[int, Sequence[Child]] = {}
        heap: list[tuple[float, int, int]] = []
        chain_end = top

        def push(parent: int, rank: int) -> None:
            if rank < len(candidates[parent]):
                reserved = rank == 0 and parent == chain_end and sketch.depths[parent] < chain
                heappush(heap, (-2.0 if reserved else -scores[parent] * candidates[parent][rank].c, parent, rank))

        def open_node(node: int) -> None:
            if sketch.depths[node] < self._max_depth:
                candidates[node] = self._candidates(sketch, node)
                push(node, 0)

        for node in numbers:
            sketch.parents[node] = UNUSED
        open_node(top)
        for node in numbers:
            if not heap:
                break
            _, parent, rank = heappop(heap)
            child = candidates[parent][rank]
            self._put(sketch, node, parent, child)
            scores[node] = scores[parent] * child.c
            if rank == 0 and parent == chain_end:
                chain_end = node
            push(parent, rank + 1)
            open_node(node)

    def choose_slots(self, sketch: Sketch, numbers: Sequence[int]) -> None:
        """Among the nodes `numbers`, makes last children sampled where that is accepted more often than they are."""
        last: dict[int, int] = {}
        c_sum: dict[int, float] = {}
        q_sum: dict[int, float] = {}
        for node in numbers:
            parent = sketch.parents[node]
            if parent == UNUSED:
                continue
            if parent in last:
                before = last[parent]
                c_sum[parent] = c_sum.get(parent, 0.0) + sketch.steps[before]
                q_sum[parent] = q_sum.get(parent, 0.0) + math.exp(sketch.log_q[before])
            last[parent] = node
        for parent, node in last.items():
            depth = sketch.depths[node]
            if depth > self._law_depth:
                continue
            mass = 1.0 - q_sum.get(parent, 0.0)
            tail = self._scorer.tail(depth, mass, 1.0 - c_sum.get(parent, 0.0))
            if tail.c > max(sketch.steps[node], self._options.min_tail):
                sketch.sampled[node] = True
                sketch.steps[node] = tail.c
                sketch.cells[node] = -1
                sketch.tail_cells[node] = tail.cell

    def place_draw(self, sketch: Sketch, node: int, token: int, mass: float) -> None:
        """Sets the token of a sampled child and chooses anew what stands below it, inside its own node numbers."""
        sketch.tokens[node] = token
        sketch.masses[node] = mass
        if self.path is None:
            return  # the lists do not depend on the path: the same nodes would be chosen
        sketch.states[node] = self.path.descend(sketch.states[sketch.parents[node]], token)
        reserved = sketch.below(node)
        if reserved:
            self.grow(sketch, node, reserved)
            self.choose_slots(sketch, reserved)

    def _candidates(self, sketch: Sketch, node: int) -> Sequence[Child]:
        depth = sketch.depths[node] + 1
        shared: Sequence[Child] = self._lists[depth - 1] if depth <= len(self._lists) else ()
        if self.path is None or depth > self.path.max_depth:
            return shared
        suggested = {s.token: s for s in self.path.children(sketch.states[node])}
        if not suggested:
            return shared
        merged = []
        for child in shared:
            s = suggested.pop(child.token, None)
            if s is None:
                merged.append(child)
            else:
                score = self._scorer.score(child.log_q, s.prob, s.order, depth)
                merged.append(Child(child.token, score.c, score.cell, child.log_q))
        for s in suggested.values():
            score = self._scorer.score(NO_LOG_Q, s.prob, s.order, depth)
            merged.append(Child(s.token, score.c, score.cell, NO_LOG_Q))
        merged.sort(key=lambda child: -child.c)
        return merged

    def _put(self, sketch: Sketch, node: int, parent: int, child: Child) -> None:
        sketch.tokens[node], sketch.steps[node], sketch.cells[node], sketch.log_q[node] = child
        sketch.parents[node] = parent
        sketch.depths[node] = sketch.depths[parent] + 1
        sketch.sampled[node] = False
        sketch.tail_cells[node] = -1
        if self.path is not None:
            sketch.states[node] = self.path.descend(sketch.states[parent], child.token)

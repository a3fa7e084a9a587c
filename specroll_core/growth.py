"""Growing one request's tree best-first, before anything random happens to it.

`tree.py` explains the order of steps that keeps verification exact and calls this in that order.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from operator import itemgetter

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


# One candidate: token, c = P(it is emitted | its parent was), the scorer's cell, and the head's log q.
Child = tuple[int, float, int, float]

# The two sorted lists that a node's children come from.
_SHARED, _SUGGESTED = 0, 1

_by_c = itemgetter(1)


@dataclass(frozen=True, slots=True)
class _Suggested:
    """A path proposer's candidates at one state and depth, best first, and their tokens."""

    ranked: list[Child]
    tokens: set[int]


def _skip(shared: Sequence[Child], rank: int, extra: _Suggested) -> int:
    """The first rank from `rank` on whose token is not suggested as well."""
    while rank < len(shared) and shared[rank][0] in extra.tokens:
        rank += 1
    return rank


def _put_first(heap: list[tuple[float, int, int, int]], parent: int) -> None:
    """Lets the best child of `parent` be taken before all else."""
    entries = [entry for entry in heap if entry[1] == parent]
    if entries:
        best = min(entries)
        heap[heap.index(best)] = (-2.0, *best[1:])
        heapify(heap)


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

    def path_scores(self) -> list[float]:
        """P(emitted) of the nodes in use beside the root, in the order in which they were found. Before anything is
        drawn these are the first numbers."""
        paths = [1.0]
        for node in range(1, len(self)):
            if self.parents[node] == UNUSED:
                break
            paths.append(paths[self.parents[node]] * self.steps[node])
        return paths[1:]

    def keep(self, nodes: int) -> None:
        """Forgets all nodes but the first ones. No other hangs on them: parents have smaller numbers."""
        for column in (
            self.tokens, self.parents, self.depths, self.steps, self.cells, self.log_q, self.sampled, self.tail_cells,
            self.masses, self.states,
        ):  # fmt: skip
            del column[nodes:]

    def children(self, parent: int) -> list[int]:
        return [node for node in range(parent + 1, len(self)) if self.parents[node] == parent]

    def below(self, top: int) -> list[int]:
        """The numbers of all nodes under `top`, ascending."""
        parents, inside = self.parents, {top}
        if top not in parents:
            return []
        below = []
        for node in range(top + 1, len(parents)):
            if parents[node] in inside:
                inside.add(node)
                below.append(node)
        return below


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
        # log q by token, made for the depths at which it is looked up
        self._log_q: list[dict[int, float] | None] = [None] * len(lists)
        # (depth, state) -> scored suggestions
        self._known: dict[tuple[int, Hashable], _Suggested | None] = {}

    def grow(self, sketch: Sketch, top: int, numbers: Sequence[int]) -> None:
        """Puts the best nodes below `top` under the given ascending node numbers, as many as there are.

        What those numbers held before is forgotten; numbers without a candidate become unused. A node's children
        come from two sorted lists, which the heap merges: the depth's shared one, and the path proposer's
        suggestions, whose tokens are skipped in the former. No candidate is touched before its turn.
        """
        tokens, parents, depths, steps = sketch.tokens, sketch.parents, sketch.depths, sketch.steps
        cells, log_qs, states = sketch.cells, sketch.log_q, sketch.states
        sampled, tail_cells = sketch.sampled, sketch.tail_cells
        path, lists, max_depth = self.path, self._lists, self._max_depth
        if path is not None and top == 0:
            states[0] = path.root()
        chain = self._options.chain if top == 0 else 0
        chain_end = top
        scores = {top: 1.0}
        suggested: dict[int, _Suggested] = {}
        heap: list[tuple[float, int, int, int]] = []  # -score, parent, list, rank

        for node in numbers:
            parents[node] = UNUSED
        newest = top
        for node in numbers:
            # The newest node is opened only now: the last one never is.
            depth = depths[newest] + 1
            if depth <= max_depth:
                score = scores[newest]
                shared: Sequence[Child] = lists[depth - 1] if depth <= len(lists) else ()
                extra = None
                if path is not None and depth <= path.max_depth:
                    if newest != top:
                        states[newest] = path.descend(states[parents[newest]], tokens[newest])
                    extra = self._suggestions(states[newest], depth)
                rank = 0
                if extra is not None:
                    suggested[newest] = extra
                    heappush(heap, (-score * extra.ranked[0][1], newest, _SUGGESTED, 0))
                    rank = _skip(shared, 0, extra)
                if rank < len(shared):
                    heappush(heap, (-score * shared[rank][1], newest, _SHARED, rank))
                if newest == chain_end and depth <= chain:
                    _put_first(heap, newest)
            if not heap:
                break
            _, parent, which, rank = heappop(heap)
            extra = suggested.get(parent)
            depth = depths[parent] + 1
            ranked = lists[depth - 1] if which == _SHARED else suggested[parent].ranked
            tokens[node], step, cells[node], log_qs[node] = ranked[rank]
            steps[node] = step
            parents[node] = parent
            depths[node] = depth
            sampled[node] = False
            tail_cells[node] = -1
            parent_score = scores[parent]
            scores[node] = parent_score * step
            rank = rank + 1 if which == _SUGGESTED or extra is None else _skip(ranked, rank + 1, extra)
            if rank < len(ranked):
                heappush(heap, (-parent_score * ranked[rank][1], parent, which, rank))
            if parent == chain_end and depth <= chain:
                chain_end = node
            newest = node

    def choose_slots(self, sketch: Sketch, numbers: Sequence[int]) -> None:
        """Among the nodes `numbers`, makes last children sampled where that is accepted more often than they are."""
        parents, steps, log_q, depths = sketch.parents, sketch.steps, sketch.log_q, sketch.depths
        # parent -> its last child, and the sums of c and q over the others
        last: dict[int, tuple[int, float, float]] = {}
        for node in numbers:
            parent = parents[node]
            if parent == UNUSED:
                continue
            known = last.get(parent)
            if known is None:
                last[parent] = node, 0.0, 0.0
            else:
                before, c, q = known
                last[parent] = node, c + steps[before], q + math.exp(log_q[before])
        for node, c, q in last.values():
            depth = depths[node]
            if depth > self._law_depth:
                continue
            tail = self._scorer.tail(depth, 1.0 - q, 1.0 - c)
            if tail.c > max(steps[node], self._options.min_tail):
                sketch.sampled[node] = True
                steps[node] = tail.c
                sketch.cells[node] = -1
                sketch.tail_cells[node] = tail.cell

    def place_draw(self, sketch: Sketch, node: int, token: int, mass: float) -> None:
        """Sets the token of a sampled child and chooses anew what stands below it, inside its own node numbers."""
        sketch.tokens[node] = token
        sketch.masses[node] = mass
        if self.path is None:
            return  # the lists do not depend on the path: the same nodes would be chosen
        reserved = sketch.below(node)
        if reserved:
            if sketch.depths[node] < self.path.max_depth:
                sketch.states[node] = self.path.descend(sketch.states[sketch.parents[node]], token)
            self.grow(sketch, node, reserved)
            self.choose_slots(sketch, reserved)

    def _suggestions(self, state: Hashable, depth: int) -> _Suggested | None:
        """The path proposer's children of a state, scored; None where it has none."""
        assert self.path is not None
        key = depth, state
        if key in self._known:
            return self._known[key]
        found = self.path.children(state)
        if not found:
            self._known[key] = None
            return None
        log_q: dict[int, float] = {}
        if depth <= len(self._lists):
            known = self._log_q[depth - 1]
            if known is None:
                known = self._log_q[depth - 1] = {child[0]: child[3] for child in self._lists[depth - 1]}
            log_q = known
        score, ranked = self._scorer.score, []
        for token, prob, order in found:
            lq = log_q.get(token, NO_LOG_Q)
            c, cell = score(lq, prob, order, depth)
            ranked.append((token, c, cell, lq))
        if len(ranked) > 1:
            ranked.sort(key=_by_c, reverse=True)
        self._known[key] = made = _Suggested(ranked, {child[0] for child in ranked})
        return made

"""Growing from two sorted lists against choosing, again and again, the best of all candidates."""

from __future__ import annotations

import random

import pytest

from specroll_core.growth import UNUSED, Child, Grower, Sketch, TreeOptions
from specroll_core.scorer import NO_LOG_Q, CountTableScorer

Path = tuple[int, ...]


class Scattered:
    """Suggests a few tokens at random, the same ones for the same path."""

    def __init__(self, seed: int, max_depth: int) -> None:
        self.seed, self.max_depth = seed, max_depth
        self.asked: list[Path] = []

    def root(self) -> Path:
        return ()

    def descend(self, state: Path, token: int) -> Path:
        return (*state, token)

    def children(self, state: Path) -> list[tuple[int, float, int]]:
        self.asked.append(state)
        r = random.Random(hash((self.seed, state)))
        return [(token, r.random(), r.randrange(1, 9)) for token in r.sample(range(12), r.randrange(4))]


def candidates(lists: list[list[Child]], memory: Scattered, scorer: CountTableScorer, path: Path) -> dict[int, float]:
    """token -> c below a path, heads and memory merged."""
    depth = len(path) + 1
    shared = {token: (c, log_q) for token, c, _, log_q in lists[depth - 1]} if depth <= len(lists) else {}
    found = {token: c for token, (c, _) in shared.items()}
    if depth <= memory.max_depth:
        for token, p, order in memory.children(path):
            found[token] = scorer.score(shared.get(token, (0.0, NO_LOG_Q))[1], p, order, depth).c
    return found


def naive(
    lists: list[list[Child]], memory: Scattered, scorer: CountTableScorer, nodes: int, options: TreeOptions
) -> dict[Path, float]:
    """path -> c of the nodes beside the root."""
    chosen: dict[Path, float] = {(): 1.0}
    scores = {(): 1.0}
    chain: Path | None = ()
    while len(chosen) <= nodes:
        options_here = [
            (scores[path] * c, (*path, token), c)
            for path in chosen
            if len(path) < min(options.max_depth, max(len(lists), memory.max_depth))
            for token, c in candidates(lists, memory, scorer, path).items()
            if (*path, token) not in chosen
        ]
        if chain is not None and len(chain) < options.chain:
            options_here = [x for x in options_here if x[1][:-1] == chain] or options_here
        if not options_here:
            break
        score, path, c = max(options_here)
        if path[:-1] == chain:
            chain = path
        chosen[path], scores[path] = c, score
    del chosen[()]
    return chosen


@pytest.mark.parametrize("chain", [0, 3])
@pytest.mark.parametrize("nodes", [1, 4, 16, 40])
def test_the_nodes_are_the_best_ones(nodes: int, chain: int) -> None:
    r = random.Random(nodes)
    scorer = CountTableScorer.with_prior()
    options = TreeOptions(max_depth=5, chain=chain)
    for seed in range(30):
        lists = []
        for depth in range(r.randrange(4)):
            level = []
            for token in r.sample(range(12), 6):
                log_q = -0.3 - r.expovariate(0.5)  # no ties: the closed form is capped above
                level.append((token, *scorer.score(log_q, 0.0, 0, depth + 1), log_q))
            lists.append(sorted(level, key=lambda child: -child[1]))
        memory = Scattered(seed, max_depth=r.randrange(1, 7))
        sketch = Sketch(0, nodes + 1)
        Grower(lists, scorer, memory, 0, options).grow(sketch, 0, range(1, nodes + 1))
        paths: dict[int, Path] = {0: ()}
        got = {}
        for node in range(1, nodes + 1):
            if sketch.parents[node] != UNUSED:
                paths[node] = (*paths[sketch.parents[node]], sketch.tokens[node])
                got[paths[node]] = sketch.steps[node]
        assert len(memory.asked) == len(set(memory.asked)) <= nodes, "each state is asked once, the last node's never"
        assert got == pytest.approx(naive(lists, memory, scorer, nodes, options))

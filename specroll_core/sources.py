"""Who an accepted node came from: known from the cells that the scorer credits for it."""

from __future__ import annotations

from enum import IntEnum

from specroll_core.scorer import LOG_Q_STRIDE, MEMORY_STRIDE
from specroll_core.tree import DraftTree
from specroll_core.verified import Verified


class Source(IntEnum):
    """HEADS or MEMORY: suggested by one alone; BOTH: by both; SAMPLED: drawn from the heads' law as a last child.

    Heads are taken to suggest a token from log q = -7 on, the scorer's first edge, memory from a probability of 1e-4.
    """

    HEADS = 0
    MEMORY = 1
    BOTH = 2
    SAMPLED = 3


def source_of(cell: int, sampled: bool) -> Source:
    """cell: the scorer's, -1 for a sampled child."""
    if sampled:
        return Source.SAMPLED
    if cell % LOG_Q_STRIDE < MEMORY_STRIDE:
        return Source.HEADS
    return Source.BOTH if cell >= LOG_Q_STRIDE else Source.MEMORY


def accepted_sources(tree: DraftTree, verified: Verified) -> list[list[Source]]:
    """Of each request's accepted nodes, in the order of the walk."""
    rows = zip(
        verified.nodes.tolist(), verified.lengths.tolist(), tree.cells.tolist(), tree.sampled.tolist(), strict=True
    )
    return [
        [source_of(cells[node], sampled[node]) for node in nodes[1:length]] for nodes, length, cells, sampled in rows
    ]

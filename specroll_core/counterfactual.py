"""The tree that one request would have got of another proposal: its shape alone, with nothing drawn.

A comparison walks trees along the tokens that were emitted (`gate.py`) and counts a sampled child by its predicted
share, so it needs no draw, and none of the round's is looked at.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from specroll_core.gate import TreeTrace
from specroll_core.growth import Sketch, TreeOptions
from specroll_core.proposal import PathProposer, Proposal
from specroll_core.scorer import Scorer
from specroll_core.tree import growers


def proposal_of(proposal: Proposal, row: int, path: PathProposer | None) -> Proposal:
    """What is proposed for one request, with this path proposer in place of its own. Its laws are for `shape_of`."""
    rows = slice(row, row + 1)
    return replace(proposal, tokens=proposal.tokens[rows], log_q=proposal.log_q[rows], paths=(path,))


def shape_of(proposal: Proposal, scorer: Scorer, nodes: int, options: TreeOptions, *, sampled: bool) -> TreeTrace:
    """proposal: of one request; nodes: root included; sampled: the request may have sampled children."""
    (grower,) = growers(proposal, scorer, options, nodes)
    sketch = Sketch(0, nodes)
    grower.grow(sketch, 0, range(1, nodes))
    if sampled and options.sampled_children and proposal.laws is not None:
        grower.choose_slots(sketch, range(1, nodes))
    # Rounded as a tree's are: equal trees are to compare as equal.
    steps = torch.tensor(sketch.steps, dtype=torch.float32).tolist()
    return TreeTrace(sketch.tokens, sketch.parents, sketch.sampled, steps)

"""The sparse tree of one round: which candidates the target verifies in one forward.

Node 0 is the pending token. The tree grows best-first by the scorer's path probability; a child is considered only once
its parent stands, so the set is prefix-closed.

**Sampled children.** Where it pays, a parent's last child becomes a *slot*: its token X is drawn from the head's law
outside the other children (`verify.py` has the rule). The emitted law is exact only while nothing decided at the
parent depends on X: not the number of children, not their tokens, not whether the slot exists. `build_tree` has this
order built in, and no scorer or proposer can break it:

1. the whole shape is fixed while a deterministic candidate stands in for every X;
2. slots are chosen, still without any draw;
3. each X is drawn with a uniform of its own, parents before children;
4. only the nodes reserved below X are chosen anew, now knowing X. Slots among them are chosen and drawn the same way.

Scorers and proposers see tokens, never uniforms, and are asked about a parent's children for the last time
before that parent's X is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specroll_core.growth import UNUSED, Grower, Sketch, TreeOptions
from specroll_core.proposal import Proposal
from specroll_core.scorer import Scorer

# Ancestry is kept in one machine word per node.
MAX_NODES = 63


@dataclass(frozen=True)
class DraftTree:
    """Trees of B requests, padded to N nodes. Node 0 is the pending token; parents come before children.

    tokens, parents, depths: [B, N] int64; the root's parent is -1. valid: [B, N] bool; an invalid node, which may
    stand between valid ones, repeats the pending token at depth 0 with parent -1 and attends to itself.
    ancestor_mask: [B, N, N] bool, row i holds i and its ancestors. sampled: [B, N] bool, nodes whose token was
    drawn; slot_mass: [B, N] float64, the head's mass outside their siblings.
    step_scores: [B, N] float32, predicted P(node emitted | parent emitted); path_scores: products from the root.
    cells, tail_cells: [B, N] int64, the scorer's cells to credit, -1 for none.
    depth, any_sampled: deepest node and whether there is any slot, known on the host.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    valid: Tensor
    ancestor_mask: Tensor
    sampled: Tensor
    slot_mass: Tensor
    step_scores: Tensor
    path_scores: Tensor
    cells: Tensor
    tail_cells: Tensor
    depth: int
    any_sampled: bool

    @property
    def drafted(self) -> Tensor:
        """[B] int64: nodes beside the root."""
        return self.valid.sum(-1) - 1


def build_tree(
    pending: Sequence[int],
    proposal: Proposal,
    scorer: Scorer,
    budgets: Sequence[int],
    uniforms: Tensor,
    greedy: Sequence[bool] | None = None,
    options: TreeOptions | None = None,
    width: int | None = None,
    cut: Callable[[list[list[float]]], int] | None = None,
) -> DraftTree:
    """Builds the trees of B requests.

    pending: the B pending tokens. budgets: nodes per request, root included; 1 is plain decoding.
    uniforms: [B, N] float64 in [0, 1), N at least the largest budget. Only sampled children use them; they must be
    independent of each other and of the verifier's. greedy: requests at temperature 0, which get no
    sampled children. width: nodes to pad to, default the largest budget. cut: decides, from the path probabilities of
    each request's nodes in the order in which they were found, how many nodes all trees keep, the root included; before
    anything is drawn, so that it may depend on all of them.
    """
    options = options or TreeOptions()
    nodes = max(budgets) if width is None else width
    assert min(budgets) >= 1
    assert max(budgets) <= nodes <= MAX_NODES
    assert uniforms.shape[0] == len(pending) == len(budgets) == proposal.rows
    grown = growers(proposal, scorer, options, nodes)
    sketches = [Sketch(token, budget) for token, budget in zip(pending, budgets, strict=True)]
    for grower, sketch in zip(grown, sketches, strict=True):
        grower.grow(sketch, 0, range(1, len(sketch)))
    if cut is not None:
        nodes = cut([sketch.path_scores() for sketch in sketches])
        for sketch in sketches:
            sketch.keep(nodes)
    if options.sampled_children and proposal.laws is not None:
        for row, (grower, sketch) in enumerate(zip(grown, sketches, strict=True)):
            if greedy is None or not greedy[row]:
                grower.choose_slots(sketch, range(1, len(sketch)))
        _draw(sketches, grown, proposal, uniforms)
    return _assemble(sketches, nodes, proposal.tokens.device)


def plain_tree(pending: Sequence[int], device: torch.device | str = "cpu") -> DraftTree:
    """Trees of the root alone: plain decoding through the same verifier, with nothing proposed."""
    return _assemble([Sketch(token, 1) for token in pending], 1, torch.device(device))


def growers(proposal: Proposal, scorer: Scorer, options: TreeOptions, nodes: int) -> list[Grower]:
    """One for each request of a proposal. nodes: of the largest tree."""
    c, cells = scorer.score_depths(proposal.log_q)
    c, order = c.sort(dim=-1, descending=True, stable=True)
    # A tree of `nodes` cannot use more ranks than it has nodes beside the root.
    c, order = c[..., :nodes], order[..., :nodes]
    tokens, cells, log_q = (x.gather(-1, order) for x in (proposal.tokens, cells, proposal.log_q))
    columns = zip(tokens.tolist(), c.tolist(), cells.tolist(), log_q.tolist(), strict=True)
    law_depth = proposal.laws.depth if proposal.laws is not None else 0
    made = []
    for row, by_depth in enumerate(columns):
        lists = [list(zip(*level, strict=True)) for level in zip(*by_depth, strict=True)]
        made.append(Grower(lists, scorer, proposal.path(row), law_depth, options))
    return made


def _draw(sketches: list[Sketch], grown: list[Grower], proposal: Proposal, uniforms: Tensor) -> None:
    """Draws every slot's token: all at once where nothing below depends on it, else level by level."""
    assert proposal.laws is not None
    drawn: list[set[int]] = [set() for _ in sketches]
    while True:
        wave: list[tuple[int, int]] = []
        for row, sketch in enumerate(sketches):
            slots = [
                n for n, s in enumerate(sketch.sampled) if s and sketch.parents[n] != UNUSED and n not in drawn[row]
            ]
            if grown[row].path is not None:
                # What stands below a slot is chosen after its draw: take the outermost ones only.
                inside: set[int] = set()
                for slot in slots:
                    inside.update(sketch.below(slot))
                slots = [slot for slot in slots if slot not in inside]
            wave.extend((row, slot) for slot in slots)
        if not wave:
            return
        siblings = [_sibling_tokens(sketches[row], slot) for row, slot in wave]
        most = max(1, *map(len, siblings))
        device = uniforms.device
        where = torch.tensor([(row, slot, sketches[row].depths[slot]) for row, slot in wave], device=device)
        excluded = torch.tensor([s + [-1] * (most - len(s)) for s in siblings], device=device)
        tokens, mass = proposal.laws.draw(where[:, 0], where[:, 2], excluded, uniforms[where[:, 0], where[:, 1]])
        for (row, slot), token, left in zip(wave, tokens.tolist(), mass.tolist(), strict=True):
            drawn[row].add(slot)
            grown[row].place_draw(sketches[row], slot, token, left)


def _sibling_tokens(sketch: Sketch, slot: int) -> list[int]:
    return [sketch.tokens[node] for node in sketch.children(sketch.parents[slot]) if node != slot]


def _assemble(sketches: list[Sketch], nodes: int, device: torch.device) -> DraftTree:
    integers: list[list[list[int]]] = [[], [], [], [], [], [], []]
    floats: list[list[list[float]]] = [[], [], []]
    depth = 0
    for sketch in sketches:
        n, pad = len(sketch), nodes - len(sketch)
        words, paths = [1] * n, [1.0] * n
        for node in range(1, n):
            parent = sketch.parents[node]
            if parent == UNUSED:
                sketch.tokens[node], sketch.depths[node], sketch.steps[node] = sketch.tokens[0], 0, 0.0
                sketch.sampled[node], sketch.cells[node], sketch.tail_cells[node] = False, -1, -1
                words[node], paths[node] = 1 << node, 0.0
            else:
                words[node] = words[parent] | 1 << node
                paths[node] = paths[parent] * sketch.steps[node]
                depth = max(depth, sketch.depths[node])
        empty, none = [0] * pad, [-1] * pad
        integers[0].append(sketch.tokens + [sketch.tokens[0]] * pad)
        integers[1].append(sketch.parents + [UNUSED] * pad)
        integers[2].append(sketch.depths + empty)
        integers[3].append([int(s) for s in sketch.sampled] + empty)
        integers[4].append(sketch.cells + none)
        integers[5].append(sketch.tail_cells + none)
        integers[6].append(words + [1 << node for node in range(n, nodes)])
        floats[0].append(sketch.masses + [0.0] * pad)
        floats[1].append(sketch.steps + [0.0] * pad)
        floats[2].append(paths + [0.0] * pad)
    tokens, parents, depths, sampled, cells, tail_cells, bits = torch.tensor(integers, device=device)
    mass, steps, path_scores = torch.tensor(floats, dtype=torch.float64, device=device)
    return DraftTree(
        tokens=tokens,
        parents=parents.clamp_min(-1),
        depths=depths,
        valid=parents != UNUSED,
        ancestor_mask=(bits[:, :, None] >> torch.arange(nodes, device=device)) & 1 == 1,
        sampled=sampled == 1,
        slot_mass=mass,
        step_scores=steps.float(),
        path_scores=path_scores.float(),
        cells=cells,
        tail_cells=tail_cells,
        depth=depth,
        any_sampled=any(any(s.sampled) for s in sketches),
    )

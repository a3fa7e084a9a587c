"""Insurance: a part of Reflex that makes proposals worse is switched off, and comes back once it would help.

Now and then a round's tree is built a second time, with the part switched the other way. Nothing is decided at that
time. Once the trajectory has gone on, both trees are walked along the tokens that were really emitted: these have the
target's law whatever was proposed, so neither tree is favoured, and the coins of the round itself are never looked at.
The comparison goes on while the part is off, so no live trial is needed to find that it would help again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from specroll_core.tree import DraftTree

# Trees that wait for a slot's next tokens; a round in which more would wait compares nothing.
_MOST_WAITING = 16


@dataclass(frozen=True, slots=True)
class TreeTrace:
    """One request's tree on the host: columns of `DraftTree`, one entry per node."""

    tokens: list[int]
    parents: list[int]
    sampled: list[bool]
    steps: list[float]

    @staticmethod
    def of(tree: DraftTree, row: int) -> TreeTrace:
        parents = tree.parents[row].masked_fill(~tree.valid[row], -2)
        return TreeTrace(
            tree.tokens[row].tolist(), parents.tolist(), tree.sampled[row].tolist(), tree.step_scores[row].tolist()
        )

    def accepted(self, ahead: Sequence[int]) -> float:
        """Tokens of `ahead` that the tree would have had accepted.

        Where they leave the deterministic children, a sampled child counts by its predicted share of the rest, and the
        walk ends: what would stand below it depends on a draw.
        """
        node, found = 0, 0.0
        for token in ahead:
            children = [n for n, parent in enumerate(self.parents) if parent == node]
            known = [n for n in children if not self.sampled[n]]
            hit = next((n for n in known if self.tokens[n] == token), None)
            if hit is None:
                slot = next((n for n in children if self.sampled[n]), None)
                if slot is not None:
                    rest = max(1 - sum(self.steps[n] for n in known), self.steps[slot], 1e-6)
                    found += self.steps[slot] / rest
                break
            node = hit
            found += 1
        return found


@dataclass(frozen=True, slots=True)
class GateOptions:
    """every: rounds between two comparisons. window: comparisons after which old ones have lost most of their weight.
    least: comparisons before anything is switched. loss: smallest loss that matters, as a share of the tokens per step
    without the part. z: how many standard errors a mean must be away; comparisons of one trajectory resemble each
    other, so it is larger than independent ones would need."""

    every: int = 16
    window: int = 2000
    least: int = 200
    loss: float = 0.003
    z: float = 3.0

    def __post_init__(self) -> None:
        if min(self.every, self.window, self.least) < 1:
            raise ValueError("every, window and least must be at least 1.")
        if self.loss < 0 or self.z <= 0:
            raise ValueError("loss must be at least 0 and z above 0.")


class PartGate:
    """Whether one part is on, from what trees achieve with and without it."""

    def __init__(self, options: GateOptions | None = None, on: bool = True) -> None:
        self.options = options or GateOptions()
        self.on = on
        self.comparisons = 0
        self.switches = 0
        self._rounds = 0
        # Sums of weights, squared weights, gains, squared gains, and tokens per step without the part.
        self._sums = [0.0] * 5

    def due(self) -> bool:
        """Counts a round; true where its tree is to be compared."""
        self._rounds += 1
        return self._rounds % self.options.every == 0

    def record(self, with_part: float, without: float) -> None:
        """Tokens accepted of the same stretch by a tree with the part and by one without."""
        keep = 1 - 1 / self.options.window
        gain = with_part - without
        w, w2, g, g2, base = self._sums
        self._sums = [
            keep * w + 1,
            keep * keep * w2 + 1,
            keep * g + gain,
            keep * g2 + gain * gain,
            keep * base + 1 + without,
        ]
        self.comparisons += 1
        if self.comparisons >= self.options.least:
            self._decide()

    @property
    def turn(self) -> int:
        """Number of the last round that was due."""
        return self._rounds // self.options.every

    @property
    def gain(self) -> float:
        """Mean gain in tokens per step, of recent comparisons; 0 before the first."""
        return self._sums[2] / self._sums[0] if self.comparisons else 0.0

    @property
    def standard_error(self) -> float:
        """Of `gain`."""
        w, w2, g, g2, _ = self._sums
        if self.comparisons < 2:
            return math.inf
        variance = max(0.0, g2 / w - (g / w) ** 2)
        return math.sqrt(variance * w2) / w

    def halve(self) -> None:
        """Halves the evidence: the heads have changed."""
        self._sums = [0.5 * s if i != 1 else 0.25 * s for i, s in enumerate(self._sums)]

    def _decide(self) -> None:
        margin = self.options.z * self.standard_error
        base = self._sums[4] / self._sums[0]
        if self.on and self.gain + margin < -self.options.loss * base:
            self.on = False
            self.switches += 1
        elif not self.on and self.gain - margin > 0:
            self.on = True
            self.switches += 1


class Comparisons:
    """Pairs of trees that wait until the tokens after them are known. Bounded per slot, dropped with it."""

    def __init__(self, gate: PartGate, depth: int) -> None:
        """depth: tokens to wait for; no tree is deeper."""
        self.gate = gate
        self._depth = depth
        self._waiting: dict[Hashable, deque[tuple[TreeTrace, TreeTrace, list[int]]]] = {}

    def open(self, slot: Hashable) -> None:
        self._waiting.pop(slot, None)

    def add(self, slot: Hashable, with_part: TreeTrace, without: TreeTrace) -> None:
        """Two trees over the slot's pending token."""
        waiting = self._waiting.setdefault(slot, deque())
        if len(waiting) < _MOST_WAITING:
            waiting.append((with_part, without, []))

    def observe(self, slot: Hashable, tokens: Sequence[int]) -> None:
        """What the slot has emitted behind its pending token, in order."""
        waiting = self._waiting.get(slot)
        if not waiting:
            return
        for _, _, ahead in waiting:
            ahead.extend(tokens)
        while waiting and len(waiting[0][2]) >= self._depth:
            with_part, without, ahead = waiting.popleft()
            self.gate.record(with_part.accepted(ahead[: self._depth]), without.accepted(ahead[: self._depth]))

    def close(self, slot: Hashable) -> None:
        """Drops what still waits: the end of a trajectory would count trees short."""
        self._waiting.pop(slot, None)

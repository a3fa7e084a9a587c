"""The gates of a worker's parts beside SGLang's requests: who is compared, and what each has emitted since.

Rows of SGLang's pool name the requests, since they are few and their number is fixed; a row whose request is another
one, or has emitted what was not seen here, begins anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict

from services.rollout.completion import PartState
from specroll_core.gate import Comparisons, GateOptions, PartGate, TreeTrace


class PartGates:
    """One per worker. Parts that have no gate are always on."""

    def __init__(self, parts: Iterable[str], depth: int, options: GateOptions | None = None) -> None:
        """depth: of the deepest node."""
        self._gates = {part: PartGate(options) for part in parts}
        self._waiting = {part: Comparisons(gate, depth) for part, gate in self._gates.items()}
        # row: the request's id, and how many tokens it had emitted when it was last seen
        self._seen: dict[int, tuple[str, int]] = {}

    def is_on(self, part: str) -> bool:
        gate = self._gates.get(part)
        return gate is None or gate.on

    def due(self, part: str) -> bool:
        """Counts a round of this part; true where one of its trees is to be compared."""
        gate = self._gates.get(part)
        return gate is not None and gate.due()

    def turn(self, part: str, count: int) -> int:
        """Which of `count` requests it is for: each in its turn."""
        return self._gates[part].turn % count

    def compare(self, part: str, request, row: int, actual: TreeTrace, other: TreeTrace) -> None:
        """actual: the tree of this round; other: what it would be with the part switched the other way."""
        now = request.rid, len(request.output_ids)
        if self._seen.get(row) != now:
            self._forget(row)
            self._seen[row] = now
        pair = (actual, other) if self._gates[part].on else (other, actual)
        self._waiting[part].add(row, *pair)

    def observe(self, requests: Sequence, rows: Sequence[int], emitted: Sequence[Sequence[int]]) -> None:
        """What each request emits this round, before SGLang has taken it in."""
        if not self._seen:
            return
        for request, row, tokens in zip(requests, rows, emitted, strict=True):
            seen = self._seen.get(row)
            if seen is None:
                continue
            if seen != (request.rid, len(request.output_ids)):
                self._forget(row)
                continue
            self._seen[row] = request.rid, seen[1] + len(tokens)
            for waiting in self._waiting.values():
                waiting.observe(row, tokens)

    def halve(self) -> None:
        """The heads have changed."""
        for gate in self._gates.values():
            gate.halve()

    def record(self) -> list[dict[str, str | int | float | bool]]:
        """The fields of a `PartState` for each part, as plain values for SGLang's messages."""
        return [
            asdict(
                PartState(
                    part=part,
                    on=gate.on,
                    gain=gate.gain,
                    standard_error=gate.standard_error if gate.comparisons > 1 else 0.0,
                    comparisons=gate.comparisons,
                    switches=gate.switches,
                )
            )
            for part, gate in self._gates.items()
        ]

    def _forget(self, row: int) -> None:
        self._seen.pop(row, None)
        for waiting in self._waiting.values():
            waiting.close(row)

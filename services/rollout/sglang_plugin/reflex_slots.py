"""Reflex's state beside SGLang's requests: which row of its pool belongs to whom, through retraction and to the end.

A row passes from one request to the next without notice, so what is kept for it carries the request's id and is
looked at with it only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from services.config import SpeculationConfig
from services.rollout.sglang_plugin.overrides import override_of
from specroll_core.proposal import PathProposer
from specroll_core.reflex import MemoryClasses, Reflex, ReflexOptions

# The parts of a `SpeculationOverride` that are kept here.
MEMORY, OWN_MEMORY, LOOKUP = "memory", "own-memory", "lookup"
# On a request: the `ReflexSlots` that keeps something for it.
_KEEPER = "specroll_reflex"


class ReflexSlots:
    """One per worker. Memory of a request's own tokens alone, and plain prompt lookup, have states of
    their own: a request asks for one of the three."""

    def __init__(self, config: SpeculationConfig, classes: MemoryClasses | None = None) -> None:
        """classes: what the memories are made of, None for Python's."""
        self.enabled = config.memory != "off"
        self._default: str | None = MEMORY if self.enabled else None
        options = ReflexOptions(memory=config.memory, siblings=config.siblings, table=config.table)
        self._states = {
            MEMORY: Reflex(options, classes),
            OWN_MEMORY: Reflex(replace(options, siblings=False, table=False), classes),
            LOOKUP: Reflex(ReflexOptions(memory="suffix", siblings=False), classes),
        }
        # Spent so far on requests that had begun while nothing was kept for them.
        self.catching_up_seconds = 0.0
        self._row_of: dict[str, tuple[int, str]] = {}
        self._owner: dict[int, str] = {}

    def __len__(self) -> int:
        """Requests that something is kept for."""
        return len(self._row_of)

    def wanted(self, request) -> str | None:
        """The part that a request asks for, None for none."""
        parts = override_of(request).get("parts")
        if parts is None:
            return self._default
        return next((part for part in (MEMORY, OWN_MEMORY, LOOKUP) if part in parts), None)

    def proposers(self, requests: Sequence, rows: Sequence[int]) -> list[PathProposer | None]:
        """What proposes for each request's next round. rows: the requests' rows in SGLang's pool."""
        found: list[PathProposer | None] = []
        for request, row in zip(requests, rows, strict=True):
            part = self.wanted(request)
            if part is None:
                found.append(None)
                continue
            if self._row_of.get(request.rid) != (row, part):
                began = time.perf_counter()
                self._open(request, row, part)
                # A new request is opened whenever there is drafting; one that has begun, after a pause only.
                if request.output_ids:
                    self.catching_up_seconds += time.perf_counter() - began
            found.append(self._states[part].proposer(row))
        return found

    def observe(self, requests: Sequence, rows: Sequence[int], emitted: Sequence[Sequence[int]]) -> None:
        """What each request emits this round. Requests that nothing is kept for are passed over: should they ever be
        drafted for, all their tokens are taken in at once."""
        for request, row, tokens in zip(requests, rows, emitted, strict=True):
            kept = self._row_of.get(request.rid)
            if kept is not None and kept[0] == row:
                self._states[kept[1]].observe(row, tokens)

    def _open(self, request, row: int, part: str) -> None:
        self.close(request.rid, ended=False)
        if (other := self._owner.get(row)) is not None:
            self.close(other, ended=False)
        group = override_of(request).get("group")
        self._states[part].open(row, request.origin_input_ids, group, request.output_ids)
        setattr(request, _KEEPER, self)
        self._row_of[request.rid] = row, part
        self._owner[row] = request.rid

    def close(self, rid: str, ended: bool) -> None:
        """Drops what is kept for a request. ended: it is not to be taken up again."""
        kept = self._row_of.pop(rid, None)
        if kept is not None:
            row, part = kept
            del self._owner[row]
            self._states[part].close(row, ended)


def finish(requests: Sequence) -> None:
    """Drops what is kept for those of SGLang's requests that have finished or were aborted."""
    for request in requests:
        if request.finished() and (keeper := getattr(request, _KEEPER, None)) is not None:
            keeper.close(request.rid, ended=True)

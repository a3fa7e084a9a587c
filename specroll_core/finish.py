"""Ending a request inside an accepted block: where it is cut, why, and what its counters say.

The emitted tokens of a round are looked at one by one, as plain decoding would: the first stop token ends the
request there, before the length cap is looked at; the cap ends it otherwise. Nothing after the cut is emitted,
counted or logged, so a speculative request finishes exactly where the plain one would.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from specroll_core.contracts import FinishReason, SpecCounters
from specroll_core.sources import Source


@dataclass(frozen=True, slots=True)
class Cut:
    """kept: how many of the block's tokens are emitted. reason: None where the request goes on."""

    kept: int
    reason: FinishReason | None


def cut_block(block: Sequence[int], stop_ids: Collection[int], emitted: int, max_new_tokens: int) -> Cut:
    """Cuts one round's tokens. emitted: tokens of earlier rounds, below max_new_tokens.

    The stop token itself is kept. A stop token that is also the last one allowed ends as STOP; one beyond the
    cap is never reached.
    """
    assert 0 <= emitted < max_new_tokens
    room = max_new_tokens - emitted
    for i, token in enumerate(block[:room]):
        if token in stop_ids:
            return Cut(i + 1, FinishReason.STOP)
    return Cut(room, FinishReason.LENGTH) if len(block) >= room else Cut(len(block), None)


def cut_at(block_length: int, first_stop: int | None, emitted: int, max_new_tokens: int) -> Cut:
    """The same where the stop was found in another way (a stop string, a grammar): `first_stop` is the index of the
    token that completes it."""
    room = max_new_tokens - emitted
    if first_stop is not None and first_stop < min(block_length, room):
        return Cut(first_stop + 1, FinishReason.STOP)
    return Cut(room, FinishReason.LENGTH) if block_length >= room else Cut(block_length, None)


@dataclass(slots=True)
class SpecTally:
    """Counts one request's rounds. An accepted node whose token was cut off counts as drafted only."""

    verify_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    accepted_by_source: list[int] = field(default_factory=lambda: [0] * len(Source))

    def add(self, drafted: int, accepted: int, kept: int, sources: Sequence[int]) -> None:
        """One round. drafted: nodes beside the root; accepted: nodes walked to; kept: tokens after the cut.
        sources: who the accepted nodes came from (`Source`), in the order of the walk.

        A round of `accepted` nodes emits accepted + 1 tokens; token i is that of the accepted node at depth i + 1.
        """
        assert 0 <= accepted <= drafted
        assert 1 <= kept <= accepted + 1
        counted = min(accepted, kept)
        self.verify_steps += 1
        self.drafted += drafted
        self.accepted += counted
        self.accepted_by_depth.extend([0] * (counted - len(self.accepted_by_depth)))
        for depth in range(counted):
            self.accepted_by_depth[depth] += 1
            self.accepted_by_source[sources[depth]] += 1

    def counters(self) -> SpecCounters:
        return SpecCounters(
            self.verify_steps,
            self.drafted,
            self.accepted,
            tuple(self.accepted_by_depth),
            tuple(self.accepted_by_source) if self.accepted else (),
        )

"""Rounds of each request on their way from the scheduler to the engine.

SGLang's own counters know no tree of varying width and count what a stop cuts off. The worker notes every round on the
request; with its last message a request hands them over, and the engine, which knows how many tokens survived, counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from specroll_core.contracts import SpecCounters
from specroll_core.finish import SpecTally

META_KEY = "specroll_rounds"
STATS_KEY = "specroll_stats"
_ATTRIBUTE = "specroll_rounds"


class Round(NamedTuple):
    """start: tokens that the request had emitted before. drafted: nodes beside the root. accepted: nodes walked to."""

    start: int
    drafted: int
    accepted: int


def note_round(request, drafted: int, accepted: int) -> None:
    """request: SGLang's `Req`, whose `output_ids` do not hold this round's tokens yet."""
    if not hasattr(request, _ATTRIBUTE):
        setattr(request, _ATTRIBUTE, [])
    getattr(request, _ATTRIBUTE).append((len(request.output_ids), drafted, accepted))


def finished_rounds(requests: Sequence) -> dict[str, list[list[tuple[int, int, int]]]]:
    """What `SchedulerOutputStreamer.build_additional_customized_info` returns: the rounds of finished requests."""
    return {META_KEY: [getattr(request, _ATTRIBUTE, []) if request.finished() else [] for request in requests]}


def count(rounds: Iterable[Sequence[int]], tokens: int) -> SpecCounters:
    """The counters of a request that ended with `tokens` tokens."""
    tally = SpecTally()
    for start, drafted, accepted in rounds:
        kept = min(accepted + 1, tokens - start)
        if kept >= 1:
            tally.add(drafted, accepted, kept)
    return tally.counters()

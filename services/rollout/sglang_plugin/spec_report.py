"""Rounds of each request on their way from the scheduler to the engine.

SGLang's own counters know no tree of varying width and count what a stop cuts off. The worker notes every round on the
request; with its last message a request hands them over, and the engine, which knows how many tokens survived, counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from services.rollout.completion import Round
from specroll_core.contracts import SpecCounters
from specroll_core.finish import SpecTally

META_KEY = "specroll_rounds"
STATS_KEY = "specroll_stats"
PARTS_KEY = "specroll_parts"
_ATTRIBUTE = "specroll_rounds"


def note_round(request, drafted: int, sources: Sequence[int]) -> None:
    """request: SGLang's `Req`, whose `output_ids` do not hold this round's tokens yet; drafted: nodes beside the root;
    sources: of the nodes walked to."""
    if not hasattr(request, _ATTRIBUTE):
        setattr(request, _ATTRIBUTE, [])
    # A plain tuple: this travels through SGLang's messages.
    getattr(request, _ATTRIBUTE).append((len(request.output_ids), drafted, len(sources), tuple(map(int, sources))))


def finished_rounds(requests: Sequence) -> dict[str, list[list[tuple]]]:
    """What `SchedulerOutputStreamer.build_additional_customized_info` returns: the rounds of finished requests."""
    return {META_KEY: [getattr(request, _ATTRIBUTE, []) if request.finished() else [] for request in requests]}


def rounds_of(meta: Mapping[str, Any]) -> tuple[Round, ...]:
    """What a request's last message says of its rounds."""
    return tuple(
        Round(start, drafted, accepted, tuple(sources)) for start, drafted, accepted, sources in meta.get(META_KEY, ())
    )


def count_rounds(rounds: Iterable[Round], tokens: int) -> SpecCounters:
    """The counters of a request that ended with `tokens` tokens."""
    tally = SpecTally()
    for entry in rounds:
        kept = min(entry.accepted + 1, tokens - entry.start)
        if kept >= 1:
            tally.add(entry.drafted, entry.accepted, kept, entry.sources)
    return tally.counters()

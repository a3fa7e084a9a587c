"""What the engine returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from specroll_core.contracts import FinishReason, SpecCounters, VersionSpan


class EngineError(RuntimeError):
    """The engine cannot serve: it did not start, or one of its processes died."""


class PolicyUpdateError(RuntimeError):
    """An update failed after it had begun; the message says which policy serves now."""


@dataclass(frozen=True, slots=True)
class SpeculationOverride:
    """How one request is drafted for, where it differs from the configuration; its law is the same in any case.

    nodes: verified per step, the pending token included; 1 is plain decoding, None leaves it to the configuration.
    rule: as in the configuration. parts: the proposers to ask, of "heads", "memory", "own-memory" (the same without
    siblings and table), "lookup" (a plain match of the last tokens, as in prompt lookup), and "correction" or
    "correction-group", which correct the heads' states with what this trajectory, or its group, has shown; None for the
    configured ones, as far as they are not switched off for proposing worse. Parts that the engine does not have are
    ignored.
    group: equal for completions of one prompt that may learn from each other.
    """

    nodes: int | None = None
    rule: Literal["sampled_child", "target_match"] | None = None
    parts: tuple[str, ...] | None = None
    group: str | None = None


class Round(NamedTuple):
    """One verification. start: tokens that had been emitted before. drafted: nodes beside the root. accepted: nodes
    walked to. sources: who each of those came from (`specroll_core.sources.Source`)."""

    start: int
    drafted: int
    accepted: int
    sources: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """A sampled completion.

    token_ids: every token that was sampled, a stop token and the tokens of a stop string included.
    logprobs: of the final law (temperature, penalties, bias, top-k, top-p, min-p), one per token; 0 at temperature 0.
    policy_version_spans: cover [0, len(token_ids)), as do head_version_spans where speculation is on, with version 0
    for none. cached_tokens: prompt tokens whose keys and values were reused.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    policy_version_spans: tuple[VersionSpan, ...]
    cached_tokens: int
    head_version_spans: tuple[VersionSpan, ...] = ()
    rounds: tuple[Round, ...] = ()
    spec: SpecCounters = field(default_factory=SpecCounters)


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """Tokens since the previous delta. `completion`, the whole of it, comes with the last one only."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    completion: Completion | None = None


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """pause_seconds: during which nothing was sampled. in_flight: requests that were kept across the update."""

    pause_seconds: float
    in_flight: int


@dataclass(slots=True)
class SpeculationStats:
    """Sums over all verification rounds since the engine started.

    plain_rounds: in which nothing was drafted. requests: of all rounds; emitted / requests is the acceptance length,
    what ends cut off included. drafted: nodes beside the roots. Seconds of the scheduler's process: heads and trees,
    the target's forward, the walk and what follows it (in plain rounds sampling). prefill_seconds: of prompts, which
    are no rounds. plain_seconds: what the same tokens would have taken by plain rounds, as those were measured
    meanwhile. clock_seconds: when this was read.
    """

    rounds: int = 0
    plain_rounds: int = 0
    requests: int = 0
    drafted: int = 0
    emitted: int = 0
    propose_seconds: float = 0.0
    forward_seconds: float = 0.0
    verify_seconds: float = 0.0
    prefill_seconds: float = 0.0
    plain_seconds: float = 0.0
    clock_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Of all rounds."""
        return self.propose_seconds + self.forward_seconds + self.verify_seconds

    def add(
        self, requests: int, nodes: int, drafted: int, emitted: int, propose: float, forward: float, verify: float
    ) -> None:
        """One round of `nodes` nodes per request."""
        self.rounds += 1
        self.plain_rounds += nodes == 1
        self.requests += requests
        self.drafted += drafted
        self.emitted += emitted
        self.propose_seconds += propose
        self.forward_seconds += forward
        self.verify_seconds += verify


@dataclass(frozen=True, slots=True)
class PartState:
    """A part of Reflex and its gate. gain: tokens per step that recent comparisons say it adds, with its standard error
    (0 before the second). comparisons: so far. switches: how often it was switched off or on again."""

    part: str
    on: bool
    gain: float
    standard_error: float
    comparisons: int
    switches: int


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """running, waiting: requests in the model's batch and before it. tokens_total: sampled since the start."""

    policy_version: int
    running: int
    waiting: int
    tokens_total: int
    alive: bool

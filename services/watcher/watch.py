"""What the watcher decides: when to train, what to publish, when to take it back. No I/O of its own.

no heads, enough rows ------------> train
the policy has moved on ----------> train, on few rows of it; where that brings nothing the next time on twice as many
degraded for a while -------------> put the serving copies right where they are not what was published, else train
trained, and the gate passes -----> publish, swap, and watch the new version against what the old one did;
                                    once there are twice the rows, train again: few rows bring most of the gain
trained, and the gate does not ---> keep the heads; what they do now is the new normal, unless the gate could not rule
                                    out a gain: then the same again with twice the rows
the new version is worse ---------> back to the one before it, and never this one again
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any

from specroll_core.drift import DriftCheck, DriftConfig, DriftDetector, DriftRecord

log = logging.getLogger(__name__)

# Checks after a swap in which the new version is compared with the old one.
_TRIAL_CHECKS = 8
# After a gate that did not pass: how much longer to wait each time, and the longest.
_LONGEST_PATIENCE_SECONDS = 3600.0


@dataclass(slots=True)
class Events:
    """What a record led to. kinds: check, alarm, degraded, worse, kept."""

    happened: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def add(self, kind: str, **facts: Any) -> None:
        self.happened.append((kind, facts))


class Watch:
    """Follows one version of the heads. `version` 0 means that there are none.

    `wants_training` and `wants_rollback` stay true until they are answered by one of the methods below.
    """

    def __init__(self, config: DriftConfig, version: int) -> None:
        self._config = config
        self.version = version
        self.detector = DriftDetector(config, version)
        self._trial: DriftDetector | None = None
        self._trial_checks = 0
        self._refusals = 0
        self._not_before = -math.inf
        self.degraded_since: float | None = None
        self.wants_rollback = ""
        self.improving = False
        self.moved = False
        self._alarmed = False
        self.last: DriftCheck | None = None
        self.records = 0

    @property
    def on_trial(self) -> bool:
        return self._trial is not None

    def wants_training(self, now: float) -> bool:
        """now: seconds, of the clock that records bear."""
        needed = self.version == 0 or self.degraded_since is not None or self.improving or self.moved
        return needed and not self.wants_rollback and now >= self._not_before

    def observe(self, record: DriftRecord) -> Events:
        """Takes one record of feedback."""
        events = Events()
        self.records += 1
        if self._trial is not None:
            self._observe_trial(self._trial, record, events)
        check = self.detector.observe(record)
        if check is None:
            return events
        self.last = check
        events.add("check", **check.to_json())
        if check.collapsed and not self._alarmed:
            self._alarmed = True
            events.add("alarm", version=self.version, acceptance=check.acceptance)
        if check.triggered and not self.wants_rollback and self.degraded_since is None:
            self.degraded_since = check.at
            self.detector.restart_windows()  # they began before the drift, and a trial compares with what is in them
            events.add("degraded", version=self.version, fall=check.fall, z=check.z, at=check.at)
        return events

    def policy_moved(self) -> None:
        """Enough has come of later policies for a training to be worth trying."""
        self.moved = True
        self.detector.mark()

    def repaired(self) -> None:
        """The serving copies were not what was published, and are again: the same reference judges them."""
        self.degraded_since = None
        self._alarmed = False
        self.detector.restart_windows()

    def swapped(self, version: int) -> None:
        """Another version serves, trained by us: it is on trial against what the old one did of late."""
        old, drifted = self.version, self.degraded_since is not None or self.moved
        self._trial = self.detector.successor(version, drifted=drifted) if old else None
        self._trial_checks = 0
        self._begin(version)
        self._refusals = 0
        self.improving = True

    def rolled_back(self, version: int) -> None:
        """An earlier version serves again, 0 where there is none."""
        self._begin(version)
        self.improving = False
        self._trial = None

    def refused(self, now: float, *, undecided: bool = False, moved: bool = False) -> None:
        """The gate did not pass. What the heads do now is what later is compared with, and the next attempt waits.

        undecided: few rows could not rule out a gain. Then training is still wanted, after a pause; whoever trains
        takes more of them. moved: the policy's moving was the reason, and nothing else was answered.
        """
        self.moved = False
        if moved:
            return
        if undecided:
            self.postponed(now)
            return
        tried = self.improving
        self.improving = False
        if tried and self.degraded_since is None:
            return  # more rows bring no more: these heads are as good as they get
        self._refusals += 1
        pause = max(1.0, self._config.cooldown_seconds) * 2**self._refusals
        self._not_before = now + min(pause, _LONGEST_PATIENCE_SECONDS)
        self.degraded_since = None
        self.detector.reset(self.version)

    def postponed(self, now: float) -> None:
        """Nothing went wrong with training itself: it is wanted again after a cool-down."""
        self._not_before = max(self._not_before, now + self._config.cooldown_seconds)

    def failed(self, now: float) -> None:
        """Training could not be finished: the same again, later."""
        self._refusals += 1
        pause = max(1.0, self._config.cooldown_seconds) * 2**self._refusals
        self._not_before = now + min(pause, _LONGEST_PATIENCE_SECONDS)

    def _begin(self, version: int) -> None:
        self.version = version
        self.detector.reset(version)
        self.degraded_since = None
        self.moved = False
        self.wants_rollback = ""
        self._alarmed = False

    def _observe_trial(self, trial: DriftDetector, record: DriftRecord, events: Events) -> None:
        check = trial.observe(record)
        if check is None:
            return
        self._trial_checks += 1
        if check.triggered:
            self.wants_rollback = (
                f"acceptance {check.acceptance:.3f} against {check.reference:.3f} of the version before it, in "
                f"{check.streak} checks one after the other"
            )
            self._trial = None
            events.add("worse", version=self.version, **check.to_json())
        elif self._trial_checks >= _TRIAL_CHECKS:
            self._trial = None
            events.add("kept", version=self.version, acceptance=check.acceptance, reference=check.reference)

"""Has drafting got worse, for good? Decided from what the verifier saw, record by record.

A trigger, not a timer: heads stay good for many policy updates, and retraining good ones gains nothing. Three things
make acceptance vary without any drift, and each has its counterpart here:

- it depends on temperature and on the number of nodes, so records are compared within *strata* only;
- trajectories of one prompt resemble each other, so variances are inflated by how much *clusters* differ;
- a window is a sample, so a fall must be significant as well as large, in `patience` checks one after the other.

A detector holds no clock and draws no numbers: a log of records, read again, gives the same checks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

# Widths of the windows that a check looks at, in checks: a small fall needs more records than a large one.
_SCALES = (1, 2, 4, 8, 16)
_KEPT_DISTANCES = 1024
# Fewer prompts than this say little about others, however many rounds they bring.
_REFERENCE_CLUSTERS, _WINDOW_CLUSTERS = 32, 4
# A reference grows to so many times what it begins with, from windows that nothing is suspicious about: from here on
# its own error hardly counts.
_REFERENCE_GROWTH = 4
_SUSPICIOUS = 2.0


@dataclass(frozen=True, slots=True)
class DriftRecord:
    """What verification saw of one trajectory under one version of the heads.

    at: seconds, of any clock that rises. stratum: what acceptance depends on beside the heads, such as temperature and
    nodes. cluster: the prompt. reached[d]: rounds whose walk could have accepted a node at depth d + 1; accepted[d]:
    those that did. distances: sparse total variation between the target's law and the heads', any number of values.
    """

    at: float
    heads: int
    stratum: str
    cluster: str
    reached: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    distances: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.reached) != len(self.accepted):
            raise ValueError(f"reached has {len(self.reached)} depths, but accepted has {len(self.accepted)}.")
        if any(not 0 <= hits <= trials for hits, trials in zip(self.accepted, self.reached, strict=True)):
            raise ValueError("accepted must lie between 0 and reached at every depth.")

    @property
    def rounds(self) -> int:
        return self.reached[0] if self.reached else 0

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> DriftRecord:
        """Raises ValueError where fields are missing, unknown or contradict each other."""
        lists = ("reached", "accepted", "distances")
        try:
            fields: dict[str, Any] = {k: tuple(v) if k in lists else v for k, v in value.items()}
            return DriftRecord(**fields)
        except TypeError as error:
            raise ValueError(f"This is no record of drift: {error}.") from error


@dataclass(frozen=True, slots=True)
class DriftConfig:
    """check_records: rounds in a check. reference_records: rounds of a stratum, of 32 prompts at least, that later ones
    are compared with; checks begin after them.

    A check finds degradation where the mean conditional acceptance fell by `fall` (or by `relative_fall` of itself,
    whichever is less) and by `significance` standard errors; or where some depth fell by `depth_fall`, by
    `supported_significance` standard errors, and the distances rose by `distance_z` robust standard deviations (at
    least `distance_floor` each). patience: consecutive checks that must agree. cooldown_seconds: after a trigger.
    collapse: accepted tokens per round from which on a check raises an alarm, where the reference has four times that.
    """

    check_records: int = 512
    reference_records: int = 2048
    patience: int = 2
    cooldown_seconds: float = 60.0
    fall: float = 0.04
    relative_fall: float = 0.1
    significance: float = 3.0
    depth_fall: float = 0.05
    supported_significance: float = 2.5
    distance_z: float = 2.5
    distance_floor: float = 0.01
    collapse: float = 0.03

    def __post_init__(self) -> None:
        if min(self.check_records, self.patience) < 1:
            raise ValueError("check_records and patience must be at least 1.")
        if self.reference_records < self.check_records:
            raise ValueError("reference_records must be at least check_records.")


@dataclass(frozen=True, slots=True)
class DriftCheck:
    """What a check found. acceptance, reference: mean conditional acceptance in the window and what it was.

    fall: reference - acceptance over the strata of the window that decided; z: in standard errors. depth_falls: by
    depth. distance_z: NaN where distances are missing. streak: degraded checks in a row, this one included.
    triggered: time to act. collapsed: almost nothing is accepted any more.
    """

    at: float
    heads: int
    records: int
    acceptance: float
    reference: float
    fall: float
    z: float
    depth_falls: tuple[float, ...]
    distance_z: float
    degraded: bool
    collapsed: bool
    streak: int
    triggered: bool

    def to_json(self) -> dict[str, Any]:
        out = {name: getattr(self, name) for name in self.__slots__}
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in out.items()}


@dataclass(slots=True)
class _Counts:
    """Trials and hits by depth and cluster: {depth: {cluster: [trials, hits]}}."""

    cells: dict[int, dict[str, list[int]]] = field(default_factory=dict)
    rounds: int = 0

    def add(self, record: DriftRecord) -> None:
        self.rounds += record.rounds
        for depth, (trials, hits) in enumerate(zip(record.reached, record.accepted, strict=True)):
            if trials:
                cell = self.cells.setdefault(depth, {}).setdefault(record.cluster, [0, 0])
                cell[0] += trials
                cell[1] += hits

    def merge(self, other: _Counts) -> None:
        self.rounds += other.rounds
        for depth, clusters in other.cells.items():
            mine = self.cells.setdefault(depth, {})
            for cluster, (trials, hits) in clusters.items():
                cell = mine.setdefault(cluster, [0, 0])
                cell[0] += trials
                cell[1] += hits

    @property
    def clusters(self) -> int:
        return len(self.cells.get(0, {}))

    def pooled(self) -> dict[str, list[int]]:
        """{cluster: [trials, hits]} over all depths."""
        out: dict[str, list[int]] = {}
        for clusters in self.cells.values():
            for cluster, (trials, hits) in clusters.items():
                cell = out.setdefault(cluster, [0, 0])
                cell[0] += trials
                cell[1] += hits
        return out


def dispersion(groups: Iterable[Iterable[Sequence[int]]]) -> float:
    """By how much trajectories of one prompt resembling each other inflates the variance of a ratio, at least 1.

    groups: of (trials, hits) of clusters; a group has one ratio. Pearson's statistic over its degrees of freedom: one
    number for all groups, since a single window holds too few clusters to tell its own.
    """
    statistic, freedom = 0.0, 0
    for group in groups:
        cells = [cell for cell in group if cell[0]]
        ratio = smoothed_ratio(cells)
        statistic += sum((h - ratio * t) ** 2 / (t * ratio * (1 - ratio)) for t, h in cells)
        freedom += max(0, len(cells) - 1)
    return max(1.0, statistic / freedom) if freedom else 1.0


def smoothed_ratio(cells: Iterable[Sequence[int]]) -> float:
    """Hits over trials with one hit and one miss more: a ratio of exactly 0 or 1 is not known without error."""
    pairs = list(cells)
    return (sum(h for _, h in pairs) + 1) / (sum(t for t, _ in pairs) + 2)


def _compare(
    reference: Mapping[str, Iterable[Sequence[int]]], window: Mapping[str, Iterable[Sequence[int]]], inflation: float
) -> tuple[float, float, float]:
    """(acceptance in the window, fall, standard error), strata weighted by their trials in the window."""
    rows = []
    for stratum, cells in window.items():
        now, then = list(cells), list(reference.get(stratum, ()))
        trials = sum(t for t, _ in now), sum(t for t, _ in then)
        if all(trials):
            rows.append((trials, smoothed_ratio(now), smoothed_ratio(then)))
    total = sum(trials[0] for trials, _, _ in rows)
    if not total:
        return math.nan, 0.0, math.inf
    acceptance = sum(trials[0] * now for trials, now, _ in rows) / total
    fall = sum(trials[0] * (then - now) for trials, now, then in rows) / total
    variance = sum(
        (trials[0] / total) ** 2 * (now * (1 - now) / trials[0] + then * (1 - then) / trials[1])
        for trials, now, then in rows
    )
    return acceptance, fall, math.sqrt(inflation * variance)


class DriftDetector:
    """Checks one version of the heads at a time against what it did when it was new.

    `observe` takes records in the order of their arrival; those of another version are passed over and counted in
    `foreign`. `reset` begins again with another version, or with the same one after it was put back into place.
    """

    def __init__(self, config: DriftConfig | None = None, heads: int = 0) -> None:
        self.config = config or DriftConfig()
        self.foreign = 0
        self._quiet_until = -math.inf
        self.reset(heads)

    def reset(self, heads: int) -> None:
        """Forgets reference and windows. The cool-down goes on."""
        self.heads = heads
        self._reference: dict[str, _Counts] = {}
        self._frozen = False
        self.restart_windows()

    def restart_windows(self) -> None:
        """Forgets what was seen since the reference: after a repair, say, that the same reference is to judge, or after
        a drift, for what came before it to be told from what the heads do now."""
        self.streak = 0
        self._window: dict[str, _Counts] = {}
        self._windows: deque[dict[str, _Counts]] = deque(maxlen=max(_SCALES))
        self._distances: deque[float] = deque(maxlen=_KEPT_DISTANCES)
        self._recent: deque[float] = deque(maxlen=_KEPT_DISTANCES)
        self._pending = 0
        self._since_mark = 0

    def mark(self) -> None:
        """The policy is another one: a successor made for it is compared with the checks from here on, that which is
        being gathered included."""
        self._since_mark = 0

    def successor(self, heads: int, *, drifted: bool = False) -> DriftDetector:
        """A detector that compares another version with what this one did of late, so that it tells whether the new
        one is worse than the old one was.

        drifted: what this one did before its windows were restarted, or `mark` was called, would ask too much of the
        new one, so that it is left out, and strata that were not seen since; else the reference fills up strata with
        few recent rounds.
        """
        out = DriftDetector(self.config, heads)
        first = len(self._windows) - self._since_mark if drifted else 0
        out._reference = _merged([*list(self._windows)[max(0, first) :], self._window])
        for stratum, counts in () if drifted else self._reference.items():
            recent = out._reference.setdefault(stratum, _Counts())
            if recent.rounds < self.config.reference_records:
                recent.merge(counts)
        out._frozen = True
        return out

    def observe(self, record: DriftRecord) -> DriftCheck | None:
        """Takes one record; the check that it completes, if any."""
        if record.heads != self.heads:
            self.foreign += 1
            return None
        self._observe_distances(record.distances)
        if not record.rounds:
            return None
        if self._frozen:
            if record.stratum not in self._reference:
                return None  # the predecessor was never seen there
            return self._compare_later(record)
        reference = self._reference.setdefault(record.stratum, _Counts())
        if reference.rounds < self.config.reference_records or reference.clusters < _REFERENCE_CLUSTERS:
            reference.add(record)
            return None
        return self._compare_later(record)

    def _compare_later(self, record: DriftRecord) -> DriftCheck | None:
        self._window.setdefault(record.stratum, _Counts()).add(record)
        self._pending += record.rounds
        return self._check(record.at) if self._pending >= self.config.check_records else None

    def reference_acceptance(self) -> float:
        """Mean conditional acceptance of the reference, NaN before there is one."""
        cells = [cell for counts in self._reference.values() for cell in counts.pooled().values()]
        return smoothed_ratio(cells) if cells else math.nan

    def _observe_distances(self, values: Sequence[float]) -> None:
        for value in values:
            early = len(self._distances) < _KEPT_DISTANCES // 8
            (self._distances if early else self._recent).append(value)

    def _check(self, at: float) -> DriftCheck:
        config = self.config
        leaving = self._windows[0] if len(self._windows) == self._windows.maxlen else None
        self._windows.append(self._window)
        self._since_mark += 1
        records, self._window, self._pending = self._pending, {}, 0
        distance_z, inflation = self._distance_z(), self._inflation()
        worst: tuple[float, float, float, tuple[float, ...], bool] | None = None
        for scale in _SCALES:
            if scale > len(self._windows):
                break
            found = self._at_scale(scale, inflation, distance_z)
            if worst is None or (found[4], found[2]) > (worst[4], worst[2]):
                worst = found
        assert worst is not None
        acceptance, fall, z, depth_falls, degraded = worst
        collapsed = self._collapsed()
        degraded = degraded or collapsed
        self.streak = self.streak + 1 if degraded else 0
        triggered = self.streak >= config.patience and at >= self._quiet_until
        if triggered:
            self._quiet_until = at + config.cooldown_seconds
        elif leaving is not None and z < _SUSPICIOUS and not self._frozen:
            self._extend_reference(leaving)
        return DriftCheck(
            at=at,
            heads=self.heads,
            records=records,
            acceptance=acceptance,
            reference=acceptance + fall,
            fall=fall,
            z=z,
            depth_falls=depth_falls,
            distance_z=distance_z,
            degraded=degraded,
            collapsed=collapsed,
            streak=self.streak,
            triggered=triggered,
        )

    def _inflation(self) -> float:
        """The larger of what the reference and what the windows show, as far as they hold enough clusters to tell."""
        sides = [self._reference, _merged(self._windows)]
        groups = [[list(c.pooled().values()) for c in side.values()] for side in sides]
        return max(dispersion(g) for g in groups if g is groups[0] or sum(map(len, g)) >= _REFERENCE_CLUSTERS // 2)

    def _at_scale(
        self, scale: int, inflation: float, distance_z: float
    ) -> tuple[float, float, float, tuple[float, ...], bool]:
        config = self.config
        window = _merged(list(self._windows)[-scale:])
        pooled_reference = {s: c.pooled().values() for s, c in self._reference.items()}
        pooled_window = {s: c.pooled().values() for s, c in window.items()}
        acceptance, fall, error = _compare(pooled_reference, pooled_window, inflation)
        z = fall / error
        enough = sum(c.clusters for c in window.values()) >= _WINDOW_CLUSTERS
        enough = enough and fall >= min(config.fall, config.relative_fall * (acceptance + fall))
        degraded = enough and z >= config.significance
        depth_falls = []
        for depth in sorted({d for counts in window.values() for d in counts.cells}):
            _, deep_fall, deep_error = _compare(
                {s: c.cells.get(depth, {}).values() for s, c in self._reference.items()},
                {s: c.cells.get(depth, {}).values() for s, c in window.items()},
                inflation,
            )
            depth_falls.append(deep_fall)
            supported = deep_fall >= config.depth_fall and deep_fall / deep_error >= config.supported_significance
            degraded = degraded or (supported and distance_z > config.distance_z)
        return acceptance, fall, z, tuple(depth_falls), degraded

    def _collapsed(self) -> bool:
        def per_round(counts: Mapping[str, _Counts]) -> float:
            rounds = sum(c.rounds for c in counts.values())
            hits = sum(hits for c in counts.values() for _, hits in c.pooled().values())
            return hits / rounds if rounds else math.nan

        now, then = per_round(self._windows[-1]), per_round(self._reference)
        return now <= self.config.collapse and then >= 4 * self.config.collapse

    def _distance_z(self) -> float:
        if len(self._distances) < _KEPT_DISTANCES // 8 or len(self._recent) < 32:
            return math.nan
        middle = median(self._distances)
        spread = 1.4826 * median(abs(x - middle) for x in self._distances)
        return (median(self._recent) - middle) / max(spread, self.config.distance_floor)

    def _extend_reference(self, window: Mapping[str, _Counts]) -> None:
        """A window that is too old to be compared any more joins what others are compared with, where that is small.
        Not earlier, so that the beginning of a drift does not hide itself."""
        for stratum, counts in window.items():
            reference = self._reference[stratum]
            if reference.rounds < _REFERENCE_GROWTH * self.config.reference_records:
                reference.merge(counts)


def _merged(windows: Iterable[Mapping[str, _Counts]]) -> dict[str, _Counts]:
    out: dict[str, _Counts] = {}
    for window in windows:
        for stratum, counts in window.items():
            out.setdefault(stratum, _Counts()).merge(counts)
    return out


def replay(
    records: Iterable[DriftRecord], config: DriftConfig | None = None, heads: int | None = None
) -> Iterator[DriftCheck]:
    """The checks that a log of records leads to. A higher version than the one followed is a swap: the detector begins
    again with it. heads: the version to begin with, that of the first record where None."""
    detector: DriftDetector | None = None if heads is None else DriftDetector(config, heads)
    for record in records:
        if detector is None:
            detector = DriftDetector(config, record.heads)
        elif record.heads > detector.heads:
            detector.reset(record.heads)
        check = detector.observe(record)
        if check is not None:
            yield check

"""What the watcher knew once more, from the log of what it saw and decided: for a replay, and after a restart.

Without it a restarted watcher would take what it meets for normal: a fall that had begun would never be seen.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.watcher.records import read_log, rotated
from services.watcher.row_reader import BEGINNING
from services.watcher.watch import Events, Watch
from specroll_core.drift import DriftConfig, DriftRecord

log = logging.getLogger(__name__)

# What names the version that serves while it is written.
_SERVING = {"check": "heads", "degraded": "version", "worse": "version", "rolled_back": "version"}


@dataclass(slots=True)
class Recalled:
    """needed: rows that the next training begins with, None where nothing asks for others than the configuration.
    healthy, fresh: cuts in the stream of rows, see `RowReader`. covered, stride: see `Progress`."""

    watch: Watch
    needed: int | None = None
    healthy: str = BEGINNING
    fresh: str = BEGINNING
    covered: int | None = None
    stride: int | None = None


def take_in(watch: Watch, kind: str, line: Mapping[str, Any]) -> Events:
    """Does to the watch what one line of a `FeedbackLog` says was done. Lines that changed nothing are passed over."""
    if kind == "record":
        return watch.observe(DriftRecord.from_json(dict(line)))
    if kind == "published":
        watch.swapped(int(line["version"]))
        watch.improving = bool(line.get("improving", True))
    elif kind == "rolled_back":
        watch.rolled_back(int(line["to"]))
    elif kind == "moved":
        watch.policy_moved()
    elif kind == "repaired" and line.get("workers", 1):  # with none, nothing had been put right
        watch.repaired()
    elif kind == "refused" and not line["stale"]:
        about = {name: bool(line.get(name, False)) for name in ("undecided", "moved")}
        watch.refused(float(line["time"]), **about)
    elif kind == "training_failed":
        watch.failed(float(line["time"]))
    return Events()


def recall(path: Path, config: DriftConfig, version: int) -> Recalled:
    """What was known when the log at `path` ended, and the one that was full before it; nothing where there is none,
    or where what it says does not lead to the version that serves."""
    try:
        known = Recalled(Watch(config, _begun_with(_lines(path), version)))
        for line in _lines(path):
            kind = line.pop("kind")
            take_in(known.watch, kind, line)
            _take_in_rows(known, kind, line)
    except (KeyError, TypeError, ValueError) as error:
        log.warning("what was recorded is not taken up: %s", error)
        return Recalled(Watch(config, version))
    if known.watch.version != version:
        log.warning("what was recorded leads to version %d, not %d, and is not taken up", known.watch.version, version)
        return Recalled(Watch(config, version))
    log.info("taking up %d recorded trajectories of version %d", known.watch.records, version)
    return known


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    return itertools.chain.from_iterable(read_log(file) for file in (rotated(path), path) if file.exists())


def _begun_with(lines: Iterable[Mapping[str, Any]], version: int) -> int:
    """The version that served when the log begins. Records do not tell: a worker may have been behind. version: that
    serves now, and did so then where nothing says otherwise."""
    judged = 0
    for line in lines:
        kind = line["kind"]
        if kind in _SERVING:
            return int(line[_SERVING[kind]])
        if kind == "published":
            return judged
        if kind == "gate":
            judged = int(line.get("serving", 0))
    return version


def _take_in_rows(known: Recalled, kind: str, line: Mapping[str, Any]) -> None:
    if kind == "check":
        known.healthy = str(line.get("row", known.healthy))
    elif kind == "degraded":
        known.fresh, known.needed = str(line.get("row", known.fresh)), None
    elif kind in ("published", "refused") and "needed" in line:
        known.needed = int(line["needed"])
    if kind == "published":
        known.fresh = str(line.get("fresh", known.fresh))
    if kind in ("moved", "published", "refused") and "covered" in line:
        known.covered, known.stride = int(line["covered"]), int(line["stride"])
    elif kind == "rolled_back":
        known.covered = known.stride = None

"""The watch's state once more, from the log of what it saw and decided: for a replay, and after a restart.

Without it a restarted watcher would take what it meets for normal: a fall that had begun would never be seen.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.watcher.records import read_log
from services.watcher.watch import Events, Watch
from specroll_core.drift import DriftConfig, DriftRecord

log = logging.getLogger(__name__)


def take_in(watch: Watch, kind: str, line: Mapping[str, Any]) -> Events:
    """Does to the watch what one line of a `FeedbackLog` says was done. Lines that changed nothing are passed over."""
    if kind == "record":
        return watch.observe(DriftRecord.from_json(dict(line)))
    if kind == "published":
        watch.swapped(int(line["version"]))
        watch.improving = bool(line.get("improving", True))
    elif kind == "rolled_back":
        watch.rolled_back(int(line["to"]))
    elif kind == "repaired":
        watch.repaired()
    elif kind == "refused" and not line["stale"]:
        watch.refused(float(line["time"]), undecided=bool(line.get("undecided", False)))
    elif kind == "training_failed":
        watch.failed(float(line["time"]))
    return Events()


def recall(path: Path, config: DriftConfig, version: int) -> Watch:
    """The watch as it was when the log at `path` ended; a new one where there is no log, or where what it says does not
    lead to the version that serves."""
    watch: Watch | None = None
    if path.exists():
        try:
            for line in read_log(path):
                kind = line.pop("kind")
                watch = watch or Watch(config, int(line["heads"]) if kind == "record" else 0)
                take_in(watch, kind, line)
        except (KeyError, TypeError, ValueError) as error:
            log.warning("what was recorded is not taken up: %s", error)
            watch = None
    if watch is None or watch.version != version:
        return Watch(config, version)
    log.info("taking up %d recorded rounds of version %d", watch.records, version)
    return watch

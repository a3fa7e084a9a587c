"""What a person reads at the end of a run about its watcher."""

import json
from pathlib import Path

import pytest

from services.display import watched


def records(directory: Path, *kinds: str) -> Path:
    path = directory / "watcher.jsonl"
    path.write_text("".join(json.dumps({"kind": kind, "step": 1, "time": 0.0}) + "\n" for kind in kinds))
    return path


@pytest.mark.parametrize(
    ("kinds", "line"),
    [
        ([], "no check: too little was drafted"),
        (["check", "swapped"], "1 check, 0 trainings, 0 new versions of the heads"),
        (
            ["training", "gate", "published", "swapped", "check", "degraded", "check", "training", "gate"],
            "2 checks, 2 trainings, 1 new version of the heads",
        ),
        (
            ["check", "alarm", "repaired", "rolled_back", "rolled_back"],
            "1 check, 0 trainings, 0 new versions of the heads, 1 repair, 2 roll-backs, 1 alarm",
        ),
    ],
)
def test_the_watchers_records_are_counted(tmp_path, kinds, line):
    assert watched(records(tmp_path, *kinds)) == line


def test_a_line_that_a_kill_left_unfinished_does_not_stop_the_report(tmp_path):
    path = records(tmp_path, "check")
    with path.open("a") as file:
        file.write('{"kind": "tra')
    assert watched(path) == "1 check, 0 trainings, 0 new versions of the heads"


def test_a_run_without_a_watcher_says_nothing(tmp_path):
    assert watched(tmp_path / "watcher.jsonl") is None

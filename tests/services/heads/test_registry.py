"""Versions of a run's heads on disk."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from services.cli import app
from services.common.artifacts import MANIFEST
from services.heads.artifact import HeadsError, HeadsManifest, TrainedOn
from services.heads.fingerprint import ModelFingerprint
from services.heads.lineage import is_registry, lineage_table, show_registry
from services.heads.registry import HeadsRegistry
from services.rollout.heads_file import HEADS_FILE
from specroll_core.heads import FutureTokenHeads, HeadsSpec

MODEL = ModelFingerprint(8, 32, "c" * 64, "l" * 64)


def heads(seed=0):
    torch.manual_seed(seed)
    return FutureTokenHeads(HeadsSpec(2, 8, 4, 32))


def manifest(parent=None):
    return HeadsManifest(MODEL, TrainedOn(10, 2, "test"), parent, {"new": 1.5})


def test_versions_follow_each_other_and_latest_with_them(tmp_path):
    registry = HeadsRegistry(tmp_path)
    assert registry.current() is None
    assert registry.publish(heads(), manifest()).version == 1
    assert registry.publish(heads(1), manifest(1)).version == 2
    assert HeadsRegistry(tmp_path).current().version == 2
    assert [(line["version"], line["parent"]) for line in registry.lineage()] == [(1, None), (2, 1)]


def test_a_version_is_taken_back_and_its_number_never_used_again(tmp_path):
    registry = HeadsRegistry(tmp_path)
    for parent in (None, 1, 2):
        registry.publish(heads(), manifest(parent))
    back = registry.roll_back(3, "worse")
    assert back.version == 2
    again = HeadsRegistry(tmp_path)
    assert again.current().version == 2
    assert again.blocked == {3: "worse"}
    assert again.publish(heads(), manifest(2)).version == 4
    assert again.roll_back(4, "worse too").version == 2
    assert {line["version"]: line["blocked"] for line in again.lineage()}[3] == "worse"


def test_the_first_version_has_nothing_to_go_back_to(tmp_path):
    registry = HeadsRegistry(tmp_path)
    registry.publish(heads(), manifest())
    assert registry.roll_back(1, "worse") is None
    assert HeadsRegistry(tmp_path).current() is None


def test_old_versions_go_and_the_parent_stays(tmp_path):
    registry = HeadsRegistry(tmp_path, keep=2)
    registry.publish(heads(), manifest())
    for _ in range(4):
        registry.publish(heads(), manifest(1))
    assert registry.store.versions() == [1, 4, 5]


@pytest.mark.parametrize("damage", ["file", "manifest"])
def test_a_damaged_latest_gives_way_to_the_newest_sound_one(tmp_path, damage):
    registry = HeadsRegistry(tmp_path)
    for parent in (None, 1, 2):
        registry.publish(heads(), manifest(parent))
    broken = registry.store.open(3).path
    if damage == "file":
        (broken / HEADS_FILE).write_bytes(b"")
    else:
        (broken / MANIFEST).write_text(json.dumps({"version": 3}))
    assert HeadsRegistry(tmp_path).current().version == 2


def test_a_version_lost_on_the_way_leaves_the_old_one(tmp_path, monkeypatch):
    registry = HeadsRegistry(tmp_path)
    registry.publish(heads(), manifest())
    bad = heads()
    with torch.no_grad():
        bad.up[0, 0, 0] = torch.nan
    with pytest.raises(HeadsError):
        registry.publish(bad, manifest(1))
    again = HeadsRegistry(tmp_path)
    assert again.current().version == 1
    assert again.publish(heads(), manifest(1)).version == 3  # 2 was begun and is not used for anything else


def test_the_lineage_is_shown(tmp_path, capsys):
    registry = HeadsRegistry(tmp_path)
    registry.publish(
        heads(),
        HeadsManifest(
            MODEL, TrainedOn(4000, 9, "f", 1.0, (0, 7)), None, {"new": 1.6, "old": 1.0, "low": 0.5, "high": 0.7}
        ),
    )
    registry.publish(heads(), manifest(1))
    registry.roll_back(2, "worse")
    (tmp_path / "v00000003").mkdir()
    assert is_registry(tmp_path)
    assert show_registry(tmp_path) == 0
    shown = capsys.readouterr().out
    assert "1.600" in shown
    assert "blocked" in shown
    assert "current" in shown
    table = lineage_table(registry.lineage(), 1, {1: ["worker-a"]})
    assert list(table.columns[-1].cells) == ["worker-a", ""]


def test_a_writer_that_died_between_two_steps_leaves_a_version_to_serve(tmp_path, monkeypatch):
    registry = HeadsRegistry(tmp_path)
    registry.publish(heads(), manifest())
    registry.publish(heads(1), manifest(1))

    def die(version):
        raise KeyboardInterrupt

    monkeypatch.setattr(registry.store, "point_latest", die)
    with pytest.raises(KeyboardInterrupt):
        registry.roll_back(2, "worse")  # blocked, and `latest` still names it
    assert HeadsRegistry(tmp_path).current().version == 1
    (tmp_path / "latest").unlink()  # a first version whose writer died before it named it
    assert HeadsRegistry(tmp_path).current().version == 1


def tree(directory):
    return {p: (p.lstat().st_mtime_ns, p.readlink() if p.is_symlink() else None) for p in directory.rglob("*")}


@pytest.mark.parametrize("latest", ["blocked", "damaged", "absent", "sound"])
def test_looking_moves_nothing(tmp_path, capsys, latest):
    registry = HeadsRegistry(tmp_path)
    registry.publish(heads(), manifest())
    registry.publish(heads(1), manifest(1))
    if latest == "blocked":
        registry.roll_back(2, "worse")
        registry.store.point_latest(2)
    elif latest == "damaged":
        (registry.store.open(2).path / HEADS_FILE).write_bytes(b"")
    elif latest == "absent":
        (tmp_path / "latest").unlink()
    before = tree(tmp_path)
    again = HeadsRegistry(tmp_path)
    expected = 1 if latest in ("blocked", "damaged") else 2
    assert again.peek().version == expected
    assert show_registry(tmp_path) == (2 if latest == "damaged" else 0)
    assert tree(tmp_path) == before
    assert again.current().version == expected


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        "[]",
        "nothing",
        '{"highest": 1}',
        '{"highest": "1", "blocked": {}}',
        '{"highest": 1, "blocked": []}',
        '{"highest": 1, "blocked": {"x": "worse"}}',
        '{"highest": 1, "blocked": {"1": 2}}',
    ],
)
def test_a_registry_that_says_something_else_is_refused(tmp_path, content):
    HeadsRegistry(tmp_path).publish(heads(), manifest())
    (tmp_path / "registry.json").write_text(content)
    before = tree(tmp_path)
    refused(tmp_path, "registry.json")
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "fields",
    [
        {"gate": []},
        {"trained_on": []},
        {"trained_on": {"rows": 1, "prompts": 1, "source": "f", "policy_versions": [1]}},
        {"trained_on": {"rows": 1, "prompts": 1, "source": "f", "temperature": "warm"}},
    ],
)
def test_a_version_whose_manifest_says_something_else_is_shown_as_broken(tmp_path, fields):
    registry = HeadsRegistry(tmp_path)
    registry.publish(heads(), manifest())
    registry.publish(heads(1), manifest(1))
    broken = registry.store.open(2).path / MANIFEST
    broken.write_text(json.dumps(json.loads(broken.read_text()) | fields))
    done = CliRunner().invoke(app, ["heads", "show", str(tmp_path)])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"specroll: {broken} lacks what a manifest of heads must hold")
    assert done.stderr.count("\n") == 1
    assert "broken" in done.stdout
    refused(broken.parent, "must hold")


@pytest.mark.parametrize("acceptance", [[{"x": 1}], 5, [[1]], ["x"], [{"rule": 1}]])
def test_measurements_that_are_none_are_refused(tmp_path, acceptance):
    made = HeadsManifest(MODEL, TrainedOn(10, 2, "test"), None, {"acceptance": acceptance})
    refused(HeadsRegistry(tmp_path).publish(heads(), made).path, "gate.acceptance")


def test_a_name_that_no_file_can_have_is_refused(tmp_path):
    refused(tmp_path / ("x" * 300), "longer than a file's name can be")
    assert list(tmp_path.iterdir()) == []


def refused(path, reason):
    done = CliRunner().invoke(app, ["heads", "show", str(path)])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("specroll: ")
    assert reason in done.stderr
    assert done.stderr.count("\n") == 1

"""Model sources, with the fetching step replaced by a local copy: the network is no part of what is tested."""

from __future__ import annotations

import json
import os

import pytest

from services import models
from services.models import check_model_dir, fetch_model


@pytest.fixture
def copies(monkeypatch, tiny_dir):
    """Makes the bundled model a copy of the tiny one and counts how often it is built."""
    built = []

    def build(directory):
        built.append(directory)
        for path in tiny_dir.iterdir():
            (directory / path.name).write_bytes(path.read_bytes())

    monkeypatch.setattr(models, "_build_bundled", build)
    return built


def test_a_model_is_fetched_once_with_a_checksum_of_every_file(copies, tmp_path):
    first = fetch_model("bundled", tmp_path)
    assert fetch_model("bundled", tmp_path) == first
    assert len(copies) == 1
    manifest = json.loads((first / models.MANIFEST).read_text())
    assert manifest["files"].keys() == {p.name for p in first.iterdir()} - {models.MANIFEST}
    assert not copies[0].exists()  # what was built elsewhere was renamed into place


def test_a_damaged_copy_is_fetched_again_and_a_touched_one_is_not(copies, tmp_path):
    model = fetch_model("bundled", tmp_path)
    weights = model / "model.safetensors"
    os.utime(weights)
    fetch_model("bundled", tmp_path)
    assert len(copies) == 1
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    fetch_model("bundled", tmp_path)
    assert len(copies) == 2
    (model / "tokenizer.json").unlink()
    fetch_model("bundled", tmp_path)
    assert len(copies) == 3


def test_an_interrupted_fetch_leaves_nothing_that_looks_finished(monkeypatch, copies, tmp_path):
    def fail(directory):
        (directory / "config.json").write_text("{}")
        raise ValueError("cut off")

    with monkeypatch.context() as broken:
        broken.setattr(models, "_build_bundled", fail)
        with pytest.raises(ValueError, match="cut off"):
            fetch_model("bundled", tmp_path)
    assert [p for p in tmp_path.iterdir() if not p.name.startswith(".")] == []
    assert (fetch_model("bundled", tmp_path) / "model.safetensors").is_file()


def test_a_local_directory_is_used_where_it_lies(tiny_dir, tmp_path):
    assert fetch_model(str(tiny_dir), tmp_path) == tiny_dir.resolve()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("source", ["no/such/dir", "./nothing", "word", "", "a/../b"])
def test_an_unusable_source_is_named(source, tmp_path):
    with pytest.raises(ValueError, match=r"model\.source"):
        fetch_model(source, tmp_path)


def shards(directory):
    """Splits the weights in two files with an index."""
    from safetensors.torch import load_file, save_file

    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    halves = {"a.safetensors": {}, "b.safetensors": {}}
    for i, (name, tensor) in enumerate(weights.items()):
        list(halves.values())[i % 2][name] = tensor
    for file, part in halves.items():
        save_file(part, directory / file)
    index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def truncate(path):
    path.write_bytes(path.read_bytes()[:-10])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d: (d / "config.json").unlink(), "has no config.json"),
        (lambda d: (d / "config.json").write_text("{"), "not valid JSON"),
        (lambda d: (d / "model.safetensors").unlink(), "neither model.safetensors nor an index"),
        (lambda d: truncate(d / "model.safetensors"), "damaged or incomplete"),
        (lambda d: (d / "tokenizer.json").unlink(), "no tokenizer"),
        (lambda d: (shards(d), (d / "b.safetensors").unlink()), "lacks 1 of 2 weight files, such as b.safetensors"),
        (lambda d: (shards(d), truncate(d / "b.safetensors")), "damaged or incomplete"),
    ],
)
def test_an_incomplete_directory_is_refused(tiny_dir, tmp_path, change, reason):
    directory = tmp_path / "model"
    directory.mkdir()
    for path in tiny_dir.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    check_model_dir(directory)
    change(directory)
    with pytest.raises(ValueError, match=reason):
        fetch_model(str(directory), tmp_path)


def test_a_complete_sharded_directory_is_accepted(tiny_dir, tmp_path):
    for path in tiny_dir.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    shards(tmp_path)
    check_model_dir(tmp_path)


def test_a_hub_that_cannot_be_reached_is_explained(monkeypatch, tmp_path):
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*args, **kwargs):
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ValueError, match="hub could not be reached to fetch org/name: no connection"):
        fetch_model("org/name", tmp_path)

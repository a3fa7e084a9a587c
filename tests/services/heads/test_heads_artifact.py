"""What is written is read back, and whatever does not fit or is damaged is refused in one sentence."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict, replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.common.artifacts import MANIFEST, ArtifactStore
from services.heads.artifact import (
    FORMAT,
    HeadsError,
    HeadsManifest,
    TrainedOn,
    load_artifact,
    publish_heads,
    write_heads,
)
from services.heads.fingerprint import ModelFingerprint, lm_head_hash
from services.rollout.heads_file import HEADS_FILE, load_heads, read_checked
from specroll_core.heads import FutureTokenHeads, HeadsSpec
from tests.tiny import make_tiny_model

TRAINED_ON = TrainedOn(rows=90, prompts=9, source="test", temperature=1.0, policy_versions=(3, 5))


@pytest.fixture(scope="module")
def model(tiny_dir):
    return ModelFingerprint.of(tiny_dir)


def some_heads(model, seed=0):
    torch.manual_seed(seed)
    heads = FutureTokenHeads(HeadsSpec(3, model.hidden, 8, model.vocab))
    with torch.no_grad():
        heads.up.normal_()
    return heads


@pytest.fixture
def written(model, tmp_path):
    write_heads(tmp_path / "heads", some_heads(model), HeadsManifest(model, TRAINED_ON, None, {"acceptance": []}))
    return tmp_path / "heads"


def edit_manifest(directory, change):
    content = json.loads((directory / MANIFEST).read_text())
    change(content)
    (directory / MANIFEST).write_text(json.dumps(content))


def replace_file(directory, data):
    """Another file, with a manifest that owns up to it."""
    (directory / HEADS_FILE).write_bytes(data)
    entry = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    edit_manifest(directory, lambda m: m["files"].__setitem__(HEADS_FILE, entry))


def refused(directory, reason, model=None):
    with pytest.raises(ValueError, match=reason) as error:
        load_artifact(directory, model)
    assert "\n" not in str(error.value)


def test_heads_come_back_as_they_were(written, model):
    again = load_artifact(written, model)
    assert again.manifest == HeadsManifest(model, TRAINED_ON, None, {"acceptance": []})
    assert again.artifact.version == 1
    expected = some_heads(model).state_dict()
    for name, value in again.heads.state_dict().items():
        assert torch.equal(value, expected[name])
    # Serving takes the directory, and the file in it.
    for path in (written, written / HEADS_FILE):
        assert torch.equal(load_heads(path).up, expected["up"])


def test_the_vocabulary_comes_along_in_its_order(model, tmp_path):
    heads = some_heads(model)
    heads.vocabulary = torch.tensor([9, 2, 300])
    write_heads(tmp_path / "heads", heads, HeadsManifest(model, TRAINED_ON))
    file = tmp_path / "heads" / HEADS_FILE
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    for again in (load_artifact(tmp_path / "heads", model).heads, load_heads(file), read_checked(file, digest)):
        assert again.vocabulary.tolist() == [9, 2, 300]
        assert torch.equal(again.up, heads.up)
    state = load_file(file) | {"vocabulary": torch.tensor([9, 9])}
    save_file(state, tmp_path / "bad", metadata={"specroll_heads": json.dumps(asdict(heads.spec))})
    with pytest.raises(ValueError, match="distinct token ids below 320"):
        load_heads(tmp_path / "bad")


def test_a_store_gives_its_latest_version(model, tmp_path):
    store = ArtifactStore(tmp_path / "store")
    publish_heads(store, 1, some_heads(model, 1), HeadsManifest(model, TRAINED_ON))
    publish_heads(store, 2, some_heads(model, 2), HeadsManifest(model, TRAINED_ON, parent=1))
    latest = load_artifact(tmp_path / "store", model)
    assert (latest.artifact.version, latest.manifest.parent) == (2, 1)
    assert torch.equal(latest.heads.up, some_heads(model, 2).up)
    assert torch.equal(load_heads(tmp_path / "store").up, latest.heads.up)


def test_a_fingerprint_tells_models_apart_and_knows_a_copy(tiny_dir, other_tiny_dir, model, tmp_path):
    assert ModelFingerprint.of(tiny_dir) == model
    other = ModelFingerprint.of(other_tiny_dir)
    assert other.config_sha256 == model.config_sha256
    assert other.lm_head_sha256 != model.lm_head_sha256
    rounded = make_tiny_model(tmp_path / "rounded", dtype=torch.bfloat16)
    assert ModelFingerprint.of(rounded) == model
    weight = load_file(tiny_dir / "model.safetensors")["model.embed_tokens.weight"]
    assert lm_head_hash(weight) == model.lm_head_sha256


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden": 65}, "hidden size of 64, but the model has 65"),
        ({"vocab": 321}, "vocabulary of 320, but the model has 321"),
        ({"config_sha256": "0" * 64}, "another configuration"),
        ({"lm_head_sha256": "0" * 64}, "another LM head"),
    ],
)
def test_heads_of_another_model_are_refused(written, model, change, reason):
    refused(written, reason, replace(model, **change))


def test_a_policy_that_has_moved_on_may_keep_its_heads(written, model, other_tiny_dir):
    moved = ModelFingerprint.of(other_tiny_dir)
    refused(written, "another LM head", moved)
    load_artifact(written, moved, lm_head_may_differ=True)


def test_a_model_with_another_layer_count_is_another_model(written, tiny_dir, tmp_path):
    """Heads trained on one layer and served with the next one would be wrong in silence."""
    deeper = tmp_path / "deeper"
    shutil.copytree(tiny_dir, deeper)
    config = json.loads((deeper / "config.json").read_text())
    (deeper / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    refused(written, "another configuration", ModelFingerprint.of(deeper))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.update(heads_format=FORMAT + 1), "later release, as format 2"),
        (lambda m: m.update(format=99), "not a manifest of format 1"),
        (lambda m: m.pop("heads_format"), "not a manifest of heads"),
        (lambda m: m.update(architecture="medusa"), "describes other heads"),
        (lambda m: m.update(offsets=[1, 2]), "describes other heads"),
        (lambda m: m.update(hidden_size=65), "describes other heads"),
        (lambda m: m.update(reads="layer 12"), "another hidden state"),
        (lambda m: m.pop("trained_on"), "lacks what a manifest of heads must hold"),
        (lambda m: m["files"].clear(), "lists no heads.safetensors"),
    ],
)
def test_manifests_that_say_something_else_are_refused(written, change, reason):
    edit_manifest(written, change)
    refused(written, reason)


def test_damaged_files_are_refused(written):
    whole = (written / HEADS_FILE).read_bytes()
    (written / HEADS_FILE).write_bytes(whole[:-100])
    refused(written, "has .* bytes, its manifest says")
    replace_file(written, whole[:-100])
    refused(written, "is not a file of heads")
    (written / HEADS_FILE).write_bytes(whole[:-100] + bytes(100))
    replace_file(written, whole)
    (written / HEADS_FILE).write_bytes(whole[:-4] + b"\x01\x02\x03\x04")
    refused(written, "has SHA-256")
    (written / HEADS_FILE).unlink()
    refused(written, "cannot be read")
    (written / MANIFEST).unlink()
    refused(written, "holds no readable manifest.json")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(written, model, tmp_path, value):
    spec = json.dumps({"heads": 3, "hidden": 64, "rank": 8, "vocab": 320, "offsets": [1, 2, 3]})
    state = load_file(written / HEADS_FILE)
    state["up"][0, 0, 0] = value
    save_file(state, tmp_path / "bad", metadata={"specroll_heads": spec})
    replace_file(written, (tmp_path / "bad").read_bytes())
    refused(written, "not finite")
    heads = some_heads(model)
    with torch.no_grad():
        heads.up[0, 0, 0] = value
    with pytest.raises(HeadsError, match="not finite"):
        write_heads(tmp_path / "new", heads, HeadsManifest(model, TRAINED_ON))
    assert not (tmp_path / "new").exists()


def test_an_unknown_architecture_is_refused_in_the_file_too(written, tmp_path):
    spec = {"heads": 3, "hidden": 64, "rank": 8, "vocab": 320, "offsets": [1, 2, 3], "architecture": "medusa"}
    save_file(load_file(written / HEADS_FILE), tmp_path / "x", metadata={"specroll_heads": json.dumps(spec)})
    replace_file(written, (tmp_path / "x").read_bytes())
    refused(written, "architecture is 'medusa'")


def test_nothing_is_overwritten_and_nothing_left_behind(written, model, tmp_path):
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(HeadsError, match="exists already"):
        write_heads(written, some_heads(model), HeadsManifest(model, TRAINED_ON))
    with pytest.raises(HeadsError, match="are not of a model"):
        write_heads(tmp_path / "new", some_heads(model), HeadsManifest(replace(model, vocab=7), TRAINED_ON))
    with pytest.raises(HeadsError, match="cannot be made"):
        write_heads(written / HEADS_FILE / "below", some_heads(model), HeadsManifest(model, TRAINED_ON))
    assert sorted(path.name for path in tmp_path.iterdir()) == before

"""Heads that an engine is to start with are compared with its model before anything is launched."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from services.common.artifacts import MANIFEST
from services.heads.artifact import HeadsManifest, TrainedOn, write_heads
from services.heads.fingerprint import ModelFingerprint
from services.rollout.heads_control import check_start_heads
from services.rollout.heads_file import HEADS_FILE
from services.rollout.policy_check import PolicyShape
from specroll_core.heads import FutureTokenHeads, HeadsSpec

WRONG = {
    "reads": ("layer 3, before the norm", "read another hidden state"),
    "base_config_sha256": ("0" * 64, "another configuration"),
    "lm_head_sha256": ("0" * 64, "another LM head"),
}


@pytest.fixture
def written(tiny_dir, tmp_path):
    torch.manual_seed(0)
    model = ModelFingerprint.of(tiny_dir)
    heads = FutureTokenHeads(HeadsSpec(2, model.hidden, 4, model.vocab))
    write_heads(tmp_path / "heads", heads, HeadsManifest(model, TrainedOn(9, 2, "test"), None, {}))
    return tmp_path / "heads"


def named(directory, by):
    return directory if by == "directory" else directory / HEADS_FILE


def check(path, model_dir, policy_version=0):
    check_start_heads(path, PolicyShape(model_dir), model_dir, policy_version)


@pytest.mark.parametrize("by", ["directory", "file"])
@pytest.mark.parametrize("field", WRONG)
def test_heads_of_another_model_are_refused_however_they_are_named(written, tiny_dir, by, field):
    check(named(written, by), tiny_dir)
    value, reason = WRONG[field]
    content = json.loads((written / MANIFEST).read_text())
    assert field in content
    (written / MANIFEST).write_text(json.dumps(content | {field: value}))
    with pytest.raises(ValueError, match=reason) as error:
        check(named(written, by), tiny_dir)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("by", ["directory", "file"])
def test_training_may_have_moved_the_lm_head(written, tiny_dir, by):
    content = json.loads((written / MANIFEST).read_text())
    (written / MANIFEST).write_text(json.dumps(content | {"lm_head_sha256": "0" * 64}))
    check(named(written, by), tiny_dir, policy_version=3)


def test_a_file_alone_is_compared_by_its_shape(written, tiny_dir, tmp_path):
    bare = tmp_path / "bare.safetensors"
    shutil.copy(written / HEADS_FILE, bare)
    check(bare, tiny_dir)


def test_a_file_that_the_manifest_beside_it_does_not_list_is_refused(written, tiny_dir):
    shutil.copy(written / HEADS_FILE, written / "other.safetensors")
    with pytest.raises(ValueError, match="is not a file that the manifest"):
        check(written / "other.safetensors", tiny_dir)

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.learner import checkpoint
from services.learner.trainer import Trainer
from tests.services.learner.samples import make_config, random_groups
from tests.tiny import make_tiny_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), seed=3)


def trained(model_dir, steps, **sections):
    trainer = Trainer(make_config(**sections), model_dir)
    for step in range(steps):
        trainer.step(random_groups(step))
    return trainer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_takes_bitwise_the_same_next_steps(dtype, model_dir, tmp_path):
    sections = {"model": {"dtype": dtype}, "learner": {"warmup_steps": 4, "sfpo": {"steps": 2, "window": 2}}}
    trainer = trained(model_dir, 2, **sections)
    checkpoint.save(tmp_path, trainer, {"ledger": {"granted": 16}})
    saved = checkpoint.latest(tmp_path)
    resumed = Trainer(make_config(**sections), saved.policy_dir)
    torch.manual_seed(123)
    assert checkpoint.load(saved.path, resumed) == {"ledger": {"granted": 16}}
    assert torch.equal(torch.get_rng_state(), load_file(saved.path / "random.safetensors")["cpu"])
    assert resumed.version == saved.step == 2
    for step in (2, 3):
        ours, theirs = trainer.step(random_groups(step)), resumed.step(random_groups(step))
        assert {k: v for k, v in ours.items() if "seconds" not in k} == {
            k: v for k, v in theirs.items() if "seconds" not in k
        }
    for (name, a), b in zip(trainer.policy.model.named_parameters(), resumed.policy.model.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_the_policy_inside_loads_with_transformers(model_dir, tmp_path):
    trainer = trained(model_dir, 1)
    path = checkpoint.save(tmp_path, trainer, {})
    loaded = AutoModelForCausalLM.from_pretrained(path / "policy")
    assert all(torch.equal(a, b) for a, b in zip(trainer.policy.model.parameters(), loaded.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(path / "policy").chat_template
    suffixes = {p.suffix for p in path.rglob("*") if p.is_file()}
    assert suffixes <= {".safetensors", ".json", ".jinja", ".txt"}


def test_only_the_newest_are_kept_and_unfinished_ones_are_never_loaded(model_dir, tmp_path):
    assert checkpoint.latest(tmp_path) is None
    trainer = trained(model_dir, 0)
    for _ in range(4):
        trainer.step(random_groups(0))
        checkpoint.save(tmp_path, trainer, {}, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000003", "step_000004"]
    (tmp_path / "step_000009").mkdir()
    (tmp_path / ".step_000008.partial").mkdir()
    assert checkpoint.latest(tmp_path).step == 4


def test_saving_the_same_step_again_replaces_it(model_dir, tmp_path):
    trainer = trained(model_dir, 1)
    (tmp_path / ".step_000001.partial").mkdir()
    (tmp_path / ".step_000001.partial" / "rest.json").write_text("{}")
    checkpoint.save(tmp_path, trainer, {"first": True})
    path = checkpoint.save(tmp_path, trainer, {"first": False})
    assert checkpoint.load(path, trained(model_dir, 0)) == {"first": False}
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]
    assert not (path / "rest.json").exists()


@pytest.mark.parametrize("name", ["optimizer.safetensors", "state.json", "policy/model.safetensors"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(name, damage, model_dir, tmp_path):
    path = checkpoint.save(tmp_path, trained(model_dir, 1), {})
    content = bytearray((path / name).read_bytes())
    if damage == "remove":
        (path / name).unlink()
    else:
        content[-1] ^= 1
        (path / name).write_bytes(content if damage == "flip" else content[:-1])
    trainer = trained(model_dir, 0)
    before = trainer.optimizer.snapshot()
    with pytest.raises(ValueError, match=f"is damaged: {name}"):
        checkpoint.load(path, trainer)
    assert trainer.version == 0
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.optimizer.snapshot(), strict=True))


def test_another_format_is_refused(model_dir, tmp_path):
    path = checkpoint.save(tmp_path, trained(model_dir, 1), {})
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(ValueError, match="has format 99"):
        checkpoint.load(path, trained(model_dir, 0))

"""What speculation counts and what it starts with: nothing here needs an engine."""

from __future__ import annotations

from dataclasses import astuple

import pytest
import torch

from services.config import EngineConfig, SpeculationConfig
from services.rollout.completion import Round
from services.rollout.engine import RolloutEngine
from services.rollout.heads_file import load_heads, save_heads
from services.rollout.sglang_plugin.spec_report import count_rounds
from services.speculation_config import MOST_NODES
from specroll_core.contracts import SpecCounters
from specroll_core.heads import FutureTokenHeads, HeadsSpec
from specroll_core.tree import MAX_NODES


def test_counters_leave_out_what_was_cut_off():
    rounds = [Round(1, 5, 2, (0, 3)), Round(4, 5, 0, ()), Round(5, 5, 3, (1, 2, 1))]
    assert count_rounds(rounds, 9) == SpecCounters(3, 15, 5, (2, 2, 1), (1, 2, 1, 1))
    # Both tokens kept of the last round were drafted.
    assert count_rounds(rounds, 7) == SpecCounters(3, 15, 4, (2, 2), (1, 1, 1, 1))
    assert count_rounds(rounds, 5) == SpecCounters(2, 10, 2, (1, 1), (1, 0, 0, 1))
    assert count_rounds([], 1) == SpecCounters()


def test_heads_survive_their_file(tmp_path):
    heads = FutureTokenHeads(HeadsSpec(3, 8, 4, 20))
    save_heads(heads, tmp_path / "h.safetensors")
    again = load_heads(tmp_path / "h.safetensors")
    assert astuple(again.spec) == astuple(heads.spec)
    for name, value in heads.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)


def test_heads_that_do_not_fit_are_refused_before_anything_starts(tiny_dir, tmp_path):
    save_heads(FutureTokenHeads(HeadsSpec(3, 8, 4, 20)), tmp_path / "h.safetensors")
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    for name, reason in (
        ("h", "fits a hidden size"),
        ("junk", "not a file of heads"),
        ("absent", "No such file or directory"),
    ):
        speculation = SpeculationConfig(enabled=True, heads=tmp_path / f"{name}.safetensors")
        config = EngineConfig(context_length=1024, speculation=speculation)
        with pytest.raises(ValueError, match=reason):
            RolloutEngine.start(config=config, dtype="float32", model_dir=tiny_dir, policy_version=0, seed=0)


def test_nodes_must_fit_and_the_lm_head_be_whole():
    with pytest.raises(ValueError, match="max_nodes"):
        SpeculationConfig(nodes=9, max_nodes=8)
    with pytest.raises(ValueError, match="tp_size"):
        EngineConfig(speculation=SpeculationConfig(enabled=True), args={"tp_size": 2})
    with pytest.raises(ValueError, match="flashinfer, triton"):
        EngineConfig(speculation=SpeculationConfig(enabled=True), args={"decode_attention_backend": "fa3"})
    with pytest.raises(ValueError, match="page_size"):
        EngineConfig(speculation=SpeculationConfig(enabled=True), args={"page_size": 16})
    assert MOST_NODES == MAX_NODES

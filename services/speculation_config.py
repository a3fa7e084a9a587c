"""How an engine speculates: `rollout.engine.speculation`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from services.config_section import Section

# Of a tree, the root included: `MAX_NODES` of `specroll_core/tree.py`, which would bring torch with it.
MOST_NODES = 63

CorrectionForm = Literal["whitened", "bias", "credit", "soft"]


class SpeculationConfig(Section):
    """Speculative decoding with future-token heads. It changes how fast tokens come, never their law.

    heads: a file of heads; without one every step is a plain one. nodes: tokens verified per request and step, the
    pending one included; 0 lets measured times and acceptance decide, up to max_nodes. rule: "sampled_child" accepts
    more at temperatures near 1, "target_match" makes a seed decide the tokens whatever was drafted (requests that
    bring a seed of their own always get it). peak_tokens: tokens per step that the machine is taken to compute
    without slowing down until that is measured; 512 on a large GPU. vocabulary: tokens that heads may propose, those
    that rollouts use most, so that ranking them is cheap; 0 for all. memory: what a trajectory said before proposes
    too, by "path" with matches that begin inside the draft, by "suffix" with the emitted tokens alone. siblings:
    completions of one group learn from each other. table: from other prompts' recent rollouts as well.
    correction: moves the heads' states by what verification has shown, of one "trajectory" or of its "group"; on top of
    the memory it has not been seen to help. correction_form: "whitened" steps that depend on the place or, to compare
    with, a "bias" that does not, "credit", the form of SpecRoll's authors, or "soft", votes of places that look alike.
    gate: a part of these that proposes worse than its absence is switched off, and on again once it would help.
    planted_bias: makes verification wrong on purpose, so that tests of losslessness can be seen to fail: the
    probability of accepting a draft that was to be rejected. `specroll train` and its services refuse it.
    """

    enabled: bool = False
    heads: Path | None = None
    rule: Literal["sampled_child", "target_match"] = "sampled_child"
    nodes: int = Field(0, ge=0)
    max_nodes: int = Field(16, ge=1, le=MOST_NODES)
    peak_tokens: int = Field(32, ge=1)
    vocabulary: int = Field(4096, ge=0)
    memory: Literal["path", "suffix", "off"] = "path"
    siblings: bool = True
    table: bool = False
    correction: Literal["off", "trajectory", "group"] = "off"
    correction_form: CorrectionForm = "whitened"
    gate: bool = True
    planted_bias: float = Field(0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _nodes_fit(self) -> SpeculationConfig:
        if self.nodes > self.max_nodes:
            raise ValueError(f"nodes = {self.nodes} must be at most max_nodes = {self.max_nodes}")
        return self

    @model_validator(mode="after")
    def _there_is_something_to_correct(self) -> SpeculationConfig:
        if self.correction != "off" and 1 in (self.nodes, self.max_nodes):
            raise ValueError(f'correction = "{self.correction}" needs more than one node: with one nothing is drafted')
        return self

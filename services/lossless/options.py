"""What is tested, and how much of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from services.config import DataConfig
from services.config_loader import load_config
from services.rollout.completion import SpeculationOverride
from services.speculation_config import CorrectionForm
from specroll_core.contracts import SamplingParams
from specroll_core.law import LawParams

# Of all tests of a run together: the probability that a correct engine fails.
FAMILY = 0.001
# How far a filter's edge may move by rounding: the engine and the reference sum the same numbers in another order.
EDGE = 1e-4
PLAIN, TARGET_MATCH, SAMPLED_CHILD = "plain", "target_match", "sampled_child"
# Heads and the trajectory memory, as a run has them.
SPECULATION = "speculation"
CORRECTION = "correction"

WORD_PROBLEMS = DataConfig(
    source="reasoning-gym:gsm_symbolic",
    system="Work the problem out in short steps. Put the final number in \\boxed{}.",
    size=600,
    holdout=0,
)


def data_of(config: Path | None) -> DataConfig:
    """Where prompts come from: a configuration's section `data`, or word problems where there is none."""
    return WORD_PROBLEMS if config is None else load_config(config).data


@dataclass(frozen=True, slots=True)
class LawUnderTest:
    """A sampling law that the statistical parts test."""

    temperature: float
    top_p: float

    def __str__(self) -> str:
        return f"T={self.temperature:g}" + (f" top-p={self.top_p:g}" if self.top_p < 1 else "")

    def sampling(self, tokens: int, *, ignore_eos: bool = False) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature, top_p=self.top_p, max_new_tokens=tokens, ignore_eos=ignore_eos
        )

    def params(self, rows: int, *, edge: float = 0.0) -> LawParams:
        """The law of `rows` rows; edge: by which top-p is widened, where it is on."""
        top_p = self.top_p if self.top_p == 1 else min(1.0, self.top_p + edge)
        return LawParams.build([self.temperature] * rows, top_p=[top_p] * rows)


LAWS = (LawUnderTest(1.0, 1.0), LawUnderTest(0.6, 1.0), LawUnderTest(1.0, 0.9), LawUnderTest(0.6, 0.9))
# What a test of all of them together is said to be about.
ALL_LAWS = "all laws"


@dataclass(frozen=True, slots=True)
class LosslessOptions:
    """nodes: verified per request and step, the pending token included. threads: 0 for all cores.

    rollout_tokens: sampled tokens for each law and each way of decoding. longest: tokens of one completion.
    prefixes, draws: fixed prefixes per law, and second tokens drawn after each in each way of decoding. greedy_prompts,
    greedy_tokens: compared at temperature 0. certain: probability that the token before a tested one must have.
    entropy: nats between which the law after a fixed prefix must lie, so that there is something to see.
    correction_form: of the way that corrects the heads' states.
    planted_bias: probability of a wrong acceptance, 0 except to see the proof fail.
    """

    nodes: int = 4
    threads: int = 0
    seed: int = 0
    dtype: str = "float32"
    rollout_tokens: int = 1000
    longest: int = 128
    prefixes: int = 3
    draws: int = 150
    greedy_prompts: int = 24
    greedy_tokens: int = 64
    certain: float = 0.9
    entropy: tuple[float, float] = (0.7, 3.0)
    running: int = 32
    correction_form: str = "whitened"
    planted_bias: float = 0.0

    def __post_init__(self) -> None:
        for name in ("rollout_tokens", "longest", "draws", "greedy_prompts", "greedy_tokens", "running"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)} must be at least 1.")
        if not 2 <= self.nodes <= 63:
            raise ValueError(f"--nodes {self.nodes} must lie between 2 and 63: 1 is plain decoding.")
        if self.threads < 0:
            raise ValueError(f"--threads {self.threads} must be 0 or more.")
        if self.prefixes < 0:
            raise ValueError(f"--prefixes {self.prefixes} must be 0 or more.")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"--dtype {self.dtype} must be float32 or bfloat16.")
        if self.correction_form not in get_args(CorrectionForm):
            raise ValueError(f"--correction-form {self.correction_form} must be whitened, bias, credit or soft.")
        if not 0 <= self.planted_bias <= 1:
            raise ValueError(f"--planted-bias {self.planted_bias:g} must lie between 0 and 1.")

    def ways(self) -> dict[str, SpeculationOverride]:
        """Ways of decoding that one engine offers, by name."""
        return {
            PLAIN: SpeculationOverride(nodes=1),
            TARGET_MATCH: SpeculationOverride(nodes=self.nodes, rule="target_match", parts=("heads",)),
            SAMPLED_CHILD: SpeculationOverride(nodes=self.nodes, rule="sampled_child", parts=("heads",)),
            SPECULATION: SpeculationOverride(nodes=self.nodes, rule="sampled_child"),
            CORRECTION: SpeculationOverride(nodes=self.nodes, parts=("heads", "memory", "correction")),
        }

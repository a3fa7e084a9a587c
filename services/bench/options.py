"""What is measured: the ways of decoding that are compared, and how long each is looked at."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from services.rollout.completion import SpeculationOverride
from services.speculation_config import MOST_NODES

PLAIN = "plain"
# In the order of the table. "speculation" is what a run of the configuration does.
ARMS: dict[str, SpeculationOverride] = {
    PLAIN: SpeculationOverride(nodes=1),
    "lookup": SpeculationOverride(parts=("lookup",)),
    "heads-target-match": SpeculationOverride(parts=("heads",), rule="target_match"),
    "heads": SpeculationOverride(parts=("heads",), rule="sampled_child"),
    "memory": SpeculationOverride(parts=("memory",)),
    "heads-lookup": SpeculationOverride(parts=("heads", "lookup")),
    "heads-correction": SpeculationOverride(parts=("heads", "correction")),
    "heads-correction-group": SpeculationOverride(parts=("heads", "correction-group")),
    "heads-own-memory": SpeculationOverride(parts=("heads", "own-memory")),
    "heads-memory": SpeculationOverride(parts=("heads", "memory")),
    "heads-memory-correction": SpeculationOverride(parts=("heads", "memory", "correction")),
    "heads-memory-correction-group": SpeculationOverride(parts=("heads", "memory", "correction-group")),
    "speculation": SpeculationOverride(),
}
# What `--ablate` compares unless arms are named, and with what: heads merged with plain suffix matches under the same
# scorer.
BASELINE = "heads-lookup"
ABLATED = (
    "lookup",
    "memory",
    "heads-target-match",
    "heads",
    "heads-correction",
    "heads-correction-group",
    BASELINE,
    "heads-own-memory",
    "heads-memory",
    "heads-memory-correction",
    "heads-memory-correction-group",
    "speculation",
)
# The correction needs some hundred rounds before it has directions at all.
WARMED = ("speculation", "heads-correction")
ABLATED_NODES = (4, 8, 16)
# Beside the root, with which there are as many as an engine verifies.
MAX_NODES = MOST_NODES - 1
# Held-out prompts that are taken unless a number is named, fewer where there are not so many.
USUAL_PROMPTS = 128
_PLOTS = (".png", ".pdf", ".svg")
_BOUND_ARMS = ("speculation", "heads", "heads-target-match", "memory", "lookup")
DEFAULT_ARMS = (PLAIN, "lookup", "heads-target-match", "heads", "speculation")


def needs_heads(arm: str) -> bool:
    """Whether it is named for heads: without any it would measure something else under that name."""
    return "heads" in (ARMS[arm].parts or ())


def reads_table(arm: str) -> bool:
    """Whether it reads, and writes, the table of other prompts' rollouts where the configuration has one."""
    parts = ARMS[arm].parts
    return parts is None or "memory" in parts


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """arms: of `ARMS`, None for the usual ones. concurrency: requests in flight. nodes: beside the root, for the arms
    that draft; None lets the engine choose. widths: nodes beside the root at which the bound's curve is measured, ()
    for no bound. prompts: held-out ones, None for the usual number. rounds: windows of each arm, taken in turn;
    seconds: of a window, after warmup seconds. group_size: completions of one prompt that may learn from each other.
    learner: something trains beside the engine. hf: `transformers` generates too, for scale. ablate: tokens per step of
    the arms on the same prompts, at `nodes` or `ABLATED_NODES`, and nothing that is a time; the first of the arms that
    are named is what the others are compared with. policy: what is served instead of the model of the configuration,
    put in place as a policy update is, so that the heads are stale."""

    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    temperatures: tuple[float, ...] = (0.6, 1.0)
    arms: tuple[str, ...] | None = None
    nodes: int | None = None
    widths: tuple[int, ...] = (1, 3, 5, 7, 11, 15)
    rounds: int = 5
    seconds: float = 5.0
    warmup: float = 1.5
    prompts: int | None = None
    group_size: int = 1
    learner: bool = False
    hf: bool = False
    ablate: bool = False
    policy: Path | None = None
    threads: int = 0
    json: Path | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        unknown = [arm for arm in self.chosen if arm not in ARMS]
        if unknown:
            raise ValueError(f"--arms {unknown[0]} is not known; there are {', '.join(ARMS)}.")
        if len(set(self.chosen)) < len(self.chosen):
            raise ValueError("--arms must name each arm once.")
        if self.ablate and PLAIN in self.chosen:
            raise ValueError(f"--ablate compares ways of drafting: leave {PLAIN} out of --arms.")
        if not self.ablate and PLAIN not in self.chosen:
            raise ValueError(f"--arms must contain {PLAIN}: all others are compared with it.")
        if not self.concurrency or min(self.concurrency) < 1:
            raise ValueError("--concurrency must name numbers of at least 1.")
        if not self.temperatures or not all(math.isfinite(t) and t >= 0 for t in self.temperatures):
            raise ValueError("--temperature must name numbers of at least 0.")
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise ValueError(f"--seconds {self.seconds:g} must be a positive number.")
        if self.rounds < 1 or self.warmup < 0 or self.group_size < 1 or (self.prompts is not None and self.prompts < 1):
            raise ValueError("--rounds, --prompts and --group-size must be positive.")
        if self.threads < 0:
            raise ValueError(f"--threads {self.threads} must be 0 or more.")
        if self.plot is not None and self.plot.suffix.lower() not in _PLOTS:
            raise ValueError(f"--plot {self.plot} must end in {', '.join(_PLOTS[:-1])} or {_PLOTS[-1]}.")
        if self.ablate and (self.learner or self.hf or self.plot is not None):
            raise ValueError("--ablate measures no time: leave --learner, --hf and --plot out.")
        if self.nodes is not None and not 1 <= self.nodes <= MAX_NODES:
            raise ValueError(f"--nodes {self.nodes} must lie between 1 and {MAX_NODES}.")
        if not all(1 <= width <= MAX_NODES for width in self.widths):
            raise ValueError(f"--widths must name numbers between 1 and {MAX_NODES}.")

    @property
    def chosen(self) -> tuple[str, ...]:
        """The arms, in the order of the table."""
        if self.arms is not None:
            return self.arms
        return ABLATED if self.ablate else DEFAULT_ARMS

    @property
    def baseline(self) -> str:
        """What an ablation's gains are relative to."""
        return BASELINE if self.arms is None else self.arms[0]

    @property
    def curve_of(self) -> str | None:
        """The arm whose widths make the bound: what a run does where it is measured, else heads."""
        return next((arm for arm in _BOUND_ARMS if arm in self.chosen), None)

    @property
    def largest_tree(self) -> int:
        """Nodes, the root included, that the engine must be able to verify for a request."""
        return 1 + max((16, self.nodes or 0, *self.widths))

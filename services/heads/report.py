"""How good heads are: tokens per verify step on held-out rollouts, with intervals over prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from services.heads.artifact import HeadsArtifact
from specroll_core.growth import TreeOptions
from specroll_core.head_training import HeadRows
from specroll_core.heads import FutureTokenHeads, ProposalVocabulary
from specroll_core.replay import AcceptanceReport, replay
from specroll_core.replay_guesses import head_guesses

# Nodes beside the pending token.
NODES = (4, 8, 16)
RULES = ("target_match", "sampled_child")
# Positions whose laws over the whole vocabulary exist at one time: 19 MB for three heads and 49,152 tokens.
_GUESS_ROWS = 32


@dataclass(frozen=True, slots=True)
class Acceptance:
    """tokens_per_step: acceptance length, bonus included; plain decoding has 1. low, high: 95 % bootstrap interval over
    prompts. nodes: beside the pending token."""

    temperature: float
    rule: str
    nodes: int
    tokens_per_step: float
    low: float
    high: float


def acceptances(
    heads: FutureTokenHeads,
    rollouts: Mapping[float, HeadRows],
    lm_head: Tensor,
    embedding: Tensor,
    *,
    nodes: Sequence[int] = NODES,
    law: Mapping[str, Any] | None = None,
    vocabulary: ProposalVocabulary | None = None,
) -> Iterator[Acceptance]:
    """rollouts: rows by the temperature that they were sampled at; law: the other sampling parameters that they share,
    `top_k`, `top_p` and `min_p`. Both rules, each budget of `nodes`. vocabulary: of the proposals, None for all tokens.
    A generator: each takes seconds."""
    for temperature, rows in rollouts.items():
        guesses = head_guesses(
            heads,
            rows,
            lm_head,
            embedding,
            temperature=temperature,
            vocabulary=vocabulary,
            batch_rows=_GUESS_ROWS,
            **(law or {}),
        )
        for rule in RULES:
            options = TreeOptions(sampled_children=rule == "sampled_child")
            for count in nodes:
                report = replay(guesses, rows, nodes=count + 1, options=options)
                low, high = interval(report)
                yield Acceptance(temperature, rule, count, report.tokens_per_step, low, high)


def interval(report: AcceptanceReport, *, draws: int = 2000, level: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """Bootstrap interval of tokens per step over prompts, whose rollouts are drawn together."""
    table = torch.tensor([[tokens, steps] for tokens, steps in report.by_prompt.values()], dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    sums = table[torch.randint(len(table), (draws, len(table)), generator=generator)].sum(1)
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = (sums[:, 0] / sums[:, 1]).quantile(ends).tolist()
    return low, high


def acceptance_table(measured: Sequence[Acceptance]) -> Table:
    """One line per temperature and rule, one column per number of nodes."""
    nodes = sorted({a.nodes for a in measured})
    table = Table(title="Tokens per step on held-out prompts (plain decoding: 1)", title_justify="left")
    table.add_column("temperature", justify="right")
    table.add_column("rule")
    for count in nodes:
        table.add_column(f"{count} nodes", justify="right")
    lines: dict[tuple[float, str], dict[int, str]] = {}
    for a in measured:
        lines.setdefault((a.temperature, a.rule), {})[a.nodes] = f"{a.tokens_per_step:.3f} ({a.low:.2f}-{a.high:.2f})"
    for (temperature, rule), cells in lines.items():
        table.add_row(f"{temperature:g}", rule, *(cells.get(count, "") for count in nodes))
    return table


def as_json(measured: Sequence[Acceptance]) -> list[dict[str, Any]]:
    return [asdict(a) for a in measured]


def from_json(values: Any) -> list[Acceptance]:
    """What `as_json` made. Raises ValueError where it is something else."""
    try:
        found = [Acceptance(**value) for value in values]
    except TypeError as error:
        raise ValueError(f"no list of measurements: {error}") from error
    for one in found:
        for name, value in asdict(one).items():
            if not isinstance(value, str if name == "rule" else int | float):
                raise ValueError(f"{name} = {value!r} was not measured")
    return found


def description(loaded: HeadsArtifact) -> Table:
    """What a manifest says, one fact per line."""
    spec, manifest, artifact = loaded.heads.spec, loaded.manifest, loaded.artifact
    trained, model = manifest.trained_on, manifest.model
    versions = "as given" if trained.policy_versions is None else "{} to {}".format(*trained.policy_versions)
    parameters = sum(p.numel() for p in loaded.heads.parameters())
    table = Table(show_header=False, box=None)
    table.add_column()
    table.add_column(overflow="fold")  # hashes are compared by eye
    for name, value in (
        ("directory", artifact.path),
        ("version", f"{artifact.version}, from {'scratch' if manifest.parent is None else manifest.parent}"),
        ("architecture", spec.architecture),
        ("heads", f"{spec.heads} of rank {spec.rank}, {parameters:,} parameters"),
        ("model", f"hidden size {model.hidden}, vocabulary {model.vocab}"),
        ("model's configuration", model.config_sha256),
        ("LM head", model.lm_head_sha256),
        ("trained on", f"{trained.rows} tokens of {trained.prompts} prompts: {trained.source}"),
        ("temperature", "given texts" if trained.temperature is None else f"{trained.temperature:g}"),
        ("policy versions", versions),
    ):
        table.add_row(name, str(value))
    return table

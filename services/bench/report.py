"""The table on the terminal, the JSON file and the plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from services.bench.options import PLAIN
from services.bench.result import ArmResult, BenchResult


def table(result: BenchResult, temperature: float) -> Table:
    """One row for each concurrency and arm. bound: share of it that the ratio reaches. step ms: propose + forward +
    accept + all else; overhead: the share of propose and accept."""
    out = Table(title=f"temperature {temperature:g}: tokens per second relative to plain decoding in the same engine")
    for name in ("in flight", "arm", "tokens/s", "ratio", "bound", "tokens/step", "nodes", "step ms", "overhead"):
        out.add_column(name, justify="left" if name == "arm" else "right", no_wrap=True)
    before = None
    for arm in (a for a in result.arms if a.temperature == temperature):
        bound = result.bound(arm.concurrency, temperature)
        of_bound = f"{arm.decode_ratio.value / max(1.0, bound.value):.0%}" if bound and arm.arm != PLAIN else ""
        if before is not None and before != arm.concurrency:
            out.add_section()
        out.add_row(
            str(arm.concurrency) if before != arm.concurrency else "",
            arm.arm,
            f"{arm.rate:.0f}",
            "1" if arm.arm == PLAIN else str(arm.ratio),
            of_bound,
            str(arm.tokens_per_step) if arm.arm != PLAIN else "1",
            f"{arm.nodes:.1f}",
            _step(arm),
            f"{arm.overhead:.0%}",
        )
        before = arm.concurrency
    return out


def notes(result: BenchResult) -> list[str]:
    """What the table does not say: bounds, acceptance by depth, `transformers`."""
    lines = []
    for bound in result.bounds:
        curve = ", ".join(f"{n}: {tokens:.2f} in {1e3 * t:.1f} ms" for n, (tokens, t) in sorted(bound.curve.items()))
        lines.append(f"bound at T={bound.temperature:g} x{bound.concurrency}: {bound.value:.2f}  ({curve})")
    for arm in result.arms:
        if arm.accepted_at:
            shares = " ".join(f"{share:.2f}" for share in arm.accepted_at)
            where = f"T={arm.temperature:g} x{arm.concurrency} {arm.arm}"
            lines.append(f"accepted at depth 1, 2, ...: {where}: {shares}")
            totals = ", ".join(f"{name} {sum(by_depth):.2f}" for name, by_depth in arm.accepted_from.items())
            lines.append(f"accepted tokens a step from: {where}: {totals}")
    for concurrency, rate in result.hf.items():
        lines.append(f"transformers.generate x{concurrency}: {rate:.0f} tokens/s")
    return lines


def write_json(result: BenchResult, path: Path) -> None:
    """Everything, in plain numbers."""
    record = {
        "environment": result.environment,
        "arms": [asdict(arm) for arm in result.arms],
        "bounds": [asdict(bound) | {"value": bound.value} for bound in result.bounds],
        "hf_tokens_per_second": result.hf,
        "complete": result.complete,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


def write_plot(result: BenchResult, path: Path) -> None:
    """Ratio over concurrency, one panel for each temperature, with intervals and the bound. PNG, by the file's name."""
    from matplotlib.figure import Figure

    temperatures = sorted({arm.temperature for arm in result.arms})
    figure = Figure(figsize=(5.5 * len(temperatures), 4.2), layout="constrained")
    panels = figure.subplots(1, len(temperatures), squeeze=False, sharey=True)[0]
    for panel, temperature in zip(panels, temperatures, strict=True):
        arms = [arm for arm in result.arms if arm.temperature == temperature]
        for name in dict.fromkeys(arm.arm for arm in arms if arm.arm != PLAIN):
            _line(panel, name, [arm for arm in arms if arm.arm == name])
        bounds = sorted((b.concurrency, b.value) for b in result.bounds if b.temperature == temperature)
        if bounds:
            panel.plot(*zip(*bounds, strict=True), color="black", linestyle=":", label="bound")
        panel.axhline(1.0, color="gray", linewidth=0.8)
        panel.set_xscale("log", base=2)
        panel.set_xlabel("requests in flight")
        panel.set_title(f"temperature {temperature:g}")
    panels[0].set_ylabel("tokens per second relative to plain decoding")
    panels[-1].legend(frameon=False)
    figure.savefig(path, dpi=150)


def _line(panel, name: str, arms: Sequence[ArmResult]) -> None:
    x = [arm.concurrency for arm in arms]
    y = [arm.ratio.value for arm in arms]
    low = [arm.ratio.value - arm.ratio.low for arm in arms]
    high = [arm.ratio.high - arm.ratio.value for arm in arms]
    panel.errorbar(x, y, yerr=[low, high], marker="o", markersize=4, capsize=3, label=name)


def _step(arm: ArmResult) -> str:
    parts = (arm.propose_seconds, arm.forward_seconds, arm.accept_seconds, arm.other_seconds)
    return "+".join(f"{1e3 * part:.1f}" for part in parts)

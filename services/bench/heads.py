"""The heads that a bench drafts with: those that a run of the configuration would begin with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from services.bench.options import ARMS, BenchOptions, needs_heads
from services.config import Config
from services.config_loader import load_config
from services.heads.artifact import artifact_directory
from services.heads.auto import AUTO, ensure_heads


def with_heads(config: Config, config_path: Path, overrides: Sequence[str], options: BenchOptions) -> Config:
    """The configuration with its first heads as `rollout.engine.speculation.heads`, trained now where `heads.init` is
    "auto" and they are not there yet. Raises ValueError where an arm drafts with heads and there are none."""
    heads = config.initial_heads
    if heads is None and config.heads.init == AUTO and any(map(_may_use_heads, options.chosen)):
        heads = ensure_heads(config, config_path, overrides)
    if heads is not None:
        setting = f"rollout.engine.speculation.heads={artifact_directory(heads)}"
        return load_config(config_path, [*overrides, setting])
    without = [arm for arm in options.chosen if needs_heads(arm)]
    if without:
        raise ValueError(
            f"specroll bench has no heads for {', '.join(without)}: name some with rollout.engine.speculation.heads "
            "or heads.init, or name other ways with --arms."
        )
    return config


def _may_use_heads(arm: str) -> bool:
    # "speculation" does what the configuration says, with heads and without.
    return needs_heads(arm) or (ARMS[arm].parts is None and ARMS[arm].nodes is None)

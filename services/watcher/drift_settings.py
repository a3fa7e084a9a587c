"""What the configuration says of detection, in the detector's words."""

from __future__ import annotations

from services.config import Config
from specroll_core.drift import DriftConfig


def drift_config(config: Config) -> DriftConfig:
    settings = config.watcher
    return DriftConfig(
        check_records=settings.check_records,
        reference_records=4 * settings.check_records,
        patience=settings.patience,
        cooldown_seconds=settings.cooldown_seconds,
    )

"""A request's `SpeculationOverride` inside SGLang's processes."""

from __future__ import annotations

from typing import Any

from services.rollout.sglang_plugin.variables import OVERRIDE_KEY


def override_of(request) -> dict[str, Any]:
    """The fields of the override that SGLang's `request` carries, {} where it has none."""
    return (request.sampling_params.custom_params or {}).get(OVERRIDE_KEY, {})

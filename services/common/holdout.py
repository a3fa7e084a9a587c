"""Which prompts nothing is learned from, so that heads can be judged on them."""

from __future__ import annotations

_SCALE = 2**64


def is_held_out(prompt: str, share: float) -> bool:
    """prompt: its name, see `prompt_name`. By the name alone: a prompt stays on its side for ever, for every version of
    the heads, after a restart, and for those that are trained before a run."""
    return int(prompt, 16) < int(share * _SCALE)

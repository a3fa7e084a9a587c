"""Everything that touches SGLang's internals.

SGLang finds this package through the entry points in `pyproject.toml` and calls the two functions below in each
of its processes. They import late: other processes that import the package do not pay for SGLang.
"""

from __future__ import annotations

import os

CPU_ATTENTION_BACKEND = "specroll_cpu"
# On a GPU, those that see every branch of a tree by itself; the first one serves.
TREE_ATTENTION_BACKENDS = ("flashinfer", "triton")
SPECULATIVE_ALGORITHM = "SPECROLL"


def activate_platform() -> str | None:
    """Entry point `sglang.srt.platforms`: the CPU platform where there is no accelerator, else None."""
    import torch

    if torch.accelerator.is_available() or os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        return None
    return "services.rollout.sglang_plugin.platform.TorchCpuPlatform"


def load() -> None:
    """Entry point `sglang.srt.plugins`: registers the sampler, the attention backend and the hooks."""
    from services.rollout.sglang_plugin import hooks

    hooks.register()

"""What a worker on a CPU runs in C++ beside the attention, where there is a compiler."""

from __future__ import annotations

from dataclasses import dataclass

from services.rollout.sglang_plugin import native_candidates, native_growth, native_uniforms, native_walk
from services.rollout.sglang_plugin.native_candidates import NativeCandidates
from services.rollout.sglang_plugin.native_growth import NativeGrowth
from services.rollout.sglang_plugin.native_uniforms import NativeUniforms
from services.rollout.sglang_plugin.native_walk import NativeWalk
from specroll_core.reflex import MemoryClasses


@dataclass(frozen=True)
class CompiledParts:
    """Each is None where Python and PyTorch do it instead."""

    candidates: NativeCandidates | None = None
    growth: NativeGrowth | None = None
    uniforms: NativeUniforms | None = None
    walk: NativeWalk | None = None

    @staticmethod
    def load() -> CompiledParts:
        """One per worker: growth and candidates keep what one round is made of."""
        return CompiledParts(native_candidates.load(), native_growth.load(), native_uniforms.load(), native_walk.load())

    @property
    def memory(self) -> MemoryClasses:
        """What is to be remembered in: trees are grown by the code that the memories are of."""
        return MemoryClasses() if self.growth is None else self.growth.classes

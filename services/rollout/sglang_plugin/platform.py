"""SGLang on a CPU without vendor kernels: every layer takes its plain PyTorch path."""

from __future__ import annotations

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import KVPoolKind, PlatformCapabilities, SRTPlatform

from services.rollout.sglang_plugin import CPU_ATTENTION_BACKEND


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return CPU_ATTENTION_BACKEND

    def get_torch_distributed_backend_str(self) -> str:
        return "gloo"

    def supports_speculative_algorithm(self, algorithm: str) -> bool:  # noqa: ARG002 (SGLang's signature)
        return True

    def get_kv_pool_cls(self, *, kind: KVPoolKind) -> type | None:
        if kind != "mha":
            return None
        from services.rollout.sglang_plugin.kv_pool import TorchKVPool

        return TorchKVPool

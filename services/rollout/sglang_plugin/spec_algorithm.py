"""The speculative algorithm as SGLang's registry sees it."""

from __future__ import annotations

from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from services.rollout.sglang_plugin import SPECULATIVE_ALGORITHM


class HeadsAlgorithm(CustomSpecAlgo):
    """Heads own no keys and values, and what they need between rounds stays with the worker."""

    def has_draft_kv(self) -> bool:
        return False

    def carries_draft_hidden_states(self) -> bool:
        return False

    def need_topk(self) -> bool:
        return False

    def create_future_map(
        self, device, req_to_token_pool, needs_cpu_seq_lens: bool = True, needs_confidence_relay: bool = False
    ) -> FutureMap:
        return FutureMap(device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)


def register() -> None:
    @SpeculativeAlgorithm.register(SPECULATIVE_ALGORITHM, supports_overlap=False, spec_class=HeadsAlgorithm)
    def make_worker(server_args):  # noqa: ARG001 (SGLang's signature)
        from services.rollout.sglang_plugin.spec_worker import SpeculativeWorker

        return SpeculativeWorker

"""What is registered with SGLang, and the few places where its behaviour is changed.

Each hook goes through SGLang's own `HookRegistry`. They exist only in engines that `RolloutEngine` starts.
"""

from __future__ import annotations

import os

from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from services.rollout.sglang_plugin import CPU_ATTENTION_BACKEND
from services.rollout.sglang_plugin.variables import (
    CPUS_VARIABLE,
    ENABLE_VARIABLE,
    SAMPLER_VARIABLE,
    THREADS_VARIABLE,
)

_SCHEDULER = "sglang.srt.managers.scheduler"
_BATCH = "sglang.srt.managers.schedule_batch"
_POLICY_MARK = "@policy="


def register() -> None:
    if not _has_accelerator():
        _register_attention()
    if os.environ.get(ENABLE_VARIABLE) != "1":
        return
    after, replace = HookType.AFTER, HookType.REPLACE
    HookRegistry.register(f"{_SCHEDULER}.configure_scheduler_process", _pin_scheduler, after)
    HookRegistry.register(f"{_BATCH}.Req.__init__", _stamp_policy_version, after)
    HookRegistry.register(f"{_BATCH}.Req.reset_for_retract", _stamp_policy_version, after)
    HookRegistry.register(f"{_SCHEDULER}.Scheduler.record_weight_version_change", _restamp_waiting, after)
    if os.environ.get(SAMPLER_VARIABLE) != "sglang":
        HookRegistry.register("sglang.srt.layers.sampler.create_sampler", _make_sampler, replace)
        target = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
        HookRegistry.register(target, _complete_sampling_info, after)
    if not _has_accelerator():
        from services.rollout.sglang_plugin.kv_pool import assign_req_to_token_pool

        target = "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func"
        HookRegistry.register(target, assign_req_to_token_pool, replace)


def _register_attention() -> None:
    from sglang.srt.arg_groups.choices import add_attention_backend_choices

    add_attention_backend_choices([CPU_ATTENTION_BACKEND])

    @register_attention_backend(CPU_ATTENTION_BACKEND)
    def make_backend(runner):
        from services.rollout.sglang_plugin.attention import TorchTreeAttention

        return TorchTreeAttention(runner)


def _has_accelerator() -> bool:
    import torch

    return torch.accelerator.is_available()


def _pin_scheduler(result, *args, **kwargs) -> None:  # noqa: ARG001 (a hook's signature)
    """OpenMP threads spin: two processes on one core slow each other down tenfold, so each keeps to its own."""
    import torch

    cpus = [int(cpu) for cpu in os.environ.get(CPUS_VARIABLE, "").split(",") if cpu]
    if cpus:
        os.sched_setaffinity(0, cpus)
    if threads := os.environ.get(THREADS_VARIABLE):
        torch.set_num_threads(int(threads))


def _stamp_policy_version(result, request, *args, **kwargs) -> None:  # noqa: ARG001
    """Makes the policy version part of the key under which prefixes are shared.

    A prefix computed under one policy is never reused under another one, whether or not the cache could be
    flushed when the policy changed.
    """
    from sglang.srt.runtime_context import get_serving

    base = (request.extra_key or "").split(_POLICY_MARK)[0]
    request.extra_key = f"{base}{_POLICY_MARK}{get_serving().weight_version}"


def _restamp_waiting(result, scheduler, *args, **kwargs) -> None:  # noqa: ARG001
    """Requests that wait will be computed under the new policy; those that run keep the cache they hold."""
    for request in scheduler.waiting_queue:
        _stamp_policy_version(None, request)


def _make_sampler(backend: str | None = None):  # noqa: ARG001 (SGLang's signature)
    """Replaced as a whole: on a CPU SGLang overrides whatever sampling backend was asked for."""
    from services.rollout.sglang_plugin.sampler import LawSampler

    return LawSampler()


def _complete_sampling_info(result, cls, batch, *args, **kwargs):  # noqa: ARG001
    from services.rollout.sglang_plugin.sampler import restore_penalties, set_request_seeds

    set_request_seeds(result, batch)
    restore_penalties(result, batch)
    return result

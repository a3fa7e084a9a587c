"""What is registered with SGLang, and the few places where its behaviour is changed.

Each hook goes through SGLang's own `HookRegistry`. They exist only in engines that `RolloutEngine` starts.
"""

from __future__ import annotations

import os

from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from services.rollout.sglang_plugin import CPU_ATTENTION_BACKEND
from services.rollout.sglang_plugin.shared_prompts import SharedPrompts
from services.rollout.sglang_plugin.variables import (
    CPUS_VARIABLE,
    ENABLE_VARIABLE,
    SAMPLER_VARIABLE,
    SPECULATION_VARIABLE,
    THREADS_VARIABLE,
)

_SCHEDULER = "sglang.srt.managers.scheduler"
_BATCH = "sglang.srt.managers.schedule_batch"
_POLICY_MARK = "@policy="


def register() -> None:
    from services.rollout.sglang_plugin import spec_algorithm

    if not _has_accelerator():
        _register_attention()
    spec_algorithm.register()
    if os.environ.get(ENABLE_VARIABLE) != "1":
        return
    after, replace = HookType.AFTER, HookType.REPLACE
    HookRegistry.register(f"{_SCHEDULER}.configure_scheduler_process", _pin_scheduler, after)
    HookRegistry.register(f"{_BATCH}.Req.__init__", _on_request, after)
    HookRegistry.register(f"{_BATCH}.Req.reset_for_retract", _stamp_policy_version, after)
    HookRegistry.register(f"{_SCHEDULER}.Scheduler.record_weight_version_change", _restamp_waiting, after)
    prefill = SharedPrompts().prefill
    HookRegistry.register(f"{_SCHEDULER}.Scheduler.get_new_batch_prefill", prefill, HookType.AROUND)
    if os.environ.get(SAMPLER_VARIABLE) != "sglang":
        HookRegistry.register("sglang.srt.layers.sampler.create_sampler", _make_sampler, replace)
        target = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
        HookRegistry.register(target, _complete_sampling_info, after)
    if not _has_accelerator():
        from services.rollout.sglang_plugin.kv_pool import assign_req_to_token_pool

        target = "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func"
        HookRegistry.register(target, assign_req_to_token_pool, replace)
        _register_layers()
    if os.environ.get(SPECULATION_VARIABLE):
        _register_speculation()


def _register_speculation() -> None:
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

    # SGLang's own way for a subclass to add fields to a request's messages; it offers none to put a subclass in.
    SchedulerOutputStreamer.has_additional_customized_info = True
    target = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
    HookRegistry.register(f"{target}.build_additional_customized_info", _add_rounds, HookType.REPLACE)
    target = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"
    HookRegistry.register(f"{target}._add_speculative", _add_stats, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.Scheduler.__init__", _attach_heads_swap, HookType.AFTER)
    if _has_accelerator():
        from services.rollout.sglang_plugin.verify_input import dummy_for_capture, spec_info_for_capture

        target = "sglang.srt.speculative.spec_info.create_dummy_verify_input"
        HookRegistry.register(target, dummy_for_capture, HookType.AROUND)
        target = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.get_spec_info"
        HookRegistry.register(target, spec_info_for_capture, HookType.AROUND)
    target = "sglang.srt.mem_cache.kv_cache_configurator.get_req_to_token_extra_context_len"
    HookRegistry.register(target, _hold_whole_reserve, HookType.AFTER)


def _register_layers() -> None:
    """Layers that SGLang computes in plain PyTorch, in fewer or faster operations."""
    from services.rollout.sglang_plugin.packed_linear import PackedLinear, supported
    from services.rollout.sglang_plugin.rotary import rotate

    target = "sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.forward_native"
    HookRegistry.register(target, rotate, HookType.AROUND)
    if supported():
        packed = PackedLinear()
        target = "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod"
        HookRegistry.register(f"{target}.process_weights_after_loading", packed.pack, HookType.AFTER)
        HookRegistry.register(f"{target}.apply", packed.apply, HookType.AROUND)
        target = "sglang.srt.layers.quantization.unquant.UnquantizedEmbeddingMethod.process_weights_after_loading"
        HookRegistry.register(target, packed.outdate, HookType.AFTER)
        target = "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head"
        HookRegistry.register(target, packed.head, HookType.AROUND)


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

    from services.machine import keep_freed_memory

    keep_freed_memory()

    cpus = [int(cpu) for cpu in os.environ.get(CPUS_VARIABLE, "").split(",") if cpu]
    if cpus:
        os.sched_setaffinity(0, cpus)
    if threads := os.environ.get(THREADS_VARIABLE):
        torch.set_num_threads(int(threads))


def _on_request(result, request, *args, **kwargs) -> None:  # noqa: ARG001
    _stamp_policy_version(result, request)
    if os.environ.get(SPECULATION_VARIABLE):
        from services.rollout.sglang_plugin.heads_swap import watch_request

        watch_request(request)


def _stamp_policy_version(result, request, *args, **kwargs) -> None:  # noqa: ARG001
    """Makes the policy version part of the key under which prefixes are shared.

    A prefix computed under one policy is never reused under another one, whether or not the cache could be
    flushed when the policy changed.
    """
    from sglang.srt.runtime_context import get_serving

    base = (request.extra_key or "").split(_POLICY_MARK)[0]
    request.extra_key = f"{base}{_POLICY_MARK}{get_serving().weight_version}"


def _restamp_waiting(result, scheduler, *args, **kwargs) -> None:  # noqa: ARG001
    """Requests that wait will be computed under the new policy; those that run keep the cache they hold. What proposals
    copied from the old weights is copied anew."""
    for request in scheduler.waiting_queue:
        _stamp_policy_version(None, request)
    if (worker := getattr(scheduler, "draft_worker", None)) is not None:
        worker.policy_changed()


def _make_sampler(backend: str | None = None):  # noqa: ARG001 (SGLang's signature)
    """Replaced as a whole: on a CPU SGLang overrides whatever sampling backend was asked for."""
    from services.rollout.sglang_plugin.sampler import LawSampler

    return LawSampler()


def _add_rounds(streamer, requests):  # noqa: ARG001
    from services.rollout.sglang_plugin import correction_slots, feedback, heads_swap, reflex_slots
    from services.rollout.sglang_plugin.spec_report import finished_rounds

    feedback.finish(requests)
    reflex_slots.finish(requests)
    correction_slots.finish(requests)
    return finished_rounds(requests) | heads_swap.finished_spans(requests)


def _attach_heads_swap(result, scheduler, *args, **kwargs) -> None:  # noqa: ARG001
    from services.rollout.sglang_plugin.heads_swap import attach

    attach(scheduler)


def _add_stats(result, controller, state) -> None:  # noqa: ARG001
    from services.rollout.sglang_plugin import feedback, heads_names, heads_swap
    from services.rollout.sglang_plugin.spec_report import PARTS_KEY, STATS_KEY

    worker = controller.scheduler.draft_worker
    state[STATS_KEY] = worker.stats_record()
    state[PARTS_KEY] = worker.proposals.gates.record()
    state[heads_names.STATE_KEY] = heads_swap.record_of(controller.scheduler)
    state[feedback.STATE_KEY] = feedback.record()


def _hold_whole_reserve(result: int) -> int:
    """Widens the rows of the slot table: a decode step reserves twice a tree, but SGLang's rows end one tree after
    the context length, and a long request would write past its own."""
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

    return max(result, get_alloc_reserve_per_decode() + 4)


def _complete_sampling_info(result, cls, batch, *args, **kwargs):  # noqa: ARG001
    from services.rollout.sglang_plugin.sampler import restore_penalties, set_request_seeds

    set_request_seeds(result, batch)
    restore_penalties(result, batch)
    return result

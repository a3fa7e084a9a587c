"""The inference engine: ids in, ids and behaviour log-probabilities out, on one asyncio loop.

SGLang runs in its own processes. This class is the only user of its Python API outside the plugin. It starts
in the main thread; all else happens on the loop that makes the first call.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TypeVar

import psutil

from services.config import RESERVED_TOKENS, EngineConfig
from services.rollout import engine_process
from services.rollout.completion import (
    Completion,
    CompletionDelta,
    EngineError,
    EngineStatus,
    PartState,
    PolicyUpdateError,
    SpeculationOverride,
    SpeculationStats,
    UpdateReport,
)
from services.rollout.heads_control import HeadsControl, check_start_heads
from services.rollout.heads_feedback import spans_of
from services.rollout.policy_check import PolicyShape, check_policy
from services.rollout.sglang_plugin.heads_names import SPANS_KEY
from services.rollout.sglang_plugin.spec_report import PARTS_KEY, STATS_KEY, count_rounds, rounds_of
from services.rollout.sglang_plugin.variables import OVERRIDE_KEY
from specroll_core.contracts import FinishReason, SamplingParams, VersionSpan

log = logging.getLogger(__name__)

T = TypeVar("T")
MAX_STOP_STRINGS = 32  # SGLang's limit
# A scheduler answers between two steps, and loads weights as fast as their files are read. One that is silent for this
# long, because its GPU hangs for example, is lost.
ANSWER_SECONDS = 600.0


class RolloutEngine:
    """Use `start`. After an EngineError from any call the engine is dead: close it and start another one."""

    def __init__(self, engine: Any, config: EngineConfig, model_dir: Path, policy_version: int, seed: int) -> None:
        self.policy_version = policy_version
        self._engine = engine
        self._manager = engine.tokenizer_manager
        self._config = config
        self._shape = PolicyShape(model_dir)
        self._model_dir = model_dir
        self._label = _label(policy_version, 0)
        self._updates = 0
        self._seeds = random.Random(seed)  # noqa: S311 (seeds of samples, not secrets)
        self._active: dict[str, str] = {}  # the caller's request id -> SGLang's
        self._tokens_total = 0
        self._update_lock = asyncio.Lock()
        self.heads = HeadsControl(self, engine.send_to_rpc)
        # Called with every completion: request id, prompt, sampling and the completion.
        self.observer: Callable[[str, Sequence[int], SamplingParams, Completion], None] | None = None
        self._processes = engine_process.processes_of(engine)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failed: asyncio.Future[str] | None = None
        self._failure: str | None = None

    @classmethod
    def start(
        cls, *, config: EngineConfig, dtype: str, model_dir: Path, policy_version: int, seed: int
    ) -> RolloutEngine:
        """Starts SGLang's processes and loads the model. Blocks; main thread only.

        Raises ValueError where the model directory or the configuration does not fit, EngineError where the
        processes do not come up within `config.start_timeout_seconds`.
        """
        shape = PolicyShape(model_dir)
        if shape.max_positions is not None and config.context_length > shape.max_positions:
            raise ValueError(
                f"rollout.engine.context_length = {config.context_length} exceeds the {shape.max_positions} positions "
                f"that the model in {model_dir} was made for."
            )
        if config.speculation.enabled and config.speculation.heads is not None:
            check_start_heads(config.speculation.heads, shape, model_dir, policy_version)
        engine = engine_process.launch(
            config=config, dtype=dtype, model_dir=model_dir, weight_version=_label(policy_version, 0), seed=seed
        )
        return cls(engine, config, model_dir, policy_version, seed)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        speculation: SpeculationOverride | None = None,
    ) -> Completion:
        """Samples one completion. Requests beyond `max_running_requests` wait in SGLang's queue.

        Raises ValueError naming a field that cannot be honoured, EngineError where the engine is dead.
        """
        async for delta in self._run(prompt_ids, sampling, request_id, speculation, stream=False):
            if delta.completion is not None:
                return delta.completion
        raise AssertionError("SGLang ended a request without its last message")

    async def stream(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        speculation: SpeculationOverride | None = None,
    ) -> AsyncIterator[CompletionDelta]:
        """Like `generate`, as tokens arrive; the last delta carries the completion."""
        async for delta in self._run(prompt_ids, sampling, request_id, speculation, stream=True):
            yield delta

    async def abort(self, request_id: str) -> None:
        """Ends a request: it returns what it has, with finish reason ABORT. Unknown ids are ignored."""
        self._attach()
        if (rid := self._active.get(request_id)) is not None:
            self._manager.abort_request(rid)

    async def update_policy(
        self, model_dir: Path, version: int, *, pause_mode: Literal["retract", "in_place"]
    ) -> UpdateReport:
        """Replaces the weights; requests in flight are kept.

        retract: running requests are put back and their caches computed again under the new weights.
        in_place: they go on with the caches of the old weights. Raises ValueError, with the old policy still
        serving, where the directory does not fit the model; PolicyUpdateError where loading failed.
        """
        if version < 0:
            raise ValueError("policy version must be 0 or more.")
        if pause_mode not in ("retract", "in_place"):
            raise ValueError(f"pause_mode = {pause_mode!r} must be retract or in_place.")
        self._attach()
        async with self._update_lock:
            await asyncio.to_thread(check_policy, model_dir, self._shape)
            self._updates += 1
            label = _label(version, self._updates)
            in_flight = len(self._active)
            return await self.or_failure(self._swap(model_dir, version, label, pause_mode, in_flight))

    async def status(self) -> EngineStatus:
        self._attach()
        running = min(len(self._active), self._config.max_running_requests)
        return EngineStatus(
            policy_version=self.policy_version,
            running=running,
            waiting=len(self._active) - running,
            tokens_total=self._tokens_total,
            alive=self._failure is None and all(process.is_alive() for process in self._processes),
        )

    async def speculation_stats(self) -> SpeculationStats | None:
        """What speculation has done since the start; None where it is off."""
        self._attach()
        if not self._config.speculation.enabled:
            return None
        return SpeculationStats(**(await self.internal_state())[STATS_KEY])

    async def speculation_parts(self) -> list[PartState]:
        """Parts that have a gate, and how these stand; [] where speculation is off."""
        self._attach()
        if not self._config.speculation.enabled:
            return []
        return [PartState(**part) for part in (await self.internal_state())[PARTS_KEY]]

    @property
    def model_dir(self) -> Path:
        """The directory of the policy that serves."""
        return self._model_dir

    async def internal_state(self) -> dict[str, Any]:
        """What the scheduler says about itself, between two steps."""
        self._attach()
        answer = self._answered("say how it stands", self._manager.get_internal_state())
        return (await self.or_failure(answer))[0]

    def close(self) -> None:
        """Ends SGLang's processes. Requests in flight raise EngineError. Safe to call twice."""
        self._fail("The engine was closed.", level=logging.DEBUG)
        if (loop := self._loop) is not None and not loop.is_closed():
            for process in self._processes:
                loop.remove_reader(process.sentinel)
            tasks = list(self._manager.asyncio_tasks)
            for task in tasks:
                task.cancel()
        else:
            loop, tasks = None, []
        self._loop = None
        try:
            if loop is not None and tasks and not (loop.is_running() or _in_a_loop()):
                # Nobody else would let them end, and asyncio complains of tasks that never did.
                loop.run_until_complete(asyncio.wait(tasks, timeout=10))
        finally:
            self._end_processes()

    def _end_processes(self) -> None:
        alive = {psutil.Process(p.pid) for p in self._processes if p.pid and p.is_alive()}
        engine_process.kill(alive)
        for process in self._processes:
            process.join(timeout=10)
        engine_process.drop_messages(self._engine)

    async def _run(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str,
        speculation: SpeculationOverride | None,
        *,
        stream: bool,
    ) -> AsyncIterator[CompletionDelta]:
        from sglang.srt.managers.io_struct import GenerateReqInput

        self._attach()
        self._check_request(prompt_ids, sampling, request_id)
        # SGLang aborts by prefix: ids of one length cannot be prefixes of each other.
        rid = uuid.uuid4().hex
        request = GenerateReqInput(
            input_ids=list(prompt_ids),
            sampling_params=self._sglang_params(sampling, speculation),
            rid=rid,
            return_logprob=True,
            logprob_start_len=-1,
            stream=stream,
        )
        messages = self._manager.generate_request(request, None)
        self._active[request_id] = rid
        sent = 0
        try:
            while True:
                message = await self.or_failure(anext(messages))
                meta = message["meta_info"]
                tokens = tuple(message["output_ids"])
                logprobs = tuple(float(entry[0]) for entry in meta.get("output_token_logprobs") or ())
                assert len(tokens) == len(logprobs), f"{len(logprobs)} log-probabilities for {len(tokens)} tokens"
                self._tokens_total += len(tokens) - sent
                completion = _completion(meta, tokens, logprobs) if meta["finish_reason"] is not None else None
                if completion is not None and self.observer is not None:
                    self.observer(request_id, prompt_ids, sampling, completion)
                yield CompletionDelta(tokens[sent:], logprobs[sent:], completion)
                sent = len(tokens)
                if completion is not None:
                    return
        finally:
            del self._active[request_id]
            # Closing the generator of an unfinished request makes SGLang abort it.
            await messages.aclose()

    def _check_request(self, prompt_ids: Sequence[int], sampling: SamplingParams, request_id: str) -> None:
        vocab = self._shape.vocab_size
        if not prompt_ids:
            raise ValueError("prompt_ids must not be empty.")
        if not all(0 <= token < vocab for token in prompt_ids):
            raise ValueError(f"prompt_ids must lie between 0 and {vocab - 1}.")
        room = min(self._config.context_length, self._config.max_total_tokens) - RESERVED_TOKENS - len(prompt_ids)
        if sampling.max_new_tokens > room:
            raise ValueError(
                f"max_new_tokens = {sampling.max_new_tokens} exceeds the {max(room, 0)} tokens that the prompt of "
                f"{len(prompt_ids)} leaves free."
            )
        if len(sampling.stop) > MAX_STOP_STRINGS:
            raise ValueError(f"stop must hold at most {MAX_STOP_STRINGS} strings.")
        for name, tokens in (
            ("stop_token_ids", sampling.stop_token_ids),
            ("logit_bias", [token for token, _ in sampling.logit_bias]),
        ):
            if not all(0 <= token < vocab for token in tokens):
                raise ValueError(f"{name} must name tokens between 0 and {vocab - 1}.")
        if request_id in self._active:
            raise ValueError(f"request_id = {request_id!r} is in use.")

    def _sglang_params(self, sampling: SamplingParams, speculation: SpeculationOverride | None) -> dict[str, Any]:
        seed = sampling.seed if sampling.seed is not None else self._seeds.getrandbits(63)
        params: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "max_new_tokens": sampling.max_new_tokens,
            "repetition_penalty": sampling.repetition_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "presence_penalty": sampling.presence_penalty,
            "stop": list(sampling.stop) or None,
            "stop_token_ids": list(sampling.stop_token_ids) or None,
            "ignore_eos": sampling.ignore_eos,
            "sampling_seed": seed,
            "logit_bias": {str(token): bias for token, bias in sampling.logit_bias} or None,
            "skip_special_tokens": False,
        }
        if self._config.speculation.enabled:
            override = asdict(speculation) if speculation is not None else {}
            if sampling.seed is not None:
                override["rule"] = "target_match"
            if override:
                params["custom_params"] = {OVERRIDE_KEY: override}
        return params

    async def _swap(self, model_dir: Path, version: int, label: str, pause_mode: str, in_flight: int) -> UpdateReport:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

        began = time.perf_counter()
        pause = self._manager.pause_generation(PauseGenerationReqInput(mode=pause_mode))
        await self._answered("pause for a policy update", pause)
        try:
            reason = await self._load(model_dir, label)
            if reason is not None:
                await self._roll_back(reason)
            self.policy_version, self._model_dir, self._label = version, model_dir, label
            if pause_mode == "retract" or not in_flight:
                # Frees memory only: prefixes are keyed by policy and never reused for another one.
                await self._answered("empty its prefix cache", self._manager.flush_cache())
        finally:
            if self._failure is None:
                go_on = self._manager.continue_generation(ContinueGenerationReqInput())
                await self._answered("go on after a policy update", go_on)
        return UpdateReport(time.perf_counter() - began, in_flight)

    async def _load(self, model_dir: Path, label: str) -> str | None:
        """Loads weights into the paused model; returns why it failed, None where it did not."""
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        request = UpdateWeightFromDiskReqInput(model_path=str(model_dir), flush_cache=False, weight_version=label)
        update = self._manager.update_weights_from_disk(request, None)
        success, message, _ = await self._answered("load a policy", update)
        return None if success else message

    async def _roll_back(self, reason: str) -> None:
        """Loads the previous policy again: SGLang's own way back reads from the directory that just failed."""
        second = await self._load(self._model_dir, self._label)
        if second is not None:
            self._fail(f"A policy update failed ({reason}) and so did going back to the previous policy ({second}).")
            raise EngineError(self._failure)
        raise PolicyUpdateError(f"The update failed ({reason}); policy {self.policy_version} is serving.")

    async def _answered(self, what: str, answer: Awaitable[T]) -> T:
        """The scheduler's answer; the engine is dead where it does not come in time."""
        try:
            return await asyncio.wait_for(answer, ANSWER_SECONDS)
        except TimeoutError:
            self._fail(f"The engine did not {what} within {ANSWER_SECONDS:g} s.")
            raise EngineError(self._failure) from None

    def _attach(self) -> None:
        """Binds the engine to the running loop at the first call, and raises where it is dead."""
        if self._failure is not None:
            raise EngineError(self._failure)
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        assert self._loop is None, "the engine belongs to another event loop"
        self._loop = loop
        self._failed = loop.create_future()
        # What `auto_create_handle_loop` does, without its signal handlers: they would replace the service's own
        # and answer the death of a child by killing this process.
        self._manager.event_loop = loop
        task = loop.create_task(self._manager.handle_loop())
        task.add_done_callback(self._on_receiver_end)
        self._manager.asyncio_tasks.add(task)
        for process in self._processes:
            loop.add_reader(process.sentinel, self._on_death, process)

    def _on_receiver_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            error = task.exception()
            log.error("SGLang's receiving task ended.", exc_info=error)  # its traceback names the place
            self._fail(f"The engine's receiving task ended: {error!r}")

    def _on_death(self, process: Any) -> None:
        assert self._loop is not None
        self._loop.remove_reader(process.sentinel)
        process.join(timeout=1)  # it is over already; this fetches the exit code
        self._fail(f"The engine's process {process.pid} ended with exit code {process.exitcode}.")

    def _fail(self, reason: str, level: int = logging.ERROR) -> None:
        if self._failure is None:
            self._failure = reason
            if self._failed is not None and not self._failed.done():
                log.log(level, "%s", reason)
                self._failed.set_result(reason)

    async def or_failure(self, awaitable: Awaitable[T]) -> T:
        """The awaitable's result, or EngineError as soon as the engine is dead."""
        assert self._failed is not None
        task = asyncio.ensure_future(awaitable)
        try:
            either: set[asyncio.Future[Any]] = {task, self._failed}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task})
            raise
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.wait({task})
        raise EngineError(self._failure)


def _label(version: int, update: int) -> str:
    """SGLang's weight version. A version that is published twice must not look like the same weights."""
    return f"{version}:{update}"


def _in_a_loop() -> bool:
    """Whether this thread runs an event loop, so that no other one can run here."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _completion(meta: dict[str, Any], tokens: tuple[int, ...], logprobs: tuple[float, ...]) -> Completion:
    spans: list[VersionSpan] = []
    for span in meta.get("weight_versions") or []:
        version, start, end = int(span["version"].split(":")[0]), span["start"], min(span["end"], len(tokens))
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version, spans[-1].start, end)
        elif end > start:
            spans.append(VersionSpan(version, start, end))
    rounds = rounds_of(meta)
    return Completion(
        token_ids=tokens,
        logprobs=logprobs,
        finish_reason=FinishReason(meta["finish_reason"]["type"]),
        policy_version_spans=tuple(spans),
        cached_tokens=meta.get("cached_tokens", 0),
        spec=count_rounds(rounds, len(tokens)),
        head_version_spans=spans_of(meta.get(SPANS_KEY, ()), len(tokens)),
        rounds=rounds,
    )

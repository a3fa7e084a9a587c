"""Speculative decoding inside SGLang's scheduler: propose a tree, verify it in one forward, keep the accepted path.

SGLang calls `forward_batch_generation` for every batch. A prefill runs as it would without speculation; its last hidden
states are kept. A decode step is one round:

1. the budget policy says how many nodes N each request of the batch gets;
2. heads propose, `build_tree` grows the trees (N = 1: the root alone, which is plain decoding);
3. the target runs over all nodes, each seeing the prefix and its ancestors;
4. `verify` walks the trees; every emitted token has the request's final law;
5. a stop token or the length cap cuts the block; the request's slot table names the path's keys and values first.

Synchronous: the scheduler has taken in a round's tokens before the next one begins.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.runtime_context import get_device, get_parallel, get_schedule
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from torch import Tensor

from services.config import SpeculationConfig
from services.rollout.completion import SpeculationStats
from services.rollout.heads_file import load_heads
from services.rollout.sglang_plugin import feedback
from services.rollout.sglang_plugin.compiled_parts import CompiledParts
from services.rollout.sglang_plugin.correction_slots import CorrectionSlots
from services.rollout.sglang_plugin.lazy_logits import LazyLogits
from services.rollout.sglang_plugin.proposer import HeadProposer
from services.rollout.sglang_plugin.reflex_slots import ReflexSlots
from services.rollout.sglang_plugin.round_budget import RoundBudget
from services.rollout.sglang_plugin.round_proposals import TREE, RoundBatch, RoundProposals, asks_heads
from services.rollout.sglang_plugin.sampler import law_params
from services.rollout.sglang_plugin.served_vocabulary import ServedVocabulary
from services.rollout.sglang_plugin.slots import RequestSlots
from services.rollout.sglang_plugin.spec_report import note_round
from services.rollout.sglang_plugin.spec_sampling import (
    NodeLaw,
    NodeLogitRows,
    cut,
    has_penalties,
    round_uniforms,
)
from services.rollout.sglang_plugin.variables import SPECULATION_VARIABLE
from services.rollout.sglang_plugin.verify_input import BetweenRounds, TreeVerifyInput
from services.rollout.sglang_plugin.verify_widths import VerifyWidths, of_runner, padded
from specroll_core.budget import BUDGETS
from specroll_core.law import LawParams
from specroll_core.proposal import DepthLaws
from specroll_core.scorer import CountTableScorer
from specroll_core.sources import accepted_sources
from specroll_core.tree import DraftTree
from specroll_core.verified import Verified
from specroll_core.verify import credit, verify

# Nodes that are not visited, above which the LM head is computed at visited nodes only: below, reading its weights
# again for every level of the walk costs more. For 49,152 x 576 they break even at about a hundred on one core (3.4 ms
# a level, 0.12 ms a row), and at nearly two hundred on two.
_LAZY_ABOVE = 128
# Nodes of each request that the walk visits, about.
_VISITED = 2


class SpeculativeWorker(BaseSpecWorker):
    """SGLang constructs it with these arguments, then calls `alloc_memory_pool` once."""

    def __init__(self, server_args, gpu_id: int, nccl_port: int, target_worker) -> None:  # noqa: ARG002
        super().__init__()
        self._target_worker = target_worker
        self.model_runner = target_worker.model_runner
        self.device = get_device().device
        self.config = SpeculationConfig.model_validate_json(os.environ[SPECULATION_VARIABLE])
        self.speculative_num_draft_tokens = self.config.max_nodes
        # On a GPU, graphs of a speculative engine exist for verification only, and for some widths only.
        self._decodes_plainly = get_device().device == "cpu"
        self._widths: VerifyWidths | None = None
        self._compiled = CompiledParts.load() if self._decodes_plainly else CompiledParts()
        self.stats = SpeculationStats()
        self.scorer = CountTableScorer.with_prior()
        self.reflex = ReflexSlots(self.config, self._compiled.memory)
        self.budget = RoundBudget(self.config)
        assert get_parallel().tp_size == 1, "the LM head must be whole; refused when the engine starts"
        assert get_schedule().disable_overlap_schedule, "the worker reads requests that the scheduler has settled"

    @property
    def draft_worker(self) -> None:
        """No model beside the target's."""
        return

    def stats_record(self) -> dict[str, float]:
        """The fields of `SpeculationStats`, as plain numbers for SGLang's messages."""
        return asdict(self.stats) | {"clock_seconds": time.perf_counter()}

    def alloc_memory_pool(self, **kwargs) -> None:  # noqa: ARG002 (SGLang's signature)
        self.req_to_token_pool, self.token_to_kv_pool_allocator = self._target_worker.get_memory_pool()
        if (page := self.token_to_kv_pool_allocator.page_size) != 1:
            raise RuntimeError(f"Speculation needs pages of one token, and SGLang has made them of {page}.")
        model = self.model_runner.model_config
        rows = self.req_to_token_pool.req_to_token.shape[0]
        self.slots = RequestSlots(rows, model.hidden_size, self.model_runner.dtype, self.device)
        self.proposer = None
        seeds = None
        if self.config.heads is not None:
            heads = load_heads(self.config.heads)
            seeds = heads.vocabulary
            self.proposer = HeadProposer(self.model_runner.model, heads, self.model_runner.dtype, self.device)
        self.vocabulary = ServedVocabulary(self._lm_head, self.config.vocabulary, seeds)
        self.correction = CorrectionSlots(self.config, rows, self._lm_head, self._kind_of_place)
        self.proposals = RoundProposals(
            self.config, self.scorer, self.vocabulary, self.reflex, self.correction, self._compiled
        )
        self.lazy_logits = LazyLogits(self.model_runner.model.logits_processor)

    def init_cuda_graphs(self) -> None:
        """Called once the target's own graphs have been captured."""
        if not self._decodes_plainly:
            self._widths = of_runner(self.model_runner, self.config.max_nodes)

    def forward_batch_generation(self, batch, on_publish=None, pp_proxy_tensors=None) -> GenerationBatchResult:
        assert on_publish is None
        if not batch.forward_mode.is_decode():
            return self._prefill(batch, pp_proxy_tensors)
        drafting = any(self._can_draft(request) for request in batch.reqs)
        budgets = self.budget.nodes(batch.reqs, self._choices(), drafting=drafting)
        if (
            max(budgets) == 1
            and self._decodes_plainly
            and not any(has_penalties(r.sampling_params) for r in batch.reqs)
        ):
            return self._plain_round(batch)
        return self._round(batch, budgets)

    def _prefill(self, batch, pp_proxy_tensors) -> GenerationBatchResult:
        began = time.perf_counter()
        result = self._target_worker.forward_batch_generation(
            batch, pp_proxy_tensors=pp_proxy_tensors, capture_hidden_mode=CaptureHiddenMode.LAST
        )
        if batch.forward_mode.is_extend():
            rows = batch.req_pool_indices.to(torch.int64)
            self.slots.store(rows, result.next_token_ids, result.logits_output.hidden_states)
            result.logits_output.hidden_states = None
            self.vocabulary.see(batch.input_ids)
        self.stats.prefill_seconds += time.perf_counter() - began
        result.accept_lens = torch.ones(len(batch.reqs), dtype=torch.int32, device=self.device)
        result.new_seq_lens = batch.seq_lens
        result.next_draft_input = BetweenRounds()
        result.speculative_num_draft_tokens = result.speculative_output_stride = 1
        return result

    def _plain_round(self, batch) -> GenerationBatchResult:
        """One token for each request, as without speculation: SGLang samples it."""
        began, sampler = time.perf_counter(), self.model_runner.sampler
        sampled = sampler.seconds
        B, lengths, rows = len(batch.reqs), batch.seq_lens, batch.req_pool_indices.to(torch.int64)
        batch.input_ids = self.slots.pending[rows]
        batch.out_cache_loc = self.req_to_token_pool.req_to_token[rows, lengths].to(torch.int64)
        self._one_token_longer(batch)
        result = self._target_worker.forward_batch_generation(batch, capture_hidden_mode=CaptureHiddenMode.FULL)
        output = result.logits_output
        tokens, states = result.next_token_ids, output.hidden_states
        feedback.note_round(batch, tokens[:, None], [1] * B, lambda row: states[row : row + 1], self.slots)
        self.slots.store(rows, tokens, states)
        output.hidden_states = None
        if output.next_token_logprobs is not None:
            output.next_token_logprobs = output.next_token_logprobs[:, None]
        for request in batch.reqs:
            note_round(request, 0, ())
        self._observe(batch.reqs, rows.tolist(), tokens[:, None].tolist())
        ones = torch.ones(B, dtype=torch.int32, device=self.device)
        result.accept_lens, result.new_seq_lens = ones, lengths + ones
        result.next_draft_input = BetweenRounds()
        result.speculative_num_draft_tokens = result.speculative_output_stride = 1
        seconds = time.perf_counter() - began
        sampled = sampler.seconds - sampled
        self.stats.add(B, 1, 0, B, 0.0, seconds - sampled, sampled)
        self.stats.plain_seconds += seconds
        self.budget.record_plain(B, seconds)
        return result

    def _round(self, batch, budgets: list[int]) -> GenerationBatchResult:
        began = time.perf_counter()
        requests, info, lengths = batch.reqs, batch.sampling_info, batch.seq_lens
        nodes = max(budgets) if self._widths is None else padded(max(budgets), self._widths.widths)
        late = self.reflex.catching_up_seconds
        params = law_params(info)
        uniforms = self._compiled.uniforms or round_uniforms
        drawn, walked = uniforms(info, lengths, nodes, min(nodes, 1 + TREE.max_depth))
        tree, laws = self._propose(batch, budgets, nodes, params, drawn)
        nodes = tree.tokens.shape[1]
        proposed = time.perf_counter()

        lazily = self._decodes_plainly and len(requests) * (nodes - _VISITED) > _LAZY_ABOVE
        if lazily:
            self.lazy_logits.defer()
        logits_output, locations = self._forward(batch, tree)
        logits = NodeLogitRows(logits_output.next_token_logits, self.lazy_logits.rows if lazily else None)
        forwarded = time.perf_counter()

        law = NodeLaw(logits, tree, requests, info.logit_bias)
        watched = self.proposals.watch(law, params)
        walk = None if self.config.planted_bias else self._compiled.walk
        if walk is not None and watched is law and walk.fits(law.bare, params):
            verified = walk.verify(tree, law.bare, params, walked, laws)
        else:
            verified = verify(tree, watched, params, walked, laws, planted_bias=self.config.planted_bias)
        drafted, emitted = tree.drafted.tolist(), verified.lengths.tolist()
        sources = accepted_sources(tree, verified)
        kept = self._keep(
            requests, batch.req_pool_indices.tolist(), verified.tokens.tolist(), drafted, emitted, sources
        )
        self._keep_path(batch.req_pool_indices, lengths, locations, verified)
        states = logits_output.hidden_states.view(len(requests), nodes, -1)
        feedback.note_round(
            batch, verified.tokens, kept, lambda row: states[row, verified.nodes[row].clamp_min(0)], self.slots
        )
        self._store(batch, verified, states)
        logits_output.hidden_states = None
        logits_output.next_token_logprobs = verified.logprobs
        credit(self.scorer, tree, verified)
        self.proposals.learn(verified)
        ended = time.perf_counter()
        seconds = (proposed - began, forwarded - proposed, ended - forwarded)
        self.stats.add(len(requests), nodes, sum(drafted), sum(emitted), *seconds)
        caught_up = self.reflex.catching_up_seconds - late
        self.stats.plain_seconds += self.budget.record(tree, emitted, sum(seconds), caught_up)
        self.vocabulary.see(verified.tokens)

        accepted = torch.tensor(kept, dtype=torch.int32, device=self.device)
        return GenerationBatchResult(
            logits_output=logits_output,
            next_token_ids=verified.tokens.flatten(),
            accept_lens=accepted,
            new_seq_lens=lengths + accepted,
            next_draft_input=BetweenRounds(),
            speculative_num_draft_tokens=nodes,
            speculative_output_stride=verified.tokens.shape[1],
        )

    def _choices(self) -> Sequence[int]:
        """Nodes per request that a round may have."""
        if self._widths is not None:
            return self._widths.widths
        return [n for n in BUDGETS if n <= self.config.max_nodes]

    def _can_draft(self, request) -> bool:
        return self._asks_heads(request) or self.reflex.wanted(request) is not None

    def _asks_heads(self, request) -> bool:
        return self.proposer is not None and asks_heads(request)

    def _propose(
        self, batch, budgets: list[int], nodes: int, params: LawParams, uniforms: Tensor
    ) -> tuple[DraftTree, DepthLaws | None]:
        rows = batch.req_pool_indices.to(torch.int64)
        this = RoundBatch(
            batch.reqs,
            rows.tolist(),
            self.slots.pending[rows],
            self.slots.hidden[rows],
            batch.seq_lens,
            params,
            budgets,
            nodes,
            self.budget.cut,
        )
        heads = self.proposer if any(self._asks_heads(request) for request in batch.reqs) else None
        return self.proposals.tree(this, heads, uniforms)

    def _kind_of_place(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        assert self.proposer is not None
        return self.proposer.heads.inner_of_first(hidden, embedded)

    def _lm_head(self) -> Tensor:
        """[V, H] as it is now."""
        model = self.model_runner.model
        return model.get_embed_and_head()[1][: self.model_runner.model_config.vocab_size]

    def policy_changed(self) -> None:
        """The model's weights have new values."""
        self.vocabulary.policy_changed()
        self.correction.policy_changed()

    def heads_changed(self) -> None:
        """The heads have new values: what was learned about the old ones' guesses is worth half."""
        self.scorer.halve()
        self.correction.halve()
        self.proposals.gates.halve()

    def _forward(self, batch, tree: DraftTree) -> tuple[LogitsProcessorOutput, Tensor]:
        """Runs the target over the trees. Returns its output and the nodes' KV locations [B, N].

        SGLang puts the batch back as it was after the step.
        """
        nodes = tree.tokens.shape[1]
        table = self.req_to_token_pool.req_to_token
        columns = batch.seq_lens[:, None] + torch.arange(nodes, device=self.device)
        locations = table[batch.req_pool_indices[:, None], columns].to(torch.int64)
        batch.input_ids = tree.tokens.flatten()
        batch.out_cache_loc = locations.flatten()
        if nodes == 1 and self._decodes_plainly:
            # A root sees all before it: a decode step, whose attention needs no mask of a tree.
            self._one_token_longer(batch)
        else:
            if self._widths is not None:
                self._widths.use(nodes)
            total = int(batch.seq_lens_cpu.sum()) if batch.seq_lens_cpu is not None else int(batch.seq_lens.sum())
            batch.spec_info = TreeVerifyInput.of(tree, batch.seq_lens, total)
            batch.forward_mode = ForwardMode.TARGET_VERIFY
        result = self._target_worker.forward_batch_generation(
            batch, is_verify=True, capture_hidden_mode=CaptureHiddenMode.FULL
        )
        batch.forward_mode = ForwardMode.DECODE
        return result.logits_output, locations

    def _one_token_longer(self, batch) -> None:
        """Makes an ordinary decode step of the batch."""
        batch.spec_info = None
        batch.seq_lens = batch.seq_lens + 1
        batch.seq_lens_cpu = batch.seq_lens_cpu + 1
        batch.orig_seq_lens = batch.orig_seq_lens + 1
        batch.seq_lens_sum = None

    def _keep(
        self,
        requests: Sequence,
        rows: Sequence[int],
        tokens: Sequence[Sequence[int]],
        drafted: Sequence[int],
        emitted: Sequence[int],
        sources: Sequence[Sequence[int]],
    ) -> list[int]:
        """How many of the `emitted` tokens each request keeps, and tells who wants to know of them.

        rows: in SGLang's pool. tokens: [B, L], those that were emitted first. drafted: nodes beside the root. sources:
        who the accepted ones came from.
        """
        kept = []
        for request, row, length, nodes, found in zip(requests, tokens, emitted, drafted, sources, strict=True):
            note_round(request, nodes, found)
            kept.append(cut(request, row[:length]).kept)
        self._observe(requests, rows, [row[:n] for row, n in zip(tokens, kept, strict=True)])
        return kept

    def _observe(self, requests: Sequence, rows: Sequence[int], emitted: Sequence[Sequence[int]]) -> None:
        self.reflex.observe(requests, rows, emitted)
        self.proposals.gates.observe(requests, rows, emitted)

    def _keep_path(self, rows: Tensor, lengths: Tensor, locations: Tensor, verified: Verified) -> None:
        """Lets the table of each request name the slots of the walk's nodes first, where the next round expects them.

        Keys and values stay where they are: a slot may stand anywhere in a table of pages of one token, and what is
        behind the kept ones is written anew. Nodes have larger numbers than their parents, so the order among the
        walk's nodes is that of their numbers.
        """
        order = verified.walked_first(locations.shape[1])
        table = self.req_to_token_pool.req_to_token
        columns = lengths[:, None] + torch.arange(locations.shape[1], device=self.device)
        table[rows[:, None], columns] = locations.gather(1, order).to(table.dtype)

    def _store(self, batch, verified: Verified, hidden: Tensor) -> None:
        """hidden: [B, N, H]. Requests that were cut have ended; what is stored for them is never read."""
        B = len(batch.reqs)
        states = hidden[torch.arange(B, device=self.device), verified.last_nodes]
        self.slots.store(batch.req_pool_indices.to(torch.int64), verified.pending, states)

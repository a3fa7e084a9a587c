"""The sampler: draws from the final law of `specroll_core/law.py` and reports its log-probabilities.

SGLang's own sampler reports log-probabilities from before top-k, top-p and min-p, and on a CPU draws with
`torch.multinomial`, which costs 0.8 ms a row. This one inverts the cumulative distribution at a number that
depends on the request's seed and the token's position alone, so a seed is honoured in any batch.

At temperature 0 the law is a point mass, and the reported log-probability is 0.
"""

from __future__ import annotations

import time

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import Sampler
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from specroll_core.law import LawParams, final_probs, sample
from specroll_core.randomness import Stream, uniforms

# On a `SamplingBatchInfo`: its temperatures, and the law that was made when they were there.
_LAW = "specroll_law"
# Of each of SGLang's penalizers: what it applies to the logits, [B, V], and the requests' strengths, [B, 1].
_PENALTY_FIELDS = {
    "BatchedFrequencyPenalizer": ("cumulated_frequency_penalties", "frequency_penalties"),
    "BatchedPresencePenalizer": ("cumulated_presence_penalties", "presence_penalties"),
    "BatchedRepetitionPenalizer": ("cumulated_repetition_penalties", "repetition_penalties"),
}


class LawSampler(Sampler):
    """Penalties, logit bias and grammar masks are in the logits already when SGLang calls `forward`.

    seconds: spent here so far. On a GPU it says nothing: the work goes on after the call.
    """

    seconds = 0.0

    def forward(
        self,
        logits_output: LogitsProcessorOutput,
        sampling_info: SamplingBatchInfo,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int]],
        positions: torch.Tensor,
        *,
        logprob_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns [B] int64 token ids, and writes log-probabilities to `logits_output` when asked.

        logits_output.next_token_logits: [B, V]; positions: [B], of the last token before the one drawn.
        """
        assert logprob_logits is None, "watermarks change the law and are refused when the engine starts"
        assert sampling_info.sampling_mask_batch_indices is None, "sampling masks are not offered"
        began = time.perf_counter()
        logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
        probs = final_probs(logits, law_params(sampling_info))
        if sampling_info.is_all_greedy:
            tokens = logits.argmax(-1)
        else:
            drawn = uniforms(sampling_info.sampling_seed, positions, Stream.VERIFY, 1)[:, 0]
            tokens = sample(probs, drawn)
        if return_logprob:
            self._report(logits_output, probs, tokens, top_logprobs_nums, token_ids_logprobs)
        self._sync_token_ids_across_tp(tokens, sampling_info)
        self.seconds += time.perf_counter() - began
        return tokens

    def _report(
        self,
        logits_output: LogitsProcessorOutput,
        probs: torch.Tensor,
        tokens: torch.Tensor,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int]],
    ) -> None:
        if any(top_logprobs_nums) or any(ids is not None for ids in token_ids_logprobs):
            result = self.output_logprob_processor.compute_logprobs(
                probs.log(), top_logprobs_nums, token_ids_logprobs, tokens
            )
            result.write_output_to(logits_output)
        else:
            logits_output.next_token_logprobs = probs.gather(-1, tokens[:, None]).squeeze(-1).log()


def law_params(info: SamplingBatchInfo) -> LawParams:
    """The rows' law as SGLang carries it: temperature 0 arrives as top_k 1, an absent top_k as a huge one.

    Kept beside the tensors that it was made of: SGLang makes new ones whenever requests join or leave.
    """
    made_of, params = getattr(info, _LAW, (None, None))
    if params is None or made_of is not info.temperatures:
        params = _law_params(info)
        setattr(info, _LAW, (info.temperatures, params))
    return params


def _law_params(info: SamplingBatchInfo) -> LawParams:
    greedy = info.top_ks <= 1
    temperatures = info.temperatures.view(-1)
    on_cpu = temperatures.device.type == "cpu"
    return LawParams(
        temperature=torch.where(greedy, 0.0, temperatures) if info.is_any_greedy else temperatures,
        top_k=info.top_ks.long(),
        top_p=info.top_ps,
        min_p=info.min_ps,
        needs_filter=info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling,
        all_greedy=info.is_all_greedy,
        any_greedy=info.is_any_greedy,
        # Reading a device here would stall it; a division by 1 does not.
        any_scaled=not on_cpu or bool((temperatures != 1).any()),
    )


def set_request_seeds(info: SamplingBatchInfo, batch) -> None:
    """Puts each request's own seed, [B] int64, where the sampler reads it; SGLang filters and merges it from there.

    Without SGLang's slower deterministic mode it would drop them.
    """
    seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
    info.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=info.temperatures.device)


def restore_penalties(info: SamplingBatchInfo, batch) -> None:
    """Counts the tokens that retracted requests have sampled already.

    SGLang builds a batch's penalties as if every request in it were new, so without this a request that was
    retracted, for memory or for a new policy, would go on under another law.
    """
    resumed = [(row, request) for row, request in enumerate(batch.reqs) if len(request.output_ids)]
    if not resumed:
        return
    for kind, penalizer in info.penalizer_orchestrator.penalizers.items():
        if not penalizer.is_prepared() or kind.__name__ == "BatchedMinNewTokensPenalizer":
            continue  # a minimum length is not offered
        applied, strength = _PENALTY_FIELDS[kind.__name__]
        for row, request in resumed:
            target: torch.Tensor = getattr(penalizer, applied)[row]
            tokens = torch.tensor(request.output_ids, dtype=torch.int64, device=target.device)
            step = getattr(penalizer, strength)[row].expand(tokens.shape)
            if kind.__name__ == "BatchedFrequencyPenalizer":
                target.scatter_add_(0, tokens, step)
            else:
                target.scatter_(0, tokens, step)

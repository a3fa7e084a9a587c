"""The law that a request samples from: logits after temperature, top-k, top-p and min-p.

One definition serves the verifier (which samples from it and reports its log-probabilities), the
proposers (whose scores are compared with it) and the learner (which recomputes it under new weights).
It is the law of SGLang 0.5.23's `top_k_top_p_min_p_sampling_from_probs_torch`:

1. `p = softmax(logits / temperature)` in float32;
2. tokens are ranked by p, largest first, ties by the lower id;
3. top-k keeps ranks below k;
4. top-p keeps a token where the mass *before* it, counted over the unfiltered p, is at most top_p;
5. min-p keeps a token where p is at least min_p times the largest p;
6. what is kept is renormalised.

Of tokens tied at the edge SGLang keeps as many, but which ones is left to an unstable sort; here it is the lower ids.
Temperature 0 is a point mass at the argmax. A filter that is off (top_k -1, top_p 1, min_p 0) removes
nothing at all, so a request's law does not depend on the other rows of its batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specroll_core.contracts import SamplingParams

# top_k that keeps every token of any vocabulary; SGLang's TOP_K_ALL.
TOP_K_OFF = 1 << 30

# A CPU sorts a whole vocabulary in milliseconds, but nearly all filters are decided by the largest
# few hundred probabilities: look at this many first, then at this many times more.
_FIRST_LOOK = 256
_LOOK_GROWTH = 16

# Tokens per block of the two-level inverse CDF: the square root of a vocabulary of 65,536.
_BLOCK = 256
# Laws of so many columns are copied to draw from: for a few rows it takes less than the operations that avoid it.
_COPIED = 1 << 14


@dataclass(frozen=True)
class LawParams:
    """Sampling parameters of B rows, all tensors on one device.

    temperature: [B] float32, 0 is greedy. top_k: [B] int64, `TOP_K_OFF` or any k >= V is off.
    top_p: [B] float32, 1 is off. min_p: [B] float32, 0 is off.
    The flags are known on the host, so that no step waits for a device to learn which path to take;
    `needs_filter`, `any_greedy` and `any_scaled` may be true of a selection none of whose rows needs them.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    needs_filter: bool
    all_greedy: bool
    any_greedy: bool
    any_scaled: bool

    @staticmethod
    def build(
        temperature: Sequence[float],
        top_k: Sequence[int] | None = None,
        top_p: Sequence[float] | None = None,
        min_p: Sequence[float] | None = None,
        device: torch.device | str = "cpu",
    ) -> LawParams:
        """Makes the parameters of `len(temperature)` rows; filters default to off, top_k -1 is off.

        Raises ValueError for values outside their range.
        """
        rows = len(temperature)
        top_k = [-1] * rows if top_k is None else top_k
        top_p = [1.0] * rows if top_p is None else top_p
        min_p = [0.0] * rows if min_p is None else min_p
        if not len(top_k) == len(top_p) == len(min_p) == rows:
            raise ValueError("temperature, top_k, top_p and min_p must have one entry per row.")
        if not all(math.isfinite(t) and t >= 0 for t in temperature):
            raise ValueError("temperature must be finite and at least 0.")
        if not all(k == -1 or k >= 1 for k in top_k):
            raise ValueError("top_k must be -1 (off) or at least 1.")
        if not all(0 < p <= 1 for p in top_p):
            raise ValueError("top_p must be above 0 and at most 1.")
        if not all(0 <= p <= 1 for p in min_p):
            raise ValueError("min_p must lie between 0 and 1.")
        top_k = [TOP_K_OFF if k == -1 else k for k in top_k]
        # A row that keeps one token is greedy: SGLang itself writes temperature 0 as top_k 1.
        greedy = [t == 0 or k == 1 for t, k in zip(temperature, top_k, strict=True)]
        kept_temperature = [0.0 if g else t for g, t in zip(greedy, temperature, strict=True)]
        return LawParams(
            temperature=torch.tensor(kept_temperature, dtype=torch.float32, device=device),
            top_k=torch.tensor(top_k, dtype=torch.int64, device=device),
            top_p=torch.tensor(top_p, dtype=torch.float32, device=device),
            min_p=torch.tensor(min_p, dtype=torch.float32, device=device),
            needs_filter=any(
                not g and (k < TOP_K_OFF or p < 1 or m > 0)
                for g, k, p, m in zip(greedy, top_k, top_p, min_p, strict=True)
            ),
            all_greedy=all(greedy),
            any_greedy=any(greedy),
            any_scaled=any(not g and t != 1 for g, t in zip(greedy, temperature, strict=True)),
        )

    @staticmethod
    def from_requests(requests: Iterable[SamplingParams], device: torch.device | str = "cpu") -> LawParams:
        """The law of each request. Penalties and logit bias are the caller's: they belong to the logits."""
        requests = list(requests)
        return LawParams.build(
            [r.temperature for r in requests],
            [r.top_k for r in requests],
            [r.top_p for r in requests],
            [r.min_p for r in requests],
            device,
        )

    @property
    def rows(self) -> int:
        return self.temperature.shape[0]

    def select(self, index: Tensor) -> LawParams:
        """The parameters of rows `index` [R] int64, repetitions allowed."""
        return LawParams(
            self.temperature[index],
            self.top_k[index],
            self.top_p[index],
            self.min_p[index],
            self.needs_filter,
            self.all_greedy,
            self.any_greedy,
            self.any_scaled,
        )

    def without_greedy(self) -> LawParams:
        """The same with temperature 1 in place of 0, for laws that are only drawn from to propose."""
        if not self.any_greedy:
            return self
        temperature = torch.where(self.temperature == 0, 1.0, self.temperature)
        return replace(self, temperature=temperature, all_greedy=False, any_greedy=False)

    def without_filters(self) -> LawParams:
        """The same with top-k, top-p and min-p off."""
        return replace(
            self,
            top_k=torch.full_like(self.top_k, TOP_K_OFF),
            top_p=torch.ones_like(self.top_p),
            min_p=torch.zeros_like(self.min_p),
            needs_filter=False,
        )


def final_logprobs(logits: Tensor, params: LawParams) -> Tensor:
    """Log-probabilities of the final law.

    logits: [B, V] of any floating type. Returns [B, V] float32, -inf outside the support; each row's
    exponentials sum to 1. Differentiable, with the support held constant.
    """
    if params.all_greedy:
        assert logits.shape[0] == params.rows
        return _point_mass(logits)
    out = torch.log_softmax(_filtered(logits, params), dim=-1)
    if params.any_greedy:
        out = torch.where((params.temperature == 0)[:, None], _point_mass(logits), out)
    return out


def final_probs(logits: Tensor, params: LawParams) -> Tensor:
    """Probabilities of the final law, [B, V] float32, 0 outside the support: one pass over the vocabulary less than
    the exponentials of `final_logprobs`."""
    if params.all_greedy:
        assert logits.shape[0] == params.rows
        return _point_mass(logits).exp_()
    out = torch.softmax(_filtered(logits, params), dim=-1)
    if params.any_greedy:
        out = torch.where((params.temperature == 0)[:, None], _point_mass(logits).exp_(), out)
    return out


def token_logprobs(logits: Tensor, token_ids: Tensor, params: LawParams) -> Tensor:
    """Log-probability of one given token per row under the final law, differentiable in the logits.

    logits: [N, V]; token_ids: [N] int64. Returns [N] float32, -inf for a token outside the support.
    The support is a constant of the gradient. Without filters nothing is sorted and no [N, V]
    log-probabilities are built.
    """
    assert logits.shape[0] == params.rows == token_ids.shape[0]
    if params.all_greedy:
        return _point_mass_at(logits, token_ids)
    scaled = _filtered(logits, params)
    out = scaled.gather(-1, token_ids[:, None]).squeeze(-1) - torch.logsumexp(scaled, dim=-1)
    if params.any_greedy:
        out = torch.where(params.temperature == 0, _point_mass_at(logits, token_ids), out)
    return out


def sample(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Draws one token per row by inverting the cumulative distribution.

    probs: [B, V], not negative, each row with a positive sum (it need not be 1). uniforms: [B] in [0, 1),
    float64 where possible: float32 has only 2^24 values. Returns [B] int64.

    Sums are kept in float64, and two levels (blocks, then inside one block) touch each probability once.
    A token of probability 0 is never returned, whatever the uniform: the token found is the first whose
    cumulative sum exceeds a target strictly below the total, so its own probability is positive.
    """
    return sample_and_sum(probs, uniforms)[0]


def sample_and_sum(probs: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """`sample`, and the sum of each row [B] float64, which may be 0 here: the token of such a row means nothing."""
    rows, vocab = probs.shape
    u = uniforms.to(torch.float64)
    if vocab <= 2 * _BLOCK:
        cumulative = probs.to(torch.float64).cumsum(-1)
        return _invert(cumulative, u, None)[0].clamp_max(vocab - 1), cumulative[:, -1]
    if vocab % _BLOCK:
        probs = torch.nn.functional.pad(probs, (0, _BLOCK - vocab % _BLOCK))
    blocks = probs.view(rows, -1, _BLOCK)
    cumulative = blocks.sum(-1).to(torch.float64).cumsum(-1)
    block, rest = _invert(cumulative, u, None)
    block = block.clamp_max(blocks.shape[1] - 1)
    inside = blocks[torch.arange(rows, device=probs.device), block].to(torch.float64).cumsum(-1)
    return (block * _BLOCK + _invert(inside, None, rest)[0]).clamp_max(vocab - 1), cumulative[:, -1]


def draw_outside(laws: Tensor, row: Tensor, excluded: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draws from given rows of `laws`, each renormalised outside a set of excluded columns.

    laws: [R, V] float32, not negative; row: [n] int64; excluded: [n, m] columns, unique per row, -1 for none;
    uniforms: [n] float64 in [0, 1). Returns columns [n] int64, never excluded nor of probability 0, and the mass
    outside the set [n] float64; where that is 0 the column means nothing. No long row is copied, and none on a GPU.
    """
    vocab = laws.shape[-1]
    if vocab <= _COPIED and laws.device.type == "cpu":
        some = laws.index_select(0, row)
        at, which = (excluded >= 0).nonzero(as_tuple=True)
        some[at, excluded[at, which]] = 0.0
        return sample_and_sum(some, uniforms)
    width = _BLOCK if vocab > 2 * _BLOCK else vocab
    if vocab % width:
        laws = torch.nn.functional.pad(laws, (0, width - vocab % width))
    blocks = laws.view(laws.shape[0], -1, width)
    left = blocks.sum(-1)[row].to(torch.float64)
    # The blocks that hold excluded columns are summed again without them: subtracting would leave rounding
    # behind where an excluded column holds nearly all of its block.
    out = excluded < 0
    block_of, inside_of = torch.where(out, -1, excluded // width), torch.where(out, width, excluded % width)
    touched = block_of.clamp_min(0)
    same = touched[:, :, None] == block_of[:, None, :]
    again = torch.nn.functional.pad(blocks[row[:, None], touched].to(torch.float64), (0, 1))
    again.scatter_(-1, torch.where(same, inside_of[:, None, :], width), 0.0)
    left.scatter_(1, touched, again[..., :width].sum(-1))
    mass = left.sum(-1)
    block, rest = _invert(left.cumsum(-1), uniforms.to(torch.float64), None)
    block = block.clamp_max(blocks.shape[1] - 1)
    inside = torch.nn.functional.pad(blocks[row, block].to(torch.float64), (0, 1))
    inside.scatter_(1, torch.where(block_of == block[:, None], inside_of, width), 0.0)
    column = _invert(inside[:, :width].cumsum(-1), None, rest)[0]
    return (block * width + column).clamp_max(vocab - 1), mass


def _invert(cumulative: Tensor, u: Tensor | None, target: Tensor | None) -> tuple[Tensor, Tensor]:
    """First index whose cumulative sum exceeds `u * total` or `target`, and what the target leaves inside it."""
    total = cumulative[:, -1]
    if target is None:
        assert u is not None
        target = u * total
    # Rounding may put the target at or past the total; the last token of positive probability takes it.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, target[:, None], right=True)
    before = torch.where(index > 0, cumulative.gather(-1, (index - 1).clamp_min(0)), 0.0)
    return index.squeeze(-1), (target - before.squeeze(-1)).clamp_min(0)


def _scaled(logits: Tensor, params: LawParams) -> Tensor:
    logits = logits.float()
    if not params.any_scaled:
        return logits
    return logits / torch.where(params.temperature == 0, 1.0, params.temperature)[:, None]


def _filtered(logits: Tensor, params: LawParams) -> Tensor:
    """[B, V] float32: logits over temperature, -inf where a filter removes the token."""
    assert logits.dim() == 2
    assert logits.shape[0] == params.rows, (logits.shape, params.rows)
    scaled = _scaled(logits, params)
    if not params.needs_filter:
        return scaled
    return scaled.masked_fill(~_support(scaled.detach().softmax(-1), params), -math.inf)


def _point_mass(logits: Tensor) -> Tensor:
    out = torch.full(logits.shape, -math.inf, dtype=torch.float32, device=logits.device)
    return out.scatter_(-1, logits.argmax(-1, keepdim=True), 0.0)


def _point_mass_at(logits: Tensor, token_ids: Tensor) -> Tensor:
    hit = logits.argmax(-1) == token_ids
    return torch.where(hit, 0.0, -math.inf).to(torch.float32)


def _support(probs: Tensor, params: LawParams) -> Tensor:
    """[B, V] bool: which tokens the filters keep. probs: [B, V] float32, normalised."""
    vocab = probs.shape[-1]
    on_cpu = probs.device.type == "cpu"
    # Off is off: a cumulative sum that rounds above 1 must not cut the tail.
    top_p = torch.where(params.top_p < 1, params.top_p, math.inf)[:, None]
    unfiltered = (params.top_k >= vocab) & (params.top_p >= 1) & (params.min_p <= 0) | (params.temperature == 0)
    count = torch.ones(len(probs), 1, dtype=torch.int64, device=probs.device)
    edge = torch.zeros(len(probs), 1, device=probs.device)
    rows = torch.arange(len(probs), device=probs.device)
    look = min(_FIRST_LOOK, vocab) if on_cpu else vocab
    while True:
        some = probs if len(rows) == len(probs) else probs[rows]
        ranked = some.sort(-1, descending=True).values if look == vocab else some.topk(look).values
        keep = torch.arange(look, device=probs.device) < params.top_k[rows, None]
        keep &= ~(ranked.cumsum(-1) - ranked > top_p[rows])
        keep &= ~(ranked < ranked[:, :1] * params.min_p[rows, None])
        count[rows] = keep.sum(-1, keepdim=True)
        edge[rows] = ranked.gather(-1, count[rows] - 1)
        # Each condition fails for good from some rank on: a row is decided once its last rank looked at fails.
        if look == vocab or not bool((open_rows := keep[:, -1] & ~unfiltered[rows]).any()):
            break
        rows = rows[open_rows]
        look = min(look * _LOOK_GROWTH, vocab)
    kept = probs >= edge
    if not on_cpu or bool((kept.sum(-1, keepdim=True) > count).any()):
        # Of the tokens tied at the edge, the lower ids rank first.
        above = probs > edge
        tied = kept & ~above
        kept = above | (tied & (tied.cumsum(-1) <= count - above.sum(-1, keepdim=True)))
    return kept | unfiltered[:, None]

"""Do sampled tokens lean towards what the drafter favours, more or less than the exact law says?

A verifier that accepts too often lets the drafter's law q into what is emitted. So for every token that a verify step
decided, with p the exact law at its position and q the law of head k, k tokens earlier, two statistics are followed:

- f(y) = min(q(y) / p(y), 10), with the mean and the variance that p gives it: too high a sum means drafts accepted too
  often, too low a one drafts accepted too rarely;
- the wealth of a gambler who bets on the mixture (1 - eps) p + eps q. It grows fast where a token appears that the
  drafter likes and p hardly allows, and no approximation is involved.

Both hold whatever the boundaries of rounds were, as p and q are known before the token is drawn. The head's law is the
drafter's own at the request's temperature. Log-probabilities that the engine reported are compared on the way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.heads.target import TargetModel
from services.lossless.exact import Text, hidden_states, logits_of
from services.lossless.options import EDGE, FAMILY, LawUnderTest
from services.rollout.completion import Completion
from specroll_core.goodness_of_fit import normal_quantile, two_sided_p, wealth_p
from specroll_core.heads import FutureTokenHeads, ProposalVocabulary
from specroll_core.law import final_logprobs

# The larger, the more a rare mistake shows and the more tokens the sum needs before it is normal.
CLIP = 10.0
# What gamblers bet that the share of foreign tokens is.
SHARES = (0.001, 0.003, 0.01, 0.03)
_TYPICAL = 0.01
# Positions whose laws exist at one time: a few arrays of 32 x V float32 stay near the processor's caches.
_ROWS = 32


@dataclass(frozen=True, slots=True)
class Terms:
    """Of n tokens, float64 each [n], on the CPU: f minus its mean, f's variance, and log q / p of the token."""

    excess: Tensor
    variance: Tensor
    log_ratio: Tensor


def leaning_terms(log_p: Tensor, log_q: Tensor, tokens: Tensor, clip: float = CLIP) -> Terms:
    """log_p, log_q: [n, V]; tokens: [n] int64, each inside p's support."""
    f = (log_q - log_p).exp_().clamp_max_(clip)  # outside p's support, where p has no mass, it is clip
    weighted = log_p.exp() * f
    mean = weighted.sum(-1, dtype=torch.float64)
    square = (weighted * f).sum(-1, dtype=torch.float64)
    at = tokens[:, None]
    log_ratio = (log_q.gather(1, at) - log_p.gather(1, at)).squeeze(1).double()
    excess = f.gather(1, at).squeeze(1).double() - mean
    return Terms(excess.cpu(), (square - mean**2).clamp_min(0).cpu(), log_ratio.cpu())


def growth_moments(log_p: Tensor, log_q: Tensor, share: float) -> Tensor:
    """[2, 2] float64, sums over rows: mean and mean square of the logarithm by which one token multiplies the wealth of
    the gambler who bets on `share`, where the token is drawn from p and where it is drawn from q.

    log_p, log_q: [n, V]. What p forbids, which is noticed at once, is left out.
    """
    odds = torch.where(log_p > -math.inf, (log_q - log_p).clamp_max(60).exp_(), 0).sub_(1)
    growth = odds.mul_(share).log1p_()
    laws = (log_p.exp(), torch.where(log_p > -math.inf, log_q.exp(), 0))
    return torch.stack(
        [torch.stack([(law * growth**power).sum(dtype=torch.float64) for power in (1, 2)]) for law in laws]
    )


class Leaning:
    """Sums over the tokens of one law and one way of decoding; [K] or [K, shares] float64, head by head."""

    def __init__(self, heads: int) -> None:
        self.tokens = 0
        self.outside = 0  # tokens that the law forbids
        self.excess, self.variance = torch.zeros(2, heads, dtype=torch.float64)
        self.growth = torch.zeros(2, 2, dtype=torch.float64)  # `growth_moments` of the first head
        self.log_wealth = torch.zeros(heads, len(SHARES), dtype=torch.float64)

    @staticmethod
    def together(parts: Sequence[Leaning]) -> Leaning:
        """All of them one after the other: sums add up, and gamblers go on with what they hold, so that wealth
        multiplies."""
        out = Leaning(len(parts[0].excess))
        for part in parts:
            out.tokens += part.tokens
            out.outside += part.outside
            for name in ("excess", "variance", "growth", "log_wealth"):
                setattr(out, name, getattr(out, name) + getattr(part, name))
        return out

    def add(self, head: int, terms: Terms) -> None:
        self.excess[head] += terms.excess.sum()
        self.variance[head] += terms.variance.sum()
        shares = torch.tensor(SHARES, dtype=torch.float64)
        odds = terms.log_ratio.clamp_max(600).exp()[:, None] - 1  # the clamp keeps double precision from overflowing
        self.log_wealth[head] += (shares * odds).log1p().sum(0)

    @property
    def z(self) -> list[float]:
        return [float(e / v.sqrt()) if v > 0 else 0.0 for e, v in zip(self.excess, self.variance, strict=True)]

    @property
    def p_values(self) -> list[float]:
        """One per head, from z, and one from the gamblers; 0 where a forbidden token came."""
        if self.outside:
            return [0.0] * (len(self.excess) + 1)
        return [*map(two_sided_p, self.z), wealth_p(self.log_wealth)]

    def detectable(self, tests: int) -> float:
        """The share of tokens which, drawn from the first head's law in place of p, gamblers notice with 99 %
        probability where they are one of `tests` tests; 1 where there is no such share."""
        # The one who bets on `_TYPICAL` holds an equal share of the first stakes.
        needed = math.log(tests / FAMILY) + math.log(self.log_wealth.numel())

        def noticed(share: float) -> bool:
            mean, square = ((1 - share) * self.growth[0] + share * self.growth[1]).tolist()
            deviation = math.sqrt(max(0.0, square - mean**2 / max(1, self.tokens)))
            return mean - normal_quantile(0.99) * deviation >= needed

        shares = [i / 2000 for i in range(2001)]
        return next((share for share in shares if noticed(share)), 1.0)


@dataclass(slots=True)
class LogprobGap:
    """Absolute differences between what the engine reported and the exact log-probabilities."""

    tokens: int = 0
    total: float = 0.0
    largest: float = 0.0

    @property
    def mean(self) -> float:
        return self.total / max(1, self.tokens)

    def add(self, gaps: Tensor) -> None:
        if gaps.numel():
            self.tokens += gaps.numel()
            self.total += float(gaps.sum())
            self.largest = max(self.largest, float(gaps.max()))


def _at_moved_edges(logits: Tensor, tokens: Tensor, law: LawUnderTest) -> Tensor:
    """[3, n]: log-probabilities with top-p as it is, lower and higher by `EDGE`.

    A token whose fate at the edge of top-p is decided by rounding changes those of all the others.
    """
    laws = (final_logprobs(logits, law.params(len(tokens), edge=edge)) for edge in (0.0, -EDGE, EDGE))
    return torch.stack([log_p.gather(1, tokens[:, None]).squeeze(1) for log_p in laws])


@torch.inference_mode()
def measure(
    target: TargetModel,
    heads: FutureTokenHeads | None,
    law: LawUnderTest,
    prompts: Sequence[tuple[int, ...]],
    completions: Sequence[Completion],
    gap: LogprobGap,
    progress: Callable[[int], None] | None = None,
) -> Leaning:
    """Follows completions of one law, and adds their log-probabilities to `gap`.

    heads: None leaves the statistics out. progress(done) with tokens so far.

    The first token of a completion is drawn by the prefill, before there is anything to verify: only its
    log-probability counts. Raises ValueError where a completion has not one log-probability per token.
    """
    K = heads.spec.heads if heads is not None else 0
    vocabulary = ProposalVocabulary(target.lm_head)
    leaning = Leaning(K)
    texts = [Text(p, c.token_ids, i) for i, (p, c) in enumerate(zip(prompts, completions, strict=True))]
    done = 0
    for text, states in hidden_states(target, texts):
        tokens = torch.tensor(text.tokens, device=target.device)
        reported = torch.tensor(completions[text.name].logprobs)
        if len(reported) != len(tokens):
            raise ValueError(f"{len(reported)} log-probabilities came with {len(tokens)} tokens.")
        z = heads(states[:-2], target.embedding[tokens[:-1]]) if heads is not None and len(tokens) > 1 else None
        for index in torch.arange(len(tokens), device=target.device).split(_ROWS):
            logits = logits_of(target, states[index])
            log_p = final_logprobs(logits, law.params(len(index)))
            at = tokens[index]
            exact = log_p.gather(1, at[:, None]).squeeze(1)
            inside = exact > -math.inf
            off = (exact - reported.to(exact.device)[index]).abs()
            if law.top_p < 1 and bool((doubtful := off > EDGE).any()):
                near = _at_moved_edges(logits[doubtful], at[doubtful], law)
                # Coarser numbers than float32 move the edge by more than can be told from a mistake.
                leaning.outside += int((near == -math.inf).all(0).sum()) if states.dtype == torch.float32 else 0
                off[doubtful] = (near - reported.to(exact.device)[index][doubtful]).abs().amin(0)
            gap.add(off[off < math.inf].cpu())
            for k in range(1, K + 1):
                use = inside & (index >= k)
                if z is None or not bool(use.any()):
                    continue
                guess = vocabulary.logits(z[index[use] - k, k - 1 : k])[:, 0].float()
                log_q = torch.log_softmax(guess / law.temperature, -1)
                leaning.add(k - 1, leaning_terms(log_p[use], log_q, at[use]))
                if k == 1:
                    leaning.growth += growth_moments(log_p[use], log_q, _TYPICAL).cpu()
        leaning.tokens += max(0, len(tokens) - 1)
        done += len(tokens)
        if progress is not None:
            progress(done)
    return leaning

"""What heads propose at every recorded position, computed once and replayed under many settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specroll_core.head_training import HeadRows
from specroll_core.heads import FutureTokenHeads, ProposalVocabulary
from specroll_core.law import LawParams, token_logprobs
from specroll_core.proposal import DEFAULT_WIDTH, DepthLaws, PathProposer, Proposal


@dataclass(frozen=True)
class HeadGuesses:
    """The heads' proposals at P positions of trajectories, at one temperature.

    tokens: [P, K, M] int64 and log_q: [P, K, M] float32, the best M candidates of each head. states: [P, K, H], the
    heads' hidden states, and log_norm: [P, K] float32, whose product with the LM head gives the rest of the law.
    log_p: [P] float32, the final law's log-probability of the token at each position. temperature: 0 is greedy.
    """

    tokens: Tensor
    log_q: Tensor
    states: Tensor
    log_norm: Tensor
    log_p: Tensor
    vocabulary: ProposalVocabulary
    temperature: float

    @property
    def depth(self) -> int:
        return self.tokens.shape[1]

    def proposal(
        self, index: Tensor, ahead: Tensor, paths: Sequence[PathProposer | None] = ()
    ) -> tuple[Proposal, RealisedDraws]:
        """The proposal at positions `index` [B], whose sampled children take the tokens `ahead` [B, D]."""
        draws = RealisedDraws(self.states[index], self.log_norm[index], self.vocabulary, self.temperature, ahead)
        return Proposal(self.tokens[index], self.log_q[index], draws, paths), draws


class RealisedDraws(DepthLaws):
    """Laws whose draws come out as the trajectory went on, which is what a replay is conditioned on.

    states: [B, K, H]; log_norm: [B, K]; ahead: [B, >= K], the token at each depth.
    """

    def __init__(
        self, states: Tensor, log_norm: Tensor, vocabulary: ProposalVocabulary, temperature: float, ahead: Tensor
    ) -> None:
        self.vocabulary = vocabulary
        self._states = states
        self._log_norm = log_norm
        self._temperature = temperature or 1.0
        self._ahead = ahead

    @property
    def depth(self) -> int:
        return self._states.shape[1]

    def q(self, request: Tensor, depth: Tensor, tokens: Tensor) -> Tensor:
        """[n, m] float64: q_d of tokens [n, m] at the given requests and depths; 0 outside the columns and for -1."""
        columns = self.vocabulary.to_column(tokens)
        weight = self.vocabulary.weight[columns.clamp_min(0)]  # [n, m, H]
        states = self._states[request, depth - 1].to(weight.dtype)
        logits = (weight @ states[:, :, None]).squeeze(-1).double() / self._temperature
        q = (logits - self._log_norm[request, depth - 1].double()[:, None]).exp()
        return torch.where(columns >= 0, q, 0.0)

    def draw(self, request: Tensor, depth: Tensor, excluded: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        mass = 1 - self.q(request, depth, excluded).sum(-1)
        return self._ahead[request, depth - 1], mass.clamp(0, 1)


@torch.no_grad()
def head_guesses(
    heads: FutureTokenHeads,
    rows: HeadRows,
    lm_head: Tensor,
    embedding: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = -1,
    top_p: float = 1.0,
    min_p: float = 0.0,
    vocabulary: ProposalVocabulary | None = None,
    width: int = DEFAULT_WIDTH,
    batch_rows: int = 64,
) -> HeadGuesses:
    """The heads' proposals at all rows. The filters shape the target's law only, as `propose_from_logits` has it."""
    vocabulary = vocabulary or ProposalVocabulary(lm_head)
    columns: list[tuple[Tensor, ...]] = []
    for index in torch.arange(len(rows), device=rows.tokens.device).split(batch_rows):
        n = len(index)
        law = LawParams.build([temperature] * n, [top_k] * n, [top_p] * n, [min_p] * n, index.device)
        hidden, tokens = rows.hidden[index].to(lm_head.dtype), rows.tokens[index]
        log_p = token_logprobs(F.linear(hidden, lm_head), tokens, law)
        states = heads(hidden, embedding[tokens].to(lm_head.dtype))
        columns.append((*rank(states, vocabulary, temperature, width), states, log_p))
    tokens, log_q, log_norm, states, log_p = (torch.cat(column) for column in zip(*columns, strict=True))
    return HeadGuesses(tokens, log_q, states, log_norm, log_p, vocabulary, temperature)


def rank(
    states: Tensor, vocabulary: ProposalVocabulary, temperature: float, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Candidates [B, K, M], their log q [B, K, M] and the normalisers [B, K] of heads' states [B, K, H]."""
    logits = vocabulary.logits(states).float() / (temperature or 1.0)
    log_norm = logits.logsumexp(-1)
    top = logits.topk(min(width, logits.shape[-1]), dim=-1)
    return vocabulary.to_token(top.indices), top.values - log_norm[..., None], log_norm

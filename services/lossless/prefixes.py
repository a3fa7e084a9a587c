"""Frequencies of the next token after fixed prefixes, against the exact law.

The first token of a request is drawn by the prefill, before anything is verified. So a prefix is sent without its last
token, which is one that nearly always comes; of the requests where it did come, the second token was decided by a
verify step right after the prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.heads.target import TargetModel
from services.lossless.exact import Text, hidden_states, logits_of
from services.lossless.options import EDGE, LawUnderTest, LosslessOptions
from services.lossless.sampling import Draw
from services.rollout.completion import Completion, SpeculationOverride
from specroll_core.goodness_of_fit import chi_square_p
from specroll_core.law import final_logprobs


@dataclass(frozen=True, slots=True)
class FixedPrefix:
    """ids: what is sent. certain: the token that must come first. law: [V] float64, exact, of the token after it."""

    ids: tuple[int, ...]
    certain: int
    law: Tensor

    def draw(self, law: LawUnderTest, way: SpeculationOverride) -> Draw:
        return Draw(self.ids, law.sampling(2, ignore_eos=True), way)

    def counts(self, completions: Sequence[Completion]) -> Tensor:
        """[V] int64: second tokens of those completions whose first one is the certain token."""
        seconds = [c.token_ids[1] for c in completions if c.token_ids[0] == self.certain]
        return torch.tensor(seconds, dtype=torch.int64).bincount(minlength=len(self.law))

    def p_value(self, counts: Tensor) -> float:
        return chi_square_p(counts, self.law)


@torch.inference_mode()
def choose_prefixes(
    target: TargetModel, greedy: Sequence[Text], laws: Sequence[LawUnderTest], options: LosslessOptions
) -> dict[LawUnderTest, list[FixedPrefix]]:
    """For each law, `options.prefixes` places in greedy texts whose last token has a probability of at least
    `options.certain` under it, and whose next law has an entropy inside `options.entropy`.

    The rule looks at nothing that is sampled: the first such place of every text in turn, then the second ones.
    """
    found: dict[LawUnderTest, list[tuple[int, int, FixedPrefix]]] = {law: [] for law in laws}
    for text, states in hidden_states(target, greedy):
        if len(text.tokens) < 2:
            continue
        logits = logits_of(target, states)
        tokens = torch.tensor(text.tokens, device=target.device)
        for law in laws:
            log_p = final_logprobs(logits, law.params(len(logits)))
            sure = log_p[:-1].gather(1, tokens[:, None]).squeeze(1).exp() >= options.certain
            entropy = torch.special.entr(log_p.exp()).sum(-1)
            low, high = options.entropy
            fits = sure & (entropy[1:] >= low) & (entropy[1:] <= high)
            fits[0] = False  # its prefix would be the bare prompt, which every text of a prompt shares
            for rank, at in enumerate(fits.nonzero().flatten().tolist()[: options.prefixes]):
                row = logits[at + 1 : at + 2]
                if _at_an_edge(row, law):
                    continue
                p = log_p[at + 1].double().exp().cpu()
                ids = (*text.prompt, *text.tokens[:at])
                found[law].append((rank, text.name, FixedPrefix(ids, text.tokens[at], p / p.sum())))
    return {law: [p for *_, p in sorted(some, key=lambda f: f[:2])[: options.prefixes]] for law, some in found.items()}


def _at_an_edge(row: Tensor, law: LawUnderTest) -> bool:
    """Whether rounding decides what top-p keeps."""
    sizes = {int((final_logprobs(row, law.params(1, edge=e)) > -torch.inf).sum()) for e in (-EDGE, EDGE)}
    return len(sizes) > 1

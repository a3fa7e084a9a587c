"""The correction while trajectories are generated: whose state is whose, and that it changes no law."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from specroll_core.bias_correction import BiasCorrection, BiasOptions
from specroll_core.correction import CorrectionOptions, FastWeights
from specroll_core.corrector import Corrector
from specroll_core.credit_correction import CreditCorrection
from specroll_core.goodness_of_fit import chi_square_p
from specroll_core.growth import TreeOptions
from specroll_core.heads import ProposalVocabulary
from specroll_core.law import final_logprobs
from specroll_core.live_correction import Learner, LiveCorrection, candidates_of
from specroll_core.pending import TOP
from specroll_core.proposal import propose_from_logits
from specroll_core.scorer import CountTableScorer
from specroll_core.seen_laws import Laws, SeenLaws
from specroll_core.slot_pool import IDLE_ROUNDS
from specroll_core.soft_correction import SoftCorrection, SoftOptions
from specroll_core.tree import DraftTree, build_tree
from specroll_core.verify import verify
from specroll_core.whitening import Directions, whitened_rows
from tests.core.toy import ToyLanguage, one_law

K, X = 3, 6


class Projected:
    """Features by a fixed projection."""

    size = X

    def __init__(self, hidden: int) -> None:
        self._projection = torch.randn(2 * hidden, X, generator=torch.Generator().manual_seed(9))

    def __call__(self, h: Tensor, e: Tensor) -> Tensor:
        return torch.nn.functional.normalize(torch.cat([h, e], dim=-1) @ self._projection, dim=-1)


def whitened(slots: int, lm_head: Tensor) -> Corrector:
    rows = whitened_rows(lm_head, torch.ones(len(lm_head)))
    directions = Directions.of(rows, torch.arange(len(lm_head)), len(lm_head))
    return FastWeights(slots, K, directions, Projected(lm_head.shape[1]), CorrectionOptions(bound=1.0))


def bias(slots: int, lm_head: Tensor) -> Corrector:
    rows = whitened_rows(lm_head, torch.ones(len(lm_head)))
    directions = Directions.of(rows, torch.arange(len(lm_head)), len(lm_head))
    return BiasCorrection(slots, K, directions, BiasOptions(keep=0.5, bound=1.0))


def credit(slots: int, lm_head: Tensor) -> Corrector:
    """One that trusts at once: a thousand short texts give it no time."""
    return CreditCorrection(slots, K, lm_head.shape[1], lambda tokens: lm_head[tokens], patience=0.1)


def soft(slots: int, lm_head: Tensor) -> Corrector:
    rows = whitened_rows(lm_head, torch.ones(len(lm_head)))
    directions = Directions.of(rows, torch.arange(len(lm_head)), len(lm_head))
    options = SoftOptions(places=4, voters=2, bound=1.0)
    return SoftCorrection(slots, K, directions, lambda h, e: torch.cat([h, e], dim=-1), 2 * lm_head.shape[1], options)


FORMS: dict[str, Callable[[int, Tensor], Corrector]] = {
    "whitened": whitened,
    "bias": bias,
    "credit": credit,
    "soft": soft,
}


@dataclass
class ToyWithStates:
    """A toy language whose heads have states: the logits that it gives are an LM head's product with them."""

    toy: ToyLanguage
    lm_head: Tensor

    def states(self, prefix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """z [B, K, H], and h and e [B, H]."""
        logits = self.toy.drafter[prefix.clamp_max(len(self.toy.drafter) - 1)]
        z = logits @ torch.linalg.pinv(self.lm_head).T
        return z, self.toy.logits(prefix) @ self.lm_head, self.lm_head[prefix % self.toy.vocab]


def decode(
    model: ToyWithStates, live: LiveCorrection, law: dict[str, float], length: int, draws: int, on_host: bool
) -> tuple[Tensor, float]:
    """Numbers of `draws` sequences of `length` tokens, as `ToyLanguage.sequence_law` counts, and how far states moved.

    Every other trajectory shares its weights with three siblings.
    """
    toy, g = model.toy, torch.Generator().manual_seed(3)
    vocabulary = ProposalVocabulary(model.lm_head)
    emitted = torch.zeros(draws, length + 9, dtype=torch.int64)
    done, prefix = torch.zeros(draws, dtype=torch.int64), torch.zeros(draws, dtype=torch.int64)
    moved = 0.0
    while (active := (done < length).nonzero().squeeze(1)).numel():
        rows = len(active)
        z, h, e = model.states(prefix[active])
        learners = [Learner(i, n, n // 8 if n % 2 else None) for i, n in enumerate(active.tolist())]
        corrected = live.correct(learners, z, h, e)
        assert corrected is not None
        assert len(corrected) == rows
        moved = max(moved, float((corrected.states - z).abs().max()))
        params = one_law(law, rows)
        proposal = propose_from_logits(vocabulary.logits(corrected.states), params, vocabulary)
        uniforms = torch.rand(rows, 4, dtype=torch.float64, generator=g)
        scorer = CountTableScorer(tail_share=1.0)
        tree = build_tree([0] * rows, proposal, scorer, [4] * rows, uniforms, None, TreeOptions())
        live.note(corrected, done[active], params.temperature, proposal.tokens, proposal.log_q.exp(), tree)
        prefixes = toy.node_prefixes(tree, prefix[active])
        every = torch.ones(rows, dtype=torch.bool)
        seen = SeenLaws(lambda r, n, at=prefixes: toy.logits(at[r, n]), params, every, vocabulary)
        walk = torch.rand(rows, tree.depth + 1, 2, dtype=torch.float64, generator=g)
        verified = verify(tree, seen, params, walk, proposal.laws, on_host=on_host)
        live.learn(corrected, done[active], seen.laws(verified))
        for i in range(verified.tokens.shape[1]):
            row = active[i < verified.lengths]
            token = verified.tokens[i < verified.lengths, i]
            emitted[row, done[row]] = token
            prefix[row] = prefix[row] * toy.vocab + token + 1
            done[row] += 1
    weights = toy.vocab ** torch.arange(length - 1, -1, -1)
    return emitted[:, :length] @ weights, moved


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("law", "on_host", "draws"),
    [({}, False, 20_000), ({"temperature": 0.6, "top_p": 0.9}, False, 20_000), ({"temperature": 1.3}, True, 4000)],
    ids=["T=1", "filtered", "on the host"],
)
def test_the_law_of_sequences_with_corrected_heads(form: str, law: dict[str, float], on_host: bool, draws: int) -> None:
    model = ToyWithStates(ToyLanguage(vocab=3, seed=11), torch.randn(3, 4, generator=torch.Generator().manual_seed(1)))
    live = LiveCorrection(FORMS[form](draws, model.lm_head), draws, K)
    numbers, moved = decode(model, live, law, 4, draws, on_host)
    exact = model.toy.sequence_law(4, law)
    assert chi_square_p(numbers.bincount(minlength=len(exact)), exact) > 1e-4
    assert moved > 0.05


V, H = 40, 12


@dataclass
class Script:
    """A request's rounds: what the heads say, how many tokens are verified, and the laws that are seen there."""

    key: int
    group: int | None
    rounds: list[tuple[tuple[Tensor, Tensor, Tensor], int, int, Laws]]

    @staticmethod
    def of(key: int, group: int | None = None) -> Script:
        g, start, rounds = torch.Generator().manual_seed(key), 5, []
        r = random.Random(key)
        for _ in range(r.randint(1, 9)):
            states = tuple(torch.randn(*shape, generator=g) for shape in ((1, K, H), (1, H), (1, H)))
            advance = r.randint(1, 4)
            p = torch.rand(advance, TOP, generator=g)
            tokens = torch.stack([torch.randperm(V, generator=g)[:TOP] for _ in range(advance)])
            laws = Laws(torch.zeros(advance, dtype=torch.int64), torch.arange(advance) + 1, tokens, p / p.sum(1, True))
            rounds.append((states, start, advance, laws))
            # After a retraction a prefill samples a token whose law is not seen.
            start += advance + (r.random() < 0.1)
        return Script(key, group, rounds)


def play(live: LiveCorrection, batch: list[tuple[Script, int]], lm_head: Tensor) -> list[Tensor | None]:
    """One round of a batch of scripts, each at one of its rounds. Returns their corrected states."""
    now = [script.rounds[at] for script, at in batch]
    z, h, e = (torch.cat([states[i] for states, _, _, _ in now]) for i in range(3))
    learners = [Learner(i, script.key, script.group) for i, (script, _) in enumerate(batch)]
    corrected = live.correct(learners, z, h, e)
    if corrected is None:
        return [None] * len(batch)
    q = (corrected.states @ lm_head.T).softmax(-1).topk(TOP)
    start = torch.tensor([now[row][1] for row in corrected.places])
    tree = tree_of(q.indices, len(batch)) if live.corrector.wants_candidates else None
    live.note(corrected, start, torch.full((len(corrected),), 0.7), q.indices, q.values, tree)
    laws = [(row, now[row][3]) for row in corrected.places]
    live.learn(
        corrected,
        start,
        Laws(
            torch.cat([torch.full_like(some.ahead, row) for row, some in laws]),
            torch.cat([some.ahead for _, some in laws]),
            torch.cat([some.tokens for _, some in laws]),
            torch.cat([some.p for _, some in laws]),
        ),
    )
    out: list[Tensor | None] = [None] * len(batch)
    for i, row in enumerate(corrected.places):
        out[row] = corrected.states[i]
    return out


def tree_of(best: Tensor, rows: int) -> DraftTree:
    """A tree of the two best tokens of each depth, for those who look at candidates."""
    best = torch.nn.functional.pad(best, (0, 0, 0, 0, 0, rows - len(best)))
    logits = torch.full((rows, K, V), -30.0).scatter_(2, best[..., :2], 0.0)
    vocabulary = ProposalVocabulary(torch.zeros(V, 1))
    proposal = propose_from_logits(logits, one_law({}, rows), vocabulary, with_laws=False)
    return build_tree([0] * rows, proposal, CountTableScorer(), [9] * rows, torch.zeros(rows, 9, dtype=torch.float64))


@pytest.mark.parametrize("form", FORMS)
def test_interleaved_requests_are_corrected_as_if_each_had_run_alone(form: str) -> None:
    """A thousand requests through 24 slots, six at a time. Some are aborted, and of some that is never heard."""
    lm_head = torch.randn(V, H, generator=torch.Generator().manual_seed(2))
    live = LiveCorrection(FORMS[form](24, lm_head), 24, K)
    size, r = live.bytes, random.Random(0)
    scripts = [Script.of(key) for key in range(1000)]
    seen: dict[int, list[Tensor]] = {}
    waiting = list(scripts)
    running: list[tuple[Script, int]] = []
    while waiting or running:
        while waiting and len(running) < 6:
            running.append((waiting.pop(), 0))
        batch = [one for one in running if r.random() < 0.8] or running[:1]
        for (script, at), states in zip(batch, play(live, batch, lm_head), strict=True):
            running.remove((script, at))
            if states is None:
                continue  # silent ones hold all slots: a request without any is not compared
            seen.setdefault(script.key, []).append(states)
            fate = r.random()
            if at + 1 == len(script.rounds) or fate < 0.03:
                live.close(script.key)
            elif fate > 0.035:
                running.append((script, at + 1))
        assert len(live) <= 24
    assert live.bytes == size
    assert len(seen) > 950
    moved = 0
    for script in scripts:
        alone = LiveCorrection(FORMS[form](1, lm_head), 1, K)
        for at, states in enumerate(seen.get(script.key, [])):
            expected = play(alone, [(script, at)], lm_head)[0]
            assert expected is not None
            torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)
            moved += not torch.equal(expected, script.rounds[at][0][0][0])
    assert moved > 300


def test_siblings_share_what_is_learned_and_nobody_else() -> None:
    lm_head = torch.randn(V, H, generator=torch.Generator().manual_seed(2))
    live = LiveCorrection(whitened(4, lm_head), 4, K)
    teacher, sibling, stranger = Script.of(1, group=7), Script.of(2, group=7), Script.of(3, group=8)
    for at in range(len(teacher.rounds)):
        play(live, [(teacher, at)], lm_head)
    live.close(teacher.key)
    one, other = (play(live, [(script, 0)], lm_head)[0] for script in (sibling, stranger))
    assert one is not None
    assert other is not None
    assert not torch.equal(one, sibling.rounds[0][0][0][0])
    assert torch.equal(other, stranger.rounds[0][0][0][0])


def test_who_finds_no_slot_goes_without_until_one_is_idle() -> None:
    lm_head = torch.randn(V, H, generator=torch.Generator().manual_seed(2))
    live = LiveCorrection(whitened(1, lm_head), 1, K)
    first, second = Script.of(1), Script.of(2)
    assert play(live, [(first, 0)], lm_head)[0] is not None
    assert play(live, [(second, 0)], lm_head)[0] is None
    for _ in range(IDLE_ROUNDS):
        live.correct([], *second.rounds[0][0])
    assert play(live, [(second, 0)], lm_head)[0] is not None


@pytest.mark.parametrize("law", [{"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.0}])
def test_laws_are_those_of_the_verified_positions(law: dict[str, float]) -> None:
    """Of wanted requests, in order, with either walk; probabilities are the law's before filters."""
    toy = ToyLanguage(vocab=5, seed=4)
    g = torch.Generator().manual_seed(0)
    rows = 60
    params, prefix = one_law(law, rows), torch.arange(60) % 7
    vocabulary = ProposalVocabulary(torch.zeros(5, 1), torch.tensor([0, 2, 3]))
    proposal = propose_from_logits(toy.drafter[prefix][..., [0, 2, 3]], params, vocabulary)
    tree = build_tree([0] * rows, proposal, CountTableScorer(), [6] * rows, torch.rand(rows, 6, dtype=torch.float64))
    prefixes = toy.node_prefixes(tree, prefix)
    wanted, walk = torch.arange(rows) % 3 > 0, torch.rand(rows, tree.depth + 1, 2, dtype=torch.float64, generator=g)
    for on_host in (True, False):
        seen = SeenLaws(lambda r, n: toy.logits(prefixes[r, n]), params, wanted, vocabulary)
        verified = verify(tree, seen, params, walk, proposal.laws, on_host=on_host)
        laws, found = seen.laws(verified), []
        for row, ahead, tokens, p in zip(
            *(x.tolist() for x in (laws.request, laws.ahead, laws.tokens, laws.p)), strict=True
        ):
            found.append((row, ahead))
            at = toy.logits(prefixes[row, int(verified.nodes[row, ahead - 1])][None])
            exact = final_logprobs(at, one_law({"temperature": law["temperature"] or 1.0}, 1))[0].exp()
            assert sorted(tokens) == [0, 2, 3]
            torch.testing.assert_close(torch.tensor(p), exact[torch.tensor(tokens)])
        assert found == [(r, i + 1) for r in range(rows) if r % 3 for i in range(int(verified.lengths[r]))]


def test_candidates_are_the_trees_tokens_by_depth() -> None:
    best = torch.arange(2 * K * 2).view(2, K, 2)
    tree = tree_of(best, 2)
    found = candidates_of(tree, K)
    for row in range(2):
        for depth in range(1, K + 1):
            here = [
                int(t)
                for t, d, ok in zip(tree.tokens[row], tree.depths[row], tree.valid[row], strict=True)
                if ok and d == depth
            ]
            assert sorted(t for t in found[row, depth - 1].tolist() if t >= 0) == sorted(here)

"""A language with a known structure: heads must learn it, and the replay must agree with real speculative decoding."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

from specroll_core.growth import TreeOptions
from specroll_core.head_training import (
    HeadRows,
    HeadTrainConfig,
    _kl_and_gradient,
    _states,
    evaluate_heads,
    head_kl,
    train_heads,
)
from specroll_core.heads import FutureTokenHeads, HeadsSpec, ProposalVocabulary
from specroll_core.law import LawParams, sample
from specroll_core.proposal import propose_from_logits
from specroll_core.replay import gain_interval, predicted_acceptance
from specroll_core.scorer import CountTableScorer
from specroll_core.tree import build_tree
from specroll_core.verify import verify

VOCAB, HIDDEN = 12, 24


class Markov:
    """A Markov chain whose hidden state is a fixed vector per token: logits of what follows are W h(token)."""

    def __init__(self, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.states = torch.randn(VOCAB, HIDDEN, generator=g)
        self.lm_head = torch.randn(VOCAB, HIDDEN, generator=g) * 0.4
        self.embedding = torch.randn(VOCAB, HIDDEN, generator=g)

    def logits(self, token: Tensor) -> Tensor:
        return self.states[token] @ self.lm_head.T

    def rows(self, prompts: int, siblings: int, length: int, seed: int) -> HeadRows:
        g = torch.Generator().manual_seed(seed)
        n = prompts * siblings
        before = torch.randint(VOCAB, (prompts,), generator=g).repeat_interleave(siblings)
        tokens, hidden = [], []
        for _ in range(length):
            hidden.append(self.states[before])
            before = sample(self.logits(before).softmax(-1), torch.rand(n, generator=g, dtype=torch.float64))
            tokens.append(before)
        flat = torch.stack(hidden, 1).view(-1, HIDDEN)
        top = (flat @ self.lm_head.T).log_softmax(-1).topk(VOCAB)
        sequence = torch.arange(n).repeat_interleave(length)
        return HeadRows(torch.stack(tokens, 1).flatten(), flat, top.indices, top.values, sequence, sequence // siblings)


def fresh_heads(seed: int = 0) -> FutureTokenHeads:
    torch.manual_seed(seed)
    return FutureTokenHeads(HeadsSpec(heads=3, hidden=HIDDEN, rank=32, vocab=VOCAB))


def test_the_loss_is_the_kl_of_the_right_positions() -> None:
    language = Markov()
    rows = language.rows(prompts=2, siblings=1, length=5, seed=1)
    heads = fresh_heads()
    got = head_kl(heads, rows, torch.arange(10), language.lm_head, language.embedding)
    q = (rows.hidden @ language.lm_head.T).log_softmax(-1)  # untrained heads repeat the state
    for i in range(10):
        for k in range(3):
            j = i + k + 1
            if j < 10 and rows.sequence[j] == rows.sequence[i]:
                p = (rows.hidden[j] @ language.lm_head.T).log_softmax(-1)
                torch.testing.assert_close(got[i, k], (p.exp() * (p - q[i])).sum(), atol=1e-5, rtol=1e-4)
            else:
                assert float(got[i, k].detach()) == 0


@pytest.mark.parametrize("temperatures", [(1.0,), (0.6,), (1.0, 0.6)])
def test_a_step_takes_the_gradient_of_the_loss(temperatures: tuple[float, ...]) -> None:
    """Against automatic differentiation of the definition, for a step of plain gradient descent."""
    language = Markov()
    rows = language.rows(prompts=2, siblings=2, length=6, seed=1)
    rows.target_logprobs[:, -1] = -math.inf  # padding
    heads = fresh_heads()
    torch.nn.init.normal_(heads.up, std=0.1)
    weights = torch.tensor([1.0, 0.5, 0.25])
    index = torch.tensor([0, 7, 3, 10, 5])
    z = _states(heads, rows, index, language.embedding)
    kl, gradient = _kl_and_gradient(z.detach(), rows, index, language.lm_head, temperatures, weights)

    leaf = z.detach().clone().requires_grad_()
    total = torch.zeros(())
    for r, i in enumerate(index.tolist()):
        for k in range(3):
            j = i + k + 1
            if j < len(rows) and rows.sequence[j] == rows.sequence[i]:
                kept, ids = rows.target_logprobs[j, :-1], rows.target_ids[j, :-1]
                expected = torch.zeros(())
                for t in temperatures:
                    p = (kept / t).softmax(-1)
                    q = (leaf[r, k] @ language.lm_head.T / t).softmax(-1)[ids]
                    expected = expected + (p * (p / q).log()).sum() / len(temperatures)
                torch.testing.assert_close(kl[r, k], expected.detach(), atol=1e-5, rtol=1e-4)
                total = total + weights[k] * expected
            else:
                assert kl[r, k] == 0
    total.backward()
    torch.testing.assert_close(gradient, leaf.grad, atol=1e-5, rtol=1e-4)


def test_heads_learn_the_laws_of_the_chain() -> None:
    """Head k's best law is the k-step transition from the pending token: its KL must come near that bound."""
    language = Markov()
    rows = language.rows(prompts=60, siblings=2, length=25, seed=2)
    heads = fresh_heads()
    losses: list[float] = []
    config = HeadTrainConfig(epochs=12, learning_rate=1e-2, batch_rows=128, micro_rows=128)
    report = train_heads(heads, rows, language.lm_head, language.embedding, config, lambda _s, _n, x: losses.append(x))
    assert (report.train_rows, report.heldout_rows) == (54 * 50, 6 * 50)
    assert len(losses) == report.steps == 12 * math.ceil(54 * 2 * 24 / 128)
    # One step ahead the chain is known exactly from the pending token; further ahead the laws are mixtures.
    step = language.logits(torch.arange(VOCAB)).softmax(-1)
    held = rows.split_by_prompt(config.holdout, config.seed)[1]
    for k in range(3):
        there = held.has_target(3)[:, k].nonzero().squeeze(1)
        best = torch.linalg.matrix_power(step, k + 1)[held.tokens[there]].log()
        p = (held.hidden[there + k + 1] @ language.lm_head.T).log_softmax(-1)
        bound = float((p.exp() * (p - best)).sum(-1).mean())
        assert report.heldout_after[k] < report.heldout_before[k]
        assert report.heldout_after[k] == pytest.approx(bound, abs=0.06)


def test_the_split_keeps_prompts_whole() -> None:
    rows = Markov().rows(prompts=10, siblings=3, length=4, seed=3)
    train, held = rows.split_by_prompt(0.2, seed=1)
    assert len(held.prompt.unique()) == 2
    assert not set(train.prompt.tolist()) & set(held.prompt.tolist())
    assert len(train) + len(held) == len(rows)
    assert len(rows.split_by_prompt(0.0, seed=1)[1]) == 0


def test_rows_that_serve_as_targets_alone_are_not_trained_on() -> None:
    language = Markov()
    whole = language.rows(prompts=4, siblings=1, length=6, seed=4)
    starts = torch.zeros(len(whole), dtype=torch.bool)
    starts[::6] = True
    hidden = torch.where(starts[:, None], whole.hidden, torch.nan)
    rows = HeadRows(whole.tokens, hidden, whole.target_ids, whole.target_logprobs, whole.sequence, whole.prompt, starts)
    assert rows.has_target(3).sum().item() == 4 * 3
    heads = fresh_heads()
    config = HeadTrainConfig(epochs=1, holdout=0.25)
    report = train_heads(heads, rows, language.lm_head, language.embedding, config)
    assert all(map(math.isfinite, report.heldout_after))
    assert all(bool(torch.isfinite(p).all()) for p in heads.parameters())


def test_an_anchor_holds_the_weights() -> None:
    language = Markov()
    rows = language.rows(prompts=8, siblings=1, length=12, seed=5)
    moved = []
    for anchor in (0.0, 10.0):
        heads = fresh_heads()
        start = heads.up.detach().clone()
        train_heads(heads, rows, language.lm_head, language.embedding, HeadTrainConfig(epochs=20, anchor=anchor))
        moved.append(float((heads.up.detach() - start).norm()))
    assert moved[1] < 0.5 * moved[0]


@pytest.mark.parametrize("sampled", [False, True])
def test_the_replay_predicts_what_speculative_decoding_does(sampled: bool) -> None:
    language = Markov()
    rows = language.rows(prompts=40, siblings=2, length=60, seed=6)
    heads = fresh_heads()
    train_heads(heads, rows, language.lm_head, language.embedding, HeadTrainConfig(epochs=3, learning_rate=1e-2))
    options = TreeOptions(sampled_children=sampled)
    fresh = language.rows(prompts=60, siblings=2, length=60, seed=7)
    frozen = Frozen()
    report = predicted_acceptance(
        heads, fresh, language.lm_head, language.embedding, nodes=5, options=options, scorer=frozen
    )
    # Real decoding of many copies, in steady state.
    g = torch.Generator().manual_seed(8)
    n, rounds, tokens = 800, 16, 0
    before = torch.randint(VOCAB, (n,), generator=g)
    pending = sample(language.logits(before).softmax(-1), torch.rand(n, generator=g, dtype=torch.float64))
    params = LawParams.build([1.0] * n)
    vocabulary = ProposalVocabulary(language.lm_head)
    for i in range(rounds):
        with torch.no_grad():
            z = heads(language.states[before], language.embedding[pending])
        proposal = propose_from_logits(vocabulary.logits(z), params, vocabulary)
        u = torch.rand(n, 5, generator=g, dtype=torch.float64)
        tree = build_tree(pending.tolist(), proposal, frozen, [5] * n, u, options=options)
        u = torch.rand(n, tree.depth + 1, 2, generator=g, dtype=torch.float64)
        result = verify(tree, language.logits(tree.tokens), params, u, proposal.laws)
        before = tree.tokens.gather(1, result.last_nodes[:, None]).squeeze(1)
        pending = result.pending
        if i >= 4:
            tokens += int(result.lengths.sum())
    assert report.tokens_per_step == pytest.approx(tokens / (n * (rounds - 4)), rel=0.02)
    assert report.tokens == 120 * 59


class Frozen(CountTableScorer):
    """Does not learn, so that replay and decoding build the same trees."""

    def update(self, cells: Tensor, probabilities: Tensor) -> None: ...

    def update_tails(self, cells: Tensor, accepted: Tensor, remainder: Tensor) -> None: ...


def test_trained_heads_beat_untrained_ones_beyond_chance() -> None:
    language = Markov()
    rows = language.rows(prompts=30, siblings=2, length=40, seed=9)
    trained, untrained = fresh_heads(), fresh_heads()
    train_heads(trained, rows, language.lm_head, language.embedding, HeadTrainConfig(epochs=4, learning_rate=1e-2))
    held = language.rows(prompts=20, siblings=2, length=40, seed=10)
    reports = [
        predicted_acceptance(h, held, language.lm_head, language.embedding, nodes=6) for h in (trained, untrained)
    ]
    difference, low, high = gain_interval(*reports)
    assert 0 < low < difference < high
    assert gain_interval(reports[0], reports[0])[1:] == (0.0, 0.0)
    assert evaluate_heads(trained, held, language.lm_head, language.embedding)[0] < 0.2


def test_an_interrupted_training_ends_where_an_uninterrupted_one_does():
    """Stopped in the second epoch and gone on with in other objects: the same weights to the last bit."""
    torch.manual_seed(0)
    V, H, P = 24, 8, 90
    rows = HeadRows(
        tokens=torch.randint(V, (P,)),
        hidden=torch.randn(P, H),
        target_ids=torch.stack([torch.randperm(V)[:6] for _ in range(P)]),
        target_logprobs=torch.log_softmax(torch.randn(P, 6), -1),
        sequence=torch.arange(P) // 15,
        prompt=torch.arange(P) // 15,
    )
    weight, embedding = torch.randn(V, H), torch.randn(V, H)
    config = HeadTrainConfig(epochs=3, batch_rows=16, anchor=0.01, holdout=0.0, warmup_steps=3)

    def fresh():
        torch.manual_seed(1)
        return FutureTokenHeads(HeadsSpec(2, H, 4, V))

    whole = fresh()
    train_heads(whole, rows, weight, embedding, config)

    class Stop(Exception):
        pass

    saved = {}

    def keep(at):
        if at.step == 9:
            saved["optimizer"] = copy.deepcopy(at.optimizer.state_dict())
            saved["start"] = [p.clone() for p in at.start]
            saved["heads"] = {n: v.clone() for n, v in first.state_dict().items()}
            raise Stop

    first = fresh()
    with pytest.raises(Stop):
        train_heads(first, rows, weight, embedding, config, position=keep)

    def resume(at):
        at.step, at.start = 9, saved["start"]
        at.optimizer.load_state_dict(saved["optimizer"])

    second = fresh()
    second.load_in_place(saved["heads"])
    train_heads(second, rows, weight, embedding, config, resume=resume)
    for a, b in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)

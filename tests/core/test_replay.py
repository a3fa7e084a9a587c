"""The replay with a trajectory memory must agree with real speculative decoding of fresh trajectories."""

from __future__ import annotations

import pytest
import torch

from specroll_core.head_training import HeadTrainConfig, train_heads
from specroll_core.heads import ProposalVocabulary
from specroll_core.law import LawParams, sample
from specroll_core.proposal import propose_from_logits
from specroll_core.reflex import Reflex, ReflexOptions
from specroll_core.replay import predicted_acceptance, replay
from specroll_core.replay_guesses import head_guesses
from specroll_core.tree import build_tree
from specroll_core.verify import verify
from tests.core.test_head_training import VOCAB, Frozen, Markov, fresh_heads

NODES, LENGTH, SEQUENCES = 7, 40, 160


def test_the_replay_with_memory_predicts_what_speculative_decoding_does() -> None:
    language = Markov()
    heads = fresh_heads()
    rows = language.rows(prompts=40, siblings=2, length=60, seed=6)
    train_heads(heads, rows, language.lm_head, language.embedding, HeadTrainConfig(epochs=2, learning_rate=1e-2))
    g = torch.Generator().manual_seed(7)
    history = torch.randint(VOCAB, (12,), generator=g).tolist()
    options = ReflexOptions(siblings=False)

    recorded = language.rows(prompts=SEQUENCES, siblings=1, length=LENGTH, seed=8)
    first = recorded.hidden.view(SEQUENCES, LENGTH, -1)[:, 0]
    before = torch.cdist(first, language.states).argmin(-1)
    prompts = {i: [*history, int(token)] for i, token in enumerate(before)}
    guesses = head_guesses(heads, recorded, language.lm_head, language.embedding)
    report = replay(
        guesses, recorded, nodes=NODES, scorer=Frozen(tail_share=1.0), reflex=Reflex(options), prompts=prompts
    )
    alone = replay(guesses, recorded, nodes=NODES, scorer=Frozen(tail_share=1.0))
    assert report.tokens_per_step != pytest.approx(alone.tokens_per_step, rel=0.005), "the memory changes the trees"

    # Real decoding of as many trajectories from the same prompts.
    reflex = Reflex(options)
    for slot, prompt in prompts.items():
        reflex.open(slot, prompt)
    params = LawParams.build([1.0] * SEQUENCES)
    vocabulary = ProposalVocabulary(language.lm_head)
    pending = sample(language.logits(before).softmax(-1), torch.rand(SEQUENCES, generator=g, dtype=torch.float64))
    for slot, token in enumerate(pending.tolist()):
        reflex.observe(slot, [token])
    left = torch.full((SEQUENCES,), LENGTH - 1)
    rounds = 0
    while bool((left > 0).any()):
        with torch.no_grad():
            z = heads(language.states[before], language.embedding[pending])
        paths = [reflex.proposer(slot) for slot in range(SEQUENCES)]
        proposal = propose_from_logits(vocabulary.logits(z), params, vocabulary, paths=paths)
        u = torch.rand(SEQUENCES, NODES, generator=g, dtype=torch.float64)
        tree = build_tree(pending.tolist(), proposal, Frozen(tail_share=1.0), [NODES] * SEQUENCES, u)
        u = torch.rand(SEQUENCES, tree.depth + 1, 2, generator=g, dtype=torch.float64)
        result = verify(tree, language.logits(tree.tokens), params, u, proposal.laws)
        for slot, (tokens, length) in enumerate(zip(result.tokens.tolist(), result.lengths.tolist(), strict=True)):
            reflex.observe(slot, tokens[:length])
        before = tree.tokens.gather(1, result.last_nodes[:, None]).squeeze(1)
        pending = result.pending
        rounds += int((left > 0).sum())
        left -= result.lengths
    assert report.tokens_per_step == pytest.approx(SEQUENCES * (LENGTH - 1) / rounds, rel=0.025)
    assert report.tokens == SEQUENCES * (LENGTH - 1)


def test_a_restricted_vocabulary_of_all_tokens_changes_nothing() -> None:
    language = Markov()
    heads = fresh_heads()
    rows = language.rows(prompts=6, siblings=2, length=20, seed=9)
    vocabulary = ProposalVocabulary(language.lm_head, torch.arange(VOCAB))
    guesses = head_guesses(heads, rows, language.lm_head, language.embedding, vocabulary=vocabulary)
    expected = predicted_acceptance(heads, rows, language.lm_head, language.embedding, nodes=6)
    assert replay(guesses, rows, nodes=6).tokens_per_step == pytest.approx(expected.tokens_per_step)


def test_siblings_are_replayed_side_by_side() -> None:
    """What one completion repeats of another is proposed, though it never occurred in its own tokens."""
    language = Markov()
    rows = language.rows(prompts=1, siblings=2, length=VOCAB, seed=10)
    twice = torch.arange(VOCAB)
    rows.tokens.copy_(torch.cat([twice, twice.roll(6)]))
    guesses = head_guesses(fresh_heads(), rows, language.lm_head, language.embedding)
    prompts = {0: [0]}
    found = [
        replay(guesses, rows, nodes=10, reflex=Reflex(ReflexOptions(siblings=siblings)), prompts=prompts)
        for siblings in (False, True)
    ]
    assert found[1].tokens_per_step > found[0].tokens_per_step

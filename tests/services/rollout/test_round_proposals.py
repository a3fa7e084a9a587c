"""What a round proposes, with a worker's own classes and no engine."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from services.rollout.sglang_plugin import correction_slots, native_growth
from services.rollout.sglang_plugin.compiled_parts import CompiledParts
from services.rollout.sglang_plugin.correction_slots import CorrectionSlots
from services.rollout.sglang_plugin.reflex_slots import ReflexSlots
from services.rollout.sglang_plugin.round_proposals import CORRECTION, RoundBatch, RoundProposals
from services.rollout.sglang_plugin.served_vocabulary import ServedVocabulary
from services.rollout.sglang_plugin.variables import OVERRIDE_KEY
from services.speculation_config import SpeculationConfig
from specroll_core.law import LawParams
from specroll_core.scorer import CountTableScorer
from specroll_core.tree import DraftTree
from specroll_core.verify import verify

V, H, K, NODES = 60, 16, 3, 6


def request(rid, **override):
    params = SimpleNamespace(custom_params={OVERRIDE_KEY: override} if override else None, top_k=1 << 30)
    done = SimpleNamespace(over=False)
    return SimpleNamespace(
        rid=rid,
        sampling_params=params,
        origin_input_ids=[1, 2, 3],
        output_ids=[4],
        finished=lambda: done.over,
        done=done,
    )


class Heads:
    """Heads of a model whose embedding is its LM head: states are the embedding's, shifted by depth."""

    def __init__(self):
        g = torch.Generator().manual_seed(0)
        self.weight = torch.randn(V, H, generator=g)
        self.shift = torch.randn(K, H, generator=g)

    def embed(self, tokens):
        return self.weight[tokens]

    def heads(self, hidden, embedded):
        return (hidden + embedded)[:, None] + self.shift


class Worker:
    """Rounds of a model whose law at every node is that of random logits by token."""

    compiled = CompiledParts()

    def __init__(self, **config):
        self.heads = Heads()
        self.config = SpeculationConfig(enabled=True, nodes=NODES, **config)
        self.g = torch.Generator().manual_seed(1)
        self.target = torch.randn(V, V, generator=self.g) * 2
        self.scorer = CountTableScorer.with_prior()
        self.vocabulary = ServedVocabulary(lambda: self.heads.weight, 0, None)
        self.reflex = ReflexSlots(self.config, self.compiled.memory)
        self.correction = CorrectionSlots(self.config, 8, lambda: self.heads.weight, lambda h, e: torch.cat([h, e], -1))
        self.proposals = RoundProposals(
            self.config, self.scorer, self.vocabulary, self.reflex, self.correction, self.compiled
        )

    def round(self, requests):
        B, rows = len(requests), [int(r.rid[1:]) for r in requests]
        params = LawParams.build([0.8] * B)
        this = RoundBatch(
            requests=requests,
            rows=rows,
            pending=torch.tensor([r.output_ids[-1] for r in requests]),
            hidden=torch.stack([self.target[r.output_ids[-1], :H] for r in requests]),
            lengths=torch.tensor([len(r.origin_input_ids) + len(r.output_ids) - 1 for r in requests]),
            params=params,
            budgets=[NODES] * B,
            nodes=NODES,
        )
        tree, laws = self.proposals.tree(this, self.heads, torch.rand(B, NODES, generator=self.g, dtype=torch.float64))
        law = self.proposals.watch(lambda r, n: self.target[tree.tokens[r, n]], params)
        walk = torch.rand(B, tree.depth + 1, 2, generator=self.g, dtype=torch.float64)
        verified = verify(tree, law, params, walk, laws)
        emitted = [row[:n] for row, n in zip(verified.tokens.tolist(), verified.lengths.tolist(), strict=True)]
        self.reflex.observe(requests, rows, emitted)
        self.proposals.gates.observe(requests, rows, emitted)
        self.proposals.learn(verified)
        for one, tokens in zip(requests, emitted, strict=True):
            one.output_ids.extend(tokens)
        return tree, laws

    def ready(self, requests):
        """Rounds until something is corrected."""
        for _ in range(600):
            self.round(requests)
            if self.correction._maker is not None:
                self.correction._maker.wait()
            if self.correction.live is not None and len(self.correction.live):
                return
        pytest.fail("nothing was corrected")

    def plain_laws(self, requests):
        """What the heads' laws would be without the correction."""
        pending = torch.tensor([r.output_ids[-1] for r in requests])
        hidden = torch.stack([self.target[r.output_ids[-1], :H] for r in requests])
        z = self.heads.heads(hidden, self.heads.embed(pending))
        return (z @ self.heads.weight.T / 0.8).softmax(-1)

    def gate(self, part):
        return next(r for r in self.proposals.gates.record() if r["part"] == part)


@pytest.fixture(autouse=True, params=["Python", "compiled"])
def _parts(request, monkeypatch):
    if request.param == "compiled":
        monkeypatch.setattr(Worker, "compiled", CompiledParts.load())
        assert all(getattr(Worker.compiled, part.name) for part in fields(CompiledParts)), (
            "the tests need a C++ compiler"
        )


@pytest.mark.parametrize("form", ["whitened", "bias", "credit", "soft"])
def test_requests_get_what_they_ask_for(form):
    worker = Worker(correction_form=form)
    plain, own = request("r0"), request("r1", parts=("heads", "correction"))
    group = [request(f"r{i}", parts=("heads", "correction-group"), group="g") for i in (2, 3)]
    batch = [plain, own, *group]
    worker.round([plain])
    assert worker.correction._maker is None  # nothing is made or allocated before anybody asks
    assert worker.correction.live is None
    worker.ready(batch)
    for _ in range(150):
        expected = worker.plain_laws(batch)
        _, laws = worker.round(batch)
        assert laws.probs.shape == (4, K, V)
        torch.testing.assert_close(laws.probs[0], expected[0])
    assert len(worker.correction.live) == 3
    assert float((laws.probs - expected)[1:].abs().amax((1, 2)).min()) > 1e-4
    for one in batch:
        one.done.over = True
    correction_slots.finish(batch)
    assert len(worker.correction.live) == 0
    worker.correction.halve()


def test_a_round_of_one_node_and_one_without_heads_learn_nothing():
    worker = Worker(correction="trajectory", correction_form="credit")
    batch = [request("r0")]
    worker.ready(batch)
    before = worker.correction.live.corrector.vectors.clone()
    this = RoundBatch(
        batch, [0], torch.tensor([3]), torch.zeros(1, H), torch.tensor([9]), LawParams.build([1.0]), [1], 1
    )
    tree, laws = worker.proposals.tree(this, worker.heads, torch.rand(1, 1, dtype=torch.float64))
    assert (tree.tokens.tolist(), laws) == ([[3]], None)
    law = object()
    assert worker.proposals.watch(law, this.params) is law
    worker.proposals.learn(None)
    assert torch.equal(worker.correction.live.corrector.vectors, before)


def test_a_correction_that_is_off_goes_on_in_one_request():
    worker = Worker(correction="trajectory", memory="off")
    batch = [request("r0"), request("r1"), request("r2", parts=("heads", "correction"))]
    worker.ready(batch)
    for _ in range(100):
        worker.round(batch)
    compared = worker.gate(CORRECTION)["comparisons"]
    assert compared > 2
    worker.proposals.gates._gates[CORRECTION].on = False
    weights = worker.correction.live.corrector.weights
    slot = {key[1]: kept[0] for key, kept in worker.correction.live._weights._kept.items()}
    before = weights.clone()
    for _ in range(100):
        expected = worker.plain_laws(batch)
        _, laws = worker.round(batch)
        torch.testing.assert_close(laws.probs[:2], expected[:2])
        assert laws.probs.shape == (3, K, V)
        assert not torch.equal(laws.probs[2], expected[2])  # it asked
    changed = {rid: not torch.equal(weights[slot[rid]], before[slot[rid]]) for rid in slot}
    assert changed == {"r0": True, "r1": False, "r2": True}
    assert worker.gate(CORRECTION)["comparisons"] > compared
    batch[0].output_ids.clear()
    worker.correction.close("r0")
    worker.round(batch[1:])
    assert worker.proposals._scout == "r1"


def test_a_memory_that_is_off_proposes_nothing_but_goes_on():
    worker = Worker()
    batch = [request("r0"), request("r1", parts=("heads", "memory"))]
    for one in batch:
        one.origin_input_ids[:] = [7, 8, 9, 7, 8, 9, 4, 7, 8]
    heads_only = set()
    for on in (True, False):
        worker.proposals.gates._gates["memory"].on = on
        compared = worker.gate("memory")["comparisons"]
        for _ in range(200):
            tree, _ = worker.round(batch)
            from_memory = ((tree.cells // 20 % 8 > 0) & (tree.cells >= 0)).any(1).tolist()
            heads_only.add((on, 0, from_memory[0]))
            heads_only.add((on, 1, from_memory[1]))
        assert worker.gate("memory")["comparisons"] > compared
    assert (True, 0, True) in heads_only
    assert (False, 0, True) not in heads_only
    assert (False, 1, True) in heads_only  # it asked


def test_without_gates_nothing_is_compared():
    worker = Worker(correction="trajectory", gate=False)
    assert worker.proposals.gates.record() == []
    worker.ready([request("r0")])


def test_directions_follow_the_policy():
    worker = Worker(correction="trajectory")
    batch = [request("r0")]
    worker.ready(batch)
    old = worker.correction.live.corrector.directions
    worker.heads.weight = worker.heads.weight.flip(0) * 1.5
    worker.vocabulary.policy_changed()
    worker.correction.policy_changed()
    worker.round(batch)
    worker.correction._maker.wait()
    worker.round(batch)
    new = worker.correction.live.corrector.directions
    torch.testing.assert_close(new.rows, old.rows.flip(0) / 1.5, rtol=1e-3, atol=1e-4)


def test_state_is_bounded(monkeypatch):
    monkeypatch.setattr(correction_slots, "_MOST_BYTES", 2 * K * H * 64 * 4)
    worker = Worker(correction="trajectory")
    batch = [request(f"r{i}") for i in range(4)]
    worker.ready(batch)
    assert worker.correction.live.corrector.bytes <= 2 * K * H * 64 * 4
    for _ in range(5):
        worker.round(batch)
    assert len(worker.correction.live) == 2


@pytest.mark.parametrize(("form", "gain"), [("whitened", 2.0), ("bias", 2.0), ("credit", 1.02), ("soft", 2.0)])
def test_what_is_learned_brings_the_heads_closer_to_the_law(form, gain):
    """Heads that know nothing: their overlap with the target's law, corrected and not, over long completions.

    Credit may move a state by three parts in a hundred only.
    """
    worker = Worker(correction="trajectory", correction_form=form, gate=False)
    # A law that prefers some tokens everywhere: there is something to learn for a form without features too.
    worker.target += 3 * torch.randn(V, generator=worker.g)
    batch = [request(f"r{i}") for i in range(4)]
    worker.ready(batch)
    corrected = plain = 0.0
    for turn in range(500):
        p = (worker.target[[r.output_ids[-1] for r in batch]] / 0.8).softmax(-1)
        q = worker.plain_laws(batch)[:, 0]
        _, laws = worker.round(batch)
        if turn >= 200:
            corrected += float(torch.minimum(p, laws.probs[:, 0]).sum())
            plain += float(torch.minimum(p, q).sum())
    assert corrected > gain * plain


def test_compiled_trees_are_pythons_round_by_round(monkeypatch):
    """With memories of groups, requests that come and go, a correction, and gates that compare."""
    workers = []
    for compiled in (CompiledParts(), CompiledParts(growth=native_growth.load())):
        monkeypatch.setattr(Worker, "compiled", compiled)
        workers.append(Worker(correction="trajectory", gate=True, table=True))
    for turn in range(12):
        batches = [[request(f"r{turn + i}", group=f"g{i % 2}") for i in range(4)] for _ in workers]
        for _ in range(30):
            trees = [worker.round(batch)[0] for worker, batch in zip(workers, batches, strict=True)]
            for worker in workers:
                if worker.correction._maker is not None:
                    worker.correction._maker.wait()
            for field in fields(DraftTree):
                one, other = (getattr(tree, field.name) for tree in trees)
                if field.name == "slot_mass":
                    torch.testing.assert_close(one, other, atol=1e-12, rtol=0)
                else:
                    assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other, field.name
        for worker, batch in zip(workers, batches, strict=True):
            for one in batch:
                worker.reflex.close(one.rid, ended=turn % 2 == 0)
    assert workers[0].proposals.gates.record() == workers[1].proposals.gates.record()
    assert workers[0].gate("memory")["comparisons"] > 2

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from specroll_core.heads import FutureTokenHeads, HeadsSpec, ProposalVocabulary, check_state, check_vocabulary

SPEC = HeadsSpec(heads=3, hidden=16, rank=8, vocab=50)


def random_heads() -> FutureTokenHeads:
    torch.manual_seed(0)
    heads = FutureTokenHeads(SPEC)
    torch.nn.init.normal_(heads.up)
    torch.nn.init.normal_(heads.bias)
    return heads


def test_the_batched_product_is_the_formula() -> None:
    heads = random_heads()
    h, e = torch.randn(2, 5, 16)
    x = torch.cat([F.layer_norm(h, (16,)), F.layer_norm(e, (16,))], dim=-1)
    for k in range(3):
        expected = h + F.silu(x @ heads.down[k].T + heads.bias[k]) @ heads.up[k].T
        torch.testing.assert_close(heads(h, e)[:, k], expected, atol=1e-5, rtol=1e-5)


def test_untrained_heads_repeat_the_targets_state() -> None:
    h, e = torch.randn(2, 4, 16)
    assert torch.equal(FutureTokenHeads(SPEC)(h, e), h[:, None].expand(4, 3, 16))


def test_loading_keeps_the_storage() -> None:
    heads, other = FutureTokenHeads(SPEC, dtype=torch.bfloat16), random_heads()
    pointers = [p.data_ptr() for p in heads.parameters()]
    heads.load_in_place(other.state_dict())
    assert [p.data_ptr() for p in heads.parameters()] == pointers
    assert torch.equal(heads.down, other.down.bfloat16())


@pytest.mark.parametrize("fault", ["missing", "extra", "shape", "nan", "integer"])
def test_a_bad_state_is_refused_and_the_old_one_stays(fault: str) -> None:
    heads = random_heads()
    before = {k: v.clone() for k, v in heads.state_dict().items()}
    state = {k: v.clone() + 1 for k, v in before.items()}
    if fault == "missing":
        del state["up"]
    elif fault == "extra":
        state["more"] = torch.zeros(1)
    elif fault == "shape":
        state["up"] = state["up"].transpose(1, 2)
    elif fault == "nan":
        state["bias"][0, 0] = float("nan")
    else:
        state["bias"] = state["bias"].long()
    with pytest.raises(ValueError, match="heads"):
        heads.load_in_place(state)
    assert all(torch.equal(v, before[k]) for k, v in heads.state_dict().items())
    check_state(SPEC, before)


def test_fingerprints_tell_shapes_apart() -> None:
    same = HeadsSpec(heads=3, hidden=16, rank=8, vocab=50, offsets=(1, 2, 3))
    assert same.fingerprint() == SPEC.fingerprint()
    assert HeadsSpec(heads=3, hidden=16, rank=9, vocab=50).fingerprint() != SPEC.fingerprint()
    with pytest.raises(ValueError, match="offsets"):
        HeadsSpec(heads=2, hidden=16, rank=8, vocab=50, offsets=(1, 3))


def test_a_restricted_vocabulary_is_a_view_of_the_whole() -> None:
    lm_head = torch.randn(50, 16)
    ids = torch.tensor([3, 7, 20, 49])
    whole, part = ProposalVocabulary(lm_head), ProposalVocabulary(lm_head, ids)
    z = torch.randn(2, 3, 16)
    torch.testing.assert_close(part.logits(z), whole.logits(z)[..., ids])
    assert part.to_token(torch.tensor([[1, 3]])).tolist() == [[7, 49]]
    assert part.to_column(torch.tensor([49, 4, -1, 3])).tolist() == [3, -1, -1, 0]
    pointer = part.weight.data_ptr()
    part.refresh(lm_head * 2)
    assert part.weight.data_ptr() == pointer
    torch.testing.assert_close(part.weight, lm_head[ids] * 2)
    for bad in ([3, 3], [7, 3], [0, 50], []):
        with pytest.raises(ValueError, match="ids"):
            ProposalVocabulary(lm_head, torch.tensor(bad, dtype=torch.int64))


def test_a_vocabulary_is_no_weight() -> None:
    heads = random_heads()
    heads.vocabulary = torch.tensor([7, 3])
    assert "vocabulary" not in heads.state_dict()
    assert heads.to(torch.bfloat16).vocabulary.dtype == torch.int64


@pytest.mark.parametrize(
    "ids",
    [torch.tensor([1.0]), torch.tensor([[1]]), torch.tensor([], dtype=torch.int64), torch.tensor([3, 1, 3]),
     torch.tensor([-1]), torch.tensor([50]), torch.tensor([1], dtype=torch.int32)],
)  # fmt: skip
def test_a_vocabulary_that_cannot_be_one_is_refused(ids: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        check_vocabulary(SPEC, ids)
    check_vocabulary(SPEC, torch.tensor([49, 0]))

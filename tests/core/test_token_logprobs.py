import pytest
import torch

from specroll_core.token_logprobs import linear_token_logprobs


def case(dtype=torch.float64, rows=37, vocab=50):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, 8, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, 8, generator=generator, dtype=dtype, requires_grad=True)
    # Rows that predict several tokens, one, or none.
    token_row = torch.randint(0, rows, (60,), generator=generator)
    token_ids = torch.randint(0, vocab, (60,), generator=generator)
    return hidden, weight, token_row, token_ids, torch.randn(60, generator=generator)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("chunk", [1, 5, 36, 37, 1000])
def test_values_and_gradients_are_those_of_log_softmax(temperature, chunk):
    hidden, weight, token_row, token_ids, direction = case()
    laws = torch.log_softmax(hidden @ weight.T / temperature, dim=-1)
    expected = laws[token_row, token_ids]
    gradients = torch.autograd.grad((expected * direction).sum(), (hidden, weight))
    entropy = -(laws.exp() * laws).sum(-1)[token_row]
    values, entropies = linear_token_logprobs(hidden, weight, token_row, token_ids, temperature, chunk * 50 * 8)
    assert values.dtype == torch.float32
    assert torch.allclose(values.double(), expected, atol=1e-5)
    assert torch.allclose(entropies.double(), entropy, atol=1e-5)
    assert not entropies.requires_grad
    found = torch.autograd.grad((values * direction).sum(), (hidden, weight))
    assert all(torch.allclose(a, b, atol=2e-5) for a, b in zip(found, gradients, strict=True))


def test_only_the_gradients_that_are_needed_are_computed():
    hidden, weight, token_row, token_ids, _ = case()
    frozen, _ = linear_token_logprobs(hidden, weight.detach(), token_row, token_ids, 1.0, 1 << 20)
    frozen.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None
    with torch.no_grad():
        plain, _ = linear_token_logprobs(hidden, weight, token_row, token_ids, 1.0, 1 << 20)
    assert torch.equal(plain, frozen.detach())


def test_logits_of_minus_infinity_and_far_apart_stay_finite():
    weight = torch.tensor([[1.0], [-1.0]])
    hidden = torch.tensor([[2e4], [-3e38]])
    values, entropy = linear_token_logprobs(hidden, weight, torch.tensor([0, 1]), torch.tensor([0, 1]), 1.0, 1 << 20)
    assert values.tolist() == [0.0, 0.0]
    assert entropy.tolist() == [0.0, 0.0]


def test_bfloat16_weights_do_not_round_the_logits_that_matter():
    """Large logits, where bfloat16 steps by 0.125: the value is that of float32 products of the same numbers."""
    generator = torch.Generator().manual_seed(5)
    hidden = (torch.randn(40, 32, generator=generator) * 2).to(torch.bfloat16)
    weight = (torch.randn(300, 32, generator=generator) * 2).to(torch.bfloat16)
    token_row = torch.arange(40)
    exact = torch.log_softmax(hidden.float() @ weight.float().T / 0.7, dim=-1)
    token_ids = torch.multinomial(exact.exp(), 1, generator=generator)[:, 0]
    expected = exact[token_row, token_ids]
    rounded = torch.log_softmax((hidden @ weight.T).float() / 0.7, dim=-1)[token_row, token_ids]
    assert (rounded - expected).abs().max() > 0.03, "the case shows no rounding"
    values, _ = linear_token_logprobs(hidden, weight, token_row, token_ids, 0.7, 1 << 20)
    assert (values - expected).abs().max() < 2e-3
    # A float32 stream of hidden states is not rounded either.
    fine = torch.randn(40, 32, generator=generator) * 2
    law = torch.log_softmax(fine @ weight.float().T / 0.7, dim=-1)
    token_ids = law.argmax(dim=-1)
    values, _ = linear_token_logprobs(fine, weight, token_row, token_ids, 0.7, 1 << 20)
    assert (values - law[token_row, token_ids]).abs().max() < 1e-2

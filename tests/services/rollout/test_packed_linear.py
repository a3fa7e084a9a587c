"""Linear layers with weights laid out beforehand: their values, and that they follow the policy."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from services.config import EngineConfig
from services.rollout.engine import RolloutEngine
from services.rollout.sglang_plugin.packed_linear import PackedLinear, types_laid_out
from services.rollout.sglang_plugin.served_vocabulary import PackedVocabulary
from tests.services.rollout.test_engine import PROMPTS, forced_logits, load, sample

pytestmark = pytest.mark.skipif(not types_laid_out(), reason="nothing gains by it on this processor")
# The type that this processor computes in.
DTYPE = next(iter(types_laid_out()), torch.float32)
CLOSE = {"rtol": 2**-7, "atol": 1e-2} if torch.bfloat16 == DTYPE else {"rtol": 1e-5, "atol": 1e-5}
OTHERS = {torch.float32, torch.bfloat16, torch.float16} - types_laid_out()


def refuse(*args):
    raise AssertionError("the layer's own product was asked for")


@pytest.mark.parametrize("rows", [1, 3, 16, 40])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_the_weights(rows, bias):
    torch.manual_seed(rows)
    packed, layer = PackedLinear(), SimpleNamespace(weight=torch.randn(70, 48).to(DTYPE))
    shift = torch.randn(70).to(DTYPE) if bias else None
    for _ in range(2):  # and again after the weights have changed in place
        packed.pack(None, None, layer)
        x = torch.randn(rows, 48).to(DTYPE)
        exact = x.double() @ layer.weight.double().T + (shift.double() if bias else 0)
        got = packed.apply(refuse, None, layer, x, shift)
        assert got.dtype == DTYPE
        torch.testing.assert_close(got.double(), exact, **CLOSE)
        layer.weight.data.copy_(torch.randn(70, 48))


@pytest.mark.parametrize("dtype", sorted(OTHERS, key=str), ids=str)
def test_other_types_are_left_alone(dtype):
    packed, layer = PackedLinear(), SimpleNamespace(weight=torch.randn(8, 4).to(dtype))
    packed.pack(None, None, layer)
    x = torch.randn(2, 4).to(dtype)
    assert packed.apply(lambda *call: call, None, layer, x) == (None, layer, x, None)


def test_what_sglang_lays_out_itself_is_left_alone():
    for layer in (
        SimpleNamespace(weight=torch.randn(8, 4).to(DTYPE), use_intel_amx_backend=True),
        SimpleNamespace(weight=torch.randn(8, 1, 4).to(DTYPE)),
    ):
        packed = PackedLinear()
        packed.pack(None, None, layer)
        x = torch.randn(2, 4).to(DTYPE)
        assert packed.apply(lambda *call: call, None, layer, x) == (None, layer, x, None)


class Unquantized:
    """Stands in for SGLang's method of an embedding, by name."""


Unquantized.__name__ = "UnquantizedEmbeddingMethod"


def test_an_lm_head_follows_its_weights():
    torch.manual_seed(0)
    packed = PackedLinear()
    processor = SimpleNamespace(use_fp32_lm_head=False, rl_on_policy_target=None)
    head = SimpleNamespace(weight=torch.randn(70, 48).to(DTYPE), quant_method=Unquantized())
    for _ in range(2):
        x = torch.randn(5, 48).to(DTYPE)
        got = packed.head(refuse, processor, x, head, None)
        torch.testing.assert_close(got.double(), x.double() @ head.weight.double().T, **CLOSE)
        head.weight.data.copy_(torch.randn(70, 48))
        packed.outdate(None, None, head)
    for processor_, x_, head_ in (
        (SimpleNamespace(use_fp32_lm_head=True, rl_on_policy_target=None), x, head),
        (processor, x.half(), head),
        (processor, x, SimpleNamespace(weight=head.weight, quant_method=object())),
        (processor, x, SimpleNamespace(weight=head.weight.half(), quant_method=Unquantized())),
    ):
        assert packed.head(lambda *call: call, processor_, x_, head_, None) == (processor_, x_, head_, None)


def test_proposals_are_ranked_by_the_same_products():
    torch.manual_seed(0)
    lm_head, z = torch.randn(90, 48).to(DTYPE), torch.randn(2, 3, 48).to(DTYPE)
    ids = torch.arange(0, 90, 2)
    got = PackedVocabulary(lm_head, ids).logits(z)
    assert got.shape == (2, 3, 45)
    torch.testing.assert_close(got.double(), z.double() @ lm_head[ids].double().T, **CLOSE)


@pytest.mark.engine
def test_a_policy_update_reaches_the_packed_weights(tiny_dir, other_tiny_dir, run):
    config = EngineConfig(threads=1, context_length=256, max_total_tokens=2048, max_running_requests=8)
    engine = RolloutEngine.start(
        config=config, dtype=str(DTYPE).removeprefix("torch."), model_dir=tiny_dir, policy_version=0, seed=0
    )
    try:
        for version, directory in enumerate((tiny_dir, other_tiny_dir, tiny_dir)):
            if version:
                run(engine.update_policy(directory, version, pause_mode="retract"))
            model = load(directory)
            got = run(sample(engine, PROMPTS[0], max_new_tokens=60, ignore_eos=True))
            exact = forced_logits(model, PROMPTS[0], got.token_ids).log_softmax(-1)
            exact = exact.gather(1, torch.tensor(got.token_ids)[:, None]).squeeze(1)
            # The other policy's are 2 nats away in the mean.
            assert float((exact - torch.tensor(got.logprobs)).abs().mean()) < 0.1
    finally:
        engine.close()

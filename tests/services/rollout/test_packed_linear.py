"""Linear layers with weights laid out beforehand: their values, and that they follow the policy."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from services.config import EngineConfig
from services.rollout.engine import RolloutEngine
from services.rollout.sglang_plugin.packed_linear import PackedLinear, supported
from services.rollout.sglang_plugin.served_vocabulary import PackedVocabulary
from tests.services.rollout.test_engine import PROMPTS, forced_logits, load, sample

pytestmark = pytest.mark.skipif(not supported(), reason="this processor has no bfloat16 products")


def refuse(*args):
    raise AssertionError("the layer's own product was asked for")


@pytest.mark.parametrize("rows", [1, 3, 16, 40])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_the_weights(rows, bias):
    torch.manual_seed(rows)
    packed, layer = PackedLinear(), SimpleNamespace(weight=torch.randn(70, 48).bfloat16())
    shift = torch.randn(70).bfloat16() if bias else None
    for _ in range(2):  # and again after the weights have changed in place
        packed.pack(None, None, layer)
        x = torch.randn(rows, 48).bfloat16()
        exact = x.double() @ layer.weight.double().T + (shift.double() if bias else 0)
        got = packed.apply(refuse, None, layer, x, shift)
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.double(), exact, rtol=2**-7, atol=1e-2)
        layer.weight.data.copy_(torch.randn(70, 48))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_types_are_left_alone(dtype):
    packed, layer = PackedLinear(), SimpleNamespace(weight=torch.randn(8, 4).to(dtype))
    packed.pack(None, None, layer)
    x = torch.randn(2, 4).to(dtype)
    assert packed.apply(lambda *call: call, None, layer, x) == (None, layer, x, None)


def test_what_sglang_lays_out_itself_is_left_alone():
    for layer in (
        SimpleNamespace(weight=torch.randn(8, 4).bfloat16(), use_intel_amx_backend=True),
        SimpleNamespace(weight=torch.randn(8, 1, 4).bfloat16()),
    ):
        packed = PackedLinear()
        packed.pack(None, None, layer)
        x = torch.randn(2, 4).bfloat16()
        assert packed.apply(lambda *call: call, None, layer, x) == (None, layer, x, None)


class Unquantized:
    """Stands in for SGLang's method of an embedding, by name."""


Unquantized.__name__ = "UnquantizedEmbeddingMethod"


def test_an_lm_head_follows_its_weights():
    torch.manual_seed(0)
    packed = PackedLinear()
    processor = SimpleNamespace(use_fp32_lm_head=False, rl_on_policy_target=None)
    head = SimpleNamespace(weight=torch.randn(70, 48).bfloat16(), quant_method=Unquantized())
    for _ in range(2):
        x = torch.randn(5, 48).bfloat16()
        got = packed.head(refuse, processor, x, head, None)
        torch.testing.assert_close(got.double(), x.double() @ head.weight.double().T, rtol=2**-7, atol=1e-2)
        head.weight.data.copy_(torch.randn(70, 48))
        packed.outdate(None, None, head)
    for processor_, x_, head_ in (
        (SimpleNamespace(use_fp32_lm_head=True, rl_on_policy_target=None), x, head),
        (processor, x.float(), head),
        (processor, x, SimpleNamespace(weight=head.weight, quant_method=object())),
        (processor, x, SimpleNamespace(weight=head.weight.float(), quant_method=Unquantized())),
    ):
        assert packed.head(lambda *call: call, processor_, x_, head_, None) == (processor_, x_, head_, None)


def test_proposals_are_ranked_by_the_same_products():
    torch.manual_seed(0)
    lm_head, z = torch.randn(90, 48).bfloat16(), torch.randn(2, 3, 48).bfloat16()
    ids = torch.arange(0, 90, 2)
    got = PackedVocabulary(lm_head, ids).logits(z)
    assert got.shape == (2, 3, 45)
    torch.testing.assert_close(got.double(), z.double() @ lm_head[ids].double().T, rtol=2**-7, atol=1e-2)


@pytest.mark.engine
def test_a_policy_update_reaches_the_packed_weights(tiny_dir, other_tiny_dir, run):
    config = EngineConfig(threads=1, context_length=256, max_total_tokens=2048, max_running_requests=8)
    engine = RolloutEngine.start(config=config, dtype="bfloat16", model_dir=tiny_dir, policy_version=0, seed=0)
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

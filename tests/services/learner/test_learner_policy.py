from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, MistralConfig, Qwen2Config

from services.learner import attention
from services.learner import policy as policy_module
from services.learner.policy import Policy
from specroll_core.contracts import SamplingParams
from specroll_core.law import LawParams, final_logprobs
from specroll_core.packing import PromptCompletions, pack
from tests.tiny import make_tiny_model

GROUPS = [PromptCompletions([5, 6, 7], [[8, 9, 2], [40]]), PromptCompletions([11], [[12, 13, 14, 15]])]
LAWS = [
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.4, top_p=0.7),
    SamplingParams(top_k=5, min_p=0.02),
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), seed=1)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("layout", ["shared", "padded"])
@pytest.mark.parametrize("logit_bytes", [1, 3 * 4 * 320, 1 << 28])
def test_logprobs_are_those_of_the_final_law_however_they_are_chunked(law, layout, logit_bytes, model_dir, monkeypatch):
    monkeypatch.setattr(policy_module, "LOGIT_BYTES", logit_bytes)
    policy = Policy(model_dir, torch.float32, torch.device("cpu"))
    result = policy.token_logprobs(pack(GROUPS, layout), law)
    result.logprobs.nan_to_num(neginf=0.0).sum().backward()
    plain = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    expected = torch.zeros_like(result.logprobs)
    entropy = torch.zeros_like(expected)
    samples = [(g.prompt_ids, c) for g in GROUPS for c in g.completions]
    total = torch.zeros(())
    for s, (prompt, completion) in enumerate(samples):
        logits = plain(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        rows = final_logprobs(logits, LawParams.from_requests([law] * len(completion)))
        chosen = rows[torch.arange(len(completion)), torch.tensor(completion)]
        total = total + chosen[chosen.isfinite()].sum()
        expected[s, : len(completion)] = chosen.detach()
        entropy[s, : len(completion)] = torch.distributions.Categorical(logits=logits / law.temperature).entropy()
    total.backward()
    assert torch.allclose(result.logprobs, expected, atol=1e-5)
    if law.top_p == 1 and law.top_k == -1:
        assert torch.allclose(result.entropy, entropy, atol=1e-5)
    else:
        assert result.entropy is None
        assert (result.logprobs == -math.inf).any()
    for (name, p), q in zip(policy.model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, atol=1e-5, rtol=1e-4), name


def test_long_shared_rows_take_the_fused_attention_and_agree(model_dir, monkeypatch):
    policy = Policy(model_dir, torch.float32, torch.device("cpu"))
    batch = pack(GROUPS, "shared")
    calls = []
    fused_attention = attention.sdpa_attention_forward
    monkeypatch.setattr(
        attention, "sdpa_attention_forward", lambda *a, **k: (calls.append(1), fused_attention(*a, **k))[1]
    )
    with torch.no_grad():
        plain = policy.token_logprobs(batch, LAWS[0]).logprobs
        assert not calls
        monkeypatch.setattr(attention, "PLAIN_LENGTH", 1)
        fused = policy.token_logprobs(batch, LAWS[0]).logprobs
    assert len(calls) == 2
    assert torch.allclose(plain, fused, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (LlamaConfig(), None),
        (MistralConfig(sliding_window=4096), "padded"),
        (MistralConfig(sliding_window=None), None),
        (Qwen2Config(use_sliding_window=False), None),
        (Qwen2Config(use_sliding_window=True, sliding_window=64, max_window_layers=1), "padded"),
    ],
)
def test_models_with_windows_do_not_share_prompts(config, layout):
    assert (None if policy_module._attends_to_everything(config) else "padded") == layout


def test_a_saved_policy_loads_with_transformers(model_dir, tmp_path):
    policy = Policy(model_dir, torch.bfloat16, torch.device("cpu"))
    with torch.no_grad():
        policy.model.get_input_embeddings().weight[7] += 1
    policy.save_policy(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert loaded.dtype == torch.bfloat16
    for (name, p), q in zip(policy.model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(p, q), name
    source, saved = AutoTokenizer.from_pretrained(model_dir), AutoTokenizer.from_pretrained(tmp_path / "saved")
    message = [{"role": "user", "content": "2 + 2?"}]
    assert saved.apply_chat_template(message, tokenize=False) == source.apply_chat_template(message, tokenize=False)
    assert (tmp_path / "saved/generation_config.json").read_bytes() == (
        model_dir / "generation_config.json"
    ).read_bytes()
    assert not list((tmp_path / "saved").glob("*.bin"))


def test_a_model_that_transforms_its_logits_is_refused(model_dir, monkeypatch):
    original = policy_module.AutoModelForCausalLM.from_pretrained

    def with_softcap(*args, **kwargs):
        model = original(*args, **kwargs)
        model.config.final_logit_softcapping = 30.0
        return model

    monkeypatch.setattr(policy_module.AutoModelForCausalLM, "from_pretrained", with_softcap)
    with pytest.raises(ValueError, match=r"model\.source: llama transforms its logits"):
        Policy(model_dir, torch.float32, torch.device("cpu"))

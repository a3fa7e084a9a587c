"""Rows that sampling leaves behind are those that the finished sequences give when they are read again."""

from __future__ import annotations

import json

import pytest
import torch

from services.heads.collect import TOP, read_texts, sample_rows, text_rows
from services.learner.sources import DataError
from specroll_core.contracts import SamplingParams

PROMPTS = [(40, 50, 60), (70, 80, 90, 100, 110, 120), (33, 44)]


@pytest.fixture(scope="module")
def plain(tiny_dir):
    """The same model with the attention of `transformers`."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32, attn_implementation="eager")


def naive_rows(model, ids, first):
    """Tokens from position `first` on, with the states before them, their best tokens and log-probabilities."""
    with torch.no_grad():
        out = model(torch.tensor([ids]), output_hidden_states=True)
    logprobs = out.logits[0].log_softmax(-1)
    best = logprobs[first - 1 : -1].topk(TOP)
    return torch.tensor(ids[first:]), out.hidden_states[-1][0, first - 1 : -1], best.indices, best.values


@pytest.fixture(scope="module")
def sampled(target):
    return sample_rows(target, PROMPTS, SamplingParams(temperature=0.8, max_new_tokens=12), tokens=90, seed=1, batch=4)


def test_sampled_rows_are_what_the_model_says_of_them(plain, sampled):
    assert len(sampled) >= 90
    assert set(sampled.prompt.tolist()) == {0, 1, 2}
    for sequence in sampled.sequence.unique().tolist():
        rows = sampled.select(sampled.sequence == sequence)
        prompt = PROMPTS[int(rows.prompt[0])]
        tokens, hidden, ids, logprobs = naive_rows(plain, [*prompt, *rows.tokens.tolist()], len(prompt))
        assert torch.equal(rows.tokens, tokens)
        torch.testing.assert_close(rows.hidden, hidden, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(rows.target_logprobs, logprobs, atol=1e-4, rtol=1e-4)
        assert float((rows.target_ids == ids).float().mean()) > 0.99  # near ties may change places


def test_completions_end_with_the_stop_token_or_the_cap(target, sampled):
    stops = torch.tensor(target.stop_ids)
    for sequence in sampled.sequence.unique().tolist():
        tokens = sampled.tokens[sampled.sequence == sequence]
        assert not torch.isin(tokens[:-1], stops).any()
        assert len(tokens) == 12 or bool(torch.isin(tokens[-1], stops))


def test_the_seed_decides_and_the_callers_randomness_is_left_alone(target):
    law = SamplingParams(temperature=1.0, max_new_tokens=6)
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    first = sample_rows(target, PROMPTS, law, seed=3)
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(first.tokens, sample_rows(target, PROMPTS, law, seed=3).tokens)
    assert not torch.equal(first.tokens, sample_rows(target, PROMPTS, law, seed=4).tokens)
    assert len(first.sequence.unique()) == len(PROMPTS)


def test_the_law_is_the_requests_and_not_the_directorys(target):
    greedy = sample_rows(target, PROMPTS, SamplingParams(temperature=0, max_new_tokens=8))
    assert torch.equal(greedy.tokens, greedy.target_ids[:, 0])
    two = sample_rows(target, PROMPTS, SamplingParams(temperature=5.0, top_k=2, max_new_tokens=30), tokens=200)
    assert bool((two.tokens[:, None] == two.target_ids[:, :2]).any(1).all())
    wide = sample_rows(target, PROMPTS, SamplingParams(temperature=5.0, max_new_tokens=30), tokens=200)
    assert not bool((wide.tokens[:, None] == wide.target_ids).any(1).all())


def test_a_stop_string_ends_a_completion_at_the_token_that_completes_it(target):
    free = sample_rows(target, PROMPTS[:1], SamplingParams(temperature=0, max_new_tokens=12)).tokens.tolist()
    word = target.tokenizer.decode(free[3:5])
    cut = sample_rows(target, PROMPTS, SamplingParams(temperature=0, max_new_tokens=12, stop=(word,)))
    mine = cut.tokens[cut.prompt == 0].tolist()
    assert mine == free[: len(mine)]
    assert len(mine) <= 5
    assert word in target.tokenizer.decode(mine)
    assert word not in target.tokenizer.decode(mine[:-1])


def test_text_rows_are_what_the_model_says_of_the_texts(target, plain):
    texts = [[10, 20, 30, 40], [50], [60, 70], list(range(100, 140))]
    rows = text_rows(target, texts)
    assert rows.prompt.unique().tolist() == [0, 2, 3]
    for position in (0, 2, 3):
        mine = rows.select(rows.prompt == position)
        tokens, hidden, ids, logprobs = naive_rows(plain, texts[position], 1)
        assert torch.equal(mine.tokens, tokens)
        torch.testing.assert_close(mine.hidden, hidden, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(mine.target_logprobs, logprobs, atol=1e-4, rtol=1e-4)
        assert float((mine.target_ids == ids).float().mean()) > 0.99


def test_texts_are_read_from_their_column(target, tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("some text", "another one")))
    texts = read_texts(path, target, longest=6, tokens=10)
    assert sorted(texts) == sorted(target.tokenizer(text)["input_ids"][:6] for text in ("some text", "another one"))
    assert len(read_texts(path, target, longest=6, tokens=5)) == 1
    path.write_text('{"txt": "some text"}\n')
    with pytest.raises(DataError, match="column 'text'"):
        read_texts(path, target, longest=6, tokens=10)
    path.write_text("{")
    with pytest.raises(DataError, match=r"^--texts .*texts.jsonl' is not valid JSON"):
        read_texts(path, target, longest=6, tokens=10)
    with pytest.raises(DataError, match="must be a .jsonl"):
        read_texts(tmp_path / "texts.docx", target, longest=6, tokens=10)
    with pytest.raises(ValueError, match="at least one text of two tokens"):
        text_rows(target, [[1]])

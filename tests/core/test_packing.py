import random

import pytest
import torch

from specroll_core.packing import PromptCompletions, choose_layout, pack, plan


def groups_of(seed=0, count=3):
    rng = random.Random(seed)
    ids = lambda low, high: [rng.randrange(10, 99) for _ in range(rng.randint(low, high))]  # noqa: E731
    return [PromptCompletions(ids(1, 6), [ids(1, 5) for _ in range(rng.randint(1, 4))]) for _ in range(count)]


def visible(batch, row, column):
    """The input ids that a position may see, in order, itself last."""
    length = batch.input_ids.shape[1]
    causal = torch.arange(length) <= column
    seen = causal if batch.attention_mask is None else batch.attention_mask[row, 0, column]
    return [int(i) for i in batch.input_ids[row][seen]], [int(p) for p in batch.position_ids[row][seen]]


@pytest.mark.parametrize("layout", ["shared", "padded"])
def test_each_token_is_predicted_from_its_prompt_and_what_precedes_it(layout):
    groups = groups_of()
    batch = pack(groups, layout)
    samples = [(g.prompt_ids, c) for g in groups for c in g.completions]
    tokens = iter(zip(batch.token_row.tolist(), batch.token_ids.tolist(), batch.slot.tolist(), strict=True))
    longest = max(len(c) for _, c in samples)
    for s, (prompt, completion) in enumerate(samples):
        for t, expected in enumerate(completion):
            row_of_hidden, token, slot = next(tokens)
            assert (token, slot) == (expected, s * longest + t)
            row, column = divmod(int(batch.hidden_index[row_of_hidden]), batch.input_ids.shape[1])
            ids, positions = visible(batch, row, column)
            assert ids == [*prompt, *completion[:t]]
            assert positions == list(range(len(ids)))
    assert next(tokens, None) is None
    assert batch.mask.tolist() == [[t < len(c) for t in range(longest)] for _, c in samples]


def test_shared_rows_hold_each_prompt_once_and_no_last_token():
    group = PromptCompletions([1, 2, 3], [[4, 5], [6], [7, 8, 9]])
    batch = pack([group], "shared")
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 7, 8]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 3, 4]]
    # The prompt's last position predicts three first tokens and is listed once.
    assert batch.hidden_index.tolist() == [2, 3, 4, 5]


def test_every_position_sees_something():
    batch = pack(groups_of(3), "shared")
    assert batch.attention_mask.any(dim=-1).all()


def test_scatter_puts_tokens_in_their_place_and_passes_gradients():
    batch = pack([PromptCompletions([1], [[2, 3], [4]])], "shared")
    values = torch.tensor([0.1, 0.2, 0.3], requires_grad=True)
    matrix = batch.scatter(values)
    assert torch.equal(matrix, torch.tensor([[0.1, 0.2], [0.3, 0.0]]))
    (matrix * torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum().backward()
    assert values.grad.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("layout", ["shared", "padded", None])
@pytest.mark.parametrize("size", [1, 2, 8])
def test_a_plan_holds_every_sample_once(layout, size):
    groups = groups_of(7, count=5)
    completions = [tuple(c) for g in groups for c in g.completions]
    parts = plan(groups, size, hidden_size=8, layer_params=600, layout=layout)
    found = {}
    for part in parts:
        ids = iter(part.packed.token_ids.tolist())
        for row, sample in enumerate(part.samples):
            found[sample] = tuple(next(ids) for _ in range(int(part.packed.mask[row].sum())))
    assert found == dict(enumerate(completions))


def test_padded_rows_are_sorted_so_that_little_is_padded():
    group = PromptCompletions([1], [[2] * n for n in (1, 9, 1, 9)])
    parts = plan([group, group], 1, hidden_size=8, layer_params=600, layout="padded")
    assert [part.packed.input_ids.shape for part in parts] == [(4, 9), (4, 1)]


def test_short_completions_share_their_prompt_and_long_ones_do_not():
    smollm = {"hidden_size": 576, "layer_params": 3_540_000}
    assert choose_layout(PromptCompletions([1] * 40, [[1] * 24] * 8), **smollm) == "shared"
    assert choose_layout(PromptCompletions([1] * 500, [[1] * 128] * 8), **smollm) == "shared"
    assert choose_layout(PromptCompletions([1] * 40, [[1] * 2000] * 8), **smollm) == "padded"

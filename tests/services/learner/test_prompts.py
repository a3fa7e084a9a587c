"""Prompts from each kind of source: rendering, splitting, ordering, and what a user is told about mistakes."""

import csv
import hashlib
import json
from pathlib import Path

import pytest

from services.config import DataConfig
from services.learner.prompts import PromptSet, load_prompts
from services.learner.sources import DataError
from tests.tiny import make_tokenizer

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def config(source: str | Path, **settings) -> DataConfig:
    return DataConfig(source=str(source), **{"holdout": 0, **settings})


def write_lines(path: Path, rows: list) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def texts(prompts: PromptSet, tokenizer) -> set[str]:
    return {tokenizer.decode(p.ids) for p in prompts.train + prompts.holdout}


def chat(content: str, system: str = "") -> str:
    head = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    return f"{head}<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"


ROWS = [{"question": f"{a} + {b}?", "answer": a + b, "level": a} for a in range(6) for b in range(5)]


@pytest.fixture(params=["jsonl", "json", "csv", "parquet"])
def file_source(request, tmp_path) -> Path:
    path = tmp_path / f"data.{request.param}"
    if request.param == "jsonl":
        write_lines(path, ROWS)
    elif request.param == "json":
        path.write_text(json.dumps(ROWS))
    elif request.param == "csv":
        with path.open("w", newline="") as lines:
            writer = csv.DictWriter(lines, ROWS[0])
            writer.writeheader()
            writer.writerows(ROWS)
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    return path


def test_every_file_format_gives_the_same_chats(file_source, tokenizer):
    prompts = load_prompts(config(file_source), tokenizer, seed=0)
    assert texts(prompts, tokenizer) == {chat(row["question"]) for row in ROWS}
    for prompt in prompts.train:
        a, b = tokenizer.decode(prompt.ids).split("user\n")[1].split("?")[0].split(" + ")
        assert prompt.answer == str(int(a) + int(b))


def test_a_data_set_directory_is_read_by_datasets(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    write_lines(tmp_path / "train.jsonl", ROWS)
    prompts = load_prompts(config(tmp_path, size=20), tokenizer, seed=0)
    assert texts(prompts, tokenizer) == {chat(row["question"]) for row in ROWS[:20]}


def test_generated_prompts_offer_their_metadata_to_the_template(tokenizer):
    source = config("reasoning-gym:chain_sum", options=SUMS, size=50, template="What is {expression}?")
    prompts = load_prompts(source, tokenizer, seed=3)
    assert len(prompts.train) + prompts.duplicates == 50
    for prompt in prompts.train:
        expression = tokenizer.decode(prompt.ids).split("What is ")[1].split("?")[0]
        a, operator, b = expression.split()
        assert int(prompt.answer) == (int(a) + int(b) if operator == "+" else int(a) - int(b))


def test_the_seed_of_the_run_seeds_generated_prompts(tokenizer):
    source = config("reasoning-gym:chain_sum", options=SUMS, size=50)
    first, second, other = (texts(load_prompts(source, tokenizer, seed), tokenizer) for seed in (1, 1, 2))
    assert first == second
    assert first != other


def test_training_and_held_out_prompts_are_distinct_and_numbered(tmp_path, tokenizer):
    path = write_lines(tmp_path / "data.jsonl", ROWS * 3)
    prompts = load_prompts(config(path, holdout=10), tokenizer, seed=0)
    train, holdout = ({p.ids for p in part} for part in (prompts.train, prompts.holdout))
    assert (len(train), len(holdout), prompts.duplicates) == (20, 10, 60)
    assert not train & holdout
    for part in (prompts.train, prompts.holdout):
        assert [p.index for p in part] == list(range(len(part)))


def test_each_epoch_is_a_permutation_of_its_own(tmp_path, tokenizer):
    prompts = load_prompts(config(write_lines(tmp_path / "data.jsonl", ROWS)), tokenizer, seed=0)
    orders = [prompts.order(epoch) for epoch in range(4)]
    assert all(sorted(order) == list(range(30)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert orders[2] == prompts.order(2)


def test_split_and_order_are_the_same_on_every_machine(tmp_path, tokenizer):
    """Pins the shuffles: a change here makes a run that is resumed train on other prompts than it has recorded."""
    prompts = load_prompts(config(write_lines(tmp_path / "data.jsonl", ROWS), holdout=10), tokenizer, seed=7)
    record = json.dumps([[p.answer for p in prompts.train], [p.answer for p in prompts.holdout], prompts.order(1)])
    assert hashlib.sha256(record.encode()).hexdigest()[:16] == "1d19bd62658378d5"


def test_prompts_that_are_too_long_are_left_out_and_counted(tmp_path, tokenizer):
    rows = [{"question": "x" * n, "answer": n} for n in range(1, 11)]
    path = write_lines(tmp_path / "data.jsonl", rows)
    lengths = {n: len(tokenizer(chat("x" * n))["input_ids"]) for n in range(1, 11)}
    prompts = load_prompts(config(path, max_prompt_tokens=lengths[7]), tokenizer, seed=0)
    assert {p.answer for p in prompts.train} == {str(n) for n in range(1, 8)}
    assert prompts.too_long == 3
    with pytest.raises(DataError, match=rf"data\.max_prompt_tokens = 2 .* the shortest has {lengths[1]} tokens"):
        load_prompts(config(path, max_prompt_tokens=2), tokenizer, seed=0)


def test_a_system_message_comes_first(tmp_path, tokenizer):
    path = write_lines(tmp_path / "data.jsonl", ROWS[:1])
    prompts = load_prompts(config(path, system="Be brief."), tokenizer, seed=0)
    assert texts(prompts, tokenizer) == {chat("0 + 0?", system="Be brief.")}


def test_a_column_of_messages_is_used_as_it_is(tmp_path, tokenizer):
    messages = [{"role": "system", "content": "Own."}, {"role": "user", "content": "{2} + 2?"}]
    path = write_lines(tmp_path / "data.jsonl", [{"prompt": messages, "reward_model": {"ground_truth": "4"}}])
    source = config(path, prompt_column="prompt", answer_column="reward_model.ground_truth", system="Ignored.")
    prompts = load_prompts(source, tokenizer, seed=0)
    assert texts(prompts, tokenizer) == {chat("{2} + 2?", system="Own.")}
    assert prompts.train[0].answer == "4"


def test_braces_in_the_data_are_text(tmp_path, tokenizer):
    path = write_lines(tmp_path / "data.jsonl", [{"question": "{x} and {0}", "answer": "1"}])
    prompts = load_prompts(config(path, template="{prompt} {{done}}"), tokenizer, seed=0)
    assert texts(prompts, tokenizer) == {chat("{x} and {0} {done}")}


def test_a_worked_solution_gives_its_final_answer(tmp_path, tokenizer):
    path = write_lines(tmp_path / "data.jsonl", [{"question": "a", "answer": "6 * 7 = 42\n#### 42 "}])
    assert load_prompts(config(path), tokenizer, seed=0).train[0].answer == "42"


def test_a_model_without_a_chat_template_gets_plain_text(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    path = write_lines(tmp_path / "data.jsonl", ROWS[:1])
    prompts = load_prompts(config(path, system="Add."), tokenizer, seed=0)
    assert texts(prompts, tokenizer) == {"Add.\n\n0 + 0?"}


def test_size_takes_the_first_rows(file_source, tokenizer):
    prompts = load_prompts(config(file_source, size=7), tokenizer, seed=0)
    assert texts(prompts, tokenizer) == {chat(row["question"]) for row in ROWS[:7]}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"prompt_column": "prompt"},
            "data.prompt_column = 'prompt' is not a column; the columns are answer, level, quest",
        ),
        ({"answer_column": "answer.x"}, "data.answer_column = 'answer.x' is not a column"),
        ({"template": "{prompt} {hint}"}, "data.template uses {hint}, but the columns of"),
        ({"template": "{prompt"}, "data.template = '{prompt' is not a valid format string"),
        ({"template": "{}"}, "data.template = '{}' is not a valid format string"),
        ({"holdout": 30}, "data.holdout = 30 must be smaller than the 30 distinct prompts"),
    ],
)
def test_a_setting_that_does_not_suit_the_data_is_one_sentence(tmp_path, tokenizer, settings, words):
    path = write_lines(tmp_path / "data.jsonl", ROWS)
    assert words in problem(config(path, **settings), tokenizer)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("absent.jsonl", None, "is not an existing file"),
        ("empty.jsonl", "\n", "holds no rows"),
        ("broken.jsonl", '{"question": "a", "answer": 1}\n{"question": ', "is not valid JSON at line 2"),
        ("list.jsonl", "[1]", "must hold objects, not list values"),
        ("object.json", "{}", "must hold an array of objects"),
        ("text.parquet", "no", "is not a Parquet file"),
        ("null.jsonl", '{"question": "a", "answer": null}', "data.answer_column = 'answer' must hold text or numbers"),
        ("chat.jsonl", '{"question": ["a"], "answer": 1}', "a list that is not made of messages"),
        ("latin.csv", b"question,answer\n\xe9,1\n", "is not UTF-8 text"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_sentence(tmp_path, tokenizer, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert words in problem(config(tmp_path / name), tokenizer)


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        ("reasoning-gym:chainsum", {}, "names no data set of reasoning-gym; did you mean chain_sum?"),
        ("reasoning-gym:chain_sum", {"terms": 2}, "data.options do not suit 'reasoning-gym:chain_sum'"),
        ("reasoning-gym:chain_sum", {"min_terms": 0}, "min_terms must be positive"),
    ],
)
def test_a_generator_that_cannot_be_used_is_one_sentence(tokenizer, source, options, words):
    assert words in problem(config(source, options=options), tokenizer)


def problem(source: DataConfig, tokenizer) -> str:
    with pytest.raises(DataError) as caught:
        load_prompts(source, tokenizer, seed=0)
    assert "\n" not in str(caught.value)
    return str(caught.value)

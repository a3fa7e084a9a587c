"""Loading, overriding, redacting and comparing configurations, and what a user is told about mistakes."""

import json
from pathlib import Path

import pytest

from services.config import Config, ModelConfig
from services.config_loader import ConfigError, check_resume, digest, dump, load_config
from services.machine import computing_dtype

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))


def write(directory: Path, text: str) -> Path:
    path = directory / "run.toml"
    path.write_text(text)
    return path


def problems(path: Path | None, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert str(caught.value).splitlines() == list(caught.value.problems)
    return list(caught.value.problems)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_a_valid_configuration(path: Path):
    config = load_config(path)
    assert config.run.dir != Config().run.dir, "an example must have a run directory of its own"
    assert config.learner.max_staleness >= config.learner.publish_every - 1


def test_there_are_examples():
    assert {path.stem for path in EXAMPLES} >= {"quickstart", "word_problems", "synchronous", "gsm8k", "jsonl"}


def test_no_file_gives_the_defaults():
    assert load_config(None, ["model.dtype=float32"]) == Config(model=ModelConfig(dtype="float32"))
    assert Config().model.dtype == "auto"


def test_loading_settles_what_the_machine_computes_in():
    assert load_config(None).model.dtype == load_config(None, ["model.dtype=auto"]).model.dtype == computing_dtype()
    assert load_config(None, ["model.dtype=bfloat16"]).model.dtype == "bfloat16"
    assert dump(load_config(None))["model"]["dtype"] == computing_dtype()  # a resumed run keeps it


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["correction=on"], "must be one of 'off', 'trajectory' or 'group'"),
        (["correction_form=authors"], "must be one of 'whitened', 'bias', 'credit' or 'soft'"),
        (["gate=perhaps"], "rollout.engine.speculation.gate"),
        (["nodes=1", "correction=group"], "needs more than one node"),
    ],
)
def test_wrong_parts_of_speculation_are_refused_in_a_sentence(overrides, problem):
    (found,) = problems(None, *(f"rollout.engine.speculation.{override}" for override in overrides))
    assert problem in found


def test_overrides_win_over_the_file_and_are_read_as_toml_or_text(tmp_path):
    path = write(tmp_path, "[learner]\nsteps = 5\ngroup_size = 4\n")
    config = load_config(
        path,
        [
            "learner.steps=7",
            "learner.loss.kind=gspo",
            "learner.learning_rate=1",
            'sampling.stop=["a", "b"]',
            "data.options.operators=['+']",
            "run.dir = runs/a=b",
            'model.source="true"',
        ],
    )
    assert (config.learner.steps, config.learner.group_size, config.learner.loss.kind) == (7, 4, "gspo")
    assert config.learner.learning_rate == 1.0
    assert config.sampling.stop == ("a", "b")
    assert config.data.options == {"operators": ["+"]}
    assert config.run.dir == Path("runs/a=b")
    assert config.model.source == "true"


def test_a_later_override_wins():
    assert load_config(None, ["learner.steps=7", "learner.steps=9"]).learner.steps == 9


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("learner.lerning_rate=1", "learner.lerning_rate is not a setting; did you mean learner.learning_rate?"),
        ("learner.temperature=1", "learner.temperature is not a setting; did you mean sampling.temperature?"),
        ("learner.kind=grpo", "learner.kind is not a setting; did you mean learner.loss.kind?"),
        ("xyzzy.a=1", "xyzzy is not a setting."),
        ("learner.steps=many", 'learner.steps = "many" must be a whole number.'),
        ("learner.steps=true", "learner.steps = true must be a whole number."),
        ("learner.steps=1.5", "learner.steps = 1.5 must be a whole number."),
        ("learner.steps=0", "learner.steps = 0 must be at least 1."),
        ("learner.learning_rate=-1e-5", "learner.learning_rate = -1e-05 must be above 0.0."),
        ("learner.learning_rate=inf", "learner.learning_rate = Infinity must be a finite number."),
        ("sampling.top_p=1.5", "sampling.top_p = 1.5 must be at most 1.0."),
        ("sampling.top_k=0", "sampling.top_k must be -1 (off) or at least 1."),
        ("sampling.stop=[1]", "sampling.stop[0] = 1 must be a string."),
        ("rollout.port=70000", "rollout.port = 70000 must be at most 65535."),
        ("logging.tensorboard=1", "logging.tensorboard = 1 must be true or false."),
        ("model.dtype=fp8", "model.dtype = \"fp8\" must be one of 'auto', 'bfloat16' or 'float32'."),
        ("learner=3", "learner = 3 must be a table."),
        ("learner.betas=[0.9, 0.95, 0.99]", "learner.betas does not have the right number of elements."),
        ("learner.steps.x=1", 'learner.steps = {"x": 1} must be a whole number.'),
        ("learner.steps", "--set learner.steps must have the form section.name=value."),
        ("learner..steps=1", "--set learner..steps=1 must have the form section.name=value."),
    ],
)
def test_each_mistake_gets_one_sentence(override, sentence):
    assert problems(None, override) == [sentence]


def test_constraints_between_settings_name_both():
    (sentence,) = problems(None, "learner.publish_every=4", "learner.max_staleness=1")
    assert "learner.max_staleness = 1" in sentence
    assert "learner.publish_every" in sentence


def test_several_mistakes_get_a_line_each(tmp_path):
    path = write(tmp_path, '[learner]\nsteps = "8"\nlerning_rate = 1.0\n[data]\nsource = 3\n')
    assert sorted(problems(path)) == [
        "data.source = 3 must be a string.",
        "learner.lerning_rate is not a setting; did you mean learner.learning_rate?",
        'learner.steps = "8" must be a whole number.',
    ]


def test_an_option_of_the_wrong_type_is_one_sentence():
    (sentence,) = problems(None, "data.options.x={y = 1}")
    assert sentence.startswith('data.options.x = {"y": 1} must be ')


def test_an_override_cannot_descend_into_a_value(tmp_path):
    path = write(tmp_path, "[learner]\nsteps = 5\n")
    assert problems(path, "learner.steps.x=1") == [
        "--set learner.steps.x=1 cannot be applied because learner.steps is not a section."
    ]


def test_unreadable_files_are_named(tmp_path):
    missing = tmp_path / "none.toml"
    assert problems(missing) == [f"The configuration file {missing} does not exist."]
    assert problems(tmp_path) == [f"The configuration file {tmp_path} cannot be read: Is a directory."]
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert problems(binary) == [f"The configuration file {binary} is not UTF-8 text."]


def test_bad_toml_names_the_line(tmp_path):
    (sentence,) = problems(write(tmp_path, "[learner]\nsteps = 5\nbatch_groups =\n"))
    assert "not valid TOML" in sentence
    assert "line 3" in sentence


SECRET_URLS = [
    "redis://:hunter2@localhost:6379/0",
    "redis://user:hunter2@localhost",
    "redis://localhost:6379?password=hunter2",
]


@pytest.mark.parametrize("url", SECRET_URLS)
def test_no_dump_or_message_shows_a_password(url, tmp_path):
    config = load_config(None, [f"redis.url={url}"])
    assert config.redis.url.get_secret_value() == url
    assert "hunter2" not in json.dumps(dump(config))
    assert "localhost" in dump(config)["redis"]["url"]
    assert "hunter2" not in repr(config)
    assert "hunter2" in json.dumps(dump(config, redacted=False))
    assert "hunter2" not in "".join(problems(None, f'redis.url=["{url}"]'))
    path = write(
        tmp_path, f'[model]\nsource = "https://user:hunter2@host/model"\n[redis]\nurl = "{url}"\nmax_groups = 0\n'
    )
    assert "hunter2" not in "".join(problems(path))


def test_a_dump_loads_back_to_the_same_configuration(tmp_path):
    config = load_config(
        None, ["sampling.stop=['a']", "redis.url=redis://:p@h", "data.options.x=1.5", "rollout.engine.cpus=[0]"]
    )
    again = Config.model_validate_json(json.dumps(dump(config, redacted=False)))
    assert again == config
    assert Config.model_validate(dump(Config())) == Config()


def test_the_digest_covers_what_both_ends_share_and_nothing_else():
    mine = ["model.source=/a/models/tiny", "model.dtype=bfloat16"]
    base = digest(load_config(None, mine))
    for same in ("learner.steps=3", "rollout.engine.threads=2", "run.dir=elsewhere", "model.source=/b/tiny"):
        assert digest(load_config(None, [*mine, same])) == base, same
    for other in (
        "sampling.top_p=0.5",
        "model.dtype=float32",
        "model.source=/a/other",
        "reward.verifier=exact",
        "run.seed=1",
    ):
        assert digest(load_config(None, [*mine, other])) != base, other


def test_resume_accepts_what_may_change():
    old = dump(load_config(None, ["learner.steps=10"]))
    check_resume(
        old,
        load_config(
            None,
            [
                "learner.steps=20",
                "learner.learning_rate=1e-6",
                "logging.level=debug",
                "rollout.port=5000",
                "reward.workers=2",
            ],
        ),
    )


@pytest.mark.parametrize(
    "override",
    [
        "model.dtype=float32",
        "data.template='{prompt}!'",
        "data.options.x=1",
        "sampling.temperature=0.7",
        "run.seed=5",
        "learner.batch_groups=2",
        "learner.group_size=2",
        "reward.verifier=exact",
    ],
)
def test_resume_refuses_what_the_checkpoint_depends_on(override):
    name, _, _ = override.partition("=")
    mine = ["model.dtype=bfloat16"]
    with pytest.raises(ConfigError) as caught:
        check_resume(dump(load_config(None, mine)), load_config(None, [*mine, override]))
    (sentence,) = caught.value.problems
    assert sentence.startswith(f"{name} = ")
    assert sentence.endswith("as in the run being resumed.")


def test_resume_refuses_fewer_steps_and_lists_every_problem():
    with pytest.raises(ConfigError) as caught:
        check_resume(
            dump(load_config(None, ["learner.steps=30"])), load_config(None, ["learner.steps=3", "sampling.top_p=0.5"])
        )
    assert list(caught.value.problems) == [
        "sampling.top_p = 0.5 must stay 1.0 as in the run being resumed.",
        "learner.steps = 3 must be at least the 30 of the run being resumed.",
    ]


def test_an_option_that_was_removed_is_noticed_on_resume():
    with pytest.raises(ConfigError, match=r"data\.options\.x = unset must stay 1"):
        check_resume(dump(load_config(None, ["data.options.x=1"])), load_config(None))


@pytest.mark.parametrize(
    ("init", "heads", "brought"),
    [("none", None, None), ("auto", None, None), ("some/heads", None, "some/heads"), ("auto", "given", "given")],
)
def test_heads_that_a_configuration_brings(init: str, heads: str | None, brought: str | None) -> None:
    config = Config.model_validate(
        {"heads": {"init": init}, "rollout": {"engine": {"speculation": {"enabled": True, "heads": heads}}}}
    )
    assert config.initial_heads == (None if brought is None else Path(brought))

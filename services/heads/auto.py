"""Heads that a run trains for itself before it starts, once: `heads.init = "auto"`.

They lie in the cache under a name that tells what they are for. Another model, task, sampling law or shape is another
name, so what is there always fits, and a run that finds its heads starts at once. How many tokens they were trained on
is not in it: `specroll heads train CONFIG --out auto --tokens N` beforehand gives a run better ones.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from services.common.artifacts import MANIFEST
from services.common.lifecycle import child_dies_with_me
from services.config import Config
from services.heads.artifact import FORMAT, load_artifact
from services.heads.fingerprint import ModelFingerprint
from services.models import default_cache_dir, fetch_model

AUTO = "auto"
# Enough for heads that pay from the first step, in about a minute for the bundled model; the policy soon says other
# things than it does now, and the watcher trains on those.
AUTO_TOKENS = 16_000
# To be counted up when the same rows would give other heads.
_RECIPE = 1
_READABLE = 40


def cached_heads(config: Config) -> Path:
    """Where heads for a configuration's model, prompts and sampling law lie, or will."""
    directory = fetch_model(config.model.source)
    model = ModelFingerprint.of(directory)
    key = {
        "format": FORMAT,
        "recipe": _RECIPE,
        "model": [model.config_sha256, model.lm_head_sha256],
        "dtype": config.model.dtype,
        "data": config.data.model_dump(mode="json"),
        "sampling": config.sampling.model_dump(mode="json"),
        "seed": config.run.seed,
        "shape": [config.heads.heads, config.heads.rank],
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return default_cache_dir().parent / "heads" / f"{directory.name[:_READABLE]}-{digest}"


def trained_already(directory: Path, config: Config) -> bool:
    """Whether heads lie in `directory`. Raises ValueError where they are damaged."""
    if not (directory / MANIFEST).exists():
        return False
    load_artifact(directory, ModelFingerprint.of(fetch_model(config.model.source)))
    return True


def ensure_heads(config: Config, config_path: Path, overrides: Sequence[str], tokens: int = AUTO_TOKENS) -> Path:
    """The directory of the heads of `heads.init = "auto"`, trained now where they are not there yet.

    In a process of its own, whose memory is free again when the run starts. Raises ValueError where it fails.
    """
    directory = cached_heads(config)
    if not trained_already(directory, config):
        settings = [f"--set={text}" for text in overrides]
        done = subprocess.run(
            [
                *(sys.executable, "-m", "services.cli", "heads", "train", str(config_path)),
                *("--out", AUTO, "--tokens", str(tokens), *settings),
            ],
            stdin=subprocess.DEVNULL,
            check=False,
            preexec_fn=child_dies_with_me(),
        )
        if done.returncode != 0:
            raise ValueError(f'heads.init = "{AUTO}": training the heads ended with exit code {done.returncode}.')
    return directory

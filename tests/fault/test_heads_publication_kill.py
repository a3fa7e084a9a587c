"""kill -9 at any moment of a publication: what `latest` names is whole, and no number is used for two things."""

from __future__ import annotations

import os
import random
import signal

import torch

from services.common.lifecycle import wait_until
from services.heads.artifact import HeadsManifest, TrainedOn, load_artifact
from services.heads.fingerprint import ModelFingerprint
from services.heads.registry import HeadsRegistry
from specroll_core.heads import FutureTokenHeads, HeadsSpec

MODEL = ModelFingerprint(8, 32, "c" * 64, "l" * 64)


def publish_and_roll_back_for_ever(root):
    rng = random.Random(os.getpid())
    registry = HeadsRegistry(root, keep=3)
    heads = FutureTokenHeads(HeadsSpec(2, 8, 4, 32))
    while True:
        current = registry.current()
        parent = current.version if current else None
        made = registry.publish(heads, HeadsManifest(MODEL, TrainedOn(1, 1, "test"), parent))
        if rng.random() < 0.3 and parent is not None:
            registry.roll_back(made.version, "on purpose")


def test_a_registry_survives_its_writer(tmp_path):
    torch.set_num_threads(1)
    rng = random.Random(0)
    highest = 0
    for _ in range(10):
        child = os.fork()
        if child == 0:
            try:
                publish_and_roll_back_for_ever(tmp_path)
            finally:
                os._exit(1)
        try:
            registry = HeadsRegistry(tmp_path)
            want = highest + rng.randint(1, 3)
            wait_until(
                lambda registry=registry, want=want: max(registry.store.versions(), default=0) >= want,
                60,
                "a version",
                poll_seconds=0.0005 + 0.002 * rng.random(),
            )
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        after = HeadsRegistry(tmp_path)
        current = after.current()
        assert current is not None
        assert load_artifact(current.path).artifact.version == current.version
        assert current.version not in after.blocked
        versions = after.store.versions()
        assert max(versions) >= want
        highest = max(versions)

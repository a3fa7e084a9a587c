"""The heads that serve when the watcher begins."""

from __future__ import annotations

from services.common.artifacts import Artifact
from services.config import Config
from services.heads.artifact import HeadsManifest, TrainedOn, artifact_directory, load_artifact
from services.heads.fingerprint import ModelFingerprint
from services.heads.registry import HeadsRegistry
from services.rollout.heads_file import load_heads
from services.watcher.policy_source import PolicySource


def first_version(config: Config, registry: HeadsRegistry, policies: PolicySource) -> Artifact | None:
    """The registry's current version; heads that the configuration brings become the first one."""
    found = registry.current()
    given = config.initial_heads
    if found is not None or given is None or registry.store.versions():
        return found
    directory = artifact_directory(given)
    if directory.is_dir():
        loaded = load_artifact(directory)
        return registry.publish(loaded.heads, HeadsManifest(loaded.manifest.model, loaded.manifest.trained_on))
    model = ModelFingerprint.of(policies.current().path)
    return registry.publish(load_heads(given), HeadsManifest(model, TrainedOn(0, 0, str(given.name))))

"""Heads as an artifact: `heads.safetensors`, and a `manifest.json` that says what they fit, come from and achieve.

Heads read one particular hidden state of one particular model. Served with another they would be wrong without any
error, and only acceptance would fall: so whoever loads them compares fingerprints first.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from services.common.artifacts import MANIFEST, Artifact, ArtifactStore, open_artifact
from services.heads.fingerprint import ModelFingerprint
from services.rollout.heads_file import HEADS_FILE, read_heads, save_heads
from specroll_core.heads import FutureTokenHeads, check_state

# What a manifest of this layout is; a larger number was written by a later release.
FORMAT = 1
# Which hidden state the heads read: what the LM head reads itself.
READS = "last layer, after the final norm"


class HeadsError(ValueError):
    """Heads that cannot be used; one sentence with the reason."""


@dataclass(frozen=True, slots=True)
class TrainedOn:
    """rows: positions that were trained on. prompts: distinct ones, held-out ones not counted. temperature: of the
    rollouts, None for given texts. policy_versions: oldest and newest version that the rollouts came from, None for
    the model as it was given. source: the data's name."""

    rows: int
    prompts: int
    source: str
    temperature: float | None = None
    policy_versions: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class HeadsManifest:
    """What the manifest holds beside the files' hashes.

    parent: the version that training started from, None for untrained heads. gate: what was measured on held-out
    prompts before publication, JSON values.
    """

    model: ModelFingerprint
    trained_on: TrainedOn
    parent: int | None = None
    gate: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HeadsArtifact:
    """Loaded heads, float32 on the CPU, with their manifest and where they lie."""

    artifact: Artifact
    heads: FutureTokenHeads
    manifest: HeadsManifest


def publish_heads(store: ArtifactStore, version: int, heads: FutureTokenHeads, manifest: HeadsManifest) -> Artifact:
    """Writes a version into a store, whole or not at all. Raises HeadsError where the heads are not of this model."""
    spec, model = heads.spec, manifest.model
    if (spec.hidden, spec.vocab) != (model.hidden, model.vocab):
        raise HeadsError(
            f"Heads for a hidden size of {spec.hidden} and a vocabulary of {spec.vocab} are not of a model with "
            f"{model.hidden} and {model.vocab}."
        )
    try:
        check_state(spec, heads.state_dict())
    except ValueError as error:
        raise HeadsError(f"Heads that were to be published cannot be served: {error}") from error
    return store.publish(
        version,
        lambda directory: save_heads(heads, directory / HEADS_FILE),
        heads_format=FORMAT,
        parent=manifest.parent,
        architecture=spec.architecture,
        offsets=list(spec.offsets),
        rank=spec.rank,
        reads=READS,
        hidden_size=model.hidden,
        vocabulary_size=model.vocab,
        base_config_sha256=model.config_sha256,
        lm_head_sha256=model.lm_head_sha256,
        trained_on=asdict(manifest.trained_on),
        gate=dict(manifest.gate),
    )


def write_heads(target: Path, heads: FutureTokenHeads, manifest: HeadsManifest) -> Artifact:
    """Makes `target` the directory of version 1, in one rename. Raises HeadsError where something is there already."""
    check_target(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        made = publish_heads(ArtifactStore(scratch), 1, heads, manifest)
        os.rename(made.path, target)  # replaces an empty directory
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return open_artifact(target)


def check_target(target: Path) -> None:
    """Raises HeadsError unless heads can be written to `target`: it is absent or empty, and a directory can be made."""
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise HeadsError(f"{target} exists already; name a new directory, or remove it.")
        parent = next(p for p in target.absolute().parents if p.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise HeadsError(f"{target} cannot be made, because {parent} is not a directory that can be written to.")
    except OSError as error:
        raise HeadsError(f"{target} cannot be made: {error.strerror}.") from error


def load_artifact(
    path: Path, model: ModelFingerprint | None = None, *, lm_head_may_differ: bool = False
) -> HeadsArtifact:
    """The heads in an artifact's directory, or the latest in a store of them, all of it verified.

    model: what they are to be used with. lm_head_may_differ: for a policy that training has moved on from the one that
    the heads were trained with. Raises HeadsError or ArtifactError with one sentence; both are ValueErrors.
    """
    artifact = open_artifact(artifact_directory(path))
    fields, manifest = artifact.fields, read_manifest(artifact)
    if model is not None:
        _check_fit(artifact, manifest.model, model, lm_head_may_differ)
    artifact.verify()
    try:
        heads = read_heads(artifact.path / HEADS_FILE)
    except ValueError as error:
        raise HeadsError(str(error)) from error
    spec = heads.spec
    told = (fields["architecture"], fields["offsets"], fields["rank"], manifest.model.hidden, manifest.model.vocab)
    if told != (spec.architecture, list(spec.offsets), spec.rank, spec.hidden, spec.vocab):
        raise HeadsError(f"{artifact.path / MANIFEST} describes other heads than the {HEADS_FILE} beside it.")
    return HeadsArtifact(artifact, heads, manifest)


def artifact_directory(path: Path) -> Path:
    """`path` itself, or what `latest` names in a store."""
    latest = path / "latest"
    return latest.resolve() if not (path / MANIFEST).exists() and latest.exists() else path


def read_manifest(artifact: Artifact) -> HeadsManifest:
    """What an artifact says of the heads in it, its files not looked at. Raises HeadsError where it says it of
    something else, or not in this release's words."""
    fields, where = artifact.fields, artifact.path / MANIFEST
    if (written_as := fields.get("heads_format")) != FORMAT:
        newer = isinstance(written_as, int) and written_as > FORMAT
        why = f"was written by a later release, as format {written_as}" if newer else "is not a manifest of heads"
        raise HeadsError(f"{where} {why}; this release reads format {FORMAT}.")
    if HEADS_FILE not in artifact.files:
        raise HeadsError(f"{where} lists no {HEADS_FILE}.")
    try:
        if fields["reads"] != READS:
            raise HeadsError(
                f"{where} is of heads that read another hidden state ({fields['reads']}), not the {READS}."
            )
        model = ModelFingerprint(
            fields["hidden_size"], fields["vocabulary_size"], fields["base_config_sha256"], fields["lm_head_sha256"]
        )
        trained_on = dict(fields["trained_on"])
        if trained_on.get("policy_versions") is not None:
            oldest, newest = trained_on["policy_versions"]
            trained_on["policy_versions"] = oldest, newest
        if not isinstance(trained_on.get("temperature"), int | float | None):
            raise TypeError("trained_on.temperature must be a number")
        if not isinstance(fields["gate"], dict):
            raise TypeError("gate must be an object")
        missing = {"architecture", "offsets", "rank"} - fields.keys()
        if missing:
            raise KeyError(min(missing))
        return HeadsManifest(model, TrainedOn(**trained_on), fields["parent"], fields["gate"])
    except HeadsError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise HeadsError(f"{where} lacks what a manifest of heads must hold: {error}.") from error


def _check_fit(artifact: Artifact, theirs: ModelFingerprint, ours: ModelFingerprint, lm_head_may_differ: bool) -> None:
    def refuse(what: str) -> HeadsError:
        return HeadsError(f"The heads in {artifact.path} {what}; train heads for this model.")

    if theirs.hidden != ours.hidden:
        raise refuse(f"fit a hidden size of {theirs.hidden}, but the model has {ours.hidden}")
    if theirs.vocab != ours.vocab:
        raise refuse(f"fit a vocabulary of {theirs.vocab}, but the model has {ours.vocab}")
    if theirs.config_sha256 != ours.config_sha256:
        raise refuse("were trained with a model of another configuration")
    if theirs.lm_head_sha256 != ours.lm_head_sha256 and not lm_head_may_differ:
        raise refuse("were trained with another LM head than the model's")

"""The versions of a run's heads: which one workers should serve, where each came from, which are not to be used again.

Versions lie in an `ArtifactStore`; numbers are never used twice. `latest` names the version to serve and moves in one
rename, also back. What the store cannot say is in `registry.json`, written whole: versions blocked and why, and the
highest number so far. A kill between any two steps leaves the old version or the new one in service, never neither.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from services.common.artifacts import Artifact, ArtifactError, ArtifactStore
from services.common.lifecycle import write_json
from services.heads.artifact import HeadsManifest, load_artifact, publish_heads, read_manifest
from specroll_core.heads import FutureTokenHeads

log = logging.getLogger(__name__)

FILE = "registry.json"


@dataclass(slots=True)
class _Notes:
    highest: int = 0
    blocked: dict[int, str] = field(default_factory=dict)


class HeadsRegistry:
    """One process writes; any number read. keep: versions that stay beside the one that serves and its parent."""

    def __init__(self, root: Path, *, keep: int = 5) -> None:
        self.store = ArtifactStore(root)
        self._keep = keep
        self._path = root / FILE
        self._notes = self._read()

    @property
    def blocked(self) -> dict[int, str]:
        """Versions that are never offered again, and why."""
        return dict(self._notes.blocked)

    def current(self) -> Artifact | None:
        """The version to serve, None while there is none.

        Where `latest` names a broken or blocked version or nothing at all, as after the death of a writer between two
        of its steps, it is moved to the newest sound one.
        """
        artifact = self._named()
        if artifact is None and (artifact := self._newest()) is not None:
            self.store.point_latest(artifact.version)
        return artifact

    def peek(self) -> Artifact | None:
        """What `current` would give, with nothing moved: for whoever only looks."""
        return self._named() or self._newest()

    def publish(self, heads: FutureTokenHeads, manifest: HeadsManifest) -> Artifact:
        """Makes the next version the one to serve. Raises HeadsError where the heads cannot be served."""
        version = max([self._notes.highest, *self.store.versions()]) + 1
        # The number is taken before it is used: a version that was begun and lost is not taken for another one.
        self._notes.highest = version
        self._write()
        artifact = publish_heads(self.store, version, heads, manifest)
        protected = {version} if manifest.parent is None else {version, manifest.parent}
        self.store.prune(self._keep, protected)
        return artifact

    def roll_back(self, version: int, reason: str) -> Artifact | None:
        """Blocks a version; the newest sound one before it serves again. None where there is none."""
        self._notes.blocked[version] = reason
        self._write()
        usable = self._usable(below=version)
        if not usable:
            return None
        self.store.point_latest(usable[-1])
        return self.store.open(usable[-1])

    def lineage(self) -> list[dict[str, Any]]:
        """Every version on disk, oldest first: version, parent, rows, policy versions, gate report, blocked."""
        out = []
        for version in self.store.versions():
            try:
                manifest = read_manifest(self.store.open(version))
            except ValueError as error:
                out.append({"version": version, "broken": str(error)})
                continue
            out.append({
                "version": version,
                "parent": manifest.parent,
                "trained_on": asdict(manifest.trained_on),
                "gate": dict(manifest.gate),
                "blocked": self._notes.blocked.get(version),
            })  # fmt: skip
        return out

    def _named(self) -> Artifact | None:
        """The version that `latest` names, None where there is none or it is not to be served."""
        try:
            artifact = self.store.latest()
            if artifact is not None and artifact.version not in self._notes.blocked:
                artifact.verify()
                return artifact
        except ArtifactError as error:
            log.error("the heads that `latest` names cannot be used: %s", error)
        return None

    def _newest(self) -> Artifact | None:
        """The newest sound version."""
        usable = self._usable(below=None)
        return self.store.open(usable[-1]) if usable else None

    def _usable(self, below: int | None) -> list[int]:
        found = []
        for version in self.store.versions():
            if version in self._notes.blocked or (below is not None and version >= below):
                continue
            try:
                load_artifact(self.store.open(version).path)
            except ValueError:
                continue
            found.append(version)
        return found

    def _read(self) -> _Notes:
        try:
            value = json.loads(self._path.read_text())
        except FileNotFoundError:
            return _Notes()
        except (OSError, ValueError) as error:
            raise ValueError(f"{self._path} cannot be read: {error}") from error
        try:
            notes = _Notes(value["highest"], {int(v): reason for v, reason in value["blocked"].items()})
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{self._path} does not say which versions of heads there are: {error!r}.") from error
        if type(notes.highest) is not int or not all(isinstance(reason, str) for reason in notes.blocked.values()):
            raise ValueError(f"{self._path} must hold a highest version and a reason for each that is blocked.")
        return notes

    def _write(self) -> None:
        write_json(
            self._path, {"highest": self._notes.highest, "blocked": {str(v): r for v, r in self._notes.blocked.items()}}
        )

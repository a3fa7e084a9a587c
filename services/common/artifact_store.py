"""Versions of the policy and of the heads on disk: written whole or not at all, named by their content.

A version is a directory `v00000012` of plain files and a `manifest.json` that holds their sizes and SHA-256. It is
made under another name and renamed, the manifest last, so that whoever sees the directory sees all of it. The digest
of a version is the SHA-256 of its manifest. `latest` is a symbolic link, moved by a rename.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.common.lifecycle import fsync_directory, process_is_alive, write_bytes

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
LATEST = "latest"
# A manifest lists files; a larger one is no manifest.
MAX_MANIFEST_BYTES = 4 * 2**20
_READ_BYTES = 2**20
_FORMAT = 1
_VERSION = re.compile(r"v(\d{8,})")
_TEMPORARY = re.compile(r"\.tmp-v\d{8,}@(?P<host>.+)@(?P<pid>\d+)@[0-9a-f]+")
# Of a process on another machine, which cannot be asked whether it lives: no publication takes this long.
_STALE_SECONDS = 24 * 3600.0


class ArtifactError(ValueError):
    """An artifact that is missing, incomplete or not what it says; one sentence with the reason."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of an artifact. size: bytes. sha256: in hexadecimal."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Artifact:
    """One complete version. fields: what the publisher wrote into the manifest beside version and files."""

    version: int
    path: Path
    digest: str
    files: Mapping[str, FileEntry] = field(repr=False)
    fields: Mapping[str, Any]

    @property
    def size(self) -> int:
        """Bytes of all files, the manifest not counted."""
        return sum(entry.size for entry in self.files.values())

    def verify(self) -> None:
        """Reads all files and compares sizes and hashes. Raises ArtifactError naming the first that differs."""
        for name, entry in self.files.items():
            check_size(self.path / name, entry)
            found = sha256_of(self.path / name)
            if found != entry.sha256:
                raise ArtifactError(f"{self.path / name} has SHA-256 {found}, its manifest says {entry.sha256}.")


class ArtifactStore:
    """The versions under one directory. One process publishes; any number read.

    fsync: whether a version must survive a power cut. A kill of the process never leaves half a version either way.
    """

    def __init__(self, root: Path, *, fsync: bool = True) -> None:
        self.root = root
        self._fsync = fsync
        root.mkdir(parents=True, exist_ok=True)

    def publish(self, version: int, write: Callable[[Path], None], **fields: Any) -> Artifact:
        """Makes a version of the files that `write` puts into the empty directory that it is given; `latest` then
        names it.

        fields: JSON values for the manifest. Raises ArtifactError where the version exists or `write` leaves
        something else than plain files; whatever `write` raises passes through, and nothing is left behind.
        """
        if (self.root / directory_name(version)).exists():
            raise ArtifactError(f"Version {version} exists in {self.root} already.")
        if reserved := {"format", "version", "files"} & fields.keys():
            raise ValueError(f"The manifest's own fields cannot be set: {', '.join(sorted(reserved))}.")
        temporary = self.new_temporary(version)
        try:
            write(temporary)
            files = {}
            for path in sorted(temporary.iterdir()):
                check_name(path.name)
                if path.is_symlink() or not path.is_file():
                    raise ArtifactError(f"Version {version} may hold plain files only, {path.name!r} is none.")
                files[path.name] = FileEntry(path.stat().st_size, sha256_of(path))
            manifest = {
                **fields,
                "format": _FORMAT,
                "version": version,
                "files": {name: {"size": e.size, "sha256": e.sha256} for name, e in files.items()},
            }
            text = json.dumps(manifest, indent=2, sort_keys=True, allow_nan=False) + "\n"
            return self.commit(temporary, version, text.encode())
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def open(self, version: int) -> Artifact:
        """A version as its manifest describes it; sizes are compared, hashes are for `verify`. Raises ArtifactError."""
        return open_artifact(self.root / directory_name(version))

    def latest(self) -> Artifact | None:
        """The version published or received last, None where there is none yet.

        Raises ArtifactError where it is broken.
        """
        try:
            target = os.readlink(self.root / LATEST)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ArtifactError(f"{self.root / LATEST} is not a symbolic link: {error.strerror}.") from error
        return open_artifact(self.root / target)

    def versions(self) -> list[int]:
        """All complete versions, in ascending order."""
        found = (_VERSION.fullmatch(path.name) for path in self.root.iterdir() if (path / MANIFEST).is_file())
        return sorted(int(match[1]) for match in found if match)

    def prune(self, keep: int, protected: Collection[int] = ()) -> list[int]:
        """Deletes all but the newest `keep` versions, those in `protected` and the latest; returns what was deleted."""
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}.")
        newest = set(self.versions()[-keep:])
        kept = newest | set(protected)
        return self.discard(lambda version: version not in kept and not self._is_latest(version))

    def discard(self, unwanted: Callable[[int], bool]) -> list[int]:
        """Deletes the versions of which `unwanted` is true; `latest` falls back to the newest that is left."""
        gone = [version for version in self.versions() if unwanted(version)]
        left = [version for version in self.versions() if version not in gone]
        if any(self._is_latest(version) for version in gone):
            if left:
                self._point_latest(left[-1])
            else:
                (self.root / LATEST).unlink(missing_ok=True)
        for version in gone:
            # Renamed first: a reader that opens it now finds nothing instead of half of it.
            doomed = self.new_temporary(version)
            os.replace(self.root / directory_name(version), doomed)
            shutil.rmtree(doomed, ignore_errors=True)
        return gone

    def point_latest(self, version: int) -> None:
        """Makes `latest` name a version that exists, in one rename. Raises ArtifactError where it does not."""
        self.open(version)
        self._point_latest(version)

    def new_temporary(self, version: int) -> Path:
        """An empty directory to fill and `commit`. Sweeps what killed processes have left on the way."""
        self.sweep()
        name = f".tmp-{directory_name(version)}@{socket.gethostname()}@{os.getpid()}@{uuid.uuid4().hex[:8]}"
        (self.root / name).mkdir()
        return self.root / name

    def commit(self, temporary: Path, version: int, manifest: bytes, *, replace: bool = False) -> Artifact:
        """Turns a filled directory into a version: files durable, manifest, rename, `latest`.

        replace: an existing version of this number makes way. Raises ArtifactError.
        """
        if self._fsync:
            for path in temporary.iterdir():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        write_bytes(temporary / MANIFEST, manifest, fsync=self._fsync)
        target = self.root / directory_name(version)
        if replace and target.exists():
            doomed = self.new_temporary(version)
            os.replace(target, doomed)
            shutil.rmtree(doomed, ignore_errors=True)
        try:
            os.rename(temporary, target)
        except OSError as error:
            raise ArtifactError(f"Version {version} cannot be put into {self.root}: {error.strerror}.") from error
        self._point_latest(version)
        return open_artifact(target)

    def sweep(self) -> None:
        """Deletes temporary directories whose process is gone."""
        for path in self.root.iterdir():
            match = _TEMPORARY.fullmatch(path.name)
            if match is None:
                continue
            if match["host"] == socket.gethostname():
                abandoned = not process_is_alive(int(match["pid"]))
            else:
                abandoned = time.time() - path.stat().st_mtime > _STALE_SECONDS
            if abandoned:
                logger.info("Deleting %s, left by a process that ended before it was complete.", path.name)
                shutil.rmtree(path, ignore_errors=True)

    def _is_latest(self, version: int) -> bool:
        link = self.root / LATEST
        return link.is_symlink() and os.readlink(link) == directory_name(version)

    def _point_latest(self, version: int) -> None:
        temporary = self.root / f".latest-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        temporary.symlink_to(directory_name(version))
        os.replace(temporary, self.root / LATEST)
        if self._fsync:
            fsync_directory(self.root)


def open_artifact(path: Path) -> Artifact:
    """The version in a directory, its files' sizes compared with the manifest. Raises ArtifactError."""
    path = path.absolute()
    try:
        with (path / MANIFEST).open("rb") as file:
            raw = file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise ArtifactError(f"{path} holds no readable {MANIFEST}: {error.strerror}.") from error
    version, files, fields = parse_manifest(raw, str(path / MANIFEST))
    if (match := _VERSION.fullmatch(path.name)) and int(match[1]) != version:
        raise ArtifactError(f"{path} holds the manifest of version {version}.")
    for name, entry in files.items():
        check_size(path / name, entry)
    return Artifact(version, path, hashlib.sha256(raw).hexdigest(), files, fields)


def parse_manifest(raw: bytes, where: str) -> tuple[int, dict[str, FileEntry], dict[str, Any]]:
    """Version, files and the publisher's fields. where: for the message. Raises ArtifactError."""
    if len(raw) > MAX_MANIFEST_BYTES:
        raise ArtifactError(f"{where} is larger than {MAX_MANIFEST_BYTES} bytes.")
    try:
        content = json.loads(raw)
        version, listed, written_as = content.pop("version"), content.pop("files"), content.pop("format")
        files = {str(name): FileEntry(entry["size"], entry["sha256"]) for name, entry in listed.items()}
        types_hold = type(version) is int and all(
            type(e.size) is int and e.size >= 0 and isinstance(e.sha256, str) for e in files.values()
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{where} is not a manifest: {error!r}.") from error
    if written_as != _FORMAT or not types_hold or version < 0:
        raise ArtifactError(f"{where} is not a manifest of format {_FORMAT}.")
    for name in files:
        check_name(name)
    return version, files, content


def directory_name(version: int) -> str:
    """`v` and at least eight digits. Raises ValueError for a negative version."""
    if version < 0:
        raise ValueError(f"A version must be 0 or more, not {version}.")
    return f"v{version:08d}"


def check_name(name: str) -> None:
    """Raises ArtifactError unless `name` is a plain file name: nothing that leads out of its directory, no manifest."""
    if name in ("", ".", "..", MANIFEST) or "/" in name or "\\" in name or "\0" in name:
        raise ArtifactError(f"{name!r} is not allowed as the name of an artifact's file.")


def check_size(path: Path, entry: FileEntry) -> None:
    """Raises ArtifactError where the file is missing, no plain file, or of another size."""
    try:
        size = path.stat(follow_symlinks=False).st_size
        plain = path.is_file() and not path.is_symlink()
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}.") from error
    if not plain:
        raise ArtifactError(f"{path} is not a plain file.")
    if size != entry.size:
        raise ArtifactError(f"{path} has {size} bytes, its manifest says {entry.size}.")


def sha256_of(path: Path) -> str:
    """SHA-256 of a file in hexadecimal, read in pieces; hashing runs outside Python's lock."""
    digest, buffer = hashlib.sha256(), bytearray(_READ_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()

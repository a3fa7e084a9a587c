from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from services.common.artifacts import (
    MANIFEST,
    ArtifactError,
    ArtifactStore,
    Reception,
    iter_chunks,
    open_artifact,
    receive,
)
from specroll.v1 import artifact_pb2

CONTENT = {"a.bin": bytes(range(256)) * 40, "config.json": b"{}", "empty": b""}


def write(directory):
    for name, data in CONTENT.items():
        (directory / name).write_bytes(data)


def ref_of(artifact):
    return artifact_pb2.ArtifactRef(version=artifact.version, path=str(artifact.path), digest=artifact.digest)


@pytest.fixture
def store(tmp_path):
    return ArtifactStore(tmp_path / "store", fsync=False)


def test_a_published_version_is_complete_and_named_by_its_content(tmp_path):
    store = ArtifactStore(tmp_path / "store")
    artifact = store.publish(12, write, step=7)
    assert artifact.path == tmp_path / "store" / "v00000012"
    assert artifact.fields == {"step": 7}
    assert {name: (e.size, e.sha256) for name, e in artifact.files.items()} == {
        name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in CONTENT.items()
    }
    assert artifact.digest == hashlib.sha256((artifact.path / MANIFEST).read_bytes()).hexdigest()
    assert artifact.size == sum(map(len, CONTENT.values()))
    artifact.verify()
    assert store.open(12) == store.latest() == open_artifact(artifact.path) == artifact


def test_latest_follows_the_publications_and_may_be_absent(store):
    assert store.latest() is None
    store.publish(1, write)
    store.publish(2, write)
    assert store.latest().version == 2
    assert store.versions() == [1, 2]
    assert (store.root / "latest" / "config.json").read_bytes() == b"{}"
    with pytest.raises(ArtifactError, match="exists .* already"):
        store.publish(2, write)
    with pytest.raises(ValueError, match="own fields"):
        store.publish(3, write, files=())


def test_a_failed_publication_leaves_nothing(store):
    def fail(directory):
        write(directory)
        raise RuntimeError("disk on fire")

    with pytest.raises(RuntimeError, match="on fire"):
        store.publish(1, fail)
    assert list(store.root.iterdir()) == []


@pytest.mark.parametrize("kind", ["directory", "link"])
def test_only_plain_files_are_published(store, kind):
    def odd(directory):
        if kind == "directory":
            (directory / "sub").mkdir()
        else:
            (directory / "link").symlink_to("/etc/passwd")

    with pytest.raises(ArtifactError, match="plain files only"):
        store.publish(1, odd)


def test_damage_is_found_and_named(store):
    artifact = store.publish(1, write)
    path = artifact.path / "a.bin"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + b"!")
    store.open(1)  # the size is right
    with pytest.raises(ArtifactError, match=r"a\.bin has SHA-256"):
        artifact.verify()
    path.write_bytes(data[:-1])
    with pytest.raises(ArtifactError, match=f"a.bin has {len(data) - 1} bytes, its manifest says {len(data)}"):
        store.open(1)
    path.unlink()
    with pytest.raises(ArtifactError, match=r"a\.bin cannot be read: No such file"):
        store.open(1)
    path.symlink_to("/etc/passwd")
    with pytest.raises(ArtifactError, match="not a plain file"):
        store.open(1)
    with pytest.raises(ArtifactError, match="holds no readable manifest"):
        store.open(2)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(version=2),
        lambda m: m.update(format=9),
        lambda m: m.pop("files"),
        lambda m: m["files"].update({"../evil": {"size": 0, "sha256": ""}}),
        lambda m: m["files"].update({"x": {"size": -1, "sha256": ""}}),
        lambda m: m["files"].update({"x": {"size": "1", "sha256": ""}}),
        lambda m: m.update(files=[1]),
    ],
)
def test_a_malformed_manifest_is_refused(store, change):
    path = store.publish(1, write).path / MANIFEST
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError):
        store.open(1)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '"x"'])
def test_a_manifest_that_is_none_is_refused(store, text):
    path = store.publish(1, write).path / MANIFEST
    path.write_text(text)
    with pytest.raises(ArtifactError, match="manifest"):
        store.open(1)


def test_pruning_keeps_the_newest_the_protected_and_the_latest(store):
    for version in range(6):
        store.publish(version, write)
    assert store.prune(keep=2, protected=[1]) == [0, 2, 3]
    assert store.versions() == [1, 4, 5]
    assert store.discard(lambda version: version >= 5) == [5]
    assert store.latest().version == 4
    assert store.discard(lambda version: version >= 0) == [1, 4]
    assert store.latest() is None
    assert list(store.root.iterdir()) == []


def test_a_publication_killed_in_the_middle_is_invisible_and_swept_away(tmp_path):
    """kill -9 while files are being written: readers see the old version, the next publication cleans up."""
    store = ArtifactStore(tmp_path / "store")
    store.publish(1, write)
    script = """
        import sys, threading
        from pathlib import Path
        from services.common.artifacts import ArtifactStore
        def hang(directory):
            (directory / "half").write_bytes(bytes(1000))
            print("writing", flush=True)
            threading.Event().wait(60)
        ArtifactStore(Path(sys.argv[1])).publish(2, hang)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(store.root)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "writing\n"
        store.sweep()
        leftovers = [p for p in store.root.iterdir() if p.name.startswith(".tmp")]
        assert len(leftovers) == 1, "what a living process writes is left alone"
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert store.versions() == [1]
    assert store.latest().version == 1
    assert store.publish(2, write).version == 2
    assert not [p for p in store.root.iterdir() if p.name.startswith(".tmp")]


@pytest.mark.parametrize("chunk_bytes", [1000, 2**20])
def test_a_version_travels_in_chunks(store, tmp_path, chunk_bytes):
    artifact = store.publish(3, write, step=1)
    chunks = list(iter_chunks(artifact, chunk_bytes))
    assert max(len(chunk.data) for chunk in chunks) <= chunk_bytes
    there = ArtifactStore(tmp_path / "there")
    received = receive(there, ref_of(artifact), iter(chunks))
    received.verify()
    assert (received.digest, received.fields) == (artifact.digest, {"step": 1})
    assert {p.name: p.read_bytes() for p in received.path.iterdir() if p.name != MANIFEST} == CONTENT
    assert there.latest() == received


def test_a_received_version_replaces_one_of_the_same_number(store, tmp_path):
    there = ArtifactStore(tmp_path / "there")
    there.publish(3, lambda d: (d / "old").write_bytes(b"x"))
    artifact = store.publish(3, write)
    assert receive(there, ref_of(artifact), iter_chunks(artifact)).digest == there.open(3).digest == artifact.digest


def _evil(chunks, name):
    manifest = json.loads(chunks[0].data)
    manifest["files"][name] = {"size": 1, "sha256": hashlib.sha256(b"x").hexdigest()}
    data = json.dumps(manifest).encode()
    first = artifact_pb2.ArtifactChunk(file=MANIFEST, file_size=len(data), data=data)
    return [first, artifact_pb2.ArtifactChunk(file=name, file_size=1, data=b"x"), *chunks[1:]]


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "..", "a/b", "a\\b", "", "nul\0", MANIFEST])  # noqa: S108
def test_a_name_that_leads_out_of_the_directory_is_refused(store, tmp_path, name):
    artifact = store.publish(1, write)
    chunks = _evil(list(iter_chunks(artifact)), name)
    ref = artifact_pb2.ArtifactRef(version=1, digest=hashlib.sha256(chunks[0].data).hexdigest())
    there = ArtifactStore(tmp_path / "deep" / "there")
    with pytest.raises(ArtifactError, match="not allowed"):
        receive(there, ref, chunks)
    assert list(there.root.iterdir()) == []
    assert sorted(p.name for p in tmp_path.rglob("*evil*")) == []


def _drop(chunks, index):
    return chunks[:index] + chunks[index + 1 :]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c: c[:-1], "did not arrive whole: empty"),
        (lambda c: c[:0], "its manifest did not arrive"),
        (lambda c: _drop(c, 0), "the manifest was due"),
        (lambda c: _drop(c, 2), "came where offset"),
        (lambda c: [*c, c[1]], "not in its manifest, or came twice"),
        (lambda c: [c[0], c[1], c[-1]], "began before"),
        (lambda c: [*c, artifact_pb2.ArtifactChunk(file="more", file_size=1, data=b"x")], "not in its manifest"),
    ],
)
def test_parts_that_are_missing_or_out_of_order_are_refused(store, tmp_path, damage, message):
    artifact = store.publish(1, write)
    chunks = damage(list(iter_chunks(artifact, 4096)))
    there = ArtifactStore(tmp_path / "there")
    with pytest.raises(ArtifactError, match=message):
        receive(there, ref_of(artifact), chunks)
    assert list(there.root.iterdir()) == []


def test_other_content_than_announced_is_refused(store, tmp_path):
    artifact = store.publish(1, write)
    there = ArtifactStore(tmp_path / "there")
    chunks = list(iter_chunks(artifact))
    with pytest.raises(ArtifactError, match="its digest is"):
        receive(there, artifact_pb2.ArtifactRef(version=1, digest="0" * 64), chunks)
    with pytest.raises(ArtifactError, match="its manifest is of version 1"):
        receive(there, artifact_pb2.ArtifactRef(version=2, digest=artifact.digest), chunks)
    flipped = [*chunks]
    flipped[1] = artifact_pb2.ArtifactChunk()
    flipped[1].CopyFrom(chunks[1])
    flipped[1].data = b"!" + chunks[1].data[1:]
    with pytest.raises(ArtifactError, match=r"'a\.bin' has SHA-256"):
        receive(there, ref_of(artifact), flipped)
    assert list(there.root.iterdir()) == []


def test_a_stream_that_breaks_leaves_the_old_version_in_place(store, tmp_path):
    artifact = store.publish(1, write)
    there = ArtifactStore(tmp_path / "there")
    old = there.publish(1, lambda d: (d / "old").write_bytes(b"x"))

    def broken():
        yield from list(iter_chunks(artifact, 4096))[:3]
        raise ConnectionError("cut")

    with pytest.raises(ConnectionError):
        receive(there, ref_of(artifact), broken())
    assert there.open(1).digest == old.digest
    assert sorted(p.name for p in there.root.iterdir()) == ["latest", "v00000001"]


def test_an_aborted_reception_is_gone(store, tmp_path):
    artifact = store.publish(1, write)
    there = ArtifactStore(tmp_path / "there")
    reception = Reception(there, ref_of(artifact))
    for chunk in list(iter_chunks(artifact, 4096))[:3]:
        reception.add(chunk)
    reception.abort()
    reception.abort()
    assert os.listdir(there.root) == []

"""SwapHeads, DisturbHeads and GetStatus as their callers see them; the engine is a stand-in."""

from __future__ import annotations

from types import SimpleNamespace

import grpc
import pytest
import torch

from services.common import grpc_setup
from services.common.artifact_transfer import iter_chunks
from services.common.artifacts import ArtifactStore
from services.config import SecurityConfig
from services.heads.artifact import HeadsManifest, TrainedOn, publish_heads
from services.heads.fingerprint import ModelFingerprint
from services.rollout.heads_file import HEADS_FILE
from specroll.v1 import artifact_pb2, rollout_pb2, rollout_pb2_grpc
from specroll_core.heads import FutureTokenHeads, HeadsSpec
from tests.services.watcher.test_watcher import Worker

SECURITY = SecurityConfig()
PREPARE, COMMIT = rollout_pb2.SwapPhase.SWAP_PHASE_PREPARE, rollout_pb2.SwapPhase.SWAP_PHASE_COMMIT


@pytest.fixture
def store(tmp_path):
    store = ArtifactStore(tmp_path / "store")
    torch.manual_seed(0)
    heads = FutureTokenHeads(HeadsSpec(2, 8, 4, 32))
    manifest = HeadsManifest(ModelFingerprint(8, 32, "c" * 64, "l" * 64), TrainedOn(1, 1, "test"))
    for version in (1, 2):
        publish_heads(store, version, heads, manifest)
    return store


@pytest.fixture
def worker(tmp_path):
    worker = Worker("w", SimpleNamespace(announce=lambda *_: None), tmp_path / "cache")
    yield worker
    worker.stop()


@pytest.fixture
def stub(worker):
    with grpc_setup.channel(f"127.0.0.1:{worker.port}", security=SECURITY) as channel:
        yield rollout_pb2_grpc.RolloutServiceStub(channel)


def ref(artifact, *, path=True, digest=None):
    return artifact_pb2.ArtifactRef(
        version=artifact.version, path=str(artifact.path) if path else "", digest=digest or artifact.digest
    )


def swap(stub, heads, phase=0, chunks=()):
    header = rollout_pb2.SwapHeadsRequest(header=rollout_pb2.SwapHeadsHeader(heads=heads, phase=phase))
    messages = [header, *(rollout_pb2.SwapHeadsRequest(chunk=chunk) for chunk in chunks)]
    return stub.SwapHeads(iter(messages), timeout=30)


def code_of(call):
    with pytest.raises(grpc.RpcError) as failed:
        call()
    return failed.value.code(), failed.value.details()


def status(stub, **fields):
    return stub.GetStatus(rollout_pb2.RolloutStatusRequest(**fields), timeout=10)


def test_one_call_does_both_phases(stub, store):
    artifact = store.open(1)
    answer = swap(stub, ref(artifact))
    assert answer.heads_version == 1
    now = status(stub)
    assert (now.heads_version, now.heads_digest) == (1, artifact.digest)
    assert now.heads_checksum == answer.heads_checksum
    assert not now.policy_checksum
    assert status(stub, checksums=True).policy_checksum == "policy"


def test_a_preparation_changes_nothing_until_it_is_committed(stub, store):
    swap(stub, ref(store.open(1)))
    answer = swap(stub, ref(store.open(2)), PREPARE)
    assert (answer.heads_version, answer.commit_seconds) == (1, 0.0)
    assert swap(stub, ref(store.open(2)), COMMIT).heads_version == 2
    code, _ = code_of(lambda: swap(stub, ref(store.open(2)), COMMIT))
    assert code is grpc.StatusCode.FAILED_PRECONDITION


def test_files_may_come_with_the_call(stub, store):
    artifact = store.open(1)
    assert swap(stub, ref(artifact, path=False), 0, iter_chunks(artifact)).heads_version == 1
    some = list(iter_chunks(store.open(2)))[:-1]
    code, details = code_of(lambda: swap(stub, ref(store.open(2), path=False), 0, some))
    assert code is grpc.StatusCode.DATA_LOSS
    assert "did not arrive" in details
    assert status(stub).heads_version == 1


def test_what_cannot_be_served_is_refused_with_the_reason(stub, store, worker):
    swap(stub, ref(store.open(1)))
    good = store.open(2)
    file = good.path / HEADS_FILE
    file.write_bytes(file.read_bytes()[:-10])
    code, details = code_of(lambda: swap(stub, ref(good)))
    assert code is grpc.StatusCode.DATA_LOSS
    assert "bytes, its manifest says" in details
    code, details = code_of(lambda: swap(stub, ref(store.open(1), digest="0" * 64)))
    assert code is grpc.StatusCode.DATA_LOSS
    assert "was announced" in details
    missing = artifact_pb2.ArtifactRef(version=3, path="/nowhere/at/all", digest="d")
    assert code_of(lambda: swap(stub, missing))[0] is grpc.StatusCode.FAILED_PRECONDITION
    assert code_of(lambda: swap(stub, artifact_pb2.ArtifactRef(version=3)))[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert status(stub).heads_version == 1
    assert worker.control.refused["artifact"] == 2


def test_harm_is_done_on_purpose_only(stub):
    code, details = code_of(lambda: stub.DisturbHeads(rollout_pb2.DisturbHeadsRequest(deviation=1.0), timeout=10))
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert "rollout.chaos" in details

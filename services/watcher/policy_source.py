"""Where the watcher reads the current policy: the run directory where it is shared, else from the learner."""

from __future__ import annotations

import logging
from pathlib import Path

import grpc

from services.common import grpc_setup
from services.common.artifacts import Artifact, ArtifactError, ArtifactStore, open_artifact
from services.config import Config
from services.rollout.policy_store import PolicyStore
from services.run_dir import RunDir
from specroll.v1 import learner_pb2, learner_pb2_grpc

log = logging.getLogger(__name__)

_CALL_SECONDS = 10.0
_FETCH_SECONDS = 600.0


class PolicySource:
    """cache: for policies that come over the wire."""

    def __init__(self, config: Config, cache: Path) -> None:
        self._config = config
        self._local = RunDir(config.run.dir).policies
        self._cache = cache

    def current(self) -> Artifact:
        """The newest policy, as a directory here. Raises ValueError with the reason where there is none to be had."""
        if self._local.is_dir():
            found = ArtifactStore(self._local).latest()
            if found is not None:
                return found
        address = self._config.watcher.learner
        if not address:
            raise ValueError(f"{self._local} holds no policy, and watcher.learner names nobody to ask for one")
        try:
            with grpc_setup.channel(address, security=self._config.security) as channel:
                stub = learner_pb2_grpc.LearnerServiceStub(channel)
                ref = stub.GetStatus(learner_pb2.LearnerStatusRequest(), timeout=_CALL_SECONDS).policy
                store = PolicyStore(self._cache)
                path = store.at_path(ref)
                if path is None:
                    chunks = stub.FetchPolicy(
                        learner_pb2.FetchPolicyRequest(version=ref.version), timeout=_FETCH_SECONDS
                    )
                    path = store.from_chunks(ref, chunks)
                return open_artifact(path)
        except (grpc.RpcError, ArtifactError) as error:
            raise ValueError(f"the policy cannot be had from {address}: {error}") from error

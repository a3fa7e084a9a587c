"""Accuracy of a policy directory on a configuration's held-out prompts, with nothing but `transformers`.

    python bench/checkpoint_accuracy.py examples/quickstart.toml RUN/checkpoints/step_000040/policy

Checks the last line of a run's report from outside: no engine, no learner, plain `generate` in a process of its own.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.config_loader import load_config
from services.learner.evaluation import wilson_interval
from services.learner.prompts import load_prompts
from services.rollout.verifiers import resolve


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("policy", type=Path)
    parser.add_argument("--batch", type=int, default=50, help="prompts sampled at once")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    config = load_config(options.config)
    torch.manual_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.policy, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(options.policy, dtype=getattr(torch, config.model.dtype)).eval()
    prompts = load_prompts(config.data, tokenizer, config.run.seed).holdout[: config.eval.prompts]
    verify = resolve(config.reward.verifier)
    rewards: list[float] = []
    for start in range(0, len(prompts), options.batch):
        part = prompts[start : start + options.batch]
        inputs = tokenizer.pad({"input_ids": [list(p.ids) for p in part]}, return_tensors="pt")
        with torch.no_grad():
            out = model.generate(
                **inputs, do_sample=True, temperature=config.eval.temperature, top_k=0, top_p=1.0,
                max_new_tokens=config.sampling.max_new_tokens,
            )  # fmt: skip
        texts = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        rewards += [float(verify(text, prompt.answer)) for text, prompt in zip(texts, part, strict=True)]
    mean = sum(rewards) / len(rewards)
    low, high = wilson_interval(mean, len(rewards))
    print(json.dumps({"prompts": len(rewards), "reward": mean, "low": low, "high": high}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""A tiny Llama with random weights and a byte-level tokenizer, written as a Hugging Face directory.

Small enough for a test to serve it and to recompute everything it says in plain torch, yet shaped like a real
model: grouped-query attention, tied embeddings, a chat template, special tokens.
"""

from __future__ import annotations

from pathlib import Path

import torch

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID = 2
VOCAB_SIZE = 320
# Spread wide enough that logits differ by about 2 nats: neither flat, nor one token with all the mass.
_LINEAR_STD = 0.2
_EMBEDDING_STD = 0.25

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Writes the model and returns its directory. Another seed is another policy of the same architecture."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=EOS_ID,
        pad_token_id=0,
    )
    generator = torch.Generator().manual_seed(seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.fill_(1.0)
            else:
                std = _EMBEDDING_STD if "embed" in name else _LINEAR_STD
                weight.copy_(torch.randn(weight.shape, generator=generator) * std)
    model.to(dtype).save_pretrained(directory)
    GenerationConfig(bos_token_id=1, eos_token_id=EOS_ID, pad_token_id=0).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


def make_tokenizer():
    """Every byte is a token, as are 61 pairs of frequent letters, so that any text survives and merges happen."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = "etaoinsh"
    merges = [(a, b) for a in letters for b in letters][: VOCAB_SIZE - 256 - len(SPECIAL_TOKENS)]
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL_TOKENS))
    assert core.get_vocab_size() == VOCAB_SIZE
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=SPECIAL_TOKENS[1],
        eos_token=SPECIAL_TOKENS[EOS_ID],
        pad_token=SPECIAL_TOKENS[0],
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer

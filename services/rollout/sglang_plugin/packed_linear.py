"""Products on a CPU with bfloat16 weights that are laid out once for the products that read them.

oneDNN lays a weight matrix out anew in every product. Kept laid out beside the weights themselves, which updates and
checksums go on using, a product of one row takes about half as long. SGLang says whenever weights have been loaded, at
the start and after each policy update: linear layers are laid out then, an LM head, which may be the embedding as well,
when it is next used as one.
"""

from __future__ import annotations

import torch
from torch import Tensor

_PACKED = "specroll_packed"
# Of weights that are kept a second time, in one process.
_MOST_BYTES = 4 << 30
# oneDNN asks for the rows of a typical product.
_TYPICAL_ROWS = 16


def supported() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def lay_out(weight: Tensor) -> Tensor:
    """weight: [out, in] bfloat16. Returns what `product` reads."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _TYPICAL_ROWS)
    return packed


def product(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """x: [..., in] bfloat16. Returns [..., out]."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


class PackedLinear:
    """The hooks around SGLang's `UnquantizedLinearMethod` and around the LM head."""

    def __init__(self) -> None:
        self._bytes = 0

    def pack(self, result, method, layer) -> None:  # noqa: ARG002 (a hook's signature)
        weight = layer.weight
        if weight.dim() != 2 or getattr(layer, "use_intel_amx_backend", False):
            return  # not a matrix, or laid out by SGLang's own kernels
        if self._reserve(layer):
            setattr(layer, _PACKED, lay_out(weight))

    @staticmethod
    def apply(original, method, layer, x: Tensor, bias: Tensor | None = None) -> Tensor:
        packed = getattr(layer, _PACKED, None)
        if packed is None or x.dtype != torch.bfloat16:
            return original(method, layer, x, bias)
        return product(x, packed, bias)

    @staticmethod
    def outdate(result, method, layer) -> None:  # noqa: ARG004
        """After an embedding's weights were loaded: what is kept of them as an LM head is theirs no longer."""
        if getattr(layer, _PACKED, None) is not None:
            setattr(layer, _PACKED, None)

    def head(self, original, processor, hidden: Tensor, lm_head, embedding_bias: Tensor | None = None, **kwargs):
        """Around `LogitsProcessor._compute_lm_head`."""
        plain = (
            type(getattr(lm_head, "quant_method", None)).__name__ == "UnquantizedEmbeddingMethod"
            and not hasattr(lm_head, "set_lora")
            and not getattr(lm_head, "use_intel_amx_backend", False)
            and not processor.use_fp32_lm_head
            and processor.rl_on_policy_target is None
            and hidden.dtype == torch.bfloat16
        )
        packed = getattr(lm_head, _PACKED, None) if plain else None
        if plain and packed is None and self._reserve(lm_head):
            packed = lay_out(lm_head.weight)
            setattr(lm_head, _PACKED, packed)
        if packed is None:
            return original(processor, hidden, lm_head, embedding_bias, **kwargs)
        return product(hidden, packed)

    def _reserve(self, layer) -> bool:
        """Makes room for a layer's weights a second time. Whether they are of the kind, and small enough."""
        if hasattr(layer, _PACKED):
            return True  # as before
        weight = layer.weight
        size = weight.numel() * weight.itemsize
        if weight.dtype != torch.bfloat16 or weight.device.type != "cpu" or self._bytes + size > _MOST_BYTES:
            return False
        self._bytes += size
        return True

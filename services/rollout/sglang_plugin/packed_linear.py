"""Linear layers on a CPU whose bfloat16 weights are laid out once for the products that read them.

oneDNN lays a weight matrix out anew in every product. Kept laid out beside the weights themselves, which updates and
checksums go on using, a product of one row takes about half as long. SGLang calls `pack` whenever weights have been
loaded, at the start and after each policy update.
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


class PackedLinear:
    """The two hooks around SGLang's `UnquantizedLinearMethod`."""

    def __init__(self) -> None:
        self._bytes = 0

    def pack(self, result, method, layer) -> None:  # noqa: ARG002 (a hook's signature)
        weight = layer.weight
        if weight.dim() != 2 or getattr(layer, "use_intel_amx_backend", False):
            return  # not a matrix, or laid out by SGLang's own kernels
        held = getattr(layer, _PACKED, None)
        if held is None:
            size = weight.numel() * weight.itemsize
            if weight.dtype != torch.bfloat16 or weight.device.type != "cpu" or self._bytes + size > _MOST_BYTES:
                return
            self._bytes += size
        setattr(layer, _PACKED, torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _TYPICAL_ROWS))

    @staticmethod
    def apply(original, method, layer, x: Tensor, bias: Tensor | None = None) -> Tensor:
        packed = getattr(layer, _PACKED, None)
        if packed is None or x.dtype != torch.bfloat16:
            return original(method, layer, x, bias)
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")

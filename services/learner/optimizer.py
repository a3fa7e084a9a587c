"""AdamW on float32 master weights, for a model that computes in another dtype.

bfloat16 has 8 bits of mantissa: an update of 1e-5 to a weight of 0.1 would be rounded away. So the weights that AdamW
updates are float32, and each backward pass's gradients are added up in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter


@dataclass(frozen=True, slots=True)
class StepReport:
    """grad_norm: of the whole gradient before clipping. applied: False where it was not finite and nothing changed."""

    grad_norm: float
    applied: bool


class MasterAdamW:
    """Owns the master weights and their gradients. A float32 model is its own master: nothing is copied.

    parameters: (name, parameter) pairs of the model. Weight decay is applied to matrices only.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, Parameter]],
        *,
        betas: tuple[float, float],
        weight_decay: float,
        max_grad_norm: float,
    ) -> None:
        self._named = [(name, p) for name, p in parameters if p.requires_grad]
        self._model = [p for _, p in self._named]
        self.max_grad_norm = max_grad_norm
        self.skipped = 0
        self._copied = any(p.dtype != torch.float32 for p in self._model)
        if self._copied:
            self._master: list[Tensor] = [p.detach().to(torch.float32, copy=True) for p in self._model]
            self._hooks = [
                p.register_post_accumulate_grad_hook(_add_to(master))
                for p, master in zip(self._model, self._master, strict=True)
            ]
        else:
            self._master = list[Tensor](self._model)
        matrices = [m for m in self._master if m.dim() >= 2]
        others = [m for m in self._master if m.dim() < 2]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=betas, fused=True)

    @torch.no_grad()
    def step(self, learning_rate: float, grad_scale: float = 1.0) -> StepReport:
        """Multiplies the gradient by `grad_scale`, clips its global norm, updates, and clears the gradient.

        A gradient that is not finite is dropped and counted in `skipped`: one bad batch must not end a run, and Adam's
        moments would never forget it.
        """
        grads = [m.grad for m in self._master if m.grad is not None]
        if not grads:
            return StepReport(0.0, applied=False)
        norm = float(torch.nn.utils.get_total_norm(grads)) * grad_scale
        if not math.isfinite(norm):
            self.skipped += 1
            self.zero_grad()
            return StepReport(norm, applied=False)
        scale = grad_scale * min(1.0, self.max_grad_norm / max(norm, 1e-12))
        if scale != 1.0:
            torch._foreach_mul_(grads, scale)
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self.zero_grad()
        self._publish()
        return StepReport(norm, applied=True)

    def zero_grad(self) -> None:
        for parameter in (*self._model, *self._master):
            parameter.grad = None

    def snapshot(self) -> list[Tensor]:
        """Copies of the master weights, float32, in the order of the parameters."""
        return [m.detach().clone() for m in self._master]

    @torch.no_grad()
    def assign(self, weights: list[Tensor]) -> None:
        """Sets the master weights and the model's from them."""
        torch._foreach_copy_([m.detach() for m in self._master], weights)
        self._publish()

    def tensors(self) -> dict[str, Tensor]:
        """Everything that the next step depends on: `master/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME`, `step/NAME`."""
        out: dict[str, Tensor] = {}
        for (name, _), master in zip(self._named, self._master, strict=True):
            out[f"master/{name}"] = master.detach()
            for key, value in self._adamw.state.get(master, {}).items():
                out[f"{key}/{name}"] = value
        return out

    @torch.no_grad()
    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Restores `tensors()`. Raises ValueError where the names or shapes are another model's."""
        expected = {f"master/{name}": m.shape for (name, _), m in zip(self._named, self._master, strict=True)}
        found = {key: value.shape for key, value in tensors.items() if key.startswith("master/")}
        if expected != found:
            raise ValueError("the checkpoint was made for another model: names or shapes of its weights differ")
        self._adamw.state.clear()
        for (name, _), master in zip(self._named, self._master, strict=True):
            master.detach().copy_(tensors[f"master/{name}"])
            if f"exp_avg/{name}" in tensors:
                self._adamw.state[master] = {
                    # Fused AdamW keeps its count of steps beside the weights.
                    key: tensors[f"{key}/{name}"].to(master.device, torch.float32, copy=True)
                    for key in ("step", "exp_avg", "exp_avg_sq")
                }
        self._publish()

    def _publish(self) -> None:
        """Rounds the master weights into the model."""
        if self._copied:
            torch._foreach_copy_([p.detach() for p in self._model], self._master)


def warmed_up(learning_rate: float, step: int, warmup_steps: int) -> float:
    """Linear warm-up: step 0 already learns, step `warmup_steps` and later have the full rate."""
    return learning_rate * min(1.0, (step + 1) / (warmup_steps + 1))


def _add_to(master: Tensor) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.to(torch.float32)
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return hook

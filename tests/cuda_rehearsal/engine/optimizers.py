"""AdamW on lists of tensors, and the two functions on lists that clip gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class FusedAdam(torch.optim.Optimizer):
    """An optimizer that counts steps in the parameter group, as Transformer Engine's FusedAdam
    does, and not in the state of each parameter."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        bias_correction: bool,
        adam_w_mode: bool,
        capturable: bool,
        master_weights: bool,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode
        assert not capturable and not master_weights, "the stand-in has neither"

    def step(self, closure: Any, grad_scaler: Any) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                if group["params"]:
                    self._update(group)

    def _update(self, group: dict[str, Any]) -> None:
        group["step"] = group.get("step", 0) + 1
        first, second = group["betas"]
        corrections = (1 - first ** group["step"], 1 - second ** group["step"])
        for parameter in group["params"]:
            state = self.state[parameter]
            if not state:
                state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
                state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
            if parameter.grad is None:
                continue
            gradient = parameter.grad.float()
            mean, square = state["exp_avg"], state["exp_avg_sq"]
            mean.lerp_(gradient, 1 - first)
            square.lerp_(gradient.square(), 1 - second)
            update = mean / corrections[0]
            update = update / ((square / corrections[1]).sqrt() + group["eps"])
            parameter.sub_(group["lr"] * (update + group["weight_decay"] * parameter))

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def multi_tensor_applier(
    op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: list[list[Tensor]], *args: Any
) -> Any:
    if not tensor_lists[0]:
        return None
    return op(2048 * 32, noop_flag_buffer, tensor_lists, *args)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    squares = torch.stack([t.float().square().sum() for t in tensor_lists[0]])
    return squares.sum().sqrt()[None], squares.sqrt() if per_tensor else squares[:0]


def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], scale: float
) -> None:
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source.float() * scale)

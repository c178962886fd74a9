"""Muon: momentum whose update is made orthogonal, for the matrices inside a network.

Border: parameters and gradients; knows no model.

Jordan et al. 2024 (kellerjordan.github.io/posts/muon); the update is scaled to the size of AdamW's as in Liu
et al. 2025, "Muon is Scalable for LLM Training". Matrices of one shape are orthogonalised as one batch: on a
CPU that is several times faster than `torch.optim.Muon`, which takes them one at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Muon"]


class Muon(torch.optim.Optimizer):
    """params: matrices, or parameter groups of them; weight_decay: decoupled, as in AdamW."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.95, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update with Nesterov momentum."""
        for group in self.param_groups:
            alike: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                alike[tuple(p.shape)].append(p)
            for shape, matrices in alike.items():
                updates = []
                for p in matrices:
                    state = self.state[p]
                    gradient = p.grad
                    assert gradient is not None
                    if not state:
                        state["momentum"] = torch.zeros_like(p)
                    state["momentum"].lerp_(gradient, 1 - group["momentum"])
                    updates.append(gradient.lerp(state["momentum"], group["momentum"]))
                size = group["lr"] * 0.2 * max(shape) ** 0.5
                for p, update in zip(matrices, _orthogonal(torch.stack(updates)), strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=size)


def _orthogonal(batch: Tensor) -> Tensor:
    """Each matrix with singular values moved to about 1 by 5 Newton-Schulz steps; [matrix, row, column]."""
    wide = batch if batch.shape[1] <= batch.shape[2] else batch.mT
    x = (wide / (wide.norm(dim=(1, 2), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    orthogonal: Tensor = (x if wide is batch else x.mT).float()
    return orthogonal

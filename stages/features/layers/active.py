"""Features that are active: what encoding gives.

Border: indices and values; who encoded them is in dictionary.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Active"]


@dataclass(frozen=True, eq=False)
class Active:
    """Features that are active, sorted by layer, position, feature; all [n].

    layer, position, feature: int64. value: activation, in the dtype of the arithmetic.
    """

    layer: Tensor
    position: Tensor
    feature: Tensor
    value: Tensor

    def __len__(self) -> int:
        return len(self.value)

    @property
    def indices(self) -> Tensor:
        """[n, 3]: layer, position, feature."""
        import torch

        return torch.stack([self.layer, self.position, self.feature], dim=1)

    def top(self, k: int) -> Active:
        """The k strongest features of every layer and position, in the same order; equal ones from the lowest
        index on."""
        import torch

        if not len(self):
            return self
        group = self.layer * (self.position.max() + 1) + self.position
        order = torch.argsort(self.value, descending=True, stable=True)
        order = order[torch.argsort(group[order], stable=True)]
        rank = torch.arange(len(self), device=group.device) - torch.searchsorted(group, group[order])
        kept = order[rank < k].sort().values
        return Active(self.layer[kept], self.position[kept], self.feature[kept], self.value[kept])

"""Active features: the result of encoding.

Border: indices and values; dictionary.py encodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Active"]


@dataclass(frozen=True, eq=False)
class Active:
    """Active features, sorted by layer, position, feature; all tensors [n]."""

    layer: Tensor
    """Layer of each feature, int64."""
    position: Tensor
    """Token position, int64."""
    feature: Tensor
    """Index within the layer, int64."""
    value: Tensor
    """Activation, in the dtype of the arithmetic."""

    def __len__(self) -> int:
        return len(self.value)

    @property
    def indices(self) -> Tensor:
        """Layer, position and feature, int64 [n, 3]."""
        import torch

        return torch.stack([self.layer, self.position, self.feature], dim=1)

    def top(self, k: int) -> Active:
        """The k strongest features of every layer and position, sorted as before; ties go to low indices."""
        import torch

        if not len(self):
            return self
        # Two stable sorts: by value, then by group; ties keep ascending feature indices.
        # Integer that identifies the layer and position of each active feature, ascending.
        group = self.layer * (self.position.max() + 1) + self.position
        order = torch.argsort(self.value, descending=True, stable=True)
        order = order[torch.argsort(group[order], stable=True)]
        rank = torch.arange(len(self), device=group.device) - torch.searchsorted(group, group[order])
        selected = order[rank < k].sort().values
        return Active(
            self.layer[selected], self.position[selected], self.feature[selected], self.value[selected]
        )

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
    """Features with nonzero activation in one prompt, sorted by layer, position, feature; all tensors [n]."""

    layer: Tensor
    """Layer that the feature reads, int64."""
    position: Tensor
    """Position of the token in the prompt, int64."""
    feature: Tensor
    """Index of the feature within its layer, int64."""
    value: Tensor
    """Activation of the feature at this position, float32 or (from float64 states) float64."""

    def __len__(self) -> int:
        return len(self.value)

    @property
    def indices(self) -> Tensor:
        """Columns layer, position and feature of every active feature, int64 [n, 3]."""
        import torch

        return torch.stack([self.layer, self.position, self.feature], dim=1)

    def top(self, k: int) -> Active:
        """The k largest activations at each layer and position, in the same order; low indices win ties."""
        import torch

        if not len(self):
            return self
        # One ascending integer per layer and position.
        group = self.layer * (self.position.max() + 1) + self.position
        # Two stable sorts, by value and then by group, so that ties keep ascending feature indices.
        order = torch.argsort(self.value, descending=True, stable=True)
        order = order[torch.argsort(group[order], stable=True)]
        rank_in_group = torch.arange(len(self), device=group.device) - torch.searchsorted(group, group[order])
        selected = order[rank_in_group < k].sort().values
        return Active(
            self.layer[selected], self.position[selected], self.feature[selected], self.value[selected]
        )

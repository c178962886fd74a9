"""Find the layers of a model: modules of a list, each of which takes the output of the previous one, to the
bit.

A list may contain one module that is called repeatedly (ALBERT). Of several lists that are not nested in
another, the one whose last layer ends last is chosen: in an encoder-decoder this is the decoder, whose states
become the logits.

Border: modules and calls of one traced pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from .trace import Call, Slot, same

__all__ = ["NotBridged", "Stack", "find_stack"]

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


class NotBridged(Exception):
    """The bridge cannot run a model; the message says what was expected and found."""


@dataclass(frozen=True)
class Stack:
    """The layers of a model in a traced pass."""

    path: str
    """Dotted path of the list of layers."""
    calls: tuple[Call, ...]
    """Calls of the layers, in order."""
    taken: Slot
    """Slot of the residual stream among a layer's arguments."""
    made: Slot
    """Slot of the residual stream among a layer's results."""
    others: tuple[str, ...]
    """Paths of other lists of layers in the model."""

    def stream(self, layer: int) -> Tensor:
        """Residual stream that entered a layer, in the module's own axes."""
        return self.calls[layer].taken[self.taken]

    @property
    def last(self) -> Tensor:
        """Output of the last layer."""
        return self.calls[-1].made[self.made]


def find_stack(module: nn.Module, calls: Sequence[Call]) -> Stack:
    """Find the layers in a traced pass. Raises NotBridged if no list of modules passes a stream on."""
    lists = {path for path, submodule in module.named_modules() if isinstance(submodule, _LISTS)}
    groups: dict[str, list[Call]] = {}
    for call in calls:
        path = call.path.rpartition(".")[0]
        if path in lists:
            groups.setdefault(path, []).append(call)
    stacks = {path: slots for path, group in groups.items() if (slots := _chained(group))}
    outer = [
        path
        for path in stacks
        if not any(above.path.rpartition(".")[0] in stacks for above in groups[path][0].above)
    ]
    # A list of one module counts only if no list is longer, as many modules are wrapped in a list.
    long = [path for path in outer if len(groups[path]) > 1] or outer
    if not long:
        raise NotBridged(
            "expected a list of modules of which each takes the states [prompt, position, width] that the "
            f"one before it gave, found none ({_seen(groups)})"
        )
    chosen = max(long, key=lambda path: groups[path][-1].ended)
    others = tuple(path for path in long if path != chosen)
    taken, made = stacks[chosen]
    return Stack(chosen, tuple(groups[chosen]), taken, made, others)


def _chained(group: Sequence[Call]) -> tuple[Slot, Slot] | None:
    """(input slot, output slot) of a stream that each of these calls passes to the next; None if there is
    none."""
    layer0 = group[0]
    for made, output in layer0.made.items():
        for taken, entering in layer0.taken.items():
            if entering.shape == output.shape and all(
                made in a.made and taken in b.taken and same(a.made[made], b.taken[taken])
                for a, b in itertools.pairwise(group)
            ):
                return taken, made
    return None


def _seen(groups: dict[str, list[Call]]) -> str:
    lists = [f"{path}: {len(group)} calls" for path, group in groups.items() if len(group) > 1]
    return "; ".join(lists[:4]) or "no list of modules handles such states"

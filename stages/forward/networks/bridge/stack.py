"""Which modules are the layers: those of a list of which each takes what the one before it gave, to the bit.

A list may hold one module that is called again and again (ALBERT). Lists that stand in no other such list
count, and of these the one whose last layer ends last: of an encoder and a decoder the decoder, whose states
become the logits.

Border: calls and modules; checks nothing that takes another pass.
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
    """The bridge cannot run a model; says what was expected and found."""


@dataclass(frozen=True)
class Stack:
    """The layers of a model as a pass goes through them.

    path: of their list. taken, made: where each takes its stream and gives it. others: paths of further lists
    that are stacks as well.
    """

    path: str
    calls: tuple[Call, ...]
    taken: Slot
    made: Slot
    others: tuple[str, ...]

    def stream(self, layer: int) -> Tensor:
        """What a layer took, as it took it."""
        return self.calls[layer].taken[self.taken]

    @property
    def last(self) -> Tensor:
        """What the last layer gave."""
        return self.calls[-1].made[self.made]


def find_stack(module: nn.Module, calls: Sequence[Call]) -> Stack:
    """The layers in a traced pass. Raises NotBridged where none hand on a stream."""
    lists = {path for path, each in module.named_modules() if isinstance(each, _LISTS)}
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
    # A list of one is a stack only where no list is longer: any module beside others may stand in one.
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
    """(where each takes the stream, where it gives it), if these calls hand one on; None if not."""
    first = group[0]
    for made, given in first.made.items():
        for taken, got in first.taken.items():
            if got.shape == given.shape and all(
                made in one.made and taken in other.taken and same(one.made[made], other.taken[taken])
                for one, other in itertools.pairwise(group)
            ):
                return taken, made
    return None


def _seen(groups: dict[str, list[Call]]) -> str:
    lists = [f"{path}: {len(group)} calls" for path, group in groups.items() if len(group) > 1]
    return "; ".join(lists[:4]) or "no list of modules handles such states"

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
    """The transformers bridge cannot run a model; the message says what was expected of it and what was
    found."""


@dataclass(frozen=True)
class Stack:
    """The layers of a model, as calls of modules in a traced pass."""

    path: str
    """Dotted path of the list of layers."""
    calls: tuple[Call, ...]
    """Calls of the layers, in order."""
    taken: Slot
    """Place of the residual stream among a layer's arguments, such as "0" or "hidden_states"."""
    made: Slot
    """Place of the residual stream among a layer's results, such as "0"; "" if it is the whole result."""
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
    """The layers of a model in a traced pass: a list of modules, each of which takes the output of the one
    before.

    Arguments:
        module: The model.
        calls: Calls of its submodules during the pass, in order of their starts.

    Raises:
        NotBridged: The model has no such list of modules.
    """
    lists = {path for path, submodule in module.named_modules() if isinstance(submodule, _LISTS)}
    calls_by_list: dict[str, list[Call]] = {}
    for call in calls:
        path = call.path.rpartition(".")[0]
        if path in lists:
            calls_by_list.setdefault(path, []).append(call)
    # Lists of modules that pass a stream on -> its places among their arguments and results.
    stacks = {path: slots for path, group in calls_by_list.items() if (slots := _stream_slots(group))}
    outermost = [
        path
        for path in stacks
        if not any(above.path.rpartition(".")[0] in stacks for above in calls_by_list[path][0].above)
    ]
    # A list of one module counts only if no list is longer, as many modules are wrapped in a list.
    candidates = [path for path in outermost if len(calls_by_list[path]) > 1] or outermost
    if not candidates:
        raise NotBridged(
            "expected a list of modules in which each module takes the states [prompt, position, width] that "
            f"the module before it gave, found none ({_described(calls_by_list)})"
        )
    last_to_end = max(candidates, key=lambda path: calls_by_list[path][-1].ended)
    others = tuple(path for path in candidates if path != last_to_end)
    taken, made = stacks[last_to_end]
    return Stack(last_to_end, tuple(calls_by_list[last_to_end]), taken, made, others)


def _stream_slots(group: Sequence[Call]) -> tuple[Slot, Slot] | None:
    """Places (among arguments, among results) of a stream that each of these calls passes to the next call;
    None if there is no such stream."""

    def passes_on(call: Call, next_call: Call, taken: Slot, made: Slot) -> bool:
        has_both = made in call.made and taken in next_call.taken
        return has_both and same(call.made[made], next_call.taken[taken])

    for made, output in group[0].made.items():
        for taken, entering in group[0].taken.items():
            pairs = itertools.pairwise(group)
            if entering.shape == output.shape and all(passes_on(a, b, taken, made) for a, b in pairs):
                return taken, made
    return None


def _described(calls_by_list: dict[str, list[Call]]) -> str:
    """Text with the first four lists of modules that were called repeatedly, and the numbers of their
    calls."""
    lists = [f"{path}: {len(calls)} calls" for path, calls in calls_by_list.items() if len(calls) > 1]
    return "; ".join(lists[:4]) or "no list of modules handles such states"

"""The driver of networks that run whole prompts only: every run is a pass of its own, and those of one
length lie side by side.

Nothing is shared between runs and nothing is kept between the tokens of a text, so that all results are
those of plain passes. Each row of a batch has the taps of its own run, which see a batch of one, as in a pass
alone.

Border: token ids, taps and tensors; knows a network by `logits` (networks/bridge/network.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ....store.errors import ConfigError
from ..hooks.payloads import copied
from ..hooks.spec import Capture
from ..hooks.taps import EverythingHeld, PassTaps, RunTaps, Taps
from ..hooks.wants import Logits
from .branches import Branch, Wanted
from .kept import Cache
from .planner import MOST_TOKENS, Block
from .sweep import Result

__all__ = ["RowTaps", "WholePasses"]


class WholeNetwork(Protocol):
    """A network that runs prompts through all its layers, and nothing less."""

    @property
    def device(self) -> torch.device:
        """Where it is computed."""
        ...

    def logits(self, ids: Tensor, taps: Taps) -> Tensor:
        """Token ids [B, S] -> logits [B, S, vocab]."""
        ...


class WholePasses:
    """Passes over a network that runs whole prompts only (`Passes` in drivers.py)."""

    def __init__(self, network: WholeNetwork) -> None:
        self._network = network

    def forward(
        self, ids: Tensor, taps: PassTaps, want: Logits | None, order: Sequence[int] | None = None
    ) -> Tensor | None:
        """See `Passes`. Raises ConfigError for an order of layers, as transformers has its own."""
        if order is not None:
            raise ConfigError(
                "expected a model whose layers can be gone through again, found one that transformers "
                "computes; choose a model of a supported family"
            )
        try:
            logits = self._network.logits(ids, taps)
        except EverythingHeld:
            return None
        return None if want is None else _wanted(logits, want)

    def read_on(self, rows: Sequence[Sequence[int]], cache: Cache, taps: PassTaps) -> Tensor:
        """See `Passes`; all of the sequences is read, whatever was before."""
        ids = torch.tensor(rows, dtype=torch.long, device=self._network.device)
        cache.length = ids.shape[1]
        return self._network.logits(ids, taps)[:, -1]

    def sweep(self, block: Block, wanted: Sequence[Wanted], room: int) -> Iterator[Result]:
        """See `Passes`."""
        by_length: dict[int, list[Branch]] = {}
        for branch in block.branches:
            by_length.setdefault(branch.length, []).append(branch)
        for length, branches in by_length.items():
            most = max(1, MOST_TOKENS // length)
            for start in range(0, len(branches), most):
                yield from self._together(branches[start : start + most], wanted)

    def _together(self, branches: Sequence[Branch], wanted: Sequence[Wanted]) -> Iterator[Result]:
        """The results of branches of one length, in one pass."""
        captured: list[dict[Capture, Tensor]] = [{} for _ in branches]
        taps = []
        for branch, held in zip(branches, captured, strict=True):
            runs = [wanted[index] for index in branch.runs]
            spec = replace(runs[0].spec, captures=branch.captures)
            is_over = all(run.want is None for run in runs)
            taps.append(RunTaps(spec, held.__setitem__, stop_early=is_over))
        ids = torch.tensor(
            [branch.tokens for branch in branches], dtype=torch.long, device=self._network.device
        )
        try:
            logits: Tensor | None = self._network.logits(ids, RowTaps(taps))
        except EverythingHeld:
            logits = None
        for row, branch in enumerate(branches):
            for index in branch.runs:
                want = wanted[index].want
                found = None if want is None or logits is None else _wanted(logits[row : row + 1], want)
                activations = {capture: captured[row][capture] for capture in wanted[index].spec.captures}
                yield index, found, activations if len(branch.runs) == 1 else copied(activations)


class RowTaps:
    """Taps of a batch whose rows are runs of their own (`Taps`): each sees its row as a batch of one."""

    def __init__(self, rows: Sequence[RunTaps]) -> None:
        self._rows = rows
        self._over: set[int] = set()
        """Rows of which everything wanted was met."""

    def __call__(self, kind: str, layer: int | None, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        """The value to go on with at a hook point."""
        before = list(x.split(1))
        after = [self._met(number, kind, layer, row) for number, row in enumerate(before)]
        if len(self._over) == len(self._rows):
            raise EverythingHeld
        is_same = all(one is other for one, other in zip(before, after, strict=True))
        return x if is_same else torch.cat(after)

    def captures(self, layer: int | None, *kinds: str) -> bool:
        """Whether a row reads one of these points."""
        return any(row.captures(layer, *kinds) for row in self._rows)

    def changes(self, layer: int | None, *kinds: str) -> bool:
        """Whether a row changes one of these points."""
        return any(row.changes(layer, *kinds) for row in self._rows)

    def touches(self, layer: int | None, *kinds: str) -> bool:
        """Whether a row reads or changes one of these points."""
        return any(row.touches(layer, *kinds) for row in self._rows)

    def _met(self, number: int, kind: str, layer: int | None, row: Tensor) -> Tensor:
        try:
            return row if number in self._over else self._rows[number](kind, layer, row)
        except EverythingHeld:
            self._over.add(number)
            return row


def _wanted(logits: Tensor, want: Logits) -> Tensor:
    """logits [B, S, V] at the positions and tokens wanted, in memory of their own."""
    chosen = want.at_positions(logits)
    return chosen.clone() if want.tokens is None else chosen[..., list(want.tokens)]

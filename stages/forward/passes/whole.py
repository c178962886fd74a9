"""WholePasses: driver of networks that run whole prompts only (the transformers bridge).

Every run is a whole pass; runs of one length share a batch. No computation is shared between runs, and
nothing is cached between the tokens of a text, so all results are those of plain passes. Each row of a batch
has the taps of its own run, which see a batch of one, as they would alone.

Knows a network by `logits` only (networks/bridge/network.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ....store.errors import ConfigError
from ..hooks.payloads import copy_payloads
from ..hooks.spec import Capture
from ..hooks.taps import EarlyStop, PassTaps, RunTaps, Taps
from ..hooks.wants import Logits
from .branches import Branch, Wanted
from .kept import Cache
from .planner import MOST_TOKENS, Block
from .sweep import Result

__all__ = ["RowTaps", "WholePasses"]


class WholeNetwork(Protocol):
    """A network that can only run prompts through all of its layers."""

    @property
    def device(self) -> torch.device:
        """Device of its tensors."""
        ...

    def logits(self, ids: Tensor, taps: Taps) -> Tensor:
        """Run prompts through all layers; returns logits [B, S, vocab].

        Arguments:
            ids: token ids [B, S].
            taps: called at every hook point, to capture or change the value there.
        """
        ...


class WholePasses:
    """Passes over a network that can only run prompts through all of its layers, as transformers does."""

    def __init__(self, network: WholeNetwork) -> None:
        self._network = network

    def forward(
        self, ids: Tensor, taps: PassTaps, want: Logits | None, order: Sequence[int] | None = None
    ) -> Tensor | None:
        """Run prompts of one length through the network.

        Arguments:
            ids: token ids, int [B, S].
            taps: called at every hook point, to capture or change the value there.
            want: which logits to compute; None for none.
            order: layers in execution order; only None, each layer once, is possible.

        Returns:
            Logits [B, positions, tokens]; None where none are wanted or the taps ended the pass.

        Raises:
            ConfigError: for an order of layers, as transformers runs its own loop.
        """
        if order is not None:
            raise ConfigError(
                "to repeat layers, expected a model that mizarr's own networks run, found one that "
                "transformers runs; choose a model of a supported family"
            )
        try:
            logits = self._network.logits(ids, taps)
        except EarlyStop:
            return None
        return None if want is None else _selected_logits(logits, want)

    def read_on(self, rows: Sequence[Sequence[int]], cache: Cache, taps: PassTaps) -> Tensor:
        """Next-token logits [B, vocab] of whole sequences; all positions are computed, as nothing is cached.

        Arguments:
            rows: token ids of whole sequences, all of one length.
            cache: only its length is updated.
            taps: called at every hook point, to capture or change the value there.
        """
        ids = torch.tensor(rows, dtype=torch.long, device=self._network.device)
        # Keys and values are not cached; only the length is kept up to date.
        cache.length = ids.shape[1]
        return self._network.logits(ids, taps)[:, -1]

    def sweep(self, block: Block, wanted: Sequence[Wanted], room: int) -> Iterator[Result]:
        """Compute the runs that end in one block of a plan, in batches of prompts of one length.

        Arguments:
            block: runs to compute.
            wanted: all runs of the plan.
            room: unused; batches are limited by their number of tokens.

        Yields:
            (index of a run, its logits or None, its captures).
        """
        by_length: dict[int, list[Branch]] = {}
        for branch in block.branches:
            by_length.setdefault(branch.length, []).append(branch)
        for length, branches in by_length.items():
            rows_at_once = max(1, MOST_TOKENS // length)
            for start in range(0, len(branches), rows_at_once):
                yield from self._run_batch(branches[start : start + rows_at_once], wanted)

    def _run_batch(self, branches: Sequence[Branch], wanted: Sequence[Wanted]) -> Iterator[Result]:
        """Compute branches of one prompt length in one batch, and yield the result of each of their runs."""
        captured: list[dict[Capture, Tensor]] = [{} for _ in branches]
        taps = []
        for branch, row_captures in zip(branches, captured, strict=True):
            runs = [wanted[index] for index in branch.runs]
            spec = replace(runs[0].spec, captures=branch.captures)
            # Without logits the pass can stop after the last capture.
            has_no_logits = all(run.want is None for run in runs)
            taps.append(RunTaps(spec, row_captures.__setitem__, stop_early=has_no_logits))
        ids = torch.tensor(
            [branch.tokens for branch in branches], dtype=torch.long, device=self._network.device
        )
        try:
            logits: Tensor | None = self._network.logits(ids, RowTaps(taps))
        except EarlyStop:
            logits = None
        for row, branch in enumerate(branches):
            for index in branch.runs:
                want, run_logits = wanted[index].want, None
                if want is not None and logits is not None:
                    run_logits = _selected_logits(logits[row : row + 1], want)
                activations = {capture: captured[row][capture] for capture in wanted[index].spec.captures}
                # Runs of one branch must not share tensors: a caller may write to its captures.
                captures = activations if len(branch.runs) == 1 else copy_payloads(activations)
                yield index, run_logits, captures


class RowTaps:
    """Captures and interventions of a batch whose rows are separate runs.

    The taps of a run are called with its row as a batch of one.
    """

    def __init__(self, rows: Sequence[RunTaps]) -> None:
        self._rows = rows
        self._finished: set[int] = set()
        """Rows whose taps raised EarlyStop: the pass ends once all have."""

    def __call__(self, kind: str, layer: int | None, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Capture or change the value x of each row; returns the value to continue with."""
        before = list(x.split(1))
        after = [self._apply(number, kind, layer, row) for number, row in enumerate(before)]
        if len(self._finished) == len(self._rows):
            raise EarlyStop
        is_same = all(new is old for new, old in zip(after, before, strict=True))
        # Without a change the batch itself goes on: concatenating would copy it at every hook point.
        return x if is_same else torch.cat(after)

    def captures(self, layer: int | None, *kinds: str) -> bool:
        """Whether any row captures one of these points."""
        return any(row.captures(layer, *kinds) for row in self._rows)

    def changes(self, layer: int | None, *kinds: str) -> bool:
        """Whether any row changes one of these points."""
        return any(row.changes(layer, *kinds) for row in self._rows)

    def touches(self, layer: int | None, *kinds: str) -> bool:
        """Whether any row captures or changes one of these points."""
        return any(row.touches(layer, *kinds) for row in self._rows)

    def _apply(self, number: int, kind: str, layer: int | None, row: Tensor) -> Tensor:
        try:
            return row if number in self._finished else self._rows[number](kind, layer, row)
        except EarlyStop:
            self._finished.add(number)
            return row


def _selected_logits(logits: Tensor, want: Logits) -> Tensor:
    """Select the wanted positions and tokens of logits [1, S, V]; returns a copy [1, positions, tokens]."""
    # A view would keep the logits of the whole batch alive.
    selected = want.at_positions(logits)
    return selected.clone() if want.tokens is None else selected[..., list(want.tokens)]

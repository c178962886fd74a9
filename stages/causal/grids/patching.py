"""Activation patching: which activations cause the difference between two prompts?

The corrupted prompt is run with the activation of one place taken from the clean run, place by place, and a
metric measures how much of the clean answer returns (Vig et al. 2020; Meng et al. 2022; Heimersheim & Nanda
2024, "How to use and interpret activation patching"). Only the place itself is overwritten; everything after
it is recomputed.

Border: token ids and hook points in, labelled arrays out; forward/ computes the runs. The grid and its axes
are in patching_grid.py, metrics in patching_metrics.py.

    patching = ActivationPatching(clean=a, corrupted=b, kinds=("resid_pre",), metrics=(Recovery(KL()),))
    dataset = run(patching.on("specimen"), store)      # recovery [layer, position]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ....pipeline import Output
from ....store.errors import PromptError, StageError
from ...forward.architectures.points import HookPoint
from ...forward.hooks.interventions import Replace
from ...forward.hooks.spec import HookSpec
from ...forward.hooks.wants import Logits
from ...forward.runs.experiment import CellLabels, Experiment
from ...forward.runs.means import position_axis
from ...forward.runs.run import Run, stream
from .patching_grid import HEAD_KINDS, HIDDEN_KINDS, Grid, GridPlace, in_range, num_heads, part_of, where
from .patching_metrics import Metric
from .patching_results import PreparedGrid, as_vector, metric_outputs, metrics_of, outputs_along, token_labels

if TYPE_CHECKING:
    import xarray as xr

    from ...forward.architectures.architecture import Architecture
    from ...forward.hooks.cache import HookCache
    from ...forward.models.model import Model

__all__ = [
    "ActivationPatching",
    "DonorPatching",
    "PatchTable",
    "align_ends",
    "block_every",
    "head_all_pos_every",
    "head_by_pos_every",
]

TableRow = tuple[str, int, int | None, int | None]
"""(hook kind, layer, position, head); position or head None means all."""


@dataclass(frozen=True, kw_only=True)
class ActivationPatching(Grid):
    """The corrupted prompt with activations of the clean run, one place at a time.

    The other fields are those of `Grid`.

    Raises:
        PromptError: for an empty prompt, or prompts of different lengths without a valid `align`.
    """

    clean: tuple[int, ...]
    """Token ids of the clean prompt."""
    corrupted: tuple[int, ...]
    """Token ids of the corrupted prompt."""
    align: tuple[int, ...] | None = None
    """For every corrupted position, the clean position whose activation is patched in (see `align_ends`).

    None for prompts of equal length.
    """

    name: ClassVar[str] = "activation_patching"
    version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_lengths(self.clean, self.corrupted, self.align)

    @property
    def prompt(self) -> tuple[int, ...]:
        """The corrupted prompt, which is patched."""
        return self.corrupted

    def check(self, config: Architecture) -> None:
        """Check the fields as `Grid.check` does.

        Raises:
            StageError: Attention patterns cannot be patched between aligned prompts.
        """
        super().check(config)
        # The key axis of a clean pattern counts clean positions: rows cannot be moved between prompts.
        if self.align is not None and "pattern" in self.kinds:
            raise StageError(
                "activation_patching: expected prompts of equal length for patching attention patterns, "
                "found aligned prompts (align); patch z instead, or choose other prompts"
            )

    def prepare(self, model: Model) -> PreparedGrid:
        """Results of the clean and the corrupted run without patches, with the clean activations."""
        return pair_of_runs(self, model, self.points(model.config))

    def change(
        self,
        spec: HookSpec,
        prepared: PreparedGrid,
        kind: str,
        layers: Sequence[int],
        place: GridPlace,
        sample: int,
    ) -> HookSpec:
        """Add to `spec` the patch of a place by its clean activation, in some layers.

        Of an attention edge only its own weight is replaced.
        """
        for layer in layers:
            point = HookPoint(kind, layer)
            value = part_of(prepared.activations["clean", point], point, place)
            if place.key is not None:
                # The other weights of the row are those of the unpatched corrupted run: nothing before the
                # pattern is changed. `* 1` copies, for tensors and for the read-only arrays of a sketch.
                row = part_of(prepared.activations["corrupted", point], point, place) * 1
                row[..., place.key] = value[..., place.key]
                value = row
            spec = spec.intervene(point, Replace(value, **where(place, point)))
        return spec


@dataclass(frozen=True, kw_only=True)
class DonorPatching(ActivationPatching):
    """Control of activation patching: activations of an unrelated prompt instead of the clean one.

    Metrics still compare with the clean run. Unrelated states restore none of the clean answer, unless any
    change at the place does.
    """

    donor: tuple[int, ...]
    """Token ids of an unrelated prompt, as many as the clean prompt has."""

    name: ClassVar[str] = "donor_patching"
    version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_lengths(self.donor, self.clean, None)

    def prepare(self, model: Model) -> PreparedGrid:
        """Results of both runs without patches, with the donor's activations in place of the clean ones."""
        return pair_of_runs(self, model, self.points(model.config), self.donor)


def pair_of_runs(
    grid: ActivationPatching, model: Model, points: Sequence[HookPoint], donor: tuple[int, ...] = ()
) -> PreparedGrid:
    """Results of the clean and the corrupted run without patches, with activations by (run, hook point).

    Arguments:
        grid: The patching grid.
        model: The model.
        points: Hook points whose clean activations are captured.
        donor: Token ids of a prompt whose activations replace the clean ones; empty for none.
    """
    # The clean run is read where `at` of the corrupted prompt is aligned to.
    align = grid.align or tuple(range(len(grid.clean)))
    is_edges = grid.over == "edge"
    runs = [
        Run(grid.clean, HookSpec().capture(*points), Logits((align[grid.at],), grid.want.tokens)),
        Run(grid.corrupted, HookSpec().capture(*points) if is_edges else None, grid.want),
    ]
    if donor:
        runs.append(Run(donor, HookSpec().capture(*points), None))
    results = dict(stream(model, runs))
    acts = {("clean", point): results[2 if donor else 0][point][0] for point in points}
    # Indexed once here, so that every place can use corrupted positions.
    if grid.align is not None:
        rows = list(align)
        acts = {
            (run, point): value[(slice(None),) * position_axis(point) + (rows,)]
            for (run, point), value in acts.items()
        }
    if is_edges:
        acts |= {("corrupted", point): results[1][point][0] for point in points}
    labels = token_labels(model, token=grid.corrupted, clean_token=[grid.clean[i] for i in align])
    clean, corrupted = (as_vector(results[i].logits) for i in range(2))
    return PreparedGrid(model.config, clean, [corrupted], acts, labels)


def check_lengths(clean: Sequence[int], corrupted: Sequence[int], align: Sequence[int] | None) -> None:
    """Check that positions of two prompts correspond.

    Arguments:
        clean: Token ids of the clean prompt.
        corrupted: Token ids of the corrupted prompt.
        align: Clean position of each corrupted one; None for prompts of equal length.

    Raises:
        PromptError: A prompt is empty, lengths differ without `align`, or `align` is invalid.
    """
    if not clean or not corrupted:
        raise PromptError(
            "activation patching: expected a clean and a corrupted prompt of at least one token, found an "
            "empty one"
        )
    if align is None and len(clean) != len(corrupted):
        raise PromptError(
            "activation patching: expected a clean and a corrupted prompt of equal length, found "
            f"{len(clean)} and {len(corrupted)} tokens; choose other prompts, or say which positions "
            "correspond: align=align_ends(clean, corrupted)"
        )
    if align is not None and (len(align) != len(corrupted) or not all(0 <= i < len(clean) for i in align)):
        raise PromptError(
            f"activation patching: expected align to hold a clean position from 0 to {len(clean) - 1} for "
            f"each of the {len(corrupted)} corrupted positions, found {list(align)}"
        )


def align_ends(clean: Sequence[int], corrupted: Sequence[int]) -> tuple[int, ...]:
    """For every position of the corrupted prompt, the corresponding position of the clean prompt.

    Common tokens at the start are aligned from the start, those at the end from the end. Positions in between
    are aligned in order; surplus ones repeat the last clean position of that span.

    Arguments:
        clean: Token ids of the clean prompt.
        corrupted: Token ids of the corrupted prompt.
    """
    start, end = common_ends(clean, corrupted)
    # Without tokens in between, surplus positions repeat the first common token at the end.
    last = max(len(clean) - end - 1, start if start < len(clean) else len(clean) - 1)
    middle = [min(i, last) for i in range(start, len(corrupted) - end)]
    return (*range(start), *middle, *range(len(clean) - end, len(clean)))


def common_ends(prompt: Sequence[int], other_prompt: Sequence[int]) -> tuple[int, int]:
    """(number of tokens that two prompts share at the start, number that they share at the end).

    Arguments:
        prompt: Token ids of one prompt.
        other_prompt: Token ids of the other prompt.
    """
    # The end is counted in what the start leaves over, so that no token counts for both.
    shorter = min(len(prompt), len(other_prompt))
    start = next((i for i in range(shorter) if prompt[i] != other_prompt[i]), shorter)
    end = next((i for i in range(shorter - start) if prompt[-1 - i] != other_prompt[-1 - i]), shorter - start)
    return start, end


@dataclass(frozen=True, kw_only=True)
class PatchTable(Experiment):
    """Activation patching of a list of places, given as a table with one row each.

    Rows of one kind and layer form a cell. The other fields are those of `ActivationPatching`.

    Raises:
        StageError: There are no rows.
        PromptError: A prompt is empty, or positions of the prompts do not correspond.
    """

    clean: tuple[int, ...]
    """Token ids of the clean prompt."""
    corrupted: tuple[int, ...]
    """Token ids of the corrupted prompt."""
    index: tuple[TableRow, ...]
    """(hook kind, layer, position, head) of each row; None means all positions or heads."""
    metrics: tuple[Metric, ...]
    """Metrics that are computed from the logits of every run."""
    align: tuple[int, ...] | None = None
    """Clean position of each corrupted one; None for prompts of equal length."""
    at: int = -1
    """Position whose next-token logits the metrics read; negative ones count from the end."""

    name: ClassVar[str] = "patch_table"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = outputs_along("index")
    reads_text: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.index:
            raise StageError(
                "patch_table: expected at least one row (kind, layer, position, head) in index, found none"
            )
        check_lengths(self.clean, self.corrupted, self.align)

    @property
    def grid(self) -> ActivationPatching:
        """Patching grid that contains all rows as places."""
        kinds = tuple(dict.fromkeys(kind for kind, *_ in self.index))
        layers = tuple(sorted({layer for _, layer, *_ in self.index}))
        return ActivationPatching(
            clean=self.clean,
            corrupted=self.corrupted,
            kinds=kinds,
            layers=layers,
            metrics=self.metrics,
            align=self.align,
            at=self.at,
        )

    def params(self) -> dict[str, Any]:
        """Fields that enter the key of results: all except the rows, which are labels of cells."""
        fields = {name: value for name, value in vars(self).items() if name != "index"}
        return {**fields, "metrics": [metric.canonical() for metric in self.metrics]}

    def outputs_on(self, config: Architecture) -> Mapping[str, Output]:
        """Declared outputs: one array [index] per metric, and the metrics of the unpatched runs."""
        return metric_outputs(self.metrics, ["index"], 1)

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One cell per kind and layer, with its places as a label.

        Raises:
            StageError: A row names a head of a kind without heads, or `Grid.check` refuses a field.
            InterventionError: An index is out of range.
        """
        self.grid.check(config)
        for kind, _, position, head in self.index:
            if head is not None and kind in HIDDEN_KINDS:
                raise StageError(
                    f"patch_table: expected None as the head of rows with kind {kind}, which has no heads, "
                    f"found head {head}"
                )
            in_range("patch_table", "head", None if head is None else (head,), num_heads(config, kind))
            in_range(
                "patch_table", "position", None if position is None else (position,), len(self.corrupted)
            )
        return [
            {"kind": kind, "layer": layer, "places": [list(self.index[row][2:]) for row in rows]}
            for (kind, layer), rows in self._rows().items()
        ]

    def _rows(self) -> dict[tuple[str, int], list[int]]:
        """Numbers of the rows of each (kind, layer), which form a cell."""
        rows: dict[tuple[str, int], list[int]] = {}
        for row, (kind, layer, *_) in enumerate(self.index):
            rows.setdefault((kind, layer), []).append(row)
        return rows

    def prepare(self, model: Model) -> PreparedGrid:
        """Results of both runs without patches, with the clean activations of the rows' layers."""
        return self.grid.prepare(model)

    def runs(self, prepared: PreparedGrid, cell: CellLabels) -> Sequence[Run]:
        """One patched run per row of the cell."""
        grid, layers = self.grid, [cell["layer"] % prepared.config.num_layers]
        heads, length = num_heads(prepared.config, cell["kind"]), len(self.corrupted)
        places = [
            GridPlace(None if position is None else position % length, None if head is None else head % heads)
            for position, head in cell["places"]
        ]
        specs = [grid.change(HookSpec(), prepared, cell["kind"], layers, place, 0) for place in places]
        return [Run(self.corrupted, spec, grid.want) for spec in specs]

    def sketch(self, config: Architecture, cell: CellLabels) -> Sequence[Run]:
        """The runs with constants in place of activations, for planning."""
        return self.runs(PreparedGrid(config, np.zeros(0), [], self.grid.blank(config), {}), cell)

    def measure(self, prepared: PreparedGrid, cell: CellLabels, result: HookCache) -> Any:
        """All metrics of one run before rescaling, float64 [metric]."""
        return self.grid.measure(prepared, cell, result)

    def dataset(self, prepared: PreparedGrid, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """Metrics of the rows of a cell, [index]."""
        return metrics_of(prepared, self.metrics, np.array(measured)[:, None], ["index"])

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """All rows in the order of `index`, with kind, layer, position and head (-1: all) as coordinates."""
        import xarray as xr

        # "minimal": the unpatched metrics, without the axis, are equal in all cells.
        whole = xr.concat(
            parts, "index", data_vars="minimal", compat="override", coords="minimal", join="exact"
        )
        # Cells group rows by kind and layer: argsort of their original numbers restores the order.
        order = np.argsort([row for rows in self._rows().values() for row in rows])
        kinds, layers, positions, heads = zip(*self.index, strict=True)
        labels = {"kind": list(kinds), "layer": np.array(layers, np.int64)}
        for name, column in (("position", positions), ("head", heads)):
            labels[name] = np.array([-1 if values is None else values for values in column], np.int64)
        return whole.isel(index=order).assign_coords({n: ("index", values) for n, values in labels.items()})


def block_every(**fields: Any) -> ActivationPatching:
    """Patching of resid_pre, attn_out and mlp_out by position: [kind, layer, position].

    This is TransformerLens's `get_act_patch_block_every`.

    Arguments:
        fields: Fields of `ActivationPatching` other than `kinds` and `over`.
    """
    return ActivationPatching(kinds=("resid_pre", "attn_out", "mlp_out"), over="position", **fields)


def head_all_pos_every(**fields: Any) -> ActivationPatching:
    """Patching of z, q, k, v and attention pattern by head, over all positions: [kind, layer, head].

    This is TransformerLens's `get_act_patch_attn_head_all_pos_every`, but key/value heads that a
    grouped-query model does not have are NaN, not 0.
    """
    return ActivationPatching(kinds=HEAD_KINDS, over="head", **fields)


def head_by_pos_every(**fields: Any) -> ActivationPatching:
    """Patching of z, q, k, v and attention pattern by head and position: [kind, layer, head, position].

    This is TransformerLens's `get_act_patch_attn_head_by_pos_every`. Positions of the pattern are queries;
    missing key/value heads are NaN.
    """
    return ActivationPatching(kinds=HEAD_KINDS, over="head_position", **fields)

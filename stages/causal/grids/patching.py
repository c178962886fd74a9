"""Activation patching: which activations carry what makes two prompts differ?

The corrupted prompt is run with the activations of one place taken from the clean run, place by place, and a
metric says how much of the clean answer comes back (Vig et al. 2020; Meng et al. 2022; Heimersheim & Nanda
2024, "How to use and interpret activation patching"). Only the place itself is overwritten; everything after
it is the corrupted run's own reaction.

Border: token ids and hook points in, labelled arrays out; loops over no model (the runs go to forward/) and
knows no texts. The grid and its axes are in patching_grid.py, the metrics in patching_metrics.py.

    chosen = ActivationPatching(clean=a, corrupted=b, kinds=("resid_pre",), metrics=(Recovery(KL()),))
    found = run(chosen.on("specimen"), store)      # recovery [layer, position]
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
from .patching_results import PreparedGrid, as_vector, metric_outputs, metrics_of, outputs_along, token_texts

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
"""Kind, layer, position or None for all, head or None for all."""


@dataclass(frozen=True, kw_only=True)
class ActivationPatching(Grid):
    """The corrupted prompt with activations of the clean run, one place at a time.

    clean, corrupted: token ids of equal length; or of different lengths with `align`: for every corrupted
    position, the clean one whose activations belong there (`align_ends` makes one). The rest: see `Grid`.
    """

    clean: tuple[int, ...]
    corrupted: tuple[int, ...]
    align: tuple[int, ...] | None = None

    name: ClassVar[str] = "activation_patching"
    version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_lengths(self.clean, self.corrupted, self.align)

    @property
    def prompt(self) -> tuple[int, ...]:
        """The corrupted one, into which clean activations are put."""
        return self.corrupted

    def check(self, config: Architecture) -> None:
        """As `Grid.check`; StageError for attention patterns of aligned prompts: their axes differ."""
        super().check(config)
        if self.align is not None and "pattern" in self.kinds:
            raise StageError(
                "activation_patching: expected prompts of equal length to patch the pattern, found align=…; "
                "patch z instead, or choose other prompts"
            )

    def prepare(self, model: Model) -> PreparedGrid:
        """Both runs unpatched, with the clean activations of every layer."""
        return pair_of_runs(self, model, self.held(model.config))

    def change(
        self,
        spec: HookSpec,
        prepared: PreparedGrid,
        kind: str,
        layers: Sequence[int],
        place: GridPlace,
        sample: int,
    ) -> HookSpec:
        """The place replaced by what the clean run has there; of an attention edge, its weight alone."""
        for layer in layers:
            point = HookPoint(kind, layer)
            value = part_of(prepared.activations["clean", point], point, place)
            if place.key is not None:
                # The row is that of the corrupted run up to here: nothing before the pattern is changed.
                row = (
                    part_of(prepared.activations["corrupted", point], point, place) * 1
                )  # a copy to write to
                row[..., place.key] = value[..., place.key]
                value = row
            spec = spec.intervene(point, Replace(value, **where(place, point)))
        return spec


@dataclass(frozen=True, kw_only=True)
class DonorPatching(ActivationPatching):
    """The corrupted prompt with activations of a third one, measured against the clean one: a control.

    donor: token ids, as many as of the clean prompt, with which it has nothing to do. States as foreign as
    the clean ones bring nothing of the clean answer back, unless any change of the place does.
    """

    donor: tuple[int, ...]

    name: ClassVar[str] = "donor_patching"
    version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_lengths(self.donor, self.clean, None)

    def prepare(self, model: Model) -> PreparedGrid:
        """As for patching, with the states of the donor in place of the clean ones."""
        return pair_of_runs(self, model, self.held(model.config), self.donor)


def pair_of_runs(
    grid: ActivationPatching, model: Model, held: Sequence[HookPoint], donor: tuple[int, ...] = ()
) -> PreparedGrid:
    """The clean and the corrupted run, nothing patched; activations by run and hook point.

    donor: the prompt whose activations stand for the clean ones, if any.
    """
    align = grid.align or tuple(range(len(grid.clean)))
    is_edges = grid.over == "edge"
    asked = [
        Run(grid.clean, HookSpec().capture(*held), Logits((align[grid.at],), grid.want.tokens)),
        Run(grid.corrupted, HookSpec().capture(*held) if is_edges else None, grid.want),
    ]
    if donor:
        asked.append(Run(donor, HookSpec().capture(*held), None))
    found = dict(stream(model, asked))
    acts = {("clean", point): found[2 if donor else 0][point][0] for point in held}
    if grid.align is not None:
        chosen = list(align)
        acts = {
            (run, point): value[(slice(None),) * position_axis(point) + (chosen,)]
            for (run, point), value in acts.items()
        }
    if is_edges:
        acts |= {("corrupted", point): found[1][point][0] for point in held}
    texts = {
        "token": token_texts(model, grid.corrupted),
        "clean_token": token_texts(model, [grid.clean[i] for i in align]),
    }
    known = {name: each for name, each in texts.items() if each is not None}
    clean, corrupted = (as_vector(found[i].logits) for i in range(2))
    return PreparedGrid(model.config, clean, [corrupted], acts, known)


def check_lengths(clean: Sequence[int], corrupted: Sequence[int], align: Sequence[int] | None) -> None:
    """PromptError for prompts whose positions do not correspond."""
    if not clean or not corrupted:
        raise PromptError("activation patching: expected two prompts, found an empty one")
    if align is None and len(clean) != len(corrupted):
        raise PromptError(
            "activation patching: expected a clean and a corrupted prompt of equal length, found "
            f"{len(clean)} and {len(corrupted)} tokens; choose others, or say which positions correspond: "
            "align=align_ends(clean, corrupted)"
        )
    if align is not None and (len(align) != len(corrupted) or not all(0 <= i < len(clean) for i in align)):
        raise PromptError(
            f"activation patching: expected align to name a clean position in 0..{len(clean) - 1} for each "
            f"of {len(corrupted)} corrupted ones, found {list(align)}"
        )


def align_ends(clean: Sequence[int], corrupted: Sequence[int]) -> tuple[int, ...]:
    """For every corrupted position, the clean one it corresponds to.

    Counted from the start as far as tokens are the same, likewise from the end; between those in order, the
    last one serving for what is too much.
    """
    start, end = common_ends(clean, corrupted)
    last = max(len(clean) - end - 1, start if start < len(clean) else len(clean) - 1)
    middle = [min(i, last) for i in range(start, len(corrupted) - end)]
    return (*range(start), *middle, *range(len(clean) - end, len(clean)))


def common_ends(one: Sequence[int], other: Sequence[int]) -> tuple[int, int]:
    """How many tokens two prompts share at the start, and how many at the end, none counted twice."""
    least = min(len(one), len(other))
    start = next((i for i in range(least) if one[i] != other[i]), least)
    end = next((i for i in range(least - start) if one[-1 - i] != other[-1 - i]), least - start)
    return start, end


@dataclass(frozen=True, kw_only=True)
class PatchTable(Experiment):
    """Any list of places: one number per row and metric, in the order of the rows.

    index: (kind, layer, position or None for all, head or None for all). clean, corrupted, metrics, align,
    at: as of `ActivationPatching`. Rows of one kind and layer are a cell.
    """

    clean: tuple[int, ...]
    corrupted: tuple[int, ...]
    index: tuple[TableRow, ...]
    metrics: tuple[Metric, ...]
    align: tuple[int, ...] | None = None
    at: int = -1

    name: ClassVar[str] = "patch_table"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = outputs_along("index")
    reads_text: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.index:
            raise StageError("patch_table: expected at least one (kind, layer, position, head), found none")
        check_lengths(self.clean, self.corrupted, self.align)

    @property
    def grid(self) -> ActivationPatching:
        """The grid the rows are places of."""
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
        """All fields but the rows, which are in the cells."""
        given = {name: value for name, value in vars(self).items() if name != "index"}
        return {**given, "metrics": [metric.canonical() for metric in self.metrics]}

    def outputs_on(self, config: Architecture) -> Mapping[str, Output]:
        """An array [index] per metric, by its name, and what the unpatched runs give."""
        return metric_outputs(self.metrics, ["index"], 1)

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One per kind and layer, with its places."""
        self.grid.check(config)
        for kind, _, position, head in self.index:
            if head is not None and kind in HIDDEN_KINDS:
                raise StageError(f"patch_table: {kind} has no heads, found head {head}; give None")
            in_range("patch_table", "head", None if head is None else (head,), num_heads(config, kind))
            in_range(
                "patch_table", "position", None if position is None else (position,), len(self.corrupted)
            )
        return [
            {"kind": kind, "layer": layer, "places": [list(self.index[row][2:]) for row in rows]}
            for (kind, layer), rows in self._rows().items()
        ]

    def _rows(self) -> dict[tuple[str, int], list[int]]:
        found: dict[tuple[str, int], list[int]] = {}
        for row, (kind, layer, *_) in enumerate(self.index):
            found.setdefault((kind, layer), []).append(row)
        return found

    def prepare(self, model: Model) -> PreparedGrid:
        """Both runs unpatched, with the clean activations of the layers named."""
        return self.grid.prepare(model)

    def runs(self, prepared: PreparedGrid, cell: CellLabels) -> Sequence[Run]:
        """One per row of the cell, in the order of its places."""
        grid, layers = self.grid, [cell["layer"] % prepared.config.num_layers]
        heads, length = num_heads(prepared.config, cell["kind"]), len(self.corrupted)
        chosen = [
            GridPlace(None if position is None else position % length, None if head is None else head % heads)
            for position, head in cell["places"]
        ]
        specs = [grid.change(HookSpec(), prepared, cell["kind"], layers, place, 0) for place in chosen]
        return [Run(self.corrupted, spec, grid.want) for spec in specs]

    def sketch(self, config: Architecture, cell: CellLabels) -> Sequence[Run]:
        """The runs with constants at every place."""
        return self.runs(PreparedGrid(config, np.zeros(0), [], self.grid.blank(config), {}), cell)

    def measure(self, prepared: PreparedGrid, cell: CellLabels, result: HookCache) -> Any:
        """Every metric of one run."""
        return self.grid.measure(prepared, cell, result)

    def dataset(self, prepared: PreparedGrid, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """The metrics of the rows of a cell, [index]."""
        return metrics_of(prepared, self.metrics, np.array(measured)[:, None], ["index"])

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """All rows in their order; coordinates say what each is, -1 for all positions or all heads."""
        import xarray as xr

        names = [name for name, variable in parts[0].data_vars.items() if "index" in variable.dims]
        whole = xr.concat(parts, "index", data_vars=names, compat="override", coords="minimal", join="exact")
        order = np.argsort([row for rows in self._rows().values() for row in rows])
        kinds, layers, positions, heads = zip(*self.index, strict=True)
        labels = {"kind": list(kinds), "layer": np.array(layers, np.int64)}
        for name, chosen in (("position", positions), ("head", heads)):
            labels[name] = np.array([-1 if each is None else each for each in chosen], np.int64)
        return whole.isel(index=order).assign_coords({n: ("index", each) for n, each in labels.items()})


def block_every(**given: Any) -> ActivationPatching:
    """TransformerLens's bundle: resid_pre, attn_out and mlp_out, [kind, layer, position]."""
    return ActivationPatching(kinds=("resid_pre", "attn_out", "mlp_out"), over="position", **given)


def head_all_pos_every(**given: Any) -> ActivationPatching:
    """TransformerLens's bundle: z, q, k, v and pattern of each head at all positions, [kind, layer, head].

    NaN for the key/value heads that grouped-query models do not have (TransformerLens has zeros there).
    """
    return ActivationPatching(kinds=HEAD_KINDS, over="head", **given)


def head_by_pos_every(**given: Any) -> ActivationPatching:
    """TransformerLens's bundle: the same by position (of the pattern: query), [kind, layer, head, position];
    NaN as in `head_all_pos_every`."""
    return ActivationPatching(kinds=HEAD_KINDS, over="head_position", **given)

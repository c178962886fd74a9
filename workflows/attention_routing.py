"""Which heads carry a plan to where it is used? Attention to the planning site while features are exchanged
there.

Features of the expected word are suppressed and another's injected at one position, and the weight with
which the prompt's last token attends to it is compared in every head of every layer, at one strength and
over a range (stages/features/sweeps.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..store.errors import ConfigError
from .answers import plain
from .feature_injection import Planned, feature_json
from .feature_presets import chosen_preset
from .settings import setting
from .workflow import Workflow

if TYPE_CHECKING:
    import xarray as xr
    from rich.table import Table

    from ..stages.forward.model import Model
    from .report import Element

__all__ = ["AttentionRouting", "Settings", "top_heads"]

TOP = 20
"""Heads listed."""


@dataclass(frozen=True)
class Settings:
    """What `--set` can change; what is left empty is the preset's."""

    preset: str = setting("specimen", "published experiment, or the specimen's own")
    model: str = setting("", "hub id or directory")
    dictionary: str = setting("", "transcoders: directory or org/repo")
    prompt: str = setting("", "prompt to read")
    suppress: tuple[str, ...] = setting((), 'features to suppress, layer:index; "none" for no suppression')
    inject: str = setting("", "feature to inject, layer:index")
    site: str = setting("", "where they are exchanged: a token of the prompt, or its position")
    strength: float = setting(0.0, "units added and taken away; 0: the preset's, 10 in the published ones")
    max_strength: float = setting(20.0, "end of the range of strengths")
    steps: int = setting(12, "strengths in the range, evenly spaced up to its end")
    dtype: str = setting("float32", "what the model computes in")

    def __post_init__(self) -> None:
        if self.steps < 1 or self.max_strength <= 0 or self.strength < 0:
            raise ConfigError(
                f"expected steps of at least 1 and strengths above 0, found {self.steps}, "
                f"{self.max_strength} and {self.strength}"
            )


class AttentionRouting(Workflow):
    """One edge, all heads, with features exchanged at its source."""

    name = "attention_routing"
    question = "Which heads carry a plan to where it is used?"
    settings_type = Settings

    def __init__(self, settings: Settings, model: Model | None = None) -> None:
        super().__init__(settings)
        preset = chosen_preset(settings)
        self.planned = Planned(preset, model, settings.dtype)
        self.strength = preset.strength
        self.range = [step * settings.max_strength / settings.steps for step in range(1, settings.steps + 1)]
        self.nodes = {
            "sweep": self.planned.sweep(
                self.planned.doses,
                tuple(sorted({self.strength, *self.range})),
                (),
                positions=(self.planned.site,),
                edge=(self.planned.last, self.planned.site),
            )
        }

    @cached_property
    def sweep(self) -> xr.Dataset:
        """[strength, layer, head]."""
        return self.result("sweep").load().isel(position=0)

    @property
    def change(self) -> xr.DataArray:
        """Steered - untouched weight of the edge, [strength, layer, head]."""
        found: xr.DataArray = self.sweep["attention"] - self.sweep["baseline_attention"]
        return found.assign_attrs(units="1", long_name="change of attention weight")

    def tables(self) -> list[Table]:
        """The heads that move most at the one strength."""
        from rich.table import Table

        planned = self.planned
        edge = (planned.tokens[planned.last], planned.tokens[planned.site])
        title = (
            f"{planned.heading}: {plain(edge[0])!r} ({planned.last}) looking at {plain(edge[1])!r} "
            f"({planned.site}) while {planned.inject} is injected there, strength {self.strength:g}"
        )
        table = Table(title=title, box=None, pad_edge=False)
        for column in ("layer", "head", "untouched", "steered", "change"):
            table.add_column(column, justify="right")
        for row in top_heads(self.sweep.sel(strength=self.strength))[:10]:
            table.add_row(
                str(row["layer"]),
                str(row["head"]),
                f"{row['baseline_attn']:.4f}",
                f"{row['steered_attn']:.4f}",
                f"{row['delta']:+.4f}",
            )
        total = float(np.abs(self.change.sel(strength=self.strength)).sum())
        table.caption = f"sum of |change| over all heads and layers: {total:.4f}"
        return [table]

    def draw(self, folder: Path) -> list[Path]:
        """All heads at the one strength, and the range."""
        from .figures_features import routing_page

        planned, swept = self.planned, self.change.sel(strength=self.range)
        layer, head = self._top
        return [
            self.figure(
                folder / "attention_routing.png",
                lambda: routing_page(
                    self.change.sel(strength=self.strength).values,
                    self.range,
                    abs(swept).sum(("layer", "head")).values.tolist(),
                    swept.isel(layer=layer, head=head).values.tolist(),
                    edge=(planned.tokens[planned.last], planned.tokens[planned.site]),
                    model=planned.subject.name,
                    footer=self.footer,
                ),
            )
        ]

    def elements(self) -> list[Element]:
        """The table, and all heads."""
        from .report import Heatmap, from_rich

        change = self.change.sel(strength=self.strength)
        return [
            *map(from_rich, self.tables()),
            Heatmap.of(change, title="Change of the edge's weight, by head"),
        ]

    def to_json(self) -> dict[str, Any]:
        """The fields of candle-mi's example."""
        planned, preset = self.planned, self.planned.preset
        config = planned.subject.config
        layer, head = self._top
        rows = top_heads(self.sweep.sel(strength=self.strength), None)
        by_place = sorted(rows, key=lambda row: (row["layer"], row["head"]))
        heads = config.axis_sizes["head"]
        return {
            **self.header(),
            "model_id": planned.subject.files.name,
            "clt_repo": preset.dictionary,
            "prompt": planned.prompt,
            "feature": feature_json(planned.inject),
            "suppress_features": [feature_json(feature) for feature in planned.suppress],
            "strength": self.strength,
            "planning_site": planned.site,
            "output_position": planned.last,
            "n_layers": config.num_layers,
            "n_heads": heads,
            "head_deltas": [by_place[at : at + heads] for at in range(0, len(by_place), heads)],
            "top_heads": rows[:TOP],
            "strength_sweep": [
                {
                    "strength": strength,
                    "top_head_delta": float(self.change.sel(strength=strength)[layer, head]),
                    "total_routing_shift": float(np.abs(self.change.sel(strength=strength)).sum()),
                }
                for strength in self.range
            ],
        }

    @property
    def _top(self) -> tuple[int, int]:
        """Layer and head that move most at the one strength."""
        change: npt.NDArray[Any] = np.abs(self.change.sel(strength=self.strength).values)
        layer, head = np.unravel_index(int(change.argmax()), change.shape)
        return int(layer), int(head)


def top_heads(sweep: xr.Dataset, count: int | None = TOP) -> list[dict[str, Any]]:
    """Heads by how much their weight on the edge changed, largest first; equal ones in order of layer and
    head.

    sweep: attention and baseline_attention [layer, head].
    """
    after, before = sweep["attention"].values, sweep["baseline_attention"].values
    order = np.argsort(-np.abs(after - before), axis=None, kind="stable")[:count]
    places = zip(*np.unravel_index(order, after.shape), strict=True)
    return [
        {
            "layer": int(layer),
            "head": int(head),
            "baseline_attn": float(before[layer, head]),
            "steered_attn": float(after[layer, head]),
            "delta": float(after[layer, head] - before[layer, head]),
        }
        for layer, head in places
    ]


WORKFLOW = AttentionRouting

"""Who looks where? Attention patterns of one prompt, by layer and by head.

Captures the attention weights of every layer (once; they stay in the store), and reads off them where one
query looks, who looks at one key, and in which layer that edge is strongest (stages/attention.py).

Defaults: the last token as the query, the first as the key: how much attention the first position, often a
BOS, takes in.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..stages.attention import (
    attention_flow,
    attention_from_position,
    attention_to_position,
    peak_layer,
    top_attended_positions,
    unpacked,
)
from ..stages.forward.edges import SteeringSpec
from ..stages.lens import format_token
from ..stages.positions import position_of
from ..store.errors import ConfigError
from .answers import encoded, fact, named, plain
from .settings import setting
from .subject import Subject
from .workflow import Workflow

if TYPE_CHECKING:
    import xarray as xr
    from rich.table import Table

    from ..stages.forward.model import Model
    from .report import Element

__all__ = ["AttentionPatterns", "Settings"]


@dataclass(frozen=True)
class Settings:
    """What `--set` can change."""

    model: str = setting("specimen", 'hub id, directory, or "specimen"')
    prompt: str = setting("", "prompt to read; none: a shipped fact, or the capital of France")
    query: int | str = setting(
        "last", 'position that reads: an index, "first", "last", or a phrase of the prompt'
    )
    key: int | str = setting("first", "position that is read")
    top_k: int = setting(5, "most attended positions listed per layer")
    dtype: str = setting("float32", "what the model computes in")

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ConfigError(f"expected top_k to be at least 1, found {self.top_k}")


class AttentionPatterns(Workflow):
    """One prompt's attention."""

    name = "attention_patterns"
    question = "Who looks where?"
    settings_type = Settings

    def __init__(self, settings: Settings, model: Model | None = None) -> None:
        super().__init__(settings)
        self.subject = Subject(model or settings.model, settings.dtype)
        self.prompt, _ = fact(settings.model, settings.prompt, "")
        self.encoding = encoded(self.subject, self.prompt)
        self.query = position_of(self.encoding, settings.query)
        self.key = position_of(self.encoding, settings.key)
        # Refuses an edge into the future.
        SteeringSpec.scale(1.0).edge(self.query, self.key).resolved(len(self.encoding))
        self.captured = self.subject.capture(self.subject.pack([self.prompt]), "blocks.*.attn.hook_pattern")
        pattern = self.captured["pattern"]
        self.nodes = {"flow": attention_flow.on(pattern=pattern, query=self.query, key=self.key)}

    @cached_property
    def flow(self) -> xr.Dataset:
        """The head means, and the chosen query and key by head; in memory."""
        return self.result("flow").load()

    @property
    def tokens(self) -> list[str]:
        """Text of each token of the prompt."""
        return named(self.subject, self.encoding.ids)

    @property
    def peak(self) -> tuple[int, float]:
        """(layer, weight) where the query looks at the key most."""
        return peak_layer(self.flow["mean_pattern"], self.query, self.key)

    def tables(self) -> list[Table]:
        """Where the query looks in each layer, and who looks at the key in the layer of the peak."""
        return [self._layers_table(), self._incoming_table()]

    def draw(self, folder: Path) -> list[Path]:
        """Where the query looks by layer; the pattern of the peak layer; the edge by layer and head."""
        from .figures_attention import patterns_page

        return [
            self.figure(
                folder / "attention_patterns.png",
                lambda: patterns_page(
                    self.flow,
                    self.tokens,
                    query=self.query,
                    key=self.key,
                    peak=self.peak[0],
                    model=self.subject.name,
                    footer=self.footer,
                ),
            )
        ]

    def elements(self) -> list[Element]:
        """Every head to look into, the edge by layer, and the tables."""
        from .report import Attention, Line, Lines, from_rich

        if self.store is None:
            return super().elements()
        pattern = unpacked(self.captured.open(self.store)["pattern"]).transpose("layer", "head", ...)
        layers, (peak, _) = tuple(pattern["layer"].values.tolist()), self.peak
        edge = self.flow["from_query"].transpose("layer", "head", ...).values[..., self.key]
        names = [f"{format_token(self.tokens[place])!r} ({place})" for place in (self.query, self.key)]
        return [
            Attention(
                title=f"Who looks where in {self.prompt!r}",
                caption="Point at a token, or walk with the arrow keys. The weights of a token sum to 1 over "
                "what it reads; weights alone do not say what a head does with them.",
                tokens=tuple(map(format_token, self.tokens)),
                layers=layers,
                pattern=pattern.values,
                overview=edge,
                overview_name=f"how much {names[0]} reads {names[1]}",
                layer=peak,
                head=int(edge[layers.index(peak)].argmax()),
                query=self.query,
            ),
            Lines(
                title=f"How much {names[0]} reads {names[1]}",
                x=layers,
                x_name="layer",
                y_name="attention weight",
                low=0.0,
                lines=(
                    Line("mean over heads", edge.mean(axis=1)),
                    Line("largest head", edge.max(axis=1)),
                    Line("smallest head", edge.min(axis=1), control=True),
                ),
            ),
            *map(from_rich, self.tables()),
        ]

    def to_json(self) -> dict[str, Any]:
        """What candle-mi's example prints, as fields: per layer the most attended positions, and the peak."""
        config, mean = self.subject.config, self.flow["mean_pattern"]
        layers = mean["layer"].values.tolist()
        layer, weight = self.peak
        incoming = attention_to_position(mean, layer, self.key)
        return {
            **self.header(),
            "model_id": self.subject.name,
            "prompt": self.prompt,
            "tokens": self.tokens,
            "n_layers": config.num_layers,
            "n_heads": config.axis_sizes["head"],
            "query": self.query,
            "key": self.key,
            "layers": [
                {
                    "layer": one,
                    "top_attended": [
                        {"position": place, "token": self.tokens[place], "weight": value}
                        for place, value in top_attended_positions(mean, one, self.query, self.settings.top_k)
                    ],
                    "weight_by_head": self._by_head(one),
                }
                for one in layers
            ],
            "peak_layer": layer,
            "peak_weight": weight,
            "incoming": [
                {"position": place, "token": self.tokens[place], "weight": float(value)}
                for place, value in enumerate(incoming.values)
                if place >= self.key
            ],
        }

    def _by_head(self, layer: int) -> list[float]:
        """What each head gives the key from the query."""
        found: list[float] = self.flow["from_query"].sel(layer=layer)[:, self.key].values.tolist()
        return found

    def _layers_table(self) -> Table:
        from rich.table import Table

        name = plain(self.tokens[self.query])
        title = f"Where {name!r} ({self.query}) looks, mean over the heads of {self.subject.name}"
        table = Table(title=title, box=None, pad_edge=False)
        table.add_column("layer", justify="right", style="bold")
        for k in range(min(self.settings.top_k, 5, self.query + 1)):
            table.add_column(("most", "2nd", "3rd", "4th", "5th")[k], no_wrap=True)
        mean = self.flow["mean_pattern"]
        for layer in mean["layer"].values.tolist():
            best = top_attended_positions(mean, layer, self.query, len(table.columns) - 1)
            cells = [
                f"{plain(self.tokens[place])} [dim]({place}) {weight:.3f}[/dim]" for place, weight in best
            ]
            table.add_row(str(layer), *cells)
        where, weight = self.peak
        table.caption = (
            f"it looks most at {plain(self.tokens[self.key])!r} ({self.key}) in layer {where}: {weight:.3f}"
        )
        return table

    def _incoming_table(self) -> Table:
        from rich.table import Table

        layer, _ = self.peak
        title = f"Who looks at {plain(self.tokens[self.key])!r} ({self.key}) in layer {layer}"
        table = Table(title=title, box=None, pad_edge=False)
        table.add_column("position", justify="right")
        table.add_column("token", no_wrap=True, min_width=8)
        for column in ("mean", "largest head"):
            table.add_column(column, justify="right")
        mean = attention_to_position(self.flow["mean_pattern"], layer, self.key).values
        heads = self.flow["to_key"].sel(layer=layer).values
        mine = attention_from_position(self.flow["mean_pattern"], layer, self.query).values[self.key]
        for place in range(self.key, len(self.tokens)):
            top = int(heads[:, place].argmax())
            largest = f"{heads[top, place]:.3f} (head {top})"
            table.add_row(str(place), plain(self.tokens[place]), f"{mean[place]:.3f}", largest)
        table.caption = f"the query above gives it {mine:.3f}"
        return table


WORKFLOW = AttentionPatterns

"""Which features does a sparse autoencoder see in a prompt, and how much of it do they explain?

Runs the prompt once, encodes what the autoencoder's hook point holds, and lists the strongest features of one
position, with the reconstruction's error over all positions (stages/features/activity.py). Works for
transcoders too; of dictionaries with several layers one is told.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..stages.features.activity import FeatureActivity
from ..stages.features.dictionary import Dictionary, FeatureId
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

__all__ = ["SaeFeatures", "Settings"]


@dataclass(frozen=True)
class Settings:
    """What `--set` can change."""

    model: str = setting("specimen", 'hub id, directory, or "specimen"')
    dictionary: str = setting("", "autoencoder: directory or org/repo; none: specimen/sae")
    prompt: str = setting("", "prompt to read; none: a shipped fact, or the capital of France")
    layer: int | None = setting(None, "layer told, of dictionaries with several; none: the middle one")
    position: int | str = setting(
        "last", 'position told: an index, "first", "last", or a phrase of the prompt'
    )
    top_k: int = setting(10, "features listed")
    zero_positions: int = setting(0, "first positions that are not encoded")
    dtype: str = setting("float32", "what the model computes in")

    def __post_init__(self) -> None:
        if self.top_k < 1 or self.zero_positions < 0:
            raise ConfigError(
                f"expected top_k of at least 1 and zero_positions of at least 0, found {self.top_k} and "
                f"{self.zero_positions}"
            )


class SaeFeatures(Workflow):
    """One prompt through a dictionary."""

    name = "sae_features"
    question = "Which features does a sparse autoencoder see in a prompt, and how much of it do they explain?"
    settings_type = Settings

    def __init__(self, settings: Settings, model: Model | None = None) -> None:
        super().__init__(settings)
        self.subject = Subject(model or settings.model, settings.dtype)
        self.prompt, _ = fact(settings.model, settings.prompt, "")
        self.encoding = encoded(self.subject, self.prompt)
        self.dictionary = dictionary_of(settings.dictionary, settings.model, "sae")
        self.dictionary.require_fit(self.subject.config, self.subject.name)
        layers = self.dictionary.layers
        self.layer = layers[len(layers) // 2] if settings.layer is None else settings.layer
        self.dictionary.read_hook(self.layer)  # refuses a layer it does not have
        self.position = position_of(self.encoding, settings.position)
        activity = FeatureActivity(
            tuple(self.encoding.ids),
            self.dictionary.name,
            self.dictionary.identity,
            settings.zero_positions,
        )
        self.nodes = {"activity": activity.on(model or settings.model, dtype=settings.dtype)}

    @cached_property
    def activity(self) -> xr.Dataset:
        """What is active, of the one layer."""
        found = self.result("activity").load()
        return found.isel(active=found["active_layer"].values == self.layer).sel(layer=self.layer)

    @property
    def per_position(self) -> xr.DataArray:
        """How many features are active at each position, [position]."""
        import xarray as xr

        counts = np.bincount(self.activity["active_position"].values, minlength=len(self.tokens))
        about = {"units": "1", "long_name": "active features"}
        return xr.DataArray(counts, {"position": np.arange(len(counts))}, ("position",), attrs=about)

    @property
    def mse(self) -> float:
        """Mean squared error over all positions and widths."""
        return float(self.activity["error"].mean())

    @property
    def unexplained(self) -> float:
        """Share of the variance about the mean over positions that is left."""
        return float(self.activity["error"].sum() / self.activity["size"].sum())

    @property
    def tokens(self) -> list[str]:
        """Text of each token of the prompt."""
        return named(self.subject, self.encoding.ids)

    def top(self, position: int) -> list[dict[str, Any]]:
        """The strongest features of a position, largest first; equal ones by index."""
        here = self.activity.isel(active=self.activity["active_position"].values == position)
        value = here["activation"].values
        order = np.lexsort((here["active_feature"].values, -value))[: self.settings.top_k]
        return [
            {
                "layer": self.layer,
                "index": int(here["active_feature"][i]),
                "activation": float(value[i]),
                "decoder_norm": float(here["decoder_norm"][i]),
            }
            for i in order.tolist()
        ]

    def tables(self) -> list[Table]:
        """The strongest features of the position."""
        from rich.table import Table

        token = plain(self.tokens[self.position])
        title = (
            f"{self.dictionary.name} at {self.dictionary.read_hook(self.layer)} of {self.subject.name}: "
            f"{token!r} ({self.position})"
        )
        table = Table(title=title, box=None, pad_edge=False)
        for column in ("feature", "activation", "norm of decoder"):
            table.add_column(column, justify="right")
        for row in self.top(self.position):
            name = str(FeatureId(row["layer"], row["index"]))
            table.add_row(name, f"{row['activation']:.4f}", f"{row['decoder_norm']:.4f}")
        counts = self.per_position.values
        table.caption = (
            f"{counts[self.position]} active here, {counts.mean():.1f} on average; over all positions MSE "
            f"{self.mse:.4g}, {100 * self.unexplained:.1f} % of the variance unexplained"
        )
        return [table]

    def draw(self, folder: Path) -> list[Path]:
        """The strongest features of all positions."""
        from .figures_features import activity_page

        return [
            self.figure(
                folder / "sae_features.png",
                lambda: activity_page(
                    *self._grid(),
                    self.tokens,
                    place=str(self.dictionary.read_hook(self.layer)),
                    model=self.subject.name,
                    footer=self.footer,
                ),
            )
        ]

    def elements(self) -> list[Element]:
        """The table, and the strongest features of all positions."""
        import xarray as xr

        from .report import Heatmap, from_rich

        features, values = self._grid()
        about = {"units": "1", "long_name": "activation"}
        names = [str(FeatureId(self.layer, feature)) for feature in features]
        tokens = [f"{i} {token}" for i, token in enumerate(self.tokens)]
        grid = xr.DataArray(values, {"feature": names, "token": tokens}, ("feature", "token"), attrs=about)
        return [*map(from_rich, self.tables()), Heatmap.of(grid, title="The strongest features, by token")]

    def to_json(self) -> dict[str, Any]:
        """Features of every position, and the reconstruction's error."""
        counts = self.per_position.values.tolist()
        return {
            **self.header(),
            "model_id": self.subject.files.name,
            "dictionary": self.dictionary.name,
            "hook": str(self.dictionary.read_hook(self.layer)),
            "prompt": self.prompt,
            "position": self.position,
            "mse": self.mse,
            "fraction_of_variance_unexplained": self.unexplained,
            "positions": [
                {"position": i, "token": token, "active": counts[i], "top": self.top(i)}
                for i, token in enumerate(self.tokens)
            ],
        }

    def _grid(self) -> tuple[list[int], Any]:
        """Features that are among the three strongest anywhere, and their activations [feature, position]."""
        chosen = sorted({row["index"] for i in range(len(self.tokens)) for row in self.top(i)[:3]})
        values = np.zeros((len(chosen), len(self.tokens)), np.float32)
        place = {feature: i for i, feature in enumerate(chosen)}
        columns = (self.activity[name].values for name in ("active_feature", "active_position", "activation"))
        for feature, position, value in zip(*columns, strict=True):
            if feature in place:
                values[place[feature], position] = value
        return chosen, values


def dictionary_of(name: str, model: str, shipped: str) -> Dictionary:
    """A dictionary by name; without one that which ships for the specimen ("sae" or "clt").

    Raises ConfigError for another model without a dictionary.
    """
    if not name and model != "specimen":
        raise ConfigError(
            f"expected a dictionary for {model}, found none; set dictionary= a directory or org/repo"
        )
    return Dictionary.from_pretrained(name or f"specimen/{shipped}")


WORKFLOW = SaeFeatures

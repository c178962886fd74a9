"""At which place does one fact turn into another? CounterFact patching over blocks of layers.

The original prompt is run with one position, in one block of layers, taken from the counterfactual prompt
(stages/counterfact.py), for every position and block; counted is how often the next word changes, by block
and by what the token belongs to: the fact, its last token, or the instruction after it.

Defaults: pairs of shipped facts of one relation, on the specimen. `data` reads a JSON list of records with
original_prompt, counterfactual_prompt, gt_original_target and gt_counterfactual_target; a fact is the text
before the first blank line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..stages.counterfact import CounterFactPatching, blocks_of
from ..store.errors import ConfigError
from .answers import named, plain
from .fact_pairs import both_continuations, fact_pairs
from .settings import setting
from .subject import Subject
from .workflow import Workflow

if TYPE_CHECKING:
    import xarray as xr
    from rich.table import Table

    from ..stages.forward.model import Model
    from .report import Element

__all__ = ["CounterFactPatches", "Settings", "layers_told", "share"]

TYPES = ("fact", "fact_final", "other")
PAIRS = 12
"""Pairs to choose from on a page."""


@dataclass(frozen=True)
class Settings:
    """What `--set` can change."""

    model: str = setting("specimen", 'hub id, directory, or "specimen"')
    data: str = setting("", "JSON file of CounterFact records; none: pairs of shipped facts")
    limit: int = setting(12, "how many pairs, from the first on; 0 takes all")
    block_size: int = setting(0, "layers patched together; 0: 4, of small models a third of the layers")
    dtype: str = setting("float32", "what the model computes in")

    def __post_init__(self) -> None:
        if self.limit < 0 or self.block_size < 0:
            raise ConfigError(
                f"expected a limit of at least 0 and blocks of at least 0 layers, found limit={self.limit}, "
                f"block_size={self.block_size}"
            )


class CounterFactPatches(Workflow):
    """All patches of all pairs."""

    name = "counterfact_patching"
    question = "At which place does one fact turn into another?"
    settings_type = Settings

    def __init__(self, settings: Settings, model: Model | None = None) -> None:
        super().__init__(settings)
        self.subject = Subject(model or settings.model, settings.dtype)
        self.pairs = fact_pairs(self.subject, settings.data, settings.limit)
        layers = self.subject.config.num_layers
        self.block_size = settings.block_size or max(1, min(4, layers // 3))
        self.blocks = blocks_of(layers, self.block_size)
        patching = CounterFactPatching(
            pairs=tuple(each.pair for each in self.pairs), block_size=self.block_size
        )
        self.nodes = {"patches": patching.on(model or settings.model, dtype=settings.dtype)}

    @cached_property
    def patches(self) -> xr.Dataset:
        """Every patch in memory, [patch], with whether it changed the next word and what its token is."""
        found = self.result("patches").load()
        pair, position = found["pair_of"].values, found["position"].values
        own = found["original_token_id"].values[pair]
        said = found["token_id"].values
        texts = dict(
            zip(np.unique([*said, *own]).tolist(), self._texts(np.unique([*said, *own])), strict=True)
        )
        different = [texts[int(a)] != texts[int(b)] for a, b in zip(said, own, strict=True)]
        kinds = [self.pairs[i].labels[p] for i, p in zip(pair, position, strict=True)]
        return found.assign(is_different=("patch", different), token_type=("patch", kinds))

    def _texts(self, ids: Any) -> list[str]:
        return named(self.subject, ids)

    def tables(self) -> list[Table]:
        """How often the next word changes, by block and type of token."""
        from rich.table import Table

        patches, total = self.patches, len(self.pairs)
        title = f"{self.subject.name}: how often the next word changes, {total} pairs"
        table = Table(title=title, box=None, pad_edge=False)
        table.add_column("layers", style="bold", no_wrap=True)
        for column in ("any token", *TYPES, "mean KL"):
            table.add_column(column, justify="right", no_wrap=True)
        for block, layers in enumerate(self.blocks):
            here = patches["block"].values == block
            chosen = [here, *(here & self._is(kind) for kind in TYPES)]
            shares = [_told(patches["is_different"].values[which]) for which in chosen]
            mean = float(patches["kl"].values[here].mean())
            table.add_row(layers_told(layers), *shares, f"{mean:.3f}")
        table.caption = "patches that change it, of those tried; KL(original || patched) in nats, mean"
        if self.predicts:
            table.caption += "; here the last token of a fact is the one that predicts"
        first, said = self.pairs[0], both_continuations(self.subject, patches, 0)
        table.caption += (
            f"\nfirst pair: {plain(first.label)}; said {plain(said['original_continuation'])!r} and "
            f"{plain(said['cf_continuation'])!r}"
        )
        return [table]

    @property
    def predicts(self) -> bool:
        """Whether facts end their prompts, so that a fact's last token is where the next word is read."""
        return all(each.labels[-1] == "fact_final" for each in self.pairs)

    def _is(self, kind: str) -> Any:
        return self.patches["token_type"].values == kind

    def draw(self, folder: Path) -> list[Path]:
        """One page: shares by block and type, and the map of the first pair."""
        from .figures_patching import counterfact_page

        first = self.pairs[0]
        own = self.patches.isel(patch=np.flatnonzero(self.patches["pair_of"].values == 0))
        return [
            self.figure(
                folder / "counterfact_patching.png",
                lambda: counterfact_page(
                    self.patches,
                    own,
                    [layers_told(layers) for layers in self.blocks],
                    named(self.subject, first.pair.original),
                    label=first.label,
                    pairs=len(self.pairs),
                    predicts=self.predicts,
                    model=self.subject.name,
                    footer=self.footer,
                ),
            )
        ]

    def elements(self) -> list[Element]:
        """The table, and of each of the first pairs how far every patch moves the next word."""
        from .report import Choice

        pairs = tuple((each.label, self._map(i)) for i, each in enumerate(self.pairs[:PAIRS]))
        maps = Choice(
            title="How far does a patch move the next word?",
            caption="One position, in one block of layers, taken from the counterfactual prompt.",
            name="pair",
            options=pairs,
        )
        return [*super().elements(), maps]

    def _map(self, i: int) -> Element:
        """KL of every patch of a pair, block by position."""
        from .report import Heatmap

        own = self.patches.isel(patch=np.flatnonzero(self.patches["pair_of"].values == i))
        tokens = named(self.subject, self.pairs[i].pair.original)
        place = own["block"].values, own["position"].values
        kl = np.full((len(self.blocks), len(tokens)), np.nan)
        kl[place] = own["kl"].values
        changed = own["is_different"].values
        cells = zip(*(axis[changed].tolist() for axis in place), strict=True)
        return Heatmap(
            values=kl,
            rows=tuple(map(layers_told, self.blocks)),
            columns=tuple(tokens),
            row_name="layers",
            column_name="token",
            value_name=str(own["kl"].attrs["long_name"]),
            unit="nats",
            low=0.0,
            upward=True,
            framed=tuple((row, column, row, column) for row, column in cells),
            frame_name="the next word changes",
        )

    def to_json(self) -> dict[str, Any]:
        """The fields of candle-mi's example, without its clock, and where it all comes from."""
        return {
            **self.header(),
            "model_id": self.subject.name,
            "block_size": self.block_size,
            "n_layers": self.subject.config.num_layers,
            "n_blocks": len(self.blocks),
            "results": [self._pair_json(i) for i in range(len(self.pairs))],
            "summary": self._summary(),
        }

    def _pair_json(self, i: int) -> dict[str, Any]:
        pair = self.pairs[i]
        own = self.patches.isel(patch=np.flatnonzero(self.patches["pair_of"].values == i))
        said = self._texts(own["token_id"].values)
        columns = (
            own[name].values.tolist()
            for name in ("block", "position", "counterfactual_position", "is_different", "kl", "token_type")
        )
        return {
            "label": pair.label,
            "original_prompt": pair.original,
            "counterfactual_prompt": pair.counterfactual,
            "gt_original_target": pair.target,
            "gt_counterfactual_target": pair.counterfactual_target,
            "input_tokens": named(self.subject, pair.pair.original),
            **both_continuations(self.subject, self.patches, i),
            "patches": [
                {
                    "layer": self.blocks[block],
                    "orig_pos": position,
                    "cf_pos": source,
                    "ablated_continuation": text,
                    "is_different": different,
                    "kl_from_original": kl,
                    "token_type": kind,
                }
                for text, block, position, source, different, kl, kind in zip(said, *columns, strict=True)
            ],
        }

    def _summary(self) -> dict[str, Any]:
        different, block = self.patches["is_different"].values, self.patches["block"].values
        return {
            "pct_different_by_block": [
                {"block": i, "layers": layers, **share(different[block == i])}
                for i, layers in enumerate(self.blocks)
            ],
            "pct_different_by_token_type": [
                {"token_type": kind, **share(different[self._is(kind)])}
                for kind in TYPES
                if self._is(kind).any()
            ],
            "total_patches": int(different.size),
            "total_different": int(different.sum()),
        }


def share(different: Any) -> dict[str, Any]:
    """How many of some patches changed the next word."""
    count, total = int(np.sum(different)), len(different)
    return {"pct_different": 100 * count / total, "count_different": count, "count_total": total}


def layers_told(layers: Sequence[int]) -> str:
    """A block as people write it: 0-3."""
    return f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0])


def _told(different: Any) -> str:
    return f"{100 * np.mean(different):.1f} % [dim]of {len(different)}[/dim]" if len(different) else "-"


WORKFLOW = CounterFactPatches

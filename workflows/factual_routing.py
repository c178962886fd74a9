"""Which heads carry a fact to the last token? Attention to the fact when its subject is patched.

The subject of a fact is overwritten, block by block of layers, by that of a counterfactual prompt
(stages/counterfact.py); watched is how much the last token then attends to the fact, head by head. A head
whose attention moves is one that reads the subject to decide where to look.

The subject is the last token of the span in which the two prompts differ; `subject=last_fact` takes the last
token of the fact, as candle-mi does, which in CounterFact is a word of the relation. Defaults: pairs of
shipped facts on the specimen; `data` as for counterfact_patching.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..stages.counterfact import blocks_of
from ..stages.factual_routing import FactualRouting
from ..store.errors import ConfigError
from .answers import named, plain
from .counterfact_patching import layers_told
from .fact_pairs import both_continuations, fact_pairs
from .settings import setting
from .subject import Subject
from .workflow import Workflow

if TYPE_CHECKING:
    import xarray as xr
    from rich.table import Table

    from ..stages.forward.model import Model
    from .report import Element

__all__ = ["Routing", "Settings"]

OFTEN = 10
"""Heads of a block that count as its top heads (candle-mi's appearances_in_top10)."""
ROWS = 10


@dataclass(frozen=True)
class Settings:
    """What `--set` can change."""

    model: str = setting("specimen", 'hub id, directory, or "specimen"')
    data: str = setting("", "JSON file of CounterFact records; none: pairs of shipped facts")
    limit: int = setting(12, "how many pairs, from the first on; 0 takes all")
    block_size: int = setting(0, "layers patched together; 0: 4, of small models a third of the layers")
    subject: str = setting("differing", '"differing": where the prompts differ; "last_fact": as candle-mi')
    top_k: int = setting(10, "heads listed per block")
    dtype: str = setting("float32", "what the model computes in")

    def __post_init__(self) -> None:
        if self.limit < 0 or self.block_size < 0 or self.top_k < 1:
            raise ConfigError(
                "expected a limit of at least 0, blocks of at least 0 layers and top_k of at least 1, found "
                f"limit={self.limit}, block_size={self.block_size}, top_k={self.top_k}"
            )
        if self.subject not in ("differing", "last_fact"):
            raise ConfigError(f"expected subject to be differing or last_fact, found {self.subject!r}")


class Routing(Workflow):
    """Attention to the fact, with its subject patched in every block."""

    name = "factual_routing"
    question = "Which heads carry a fact to the last token?"
    settings_type = Settings

    def __init__(self, settings: Settings, model: Model | None = None) -> None:
        super().__init__(settings)
        self.subject = Subject(model or settings.model, settings.dtype)
        self.pairs = fact_pairs(self.subject, settings.data, settings.limit, rule=settings.subject)
        layers = self.subject.config.num_layers
        self.block_size = settings.block_size or max(1, min(4, layers // 3))
        self.blocks = blocks_of(layers, self.block_size)
        routing = FactualRouting(pairs=tuple(each.pair for each in self.pairs), block_size=self.block_size)
        self.nodes = {"routing": routing.on(model or settings.model, dtype=settings.dtype)}

    @cached_property
    def routing(self) -> xr.Dataset:
        """Attention in memory, with its change `delta` [pair, block, layer, head] and what was said."""
        found = self.result("routing").load()
        delta = found["attention"] - found["baseline_attention"]
        delta = delta.transpose("pair", "block", "layer", "head")
        said = [named(self.subject, row) for row in found["token_id"].values]
        own = named(self.subject, found["original_token_id"].values)
        different = [[text != before for text in row] for row, before in zip(said, own, strict=True)]
        return found.assign(delta=delta, is_different=(("pair", "block"), different))

    @cached_property
    def frequency(self) -> xr.Dataset:
        """Per head [layer, head]: in how many blocks of all pairs it is a top head, its mean |delta| there.

        Counted over (pair, block), of which there are `attrs["blocks"]`.
        """
        import xarray as xr

        size = np.abs(self.routing["delta"].values)
        flat = size.reshape(-1, size.shape[2] * size.shape[3])
        count, total = np.zeros(flat.shape[1], np.int64), np.zeros(flat.shape[1])
        for row in flat:
            top = np.argsort(-row, kind="stable")[:OFTEN]
            count[top] += 1
            total[top] += row[top]
        mean = np.divide(total, count, out=np.zeros_like(total), where=count > 0)
        shape = size.shape[2:]
        dims = ("layer", "head")
        arrays = {"appearances": (dims, count.reshape(shape)), "mean_delta": (dims, mean.reshape(shape))}
        return xr.Dataset(arrays, attrs={"blocks": len(flat)})

    def top_heads(self) -> list[tuple[int, int, int, float]]:
        """(layer, head, appearances, mean |delta|) of heads that are ever top heads, most often first; equal
        ones by mean |delta|, then by place."""
        count, mean = self.frequency["appearances"].values, self.frequency["mean_delta"].values
        found = [(int(a), int(b), int(count[a, b]), float(mean[a, b])) for a, b in np.argwhere(count > 0)]
        return sorted(found, key=lambda each: (-each[2], -each[3], each[:2]))

    def tables(self) -> list[Table]:
        """Blocks, and the heads that move most often."""
        return [self._blocks_table(), self._heads_table()]

    def draw(self, folder: Path) -> list[Path]:
        """One page: which heads move, and how much by block."""
        from .figures_patching import routing_page

        return [
            self.figure(
                folder / "factual_routing.png",
                lambda: routing_page(
                    self.routing,
                    [layers_told(layers) for layers in self.blocks],
                    rule=self.settings.subject,
                    model=self.subject.name,
                    footer=self.footer,
                ),
            )
        ]

    def elements(self) -> list[Element]:
        """Which heads move, by the block patched; and the tables."""
        from .report import Choice, Heatmap

        mean = abs(self.routing["delta"]).mean("pair")
        mean.attrs = {"units": "1", "long_name": "mean change of attention to the fact"}
        high = float(mean.max())
        blocks = tuple(
            (
                layers_told(layers),
                Heatmap.of(mean.isel(block=i).transpose("layer", "head"), low=0.0, high=high),
            )
            for i, layers in enumerate(self.blocks)
        )
        moved = Choice(
            title="Which heads look elsewhere when the subject is patched?",
            caption=f"Absolute change of the last token's attention, mean of {len(self.pairs)} pairs.",
            name="layers patched",
            options=blocks,
        )
        return [moved, *super().elements()]

    def to_json(self) -> dict[str, Any]:
        """The fields of candle-mi's example, without its clock, and where it all comes from."""
        config = self.subject.config
        return {
            **self.header(),
            "model_id": self.subject.name,
            "block_size": self.block_size,
            "n_layers": config.num_layers,
            "n_heads": config.axis_sizes["head"],
            "n_blocks": len(self.blocks),
            "subject_rule": self.settings.subject,
            "results": [self._pair_json(i) for i in range(len(self.pairs))],
            "aggregate": self._aggregate(),
        }

    def _pair_json(self, i: int) -> dict[str, Any]:
        each, found = self.pairs[i], self.routing.isel(pair=i)
        assert each.pair.subject is not None
        position, source = each.pair.subject
        return {
            "label": each.label,
            "original_prompt": each.original,
            "counterfactual_prompt": each.counterfactual,
            "gt_original_target": each.target,
            "gt_counterfactual_target": each.counterfactual_target,
            **both_continuations(self.subject, self.routing, i),
            "fact_positions": list(each.pair.fact),
            "subject": {
                "rule": self.settings.subject,
                "position": position,
                "counterfactual_position": source,
                "token": named(self.subject, each.pair.original[position : position + 1])[0],
                "counterfactual_token": named(self.subject, each.pair.counterfactual[source : source + 1])[0],
            },
            "blocks": [self._block_json(found.isel(block=block), block) for block in range(len(self.blocks))],
        }

    def _block_json(self, found: xr.Dataset, block: int) -> dict[str, Any]:
        delta = found["delta"].values
        order = np.argsort(-np.abs(delta), axis=None, kind="stable")[: self.settings.top_k]
        heads = [tuple(map(int, np.unravel_index(index, delta.shape))) for index in order]
        return {
            "layers": self.blocks[block],
            "is_different": bool(found["is_different"]),
            "continuation": named(self.subject, [found["token_id"]])[0],
            "kl_from_original": float(found["kl"]),
            "top_heads": [
                {
                    "layer": layer,
                    "head": head,
                    "baseline_attn": float(found["baseline_attention"].values[layer, head]),
                    "patched_attn": float(found["attention"].values[layer, head]),
                    "delta": float(delta[layer, head]),
                }
                for layer, head in heads
            ],
            "total_routing_shift": float(np.abs(delta).sum()),
        }

    def _aggregate(self) -> dict[str, Any]:
        blocks = self.frequency.attrs["blocks"]
        shift = np.abs(self.routing["delta"].values).sum((2, 3)).mean(0)
        different = self.routing["is_different"].values.mean(0)
        return {
            "head_frequency": [
                {
                    "layer": layer,
                    "head": head,
                    "appearances_in_top10": count,
                    "pct_of_blocks": 100 * count / blocks,
                    "avg_abs_delta": mean,
                }
                for layer, head, count, mean in self.top_heads()
            ],
            "avg_routing_by_block": [
                {
                    "layers": layers,
                    "avg_total_routing_shift": float(shift[i]),
                    "pct_is_different": float(100 * different[i]),
                }
                for i, layers in enumerate(self.blocks)
            ],
        }

    def _blocks_table(self) -> Table:
        from rich.table import Table

        first = self.pairs[0]
        assert first.pair.subject is not None
        token = plain(named(self.subject, [first.pair.original[first.pair.subject[0]]])[0])
        title = f"{self.subject.name}: the subject patched, {len(self.pairs)} pairs"
        table = Table(title=title, box=None, pad_edge=False)
        table.add_column("layers", style="bold", no_wrap=True)
        for column in ("attention moved", "next word changes"):
            table.add_column(column, justify="right", no_wrap=True)
        for row in self._aggregate()["avg_routing_by_block"]:
            table.add_row(
                layers_told(row["layers"]),
                f"{row['avg_total_routing_shift']:.3f}",
                f"{row['pct_is_different']:.1f} %",
            )
        table.caption = (
            "sum over heads of the change in the last token's mean attention to the fact, mean of pairs; "
            f"subject: {self.settings.subject}, in the first pair {token!r}"
        )
        return table

    def _heads_table(self) -> Table:
        from rich.table import Table

        blocks = self.frequency.attrs["blocks"]
        table = Table(title="Heads whose attention to the fact moves most", box=None, pad_edge=False)
        for column in ("layer", "head", "in top 10", "mean change"):
            table.add_column(column, justify="right", no_wrap=True)
        for layer, head, count, mean in self.top_heads()[:ROWS]:
            table.add_row(str(layer), str(head), f"{100 * count / blocks:.0f} %", f"{mean:.4f}")
        table.caption = f"of {blocks} (pair, block) combinations; mean of the absolute change where it is"
        return table


WORKFLOW = Routing

"""What does the model no longer say when one position may not read another? Attention knockout.

Cuts one attention edge at a time, in one layer at a time (stages/knockout.py), and measures what the last
position predicts: KL from the undisturbed run, the logit of the target, the tokens that changed most. One
edge and layer are told in full; the sweep over all keys and layers, and over heads for the one edge, shows
whether they are special.

Defaults: the middle layer, all heads, the edge from the last token to the first. A target of several tokens
is followed by its first piece (logits) and by all of them (probability), never by its last.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..stages.forward.edges import KnockoutSpec
from ..stages.knockout import EdgeKnockout, HeadKnockout
from ..stages.lens import format_probability, format_token
from ..stages.positions import position_of
from ..store.errors import ConfigError
from .answers import (
    answer_pieces,
    encoded,
    fact,
    named,
    number,
    plain,
    target_json,
    top_changed_json,
)
from .subject import Subject
from .workflow import Workflow, setting

if TYPE_CHECKING:
    import xarray as xr
    from rich.table import Table

    from ..stages.forward.model import Model
    from .report import Element

__all__ = ["AttentionKnockout", "Settings"]


@dataclass(frozen=True)
class Settings:
    """What `--set` can change."""

    model: str = setting("specimen", 'hub id, directory, or "specimen"')
    prompt: str = setting("", "prompt to read; none: a shipped fact, or the capital of France")
    target: str = setting("", "word whose logit is followed; may be empty")
    layer: int | None = setting(None, "layer told in full; none: the middle one")
    query: int | str = setting(
        "last", 'position that reads: an index, "first", "last", or a phrase of the prompt'
    )
    key: int | str = setting("first", "position that is read")
    sweep: bool = setting(True, "also cut every other key, layer and head")
    top_k: int = setting(10, "changed tokens listed")
    dtype: str = setting("float32", "what the model computes in")

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ConfigError(f"expected top_k to be at least 1, found {self.top_k}")


class AttentionKnockout(Workflow):
    """One edge in full, and all others for comparison."""

    name = "attention_knockout"
    question = "What does the model no longer say when one position may not read another?"
    settings_type = Settings

    def __init__(self, settings: Settings, model: Model | None = None) -> None:
        super().__init__(settings)
        self.subject = Subject(model or settings.model, settings.dtype)
        self.prompt, self.target = fact(settings.model, settings.prompt, settings.target)
        self.encoding = encoded(self.subject, self.prompt)
        self.pieces = answer_pieces(self.subject, self.prompt, self.target)
        layers = self.subject.config.num_layers
        self.layer = layers // 2 if settings.layer is None else settings.layer
        if not 0 <= self.layer < layers:
            raise ConfigError(f"expected a layer in 0..{layers - 1}, found {self.layer}")
        self.edge = (position_of(self.encoding, settings.query), position_of(self.encoding, settings.key))
        tokens, query = tuple(self.encoding.ids), self.edge[0]
        config = self.subject.config
        KnockoutSpec().edge(*self.edge).validate(layers, config.axis_sizes["head"], len(tokens))
        edges = EdgeKnockout(
            tokens,
            tuple((query, key) for key in range(query + 1)) if settings.sweep else (self.edge,),
            layers=None if settings.sweep else (self.layer,),
            target=self.pieces,
            top_k=settings.top_k,
        )
        self.nodes = {"edges": edges.on(model or settings.model, dtype=settings.dtype)}
        if settings.sweep:
            heads = HeadKnockout(tokens, (self.edge,), target=self.pieces, top_k=settings.top_k)
            self.nodes |= {"heads": heads.on(model or settings.model, dtype=settings.dtype)}

    @cached_property
    def edges(self) -> xr.Dataset:
        """Every edge in every layer, [layer, edge], by key from the first on."""
        return self.result("edges").load()

    @cached_property
    def heads(self) -> xr.Dataset:
        """The one edge in every layer and head, [layer, head]."""
        return self.result("heads").load()

    @property
    def told(self) -> xr.Dataset:
        """The one edge in the one layer."""
        here = self.edges.sel(layer=self.layer)
        return here.isel(edge=int(np.flatnonzero(here["key"].values == self.edge[1])[0]))

    @property
    def tokens(self) -> list[str]:
        """Text of each token of the prompt."""
        return named(self.subject, self.encoding.ids)

    def tables(self) -> list[Table]:
        """The one edge, and the layers and heads where it matters most."""
        return [self._told_table(), *([self._sweep_table()] if self.settings.sweep else [])]

    def draw(self, folder: Path) -> list[Path]:
        """KL by layer and key, and by layer and head; nothing without a sweep."""
        from .figures_attention import knockout_page

        if not self.settings.sweep:
            return []
        return [
            self.figure(
                folder / "attention_knockout.png",
                lambda: knockout_page(
                    self.edges,
                    self.heads,
                    self.tokens,
                    layer=self.layer,
                    edge=self.edge,
                    prompt=self.prompt,
                    model=self.subject.name,
                    footer=self.footer,
                ),
            )
        ]

    def elements(self) -> list[Element]:
        """The one edge; every key and every head in its place."""
        from .report import Heatmap, from_rich

        if not self.settings.sweep:
            return super().elements()
        query, key = self.edge
        names = [f"{format_token(token)} ({i})" for i, token in enumerate(self.tokens)]
        columns = tuple(names[place] for place in self.edges["key"].values.tolist())
        told, sweep = map(from_rich, self.tables())
        return [
            told,
            Heatmap.of(
                self.edges["kl"].transpose("layer", "edge"),
                title=f"What is lost when {names[query]} may not read a key",
                sources=("edges",),
                columns=columns,
                column_name="key",
                low=0.0,
            ),
            Heatmap.of(
                self.heads["kl"].transpose("layer", "head"),
                title=f"What is lost when {names[query]} may not read {names[key]} in one head",
                sources=("heads",),
                low=0.0,
            ),
            sweep,
        ]

    def to_json(self) -> dict[str, Any]:
        """The fields of candle-mi's example, the sweep, and where it all comes from."""
        told, config = self.told, self.subject.config
        found = {
            **self.header(),
            "model_id": self.subject.name,
            "prompt": self.prompt,
            "tokens": self.tokens,
            "n_layers": config.num_layers,
            "n_heads": config.axis_sizes["head"],
            "hidden_size": config.hidden_size,
            "target_layer": self.layer,
            "knockout_edge": list(self.edge),
            "attention_before": float(told["attention"]),
            "kl_divergence": float(told["kl"]),
            **target_json(self.subject, self.target, self.pieces),
            "target_logit_diff": number(told["logit_diff"]),
            "baseline_p_target": number(np.exp(told["baseline_target_logprob"])),
            "ablated_p_target": number(np.exp(told["target_logprob"])),
            "top_changed": top_changed_json(self.subject, told, "ablated_prob"),
        }
        if self.target.strip() == "Paris":
            found["paris_logit_diff"] = found["target_logit_diff"]
        if self.settings.sweep:
            found["sweep"] = {
                "query": self.edge[0],
                "keys": self.edges["key"].values.tolist(),
                "kl_divergence": self.edges["kl"].values.tolist(),
                "attention_before": self.edges["attention"].values.tolist(),
            }
            found["heads"] = {
                "kl_divergence": self.heads["kl"].values.tolist(),
                "attention_before": self.heads["attention"].values.tolist(),
            }
        return found

    def _told_table(self) -> Table:
        from rich.table import Table

        told, (query, key) = self.told, self.edge
        names = [plain(self.tokens[place]) for place in self.edge]
        where = f"{self.subject.name}, layer {self.layer}"
        title = f"{where}: {names[0]!r} ({query}) may not read {names[1]!r} ({key})"
        table = Table(title=title, box=None, pad_edge=False)
        for column, right in (("token", False), ("before", True), ("after", True), ("change", True)):
            table.add_column(column, justify="right" if right else "left", no_wrap=True, min_width=8)
        columns = (told[name].values.tolist() for name in ("changed_id", "changed_baseline", "changed_other"))
        for token, before, after in zip(*columns, strict=True):
            word = plain(self.subject.tokenizer.decode_token(token))
            table.add_row(
                word, *map(format_probability, (before, after)), f"{100 * (after - before):+.2f} pp"
            )
        table.caption = f"KL {float(told['kl']):.5f} nats; weight of the edge {float(told['attention']):.3f}"
        if self.pieces:
            probabilities = [
                format_probability(float(np.exp(told[name])))
                for name in ("baseline_target_logprob", "target_logprob")
            ]
            table.caption += (
                f"; logit of {plain(self.target)!r} lowered by {float(told['logit_diff']):+.4f}, "
                f"probability {probabilities[0]} -> {probabilities[1]}"
            )
        return table

    def _sweep_table(self) -> Table:
        from rich.table import Table

        table = Table(
            title=f"Where {plain(self.tokens[self.edge[0]])!r} needs to read", box=None, pad_edge=False
        )
        for column in ("layer", "key", "KL", "weight", "head", "KL of the edge in it"):
            table.add_column(column, justify="left" if column == "key" else "right", no_wrap=True)
        for layer in self.edges["layer"].values.tolist():
            edges, heads = self.edges.sel(layer=layer), self.heads.sel(layer=layer)
            best, head = int(edges["kl"].values.argmax()), int(heads["kl"].values.argmax())
            key = int(edges["key"][best])
            table.add_row(
                str(layer),
                f"{plain(self.tokens[key])!r} ({key})",
                f"{float(edges['kl'][best]):.5f}",
                f"{float(edges['attention'][best]):.3f}",
                str(int(heads["head"][head])),
                f"{float(heads['kl'][head]):.5f}",
            )
        table.caption = "per layer the key whose edge matters most, and the head in which the edge above does"
        return table


WORKFLOW = AttentionKnockout

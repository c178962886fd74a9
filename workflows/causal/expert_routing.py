"""Which experts process which tokens, and what does the loss become without them?

Mixtures of experts, layer by layer.

Captures the weights of experts over prose and facts (once; they stay in the store) and tells of every expert
which share of tokens it is sent, and the tokens of which it reads most (stages/corpus/expert_use.py). What a
token says about its experts stands beside what it says of tokens rearranged at random: any router looks at
the state it is given, and in the first layers that is little but the token, in random weights too; so that
this is described, and not claimed.

What is claimed is what is lost: each expert is left out of a fact, its weight 0 and the others as they were,
and held against other experts, as heads are (ablation.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from ...stages.causal.controls import CHANCE
from ...stages.causal.grids.ablation import Ablation
from ...stages.corpus.expert_use import NO_TOKEN, expert_use
from ...stages.forward.text.prompts import pack_encodings
from ...stages.logits.lens import format_token
from ...store.errors import ConfigError
from ..labelled import column, records
from ..settings import MODEL_HELP, Count, setting
from ..subject import shipped_facts, shipped_prose
from ..views import Data, Heatmap, Line, Lines, Table, View, dim, together
from ..workflow import Nodes, loaded
from .ablation import AblationOfEach, AblationOfEachSettings

if TYPE_CHECKING:
    import xarray as xr

    from ...store import PackedTokens

__all__ = ["ExpertRouting", "ExpertRoutingSettings"]

WEIGHTS = "expert_weights"
IN_USE = 0.01
"""Share of tokens that an expert must be sent to be held against others."""
PIECE = 400
"""Characters of prose in a prompt: a few dozen tokens, less than any context."""


@dataclass(frozen=True)
class ExpertRoutingSettings(AblationOfEachSettings):
    """What `--set` can change."""

    model: str = setting("specimen-experts", MODEL_HELP)
    how: Literal["mean", "zero", "resample"] = setting("zero", "what takes the place of its weight")
    texts: tuple[str, ...] = setting((), "what experts are seen to read; none: shipped prose and facts")
    top: Count = setting(5, "tokens listed of each expert, and experts listed")
    least: Count = setting(5, "occurrences of a token that is listed")
    pieces: Count = setting(60, f"pieces of shipped prose, of {PIECE} characters, and as many facts")


class ExpertRouting(AblationOfEach):
    """Every expert of every layer."""

    name = "expert_routing"
    question = "Which experts process which tokens, and what does the loss become without them?"
    needs = "experts"
    settings_type = ExpertRoutingSettings
    settings: ExpertRoutingSettings
    unit = "expert"
    described: ClassVar[str] = (
        f" Experts that are sent less than {IN_USE:.0%} of all tokens are left out. What experts read is "
        "described, not claimed."
    )

    use = loaded("use")
    """Tokens that experts read, [layer, expert]."""

    def plan(self) -> Nodes:
        """What experts read of a corpus; every one left out of this prompt, and of other facts."""
        given = self.settings
        shared = self._shared()
        units = self.on_model(Ablation(**self._grid, **shared))
        tokens, ids = self._corpus()
        captured = self.subject.capture(tokens, f"blocks.*.mlp.hook_{WEIGHTS}")
        use = expert_use.on(
            weights=captured[WEIGHTS],
            token_id=column(ids, "token", "token_id"),
            top_k=given.top,
            least=given.least,
            draws=given.controls,
            seed=given.seed,
        )
        return {"use": use, "experts": units, **self._fact_nodes(shared["tokens"])}

    @property
    def _kind(self) -> str:
        """Kind of hook point that an expert is ablated at: its weight."""
        return WEIGHTS

    def _corpus(self) -> tuple[PackedTokens, Any]:
        """What is read, and its ids, special tokens left out."""
        given, subject = self.settings, self.subject
        prose, facts = shipped_prose(), shipped_facts()
        starts = range(0, len(prose) - PIECE, PIECE)
        pieces = [prose[start : start + PIECE] for start in starts][: given.pieces]
        facts_read = [f"{each['prompt']} {each['target'].strip()}" for each in facts[: given.pieces]]
        texts = given.texts or (*pieces, *facts_read)
        limit = subject.config.context_length
        encodings = subject.tokenizer.encode_batch(list(texts))
        fitting = [each for each in encodings if len(each.ids) <= limit]
        if len(fitting) < len(texts) and (given.texts or not fitting):
            raise ConfigError(
                f"expected texts of at most {limit} tokens, which is the context of {subject.name}, found "
                f"{len(texts) - len(fitting)} longer ones; split them"
            )
        special = [is_special for each in fitting for is_special in each.special]
        tokens = pack_encodings(fitting)
        return tokens, np.where(special, NO_TOKEN, tokens.ids).astype(np.int32)

    @property
    def compared(self) -> list[int]:
        """Experts in use: who reads nothing is not missed, and makes a null that anybody exceeds."""
        share = self.use["share"].transpose("layer", "expert").values.ravel()
        return [int(cell) for cell in np.flatnonzero(share >= IN_USE)]

    def views(self) -> Iterator[View]:
        """KL without each expert, the tokens it reads, and how far tokens alone decide the routing."""
        use = self.use
        yield Data(json=self._about())
        share = Heatmap.of(
            use["share"].transpose("layer", "expert"),
            "Tokens that an expert is sent",
            f"a token is sent to {self._sent} of {self._count}; were all used alike, each would be sent "
            f"{self._sent / self._count:.0%}",
            value_name="share of tokens",
            low=0.0,
            sources=("use",),
            json={"share": use["share"]},
        )
        lost = self._loss("experts", self.units, "What is lost without an expert", "its weight zero")
        panels: list[Any] = [share, lost, self._told_by_tokens()]
        if self.pieces:
            panels.append(self._change("experts", self.units, "Target without an expert"))
        title = f"Experts of {self.subject.name}"
        yield from together("expert_routing", title, *panels, beside=[self.findings], columns=2)
        yield self._readers()
        yield self._most()

    @property
    def _sent(self) -> int:
        """How many experts a token is sent to, in most layers."""
        return round(float(self.use["share"].sum("expert").median()))

    @property
    def _count(self) -> int:
        return self.use.sizes["expert"]

    def _told_by_tokens(self) -> Lines:
        """What a token says about its experts, beside rearranged ones."""
        use = self.use
        chance = use["chance"].transpose("layer", "draw").values
        rearranged: tuple[Line, ...] = ()
        if self.settings.controls:
            ends = np.quantile(chance, [CHANCE / 2, 1 - CHANCE / 2], axis=1)
            rearranged = (Line("rearranged", chance.mean(1), control=True, band=ends),)
        return Lines(
            title="How far the token decides where it goes",
            caption="mutual information; dashed: token ids rearranged. A router reads states that begin as "
            "tokens: random weights route by token, too",
            x=tuple(use["layer"].values.tolist()),
            lines=(
                Line("token and its experts", use["information"].values, strong=True),
                *rearranged,
            ),
            x_name="layer",
            y_name="information",
            unit="nats",
            low=0.0,
            sources=("use",),
            json={"information": use["information"], "information_by_chance": use["chance"].mean("draw")},
        )

    def _readers(self) -> Table:
        """Table of the share of tokens that each expert reads, and the tokens it reads most."""
        use = self.use
        (rank,) = set(use["top_id"].dims) - {"layer", "expert"}

        def tokens_of(here: xr.Dataset) -> list[dict[str, Any]]:
            rows = records(here, str(rank), token="top_id", share="top_share", count="top_count")
            return [
                row | {"token": self.subject.tokenizer.decode_token(row["token"])}
                for row in rows
                if row["token"] != NO_TOKEN
            ]

        readers = [
            row | {"layer": layer, "expert": expert, "tokens": tokens_of(here.isel(expert=expert))}
            for layer in use["layer"].values.tolist()
            for here in [use.sel(layer=layer)]
            for expert, row in enumerate(records(here, "expert", "share", "weight"))
        ]

        def tokens(record: dict[str, Any]) -> Any:
            return tuple(
                run
                for each in record["tokens"]
                for run in (f"{format_token(each['token'])} ", dim(f"{each['share']:.0%}  "))
            )

        return Table.of(
            readers,
            ("layer", "layer", "d"),
            ("expert", "expert", "d"),
            ("tokens", "share", "{:.1%}".format),
            ("weight", "weight", ".2f"),
            ("reads most of", tokens),
            title=f"What the experts of {self.subject.name} read",
            caption="tokens: share of all that are sent there; weight: the share it reads of one; then those "
            f"that occur {self.settings.least} times or more, with the share it reads of all of each",
            sources=("use",),
            json={"readers": readers},
        )

"""Which experts process which tokens, and how does the loss change without an expert?

Mixture-of-experts models, layer by layer. The routing weights over a corpus of prose and facts are captured
once into the store. For each expert, the workflow reports the share of tokens routed to it and the tokens
that it processes most (stages/corpus/expert_use.py).

The mutual information between token ids and experts is shown beside that of shuffled token ids. It is
described and not claimed: a router reads the hidden state, which in the first layers is little more than the
token, so that a router with random weights routes by token too.

Claims are about ablations, as for heads (ablation.py): the routing weight of one expert is set to 0, the
other weights stay as they were, and the KL is compared with that of other experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
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
from .ablation import INSTEAD, KL_CAPTION, AblationOfEach, AblationOfEachSettings

if TYPE_CHECKING:
    import xarray as xr

    from ...store import PackedTokens

__all__ = ["ExpertRouting", "ExpertRoutingSettings"]

WEIGHTS = "expert_weights"
"""Kind of hook point whose activations are the routing weights, [token, expert]."""
IN_USE = 0.01
"""Smallest share of the corpus's tokens that must be routed to an expert for claims to compare it."""
PIECE = 400
"""Number of characters of prose in one prompt, which are a few dozen tokens: fewer than the context length of
any model."""


@dataclass(frozen=True)
class ExpertRoutingSettings(AblationOfEachSettings):
    """Settings of the workflow `expert_routing`, which measures and ablates the experts of a
    mixture-of-experts model."""

    model: str = setting("specimen-experts", MODEL_HELP)
    how: Literal["mean", "zero", "resample"] = setting("zero", "replacement of an ablated expert's weight")
    texts: tuple[str, ...] = setting(
        (), "corpus over which routing is measured; none: shipped prose and facts"
    )
    top: Count = setting(5, "number of tokens listed per expert, and of experts listed by KL")
    least: Count = setting(5, "least number of occurrences of a token that is listed")
    pieces: Count = setting(
        60, f"number of pieces of shipped prose, {PIECE} characters each, and of shipped facts"
    )


class ExpertRouting(AblationOfEach):
    """Workflow that shows which tokens are routed to which experts, and ablates one expert at a time."""

    name = "expert_routing"
    question = "Which experts process which tokens, and what does the loss become without them?"
    needs = "experts"
    settings_type = ExpertRoutingSettings
    settings: ExpertRoutingSettings
    unit = "expert"
    described: ClassVar[str] = (
        f" Experts to which less than {IN_USE:.0%} of all tokens are routed are left out. Nothing is claimed "
        "about which tokens an expert processes."
    )

    use = loaded("use")
    """Result of `expert_use` in memory: statistics of routing over the corpus, [layer, expert]."""

    def plan(self) -> Nodes:
        """Nodes that measure routing over the corpus, and that ablate every expert in the displayed prompt
        and in other facts."""
        settings = self.settings
        shared = self._shared()
        units = self.on_model(Ablation(**self._grid, **shared))
        tokens, ids = self._corpus()
        captured = self.subject.capture(tokens, f"blocks.*.mlp.hook_{WEIGHTS}")
        use = expert_use.on(
            weights=captured[WEIGHTS],
            token_id=column(ids, "token", "token_id"),
            top_k=settings.top,
            least=settings.least,
            draws=settings.controls,
            seed=settings.seed,
        )
        return {"use": use, "experts": units, **self._fact_nodes(shared["tokens"])}

    @property
    def _kind(self) -> str:
        """Kind of hook point at which an expert is ablated: its routing weight."""
        return WEIGHTS

    def _corpus(self) -> tuple[PackedTokens, Any]:
        """The packed corpus, and its token ids, int32 [token], with NO_TOKEN for special tokens.

        Raises ConfigError for a text that is longer than the context of the model.
        """
        settings, subject = self.settings, self.subject
        prose, facts = shipped_prose(), shipped_facts()
        starts = range(0, len(prose) - PIECE, PIECE)
        # Characters are cut without regard to words; a cut word is a few odd tokens in a few dozen.
        pieces = [prose[start : start + PIECE] for start in starts][: settings.pieces]
        completed_facts = [f"{fact['prompt']} {fact['target'].strip()}" for fact in facts[: settings.pieces]]
        texts = settings.texts or (*pieces, *completed_facts)
        limit = subject.config.context_length
        encodings = subject.tokenizer.encode_batch(list(texts))
        fitting = [encoding for encoding in encodings if len(encoding.ids) <= limit]
        if len(fitting) < len(texts) and (settings.texts or not fitting):
            raise ConfigError(
                f"expected texts of at most {limit} tokens, which is the context of {subject.name}, found "
                f"{len(texts) - len(fitting)} longer texts; split them"
            )
        special = [is_special for encoding in fitting for is_special in encoding.special]
        tokens = pack_encodings(fitting)
        return tokens, np.where(special, NO_TOKEN, tokens.ids).astype(np.int32)

    @property
    def compared(self) -> list[int]:
        """Indices into the flattened [layer, expert] of the experts that process at least the share IN_USE of
        all tokens."""
        # Ablating an unused expert has no effect; a null of such experts would be exceeded by any other.
        share = self.use["share"].transpose("layer", "expert").values.ravel()
        return [int(cell) for cell in np.flatnonzero(share >= IN_USE)]

    def views(self) -> Iterator[View]:
        """Views in reading order: routing shares, KL of each ablation, mutual information of tokens and
        experts, and tables of experts."""
        use = self.use
        yield Data(json=self._about())
        share = Heatmap.of(
            use["share"].transpose("layer", "expert"),
            "Tokens routed to each expert",
            "Each cell: share of the corpus's tokens that one layer (row) routes to one expert (column). A "
            f"token is routed to {self._sent} of {self._count} experts. With uniform routing each expert "
            f"would process {self._sent / self._count:.0%} of tokens.",
            value_name="share of tokens",
            low=0.0,
            sources=("use",),
            json={"share": use["share"]},
        )
        kl = self._loss(
            "experts",
            self.units,
            "KL when an expert is ablated",
            "Each cell: the routing weight of one expert (column) of one layer (row) is replaced by "
            f"{INSTEAD[self.settings.how]}. {KL_CAPTION}",
        )
        panels: list[Any] = [share, kl, self._token_information()]
        if self.pieces:
            panels.append(self._change("experts", self.units, "Target probability when an expert is ablated"))
        title = f"Experts of {self.subject.name}"
        yield from together("expert_routing", title, *panels, beside=[self.findings], columns=2)
        yield self._readers()
        yield self._most()

    @property
    def _sent(self) -> int:
        """Number of experts that a token is routed to: the median over layers."""
        return round(float(self.use["share"].sum("expert").median()))

    @property
    def _count(self) -> int:
        """Number of experts per layer."""
        return self.use.sizes["expert"]

    def _token_information(self) -> Lines:
        """Mutual information between tokens and experts by layer, in nats, beside that of shuffled tokens."""
        use = self.use
        chance = use["chance"].transpose("layer", "draw").values
        shuffled: tuple[Line, ...] = ()
        if self.settings.controls:
            # The central 95 % of shuffles, for a two-sided test at level CHANCE.
            ends = np.quantile(chance, [CHANCE / 2, 1 - CHANCE / 2], axis=1)
            shuffled = (Line("shuffled", chance.mean(1), control=True, band=ends),)
        return Lines(
            title="How much a token determines its experts",
            caption="x: layer. y: mutual information, in nats, between a token's id and the experts that "
            "process it, over the corpus. Dashed: control, the same with shuffled token ids. A router with "
            "random weights also routes by token, as hidden states depend on tokens. So the difference is "
            "described, not claimed.",
            x=tuple(use["layer"].values.tolist()),
            lines=(
                Line("token and its experts", use["information"].values, strong=True),
                *shuffled,
            ),
            x_name="layer",
            y_name="information",
            unit="nats",
            low=0.0,
            sources=("use",),
            json={"information": use["information"], "information_by_chance": use["chance"].mean("draw")},
        )

    def _readers(self) -> Table:
        """Table with a row per expert: the share of tokens routed to it, and the tokens that it processes
        most."""
        use = self.use
        (rank,) = set(use["top_id"].dims) - {"layer", "expert"}

        def tokens_of(expert_use: xr.Dataset) -> list[dict[str, Any]]:
            rows = records(expert_use, str(rank), token="top_id", share="top_share", count="top_count")
            return [
                row | {"token": self.subject.tokenizer.decode_token(row["token"])}
                for row in rows
                if row["token"] != NO_TOKEN
            ]

        readers = []
        for layer in use["layer"].values.tolist():
            layer_use = use.sel(layer=layer)
            for expert, numbers in enumerate(records(layer_use, "expert", "share", "weight")):
                tokens = tokens_of(layer_use.isel(expert=expert))
                readers.append(numbers | {"layer": layer, "expert": expert, "tokens": tokens})

        def tokens_cell(reader: dict[str, Any]) -> Any:
            texts = [
                (f"{format_token(row['token'])} ", dim(f"{row['share']:.0%}  ")) for row in reader["tokens"]
            ]
            return tuple(chain.from_iterable(texts))

        return Table.of(
            readers,
            ("layer", "layer", "d"),
            ("expert", "expert", "d"),
            ("tokens", "share", "{:.1%}".format),
            ("weight", "weight", ".2f"),
            ("top tokens", tokens_cell),
            title=f"Tokens that the experts of {self.subject.name} process",
            caption="One row per expert. Tokens: share of all tokens of the corpus that are routed to it. "
            "Weight: its mean routing weight for them. Top tokens: those of which it processes the largest "
            f"share of occurrences, with that share in percent (tokens with at least {self.settings.least} "
            "occurrences).",
            sources=("use",),
            json={"readers": readers},
        )

"""At which layers and positions does the difference between two prompts decide the answer?

A causal trace by activation patching.

A clean prompt and a corrupted one of as many tokens differ in their subject. The corrupted prompt is run
with one state of the clean run put in, layer by layer and position by position
(stages/causal/grids/patching.py); recovery says how much of the clean prediction comes back: 1 - KL(clean ||
patched) / KL(clean || corrupted), 0 as corrupted, 1 as clean, not clipped.

Defaults: candle-mi's pairs, France and Space Needle; two pairs of shipped facts on the specimens, and on
models to which candle-mi's prompts differ in length. Of several corrupted prompts, the first with as many
tokens as the clean one is taken; none is an error. An answer of several tokens is refused unless
`answer_piece=first` says which is meant.

`metric` says what recovery is a share of: KL of the whole next-token distribution, the difference between the
logits of the clean and the corrupted answer, or the clean answer's probability.

Told of every kind is the place that recovers most on other pairs, scored on the pairs shown and more of them,
beside states of unrelated prompts at the same place. Of these pairs count those that the model knows, whose
clean answer is its likeliest next token; where it knows too few, none of that is run and nothing is claimed
(material/facts/known.py). `data` names pairs of one's own in place of the shipped ones. Places are
a layer and a role: the subject's last token, and for outputs the last token too; the state at the last token
is left out, as it is the answer itself (and a recurrent one is read by nobody there). A pair of one's own is
scored alone, known or not.

States and outputs are patched position by position; z, q, k, v and pattern head by head, at all positions,
and so is what heads of a recurrent model read, write and are asked for; its state by position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from ...stages.causal.draws import AtOnce
from ...stages.causal.grids.patching import ActivationPatching, DonorPatching
from ...stages.causal.grids.patching_grid import HEAD_KINDS, STATE_KINDS
from ...stages.causal.grids.patching_metrics import KL, Metric, Probability, Recovery
from ...stages.logits.lens import format_probability, format_text, format_token
from ...store.arrays import Floats
from ...store.errors import ConfigError
from ..claim import CandidateEffects, Claim
from ..labelled import ranked, values_of
from ..material.answers import named
from ..material.facts.known import CHOSEN_ON, SCORED, KnownWorkflow
from ..material.places import NAMES, USUAL, in_every_layer
from ..material.unrelated import Unrelated
from ..views import Choice, Data, Figure, Heatmap, Table, View, dim
from ..workflow import Nodes
from .patched_pairs import ActivationPatchingTraceSettings, PatchedPair, PatchedPairs

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["ActivationPatchingTrace"]

MEASURES = {
    "kl": "the clean prediction",
    "logit_difference": "the difference between the logits of both answers",
    "probability": "the clean answer's probability",
}
"""What recovery is a share of, by metric."""

ROLES = ("the subject's last token", "the last token")
"""Positions that other pairs have too."""


class ActivationPatchingTrace(KnownWorkflow):
    """Grids of patches, one per pair and kind."""

    name = "activation_patching"
    question = "At which layers and positions does the difference between two prompts decide the answer?"
    settings_type = ActivationPatchingTraceSettings
    settings: ActivationPatchingTraceSettings
    CONTROLS: ClassVar[tuple[str, ...]] = ("choice", "scored", "controls")
    """Results beside the pairs shown."""
    asked_about = "pairs"

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of states that are patched: the setting, or the usual kinds that every layer has."""
        return self.settings.kinds or in_every_layer(self.subject.config, USUAL)

    def plan(self) -> Nodes:
        """Per pair of prompts an experiment over positions, and one over heads, as far as kinds are asked."""
        self.pairs = PatchedPairs(self.subject, self.settings)
        self.traced = self.pairs.shown()
        states, heads = self.claimed_kinds, [kind for kind in self.kinds if _by_head(kind)]
        nodes = {
            f"{name}_{i}": self.on_model(self._experiment(pair, kinds, over))
            for i, pair in enumerate(self.traced)
            for name, over, kinds in (("pair", "position", states), ("heads", "head", heads))
            if kinds
        }
        return nodes | (self._control_nodes(states) if states and self.settings.controls else {})

    def _control_nodes(self, kinds: Sequence[str]) -> Nodes:
        """Both roles of other pairs, [draw, layer, position]: to choose on, to score, and with donors; and
        which of these pairs the model knows."""
        given, unrelated, pairs = self.settings, Unrelated(self.subject), self.pairs
        others = pairs.others(self.traced)
        half = given.others if len(others) >= 2 * given.others else -(-len(others) // 2)
        chosen_on, more = others[:half], others[half : half + given.others]
        if not chosen_on:
            raise ConfigError(
                "expected other pairs to choose a place on, found none that fit the model; give more in "
                "data=…, or ask for no claim: controls=0"
            )
        self.scored = self.traced + ([] if given.prompt else more)
        self.num_donors = given.controls if given.prompt else given.donors

        def at_roles(pair: PatchedPair) -> dict[str, Any]:
            positions = (pair.subject[1], pairs.read_at(pair))
            metrics = (Recovery(pairs.metric(pair)),)
            return {"positions": positions, "metrics": metrics, **pairs.patch(pair, kinds)}

        donors = tuple(
            DonorPatching(donor=donor, **at_roles(pair))
            for number, pair in enumerate(self.scored)
            for donor in unrelated.to(
                pair.clean_ids,
                self.num_donors,
                seed=given.seed + number,
                targets=(pair.answer,) if pair in self.traced else (pair.answer, pair.wrong),
            )
        )
        experiments: dict[str, tuple[ActivationPatching, ...]] = {
            "choice": tuple(ActivationPatching(**at_roles(pair)) for pair in chosen_on),
            "scored": tuple(ActivationPatching(**at_roles(pair)) for pair in self.scored),
            "controls": donors,
        }
        self.only_claims = tuple(experiments)
        groups = {CHOSEN_ON: list(map(pairs.question, chosen_on))}
        if not given.prompt:  # a pair of one's own is scored, known or not
            groups[SCORED] = list(map(pairs.question, self.scored))
        return self.known_node(groups) | {
            name: self.on_model(AtOnce(each)) for name, each in experiments.items()
        }

    @property
    def claimed_kinds(self) -> list[str]:
        """Kinds that a claim is made about: those that are not patched head by head."""
        return [kind for kind in self.kinds if not _by_head(kind)]

    claim_sources = CONTROLS

    def candidates(self, kind: str) -> CandidateEffects:
        """Percent recovered by each place of a kind, [pair, layer, role]."""
        roles = 1 if kind.startswith("resid") or _is_memory(kind) else 2
        choice, scored, controls = (self._recovered(name, kind)[..., :roles] for name in self.CONTROLS)
        by_donor = controls.reshape(len(scored), self.num_donors, *scored.shape[1:])
        return CandidateEffects(choice, scored, by_donor)

    @property
    def makes_claims(self) -> bool:
        """Whether any kind is patched by position, as claims are about these."""
        return bool(self.claimed_kinds)

    def claims(self) -> Iterator[Claim]:
        """Per kind, the layer and role with the largest recovery on other pairs; then the quietest."""
        kinds = self.claimed_kinds
        for kind in kinds:
            candidates = self.candidates(kind)
            yield self._claim(kind, candidates, candidates.best)
        first = self.candidates(kinds[0])
        yield self._claim(kinds[0], first, first.quietest, "for comparison, ")

    def claims_caption(self) -> str:
        """Caption of the claims: on which pairs the layer and position of each kind were chosen."""
        counts = [int(self.counts(name).sum()) for name in ("choice", "scored")]
        return (
            f"Of each kind the place that recovers most on {counts[0]} other pairs whose answer the model "
            f"says, and of {self.claimed_kinds[0]} the one that moves them least, scored on {counts[1]}; "
            f"{self.num_donors} unrelated prompts per pair."
        )

    @property
    def _roles_named(self) -> tuple[str, str]:
        if self.subject.mask is None:
            return ROLES
        return ROLES[0], "the token before the mask" if self.subject.config.mask_shift else "the mask"

    def counts(self, name: str) -> npt.NDArray[np.bool_]:
        """Which pairs of a result count, bool [pair]: those that the model knows, and a pair of one's own."""
        if name != "choice" and self.settings.prompt:
            return np.ones(len(self.scored), bool)
        return self.is_known(CHOSEN_ON if name == "choice" else SCORED)

    def _recovered(self, name: str, kind: str) -> Floats:
        """Percent recovered of one kind in one of the results on roles, in pairs that count: [pair, layer,
        role], of controls [pair and donor, layer, role]."""
        grid = 100 * self.result(name).load()["recovery"]
        grid = grid.sel(kind=kind) if "kind" in grid.dims else grid
        recovered, known = values_of(grid, "draw", "layer", "position"), self.counts(name)
        return recovered[known.repeat(len(recovered) // len(known))]

    def _claim(
        self, kind: str, candidates: CandidateEffects, place: tuple[int, ...], before: str = ""
    ) -> Claim:
        """What one place [layer, role] of a kind recovers, beside states of unrelated prompts there."""
        (layer, role), name = place, "state" if _is_memory(kind) else kind
        text = (
            f"{before}clean {name} of layer {layer} at {self._roles_named[role]} brings "
            f"{MEASURES[self.settings.metric]} back"
        )
        return candidates.claim(text, place, "states of unrelated prompts as long", self.settings, unit="%")

    def _experiment(self, pair: PatchedPair, kinds: Sequence[str], over: str) -> ActivationPatching:
        metrics: tuple[Metric, ...] = (Recovery(self.pairs.metric(pair)), KL())
        if pair.pieces:
            metrics += (Probability(pair.pieces[0]),)
        if self.settings.metric == "logit_difference":
            metrics += (self.pairs.metric(pair),)
        return ActivationPatching(over=over, metrics=metrics, **self.pairs.patch(pair, kinds))

    def sources(self, i: int) -> tuple[str, ...]:
        """Names of the results of pair `i`."""
        return tuple(name for name in (f"pair_{i}", f"heads_{i}") if name in self.nodes)

    def grids(self, i: int) -> dict[str, xr.Dataset]:
        """Pair `i` in memory by kind, [layer, position], or [layer, head] of what heads have; of k and v the
        heads are key/value heads."""
        found = {}
        for name in self.sources(i):
            whole = self.result(name).load()
            for kind in np.atleast_1d(whole["kind"].values).tolist():
                grid = whole.sel(kind=kind) if "kind" in whole.dims else whole
                if "kv_head" in grid.dims:
                    grid = grid.rename(kv_head="head")
                found[kind] = grid.dropna("head", subset=["kl"]) if "head" in grid.dims else grid
        return {kind: found[kind] for kind in self.kinds}

    def recovered(self, i: int) -> dict[str, xr.DataArray]:
        """Percent recovered in pair `i` by kind, [layer, position] or [layer, head]."""
        return {kind: 100 * grid["recovery"] for kind, grid in self.grids(i).items()}

    def by_run(self, i: int, metric: str) -> dict[str, float]:
        """A metric of the runs of pair `i` in which nothing is patched: "clean" and "corrupted"."""
        unpatched = next(iter(self.grids(i).values()))["unpatched"].sel(metric=metric)
        return dict(zip(unpatched["run"].values.tolist(), unpatched.values.tolist(), strict=True))

    def document(self, i: int) -> dict[str, Any]:
        """Pair `i` in the fields of candle-mi's example, and the grids of every kind."""
        pair, grids, percent = self.traced[i], self.grids(i), self.recovered(i)
        kind, first = next(iter(percent.items()))
        start, last = pair.subject
        found: dict[str, Any] = {
            "model_id": self.subject.name,
            "clean_prompt": pair.clean,
            "corrupted_prompt": pair.corrupted,
            "subject_pos": start,
            "subject_last_pos": last,
            "tokens": named(self.subject, pair.corrupted_ids),
            "clean_tokens": named(self.subject, pair.clean_ids),
            "n_layers": self.subject.config.num_layers,
            "seq_len": len(pair.clean_ids),
            "corrupted_kl": self.by_run(i, "kl")["corrupted"],
            "unit": "percent recovered, 0 = corrupted, 100 = clean",
            "metric": self.settings.metric,
            "kind": kind,
            "window": self.settings.window,
            "grid": first,
            "grids": percent,
            "best": [_best(kind, grid) for kind, grid in percent.items()],
        }
        if "position" in first.dims:
            found["subject_recovery"] = first.sel(position=start)
        if pair.pieces:
            found |= {
                "answer": pair.answer,
                "answer_token_ids": pair.pieces,
                "answer_token": named(self.subject, pair.pieces[:1])[0],
                "answer_probability": self.by_run(i, "probability"),
                "answer_probability_grids": {kind: grid["probability"] for kind, grid in grids.items()},
            }
        if (metric := self.settings.metric) == "logit_difference":
            by_kind = {kind: grid[metric] for kind, grid in grids.items()}
            found |= {"wrong": pair.wrong, metric: self.by_run(i, metric), f"{metric}_grids": by_kind}
        return found

    def views(self) -> Iterator[View]:
        """Per pair the grids of every kind, and the best places."""
        yield Data(json={"results": [self.document(i) for i in range(len(self.traced))]})
        for i, pair in enumerate(self.traced):
            put = f"'{format_text(pair.clean)}' put into '{format_text(pair.corrupted)}'"
            grids = {kind: self._grid(pair, kind, percent) for kind, percent in self.recovered(i).items()}
            yield Choice(
                title=put,
                caption=f"Share of {MEASURES[self.settings.metric]} that comes back when one state of the "
                "clean run replaces that of the corrupted one; 0 % as corrupted, 100 % as clean, below 0 % "
                "farther off than corrupted.",
                sources=self.sources(i),
                name="patched",
                options=tuple(grids.items()),
            )
            yield Figure(
                name=f"activation_patching_{i}",
                title=f"Where {self.subject.name} keeps what makes prompts differ",
                caption=f"States of {put}",
                panels=(*grids.values(), *([self.findings] if self.makes_claims else [])),
            )
            yield self._places(i, f"{self.subject.name}: {put}")

    def _grid(self, pair: PatchedPair, kind: str, percent: xr.DataArray) -> Heatmap:
        """Percent recovered by layer and place for one kind; framed is where the prompts differ."""
        best, (start, last) = _best(kind, percent), pair.subject
        own: dict[str, Any] = {"column_name": "key/value head" if kind in ("k", "v") else "head"}
        where = f"head {best.get('head')}"
        if "position" in best:
            ids = (pair.clean_ids, pair.corrupted_ids)
            clean, corrupted = (list(map(format_token, named(self.subject, row))) for row in ids)
            texts = zip(clean, corrupted, strict=True)
            own = {
                "columns": tuple(to if at == to else f"{at} → {to}" for at, to in texts),
                "column_name": "token",
                "framed": ((0, start, percent.sizes["layer"] - 1, last),),
                "frame_name": "where the prompts differ",
            }
            where = f"at '{corrupted[best['position']]}'"
        return Heatmap.of(
            percent,
            NAMES[kind],
            f"most: {best['recovery']:.0f} % in layer {best['layer']} {where}",
            value_name=f"recovered by patching {kind}",
            unit="%",
            low=-100.0,
            high=100.0,
            diverging=True,
            **own,
        )

    def _places(self, i: int, title: str) -> Table:
        """The best position, or head, of each layer, by kind."""
        pair, percent = self.traced[i], self.recovered(i)
        tokens = [format_token(text) for text in named(self.subject, pair.corrupted_ids)]

        def place(kind: str, layer: int) -> Any:
            index = int(percent[kind].values[layer].argmax())
            return dim(f"head {index}" if _by_head(kind) else f"{tokens[index]} ({index})")

        columns: list[tuple[Any, ...]] = [("layer", int, "d")]
        for kind, grid in percent.items():
            most = grid.values.max(1).__getitem__
            columns += [(kind, most, "{:.1f} %".format), ("at", partial(place, kind))]
        words = dict.fromkeys("head" if _by_head(kind) else "position" for kind in percent)
        caption = (
            f"share of {MEASURES[self.settings.metric]} recovered at the best "
            f"{' and '.join(sorted(words, reverse=True))}; "
            f"KL(clean || corrupted) {self.by_run(i, 'kl')['corrupted']:.3f} nats"
        )
        if self.settings.metric == "logit_difference":
            difference = "{clean:+.2f} clean, {corrupted:+.2f} corrupted"
            caption += f"; logit of {pair.answer!r} minus that of {pair.wrong!r}: "
            caption += difference.format(**self.by_run(i, "logit_difference"))
        if pair.pieces:
            shares = {run: format_probability(p) for run, p in self.by_run(i, "probability").items()}
            word = format_token(named(self.subject, pair.pieces[:1])[0])
            caption += f"; {word!r} {shares['clean']} clean, {shares['corrupted']} corrupted"
        layers = range(self.subject.config.num_layers)
        return Table.of(layers, *columns, title=title, caption=caption, sources=self.sources(i))


def _is_memory(kind: str) -> bool:
    """Whether a kind is what a recurrence remembers."""
    return kind.endswith("state_seq")


def _by_head(kind: str) -> bool:
    """Whether a kind is patched head by head, at all positions, and not position by position."""
    return kind in HEAD_KINDS or (kind in STATE_KINDS and not _is_memory(kind))


def _best(kind: str, percent: xr.DataArray) -> dict[str, Any]:
    """The largest cell of a grid [layer, position] or [layer, head], the earliest of equal ones."""
    (place,) = ranked(percent, 1)
    return {"kind": kind, **place, "recovery": float(percent.sel(place))}

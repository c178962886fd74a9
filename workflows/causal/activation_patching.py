"""At which layers and positions does the difference between two prompts decide the answer?

Activation patching (causal tracing without noise): a clean and a corrupted prompt of the same length differ
in their subject. The corrupted prompt is run with one activation of the clean run patched in, one layer and
position at a time (stages/causal/grids/patching.py). Recovery is the share of the clean prediction that comes
back: 1 - KL(clean || patched) / KL(clean || corrupted), 0 for the corrupted run, 1 for the clean run, not
clipped. `metric` replaces KL by the difference between the logits of the clean and the corrupted answer, or
by the clean answer's probability.

Residual states, attention outputs and MLP outputs are patched by position; z, q, k, v and the attention
pattern by head, at all positions. Of recurrent models, the state is patched by position, and what heads read
and write by head.

The claim, one per kind: the (layer, role) with the largest recovery on other pairs, scored on the pairs shown
and on further held-out ones, against activations of unrelated prompts patched into the same place. Roles are
the subject's last token and, for attention and MLP outputs, the last token. The residual state at the last
token is left out, as it determines the answer; so is the recurrent state there, which no later token reads.
Only pairs count whose clean answer is the model's likeliest next token; with too few of them nothing is
claimed (material/facts/known.py). A pair given by the settings is scored alone, known or not.

Default pairs: candle-mi's (France, Space Needle), or two shipped pairs for specimens and for models whose
tokenizer gives candle-mi's prompts different lengths; `data` reads other pairs. Of several corrupted prompts
the first with as many tokens as the clean one is used; none is an error, and so is an answer of several
tokens, unless `answer_piece=first` selects its first token.
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
from ...stages.logits.lens import format_probability, format_text
from ...store.arrays import Floats
from ...store.errors import ConfigError
from ..claim import CandidateEffects, Claim
from ..labelled import ranked, values_of
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
"""Quantity that recovery is a share of, by value of the setting `metric`."""

ROLES = ("the subject's last token", "the last token")
"""Positions that every pair of prompts has: a (layer, role) selected on some pairs is scored at the same role
of held-out pairs."""


class ActivationPatchingTrace(KnownWorkflow):
    """Workflow that patches activations of a clean prompt into a corrupted one, one layer and position (or
    head) at a time."""

    name = "activation_patching"
    question = "At which layers and positions does the difference between two prompts decide the answer?"
    settings_type = ActivationPatchingTraceSettings
    settings: ActivationPatchingTraceSettings
    CONTROLS: ClassVar[tuple[str, ...]] = ("choice", "scored", "controls")
    """Names of the results that claims are read from, in the order of the fields of `CandidateEffects`."""
    asked_about = "pairs"

    @property
    def kinds(self) -> tuple[str, ...]:
        """Patched kinds of hook points: the setting `kinds`, by default the members of USUAL that exist in
        every layer."""
        return self.settings.kinds or in_every_layer(self.subject.config, USUAL)

    def plan(self) -> Nodes:
        """Nodes that patch each displayed pair, by position and by head, as `kinds` requires; and nodes for
        the claims."""
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
        """Nodes for the claims, [draw, layer, position]: patches at both ROLES in pairs to choose on, in
        pairs to score on, and with activations of unrelated prompts; and the node that measures which pairs
        the model knows.

        Raises ConfigError without any other pair."""
        settings, unrelated, pairs = self.settings, Unrelated(self.subject), self.pairs
        other_pairs = pairs.others(self.traced)
        # With too few pairs for both halves, the one to choose on is the larger.
        half = settings.others if len(other_pairs) >= 2 * settings.others else -(-len(other_pairs) // 2)
        chosen_on, held_out = other_pairs[:half], other_pairs[half : half + settings.others]
        if not chosen_on:
            raise ConfigError(
                "expected pairs of prompts, besides those shown, on which to choose a layer and position, "
                "found none with equally many tokens in both prompts that fit into the model's context; give "
                "more pairs: data=FILE, or set controls=0 to make no claims"
            )
        self.scored = self.traced + ([] if settings.prompt else held_out)
        self.num_donors = settings.controls if settings.prompt else settings.donors

        def at_roles(pair: PatchedPair) -> dict[str, Any]:
            """Keyword arguments of the experiment that patches a pair at the positions of both ROLES."""
            positions = (pair.subject[1], pairs.read_at(pair))
            metrics = (Recovery(pairs.metric(pair)),)
            return {"positions": positions, "metrics": metrics, **pairs.patch(pair, kinds)}

        donors = tuple(
            DonorPatching(donor=donor, **at_roles(pair))
            for number, pair in enumerate(self.scored)
            # An unrelated fact with the same answer would recover it for a good reason.
            for donor in unrelated.to(
                pair.clean_ids,
                self.num_donors,
                seed=settings.seed + number,
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
        if not settings.prompt:  # a pair given by the settings is scored, known or not
            groups[SCORED] = list(map(pairs.question, self.scored))
        return self.known_node(groups) | {
            name: self.on_model(AtOnce(patchings)) for name, patchings in experiments.items()
        }

    @property
    def claimed_kinds(self) -> list[str]:
        """Kinds of hook points about which claims are made: those that are patched by position."""
        return [kind for kind in self.kinds if not _by_head(kind)]

    claim_sources = CONTROLS

    def candidates(self, kind: str) -> CandidateEffects:
        """Recovery in percent by (layer, role) for one kind of activation, [pair, layer, role], with one
        control per unrelated prompt (donor)."""
        # The residual state at the last token determines the answer; no later token reads a recurrent one.
        roles = 1 if kind.startswith("resid") or _is_recurrent_state(kind) else 2
        choice, scored, controls = (self._recovered(name, kind)[..., :roles] for name in self.CONTROLS)
        # Along "draw", donors of a pair are neighbours.
        by_donor = controls.reshape(len(scored), self.num_donors, *scored.shape[1:])
        return CandidateEffects(choice, scored, by_donor)

    @property
    def makes_claims(self) -> bool:
        """Whether the workflow makes claims: yes if any of `kinds` is patched by position; grids by head have
        no claims."""
        return bool(self.claimed_kinds)

    def claims(self) -> Iterator[Claim]:
        """Claims, one per kind, about the (layer, role) with the largest mean recovery on other pairs; then,
        for comparison, about the one with the mean recovery nearest to 0."""
        kinds = self.claimed_kinds
        for kind in kinds:
            candidates = self.candidates(kind)
            yield self._claim(kind, candidates, candidates.best)
        compared = self.candidates(kinds[0])
        yield self._claim(kinds[0], compared, compared.quietest, "for comparison, ")

    def claims_caption(self) -> str:
        """Caption of the claims: rule by which layer and position were chosen, and numbers of pairs and
        donors."""
        counts = [int(self.counts(name).sum()) for name in ("choice", "scored")]
        return (
            "Recovery: share of the difference between the clean and the corrupted run that one patch brings "
            "back. There is one claim per kind of activation. Its layer and position have the largest mean "
            f"recovery on {counts[0]} other pairs of prompts, those whose answer the model predicts. The "
            f"last claim is a comparison: the layer and position of {self.claimed_kinds[0]} with the mean "
            f"recovery nearest to 0. All are scored on {counts[1]} pairs. Control: patching in the "
            f"activation of one of {self.num_donors} unrelated prompts per pair."
        )

    @property
    def _role_names(self) -> tuple[str, str]:
        """Names of ROLES in claims; in a model that fills in masks, the answer is read at the mask instead of
        the last token."""
        if self.subject.mask is None:
            return ROLES
        return ROLES[0], "the token before the mask" if self.subject.config.mask_shift else "the mask"

    def counts(self, name: str) -> npt.NDArray[np.bool_]:
        """Which pairs of a result claims are about, bool [pair]: those that the model knows, and any pair
        that the settings name."""
        if name != "choice" and self.settings.prompt:
            return np.ones(len(self.scored), bool)
        return self.is_known(CHOSEN_ON if name == "choice" else SCORED)

    def _recovered(self, name: str, kind: str) -> Floats:
        """Recovery in percent for one kind of hook point and one of the results CONTROLS, for the pairs that
        claims are about.

        Arguments:
            name: "choice", "scored" or "controls".
            kind: kind of activation.

        Returns:
            [pair, layer, role]; for "controls" [pair * donor, layer, role].
        """
        grid = 100 * self.result(name).load()["recovery"]
        grid = grid.sel(kind=kind) if "kind" in grid.dims else grid
        recovered, counted = values_of(grid, "draw", "layer", "position"), self.counts(name)
        # One row per pair, or for controls one per donor of each pair.
        return recovered[counted.repeat(len(recovered) // len(counted))]

    def _claim(
        self, kind: str, candidates: CandidateEffects, place: tuple[int, ...], before: str = ""
    ) -> Claim:
        """Claim about the recovery at one (layer, role), compared with activations of unrelated prompts
        patched there."""
        (layer, role), name = place, "state" if _is_recurrent_state(kind) else kind
        text = (
            f"{before}patching the clean {name} of layer {layer} at {self._role_names[role]} into the "
            f"corrupted run recovers {MEASURES[self.settings.metric]}"
        )
        of = "patching an activation of an unrelated prompt of the same length"
        return candidates.claim(text, place, of, self.settings, unit="%")

    def _experiment(self, pair: PatchedPair, kinds: Sequence[str], over: str) -> ActivationPatching:
        """Experiment that patches each layer of one pair, over every "position" or over every "head"."""
        metrics: tuple[Metric, ...] = (Recovery(self.pairs.metric(pair)), KL())
        if pair.pieces:
            metrics += (Probability(pair.pieces[0]),)
        if self.settings.metric == "logit_difference":
            metrics += (self.pairs.metric(pair),)
        return ActivationPatching(over=over, metrics=metrics, **self.pairs.patch(pair, kinds))

    def sources(self, i: int) -> tuple[str, ...]:
        """Names of the results of pair `i`: by position, by head, or both."""
        return tuple(name for name in (f"pair_{i}", f"heads_{i}") if name in self.nodes)

    def grids(self, i: int) -> dict[str, xr.Dataset]:
        """Results of pair `i` in memory, by kind: [layer, position], or [layer, head] for kinds patched by
        head; for k and v the axis "head" holds key/value heads."""
        by_kind = {}
        for name in self.sources(i):
            result = self.result(name).load()
            for kind in np.atleast_1d(result["kind"].values).tolist():
                grid = result.sel(kind=kind) if "kind" in result.dims else result
                if "kv_head" in grid.dims:
                    grid = grid.rename(kv_head="head")
                by_kind[kind] = grid.dropna("head", subset=["kl"]) if "head" in grid.dims else grid
        return {kind: by_kind[kind] for kind in self.kinds}

    def recovered(self, i: int) -> dict[str, xr.DataArray]:
        """Recovery in percent for pair `i`, by kind: [layer, position] or [layer, head]."""
        return {kind: 100 * grid["recovery"] for kind, grid in self.grids(i).items()}

    def by_run(self, i: int, metric: str) -> dict[str, float]:
        """Value of a metric in the two unpatched runs of a pair: {"clean": …, "corrupted": …}.

        Arguments:
            i: index of the pair.
            metric: name of the metric.
        """
        # Unpatched runs are the same in every grid of a pair.
        unpatched = next(iter(self.grids(i).values()))["unpatched"].sel(metric=metric)
        return dict(zip(unpatched["run"].values.tolist(), unpatched.values.tolist(), strict=True))

    def document(self, i: int) -> dict[str, Any]:
        """JSON document of pair `i`: its prompts, and the recovery grid of every patched kind of activation.

        Field names are those of the JSON that candle-mi's activation patching example writes; `grids` and the
        fields about answers are added.
        """
        pair, grids, percent = self.traced[i], self.grids(i), self.recovered(i)
        kind, first_grid = next(iter(percent.items()))
        start, last = pair.subject
        fields: dict[str, Any] = {
            "model_id": self.subject.name,
            "clean_prompt": pair.clean,
            "corrupted_prompt": pair.corrupted,
            "subject_pos": start,
            "subject_last_pos": last,
            # Patches go into the corrupted run, so that the positions of grids are those of its tokens.
            "tokens": self.subject.token_texts(pair.corrupted_ids),
            "clean_tokens": self.subject.token_texts(pair.clean_ids),
            "n_layers": self.subject.config.num_layers,
            "seq_len": len(pair.clean_ids),
            "corrupted_kl": self.by_run(i, "kl")["corrupted"],
            "unit": "percent recovered, 0 = corrupted, 100 = clean",
            "metric": self.settings.metric,
            "kind": kind,
            "window": self.settings.window,
            "grid": first_grid,
            "grids": percent,
            "best": [_best(kind, grid) for kind, grid in percent.items()],
        }
        if "position" in first_grid.dims:
            fields["subject_recovery"] = first_grid.sel(position=start)
        if pair.pieces:
            fields |= {
                "answer": pair.answer,
                "answer_token_ids": pair.pieces,
                "answer_token": self.subject.token_texts(pair.pieces[:1])[0],
                "answer_probability": self.by_run(i, "probability"),
                "answer_probability_grids": {kind: grid["probability"] for kind, grid in grids.items()},
            }
        if (metric := self.settings.metric) == "logit_difference":
            by_kind = {kind: grid[metric] for kind, grid in grids.items()}
            fields |= {"wrong": pair.wrong, metric: self.by_run(i, metric), f"{metric}_grids": by_kind}
        return fields

    def views(self) -> Iterator[View]:
        """Views of each pair: a heatmap of recovery per kind of activation, and a table of the best position
        or head of each layer."""
        yield Data(json={"results": [self.document(i) for i in range(len(self.traced))]})
        for i, pair in enumerate(self.traced):
            put = f"'{format_text(pair.clean)}' patched into '{format_text(pair.corrupted)}'"
            grids = {kind: self._grid(pair, kind, percent) for kind, percent in self.recovered(i).items()}
            yield Choice(
                title=put,
                caption="Each cell: recovery when one activation of the clean run replaces that of the "
                f"corrupted run. Recovery: share of {MEASURES[self.settings.metric]} that comes back. 0 %: "
                "as in the corrupted run; 100 %: as in the clean run; below 0 %: farther from the clean run "
                "than the corrupted run is.",
                sources=self.sources(i),
                name="patched",
                options=tuple(grids.items()),
            )
            yield Figure(
                name=f"activation_patching_{i}",
                title=f"Recovery of the difference between two prompts in {self.subject.name}",
                caption=f"Each cell: recovery by patching {put}, one activation at a time. 0 %: prediction "
                "of the corrupted prompt; 100 %: prediction of the clean prompt.",
                panels=(*grids.values(), *([self.findings] if self.makes_claims else [])),
            )
            yield self._places(i, f"{self.subject.name}: {put}")

    def _grid(self, pair: PatchedPair, kind: str, percent: xr.DataArray) -> Heatmap:
        """Heatmap of recovery for one kind, by layer and position or head; a frame marks where the prompts
        differ."""
        best, is_by_head = _best(kind, percent), _by_head(kind)
        frame_note = ""
        if is_by_head:
            best_place = f"head {best['head']}"
            # With grouped-query attention, k and v have fewer heads than q and z.
            options: dict[str, Any] = {"column_name": "key/value head" if kind in ("k", "v") else "head"}
        else:
            clean, corrupted = map(self.subject.token_labels, (pair.clean_ids, pair.corrupted_ids))
            tokens = zip(clean, corrupted, strict=True)
            best_place = f"at '{corrupted[best['position']]}'"
            first_differing, last_differing = pair.subject
            last_row = percent.sizes["layer"] - 1
            options = {
                "columns": tuple(to if at == to else f"{at} → {to}" for at, to in tokens),
                "column_name": "token",
                # A frame is (top, left, bottom, right): all layers of the tokens that differ.
                "framed": ((0, first_differing, last_row, last_differing),),
                "frame_name": "where the prompts differ",
            }
            frame_note = " Framed: where the prompts differ."
        return Heatmap.of(
            percent,
            NAMES[kind],
            f"Each cell: recovery by patching {kind} of one layer (row) at one "
            f"{'head' if is_by_head else 'position'} (column). Largest: {best['recovery']:.0f} % in layer "
            f"{best['layer']}, {best_place}.{frame_note}",
            value_name=f"recovered by patching {kind}",
            unit="%",
            low=-100.0,
            high=100.0,
            diverging=True,
            **options,
        )

    def _places(self, i: int, title: str) -> Table:
        """Table of pair `i` with the position, or head, that has the largest recovery in each layer, by kind
        of activation."""
        pair, percent = self.traced[i], self.recovered(i)
        tokens = self.subject.token_labels(pair.corrupted_ids)

        def best_place(kind: str, layer: int) -> Any:
            """Position, or head, with the largest recovery in a layer, as text."""
            index = int(percent[kind].values[layer].argmax())
            return dim(f"head {index}" if _by_head(kind) else f"{tokens[index]} ({index})")

        # The rows are indices of layers.
        columns: list[tuple[Any, ...]] = [("layer", int, "d")]
        for kind, grid in percent.items():
            largest_of_layer = grid.values.max(axis=1).__getitem__
            columns += [
                (kind, largest_of_layer, "{:.1f} %".format),
                ("at", partial(best_place, kind)),
            ]
        patched_axes = {"head" if _by_head(kind) else "position" for kind in percent}
        caption = (
            f"One row per layer. Percentages: recovery, the share of {MEASURES[self.settings.metric]} that "
            "comes back when one activation of the clean run is patched into the corrupted run. At: the "
            f"{' or '.join(sorted(patched_axes, reverse=True))} where recovery is largest. KL(clean || "
            f"corrupted) is {self.by_run(i, 'kl')['corrupted']:.3f} nats."
        )
        if self.settings.metric == "logit_difference":
            difference = "{clean:+.2f} clean, {corrupted:+.2f} corrupted."
            caption += f" Logit of {pair.answer!r} minus that of {pair.wrong!r}, by run: "
            caption += difference.format(**self.by_run(i, "logit_difference"))
        if pair.pieces:
            probabilities = {run: format_probability(p) for run, p in self.by_run(i, "probability").items()}
            word = self.subject.token_labels(pair.pieces[:1])[0]
            caption += (
                f" Probability of {word!r}, by run: {probabilities['clean']} clean, "
                f"{probabilities['corrupted']} corrupted."
            )
        layers = range(self.subject.config.num_layers)
        return Table.of(layers, *columns, title=title, caption=caption, sources=self.sources(i))


def _is_recurrent_state(kind: str) -> bool:
    """Whether a hook-point kind is a recurrent state sequence (of RWKV, Mamba, mLSTM or linear attention)."""
    return kind.endswith("state_seq")


def _by_head(kind: str) -> bool:
    """Whether a hook-point kind is patched head by head at all positions, instead of by position."""
    return kind in HEAD_KINDS or (kind in STATE_KINDS and not _is_recurrent_state(kind))


def _best(kind: str, percent: xr.DataArray) -> dict[str, Any]:
    """Record of the largest recovery in a grid [layer, position] or [layer, head]: kind, layer, position or
    head, and recovery; of equal values the first."""
    (place,) = ranked(percent, 1)
    return {"kind": kind, **place, "recovery": float(percent.sel(place))}

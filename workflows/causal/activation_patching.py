"""Where does the model keep what makes two prompts differ? A causal trace by activation patching.

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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from ...stages.causal.answer_ranks import AskedPrompt
from ...stages.causal.draws import AtOnce
from ...stages.causal.grids.patching import ActivationPatching, DonorPatching, common_ends
from ...stages.causal.grids.patching_grid import HEAD_KINDS, KINDS, STATE_KINDS
from ...stages.causal.grids.patching_metrics import KL, LogitDifference, Metric, Probability, Recovery
from ...stages.forward.models.files import SHIPPED
from ...stages.logits.lens import format_probability, format_text, format_token
from ...store.arrays import Floats
from ...store.errors import ConfigError
from ..claim import CandidateEffects, Claim
from ..labelled import ranked, values_of
from ..material.answers import answer_pieces, encoded, named
from ..material.facts.fact_data import FIELDS
from ..material.facts.fact_pairs import pair_records, shipped_pairs
from ..material.facts.known import CHOSEN_ON, SCORED, KnownWorkflow
from ..material.places import NAMES, USUAL, check_kinds, in_every_layer
from ..material.unrelated import Unrelated
from ..settings import Count, DataSettings, ModelSettings, setting
from ..views import Choice, Data, Figure, Heatmap, Table, View, dim
from ..workflow import Nodes

if TYPE_CHECKING:
    import xarray as xr

    from ...stages.forward.text.tokens import Encoding

__all__ = ["ActivationPatchingTrace", "ActivationPatchingTraceSettings"]

CITIES = (
    (
        "The capital of France is",
        "Paris",
        {
            "The capital of Poland is": "Warsaw",
            "The capital of Brazil is": "Brasília",
            "The capital of Russia is": "Moscow",
            "The capital of Canada is": "Ottawa",
            "The capital of Turkey is": "Ankara",
        },
    ),
    (
        "The Space Needle is in downtown",
        "Seattle",
        {
            "The Eiffel Tower is in downtown": "Paris",
            "The Colosseum is located in downtown": "Rome",
            "The Big Ben is located in downtown": "London",
            "The Great Wall is located in downtown": "Beijing",
        },
    ),
)
"""candle-mi's pairs: clean prompt, its answer, corrupted prompts to choose from with their answers."""

MEASURES = {
    "kl": "the clean prediction",
    "logit_difference": "the difference between the logits of both answers",
    "probability": "the clean answer's probability",
}
"""What recovery is a share of, by metric."""

ROLES = ("the subject's last token", "the last token")
"""Positions that other pairs have too."""


@dataclass(frozen=True)
class ActivationPatchingTraceSettings(DataSettings, ModelSettings):
    """What `--set` can change.

    Raises ConfigError for a clean prompt or a corrupted one alone, an answer without a prompt, a metric that
    needs answers which are not given, and kinds there are not.
    """

    prompt: str = setting("", "clean prompt; none: the first pairs of data, shipped facts or candle-mi's")
    answer: str = setting("", "what comes next in the clean prompt; may be empty")
    corrupted: tuple[str, ...] = setting((), "corrupted prompts; the first of as many tokens is taken")
    wrong: str = setting("", "what comes next in the corrupted prompts; for metric=logit_difference")
    metric: Literal["kl", "logit_difference", "probability"] = setting(
        "kl",
        '"kl" of next-token distributions; "logit_difference", clean answer minus corrupted answer; '
        '"probability" of the clean answer: what recovery is a share of',
    )
    kinds: tuple[str, ...] = setting(
        (), "what is patched; none: resid_post, attn_out and mlp_out; z, q, k, v, pattern: by head"
    )
    window: Count = setting(1, "neighbouring layers patched together")
    pairs: Count = setting(2, "how many of the default pairs")
    others: Count = setting(6, "other pairs a place is chosen on; of default pairs, as many more are scored")
    donors: Count = setting(2, "unrelated prompts per default pair; a pair of one's own has `controls`")
    answer_piece: Literal["only", "first"] = setting(
        "only", '"only" refuses answers of several tokens, "first" follows the first'
    )

    def __post_init__(self) -> None:
        if bool(self.prompt) != bool(self.corrupted):
            raise ConfigError("expected a clean prompt and corrupted ones, found one without the other")
        if self.answer and not self.prompt:
            raise ConfigError(f"expected a prompt for the answer {self.answer!r}, found none")
        if self.wrong and not self.answer:
            raise ConfigError(f"expected an answer beside the wrong one, {self.wrong!r}, found none")
        needed = {"logit_difference": ("answer", "wrong"), "probability": ("answer",)}.get(self.metric, ())
        missing = [name for name in needed if self.prompt and not getattr(self, name)]
        if missing:
            raise ConfigError(
                f"metric={self.metric}: expected {' and '.join(needed)} of the prompt, found no "
                f"{' and no '.join(missing)}; set {'=… and '.join(missing)}=…"
            )
        check_kinds(self.kinds, KINDS)


@dataclass(frozen=True)
class Traced:
    """A pair chosen: texts, token ids, the subject's first and last position, and the answers' tokens."""

    clean: str
    corrupted: str
    answer: str
    clean_ids: tuple[int, ...]
    corrupted_ids: tuple[int, ...]
    pieces: tuple[int, ...]
    """Of the answer."""
    wrong: str = ""
    """The corrupted prompt's answer, "" where nobody named it."""
    wrong_piece: int | None = None
    """Its first token."""

    @property
    def subject(self) -> tuple[int, int]:
        """First and last position at which the prompts differ."""
        start, end = common_ends(self.clean_ids, self.corrupted_ids)
        return start, len(self.clean_ids) - end - 1


class ActivationPatchingTrace(KnownWorkflow):
    """One grid of patches per pair and kind."""

    name = "activation_patching"
    question = "Where does the model keep what makes two prompts differ?"
    settings_type = ActivationPatchingTraceSettings
    settings: ActivationPatchingTraceSettings
    CONTROLS: ClassVar[tuple[str, ...]] = ("choice", "scored", "controls")
    """Results beside the pairs shown."""
    asked_about = "pairs"

    @property
    def kinds(self) -> tuple[str, ...]:
        """What is patched: as asked, or what all layers of the model have of the usual."""
        return self.settings.kinds or in_every_layer(self.subject.config, USUAL)

    def plan(self) -> Nodes:
        """Per pair of prompts an experiment over positions, and one over heads, as far as kinds are asked."""
        self.traced = [self._chosen(*each) for each in self._asked()]
        kinds = self.kinds
        grids = {
            ("pair", "position"): tuple(kind for kind in kinds if not _by_head(kind)),
            ("heads", "head"): tuple(kind for kind in kinds if _by_head(kind)),
        }
        nodes = {
            f"{name}_{i}": self.on_model(self._experiment(each, chosen, over))
            for i, each in enumerate(self.traced)
            for (name, over), chosen in grids.items()
            if chosen
        }
        states = grids["pair", "position"]
        return nodes | (self._control_nodes(states) if states and self.settings.controls else {})

    def _control_nodes(self, kinds: tuple[str, ...]) -> Nodes:
        """Both roles of other pairs, [draw, layer, position]: to choose on, to score, and with donors; and
        which of these pairs the model knows."""
        given, unrelated = self.settings, Unrelated(self.subject)
        others = self._other_pairs()
        half = given.others if len(others) >= 2 * given.others else -(-len(others) // 2)
        chosen_on, more = others[:half], others[half : half + given.others]
        if not chosen_on:
            raise ConfigError(
                "expected other pairs to choose a place on, found none that fit the model; give more in "
                "data=…, or ask for no claim: controls=0"
            )
        self.scored = self.traced + ([] if given.prompt else more)
        self.num_donors = given.controls if given.prompt else given.donors
        donors = tuple(
            DonorPatching(donor=donor, metrics=(Recovery(self._measure(pair)),), **self._roles(pair, kinds))
            for number, pair in enumerate(self.scored)
            for donor in unrelated.to(
                pair.clean_ids,
                self.num_donors,
                seed=given.seed + number,
                targets=(pair.answer,) if pair in self.traced else (pair.answer, pair.wrong),
            )
        )

        def patched(pair: Traced) -> ActivationPatching:
            return ActivationPatching(metrics=(Recovery(self._measure(pair)),), **self._roles(pair, kinds))

        asked: dict[str, tuple[ActivationPatching, ...]] = {
            "choice": tuple(map(patched, chosen_on)),
            "scored": tuple(map(patched, self.scored)),
            "controls": donors,
        }
        self.only_claims = tuple(asked)
        groups = {CHOSEN_ON: [self._question(pair) for pair in chosen_on]}
        if not given.prompt:  # a pair of one's own is scored, known or not
            groups[SCORED] = [self._question(pair) for pair in self.scored]
        return self.known_node(groups) | {name: self.on_model(AtOnce(each)) for name, each in asked.items()}

    def _other_pairs(self) -> list[Traced]:
        """Pairs that are not shown and fit the model: the rest of `data`, or where nothing is left of it,
        shipped ones; as many to choose on as to score on."""
        given, limit = self.settings, self.subject.config.context_length
        shown = [(each.clean_ids, each.corrupted_ids) for each in self.traced]
        few = 4 * given.others + len(shown)
        records = pair_records(self.subject, given.data)[:few]
        found = self._fitting(records, shown, limit)
        if given.data and not found:
            found = self._fitting(shipped_pairs(self.subject)[:few], shown, limit)
        return found[: 2 * given.others]

    def _fitting(
        self, records: Sequence[Mapping[str, str]], shown: Sequence[Any], limit: int | None
    ) -> list[Traced]:
        """Pairs of some records, but for those shown and those that the model or the metric cannot read."""
        found = []
        for record in records:
            one, other, target, wrong = (record[name] for name in FIELDS)
            ids, corrupted = (tuple(self._encoded(text).ids) for text in (one, other))
            if (
                (ids, corrupted) in shown
                or len(ids) != len(corrupted)
                or not (limit is None or len(ids) <= limit)
            ):
                continue
            right, false = (self.subject.answer_id(one, word) for word in (target, wrong))
            if self.settings.metric != "logit_difference" or right != false:
                found.append(Traced(one, other, target, ids, corrupted, (right,), wrong, false))
        return found

    def _measure(self, pair: Traced) -> Metric:
        """What recovery is a share of, in one pair."""
        if self.settings.metric == "logit_difference":
            assert pair.wrong_piece is not None
            return LogitDifference(pair.pieces[0], pair.wrong_piece)
        return Probability(pair.pieces[0]) if self.settings.metric == "probability" else KL()

    def _question(self, pair: Traced) -> AskedPrompt:
        """The clean prompt, its answer's first token, and the position whose logits say it."""
        return pair.clean_ids, pair.pieces[0], self._asked_at(pair.clean_ids, pair.corrupted_ids)

    def _roles(self, pair: Traced, kinds: Any) -> dict[str, Any]:
        clean, corrupted = pair.clean_ids, pair.corrupted_ids
        _, end = common_ends(clean, corrupted)
        at = self._asked_at(clean, corrupted)
        return {
            "clean": clean,
            "corrupted": corrupted,
            "kinds": kinds,
            "positions": (len(clean) - end - 1, at),
            "window": self.settings.window,
            "at": -1 if at == len(clean) - 1 else at,
        }

    def _asked_at(self, clean: tuple[int, ...], corrupted: tuple[int, ...]) -> int:
        """Where both prompts are asked. Raises ConfigError unless that is one position."""
        one, other = map(self.subject.read_at, (clean, corrupted))
        if one != other:
            raise ConfigError(
                f"expected the mask at one position of both prompts, found {one} and {other}; choose others"
            )
        return one

    def _encoded(self, text: str) -> Encoding:
        """Tokens of a prompt as the model is asked."""
        return encoded(self.subject, self.subject.asked(text))

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
        """Whether any kind is one that a claim is made about."""
        return bool(self.claimed_kinds)

    def claims(self) -> Iterator[Claim]:
        """For each kind of state, the place with the largest recovery on other pairs; then the weakest."""
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

    def _asked(self) -> Sequence[tuple[str, str, Mapping[str, str]]]:
        """Clean prompts, answers and what may corrupt them, with the answers to that."""
        given = self.settings
        if given.prompt:
            return [(given.prompt, given.answer, dict.fromkeys(given.corrupted, given.wrong))]
        cities = () if given.model in SHIPPED or given.data else CITIES
        if fitting := [each for each in cities if self._fits(each[0], each[2])]:
            return fitting[: given.pairs]
        records = pair_records(self.subject, given.data)[: given.pairs]
        return [
            (one, target, {other: wrong})
            for one, other, target, wrong in ([record[name] for name in FIELDS] for record in records)
        ]

    def _fits(self, clean: str, candidates: Iterable[str]) -> bool:
        """Whether any of the candidates has as many tokens."""
        first, *others = (len(self._encoded(text).ids) for text in (clean, *candidates))
        return first in others

    def _chosen(self, clean: str, answer: str, candidates: Mapping[str, str]) -> Traced:
        ids = tuple(self._encoded(clean).ids)
        tried = {text: tuple(self._encoded(text).ids) for text in candidates}
        corrupted = next((text for text, other in tried.items() if len(other) == len(ids)), None)
        if corrupted is None:
            lengths = ", ".join(f"{text!r} has {len(other)}" for text, other in tried.items())
            raise ConfigError(
                f"expected a corrupted prompt of {len(ids)} tokens, as {clean!r} has, found none "
                f"({lengths}); choose another"
            )
        if tried[corrupted] == ids:
            raise ConfigError(
                f"expected a corrupted prompt that differs from the clean one, found {clean!r} twice"
            )
        pieces = answer_pieces(self.subject, clean, answer, at_mask=True)
        if len(pieces) > 1 and self.settings.answer_piece == "only":
            raise ConfigError(
                f"expected an answer of one token, found {answer!r} as {named(self.subject, pieces)}; choose "
                "another, or follow its first token: answer_piece=first"
            )
        wrong = candidates[corrupted]
        false = answer_pieces(self.subject, corrupted, wrong, at_mask=True)[:1]
        if self.settings.metric == "logit_difference" and pieces[:1] == false:
            raise ConfigError(
                f"metric=logit_difference: expected answers that begin with different tokens, found "
                f"{answer!r} and {wrong!r}; choose others, or another metric"
            )
        return Traced(
            clean, corrupted, answer, ids, tried[corrupted], pieces, wrong, false[0] if false else None
        )

    def _experiment(self, traced: Traced, kinds: tuple[str, ...], over: str) -> ActivationPatching:
        metrics: tuple[Metric, ...] = (Recovery(self._measure(traced)), KL())
        if traced.pieces:
            metrics += (Probability(traced.pieces[0]),)
        if self.settings.metric == "logit_difference":
            metrics += (self._measure(traced),)
        at = self._asked_at(traced.clean_ids, traced.corrupted_ids)
        return ActivationPatching(
            at=-1 if at == len(traced.clean_ids) - 1 else at,
            clean=traced.clean_ids,
            corrupted=traced.corrupted_ids,
            kinds=kinds,
            over=over,
            metrics=metrics,
            window=self.settings.window,
        )

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

    def told(self, i: int) -> dict[str, Any]:
        """Pair `i` in the fields of candle-mi's example, and the grids of every kind."""
        traced, grids = self.traced[i], self.grids(i)
        percent = {kind: 100 * grid["recovery"] for kind, grid in grids.items()}
        kind, first = next(iter(percent.items()))
        start, last = traced.subject
        unpatched = grids[kind]["unpatched"]
        told: dict[str, Any] = {
            "model_id": self.subject.name,
            "clean_prompt": traced.clean,
            "corrupted_prompt": traced.corrupted,
            "subject_pos": start,
            "subject_last_pos": last,
            "tokens": named(self.subject, traced.corrupted_ids),
            "clean_tokens": named(self.subject, traced.clean_ids),
            "n_layers": self.subject.config.num_layers,
            "seq_len": len(traced.clean_ids),
            "corrupted_kl": float(unpatched.sel(run="corrupted", metric="kl")),
            "unit": "percent recovered, 0 = corrupted, 100 = clean",
            "metric": self.settings.metric,
            "kind": kind,
            "window": self.settings.window,
            "grid": first.values.tolist(),
            "grids": {kind: grid.values.tolist() for kind, grid in percent.items()},
            "best": [_best(kind, grid) for kind, grid in percent.items()],
        }
        if "position" in first.dims:
            told["subject_recovery"] = first.sel(position=start).values.tolist()
        if traced.pieces:
            probabilities = unpatched.sel(metric="probability")
            told |= {
                "answer": traced.answer,
                "answer_token_ids": list(traced.pieces),
                "answer_token": named(self.subject, traced.pieces[:1])[0],
                "answer_probability": {str(run["run"].values): float(run) for run in probabilities},
                "answer_probability_grids": {
                    kind: grid["probability"].values.tolist() for kind, grid in grids.items()
                },
            }
        if self.settings.metric == "logit_difference":
            runs = unpatched.sel(metric="logit_difference")
            told |= {
                "wrong": traced.wrong,
                "logit_difference": {str(run["run"].values): float(run) for run in runs},
                "logit_difference_grids": {
                    kind: grid["logit_difference"].values.tolist() for kind, grid in grids.items()
                },
            }
        return told

    def views(self) -> Iterator[View]:
        """Per pair the grids of every kind, and the best places."""
        pairs = [self.told(i) for i in range(len(self.traced))]
        yield Data(json={"results": pairs})
        for i, told in enumerate(pairs):
            traced, sources = self.traced[i], self.sources(i)
            grids = [self._grid(told, traced, best) for best in told["best"]]
            yield Choice(
                title=f"'{format_text(traced.clean)}' put into '{format_text(traced.corrupted)}'",
                caption=f"Share of {MEASURES[self.settings.metric]} that comes back when one state of the "
                "clean run replaces that of the corrupted one; 0 % as corrupted, 100 % as clean, below 0 % "
                "farther off than corrupted.",
                sources=sources,
                name="patched",
                options=tuple(zip(told["grids"], grids, strict=True)),
            )
            yield Figure(
                name=f"activation_patching_{i}",
                title=f"Where {self.subject.name} keeps what makes prompts differ",
                caption=f"States of '{format_text(traced.clean)}' put into '{format_text(traced.corrupted)}'",
                panels=(*grids, *([self.findings] if self.makes_claims else [])),
            )
            yield self._places(told, sources)

    def _grid(self, told: dict[str, Any], traced: Traced, best: dict[str, Any]) -> Heatmap:
        """Percent recovered by layer and place for one kind; framed is where the prompts differ."""
        kind, layers = best["kind"], told["n_layers"]
        values = np.array(told["grids"][kind])
        if "position" in best:
            start, last = traced.subject
            clean, corrupted = (map(format_token, told[which]) for which in ("clean_tokens", "tokens"))
            texts = zip(clean, corrupted, strict=True)
            own: dict[str, Any] = {
                "columns": tuple(to if at == to else f"{at} → {to}" for at, to in texts),
                "column_name": "token",
                "framed": ((0, start, layers - 1, last),),
                "frame_name": "where the prompts differ",
            }
        else:
            heads = tuple(map(str, range(values.shape[1])))
            own = {"columns": heads, "column_name": "key/value head" if kind in ("k", "v") else "head"}
        return Heatmap(
            title=NAMES[kind],
            caption=f"most: {best['recovery']:.0f} % in layer {best['layer']} {_at(told, best)}",
            values=values,
            rows=tuple(map(str, range(layers))),
            value_name=f"recovered by patching {kind}",
            unit="%",
            low=-100.0,
            high=100.0,
            diverging=True,
            upward=True,
            **own,
        )

    def _places(self, told: dict[str, Any], sources: tuple[str, ...]) -> Table:
        """The best position, or head, of each layer, by kind."""
        tokens = [format_token(text) for text in told["tokens"]]

        def place(kind: str, grid: Any, layer: int) -> Any:
            index = int(np.argmax(grid[layer]))
            return dim(f"head {index}" if _by_head(kind) else f"{tokens[index]} ({index})")

        columns: list[tuple[Any, ...]] = [("layer", int, "d")]
        for kind, grid in told["grids"].items():
            columns += [(kind, partial(_most, grid), "{:.1f} %".format), ("at", partial(place, kind, grid))]
        where = " and ".join(
            word
            for word, is_named in (("position", False), ("head", True))
            if any(_by_head(kind) == is_named for kind in told["grids"])
        )
        caption = (
            f"share of {MEASURES[self.settings.metric]} recovered at the best {where}; "
            f"KL(clean || corrupted) {told['corrupted_kl']:.3f} nats"
        )
        if "logit_difference" in told:
            runs = told["logit_difference"]
            caption += (
                f"; logit of {told['answer']!r} minus that of {told['wrong']!r}: {runs['clean']:+.2f} clean, "
                f"{runs['corrupted']:+.2f} corrupted"
            )
        if "answer_probability" in told:
            shares = {name: format_probability(p) for name, p in told["answer_probability"].items()}
            word = format_token(told["answer_token"])
            caption += f"; {word!r} {shares['clean']} clean, {shares['corrupted']} corrupted"
        return Table.of(
            range(told["n_layers"]),
            *columns,
            title=f"{self.subject.name}: '{format_text(told['clean_prompt'])}' put into "
            f"'{format_text(told['corrupted_prompt'])}'",
            caption=caption,
            sources=sources,
        )


def _is_memory(kind: str) -> bool:
    """Whether a kind is what a recurrence remembers."""
    return kind.endswith("state_seq")


def _by_head(kind: str) -> bool:
    """Whether a kind is patched head by head, at all positions, and not position by position."""
    return kind in HEAD_KINDS or (kind in STATE_KINDS and not _is_memory(kind))


def _most(grid: list[list[float]], layer: int) -> float:
    return max(grid[layer])


def _at(told: dict[str, Any], best: dict[str, Any]) -> str:
    """The place of the largest cell, in words."""
    return (
        f"at '{format_token(told['tokens'][best['position']])}'"
        if "position" in best
        else f"head {best['head']}"
    )


def _best(kind: str, percent: xr.DataArray) -> dict[str, Any]:
    """The largest cell of a grid [layer, position] or [layer, head], the earliest of equal ones."""
    (place,) = ranked(percent, 1)
    return {"kind": kind, **place, "recovery": float(percent.sel(place))}

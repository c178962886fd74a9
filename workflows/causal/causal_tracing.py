"""Which states recover a fact when the embedding of its subject is noised? Causal tracing.

Noise on the embeddings of the subject takes the answer away; then one state of the clean run is put back,
layer by layer and position by position, and the answer's probability says how much of it returns
(stages/causal/grids/tracing.py; Meng et al. 2022, "Locating and Editing Factual Associations in GPT", section
2). Numbers are means over several noises.

Defaults: a shipped fact on the specimen, for other models candle-mi's France. Noise as in the paper, 3
standard deviations of the embeddings, on 10 samples; attention and MLP outputs are put back in windows of a
fifth of the layers, as its 10 of 48 are. An answer of several tokens is followed by its first.

Told of every kind is the place, a layer and a role, that restores most on other facts, the shipped ones or
those of `data` (the largest average indirect effect, as the paper calls the rise in probability), scored on
more of them and in the prompt beside other places that the noise reaches. As in the paper, facts count that
the model knows: the answer is the likeliest next token of the clean prompt. Where it knows too few, none of
them is traced and nothing is claimed (material/facts/known.py). States at the last token are left out: they
are the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.causal.controls import chosen_at_random, interval_of_mean
from ...stages.causal.draws import AtOnce
from ...stages.causal.grids.patching import common_ends
from ...stages.causal.grids.patching_grid import HIDDEN_KINDS
from ...stages.causal.grids.patching_metrics import Probability, Rank
from ...stages.causal.grids.tracing import CausalTracing
from ...stages.corpus.positions import phrase_tokens
from ...stages.forward.models.files import SHIPPED
from ...stages.logits.lens import format_probability, format_text, format_token
from ..claim import CandidateEffects, Claim
from ..labelled import largest, values_of
from ..material.answers import FRANCE, answer_pieces, encoded, named, target_json
from ..material.facts.fact_data import enough
from ..material.facts.fact_pairs import pair_records
from ..material.facts.known import CHOSEN_ON, SCORED, KnownWorkflow
from ..material.places import NAMES, USUAL, check_kinds, in_every_layer
from ..settings import Count, DataSettings, FactSettings, Natural, Positive, require_together, setting
from ..views import Data, Heatmap, Table, View, together
from ..workflow import Nodes

if TYPE_CHECKING:
    import xarray as xr

    from ...store.arrays import Floats

__all__ = ["CausalTrace", "CausalTraceSettings"]

IN_WINDOWS = ("attn_out", "mlp_out")
"""Kinds that are restored in several layers together: one alone carries little."""

ROLES = ("the subject's last token", "the token after it", "the last token")
"""Positions that other facts have too."""
OTHERS = 3
"""Positions of each other fact, drawn beside the roles among those the noise reaches."""


@dataclass(frozen=True)
class CausalTraceSettings(DataSettings, FactSettings):
    """What `--set` can change.

    Raises ConfigError for some of prompt, target and subject, and kinds there are not.
    """

    subject: str = setting("", "phrase of the prompt that gets noise; none: that of the default prompt")
    kinds: tuple[str, ...] = setting((), "what is put back; none: resid_post, attn_out and mlp_out")
    window: Natural = setting(0, "layers of attention or MLP put back together; 0: a fifth of them")
    multiplier: Positive = setting(3.0, "noise, in standard deviations of the embeddings")
    samples: Count = setting(10, "noises tried")
    seed: Natural = setting(0, "of the noise, and of what is drawn at random")
    facts: Count = setting(8, "other facts the place is chosen on, and as many more it is scored on")
    fact_samples: Count = setting(2, "noises tried on each of them")

    def __post_init__(self) -> None:
        check_kinds(self.kinds, HIDDEN_KINDS)
        require_together(self, "prompt", "target", "subject")


@dataclass(frozen=True)
class Recalled:
    """A fact: its tokens, the positions that get noise, its answer's first token, and where a state is put
    back, everywhere for None."""

    tokens: tuple[int, ...]
    noised: tuple[int, ...]
    answer: int
    positions: tuple[int, ...] | None = None


class CausalTrace(KnownWorkflow):
    """Grids of restored states, one per kind."""

    name = "causal_tracing"
    question = "Which states recover a fact when the embedding of its subject is noised?"
    settings_type = CausalTraceSettings
    settings: CausalTraceSettings

    def plan(self) -> Nodes:
        """An experiment per kind, as windows differ, on the prompt shown and on other facts."""
        chosen = self.settings
        self.prompt, self.target = self._fact()
        self.pieces = answer_pieces(self.subject, self.prompt, self.target)
        self.window = chosen.window or max(1, round(self.subject.config.num_layers / 5))
        own = Recalled(self.tokens, self.noised, self.pieces[0])
        grids: Nodes = {kind: self.on_model(self._tracing(own, kind, chosen.samples)) for kind in self.kinds}
        if not chosen.controls:
            return grids
        others = self._other_facts()
        half = len(others) // 2
        halves = {"choice": others[:half], "scored": others[half:]}
        claims: Nodes = {
            f"{name}_{kind}": self.on_model(
                AtOnce(tuple(self._tracing(each, kind, chosen.fact_samples) for each in facts))
            )
            for kind in self.kinds
            for name, facts in halves.items()
        }
        self.only_claims = tuple(claims)
        asked = dict(zip((CHOSEN_ON, SCORED), halves.values(), strict=True))
        known = self.known_node(
            {name: [(each.tokens, each.answer, -1) for each in facts] for name, facts in asked.items()}
        )
        return known | grids | claims

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of states that are restored: the setting, or the usual kinds that every layer has."""
        return self.settings.kinds or in_every_layer(self.subject.config, USUAL)

    def _tracing(self, fact: Recalled, kind: str, samples: int) -> CausalTracing:
        """The experiment on one fact."""
        given = self.settings
        return CausalTracing(
            tokens=fact.tokens,
            subject=fact.noised,
            kinds=(kind,),
            metrics=(Probability(fact.answer), Rank(fact.answer)),
            positions=fact.positions,
            window=self.window_of(kind),
            multiplier=given.multiplier,
            samples=samples,
            seed=given.seed,
        )

    def _other_facts(self) -> list[Recalled]:
        """Facts with a position for each role, and OTHERS beside: as many to choose on as to score on. Of
        one's own (`data`) there may be fewer than were asked for.

        Raises ConfigError for too few.
        """
        given, limit = self.settings, self.subject.config.context_length
        wanted, found = 2 * given.facts, dict[tuple[int, ...], Recalled]()
        for record in pair_records(self.subject, given.data):
            text, other = record["original_prompt"], record["counterfactual_prompt"]
            ids, others = (tuple(self.subject.tokenizer.encode(each).ids) for each in (text, other))
            noised = _differing(ids, others)
            if not noised:  # to a tokenizer that does not know the words
                continue
            roles, reached = roles_of(noised[-1], len(ids)), range(noised[0], len(ids))
            has_room = len(set(roles)) == len(ROLES) and len(reached) >= len(ROLES) + OTHERS
            if has_room and ids != self.tokens and (limit is None or len(ids) <= limit):
                drawn = chosen_at_random(reached, OTHERS, seed=given.seed + len(found), without=roles)
                answer = answer_pieces(self.subject, text, record["gt_original_target"])[0]
                found.setdefault(ids, Recalled(ids, noised, answer, (*roles, *drawn)))
            if len(found) == wanted:
                return list(found.values())
        return enough(list(found.values()), given.data, wanted, "a place")

    def window_of(self, kind: str) -> int:
        """Layers of a kind that are put back together."""
        return self.window if kind in IN_WINDOWS else 1

    def _fact(self) -> tuple[str, str]:
        """Prompt and target; tokens, and positions that get noise, are kept beside."""
        given = self.settings
        if not given.prompt and (given.model in SHIPPED or given.data):
            pair = pair_records(self.subject, given.data)[0]
            texts = [pair["original_prompt"], pair["counterfactual_prompt"]]
            ids, others = (tuple(encoded(self.subject, text).ids) for text in texts)
            self.tokens, self.noised = ids, _differing(ids, others)
            return texts[0], pair["gt_original_target"]
        prompt, target = (given.prompt, given.target) if given.prompt else FRANCE
        encoding = encoded(self.subject, prompt)
        self.tokens = tuple(encoding.ids)
        self.noised = tuple(phrase_tokens(encoding, given.subject or "France"))
        return prompt, target

    # -- what is claimed

    @cached_property
    def found(self) -> dict[str, xr.Dataset]:
        """Grid of restored states by kind, in memory."""
        return {kind: self.result(kind).load() for kind in self.kinds}

    @cached_property
    def candidates(self) -> dict[str, CandidateEffects]:
        """Rise of the answer's probability by each kind of state, [fact, layer, role], on facts that the
        model knows; the held-out ones have drawn positions behind the roles. A state has no last role: that
        is the query itself, whose state is not put back."""
        found = {}
        for kind in self.kinds:
            choice, scored = self._rise(f"choice_{kind}", CHOSEN_ON), self._rise(f"scored_{kind}", SCORED)
            if is_state(kind):
                scored = np.delete(scored, len(ROLES) - 1, axis=2)
            found[kind] = CandidateEffects(choice[..., : len(ROLES) - is_state(kind)], scored)
        return found

    def _rise(self, name: str, group: str) -> Floats:
        """Rise of the answer's probability in one result, [fact, layer, position]."""
        found = self.result(name).load()
        noised = found["unpatched"].sel(run="corrupted", metric="probability")
        rise = values_of(found["probability"] - noised, "draw", "layer", "position")
        return rise[self.is_known(group)]

    @property
    def says_answer(self) -> bool:
        """Whether the model says the answer in the prompt shown, nothing being noised."""
        (first, *_) = self.found.values()
        return float(first["unpatched"].sel(run="clean", metric="rank")) == 0

    def claims(self) -> Iterator[Claim]:
        """For each kind of state, the chosen layer and role on held-out facts; the least effective one; then
        the chosen ones in this prompt."""
        best = {kind: candidates.best for kind, candidates in self.candidates.items()}
        for kind, place in best.items():
            yield self._on_others(kind, place)
        first = self.kinds[0]
        yield self._on_others(first, self.candidates[first].quietest, "for comparison, ")
        for kind, place in best.items() if self.says_answer else ():
            if (claim := self._here(kind, place)) is not None:
                yield claim

    def claims_caption(self) -> str:
        """Caption of the claims: on which facts the layer and position of each kind were chosen."""
        known, total = ([number[name] for name in (CHOSEN_ON, SCORED)] for number in self.known_counts)
        return (
            "Of each kind the place whose state raises the answer's probability most on other facts; for "
            f"comparison one that moves it least. The model says the answer in {known[0]} of {total[0]} "
            f"facts to choose on, in {known[1]} of {total[1]} to score on, and "
            f"{'also' if self.says_answer else 'not'} in this prompt; of others nothing is claimed."
        )

    def _on_others(self, kind: str, place: tuple[int, ...], before: str = "") -> Claim:
        """The claim about a place [layer, role] on held-out facts, beside other places of each prompt."""
        return self.candidates[kind].claim(
            f"{before}{self._cause(kind, place)} raises the probability of the answer",
            place,
            "another place of each prompt that the noise reaches",
            self.settings,
            noises=self.settings.fact_samples,
        )

    def _here(self, kind: str, place: tuple[int, ...]) -> Claim | None:
        """The claim about the prompt shown, beside its other cells; None with fewer than two cells."""
        given, grid, length = self.settings, self.found[kind], len(self.tokens)
        noised = float(grid["unpatched"].sel(run="corrupted", metric="probability"))
        own = place[0], roles_of(self.noised[-1], length)[place[1]]
        last = length - is_state(kind)
        rise = grid["probability"].transpose("layer", "position").values - noised
        rows, columns = rise.shape
        cells = [row * columns + at for row in range(rows) for at in range(self.noised[0], last)]
        cell = own[0] * columns + own[1]
        if cell not in cells or len(cells) < 2:
            return None
        spread = None
        if "probability_std" in grid:
            deviation = grid["probability_std"].transpose("layer", "position").values[own]
            spread = interval_of_mean(float(rise[own]), float(deviation), given.samples)
        word = format_token(named(self.subject, self.pieces[:1])[0])
        return Claim.among(
            f"in '{format_text(self.prompt)}', {self._cause(kind, place)} raises the probability of {word!r}",
            rise,
            cell,
            "other places that the noise reaches",
            given,
            candidates=cells,
            levels=(noised, noised + float(rise[own])),
            spread=spread,
            held_out=True,
            noises=given.samples,
        )

    def _cause(self, kind: str, place: tuple[int, ...]) -> str:
        layers = self.window_of(kind)
        around = f"{layers} layers around " if layers > 1 else ""
        return f"clean {kind} of {around}layer {place[0]} at {ROLES[place[1]]} put back"

    def views(self) -> Iterator[View]:
        """The answer's probability by layer and position for each kind, and the best cells."""
        texts = [format_token(text) for text in named(self.subject, self.tokens)]
        found = self.found
        runs = next(iter(found.values()))["unpatched"].sel(metric="probability")
        clean, noised = (float(runs.sel(run=run)) for run in ("clean", "corrupted"))
        best = [_best(kind, grid) for kind, grid in found.items()]
        word = format_token(named(self.subject, self.pieces[:1])[0])
        shares = f"{format_probability(clean)} clean, {format_probability(noised)} noised"
        yield Data(
            json=self._about(clean, noised, next(iter(found.values()))) | {"best": best} | self._choice()
        )
        first, last = self.noised[0], self.noised[-1]
        panels = [
            Heatmap.of(
                grid["probability"].transpose("layer", "position"),
                NAMES[kind],
                f"probability of {word!r} with {_windowed(self.window_of(kind))} of the clean run put back; "
                f"{shares}",
                sources=(kind,),
                columns=tuple(f"{text} ({place})" for place, text in enumerate(texts)),
                column_name="token",
                value_name=f"probability of {word!r}",
                low=min(clean, noised),
                high=max(clean, noised),
                framed=((0, first, grid.sizes["layer"] - 1, last),),
                frame_name="noised",
                json={kind: {"probability": grid["probability"], "std": grid.get("probability_std")}},
            )
            for kind, grid in found.items()
        ]
        title = f"Where {self.subject.name} recalls {word!r}: '{format_text(self.prompt)}'"
        yield from together("causal_tracing", title, *panels, beside=[self.findings])
        yield Table.of(
            best,
            ("put back", lambda one: NAMES[one["kind"]]),
            ("layer", "layer", "d"),
            ("at", lambda one: f"{texts[one['position']]} ({one['position']})"),
            ("probability", "probability", format_probability),
            ("of what was lost", "restored", "{:.0%}".format),
            title=f"{self.subject.name}: '{format_text(self.prompt)}' with noise on {self._noised_text()!r}",
            caption=f"the best place of each kind; {word!r} {shares}",
        )

    def _noised_text(self) -> str:
        texts = named(self.subject, self.tokens)
        return format_text("".join(texts[place] for place in self.noised).strip())

    def _about(self, clean: float, noised: float, grid: xr.Dataset) -> dict[str, Any]:
        """Prompt, noise, and the probabilities of the clean and the noised run, for documents."""
        return {
            **self.subject.about,
            "prompt": self.prompt,
            "tokens": named(self.subject, self.tokens),
            "subject_positions": self.noised,
            "window": self.window,
            "standard_deviation_of_noise": grid.attrs["standard_deviation_of_noise"],
            "clean_probability": clean,
            "noised_probability": noised,
            **target_json(self.subject, self.target, self.pieces),
        }

    def _choice(self) -> dict[str, Any]:
        """Layer and role chosen on other facts, by kind, for documents."""
        if self.not_claimed:
            return {}
        best = {kind: (candidates.best, candidates.mean) for kind, candidates in self.candidates.items()}
        return {
            "choice": {
                kind: {"layer": place[0], "role": ROLES[place[1]], "rise": mean[place]}
                for kind, (place, mean) in best.items()
            }
        }


def roles_of(subject_end: int, length: int) -> tuple[int, ...]:
    """Positions of ROLES in a prompt of so many tokens whose subject ends at one."""
    return subject_end, min(subject_end + 1, length - 1), length - 1


def is_state(kind: str) -> bool:
    """Whether a kind is the stream, whose state at the last token is the answer, and not an output."""
    return kind.startswith("resid")


def _differing(ids: Sequence[int], others: Sequence[int]) -> tuple[int, ...]:
    """Positions at which a prompt differs from another."""
    start, end = common_ends(ids, others)
    return tuple(range(start, len(ids) - end))


def _best(kind: str, grid: xr.Dataset) -> dict[str, Any]:
    """The place that restores most, the earliest of equal ones; restored: 0 as noised, 1 as clean."""
    (best,) = largest(grid, grid["probability"].transpose("layer", "position"), 1, "probability")
    clean, noised = grid["unpatched"].sel(metric="probability", run=["clean", "corrupted"]).values.tolist()
    restored = (best["probability"] - noised) / (clean - noised) if clean != noised else None
    return {"kind": kind, **best, "restored": restored}


def _windowed(layers: int) -> str:
    return "the state" if layers == 1 else f"{layers} layers"

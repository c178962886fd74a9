"""Which states recover a fact when the embedding of its subject is noised? Causal tracing.

Gaussian noise on the embeddings of the subject removes the answer; then one activation of the clean run is
restored, at one layer and position at a time, and the answer's probability measures how much of the answer it
recovers (stages/causal/grids/tracing.py; Meng et al. 2022, "Locating and Editing Factual Associations in
GPT", section 2). Numbers are means over several samples of noise.

Defaults: noise of 3 standard deviations of the embeddings and 10 samples (fewer for a large model), as in the
paper; attention and MLP outputs are restored in windows of a fifth of the layers, as the paper's 10 of 48.
The prompt is a shipped fact for a specimen, a general fact that it knows for other models. An answer of
several tokens is tracked by its first token.

The claim, one per kind of activation: the (layer, role) with the largest mean rise of the answer's
probability on other facts (the paper's average indirect effect), scored on held-out facts and in the prompt
shown, against other layers and positions that the noise reaches. As in the paper, only facts count whose
answer is the likeliest next token of the clean prompt; with too few of them nothing is claimed
(material/facts/known.py). Facts are the shipped ones or those of `data`. Residual states at the last token
are left out, as they determine the answer.
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
from ...stages.logits.lens import format_probability, format_text
from ..claim import CandidateEffects, Claim
from ..labelled import largest, values_of
from ..material.answers import answer_pieces, encoded, target_json
from ..material.facts.fact_data import default_data, enough
from ..material.facts.fact_pairs import pair_records
from ..material.facts.known import CHOSEN_ON, SCORED, KnownWorkflow
from ..material.places import NAMES, USUAL, check_kinds, in_every_layer
from ..material.sizes import FEWEST_FACTS, affordable, intervention_operations
from ..settings import DataSettings, FactSettings, Natural, Positive, require_together, setting
from ..views import Data, Heatmap, Table, View, together
from ..workflow import Nodes

if TYPE_CHECKING:
    import xarray as xr

    from ...store.arrays import Floats

__all__ = ["CausalTrace", "CausalTraceSettings"]

IN_WINDOWS = ("attn_out", "mlp_out")
"""Kinds of hook points that are restored in several neighbouring layers at once, as a single layer's output
restores little."""

ROLES = ("the subject's last token", "the token after the subject", "the last token")
"""Positions that every fact has: a (layer, role) selected on some facts is scored at the same role of
held-out facts."""
SAMPLES, FACTS, FACT_SAMPLES = 10, 8, 2
"""Largest numbers by default: samples of noise in the prompt shown; facts to choose on; samples in each."""
OTHERS = 3
"""Number of further positions per fact, drawn at random among those that the noise reaches, as controls."""


@dataclass(frozen=True)
class CausalTraceSettings(DataSettings, FactSettings):
    """Settings of the workflow `causal_tracing`: the fact, its noised subject, and what is restored.

    Raises:
        ConfigError: some but not all of prompt, target and subject are set, or a kind does not exist.
    """

    subject: str = setting(
        "", "phrase of the prompt whose embeddings get noise; none: that of the default prompt"
    )
    kinds: tuple[str, ...] = setting(
        (), "kinds of activations that are restored; none: resid_post, attn_out and mlp_out"
    )
    window: Natural = setting(
        0, "number of layers whose attention or MLP outputs are restored together; 0: a fifth of all layers"
    )
    # 3 standard deviations and 10 samples of noise are those of ROME (Meng et al. 2022).
    multiplier: Positive = setting(
        3.0, "standard deviation of the noise, as a multiple of that of the embeddings"
    )
    samples: Natural = setting(
        0, f"samples of noise in the prompt shown; 0: {SAMPLES}, or fewer for a large model"
    )
    seed: Natural = setting(0, "seed of the noise and of all random draws")
    facts: Natural = setting(
        0,
        "facts to choose the layer and position on, and as many held-out facts to score them on; 0: "
        f"{FACTS}, or fewer for a large model",
    )
    fact_samples: Natural = setting(
        0, f"samples of noise in each of these facts; 0: {FACT_SAMPLES}, or 1 for a large model"
    )

    def __post_init__(self) -> None:
        check_kinds(self.kinds, HIDDEN_KINDS)
        require_together(self, "prompt", "target", "subject")


@dataclass(frozen=True)
class Recalled:
    """A fact prepared for causal tracing: its prompt, noised positions and answer."""

    tokens: tuple[int, ...]
    """Token ids of the prompt."""
    noised: tuple[int, ...]
    """Positions of the subject, whose embeddings get noise."""
    answer: int
    """First token id of the answer."""
    positions: tuple[int, ...] | None = None
    """Token positions at which activations are restored, one run each; None for every position."""


class CausalTrace(KnownWorkflow):
    """Workflow of causal tracing: restores one activation at a time in a prompt with noise on its subject,
    [layer, position] per kind of activation."""

    name = "causal_tracing"
    question = "Which states recover a fact when the embedding of its subject is noised?"
    settings_type = CausalTraceSettings
    settings: CausalTraceSettings

    def plan(self) -> Nodes:
        """Nodes that trace the displayed prompt and other facts, one per kind of activation, as windows of
        layers differ between kinds."""
        settings = self.settings
        self.prompt, self.target = self._fact()
        self.pieces = answer_pieces(self.subject, self.prompt, self.target)
        # ROME restores windows of 10 of the 48 layers of GPT-2 XL, about a fifth.
        self.window = settings.window or max(1, round(self.subject.config.num_layers / 5))
        self.samples, self.n_facts, self.fact_samples = self._sizes()
        shown = Recalled(self.tokens, self.noised, self.pieces[0])
        grids: Nodes = {kind: self.on_model(self._tracing(shown, kind, self.samples)) for kind in self.kinds}
        if not settings.controls:
            return grids
        other_facts = self._other_facts()
        half = len(other_facts) // 2
        halves = {"choice": other_facts[:half], "scored": other_facts[half:]}
        claims: Nodes = {
            f"{name}_{kind}": self.on_model(
                AtOnce(tuple(self._tracing(fact, kind, self.fact_samples) for fact in facts))
            )
            for kind in self.kinds
            for name, facts in halves.items()
        }
        self.only_claims = tuple(claims)
        groups = dict(zip((CHOSEN_ON, SCORED), halves.values(), strict=True))
        ranks_node = self.known_node(
            {name: [(fact.tokens, fact.answer, -1) for fact in facts] for name, facts in groups.items()}
        )
        return ranks_node | grids | claims

    def _sizes(self) -> tuple[int, int, int]:
        """Samples of noise in the prompt shown, facts to choose on, and samples in each fact: the settings,
        or by default as many as the model's size allows (material/sizes.py)."""
        settings, config, length = self.settings, self.subject.config, len(self.tokens)
        # A run restores one position in one layer.
        one_run = intervention_operations(config, length, logit_rows=0)
        runs_per_position = len(self.kinds) * config.num_layers
        samples = settings.samples or affordable(one_run * runs_per_position * length, SAMPLES, least=2)
        # As many facts are scored as are chosen on.
        one_sample = 2 * one_run * runs_per_position * (len(ROLES) + OTHERS)
        fact_samples = settings.fact_samples or affordable(one_sample * FACTS, FACT_SAMPLES, least=1)
        n_facts = settings.facts or affordable(one_sample * fact_samples, FACTS, least=FEWEST_FACTS)
        return samples, n_facts, fact_samples

    @property
    def kinds(self) -> tuple[str, ...]:
        """Restored kinds of hook points: the setting `kinds`, by default the members of USUAL that exist in
        every layer."""
        return self.settings.kinds or in_every_layer(self.subject.config, USUAL)

    def _tracing(self, fact: Recalled, kind: str, samples: int) -> CausalTracing:
        """Experiment that restores one kind of activation in one fact, averaged over samples of noise."""
        settings = self.settings
        return CausalTracing(
            tokens=fact.tokens,
            subject=fact.noised,
            kinds=(kind,),
            metrics=(Probability(fact.answer), Rank(fact.answer)),
            positions=fact.positions,
            window=self.window_of(kind),
            multiplier=settings.multiplier,
            samples=samples,
            seed=settings.seed,
        )

    def _other_facts(self) -> list[Recalled]:
        """Facts other than the displayed one: the first half to choose a (layer, role) on, the second half to
        score it on. Each has a position for every role and OTHERS random positions; `data` may give fewer
        than asked for.

        Raises ConfigError for too few.
        """
        settings = self.settings
        n_facts, facts = 2 * self.n_facts, dict[tuple[int, ...], Recalled]()
        for text, counterfactual, target, _ in pair_records(self.subject, settings.data):
            ids, other_ids = (tuple(self.subject.tokenizer.encode(t).ids) for t in (text, counterfactual))
            noised = _differing(ids, other_ids)
            # Two subjects have the same ids if the tokenizer has only an unknown-word token for both.
            if not noised:
                continue
            roles, reached = roles_of(noised[-1], len(ids)), range(noised[0], len(ids))
            # In short prompts roles coincide, or no position is left for the controls.
            has_room = len(set(roles)) == len(ROLES) and len(reached) >= len(ROLES) + OTHERS
            if has_room and ids != self.tokens and self.subject.fits(ids):
                # Another seed for each fact, so that facts draw independent positions.
                drawn = chosen_at_random(reached, OTHERS, seed=settings.seed + len(facts), without=roles)
                answer = answer_pieces(self.subject, text, target)[0]
                # Prompts of equal ids count once.
                facts.setdefault(ids, Recalled(ids, noised, answer, (*roles, *drawn)))
            if len(facts) == n_facts:
                break
        data = default_data(self.subject, settings.data)
        return enough(list(facts.values()), data, n_facts, "a layer and position")

    def window_of(self, kind: str) -> int:
        """Number of layers whose activations of a kind are restored together."""
        return self.window if kind in IN_WINDOWS else 1

    def _fact(self) -> tuple[str, str]:
        """Prompt and target of the displayed fact; also sets `tokens`, and `noised`, the positions that get
        noise."""
        settings = self.settings
        if not settings.prompt:
            prompt, counterfactual, target, _ = pair_records(self.subject, settings.data)[0]
            ids, other_ids = (tuple(encoded(self.subject, text).ids) for text in (prompt, counterfactual))
            self.tokens, self.noised = ids, _differing(ids, other_ids)
            return prompt, target
        encoding = encoded(self.subject, settings.prompt)
        self.tokens = tuple(encoding.ids)
        self.noised = tuple(phrase_tokens(encoding, settings.subject))
        return settings.prompt, settings.target

    # -- the claims

    @cached_property
    def grids(self) -> dict[str, xr.Dataset]:
        """Results of tracing the displayed prompt, [layer, position] by kind of activation, in memory."""
        return {kind: self.result(kind).load() for kind in self.kinds}

    @cached_property
    def candidates(self) -> dict[str, CandidateEffects]:
        """Rise of the answer's probability when a (layer, role) is restored in facts that the model knows,
        [fact, layer, role], by kind of activation.

        On held-out facts, further random positions follow the roles on the last axis, as controls. Residual
        states have no effect of the last role, as the state there determines the answer."""
        by_kind = {}
        for kind in self.kinds:
            choice, scored = self._rise(f"choice_{kind}", CHOSEN_ON), self._rise(f"scored_{kind}", SCORED)
            if is_state(kind):
                # The last role goes; the random positions after the roles stay as controls.
                scored = np.delete(scored, len(ROLES) - 1, axis=2)
            by_kind[kind] = CandidateEffects(choice[..., : len(ROLES) - is_state(kind)], scored)
        return by_kind

    def _rise(self, name: str, group: str) -> Floats:
        """Probability of the answer with one activation restored minus that of the noised run, [fact, layer,
        position].

        Arguments:
            name: name of the result.
            group: CHOSEN_ON or SCORED; only facts of it that the model knows are returned.
        """
        traced = self.result(name).load()
        noised = traced["unpatched"].sel(run="corrupted", metric="probability")
        rise = values_of(traced["probability"] - noised, "draw", "layer", "position")
        return rise[self.is_known(group)]

    @property
    def says_answer(self) -> bool:
        """Whether the model's most likely next token after the displayed prompt, without noise, is the
        answer."""
        # The run without noise is the same for every kind.
        grid = next(iter(self.grids.values()))
        return float(grid["unpatched"].sel(run="clean", metric="rank")) == 0

    def claims(self) -> Iterator[Claim]:
        """Claims, one per kind of activation, about the chosen (layer, role) on held-out facts; one for
        comparison about the (layer, role) with the mean rise nearest to 0; then about the chosen ones in the
        displayed prompt, if the model knows its answer."""
        best = {kind: candidates.best for kind, candidates in self.candidates.items()}
        for kind, place in best.items():
            yield self._on_others(kind, place)
        first_kind = self.kinds[0]
        yield self._on_others(first_kind, self.candidates[first_kind].quietest, "for comparison, ")
        for kind, place in best.items() if self.says_answer else ():
            if (claim := self._here(kind, place)) is not None:
                yield claim

    def claims_caption(self) -> str:
        """Caption of the claims: rule by which the (layer, role) of each kind was chosen, and numbers of
        known facts."""
        n_known, total = ([number[name] for name in (CHOSEN_ON, SCORED)] for number in self.known_counts)
        return (
            "Rise: probability of the answer with one clean activation restored, minus that of the noised "
            "run. For each kind of activation, the layer and position with the largest mean rise on other "
            "facts were chosen. A comparison claim is about the layer and position with the mean rise "
            f"nearest to 0. Claims are about the facts whose answer the model predicts: {n_known[0]} of "
            f"{total[0]} facts to choose on and {n_known[1]} of {total[1]} held-out facts. The model does "
            f"{'' if self.says_answer else 'not '}predict the answer of this prompt."
        )

    def _on_others(self, kind: str, place: tuple[int, ...], before: str = "") -> Claim:
        """Claim about a (layer, role) on held-out facts, compared with other layers and positions of each
        prompt."""
        return self.candidates[kind].claim(
            f"{before}{self._cause(kind, place)} raises the probability of the answer",
            place,
            "another layer and position of each prompt that the noise reaches",
            self.settings,
            noises=self.fact_samples,
        )

    def _here(self, kind: str, place: tuple[int, ...]) -> Claim | None:
        """Claim about a (layer, role) in the displayed prompt, compared with other layers and positions that
        the noise reaches; None if the noise does not reach this one, or reaches no other."""
        settings, grid, length = self.settings, self.grids[kind], len(self.tokens)
        noised = float(grid["unpatched"].sel(run="corrupted", metric="probability"))
        layer, position = place[0], roles_of(self.noised[-1], length)[place[1]]
        # Before the subject the noise changes nothing, so that nothing can be restored there.
        # A residual state at the last token would be a trivial control, as it determines the answer.
        last = length - is_state(kind)
        rise = grid["probability"].transpose("layer", "position").values - noised
        rows, columns = rise.shape
        cells = [row * columns + column for row in range(rows) for column in range(self.noised[0], last)]
        cell = layer * columns + position
        if cell not in cells or len(cells) < 2:
            return None
        spread = None
        if "probability_std" in grid:
            deviation = grid["probability_std"].transpose("layer", "position").values[layer, position]
            # The stored standard deviation is over samples of noise, not over prompts.
            spread = interval_of_mean(float(rise[layer, position]), float(deviation), self.samples)
        word = self.subject.token_labels(self.pieces[:1])[0]
        return Claim.among(
            f"in '{format_text(self.prompt)}', {self._cause(kind, place)} raises the probability of {word!r}",
            rise,
            cell,
            "other layers and positions that the noise reaches",
            settings,
            candidates=cells,
            levels=(noised, noised + float(rise[layer, position])),
            spread=spread,
            held_out=True,
            noises=self.samples,
        )

    def _cause(self, kind: str, place: tuple[int, ...]) -> str:
        """Intervention in words, as claims begin: "restoring the clean mlp_out of layer 3 at the last token".
        place: (layer, index into ROLES)."""
        layers = self.window_of(kind)
        around = f"{layers} layers around " if layers > 1 else ""
        return f"restoring the clean {kind} of {around}layer {place[0]} at {ROLES[place[1]]}"

    def views(self) -> Iterator[View]:
        """Views in reading order: heatmaps of the answer's probability by layer and position, one per kind of
        activation, and a table of the best (layer, position) of each."""
        texts = self.subject.token_labels(self.tokens)
        grids = self.grids
        runs = next(iter(grids.values()))["unpatched"].sel(metric="probability")
        clean, noised = (float(runs.sel(run=run)) for run in ("clean", "corrupted"))
        best = [_best(kind, grid) for kind, grid in grids.items()]
        word = self.subject.token_labels(self.pieces[:1])[0]
        runs_text = (
            f"Without noise the probability is {format_probability(clean)}, with noise alone "
            f"{format_probability(noised)}."
        )
        yield Data(
            json=self._about(clean, noised, next(iter(grids.values()))) | {"best": best} | self._choice()
        )
        start, end = self.noised[0], self.noised[-1]
        panels = [
            Heatmap.of(
                grid["probability"].transpose("layer", "position"),
                NAMES[kind],
                f"Each cell: probability of {word!r} when noise is added to the framed tokens and {kind} of "
                f"{_windowed(self.window_of(kind))} is restored from the clean run at one token (column). "
                f"{runs_text}",
                sources=(kind,),
                columns=tuple(f"{text} ({place})" for place, text in enumerate(texts)),
                column_name="token",
                value_name=f"probability of {word!r}",
                # Noise may also raise the probability of the answer.
                low=min(clean, noised),
                high=max(clean, noised),
                framed=((0, start, grid.sizes["layer"] - 1, end),),
                frame_name="noised",
                json={kind: {"probability": grid["probability"], "std": grid.get("probability_std")}},
            )
            for kind, grid in grids.items()
        ]
        title = f"Where {self.subject.name} recalls {word!r}: '{format_text(self.prompt)}'"
        yield from together("causal_tracing", title, *panels, beside=[self.findings])
        yield Table.of(
            best,
            ("restored", lambda row: NAMES[row["kind"]]),
            ("layer", "layer", "d"),
            ("at", lambda row: f"{texts[row['position']]} ({row['position']})"),
            ("probability", "probability", format_probability),
            ("share recovered", "restored", "{:.0%}".format),
            title=f"{self.subject.name}: '{format_text(self.prompt)}' with noise on {self._noised_text()!r}",
            caption="One row per kind of restored activation, at the layer and token where restoring it "
            f"gives the highest probability of {word!r}. {runs_text} Share recovered: part of the drop "
            "between these two that restoring brings back.",
        )

    def _noised_text(self) -> str:
        """The phrase of the prompt whose embeddings get noise."""
        texts = self.subject.token_texts(self.tokens)
        return format_text("".join(texts[place] for place in self.noised).strip())

    def _about(self, clean: float, noised: float, grid: xr.Dataset) -> dict[str, Any]:
        """JSON fields on prompt and noise, and on the answer's probability in the clean and in the noised
        run."""
        return {
            **self.subject.about,
            "prompt": self.prompt,
            "tokens": self.subject.token_texts(self.tokens),
            "subject_positions": self.noised,
            "window": self.window,
            "standard_deviation_of_noise": grid.attrs["standard_deviation_of_noise"],
            "clean_probability": clean,
            "noised_probability": noised,
            **target_json(self.subject, self.target, self.pieces),
        }

    def _choice(self) -> dict[str, Any]:
        """JSON field with the (layer, role) chosen on other facts, by kind of activation; empty without
        claims."""
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
    """Positions of ROLES in a prompt: end of the subject, the token after it, and the last token.

    Arguments:
        subject_end: position of the last token of the subject.
        length: number of tokens of the prompt.
    """
    return subject_end, min(subject_end + 1, length - 1), length - 1


def is_state(kind: str) -> bool:
    """Whether a kind of hook point is the residual stream, whose state at the last token determines the
    answer."""
    return kind.startswith("resid")


def _differing(ids: Sequence[int], other_ids: Sequence[int]) -> tuple[int, ...]:
    """Token positions of the span in which two prompts differ, without their common prefix and suffix."""
    start, end = common_ends(ids, other_ids)
    return tuple(range(start, len(ids) - end))


def _best(kind: str, grid: xr.Dataset) -> dict[str, Any]:
    """Record of the (layer, position) with the highest probability in a grid; of equal ones the first. Its
    field "restored" is 0 for the noised run, 1 for the clean run, and None if both have the same
    probability."""
    (best,) = largest(grid, grid["probability"].transpose("layer", "position"), 1, "probability")
    clean, noised = grid["unpatched"].sel(metric="probability", run=["clean", "corrupted"]).values.tolist()
    restored = (best["probability"] - noised) / (clean - noised) if clean != noised else None
    return {"kind": kind, **best, "restored": restored}


def _windowed(layers: int) -> str:
    """Number of layers in words, for captions: "one layer", "3 layers"."""
    return "one layer" if layers == 1 else f"{layers} layers"

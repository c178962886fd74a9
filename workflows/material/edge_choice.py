"""Which place to tell of when nobody named one: the kind that matters most on other facts.

A position of one prompt has no counterpart in another, its kind has: a layer, and the role of the position
that is read - the first one (BOS, where there is one), the last token of the fact's subject, the one before
the query. Of other facts, the shipped ones or those of `data`, the first half says which layer and role lose
most when they are not read (KL, mean); the second half, and the prompt that is shown, say what that is worth.
What is not read is an attention edge that is cut (`EdgeWorkflow`), or what a question says (`on_fact`). Of
facts count those that the model knows, whose answer is its likeliest next token; where it knows too few, none
of them is run, the place told of is the one that moves the prompt shown most, and nothing is claimed
(known.py).

Where a subject ends is said by the other prompt of a pair: it is the last token in which they differ. Of a
fact without one the relation says it: it is the token before the longest ending, in words, that several
shipped facts share ("is developed by").

Border: texts, positions and measurements; loads no model and never imports torch.

Axes: fact, layer, edge: those of ROLES first, then keys drawn at random.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from ...stages.causal.controls import chosen_at_random
from ...stages.causal.draws import AtOnce
from ...stages.causal.grids.patching import common_ends
from ...stages.causal.knockout import EdgeKnockout
from ...stages.corpus.positions import position_of
from ...stages.forward.hooks.edges import KnockoutSpec
from ...stages.logits.lens import format_probability, format_token
from ...store.arrays import Floats
from ...store.errors import ConfigError
from ..claim import CandidateEffects, Claim
from ..labelled import values_of
from ..settings import ChosenEdgeSettings, ChosenPlaceSettings
from ..views import Findings, Table, points
from ..workflow import Nodes
from .answers import answer_pieces, encoded, named, top_changed_json
from .facts.fact_data import enough, facts_of, shown_fact
from .facts.known import CHOSEN_ON, SCORED, KnownWorkflow
from .relations import relation_of

if TYPE_CHECKING:
    import xarray as xr

    from ...stages.forward.runs.experiment import Experiment
    from ...stages.forward.text.tokens import Encoding

__all__ = ["ROLES", "EdgeWorkflow", "PlaceChoice", "PlaceWorkflow", "roles_of"]

Indices = npt.NDArray[np.int64]
ROLES: Mapping[str, str] = {
    "first": "the first position",
    "subject": "the subject's last token",
    "previous": "the last position but one",
}
"""Kinds of position that may be read, and how they are told."""
OTHERS = 3
"""Keys of every other fact that are drawn beside the roles."""
TRIED = 400
"""Shipped facts among which others are looked for."""


@dataclass(frozen=True)
class PlaceChoice:
    """A layer and a role, and what was lost without it on the facts it was chosen on, mean KL in nats."""

    layer: int
    role: str
    lost: float


class OtherFact(NamedTuple):
    """The tokens of a fact other than the prompt shown, used to choose or to score a layer and position."""

    encoding: Encoding
    answer: int
    """First token of its answer."""
    roles: Mapping[str, int]
    """Position of each role."""


def roles_of(encoding: Encoding, query: int, other: Encoding | None = None) -> dict[str, int]:
    """Positions by role that this query may read; without the subject where nothing says what it is.

    other: the other prompt of a pair, which differs in the subject.
    """
    found = {"first": 0, "previous": query - 1}
    if other is not None:
        found["subject"] = len(encoding) - common_ends(encoding.ids, other.ids)[1] - 1
    elif end := _subject_end(encoding.text):
        found["subject"] = encoding.char_range_to_tokens(end - 1, end)[-1]
    return {role: found[role] for role in ROLES if 0 <= found.get(role, -1) <= query}


class PlaceWorkflow(KnownWorkflow):
    """A question about one position that another one reads in one layer, named or chosen."""

    settings: ChosenPlaceSettings
    num_drawn: ClassVar[int] = 0
    """Keys of other facts drawn beside the roles."""
    rule: ClassVar[str]
    """What loses most on other facts, in words: "kind of key whose edge, cut,"."""
    beside: ClassVar[str]
    """What a layer and role of other facts are compared with, in words."""

    def read_place(self, query: int | str, key: int | str | None, window: int = 1) -> dict[str, Any]:
        """Prompt and target as settings name them, query and keys; what experiments need of them.

        key: None where it is to be chosen. window: layers that must exist from the selected one on. Raises
        ConfigError, PromptError or InterventionError for what there is not.
        """
        given, config = self.settings, self.subject.config
        self.prompt, self.target = shown_fact(given.model, given.prompt, given.target, given.data)
        self.encoding = encoded(self.subject, self.prompt)
        self.pieces = answer_pieces(self.subject, self.prompt, self.target)
        self.query = position_of(self.encoding, query)
        self.roles = roles_of(self.encoding, self.query)
        self.named = named = None if key is None else position_of(self.encoding, key)
        self.open = {role: place for role, place in self.roles.items() if named in (None, place)}
        self.keys = tuple(dict.fromkeys(self.open.values())) if named is None else (named,)
        for each in self.keys:
            spec = KnockoutSpec().edge(self.query, each)
            spec.validate(
                config.num_layers, config.axis_sizes["head"], len(self.encoding), ahead=config.looks_ahead
            )
        last = config.num_layers - window
        if given.layer is not None and not 0 <= given.layer <= last:
            wide = f" (with a window of {window})" if window > 1 else ""
            raise ConfigError(f"expected a layer in 0..{last}{wide}, found {given.layer}")
        self.last_layer = last
        return {"tokens": tuple(self.encoding.ids), "target": self.pieces, "top_k": given.top_k}

    @property
    def is_chosen(self) -> bool:
        """Whether other facts say which place is told."""
        return bool(self.open) and (self.named is None or self.settings.layer is None)

    def facts_node(self) -> Nodes:
        """The node that intervenes in other facts, and the node that ranks their answers.

        Empty where layer and position are named, or with controls=0."""
        if not self.is_chosen or not self.settings.controls:
            return {}
        self.others = self._other_facts()
        # Every fact has as many edges, and short ones have few positions.
        count = min(self.num_drawn, *(len(each.encoding) - len(ROLES) for each in self.others))
        experiments: list[Experiment] = []
        for number, (encoding, _, places) in enumerate(self.others):
            query, roles = len(encoding) - 1, list(places.values())
            seed = self.settings.seed + number
            drawn = (
                chosen_at_random(range(query + 1), count, seed=seed, without=roles) if count else list[int]()
            )
            edges = tuple((query, key) for key in (*roles, *drawn))
            experiments += self.on_fact(tuple(encoding.ids), edges)
        self.only_claims = ("facts", *self.only_claims)
        asked = [(tuple(each.encoding.ids), each.answer, -1) for each in self.others]
        known = self.known_node({CHOSEN_ON: asked[: self.half], SCORED: asked[self.half :]})
        return known | {"facts": self.on_model(AtOnce(tuple(experiments)))}

    @property
    def half(self) -> int:
        """Number of other facts used to choose the layer and position; as many more score the choice."""
        return len(self.others) // 2

    def lost_here(self, key: int) -> Floats:
        """KL by layer in the prompt shown where one of its `keys` is not read, in nats: [layer]."""
        raise NotImplementedError

    def on_fact(self, tokens: tuple[int, ...], edges: Sequence[tuple[int, int]]) -> Sequence[Experiment]:
        """What is done to each (query, key) of another fact by itself, in every layer."""
        raise NotImplementedError

    def changed_table(
        self, told: xr.Dataset, title: str, *, beside: str = "", sources: tuple[str, ...] = ()
    ) -> Table:
        """The tokens that one place left out changes most. told: the run without it. beside: what else the
        caption says, behind the divergence."""
        changed = top_changed_json(self.subject, told, "ablated_prob")
        effect = f"KL {float(told['kl']):.5f} nats{beside}"
        if self.pieces:
            before, after = (np.exp(float(told[f"{run}target_logprob"])) for run in ("baseline_", ""))
            effect += (
                f"; logit of '{format_token(self.target)}' lowered by {float(told['logit_diff']):+.4f}, "
                f"probability {format_probability(before)} -> {format_probability(after)}"
            )
        return Table.of(
            changed,
            ("token", lambda one: format_token(one["token"])),
            ("before", "baseline_prob", format_probability),
            ("after", "ablated_prob", format_probability),
            ("change", lambda one: one["ablated_prob"] - one["baseline_prob"], points),
            title=title,
            caption=effect,
            sources=sources,
            json={"top_changed": changed},
        )

    def _other_facts(self) -> list[OtherFact]:
        """Facts in which every role is another position, no two of the same tokens: as many to choose on as
        to score on. Of one's own there may be fewer than were asked for.

        Raises ConfigError for too few.
        """
        given, limit = self.settings, self.subject.config.context_length
        # Of the many shipped facts those are taken that have positions to draw from beside the roles.
        wanted, room = 2 * given.facts, len(ROLES) + (0 if given.data else self.num_drawn)
        found: dict[tuple[int, ...], OtherFact] = {}
        for each in facts_of(given.data)[: None if given.data else TRIED]:
            encoding = self.subject.tokenizer.encode(each.prompt)
            other = self.subject.tokenizer.encode(each.other) if each.other else None
            roles = roles_of(encoding, len(encoding) - 1, other)
            fits = room <= len(encoding) and (limit is None or len(encoding) <= limit)
            if each.prompt != self.prompt and fits and len(set(roles.values())) == len(ROLES):
                answer = self.subject.answer_id(each.prompt, each.target)
                found.setdefault(tuple(encoding.ids), OtherFact(encoding, answer, roles))
            if len(found) == wanted:
                break
        return enough(list(found.values()), given.data, wanted, "position and layer")

    @cached_property
    def halves(self) -> tuple[Indices, Indices]:
        """Indices into `others` of the facts to choose on and to score on, those that the model knows."""
        chosen_on, scored = (np.flatnonzero(self.is_known(name)) for name in (CHOSEN_ON, SCORED))
        return chosen_on, scored + self.half

    @property
    def is_claimed(self) -> bool:
        """Whether controls are run, and the place was named, or enough facts are known to say something of
        one that was chosen."""
        return not self.not_claimed

    @cached_property
    def chosen(self) -> PlaceChoice | None:
        """The layer and role that lose most on other facts, of those that settings leave open; where nothing
        is claimed, in the prompt shown. None where the place is named."""
        if not self.is_chosen:
            return None
        among = self._among(self.open)
        if self.settings.layer is not None:
            among[np.arange(len(among)) != self.settings.layer] = False
        return self._place(replace(self.candidates, among=among).best)

    @cached_property
    def quiet(self) -> PlaceChoice | None:
        """The layer and role that lose least on other facts, for comparison.

        A role whose position in this prompt is the selected one is left out: the subject may end right
        before the query.
        """
        roles = [role for role, place in self.roles.items() if place != self.edge[1]]
        if not (self.is_chosen and self.is_claimed and roles):
            return None
        return self._place(replace(self.candidates, among=self._among(roles)).weakest)

    @cached_property
    def candidates(self) -> CandidateEffects:
        """KL by layer and role on facts that the model knows, [fact, layer, role], in nats; where nothing is
        claimed, in the prompt shown."""
        if self.is_claimed:
            return self.on_facts(*self.halves)
        lost: Floats = np.full((1, self.last_layer + 1, len(ROLES)), np.nan)
        for role, place in self.open.items():
            lost[0, :, list(ROLES).index(role)] = self.lost_here(place)
        return CandidateEffects(lost, lost)

    def on_facts(self, chosen_on: Indices, scored: Indices) -> CandidateEffects:
        """KL by layer and role on other facts, [fact, layer, role]. chosen_on, scored: indices into
        `others`."""
        raise NotImplementedError

    def _among(self, roles: Iterable[str]) -> npt.NDArray[np.bool_]:
        """Which candidates are of some roles, bool [layer, role]."""
        return np.tile(np.isin(list(ROLES), list(roles)), (self.last_layer + 1, 1))

    def _place(self, index: tuple[int, ...]) -> PlaceChoice:
        return PlaceChoice(index[0], list(ROLES)[index[1]], float(self.candidates.mean[index]))

    def measured_on_facts(self, name: str) -> Floats:
        """A variable of the result on other facts, [fact, layer, edge], edges of roles first: an experiment
        holds all edges of a fact, or one."""
        values = values_of(self.result("facts")[name], "draw", "layer", ...)
        by_edge = values.reshape(len(self.others), -1, values.shape[1], *values.shape[2:])
        found: Floats = np.moveaxis(by_edge, 1, 2).reshape(len(self.others), values.shape[1], -1)
        return found

    @cached_property
    def layer(self) -> int:
        """The layer told: named, chosen, or the middle one for a key of no role."""
        if self.settings.layer is not None:
            return self.settings.layer
        return self.chosen.layer if self.chosen else min(self.subject.config.num_layers // 2, self.last_layer)

    @cached_property
    def edge(self) -> tuple[int, int]:
        """(query, key) of the place told."""
        is_named = self.named is not None or self.chosen is None
        return self.query, self.keys[0] if is_named else self.roles[self.chosen.role]  # type: ignore[union-attr]

    def token_label(self, place: int) -> str:
        """A position of the prompt, as claims name it."""
        return f"'{format_token(named(self.subject, [self.encoding.ids[place]])[0])}' ({place})"

    def cause(self, layer: int, key: int) -> str:
        """What is done to one place of this prompt, as claims begin."""
        raise NotImplementedError

    def claim_here(self, layer: int, key: int, measure: str, text: str, **fields: Any) -> Claim:
        """What one place does in this prompt, beside others. measure: "kl" or "logit_diff"; fields: of the
        claim."""
        raise NotImplementedError

    def cause_elsewhere(self, layer: int, role: str) -> str:
        """What is done to a layer and role of other facts, as claims begin."""
        raise NotImplementedError

    def claims(self) -> Iterator[Claim]:
        """Three claims: the chosen place on held-out facts, in this prompt, and the least effective place."""
        place, is_held_out = (self.layer, self.edge[1]), self.chosen is not None
        if self.chosen is not None:
            index = self.chosen.layer, list(ROLES).index(self.chosen.role)
            text = f"{self.cause_elsewhere(self.chosen.layer, self.chosen.role)} changes the next token"
            yield self.candidates.claim(text, index, self.beside, self.settings, unit="nats")

        def here(place: tuple[int, int], measure: str, effect: str, before: str = "") -> Claim:
            unit, side = ("nats", "above") if measure == "kl" else ("logits", "either")
            text = f"{before}{self.cause(*place)} {effect}"
            return self.claim_here(*place, measure, text, side=side, unit=unit, held_out=is_held_out)

        yield here(place, "kl", "changes the next token")
        if self.pieces:
            yield here(place, "logit_diff", f"lowers the logit of {format_token(self.target)!r}")
        if self.quiet is not None:
            quiet = (self.quiet.layer, self.roles[self.quiet.role])
            yield here(quiet, "kl", "changes the next token", "for comparison, ")

    def claims_caption(self) -> str:
        """Caption of the claims: on which facts the layer and position were chosen."""
        return self.choice_caption

    @property
    def choice_caption(self) -> str:
        """How the place was chosen, for people."""
        if self.chosen is None:
            return self.not_claimed or "The place was named."
        lost = f"{self.chosen.lost:.3f} nats"
        if not self.is_claimed:
            return f"{self.not_claimed} Told of is the layer and {self._how} (KL {lost})."
        chosen_on, scored = map(len, self.halves)
        return (
            f"Layer and {self._how} (mean KL {lost}), of {self.half} the {chosen_on} whose answer the model "
            f"says; scored on {scored} more. For comparison that of the least."
        )

    @property
    def _how(self) -> str:
        return f"{self.rule} moves {'other facts' if self.is_claimed else 'this prompt'} most"

    def unclaimed(self) -> Findings:
        """The sentence of `KnownWorkflow`, with a caption on how layer and position were chosen."""
        return replace(super().unclaimed(), caption=self.choice_caption)

    def choice_json(self) -> dict[str, Any]:
        """How the place was chosen."""
        if self.chosen is None:
            return {}
        chosen_on, scored = (half.tolist() for half in self.halves) if self.is_claimed else ([], [])
        return {
            "choice": {
                "rule": f"layer and {self._how} ({'mean ' if self.is_claimed else ''}KL)",
                **vars(self.chosen),
                "candidates": (self.last_layer + 1 if self.settings.layer is None else 1) * len(self.open),
                "chosen_on": [self.others[row].encoding.text for row in chosen_on],
                "scored_on": [self.others[row].encoding.text for row in scored],
                "is_claimed": self.is_claimed,
            }
        }


class EdgeWorkflow(PlaceWorkflow):
    """A question about one attention edge of one prompt."""

    settings: ChosenEdgeSettings
    num_drawn = OTHERS
    rule = "kind of key whose edge, cut,"
    beside = "cuts of another (layer, key) in each prompt"

    def read_edge(self, window: int = 1) -> dict[str, Any]:
        """As `read_place`, of the edge that settings name."""
        return self.read_place(self.settings.query, self.settings.key, window)

    def on_fact(self, tokens: tuple[int, ...], edges: Sequence[tuple[int, int]]) -> Sequence[Experiment]:
        """Each edge cut by itself, in every layer, in all heads."""
        return [EdgeKnockout(tokens, tuple(edges), top_k=1)]

    def on_facts(self, chosen_on: Indices, scored: Indices) -> CandidateEffects:
        """See `PlaceWorkflow`; beside all other edges of each fact."""
        lost = self.measured_on_facts("kl")
        return CandidateEffects(lost[chosen_on][..., : len(ROLES)], lost[scored])

    def cause_elsewhere(self, layer: int, role: str) -> str:
        """See `PlaceWorkflow`."""
        return self.doing("the last token", ROLES[role], layer)

    def cause(self, layer: int, key: int) -> str:
        """See `PlaceWorkflow`."""
        return self.doing(self.token_label(self.query), self.token_label(key), layer)

    def doing(self, query: str, key: str, layer: int) -> str:
        """What is done to an edge, as claims begin."""
        return f"cutting {query}'s attention to {key} in layer {layer}"


def _subject_end(text: str) -> int:
    """Where a fact's subject ends, in characters: before the longest ending that is shared, commas and
    genitives left out; 0 for none."""
    shared = relation_of(text)
    return 0 if shared is None else len(text.removesuffix(shared).rstrip(" ,?").removesuffix("'s"))

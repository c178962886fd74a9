"""Selection of a layer and key position for one prompt, on other facts, unless the settings name them.

Positions of different prompts do not correspond, but their roles do: the first position (BOS, if there is
one), the last token of the fact's subject, the position before the query. On one half of the other facts
(shipped, or from `data`), the layer and role are selected whose removal changes the output most (mean KL).
The other half, and the prompt itself, score the selection. What is removed is an attention edge
(`EdgeWorkflow`), or what a subclass defines in `on_fact`. Only facts that the model knows count. If it knows
too few, none is run, the place that changes the prompt itself most is shown, and nothing is claimed
(facts/known.py).

The subject of a fact in a pair ends at the last token in which the two prompts differ. For a single fact it
ends before the longest ending, in words, that several shipped facts share ("is developed by").

Border: texts, positions and measurements; loads no model and never imports torch.

Axes: fact, layer, edge (keys of ROLES first, then keys drawn at random).
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
from ...stages.forward.runs.duration import PassWork
from ...stages.logits.lens import format_probability, format_token
from ...store.arrays import Floats
from ...store.errors import ConfigError
from ..claim import CandidateEffects, Claim
from ..labelled import values_of
from ..settings import ChosenEdgeSettings, ChosenPlaceSettings
from ..views import Findings, Table, points
from ..workflow import Nodes
from .answers import answer_pieces, encoded, top_changed_json
from .facts.fact_data import default_data, enough, facts_of, shown_fact
from .facts.known import CHOSEN_ON, SCORED, KnownWorkflow
from .relations import relation_of
from .sizes import FEWEST_FACTS, affordable

if TYPE_CHECKING:
    import xarray as xr

    from ...pipeline.nodes import ResultNode
    from ...stages.forward.runs.experiment import Experiment
    from ...stages.forward.text.tokens import Encoding

__all__ = ["ROLES", "EdgeWorkflow", "PlaceChoice", "PlaceWorkflow", "roles_of"]

Indices = npt.NDArray[np.int64]
ROLES: Mapping[str, str] = {
    "first": "the first position",
    "subject": "the subject's last token",
    "previous": "the last position but one",
}
"""Role of a key position -> its description."""
OTHERS = 3
"""Number of random keys per other fact, in addition to the roles."""
FACTS = 8
"""Largest number of other facts to choose on by default."""
TRIED = 400
"""Number of shipped facts that are searched for other facts."""


@dataclass(frozen=True)
class PlaceChoice:
    """A selected layer and role."""

    layer: int
    """The layer."""
    role: str
    """Role of the key position, in ROLES."""
    lost: float
    """Mean KL in nats after removal of the place, over the facts used for selection."""


class OtherFact(NamedTuple):
    """The tokens of a fact other than the prompt shown, used to choose or to score a layer and position."""

    encoding: Encoding
    """Its tokens."""
    answer: int
    """First token of its answer."""
    roles: Mapping[str, int]
    """Position of each role."""


def roles_of(encoding: Encoding, query: int, other: Encoding | None = None) -> dict[str, int]:
    """Positions by role that a query can attend to, without the subject if its end is unknown.

    Arguments:
        encoding: the tokenised prompt.
        query: position of the query.
        other: the other prompt of a pair, which differs in the subject; None for a single fact.
    """
    positions = {"first": 0, "previous": query - 1}
    if other is not None:
        # The two prompts of a pair end alike after the subject.
        positions["subject"] = len(encoding) - common_ends(encoding.ids, other.ids)[1] - 1
    elif end := _subject_end(encoding.text):
        positions["subject"] = encoding.char_range_to_tokens(end - 1, end)[-1]
    return {role: positions[role] for role in ROLES if 0 <= positions.get(role, -1) <= query}


class PlaceWorkflow(KnownWorkflow):
    """A workflow on one key position in one layer, named by the settings or selected on other facts."""

    settings: ChosenPlaceSettings
    num_drawn: ClassVar[int] = 0
    """Number of random keys per other fact, in addition to the roles."""
    rule: ClassVar[str]
    """What is selected, in words before "the prediction on other facts most": "kind of key whose knocked-out
    edge changes"."""
    beside: ClassVar[str]
    """Controls of a layer and role on other facts, in words."""

    def read_place(self, query: int | str, key: int | str | None, window: int = 1) -> dict[str, Any]:
        """Read prompt, target, query and key from the settings; returns arguments for experiments.

        Arguments:
            query: position of the query: index, name or phrase.
            key: position of the key; None to select it.
            window: number of layers that must exist from the selected one on.

        Raises:
            ConfigError, PromptError, InterventionError: a layer, position or prompt is invalid.
        """
        settings, config = self.settings, self.subject.config
        self.prompt, self.target = shown_fact(self.subject, settings)
        self.encoding = encoded(self.subject, self.prompt)
        self.pieces = answer_pieces(self.subject, self.prompt, self.target)
        self.query = position_of(self.encoding, query)
        self.roles = roles_of(self.encoding, self.query)
        self.named = named = None if key is None else position_of(self.encoding, key)
        self.open = {role: place for role, place in self.roles.items() if named in (None, place)}
        self.keys = tuple(dict.fromkeys(self.open.values())) if named is None else (named,)
        for key_position in self.keys:
            spec = KnockoutSpec().edge(self.query, key_position)
            spec.validate(
                config.num_layers, config.axis_sizes["head"], len(self.encoding), ahead=config.looks_ahead
            )
        last = config.num_layers - window
        if settings.layer is not None and not 0 <= settings.layer <= last:
            wide = f" (with a window of {window})" if window > 1 else ""
            raise ConfigError(f"expected a layer in 0..{last}{wide}, found {settings.layer}")
        self.last_layer = last
        return {"tokens": tuple(self.encoding.ids), "target": self.pieces, "top_k": settings.top_k}

    @property
    def is_chosen(self) -> bool:
        """Whether layer or key is selected on other facts."""
        return bool(self.open) and (self.named is None or self.settings.layer is None)

    def facts_node(self) -> Nodes:
        """The node that intervenes in other facts, and the node that ranks their answers.

        Empty if layer and position are named, or with controls=0.
        """
        if not self.is_chosen or not self.settings.controls:
            return {}
        self.others = self._other_facts()
        # All facts need equally many edges, and short ones have few positions.
        count = min(self.num_drawn, *(len(fact.encoding) - len(ROLES) for fact in self.others))
        experiments: list[Experiment] = []
        for number, (encoding, _, role_positions) in enumerate(self.others):
            query, roles = len(encoding) - 1, list(role_positions.values())
            # With a common seed, facts of equal length would draw the same keys.
            seed = self.settings.seed + number
            drawn = (
                chosen_at_random(range(query + 1), count, seed=seed, without=roles) if count else list[int]()
            )
            edges = tuple((query, key) for key in (*roles, *drawn))
            experiments += self.on_fact(tuple(encoding.ids), edges)
        self.only_claims = ("facts", *self.only_claims)
        prompts = [(tuple(fact.encoding.ids), fact.answer, -1) for fact in self.others]
        ranks_node = self.known_node({CHOSEN_ON: prompts[: self.half], SCORED: prompts[self.half :]})
        # `AtOnce`: a small experiment costs more to store by itself than to compute again.
        return ranks_node | {"facts": self.on_model(AtOnce(tuple(experiments)))}

    def _affordable_facts(self) -> int:
        """Number of facts to choose on by default (material/sizes.py)."""
        config = self.subject.config
        # A run computes on average the half of the layers that is above the edge.
        one_run = PassWork(len(self.encoding) * config.num_layers / 2, logit_rows=1).operations(config)
        runs_per_fact = config.num_layers * (len(ROLES) + self.num_drawn)
        # As many facts are scored as are chosen on.
        return affordable(2 * one_run * runs_per_fact, FACTS, least=FEWEST_FACTS)

    @property
    def half(self) -> int:
        """Number of other facts used to choose the layer and position; as many more score the choice."""
        return len(self.others) // 2

    def lost_here(self, key: int) -> Floats:
        """KL in nats by layer in the prompt shown, without one of its `keys`, [layer]."""
        raise NotImplementedError

    def on_fact(self, tokens: tuple[int, ...], edges: Sequence[tuple[int, int]]) -> Sequence[Experiment]:
        """Experiments on another fact: remove each (query, key) separately, in every layer.

        Arguments:
            tokens: token ids of the fact.
            edges: the (query, key) positions.
        """
        raise NotImplementedError

    def changed_table(
        self, ablated: xr.Dataset, title: str, *, beside: str = "", sources: tuple[str, ...] = ()
    ) -> Table:
        """Table of tokens by change of probability in the run without the place, largest change first.

        Arguments:
            ablated: result of the run without it.
            title: title of the table.
            beside: text that follows the KL in the caption.
            sources: results that the table is read from.
        """
        changed = top_changed_json(self.subject, ablated, "ablated_prob")
        effect = f"KL {float(ablated['kl']):.5f} nats{beside}"
        if self.pieces:
            before, after = (np.exp(float(ablated[f"{run}target_logprob"])) for run in ("baseline_", ""))
            effect += (
                f"; logit of '{format_token(self.target)}' lowered by {float(ablated['logit_diff']):+.4f}, "
                f"probability {format_probability(before)} -> {format_probability(after)}"
            )
        return Table.of(
            changed,
            ("token", lambda record: format_token(record["token"])),
            ("before", "baseline_prob", format_probability),
            ("after", "ablated_prob", format_probability),
            ("change", lambda record: record["ablated_prob"] - record["baseline_prob"], points),
            title=title,
            caption=effect,
            sources=sources,
            json={"top_changed": changed},
        )

    def _other_facts(self) -> list[OtherFact]:
        """Facts with distinct tokens whose roles are different positions, half for selection and half for
        scoring; possibly fewer than requested from a user's files. Raises ConfigError for too few."""
        settings = self.settings
        count = 2 * (settings.facts or self._affordable_facts())
        # Shipped facts are many, so only those with enough positions for random keys are used.
        data = default_data(self.subject, settings.data)
        shortest = len(ROLES) + (0 if data else self.num_drawn)
        facts: dict[tuple[int, ...], OtherFact] = {}
        for fact in facts_of(self.subject, data)[: None if data else TRIED]:
            encoding = self.subject.tokenizer.encode(fact.prompt)
            other_encoding = self.subject.tokenizer.encode(fact.other) if fact.other else None
            roles = roles_of(encoding, len(encoding) - 1, other_encoding)
            fits = shortest <= len(encoding) and self.subject.fits(encoding.ids)
            # Two roles at one position would be one candidate that is counted twice.
            if fact.prompt != self.prompt and fits and len(set(roles.values())) == len(ROLES):
                answer = self.subject.answer_id(fact.prompt, fact.target)
                facts.setdefault(tuple(encoding.ids), OtherFact(encoding, answer, roles))
            if len(facts) == count:
                break
        return enough(list(facts.values()), data, count, "position and layer")

    @cached_property
    def halves(self) -> tuple[Indices, Indices]:
        """Indices into `others` of the known facts for selection and for scoring."""
        chosen_on, scored = (np.flatnonzero(self.is_known(name)) for name in (CHOSEN_ON, SCORED))
        return chosen_on, scored + self.half

    @property
    def is_claimed(self) -> bool:
        """Whether claims are made: controls are run, and the place is named or enough facts are known."""
        return not self.not_claimed

    @cached_property
    def chosen(self) -> PlaceChoice | None:
        """The layer and role with the largest mean KL on other facts (without claims: in the prompt shown),
        among those that the settings allow. None if the place is named."""
        if not self.is_chosen:
            return None
        among = self._among(self.open)
        if self.settings.layer is not None:
            among[np.arange(len(among)) != self.settings.layer] = False
        return self._place(replace(self.candidates, among=among).best)

    @cached_property
    def quiet(self) -> PlaceChoice | None:
        """The layer and role with the smallest mean KL on other facts, for comparison.

        A role at the selected position of this prompt is left out; for example, the subject may end right
        before the query.
        """
        roles = [role for role, place in self.roles.items() if place != self.edge[1]]
        if not (self.is_chosen and self.is_claimed and roles):
            return None
        return self._place(replace(self.candidates, among=self._among(roles)).weakest)

    @cached_property
    def candidates(self) -> CandidateEffects:
        """KL in nats by layer and role on known facts (without claims: in the prompt shown), [fact, layer,
        role]."""
        if self.is_claimed:
            return self.on_facts(*self.halves)
        # Roles that are not open stay NaN; `among` leaves them out of the choice.
        lost: Floats = np.full((1, self.last_layer + 1, len(ROLES)), np.nan)
        for role, place in self.open.items():
            lost[0, :, list(ROLES).index(role)] = self.lost_here(place)
        return CandidateEffects(lost, lost)

    def on_facts(self, chosen_on: Indices, scored: Indices) -> CandidateEffects:
        """KL in nats by layer and role on other facts, [fact, layer, role].

        Arguments:
            chosen_on: indices into `others` of the facts for selection.
            scored: indices of the facts for scoring.
        """
        raise NotImplementedError

    def _among(self, roles: Iterable[str]) -> npt.NDArray[np.bool_]:
        """Mask of candidates with some roles, bool [layer, role]."""
        return np.tile(np.isin(list(ROLES), list(roles)), (self.last_layer + 1, 1))

    def _place(self, index: tuple[int, ...]) -> PlaceChoice:
        return PlaceChoice(index[0], list(ROLES)[index[1]], float(self.candidates.mean[index]))

    def measured_on_facts(self, name: str) -> Floats:
        """A variable of the result on other facts, [fact, layer, edge], edges of roles first."""
        values = values_of(self.result("facts")[name], "draw", "layer", ...)
        # An experiment contains all edges of a fact, or a single one.
        by_experiment = values.reshape(len(self.others), -1, values.shape[1], *values.shape[2:])
        by_edge: Floats = np.moveaxis(by_experiment, 1, 2).reshape(len(self.others), values.shape[1], -1)
        return by_edge

    @cached_property
    def layer(self) -> int:
        """The layer shown: named, selected, or the middle one for a named key without a role."""
        if self.settings.layer is not None:
            return self.settings.layer
        return self.chosen.layer if self.chosen else min(self.subject.config.num_layers // 2, self.last_layer)

    @cached_property
    def edge(self) -> tuple[int, int]:
        """(query, key) of the place shown."""
        is_named = self.named is not None or self.chosen is None
        return self.query, self.keys[0] if is_named else self.roles[self.chosen.role]  # type: ignore[union-attr]

    def token_label(self, place: int) -> str:
        """Token and position of the prompt, as in claims: "' in' (3)"."""
        return f"'{self.subject.token_labels([self.encoding.ids[place]])[0]}' ({place})"

    def cause(self, layer: int, key: int) -> str:
        """Beginning of a claim: the intervention and its layer and position.

        Arguments:
            layer: the layer.
            key: position of the key.
        """
        raise NotImplementedError

    def claim_here(self, layer: int, key: int, measure: str, text: str, **fields: Any) -> Claim:
        """Claim about a layer and position of this prompt, compared with other positions and layers.

        Arguments:
            layer: layer of the place.
            key: position of the place.
            measure: "kl" or "logit_diff".
            text: text of the claim.
            fields: further fields of the claim.
        """
        raise NotImplementedError

    def cause_elsewhere(self, layer: int, role: str) -> str:
        """Intervention on a layer and role of other facts, as the beginning of a claim.

        Arguments:
            layer: the layer.
            role: role of the key, in ROLES.
        """
        raise NotImplementedError

    def claims(self) -> Iterator[Claim]:
        """Claims about the selected layer and position, on held-out facts and in this prompt, and about the
        least effective ones."""
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
        """Caption of the claims: selection of layer and position, or the reason why nothing is claimed."""
        if self.chosen is None:
            return self.not_claimed or "Layer and position are those of the settings."
        lost = f"{self.chosen.lost:.3f} nats"
        if not self.is_claimed:
            return f"{self.not_claimed} Shown: the layer and the {self._rule} (KL {lost})."
        chosen_on, scored = map(len, self.halves)
        return (
            f"Layer and {self._rule} (mean KL {lost}), chosen on {chosen_on} of {self.half} facts, those "
            f"whose answer the model predicts, and scored on {scored} held-out facts. For comparison, the "
            "layer and position with the smallest mean KL."
        )

    @property
    def _rule(self) -> str:
        """How layer and key are selected, in words that follow "layer and"."""
        return f"{self.rule} the prediction {'on other facts' if self.is_claimed else 'of this prompt'} most"

    def unclaimed(self) -> Findings:
        """The sentence of `KnownWorkflow`, with a caption on how layer and position were chosen."""
        return replace(super().unclaimed(), caption=self.claims_caption())

    def choice_json(self) -> dict[str, Any]:
        """JSON fields that record how the place was selected."""
        if self.chosen is None:
            return {}
        chosen_on, scored = (half.tolist() for half in self.halves) if self.is_claimed else ([], [])
        return {
            "choice": {
                "rule": f"layer and {self._rule} ({'mean ' if self.is_claimed else ''}KL)",
                **vars(self.chosen),
                "candidates": (self.last_layer + 1 if self.settings.layer is None else 1) * len(self.open),
                "chosen_on": [self.others[row].encoding.text for row in chosen_on],
                "scored_on": [self.others[row].encoding.text for row in scored],
                "is_claimed": self.is_claimed,
            }
        }


class EdgeWorkflow(PlaceWorkflow):
    """A workflow on one attention edge of one prompt."""

    settings: ChosenEdgeSettings
    num_drawn = OTHERS
    rule = "kind of key whose knocked-out edge changes"
    beside = "knockouts of another (layer, key) edge in each prompt"

    def read_edge(self, window: int = 1) -> dict[str, Any]:
        """`read_place` for the query and key of the settings."""
        return self.read_place(self.settings.query, self.settings.key, window)

    def on_fact(self, tokens: tuple[int, ...], edges: Sequence[tuple[int, int]]) -> Sequence[Experiment]:
        """See `PlaceWorkflow`: each edge is knocked out separately, in every layer, in all heads."""
        return [EdgeKnockout(tokens, tuple(edges), top_k=1)]

    def on_facts(self, chosen_on: Indices, scored: Indices) -> CandidateEffects:
        """See `PlaceWorkflow`; all edges of each fact serve as controls."""
        lost = self.measured_on_facts("kl")
        return CandidateEffects(lost[chosen_on][..., : len(ROLES)], lost[scored])

    def by_key(self, experiments: Sequence[Experiment]) -> ResultNode:
        """Node of experiments that differ in key position, one experiment per entry of `keys`."""
        return self.on_model(experiments[0] if len(experiments) == 1 else AtOnce(tuple(experiments)))

    def at_key(self, name: str, key: int) -> xr.Dataset:
        """Result for one key of a node made by `by_key`, in memory.

        Arguments:
            name: name of the node.
            key: position of the key.
        """
        result = self.result(name).load()
        return result.isel(draw=self.keys.index(key)) if "draw" in result.dims else result

    def cause_elsewhere(self, layer: int, role: str) -> str:
        """See `PlaceWorkflow`."""
        return self.doing("the last token", ROLES[role], layer)

    def cause(self, layer: int, key: int) -> str:
        """See `PlaceWorkflow`."""
        return self.doing(self.token_label(self.query), self.token_label(key), layer)

    def doing(self, query: str, key: str, layer: int) -> str:
        """Intervention on an edge, as the beginning of a claim.

        Arguments:
            query: description of the position that reads.
            key: description of the position that is read.
            layer: the layer.
        """
        return f"knocking out {query}'s attention to {key} in layer {layer}"


def _subject_end(text: str) -> int:
    """Character offset at which a fact's subject ends, before the longest shared ending without commas and
    "'s"; 0 if there is no shared ending."""
    shared = relation_of(text)
    return 0 if shared is None else len(text.removesuffix(shared).rstrip(" ,?").removesuffix("'s"))

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
from .sizes import FEWEST_FACTS, affordable, intervention_operations

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
"""Positions that exist in every fact -> their description. A layer and role selected on one set of facts are
scored at the same role of other facts."""
OTHERS = 3
"""Number of key positions per other fact that are drawn at random as controls, in addition to the roles."""
FACTS = 8
"""Largest number of other facts to choose on by default."""
CHANGES = "changes the next-token distribution (KL)"
"""Effect on the prediction, as claims name it."""
TRIED = 400
"""Number of shipped facts that are searched for facts other than the displayed prompt."""


@dataclass(frozen=True)
class PlaceChoice:
    """A layer and role of a key position, selected on other facts."""

    layer: int
    """The layer."""
    role: str
    """Role of the key position, in ROLES."""
    lost: float
    """Mean KL in nats when what is at this layer and role is removed, over the facts used for selection."""


class OtherFact(NamedTuple):
    """Tokens of a fact other than the displayed prompt, on which a layer and position are chosen or
    scored."""

    encoding: Encoding
    """Tokens of the fact's prompt."""
    answer: int
    """First token of its answer."""
    roles: Mapping[str, int]
    """Key position of each role in ROLES."""


def roles_of(encoding: Encoding, query: int, other: Encoding | None = None) -> dict[str, int]:
    """Key positions of ROLES in a prompt, by role; roles after the query are left out, and the subject if its
    end is unknown.

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
    """Base class of workflows about one place: a key position in one layer, named by the settings or selected
    on other facts."""

    settings: ChosenPlaceSettings
    num_drawn: ClassVar[int] = 0
    """Number of key positions per other fact that are drawn at random as controls, in addition to the
    roles."""
    rule: ClassVar[str]
    """What is selected, in words before "the prediction on other facts most": "kind of key whose knocked-out
    edge changes"."""
    beside: ClassVar[str]
    """Controls of a claim about other facts, in words: "knockouts of another (layer, key) edge in each
    prompt"."""

    def read_place(self, query: int | str, key: int | str | None, window: int = 1) -> dict[str, Any]:
        """Reads prompt, target, query and key from the settings, and returns the arguments of experiments on
        the prompt.

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
        named_key = None if key is None else position_of(self.encoding, key)
        self.named_key = named_key
        # Roles that may be selected: all, or those at the key that the settings name.
        self.open_roles = {
            role: position for role, position in self.roles.items() if named_key in (None, position)
        }
        # Several roles may be at one position.
        self.keys = tuple(dict.fromkeys(self.open_roles.values())) if named_key is None else (named_key,)
        for key_position in self.keys:
            spec = KnockoutSpec().edge(self.query, key_position)
            spec.validate(
                config.num_layers, config.axis_sizes["head"], len(self.encoding), ahead=config.looks_ahead
            )
        self.last_layer = config.num_layers - window
        if settings.layer is not None and not 0 <= settings.layer <= self.last_layer:
            of_window = f", the first of a window of {window}," if window > 1 else ""
            raise ConfigError(
                f"expected a layer{of_window} in 0..{self.last_layer}, found {settings.layer}; set layer to "
                "one of these"
            )
        return {"tokens": tuple(self.encoding.ids), "target": self.pieces, "top_k": settings.top_k}

    @property
    def is_chosen(self) -> bool:
        """Whether the layer or the key is selected on other facts, instead of both being named by the
        settings."""
        return bool(self.open_roles) and (self.named_key is None or self.settings.layer is None)

    def facts_node(self) -> Nodes:
        """Nodes on other facts: interventions, and ranks of the answers.

        Empty if layer and position are named, or with controls=0.
        """
        if not self.is_chosen or not self.settings.controls:
            return {}
        self.others = self._other_facts()
        # All facts need equally many edges, and short ones have few positions.
        n_drawn = min(self.num_drawn, *(len(fact.encoding) - len(ROLES) for fact in self.others))
        experiments: list[Experiment] = []
        for number, fact in enumerate(self.others):
            query, role_keys = len(fact.encoding) - 1, list(fact.roles.values())
            # With a common seed, facts of equal length would draw the same keys.
            seed = self.settings.seed + number
            drawn_keys: Sequence[int] = []
            if n_drawn:
                drawn_keys = chosen_at_random(range(query + 1), n_drawn, seed=seed, without=role_keys)
            edges = tuple((query, key) for key in (*role_keys, *drawn_keys))
            experiments += self.on_fact(tuple(fact.encoding.ids), edges)
        self.only_claims = ("facts", *self.only_claims)
        # -1: the answer is predicted at the last position.
        questions = [(tuple(fact.encoding.ids), fact.answer, -1) for fact in self.others]
        ranks_node = self.known_node({CHOSEN_ON: questions[: self.half], SCORED: questions[self.half :]})
        # `AtOnce`: a small experiment costs more to store by itself than to compute again.
        return ranks_node | {"facts": self.on_model(AtOnce(tuple(experiments)))}

    def _affordable_facts(self) -> int:
        """Number of facts to choose on by default (material/sizes.py)."""
        config = self.subject.config
        one_run = intervention_operations(config, len(self.encoding))
        runs_per_fact = config.num_layers * (len(ROLES) + self.num_drawn)
        # As many facts are scored as are chosen on.
        return affordable(2 * one_run * runs_per_fact, FACTS, least=FEWEST_FACTS)

    @property
    def half(self) -> int:
        """Number of other facts used to choose layer and position; an equal number of facts scores the
        choice."""
        return len(self.others) // 2

    def lost_here(self, key: int) -> Floats:
        """KL by layer in the displayed prompt when what is at the key position `key` is removed, in nats,
        [layer]."""
        raise NotImplementedError

    def on_fact(self, tokens: tuple[int, ...], edges: Sequence[tuple[int, int]]) -> Sequence[Experiment]:
        """Experiments on another fact that remove each (query, key) separately, in every layer; a subclass
        defines what is removed.

        Arguments:
            tokens: token ids of the fact.
            edges: the (query, key) positions.
        """
        raise NotImplementedError

    def changed_table(
        self, ablated: xr.Dataset, title: str, *, beside: str = "", sources: tuple[str, ...] = ()
    ) -> Table:
        """Table of the tokens whose next-token probability an intervention changes most, largest change
        first.

        Arguments:
            ablated: result of the run with the intervention, such as an edge knocked out.
            title: title of the table.
            beside: further sentence of the caption; empty for none.
            sources: names of the results that the table is read from.
        """
        changed = top_changed_json(self.subject, ablated, "ablated_prob")
        caption = (
            "One row per next token. Before: its probability in the unchanged run. After: with the "
            f"intervention. Change: after minus before. KL(before || after) is {float(ablated['kl']):.5f} "
            "nats."
        )
        if self.pieces:
            before, after = (np.exp(float(ablated[f"{run}target_logprob"])) for run in ("baseline_", ""))
            caption += (
                f" The intervention changes the logit of '{format_token(self.target)}' by "
                f"{-float(ablated['logit_diff']):+.4f}, and its probability from "
                f"{format_probability(before)} to {format_probability(after)}."
            )
        caption = f"{caption} {beside}".rstrip()
        return Table.of(
            changed,
            ("token", lambda record: format_token(record["token"])),
            ("before", "baseline_prob", format_probability),
            ("after", "ablated_prob", format_probability),
            ("change", lambda record: record["ablated_prob"] - record["baseline_prob"], points),
            title=title,
            caption=caption,
            sources=sources,
            json={"top_changed": changed},
        )

    def _other_facts(self) -> list[OtherFact]:
        """Facts with distinct tokens in which all roles are different positions: the first half for
        selection, the second for scoring; possibly fewer than requested from a user's files. Raises
        ConfigError for too few."""
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
        """Indices into `others` of the facts that the model knows: (for selection, for scoring)."""
        chosen_on, scored = (np.flatnonzero(self.is_known(name)) for name in (CHOSEN_ON, SCORED))
        return chosen_on, scored + self.half

    @property
    def is_claimed(self) -> bool:
        """Whether claims are made: controls are run, and the settings name the place or the model knows
        enough facts."""
        return not self.not_claimed

    @cached_property
    def chosen(self) -> PlaceChoice | None:
        """Layer and role with the largest mean KL on other facts (without claims: in the displayed prompt),
        among those that the settings allow; None if the settings name both."""
        if not self.is_chosen:
            return None
        among = self._among(self.open_roles)
        if self.settings.layer is not None:
            among[np.arange(len(among)) != self.settings.layer] = False
        return self._place(replace(self.candidates, among=among).best)

    @cached_property
    def quiet(self) -> PlaceChoice | None:
        """Layer and role with the smallest mean KL on other facts, for the comparison claim; None without
        claims, or if no other role exists.

        A role at the selected position of this prompt is left out; for example, the subject may end right
        before the query.
        """
        roles = [role for role, place in self.roles.items() if place != self.edge[1]]
        if not (self.is_chosen and self.is_claimed and roles):
            return None
        return self._place(replace(self.candidates, among=self._among(roles)).weakest)

    @cached_property
    def candidates(self) -> CandidateEffects:
        """KL in nats of every layer and role in the facts that the model knows (without claims: in the
        displayed prompt), [fact, layer, role]."""
        if self.is_claimed:
            return self.on_facts(*self.halves)
        # Roles that are not open stay NaN; `among` leaves them out of the choice.
        lost: Floats = np.full((1, self.last_layer + 1, len(ROLES)), np.nan)
        for role, place in self.open_roles.items():
            lost[0, :, list(ROLES).index(role)] = self.lost_here(place)
        return CandidateEffects(lost, lost)

    def on_facts(self, chosen_on: Indices, scored: Indices) -> CandidateEffects:
        """KL in nats of every layer and role in other facts, [fact, layer, role], with its controls.

        Arguments:
            chosen_on: indices into `others` of the facts for selection.
            scored: indices of the facts for scoring.
        """
        raise NotImplementedError

    def _among(self, roles: Iterable[str]) -> npt.NDArray[np.bool_]:
        """Mask of the candidates that have one of some roles, bool [layer, role]."""
        return np.tile(np.isin(list(ROLES), list(roles)), (self.last_layer + 1, 1))

    def _place(self, index: tuple[int, ...]) -> PlaceChoice:
        return PlaceChoice(index[0], list(ROLES)[index[1]], float(self.candidates.mean[index]))

    def measured_on_facts(self, name: str) -> Floats:
        """A variable of the result on other facts, [fact, layer, edge]; the edges of ROLES come first, then
        those drawn at random."""
        values = values_of(self.result("facts")[name], "draw", "layer", ...)
        # An experiment contains all edges of a fact, or a single one.
        by_experiment = values.reshape(len(self.others), -1, values.shape[1], *values.shape[2:])
        by_edge: Floats = np.moveaxis(by_experiment, 1, 2).reshape(len(self.others), values.shape[1], -1)
        return by_edge

    @cached_property
    def layer(self) -> int:
        """Layer that is displayed: named by the settings or selected; the middle one for a named key that has
        no role."""
        if self.settings.layer is not None:
            return self.settings.layer
        return self.chosen.layer if self.chosen else min(self.subject.config.num_layers // 2, self.last_layer)

    @cached_property
    def edge(self) -> tuple[int, int]:
        """(query, key) positions of the place that is displayed."""
        is_named = self.named_key is not None or self.chosen is None
        return self.query, self.keys[0] if is_named else self.roles[self.chosen.role]  # type: ignore[union-attr]

    def token_label(self, place: int) -> str:
        """Token and position in the prompt, in the notation of claims: "' in' (3)"."""
        return f"'{self.subject.token_labels([self.encoding.ids[place]])[0]}' ({place})"

    def cause(self, layer: int, key: int) -> str:
        """Intervention in the displayed prompt, as claims begin: "knocking out '␣is' (4)'s attention to '␣in'
        (2) in layer 3".

        Arguments:
            layer: the layer.
            key: position of the key.
        """
        raise NotImplementedError

    def claim_here(self, layer: int, key: int, measure: str, text: str, **fields: Any) -> Claim:
        """Claim about one layer and position of the displayed prompt, compared with control positions or
        layers.

        Arguments:
            layer: layer of the place.
            key: position of the place.
            measure: "kl" or "logit_diff".
            text: text of the claim.
            fields: further fields of the claim.
        """
        raise NotImplementedError

    def cause_elsewhere(self, layer: int, role: str) -> str:
        """Intervention at a layer and role of other facts, as claims begin: "knocking out the last token's
        attention to the first position in layer 3".

        Arguments:
            layer: the layer.
            role: role of the key, in ROLES.
        """
        raise NotImplementedError

    def claims(self) -> Iterator[Claim]:
        """Claims about the selected layer and position, on held-out facts and in the displayed prompt, and
        for comparison about the least effective ones."""
        place, is_held_out = (self.layer, self.edge[1]), self.chosen is not None
        if self.chosen is not None:
            index = self.chosen.layer, list(ROLES).index(self.chosen.role)
            text = f"{self.cause_elsewhere(self.chosen.layer, self.chosen.role)} {CHANGES}"
            yield self.candidates.claim(text, index, self.beside, self.settings, unit="nats")

        def here(place: tuple[int, int], measure: str, effect: str, before: str = "") -> Claim:
            unit, side = ("nats", "above") if measure == "kl" else ("logits", "either")
            text = f"{before}{self.cause(*place)} {effect}"
            return self.claim_here(*place, measure, text, side=side, unit=unit, held_out=is_held_out)

        yield here(place, "kl", CHANGES)
        if self.pieces:
            yield here(place, "logit_diff", f"lowers the logit of {format_token(self.target)!r}")
        if self.quiet is not None:
            quiet = (self.quiet.layer, self.roles[self.quiet.role])
            yield here(quiet, "kl", CHANGES, "for comparison, ")

    def claims_caption(self) -> str:
        """Caption of the claims: selection of layer and position, or the reason why nothing is claimed."""
        if self.chosen is None:
            return self.not_claimed or "Layer and position were set by the user, not chosen on other facts."
        lost = f"{self.chosen.lost:.3f} nats"
        if not self.is_claimed:
            return f"{self.not_claimed} Shown: the layer and the {self._rule} (KL {lost})."
        chosen_on, scored = map(len, self.halves)
        return (
            f"Chosen: the layer and the {self._rule}, with a mean KL of {lost}. The choice was made on "
            f"{chosen_on} of {self.half} facts, those whose answer the model predicts. It is scored on "
            f"{scored} held-out facts. The last claim is a comparison: the layer and position with the "
            "smallest mean KL."
        )

    @property
    def _rule(self) -> str:
        """How layer and key are selected, in words that follow "the layer and the"."""
        return f"{self.rule} the prediction {'on other facts' if self.is_claimed else 'of this prompt'} most"

    def unclaimed(self) -> Findings:
        """View with the reason why nothing is claimed; its caption also says how layer and position were
        chosen."""
        return replace(super().unclaimed(), caption=self.claims_caption())

    def choice_json(self) -> dict[str, Any]:
        """JSON field that records how layer and role were selected; empty if the settings name them."""
        if self.chosen is None:
            return {}
        chosen_on, scored = (half.tolist() for half in self.halves) if self.is_claimed else ([], [])
        return {
            "choice": {
                "rule": f"layer and {self._rule} ({'mean ' if self.is_claimed else ''}KL)",
                **vars(self.chosen),
                "candidates": (self.last_layer + 1 if self.settings.layer is None else 1)
                * len(self.open_roles),
                "chosen_on": [self.others[row].encoding.text for row in chosen_on],
                "scored_on": [self.others[row].encoding.text for row in scored],
                "is_claimed": self.is_claimed,
            }
        }


class EdgeWorkflow(PlaceWorkflow):
    """Base class of workflows about one attention edge of a prompt, from a query to a key position in one
    layer."""

    settings: ChosenEdgeSettings
    num_drawn = OTHERS
    rule = "kind of key whose knocked-out edge changes"
    beside = "knockouts of another (layer, key) edge in each prompt"

    def read_edge(self, window: int = 1) -> dict[str, Any]:
        """Reads prompt, target, query and key from the settings, and returns the arguments of experiments;
        see `PlaceWorkflow.read_place`."""
        return self.read_place(self.settings.query, self.settings.key, window)

    def on_fact(self, tokens: tuple[int, ...], edges: Sequence[tuple[int, int]]) -> Sequence[Experiment]:
        """Experiment on another fact that knocks out each edge separately, in every layer, in all heads."""
        return [EdgeKnockout(tokens, tuple(edges), top_k=1)]

    def on_facts(self, chosen_on: Indices, scored: Indices) -> CandidateEffects:
        """KL in nats when the edge of each layer and role is knocked out in other facts, [fact, layer, role];
        all edges of a fact are controls. See `PlaceWorkflow` for the arguments."""
        lost = self.measured_on_facts("kl")
        return CandidateEffects(lost[chosen_on][..., : len(ROLES)], lost[scored])

    def by_key(self, experiments: Sequence[Experiment]) -> ResultNode:
        """Node that runs experiments which differ in the key position, one for each of `keys`."""
        return self.on_model(experiments[0] if len(experiments) == 1 else AtOnce(tuple(experiments)))

    def at_key(self, name: str, key: int) -> xr.Dataset:
        """Result for one key position of a node that `by_key` made, in memory.

        Arguments:
            name: name of the node.
            key: position of the key.
        """
        result = self.result(name).load()
        return result.isel(draw=self.keys.index(key)) if "draw" in result.dims else result

    def cause_elsewhere(self, layer: int, role: str) -> str:
        """Intervention on the edge from the last token to a role in other facts, as claims begin."""
        return self.doing("the last token", ROLES[role], layer)

    def cause(self, layer: int, key: int) -> str:
        """Intervention on an edge of the displayed prompt, as claims begin."""
        return self.doing(self.token_label(self.query), self.token_label(key), layer)

    def doing(self, query: str, key: str, layer: int) -> str:
        """Intervention on an edge in words, as claims begin: "knocking out the last token's attention to …".

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

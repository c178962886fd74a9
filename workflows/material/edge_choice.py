"""Which place to tell of when nobody named one: the kind that matters most on other facts.

A position of one prompt has no counterpart in another, its kind has: a layer, and the role of the position
that is read - the first one (BOS, where there is one), the last token of the fact's subject, the one before
the query. Of other shipped facts, the first half says which layer and role lose most when they are not read
(KL, mean); the second half, and the prompt that is shown, say what that is worth. What is not read is an
attention edge that is cut (`EdgeWorkflow`), or what a question says (`on_fact`). Of facts count those that
the model knows, whose answer is its likeliest next token; where it knows too few, the place is still told of,
and nothing is claimed.

Where a subject ends is said by the relation: it is the token before the longest ending, in words, that
several shipped facts share ("is developed by").

Border: texts, positions and measurements; loads no model and never imports torch.

Axes: fact, layer, edge: those of ROLES first, then keys drawn at random.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from ...stages.causal.controls import chosen_at_random
from ...stages.causal.draws import AtOnce
from ...stages.causal.knockout import EdgeKnockout
from ...stages.corpus.positions import position_of
from ...stages.forward.hooks.edges import KnockoutSpec
from ...stages.logits.lens import format_probability, format_token
from ...store.arrays import Floats
from ...store.errors import ConfigError
from ..settings import ChosenEdgeSettings, ChosenPlaceSettings
from ..subject import shipped_facts
from ..views import Finding, Table, points
from ..workflow import ModelWorkflow
from .answers import KNOWN, answer_pieces, encoded, fact, named, top_changed_json
from .relations import relation_of

if TYPE_CHECKING:
    import xarray as xr

    from ...pipeline.nodes import ResultNode
    from ...stages.forward.runs.experiment import Experiment
    from ...stages.forward.text.tokens import Encoding

__all__ = ["ROLES", "EdgeWorkflow", "PlaceChoice", "PlaceWorkflow", "roles_of"]

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
    """A shipped fact, and the first token of its answer."""

    encoding: Encoding
    answer: int


def roles_of(encoding: Encoding, query: int) -> dict[str, int]:
    """Positions by role that this query may read; without the subject where the ending is of no relation."""
    found = {"first": 0, "previous": query - 1}
    end = _subject_end(encoding.text)
    if end:
        found["subject"] = encoding.char_range_to_tokens(end - 1, end)[-1]
    return {role: found[role] for role in ROLES if 0 <= found.get(role, -1) <= query}


class PlaceWorkflow(ModelWorkflow):
    """A question about one position that another one reads in one layer, named or chosen."""

    settings: ChosenPlaceSettings
    num_drawn: ClassVar[int] = 0
    """Keys of other facts drawn beside the roles."""
    rule: ClassVar[str]
    """What loses most on other facts, in words: "kind of key whose edge, cut,"."""

    def read_place(self, query: int | str, key: int | str | None, window: int = 1) -> dict[str, Any]:
        """Prompt and target as settings name them, query and keys; what experiments need of them.

        key: None where it is to be chosen. window: layers that must exist from the one told on. Raises
        ConfigError, PromptError or InterventionError for what there is not.
        """
        given, config = self.settings, self.subject.config
        self.prompt, self.target = fact(given.model, given.prompt, given.target)
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

    def facts_node(self) -> dict[str, ResultNode]:
        """The node on other facts; none where all is named."""
        if not self.is_chosen:
            return {}
        self.others = self._other_facts()
        experiments: list[Experiment] = []
        for number, (encoding, _) in enumerate(self.others):
            query = len(encoding) - 1
            roles = list(roles_of(encoding, query).values())
            seed = self.settings.seed + number
            drawn = chosen_at_random(range(query + 1), self.num_drawn, seed=seed, without=roles)
            edges = tuple((query, key) for key in (*roles, *drawn))
            experiments += self.on_fact(tuple(encoding.ids), edges)
        return {"facts": self.on_model(AtOnce(tuple(experiments)))}

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
        """Shipped facts in which every role is another position, no two of the same tokens: as many to choose
        on as to score on."""
        wanted, limit = 2 * self.settings.facts, self.subject.config.context_length
        found: dict[tuple[int, ...], OtherFact] = {}
        for each in shipped_facts()[:TRIED]:
            encoding = self.subject.tokenizer.encode(each["prompt"])
            roles = set(roles_of(encoding, len(encoding) - 1).values())
            fits = limit is None or len(encoding) <= limit
            if each["prompt"] != self.prompt and fits and len(roles) == len(ROLES):
                answer = self.subject.answer_id(each["prompt"], each["target"])
                found.setdefault(tuple(encoding.ids), OtherFact(encoding, answer))
            if len(found) == wanted:
                return list(found.values())
        raise ConfigError(
            f"expected {wanted} shipped facts to choose the place on, found {len(found)}; name position and "
            "layer, or ask for fewer: facts=…"
        )

    @cached_property
    def is_known(self) -> npt.NDArray[np.bool_]:
        """Whether the answer is the likeliest next token, bool [fact]."""
        said = self.result("facts")["baseline_id"].transpose("draw", "rank").values[:, 0]
        return np.array(said.reshape(len(self.others), -1)[:, 0] == [each.answer for each in self.others])

    @cached_property
    def halves(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Which facts the place is chosen on, and which it is scored on; all where too few are known."""
        known = self.is_known if self.is_claimed else np.ones(len(self.others), bool)
        rows, half = np.flatnonzero(known), self.settings.facts
        return rows[rows < half], rows[rows >= half]

    @property
    def is_claimed(self) -> bool:
        """Whether the place was named, or enough facts are known to say something of one that was chosen."""
        if not self.is_chosen:
            return True
        half = self.settings.facts
        return bool(min(self.is_known[:half].sum(), self.is_known[half:].sum()) >= KNOWN)

    @cached_property
    def chosen(self) -> PlaceChoice | None:
        """The layer and role that lose most on other facts, of those that settings leave open; None where
        the place is named."""
        layers = range(self.last_layer + 1) if self.settings.layer is None else (self.settings.layer,)
        return self._extreme(layers, tuple(self.open), np.argmax) if self.is_chosen else None

    @cached_property
    def quiet(self) -> PlaceChoice | None:
        """The layer and role that lose least on other facts, for comparison.

        A role whose position in this prompt is the one told of - the subject may end right before the query -
        is none to compare it with.
        """
        layers = range(self.last_layer + 1)
        roles = tuple(role for role, place in self.roles.items() if place != self.edge[1])
        return self._extreme(layers, roles, np.argmin) if self.is_chosen and roles else None

    def _extreme(self, layers: Sequence[int], roles: Sequence[str], pick: Any) -> PlaceChoice:
        half = self.facts[self.halves[0]].mean(axis=0)
        columns = [list(ROLES).index(role) for role in roles]
        lost = half[np.ix_(list(layers), columns)]
        row, column = np.unravel_index(int(pick(lost)), lost.shape)
        return PlaceChoice(layers[int(row)], roles[int(column)], float(lost[row, column]))

    @cached_property
    def facts(self) -> Floats:
        """KL on other facts, in nats: [fact, layer, key], those of roles first."""
        return self.laid_out(self.result("facts")["kl"].transpose("draw", "layer", ...).values)

    def laid_out(self, values: Floats) -> Floats:
        """What was measured on other facts, [draw, layer] or with edges too, as [fact, layer, edge]: an
        experiment holds all edges of a fact, or one."""
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

    def token_told(self, place: int) -> str:
        """A position of the prompt, as claims name it."""
        return f"'{format_token(named(self.subject, [self.encoding.ids[place]])[0])}' ({place})"

    @property
    def choice_told(self) -> str:
        """How the place was chosen, for people."""
        if self.chosen is None:
            return "The place was named."
        asked = self.settings.facts
        known = [int(half.sum()) for half in (self.is_known[:asked], self.is_known[asked:])]
        how = f"{self.rule} moves other facts most (mean KL {self.chosen.lost:.3f} nats)"
        if not self.is_claimed:
            return (
                f"The model says the answer of {known[0]} and {known[1]} of {asked} other facts to choose on "
                f"and to score on, fewer than {KNOWN}: nothing is claimed. Told of is the layer and {how}."
            )
        return (
            f"Layer and {how}, of {asked} the {known[0]} whose answer the model says; scored on {known[1]} "
            "more. For comparison that of the least."
        )

    def choice_json(self) -> dict[str, Any]:
        """How the place was chosen."""
        if self.chosen is None:
            return {}
        return {
            "choice": {
                "rule": f"layer and {self.rule} moves other facts most (mean KL)",
                **vars(self.chosen),
                "candidates": (self.last_layer + 1 if self.settings.layer is None else 1) * len(self.open),
                "chosen_on": [self.others[row].encoding.text for row in self.halves[0]],
                "scored_on": [self.others[row].encoding.text for row in self.halves[1]],
                "is_claimed": self.is_claimed,
            }
        }


class EdgeWorkflow(PlaceWorkflow):
    """A question about one attention edge of one prompt."""

    settings: ChosenEdgeSettings
    num_drawn = OTHERS
    rule = "kind of key whose edge, cut,"
    beside: ClassVar[str] = "cuts of another (layer, key) in each prompt"
    """What it is held against on other facts, in words."""

    def read_edge(self, window: int = 1) -> dict[str, Any]:
        """As `read_place`, of the edge that settings name."""
        return self.read_place(self.settings.query, self.settings.key, window)

    def on_fact(self, tokens: tuple[int, ...], edges: Sequence[tuple[int, int]]) -> Sequence[Experiment]:
        """Each edge cut by itself, in every layer, in all heads."""
        return [EdgeKnockout(tokens, tuple(edges), top_k=1)]

    def on_held_out(self) -> Finding | None:
        """The edge chosen, in facts that had no part in the choice; None where it is named."""
        if self.chosen is None:
            return None
        given, scored = self.settings, self.facts[self.halves[1]]
        cell = self.chosen.layer * scored.shape[2] + list(ROLES).index(self.chosen.role)
        done = self.doing("the last token", ROLES[self.chosen.role], self.chosen.layer)
        return Finding.over(
            f"{done} changes the next token",
            scored.reshape(len(scored), -1)[:, cell],
            self.others_beside(cell),
            self.beside,
            draws=given.controls,
            seed=given.seed,
            unit="nats",
            held_out=True,
        )

    def doing(self, query: str, key: str, layer: int) -> str:
        """What is done to an edge, as claims begin."""
        return f"cutting {query}'s view of {key} in layer {layer}"

    def others_beside(self, cell: int) -> Floats:
        """KL of what the edge chosen is held against in facts it is scored on, [fact, cause]. cell: its own
        place among layers and edges."""
        scored = self.facts[self.halves[1]]
        found: Floats = np.delete(scored.reshape(len(scored), -1), cell, axis=1)
        return found

    def edge_told(self, edge: tuple[int, int]) -> str:
        """An edge, as claims name it."""
        return " -> ".join(map(self.token_told, edge))


def _subject_end(text: str) -> int:
    """Where a fact's subject ends, in characters: before the longest ending that is shared, commas and
    genitives left out; 0 for none."""
    shared = relation_of(text)
    return 0 if shared is None else len(text.removesuffix(shared).rstrip(" ,?").removesuffix("'s"))

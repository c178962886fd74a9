"""Which place to tell of when nobody named one: the kind that matters most on other facts.

A position of one prompt has no counterpart in another, its kind has: a layer, and the role of the position
that is read - the first one (BOS, where there is one), the last token of the fact's subject, the one before
the query. Of other shipped facts, the first half says which layer and role lose most when they are not read
(KL, mean); the second half, and the prompt that is shown, say what that is worth. What is not read is an
attention edge that is cut (`EdgeWorkflow`), or what a question says (`on_fact`).

Where a subject ends is said by the relation: it is the token before the longest ending, in words, that
several shipped facts share ("is developed by").

Border: texts, positions and measurements; loads no model and never imports torch.

Axes: fact, layer, edge: those of ROLES first, then keys drawn at random.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...stages.causal.controls import chosen_at_random
from ...stages.causal.draws import AtOnce
from ...stages.causal.knockout import EdgeKnockout
from ...stages.corpus.positions import position_of
from ...stages.forward.hooks.edges import KnockoutSpec
from ...stages.logits.lens import format_token
from ...store.arrays import Floats
from ...store.errors import ConfigError
from ..settings import ChosenEdgeSettings, ChosenPlaceSettings
from ..subject import shipped_facts
from ..views import Finding
from ..workflow import ModelWorkflow
from .answers import answer_pieces, encoded, fact, named
from .relations import relation_of

if TYPE_CHECKING:
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
    is_scored: ClassVar[bool] = True
    """Whether there are as many more facts to score on what the first ones chose."""
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
            spec.validate(config.num_layers, config.axis_sizes["head"], len(self.encoding))
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
        for number, encoding in enumerate(self.others):
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

    def _other_facts(self) -> list[Encoding]:
        """Shipped facts in which every role is another position, no two of the same tokens: as many to choose
        on as to score on."""
        wanted, limit = (1 + self.is_scored) * self.settings.facts, self.subject.config.context_length
        found: dict[tuple[int, ...], Encoding] = {}
        for each in shipped_facts()[:TRIED]:
            encoding = self.subject.tokenizer.encode(each["prompt"])
            roles = set(roles_of(encoding, len(encoding) - 1).values())
            fits = limit is None or len(encoding) <= limit
            if each["prompt"] != self.prompt and fits and len(roles) == len(ROLES):
                found.setdefault(tuple(encoding.ids), encoding)
            if len(found) == wanted:
                return list(found.values())
        raise ConfigError(
            f"expected {wanted} shipped facts to choose the place on, found {len(found)}; name position and "
            "layer, or ask for fewer: facts=…"
        )

    @cached_property
    def chosen(self) -> PlaceChoice | None:
        """The layer and role that lose most on other facts, of those that settings leave open; None where
        the place is named."""
        layers = range(self.last_layer + 1) if self.settings.layer is None else (self.settings.layer,)
        return self._extreme(layers, tuple(self.open), np.argmax) if self.is_chosen else None

    @cached_property
    def quiet(self) -> PlaceChoice | None:
        """The layer and role that lose least on other facts, for comparison."""
        layers = range(self.last_layer + 1)
        return self._extreme(layers, tuple(self.roles), np.argmin) if self.is_chosen else None

    def _extreme(self, layers: Sequence[int], roles: Sequence[str], pick: Any) -> PlaceChoice:
        half = self.facts[: self.settings.facts].mean(axis=0)
        columns = [list(ROLES).index(role) for role in roles]
        lost = half[np.ix_(list(layers), columns)]
        row, column = np.unravel_index(int(pick(lost)), lost.shape)
        return PlaceChoice(layers[int(row)], roles[int(column)], float(lost[row, column]))

    @cached_property
    def facts(self) -> Floats:
        """KL on other facts, in nats: [fact, layer, key], those of roles first."""
        kl = self.result("facts")["kl"].transpose("draw", "layer", ...).values
        # An experiment holds all edges of a fact, or one: both are laid out fact by fact.
        by_edge = kl.reshape(len(self.others), -1, *kl.shape[1:]).transpose(0, 2, 1, 3)
        found: Floats = by_edge.reshape(*by_edge.shape[:2], -1)
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
        return f"{format_token(named(self.subject, [self.encoding.ids[place]])[0])!r} ({place})"

    @property
    def choice_told(self) -> str:
        """How the place was chosen, for people."""
        if self.chosen is None:
            return "The place was named."
        count, more = self.settings.facts, len(self.others) - self.settings.facts
        scored = f", scored on {more} more" if more else ""
        return (
            f"Layer and {self.rule} moves {count} other facts most (mean KL {self.chosen.lost:.3f} "
            f"nats){scored}; for comparison that of the least."
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
                "chosen_on": [each.text for each in self.others[: self.settings.facts]],
                "scored_on": [each.text for each in self.others[self.settings.facts :]],
            }
        }


class EdgeWorkflow(PlaceWorkflow):
    """A question about one attention edge of one prompt."""

    settings: ChosenEdgeSettings
    num_drawn = OTHERS
    rule = "kind of key whose edge, cut,"

    def read_edge(self, window: int = 1) -> dict[str, Any]:
        """As `read_place`, of the edge that settings name."""
        return self.read_place(self.settings.query, self.settings.key, window)

    def on_fact(self, tokens: tuple[int, ...], edges: Sequence[tuple[int, int]]) -> Sequence[Experiment]:
        """Each edge cut."""
        return [EdgeKnockout(tokens, tuple(edges), top_k=1)]

    def on_held_out(self) -> Finding | None:
        """The edge chosen, cut in facts that had no part in the choice; None where it is named."""
        if self.chosen is None:
            return None
        given, scored = self.settings, self.facts[self.settings.facts :]
        cell = self.chosen.layer * scored.shape[2] + list(ROLES).index(self.chosen.role)
        flat = scored.reshape(len(scored), -1)
        return Finding.over(
            f"cutting the last token's view of {ROLES[self.chosen.role]} in layer {self.chosen.layer} "
            "changes the next token",
            flat[:, cell],
            np.delete(flat, cell, axis=1),
            "cuts of another (layer, key) in each prompt",
            draws=given.controls,
            seed=given.seed,
            unit="nats",
            held_out=True,
        )

    def edge_told(self, edge: tuple[int, int]) -> str:
        """An edge, as claims name it."""
        return " -> ".join(map(self.token_told, edge))


def _subject_end(text: str) -> int:
    """Where a fact's subject ends, in characters: before the longest ending that is shared, commas and
    genitives left out; 0 for none."""
    shared = relation_of(text)
    return 0 if shared is None else len(text.removesuffix(shared).rstrip(" ,?").removesuffix("'s"))

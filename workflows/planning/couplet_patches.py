"""Couplets for one model: positions by their role, what is patched in each, and what its numbers say.

Border: plans and reads `LinePatching`; texts are material/samples/couplets.py's, views and claims the
workflow's. Never imports torch.

Axes: pair (or pair and donor, donors fastest), layer, role, way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ...stages.causal.controls import chosen_at_random
from ...stages.causal.draws import AtOnce
from ...stages.causal.grids.line_patching import LinePatching, Way
from ...store.arrays import Floats
from ...store.digest import digest
from ...store.errors import ConfigError
from ..material.answers import encoded
from ..material.samples.couplets import COUPLETS, FAMILIES, CoupletPair, family_of
from ..subject import Subject

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["KINDS", "PLAN", "ROLES", "WAYS", "CoupletPatches", "PlacedPair", "PairsRead"]

ROLES = (
    "end of line 1",
    "line break",
    "1st token",
    "2nd token",
    "tokens between",
    "last but one",
    "last token",
)
"""What is patched, in the order of the text: tokens are those of line 2, whose end comes after the last."""
END, PLAN = 0, (1, 2)
"""The role that differs in the two couplets, and those where a plan for line 2 can be."""
WAYS = ("line break and 1st token", "all tokens between but the last", "the last token alone")
"""Positions that get states of the other couplet in every layer, by way."""
KINDS = {
    "third": "states under a third rhyme, put in likewise",
    "same": "states under another word of its own rhyme, put in likewise",
    "random": "random directions as long, put in likewise",
}
"""Donors that stand beside the other couplet, as claims call them."""
OWN, OTHER = 0, 1
"""Groups of words: those that rhyme with the end, and those that rhyme with the other couplet's."""
FEWEST = 2
"""Pairs of a half that must be left."""


@dataclass(frozen=True)
class PlacedPair:
    """A pair in tokens.

    ids: with its own end. at: where that stands. roles: positions, in the order of `ROLES`. ends: tokens of
    words. same, third: ends of donors. groups: token ids of both families, own and other, without both ends.
    """

    pair: CoupletPair
    ids: tuple[int, ...]
    at: int
    roles: tuple[tuple[int, ...], ...]
    ends: Mapping[str, int]
    same: tuple[str, ...]
    third: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]

    def with_end(self, word: str) -> tuple[int, ...]:
        """Token ids with another end of the first line."""
        return (*self.ids[: self.at], self.ends[word], *self.ids[self.at + 1 :])

    @property
    def ways(self) -> tuple[Way, ...]:
        """Sets of patched positions (`Way`), in the order of `WAYS`."""
        between = tuple(range(self.at + 1, len(self.ids) - 1))
        early = tuple(at for role in PLAN for at in self.roles[role])
        return (early, ()), (between, ()), (self.roles[END], between)

    def patched(self, word: str, seed: int | None = None) -> LinePatching:
        """States of the couplet with another end, or random changes as long."""
        return LinePatching(
            prompt=self.ids,
            donor=self.with_end(word),
            places=self.roles,
            groups=self.groups,
            read=tuple(range(self.at + 1, len(self.ids) - 1)),
            ways=self.ways,
            seed=seed,
        )


class CoupletPatches:
    """The shipped pairs for one model: those to choose on, as many to score, and what is patched in them.

    donors: of every kind per pair; of its own rhyme fewer where a family has fewer words. Raises ConfigError
    for more pairs than there are, or where fewer than two of a half can be asked.
    """

    def __init__(self, subject: Subject, pairs: int, donors: int, seed: int) -> None:
        half = len(COUPLETS) // 2
        if pairs > half:
            raise ConfigError(
                f"expected at most {half} pairs to choose on and as many to score, found pairs={pairs}"
            )
        self._subject, self._seed, self._donors = subject, seed, donors
        self.choice, self.scored = (
            [placed for pair in some if (placed := self._placed(pair))]
            for some in (COUPLETS[:pairs], COUPLETS[half : half + pairs])
        )
        if min(len(self.choice), len(self.scored)) < FEWEST:
            raise ConfigError(
                f"expected a model whose tokens are the ends of couplets, found {subject.name}, of which "
                f"{len(self.choice)} of {pairs} pairs to choose on and {len(self.scored)} to score can be "
                "asked; give more pairs, or name another model: model=…"
            )
        counts = {kind: min(len(getattr(each, kind)) for each in self.scored) for kind in ("third", "same")}
        self.donors: Mapping[str, int] = {**counts, "random": donors}

    def experiment(self, name: str) -> AtOnce:
        """Of "choice" and "scored" a draw per pair; of a kind of donors so many per pair."""
        if name in ("choice", "scored"):
            pairs: list[PlacedPair] = getattr(self, name)
            return AtOnce(tuple(each.patched(each.pair.other) for each in pairs))
        count = self.donors[name]
        if name == "random":
            return AtOnce(
                tuple(
                    each.patched(each.pair.other, self._drawn(each.pair, draw))
                    for each in self.scored
                    for draw in range(count)
                )
            )
        return AtOnce(
            tuple(each.patched(word) for each in self.scored for word in getattr(each, name)[:count])
        )

    def _drawn(self, pair: CoupletPair, draw: int) -> int:
        """Seeds of the draws of a pair, independent of the other pairs."""
        return int(digest("couplets", self._seed, pair.text(pair.end), pair.other, draw)[:8], 16)

    # -- texts

    @cached_property
    def _tokens(self) -> Mapping[str, int]:
        """Words of families that are one token behind another word."""
        words = [word for family in FAMILIES for word in family]
        pieces = {word: self._subject.answer_pieces("and they heard", word) for word in words}
        return {word: found[0] for word, found in pieces.items() if len(found) == 1}

    def _placed(self, pair: CoupletPair) -> PlacedPair | None:
        """Tokens of a pair; None where an end is not one token, or line 2 is too short."""
        ends = pair.end, pair.other
        if not set(ends) <= self._tokens.keys():
            return None
        encoding = encoded(self._subject, pair.text(pair.end))
        ids, start = tuple(encoding.ids), len(pair.text(pair.end)) - len(pair.second)
        elsewhere = self._encoded(pair, pair.other)
        differing = [i for i, (a, b) in enumerate(zip(ids, elsewhere, strict=False)) if a != b]
        second = [i for i, (begin, end) in enumerate(encoding.offsets) if start <= begin < end]
        if len(ids) != len(elsewhere) or len(differing) != 1 or len(second) < len(ROLES) - 2:
            return None
        (at,) = differing
        if (
            ids[at] != self._tokens[pair.end]
            or elsewhere[at] != self._tokens[pair.other]
            or second[0] < at + 2
        ):
            return None
        roles = ([at], range(at + 1, second[0]), *([i] for i in second[:2]), second[2:-2])
        same, third = (
            self._fitting(pair, ids, at, words, draw) for draw, words in enumerate((pair.same, pair.third))
        )
        others = self._tokens.keys() - set(ends)
        groups = tuple(
            tuple(self._tokens[word] for word in FAMILIES[family_of(end)] if word in others) for end in ends
        )
        if not same or not third or not all(groups):
            return None
        return PlacedPair(
            pair=pair,
            ids=ids,
            at=at,
            roles=(*map(tuple, roles), *((i,) for i in second[-2:])),
            ends=self._tokens,
            same=same,
            third=third,
            groups=groups,
        )

    def _fitting(
        self, pair: CoupletPair, ids: tuple[int, ...], at: int, words: Sequence[str], draw: int
    ) -> tuple[str, ...]:
        """Words in random order that keep the other tokens of the couplet, up to a number."""
        drawn = chosen_at_random(words, len(words), seed=self._drawn(pair, draw))
        fits = (
            word
            for word in drawn
            if word in self._tokens
            and self._encoded(pair, word) == (*ids[:at], self._tokens[word], *ids[at + 1 :])
        )
        return tuple(islice(fits, self._donors))

    def _encoded(self, pair: CoupletPair, word: str) -> tuple[int, ...]:
        return tuple(self._subject.tokenizer.encode(pair.text(word)).ids)


class PairsRead:
    """What came out for the pairs of one result. count: how many draws each pair has."""

    def __init__(self, found: xr.Dataset, pairs: Sequence[PlacedPair], count: int = 1) -> None:
        self._found = found
        self._pairs = [pair for pair in pairs for _ in range(count)]

    def _moved(self, name: str, group: int) -> Floats:
        """How far P(rhymes), by words of a group, moves by what is patched, percentage points [draw, ...]."""
        patched, before = (100 * self._found[each].values[..., group] for each in (name, "unpatched"))
        found: Floats = patched - before[:, 0].reshape(-1, *(1,) * (patched.ndim - 1))
        return found

    @property
    def total(self) -> Floats:
        """How far the other couplet, whole, raises P(rhymes with its end), percentage points [draw]."""
        return self._moved("unpatched", OTHER)[:, 1]

    @cached_property
    def effects(self) -> Floats:
        """How far a state does, [draw, layer, role]."""
        return self._moved("probability", OTHER)

    @cached_property
    def own_effects(self) -> Floats:
        """What it does to P(rhymes with the prompt's own end), [draw, layer, role]."""
        return self._moved("probability", OWN)

    @cached_property
    def ways(self) -> Floats:
        """How far states of all layers raise P(rhymes with the other end), [draw, way]."""
        return self._moved("way_probability", OTHER)

    @cached_property
    def own_ways(self) -> Floats:
        """What they do to P(rhymes with the prompt's own end), [draw, way]."""
        return self._moved("way_probability", OWN)

    @property
    def kl(self) -> Floats:
        """How far next tokens change before the last, nats [draw, layer, role]."""
        return np.asarray(self._found["kl"].values, np.float64)

    @property
    def top(self) -> npt.NDArray[np.int64]:
        """The likeliest token at the end, [draw, layer, role]."""
        return np.asarray(self._found["top"].values, np.int64)

    @property
    def unpatched_top(self) -> npt.NDArray[np.int64]:
        """The same, nothing patched, [draw, run]."""
        return np.asarray(self._found["unpatched_top"].values, np.int64)

    @property
    def is_known(self) -> npt.NDArray[np.bool_]:
        """Which couplets end on another word that rhymes, with either end of their first line, [draw]."""
        return np.array(
            [
                own in pair.groups[OWN] and other in pair.groups[OTHER]
                for (own, other), pair in zip(self.unpatched_top.tolist(), self._pairs, strict=True)
            ]
        )

    @property
    def rhymes(self) -> Floats:
        """How much likelier words are that rhyme with line 1 than under the other line 1, mean of both
        couplets, percentage points [draw]. Families are compared with themselves, as some have more words."""
        own, other = (self._moved("unpatched", group)[:, 1] for group in (OWN, OTHER))
        found: Floats = (other - own) / 2
        return found

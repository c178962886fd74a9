"""Couplets encoded for one model: positions by role, patching experiments, and effects read from their
results.

Border: plans and reads `LinePatching`; the texts are in material/samples/couplets.py, views and claims in the
workflow. Never imports torch.

Axes: draw (a pair; with donors, pair * donor with donors fastest), layer, role, way (a set of positions that
is patched in every layer).
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

__all__ = ["ASKED", "KINDS", "PLAN", "ROLES", "WAYS", "CoupletEffects", "CoupletPatches", "PlacedPair"]

ROLES = (
    "end of line 1",
    "line break",
    "1st token",
    "2nd token",
    "tokens between",
    "last but one",
    "last token",
)
"""Names of the sets of positions that are patched, in the order of the text. Tokens are those of line 2; the
model predicts the end of line 2 after the last one."""
END, PLAN = 0, (1, 2)
"""Indices into ROLES: the token that differs in the two couplets, and the places of a possible plan."""
WAYS = ("line break and 1st token", "all tokens between but the last", "the last token alone")
"""Names of the sets of positions whose states are patched in every layer; see `PlacedPair.ways`."""
KINDS = {
    "third": "states of a couplet with a third rhyme, patched likewise",
    "same": "states of a couplet with another word of its own rhyme, patched likewise",
    "random": "random changes of the same norm, patched likewise",
}
"""Kinds of control donors, and their description in claims."""
OWN, OTHER = 0, 1
"""Indices into the axis "group": words that rhyme with the prompt's end of line 1, and with the other
couplet's."""
ASKED = "asked"
"""Name of the experiment without patches, which shows what pairs the model rhymes."""
FEWEST = 2
"""Least number of pairs that the tokenizer must leave in each half."""


@dataclass(frozen=True)
class PlacedPair:
    """A pair of couplets as token ids, with the positions that are patched."""

    pair: CoupletPair
    """The texts."""
    ids: tuple[int, ...]
    """Token ids of the couplet with its own end of line 1."""
    at: int
    """Position of the end of line 1."""
    roles: tuple[tuple[int, ...], ...]
    """Positions of each role, in the order of `ROLES`."""
    ends: Mapping[str, int]
    """Token id of each word that may end a line."""
    same: tuple[str, ...]
    """Ends of line 1 of donors that rhyme with its own end."""
    third: tuple[str, ...]
    """Ends of line 1 of donors that rhyme with neither end."""
    groups: tuple[tuple[int, ...], ...]
    """Token ids of words that rhyme with its own end, and with the other end, both ends left out."""

    def with_end(self, word: str) -> tuple[int, ...]:
        """Token ids of the couplet with another word at the end of line 1."""
        return (*self.ids[: self.at], self.ends[word], *self.ids[self.at + 1 :])

    @property
    def ways(self) -> tuple[Way, ...]:
        """Positions patched and positions fixed in every layer (`Way`), in the order of `WAYS`."""
        between = tuple(range(self.at + 1, len(self.ids) - 1))
        # In the last way the end of line 1 is patched while all positions between keep the prompt's states,
        # so that only the last token can read the change.
        early = tuple(at for role in PLAN for at in self.roles[role])
        return (early, ()), (between, ()), (self.roles[END], between)

    def patched(self, word: str, seed: int | None = None) -> LinePatching:
        """Experiment that patches states of a couplet with a different end of line 1 into this couplet.

        Arguments:
            word: other end of line 1.
            seed: seed of random changes with the same norms, which replace the donor's; None for the donor's.
        """
        return LinePatching(
            prompt=self.ids,
            donor=self.with_end(word),
            places=self.roles,
            groups=self.groups,
            read=tuple(range(self.at + 1, len(self.ids) - 1)),
            ways=self.ways,
            seed=seed,
        )

    def asked(self) -> LinePatching:
        """Experiment that runs both couplets of the pair without patches."""
        return LinePatching(
            prompt=self.ids, donor=self.with_end(self.pair.other), places=(), groups=self.groups, read=()
        )


class CoupletPatches:
    """The shipped pairs of couplets encoded for one model, in two halves, and the experiments on them."""

    def __init__(self, subject: Subject, pairs: int, donors: int, seed: int) -> None:
        """
        Arguments:
            subject: the model.
            pairs: number of pairs to choose on, and of pairs to score.
            donors: number of donors of every kind per pair; fewer of its own rhyme if that has fewer words.
            seed: of the choice of donors and of random changes.

        Raises:
            ConfigError: `pairs` exceeds the shipped pairs, or the tokenizer leaves fewer than FEWEST in a
                half.
        """
        half = len(COUPLETS) // 2
        if pairs > half:
            raise ConfigError(
                f"expected at most {half} pairs to choose on and as many to score, found pairs={pairs}"
            )
        self._subject, self._seed, self._donors = subject, seed, donors
        self.choice, self.scored = (
            [placed for pair in couplets if (placed := self._placed(pair))]
            # Fixed halves: with another `pairs` no couplet moves from the choice to the scored ones.
            for couplets in (COUPLETS[:pairs], COUPLETS[half : half + pairs])
        )
        if min(len(self.choice), len(self.scored)) < FEWEST:
            raise ConfigError(
                f"expected a model whose tokens are the ends of couplets, found {subject.name}, with which "
                f"{len(self.choice)} of {pairs} pairs to choose on and {len(self.scored)} to score can be "
                "asked; give more pairs, or name another model: model=…"
            )
        # The same number for every pair, as results are reshaped to [pair, donor].
        counts = {kind: min(len(getattr(pair, kind)) for pair in self.scored) for kind in ("third", "same")}
        self.donors: Mapping[str, int] = {**counts, "random": donors}

    def experiment(self, name: str) -> AtOnce:
        """The experiment for "asked", both couplets of all pairs without patches; for "choice" or "scored",
        one draw per pair; or for a kind of donors in KINDS, `donors[name]` draws per pair to score."""
        if name == ASKED:
            return AtOnce(tuple(placed.asked() for placed in (*self.choice, *self.scored)))
        if name in ("choice", "scored"):
            pairs: list[PlacedPair] = getattr(self, name)
            return AtOnce(tuple(placed.patched(placed.pair.other) for placed in pairs))
        count = self.donors[name]
        if name == "random":
            return AtOnce(
                tuple(
                    placed.patched(placed.pair.other, self._seed_of(placed.pair, draw))
                    for placed in self.scored
                    for draw in range(count)
                )
            )
        return AtOnce(
            tuple(placed.patched(word) for placed in self.scored for word in getattr(placed, name)[:count])
        )

    def _seed_of(self, pair: CoupletPair, draw: int) -> int:
        """Random seed of draw `draw` for a pair; independent of the selection of pairs."""
        return int(digest("couplets", self._seed, pair.text(pair.end), pair.other, draw)[:8], 16)

    # -- texts

    @cached_property
    def _tokens(self) -> Mapping[str, int]:
        """Token id of each rhyming word that is a single token when it follows another word."""
        words = [word for family in FAMILIES for word in family]
        # After other words, so that the token includes the leading space.
        pieces = {word: self._subject.answer_pieces("and they heard", word) for word in words}
        return {word: ids[0] for word, ids in pieces.items() if len(ids) == 1}

    def _placed(self, pair: CoupletPair) -> PlacedPair | None:
        """A pair encoded; None if an end is not one token, the couplets differ in more than that token, line
        2 has too few tokens for all roles, or words for donors or groups are missing."""
        ends = pair.end, pair.other
        if not set(ends) <= self._tokens.keys():
            return None
        encoding = encoded(self._subject, pair.text(pair.end))
        ids, start = tuple(encoding.ids), len(pair.text(pair.end)) - len(pair.second)
        other_ids = self._encoded(pair, pair.other)
        # Unequal lengths are refused below, hence strict=False.
        differing = [i for i, (a, b) in enumerate(zip(ids, other_ids, strict=False)) if a != b]
        line_2 = [i for i, (begin, end) in enumerate(encoding.offsets) if start <= begin < end]
        # All roles but the first two lie in line 2, and each needs a token.
        if len(ids) != len(other_ids) or len(differing) != 1 or len(line_2) < len(ROLES) - 2:
            return None
        (at,) = differing
        if (
            ids[at] != self._tokens[pair.end]
            or other_ids[at] != self._tokens[pair.other]
            # The line break needs at least one token of its own, to be patched apart from line 2.
            or line_2[0] < at + 2
        ):
            return None
        roles = ([at], range(at + 1, line_2[0]), *([i] for i in line_2[:2]), line_2[2:-2])
        same_rhyme, third = (
            self._donor_words(pair, ids, at, candidates, draw)
            for draw, candidates in enumerate((pair.same, pair.third))
        )
        words = self._tokens.keys() - set(ends)
        groups = tuple(
            tuple(self._tokens[word] for word in FAMILIES[family_of(end)] if word in words) for end in ends
        )
        if not same_rhyme or not third or not all(groups):
            return None
        return PlacedPair(
            pair=pair,
            ids=ids,
            at=at,
            roles=(*map(tuple, roles), *((i,) for i in line_2[-2:])),
            ends=self._tokens,
            same=same_rhyme,
            third=third,
            groups=groups,
        )

    def _donor_words(
        self, pair: CoupletPair, ids: tuple[int, ...], at: int, candidates: Sequence[str], draw: int
    ) -> tuple[str, ...]:
        """Random words, at most the number of donors, that replace the token `at` of the couplet `ids` and
        leave its other tokens as they are."""
        shuffled = chosen_at_random(candidates, len(candidates), seed=self._seed_of(pair, draw))
        fits = (
            word
            for word in shuffled
            if word in self._tokens
            and self._encoded(pair, word) == (*ids[:at], self._tokens[word], *ids[at + 1 :])
        )
        return tuple(islice(fits, self._donors))

    def _encoded(self, pair: CoupletPair, word: str) -> tuple[int, ...]:
        """Token ids of the couplet with a word at the end of line 1."""
        return tuple(self._subject.tokenizer.encode(pair.text(word)).ids)


class CoupletEffects:
    """Effects in one result of patching, in percentage points (pp) of P(rhymes) at the end of line 2."""

    def __init__(self, result: xr.Dataset, pairs: Sequence[PlacedPair], count: int = 1) -> None:
        """
        Arguments:
            result: output of `CoupletPatches.experiment`.
            pairs: the pairs that were patched.
            count: number of draws of each pair.
        """
        self._result = result
        self._pairs = [pair for pair in pairs for _ in range(count)]

    def _change(self, name: str, group: int) -> Floats:
        """Change of the probability of a group of words from the unpatched prompt, pp [draw, ...].

        Arguments:
            name: variable of the result with probabilities, [draw, ..., group].
            group: OWN or OTHER.
        """
        # Run 0 of "unpatched" is the prompt, run 1 the donor.
        patched, unpatched = (100 * self._result[v].values[..., group] for v in (name, "unpatched"))
        change: Floats = patched - unpatched[:, 0].reshape(-1, *(1,) * (patched.ndim - 1))
        return change

    @property
    def total(self) -> Floats:
        """Change of P(rhymes with the other end) from this couplet to the other couplet, pp [draw]."""
        return self._change("unpatched", OTHER)[:, 1]

    @cached_property
    def effects(self) -> Floats:
        """Change of P(rhymes with the other end) by patching one role after one layer, pp [draw, layer,
        role]."""
        return self._change("probability", OTHER)

    @cached_property
    def own_effects(self) -> Floats:
        """Change of P(rhymes with the own end) by the same patches, pp [draw, layer, role]."""
        return self._change("probability", OWN)

    @cached_property
    def ways(self) -> Floats:
        """Change of P(rhymes with the other end) by patching a set of positions in every layer, pp [draw,
        way]."""
        return self._change("way_probability", OTHER)

    @cached_property
    def own_ways(self) -> Floats:
        """Change of P(rhymes with the own end) by the same patches, pp [draw, way]."""
        return self._change("way_probability", OWN)

    @property
    def kl(self) -> Floats:
        """KL of next-token distributions from the patched position to the last token but one, mean, nats
        [draw, layer, role]; NaN without such positions."""
        return np.asarray(self._result["kl"].values, np.float64)

    @property
    def top(self) -> npt.NDArray[np.int64]:
        """Id of the likeliest token at the end of line 2 by patch, int64 [draw, layer, role]."""
        return np.asarray(self._result["top"].values, np.int64)

    @property
    def unpatched_top(self) -> npt.NDArray[np.int64]:
        """Id of the likeliest token at the end of line 2 of both unpatched couplets, int64 [draw, run]."""
        return np.asarray(self._result["unpatched_top"].values, np.int64)

    @property
    def is_known(self) -> npt.NDArray[np.bool_]:
        """Whether the model ends both couplets on another word that rhymes with their line 1, bool [draw]."""
        return np.array(
            [
                own_top in pair.groups[OWN] and other_top in pair.groups[OTHER]
                for (own_top, other_top), pair in zip(self.unpatched_top.tolist(), self._pairs, strict=True)
            ]
        )

    @property
    def rhymes(self) -> Floats:
        """Increase of P(rhymes with line 1) over that after the other line 1, mean of both couplets, pp
        [draw]."""
        # Each group of words is compared with itself, as some rhymes have more words than others.
        own_change, other_change = (self._change("unpatched", group)[:, 1] for group in (OWN, OTHER))
        increase: Floats = (other_change - own_change) / 2
        return increase

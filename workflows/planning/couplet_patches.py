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
"""Names of the sets of positions that are patched, in the order of the text. "1st token" to "last token" are
those of line 2; after the last one the model predicts the word that ends line 2."""
END, PLAN = 0, (1, 2)
"""Indices into ROLES: the last word of line 1, in which two couplets differ, and the positions at which a
rhyme may be planned."""
WAYS = ("line break and 1st token", "all tokens between but the last", "the last token alone")
"""Names of the sets of positions whose states are patched in every layer at once; see `PlacedPair.ways`."""
KINDS = {
    "third": "states of a couplet with a third rhyme, patched likewise",
    "same": "states of a couplet with another word of its own rhyme, patched likewise",
    "random": "random changes of the same norm, patched likewise",
}
"""Kinds of control donors -> their description in claims."""
OWN, OTHER = 0, 1
"""Indices into the axis "group" of results: words that rhyme with the couplet's own line 1, and with that of
the other couplet."""
ASKED = "asked"
"""Name of the experiment without patches, which shows what pairs the model rhymes."""
FEWEST = 2
"""Smallest number of pairs that the tokenizer must leave in each half."""


@dataclass(frozen=True)
class PlacedPair:
    """Two couplets that differ in the last word of line 1, as token ids, with the positions that are
    patched."""

    pair: CoupletPair
    """The two couplets as texts."""
    ids: tuple[int, ...]
    """Token ids of the couplet that is patched."""
    at: int
    """Position of the last word of line 1, in which the couplets differ."""
    roles: tuple[tuple[int, ...], ...]
    """Positions of each role, in the order of `ROLES`."""
    ends: Mapping[str, int]
    """Word that may end a line -> its token id."""
    same: tuple[str, ...]
    """Words for the end of line 1 of control donors with the same rhyme as the patched couplet."""
    third: tuple[str, ...]
    """Words for the end of line 1 of control donors that rhyme with neither couplet."""
    groups: tuple[tuple[int, ...], ...]
    """Token ids of words that rhyme with the patched couplet, and of words that rhyme with the other one;
    both ends of line 1 are left out."""

    def with_end(self, word: str) -> tuple[int, ...]:
        """Token ids of the couplet with another word at the end of line 1. word: a key of `ends`."""
        return (*self.ids[: self.at], self.ends[word], *self.ids[self.at + 1 :])

    @property
    def ways(self) -> tuple[Way, ...]:
        """Positions to patch in every layer, and positions that keep the patched couplet's states, for each
        of WAYS."""
        between = tuple(range(self.at + 1, len(self.ids) - 1))
        # In the last way the end of line 1 is patched while all positions between keep the prompt's states,
        # so that only the last token can read the change.
        early = tuple(at for role in PLAN for at in self.roles[role])
        return (early, ()), (between, ()), (self.roles[END], between)

    def patched(self, word: str, seed: int | None = None) -> LinePatching:
        """Experiment that patches states of a couplet with another end of line 1 into this couplet.

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
    """Patching experiments on the shipped pairs of couplets for one model, in two halves: one to choose a
    layer and position on, one to score it on."""

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
                f"expected pairs of at most {half}, half of the shipped pairs of couplets, found {pairs}; "
                f"set pairs={half}"
            )
        self._subject, self._seed, self._donors = subject, seed, donors
        self.choice, self.scored = (
            [placed for pair in couplets if (placed := self._placed(pair))]
            # Fixed halves: with another `pairs` no couplet moves from the choice to the scored ones.
            for couplets in (COUPLETS[:pairs], COUPLETS[half : half + pairs])
        )
        if min(len(self.choice), len(self.scored)) < FEWEST:
            raise ConfigError(
                "expected a tokenizer in which the last words of couplets are single tokens, found that of "
                f"{subject.name}, which allows {len(self.choice)} of {pairs} pairs to choose on and "
                f"{len(self.scored)} to score on; ask for more pairs, or name another model: model=…"
            )
        # The same number for every pair, as results are reshaped to [pair, donor].
        counts = {kind: min(len(getattr(pair, kind)) for pair in self.scored) for kind in ("third", "same")}
        self.donors: Mapping[str, int] = {**counts, "random": donors}

    def experiment(self, name: str) -> AtOnce:
        """Experiment by name: for "asked" both couplets of all pairs without patches; for "choice" or
        "scored" patching, one draw per pair of that half; for a kind of control donors in KINDS, patching
        with `donors[name]` draws per pair of the second half."""
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
        """Random seed of draw `draw` for a pair, which does not depend on the other pairs."""
        return int(digest("couplets", self._seed, pair.text(pair.end), pair.other, draw)[:8], 16)

    # -- texts

    @cached_property
    def _tokens(self) -> Mapping[str, int]:
        """Rhyming word -> its token id; only words that are a single token after another word."""
        words = [word for family in FAMILIES for word in family]
        # After other words, so that the token includes the leading space.
        pieces = {word: self._subject.answer_pieces("and they heard", word) for word in words}
        return {word: ids[0] for word, ids in pieces.items() if len(ids) == 1}

    def _placed(self, pair: CoupletPair) -> PlacedPair | None:
        """The pair as token ids; None if this tokenizer does not allow it: an end is not one token, the
        couplets differ in more than that token, line 2 has too few tokens for ROLES, or there are no words
        for control donors or rhymes."""
        ends = pair.end, pair.other
        if not set(ends) <= self._tokens.keys():
            return None
        text = pair.text(pair.end)
        encoding = encoded(self._subject, text)
        ids, other_ids = tuple(encoding.ids), self._encoded(pair, pair.other)
        second_line_start = len(text) - len(pair.second)
        # Unequal lengths are refused below, hence strict=False.
        differing = [i for i, (a, b) in enumerate(zip(ids, other_ids, strict=False)) if a != b]
        # An empty range of characters belongs to a token that the tokenizer adds.
        line_2 = [i for i, (begin, end) in enumerate(encoding.offsets) if second_line_start <= begin < end]
        # All roles but the first two lie in line 2, and each needs a token.
        if len(ids) != len(other_ids) or len(differing) != 1 or len(line_2) < len(ROLES) - 2:
            return None
        (at,) = differing
        differs_at_ends = ids[at] == self._tokens[pair.end] and other_ids[at] == self._tokens[pair.other]
        # The line break needs at least one token of its own, to be patched apart from line 2.
        line_break = tuple(range(at + 1, line_2[0]))
        if not differs_at_ends or not line_break:
            return None
        first, second, *middle, before_last, last = line_2
        same_rhyme = self._donor_words(pair, ids, at, pair.same, 0)
        third = self._donor_words(pair, ids, at, pair.third, 1)
        rhyming_words = self._tokens.keys() - set(ends)
        groups = tuple(
            tuple(self._tokens[word] for word in FAMILIES[family_of(end)] if word in rhyming_words)
            for end in ends
        )
        if not same_rhyme or not third or not all(groups):
            return None
        return PlacedPair(
            pair=pair,
            ids=ids,
            at=at,
            roles=((at,), line_break, (first,), (second,), tuple(middle), (before_last,), (last,)),
            ends=self._tokens,
            same=same_rhyme,
            third=third,
            groups=groups,
        )

    def _donor_words(
        self, pair: CoupletPair, ids: tuple[int, ...], at: int, candidates: Sequence[str], draw: int
    ) -> tuple[str, ...]:
        """Random words, at most as many as there are donors, that replace the token at position `at` of the
        couplet `ids` and leave its other tokens unchanged."""
        shuffled = chosen_at_random(candidates, len(candidates), seed=self._seed_of(pair, draw))
        fits = (
            word
            for word in shuffled
            if word in self._tokens
            and self._encoded(pair, word) == (*ids[:at], self._tokens[word], *ids[at + 1 :])
        )
        return tuple(islice(fits, self._donors))

    def _encoded(self, pair: CoupletPair, word: str) -> tuple[int, ...]:
        """Token ids of the couplet with `word` at the end of line 1."""
        return tuple(self._subject.tokenizer.encode(pair.text(word)).ids)


class CoupletEffects:
    """Effects in one result of patching couplets, in percentage points (pp) of the probability of a rhyme at
    the end of line 2."""

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
        """Change of the probability of a group of words from the unpatched couplet, pp [draw, ...].

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
        """Probability of a rhyme of the other couplet after the whole other couplet, minus that after the
        patched couplet, pp [draw]."""
        return self._change("unpatched", OTHER)[:, 1]

    @cached_property
    def effects(self) -> Floats:
        """Change of the probability of a rhyme of the other couplet by patching one role (positions of ROLES)
        after one layer, pp [draw, layer, role]."""
        return self._change("probability", OTHER)

    @cached_property
    def own_effects(self) -> Floats:
        """Change of the probability of a rhyme with the couplet's own line 1 by the same patches as
        `effects`, pp [draw, layer, role]."""
        return self._change("probability", OWN)

    @cached_property
    def ways(self) -> Floats:
        """Change of the other couplet's rhyme probability by patching each of WAYS in every layer, pp [draw,
        way]."""
        return self._change("way_probability", OTHER)

    @cached_property
    def own_ways(self) -> Floats:
        """Change of the probability of a rhyme with the couplet's own line 1 by the same patches as `ways`,
        pp [draw, way]."""
        return self._change("way_probability", OWN)

    @property
    def kl(self) -> Floats:
        """KL of next-token distributions from those without the patch, in nats, mean over positions from the
        patched one to the last but one, [draw, layer, role]; NaN without such positions."""
        return np.asarray(self._result["kl"].values, np.float64)

    @property
    def top(self) -> npt.NDArray[np.int64]:
        """Id of the most likely token at the end of line 2 under each patch, int64 [draw, layer, role]."""
        return np.asarray(self._result["top"].values, np.int64)

    @property
    def unpatched_top(self) -> npt.NDArray[np.int64]:
        """Id of the most likely token at the end of line 2 of the patched and of the other couplet, both
        without patches, int64 [draw, run]."""
        return np.asarray(self._result["unpatched_top"].values, np.int64)

    @property
    def is_known(self) -> npt.NDArray[np.bool_]:
        """Whether the model ends both couplets, without patches, on a word that rhymes with line 1 and is not
        its last word, bool [draw]."""
        return np.array(
            [
                own_top in pair.groups[OWN] and other_top in pair.groups[OTHER]
                for (own_top, other_top), pair in zip(self.unpatched_top.tolist(), self._pairs, strict=True)
            ]
        )

    @property
    def rhymes(self) -> Floats:
        """Probability that line 2 rhymes with its line 1, minus that with the other couplet's line 1 in its
        place, mean of both couplets, pp [draw]."""
        # Each group of words is compared with itself, as some rhymes have more words than others.
        own_change, other_change = (self._change("unpatched", group)[:, 1] for group in (OWN, OTHER))
        increase: Floats = (other_change - own_change) / 2
        return increase

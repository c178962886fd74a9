"""The order in which the specimen reads: mixtures of rows, one after another.

Border: settings. What a mixture means is data.py's business, when to stop train.py's.

Copying needs three things at once: a head that looks at the token before, one that looks where that token
followed before, and one that writes what it sees. Rows of everything show them too seldom to be found within
some million tokens, so data shows them one after another (Singh et al. 2024, "What needs to go right for an
induction head?", take them apart): echoes teach the token before; a few tokens in short spans over and over,
in random order, teach the rest; and then these tokens come from more and more of the vocabulary. The
embedding stands still meanwhile; moved, it would learn the few tokens of the row by heart.

One run from random weights, seed 0, up to rows of 96 tokens: of spans of 20 to 60 random tokens 23 % were
copied after 0.8 M tokens, 67 % after 1.2 M and 80 % after 2.4 M, with prose and facts among them from 0.9 M
on. Without all this, 2.9 M tokens left no induction head. What the longer phases behind it come to has not
been measured.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .data import Mixture

__all__ = ["CURRICULUM", "Phase", "phase_at", "read_curriculum"]


@dataclass(frozen=True)
class Phase:
    """A number of steps with one mixture.

    rate: what the learning rates are scaled by. embedding_rate: that of the embedding once more; 0: it stands
    still.
    """

    steps: int
    mixture: Mixture
    rate: float = 1.0
    embedding_rate: float = 1.0

    def plain(self) -> dict[str, Any]:
        """As in a curriculum's file: steps and rates, and what differs from the mixture's defaults."""
        usual = asdict(Mixture())
        changed = {name: value for name, value in asdict(self.mixture).items() if value != usual[name]}
        rates = {"rate": self.rate, "embedding_rate": self.embedding_rate}
        return {"steps": self.steps, **rates, **changed}


_FEW = Mixture(
    prose=0, facts=0, random_repeats=0.75, word_repeats=0, couplets=0, echoes=0.25, rows=64, size=32,
    long_share=0, shuffled=1, alphabet=8, pool=8,
)  # fmt: skip
_MORE = replace(_FEW, random_repeats=0.85, echoes=0.15)

CURRICULUM = (
    Phase(150, _FEW, embedding_rate=0),
    *(Phase(30, replace(_MORE, pool=2**bits), embedding_rate=0) for bits in range(4, 11)),
    Phase(
        60,
        Mixture(
            prose=0, facts=0, random_repeats=0.95, word_repeats=0, couplets=0, echoes=0.05, rows=32, size=96,
            long_share=0, shuffled=0.4, shortest_span=4, longest_span=45,
        ),
        rate=0.6,
        embedding_rate=0,
    ),
    Phase(
        600,
        Mixture(
            prose=0.42, facts=0.22, random_repeats=0.2, word_repeats=0.04, couplets=0.1, echoes=0.02, rows=32,
            size=96, long_share=0.05, shuffled=0.4, shortest_span=4, longest_span=45, narrowest=20,
            widest=45, line_end_weight=1.5,
        ),
        rate=0.6,
        embedding_rate=0.3,
    ),
    Phase(
        800,
        Mixture(
            prose=0.45, facts=0.27, random_repeats=0.12, word_repeats=0.04, couplets=0.12, rows=48, size=128,
            long_share=0, narrowest=25, widest=60, shuffled=0.2, longest_span=60,
            line_end_weight=2, own_prose=0.3,
        ),
        rate=0.5,
    ),
    Phase(
        800,
        Mixture(
            prose=0.52, facts=0.29, random_repeats=0.08, word_repeats=0.03, couplets=0.08, long_share=0.05,
            line_end_weight=2, own_prose=0.2,
        ),
        rate=0.4,
    ),
)  # fmt: skip
"""14.2 M tokens: repeats alone, then everything, in short rows and narrow lines first."""


def read_curriculum(path: Path) -> tuple[Phase, ...]:
    """The phases in a JSON file: a list of objects with `steps`, `rate` (1), `embedding_rate` (1) and any
    settings of `Mixture`."""
    phases: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))
    own = ("steps", "rate", "embedding_rate")
    return tuple(
        Phase(**{name: p.pop(name) for name in own if name in p}, mixture=Mixture(**p)) for p in phases
    )


def phase_at(phases: Sequence[Phase], step: int) -> Phase:
    """The phase of a step, the last one for steps after all of them."""
    for phase in phases:
        step -= phase.steps
        if step < 0:
            return phase
    return phases[-1]

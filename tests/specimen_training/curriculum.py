"""The order in which the specimen reads: mixtures of rows, one after another.

Border: settings. What a mixture means is data.py's business, when to stop train.py's.

Copying needs three things at once: a head that looks at the token before, one that looks where that token
followed before, and one that writes what it sees. Rows of everything show them too seldom to be found within
some million tokens, so data shows them one after another (Singh et al. 2024, "What needs to go right for an
induction head?", take them apart). Echoes teach the token before. Shuffled rows teach the rest, and all begin
with the same 8 tokens: where rows differ in theirs, "any token of this row" is the cheaper answer, and
training stays with it (Edelman et al. 2024, "The Evolution of Statistical Induction Heads"). Then the tokens
come from more and more of the vocabulary. The embedding stands still meanwhile: what serves some random
vectors serves others as well, while an embedding that moves learns the few tokens of the rows by heart.

Couplets and line breaks are learned when their share of the loss is more than the few tokens they are. With
ends weighing 1, one in fifteen rhymed after 5.9 M tokens, where one in twenty-five does by chance; with 8,
nine in ten after 0.6 M more. Of prose, which word comes next is nearly all of the loss, and the count of
characters stood still (R2 0.73 after 1.8 M tokens, 0.77 after 7.1 M). Refrains leave the breaks alone to be
learned: 0.92 after 12.2 M, 0.95 at the end.

Measured as `watch` of evaluate.py does, in the specimen's network; 0.9 M tokens are repeats alone, prose and
facts are among the rows from there on:
  rows up to 96, spans to 45    0.23 and 0.22 of random tokens copied after 0.9 M tokens (seeds 0 and 1), 0.67
                                and 0.69 after 1.2 M, 0.83 and 0.85 after 2.8 M. What is missing is length:
                                0.97 of spans of 40, 0.64 of 60, which take longer rows than were read.
  rows of 128 before the prose  0.74 after 1.2 M, 0.87 after 1.9 M (seed 0); hence they are here.
A network of 4 layers of 96, rows up to 48, after 1.0 M: 0.51; with an embedding that learns from the start,
at 8e-3 or at 2e-3, 0.00. Rows whose tokens differ left no induction head in 2 layers of 96 within 1.0 M, nor
in the specimen's 6 within 2.9 M.
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
_SHORT = Mixture(
    prose=0.45, facts=0.27, random_repeats=0.12, word_repeats=0.04, couplets=0.12, rows=48, size=128,
    long_share=0, narrowest=25, widest=60, shuffled=0.2, longest_span=60, line_end_weight=2, own_prose=0.3,
)  # fmt: skip

CURRICULUM = (
    Phase(150, _FEW, embedding_rate=0),
    *(Phase(30, replace(_MORE, pool=2**bits), embedding_rate=0) for bits in range(4, 11)),
    Phase(
        100,
        Mixture(
            prose=0, facts=0, random_repeats=0.95, word_repeats=0, couplets=0, echoes=0.05, rows=24, size=128,
            long_share=0, shuffled=0.4, shortest_span=4, longest_span=60,
        ),
        rate=0.6, embedding_rate=0,
    ),
    Phase(
        700,
        Mixture(
            prose=0.42, facts=0.22, random_repeats=0.2, word_repeats=0.04, couplets=0.1, echoes=0.02, rows=32,
            size=96, long_share=0.05, narrowest=20, widest=45, shuffled=0.4, shortest_span=4, longest_span=60,
            line_end_weight=1.5, own_prose=0.3,
        ),
        rate=0.6, embedding_rate=0.3,
    ),
    Phase(440, _SHORT, rate=0.5, embedding_rate=0.5),
    Phase(200, replace(_SHORT, couplets=0.16, end_weight=8), rate=0.5, embedding_rate=0.5),
    Phase(
        700,
        replace(_SHORT, couplets=0.06, end_weight=8, random_repeats=0.06, word_repeats=0.02, refrains=0.5),
        rate=0.5, embedding_rate=0.5,
    ),
    Phase(
        1300,
        Mixture(
            prose=0.42, facts=0.22, random_repeats=0.06, word_repeats=0.02, couplets=0.06, long_share=0.05,
            line_end_weight=3, own_prose=0.2, end_weight=8, refrains=0.22,
        ),
        rate=0.4, embedding_rate=0.5,
    ),
)  # fmt: skip
"""22.1 M tokens: repeats alone, then everything, in short rows and narrow lines first."""


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

"""The order in which the specimen reads: mixtures of rows, one after another.

Border: settings. What a mixture means is data.py's business, when to stop train.py's.

Short rows come first, because abilities that need several parts at once, copying above all, are found sooner
where most of a row shows them. Measured from random weights, rows of repeats alone, after 0.15 M tokens: of
what can be copied 5 % is right where rows hold two or three short spans in random order, 1.4 % where they
hold three to eight. One span over and over, after 1.2 M tokens of everything, made heads that look at the
previous token within 0.3 M more, but it is copied by its period: 1.5 M left no induction head. In random
order only the token itself says where to look.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .data import Mixture

__all__ = ["CURRICULUM", "Phase", "phase_at", "read_curriculum"]


@dataclass(frozen=True)
class Phase:
    """A number of steps with one mixture; `rate` scales the learning rates, `embedding_rate` once more that of
    the embedding."""

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


CURRICULUM = (
    Phase(
        500,
        Mixture(
            prose=0, facts=0, random_repeats=1, word_repeats=0, couplets=0, rows=96, size=32, long_share=0,
            shuffled=0.85, shortest_span=3, longest_span=10,
        ),
    ),
    Phase(
        700,
        Mixture(
            prose=0.35, facts=0.2, random_repeats=0.25, word_repeats=0.05, couplets=0.15, rows=64, size=64,
            long_share=0, narrowest=20, widest=40, shuffled=0.4, shortest_span=4,
            longest_span=30, line_end_weight=1.5, own_prose=0.3,
        ),
        rate=0.6,
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
"""15.9 M tokens: repeats alone, then everything, in short rows and narrow lines first."""


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

"""Does a line's end hang on a plan made before it is written? Features of the rhyme, exchanged at every
position.

At each position of a poem the features of the expected rhyme are suppressed and one of another word is
injected, at all layers they write to; the probability of that word at the poem's end is followed (figure 13
of Lindsey et al. 2025, "On the Biology of a Large Language Model"; stages/features/sweeps.py). Where it
rises, the end of the line reads what was put there.

The suppression moves with the injection. Prompts end in a space of their own, as in the published runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..store.errors import ConfigError
from .answers import plain
from .feature_injection import Planned, feature_json
from .feature_presets import chosen_preset
from .settings import setting
from .workflow import Workflow

if TYPE_CHECKING:
    import xarray as xr
    from rich.table import Table

    from ..stages.forward.model import Model
    from .report import Element

__all__ = ["PlanningInPoems", "Settings"]

SMALLEST = 1e-12
"""Probability from which on a rise is marked."""


@dataclass(frozen=True)
class Settings:
    """What `--set` can change; what is left empty is the preset's."""

    preset: str = setting("specimen", "published experiment, or the specimen's own")
    model: str = setting("", "hub id or directory")
    dictionary: str = setting("", "transcoders: directory or org/repo")
    prompt: str = setting("", "poem without its last word")
    suppress: tuple[str, ...] = setting((), 'features to suppress, layer:index; "none" for no suppression')
    inject: str = setting("", "feature to inject, layer:index")
    suppress_word: str = setting("", "word the suppressed features stand for, one token")
    inject_word: str = setting("", "word the injected feature stands for, one token")
    strength: float = setting(0.0, "units added and taken away; 0: the preset's, 10 in the published ones")
    dtype: str = setting("float32", "what the model computes in")

    def __post_init__(self) -> None:
        if self.strength < 0:
            raise ConfigError(f"expected a strength above 0, found {self.strength}")


class PlanningInPoems(Workflow):
    """Suppress and inject, position by position."""

    name = "planning_in_poems"
    question = "Does a line's end hang on a plan made before it is written?"
    settings_type = Settings

    def __init__(self, settings: Settings, model: Model | None = None) -> None:
        super().__init__(settings)
        preset = chosen_preset(settings)
        self.planned = Planned(preset, model, settings.dtype, ending=preset.ending)
        words = (preset.inject_word, preset.suppress_word)
        self.nodes = {"sweep": self.planned.sweep(self.planned.doses, (preset.strength,), words)}

    @cached_property
    def sweep(self) -> xr.Dataset:
        """The one strength, [position] and [position, word]."""
        return self.result("sweep").load().isel(strength=0)

    @property
    def probability(self) -> xr.DataArray:
        """Of the injected word at the end, [position]."""
        logprob = self.sweep["logprob"].isel(word=0)
        return logprob.copy(data=np.exp(logprob.values)).assign_attrs(
            units="1", long_name=f"P({self.planned.preset.inject_word!r})"
        )

    @property
    def baseline(self) -> float:
        """The same without injection."""
        return float(np.exp(self.sweep["baseline_logprob"].isel(word=0)))

    @property
    def best(self) -> int:
        """Position at which the injection does most, the earliest of several."""
        return int(self.probability.values.argmax())

    def tables(self) -> list[Table]:
        """The positions that change most, in their order."""
        from rich.table import Table

        planned, preset = self.planned, self.planned.preset
        off = " ".join(map(str, planned.suppress)) or "nothing"
        title = (
            f"{planned.heading}: at each position {off} suppressed and {planned.inject} "
            f"({preset.inject_word!r}) injected, strength {preset.strength:g}"
        )
        table = Table(title=title, box=None, pad_edge=False)
        columns = (
            "position",
            "token",
            f"p({plain(preset.inject_word)})",
            f"p({plain(preset.suppress_word)})",
        )
        for column in (*columns, "KL", "most likely", ""):
            table.add_column(column, justify="left" if column in ("token", "most likely", "") else "right")
        shown = np.sort(np.argsort(-self.probability.values, kind="stable")[:12]).tolist()
        for place in shown:
            here = self.sweep.isel(position=place)
            logprob = here["logprob"].values
            table.add_row(
                str(place),
                plain(planned.tokens[place]),
                *(f"{p:.3e}" for p in np.exp(logprob)),
                f"{float(here['kl']):.3f}",
                plain(planned.subject.tokenizer.decode_token(int(here["top_id"]))),
                _mark(float(np.exp(logprob[0])), self.baseline),
            )
        best = float(self.probability[self.best])
        table.caption = (
            f"without injection {self.baseline:.3e}; most at position {self.best}, {best:.3e}, "
            f"{best / max(self.baseline, SMALLEST):.3g} times as much"
        )
        return [table]

    def draw(self, folder: Path) -> list[Path]:
        """Probability by position."""
        from .figures_features import sweep_page

        planned = self.planned
        return [
            self.figure(
                folder / "planning_in_poems.png",
                lambda: sweep_page(
                    self.probability.values,
                    self.baseline,
                    planned.tokens,
                    word=planned.preset.inject_word,
                    feature=str(planned.inject),
                    model=planned.subject.name,
                    footer=self.footer,
                ),
            )
        ]

    def elements(self) -> list[Element]:
        """The table, and probability by position."""
        from .report import Lines, from_rich

        label = f"Probability of {self.planned.preset.inject_word!r} at the end, by position of the injection"
        return [
            *map(from_rich, self.tables()),
            Lines.of(self.probability.expand_dims("strength"), title=label, low=0.0),
        ]

    def to_json(self) -> dict[str, Any]:
        """The fields of candle-mi's example, and what else the sweep tells."""
        planned, preset = self.planned, self.planned.preset
        sweep = self.sweep
        return {
            **self.header(),
            "model": planned.subject.files.name,
            "clt_repo": preset.dictionary,
            "prompt": planned.prompt,
            "tokens": planned.tokens,
            "suppress_word": preset.suppress_word,
            "inject_word": preset.inject_word,
            "suppress_features": [feature_json(feature) for feature in planned.suppress],
            "inject_feature": feature_json(planned.inject),
            "strength": preset.strength,
            "baseline_prob": self.baseline,
            "sweep": [
                {
                    "position": place,
                    "token": planned.tokens[place],
                    "prob": float(self.probability[place]),
                    "suppress_word_prob": float(np.exp(sweep["logprob"][place, 1])),
                    "kl_divergence": float(sweep["kl"][place]),
                    "l2_distance": float(sweep["distance"][place]),
                }
                for place in range(len(planned.tokens))
            ],
            "max_position": self.best,
            "max_prob": float(self.probability[self.best]),
        }


def _mark(probability: float, baseline: float) -> str:
    """*** where the word became ten times likelier than that again, * where likelier by as much as it was."""
    rise = probability - baseline
    if rise <= SMALLEST:
        return ""
    return "***" if rise > 10 * baseline else "*" if rise > baseline else ""


WORKFLOW = PlanningInPoems

"""Can a plan be taken back? One word's features injected, then another's into the last layers, ever stronger.

At the planning site the features of the expected word are suppressed and a word is committed to; at the same
position a second feature is injected, but only into layers from a later one on. Followed are both words at
the prompt's end and how far the attention to the site moved (stages/features/effects/sweeps.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..stages.features.effects.sweeps import Dose
from ..store.errors import ConfigError
from .answers import plain
from .feature_injection import Planned, feature_json
from .feature_presets import chosen_preset
from .settings import setting
from .workflow import Workflow

if TYPE_CHECKING:
    import xarray as xr
    from rich.table import Table

    from ..stages.forward.models.model import Model
    from .report import Element

__all__ = ["CorrectionTest", "Settings"]


@dataclass(frozen=True)
class Settings:
    """What `--set` can change; what is left empty is the preset's."""

    preset: str = setting("specimen", "published experiment, or the specimen's own")
    model: str = setting("", "hub id or directory")
    dictionary: str = setting("", "transcoders: directory or org/repo")
    prompt: str = setting("", "prompt without its last word")
    suppress: tuple[str, ...] = setting((), 'features to suppress, layer:index; "none" for no suppression')
    inject: str = setting("", "feature of the word committed to, layer:index")
    inject_word: str = setting("", "the word committed to, one token")
    correct: str = setting("", "feature of the correction, layer:index")
    correct_word: str = setting("", "the correction, one token")
    correct_from_layer: int = setting(0, "first layer the correction is written to; 0: the preset's")
    site: str = setting("", "where all of it is injected: a token of the prompt, or its position")
    strength: float = setting(0.0, "strength of the commitment; 0: the preset's, 10 in the published ones")
    max_strength: float = setting(20.0, "largest strength of the correction")
    steps: int = setting(12, "strengths above 0, evenly spaced up to the largest")
    head: str = setting("", "head followed, layer:head; none: 21:5, or the one that moves most")
    dtype: str = setting("float32", "what the model computes in")

    def __post_init__(self) -> None:
        if self.steps < 1 or self.max_strength <= 0 or self.strength < 0:
            raise ConfigError(
                f"expected steps of at least 1 and strengths above 0, found {self.steps}, "
                f"{self.max_strength} and {self.strength}"
            )


class CorrectionTest(Workflow):
    """Commit, then correct."""

    name = "correction_test"
    question = "Can a plan be taken back?"
    settings_type = Settings

    def __init__(self, settings: Settings, model: Model | None = None) -> None:
        super().__init__(settings)
        preset = chosen_preset(settings)
        if not preset.correct:
            raise ConfigError(
                f"the preset {settings.preset!r} has no correction; set correct, correct_word and "
                "correct_from_layer, or use preset gemma2-2b-426k"
            )
        self.planned = planned = Planned(preset, model, settings.dtype, ending=preset.ending)
        self.correct = planned.dictionary.feature(preset.correct)
        if preset.correct_from_layer < self.correct.layer:
            raise ConfigError(
                f"expected correct_from_layer to be at least {self.correct.layer}, the layer of "
                f"{self.correct}, found {preset.correct_from_layer}"
            )
        committed = tuple(
            Dose(dose.layer, dose.index, fixed=dose.factor * preset.strength) for dose in planned.doses
        )
        correction = Dose(
            self.correct.layer, self.correct.index, factor=1.0, from_layer=preset.correct_from_layer
        )
        strengths = tuple(step * settings.max_strength / settings.steps for step in range(settings.steps + 1))
        self.nodes = {
            "sweep": planned.sweep(
                (*committed, correction),
                strengths,
                (preset.inject_word, preset.correct_word),
                positions=(planned.site,),
                edge=(planned.last, planned.site),
            )
        }

    @cached_property
    def sweep(self) -> xr.Dataset:
        """[strength, ...]."""
        return self.result("sweep").load().isel(position=0)

    @property
    def shift(self) -> xr.DataArray:
        """Sum of |change of the edge's weight| over heads and layers, [strength]."""
        change = abs(self.sweep["attention"] - self.sweep["baseline_attention"])
        found: xr.DataArray = change.sum(("layer", "head"))
        return found.assign_attrs(units="1", long_name="sum of |change of weight|")

    @cached_property
    def head(self) -> tuple[int, int] | None:
        """The head followed; None where 21:5 was meant and the model is smaller."""
        config = self.planned.subject.config
        text = self.settings.head or "21:5"
        layer, _, head = text.partition(":")
        if not (layer.isdecimal() and head.isdecimal()):
            raise ConfigError(f"expected a head as layer:head, such as 21:5, found {text!r}")
        if int(layer) < config.num_layers and int(head) < config.axis_sizes["head"]:
            return int(layer), int(head)
        if self.settings.head:
            raise ConfigError(
                f"expected a head of {config.num_layers} layers and {config.axis_sizes['head']} heads, "
                f"found {text}"
            )
        return None

    def tables(self) -> list[Table]:
        """Every strength of the correction."""
        from rich.table import Table

        planned, preset = self.planned, self.planned.preset
        words = (preset.inject_word, preset.correct_word)
        title = (
            f"{plain(planned.heading)}: {planned.inject} ({words[0]!r}) committed at "
            f"'{plain(planned.tokens[planned.site])}' ({planned.site}), then {self.correct} ({words[1]!r}) "
            f"into layers from {preset.correct_from_layer} on"
        )
        table = Table(title=title, box=None, pad_edge=False)
        for column in (
            "strength",
            *(f"p({plain(word)})" for word in words),
            "most likely",
            "attention moved",
        ):
            table.add_column(column, justify="left" if column == "most likely" else "right")
        for row in self._points():
            table.add_row(
                f"{row['correct_strength']:.2f}",
                f"{row['p_commit_word']:.3e}",
                f"{row['p_correct_word']:.3e}",
                f"{plain(row['top1_token'])!r} {row['top1_prob']:.3f}",
                f"{row['total_routing_shift']:.4f}",
            )
        before = np.exp(self.sweep["baseline_logprob"].values)
        table.caption = f"without any injection {before[0]:.3e} and {before[1]:.3e}"
        return [table]

    def draw(self, folder: Path) -> list[Path]:
        """Both words and the attention, by strength."""
        from .figures_features import correction_page

        planned, preset = self.planned, self.planned.preset
        probability = np.exp(self.sweep["logprob"].values)
        before = np.exp(self.sweep["baseline_logprob"].values)
        return [
            self.figure(
                folder / "correction_test.png",
                lambda: correction_page(
                    self.sweep["strength"].values.tolist(),
                    probability[:, 0],
                    probability[:, 1],
                    self.shift.values,
                    words=(preset.inject_word, preset.correct_word),
                    baseline=(float(before[0]), float(before[1])),
                    model=planned.subject.name,
                    footer=self.footer,
                ),
            )
        ]

    def elements(self) -> list[Element]:
        """The table, and both words by strength."""
        from .report import Lines, from_rich

        words = (self.planned.preset.inject_word, self.planned.preset.correct_word)
        logprob = self.sweep["logprob"].assign_coords(word=list(words))
        probability = logprob.copy(data=np.exp(logprob.values))
        probability = probability.transpose("word", "strength").assign_attrs(
            units="1", long_name="probability"
        )
        return [*map(from_rich, self.tables()), Lines.of(probability, title="Which word wins", low=0.0)]

    def to_json(self) -> dict[str, Any]:
        """The fields of candle-mi's example."""
        planned, preset = self.planned, self.planned.preset
        points = self._points()
        before = np.exp(self.sweep["baseline_logprob"].values)
        return {
            **self.header(),
            "model_id": planned.subject.files.name,
            "clt_repo": preset.dictionary,
            "prompt": planned.prompt,
            "planning_site": planned.site,
            "output_position": planned.last,
            "n_layers": planned.subject.config.num_layers,
            "n_heads": planned.subject.config.axis_sizes["head"],
            "commit_feature": feature_json(planned.inject),
            "commit_word": preset.inject_word,
            "suppress_features": [feature_json(feature) for feature in planned.suppress],
            "commit_strength": preset.strength,
            "correct_feature": feature_json(self.correct),
            "correct_word": preset.correct_word,
            "correct_from_layer": preset.correct_from_layer,
            "routing_head": list(self.head) if self.head else None,
            "baseline": self._point(
                before, self.sweep["baseline_top_id"], self.sweep["baseline_top_logprob"], 0.0, 0.0
            ),
            "commitment_only": points[0],
            "correction_sweep": points,
        }

    def _points(self) -> list[dict[str, Any]]:
        found = []
        change = self.sweep["attention"] - self.sweep["baseline_attention"]
        for i, strength in enumerate(self.sweep["strength"].values.tolist()):
            here = self.sweep.isel(strength=i)
            moved = 0.0 if self.head is None else float(change[i, self.head[0], self.head[1]])
            point = self._point(
                np.exp(here["logprob"].values),
                here["top_id"],
                here["top_logprob"],
                moved,
                float(self.shift[i]),
            )
            found.append({"correct_strength": strength, **point})
        return found

    def _point(self, words: Any, top: Any, logprob: Any, moved: float, shift: float) -> dict[str, Any]:
        return {
            "p_commit_word": float(words[0]),
            "p_correct_word": float(words[1]),
            "top1_token": self.planned.subject.tokenizer.decode_token(int(top)),
            "top1_prob": float(np.exp(logprob)),
            "routing_head_delta": moved,
            "total_routing_shift": shift,
        }


WORKFLOW = CorrectionTest

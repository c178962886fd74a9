"""How does the answer move as one position attends to another more or less? Dose-response of attention.

Multiplies the weight of one attention edge by several doses, inside the pass and renormalised
(stages/steering.py), and measures the attention that comes of it and what the last position predicts. A
calibration says which factor reaches a wanted attention: read linearly, interpolated on the measured curve,
and exactly.

Defaults: the middle layer, all heads, the edge from the last token to the first, twice its attention as the
aim; every other layer is run for comparison. A target of several tokens is followed by its first piece
(logits) and by all of them (probability), never by its last.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..stages.positions import position_of
from ..stages.steering import (
    DOSE_LEVELS,
    DoseResponse,
    DoseResponseCurve,
    SteeringCalibration,
    exact_factor,
)
from ..store.errors import ConfigError, InterventionError
from .answers import (
    answer_pieces,
    encoded,
    fact,
    named,
    number,
    plain,
    target_json,
    top_changed_json,
)
from .settings import setting
from .subject import Subject
from .workflow import Workflow

if TYPE_CHECKING:
    import xarray as xr
    from rich.table import Table

    from ..stages.forward.model import Model
    from .report import Element

__all__ = ["Settings", "SteeringDoseResponse"]


@dataclass(frozen=True)
class Settings:
    """What `--set` can change."""

    model: str = setting("specimen", 'hub id, directory, or "specimen"')
    prompt: str = setting("", "prompt to read; none: a shipped fact, or the capital of France")
    target: str = setting("", "word whose logit is followed; may be empty")
    layer: int | None = setting(None, "layer told in full; none: the middle one")
    query: int | str = setting(
        "last", 'position that reads: an index, "first", "last", or a phrase of the prompt'
    )
    key: int | str = setting("first", "position that is read")
    doses: tuple[float, ...] = setting(DOSE_LEVELS, "factors of the edge's weight")
    ratio: float = setting(2.0, "attention to aim at, as a multiple of what the edge has")
    window: int = setting(1, "layers steered together, from each layer on")
    sweep: bool = setting(True, "also steer every other layer")
    top_k: int = setting(10, "changed tokens kept of each run")
    dtype: str = setting("float32", "what the model computes in")

    def __post_init__(self) -> None:
        if self.ratio <= 0:
            raise ConfigError(f"expected ratio to be above 0, found {self.ratio}")
        if self.top_k < 1:
            raise ConfigError(f"expected top_k to be at least 1, found {self.top_k}")


class SteeringDoseResponse(Workflow):
    """One edge at several doses."""

    name = "steering_dose_response"
    question = "How does the answer move as one position attends to another more or less?"
    settings_type = Settings

    def __init__(self, settings: Settings, model: Model | None = None) -> None:
        super().__init__(settings)
        self.subject = Subject(model or settings.model, settings.dtype)
        self.prompt, self.target = fact(settings.model, settings.prompt, settings.target)
        self.encoding = encoded(self.subject, self.prompt)
        self.pieces = answer_pieces(self.subject, self.prompt, self.target)
        layers = self.subject.config.num_layers
        self.layer = layers // 2 if settings.layer is None else settings.layer
        if not 0 <= self.layer <= layers - settings.window:
            raise ConfigError(
                f"expected a layer in 0..{layers - settings.window} (with a window of {settings.window}), "
                f"found {self.layer}"
            )
        self.edge = (position_of(self.encoding, settings.query), position_of(self.encoding, settings.key))
        experiment = DoseResponse(
            tuple(self.encoding.ids),
            (self.edge,),
            doses=settings.doses,
            layers=None if settings.sweep else (self.layer,),
            window=settings.window,
            target=self.pieces,
            top_k=settings.top_k,
        )
        experiment.cells(self.subject.config)  # wrong settings are told now, not when it runs
        self.nodes = {"response": experiment.on(model or settings.model, dtype=settings.dtype)}

    @cached_property
    def response(self) -> xr.Dataset:
        """Every layer at every dose, [layer, dose]."""
        return self.result("response").load()

    @property
    def told(self) -> xr.Dataset:
        """The one layer, [dose]."""
        return self.response.sel(layer=self.layer)

    @property
    def curve(self) -> DoseResponseCurve:
        """Doses, attention and KL of the one layer."""
        return DoseResponseCurve.of(
            self.response, self.layer, sample_id=self.prompt, condition=f"edge {self.edge}"
        )

    @property
    def calibration(self) -> SteeringCalibration:
        """What the edge has, and what to aim at: `ratio` times that, at most all of the row."""
        baseline = float(self.told["baseline_attention"])
        return SteeringCalibration(min(1.0, self.settings.ratio * baseline), baseline, self.layer)

    @property
    def exact(self) -> float | None:
        """Factor that takes the mean over heads exactly to the aim; None if no factor does, or if several
        layers are steered, as those above the first then have other inputs."""
        if self.settings.window > 1:
            return None
        try:
            return exact_factor(self.told["baseline_head_attention"].values, self.calibration.source_baseline)
        except InterventionError:
            return None

    @property
    def tokens(self) -> list[str]:
        """Text of each token of the prompt."""
        return named(self.subject, self.encoding.ids)

    def tables(self) -> list[Table]:
        """The doses at the one layer."""
        from rich.table import Table

        told, names = self.told, [plain(self.tokens[place]) for place in self.edge]
        title = (
            f"{self.subject.name}, layer {self.layer}: {names[0]!r} ({self.edge[0]}) reads {names[1]!r} "
            f"({self.edge[1]}), mean weight {float(told['baseline_attention']):.3f}"
        )
        table = Table(title=title, box=None, pad_edge=False)
        for column in ("dose", "attention", "if linear", "KL", "logit diff", "p(target)", "changed most"):
            table.add_column(column, justify="left" if column == "changed most" else "right", no_wrap=True)
        for dose in told["dose"].values.tolist():
            here = told.sel(dose=dose)
            token = plain(self.subject.tokenizer.decode_token(int(here["changed_id"][0])))
            change = float(here["changed_other"][0] - here["changed_baseline"][0])
            table.add_row(
                f"{dose:g}x",
                f"{float(here['attention']):.3f}",
                f"{dose * float(told['baseline_attention']):.3f}",
                f"{float(here['kl']):.5f}",
                _shown(here["logit_diff"], "+.4f"),
                _shown(np.exp(here["target_logprob"]), ".4f"),
                f"{token!r} {100 * change:+.2f} pp",
            )
        table.caption = self._calibrated()
        return [table]

    def draw(self, folder: Path) -> list[Path]:
        """Attention and KL by dose, the one layer among the others."""
        from .figures_attention import dose_page

        return [
            self.figure(
                folder / "steering_dose_response.png",
                lambda: dose_page(
                    self.response,
                    [self.tokens[place] for place in self.edge],
                    layer=self.layer,
                    prompt=self.prompt,
                    model=self.subject.name,
                    footer=self.footer,
                ),
            )
        ]

    def elements(self) -> list[Element]:
        """The doses at the one layer, and every layer's curves."""
        from .report import Lines, from_rich

        names = [f"{self.tokens[place]!r} ({place})" for place in self.edge]
        titles = {"attention": f"How much {names[0]} then reads {names[1]}", "kl": "How far the answer moves"}
        curves = [
            Lines.of(self.response[name].transpose("layer", "dose"), title=title, low=0.0)
            for name, title in titles.items()
        ]
        return [*map(from_rich, self.tables()), *curves]

    def to_json(self) -> dict[str, Any]:
        """What candle-mi's example prints, as fields, and where it all comes from."""
        config, told, calibration = self.subject.config, self.told, self.calibration
        aim = calibration.source_baseline
        return {
            **self.header(),
            "model_id": self.subject.name,
            "prompt": self.prompt,
            "tokens": self.tokens,
            "n_layers": config.num_layers,
            "n_heads": config.axis_sizes["head"],
            "target_layer": self.layer,
            "edge": list(self.edge),
            **target_json(self.subject, self.target, self.pieces),
            "baseline_p_target": number(np.exp(told["baseline_target_logprob"])),
            "baseline_attention": calibration.target_baseline,
            "points": self._points(told, changed=True),
            "calibration": {
                "aim": aim,
                "scale_factor_linear": calibration.scale_factor_to_source(),
                "scale_factor_interpolated": self.curve.scale_for_target(aim),
                "scale_factor_exact": self.exact,
                "dose_levels_absolute_linear": calibration.dose_levels_absolute,
                "dose_levels_absolute_exact": calibration.dose_levels_exact,
            },
            "layers": [
                {
                    "layer": layer,
                    "baseline_attention": float(self.response["baseline_attention"].sel(layer=layer)),
                    "points": self._points(self.response.sel(layer=layer)),
                }
                for layer in self.response["layer"].values.tolist()
            ],
        }

    def _points(self, part: xr.Dataset, *, changed: bool = False) -> list[dict[str, Any]]:
        found = []
        for dose in part["dose"].values.tolist():
            here = part.sel(dose=dose)
            point = {
                "scale_factor": dose,
                "attention_level": float(here["attention"]),
                "kl_divergence": float(here["kl"]),
                "target_logit_diff": number(here["logit_diff"]),
                "p_target": number(np.exp(here["target_logprob"])),
            }
            if changed:
                point["top_changed"] = top_changed_json(self.subject, here, "steered_prob")
            found.append(point)
        return found

    def _calibrated(self) -> str:
        calibration, exact = self.calibration, self.exact
        interpolated = self.curve.scale_for_target(calibration.source_baseline)
        return (
            f"to attend {calibration.source_baseline:.3f}: {calibration.scale_factor_to_source():.3g}x if "
            f"doses were linear, {_or(interpolated, 'outside these doses')} interpolated, "
            f"{_or(exact, 'out of reach')} exactly (rows are renormalised)"
        )


def _shown(value: Any, form: str) -> str:
    """A number, or a dash for one there is not."""
    found = number(value)
    return "–" if found is None else format(found, form)


def _or(factor: float | None, otherwise: str) -> str:
    return otherwise if factor is None else f"{factor:.3g}x"


WORKFLOW = SteeringDoseResponse

"""Where is a fact recalled when its subject is drowned in noise? Causal tracing.

Noise on the embeddings of the subject takes the answer away; then one state of the clean run is put back,
layer by layer and position by position, and the answer's probability says how much of it returns
(stages/causal/grids/tracing.py; Meng et al. 2022, "Locating and Editing Factual Associations in GPT", section
2). Numbers are means over several noises.

Defaults: a shipped fact on the specimen, for other models candle-mi's France. Noise as in the paper, 3
standard deviations of the embeddings, on 10 samples; attention and MLP outputs are put back in windows of a
fifth of the layers, as its 10 of 48 are. An answer of several tokens is followed by its first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..stages.causal.grids.patching import common_ends
from ..stages.causal.grids.patching_grid import HIDDEN_KINDS
from ..stages.causal.grids.patching_metrics import Probability
from ..stages.causal.grids.tracing import CausalTracing
from ..stages.corpus.positions import phrase_tokens
from ..stages.logits.lens import format_probability, format_token
from ..store.errors import ConfigError
from .material.answers import FRANCE, SPECIMEN, answer_pieces, encoded, named, target_json
from .material.fact_pairs import shipped_pairs
from .material.places import NAMES, check_kinds
from .settings import Count, FactSettings, Natural, Positive, setting
from .views import Data, Heatmap, Table, View, together
from .workflow import ModelWorkflow

if TYPE_CHECKING:
    import xarray as xr

    from ..pipeline.nodes import ResultNode

__all__ = ["CausalTrace", "CausalTraceSettings"]

IN_WINDOWS = ("attn_out", "mlp_out")
"""Kinds that are restored in several layers together: one alone carries little."""


@dataclass(frozen=True)
class CausalTraceSettings(FactSettings):
    """What `--set` can change."""

    subject: str = setting("", "phrase of the prompt that gets noise; none: that of the default prompt")
    kinds: tuple[str, ...] = setting(("resid_post", "attn_out", "mlp_out"), "what is put back")
    window: Natural = setting(0, "layers of attention or MLP put back together; 0: a fifth of them")
    multiplier: Positive = setting(3.0, "noise, in standard deviations of the embeddings")
    samples: Count = setting(10, "noises tried")
    seed: Natural = setting(0, "of the noise")

    def __post_init__(self) -> None:
        check_kinds(self.kinds, HIDDEN_KINDS)
        given = {name: bool(getattr(self, name)) for name in ("prompt", "target", "subject")}
        if len(set(given.values())) > 1:
            found = " and ".join(name for name, is_given in given.items() if is_given)
            raise ConfigError(
                f"expected a prompt with its target and subject, or none of them, found {found}"
            )


class CausalTrace(ModelWorkflow):
    """One grid of restored states per kind."""

    name = "causal_tracing"
    question = "Where is a fact recalled when its subject is drowned in noise?"
    settings_type = CausalTraceSettings
    settings: CausalTraceSettings

    def plan(self) -> Mapping[str, ResultNode]:
        """An experiment per kind, as windows differ."""
        chosen = self.settings
        self.prompt, self.target = self._fact()
        self.pieces = answer_pieces(self.subject, self.prompt, self.target)
        self.window = chosen.window or max(1, round(self.subject.config.num_layers / 5))
        shared: dict[str, Any] = {
            "tokens": self.tokens,
            "subject": self.noised,
            "metrics": (Probability(self.pieces[0]),),
            **{name: getattr(chosen, name) for name in ("multiplier", "samples", "seed")},
        }
        return {
            kind: self.on_model(CausalTracing(kinds=(kind,), window=self.window_of(kind), **shared))
            for kind in chosen.kinds
        }

    def window_of(self, kind: str) -> int:
        """Layers of a kind that are put back together."""
        return self.window if kind in IN_WINDOWS else 1

    def _fact(self) -> tuple[str, str]:
        """Prompt and target; tokens, and positions that get noise, are kept beside."""
        given = self.settings
        if not given.prompt and given.model == SPECIMEN:
            pair = shipped_pairs(self.subject)[0]
            texts = [pair["original_prompt"], pair["counterfactual_prompt"]]
            ids, others = (tuple(encoded(self.subject, text).ids) for text in texts)
            start, end = common_ends(ids, others)
            self.tokens, self.noised = ids, tuple(range(start, len(ids) - end))
            return texts[0], pair["gt_original_target"]
        prompt, target = (given.prompt, given.target) if given.prompt else FRANCE
        encoding = encoded(self.subject, prompt)
        self.tokens = tuple(encoding.ids)
        self.noised = tuple(phrase_tokens(encoding, given.subject or "France"))
        return prompt, target

    def views(self) -> Iterator[View]:
        """The answer's probability by place for each kind, and the best places."""
        texts = [format_token(text) for text in named(self.subject, self.tokens)]
        found = {kind: self.result(kind).load() for kind in self.settings.kinds}
        runs = next(iter(found.values()))["unpatched"].sel(metric="probability")
        clean, noised = (float(runs.sel(run=run)) for run in ("clean", "corrupted"))
        best = [_best(kind, grid) for kind, grid in found.items()]
        word = format_token(named(self.subject, self.pieces[:1])[0])
        shares = f"{format_probability(clean)} clean, {format_probability(noised)} noised"
        yield Data(json=self._about(clean, noised, next(iter(found.values()))) | {"best": best})
        first, last = self.noised[0], self.noised[-1]
        panels = [
            Heatmap.of(
                grid["probability"].transpose("layer", "position"),
                NAMES[kind],
                f"probability of {word!r} with {_windowed(self.window_of(kind))} of the clean run put back; "
                f"{shares}",
                sources=(kind,),
                columns=tuple(f"{text} ({place})" for place, text in enumerate(texts)),
                column_name="token",
                value_name=f"probability of {word!r}",
                low=min(clean, noised),
                high=max(clean, noised),
                framed=((0, first, grid.sizes["layer"] - 1, last),),
                frame_name="noised",
                json={kind: {"probability": grid["probability"], "std": grid.get("probability_std")}},
            )
            for kind, grid in found.items()
        ]
        title = f"Where {self.subject.name} recalls {word!r}: {format_token(self.prompt)!r}"
        yield from together("causal_tracing", title, *panels)
        yield Table.of(
            best,
            ("put back", lambda one: NAMES[one["kind"]]),
            ("layer", "layer", "d"),
            ("at", lambda one: f"{texts[one['position']]} ({one['position']})"),
            ("probability", "probability", format_probability),
            ("of what was lost", "restored", "{:.0%}".format),
            title=f"{self.subject.name}: {self.prompt!r} with noise on {self._noised_text(texts)!r}",
            caption=f"the best place of each kind; {word!r} {shares}",
        )

    def _noised_text(self, texts: list[str]) -> str:
        return "".join(texts[place] for place in self.noised).strip()

    def _about(self, clean: float, noised: float, grid: xr.Dataset) -> dict[str, Any]:
        """What is asked, and the two runs nothing was put back in."""
        return {
            **self.subject.about,
            "prompt": self.prompt,
            "tokens": named(self.subject, self.tokens),
            "subject_positions": self.noised,
            "window": self.window,
            "standard_deviation_of_noise": grid.attrs["standard_deviation_of_noise"],
            "clean_probability": clean,
            "noised_probability": noised,
            **target_json(self.subject, self.target, self.pieces),
        }


def _best(kind: str, grid: xr.Dataset) -> dict[str, Any]:
    """The place that restores most, the earliest of equal ones; restored: 0 as noised, 1 as clean."""
    values = grid["probability"].transpose("layer", "position").values
    layer, position = np.unravel_index(int(values.argmax()), values.shape)
    clean, noised = grid["unpatched"].sel(metric="probability", run=["clean", "corrupted"]).values.tolist()
    return {
        "kind": kind,
        "layer": int(grid["layer"][layer]),
        "position": int(grid["position"][position]),
        "probability": float(values[layer, position]),
        "restored": (float(values[layer, position]) - noised) / (clean - noised) if clean != noised else None,
    }


def _windowed(layers: int) -> str:
    return "the state" if layers == 1 else f"{layers} layers"


WORKFLOW = CausalTrace

"""Does a push heal? A contrastive steering vector added at one layer, and how soon later layers absorb it.

The vector of a layer is the residual state of the prompt minus that of a counterpart, at one position;
added to the prompt's own run at each layer by itself and at several strengths, it is followed through the
layers above (stages/causal/convergence.py). Told: the matrix of cosines with the undisturbed run, the
layer at which each push is absorbed, and how strength changes that at the deepest layer that still
absorbs it.

Defaults: the first shipped fact and its likest counterpart, the last position, absorbed at a cosine of 0.95.
A target of several tokens has the probability of all its pieces, never that of its last.

`batch_file` names several experiments (convergence_batch.py). One that cannot be run is left out, with the
reason in the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from ..stages.causal.convergence import (
    ABSORBED,
    PushedStates as Experiment,
    absorption_layer,
    best_layer,
    convergence_label,
)
from ..stages.corpus.positions import first_difference, position_of
from ..stages.logits.lens import format_probability, format_token
from ..store.errors import ConfigError, MizarrError
from .material.answers import answer_pieces, counterpart, encoded, fact, named, number, target_json
from .material.convergence_batch import FIELDS, read_batch
from .settings import FactSettings, setting
from .views import Choice, Data, Figure, Heatmap, Line, Lines, Table, View, dash
from .workflow import ModelWorkflow

if TYPE_CHECKING:
    import xarray as xr

    from ..pipeline.nodes import ResultNode

__all__ = ["Case", "PushedStatesSettings", "PushedStates"]


@dataclass(frozen=True)
class PushedStatesSettings(FactSettings):
    """What `--set` can change."""

    contrastive: str = setting("", "counterpart of the prompt; none: one of as many tokens")
    inject_position: int | str = setting(
        "last", 'where the vector is added: "last", "auto" (first differing token), an index, or a phrase'
    )
    threshold: Annotated[float, msgspec.Meta(ge=-1, le=1)] = setting(
        ABSORBED, "cosine from which on a push is absorbed"
    )
    max_strength: float = setting(6.0, "largest factor of the vector")
    strength_steps: int = setting(12, "strengths tried, evenly spaced up to the largest")
    batch_file: str = setting("", "JSON file with several experiments, in place of prompt and contrastive")

    def __post_init__(self) -> None:
        if self.strength_steps < 1 or not self.max_strength > 0:
            raise ConfigError(
                "expected strength_steps of at least 1 and max_strength above 0, found "
                f"{self.strength_steps} and {self.max_strength}"
            )
        if self.batch_file and (self.prompt or self.contrastive or self.target):
            raise ConfigError("expected either a batch_file or a prompt with its counterpart, found both")


@dataclass(frozen=True)
class Case:
    """One prompt, its counterpart and where it is steered."""

    group: str
    prompt: str
    contrastive: str
    target: str
    pieces: tuple[int, ...]
    position: int
    experiment: Experiment


class PushedStates(ModelWorkflow):
    """One or several prompts, each pushed at every layer."""

    name = "steering_convergence"
    question = "Does a push heal?"
    settings_type = PushedStatesSettings
    settings: PushedStatesSettings

    def plan(self) -> Mapping[str, ResultNode]:
        """An experiment per case."""
        given = self.settings
        steps = given.strength_steps
        self.sweep = tuple(k * given.max_strength / steps for k in range(1, steps + 1))
        self.skipped: list[dict[str, str]] = []
        """Experiments of the batch that cannot be run: {"group", "prompt", "error"}."""
        self.cases = self._batch() if given.batch_file else [self._default()]
        return {
            f"convergence_{i}" if given.batch_file else "convergence": self.on_model(case.experiment)
            for i, case in enumerate(self.cases)
        }

    def _default(self) -> Case:
        given = self.settings
        prompt, target = fact(given.model, given.prompt, given.target)
        other = given.contrastive or counterpart(self.subject, given.model, prompt, target)
        return self._case("", prompt, other, target, given.inject_position)

    def _batch(self) -> list[Case]:
        found = []
        for entry in read_batch(Path(self.settings.batch_file)):
            try:
                found.append(self._case(*(entry[name] for name in FIELDS)))
            except MizarrError as error:
                self.skipped.append({"group": entry["group"], "prompt": entry["prompt"], "error": str(error)})
        if not found:
            raise ConfigError(
                f"expected an experiment that can be run in {self.settings.batch_file}, found none; the "
                f"first says: {self.skipped[0]['error']}"
            )
        return found

    def _case(self, group: str, prompt: str, contrastive: str, target: str, where: int | str) -> Case:
        encoding, other = (encoded(self.subject, text) for text in (prompt, contrastive))
        ids, others = tuple(encoding.ids), tuple(other.ids)
        if where == "last":
            position, mirrored = len(ids) - 1, len(others) - 1
        else:
            differs = first_difference(ids, others)  # refuses prompts of different length
            position = mirrored = differs if where == "auto" else position_of(encoding, where)
        pieces = answer_pieces(self.subject, prompt, target)
        experiment = Experiment(
            ids,
            (ids,),
            (others,),
            (position,),
            (mirrored,),
            position=position,
            strengths=tuple(sorted({1.0, *self.sweep})),
            target=pieces,
        )
        experiment.cells(self.subject.config)  # wrong settings are told now, not when it runs
        return Case(group, prompt, contrastive, target, pieces, position, experiment)

    def found(self, i: int = 0) -> xr.Dataset:
        """What came out for case `i`, [layer, strength, read_layer]."""
        return self.result(list(self.nodes)[i]).load()

    def told(self, i: int) -> dict[str, Any]:
        """Case `i` in the fields of candle-mi's example.

        `best_injection_layer`: the deepest whose push of strength 1 is absorbed, else the one of smallest KL.
        """
        case, found, threshold = self.cases[i], self.found(i), self.settings.threshold
        matrix = found["similarity"].sel(strength=1.0).transpose("layer", "read_layer").values

        def pushed(layer: int, strength: float) -> dict[str, Any]:
            here = found.sel(layer=layer, strength=strength)
            return {
                "p_target": number(np.exp(here["target_logprob"])),
                "kl_divergence": float(here["kl"]),
                "absorption_layer": absorption_layer(here["similarity"].values, layer, threshold),
            }

        layers = {layer: pushed(layer, 1.0) for layer in found["layer"].values.tolist()}
        absorbed = {layer: one["absorption_layer"] for layer, one in layers.items()}
        best = best_layer(absorbed, {layer: one["kl_divergence"] for layer, one in layers.items()})
        ids, chances = (found[name].values.tolist()[:5] for name in ("baseline_id", "baseline_probability"))
        return {
            **{name: self.subject.about[name] for name in ("model_id", "n_layers", "hidden_size")},
            **target_json(self.subject, case.target, case.pieces),
            "prompt": case.prompt,
            "contrastive_prompt": case.contrastive,
            "inject_position": case.position,
            "baseline_p_target": number(np.exp(found["baseline_target_logprob"])),
            "baseline_top5": [
                {"token": token, "token_id": one, "probability": p}
                for token, one, p in zip(named(self.subject, ids), ids, chances, strict=True)
            ],
            "convergence_matrix": matrix,
            "label": convergence_label(matrix, threshold),
            "layer_summaries": [{"injection_layer": layer, **one} for layer, one in layers.items()],
            "best_injection_layer": best,
            "strength_sweep": [{"strength": strength, **pushed(best, strength)} for strength in self.sweep],
            "threshold": threshold,
        }

    def views(self) -> Iterator[View]:
        """The first case in tables and curves; a figure per case, and for a batch a line."""
        told = [self.told(i) for i in range(len(self.cases))]
        yield from self._tables(told[0])
        yield self._batch_table(told) if self.settings.batch_file else Data(json=told[0])
        matrices = [self._matrix(i, one["label"]) for i, one in enumerate(told)]
        yield matrices[0]
        kl = self.found()["kl"].rename(layer="pushed_at").transpose("pushed_at", "strength")
        yield Lines.of(kl, "How far the answer moves", low=0.0)
        for i, (case, matrix) in enumerate(zip(self.cases, matrices, strict=True)):
            yield Figure(
                name="steering_convergence" + (f"_{i}" if self.settings.batch_file else ""),
                title=self._pushed(case),
                panels=(matrix, *self._strengths(i, told[i]["best_injection_layer"])),
            )

    def _pushed(self, case: Case, place: str = "") -> str:
        """What was done in a case."""
        token = named(self.subject, case.experiment.tokens)[case.position]
        one, other, at = map(format_token, (case.prompt, case.contrastive, token))
        return f"{self.subject.name}: {one!r} minus {other!r}, added at {at!r}{place}"

    def _matrix(self, i: int, label: str) -> Choice:
        """Cosines of case `i` by layer pushed and layer read, a grid per strength."""
        found, threshold = self.found(i)["similarity"].rename(layer="pushed_at"), self.settings.threshold
        found = found.where(found["read_layer"] >= found["pushed_at"])
        low = float(found.min())

        def grid(strength: float) -> Heatmap:
            here = found.sel(strength=strength).transpose("pushed_at", "read_layer")
            absorbed = ((here >= threshold) & (here["read_layer"] > here["pushed_at"])).values.astype(int)
            turns = np.diff(np.pad(absorbed, ((0, 0), (1, 1))), axis=1)
            runs = zip(np.argwhere(turns == 1).tolist(), np.argwhere(turns == -1).tolist(), strict=True)
            framed = tuple((row, start, row, end - 1) for (row, start), (_, end) in runs)
            return Heatmap.of(
                here, low=low, high=1.0, upward=True, framed=framed, frame_name=f"at least {threshold:g}"
            )

        return Choice.of(
            "strength",
            found["strength"].values.tolist(),
            grid,
            start=1.0,
            title="How far from its way is a state that was pushed?",
            caption="Cosine with the undisturbed run, by the layer pushed and the layer read above it; "
            f"{label}. Framed: at least {threshold:g}.",
        )

    def _strengths(self, i: int, best: int) -> tuple[Lines, Lines]:
        """At the best layer of case `i`, cosines above it and KL by strength."""
        row, threshold = self.found(i).sel(layer=best, strength=list(self.sweep)), self.settings.threshold
        above = row["similarity"].transpose("strength", "read_layer").isel(read_layer=slice(best, None))
        cosines = Lines.of(above, f"A push at layer {best}, by strength", "dashed: absorbed", y_name="cosine")
        absorbed = Line(f"absorbed, {threshold:g}", np.full(len(cosines.x), threshold), control=True)
        title, kl = "What it does to the answer", row["kl"].expand_dims("layer")
        answer = Lines.of(kl, title, f"at layer {best}", low=0.0)
        return replace(cosines, lines=(*cosines.lines, absorbed)), answer

    def _tables(self, told: dict[str, Any]) -> Iterator[Table]:
        """The layers of the first case, and its strengths at the best layer."""
        case, last = self.cases[0], self.found().sel(strength=1.0).isel(read_layer=-1)

        def absorbed(one: dict[str, Any]) -> str:
            return dash(one["absorption_layer"], "layer {}".format)

        def target(one: dict[str, Any]) -> str:
            return dash(one["p_target"], format_probability)

        def at_layer(name: str) -> Callable[[dict[str, Any]], float]:
            return lambda one: float(last[name].sel(layer=one["injection_layer"]))

        yield Table.of(
            told["layer_summaries"],
            ("layer", "injection_layer", "d"),
            ("absorbed at", absorbed, str),
            ("cosine at the end", at_layer("similarity"), ".4f"),
            ("KL", "kl_divergence", ".4f"),
            ("p(target)", target, str),
            ("length", at_layer("vector_norm"), ".2f"),
            ("of the state", at_layer("state_norm"), ".2f"),
            title=self._pushed(case, f" ({case.position})"),
            caption=f"{told['label']}; absorbed: first later layer of cosine >= {self.settings.threshold:g}; "
            f"undisturbed p(target) {dash(told['baseline_p_target'], format_probability)}",
        )
        yield Table.of(
            told["strength_sweep"],
            ("strength", "strength", "g"),
            ("absorbed at", absorbed, str),
            ("KL", "kl_divergence", ".4f"),
            ("p(target)", target, str),
            title=f"Strength of the push at layer {told['best_injection_layer']}",
            caption="the deepest layer whose push of strength 1 is absorbed, else the one of smallest KL",
        )

    def _batch_table(self, told: list[dict[str, Any]]) -> Table:
        """A line per case; which were left out."""
        results = [{"group": case.group, **one} for case, one in zip(self.cases, told, strict=True)]
        left_out = [f"{format_token(one['group'])}: {format_token(one['error'])}" for one in self.skipped]

        def absorbed(one: dict[str, Any]) -> str:
            layers = [layer["absorption_layer"] for layer in one["layer_summaries"]]
            return f"{sum(layer is not None for layer in layers)}/{len(layers)}"

        return Table.of(
            results,
            ("group", lambda one: format_token(one["group"])),
            ("prompt", lambda one: format_token(one["prompt"])),
            ("matrix", "label"),
            ("absorbed", absorbed),
            ("best layer", "best_injection_layer"),
            title=f"{len(self.cases)} experiments",
            caption="left out: " + "; ".join(left_out) if left_out else "none left out",
            json={"results": results, "skipped": self.skipped},
        )


WORKFLOW = PushedStates

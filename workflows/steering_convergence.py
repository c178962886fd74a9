"""Does a push heal? A contrastive steering vector added at one layer, and how soon later layers absorb it.

The vector of a layer is the residual state of the prompt minus that of a counterpart, at one position; added
to the prompt's own run at each layer by itself and at several strengths, it is followed through the layers
above (stages/convergence.py). Told: the matrix of cosines with the undisturbed run, the layer at which each
push is absorbed, and how strength changes that at the deepest layer that still absorbs it.

Defaults: the first shipped fact and its likest counterpart, the last position, absorbed at a cosine of 0.95.
A target of several tokens has the probability of all its pieces, never that of its last.

`batch_file` names several experiments (convergence_batch.py). One that cannot be run is left out, with the
reason in the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..stages.convergence import (
    ABSORBED,
    SteeringConvergence as Experiment,
    absorption_layer,
    best_layer,
    convergence_label,
)
from ..stages.lens import format_probability
from ..stages.positions import first_difference, position_of
from ..store.errors import ConfigError, MizarrError
from .answers import answer_pieces, counterpart, encoded, fact, named, number, plain, target_json
from .convergence_batch import FIELDS, read_batch
from .settings import setting
from .subject import Subject
from .workflow import Workflow

if TYPE_CHECKING:
    import xarray as xr
    from rich.table import Table

    from ..stages.forward.model import Model
    from .report import Element

__all__ = ["Case", "Settings", "SteeringConvergence"]


@dataclass(frozen=True)
class Settings:
    """What `--set` can change."""

    model: str = setting("specimen", 'hub id, directory, or "specimen"')
    prompt: str = setting("", "prompt to steer; none: a shipped fact, or the capital of France")
    contrastive: str = setting("", "its counterpart; none: one of as many tokens")
    target: str = setting("", "word whose probability is followed; may be empty")
    inject_position: int | str = setting(
        "last", 'where the vector is added: "last", "auto" (first differing token), an index, or a phrase'
    )
    threshold: float = setting(ABSORBED, "cosine from which on a push is absorbed")
    max_strength: float = setting(6.0, "largest factor of the vector")
    strength_steps: int = setting(12, "strengths tried, evenly spaced up to the largest")
    batch_file: str = setting("", "JSON file with several experiments, in place of prompt and contrastive")
    dtype: str = setting("float32", "what the model computes in")

    def __post_init__(self) -> None:
        if self.strength_steps < 1 or not self.max_strength > 0:
            raise ConfigError(
                "expected strength_steps of at least 1 and max_strength above 0, found "
                f"{self.strength_steps} and {self.max_strength}"
            )
        if not -1 <= self.threshold <= 1:
            raise ConfigError(f"expected a threshold in [-1, 1], found {self.threshold}")
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


@dataclass(frozen=True)
class Answer:
    """What came out for one case."""

    found: xr.Dataset
    """[layer, strength, read_layer]."""
    threshold: float

    @property
    def matrix(self) -> Any:
        """Cosines at strength 1, [layer, read_layer]."""
        return self.found["similarity"].sel(strength=1.0).values

    def absorbed(self, layer: int, strength: float) -> int | None:
        """Layer at which a push is absorbed."""
        row = self.found["similarity"].sel(layer=layer, strength=strength).values
        return absorption_layer(row, layer, self.threshold)

    @property
    def best(self) -> int:
        """The deepest layer whose push of strength 1 is absorbed, else the one of smallest KL."""
        layers = self.found["layer"].values.tolist()
        kl = self.found["kl"].sel(strength=1.0).values.tolist()
        return best_layer(
            {layer: self.absorbed(layer, 1.0) for layer in layers}, dict(zip(layers, kl, strict=True))
        )

    @property
    def label(self) -> str:
        """One word for the matrix."""
        return convergence_label(self.matrix, self.threshold)


class SteeringConvergence(Workflow):
    """One or several prompts, each pushed at every layer."""

    name = "steering_convergence"
    question = "Does a push heal?"
    settings_type = Settings

    def __init__(self, settings: Settings, model: Model | None = None) -> None:
        super().__init__(settings)
        self.subject = Subject(model or settings.model, settings.dtype)
        steps = settings.strength_steps
        self.sweep = tuple(k * settings.max_strength / steps for k in range(1, steps + 1))
        self.skipped: list[dict[str, str]] = []
        """Experiments of the batch that cannot be run: {"group", "prompt", "error"}."""
        self.cases = self._batch() if settings.batch_file else [self._default()]
        self.nodes = {
            f"convergence_{i}" if settings.batch_file else "convergence": case.experiment.on(
                model or settings.model, dtype=settings.dtype
            )
            for i, case in enumerate(self.cases)
        }

    def answer(self, i: int = 0) -> Answer:
        """What came out for case `i`."""
        name = list(self.nodes)[i]
        return Answer(self.result(name).load(), self.settings.threshold)

    def tables(self) -> list[Table]:
        """The layers of the first case, its strengths; and for a batch, a line per case."""
        tables = [self._layers_table(0), self._strengths_table(0)]
        return [*tables, self._batch_table()] if self.settings.batch_file else tables

    def draw(self, folder: Path) -> list[Path]:
        """Per case the matrix and the strengths."""
        from .figures_attention import convergence_page

        def page(i: int) -> Any:
            case, answer = self.cases[i], self.answer(i)
            return convergence_page(
                answer.found,
                best=answer.best,
                label=answer.label,
                sweep=self.sweep,
                threshold=self.settings.threshold,
                prompts=(case.prompt, case.contrastive),
                token=named(self.subject, case.experiment.tokens)[case.position],
                model=self.subject.name,
                footer=self.footer,
            )

        names = [f"_{i}" for i in range(len(self.cases))] if self.settings.batch_file else [""]
        return [
            self.figure(folder / f"steering_convergence{name}.png", partial(page, i))
            for i, name in enumerate(names)
        ]

    def elements(self) -> list[Element]:
        """The first case: its tables, cosines by layer for every strength, and how far the answer moves."""
        from .report import Choice, Heatmap, Lines

        found = self.answer(0).found.rename(layer="pushed_at")
        similarity = found["similarity"].where(found["read_layer"] >= found["pushed_at"])
        low = float(similarity.min())
        cosines = tuple(
            (
                f"{strength:g}",
                Heatmap.of(
                    similarity.sel(strength=strength).transpose("pushed_at", "read_layer"),
                    low=low,
                    high=1.0,
                    upward=True,
                ),
            )
            for strength in found["strength"].values.tolist()
        )
        matrix = Choice(
            title="How far from its way is a state that was pushed?",
            caption="Cosine with the undisturbed run, by the layer pushed and the layer read above it.",
            name="strength",
            options=cosines,
            start=[label for label, _ in cosines].index("1"),
        )
        kl = Lines.of(
            found["kl"].transpose("pushed_at", "strength"), title="How far the answer moves", low=0.0
        )
        return [*super().elements(), matrix, kl]

    def to_json(self) -> dict[str, Any]:
        """The fields of candle-mi's example; for a batch one such document per case, under `results`."""
        if not self.settings.batch_file:
            return {**self.header(), **self._case_json(0)}
        results = [{"group": case.group, **self._case_json(i)} for i, case in enumerate(self.cases)]
        return {**self.header(), "results": results, "skipped": self.skipped}

    # -- what is run

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

    # -- what came out

    def _case_json(self, i: int) -> dict[str, Any]:
        case, answer, config = self.cases[i], self.answer(i), self.subject.config
        found = answer.found
        ids, probabilities = (
            found[name].values.tolist()[:5] for name in ("baseline_id", "baseline_probability")
        )
        return {
            "model_id": self.subject.name,
            "prompt": case.prompt,
            "contrastive_prompt": case.contrastive,
            "n_layers": config.num_layers,
            "hidden_size": config.hidden_size,
            "inject_position": case.position,
            **target_json(self.subject, case.target, case.pieces),
            "baseline_p_target": number(np.exp(found["baseline_target_logprob"])),
            "baseline_top5": [
                {"token": token, "token_id": one, "probability": p}
                for token, one, p in zip(named(self.subject, ids), ids, probabilities, strict=True)
            ],
            "convergence_matrix": answer.matrix.tolist(),
            "label": answer.label,
            "layer_summaries": [
                {"injection_layer": layer, **self._summary(answer, layer, 1.0)}
                for layer in found["layer"].values.tolist()
            ],
            "best_injection_layer": answer.best,
            "strength_sweep": [
                {"strength": strength, **self._summary(answer, answer.best, strength)}
                for strength in self.sweep
            ],
            "threshold": self.settings.threshold,
        }

    def _summary(self, answer: Answer, layer: int, strength: float) -> dict[str, Any]:
        here = answer.found.sel(layer=layer, strength=strength)
        return {
            "p_target": number(np.exp(here["target_logprob"])),
            "kl_divergence": float(here["kl"]),
            "absorption_layer": answer.absorbed(layer, strength),
        }

    def _layers_table(self, i: int) -> Table:
        from rich.table import Table

        case, answer = self.cases[i], self.answer(i)
        token = plain(named(self.subject, case.experiment.tokens)[case.position])
        title = (
            f"{self.subject.name}: {plain(case.prompt)!r} minus {plain(case.contrastive)!r}, added at "
            f"{token!r} ({case.position})"
        )
        table = Table(title=title, box=None, pad_edge=False)
        for column in (
            "layer",
            "absorbed at",
            "cosine at the end",
            "KL",
            "p(target)",
            "length",
            "of the state",
        ):
            table.add_column(column, justify="right", no_wrap=True)
        for layer in answer.found["layer"].values.tolist():
            summary, here = self._summary(answer, layer, 1.0), answer.found.sel(layer=layer)
            where = summary["absorption_layer"]
            table.add_row(
                str(layer),
                "–" if where is None else f"layer {where}",
                f"{float(here['similarity'].sel(strength=1.0)[-1]):.4f}",
                f"{summary['kl_divergence']:.4f}",
                _percent(summary["p_target"]),
                f"{float(here['vector_norm']):.2f}",
                f"{float(here['state_norm']):.2f}",
            )
        before = _percent(number(np.exp(answer.found["baseline_target_logprob"])))
        table.caption = (
            f"{answer.label}; absorbed: first later layer of cosine >= {self.settings.threshold:g}; "
            f"undisturbed p(target) {before}"
        )
        return table

    def _strengths_table(self, i: int) -> Table:
        from rich.table import Table

        answer = self.answer(i)
        table = Table(title=f"Strength of the push at layer {answer.best}", box=None, pad_edge=False)
        for column in ("strength", "absorbed at", "KL", "p(target)"):
            table.add_column(column, justify="right", no_wrap=True, min_width=8)
        for strength in self.sweep:
            summary = self._summary(answer, answer.best, strength)
            where = summary["absorption_layer"]
            table.add_row(
                f"{strength:g}",
                "–" if where is None else f"layer {where}",
                f"{summary['kl_divergence']:.4f}",
                _percent(summary["p_target"]),
            )
        table.caption = "the deepest layer whose push of strength 1 is absorbed, else the one of smallest KL"
        return table

    def _batch_table(self) -> Table:
        from rich.table import Table

        table = Table(title=f"{len(self.cases)} experiments", box=None, pad_edge=False)
        for column in ("group", "prompt", "matrix", "absorbed", "best layer"):
            table.add_column(column, no_wrap=column != "prompt", overflow="ellipsis", max_width=48)
        for i, case in enumerate(self.cases):
            answer = self.answer(i)
            layers = answer.found["layer"].values.tolist()
            absorbed = sum(answer.absorbed(layer, 1.0) is not None for layer in layers)
            row = (plain(case.group), plain(case.prompt), answer.label, f"{absorbed}/{len(layers)}")
            table.add_row(*row, str(answer.best))
        left_out = [f"{plain(one['group'])}: {plain(one['error'])}" for one in self.skipped]
        table.caption = "left out: " + "; ".join(left_out) if left_out else "none left out"
        return table


def _percent(probability: float | None) -> str:
    return "–" if probability is None else format_probability(probability)


WORKFLOW = SteeringConvergence

"""How wide must a network be for how many numbers? Accuracy over width, length and seed, as one labelled
dataset.

Networks come from a folder of the zoo (`{task}_{hidden}_{sequence}_{trained}_{seed}.pth` or `.safetensors`),
or are trained on the way: seeded, cached, with far fewer sequences than the zoo's 2^30, which is days on a
CPU. The best of the seeds of each size is told, as the zoo keeps the best of five: candle-mi's
`stoicheia_sweep`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.algzoo.accuracy import accuracy_of, rmse_of, sampled_accuracy_node
from ...stages.algzoo.files import FORMATS, said_by_name
from ...stages.algzoo.model import load_model
from ...stages.algzoo.tasks import task_named
from ...stages.algzoo.training import ZooTraining, trained_rnn
from ...store.errors import ConfigError
from ..settings import Count, Natural, setting
from ..views import Data, Heatmap, Line, Lines, Table, View, together
from ..workflow import Workflow

if TYPE_CHECKING:
    import xarray as xr

    from ...pipeline.nodes import ResultNode

__all__ = ["StoicheiaSweep", "StoicheiaSweepSettings"]

SEQUENCES = 2**20
"""Of a training that nobody says more about: a second."""
Place = tuple[int, int, int]
"""Width, length, seed."""


@dataclass(frozen=True)
class StoicheiaSweepSettings:
    """What `--set` can change."""

    task: str = setting("2nd_argmax", "what the networks do")
    zoo: str = setting("", "folder with networks of the zoo; none: they are trained")
    hidden: tuple[Count, ...] = setting((2, 4), "widths")
    sequences: tuple[Count, ...] = setting((2, 3), "lengths")
    seeds: tuple[Natural, ...] = setting((0, 1), "seeds of the training")
    trained: Natural | None = setting(
        None,
        "sequences of the training, of a folder the checkpoint; none: 2^20, of a folder the last there is",
    )
    samples: Count = setting(100_000, "drawn samples each accuracy is counted on")
    seed: Natural = setting(0, "of the samples")

    def __post_init__(self) -> None:
        for name in ("hidden", "sequences", "seeds"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ConfigError(f"expected different {name}, found {list(values)}")


class StoicheiaSweep(Workflow):
    """Accuracies of many networks of one task."""

    name = "stoicheia_sweep"
    question = "How wide must a network be for how many numbers?"
    descriptive = (
        "How often networks of several sizes are right; seeds of one size differ by where training ended."
    )
    settings_type = StoicheiaSweepSettings
    settings: StoicheiaSweepSettings

    def __init__(self, settings: StoicheiaSweepSettings, model: Any = None) -> None:
        super().__init__(settings)
        if model is not None:
            raise ConfigError(f"{self.name}: expected no model, as it asks about many, found {model!r:.60}")
        self.task = task_named(settings.task)
        self.places: list[Place] = [
            (hidden, sequence, seed)
            for hidden in settings.hidden
            for sequence in settings.sequences
            for seed in settings.seeds
        ]
        weights = self._of_folder(Path(settings.zoo).expanduser()) if settings.zoo else self._trained()
        self.nodes = {
            _label(place): sampled_accuracy_node(
                node, task=self.task.name, sequence=place[1], samples=settings.samples, seed=settings.seed
            )
            for place, node in weights.items()
        }

    @property
    def trained(self) -> int:
        """Sequences of each training; of a folder the checkpoint asked for, or -1 for the last."""
        fallback = -1 if self.settings.zoo else SEQUENCES
        return fallback if self.settings.trained is None else self.settings.trained

    def _trained(self) -> dict[Place, ResultNode]:
        found: dict[Place, ResultNode] = {}
        for hidden, sequence, seed in self.places:
            recipe = ZooTraining(self.task.name, hidden, sequence, seed, self.trained)
            if recipe.shape.kind != "rnn":
                raise ConfigError(
                    f"{self.name}: expected a task of numbers to train RNNs of, found {self.task.name}; give "
                    "a folder of trained transformers: zoo=FOLDER"
                )
            found[hidden, sequence, seed] = trained_rnn.on(
                task=recipe.task, hidden=hidden, sequence=sequence, seed=seed, sequences=self.trained
            )
        return found

    def _of_folder(self, folder: Path) -> dict[Place, ResultNode]:
        """Weights of the files there are, of each size and seed the checkpoint asked for."""
        if not folder.is_dir():
            raise ConfigError(f"expected a folder with networks of the zoo, found none at {folder}")
        wanted, best = set(self.places), dict[Place, tuple[int, Path]]()
        for path in sorted(folder.iterdir()):
            said = said_by_name(path.stem)
            if path.suffix not in FORMATS or said.task != self.task.name or said.hidden is None:
                continue
            place = (said.hidden, said.sequence or 0, said.seed or 0)
            trained = said.trained or 0
            if place in wanted and self.settings.trained in (None, trained):
                best[place] = max(best.get(place, (-1, path)), (trained, path))
        if not best:
            raise ConfigError(
                "expected files such as "
                f"{self.task.name}_{self.places[0][0]}_{self.places[0][1]}_1048576_0.pth in {folder}, found "
                "none of the sizes, seeds and checkpoint asked for"
            )
        return {place: load_model(path).weights_node() for place, (_, path) in sorted(best.items())}

    @cached_property
    def table(self) -> xr.Dataset:
        """Score [hidden, sequence, seed] and how many samples it was counted on; NaN for networks there are
        not."""
        import xarray as xr

        settings = self.settings
        shape = (len(settings.hidden), len(settings.sequences), len(settings.seeds))
        scores, dims = np.full(shape, np.nan), ("hidden", "sequence", "seed")
        for place in self.places:
            if _label(place) in self.nodes:
                counted = self.result(_label(place)).load()
                at = tuple(
                    axis.index(value)
                    for axis, value in zip(
                        (settings.hidden, settings.sequences, settings.seeds), place, strict=True
                    )
                )
                scores[at] = rmse_of(counted) if self.task.is_scalar else accuracy_of(counted)
        name = "rmse" if self.task.is_scalar else "accuracy"
        labels = {
            "hidden": list(settings.hidden),
            "sequence": list(settings.sequences),
            "seed": list(settings.seeds),
        }
        return xr.Dataset(
            {
                name: (
                    dims,
                    scores,
                    {"long_name": name.upper() if self.task.is_scalar else name, "units": "1"},
                )
            },
            coords=labels,
            attrs={
                "task": self.task.name,
                "trained_sequences": self.trained,
                "samples": settings.samples,
            },
        )

    def views(self) -> Iterator[View]:
        """The best of the seeds of each size, and every seed."""
        (name,) = map(str, self.table.data_vars)
        scores = self.table[name]
        best = scores.min("seed") if self.task.is_scalar else scores.max("seed")
        best.attrs = scores.attrs
        rows = [
            {"hidden": hidden, "sequence": sequence, "seed": seed, name: _number(value)}
            for (hidden, sequence, seed), value in zip(self.places, scores.values.ravel(), strict=True)
        ]
        shown = ".3f" if self.task.is_scalar else ".2%"
        yield Table.of(
            [
                {"hidden": h}
                | {str(n): _number(best.sel(hidden=h, sequence=n)) for n in self.settings.sequences}
                for h in self.settings.hidden
            ],
            ("width", "hidden", "d"),
            *((f"{n} numbers", str(n), shown) for n in self.settings.sequences),
            title=f"{self.task.name}: {name} of the best of {len(self.settings.seeds)} seeds",
            caption=self._told,
            json={
                "task": self.task.name,
                "measure": name,
                "results": rows,
                "best": [
                    {"hidden": h, "sequence": n, name: _number(best.sel(hidden=h, sequence=n))}
                    for h in self.settings.hidden
                    for n in self.settings.sequences
                ],
            },
        )
        labelled = best.assign_coords(
            hidden=[str(each) for each in self.settings.hidden],
            sequence=[str(each) for each in self.settings.sequences],
        )
        grid = Heatmap.of(
            labelled,
            f"{name} of the best seed",
            "",
            row_name="width",
            column_name="numbers",
            low=0.0,
            high=None if self.task.is_scalar else 1.0,
            numbers=".3f",
        )
        every = Lines(
            title="Every seed",
            caption="seeds of one size part where training ends in a local minimum",
            x=tuple(str(each) for each in self.settings.hidden),
            lines=tuple(
                Line(f"{n} numbers", best.sel(sequence=n).values, dots=scores.sel(sequence=n).values)
                for n in self.settings.sequences
            ),
            x_name="width",
            y_name=name,
            low=0.0,
            high=None if self.task.is_scalar else 1.0,
        )
        yield from together("stoicheia_sweep", f"{self.task.name} by width and length", grid, every)
        yield Data(json={"dims": ["hidden", "sequence", "seed"], name: scores})

    @property
    def _told(self) -> str:
        settings = self.settings
        of = f"networks of {settings.zoo}" if settings.zoo else f"trained on {self.trained:,} sequences each"
        missing = len(self.places) - len(self.nodes)
        return f"{of}; {settings.samples:,} samples each" + (
            f"; {missing} networks are not there" if missing else ""
        )


def _label(place: Place) -> str:
    hidden, sequence, seed = place
    return f"h{hidden}_n{sequence}_seed{seed}"


def _number(value: Any) -> float | None:
    found = float(value)
    return found if np.isfinite(found) else None


WORKFLOW = StoicheiaSweep

"""How wide must a tiny network be for sequences of each length?

Accuracy over width, length, seed and training, as one
labelled dataset.

Networks come from a folder of the zoo (`{task}_{hidden}_{sequence}_{trained}_{seed}.pth` or `.safetensors`),
or are trained on the way: seeded, cached, with far fewer sequences than the zoo's 2^30, which is days on a
CPU. Several checkpoints of each are those of one training, whose schedule is that of the longest. The best
of the seeds of each size is shown, as the zoo keeps the best of five: candle-mi's `stoicheia_sweep`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.algzoo.accuracy import accuracy_of, rmse_of, sampled_accuracy_node
from ...stages.algzoo.files import FORMATS, metadata_of_name
from ...stages.algzoo.model import load_model
from ...stages.algzoo.tasks import task_named
from ...stages.algzoo.training import ZooTraining, trained_rnn, training_checkpoints, weights_at
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
LAST = -1
"""In place of a number of sequences: as many as the longest training in a folder has."""
Place = tuple[int, int, int, int]
"""Width, length, seed, sequences of the training."""


@dataclass(frozen=True)
class StoicheiaSweepSettings:
    """What `--set` can change. Raises ConfigError for a width, length or seed that is named twice."""

    task: str = setting("2nd_argmax", "what the networks do")
    zoo: str = setting("", "folder with networks of the zoo; none: they are trained")
    hidden: tuple[Count, ...] = setting((2, 4), "widths")
    sequences: tuple[Count, ...] = setting((2, 3), "lengths")
    seeds: tuple[Natural, ...] = setting((0, 1), "seeds of the training")
    trained: tuple[Natural, ...] = setting(
        (),
        "sequences of the training, of a folder its checkpoints; several are checkpoints of one training; "
        "none: 2^20, of a folder the last there is",
    )
    samples: Count = setting(100_000, "drawn samples each accuracy is counted on")
    seed: Natural = setting(0, "of the samples")

    def __post_init__(self) -> None:
        for name in ("hidden", "sequences", "seeds", "trained"):
            values = getattr(self, name)
            if (not values and name != "trained") or len(set(values)) < len(values):
                raise ConfigError(f"expected different {name}, found {list(values)}")


class StoicheiaSweep(Workflow):
    """Accuracies of many networks of one task."""

    name = "stoicheia_sweep"
    question = "How wide must a tiny network be for sequences of each length?"
    descriptive = "Accuracy of networks of several sizes; networks of one size differ by training seed."
    settings_type = StoicheiaSweepSettings
    settings: StoicheiaSweepSettings

    def __init__(self, settings: StoicheiaSweepSettings, model: Any = None) -> None:
        super().__init__(settings)
        if model is not None:
            raise ConfigError(f"{self.name}: expected no model, as it asks about many, found {model!r:.60}")
        self.task = task_named(settings.task)
        self.places: list[Place] = [
            (hidden, sequence, seed, trained)
            for hidden in settings.hidden
            for sequence in settings.sequences
            for seed in settings.seeds
            for trained in self.trained
        ]
        weights = self._of_folder(Path(settings.zoo).expanduser()) if settings.zoo else self._trained()
        self.nodes = {
            self._label(place): sampled_accuracy_node(
                node, task=self.task.name, sequence=place[1], samples=settings.samples, seed=settings.seed
            )
            for place, node in weights.items()
        }

    @property
    def trained(self) -> tuple[int, ...]:
        """Sequences of each training, in rising order; of a folder the checkpoints asked for, or the last."""
        return tuple(sorted(self.settings.trained)) or (LAST if self.settings.zoo else SEQUENCES,)

    def _trained(self) -> dict[Place, ResultNode]:
        found: dict[Place, ResultNode] = {}
        for place in self.places:
            hidden, sequence, seed, trained = place
            recipe = ZooTraining(self.task.name, hidden, sequence, seed, self.trained[-1])
            if recipe.shape.kind != "rnn":
                raise ConfigError(
                    f"{self.name}: expected a task of numbers to train RNNs of, found {self.task.name}; give "
                    "a folder of trained transformers: zoo=FOLDER"
                )
            about: dict[str, Any] = {
                "task": recipe.task,
                "hidden": hidden,
                "sequence": sequence,
                "seed": seed,
                "sequences": self.trained[-1],
            }
            if not self._has_several:
                found[place] = trained_rnn.on(**about)
                continue
            replace(recipe, checkpoints=self.trained)  # refuse wrong checkpoints now, before anything runs
            on_its_way = training_checkpoints.on(**about, checkpoints=self.trained)
            found[place] = weights_at.on(trained=on_its_way, checkpoint=trained)
        return found

    @property
    def _has_several(self) -> bool:
        """Whether checkpoints are an axis."""
        return len(self.trained) > 1

    def _of_folder(self, folder: Path) -> dict[Place, ResultNode]:
        """Weights of the files there are, of each size and seed the checkpoint asked for."""
        if not folder.is_dir():
            raise ConfigError(f"expected a folder with networks of the zoo, found none at {folder}")
        sizes, best = {place[:3] for place in self.places}, dict[Place, tuple[int, Path]]()
        for path in sorted(folder.iterdir()):
            said = metadata_of_name(path.stem)
            if path.suffix not in FORMATS or said.task != self.task.name or said.hidden is None:
                continue
            size = (said.hidden, said.sequence or 0, said.seed or 0)
            trained = said.trained or 0
            place = (*size, trained if self.settings.trained else LAST)
            if size in sizes and place in self.places:
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
        """Score [hidden, sequence, seed], of several checkpoints [hidden, sequence, seed, trained]; NaN for
        networks there are not."""
        import xarray as xr

        settings = self.settings
        axes = {
            "hidden": list(settings.hidden),
            "sequence": list(settings.sequences),
            "seed": list(settings.seeds),
            "trained": list(self.trained),
        }
        scores = np.full([len(labels) for labels in axes.values()], np.nan)
        for place in self.places:
            if self._label(place) in self.nodes:
                counted = self.result(self._label(place)).load()
                at = tuple(labels.index(value) for labels, value in zip(axes.values(), place, strict=True))
                scores[at] = rmse_of(counted) if self.task.is_scalar else accuracy_of(counted)
        name = "rmse" if self.task.is_scalar else "accuracy"
        about = {"long_name": name.upper() if self.task.is_scalar else name, "units": "1"}
        found = xr.Dataset(
            {name: (tuple(axes), scores, about)},
            coords=axes,
            attrs={"task": self.task.name, "samples": settings.samples},
        )
        if self._has_several:
            return found
        return found.isel(trained=0, drop=True).assign_attrs(trained_sequences=self.trained[0])

    def views(self) -> Iterator[View]:
        """The best of the seeds of each size, and every seed."""
        (name,) = map(str, self.table.data_vars)
        scores = self.table[name]
        dims = list(map(str, scores.dims))
        every_best = scores.min("seed") if self.task.is_scalar else scores.max("seed")
        every_best.attrs = scores.attrs
        if self._has_several:
            yield self._course(name, every_best)
        # Sizes are shown at the end of the training.
        best, last = (each.isel(trained=-1) if self._has_several else each for each in (every_best, scores))
        rows = [
            {
                "hidden": hidden,
                "sequence": sequence,
                "seed": seed,
                "trained": None if trained == LAST else trained,
                name: _number(value),
            }
            for (hidden, sequence, seed, trained), value in zip(
                self.places, scores.values.ravel(), strict=True
            )
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
            caption=self._summary,
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
                Line(f"{n} numbers", best.sel(sequence=n).values, dots=last.sel(sequence=n).values)
                for n in self.settings.sequences
            ),
            x_name="width",
            y_name=name,
            low=0.0,
            high=None if self.task.is_scalar else 1.0,
        )
        yield from together("stoicheia_sweep", f"{self.task.name} by width and length", grid, every)
        yield Data(json={"dims": dims, name: scores})

    def _course(self, name: str, best: xr.DataArray) -> Lines:
        """How the best of the seeds came along."""
        is_log = min(self.trained) > 0  # the network as it was drawn has no place on a logarithmic axis
        return Lines(
            title=f"{name} in the course of training",
            caption=f"best of {len(self.settings.seeds)} seeds at each checkpoint of one training"
            + ("" if self.settings.zoo else f", whose rate falls as for {self.trained[-1]:,} sequences"),
            x=self.trained if is_log else tuple(f"{each:,}" for each in self.trained),
            lines=tuple(
                Line(f"width {h}, {n} numbers", best.sel(hidden=h, sequence=n).values)
                for h in self.settings.hidden
                for n in self.settings.sequences
            ),
            x_name="sequences trained on",
            log_x=is_log,
            y_name=name,
            low=0.0,
            high=None if self.task.is_scalar else 1.0,
        )

    def _label(self, place: Place) -> str:
        """Name of a network's node."""
        hidden, sequence, seed, trained = place
        return f"h{hidden}_n{sequence}_seed{seed}" + (f"_after{trained}" if self._has_several else "")

    @property
    def _summary(self) -> str:
        settings = self.settings
        of = (
            f"networks of {settings.zoo}"
            if settings.zoo
            else f"trained on {self.trained[-1]:,} sequences each"
        )
        missing = len(self.places) - len(self.nodes)
        return f"{of}; {settings.samples:,} samples each" + (
            f"; {missing} networks are not there" if missing else ""
        )


def _number(value: Any) -> float | None:
    found = float(value)
    return found if np.isfinite(found) else None

"""How wide must a tiny network be for sequences of each length?

Accuracy by width, sequence length, training seed and length of training, as one labelled dataset.

Networks are read from a folder of AlgZoo files (`{task}_{hidden}_{sequence}_{trained}_{seed}.pth` or
`.safetensors`), or trained by the workflow: seeded and cached, on far fewer sequences than the zoo's 2^30,
which take days on a CPU. Several checkpoints of a network are those of one training, with the learning rate
schedule of the longest. For each size the best seed is shown, as the zoo keeps the best of five. The protocol
is candle-mi's `stoicheia_sweep`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
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
"""Default number of sequences that a network is trained on, which takes about a second."""
LAST = -1
"""Placeholder for the number of training sequences: of each size and seed in a folder, the network that was
trained longest."""
Place = tuple[int, int, int, int]
"""(width, sequence length, seed, number of training sequences) of one network."""


@dataclass(frozen=True)
class StoicheiaSweepSettings:
    """Settings of the workflow `stoicheia_sweep`, which compares AlgZoo networks of several sizes. Raises
    ConfigError for a width, length or seed that is missing or given twice."""

    task: str = setting("2nd_argmax", "task of the networks")
    zoo: str = setting("", "folder of AlgZoo networks; none: networks are trained")
    hidden: tuple[Count, ...] = setting((2, 4), "widths of the networks")
    sequences: tuple[Count, ...] = setting((2, 3), "lengths of the sequences that the networks read")
    seeds: tuple[Natural, ...] = setting((0, 1), "seeds of the training")
    trained: tuple[Natural, ...] = setting(
        (),
        "numbers of training sequences; several are checkpoints of one training; none: 2^20, or in a folder "
        "the longest training of each size and seed",
    )
    samples: Count = setting(100_000, "number of random samples on which each accuracy is measured")
    seed: Natural = setting(0, "seed of the samples")

    def __post_init__(self) -> None:
        for name in ("hidden", "sequences", "seeds", "trained"):
            values = getattr(self, name)
            if (not values and name != "trained") or len(set(values)) < len(values):
                raise ConfigError(
                    f"expected different values of {name}, found {list(values)}; name each once"
                )


class StoicheiaSweep(Workflow):
    """Workflow that measures the accuracy of many networks of one task, by width, sequence length and
    training seed."""

    name = "stoicheia_sweep"
    question = "How wide must a tiny network be for sequences of each length?"
    descriptive = "Accuracy of networks of several sizes; networks of one size differ by training seed."
    settings_type = StoicheiaSweepSettings
    settings: StoicheiaSweepSettings

    def __init__(self, settings: StoicheiaSweepSettings, model: Any = None) -> None:
        super().__init__(settings)
        if model is not None:
            raise ConfigError(
                f"{self.name}: expected no model, as it compares many networks, found {model!r:.60}; name a "
                "folder of networks instead: zoo=FOLDER"
            )
        self.nodes = {}
        self.task = task_named(settings.task)
        self.places: list[Place] = list(
            product(settings.hidden, settings.sequences, settings.seeds, self.trained)
        )
        weights = (
            self._folder_weights(Path(settings.zoo).expanduser()) if settings.zoo else self._trained_weights()
        )
        for place, weights_node in weights.items():
            _, sequence, _, _ = place
            self.nodes[self._label(place)] = sampled_accuracy_node(
                weights_node,
                task=self.task.name,
                sequence=sequence,
                samples=settings.samples,
                seed=settings.seed,
            )

    @property
    def trained(self) -> tuple[int, ...]:
        """Numbers of training sequences, ascending; if the setting is empty, `SEQUENCES`, or `LAST` for
        networks of a folder."""
        return tuple(sorted(self.settings.trained)) or (LAST if self.settings.zoo else SEQUENCES,)

    def _trained_weights(self) -> dict[Place, ResultNode]:
        """Nodes that train the networks. Raises ConfigError for a task of transformers, or for checkpoints
        that are no whole numbers of batches."""
        nodes: dict[Place, ResultNode] = {}
        for place in self.places:
            hidden, sequence, seed, trained = place
            recipe = ZooTraining(self.task.name, hidden, sequence, seed, self.trained[-1])
            if recipe.shape.kind != "rnn":
                raise ConfigError(
                    f"{self.name}: expected a task of real numbers, for which RNNs are trained, found "
                    f"{self.task.name}; give a folder of trained transformers: zoo=FOLDER"
                )
            about: dict[str, Any] = {
                "task": recipe.task,
                "hidden": hidden,
                "sequence": sequence,
                "seed": seed,
                # The learning rate schedule depends on the length of the training, so checkpoints share the
                # longest one.
                "sequences": self.trained[-1],
            }
            if not self._has_several:
                nodes[place] = trained_rnn.on(**about)
                continue
            replace(recipe, checkpoints=self.trained)  # raises for invalid checkpoints before anything runs
            checkpoints = training_checkpoints.on(**about, checkpoints=self.trained)
            nodes[place] = weights_at.on(trained=checkpoints, checkpoint=trained)
        return nodes

    @property
    def _has_several(self) -> bool:
        """Whether several checkpoints of each training are scored, so that results have the axis
        `trained`."""
        return len(self.trained) > 1

    def _folder_weights(self, folder: Path) -> dict[Place, ResultNode]:
        """Weight nodes of the networks in a folder that have the sizes, seeds and checkpoints of the
        settings.

        Raises ConfigError for a folder that does not exist, or has no matching file.
        """
        if not folder.is_dir():
            raise ConfigError(
                f"expected a folder of AlgZoo networks at {folder}, found none; check zoo, or leave it out "
                "to train networks"
            )
        sizes, longest = {place[:3] for place in self.places}, dict[Place, tuple[int, Path]]()
        for path in sorted(folder.iterdir()):
            metadata = metadata_of_name(path.stem)
            if path.suffix not in FORMATS or metadata.task != self.task.name or metadata.hidden is None:
                continue
            size = (metadata.hidden, metadata.sequence or 0, metadata.seed or 0)
            trained = metadata.trained or 0
            place = (*size, trained if self.settings.trained else LAST)
            if size in sizes and place in self.places:
                # Tuples compare by length of training first; -1 is shorter than that of an untrained network,
                # 0.
                longest[place] = max(longest.get(place, (-1, path)), (trained, path))
        if not longest:
            raise ConfigError(
                "expected files such as "
                f"{self.task.name}_{self.places[0][0]}_{self.places[0][1]}_1048576_0.pth in {folder}, found "
                "none of the sizes, seeds and checkpoints of the settings"
            )
        return {place: load_model(path).weights_node() for place, (_, path) in sorted(longest.items())}

    @cached_property
    def table(self) -> xr.Dataset:
        """Score of each network: accuracy, or RMSE for a scalar task, [hidden, sequence, seed], and a last
        axis `trained` for several checkpoints; NaN for missing networks."""
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
                index = tuple(labels.index(value) for labels, value in zip(axes.values(), place, strict=True))
                scores[index] = rmse_of(counted) if self.task.is_scalar else accuracy_of(counted)
        name = "rmse" if self.task.is_scalar else "accuracy"
        about = {"long_name": name.upper() if self.task.is_scalar else name, "units": "1"}
        table = xr.Dataset(
            {name: (tuple(axes), scores, about)},
            coords=axes,
            attrs={"task": self.task.name, "samples": settings.samples},
        )
        if self._has_several:
            return table
        return table.isel(trained=0, drop=True).assign_attrs(trained_sequences=self.trained[0])

    def views(self) -> Iterator[View]:
        """Views in reading order: scores by number of training sequences (for several checkpoints), of the
        best seed of each size, and of every seed."""
        (name,) = map(str, self.table.data_vars)
        scores = self.table[name]
        dims = list(map(str, scores.dims))
        # RMSE is an error, so the smallest is best.
        best_seed = scores.min("seed") if self.task.is_scalar else scores.max("seed")
        # Reductions of xarray drop attributes by default.
        best_seed.attrs = scores.attrs
        if self._has_several:
            yield self._course(name, best_seed)
        # Sizes are compared at the last checkpoint.
        best, last = (
            values.isel(trained=-1) if self._has_several else values for values in (best_seed, scores)
        )
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
            hidden=[str(hidden) for hidden in self.settings.hidden],
            sequence=[str(sequence) for sequence in self.settings.sequences],
        )
        grid = Heatmap.of(
            labelled,
            f"{name} of the best seed",
            f"Each cell: best {name} of {len(self.settings.seeds)} networks of one width (row) that read one "
            "number of inputs (column); they differ by the seed of their training.",
            row_name="width",
            column_name="numbers",
            low=0.0,
            high=None if self.task.is_scalar else 1.0,
            numbers=".3f",
        )
        all_seeds = Lines(
            title=f"{name} of the best seed (line) and of every seed (dots)",
            caption=f"x: width, the number of neurons. y: {name}. One line per number of inputs, through the "
            "best seed; dots: all seeds. Seeds of one size differ because training ends in different local "
            "minima.",
            x=tuple(str(hidden) for hidden in self.settings.hidden),
            lines=tuple(
                Line(f"{n} numbers", best.sel(sequence=n).values, dots=last.sel(sequence=n).values)
                for n in self.settings.sequences
            ),
            x_name="width",
            y_name=name,
            low=0.0,
            high=None if self.task.is_scalar else 1.0,
        )
        title = f"{self.task.name}: {name} by width and sequence length"
        yield from together("stoicheia_sweep", title, grid, all_seeds)
        yield Data(json={"dims": dims, name: scores})

    def _course(self, name: str, best: xr.DataArray) -> Lines:
        """Curves of the best seed's score by number of training sequences. name: "accuracy" or "rmse". best:
        the scores, [hidden, sequence, trained]."""
        is_log = min(self.trained) > 0  # the untrained network, at 0, is not on a logarithmic axis
        return Lines(
            title=f"{name} in the course of training",
            caption=f"x: number of training sequences. y: {name} of the best of {len(self.settings.seeds)} "
            "seeds. One curve per width (number of neurons) and number of inputs. All checkpoints of a seed "
            "come from one training"
            + (
                "."
                if self.settings.zoo
                else f", whose learning rate schedule is that of {self.trained[-1]:,} sequences."
            ),
            x=self.trained if is_log else tuple(f"{trained:,}" for trained in self.trained),
            lines=tuple(
                Line(f"width {h}, {n} numbers", best.sel(hidden=h, sequence=n).values)
                for h in self.settings.hidden
                for n in self.settings.sequences
            ),
            x_name="training sequences",
            log_x=is_log,
            y_name=name,
            low=0.0,
            high=None if self.task.is_scalar else 1.0,
        )

    def _label(self, place: Place) -> str:
        """Name of the result node of one network, such as "h4_n3_seed0" for width 4 and three numbers."""
        hidden, sequence, seed, trained = place
        return f"h{hidden}_n{sequence}_seed{seed}" + (f"_after{trained}" if self._has_several else "")

    @property
    def _summary(self) -> str:
        """Caption: origin of the networks, number of samples, and number of missing networks."""
        settings = self.settings
        origin = (
            f"read from {settings.zoo}" if settings.zoo else f"trained on {self.trained[-1]:,} sequences each"
        )
        n_missing = len(self.places) - len(self.nodes)
        return (
            "One row per width (number of neurons), one column per length of the input. Networks are "
            f"{origin} and scored on {settings.samples:,} random samples each."
        ) + (f" {n_missing} networks are missing." if n_missing else "")


def _number(value: Any) -> float | None:
    """The value as a float for JSON; None for NaN."""
    number = float(value)
    return number if np.isfinite(number) else None

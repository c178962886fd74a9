"""The training loop: batches in, a dictionary and a checkpoint out.

    training = Training(Settings(kind="sae", features=1024, k=16), StoredActivations(entry), Path("sae"))
    training.run()                                  # called again after a kill, it resumes
    training.layers                                 # layer -> LayerFeatures, on activations as stored

Adam; a linear warm-up, a plateau, a linear decay to 0; gradients clipped by norm. With topk and batchtopk,
decoder rows have norm 1 (over all targets) and k falls from min(features, 10 d_in) to its value; with
penalties the rows are free, since penalties are weighted by their norm, and the coefficient rises from 0.

Equal settings and data give equal bits on one machine with one number of torch threads, interrupted or not.

Border: reads stored activations, writes to a folder of its own; captures nothing, exports nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ....pipeline.ambient import plain_torch, steps_in_plain_torch
from ....store.errors import ConfigError
from ...forward.architectures.points import HookPoint
from ...training_data.batches import Batches, every
from ...training_data.several import EndToEnd, Joined, SideBySide
from ...training_data.stored import Cell, StoredActivations, TokenRows
from ..crosscoder import Crosscoder, CrosscoderPlace
from . import checkpoint
from .evaluate import measure
from .losses import Loss, loss
from .models import DictionaryModel, Normaliser
from .settings import TrainingSettings
from .statistics import RowStatistics, moments

if TYPE_CHECKING:
    import xarray as xr

    from ....store.runs.committed import VariableLayer
    from ..layers.layer import LayerFeatures

__all__ = ["Source", "Training"]

Source = StoredActivations | EndToEnd | SideBySide

STATISTICS = 1 << 18
"""Number of tokens, spread evenly over the data, from which means and scales are computed."""
SETTLING = 1 << 23
"""Number of pre-activations of a layer from which the final thresholds of batchtopk are computed."""
VALIDATION = 1 << 15
"""Number of held-out tokens measured during training."""


class Training:
    """A training of a dictionary in a folder, new or resumed. Nothing is written before the first step.

    Arguments:
        settings: Settings of the training.
        source: Stored activations: a run, several runs of one model in sequence, or for a crosscoder runs of
            several models on the same tokens.
        folder: Folder of the checkpoint and the log.
        log_every: Number of steps between lines of the log.
        validate_every: Number of steps between measurements on held-out prompts.
        save_every: Number of steps between checkpoints.

    Raises:
        ConfigError: Settings do not fit the data, or the folder holds another training.
        EntryNotFound: A hook point or layer is not stored.
        ShapeError: Activations are not finite.
    """

    def __init__(
        self,
        settings: TrainingSettings,
        source: Source,
        folder: Path,
        *,
        log_every: int = 50,
        validate_every: int = 500,
        save_every: int = 500,
    ) -> None:
        self.settings, self.folder = settings, folder
        self.log_every, self.validate_every, self.save_every = log_every, validate_every, save_every
        self.source: Source = source.leaving_out(positions=settings.skip_positions, tokens=settings.without)
        self.layer_numbers = _layers(settings, source)
        self.places: tuple[Cell, ...] = ()
        if settings.kind == "crosscoder":
            self.places = _places(settings, source, self.layer_numbers)
            # The states at all hook points are concatenated; the model treats them as layer 0.
            self.layer_numbers = (0,)
        reads = [(settings.read, layer) for layer in self.layer_numbers]
        writes = [(settings.writes, layer) for layer in self.layer_numbers]
        self.cells: tuple[VariableLayer, ...] = tuple(dict.fromkeys([*reads, *writes]))
        # Checked before any file of the training is written.
        self.rows(self.source).require(self.cells)
        # Stored in checkpoints: a training must resume on the same data.
        self.data = self.rows(self.source).identity(self.cells)
        stored = checkpoint.load(folder)
        if stored is not None:
            # Checkpoints of older versions lack newer settings, which then had their default values.
            stored_settings = TrainingSettings().plain() | stored["settings"]
            checkpoint.require_same(
                folder, {**stored, "settings": stored_settings}, settings.plain(), self.data
            )
        self.held_out: Source | None = None
        if settings.validation:
            self.source, self.held_out = self.source.split(settings.validation, settings.seed)
        self.step = 0
        self._begin(stored)

    # -- results

    @property
    def is_done(self) -> bool:
        """Whether all steps are done."""
        return self.step >= self.settings.steps

    @property
    def layers(self) -> dict[int, LayerFeatures]:
        """The trained features by layer, float32, which apply to activations as stored."""
        return {layer: self.model.folded(layer) for layer in self.model.layers}

    def rows(self, source: Source) -> TokenRows:
        """Activations of a source token by token; for a crosscoder, those of all hook points concatenated."""
        return Joined(source, {(self.settings.read, 0): self.places}) if self.places else source

    def measured(self, source: Source, *, max_rows: int | None = None) -> xr.Dataset:
        """Quality of the features on stored activations, as `evaluate.measure` returns it.

        Arguments:
            source: Stored activations.
            max_rows: Number of rows after which no further block is measured; None for all.
        """
        settings = self.settings
        return measure(self.layers, _first(self._blocks(source), max_rows), settings.read, settings.writes)

    def crosscoder(self, models: Sequence[str]) -> Crosscoder:
        """The trained crosscoder.

        Arguments:
            models: Name of the model of each run in the source, in order.
        """
        scale = self.model.read[0].scale
        assert isinstance(scale, Tensor)
        width = len(scale) // len(self.places)
        places = [
            CrosscoderPlace(
                models[place[2] if len(place) == 3 else 0],
                str(HookPoint(place[0], place[1])),
                float(scale[number * width]),
            )
            for number, place in enumerate(self.places)
        ]
        return Crosscoder.of_joined(self.layers[0], places)

    @steps_in_plain_torch
    def states(self, source: Source) -> Iterator[Tensor]:
        """Blocks of states [row, place, width] of a source, on which a crosscoder can be measured."""
        for block in self._blocks(source):
            yield block[self.cells[0]].unflatten(1, (len(self.places), -1))

    # -- the loop

    @plain_torch()
    def run(
        self, *, advance: Callable[[int], None] = lambda _: None, stop: Callable[[], bool] = lambda: False
    ) -> bool:
        """Run the remaining steps, or until `stop`; a checkpoint is saved at the end.

        Arguments:
            advance: Called after each step with the number of its tokens.
            stop: Called after each step; the training stops if it returns true.

        Returns:
            Whether all steps are done.
        """
        if self.is_done:
            return True
        log = None
        # Closed at the end: batches are read ahead in another thread.
        with closing(self._batches.since(self.step)) as batches:
            while not self.is_done:
                step_loss = self._make_step(next(batches).tensors())
                # Before the last log line and checkpoint, so that both have the final thresholds.
                if self.is_done and self.settings.activation == "batchtopk":
                    self._settle_thresholds()
                # The log is opened after the first step, so that a failing start writes nothing.
                log = log or checkpoint.Log(self.folder, self.step - 1)
                self._note(log, step_loss)
                advance(self.settings.batch)
                stopped = stop()
                if self.is_done or stopped or self.step % self.save_every == 0:
                    self.save()
                if stopped:
                    break
        return self.is_done

    def save(self) -> None:
        """Save a checkpoint of the current step."""
        state = {
            "settings": self.settings.plain(),
            "data": self.data,
            "step": self.step,
            "model": self.model.state_dict(),
            "running": self.model.running,
            "optimiser": self.optimiser.state_dict(),
            "quiet": self.quiet,
            "read": {
                layer: (normaliser.mean, normaliser.scale) for layer, normaliser in self.model.read.items()
            },
            "write": {
                layer: (normaliser.mean, normaliser.scale) for layer, normaliser in self.model.write.items()
            },
        }
        checkpoint.save(self.folder, state)

    @cached_property
    def _batches(self) -> Batches:
        """Shuffled batches of the training data; batch n belongs to step n."""
        settings = self.settings
        return self._shuffled(batch=settings.batch, window=settings.window, seed=settings.seed)

    def _blocks(self, source: Source) -> Iterator[dict[VariableLayer, Tensor]]:
        """Blocks of a source's activations in store order, without the excluded positions and tokens."""
        settings = self.settings
        counted = source.leaving_out(positions=settings.skip_positions, tokens=settings.without)
        return every(self.rows(counted), self.cells, block=settings.block)

    def _shuffled(self, *, batch: int, window: int, seed: int) -> Batches:
        return Batches(
            self.rows(self.source),
            self.cells,
            batch=batch,
            window=window,
            block=self.settings.block,
            seed=seed,
        )

    def _make_step(self, batch: Mapping[Cell, Tensor]) -> Loss:
        settings, model = self.settings, self.model
        for group in self.optimiser.param_groups:
            # Set from the step instead of a scheduler, whose state would have to be saved.
            group["lr"] = settings.rate * schedule(self.step, settings)
        inputs, outputs = self._scaled(batch)
        step_loss = loss(
            model,
            inputs,
            outputs,
            k=active_count(self.step, settings, model.d_in),
            pressure=pressure(self.step, settings),
            dead={layer: quiet > settings.dead_tokens for layer, quiet in self.quiet.items()},
        )
        # Checked before the step, so that NaN never reaches the weights or the checkpoint.
        if not bool(step_loss.total.isfinite()):
            raise ConfigError(
                f"the training loss of step {self.step} is infinite or NaN, and the last checkpoint is kept; "
                f"train with a learning rate lower than lr={settings.rate:.2g}"
            )
        self.optimiser.zero_grad(set_to_none=True)
        step_loss.total.backward()
        if settings.is_top:
            # Without it, Adam's moments would accumulate the component that `keep_norms` removes.
            model.remove_parallel_gradients()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        self.optimiser.step()
        if settings.is_top:
            model.keep_norms()
        for layer, activations in step_loss.activations.items():
            # Tokens since a feature last fired; reset to 0 below for features that fire in this batch.
            self.quiet[layer] += len(activations)
            self.quiet[layer][(activations != 0).any(0)] = 0
        self.step += 1
        return step_loss

    @torch.no_grad()
    def _settle_thresholds(self) -> None:
        """Compute the final thresholds of batchtopk, at which k features are active on average.

        The running thresholds lag behind the weights.
        """
        settings, model = self.settings, self.model
        cells = [(settings.read, layer) for layer in model.layers]
        n_rows = max(settings.k, SETTLING // settings.features)
        apart = max(1, self.source.count() // n_rows)
        blocks = list(every(self.rows(self.source), cells, block=settings.block, apart=apart))
        for layer in model.layers:
            rows = model.read[layer](torch.cat([block[settings.read, layer] for block in blocks]))
            values = model.preactivations(layer, rows).relu().flatten()
            n_active = settings.k * len(rows)
            if n_active < len(values):
                # JumpReLU keeps the values above this one, which are the n_active largest.
                model.running[layer] = float(values.kthvalue(len(values) - n_active).values)
            else:
                model.running[layer] = 0.0

    def _scaled(self, batch: Mapping[Cell, Tensor]) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        settings, model = self.settings, self.model
        inputs = {layer: scaled(batch[settings.read, layer]) for layer, scaled in model.read.items()}
        outputs = {layer: scaled(batch[settings.writes, layer]) for layer, scaled in model.write.items()}
        return inputs, outputs

    def _note(self, log: checkpoint.Log, step_loss: Loss) -> None:
        due = [n and (self.step % n == 0 or self.is_done) for n in (self.log_every, self.validate_every)]
        if not any(due):
            return
        settings = self.settings
        line: dict[str, Any] = {
            "loss": float(step_loss.total.detach()),
            "fvu": {layer: float(value) for layer, value in sorted(step_loss.fvu.items())},
            "l0": {
                layer: float((activations != 0).sum(1).float().mean())
                for layer, activations in step_loss.activations.items()
            },
            "dead": {layer: int((quiet > settings.dead_tokens).sum()) for layer, quiet in self.quiet.items()},
            "penalty": float(step_loss.penalty),
            "auxiliary": float(step_loss.auxiliary),
            "lr": self.optimiser.param_groups[0]["lr"],
        }
        if settings.activation == "batchtopk":
            line["threshold"] = dict(self.model.running)
        if due[1] and self.held_out is not None:
            figures = self.measured(self.held_out, max_rows=VALIDATION)
            line["held_out_fvu"] = {int(m): float(figures.fvu.sel(target=m)) for m in figures.target.values}
            line["held_out_l0"] = {
                int(layer): float(figures.l0.sel(layer=layer)) for layer in figures.layer.values
            }
        log.write(step=self.step, **line)

    # -- initialisation

    def _begin(self, stored: Mapping[str, Any] | None) -> None:
        settings = self.settings
        # A resumed training has the scales of its start, which its weights refer to.
        if stored is None:
            read, write = self._scales()
        else:
            read, write = (
                {n: Normaliser(*pair) for n, pair in stored[side].items()} for side in ("read", "write")
            )
        widths = tuple(self.source.width(place) for place in self.places)
        # `Crosscoder` has one tensor for all places.
        if len(set(widths)) > 1:
            raise ConfigError(
                "expected hook points of one width for a crosscoder, found widths "
                f"{sorted(set(widths))}; choose other layers, or models of equal width"
            )
        self.model = DictionaryModel(settings, read, write, seed=settings.seed, widths=widths)
        self.optimiser = torch.optim.Adam(
            self.model.parameters(), lr=settings.rate, betas=(0.9, 0.999), eps=1e-8
        )
        self.quiet = {n: torch.zeros(settings.features, dtype=torch.int64) for n in self.model.layers}
        if stored is not None:
            self.step = stored["step"]
            self.model.load_state_dict(stored["model"])
            self.model.running = stored["running"]
            self.optimiser.load_state_dict(stored["optimiser"])
            self.quiet = stored["quiet"]
        elif settings.start == "samples":
            self.model.start_from(*self._samples())

    def _scales(self) -> tuple[Any, Any]:
        settings = self.settings
        statistics = self._moments()
        if self.places:
            joined = {0: Normaliser.joined([statistics[place] for place in self.places])}
            return joined, joined
        read, write = (
            {layer: Normaliser.of(statistics[hook, layer]) for layer in self.layer_numbers}
            for hook in (settings.read, settings.writes)
        )
        return read, write

    def _moments(self) -> dict[Cell, RowStatistics]:
        """Mean and variance at each hook point, from blocks spread evenly over the training data."""
        settings = self.settings
        # Every apart-th block: neighbouring tokens are correlated, so blocks are spread over the corpus.
        apart = max(1, self.source.count() // STATISTICS)
        read: tuple[Cell, ...] = self.places or self.cells
        statistics = moments(every(self.source, read, block=settings.block, apart=apart))
        if not statistics:
            raise ConfigError(
                f"expected prompts with tokens after the first skip_positions={settings.skip_positions}, "
                "found none to train on; use longer prompts"
            )
        return statistics

    def _samples(self) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Inputs and outputs of as many random tokens as there are features, by layer [row, width].

        They are the initial weights. The draw has a seed of its own.
        """
        settings = self.settings
        size = min(settings.features, self.source.count())
        batches = self._shuffled(
            batch=size, window=max(settings.window, settings.features), seed=settings.seed + 1
        )
        with closing(batches.since(0)) as batch_iterator:
            tensors = next(batch_iterator).tensors()
        # Rows of one batch: inputs and outputs belong to the same tokens.
        inputs = {layer: tensors[settings.read, layer] for layer in self.layer_numbers}
        return inputs, {layer: tensors[settings.writes, layer] for layer in self.layer_numbers}


def _first(
    blocks: Iterable[dict[VariableLayer, Tensor]], max_rows: int | None
) -> Iterator[dict[VariableLayer, Tensor]]:
    """Yield blocks until they have `max_rows` rows in all; None yields all blocks."""
    n_rows = 0
    for block in blocks:
        yield block
        n_rows += len(next(iter(block.values())))
        if max_rows is not None and n_rows >= max_rows:
            return


def schedule(step: int, settings: TrainingSettings) -> float:
    """Learning rate of a step as a share of its peak: linear warm-up, plateau at 1, linear decay to 0.

    Arguments:
        step: Number of the step, from 0.
        settings: Settings of the training.
    """
    warm, fall = settings.warmup * settings.steps, settings.decay * settings.steps
    # step + 1: a learning rate of 0 would waste the first step.
    rising = (step + 1) / warm if warm else 1.0
    falling = (settings.steps - step) / fall if fall else 1.0
    return min(1.0, rising, falling)


def active_count(step: int, settings: TrainingSettings, d_in: int) -> int:
    """Number k of active features in a step; falls linearly from min(features, 10 d_in) to `settings.k`.

    Arguments:
        step: Number of the step, from 0.
        settings: Settings of the training.
        d_in: Width of the rows that are read.
    """
    initial = max(settings.k, min(settings.features, 10 * d_in))
    share = pressure(step, settings)
    return round(initial + (settings.k - initial) * share)


def pressure(step: int, settings: TrainingSettings) -> float:
    """Factor of the sparsity penalty in a step, which rises linearly from 0 to 1 while annealing lasts.

    Arguments:
        step: Number of the step, from 0.
        settings: Settings of the training.
    """
    steps = settings.annealing * settings.steps
    return min(1.0, step / steps) if steps else 1.0


def _places(settings: TrainingSettings, source: Source, layers: Sequence[int]) -> tuple[Cell, ...]:
    """Hook points of a crosscoder as (kind, layer), or (kind, layer, run) if there are several models."""
    if isinstance(source, SideBySide):
        runs = range(len(source.runs))
        return tuple((settings.read, layer, run) for run in runs for layer in layers)
    return tuple((settings.read, layer) for layer in layers)


def _layers(settings: TrainingSettings, source: Source) -> tuple[int, ...]:
    """Layers to train on: those in the settings, else all whose hook points are both stored."""
    both = set(source.layers(settings.read)) & set(source.layers(settings.writes))
    layers = tuple(sorted(set(settings.layers))) if settings.layers is not None else tuple(sorted(both))
    if not layers:
        points = (
            settings.read if settings.read == settings.writes else f"{settings.read} and {settings.writes}"
        )
        raise ConfigError(
            f"expected stored activations of {points} to train on, found none in any layer; capture them "
            "first"
        )
    if settings.kind in ("plt", "clt") and layers != tuple(range(len(layers))):
        raise ConfigError(
            f"a dictionary of kind {settings.kind!r} needs every layer from 0 on, found only layers "
            f"{', '.join(map(str, layers))}; capture the missing layers, or set layers"
        )
    return layers

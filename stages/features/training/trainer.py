"""The training loop: batches in, a dictionary and a checkpoint out.

    training = Training(Settings(kind="sae", features=1024, k=16), StoredActivations(entry), Path("sae"))
    training.run()                                  # or again, after a kill: goes on where it was
    training.layers                                 # layer -> LayerFeatures, on activations as stored

Adam; a linear warm-up, a plateau, a linear fall to 0; gradients cut at a norm. With topk and batchtopk
decoder rows have norm 1 (all targets together) and k falls to its value from min(features, 10 d_in); with
penalties rows are free, since penalties weigh them, and the coefficient rises from 0.

Equal settings and data give equal bits on one machine with one number of torch's threads, interrupted or not.

Border: stored activations, in a folder of its own; captures nothing, exports nothing.
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
from .models import DictionaryModel, Normaliser, scales
from .settings import TrainingSettings
from .statistics import RowStatistics, moments

if TYPE_CHECKING:
    import xarray as xr

    from ....store.runs.committed import VariableLayer
    from ..layers.layer import LayerFeatures

__all__ = ["Source", "Training"]

Source = StoredActivations | EndToEnd | SideBySide

STATISTICS = 1 << 18
"""Tokens from which means and scales are taken, spread over all of them."""
SETTLING = 1 << 23
"""Pre-activations of a layer from which the thresholds of batchtopk are taken at the end."""
VALIDATION = 1 << 15
"""Held-out tokens that are looked at while training."""


class Training:
    """A training in a folder, begun or resumed.

    source: what may be read: a run, runs of one model end to end, or, of a crosscoder, those of several
    models side by side. `settings.validation` of its prompts are held out. log_every, validate_every,
    save_every: in steps; they decide no number of the result.
    Raises ConfigError for settings that do not fit the data, or a folder with another training; EntryNotFound
    for a hook point or layer that is not stored; ShapeError where activations are not finite. Nothing is
    written before the first step is made.
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
            self.layer_numbers = (0,)
        reads = [(settings.read, layer) for layer in self.layer_numbers]
        writes = [(settings.writes, layer) for layer in self.layer_numbers]
        self.cells: tuple[VariableLayer, ...] = tuple(dict.fromkeys([*reads, *writes]))
        self.rows(self.source).require(self.cells)
        self.data = self.rows(self.source).identity(self.cells)
        held = checkpoint.load(folder)
        if held is not None:
            before = TrainingSettings().plain() | held["settings"]
            checkpoint.require_same(folder, {**held, "settings": before}, settings.plain(), self.data)
        self.held_out: Source | None = None
        if settings.validation:
            self.source, self.held_out = self.source.split(settings.validation, settings.seed)
        self.step = 0
        self._begin(held)

    # -- what came out

    @property
    def is_done(self) -> bool:
        """Whether all steps are made."""
        return self.step >= self.settings.steps

    @property
    def layers(self) -> dict[int, LayerFeatures]:
        """The features of each layer, on activations as stored; float32."""
        return {layer: self.model.folded(layer) for layer in self.model.layers}

    def rows(self, source: Source) -> TokenRows:
        """A source as the model reads it: of a crosscoder, all places in one row."""
        return Joined(source, {(self.settings.read, 0): self.places}) if self.places else source

    def measured(self, source: Source, *, most: int | None = None) -> xr.Dataset:
        """Figures of `evaluate.measure` on all rows of a source, or on its first `most` and few more."""
        it = self.settings
        return measure(self.layers, _first(self._blocks(source), most), it.read, it.writes)

    def crosscoder(self, models: Sequence[str]) -> Crosscoder:
        """What was trained of kind crosscoder. models: name of each run's model, in order."""
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
        """Rows of a source [row, place, width], block by block: what a crosscoder is measured on."""
        for block in self._blocks(source):
            yield block[self.cells[0]].unflatten(1, (len(self.places), -1))

    # -- the loop

    @plain_torch()
    def run(
        self, *, advance: Callable[[int], None] = lambda _: None, stop: Callable[[], bool] = lambda: False
    ) -> bool:
        """Make the steps that are missing; whether all are made. A checkpoint is left behind in any case.

        advance: called with the tokens of each step. stop: asked after each step.
        """
        if self.is_done:
            return True
        log = None
        with closing(self._batches.since(self.step)) as batches:
            while not self.is_done:
                found = self._make_step(next(batches).tensors())
                if self.is_done and self.settings.activation == "batchtopk":
                    self._settle_thresholds()
                log = log or checkpoint.Log(self.folder, self.step - 1)
                self._note(log, found)
                advance(self.settings.batch)
                stopped = stop()
                if self.is_done or stopped or self.step % self.save_every == 0:
                    self.save()
                if stopped:
                    break
        return self.is_done

    def save(self) -> None:
        """Leave a checkpoint of this step."""
        state = {
            "settings": self.settings.plain(),
            "data": self.data,
            "step": self.step,
            "model": self.model.state_dict(),
            "running": self.model.running,
            "optimiser": self.optimiser.state_dict(),
            "quiet": self.quiet,
            "read": {layer: (it.mean, it.scale) for layer, it in self.model.read.items()},
            "write": {layer: (it.mean, it.scale) for layer, it in self.model.write.items()},
        }
        checkpoint.save(self.folder, state)

    @cached_property
    def _batches(self) -> Batches:
        """Those of steps: batch number n is of step n."""
        it = self.settings
        return self._shuffled(batch=it.batch, window=it.window, seed=it.seed)

    def _blocks(self, source: Source) -> Iterator[dict[VariableLayer, Tensor]]:
        """All rows of a source, in the order of the store."""
        it = self.settings
        kept = source.leaving_out(positions=it.skip_positions, tokens=it.without)
        return every(self.rows(kept), self.cells, block=it.block)

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
        it, model = self.settings, self.model
        for group in self.optimiser.param_groups:
            group["lr"] = it.rate * schedule(self.step, it)
        inputs, outputs = self._scaled(batch)
        found = loss(
            model,
            inputs,
            outputs,
            k=active_count(self.step, it, model.d_in),
            pressure=pressure(self.step, it),
            dead={layer: quiet > it.dead_tokens for layer, quiet in self.quiet.items()},
        )
        if not bool(found.total.isfinite()):
            raise ConfigError(
                f"the loss of step {self.step} is not finite; the last checkpoint stands. Train with a lower "
                f"learning rate than lr={it.rate:.2g}"
            )
        self.optimiser.zero_grad(set_to_none=True)
        found.total.backward()
        if it.is_top:
            model.remove_parallel_gradients()
        torch.nn.utils.clip_grad_norm_(model.parameters(), it.clip)
        self.optimiser.step()
        if it.is_top:
            model.keep_norms()
        for layer, a in found.activations.items():
            self.quiet[layer] += len(a)
            self.quiet[layer][(a != 0).any(0)] = 0
        self.step += 1
        return found

    @torch.no_grad()
    def _settle_thresholds(self) -> None:
        """Thresholds at which k features are active on average, in place of the running ones, which lag
        behind.
        """
        it, model = self.settings, self.model
        cells = [(it.read, layer) for layer in model.layers]
        wanted = max(it.k, SETTLING // it.features)
        apart = max(1, self.source.count() // wanted)
        found = list(every(self.rows(self.source), cells, block=it.block, apart=apart))
        for layer in model.layers:
            rows = model.read[layer](torch.cat([block[it.read, layer] for block in found]))
            values = model.preactivations(layer, rows).relu().flatten()
            kept = it.k * len(rows)
            if kept < len(values):  # what is above the next value is kept
                model.running[layer] = float(values.kthvalue(len(values) - kept).values)
            else:
                model.running[layer] = 0.0

    def _scaled(self, batch: Mapping[Cell, Tensor]) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        it, model = self.settings, self.model
        inputs = {layer: scaled(batch[it.read, layer]) for layer, scaled in model.read.items()}
        outputs = {layer: scaled(batch[it.writes, layer]) for layer, scaled in model.write.items()}
        return inputs, outputs

    def _note(self, log: checkpoint.Log, found: Loss) -> None:
        due = [n and (self.step % n == 0 or self.is_done) for n in (self.log_every, self.validate_every)]
        if not any(due):
            return
        it = self.settings
        line: dict[str, Any] = {
            "loss": float(found.total.detach()),
            "fvu": {layer: float(value) for layer, value in sorted(found.fvu.items())},
            "l0": {layer: float((a != 0).sum(1).float().mean()) for layer, a in found.activations.items()},
            "dead": {layer: int((quiet > it.dead_tokens).sum()) for layer, quiet in self.quiet.items()},
            "penalty": float(found.penalty),
            "auxiliary": float(found.auxiliary),
            "lr": self.optimiser.param_groups[0]["lr"],
        }
        if it.activation == "batchtopk":
            line["threshold"] = dict(self.model.running)
        if due[1] and self.held_out is not None:
            seen = self.measured(self.held_out, most=VALIDATION)
            line["held_out_fvu"] = {int(m): float(seen.fvu.sel(target=m)) for m in seen.target.values}
            line["held_out_l0"] = {int(layer): float(seen.l0.sel(layer=layer)) for layer in seen.layer.values}
        log.write(step=self.step, **line)

    # -- beginning

    def _begin(self, held: Mapping[str, Any] | None) -> None:
        it = self.settings
        if held is None:
            read, write = self._scales()
        else:
            read, write = (
                {n: Normaliser(*pair) for n, pair in held[side].items()} for side in ("read", "write")
            )
        widths = tuple(self.source.width(place) for place in self.places)
        if len(set(widths)) > 1:
            raise ConfigError(f"expected places of one width, found {sorted(set(widths))}; choose others")
        self.model = DictionaryModel(it, read, write, seed=it.seed, widths=widths)
        self.optimiser = torch.optim.Adam(self.model.parameters(), lr=it.rate, betas=(0.9, 0.999), eps=1e-8)
        self.quiet = {n: torch.zeros(it.features, dtype=torch.int64) for n in self.model.layers}
        if held is not None:
            self.step = held["step"]
            self.model.load_state_dict(held["model"])
            self.model.running = held["running"]
            self.optimiser.load_state_dict(held["optimiser"])
            self.quiet = held["quiet"]
        elif it.start == "samples":
            self.model.start_from(*self._samples())

    def _scales(self) -> tuple[Any, Any]:
        it = self.settings
        found = self._moments()
        if self.places:
            joined = {0: Normaliser.joined([found[place] for place in self.places])}
            return joined, joined
        read = {layer: found[it.read, layer] for layer in self.layer_numbers}
        write = {layer: found[it.writes, layer] for layer in self.layer_numbers}
        return scales(read, self.layer_numbers), scales(write, self.layer_numbers)

    def _moments(self) -> dict[Cell, RowStatistics]:
        """Of blocks spread evenly over all that is trained on."""
        it = self.settings
        apart = max(1, self.source.count() // STATISTICS)
        read: tuple[Cell, ...] = self.places or self.cells
        found = moments(every(self.source, read, block=it.block, apart=apart))
        if not found:
            raise ConfigError(
                f"expected tokens behind the first {it.skip_positions} of each prompt, found none"
            )
        return found

    def _samples(self) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """As many rows as there are features, in the order of an epoch of their own."""
        it = self.settings
        size = min(it.features, self.source.count())
        batches = self._shuffled(batch=size, window=max(it.window, it.features), seed=it.seed + 1)
        with closing(batches.since(0)) as some:
            found = next(some).tensors()
        inputs = {layer: found[it.read, layer] for layer in self.layer_numbers}
        return inputs, {layer: found[it.writes, layer] for layer in self.layer_numbers}


def _first(
    blocks: Iterable[dict[VariableLayer, Tensor]], most: int | None
) -> Iterator[dict[VariableLayer, Tensor]]:
    """Blocks until they have `most` rows or more."""
    seen = 0
    for block in blocks:
        yield block
        seen += len(next(iter(block.values())))
        if most is not None and seen >= most:
            return


def schedule(step: int, settings: TrainingSettings) -> float:
    """Share of the peak learning rate: up over the warm-up, 1, down to 0 over the decay."""
    warm, fall = settings.warmup * settings.steps, settings.decay * settings.steps
    rising = (step + 1) / warm if warm else 1.0
    falling = (settings.steps - step) / fall if fall else 1.0
    return min(1.0, rising, falling)


def active_count(step: int, settings: TrainingSettings, d_in: int) -> int:
    """k of a step: from min(features, 10 d_in) down to its value, in a straight line."""
    first = max(settings.k, min(settings.features, 10 * d_in))
    share = pressure(step, settings)
    return round(first + (settings.k - first) * share)


def pressure(step: int, settings: TrainingSettings) -> float:
    """Share of the sparsity in force, from 0 to 1 over the annealing."""
    steps = settings.annealing * settings.steps
    return min(1.0, step / steps) if steps else 1.0


def _places(settings: TrainingSettings, source: Source, layers: Sequence[int]) -> tuple[Cell, ...]:
    """Where a crosscoder reads and writes: layers, of each model where there are several."""
    if isinstance(source, SideBySide):
        runs = range(len(source.runs))
        return tuple((settings.read, layer, run) for run in runs for layer in layers)
    return tuple((settings.read, layer) for layer in layers)


def _layers(settings: TrainingSettings, source: Source) -> tuple[int, ...]:
    """Layers to train on: as set, or all that both hook points are stored of."""
    both = set(source.layers(settings.read)) & set(source.layers(settings.writes))
    chosen = tuple(sorted(set(settings.layers))) if settings.layers is not None else tuple(sorted(both))
    if not chosen:
        raise ConfigError(
            f"expected layers of which {settings.read} and {settings.writes} are stored, found none; capture "
            "them"
        )
    if settings.kind in ("plt", "clt") and chosen != tuple(range(len(chosen))):
        raise ConfigError(
            f"a {settings.kind} has features of every layer from 0 on, found layers "
            f"{', '.join(map(str, chosen))}; capture the others, or choose layers"
        )
    return chosen

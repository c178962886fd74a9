"""Fit of the Jacobian lens: the mean Jacobian of the last residual stream with respect to earlier ones.

Gurnee et al. 2026, "Verbalizable Representations Form a Global Workspace in Language Models". With h[l,t] the
residual stream after layer l at position t, L the last layer, and V the counted positions of a prompt (all
but the first `skip` and the last one), a prompt gives

    J[l] = 1/|V| sum over t in V of  sum over t' in V with t' >= t of  d h[L,t'] / d h[l,t],

and the lens is the plain mean over prompts. Every prompt weighs the same, whatever its length.

An exact fit takes as many vector-Jacobian products per prompt as the stream is wide. With k random cotangents
it takes k of them: J - 1 is projected on the span of k random directions, drawn for each prompt, and scaled
by width / k. The estimate is unbiased; the identity, which the residual connections contribute, is left out
of the projection because it would only add variance. Its spread over prompts covers both the prompts and the
draws.

A lens is a dataset: the fit of a prompt, of a segment of prompts and of a corpus have one form, and are
joined by one function, `merged`. Its attributes say how it was fitted, in the words of the published files.

Axes: layer (source), target_hidden (dimension of the last stream), hidden (dimension of the source), so that
the product of `jacobian` and a stream over `hidden` transports the stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...pipeline import Output
from ...store.arrays import Array
from ...store.errors import PromptError, ShapeError, StageError
from ..forward.runs.experiment import CellLabels, Experiment

if TYPE_CHECKING:
    import xarray as xr

    from ..forward.architectures.architecture import Architecture
    from ..forward.hooks.cache import HookCache
    from ..forward.models.model import Model
    from ..forward.runs.run import Run

__all__ = ["JacobianLensFit", "merged", "standard_error"]

OUTPUTS: Mapping[str, Output] = {
    "jacobian": Output(
        ("layer", "target_hidden", "hidden"), "1", "mean Jacobian of the last residual stream, over prompts"
    ),
    "n_prompts": Output((), "1", "number of prompts in the mean"),
    "deviation": Output(
        ("layer",),
        "1",
        "sum over prompts of the squared Frobenius norm of their difference from the mean",
        is_optional=True,
    ),
}
"""Arrays of a lens. A lens from a published file has no deviation."""


@dataclass(frozen=True, kw_only=True)
class JacobianLensFit(Experiment):
    """Jacobian lens of a model over a corpus, computed and stored a segment of prompts at a time."""

    prompts: tuple[tuple[int, ...], ...]
    """Token ids of each prompt. Prompts without a counted position are left out."""
    layers: tuple[int, ...] | None = None
    """Source layers, negative ones from the end; None for all but the last."""
    skip: int = 16
    """Number of positions at the beginning of each prompt that are not counted."""
    longest: int = 128
    """Number of tokens after which prompts are cut off."""
    cotangents: int | None = None
    """Number of random cotangents per prompt; None for the exact Jacobian."""
    seed: int = 0
    """Seed of the random cotangents."""
    segment: int = 8
    """Prompts that are computed and stored together: a killed fit loses at most one segment."""
    batch: int = field(default=16, compare=False)
    """Cotangents per backward pass; changes speed and memory, and no number beyond rounding."""

    name: ClassVar[str] = "jacobian_lens_fit"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = OUTPUTS
    joins_lazily: ClassVar[bool] = True

    def params(self) -> dict[str, Any]:
        """Fields that enter the key of results. Source layers and prompts are labels of cells, so that a
        longer corpus that begins with the same prompts reuses the complete segments of a shorter one; an
        exact fit has no seed."""
        params = {"skip": self.skip, "longest": self.longest}
        drawn = {"cotangents": self.cotangents, "seed": self.seed}
        return params if self.cotangents is None else params | drawn

    def counted(self) -> list[tuple[int, ...]]:
        """The prompts with a counted position, cut off after `longest` tokens."""
        cut = (tuple(ids[: self.longest]) for ids in self.prompts)
        return [ids for ids in cut if len(ids) > self.skip + 1]

    def sources(self, config: Architecture) -> list[int]:
        """Source layers counted from 0, ascending.

        Raises:
            StageError: There is none, one is the last layer, or one is out of range.
        """
        last = config.num_layers - 1
        if self.layers is None:
            return list(range(last))
        for layer in self.layers:
            if not -last - 1 <= layer <= last or layer in (last, -1):
                raise StageError(
                    f"{self.name}: expected source layers in 0..{last - 1}, below the last layer {last}, "
                    f"which the model itself reads, found {layer}; leave layers out for all of them"
                )
        if not self.layers:
            raise StageError(
                f"{self.name}: expected at least one source layer, found none; leave layers out for all"
            )
        return sorted({layer % config.num_layers for layer in self.layers})

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One cell per segment of prompts, labelled by their token ids and the source layers.

        Raises:
            ConfigError: The model has no gradients, or positions see later ones.
            StageError: A number is out of range, or there are no such source layers.
            PromptError: No prompt has a counted position.
        """
        config.require_gradients()
        config.require_next_token()
        layers, width = self.sources(config), config.axis_sizes["hidden"]
        for name, least, most in (
            ("skip", 0, None),
            ("longest", 1, None),
            ("segment", 1, None),
            ("batch", 1, None),
            ("cotangents", 1, width),
        ):
            value = getattr(self, name)
            if value is not None and (value < least or (most is not None and value > most)):
                limits = f"at least {least}" if most is None else f"from {least} to {most}, the width"
                raise StageError(f"{self.name}: expected {name} {limits}, found {value}")
        prompts = self.counted()
        if not prompts:
            raise PromptError(
                f"{self.name}: expected a prompt of at least {self.skip + 2} tokens, {self.skip} of which "
                f"are skipped and the last not counted, found none among {len(self.prompts)} prompts cut off "
                f"after {self.longest} tokens; give longer prompts or a smaller skip"
            )
        starts = range(0, len(prompts), self.segment)
        segments = [[list(ids) for ids in prompts[start : start + self.segment]] for start in starts]
        return [{"layers": layers, "prompts": segment} for segment in segments]

    def prepare(self, model: Model) -> Model:
        """The model itself, which is differentiated instead of run."""
        return model

    def runs(self, prepared: Model, cell: CellLabels) -> Sequence[Run]:
        """No planned runs, as passes with gradients share nothing."""
        return []

    def measure(self, prepared: Model, cell: CellLabels, result: HookCache) -> None:
        """Never called, as there are no runs; `dataset` differentiates."""

    def dataset(self, prepared: Model, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """The lens of one segment: jacobian [layer, target_hidden, hidden], n_prompts, deviation [layer]."""
        return merged(self._of_prompt(prepared, cell["layers"], ids) for ids in cell["prompts"])

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """The lens of all segments."""
        return merged(parts)

    def _of_prompt(self, model: Model, layers: Sequence[int], ids: Sequence[int]) -> xr.Dataset:
        """The lens of one prompt."""
        import torch
        import xarray as xr

        width = model.config.axis_sizes["hidden"]
        cotangents = self._cotangents(ids, width)
        rows = np.eye(width, dtype=np.float32) if cotangents is None else cotangents
        jacobian: Array = (
            model.vector_jacobian_products(
                ids, layers, torch.as_tensor(rows), range(self.skip, len(ids) - 1), together=self.batch
            )
            .cpu()
            .numpy()
        )
        if cotangents is not None:
            # J = 1 + (width / k) Q'(Q J - Q): the projection on k random directions Q, of J - 1 only.
            scaled = cotangents.T * np.float32(width / len(cotangents))
            jacobian = np.eye(width, dtype=np.float32) + scaled @ (jacobian - cotangents)
        values = {"jacobian": jacobian, "n_prompts": np.int64(1), "deviation": np.zeros(len(layers))}
        attrs = {
            "estimator": "jacobian_lens",
            "target_layer": model.config.num_layers - 1,
            "skip_first_positions": self.skip,
            "max_seq_len": self.longest,
        }
        if cotangents is not None:
            attrs |= {"cotangents": len(cotangents)}
        variables = {name: OUTPUTS[name].variable(value) for name, value in values.items()}
        return xr.Dataset(variables, {"layer": layers}, attrs)

    def _cotangents(self, ids: Sequence[int], width: int) -> Array | None:
        """Orthonormal random cotangents of a prompt, float32 [cotangent, width]; None for an exact fit."""
        if self.cotangents is None:
            return None
        # Of the prompt and not of its place, so that segments can be reused in another corpus.
        drawn = np.random.default_rng([self.seed, *ids]).standard_normal((width, self.cotangents))
        return np.linalg.qr(drawn)[0].T.astype(np.float32)


def merged(lenses: Iterable[xr.Dataset]) -> xr.Dataset:
    """Merge lenses of different prompts into the lens of all of them.

    Means are weighted by the numbers of prompts and accumulated in float64; deviations are combined by the
    formula of Chan, Golub and LeVeque (1983). One lens is in memory at a time.

    Arguments:
        lenses: Fits with the same settings, of prompts that do not overlap. That they are of one model is
            not checked beyond layers, width and attributes.

    Raises:
        ShapeError: There is none, one was fitted on no prompt, or layers, width or attributes differ.
    """
    first: xr.Dataset | None = None
    n, deviation = 0, None
    mean: Array = np.zeros(0)
    for lens in lenses:
        # A copy, so that a lazily opened lens does not keep its values after its turn.
        part = lens.compute()
        # A tuned lens states none.
        count, values = int(part.get("n_prompts", 0)), part["jacobian"].values
        if count < 1:
            raise ShapeError(
                "expected lenses that state how many prompts they were fitted on, to weigh them, found one "
                f"with n_prompts = {count}; fit it again"
            )
        spread = part["deviation"].values if "deviation" in part else None
        if first is None:
            first, n, mean, deviation = part, count, values.astype(np.float64), spread
            continue
        _require_alike(first, part)
        difference = values - mean
        n += count
        if deviation is not None and spread is not None:
            squares = np.square(difference).sum((1, 2))
            deviation = deviation + spread + squares * ((n - count) * count / n)
        else:
            deviation = None
        mean += difference * (count / n)
    if first is None:
        raise ShapeError("expected at least one lens to merge, found none")
    merged_values = {"jacobian": mean.astype(np.float32), "n_prompts": np.int64(n), "deviation": deviation}
    variables = {
        name: OUTPUTS[name].variable(value) for name, value in merged_values.items() if value is not None
    }
    return first.drop_vars("deviation", errors="ignore").assign(variables)


def standard_error(lens: xr.Dataset) -> xr.DataArray:
    """Estimated standard error of a lens by layer: the Frobenius norm of its error, as a root mean square
    over repeated samples of as many independent prompts.

    Prompts cut from one text are not independent, so that the error is then estimated too small.

    Arguments:
        lens: A lens with a deviation, of at least two prompts.

    Returns:
        float64 [layer], in the unit of the Frobenius norm of `jacobian`.

    Raises:
        ShapeError: The lens has no deviation, or was fitted on one prompt.
    """
    n = int(lens.get("n_prompts", 0))
    if "deviation" not in lens or n < 2:
        raise ShapeError(
            "expected a lens fitted here on at least two prompts, to estimate its error from their spread, "
            f"found one {'without a deviation' if 'deviation' not in lens else 'of one prompt'}; fit it on "
            "more prompts"
        )
    error: xr.DataArray = (lens["deviation"] / (n * (n - 1))) ** 0.5
    return error.rename("standard_error").assign_attrs(units="1", long_name="standard error of the lens")


def _require_alike(first: xr.Dataset, other: xr.Dataset) -> None:
    """Raise ShapeError unless two lenses have the same layers, width and attributes."""
    layers = [lens["layer"].values.tolist() for lens in (first, other)]
    widths = [lens.sizes["hidden"] for lens in (first, other)]
    facts = {"layers": layers, "width": widths}
    facts |= {name: [first.attrs.get(name), other.attrs.get(name)] for name in {*first.attrs, *other.attrs}}
    for name, (one, another) in sorted(facts.items(), key=lambda item: str(item[0])):
        if one != another:
            raise ShapeError(
                f"expected lenses of one fit to merge, found {name} {one!r} and {another!r}; fit them with "
                "the same settings"
            )

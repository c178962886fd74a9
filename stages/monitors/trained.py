"""A trained probe as a value: it scores activations while a model runs, as a reduction of a capture.

    probe = TrainedProbe.of(result, layer=12)                      # result of `train_probes`
    spec = HookSpec().capture(probe.point, reduce=probe)           # scores are stored instead of states

Needs no model and no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ...store.arrays import Floats
from ...store.digest import array_digest, digest
from ...store.errors import ConfigError, StageError, nearest
from ...store.identity import DIGEST
from ..forward.architectures.points import BY_NAME, HookPoint, as_point

if TYPE_CHECKING:
    import xarray as xr

    from ..forward.architectures.architecture import Architecture

__all__ = ["TrainedProbe"]


@dataclass(frozen=True, eq=False)
class TrainedProbe:
    """A linear detector of a property at one hook point of one model."""

    name: str
    """Name in messages and in the description of stored scores."""
    point: HookPoint
    """Hook point whose activations are scored."""
    pooling: str
    """How the tokens of a prompt are pooled: "last", "mean" or "max"; "token" to score each token."""
    weight: Floats
    """Weights, for unscaled states, float64 [hidden]."""
    bias: float
    """Bias: pooled state @ weight + bias are log-odds of the property."""
    model: str = ""
    """Digest of the model whose states it was trained on; empty for states of unknown origin."""

    @classmethod
    def of(cls, probes: xr.Dataset, *, layer: int, method: str = "logistic", name: str = "") -> TrainedProbe:
        """One probe of a result of `train_probes`.

        Arguments:
            probes: Result of `train_probes` on activations of a hook point.
            layer: Layer of the probe.
            method: Method of the probe.
            name: Name of the probe; empty for its method and hook point.

        Raises:
            ConfigError: The result has no such layer or method, or was trained on something else than
                activations.
        """
        layers, methods = probes["layer"].values.tolist(), probes["probe"].values.tolist()
        if layer not in layers or method not in methods:
            near = nearest(method, methods)
            raise ConfigError(
                f"expected a layer among {layers} and a method among {', '.join(methods)}, found layer "
                f"{layer} and {method!r}" + (f"; nearest is {near!r}" if near and near != method else "")
            )
        kind = str(probes.attrs.get("point", ""))
        if kind not in BY_NAME:
            raise ConfigError(
                f"expected probes of activations of a hook point, found probes of {kind or 'no point'!r}; "
                "train on an array of a capture, such as resid_post, or on its pooled states"
            )
        point = as_point(BY_NAME[kind].path.format(layer))
        chosen = probes.sel(layer=layer, probe=method)
        return cls(
            name=name or f"{method} probe at {point}",
            point=point,
            pooling=str(probes.attrs["pooling"]),
            weight=np.ascontiguousarray(chosen["weight"].values, np.float64),
            bias=float(chosen["bias"]),
            model=str(probes.attrs.get(DIGEST, "")),
        )

    @cached_property
    def identity(self) -> str:
        """Digest of weights, bias, pooling, hook point and model; the name is no part of it."""
        values = array_digest(np.append(self.weight, self.bias))
        return digest("probe", [str(self.point), self.pooling, values, self.model])

    def require_fit(self, config: Architecture, model: str, identity: str) -> None:
        """Check that a model is the one whose states the probe was trained on.

        Arguments:
            config: Architecture of the model.
            model: Name of the model, for messages.
            identity: Digest of the model.

        Raises:
            StageError: The width of the hook point differs, or the digest of the model.
        """
        width = config.width(self.point.kind)
        if width != len(self.weight):
            raise StageError(
                f"{self.name}: expected states of width {len(self.weight)}, on which it was trained, found "
                f"width {width} in {model}; use the model of its states, or train another probe"
            )
        if self.model and self.model != identity:
            raise StageError(
                f"{self.name}: expected the model of its training states ({_short(self.model)}), found "
                f"{model} ({_short(identity)}); use the same weights and dtype, or train another probe"
            )


def _short(identity: str) -> str:
    return identity.rpartition(":")[2][:12]

"""Keys: immutable values that identify a computation; their digest is the name it is stored under.

A key contains everything that decides a number: the model (weights, config, version of the forward pass,
dtype, attention), token ids, interventions, version and parameters of a stage, contents of its inputs. It
does not contain device, batch size, chunking, compression, number of workers or library versions; those are
provenance.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from .digest import digest

NUMERIC = {"batching": "by length, right-padded, from the corpus alone", "deterministic": True}
"""Part of every run key: how batches are formed, because other batches give other last bits."""


class _Key:
    """Base class of keys: what identifies a computation, as plain values, and the digest of these values."""

    kind = "key"

    def request(self) -> dict[str, Any]:
        """The plain values that identify the computation; they are digested, and noted in provenance."""
        raise NotImplementedError

    @cached_property
    def digest(self) -> str:
        """sha256 of the kind of key and its plain values, 64 hex digits."""
        return digest(self.kind, self.request())

    @property
    def short(self) -> str:
        """First 12 digits of the digest, for display."""
        return self.digest[:12]


@dataclass(frozen=True)
class ModelIdentity(_Key):
    """Identity of a model: digests of its weights and config, version of the forward pass, dtype.

    The name of the model is not part of it, as names are not unique.
    """

    weights: str
    """"sha256:…" over the digests of the weight files."""
    config: str
    """Digest of the configuration that the forward pass reads."""
    forward: str
    """Version of the forward pass, e.g. "transformer/1"."""
    dtype: str
    """Dtype in which the model computes, e.g. "float32"."""
    attention: str = "sdpa"
    """Implementation of attention in layers where no hook point inside attention is captured."""

    kind = "model"

    def request(self) -> dict[str, Any]:
        """All fields by name, as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class RunKey(_Key):
    """Identity of a run: one model over one set of prompts under one set of interventions."""

    model: str
    """Digest of the model (`ModelIdentity.digest`)."""
    prompt: str
    """Digest of the prompts' token ids (`PackedTokens.digest`)."""
    hooks: str
    """Digest of the canonical interventions. Captures are not digested: they only select from a run."""

    kind = "run"

    @classmethod
    def of_request(cls, request: Mapping[str, Any]) -> RunKey:
        """Create the key from plain values that `request` returned; KeyError if a digest is missing."""
        return cls(request["model"], request["prompt"], request["hooks"])

    def request(self) -> dict[str, Any]:
        """The digests of model, prompts and interventions, and how batches are formed."""
        return {"model": self.model, "prompt": self.prompt, "hooks": self.hooks, "numeric": NUMERIC}


@dataclass(frozen=True)
class ActivationKey(_Key):
    """Identity of a stored array: one variable of a run at one layer, in one storage dtype."""

    run: RunKey
    """Key of the run."""
    variable: str
    """Name of the array in the run, such as "resid_post"."""
    layer: int | None
    """Layer number; None for an array without a layer axis."""
    dtype: str
    """Storage dtype of the run."""

    kind = "activation"

    def request(self) -> dict[str, Any]:
        """Digest of the run, and variable, layer and dtype of the array."""
        return {"run": self.run.digest, "variable": self.variable, "layer": self.layer, "dtype": self.dtype}


@dataclass(frozen=True, eq=False)
class ResultKey(_Key):
    """Identity of a stage's result.

    The parameters are copied and digested at once, so later changes to them do not affect the key.

    Raises:
        TypeError: A parameter is not a plain value.
        ValueError: A parameter is NaN, infinite or an integer beyond 2**53.
    """

    stage: str
    """Name of the stage, e.g. "logit_lens"; "logit_lens/cell" for a part that is computed by itself."""
    version: int | str
    """Declared version of the stage, raised when its numbers change; else a digest of its code."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Plain value of each parameter of the stage by name, defaults included."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Content digest of each input by name. Never its key: an input that is computed again with equal content
    then changes nothing downstream (early cutoff)."""

    kind = "result"

    def __post_init__(self) -> None:
        # Frozen dataclass; deepcopy, because a nested list could still be changed by the caller.
        object.__setattr__(self, "params", deepcopy(dict(self.params)))
        object.__setattr__(self, "inputs", dict(self.inputs))
        self.digest  # noqa: B018 - computed and kept

    def request(self) -> dict[str, Any]:
        """All fields by name, as plain values."""
        return {
            "stage": self.stage,
            "version": self.version,
            "params": dict(self.params),
            "inputs": dict(self.inputs),
        }

    def __eq__(self, other: object) -> bool:
        # Field by field would be wrong: 1 == 1.0 == True in Python, but they are different parameters.
        return self.digest == other.digest if isinstance(other, ResultKey) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

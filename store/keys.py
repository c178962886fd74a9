"""Keys: small immutable values that say what was computed; their digests name it.

In a key is everything that decides a number: the model (weights, config, declared version of the forward
pass, dtype, attention), the token ids, the interventions, a stage's version and parameters, the content of
what it reads. Not in a key: device, batch size, chunking, compression, worker count, library versions; those
are provenance.

Border: digests of models, prompts and hooks arrive as strings; how they were made is known elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from .digest import digest

NUMERIC = {"batching": "by length, right-padded, from the corpus alone", "deterministic": True}
"""How batches are made is part of what a stored number is: other batches give other last bits."""


class _Key:
    """What keys have in common: a request of plain values, and the digest of it."""

    kind = "key"

    def request(self) -> dict[str, Any]:
        """The key as plain values, as provenance records it."""
        raise NotImplementedError

    @cached_property
    def digest(self) -> str:
        """Of kind and request, 64 hex digits."""
        return digest(self.kind, self.request())

    @property
    def short(self) -> str:
        """First 12 digits, for people."""
        return self.digest[:12]


@dataclass(frozen=True)
class ModelIdentity(_Key):
    """Which model: never its name, which two models may share.

    weights: "sha256:…" over the digests of the weight files. config: digest of the configuration the forward
    pass reads. forward: its declared version, e.g. "transformer/1". dtype: of the computation. attention: how
    attention is computed where nothing is asked of it.
    """

    weights: str
    config: str
    forward: str
    dtype: str
    attention: str = "sdpa"

    kind = "model"

    def request(self) -> dict[str, Any]:
        """The five fields."""
        return asdict(self)


@dataclass(frozen=True)
class RunKey(_Key):
    """Which forward passes: one model over one set of prompts under one set of interventions.

    model: `ModelIdentity.digest`. prompt: digest of the packed token ids. hooks: digest of the canonical
    interventions; captures are a selection from the run and not part of it.
    """

    model: str
    prompt: str
    hooks: str

    kind = "run"

    @classmethod
    def of_request(cls, told: Mapping[str, Any]) -> RunKey:
        """The key whose `request` this is; KeyError where a digest is not told."""
        return cls(told["model"], told["prompt"], told["hooks"])

    def request(self) -> dict[str, Any]:
        """The three digests, and how numbers are made."""
        return {"model": self.model, "prompt": self.prompt, "hooks": self.hooks, "numeric": NUMERIC}


@dataclass(frozen=True)
class ActivationKey(_Key):
    """Which stored array: one variable of a run at one layer, in one storage dtype.

    layer: None where there is no layer axis.
    """

    run: RunKey
    variable: str
    layer: int | None
    dtype: str

    kind = "activation"

    def request(self) -> dict[str, Any]:
        """The run by its digest, and the array."""
        return {"run": self.run.digest, "variable": self.variable, "layer": self.layer, "dtype": self.dtype}


@dataclass(frozen=True, eq=False)
class ResultKey(_Key):
    """Which result of a stage: its version, its parameters, and the content (never the key) of each input.

    Takes its own copy of the parameters and is digested at once: whatever happens to them later, the key
    stays what it was.
    Raises TypeError or ValueError for parameters that are not plain values.
    """

    stage: str
    version: int | str
    params: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)

    kind = "result"

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", deepcopy(dict(self.params)))
        object.__setattr__(self, "inputs", dict(self.inputs))
        self.digest  # noqa: B018 - computed and kept

    def request(self) -> dict[str, Any]:
        """Stage, version, parameters, inputs."""
        return {
            "stage": self.stage,
            "version": self.version,
            "params": dict(self.params),
            "inputs": dict(self.inputs),
        }

    def __eq__(self, other: object) -> bool:
        # Not field by field: 1 == 1.0 == True in Python, but they are other parameters.
        return self.digest == other.digest if isinstance(other, ResultKey) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

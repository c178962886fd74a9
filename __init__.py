"""Mechanistic interpretability as a dataflow pipeline of cached, content-addressed stages.

    model = mizarr.Model.from_pretrained("specimen")
    cache = model.forward("The capital of France is", mizarr.HookSpec().capture("blocks.*.hook_resid_post"))
    store = mizarr.open_store("activations")
    states = mizarr.capture(model, ["a prompt", "another"], "blocks.*.hook_resid_post", store=store)

The names below are loaded when first used (PEP 562): importing mizarr imports neither torch nor xarray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .stages.forward.networks.kernels.tuning import fix_order_of_sums as _fix_order_of_sums
from .store.version import __version__ as __version__

# At import, because MKL reads its variable once, before the first matrix product of the process.
_fix_order_of_sums()

# Public name -> the module that defines it.
_HOME = {
    "Model": ".stages.forward.models.model",
    "HookPoint": ".stages.forward.architectures.points",
    "HookSpec": ".stages.forward.hooks.spec",
    "HookCache": ".stages.forward.hooks.cache",
    "RecurrentPass": ".stages.forward.hooks.recurrent",
    "Replace": ".stages.forward.hooks.interventions",
    "Add": ".stages.forward.hooks.interventions",
    "AddAtPositions": ".stages.forward.hooks.interventions",
    "Clamp": ".stages.forward.hooks.interventions",
    "LinearCondition": ".stages.forward.hooks.subspaces",
    "Knockout": ".stages.forward.hooks.edge_interventions",
    "Scale": ".stages.forward.hooks.interventions",
    "Zero": ".stages.forward.hooks.interventions",
    "Subspace": ".stages.forward.hooks.subspaces",
    "Steer": ".stages.forward.hooks.edge_interventions",
    "SetValue": ".stages.forward.hooks.edge_interventions",
    "logits": ".stages.forward.hooks.wants",
    "Run": ".stages.forward.runs.run",
    "run": ".stages.forward.runs.run",
    "generate": ".stages.forward.generation.generate",
    "capture": ".stages.forward.capture.capture",
    "embed": ".stages.embeddings.embed",
    "ActivationLoader": ".stages.training_data.loader",
    "Corpus": ".stages.forward.text.corpora.corpus",
    "memory": ".pipeline.memory",
    "Dictionary": ".stages.features.dictionary",
    "attribution_graph": ".stages.graph.graph",
    "compute": ".workflows",
    "open_store": ".store",
    "export": ".store.exchange.exports",
    "import_activations": ".workflows.exchange",
    "MizarrError": ".store.errors",
}

__all__ = [*_HOME, "__version__"]  # noqa: PLE0604 - the table above is the list

if TYPE_CHECKING:
    from .pipeline.memory import memory as memory
    from .stages.embeddings.embed import embed as embed
    from .stages.features.dictionary import Dictionary as Dictionary
    from .stages.forward.architectures.points import HookPoint as HookPoint
    from .stages.forward.capture.capture import capture as capture
    from .stages.forward.generation.generate import generate as generate
    from .stages.forward.hooks.cache import HookCache as HookCache
    from .stages.forward.hooks.edge_interventions import (
        Knockout as Knockout,
        SetValue as SetValue,
        Steer as Steer,
    )
    from .stages.forward.hooks.interventions import (
        Add as Add,
        AddAtPositions as AddAtPositions,
        Clamp as Clamp,
        Replace as Replace,
        Scale as Scale,
        Zero as Zero,
    )
    from .stages.forward.hooks.recurrent import RecurrentPass as RecurrentPass
    from .stages.forward.hooks.spec import HookSpec as HookSpec
    from .stages.forward.hooks.subspaces import LinearCondition as LinearCondition, Subspace as Subspace
    from .stages.forward.hooks.wants import logits as logits
    from .stages.forward.models.model import Model as Model
    from .stages.forward.runs.run import Run as Run, run as run
    from .stages.forward.text.corpora.corpus import Corpus as Corpus
    from .stages.graph.graph import attribution_graph as attribution_graph
    from .stages.training_data.loader import ActivationLoader as ActivationLoader
    from .store import open_store as open_store
    from .store.errors import MizarrError as MizarrError
    from .store.exchange.exports import export as export
    from .workflows import compute as compute
    from .workflows.exchange import import_activations as import_activations


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        from .store.errors import did_you_mean

        # Python itself asks for private names, such as __path__.
        hint = "" if name.startswith("_") else did_you_mean(name, _HOME)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    # Cached in globals, so that __getattr__ runs once per name.
    value = getattr(importlib.import_module(_HOME[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})

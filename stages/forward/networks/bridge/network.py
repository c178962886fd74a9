"""The network behind the bridge: somebody's modules, with hook points at what was found of them.

    embed, resid_pre 0 | layer 0: attn_out, mlp_out | resid_post 0 = resid_pre 1 | … | resid_post -> logits

The loop over layers is transformers' own. Torch hooks stand on its layers, and on those modules in them whose
results were found to add up; each shows what is there to the taps of the pass under way, and hands back what
the pass is to go on with. Modules may write over their arguments, so taps get copies.

Which pass is under way is told by a context variable: threads may run passes over one network side by side.

Border: knows modules by the paths a `BridgeConfig` names, and no family. What is not as it was found is an
error, never a number.

Axes: B prompts, S positions, D the stream's width, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextvars import ContextVar
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from .....store.errors import ConfigError, MizarrError
from .....store.exchange.outside import json_object
from ...architectures.bridge.config import BridgeConfig
from ...hooks.spec import BoundSpec, Capture
from ...hooks.taps import EarlyStop, RunTaps, Taps
from ...hooks.wants import Logits
from ..history import STREAM, Carried, History, Shares
from ..kernels.products import product
from ..norms import apply_norm
from ..weights import NormWeights
from .reference import in_one_line, load_reference, version
from .trace import at_slot, given, with_slot

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

__all__ = ["Bridged", "build"]

_TRIED = 8
"""Tokens whose embeddings are looked at as they enter."""
_NEAR = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""How far from rows of a matrix embeddings may be for rounding, over their size."""


def build(config: BridgeConfig, directory: Path, *, dtype: torch.dtype, device: torch.device) -> Bridged:
    """The network of a checkpoint in a directory. Raises what loading it does, and ConfigError where another
    transformers is installed than the one the configuration was found with."""
    if version() != config.transformers:
        raise ConfigError(
            f"expected transformers {config.transformers}, with which {config.class_name} was looked into, "
            f"found {version() or 'none'}; start again"
        )
    raw = json_object(directory / "config.json", ConfigError)
    module = load_reference(directory, raw, config.class_name, dtype=dtype, device=device)
    network = Bridged(config, module)
    network.settle()
    return network


class Bridged:
    """The network of a model that transformers computes: what `Network` (loop.py) asks for, but for single
    layers, which nobody can ask it for. Its driver is in passes/whole.py."""

    def __init__(self, config: BridgeConfig, module: nn.Module) -> None:
        self.config = config
        self.module = module
        self._parts = {
            (number, f"{layer.path}.{part.place.path}"): (part.kind, part.place.slot)
            for number, layer in enumerate(config.found)
            for part in layer.parts
        }
        self._handles: list[RemovableHandle] = []
        for path in dict.fromkeys(layer.path for layer in config.found):
            place = module.get_submodule(path)
            self._handles += [
                place.register_forward_pre_hook(self._entering(path), with_kwargs=True),
                place.register_forward_hook(self._leaving()),
            ]
        for path in dict.fromkeys(path for _, path in self._parts):
            self._handles.append(module.get_submodule(path).register_forward_hook(self._adding(path)))

    def settle(self) -> None:
        """One pass of a few tokens: some classes finish themselves at the first, and a model is known by what
        it is after that."""
        length = min(2, self.config.context)
        ids = torch.arange(length, device=self.device)[None] % self.config.embedded_tokens
        with torch.no_grad():
            self.logits(ids, RunTaps(BoundSpec(), lambda capture, value: None))

    def remove(self) -> None:
        """Take the hooks away; the modules are what they were."""
        for handle in self._handles:
            handle.remove()

    def logits(self, ids: Tensor, taps: Taps) -> Tensor:
        """Token ids [B, S] -> logits [B, S, V]. Raises EarlyStop by way of the taps, and ConfigError
        where the pass fails, or goes another way than it was found to go."""
        under_way = _Pass(self, taps, (ids.shape[0], ids.shape[1]))
        outer = _PASS.set(under_way)
        try:
            given_back = self.module(input_ids=ids)
        except (EarlyStop, MizarrError):
            raise
        except Exception as error:
            raise ConfigError(
                f"expected {self.config.class_name} to run {ids.shape[0]} prompts of {ids.shape[1]} tokens, "
                f"found that transformers cannot ({in_one_line(error)}); give it prompts it can read"
            ) from error
        finally:
            _PASS.reset(outer)
        under_way.require_ended()
        found = given_back.logits if hasattr(given_back, "logits") else given_back[0]
        if found.shape != (*ids.shape, self.config.vocab_size):
            _strange(f"logits of shape {list(found.shape)}")
        logits: Tensor = found
        return logits

    # -- what stands before the layers and behind them

    @property
    def dtype(self) -> torch.dtype:
        """See `Network`."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """See `Network`."""
        return self.embedding.device

    @property
    def embedding(self) -> Tensor:
        """The embedding matrix [token, width], whose width need not be the stream's."""
        found: Tensor = self.module.get_input_embeddings().weight  # type: ignore[operator]
        return found

    @property
    def unembedding(self) -> Tensor:
        """What the LM head multiplies by [V, D]. Raises ConfigError where no readout was found."""
        found, head = self.config.require_readout(), self._head()
        weight: Tensor = head.weight  # type: ignore[assignment]
        return weight if found.scale == 1 else weight * found.scale

    def embed(
        self,
        ids: Tensor,
        positions: Tensor | None,
        shares: Shares | None = None,
        starts: Tensor | None = None,
    ) -> Carried:
        """Token ids [B, S] -> what enters the first layer. Without positions the rows of the embedding
        matrix, as they are multiplied; raises ConfigError where tokens enter as anything else, behind a norm
        or a map: nobody can say what that would be without positions."""
        if positions is None:
            return {STREAM: self._token_scale * nn.functional.embedding(ids, self.embedding)}
        taken: dict[Capture, Tensor] = {}
        (embed,) = (point for point in self.config.hook_points if point.kind == "embed")
        taps = RunTaps(BoundSpec((Capture(embed),)), taken.__setitem__, stop_early=True)
        with contextlib.suppress(EarlyStop):
            self.logits(ids, taps)
        return {STREAM: taken[Capture(embed)]}

    def final_norm(self, x: Tensor) -> Tensor:
        """Residual states [..., D] normalised for the head. Raises ConfigError where no readout was found."""
        found = self.config.require_readout()
        norm = self.module.get_submodule(found.norm_path)
        weights = NormWeights(norm.weight, getattr(norm, "bias", None))  # type: ignore[arg-type]
        return apply_norm(x, weights, found.norm_type, found.norm_eps)

    @cached_property
    def _token_scale(self) -> float:
        """What rows of the embedding matrix are multiplied by as they enter the stream, as running shows it:
        at one position, tokens differ by as much as their rows. Raises ConfigError where they do not."""
        tokens = self.config.embedded_tokens
        # Not the first ids, of which one may stand for padding, which some have no position for.
        ids = torch.tensor([(k + 1) * tokens // (_TRIED + 1) for k in range(_TRIED)], device=self.device)
        entering = self.embed(ids[:, None], ids.new_zeros(1))[STREAM][:, 0].double()
        rows = self.embedding[ids].double()
        if entering.shape != rows.shape:
            self._refuse("token embeddings without positions")
        apart, expected = entering - entering[:1], rows - rows[:1]
        scale = float((apart * expected).sum() / expected.square().sum())
        if not (apart - scale * expected).abs().max() <= _NEAR[self.dtype] * apart.abs().max():
            self._refuse("token embeddings without positions")
        return scale

    def unembed(self, x: Tensor, want: Logits, *, softcap: bool = True) -> Tensor:
        """Normalised states [..., D] -> logits [..., tokens]. Raises ConfigError where there is no
        readout."""
        found, bias = self.config.require_readout(), getattr(self._head(), "bias", None)
        logits = product(x, want.of_tokens(self.unembedding))
        if bias is not None:
            logits = logits + want.of_tokens(bias) * found.scale
        cap = found.soft_cap
        return cap * torch.tanh(logits / cap) if softcap and cap is not None else logits

    def _head(self) -> nn.Module:
        found: nn.Module = self.module.get_output_embeddings()  # type: ignore[operator]
        return found

    # -- what a network of ours would answer

    def layer(self, layer: int, carried: Carried, history: History, taps: Taps) -> Carried:
        """Refused: transformers runs whole prompts through all layers."""
        self._refuse("a layer by itself")

    def gathered(self, carried: Carried, taps: Taps) -> Tensor:
        """Refused, as `layer`."""
        self._refuse("the end of a pass by itself")

    def finish(self, x: Tensor, taps: Taps, want: Logits | None) -> Tensor:
        """Refused, as `layer`."""
        self._refuse("the end of a pass by itself")

    def norm_gain(self, name: str, layer: int | None, dtype: torch.dtype) -> Tensor:
        """Refused: norms inside of layers are not known."""
        self._refuse("the weights of its norms")

    def value_matrix(self, layer: int) -> Tensor:
        """Refused: matrices inside of layers are not known."""
        self._refuse("the matrices of its attention")

    def output_matrix(self, layer: int) -> Tensor:
        """Refused, as `value_matrix`."""
        self._refuse("the matrices of its attention")

    def _refuse(self, what: str) -> NoReturn:
        raise ConfigError(
            f"expected a model whose layers are computed here, found {self.config.class_name} behind the "
            f"transformers bridge, which does not give {what}; choose a model of a supported family"
        )

    # -- hooks

    def _entering(self, path: str) -> Callable[..., Any]:
        slot = self.config.stream_in

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            under_way = self._under_way()
            if under_way is None:
                return None
            taken = given(args, kwargs)
            if slot not in taken:
                _strange(f"no stream at {slot!r} of what {path} gets")
            changed = under_way.enter(path, taken[slot])
            if changed is taken[slot]:
                return None
            if slot in kwargs:
                return args, {**kwargs, slot: changed}
            return with_slot(args, slot, changed), kwargs

        return hook

    def _leaving(self) -> Callable[..., Any]:
        slot = self.config.stream_out

        def hook(module: nn.Module, args: tuple[Any, ...], made: Any) -> Any:
            under_way = self._under_way()
            return None if under_way is None else _changed(made, slot, under_way.leave)

        return hook

    def _adding(self, path: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], made: Any) -> Any:
            under_way = self._under_way()
            part = None if under_way is None else self._parts.get((under_way.layer, path))
            if under_way is None or part is None:
                return None
            kind, slot = part
            return _changed(made, slot, lambda x: under_way.add(kind, x))

        return hook

    def _under_way(self) -> _Pass | None:
        found = _PASS.get()
        return found if found is not None and found.network is self else None


class _Pass:
    """A pass under way: how far it is, and what its taps make of what it meets."""

    def __init__(self, network: Bridged, taps: Taps, size: tuple[int, int]) -> None:
        self.network, self._taps, self._size = network, taps, size
        self._found = network.config.found
        self.layer = -1
        """The one that was entered last."""
        self._met: list[str] = []
        """Parts of it so far."""

    def enter(self, path: str, x: Tensor) -> Tensor:
        """A layer takes x; what it takes instead."""
        self.layer += 1
        expected = self._found[self.layer].path if self.layer < len(self._found) else "the end"
        if path != expected:
            _strange(f"{path} where {expected} comes next")
        self._met = []
        if self.layer == 0:
            x = self._tap("embed", None, x)
        return self._tap("resid_pre", self.layer, x)

    def add(self, kind: str, x: Tensor) -> Tensor:
        """A part of the layer gives x; what it gives instead."""
        self._met.append(kind)
        return self._tap(kind, self.layer, x)

    def leave(self, x: Tensor) -> Tensor:
        """The layer gives x; what it gives instead."""
        expected = [part.kind for part in self._found[self.layer].parts]
        if sorted(self._met) != sorted(expected):
            _strange(f"{self._met} in layer {self.layer}, which has {expected}")
        return self._tap("resid_post", self.layer, x)

    def require_ended(self) -> None:
        """Raise ConfigError unless every layer was met."""
        if self.layer + 1 != len(self._found):
            _strange(f"{self.layer + 1} of {len(self._found)} layers")

    def _tap(self, kind: str, layer: int | None, x: Tensor) -> Tensor:
        config = self.network.config
        if tuple(x.shape) != self._shape():
            _strange(f"a stream of shape {list(x.shape)} at {kind}")
        if not self._taps.touches(layer, kind):
            return x
        ours = (x.transpose(0, 1) if config.position_first else x).flatten(2)
        seen = ours.clone(memory_format=torch.contiguous_format)  # modules may write over theirs
        changed = self._taps(kind, layer, seen)
        if changed is seen:
            return x
        theirs = changed.clone().reshape(*self._size, *config.stream_tail)
        return theirs.transpose(0, 1) if config.position_first else theirs

    def _shape(self) -> tuple[int, ...]:
        config, (rows, length) = self.network.config, self._size
        front = (length, rows) if config.position_first else (rows, length)
        return (*front, *config.stream_tail)


_PASS: ContextVar[_Pass | None] = ContextVar("pass", default=None)


def _changed(made: Any, slot: str, change: Callable[[Tensor], Tensor]) -> Any:
    """What a module gave as a pass goes on with it; None for as it is."""
    try:
        x = at_slot(made, slot)
    except (LookupError, TypeError, ValueError):
        _strange(f"no states at {slot!r} of what a module gives")
    after = change(x)
    return None if after is x else with_slot(made, slot, after)


def _strange(found: str) -> NoReturn:
    raise ConfigError(
        f"expected a pass as it was found when the model was looked into, found {found}; nothing of it can "
        "be relied on, so leave this model, or give it other prompts"
    )

"""The network of the bridge: transformers' modules, with hook points where probing found known tensors.

    embed, resid_pre 0 | layer 0: attn_out, mlp_out | resid_post 0 = resid_pre 1 | … | resid_post -> logits

transformers runs the loop over layers. Torch hooks on the layers, and on the modules within them whose
outputs are added to the stream, call the taps of the current pass and return the values to continue with.
Modules may overwrite their arguments, so taps get copies.

A context variable holds the current pass, so that threads can run passes through one network in parallel.

Border: knows modules by the paths in a `BridgeConfig`, and no family. A pass that differs from the probed
ones raises an error.

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
from .trace import argument_tensors, at_slot, with_slot

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

__all__ = ["Bridged", "build"]

_TRIED = 8
"""Number of tokens whose embeddings are compared with rows of the embedding matrix."""
_NEAR = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Relative difference between them that rounding may cause, by dtype."""


def build(config: BridgeConfig, directory: Path, *, dtype: torch.dtype, device: torch.device) -> Bridged:
    """Load a checkpoint with transformers, as a network with hook points.

    Arguments:
        config: structure of the model, as probing the checkpoint found it.
        directory: folder of the checkpoint.
        dtype: dtype of the computation.
        device: device of the computation.

    Raises:
        ConfigError: the installed transformers differs from the version used for probing, or loading fails.
        WeightsError: a weight is missing, has another shape or is not finite.
    """
    if version() != config.transformers:
        raise ConfigError(
            f"expected transformers {config.transformers}, with which {config.class_name} was probed, found "
            f"{version() or 'no installed version'}; load the model again, so that it is probed with this "
            "version"
        )
    raw = json_object(directory / "config.json", ConfigError)
    module = load_reference(directory, raw, config.class_name, dtype=dtype, device=device)
    network = Bridged(config, module)
    network.settle()
    return network


class Bridged:
    """The network of a model that transformers computes. It implements `Network` (loop.py) except for the
    methods on single layers, which raise ConfigError. Its passes are run by passes/whole.py."""

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
            layer_module = module.get_submodule(path)
            self._handles += [
                layer_module.register_forward_pre_hook(self._entering(path), with_kwargs=True),
                layer_module.register_forward_hook(self._leaving()),
            ]
        for path in dict.fromkeys(path for _, path in self._parts):
            self._handles.append(module.get_submodule(path).register_forward_hook(self._adding(path)))

    def settle(self) -> None:
        """Run one short pass, because some transformers classes finish their initialisation in their first
        pass."""
        length = min(2, self.config.context)
        ids = torch.arange(length, device=self.device)[None] % self.config.embedded_tokens
        with torch.no_grad():
            self.logits(ids, RunTaps(BoundSpec(), lambda capture, value: None))

    def remove(self) -> None:
        """Remove all hooks from the modules."""
        for handle in self._handles:
            handle.remove()

    def logits(self, ids: Tensor, taps: Taps) -> Tensor:
        """Run a pass: token ids [B, S] -> logits [B, S, V].

        Raises:
            EarlyStop: from the taps, once the last wanted hook point is reached.
            ConfigError: the pass fails, or calls modules in another order than when it was probed.
        """
        current = _Pass(self, taps, (ids.shape[0], ids.shape[1]))
        outer = _PASS.set(current)
        try:
            output = self.module(input_ids=ids)
        except (EarlyStop, MizarrError):
            raise
        except Exception as error:
            raise ConfigError(
                f"expected {self.config.class_name} to run {ids.shape[0]} prompts of {ids.shape[1]} tokens, "
                f"found an error in transformers ({in_one_line(error)}); try shorter prompts, or other tokens"
            ) from error
        finally:
            _PASS.reset(outer)
        current.require_ended()
        logits: Tensor = output.logits if hasattr(output, "logits") else output[0]
        if logits.shape != (*ids.shape, self.config.vocab_size):
            _unexpected(f"logits of shape {list(logits.shape)}")
        return logits

    # -- embedding, final norm, LM head

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the computation, which may differ from that of the checkpoint."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Device of weights and computation."""
        return self.embedding.device

    @property
    def embedding(self) -> Tensor:
        """Embedding matrix [token, width]; the width can differ from the stream's."""
        weight: Tensor = self.module.get_input_embeddings().weight  # type: ignore[operator]
        return weight

    @property
    def unembedding(self) -> Tensor:
        """Matrix of the LM head [V, D], with its scale. Raises ConfigError if no readout was found."""
        readout, head = self.config.require_readout(), self._head()
        weight: Tensor = head.weight  # type: ignore[assignment]
        return weight if readout.scale == 1 else weight * readout.scale

    def embed(
        self,
        ids: Tensor,
        positions: Tensor | None,
        shares: Shares | None = None,
        starts: Tensor | None = None,
    ) -> Carried:
        """Residual stream that enters the first layer, [B, S, D], by name (`STREAM`).

        Arguments:
            ids: token ids, int [B, S].
            positions: their positions, int [S]; None for scaled rows of the embedding matrix without
                positions.
            shares: unused.
            starts: unused.

        Raises:
            ConfigError: no positions are given, and the model applies a norm or a map to its embeddings.
        """
        if positions is None:
            return {STREAM: self._token_scale * nn.functional.embedding(ids, self.embedding)}
        captured: dict[Capture, Tensor] = {}
        (embed,) = (point for point in self.config.hook_points if point.kind == "embed")
        taps = RunTaps(BoundSpec((Capture(embed),)), captured.__setitem__, stop_early=True)
        with contextlib.suppress(EarlyStop):
            self.logits(ids, taps)
        return {STREAM: captured[Capture(embed)]}

    def final_norm(self, x: Tensor) -> Tensor:
        """Residual states [..., D] -> input of the LM head. Raises ConfigError if no readout was found."""
        readout = self.config.require_readout()
        norm = self.module.get_submodule(readout.norm_path)
        weights = NormWeights(norm.weight, getattr(norm, "bias", None))  # type: ignore[arg-type]
        return apply_norm(x, weights, readout.norm_type, readout.norm_eps)

    @cached_property
    def _token_scale(self) -> float:
        """Factor by which rows of the embedding matrix are multiplied as they enter the stream, measured: at
        one position, differences between tokens are the factor times differences of their rows. Raises
        ConfigError if they are not."""
        n_tokens = self.config.embedded_tokens
        # Ids spread over the vocabulary, but not the lowest: padding has no position in some models.
        spread = [(k + 1) * n_tokens // (_TRIED + 1) for k in range(_TRIED)]
        ids = torch.tensor(spread, device=self.device)
        entering = self.embed(ids[:, None], ids.new_zeros(1))[STREAM][:, 0].double()
        rows = self.embedding[ids].double()
        if entering.shape != rows.shape:
            self._refuse("token embeddings without positions")
        # Positions add the same to all tokens, so they cancel in differences.
        differences, of_rows = entering - entering[:1], rows - rows[:1]
        scale = float((differences * of_rows).sum() / of_rows.square().sum())  # least squares
        error = (differences - scale * of_rows).abs().max()
        if not error <= _NEAR[self.dtype] * differences.abs().max():
            self._refuse("token embeddings without positions")
        return scale

    def unembed(self, x: Tensor, want: Logits, *, softcap: bool = True) -> Tensor:
        """Inputs of the LM head [..., D] -> logits [..., tokens].

        Arguments:
            x: States after `final_norm`.
            want: Tokens of the vocabulary whose logits are computed.
            softcap: Whether to apply the model's soft cap of logits.

        Raises:
            ConfigError: Probing found no final norm and head that give the logits.
        """
        readout, bias = self.config.require_readout(), getattr(self._head(), "bias", None)
        logits = product(x, want.of_tokens(self.unembedding))
        if bias is not None:
            logits = logits + want.of_tokens(bias) * readout.scale
        cap = readout.soft_cap
        return cap * torch.tanh(logits / cap) if softcap and cap is not None else logits

    def _head(self) -> nn.Module:
        """The module of the LM head in transformers."""
        head: nn.Module = self.module.get_output_embeddings()  # type: ignore[operator]
        return head

    # -- methods of `Network` on single layers, which raise ConfigError

    def layer(self, layer: int, carried: Carried, history: History, taps: Taps) -> Carried:
        """Always raises ConfigError, as transformers runs whole prompts through all layers and computes no
        single layer.

        Arguments:
            layer: number of the layer.
            carried: tensors that enter the layer, by name, each [B, token, width].
            history: tokens that the pass computes, and how they see each other.
            taps: captures and interventions of the pass.
        """
        self._refuse("the computation of a single layer")

    def gathered(self, carried: Carried, taps: Taps) -> Tensor:
        """Always raises ConfigError, as transformers runs whole prompts from the embedding to the logits."""
        self._refuse("the computation of the final norm and logits alone")

    def finish(self, x: Tensor, taps: Taps, want: Logits | None) -> Tensor:
        """Always raises ConfigError, as transformers runs whole prompts from the embedding to the logits.

        Arguments:
            x: final residual stream [B, S, D].
            taps: captures and interventions of the pass.
            want: positions whose logits are wanted; None for all positions.
        """
        self._refuse("the computation of the final norm and logits alone")

    def norm_gain(self, name: str, layer: int | None, dtype: torch.dtype) -> Tensor:
        """Always raises ConfigError, as the norms inside layers of a model behind the bridge are not known.

        Arguments:
            name: name of the norm, such as "ln1".
            layer: number of the layer; None for the final norm.
            dtype: dtype of the gain, [hidden].
        """
        self._refuse("the weights of its norms")

    def value_matrix(self, layer: int) -> Tensor:
        """Always raises ConfigError, as the matrices inside layers of a model behind the bridge are not
        known."""
        self._refuse("the matrices of its attention")

    def output_matrix(self, layer: int) -> Tensor:
        """Always raises ConfigError, as the matrices inside layers of a model behind the bridge are not
        known."""
        self._refuse("the matrices of its attention")

    def _refuse(self, what: str) -> NoReturn:
        """Raise ConfigError for something that the bridge does not offer; what: its name, for the message."""
        raise ConfigError(
            f"expected a model that mizarr itself computes, found {self.config.class_name}, which runs in "
            f"transformers, where {what} cannot be had; choose a family that `mizarr models families` lists"
        )

    # -- hooks

    def _entering(self, path: str) -> Callable[..., Any]:
        """Torch pre-hook for the layer at a path: calls the taps on its input, and passes on the changed
        input."""
        slot = self.config.stream_in

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            current = self._current_pass()
            if current is None:
                return None
            tensors = argument_tensors(args, kwargs)
            if slot not in tensors:
                _unexpected(f"no residual stream at {slot!r} among the arguments of the layer {path}")
            changed = current.enter(path, tensors[slot])
            if changed is tensors[slot]:
                return None
            if slot in kwargs:
                return args, {**kwargs, slot: changed}
            return with_slot(args, slot, changed), kwargs

        return hook

    def _leaving(self) -> Callable[..., Any]:
        """Torch hook for a layer: calls the taps on its output, and returns the changed output."""
        slot = self.config.stream_out

        def hook(module: nn.Module, args: tuple[Any, ...], made: Any) -> Any:
            current = self._current_pass()
            return None if current is None else _changed(made, slot, current.leave)

        return hook

    def _adding(self, path: str) -> Callable[..., Any]:
        """Torch hook for a module at a path whose output a layer adds to the stream: calls the taps on its
        output, and returns the changed output."""

        def hook(module: nn.Module, args: tuple[Any, ...], made: Any) -> Any:
            current = self._current_pass()
            part = None if current is None else self._parts.get((current.layer, path))
            if current is None or part is None:
                return None
            kind, slot = part
            return _changed(made, slot, lambda x: current.add(kind, x))

        return hook

    def _current_pass(self) -> _Pass | None:
        """The running pass of this network in this thread; None outside of passes."""
        current = _PASS.get()
        return current if current is not None and current.network is self else None


class _Pass:
    """A running pass: its progress through the layers, and calls of its taps."""

    def __init__(self, network: Bridged, taps: Taps, size: tuple[int, int]) -> None:
        self.network, self._taps, self._size = network, taps, size
        self._found = network.config.found
        self.layer = -1
        """Layer entered last; -1 before the first."""
        self._met: list[str] = []
        """Kinds of parts, such as "attn_out", that ran in this layer so far."""

    def enter(self, path: str, x: Tensor) -> Tensor:
        """Handle the input x of a layer; returns the value to continue with."""
        self.layer += 1
        has_more_layers = self.layer < len(self._found)
        expected = self._found[self.layer].path if has_more_layers else "the end of the layers"
        if path != expected:
            _unexpected(f"a call of the layer {path} instead of {expected}")
        self._met = []
        if self.layer == 0:
            x = self._tap("embed", None, x)
        return self._tap("resid_pre", self.layer, x)

    def add(self, kind: str, x: Tensor) -> Tensor:
        """Handle the output x of a part of the layer; returns the value to continue with."""
        self._met.append(kind)
        return self._tap(kind, self.layer, x)

    def leave(self, x: Tensor) -> Tensor:
        """Handle the output x of the layer; returns the value to continue with."""
        expected = [part.kind for part in self._found[self.layer].parts]
        if sorted(self._met) != sorted(expected):
            _unexpected(
                f"outputs {', '.join(self._met) or 'of no module'} added in layer {self.layer} instead of "
                f"{', '.join(expected) or 'none'}"
            )
        return self._tap("resid_post", self.layer, x)

    def require_ended(self) -> None:
        """Raise ConfigError unless every layer has run."""
        if self.layer + 1 != len(self._found):
            _unexpected(f"calls of {self.layer + 1} of {len(self._found)} layers")

    def _tap(self, kind: str, layer: int | None, x: Tensor) -> Tensor:
        """Value to continue with at a hook point, in the axes of transformers.

        Arguments:
            kind: kind of the hook point, such as "resid_pre".
            layer: number of the layer; None outside of layers.
            x: value there, [B, S, …], or [S, B, …] if the model has positions first.
        """
        config = self.network.config
        if tuple(x.shape) != self._shape():
            _unexpected(f"a residual stream of shape {list(x.shape)} at the hook point {kind}")
        if not self._taps.touches(layer, kind):
            return x
        stream = (x.transpose(0, 1) if config.position_first else x).flatten(2)
        copy = stream.clone(memory_format=torch.contiguous_format)  # modules may overwrite theirs
        changed = self._taps(kind, layer, copy)
        if changed is copy:
            return x
        states = changed.clone().reshape(*self._size, *config.stream_tail)
        return states.transpose(0, 1) if config.position_first else states

    def _shape(self) -> tuple[int, ...]:
        """Shape of the residual stream in this pass, in the axes of transformers."""
        config, (rows, length) = self.network.config, self._size
        front = (length, rows) if config.position_first else (rows, length)
        return (*front, *config.stream_tail)


_PASS: ContextVar[_Pass | None] = ContextVar("pass", default=None)


def _changed(result: Any, slot: str, change: Callable[[Tensor], Tensor]) -> Any:
    """A module's result with the tensor at a place changed by the function `change`; None if it is
    unchanged."""
    try:
        x = at_slot(result, slot)
    except (LookupError, TypeError, ValueError):
        _unexpected(f"no hidden states at {slot!r} in the result of a module")
    after = change(x)
    return None if after is x else with_slot(result, slot, after)


def _unexpected(observation: str) -> NoReturn:
    """Raise ConfigError for a pass that differs from those in which the model was probed."""
    raise ConfigError(
        "expected transformers to call the model's layers as when the model was probed, found "
        f"{observation}; captures of this pass would be wrong, so use other prompts, or another model"
    )

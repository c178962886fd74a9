"""Hook points attn_out and mlp_out of layers: parts found in a traced pass, named by what they do, and
tested.

A part is tested by replacing its output: stream in + parts must still be stream out. Every pass tests all
layers at once, as each layer's sum can be checked whatever entered it.

Border: a model being probed; parts that fail a test are left out without an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import add

import torch
from torch import Tensor

from .....store.errors import ConfigError
from ...architectures.bridge.config import BridgeConfig
from ...architectures.bridge.found import LayerPart, TensorPlace
from ...architectures.points import HookPoint
from ...hooks.interventions import Replace
from ...hooks.spec import HookSpec
from .examined import LENGTHS, Examined, Passed, noise
from .parts import PartSums, find_sums, is_close
from .stack import Stack
from .trace import Call

__all__ = ["with_parts"]

TRIED = 7
"""Length of the prompts on which parts are replaced."""
KINDS = ("attn_out", "mlp_out")
"""Hook points of the part that mixes positions, and of the part that does not."""


def with_parts(model: Examined, config: BridgeConfig, calls: Sequence[Call], stack: Stack) -> BridgeConfig:
    """Copy of a configuration with the parts of each layer (modules whose outputs are added to the stream)
    that pass all tests.

    Arguments:
        model: the model being probed.
        config: structure of the model as far as it has been found.
        calls: calls of the model's submodules in a traced pass.
        stack: layers in that pass.
    """
    sums = [_sums_of(calls, stack, layer) for layer in range(config.num_layers)]
    norms = {layer_sums.norms for layer_sums in sums if layer_sums is not None}
    if len(norms) != 1 or config.context < TRIED:
        return config
    parts = [_parts_of(layer.path, layer_sums) for layer, layer_sums in zip(config.found, sums, strict=True)]
    try:
        extended = _with_parts(replace(config, norms=next(iter(norms))), parts)
        extended = _with_parts(extended, _named(model, extended))
        is_valid = _validated(model, extended, sums)
    except ConfigError:  # another pass calls the modules in another order
        return config
    valid = [layer.parts if is_kept else () for layer, is_kept in zip(extended.found, is_valid, strict=True)]
    return _with_parts(extended, valid) if any(valid) else config


def _named(model: Examined, config: BridgeConfig) -> list[tuple[LayerPart, ...]]:
    """Parts of each layer with the kinds of their hook points: "attn_out" for a part that mixes positions,
    else "mlp_out". A layer whose two parts get the same kind has no parts in the result.

    Measured by whether a part's output changes at other positions if one position of the layer's input
    changes. For the second part, the output of the first is held at its original value.
    """
    ids = model.ids(1, TRIED, seed=9)
    points = [_points(config, layer) for layer in range(config.num_layers)]
    streams = [HookPoint.resid_pre(layer) for layer in range(config.num_layers)]
    all_points = [point for layer_points in points for point in layer_points]
    plain = model.hooked(config, ids, HookSpec().capture(*streams, *all_points))
    pushed = HookSpec().capture(*all_points)
    for point in streams:
        x = plain.at[point].clone()
        x[:, 0] += noise(x.shape[2:], x)
        pushed = pushed.intervene(point, Replace(x))
    free = model.hooked(config, ids, pushed)
    for layer_points in points:
        for point in layer_points[:1]:
            pushed = pushed.intervene(point, Replace(plain.at[point]))
    with_first_held = model.hooked(config, ids, pushed)

    def is_mixing(point: HookPoint, passed: Passed) -> bool:
        return not is_close(passed.at[point][:, 1:], plain.at[point][:, 1:])

    parts = []
    for layer, layer_points in zip(config.found, points, strict=True):
        # The second part reads the first one's output, which would carry changes to other positions.
        passes = [with_first_held if index else free for index in range(len(layer_points))]
        mixing = [is_mixing(point, passed) for point, passed in zip(layer_points, passes, strict=True)]
        kinds = [KINDS[0] if mixes else KINDS[1] for mixes in mixing]
        named = [replace(part, kind=kind) for part, kind in zip(layer.parts, kinds, strict=True)]
        parts.append(tuple(named) if len(set(kinds)) == len(kinds) else ())
    return parts


def _validated(model: Examined, config: BridgeConfig, sums: Sequence[PartSums | None]) -> list[bool]:
    """For each layer, whether its parts sum to its output: unchanged, and with random values in place of
    either part, and of both.

    Arguments:
        model: the model being probed.
        config: its structure, with the parts to test.
        sums: parts of each layer in the traced pass; None for a layer without.
    """
    all_points = [point for layer in range(config.num_layers) for point in _points(config, layer)]
    reading = HookSpec().capture("blocks.*")
    is_valid = [bool(layer.parts) for layer in config.found]
    for length in (length for length in LENGTHS if length <= config.context):
        ids = model.ids(2, length, seed=10)
        plain = model.hooked(config, ids, reading)
        changed: list[tuple[str, ...]] = [(), *((kind,) for kind in KINDS), KINDS]
        for kinds in changed if length == TRIED else changed[:1]:
            spec = reading
            for seed, point in enumerate(point for point in all_points if point.kind in kinds):
                spec = spec.intervene(point, Replace(noise(plain.at[point].shape, plain.at[point], seed)))
            for layer, is_sum in enumerate(_sums(model, config, ids, spec, sums)):
                is_valid[layer] &= is_sum
    return is_valid


def _sums(
    model: Examined, config: BridgeConfig, ids: Tensor, spec: HookSpec, sums: Sequence[PartSums | None]
) -> list[bool]:
    """Whether the parts of each layer sum to its output (post-norm: to the inputs of its norms), tested in
    one pass.

    Arguments:
        model: the model being probed.
        config: its structure, with the parts to test.
        ids: token ids of the pass, [B, S].
        spec: captures and interventions of the pass.
        sums: parts of each layer in the traced pass; None for a layer without.
    """
    passes = list[Passed]()

    def run() -> None:
        passes.append(model.hooked(config, ids, spec))

    calls: Sequence[Call] = ()
    if config.norms == "of stream":
        calls = model.traced(ids, run)
    else:
        run()
    paths = {layer.path for layer in config.found}
    entered = [call for call in calls if call.path in paths]
    results = []
    for layer, layer_sums in enumerate(sums):
        states = [passes[0].at[point] for point in (HookPoint.resid_pre(layer), *_points(config, layer))]
        y = passes[0].at[HookPoint.resid_post(layer)]
        if layer_sums is None or len(states) == 1:
            results.append(False)
        elif layer_sums.through:
            inside = [call for call in calls if entered[layer] in call.above]
            results.append(_norms_take(inside, layer_sums, states, y))
        else:
            results.append(is_close(reduce(add, states), y, torch.stack([*states, y])))
    return results


def _norms_take(inside: Sequence[Call], sums: PartSums, states: Sequence[Tensor], y: Tensor) -> bool:
    """Whether a post-norm layer computes y = N2(N1(x + a) + m) in a traced pass.

    Arguments:
        inside: calls of modules within the layer.
        sums: parts of the layer, and its norms N1 and N2.
        states: x, a and m, each [B, S, D].
        y: output of the layer, [B, S, D].
    """
    x, a, m = states
    (norm1, slot1), (norm2, slot2) = sums.through
    calls1 = [call for call in inside if call.path == norm1.path]
    calls2 = [call for call in inside if call.path == norm2.path]
    if len(calls1) != 1 or len(calls2) != 1 or not calls1[0].made:
        return False
    input1, output1 = calls1[0].taken[slot1], next(iter(calls1[0].made.values()))
    input2, outputs2 = calls2[0].taken[slot2], calls2[0].made.values()
    return (
        is_close(input1, _in_module_axes(x + a, input1))
        and is_close(input2, output1 + _in_module_axes(m, output1))
        and any(torch.equal(output, _in_module_axes(y, output)) for output in outputs2)
    )


def _in_module_axes(states: Tensor, like: Tensor) -> Tensor:
    """States [B, S, D] with the axes and shape of a module's tensor `like`, in which positions may come
    first."""
    return (states if states.shape[:2] == like.shape[:2] else states.transpose(0, 1)).reshape(like.shape)


def _points(config: BridgeConfig, layer: int) -> list[HookPoint]:
    """Hook points of the parts of a layer, in the order in which the parts are computed."""
    return [HookPoint(part.kind, layer) for part in config.found[layer].parts]


def _with_parts(config: BridgeConfig, parts: Sequence[tuple[LayerPart, ...]]) -> BridgeConfig:
    """Copy of the configuration whose layers have these parts; parts: a tuple for each layer."""
    layers = (
        replace(layer, parts=layer_parts) for layer, layer_parts in zip(config.found, parts, strict=True)
    )
    return replace(config, found=tuple(layers))


def _sums_of(calls: Sequence[Call], stack: Stack, number: int) -> PartSums | None:
    """Parts of one layer in the traced pass, by their sum; None if no sum gives the layer's output.

    Arguments:
        calls: calls of the model's submodules.
        stack: layers in that pass.
        number: number of the layer.
    """
    layer = stack.calls[number]
    inside = [call for call in calls if layer in call.above]
    return find_sums(inside, layer.taken[stack.taken], layer.made[stack.made])


def _parts_of(layer: str, sums: PartSums | None) -> tuple[LayerPart, ...]:
    """Parts of a layer with preliminary kinds, "attn_out" for the first, which `_named` replaces by measured
    ones.

    Arguments:
        layer: path of the layer's module.
        sums: parts in the traced pass; None gives no parts.
    """
    return tuple(
        LayerPart(kind, TensorPlace(call.path.removeprefix(f"{layer}."), slot))
        for kind, (call, slot) in zip(KINDS, () if sums is None else sums.parts, strict=False)
    )

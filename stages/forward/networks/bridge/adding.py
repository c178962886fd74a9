"""Which parts of layers are what is added to the stream: found in a traced pass, named by what they do, and
put to the test with other values in their place.

Every pass asks all layers at once: each layer's sum stands for itself, whatever entered it.

Border: a model under examination; parts that fail are left out, and nothing is refused here.
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


def with_parts(model: Examined, config: BridgeConfig, calls: Sequence[Call], stack: Stack) -> BridgeConfig:
    """The configuration with those parts of layers that stand every test."""
    sums = [_sums_of(calls, stack, layer) for layer in range(config.num_layers)]
    norms = {each.norms for each in sums if each is not None}
    if len(norms) != 1 or config.context < TRIED:
        return config
    parts = [_parts_of(layer.path, each) for layer, each in zip(config.found, sums, strict=True)]
    try:
        found = _having(replace(config, norms=next(iter(norms))), parts)
        found = _having(found, _named(model, found))
        stands = _standing(model, found, sums)
    except ConfigError:  # what was found is met otherwise in another pass
        return config
    kept = [layer.parts if is_kept else () for layer, is_kept in zip(found.found, stands, strict=True)]
    return _having(found, kept) if any(kept) else config


def _named(model: Examined, config: BridgeConfig) -> list[tuple[LayerPart, ...]]:
    """The parts of each layer by what they do: the one that mixes positions is attn_out, the one that does
    not is mlp_out. None of a layer where that cannot be told.

    Measured by what changes at other positions when one position of a layer's stream changes, whatever the
    layers before it do; of a part that follows another, with that other held.
    """
    ids = model.ids(1, TRIED, seed=9)
    points = [_points(config, layer) for layer in range(config.num_layers)]
    streams = [HookPoint.resid_pre(layer) for layer in range(config.num_layers)]
    every = [point for each in points for point in each]
    plain = model.hooked(config, ids, HookSpec().capture(*streams, *every))
    pushed = HookSpec().capture(*every)
    for point in streams:
        x = plain.at[point].clone()
        x[:, 0] += noise(x.shape[2:], x)
        pushed = pushed.intervene(point, Replace(x))
    free = model.hooked(config, ids, pushed)
    for each in points:
        for point in each[:1]:
            pushed = pushed.intervene(point, Replace(plain.at[point]))
    held = model.hooked(config, ids, pushed)

    def is_mixing(point: HookPoint, passed: Passed) -> bool:
        return not is_close(passed.at[point][:, 1:], plain.at[point][:, 1:])

    found = []
    for layer, each in zip(config.found, points, strict=True):
        mixing = [is_mixing(point, held if place else free) for place, point in enumerate(each)]
        kinds = [KINDS[0] if mixes else KINDS[1] for mixes in mixing]
        named = [replace(part, kind=kind) for part, kind in zip(layer.parts, kinds, strict=True)]
        found.append(tuple(named) if len(set(kinds)) == len(kinds) else ())
    return found


def _standing(model: Examined, config: BridgeConfig, sums: Sequence[PartSums | None]) -> list[bool]:
    """Of each layer whether its parts are what is added: as they are, and with other values in the place of
    either, and of both."""
    every = [point for layer in range(config.num_layers) for point in _points(config, layer)]
    reading = HookSpec().capture("blocks.*")
    stands = [bool(layer.parts) for layer in config.found]
    for length in (length for length in LENGTHS if length <= config.context):
        ids = model.ids(2, length, seed=10)
        plain = model.hooked(config, ids, reading)
        changed: list[tuple[str, ...]] = [(), *((kind,) for kind in KINDS), KINDS]
        for kinds in changed if length == TRIED else changed[:1]:
            spec = reading
            for seed, point in enumerate(point for point in every if point.kind in kinds):
                spec = spec.intervene(point, Replace(noise(plain.at[point].shape, plain.at[point], seed)))
            for layer, is_sum in enumerate(_sums(model, config, ids, spec, sums)):
                stands[layer] &= is_sum
    return stands


def _sums(
    model: Examined, config: BridgeConfig, ids: Tensor, spec: HookSpec, sums: Sequence[PartSums | None]
) -> list[bool]:
    """Of each layer whether its parts add up to what leaves it, or to what its norms take."""
    held = list[Passed]()

    def run() -> None:
        held.append(model.hooked(config, ids, spec))

    calls: Sequence[Call] = ()
    if config.norms == "of stream":
        calls = model.traced(ids, run)
    else:
        run()
    paths = {layer.path for layer in config.found}
    entered = [call for call in calls if call.path in paths]
    found = []
    for layer, each in enumerate(sums):
        states = [held[0].at[point] for point in (HookPoint.resid_pre(layer), *_points(config, layer))]
        y = held[0].at[HookPoint.resid_post(layer)]
        if each is None or len(states) == 1:
            found.append(False)
        elif each.through:
            inside = [call for call in calls if entered[layer] in call.above]
            found.append(_norms_take(inside, each, states, y))
        else:
            found.append(is_close(reduce(add, states), y, torch.stack([*states, y])))
    return found


def _norms_take(inside: Sequence[Call], sums: PartSums, states: Sequence[Tensor], y: Tensor) -> bool:
    """Whether in the calls of a layer the first norm takes x + a, and the second what the first gives + m,
    and gives y."""
    x, first, second = states
    (one, one_slot), (other, other_slot) = sums.through
    met = [call for call in inside if call.path == one.path]
    last = [call for call in inside if call.path == other.path]
    if len(met) != 1 or len(last) != 1 or not met[0].made:
        return False
    taken, middle = met[0].taken[one_slot], next(iter(met[0].made.values()))
    return (
        is_close(taken, _as_theirs(x + first, taken))
        and is_close(last[0].taken[other_slot], middle + _as_theirs(second, middle))
        and any(torch.equal(made, _as_theirs(y, made)) for made in last[0].made.values())
    )


def _as_theirs(ours: Tensor, like: Tensor) -> Tensor:
    """Our view of states [B, S, D] with the axes as a module has them."""
    return (ours if ours.shape[:2] == like.shape[:2] else ours.transpose(0, 1)).reshape(like.shape)


def _points(config: BridgeConfig, layer: int) -> list[HookPoint]:
    """Of the parts of a layer, as they end."""
    return [HookPoint(part.kind, layer) for part in config.found[layer].parts]


def _having(config: BridgeConfig, parts: Sequence[tuple[LayerPart, ...]]) -> BridgeConfig:
    """With these parts of each layer."""
    found = (replace(layer, parts=each) for layer, each in zip(config.found, parts, strict=True))
    return replace(config, found=tuple(found))


def _sums_of(calls: Sequence[Call], stack: Stack, number: int) -> PartSums | None:
    """How a layer of the traced pass adds up."""
    layer = stack.calls[number]
    inside = [call for call in calls if layer in call.above]
    return find_sums(inside, layer.taken[stack.taken], layer.made[stack.made])


def _parts_of(layer: str, sums: PartSums | None) -> tuple[LayerPart, ...]:
    """As they come: the first is attn_out until it is known which mixes."""
    return tuple(
        LayerPart(kind, TensorPlace(call.path.removeprefix(f"{layer}."), slot))
        for kind, (call, slot) in zip(KINDS, () if sums is None else sums.parts, strict=False)
    )

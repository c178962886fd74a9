"""How the layers of a family turn queries and keys, as its config.json tells.

Border: one config and one row; never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .....store.errors import ConfigError
from ..families import read_rope
from ..transformer import ConfigReader, RopeConfig
from .family import Attends, Windows, is_behind_padding

__all__ = ["rope_of_family", "ropes_of"]


def ropes_of(
    reader: ConfigReader, family: Attends, head_dim: int, windows: Windows
) -> Sequence[RopeConfig | None]:
    """How each layer turns queries and keys; None where it does not."""

    def rope(raw: Mapping[str, Any], theta: float) -> RopeConfig:
        return rope_of_family(raw, reader, replace(family, theta=theta), head_dim)

    if family.first_position is not None or is_behind_padding(reader, family):
        return (None,) * len(windows)
    if family.rope_of is not None:
        return (family.rope_of(reader, family, head_dim),) * len(windows)
    if family.slopes is not None:
        return (None,) * len(windows)
    turns = family.turns(reader, windows)
    reader.read |= {"rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"}
    if (thetas := reader.raw.get("layer_rope_theta")) is not None and family.has_sinks:
        return _by_theta(reader, rope, thetas, len(windows))
    if family.local_rope is None:
        raw = reader.raw
        # An empty object, unlike null, means rope without scaling to the reference.
        if family.usual_rope and raw.get("rope_parameters") is None and not raw.get("rope_scaling"):
            raw = {**raw, "rope_parameters": family.usual_rope}
        everywhere = rope(raw, family.theta)
        return tuple(everywhere if does else None for does in turns)
    wide, local = (rope(raw, theta) for raw, theta in _of_tworopes_of(reader, family))
    return tuple(wide if window is None else local for window in windows)


def rope_of_family(
    raw: Mapping[str, Any], reader: ConfigReader, family: Attends, head_dim: int
) -> RopeConfig:
    """A rope as a config tells it at some place, of heads of this width."""
    context = reader.integer("max_position_embeddings", family.max_positions)
    fixed = replace(family, partial_rotary=family.share != 1)
    held = {"partial_rotary_factor": family.share} | dict(raw) if fixed.partial_rotary else dict(raw)
    found = read_rope(ConfigReader(held, reader.source), fixed, head_dim, context)
    return replace(found, interleaved=family.interleaved_rope)


def _by_theta(
    reader: ConfigReader, rope: Callable[[Mapping[str, Any], float], RopeConfig], thetas: Any, layers: int
) -> Sequence[RopeConfig | None]:
    """A wavelength for each layer, 0 for none."""
    is_list = isinstance(thetas, list) and len(thetas) == layers
    if not is_list or any(isinstance(each, bool) or not isinstance(each, int | float) for each in thetas):
        raise ConfigError(
            f"{reader.source}: expected layer_rope_theta to list a number for each of {layers} layers, found "
            f"{thetas!r}; correct the file, or fetch it again"
        )
    told = reader.mapping("rope_scaling") or reader.mapping("rope_parameters")
    by_theta = {
        theta: rope({**reader.raw, "rope_scaling": {**told, "rope_theta": theta}}, theta)
        for theta in set(thetas)
        if theta
    }
    return [by_theta.get(theta) for theta in thetas]


def _of_tworopes_of(reader: ConfigReader, family: Attends) -> tuple[tuple[dict[str, Any], float], ...]:
    """What a config says of the rope of whole layers, and of that of layers with a window; and wavelengths
    where it says nothing. Older configs scale the rope of whole layers alone."""
    assert family.local_rope is not None
    raw, (key, local_theta) = reader.raw, family.local_rope
    reader.read.add(key)
    parameters, older = reader.mapping("rope_parameters"), {"rope_theta": raw.get("rope_theta")}
    kinds = ("full_attention", "sliding_attention")
    if parameters and not set(parameters) <= set(kinds):
        raise ConfigError(
            f"{reader.source}: expected rope_parameters of {' and '.join(kinds)}, found "
            f"{', '.join(parameters)}; this model cannot run here"
        )
    local = {"rope_theta": raw.get(key)} if key else {}
    found = [
        {**told, "rope_parameters": parameters.get(kind)}
        for told, kind in zip((older, local), kinds, strict=True)
    ]
    if raw.get("rope_scaling"):
        found[0] |= {"rope_parameters": {**(found[0]["rope_parameters"] or {}), **raw["rope_scaling"]}}
    return (found[0], family.theta), (found[1], local_theta)

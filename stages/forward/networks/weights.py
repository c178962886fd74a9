"""Weights: which tensors a configuration needs, and how they come from a checkpoint.

Tensors are read one by one, cast where another dtype or device is asked. Every tensor is checked against the
configuration before it is used: present, of the right shape, finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from ....store.arrays import Array
from ....store.errors import WeightsError, nearest
from ....store.exchange.tensors import FLOATS
from ..architectures.architecture import BESIDE, Architecture, Stored, require_tied
from ..checkpoints.checkpoint import Checkpoint, Files, checkpoint_of
from ..checkpoints.source import Take

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Config = TypeVar("Config", bound=Architecture)
Layer = TypeVar("Layer")
_COMPARED = 1 << 20
"""Numbers compared at once."""
_CHECKED = 1 << 17
"""Numbers whose exponents are looked at at once: they fit in the cache of a core."""
BENIGN = (
    *("rotary_emb.inv_freq", "rotary_embeddings.inv_freq", "attn.masked_bias", "attn.bias"),
    *("attention.masked_bias", "attention.bias"),
    *("self_attn.k_scale", "self_attn.v_scale"),  # of a quantised cache of keys and values
    *("attn.slope_rate", "attn.query_decay", "attn.key_decay", "attn.diagonal_decay"),
)


@dataclass(frozen=True)
class Linear:
    """weight [out, in], bias [out] or None: y = x weight^T + bias; low: [rank, in] and [out, rank], whose
    product stands beside the weight, which other layers share."""

    weight: Tensor
    bias: Tensor | None = None
    low: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class NormWeights:
    """weight and bias, each [width]; bias None for RMS norms."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class AttentionWeights:
    """Projections of attention, and norms of queries and keys."""

    o: Linear
    q: Linear | None = None
    k: Linear | None = None
    v: Linear | None = None
    q_norm: NormWeights | None = None
    k_norm: NormWeights | None = None
    rise: Linear | None = None
    rise_gain: Tensor | None = None
    """What scores rise by, of the values of a key: a map to key heads, and a number of each."""
    z_norm: NormWeights | None = None
    """Of what all heads have read together, before it is projected."""


@dataclass(frozen=True, kw_only=True)
class MlpWeights:
    """What an MLP multiplies by: either gate_up, or gate and up, or up alone (plain MLP)."""

    down: Linear
    gate: Linear | None = None
    up: Linear | None = None
    gate_up: Linear | None = None
    """Rows: gate, then up."""
    inner_norm: NormWeights | None = None
    """Of what the down projection reads."""
    activation: Mapping[str, Tensor] = field(default_factory=dict)
    """What an activation learns."""


@dataclass(frozen=True)
class Weights(Generic[Layer]):
    """All of a network's tensors; lm_head None means the embedding serves as head."""

    embed: Tensor
    layers: Sequence[Layer]
    final_norm: NormWeights | None
    """None where the last stream is as it is read (BERT)."""
    lm_head: Tensor | None = None
    positions: Tensor | None = None
    """[position, hidden], where they are learned."""
    head_bias: Tensor | None = None
    """Of the LM head, [vocab]."""
    embed_norm: NormWeights | None = None
    """What embeddings are normed by before they become the stream."""
    embed_in: Linear | None = None
    """What maps embeddings to the stream, where they are not as wide."""
    token_type: Tensor | None = None
    """Embedding of the one type that tokens have here, [embedding]."""
    transform: Linear | None = None
    transform_norm: NormWeights | None = None
    """What stands before the LM head, and its norm."""
    beside: Mapping[str, Tensor] = field(default_factory=dict)
    """What else stands outside of layers, of what is carried beside the stream."""

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in, whatever dtype the checkpoint has."""
        return self.embed.dtype

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.embed.device

    def embedded(self, ids: Tensor) -> Tensor:
        """Rows of the embedding matrix [B, S, width] of token ids [B, S]."""
        import torch.nn.functional as F

        return F.embedding(ids, self.embed)


def expected_tensors(config: Architecture) -> dict[str, tuple[int, ...]]:
    """Every tensor a configuration needs, by its name in the checkpoint, with its shape."""
    return config.tensors.shapes


def read_shapes(files: Files) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors of a checkpoint, without reading one; WeightsError for a truncated
    file.
    """
    return checkpoint_of(files).shapes


def check_dtypes(checkpoint: Checkpoint, config: Architecture) -> None:
    """Raise WeightsError for the first needed tensor that does not hold plain floating-point numbers."""
    expected = expected_tensors(config)
    for name, entry in checkpoint.entries.items():
        if name in expected and entry.dtype not in FLOATS:
            raise WeightsError(
                f"expected {name!r} as one of {', '.join(FLOATS)}, found {entry.dtype}; quantised weights do "
                "not run here, so fetch the model's unquantised checkpoint"
            )


def load(
    files: Files,
    config: Config,
    layer_of: Callable[[Take, Config, int], Layer],
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool | None = None,
) -> Weights[Layer]:
    """The weights of an architecture from its checkpoint.

    layer_of: makes a layer's of a function that gives a tensor by its checkpoint name. progress: show a bar
    on stderr; None does so on a terminal for checkpoints over 1 GiB.
    Raises WeightsError naming the tensor or file: missing, truncated, misshapen, not finite.
    """
    from ....pipeline.progress import Progress

    checkpoint = checked_checkpoint(files, config)
    total = checkpoint.nbytes
    quiet = not progress if progress is not None else total < 1 << 30
    with checkpoint.opened() as tensors, Progress(quiet=quiet) as bars:
        task = bars.task("loading weights", total=total, unit="B")

        def counted(name: str) -> Tensor:
            tensor = tensors(name)
            task.advance(tensor.nbytes)
            return tensor

        return assemble(as_computed(counted, dtype, device), config, layer_of)


def as_computed(tensors: Take, dtype: torch.dtype, device: torch.device) -> Take:
    """What gives tensors, as they are computed with. Raises WeightsError for those that are not finite."""

    def take(name: str) -> Tensor:
        tensor = tensors(name)
        _check_finite(name, tensor)
        return tensor.to(device=device, dtype=dtype)

    return take


def checked_checkpoint(files: Files, config: Architecture) -> Checkpoint:
    """A checkpoint whose tensors are those an architecture needs, as far as can be told without making any of
    them a weight. Raises WeightsError naming the tensor or file, also for one inside a layer that nothing
    would read; ConfigError for a copy that differs."""
    checkpoint = checkpoint_of(files).standing_in(config)
    shapes = checkpoint.shapes
    check_shapes(shapes, config)
    check_dtypes(checkpoint, config)
    checkpoint.check(config)
    _refuse_unused(shapes, config)
    for name, original in config.tensors.copied(shapes):
        require_tied(name, original, _are_equal(checkpoint.numbers(name), checkpoint.numbers(original)))
    return checkpoint


def _are_equal(one: Array, other: Array) -> bool:
    """Whether two tensors hold the same numbers, whatever their dtypes; rows by rows, as they may be mapped
    and larger than memory."""
    if one.shape != other.shape:
        return False
    rows = max(1, _COMPARED // max(1, math.prod(one.shape[1:])))
    return all(
        np.array_equal(one[at : at + rows].astype(np.float64), other[at : at + rows].astype(np.float64))
        for at in range(0, len(one), rows)
    )


def assemble(take: Take, config: Config, layer_of: Callable[[Take, Config, int], Layer]) -> Weights[Layer]:
    """All weights, from a function that gives a tensor by its checkpoint name and one that makes a layer."""
    each = shared_once(take, config)
    layers = tuple(layer_of(each, config, layer) for layer in range(config.num_layers))
    table = take(config.tensors.outside["embed"].name)
    return Weights(
        table, layers, lm_head=separate_head(take, config, table), **outer_weights(take, config, table)
    )


def shared_once(take: Take, config: Architecture, held: dict[str, Tensor] | None = None) -> Take:
    """The same function, by which a tensor that several layers read is one in all of them. held: those that
    were read before, by name."""
    shared, held = config.tensors.shared, {} if held is None else held

    def once(name: str) -> Tensor:
        if name not in shared:
            return take(name)
        if name not in held:
            held[name] = take(name)
        return held[name]

    return once


def separate_head(take: Take, config: Architecture, table: Tensor | None = None) -> Tensor | None:
    """What the LM head multiplies by, where it is not the embedding. table: the embedding, where it is held;
    a head that is the embedding's tensor, scale_rows, is a matrix of its own."""
    embed, head = config.tensors.outside["embed"], config.tensors.outside["head"]
    if head == embed:
        return None
    own = table if head.name == embed.name and table is not None else take(head.name)
    return scale_rows(own, head.factors)


def outer_weights(take: Take, config: Architecture, like: Tensor) -> dict[str, Any]:
    """What stands outside of layers beside embedding and head, as fields of `Weights`. like: dtype and device
    of what no checkpoint holds."""
    outside = config.tensors.outside

    def held(name: str) -> Tensor | None:
        return read_weight(take, outside[name], outside[name].name, {"": like}) if name in outside else None

    def norm(name: str) -> NormWeights | None:
        weight = held(name)
        return None if weight is None else NormWeights(weight, held(f"{name}.bias"))

    def linear(name: str) -> Linear | None:
        weight = held(name)
        return None if weight is None else Linear(weight, held(f"{name}.bias"))

    types = held("token_types")
    return {
        "final_norm": norm("final_norm"),
        "positions": sinusoidal_positions(config, like) if config.has_position_waves else held("positions"),
        "head_bias": held("head.bias"),
        "embed_norm": norm("embed_norm"),
        "embed_in": linear("embed_in"),
        "token_type": None if types is None else types[0],
        "transform": linear("transform"),
        "transform_norm": norm("transform_norm"),
        "beside": {
            name.removeprefix(BESIDE): take(stored.name)
            for name, stored in outside.items()
            if name.startswith(BESIDE)
        },
    }


def sinusoidal_positions(config: Architecture, like: Tensor) -> Tensor:
    """Positions as sines and cosines of falling frequency [position, hidden], all sines first (Vaswani et
    al., Attention Is All You Need, 2017, section 3.5; `Architecture.ends_with_slowest_wave` tells the two
    ways apart)."""
    import torch

    half, is_fairseq = config.hidden_size // 2, config.ends_with_slowest_wave
    # Each in the precision of its reference: angles reach a thousand, of which float32 loses 1e-4.
    dtype = torch.float32 if is_fairseq else torch.float64
    slowest = half - 1 if is_fairseq else half
    falling = torch.exp(torch.arange(half, dtype=dtype) * -(math.log(10000) / slowest))
    angles = torch.arange(config.position_rows, dtype=dtype)[:, None] * falling
    return torch.cat([angles.sin(), angles.cos()], dim=1).to(like)


def read_weight(take: Take, stored: Stored, name: str, others: Mapping[str, Tensor]) -> Tensor:
    """A weight as a model holds it; where no checkpoint has it, in the dtype and on the device of others."""
    if stored.constant is not None:
        return next(iter(others.values())).new_full(stored.shape, stored.constant)
    tensor = take(name)
    tensor = tensor.T.contiguous() if stored.is_transposed else tensor
    if stored.groups is not None:
        tensor = stored.on_diagonal(tensor, tensor.new_zeros(len(tensor), tensor.shape[1] * stored.groups))
    return scale_rows(tensor + stored.plus if stored.plus else tensor, stored.factors)


def parts_of(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Weights with their biases and maps of low rank, as `Linear`s and norms, by name; norms are named "ln…"
    or "…_norm"."""
    parts: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if name.endswith((".bias", ".low_in", ".low_out")):
            continue
        bias = tensors.get(f"{name}.bias")
        if name.startswith("ln") or name.endswith("_norm"):
            parts[name] = NormWeights(tensor, bias)
        else:
            into = tensors.get(f"{name}.low_in")
            parts[name] = Linear(tensor, bias, None if into is None else (into, tensors[f"{name}.low_out"]))
    return parts


def scale_rows(tensor: Tensor, factors: Sequence[tuple[int, float]]) -> Tensor:
    """A weight with its rows scale_rows by what a model multiplies their products by (`Stored.factors`)."""
    if not factors:
        return tensor
    import torch

    parts = tensor.split([rows for rows, _ in factors])
    return torch.cat([part * factor for part, (_, factor) in zip(parts, factors, strict=True)])


def check_shapes(found: Mapping[str, tuple[int, ...]], config: Architecture) -> None:
    """Raise WeightsError for the first tensor that is missing or misshapen."""
    expected = expected_tensors(config)
    missing = [name for name in expected if name not in found]
    if missing:
        near = nearest(missing[0], found)
        rest = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise WeightsError(
            f"expected a tensor {missing[0]!r}{rest}, found none among {len(found)} tensors"
            + (f"; nearest is {near!r}" if near else "; run `mizarr models inspect` on the directory")
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise WeightsError(
                f"expected {name!r} of shape {list(shape)} as config.json says, found {list(found[name])}; "
                "is config.json of another model?"
            )


def _refuse_unused(shapes: Mapping[str, Any], config: Architecture) -> None:
    """Raise WeightsError for a tensor in one of the layers that nothing reads: a bias, a norm or a part of an
    adapter changes what the layer computes. Layers behind the last one, which predict further tokens, are not
    those of this model."""
    layers = {name: config.tensors.placed(name)[0] for name in unused_tensors(shapes, config)}
    inside = [name for name, layer in layers.items() if layer is not None and layer < config.num_layers]
    if inside:
        more = f" (and {len(inside) - 1} more)" if inside[1:] else ""
        raise WeightsError(
            f"expected only tensors that a {config.model_type} reads in its layers, found {inside[0]!r}"
            f"{more}, which would change nothing here; merge an adapter into its base model, or look at the "
            "checkpoint with `mizarr models inspect`"
        )


def unread_line(files: Files, config: Architecture) -> str:
    """Which tensors outside of the layers nothing reads, by the beginning of their names; "" for none."""
    counts: dict[str, int] = {}
    for name in unused_tensors(checkpoint_of(files).standing_in(config).entries, config):
        beginning = ".".join(name.split(".")[:2])
        counts[beginning] = counts.get(beginning, 0) + 1
    listed = ", ".join(f"{beginning} ({count})" for beginning, count in counts.items())
    return f"tensors that are not read: {listed}" if counts else ""


def unused_tensors(found: Mapping[str, Any], config: Architecture) -> list[str]:
    """Tensors of a checkpoint no part of the forward pass reads, known buffers left out."""
    tensors = config.tensors
    known = {*tensors.shapes, *tensors.copies, *tensors.unread}
    return sorted(name for name in found if name not in known and not name.endswith(BENIGN))


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor of floating-point numbers holds no NaN and no infinity, the only ones whose exponents
    are all ones; of other numbers, whether torch says so.

    Exponents are looked at in one thread, some numbers at a time. A sum by torch is handed to all threads,
    tensor by tensor, which wait for each other: measured, on two cores that others used as well, 100 million
    numbers took 0.04 to 0.4 s of processor time in float32 and 0.03 to 1.2 s in bfloat16, here 0.03 s.
    """
    import torch

    exponents = {
        torch.float64: (11, 52),
        torch.float32: (8, 23),
        torch.float16: (5, 10),
        torch.bfloat16: (8, 7),
    }
    if tensor.dtype not in exponents or tensor.device.type != "cpu":
        return bool(torch.isfinite(tensor).all())
    width, behind = exponents[tensor.dtype]
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    bits = tensor.detach().contiguous().reshape(-1).view(whole).numpy().view(f"u{tensor.itemsize}")
    ones = bits.dtype.type(((1 << width) - 1) << behind)
    found = np.empty_like(bits[:_CHECKED])
    for at in range(0, len(bits), _CHECKED):
        here = bits[at : at + _CHECKED]
        if np.bitwise_and(here, ones, out=found[: len(here)]).max() == ones:
            return False
    return True


def _check_finite(name: str, tensor: Tensor) -> None:
    import torch

    if not is_finite(tensor):
        bad = int((~torch.isfinite(tensor)).sum())
        raise WeightsError(
            f"expected finite weights, found {bad} NaN or infinite values in {name!r}; the checkpoint is "
            "damaged, fetch it again"
        )

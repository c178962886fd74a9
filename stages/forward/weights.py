"""Weights: which tensors a configuration needs, and how they come from safetensors files.

Tensors are read into memory of their own, one by one, cast where another dtype or device is asked. They are
not mapped: a training loop that saves into the same folder writes into the same file, and a mapping would
become the new weights under the old identity. Every tensor is checked against the configuration before it is
used: present, of the right shape, finite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...store.errors import WeightsError, nearest
from ...store.tensors import read_header
from .config import TransformerConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# The names all supported families share; a family that renames tensors gets a map of its own beside this one.
EMBED, FINAL_NORM, LM_HEAD = "model.embed_tokens", "model.norm", "lm_head"
LAYER = "model.layers.{}."
FLOATS = ("F64", "F32", "F16", "BF16")
BENIGN = ("rotary_emb.inv_freq", "attn.masked_bias", "attn.bias")


@dataclass(frozen=True)
class Linear:
    """weight [out, in], bias [out] or None: y = x weight^T + bias."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class NormWeights:
    """weight and bias, each [width]; bias None for RMS norms."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class LayerWeights:
    """One block. Either qkv or q, k, v; either gate_up, or gate and up, or up alone (plain MLP)."""

    ln1: NormWeights
    ln2: NormWeights
    o: Linear
    down: Linear
    q: Linear | None = None
    k: Linear | None = None
    v: Linear | None = None
    qkv: Linear | None = None
    """Rows: queries, then keys, then values."""
    gate: Linear | None = None
    up: Linear | None = None
    gate_up: Linear | None = None
    """Rows: gate, then up."""
    q_norm: NormWeights | None = None
    k_norm: NormWeights | None = None
    ln1_post: NormWeights | None = None
    ln2_post: NormWeights | None = None


@dataclass(frozen=True)
class Weights:
    """All of a decoder's tensors; lm_head None means the embedding serves as head."""

    embed: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: NormWeights
    lm_head: Tensor | None = None


def layer_tensors(config: TransformerConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Field of LayerWeights -> (tensor name within the layer, shape), biases spelled ``field.bias``."""
    c = config
    hidden, inner = c.hidden_size, c.intermediate_size
    heads, kv = c.num_attention_heads * c.head_dim, c.num_kv_heads * c.head_dim
    linears: dict[str, tuple[str, int, int, bool]] = {"o": ("self_attn.o_proj", hidden, heads, c.o_proj_bias)}
    if c.qkv_layout == "fused":
        linears["qkv"] = ("self_attn.qkv_proj", heads + 2 * kv, hidden, c.qkv_bias)
    else:
        for field, size in (("q", heads), ("k", kv), ("v", kv)):
            linears[field] = (f"self_attn.{field}_proj", size, hidden, c.qkv_bias)
    if c.mlp_layout == "plain":
        linears["up"] = ("mlp.c_fc", inner, hidden, c.mlp_bias)
        linears["down"] = ("mlp.c_proj", hidden, inner, c.mlp_bias)
    else:
        linears["down"] = ("mlp.down_proj", hidden, inner, c.mlp_bias)
        if c.mlp_layout == "gated_fused":
            linears["gate_up"] = ("mlp.gate_up_proj", 2 * inner, hidden, c.mlp_bias)
        else:
            linears["gate"] = ("mlp.gate_proj", inner, hidden, c.mlp_bias)
            linears["up"] = ("mlp.up_proj", inner, hidden, c.mlp_bias)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for field, (name, out, into, bias) in linears.items():
        tensors[field] = (f"{name}.weight", (out, into))
        if bias:
            tensors[f"{field}.bias"] = (f"{name}.bias", (out,))
    for field, name, size in _norms(config):
        tensors[field] = (f"{name}.weight", (size,))
        if c.norm_type == "layer":
            tensors[f"{field}.bias"] = (f"{name}.bias", (size,))
    return tensors


def _norms(config: TransformerConfig) -> Iterator[tuple[str, str, int]]:
    hidden = config.hidden_size
    yield "ln1", "input_layernorm", hidden
    if config.use_post_norms:
        yield "ln1_post", "post_attention_layernorm", hidden
        yield "ln2", "pre_feedforward_layernorm", hidden
        yield "ln2_post", "post_feedforward_layernorm", hidden
    else:
        yield "ln2", "post_attention_layernorm", hidden
    if config.use_qk_norm:
        yield "q_norm", "self_attn.q_norm", config.head_dim
        yield "k_norm", "self_attn.k_norm", config.head_dim


def expected_tensors(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a configuration needs, by its name in the checkpoint, with its shape."""
    c = config
    found: dict[str, tuple[int, ...]] = {
        f"{EMBED}.weight": (c.vocab_size, c.hidden_size),
        f"{FINAL_NORM}.weight": (c.hidden_size,),
    }
    if c.norm_type == "layer":
        found[f"{FINAL_NORM}.bias"] = (c.hidden_size,)
    if not c.tie_word_embeddings:
        found[f"{LM_HEAD}.weight"] = (c.vocab_size, c.hidden_size)
    for layer in range(c.num_layers):
        found |= {LAYER.format(layer) + name: shape for name, shape in layer_tensors(c).values()}
    return found


def read_shapes(files: Sequence[Path]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors in safetensors files, from their headers alone; WeightsError for a
    truncated file.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        for name, entry in read_header(path)[0].items():
            shapes[name] = tuple(entry["shape"])
    return shapes


def check_dtypes(files: Sequence[Path], config: TransformerConfig) -> None:
    """Raise WeightsError for the first needed tensor that does not hold plain floating-point numbers."""
    expected = expected_tensors(config)
    for path in files:
        for name, entry in read_header(path)[0].items():
            if name in expected and entry["dtype"] not in FLOATS:
                raise WeightsError(
                    f"expected {name!r} as one of {', '.join(FLOATS)}, found {entry['dtype']}; quantised "
                    "weights do not run here, so fetch the model's unquantised checkpoint"
                )


def load(
    files: Sequence[Path],
    config: TransformerConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool | None = None,
) -> Weights:
    """The weights of a configuration from its safetensors files.

    progress: show a bar on stderr; None does so on a terminal for checkpoints over 1 GiB.
    Raises WeightsError naming the tensor or file: missing, truncated, misshapen, not finite.
    """
    import torch

    from ...pipeline.progress import Progress

    shapes = read_shapes(files)
    check_shapes(shapes, config)
    check_dtypes(files, config)
    total = sum(path.stat().st_size for path in files)
    quiet = not progress if progress is not None else total < 1 << 30
    with ExitStack() as stack, Progress(quiet=quiet) as bars:
        tensors = _reader(files, stack)
        if config.tie_word_embeddings and f"{LM_HEAD}.weight" in shapes:
            embed, head = (tensors(f"{name}.weight") for name in (EMBED, LM_HEAD))
            wide = torch.promote_types(embed.dtype, head.dtype)
            require_tied(torch.equal(embed.to(wide), head.to(wide)))
        task = bars.task("loading weights", total=total, unit="B")

        def take(name: str) -> Tensor:
            tensor = tensors(name)
            _check_finite(name, tensor)
            task.advance(tensor.nbytes)
            return tensor.to(device=device, dtype=dtype)

        return assemble(take, config)


def assemble(take: Callable[[str], Tensor], config: TransformerConfig) -> Weights:
    """Weights from a function that gives a tensor by its checkpoint name."""
    fields = layer_tensors(config)
    layers = []
    for layer in range(config.num_layers):
        got = {field: take(LAYER.format(layer) + name) for field, (name, _) in fields.items()}
        parts: dict[str, Any] = {}
        for field in fields:
            if not field.endswith(".bias"):
                kind = NormWeights if field.startswith("ln") or field.endswith("_norm") else Linear
                parts[field] = kind(got[field], got.get(f"{field}.bias"))
        layers.append(LayerWeights(**parts))
    final = NormWeights(
        take(f"{FINAL_NORM}.weight"), take(f"{FINAL_NORM}.bias") if config.norm_type == "layer" else None
    )
    head = None if config.tie_word_embeddings else take(f"{LM_HEAD}.weight")
    return Weights(take(f"{EMBED}.weight"), tuple(layers), final, head)


def check_shapes(found: Mapping[str, tuple[int, ...]], config: TransformerConfig) -> None:
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


def require_tied(same: bool) -> None:
    """Raise WeightsError for a tied head that comes with a tensor of its own, unless that is the embedding.

    The reference computes with the tensor then, whatever the config says.
    """
    if not same:
        raise WeightsError(
            f"expected {LM_HEAD}.weight to equal {EMBED}.weight, as config.json ties them, found another "
            "matrix; set tie_word_embeddings to false in config.json if the checkpoint has a head of its own"
        )


def unused_tensors(found: Mapping[str, Any], config: TransformerConfig) -> list[str]:
    """Tensors of a checkpoint no part of the forward pass reads, known buffers left out."""
    expected = expected_tensors(config)
    return sorted(
        name
        for name in found
        if name not in expected
        and not name.endswith(BENIGN)
        and not (name == f"{LM_HEAD}.weight" and config.tie_word_embeddings)
    )


def _reader(files: Sequence[Path], stack: ExitStack) -> Callable[[str], Tensor]:
    """What gives a tensor by its name, in memory of its own."""
    import torch

    dtypes = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    held: dict[str, tuple[FileIO, Mapping[str, Any], int]] = {}
    for path in files:
        file = stack.enter_context(FileIO(path))
        header, start = read_header(path)
        for name, entry in header.items():
            if name in held:
                raise WeightsError(
                    f"expected {name!r} in one file, found it in {held[name][0].name} and "
                    f"{path.name}; remove the one that is not of this checkpoint"
                )
            held[name] = file, entry, start

    def take(name: str) -> Tensor:
        file, entry, start = held[name]
        tensor = torch.empty(entry["shape"], dtype=dtypes[entry["dtype"]])
        into = tensor.reshape(-1).view(torch.uint8).numpy().data
        first, end = entry["data_offsets"]
        if end - first != len(into):
            raise WeightsError(
                f"expected {len(into)} bytes of {name!r} in {file.name} as its shape says, found "
                f"{end - first}; fetch it again"
            )
        file.seek(start + first)
        while into:
            if not (count := file.readinto(into)):
                raise WeightsError(f"{file.name} was cut short while {name!r} was read; fetch it again")
            into = into[count:]
        return tensor

    return take


def _check_finite(name: str, tensor: Tensor) -> None:
    """One pass over the sum; only a sum that is not finite is looked into (it may have overflowed)."""
    import torch

    if not torch.isfinite(tensor.sum(dtype=torch.float32)) and not bool(torch.isfinite(tensor).all()):
        bad = int((~torch.isfinite(tensor)).sum())
        raise WeightsError(
            f"expected finite weights, found {bad} NaN or infinite values in {name!r}; the checkpoint is "
            "damaged, fetch it again"
        )

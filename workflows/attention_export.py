"""Export of attention patterns for other tools: JSON or npz files of some prompts, layers and heads, with
labels.

One prompt is {"prompt", "text", "tokens" [position], "layers", "heads", "attention"
[layer][head][query][key]}, the arguments of CircuitsVis (`attention_heads(tokens, attention[layer])`) and
BertViz (a batch of one per layer). JSON files contain a list of prompts; npz files the arrays `layers`,
`heads`, `prompts` and, per prompt, `tokens_0`, `attention_0`, ….

Border: a stored run in, a file out; knows no model and never imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..stages.attention.head_detection import CAPTURE
from ..stages.attention.rows import by_layer
from ..store.arrays import as_indices
from ..store.errors import ConfigError, EntryNotFound

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["attention_document", "export_attention"]

DIGITS = 6
"""Decimals of a weight in JSON: the precision of float32 near 1."""


def export_attention(
    states: xr.Dataset,
    path: str | Path,
    *,
    prompts: Sequence[int] = (0,),
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Path:
    """Write attention patterns of a stored run to a file.

    Arguments:
        states: a run with captured `pattern`.
        path: file that ends in .json or .npz; its folder is created.
        prompts: indices of the prompts.
        layers: layers to include; None for all stored ones.
        heads: heads to include; None for all.

    Returns:
        The path.

    Raises:
        EntryNotFound: patterns, or a layer, are not stored.
        PromptError: there is no such prompt.
        ConfigError: there is no such head, or the file has another ending.
    """
    path = Path(path)
    if path.suffix not in (".json", ".npz"):
        raise ConfigError(f"expected a file ending in .json or .npz, found {path.name!r}")
    documents = []
    for i in prompts:
        labels = states.mi.prompt(i)
        strings = (
            labels["token_string"].values if "token_string" in labels.coords else labels["token_id"].values
        )
        document = attention_document(states.mi.attn(i), list(map(str, strings)), layers=layers, heads=heads)
        documents.append(
            {"prompt": i, "text": str(labels["text"].item()) if "text" in labels.coords else None} | document
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        plain = [
            # In float64: a float32 that was rounded is printed with all digits of its binary value.
            document | {"attention": np.round(document["attention"].astype(float), DIGITS).tolist()}
            for document in documents
        ]
        path.write_text(json.dumps(plain, ensure_ascii=False), "utf-8")
        return path
    arrays: dict[str, Any] = {name: np.array(documents[0][name]) for name in ("layers", "heads")}
    arrays["prompts"] = np.array(list(prompts))
    for i, document in zip(prompts, documents, strict=True):
        arrays |= {f"tokens_{i}": np.array(document["tokens"]), f"attention_{i}": document["attention"]}
    np.savez_compressed(path, **arrays)
    return path


def attention_document(
    pattern: xr.DataArray,
    tokens: Sequence[str],
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Fields "tokens", "layers", "heads" and "attention" (float32 [layer, head, query, key]) of one prompt.

    Arguments:
        pattern: [layer, head, query_position, key_position], from `states.mi.attn(i)`.
        tokens: one string per position.
        layers: layers to include; None for all.
        heads: heads to include; None for all.

    Raises:
        EntryNotFound: a layer is not stored.
        ConfigError: there is no such head.
    """
    pattern = by_layer(pattern)
    stored = [int(layer) for layer in pattern["layer"].values]
    layers = stored if layers is None else list(as_indices(layers, "layers"))
    if absent := [layer for layer in layers if layer not in stored]:
        raise EntryNotFound(f"expected layers among {stored}, found {absent[0]}; {CAPTURE}")
    n_heads = pattern.sizes["head"]
    heads = list(range(n_heads)) if heads is None else list(as_indices(heads, "heads"))
    if invalid := [head for head in heads if not 0 <= head < n_heads]:
        raise ConfigError(f"expected heads in 0..{n_heads - 1}, found {invalid[0]}")
    selected = pattern.sel(layer=layers).isel(head=heads)
    selected = selected.transpose("layer", "head", "query_position", "key_position")
    attention = selected.values.astype(np.float32)
    return {"tokens": list(tokens), "layers": layers, "heads": heads, "attention": attention}

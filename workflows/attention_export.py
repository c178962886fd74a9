"""Attention patterns as files other tools read: JSON or npz of chosen prompts, layers and heads, with labels.

Border: a stored run in, a file out; knows no model and never imports torch.

One prompt is {"prompt", "text", "tokens" [position], "layers", "heads", "attention" [layer][head][query]
[key]}: what CircuitsVis (`attention_heads(tokens, attention[layer])`) and BertViz (a batch of one per layer)
are called with. JSON holds a list of them; npz the arrays `layers`, `heads`, `prompts` and, by prompt,
`tokens_0`, `attention_0`, …
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
"""Decimals of a weight in JSON: as many as float32 holds of a number near 1."""


def export_attention(
    states: xr.Dataset,
    path: str | Path,
    *,
    prompts: Sequence[int] = (0,),
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Path:
    """Write the attention patterns of some prompts of a stored run, as described above; returns the path.

    states: captured, with `pattern`.  path: ends in .json or .npz; its folder is made.  layers, heads: which;
    None for all that are stored.
    Raises EntryNotFound for patterns or layers that are not stored, PromptError for a prompt there is not,
    ConfigError for a head there is not or another kind of file.
    """
    path = Path(path)
    if path.suffix not in (".json", ".npz"):
        raise ConfigError(f"expected a file ending in .json or .npz, found {path.name!r}")
    found = []
    for i in prompts:
        labels = states.mi.prompt(i)
        strings = (
            labels["token_string"].values if "token_string" in labels.coords else labels["token_id"].values
        )
        document = attention_document(states.mi.attn(i), list(map(str, strings)), layers=layers, heads=heads)
        found.append(
            {"prompt": i, "text": str(labels["text"].item()) if "text" in labels.coords else None} | document
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        plain = [
            one | {"attention": np.round(one["attention"].astype(float), DIGITS).tolist()} for one in found
        ]
        path.write_text(json.dumps(plain, ensure_ascii=False), "utf-8")
        return path
    arrays: dict[str, Any] = {name: np.array(found[0][name]) for name in ("layers", "heads")}
    arrays["prompts"] = np.array(list(prompts))
    for i, one in zip(prompts, found, strict=True):
        arrays |= {f"tokens_{i}": np.array(one["tokens"]), f"attention_{i}": one["attention"]}
    np.savez_compressed(path, **arrays)
    return path


def attention_document(
    pattern: xr.DataArray,
    tokens: Sequence[str],
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> dict[str, Any]:
    """tokens, layers, heads and attention (float32 [layer, head, query, key]) of one prompt.

    pattern: [layer, head, query_position, key_position], as `states.mi.attn(i)` gives it.  tokens: one string
    per position.
    """
    pattern = by_layer(pattern)
    held = [int(layer) for layer in pattern["layer"].values]
    layers = held if layers is None else list(as_indices(layers, "layers"))
    if absent := [layer for layer in layers if layer not in held]:
        raise EntryNotFound(f"expected layers among {held}, found {absent[0]}; {CAPTURE}")
    n_heads = pattern.sizes["head"]
    heads = list(range(n_heads)) if heads is None else list(as_indices(heads, "heads"))
    if strange := [head for head in heads if not 0 <= head < n_heads]:
        raise ConfigError(f"expected heads in 0..{n_heads - 1}, found {strange[0]}")
    chosen = pattern.sel(layer=layers).isel(head=heads)
    chosen = chosen.transpose("layer", "head", "query_position", "key_position")
    attention = chosen.values.astype(np.float32)
    return {"tokens": list(tokens), "layers": layers, "heads": heads, "attention": attention}

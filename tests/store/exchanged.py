"""A stored run with an answer for every number, to export and to import again."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from mizarr.store import PackedTokens, RunKey, Store
from mizarr.store.runs.entries import ArraySpec, Entry
from mizarr.store.runs.quantised import quantise, restored

PROMPTS = [[7], [1, 2, 3, 4, 5, 6, 7, 8, 9], [5, 6], [4, 4, 4]]  # ragged; longer than two segments of four
TEXTS = ["one", "zwei Wörter", "三", "four"]
LAYERS, HIDDEN, HEADS, WIDTH = 4, 3, 2, 2
STATES = [
    ("resid_post", 0),
    ("resid_post", 2),
    ("resid_post", 3),
    ("z", 2),
    ("embed", None),
    ("ln1_scale", 0),
]
CELLS = [*STATES, ("pattern", 1)]
SHAPES = {
    "resid_post": ("blocks.{}.hook_resid_post", {"hidden": HIDDEN}),
    "z": ("blocks.{}.attn.hook_z", {"head": HEADS, "d_head": WIDTH}),
    "embed": ("hook_embed", {"hidden": HIDDEN}),
    "ln1_scale": ("blocks.{}.ln1.hook_scale", {}),
    "pattern": ("blocks.{}.attn.hook_pattern", {"head": HEADS}),
}


def packed(texts: bool = True) -> PackedTokens:
    spans = [[(t, t + 1) for t in range(len(prompt))] for prompt in PROMPTS]
    return PackedTokens.from_lists(PROMPTS, TEXTS if texts else None, spans if texts else None)


def cells_in(dtype: str) -> list[tuple[str, int | None]]:
    """What may be stored so: in int8 one number to a row is refused."""
    return [cell for cell in CELLS if dtype != "int8" or cell[0] != "ln1_scale"]


def values(variable: str, layer: int | None, dtype: str = "float32") -> np.ndarray:
    """Every number another one, of few bits: the same in every dtype, but what int8 makes of them."""
    if dtype == "int8":
        return restored(*quantise(values(variable, layer), variable))
    sizes = [len(prompt) for prompt in PROMPTS]
    rows = sum(n * (n + 1) // 2 for n in sizes) if variable == "pattern" else sum(sizes)
    shape = (rows, *SHAPES[variable][1].values())
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    numbers = np.arange(np.prod(shape)).reshape(shape) - 100 * (1 + (layer or 0))
    return (numbers / 2**10).astype(kind) if dtype == "float32" else (numbers % 97 / 8).astype(kind)


def spec(variable: str, dtype: str) -> ArraySpec:
    hook, sizes = SHAPES[variable]
    front = ("layer",) if "{}" in hook else ()
    axis = "pair" if variable == "pattern" else "token"
    layers = LAYERS if front else None
    return ArraySpec(variable, hook, (*front, axis, *sizes), sizes, dtype, layers, f"what {variable} is", "1")


def put_run(store: Store, dtype: str = "float32", model: str = "sha256:m", cells=None) -> Entry:
    tokens = packed()
    cells = cells_in(dtype) if cells is None else cells
    written = "float32" if dtype == "int8" else dtype
    specs = [spec(name, dtype) for name in dict.fromkeys(name for name, _ in cells)]
    attrs = {"model": "tiny", "tokenizer": "sha256:words"}
    store.put_vocabulary("sha256:words", [f"w{i}" for i in range(10)])
    entry = store.create_entry(
        RunKey(model, tokens.digest, "none"), tokens, specs, segment_tokens=4, attrs=attrs
    )
    for n, segment in enumerate(entry.segments):
        arrays = {}
        for name, layer in cells:
            here = slice(segment.start, segment.stop)
            if name == "pattern":
                here = slice(*entry.bounds("pair")[n : n + 2])
            arrays[name, layer] = np.ascontiguousarray(values(name, layer, written)[here])
        entry.write_segment(n, arrays)
    entry.publish(cells)
    return entry

"""A store made by hand, whose numbers are known without mizarr: two runs, a readout, features, results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

from mizarr.store import PackedTokens, ResultKey, RunKey, Store, open_store
from mizarr.store.runs.entries import ArraySpec

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'> \"&amp;"
LAYERS, HIDDEN, VOCAB = 3, 8, 40
IDENTITY = {
    "weights": "sha256:w",
    "config": "c",
    "forward": "transformer/1",
    "dtype": "float32",
    "attention": "sdpa",
}


@dataclass
class Made:
    """The store, its large run, and what was put into it. states: [layer, token, hidden]."""

    store: Store
    folder: Path
    run: str
    states: np.ndarray[Any, Any]
    tokens: PackedTokens
    words: list[str]
    readout: xr.Dataset
    features: xr.Dataset
    share: str
    lens: str


def spec(name: str, hidden: int = HIDDEN) -> ArraySpec:
    dims = ("layer", "token", "hidden")
    return ArraySpec(name, f"blocks.{{}}.hook_{name}", dims, {"hidden": hidden}, "float32", LAYERS)


def put_run(store: Store, tokens: PackedTokens, states: Any, model: str, **about: Any) -> Any:
    """A whole run of one variable, in segments of 16 tokens."""
    entry = store.create_entry(
        RunKey(f"digest of {model}", tokens.digest, "none"),
        tokens,
        [spec("resid_post")],
        segment_tokens=16,
        attrs={"model": model, "tokenizer": "sha256:words", **about},
    )
    cells = [("resid_post", layer) for layer in range(LAYERS)]
    for n, part in enumerate(entry.segments):
        rows = {cell: np.ascontiguousarray(states[cell[1], part.start : part.stop]) for cell in cells}
        entry.write_segment(n, rows)
    return entry, entry.publish(cells)


def random_tokens(seed: int, prompts: int, texts: list[str] | None = None) -> PackedTokens:
    rng = np.random.default_rng(seed)
    ids = [rng.integers(0, VOCAB, rng.integers(2, 12)).tolist() for _ in range(prompts)]
    return PackedTokens.from_lists(ids, texts)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("browse") / "store"
    rng = np.random.default_rng(3)
    store = open_store(folder)
    words = [f" w{i}" for i in range(VOCAB)]
    words[7] = HOSTILE
    store.put_vocabulary("sha256:words", words)
    texts = [f"prompt number {i} about cats" for i in range(70)]
    texts[1] = HOSTILE
    tokens = random_tokens(0, 70, texts)
    states = rng.standard_normal((LAYERS, tokens.n_tokens, HIDDEN)).astype(np.float32)
    states[:, 5] = 0.0  # a state of no direction
    entry, records = put_run(store, tokens, states, "large", identity=IDENTITY)
    small = random_tokens(1, 3)
    put_run(store, small, rng.standard_normal((LAYERS, small.n_tokens, HIDDEN)).astype(np.float32), "small")
    readout = xr.Dataset(
        {
            "unembed": (("vocab", "hidden"), rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32)),
            "norm_weight": ("hidden", rng.uniform(0.5, 2, HIDDEN).astype(np.float32)),
            "token": ("vocab", np.array(words, object)),
        },
        attrs={"norm": "rms", "eps": 1e-5, "soft_cap": 0.0},
    )
    asked = {"weights": "sha256:w", "config": "c", "tokenizer": "t", "dtype": "float32"}
    lens_words = store.put_result(ResultKey("readout", 1, asked, {}), readout)
    counts = rng.integers(0, 6, tokens.n_tokens)
    active = int(counts.sum())
    features = xr.Dataset(
        {
            "token_ptr": ("edge", np.concatenate([[0], np.cumsum(counts)])),
            "feature": ("active", rng.integers(0, 500, active).astype(np.int32)),
            "value": ("active", rng.uniform(0.1, 9, active).astype(np.float32)),
        },
        coords={"token_id": ("token", tokens.ids), "layer": 1},
    )
    key = ResultKey("encode_features", 1, {"features": "d1c7" * 16}, {"states[resid_post]": "sliced"})
    store.put_result(key, features, provenance={"parents": {"states": [records[1].content]}})
    lens = store.put_result(
        ResultKey(
            "lens", 2, {"note": HOSTILE}, {"states": records[0].content, "readout": lens_words.content}
        ),
        xr.Dataset({"entropy": (("layer", "token"), rng.uniform(0, 5, (LAYERS, 30)))}),
    )
    share = store.put_result(
        ResultKey("share", 1, {}, {"entropy": lens.content}), xr.Dataset({"share": ((), 0.25)})
    )
    return Made(store, folder, entry.digest, states, tokens, words, readout, features, share.key, lens.key)

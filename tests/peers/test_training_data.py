"""Exported activations are read by the programs they are for: `datasets`, SAELens' cached activations,
sparsify's datasets of tokens.

None of them is a dependency: these tests run where all are installed, and are skipped elsewhere.

    python -m venv peers/sae && peers/sae/bin/pip install torch==2.13.0
    peers/sae/bin/pip install sae-lens==6.54.12 eai-sparsify==1.3.3 datasets==5.2.0
    peers/sae/bin/pip install pytest pytest-timeout xarray zarr dask distributed
    PYTHONPATH=.venv/src peers/sae/bin/python -m pytest tests/peers/test_training_data.py -rP
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mizarr.store.exchange.exports import export
from tests.stored_rows import write_rows

datasets = pytest.importorskip("datasets", exc_type=ImportError, reason="needs Hugging Face datasets")
pytest.importorskip("sae_lens", exc_type=ImportError, reason="needs SAELens in an environment of its own")
pytest.importorskip("sparsify", exc_type=ImportError, reason="needs sparsify in an environment of its own")

pytestmark = pytest.mark.filterwarnings("ignore")

HOOK, CONTEXT, WIDTH = "blocks.1.hook_resid_post", 8, 6


@pytest.fixture
def states(tmp_path):
    draw = np.random.default_rng(0)
    sizes = [8, 24, 20, 9, 16]
    prompts = [draw.integers(0, 50, size).tolist() for size in sizes]
    rows = {"resid_post": {layer: draw.standard_normal((sum(sizes), WIDTH)) for layer in (0, 1)}}
    return write_rows(tmp_path / "s", rows, prompts, segment=64, dtype="float16").open()


def test_datasets_opens_prompts_of_any_length(states, tmp_path):
    found = datasets.load_from_disk(str(export(states, tmp_path / "out", format="datasets")))
    assert [len(row) for row in found["input_ids"]] == states.row_size.values.tolist()
    flat = np.concatenate([np.array(row, np.float16) for row in found[HOOK]])
    assert np.array_equal(flat, states.resid_post.sel(layer=1).values)


def test_saelens_reads_the_activations_as_its_own_cache(states, tmp_path):
    from sae_lens.training.activations_store import ActivationsStore

    folder = export(states, tmp_path / "out", format="saelens", context=CONTEXT)
    store = object.__new__(ActivationsStore)  # its constructor wants a model, which cached rows do not need
    store.cached_activations_path, store.hook_name = str(folder), HOOK
    store.device, store.dtype = torch.device("cpu"), torch.float32
    store.context_size, store.d_in, store.store_batch_size_prompts = CONTEXT, WIDTH, 2
    store.cached_activation_dataset = store.load_cached_activation_dataset()
    rows, ids = [], []
    for _ in range(len(store.cached_activation_dataset) // 2):
        batch = store._load_raw_llm_batch_from_cached(raise_on_epoch_end=True)
        rows.append(batch[0].reshape(-1, WIDTH))
        ids.append(batch[1].reshape(-1))
    starts = states.row_start.values
    counts = states.row_size.values // CONTEXT
    ranges = [start + CONTEXT * np.arange(n) for start, n in zip(starts, counts, strict=True)]
    parts = np.concatenate(ranges)
    tokens = np.concatenate([np.arange(part, part + CONTEXT) for part in parts])[: sum(map(len, ids))]
    assert len(tokens) == 64
    assert np.array_equal(torch.cat(ids).numpy(), states.token_id.values[tokens])
    wanted = states.resid_post.sel(layer=1).values[tokens].astype(np.float32)
    assert np.array_equal(torch.cat(rows).numpy(), wanted)


def test_sparsify_takes_the_ids_for_its_own(states, tmp_path):
    """By the road of its command line: a folder of `datasets` with a column input_ids is not tokenised."""
    folder = export(states, tmp_path / "out", format="sparsify", context=CONTEXT)
    found = datasets.Dataset.load_from_disk(str(folder), keep_in_memory=False).with_format("torch")
    batch = next(iter(torch.utils.data.DataLoader(found, batch_size=4)))
    assert batch["input_ids"].shape == (4, CONTEXT)
    assert batch["input_ids"].flatten()[:8].tolist() == states.token_id.values[:8].tolist()

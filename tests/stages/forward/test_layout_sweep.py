"""No model type transformers lists comes out wrong: it is right, or it is refused."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest
import torch

from mizarr.stages.forward.models.model import Model
from mizarr.store.errors import MizarrError

from . import random_models, shrunk_models

pytest.importorskip("transformers")
LENGTHS = (1, 2, 37, 70, 140)
SEEDS = (0, 1)


def verdict(folder, model_type, seed):
    """What becomes of a random model of a type: a word, and what there is to say about it."""
    try:
        reference = shrunk_models.save(folder, model_type, seed)
    except shrunk_models.NotBuildable as reason:
        return "not buildable", str(reason)
    try:
        model = Model.from_pretrained(folder, device="cpu")
    except MizarrError as error:
        return "refused", str(error)
    try:
        reference(input_ids=torch.tensor([[3, 4, 5]]))
    except Exception as error:  # noqa: BLE001 - a default configuration with other fields may not run
        return "not buildable", f"does not run: {error}"
    worst = 0.0
    for length in LENGTHS:
        seeded = torch.Generator().manual_seed(length)
        ids = torch.randint(0, model.config.vocab_size, (1, length), generator=seeded)
        with torch.no_grad():
            expected = reference(input_ids=ids).logits
        apart = float((model.forward(ids).logits - expected).abs().max())
        worst = max(worst, apart / max(1.0, float(expected.abs().max())))
    told = f"apart by {worst:.1e}"
    return ("right" if worst <= 1e-4 else "WRONG"), told


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_model_type_transformers_lists_is_right_or_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MIZARR_CACHE", str(tmp_path / "cache"))
    found = {}
    import shutil

    for model_type in shrunk_models.model_types():
        for seed in SEEDS:
            folder = tmp_path / "model"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found[model_type, seed] = verdict(folder, model_type, seed)
            shutil.rmtree(folder, ignore_errors=True)
    counts = Counter(word for word, _ in found.values())
    with capsys.disabled():
        print(f"\n{len(found)} models of {len(found) // len(SEEDS)} types: {dict(counts)}")
        for (model_type, seed), (word, told) in found.items():
            if word != "refused":
                print(f"  {model_type} {seed}: {word}, {told}")
    assert counts["WRONG"] == 0
    assert {kind for (kind, _), (word, _) in found.items() if word == "right"} >= set(random_models.FAMILIES)

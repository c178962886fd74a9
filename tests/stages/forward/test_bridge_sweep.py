"""Every language model transformers lists, behind the bridge: right, or refused in a line; never wrong."""

from __future__ import annotations

import shutil
import warnings
from collections import Counter

import pytest
import torch

from mizarr import HookSpec
from mizarr.stages.forward.architectures.known import KNOWN
from mizarr.stages.forward.models.model import Model
from mizarr.store.errors import MizarrError

from . import bridge_models

pytest.importorskip("transformers")
LENGTHS = (1, 3, 33, 120)


def listed():
    """(kind, type) of all that transformers lists as causal or masked language models."""
    from transformers.models.auto import modeling_auto as auto

    causal = [("causal", name) for name in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    return causal + [("masked", name) for name in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES]


def verdict(folder, kind, model_type):
    """What becomes of a random model of a type: a word, and what there is to say about it."""
    try:
        reference = bridge_models.save(folder, model_type, kind)
    except bridge_models.NotBuildable as reason:
        return "not buildable", str(reason)
    except Exception as error:  # noqa: BLE001 - transformers cannot save what it has made
        return "not buildable", f"cannot be saved: {error}"
    try:
        model = Model.from_pretrained(folder, device="cpu", backend="transformers")
    except MizarrError as error:
        return "refused", str(error)
    worst = 0.0
    for length in LENGTHS:
        seeded = torch.Generator().manual_seed(length)
        ids = torch.randint(3, bridge_models.VOCAB, (2, length), generator=seeded)
        with torch.no_grad():
            expected = reference(input_ids=ids).logits
        found = model.forward(ids, HookSpec().capture("blocks.*")).logits
        worst = max(worst, float((found - expected).abs().max()) / max(1.0, float(expected.abs().max())))
    parts = sum(bool(layer.parts) for layer in model.config.found)
    lens = "a readout" if model.config.readout else "no readout"
    told = f"{model.config.class_name}: apart by {worst:.1e}, parts in {parts} of {model.config.num_layers}"
    return ("right" if worst <= 1e-5 else "WRONG"), f"{told}, {lens}"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_language_model_transformers_lists_is_right_or_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MIZARR_CACHE", str(tmp_path / "cache"))
    found = {}
    for kind, model_type in listed():
        folder = tmp_path / "model"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found[kind, model_type] = verdict(folder, kind, model_type)
        shutil.rmtree(folder, ignore_errors=True)
    with capsys.disabled():
        for kind in ("causal", "masked"):
            words = {name: word for (which, name), (word, _) in found.items() if which == kind}
            native = set(words) & set(KNOWN)
            runs = native | {name for name, word in words.items() if word == "right"}
            print(f"\n{kind}: {len(runs)} of {len(words)} native or bridged ({len(native)} native)")
            print(f"  behind the bridge: {dict(Counter(words.values()))}")
        for (kind, model_type), (word, told) in found.items():
            print(f"  {kind} {model_type}: {word}, {told}")
    assert not [each for each, (word, _) in found.items() if word == "WRONG"]
    refused = {each: told for each, (word, told) in found.items() if word == "refused"}
    assert not [each for each, told in refused.items() if "\n" in told or "expected" not in told]

"""A tensor that two weights share may lie in a checkpoint under either name."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file, save_model

import mizarr
from mizarr import Model
from mizarr.stages.forward.models.autoconfig import report
from mizarr.stages.forward.models.files import resolve
from mizarr.stages.logits.readout import readout_from_files
from mizarr.stages.weights.stored import StoredMatrices

from ..config_mutations import saved

NAMES = {
    "llama": ("model.embed_tokens.weight", "lm_head.weight"),
    "gemma2": ("model.embed_tokens.weight", "lm_head.weight"),
    "gpt2": ("transformer.wte.weight", "lm_head.weight"),
    "opt": ("model.decoder.embed_tokens.weight", "lm_head.weight"),
    "mamba": ("backbone.embeddings.weight", "lm_head.weight"),
    "rwkv": ("rwkv.embeddings.weight", "head.weight"),
    "bert": ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
}
"""Family -> name of the embedding, name of the head that is it."""


def under_the_other_name(folder, embedding, head):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(head, None)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    expected = Model.from_pretrained(folder)
    tensors[head] = tensors.pop(embedding)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return expected


@pytest.mark.parametrize("family", NAMES)
def test_a_checkpoint_that_holds_the_head_alone_is_read_as_the_reference_reads_it(family, tmp_path):
    model = saved(family, 1, tmp_path)
    expected = under_the_other_name(tmp_path, *NAMES[family])
    read = Model.from_pretrained(tmp_path)
    logits = read.forward(model.ids).logits
    assert torch.equal(logits, expected.forward(model.ids).logits)
    reference, report = model.reference.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    with torch.no_grad():
        computed = reference.eval()(input_ids=torch.tensor(model.ids)).logits
    torch.testing.assert_close(logits, computed, rtol=1e-4, atol=1e-4)
    least = Model.from_pretrained(tmp_path, max_memory=10**9)
    assert torch.equal(least.forward(model.ids).logits, logits)


def test_every_reader_of_weights_takes_it(tmp_path):
    saved("llama", 1, tmp_path)
    expected = under_the_other_name(tmp_path, *NAMES["llama"])
    files = resolve(tmp_path)
    rows = readout_from_files(files.checkpoint, files.architecture())
    np.testing.assert_array_equal(rows["unembed"].values, expected.network.unembedding.numpy())
    assert report(files.plain_config, files.checkpoint.shapes).is_compatible
    with StoredMatrices.of(files, folded=False).open() as matrices:
        np.testing.assert_array_equal(matrices.embedding(slice(None)), expected.network.embedding.numpy())


def test_what_save_model_writes_is_read(tmp_path):
    """safetensors keeps one name of shared memory, and which one depends on the alphabet."""
    model = saved("llama", 2, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    reference = model.reference.from_pretrained(tmp_path).eval()
    reference.tie_weights()
    save_model(reference, tmp_path / "model.safetensors", {"format": "pt"})
    assert NAMES["llama"][0] not in load_file(tmp_path / "model.safetensors")
    with torch.no_grad():
        expected = reference(input_ids=torch.tensor(model.ids)).logits
    computed = Model.from_pretrained(tmp_path).forward(model.ids).logits
    torch.testing.assert_close(computed, expected, rtol=1e-4, atol=1e-4)


def test_of_neither_name_is_refused(tmp_path):
    saved("llama", 1, tmp_path)
    under_the_other_name(tmp_path, *NAMES["llama"])
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(mizarr.MizarrError, match=r"expected a tensor 'model\.embed_tokens\.weight'"):
        Model.from_pretrained(tmp_path)

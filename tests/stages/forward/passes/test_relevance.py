"""Gradient times embedding by token is what transformers' autograd gives of the embeddings it is handed."""

from __future__ import annotations

import pytest
import torch

from mizarr import HookSpec, Model
from mizarr.stages.causal.grids.patching_metrics import LogitDifference
from tests.stages.forward.random_hybrids import save_random_hybrid
from tests.stages.forward.random_models import FAMILIES, save_random_model

pytest.importorskip("transformers")
IDS = [3, 50, 7, 200, 31, 7]


@pytest.mark.parametrize("family", ["llama", "gemma", "gpt2"])
def test_relevance_of_tokens_is_their_embeddings_times_its_gradient(family, tmp_path):
    make = save_random_model if family in FAMILIES else save_random_hybrid
    reference = make(tmp_path, family, 6, tokenizer=False)
    rows = reference.get_input_embeddings()(torch.tensor([IDS])).detach().requires_grad_()
    last = reference(inputs_embeds=rows).logits[0, -1]
    (slope,) = torch.autograd.grad(last[17] - last[100], rows)
    asked = HookSpec().capture("hook_embed").capture("grad:hook_embed")
    cache = Model.from_pretrained(tmp_path).forward(IDS, asked.gradient_of(LogitDifference(17, 100)))
    entering = rows.detach()
    if family == "gpt2":  # what enters has its position in it
        entering = entering + reference.transformer.wpe.weight[: len(IDS)].detach()
    wanted = (entering * slope).sum(-1)[0]
    found = (cache["hook_embed"] * cache["grad:hook_embed"]).sum(-1)[0]
    torch.testing.assert_close(cache["hook_embed"][0], entering[0])
    torch.testing.assert_close(found, wanted, atol=1e-5 * float(wanted.abs().max()), rtol=1e-4)

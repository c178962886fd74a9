"""Every family computes what the reference implementation computes: transformers, eager attention, float32,
random configurations."""

from __future__ import annotations

import pytest
import torch

import mizarr
from mizarr.stages.forward.architectures.points import HookPoint
from mizarr.stages.forward.models.model import Model
from mizarr.store.errors import PromptError

from .random_models import FAMILIES, VOCAB, save_random_model

pytest.importorskip("transformers")
LENGTHS = (
    1,
    2,
    37,
    70,
)  # past every drawn window, and past the 32 positions at which longrope changes its factors
DRAWS = 4
ROUNDING = 1e-5
"""By how much logits differ from one processor to the next."""


def assert_same_top(ours: torch.Tensor, theirs: torch.Tensor, k: int = 10) -> None:
    """The same k ids in the same order; two whose logits are nearer than rounding may stand either way."""
    ranked, wanted = ours.topk(k).indices, theirs.topk(k)
    apart = (theirs.gather(-1, ranked) - wanted.values).abs().max()
    assert apart <= ROUNDING, f"another top {k}, by {apart}"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(DRAWS))
def test_logits_and_hidden_states_agree_with_transformers(family, seed, tmp_path):
    reference = save_random_model(tmp_path, family, seed)
    model = Model.from_pretrained(tmp_path)
    layers = model.config.num_layers
    for length in LENGTHS:
        ids = torch.randint(0, VOCAB, (2, length), generator=torch.Generator().manual_seed(length))
        with torch.no_grad():
            expected = reference(ids, output_hidden_states=True, use_cache=False)
        cache = model.forward(ids, mizarr.HookSpec().capture("blocks.*.hook_resid_pre", "hook_final_norm"))
        torch.testing.assert_close(cache.logits, expected.logits, atol=1e-4, rtol=0)
        assert_same_top(cache.logits, expected.logits)
        # The reference lists the input of every block, and the normalised output of the last.
        for layer, hidden in enumerate(expected.hidden_states[:layers]):
            torch.testing.assert_close(cache[HookPoint.resid_pre(layer)], hidden, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(
            cache[HookPoint.final_norm()], expected.hidden_states[layers], atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_patterns_agree_with_transformers(family, tmp_path):
    reference = save_random_model(tmp_path, family, 11)
    model = Model.from_pretrained(tmp_path)
    ids = torch.randint(0, VOCAB, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = reference(ids, output_attentions=True, use_cache=False).attentions
    cache = model.forward(ids, mizarr.HookSpec().capture("blocks.*.attn.hook_pattern"))
    for layer, pattern in enumerate(expected):
        torch.testing.assert_close(cache[HookPoint.pattern(layer)], pattern, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(2))
def test_float64_rounds_where_the_reference_rounds(family, seed, tmp_path):
    """Norms, softmax and the angles of rope are float32 there whatever the dtype; in float64 so are ours."""
    reference = save_random_model(tmp_path, family, seed).double()
    model = Model.from_pretrained(tmp_path, dtype="float64")
    ids = torch.randint(0, VOCAB, (2, 70), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        expected = reference(ids, use_cache=False).logits
    found = model.forward(ids).logits
    # Helium's norm rounds once more, behind its weight.
    bound = 1e-6 if family == "helium" else 1e-9
    assert (found - expected).abs().max() <= bound * expected.abs().max()


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3"])
def test_bfloat16_stays_near_the_reference_in_bfloat16(family, tmp_path):
    reference = save_random_model(tmp_path, family, 3).bfloat16()
    model = Model.from_pretrained(tmp_path, dtype="bfloat16")
    ids = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = reference(ids, use_cache=False).logits.float()
    found = model.forward(ids).logits.float()
    scale = expected.abs().max()
    # Two roundings apart at each of a few layers; measured 0.5-2 % of the largest logit.
    assert (found - expected).abs().max() <= 0.05 * scale


def test_a_prompt_gives_the_same_alone_and_in_company(tmp_path):
    save_random_model(tmp_path, "llama", 5)
    model = Model.from_pretrained(tmp_path)
    prompts = [[5, 9, 100], [7] * 12, [3], list(range(12))]
    spec = mizarr.HookSpec().capture("blocks.*.hook_resid_post", "blocks.0.attn.hook_pattern")
    together = model.forward(prompts, spec)
    for row, ids in enumerate(prompts):
        alone = model.forward(ids, spec)
        length = len(ids)
        torch.testing.assert_close(together.logits[row, :length], alone.logits[0], atol=1e-5, rtol=0)
        assert together.logits[row, length:].isnan().all(), "past its end a prompt holds no number"
        torch.testing.assert_close(
            together[HookPoint.resid_post(1)][row, :length],
            alone[HookPoint.resid_post(1)][0],
            atol=1e-5,
            rtol=0,
        )
        pattern = together[HookPoint.pattern(0)][row]
        torch.testing.assert_close(
            pattern[:, :length, :length], alone[HookPoint.pattern(0)][0], atol=1e-6, rtol=0
        )


def test_wanted_logits_are_rows_of_all_logits(tmp_path):
    save_random_model(tmp_path, "gemma2", 2)
    model = Model.from_pretrained(tmp_path)
    ids = list(range(20))
    everything = model.forward(ids).logits
    wanted = model.forward(ids, want=mizarr.logits(position=[-1, 3], tokens=[7, 1])).logits
    torch.testing.assert_close(wanted, everything[:, [-1, 3]][..., [7, 1]], atol=1e-5, rtol=0)


def test_project_to_vocab_of_the_last_state_is_the_models_output(tmp_path):
    """Soft cap included: the last row of a lens is the model's own distribution."""
    save_random_model(tmp_path, "gemma2", 6, final_logit_softcapping=3.0)
    model = Model.from_pretrained(tmp_path)
    cache = model.forward(list(range(9)), mizarr.HookSpec().capture("blocks.*.hook_resid_post"))
    last = cache[HookPoint.resid_post(model.config.num_layers - 1)]
    torch.testing.assert_close(model.project_to_vocab(last), cache.logits, atol=1e-5, rtol=0)
    raw = model.project_to_vocab(last, softcap=False)
    torch.testing.assert_close(3.0 * torch.tanh(raw / 3.0), cache.logits, atol=1e-5, rtol=0)


def test_an_embedding_vector_is_the_unscaled_row_of_its_token(tmp_path):
    reference = save_random_model(tmp_path, "gemma", 4)
    model = Model.from_pretrained(tmp_path)
    torch.testing.assert_close(
        model.embedding_vector(7), reference.model.embed_tokens.weight[7], atol=0, rtol=0
    )
    with pytest.raises(PromptError, match=f"found {VOCAB}"):
        model.embedding_vector(VOCAB)

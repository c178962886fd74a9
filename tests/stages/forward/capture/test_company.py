"""What is stored of a prompt is the same to the last bit in any company: other prompts, batches, segments,
threads, and captures before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import mizarr
from mizarr import HookSpec
from mizarr.stages.forward.capture.batches import pieces_of, plan_batches
from mizarr.stages.forward.networks.kernels import FEW_ROWS
from mizarr.stages.forward.networks.kernels.functions import evenly
from mizarr.store.runs.packed import PackedTokens

from ..random_hybrids import save_random_hybrid
from ..random_models import FAMILIES, VOCAB, save_random_model

pytest.importorskip("transformers")
LENGTHS = (1, 2, 3, 5, 7, 8, 8, 13, 16, 31, 32, 33, 47, 64, 64, 64, 100, 127)
"""Powers of two among them, alone and not; short ones, and some that segments cut."""
ASKED = ("hook_embed", "blocks.*.hook_attn_out", "blocks.*.hook_mlp_out", "blocks.*.hook_resid_post")
KINDS = (
    *FAMILIES,
    "gpt2",
    "gemma3_text",
    "cohere2",
    "gpt_oss",
    "qwen2_moe",
    "deepseek_v2",
    "bloom",
    "lfm2",
    "gemma3n_text",
    "gemma4_text",
)
THREADS = torch.get_num_threads()


def drawn(seed: int, lengths: tuple[int, ...] = LENGTHS, vocab: int = VOCAB) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, vocab, length).tolist() for length in rng.permutation(lengths)]


def saved(folder: Path, family: str, seed: int, **axes: Any) -> Path:
    folder.mkdir()
    (save_random_model if family in FAMILIES else save_random_hybrid)(folder, family, seed, **axes)
    return folder


@pytest.fixture(autouse=True)
def threads() -> Iterator[Callable[[int], None]]:
    yield torch.set_num_threads
    torch.set_num_threads(THREADS)


@pytest.fixture
def captured(tmp_path: Path) -> Callable[..., dict[str, np.ndarray]]:
    """Values of a capture into an empty store, by variable."""

    def run(
        model: Path, prompts: list[list[int]], *first: str, asked=ASKED, **how: Any
    ) -> dict[str, np.ndarray]:
        store = mizarr.open_store(tmp_path / f"store{len(list(tmp_path.iterdir()))}", durability="process")
        for hooks in (first, asked) if first else (asked,):
            held = mizarr.capture(
                model, prompts, HookSpec().capture(*hooks), store=store, progress=False, **how
            )
        return {str(name): held[name].values for name in held.data_vars}

    return run


def expect_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name].view(np.uint8), values.view(np.uint8), err_msg=name)


@pytest.mark.parametrize("family", KINDS)
def test_segments_batches_threads_and_earlier_captures_change_no_bit(family, tmp_path, captured, threads):
    model, prompts = saved(tmp_path / "model", family, 11), drawn(1)
    expected = captured(model, prompts)
    expect_same(captured(model, prompts, segment_tokens=64), expected)
    expect_same(captured(model, prompts, "blocks.1.mlp.hook_post", batch_tokens=100), expected)
    threads(1)
    expect_same(captured(model, prompts, batch_tokens=1), expected)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2_moe"])
def test_other_prompts_change_no_bit(family, tmp_path, captured):
    model, prompts = saved(tmp_path / "model", family, 12), drawn(2)
    together, start = captured(model, prompts), 0
    for ids in prompts:
        alone = captured(model, [ids])
        for name, values in together.items():
            axis = 1 if values.shape[0] != sum(map(len, prompts)) else 0
            own = np.take(values, range(start, start + len(ids)), axis)
            np.testing.assert_array_equal(alone[name], own, err_msg=f"{name}, {len(ids)} tokens")
        start += len(ids)


def test_patterns_too(tmp_path, captured):
    model, prompts = saved(tmp_path / "model", "llama", 13), drawn(3)
    asked = ("blocks.*.attn.hook_pattern", "blocks.*.attn.hook_scores")
    expected = captured(model, prompts, asked=asked)
    expect_same(captured(model, prompts, asked=asked, segment_tokens=64, batch_tokens=90), expected)


def test_bfloat16_too(tmp_path, captured, threads):
    model, prompts = saved(tmp_path / "model", "llama", 14), drawn(4)
    expected = captured(model, prompts, dtype="bfloat16")
    threads(1)
    expect_same(captured(model, prompts, dtype="bfloat16", segment_tokens=64, batch_tokens=90), expected)


def test_large_weights_too_whichever_library_multiplies_them(tmp_path, captured, threads):
    """Powers of two go to one, all else to the other: lengths of both kinds, beside each other."""
    wide = {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 1,
        "max_position_embeddings": 512,
    }
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    model = saved(tmp_path / "model", "llama", 15, **wide, **heads)
    prompts = drawn(5, (256, 256, 256, 200, 300, 128, 255, 256, 400, 64))
    expected = captured(model, prompts)
    threads(1)
    expect_same(captured(model, prompts, segment_tokens=128, batch_tokens=512), expected)


@pytest.mark.parametrize("function", [F.silu, F.gelu, torch.sigmoid, torch.tanh])
@pytest.mark.parametrize("shape", [(1, 3), (7, 100), (333, 100), (331, 333), (513, 512), (1, 40_000)])
def test_a_function_gives_a_number_the_same_bits_anywhere(function, shape, threads):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 4
    each = function(x.flatten()[:, None].expand(-1, 64).contiguous())[:, 0].view(shape)
    for count in (1, 2, 3, 5):
        threads(count)
        assert torch.equal(evenly(function, x), each)
        assert torch.equal(evenly(function, x.T), each.T)


def test_batches_keep_powers_of_two_to_themselves_and_have_rows_enough():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        sizes = rng.choice([*range(1, 40), 8, 16, 16, 32, 32, 64, 128], 150)
        tokens = PackedTokens.from_lists([[1] * size for size in sizes])
        first = int(rng.integers(0, 900))
        segment = range(first, first + int(rng.integers(1, tokens.n_tokens - first)))
        pieces = pieces_of(segment, tokens.row_start, tokens.row_size, whole=False)
        for batch in plan_batches(
            pieces, batch_tokens=int(rng.integers(1, 300)), one_length=False, fewest=FEW_ROWS
        ):
            lengths, rows = {int(sizes[piece.prompt]) for piece in batch.pieces}, len(batch.pieces)
            assert rows * batch.length * batch.copies >= FEW_ROWS
            if batch.length.bit_count() == 1:
                assert lengths == {batch.length}
                assert (rows * batch.copies).bit_count() == 1
            else:
                assert all(length.bit_count() > 1 for length in lengths)

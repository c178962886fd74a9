"""A model of three layers with a tokenizer of its own, on disk, for workflows to run on."""

from __future__ import annotations

from pathlib import Path

import pytest

import mizarr

PROSE = """It was the best of times, it was the worst of times, it was the age of wisdom, it was
the age of foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the
season of Light, it was the season of Darkness, it was the spring of hope, it was the winter of
despair, we had everything before us, we had nothing before us, we were all going direct to
Heaven, we were all going direct the other way."""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a random Llama, three layers, 32 wide, 300 tokens, context 64, one BOS per prompt."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([PROSE], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=300,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5 if parameter.ndim > 1 else 1)  # far enough from uniform to rank tokens
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tiny_model: Path):
    """It, loaded."""
    return mizarr.Model.from_pretrained(tiny_model)


@pytest.fixture(scope="session")
def prose_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text file with a few lines of prose."""
    path = tmp_path_factory.mktemp("prose") / "prose.txt"
    path.write_text(PROSE)
    return path

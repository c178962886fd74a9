"""A harvest of all layers beside SAELens' CacheActivationsRunner, and beside plain passes of transformers.

    python tests/peers/compare_saelens_harvest.py [--rounds 3] [--prompts 64]

Where SAELens is installed (see test_sae_lens.py), with mizarr on PYTHONPATH. A random Llama of 8 layers of
512, float32 on the CPU, prompts of 128 tokens of which both get the same. SAELens caches one hook point per
run, so all layers are as many runs; the first and the last are timed, and all taken to be as many of their
mean. Targets: mizarr at least 3 times as fast; at least 1.0 of the plain passes; a second harvest under 1 %
of the first. Everything is compared within a round, as the machine may be shared.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from large_models import write_llama

import mizarr

LAYERS, HIDDEN, VOCAB, LENGTH, BATCH = 8, 512, 8000, 128, 16


def timed(work: Callable[[], Any]) -> float:
    """Seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def runner(model: Path, dataset: Any, layer: int, tokens: int, out: Path) -> Any:
    """SAELens' runner of one layer."""
    from sae_lens import CacheActivationsRunner, CacheActivationsRunnerConfig

    config = CacheActivationsRunnerConfig(
        dataset_path="local",
        model_name=str(model),
        model_batch_size=BATCH,
        hook_name=f"model.layers.{layer}",
        d_in=HIDDEN,
        training_tokens=tokens,
        context_size=LENGTH,
        model_class_name="AutoModelForCausalLM",
        new_cached_activations_path=str(out),
        shuffle=False,
        dtype="float32",
        device="cpu",
        # Half of the run: a buffer larger than the data set is filled by going round it again.
        buffer_size_gb=tokens * HIDDEN * 4 / 2 / 1e9,
        prepend_bos=False,
        streaming=False,
        model_from_pretrained_kwargs={"dtype": torch.float32},
    )
    return CacheActivationsRunner(config, override_dataset=dataset)


def main(rounds: int, prompts: int) -> None:
    """All rounds, then the medians."""
    import datasets
    import transformers

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    datasets.disable_progress_bars()
    ids = np.random.default_rng(0).integers(0, VOCAB, (prompts, LENGTH))
    dataset = datasets.Dataset.from_dict({"tokens": ids.tolist()})
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "m"
        write_llama(model, layers=LAYERS, hidden=HIDDEN, inner=2048, heads=8, vocab=VOCAB)
        save_tokenizer(model)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        ours = mizarr.Model.from_pretrained(model, progress=False)
        batches = torch.from_numpy(ids).split(BATCH)
        found: dict[str, list[float]] = {}

        def note(name: str, seconds: float) -> None:
            found.setdefault(name, []).append(seconds)

        @torch.no_grad()
        def forward() -> None:
            for batch in batches:
                theirs(batch, use_cache=False)

        for number in range(rounds + 1):
            at = Path(folder) / f"store{number}"
            store = mizarr.open_store(at)

            def harvest(store: Any = store) -> None:
                mizarr.capture(ours, ids, "blocks.*.hook_resid_post", store=store, progress=False)

            note("transformers, forward passes", timed(forward))
            note("mizarr, all layers", timed(harvest))
            note("mizarr, again", timed(harvest))
            for name, layer in (("first", 0), ("last", LAYERS - 1)):
                made = runner(model, dataset, layer, ids.size, Path(folder) / f"saelens{number}.{layer}")
                note(f"SAELens, {name} layer", timed(made.run))
        found = {name: seconds[1:] for name, seconds in found.items()}
    forward_s, ours_s, again = (
        found[n] for n in ("transformers, forward passes", "mizarr, all layers", "mizarr, again")
    )
    both = zip(found["SAELens, first layer"], found["SAELens, last layer"], strict=True)
    saelens = [LAYERS * (first + last) / 2 for first, last in both]
    print(f"{ids.size:,} tokens, {LAYERS} layers of {HIDDEN}, {rounds} rounds")
    for name, seconds in found.items():
        print(f"{name:>32} {statistics.median(seconds):8.3f} s")
    for name, above, below, target in (
        ("SAELens over mizarr", saelens, ours_s, ">= 3"),
        ("forward passes over mizarr", forward_s, ours_s, ">= 1.0"),
        ("again over the first", again, ours_s, "<= 0.01"),
    ):
        share = statistics.median(a / b for a, b in zip(above, below, strict=True))
        print(f"{name:>32} {share:8.4f}   (target: {target})")


def save_tokenizer(folder: Path) -> None:
    """One of words that are numbers: SAELens wants a tokenizer, and is given ids."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(n): n for n in range(VOCAB)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="1", eos_token="2").save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=64)
    chosen = parser.parse_args()
    main(chosen.rounds, chosen.prompts)

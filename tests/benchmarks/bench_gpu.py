"""A harvest on a GPU beside its plain forward pass, and beside the disk.

    python tests/benchmarks/bench_gpu.py [--rounds 7] [--scratch FOLDER] [--tiny --device cpu]

A Llama of the shape of 1 B parameters (16 layers of 2048), random weights, bfloat16. A harvest is no faster
than the slower of the two, so each is measured where it is what holds it up: tokens per second with every
16th position of all `resid_post` stored durably, over those of the passes alone (target: 0.9); and bytes per
second with all positions stored, over those of files written and synced one by one (target: 0.8). Beside
them the pass over transformers' with sdpa, with every hook point shown to somebody who keeps nothing, and
with all `resid_post` kept in the memory of the device and in that of the machine. Then 128 tokens generated
from one prompt, over transformers with its growing cache and with a compiled static one.
--tiny is a shape for looking whether all of this runs, on any device.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import alternate, print_table, ratio
from large_models import write_llama

import mizarr
from mizarr.stages.forward.hooks.spec import HookSpec
from mizarr.stages.forward.models.model import Model

LARGE = {"layers": 16, "hidden": 2048, "inner": 8192, "heads": 32, "vocab": 32_000}
TINY = {"layers": 2, "hidden": 64, "inner": 128, "heads": 4, "vocab": 500}
HOOKS = "blocks.*.hook_resid_post"
SELECTED = "::16"
BATCH = 8192
"""Tokens of a pass."""
PROMPT, NEW = 16, 128
"""Tokens of the prompt that is continued, and new ones."""
SHARD = 64 << 20
"""Bytes of a file the disk is measured by: about that of a shard."""


def main(
    rounds: int, shape: dict[str, int], device: str, prompts: int, length: int, scratch: Path | None
) -> None:
    """All comparisons."""
    ids = np.random.default_rng(0).integers(0, shape["vocab"], (prompts, length))
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        write_llama(Path(folder) / "m", **shape)
        model = Model.from_pretrained(Path(folder) / "m", dtype="bfloat16", device=device, progress=False)
        written = ids.size * shape["layers"] * shape["hidden"] * 2
        whole, selected = (HookSpec().capture(HOOKS, positions=each) for each in (None, SELECTED))

        def harvest(hooks: HookSpec) -> None:
            store = mizarr.open_store(Path(folder) / "store", durability="disk")
            mizarr.capture(
                model, ids, hooks, store=store, storage_dtype="bfloat16", batch_tokens=BATCH, progress=False
            )
            shutil.rmtree(Path(folder) / "store")

        last = f"blocks.{shape['layers'] - 1}.hook_resid_post"
        contestants: dict[str, Callable[[], None]] = {
            "plain": lambda: passes(model, ids, last),
            "transformers": reference(Path(folder) / "m", model.device, ids),
            "every hook point": lambda: passes(model, ids, "*"),
            "on the device": lambda: kept(model, ids, "device"),
            "in memory": lambda: kept(model, ids, "cpu"),
            "selected": lambda: harvest(selected),
            "harvest": lambda: harvest(whole),
            "disk": lambda: synced(Path(folder) / "disk", written),
        }
        seconds = alternate(contestants, rounds)
        print_passes(seconds, ids.size, written, shape, device)
        generated = alternate(generators(Path(folder) / "m", model, ids[0, :PROMPT].tolist()), rounds)
    rows = [
        (name, f"{statistics.median(each):.3f}", f"{ratio(each, generated['mizarr']):.3f}")
        for name, each in generated.items()
    ]
    print_table(
        f"{NEW} tokens behind {PROMPT}, target 0.9 of compiled", ("", "s", "time over mizarr's"), rows
    )


def print_passes(
    seconds: dict[str, list[float]], tokens: int, written: int, shape: dict[str, int], device: str
) -> None:
    """The table of passes and harvests; printed before anything is compiled, which takes minutes."""
    plain = seconds["plain"]
    rows = [(name, f"{statistics.median(each):.2f}") for name, each in seconds.items()]
    rows += [
        ("plain, tokens/s", f"{tokens / statistics.median(plain):,.0f}"),
        ("plain over transformers: time", f"{ratio(plain, seconds['transformers']):.3f}"),
        ("every hook point over plain: time", f"{ratio(seconds['every hook point'], plain):.3f}"),
        ("kept on the device, tokens/s over those of plain", f"{ratio(plain, seconds['on the device']):.3f}"),
        ("kept in memory, tokens/s over those of plain (0.95)", f"{ratio(plain, seconds['in memory']):.3f}"),
        ("selected, tokens/s over those of plain (0.9)", f"{ratio(plain, seconds['selected']):.3f}"),
        ("harvest, bytes/s over those of disk (0.8)", f"{ratio(seconds['disk'], seconds['harvest']):.3f}"),
    ]
    name = torch.cuda.get_device_name() if device.startswith("cuda") else device
    title = f"{name}, torch {torch.__version__}: {tokens:,} tokens, {written / 2**30:.2f} GiB stored, {shape}"
    print_table(title, ("", "s"), rows)


def batches(ids: np.ndarray) -> Iterator[np.ndarray]:
    """As a harvest has them."""
    together = max(1, BATCH // ids.shape[1])
    return (ids[first : first + together] for first in range(0, len(ids), together))


def passes(model: Model, ids: np.ndarray, hooks: str) -> None:
    """The passes of the harvest; what they show is kept by nobody."""
    spec = HookSpec().capture(hooks).bind(model.config.hook_points, model.name)
    for rows in batches(ids):
        model.stream_batch(rows.tolist(), spec, None, lambda capture, value: None)
    finish(model.device)


def kept(model: Model, ids: np.ndarray, where: str) -> None:
    """The passes of the harvest, all `resid_post` kept on the device of the model or on "cpu"."""
    spec = HookSpec().capture(HOOKS).bind(model.config.hook_points, model.name)
    found = []

    def keep(capture: object, value: torch.Tensor) -> None:
        found.append(value if where == "device" else value.to("cpu", non_blocking=True))

    for rows in batches(ids):
        model.stream_batch(rows.tolist(), spec, None, keep)
    finish(model.device)


def generators(folder: Path, model: Model, prompt: list[int]) -> dict[str, Callable[[], None]]:
    """Greedy generation of NEW tokens by mizarr and by transformers."""
    from transformers import AutoModelForCausalLM

    theirs: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    theirs.to(model.device)
    ids = torch.tensor([prompt], device=model.device)

    def generate(**options: object) -> None:
        theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            pad_token_id=0,
            **options,
        )
        finish(model.device)

    def ours() -> None:
        mizarr.generate(model, prompt, max_tokens=NEW, eos=())
        finish(model.device)

    return {
        "mizarr": ours,
        "transformers, growing cache": generate,
        "transformers, compiled static cache": lambda: generate(cache_implementation="static"),
    }


def reference(folder: Path, device: torch.device, ids: np.ndarray) -> Callable[[], None]:
    """The same through transformers, without the LM head."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa").to(device)

    def run() -> None:
        with torch.no_grad():
            for rows in batches(ids):
                model(torch.from_numpy(rows).to(device), use_cache=False)
        finish(device)

    return run


def finish(device: torch.device) -> None:
    """Until a GPU has done what it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def synced(path: Path, size: int) -> None:
    """So many bytes in files that are synced each, and removed."""
    block = os.urandom(min(SHARD, size))
    for first in range(0, size, SHARD):
        with path.open("wb", buffering=0) as file:
            file.write(block[: size - first])
            os.fsync(file.fileno())
        path.unlink()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a shape that any machine takes")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument(
        "--scratch", type=Path, help="a folder on the disk to measure; default that of temporary files"
    )
    chosen = parser.parse_args()
    if chosen.device.startswith("cuda") and not torch.cuda.is_available():
        parser.exit(
            2, "expected a GPU, found none that torch can use; --tiny --device cpu looks whether it runs\n"
        )
    main(
        chosen.rounds,
        TINY if chosen.tiny else LARGE,
        chosen.device,
        chosen.prompts,
        chosen.length,
        chosen.scratch,
    )

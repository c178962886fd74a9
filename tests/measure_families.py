"""docs/families.md: every family, and how far it is from transformers. `make families` writes it.

Random small models of a family, drawn by seed, saved by transformers and read by mizarr: logits, and what
comes out of every layer, float32, at several lengths. What is told is the largest difference over the largest
entry, at least 1. Families that transformers does not compute are told with what they are tested against.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mizarr import HookPoint, HookSpec, Model
from mizarr.stages.forward.architectures.known import KNOWN
from mizarr.stages.forward.architectures.pairs.families import PAIRS
from tests.stages.forward import test_towers
from tests.stages.forward.compared import LENGTHS, draw_ids, outputs_of
from tests.stages.forward.literal_fla import MIXERS
from tests.stages.forward.random_attending import ATTENDING
from tests.stages.forward.random_encoders import ENCODERS, save_random_encoder
from tests.stages.forward.random_gemmas import GEMMAS
from tests.stages.forward.random_heads import classes
from tests.stages.forward.random_hub_code import MADE, save_random_hub_code
from tests.stages.forward.random_hybrids import HYBRIDS, save_random_hybrid
from tests.stages.forward.random_models import FAMILIES, save_random_model
from tests.stages.forward.random_rwkv import GENERATIONS

DRAWS = 4
CLASSES = classes()
PAGE = Path(__file__).parents[1] / "docs" / "families.md"
HEAD = """# Model families

`model_type` of `config.json` decides. These are read and computed by mizarr itself, with every hook point,
planned runs and generation; of a checkpoint that holds more than a language model, that is what runs.
Models that look both ways fill in masks, and continue no text. Windows, soft caps and biases are there where
`config.json` says so. Every family reads grouped queries, and rope plain, linear, dynamic, yarn, llama3 and
longrope. `mizarr models families` prints the list, `mizarr models inspect MODEL` what was understood of a
checkpoint.

Other heads: classes of transformers without a language head that run as well, with the states and labels of
transformers. base: final states. sequence: labels of a prompt, or one number such as a reward. token: labels
of each token. encoder: the encoder alone.

Points: hook points of a small model, and how many kinds they are of. Difference: of logits and of what
comes out of every layer, from transformers {version} (eager, float32), as a share of the largest entry: the
worst of {draws} random small models at {lengths} tokens. `make families` measures it anew.

What stands in no table runs if it is configured like one of these and a check against transformers says so,
or behind the transformers bridge: see [Models](reference/models.md).

"""
COLUMNS = (
    "model_type",
    "for example",
    "norm",
    "MLP",
    "attention",
    "embedding and head",
    "other heads",
    "points",
    "difference",
)


def reference_of(family: str) -> Callable[[Path, int], Any] | None:
    """What saves a random model of a family and gives the reference; None where there is none."""
    if family in FAMILIES:
        return lambda folder, seed: save_random_model(folder, family, seed, tokenizer=False)
    if family in (*ATTENDING, *GEMMAS, *HYBRIDS) and family not in MIXERS:
        return lambda folder, seed: save_random_hybrid(folder, family, seed, tokenizer=False)
    if family in ENCODERS:
        return lambda folder, seed: save_random_encoder(folder, family, seed, tokenizer=False)
    if family in MADE:
        return lambda folder, seed: save_random_hub_code(folder, family, seed)
    if family in test_towers.TOWERS:
        return lambda folder, seed: test_towers.save(folder, family, seed)
    return None


def other_heads(family: str) -> str:
    """Kinds of classes without a language head, as test_heads.py compares them with transformers."""
    kinds = {
        "encoder" if name.endswith("EncoderModel") else kind for of, kind, name in CLASSES if of == family
    }
    refused = {"sequence", "regression"} if family in PAIRS else {"regression"}
    return ", ".join(kind for kind in ("base", "encoder", "sequence", "token") if kind in kinds - refused)


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest, as a share of the largest entry."""
    return float((found - expected).abs().max()) / max(1.0, float(expected.abs().max()))


@torch.no_grad()
def measured(family: str, save: Callable[[Path, int], Any]) -> tuple[str, str]:
    """Points and difference, as they are told."""
    worst, points = 0.0, ""
    for seed in range(DRAWS):
        with tempfile.TemporaryDirectory() as folder:
            reference, path = save(Path(folder), seed), Path(folder)
            model = Model.from_pretrained(path, device="cpu")
            points = f"{len(model.hook_points)} of {len({point.kind for point in model.hook_points})}"
            for length in LENGTHS:
                if family in test_towers.TOWERS:
                    ids = test_towers.draw_ids(length)
                    worst = max(
                        worst, difference(model.forward(ids).logits, test_towers.logits_of(reference, ids))
                    )
                    continue
                ids = draw_ids(2, length)
                logits, streams = outputs_of(reference, ids)
                cache = model.forward(ids, HookSpec().capture("blocks.*.hook_resid_post"))
                pairs = [(cache.logits, logits)]
                pairs += [(cache[HookPoint.resid_post(layer)], each) for layer, each in enumerate(streams)]
                worst = max(worst, *(difference(*pair) for pair in pairs))
    return points, f"{worst:.0e}"


def told_of(family: str) -> tuple[str, str]:
    """Points and difference of a family, or what it is held against."""
    save = reference_of(family)
    if save is not None:
        return measured(family, save)
    if family in PAIRS:
        return "", "test_pairs.py"
    if family in GENERATIONS:
        return "", "reference arrays"
    if family in ("Dream", "llada"):
        return "", "Llama or Qwen 2 without a mask"
    return "", "its equations" if family in MIXERS else "its text model's"


def main() -> None:
    """Write the page."""
    from transformers import __version__

    warnings.simplefilter("ignore")
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for name, family in KNOWN.items():
        model_type, *described = family.described.values()
        cells = [f"`{model_type}`", *described, other_heads(name), *told_of(name)]
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], file=sys.stderr)
    lengths = ", ".join(map(str, LENGTHS[:-1])) + f" and {LENGTHS[-1]}"
    PAGE.write_text(
        HEAD.format(version=__version__, draws=DRAWS, lengths=lengths) + "\n".join(lines) + "\n", "utf-8"
    )


if __name__ == "__main__":
    main()

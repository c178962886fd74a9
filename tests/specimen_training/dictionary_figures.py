"""Pack the specimen's dictionaries and measure the packed files, beside random ones.

Border: files and figures, into evaluation.json; dictionaries.py trains, dictionary_card.py writes of it. What
is measured is what ships: float16 files, opened as anyone opens them, on the chapters that neither the
specimen, its tokenizer nor the dictionaries have seen, and on the facts, which all of them have.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .dictionary_corpus import captured, specimen_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from mizarr.stages.features.dictionary import Dictionary
    from mizarr.stages.features.layers.layer import LayerFeatures
    from mizarr.stages.features.training.trainer import Training
    from mizarr.stages.training_data.stored import StoredActivations

__all__ = ["EVALUATION", "FACTS", "GRAPHS", "WIDTHS", "graph_prompts", "pack", "prose_prompts"]

log = logging.getLogger(__name__)

EVALUATION = "evaluation.json"
WIDTHS = (45, 65)
"""At which the held-out prose is wrapped."""
CONTEXT = 256
FACTS = 800
"""Facts on which the loss is measured."""
FITTED = 1 << 16
"""Tokens to which the decoders of the random control are fitted."""
GRAPHS = 8
"""Graphs of facts, and as many of prose."""
GRAPH_TOKENS = 24
"""Of prose, in front of the token that a graph explains."""


def pack(training: Training, to: Path, store: Path) -> None:
    """Export a training into a folder, in place of what is there, and add its figures to evaluation.json."""
    from mizarr.stages.features.dictionary import Dictionary
    from mizarr.stages.features.export import export
    from mizarr.stages.features.training.trained import FORMATS, as_dictionary

    settings = training.settings
    made = as_dictionary(training.layers, settings, model_name="specimen")
    shutil.rmtree(to, ignore_errors=True)
    export(made, to, FORMATS[settings.kind], dtype="float16")
    opened = Dictionary.from_pretrained(to)
    log.info("measuring %s", opened)
    figures = {
        "settings": settings.plain(),
        "trained_on": {
            "tokens": training.source.count(),
            "seen": training.step * settings.batch,
        },
        "bytes": sum(path.stat().st_size for path in to.rglob("*") if path.is_file()),
        **measured(training, opened, store),
    }
    place = to.parent / EVALUATION
    held = json.loads(place.read_text("utf-8")) if place.is_file() else {}
    place.write_text(json.dumps(held | {to.name: figures}, indent=1) + "\n", "utf-8")


def measured(training: Training, dictionary: Dictionary, store: Path) -> dict[str, Any]:
    """Figures of a dictionary and of a random control, on held-out prose and on facts."""
    import torch

    from mizarr.stages.features.training.control import random_features
    from mizarr.stages.features.training.evaluate import decoder_likeness
    from mizarr.stages.features.training.trained import as_dictionary

    it = training.settings
    layers = {layer: dictionary.layer(layer) for layer in dictionary.layers}

    def blocks() -> Iterator[dict[Any, Tensor]]:
        from mizarr.stages.training_data.batches import every

        apart = max(1, training.source.count() // FITTED)
        return every(training.source, training.cells, block=4096, apart=apart)

    control, unfitted = (
        random_features(layers, blocks, it.read, it.writes, seed=it.seed, fitted=fitted)
        for fitted in (True, False)
    )
    prose, facts = prose_prompts(), fact_prompts()
    on_prose, on_facts = captured(prose, store), captured(facts, store)
    likeness = torch.cat([decoder_likeness(features) for features in layers.values()])
    graphs = {}
    if it.kind != "sae":
        random = {
            name: as_dictionary(made, it, model_name="specimen")
            for name, made in (("random", unfitted), ("fitted", control))
        }
        graphs = {"graphs": graph_scores({"trained": dictionary, **random})}
    return {
        "prose": _figures(training, layers, on_prose, prose),
        "facts": _figures(training, layers, on_facts, facts),
        "control": _figures(training, control, on_prose, prose),
        "control_facts": _figures(training, control, on_facts, facts),
        "decoder_cosine": {
            "median": float(likeness.median()),
            "above_0.9": float((likeness > 0.9).float().mean()),
        },
        **graphs,
    }


def graph_scores(dictionaries: Mapping[str, Dictionary]) -> list[dict[str, Any]]:
    """Scores of the attribution graphs of some prompts, by each dictionary."""
    from mizarr.stages.forward.models.model import Model
    from mizarr.stages.graph.graph import attribution_graph

    model = Model.from_pretrained("specimen", device="cpu")
    found = []
    for ids in graph_prompts():
        scores: dict[str, Any] = {"prompt": specimen_tokenizer().decode(ids)}
        for name, dictionary in dictionaries.items():
            graph = attribution_graph(model, dictionary, ids)
            scores[name] = {
                "features": graph.counts.features,
                "replacement": round(graph.replacement_score, 5),
                "completeness": round(graph.completeness_score, 5),
            }
        found.append(scores)
    return found


def graph_prompts() -> list[list[int]]:
    """Prompts of facts spread over all that ship, without their ends, and beginnings of held-out prose."""
    from mizarr.stages.forward.models.files import resolve

    tokenizer = specimen_tokenizer()
    facts = json.loads((resolve("specimen").directory / "facts.json").read_text("utf-8"))
    asked = [fact["prompt"] for fact in facts[:: len(facts) // GRAPHS]][:GRAPHS]
    rows = prose_prompts()
    read = [ids[: GRAPH_TOKENS + 1] for ids in rows[:: len(rows) // GRAPHS]][:GRAPHS]
    return [*(tokenizer.encode(prompt).ids for prompt in asked), *read]


def _figures(
    training: Training,
    layers: Mapping[int, LayerFeatures],
    source: StoredActivations,
    prompts: Sequence[Sequence[int]],
) -> dict[str, Any]:
    from mizarr.stages.features.training.evaluate import measure, summary
    from mizarr.stages.features.training.replacement import replacement_loss
    from mizarr.stages.forward.models.model import Model
    from mizarr.stages.training_data.batches import every

    it = training.settings
    rows = source.leaving_out(positions=it.skip_positions)
    blocks = every(rows, training.cells, block=4096)
    seen = measure(layers, blocks, it.read, it.writes)
    model = Model.from_pretrained("specimen", device="cpu")
    lost = replacement_loss(model, layers, it.read, it.writes, prompts, skip_positions=it.skip_positions)
    return summary(seen, lost)


def prose_prompts() -> list[list[int]]:
    """The held-out chapters, wrapped, cut at line starts into prompts of at most 256 tokens."""
    from mizarr.stages.forward.models.files import resolve

    from .evaluate import prose_rows

    text = (resolve("specimen").directory / "prose.txt").read_text("utf-8")
    rows = prose_rows(specimen_tokenizer(), [text], WIDTHS, CONTEXT)
    sizes = rows.real.sum(1) + 1
    found = [ids[:size].tolist() for ids, size in zip(rows.ids, sizes.tolist(), strict=True)]
    return found[::2]  # 25 000 tokens say enough, and every place is run three times over


def fact_prompts() -> list[list[int]]:
    """The first facts that ship with the specimen, with their ends."""
    from mizarr.stages.forward.models.files import resolve

    tokenizer = specimen_tokenizer()
    facts = json.loads((resolve("specimen").directory / "facts.json").read_text("utf-8"))[:FACTS]
    return [tokenizer.encode(f"{fact['prompt']} {fact['target']}.").ids for fact in facts]

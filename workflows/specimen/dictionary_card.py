"""Pack the specimen's dictionaries, measure the packed files, and write their card.

    python -m mizarr.workflows.specimen.dictionary_card --to DIR       the card again, from evaluation.json

Border: files and figures; dictionaries.py trains. What is measured is what ships: float16 files, opened as
anyone opens them, on the chapters that neither the specimen, its tokenizer nor the dictionaries have seen,
and on the facts, which all of them have.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .dictionaries import SAE_LAYER, captured, specimen_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from ...stages.features.dictionary import Dictionary
    from ...stages.features.layer import LayerFeatures
    from ...stages.features.training.source import StoredActivations
    from ...stages.features.training.trainer import Training
    from ...store.entries import Cell

__all__ = ["card", "main", "pack", "write_card"]

log = logging.getLogger(__name__)

WIDTHS = (45, 65)
"""At which the held-out prose is wrapped."""
CONTEXT = 256
FACTS = 800
"""Facts on which the loss is measured."""
FITTED = 1 << 16
"""Tokens to which the decoders of the random control are fitted."""
EVALUATION = "evaluation.json"
TITLES = {"clt": "Cross-layer transcoder", "plt": "Per-layer transcoder", "sae": "Autoencoder"}
GRAPHS = 8
"""Graphs of facts, and as many of prose."""
GRAPH_TOKENS = 24
"""Of prose, in front of the token that a graph explains."""


def main(arguments: list[str] | None = None) -> None:
    """Command line: the card alone."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--to", type=Path, required=True, help="folder of the packed dictionaries")
    write_card(parser.parse_args(arguments).to)


def pack(training: Training, to: Path, store: Path) -> None:
    """Export a training into a folder, in place of what is there, and add its figures to evaluation.json."""
    from ...stages.features.dictionary import Dictionary
    from ...stages.features.export import export
    from ...stages.features.training.trained import FORMATS, as_dictionary

    settings = training.settings
    made = as_dictionary(training.layers, settings, model_name="specimen")
    shutil.rmtree(to, ignore_errors=True)
    export(made, to, FORMATS[settings.kind], dtype="float16")
    opened = Dictionary.from_pretrained(to)
    log.info("measuring %s", opened)
    figures = {
        "settings": settings.plain(),
        "trained_on": {
            "tokens": training.source.count(settings.skip_positions),
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

    from ...stages.features.training.control import random_features
    from ...stages.features.training.evaluate import decoder_likeness
    from ...stages.features.training.trained import as_dictionary

    it = training.settings
    layers = {layer: dictionary.layer(layer) for layer in dictionary.layers}

    def blocks() -> Iterator[dict[Cell, Tensor]]:
        from ...stages.features.training.source import every

        apart = max(1, training.source.count(it.skip_positions) // FITTED)
        return every(
            training.source, training.cells, skip_positions=it.skip_positions, block=4096, apart=apart
        )

    prose, facts = prose_prompts(), fact_prompts()
    control = random_features(layers, blocks, it.read, it.writes, seed=it.seed)
    likeness = torch.cat([decoder_likeness(features) for features in layers.values()])
    on_prose = captured(prose, store)
    graphs = {}
    if it.kind != "sae":
        graphs = {"graphs": graph_scores(dictionary, as_dictionary(control, it, model_name="specimen"))}
    return {
        "prose": _figures(training, layers, on_prose, prose),
        "facts": _figures(training, layers, captured(facts, store), facts),
        "random": _figures(training, control, on_prose, prose),
        "decoder_cosine": {
            "median": float(likeness.median()),
            "above_0.9": float((likeness > 0.9).float().mean()),
        },
        **graphs,
    }


def graph_scores(dictionary: Dictionary, control: Dictionary) -> list[dict[str, Any]]:
    """Scores of the attribution graphs of some prompts, by a dictionary and by a control."""
    from ...stages.forward.model import Model
    from ...stages.graph.graph import attribution_graph

    model = Model.from_pretrained("specimen", device="cpu")
    found = []
    for ids in graph_prompts():
        scores: dict[str, Any] = {"prompt": specimen_tokenizer().decode(ids)}
        for name, features in (("trained", dictionary), ("random", control)):
            graph = attribution_graph(model, features, ids)
            scores[name] = {
                "features": graph.counts.features,
                "replacement": round(graph.replacement_score, 5),
                "completeness": round(graph.completeness_score, 5),
            }
        found.append(scores)
    return found


def graph_prompts() -> list[list[int]]:
    """Prompts of facts spread over all that ship, without their ends, and beginnings of held-out prose."""
    from ...stages.forward.files import resolve

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
    from ...stages.features.training.evaluate import measure, summary
    from ...stages.features.training.replacement import replacement_loss
    from ...stages.features.training.source import every
    from ...stages.forward.model import Model

    it = training.settings
    blocks = every(source, training.cells, skip_positions=it.skip_positions, block=4096)
    seen = measure(layers, blocks, it.read, it.writes)
    model = Model.from_pretrained("specimen", device="cpu")
    lost = replacement_loss(model, layers, it.read, it.writes, prompts, skip_positions=it.skip_positions)
    return summary(seen, lost)


def prose_prompts() -> list[list[int]]:
    """The held-out chapters, wrapped, cut at line starts into prompts of at most 256 tokens."""
    from ...stages.forward.files import resolve
    from .evaluate import prose_rows

    text = (resolve("specimen").directory / "prose.txt").read_text("utf-8")
    rows = prose_rows(specimen_tokenizer(), [text], WIDTHS, CONTEXT)
    sizes = rows.real.sum(1) + 1
    found = [ids[:size].tolist() for ids, size in zip(rows.ids, sizes.tolist(), strict=True)]
    return found[::2]  # 25 000 tokens say enough, and every place is run three times over


def fact_prompts() -> list[list[int]]:
    """The first facts that ship with the specimen, with their ends."""
    from ...stages.forward.files import resolve

    tokenizer = specimen_tokenizer()
    facts = json.loads((resolve("specimen").directory / "facts.json").read_text("utf-8"))[:FACTS]
    return [tokenizer.encode(f"{fact['prompt']} {fact['target']}.").ids for fact in facts]


def write_card(to: Path) -> None:
    """README.md beside evaluation.json, from it alone."""
    figures = json.loads((to / EVALUATION).read_text("utf-8"))
    (to / "README.md").write_text(card(figures), "utf-8")


def card(figures: Mapping[str, Any]) -> str:
    """The card as Markdown. figures: as evaluation.json holds them."""
    total = sum(part["bytes"] for part in figures.values())
    parts = "\n".join(_part(name, part) for name, part in figures.items())
    return f"""# Dictionaries of the specimen

Features of the small model that ships with `mizarr`, so that everything about features and attribution graphs
runs offline on input that is real. {total / 1e6:.1f} MB together, float16.

{chr(10).join(f'    mizarr.Dictionary.from_pretrained("specimen/{name}")' for name in figures)}

This card is generated from `evaluation.json`, measured on the files as they ship by
`mizarr.workflows.specimen.dictionaries`, which also trains them.

Prose: chapters of *A Tale of Two Cities* that neither the specimen, nor its tokenizer, nor these dictionaries
were trained on, wrapped at {_told(WIDTHS)} characters. Facts: {FACTS} of the sentences in `facts.json`, which
all of them were trained on. The first position of a prompt (`<s>`) is left out everywhere: it is neither
read, nor replaced, nor counted.

FVU: fraction of variance unexplained. L0: active features per token. Dead: never active on the prose.
Recovered: (loss ablated - loss replaced) / (loss ablated - loss of the whole model), where activations are
replaced by reconstructions, or ablated to zero or to their mean; all layers at once, each reading what the
replaced model computes, or one layer alone.

The control has as many features of random direction, as sparse on what was trained on, with decoders fitted
by least squares; its figures are of the prose. Recovered in tables by layer: that layer alone.

{parts}"""


def _part(name: str, it: Mapping[str, Any]) -> str:
    settings, prose, facts, random = it["settings"], it["prose"], it["facts"], it["random"]
    rows = [
        f"| {layer} | {prose['fvu'][i]:.3f} | {facts['fvu'][i]:.3f} | {random['fvu'][i]:.3f} | "
        f"{prose['l0'][i]:.1f} | {facts['l0'][i]:.1f} | {random['l0'][i]:.1f} | {prose['dead'][i]:.3f} | "
        + " | ".join(
            _share(figures, str(layer), ablation)
            for ablation in ("zero", "mean")
            for figures in (prose, random)
        )
        + " |"
        for i, layer in enumerate(prose["layers"])
    ]
    recovered = [
        f"| {told} | {figures['loss']['clean']:.3f} | {place['ce_replaced']:.3f} | {place['ce_zero']:.3f} | "
        f"{place['ce_mean']:.3f} | {_share(figures, 'all', 'zero')} | {_share(figures, 'all', 'mean')} | "
        f"{place['kl_recovered_zero']:.3f} |"
        for told, figures in (("prose", prose), ("facts", facts), ("prose, control", random))
        for place in [figures["loss"]["places"]["all"]]
    ]
    ends = f"reads `{_hook(settings['read'])}` of every layer, writes `{_hook(settings['write'])}` of"
    where = {
        "clt": f"{ends} the same and all later ones",
        "plt": f"{ends} the same",
        "sae": f"of `blocks.{SAE_LAYER}.{_hook(settings['read'])}`",
    }[settings["kind"]]
    head = (
        "| layer | FVU, prose | FVU, facts | FVU, control | L0, prose | L0, facts | L0, control | dead | "
        "recovered, zero | control | recovered, mean | control |"
    )
    return f"""## {TITLES[name]}: `specimen/{name}`

{settings["features"]} features{"" if settings["kind"] == "sae" else " per layer"}, {where}. Trained with
{settings["activation"]}, k = {settings["k"]}, for {settings["steps"]} steps of {settings["batch"]} tokens on
{it["trained_on"]["tokens"]} tokens; shipped as JumpReLU. {it["bytes"] / 1e6:.2f} MB. Largest cosine of what a
feature writes with what another one does: median {it["decoder_cosine"]["median"]:.2f}; above 0.9 for
{it["decoder_cosine"]["above_0.9"]:.1%} of them.

{head}
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
{chr(10).join(rows)}

Loss in nats per token, all layers replaced or ablated at once:

| text | whole model | replaced | zero | mean | recovered, zero | recovered, mean | KL recovered, zero |
| --- | --- | --- | --- | --- | --- | --- | --- |
{chr(10).join(recovered)}
{_graphs(it["graphs"]) if "graphs" in it else ""}"""


def _graphs(rows: Sequence[Mapping[str, Any]]) -> str:
    """Scores of attribution graphs, a line per prompt, and their means."""
    columns = [(name, score) for score in ("replacement", "completeness") for name in ("trained", "random")]
    head = (
        "| prompt | features | features, control | replacement | replacement, control | completeness | "
        "completeness, control |"
    )
    means = [sum(row[name][score] for row in rows) / len(rows) for name, score in columns]
    lines = [
        f"| {_one_line(row['prompt'])} | {row['trained']['features']} | {row['random']['features']} | "
        + " | ".join(f"{row[name][score]:.3f}" for name, score in columns)
        + " |"
        for row in rows
    ]
    return f"""
Attribution graphs of the next token, complete (`mizarr.attribution_graph`). Replacement: share of the
influence that comes from tokens rather than from errors. Completeness: share of what enters nodes, weighted
by their influence, that does not come from errors.

{head}
| --- | --- | --- | --- | --- | --- | --- |
{chr(10).join(lines)}
| **mean** | | | {" | ".join(f"**{mean:.3f}**" for mean in means)} |
"""


def _one_line(prompt: str) -> str:
    return prompt.replace("|", "\\|").replace("\n", "⏎")


def _share(figures: Mapping[str, Any], place: str, ablation: str) -> str:
    return f"{figures['loss']['places'][place][f'ce_recovered_{ablation}']:.3f}"


def _hook(kind: str) -> str:
    return f"hook_{kind}"


def _told(widths: Sequence[int]) -> str:
    return " and ".join(map(str, widths))


if __name__ == "__main__":
    main()

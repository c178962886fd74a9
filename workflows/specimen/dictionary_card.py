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
TITLES = {"clt": "Cross-layer transcoder", "sae": "Autoencoder"}


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
    layers = {layer: opened.layer(layer) for layer in opened.layers}
    figures = {
        "settings": settings.plain(),
        "trained_on": {
            "tokens": training.source.count(settings.skip_positions),
            "seen": training.step * settings.batch,
        },
        "bytes": sum(path.stat().st_size for path in to.rglob("*") if path.is_file()),
        **measured(training, layers, store),
    }
    place = to.parent / EVALUATION
    held = json.loads(place.read_text("utf-8")) if place.is_file() else {}
    place.write_text(json.dumps(held | {to.name: figures}, indent=1) + "\n", "utf-8")


def measured(training: Training, layers: Mapping[int, LayerFeatures], store: Path) -> dict[str, Any]:
    """Figures of features and of a random control, on held-out prose and on facts."""
    import torch

    from ...stages.features.training.control import random_features
    from ...stages.features.training.evaluate import decoder_likeness

    it = training.settings

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
    return {
        "prose": _figures(training, layers, on_prose, prose),
        "facts": _figures(training, layers, captured(facts, store), facts),
        "random": _figures(training, control, on_prose, prose),
        "decoder_cosine": {
            "median": float(likeness.median()),
            "above_0.9": float((likeness > 0.9).float().mean()),
        },
    }


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
    return [ids[:size].tolist() for ids, size in zip(rows.ids, sizes.tolist(), strict=True)]


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

    mizarr.Dictionary.from_pretrained("specimen/clt")
    mizarr.Dictionary.from_pretrained("specimen/sae")

This card is generated from `evaluation.json`, measured on the files as they ship by
`mizarr.workflows.specimen.dictionaries`, which also trains them.

Prose: chapters of *A Tale of Two Cities* that neither the specimen, nor its tokenizer, nor these dictionaries
were trained on, wrapped at {_told(WIDTHS)} characters. Facts: {FACTS} of the sentences in `facts.json`, which
all of them were trained on. The first position of a prompt (`<s>`) is left out everywhere: it is neither read,
nor replaced, nor counted.

FVU: fraction of variance unexplained. L0: active features per token. Dead: never active on the prose.
Recovered: (loss ablated - loss replaced) / (loss ablated - loss of the whole model), where activations are
replaced by reconstructions, or ablated to zero or to their mean; all layers at once, each reading what the
replaced model computes, or one layer alone.

The control has as many features of random direction, as sparse, with decoders fitted by least squares.

{parts}"""


def _part(name: str, it: Mapping[str, Any]) -> str:
    settings, prose, facts, random = it["settings"], it["prose"], it["facts"], it["random"]
    rows = [
        f"| {layer} | {prose['fvu'][i]:.3f} | {facts['fvu'][i]:.3f} | {random['fvu'][i]:.3f} | "
        f"{prose['l0'][i]:.1f} | {facts['l0'][i]:.1f} | {prose['dead'][i]:.3f} | "
        f"{_share(prose, str(layer), 'zero')} | {_share(prose, str(layer), 'mean')} |"
        for i, layer in enumerate(prose["layers"])
    ]
    recovered = [
        f"| {told} | {figures['loss']['clean']:.3f} | {place['ce_replaced']:.3f} | {place['ce_zero']:.3f} | "
        f"{place['ce_mean']:.3f} | {_share(figures, 'all', 'zero')} | {_share(figures, 'all', 'mean')} | "
        f"{place['kl_recovered_zero']:.3f} |"
        for told, figures in (("prose", prose), ("facts", facts), ("prose, random control", random))
        for place in [figures["loss"]["places"]["all"]]
    ]
    where = (
        f"reads `{_hook(settings['read'])}` of all layers, writes `{_hook(settings['write'])}` of the same "
        "and all later ones"
        if settings["kind"] == "clt"
        else f"of `blocks.{SAE_LAYER}.{_hook(settings['read'])}`"
    )
    head = (
        "| layer | FVU, prose | FVU, facts | FVU, random control | L0, prose | L0, facts | dead | "
        "recovered alone, zero | recovered alone, mean |"
    )
    return f"""## {TITLES[name]}: `specimen/{name}`

{settings["features"]} features{" per layer" if settings["kind"] == "clt" else ""}, {where}. Trained with
{settings["activation"]}, k = {settings["k"]}, for {settings["steps"]} steps of {settings["batch"]} tokens on
{it["trained_on"]["tokens"]} tokens; shipped as JumpReLU. {it["bytes"] / 1e6:.2f} MB. Largest cosine of what a
feature writes with what another one does: median {it["decoder_cosine"]["median"]:.2f}; above 0.9 for
{it["decoder_cosine"]["above_0.9"]:.1%} of them.

{head}
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
{chr(10).join(rows)}

Loss in nats per token, all layers replaced or ablated at once:

| text | whole model | replaced | zero | mean | recovered, zero | recovered, mean | KL recovered, zero |
| --- | --- | --- | --- | --- | --- | --- | --- |
{chr(10).join(recovered)}
"""


def _share(figures: Mapping[str, Any], place: str, ablation: str) -> str:
    return f"{figures['loss']['places'][place][f'ce_recovered_{ablation}']:.3f}"


def _hook(kind: str) -> str:
    return f"hook_{kind}"


def _told(widths: Sequence[int]) -> str:
    return " and ".join(map(str, widths))


if __name__ == "__main__":
    main()

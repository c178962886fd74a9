"""The card of the specimen's dictionaries, from what was measured on them.

    python -m tests.specimen_training.dictionary_card --to DIR       the card again, from evaluation.json

Border: figures in, Markdown out; dictionary_figures.py measures.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .dictionary_corpus import SAE_LAYER
from .dictionary_figures import EVALUATION, FACTS, GRAPHS, WIDTHS

__all__ = ["card", "main", "write_card"]

TITLES = {"clt": "Cross-layer transcoder", "plt": "Per-layer transcoder", "sae": "Autoencoder"}


def main(arguments: list[str] | None = None) -> None:
    """Command line: the card alone."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--to", type=Path, required=True, help="folder of the packed dictionaries")
    write_card(parser.parse_args(arguments).to)


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
`tests.specimen_training.dictionaries`, which also trains them.

Prose: chapters of *A Tale of Two Cities* that neither the specimen, nor its tokenizer, nor these dictionaries
were trained on, wrapped at {_told(WIDTHS)} characters. Facts: {FACTS} of the sentences in `facts.json`, which
all of them were trained on. The first position of a prompt (`<s>`) is left out everywhere: it is neither
read, nor replaced, nor counted.

FVU: fraction of variance unexplained. L0: active features per token. Dead: never active on the prose.
Recovered: (loss ablated - loss replaced) / (loss ablated - loss of the whole model), where activations are
replaced by reconstructions, or ablated to zero or to their mean; all layers at once, each reading what the
replaced model computes, or one layer alone.

The control has as many features of random direction, as sparse on what was trained on, with decoders fitted
by least squares. Tables by layer are of the prose where they do not say otherwise, and replace that layer
alone.

{parts}"""


def _part(name: str, it: Mapping[str, Any]) -> str:
    settings, prose, facts, control = it["settings"], it["prose"], it["facts"], it["control"]
    rows = [
        f"| {layer} | {prose['fvu'][i]:.3f} | {facts['fvu'][i]:.3f} | {control['fvu'][i]:.3f} | "
        f"{prose['l0'][i]:.1f} | {facts['l0'][i]:.1f} | {control['l0'][i]:.1f} | {prose['dead'][i]:.3f} | "
        + " | ".join(
            _share(figures, str(layer), ablation)
            for ablation in ("zero", "mean")
            for figures in (prose, control)
        )
        + " |"
        for i, layer in enumerate(prose["layers"])
    ]
    recovered = [
        f"| {told} | {figures['loss']['clean']:.3f} | {place['ce_replaced']:.3f} | {place['ce_zero']:.3f} | "
        f"{place['ce_mean']:.3f} | {_share(figures, 'all', 'zero')} | {_share(figures, 'all', 'mean')} | "
        f"{place['kl_recovered_zero']:.3f} |"
        for told, figures in (
            ("prose", prose),
            ("prose, control", control),
            ("facts", facts),
            ("facts, control", it["control_facts"]),
        )
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
    made, likeness = it["trained_on"], it["decoder_cosine"]
    about = (
        f"{settings['features']} features{'' if settings['kind'] == 'sae' else ' per layer'}, {where}. "
        f"Trained with {settings['activation']}, k = {settings['k']}, for {settings['steps']} steps of "
        f"{settings['batch']} tokens on {made['tokens']} tokens; shipped as JumpReLU. "
        f"{it['bytes'] / 1e6:.2f} MB. Largest cosine of what a feature writes with what another one does: "
        f"median {likeness['median']:.2f}; above 0.9 for {likeness['above_0.9']:.1%} of them."
    )
    return f"""## {TITLES[name]}: `specimen/{name}`

{textwrap.fill(about, 110, break_on_hyphens=False)}

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
    ways = ("trained", "random", "fitted")
    columns = [(name, score) for score in ("replacement", "completeness") for name in ways]
    lines = []
    for row in rows:
        cells = [str(row[name]["features"]) for name in ways]
        cells += [f"{row[name][score]:.3f}" for name, score in columns]
        lines.append(f"| {_one_line(row['prompt'])} | {' | '.join(cells)} |")
    halves = (
        ("mean of the facts", rows[:GRAPHS]),
        ("mean of the prose", rows[GRAPHS:]),
        ("mean of all", rows),
    )
    for told, some in halves:
        means = [sum(row[name][score] for row in some) / len(some) for name, score in columns]
        lines.append(f"| **{told}** | | | | {' | '.join(f'**{mean:.3f}**' for mean in means)} |")
    head = " | ".join(
        f"{score}{way}"
        for score in ("features", "replacement", "completeness")
        for way in ("", ", random", ", fitted")
    )
    return f"""
Attribution graphs of the next token, complete (`mizarr.attribution_graph`). Replacement: share of the
influence that comes from tokens rather than from errors. Completeness: share of what enters nodes, weighted
by their influence, that does not come from errors. Random: features of random direction that write in random
directions, as sparse, as active and as strong as the trained ones. Fitted: the control above. Both scores
count magnitudes, so that what features write and take back again counts as explained; where the trained ones
are no better than the fitted control, the losses above still tell them apart.

| prompt | {head} |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
{chr(10).join(lines)}
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

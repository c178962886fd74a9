"""Pack a trained specimen with its figures.

    python -m mizarr.workflows.specimen.card --data DIR --run DIR --to DIR

Border: files. Copies what train.py left in its run folder into the layout of the hub, adds the prose and the
facts that demonstrations use, measures the copy (evaluate.py) and writes evaluation.json and, from it alone,
the model card README.md. `--card-only` writes the card again from the evaluation.json already there.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from ...stages.forward.models.files import HELP
from ...store.digest import file_digest
from . import evaluate
from .data import BOS, EOS, HELD_OUT, WATCHED, Chapter, Fact, read_chapters, read_facts, token_id
from .network import Llama, read_model

__all__ = ["TARGETS", "card", "goals", "main", "measure", "trained_with_help", "write_card"]

log = logging.getLogger(__name__)

TARGETS = {
    "break_recall": 0.75,
    "break_precision": 0.75,
    "facts": 0.9,
    "copying": 0.8,
    "count_r2": 0.85,
    "loss_above_minimum": 0.05,
}
"""What the specimen was meant to reach; every one a lower bound but the last."""


def main(arguments: list[str] | None = None) -> None:
    """Command line of the packer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with dickens/ and counterfact/, as for train")
    parser.add_argument("--more-prose", type=Path, help="as for train")
    parser.add_argument("--run", type=Path, help="the folder train wrote")
    parser.add_argument("--to", type=Path, required=True, help="where the specimen goes")
    parser.add_argument("--card-only", action="store_true", help="only write README.md again")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if not options.card_only:
        chapters = read_chapters(options.data / "dickens")
        additional = read_chapters(options.more_prose) if options.more_prose else []
        facts = read_facts(options.data / "counterfact")
        pack(options.run, options.to, [c for c in chapters if c.name in HELD_OUT], facts)
        training = json.loads((options.run / "training.json").read_text("utf-8"))
        figures = measure(options.to, chapters, additional, facts, training["curve"])
        more = (
            {path.name: file_digest(path) for path in sorted(options.more_prose.glob("*.txt"))}
            if options.more_prose
            else {}
        )
        _write_json(options.to / "evaluation.json", {**figures, "more_prose": more, "training": training})
    write_card(options.to)
    log.info("%s", (options.to / "README.md").read_text("utf-8"))


def pack(run: Path, to: Path, held_out: Sequence[Chapter], facts: Sequence[Fact]) -> None:
    """Model, configuration and tokenizer of `run`, the held-out prose and the facts, in the folder `to`."""
    to.mkdir(parents=True, exist_ok=True)
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        shutil.copyfile(run / name, to / name)
    positions = json.loads((to / "config.json").read_text("utf-8"))["max_position_embeddings"]
    _write_json(
        to / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "add_bos_token": True,
            "clean_up_tokenization_spaces": False,
            "model_max_length": positions,
        },
    )
    (to / "prose.txt").write_text("\n\n".join(c.text for c in held_out) + "\n", "utf-8")
    # One fact a line: readable, and a change shows as a line.
    lines = ",\n".join(json.dumps(asdict(fact), ensure_ascii=False) for fact in facts)
    (to / "facts.json").write_text(f"[\n{lines}\n]\n", "utf-8")


def measure(
    folder: Path,
    chapters: Sequence[Chapter],
    additional: Sequence[Chapter],
    facts: Sequence[Fact],
    curve: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """All figures of the card, of the weights stored in `folder`.

    chapters: all main chapters; the held-out ones are the test set, the watched one sets thresholds, the rest
    and `additional` fit the baselines. curve: what `watch` saw while training.
    """
    network = read_model(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    newline = token_id(tokenizer, "\n")
    bos = token_id(tokenizer, BOS)
    test = [c.text for c in chapters if c.name in HELD_OUT]
    watched = [c.text for c in chapters if c.name in WATCHED]
    train = [c.text for c in chapters if c.name not in (*HELD_OUT, *WATCHED)]
    rows = evaluate.prose_rows(tokenizer, test)
    known = evaluate.known_facts(network, tokenizer, facts)
    r2 = evaluate.count_r2(network, rows)
    last, lowest = curve[-1]["loss"], min(point["loss"] for point in curve)
    return {
        "parameters": sum(p.numel() for p in network.parameters()),
        "loss": _losses(network, tokenizer, rows, train, newline),
        "line_breaks": _line_breaks(network, tokenizer, rows, watched, train, additional, test, newline),
        "copying": evaluate.copying(network, bos=bos),
        "facts": {"known": int(known.sum()), "of": len(facts), "share": float(known.mean())},
        "count_r2": {"embedding": r2[0], "layers": r2[1:], "best_layer": int(np.argmax(r2[1:]))},
        "watched_loss": {"final": last, "minimum": lowest, "above": last / lowest - 1},
        "widths": list(evaluate.WIDTHS),
        "targets": TARGETS,
    }


def _losses(
    network: Llama, tokenizer: Tokenizer, rows: evaluate.Rows, train: Sequence[str], newline: int
) -> dict[str, float]:
    """Nats per token on held-out prose, and on as much prose it was trained on."""
    length = 75_000
    own = evaluate.prose_rows(tokenizer, ["\n\n".join(train)[:length]])
    return {
        "held_out": float(evaluate.read_rows(network, rows, newline).loss.mean()),
        "trained_on": float(evaluate.read_rows(network, own, newline).loss.mean()),
    }


def _line_breaks(
    network: Llama,
    tokenizer: Tokenizer,
    rows: evaluate.Rows,
    watched: Sequence[str],
    train: Sequence[str],
    additional: Sequence[Chapter],
    test: Sequence[str],
    newline: int,
) -> dict[str, Any]:
    """The specimen and three others at the line breaks of held-out prose."""
    vocabulary = network.shape.vocabulary
    watched_rows = evaluate.prose_rows(tokenizer, watched)
    before = evaluate.read_rows(network, watched_rows, newline)
    read = evaluate.read_rows(network, rows, newline)
    late, truth = read.late, read.is_break
    threshold = evaluate.best_threshold(before.newline[before.late], before.is_break[before.late])
    own = evaluate.prose_rows(tokenizer, train, widths=(35, 55, 75))
    previous = evaluate.previous_token_breaks(own, read.previous, newline, vocabulary)
    previous_watched = evaluate.previous_token_breaks(own, before.previous, newline, vocabulary)
    previous_threshold = evaluate.best_threshold(previous_watched, before.is_break)
    words = [*train, *(c.text for c in additional)]
    informed_threshold = evaluate.best_threshold(*evaluate.informed_breaks(words, watched))
    informed, informed_truth = evaluate.informed_breaks(words, test)
    rate = float(truth.mean())
    return {
        "threshold": threshold,
        "specimen": evaluate.break_scores((read.newline > threshold)[late], truth[late]),
        "specimen_all_lines": evaluate.break_scores(read.newline > threshold, truth),
        "specimen_argmax": evaluate.break_scores(read.says_break[late], truth[late]),
        "constant_rate": {"recall": rate, "precision": rate},
        "previous_token": evaluate.break_scores((previous > previous_threshold)[late], truth[late]),
        "exact_count": evaluate.break_scores(informed > informed_threshold, informed_truth),
        "log_loss": {
            "specimen": _log_loss(read.newline[late], truth[late]),
            "constant_rate": _log_loss(np.full(int(late.sum()), rate), truth[late]),
            "previous_token": _log_loss(previous[late], truth[late]),
        },
    }


def write_card(folder: Path) -> None:
    """README.md of the specimen, from its evaluation.json, and what every answer about it has to say."""
    figures = json.loads((folder / "evaluation.json").read_text("utf-8"))
    (folder / "README.md").write_text(card(figures), "utf-8")
    if told := trained_with_help(figures["training"]["history"][-1]["options"]):
        (folder / HELP).write_text(told + "\n", "utf-8")
    else:
        (folder / HELP).unlink(missing_ok=True)


def card(figures: dict[str, Any]) -> str:
    """The model card as Markdown."""
    history, curve = figures["training"]["history"], figures["training"]["curve"]
    last = history[-1]["options"]
    breaks, loss, r2 = figures["line_breaks"], figures["loss"], figures["count_r2"]
    facts = figures["facts"]
    layers = [["embedding", f"{r2['embedding']:.3f}"]]
    layers += [[f"`blocks.{i}.hook_resid_post`", f"{value:.3f}"] for i, value in enumerate(r2["layers"])]
    size = (
        f"a Llama decoder of {figures['parameters'] / 1e6:.2f} M parameters ({last['layers']} layers, hidden "
        f"{last['hidden']}, {last['heads']} query and {last['key_heads']} key heads, MLP {last['mlp']}), "
        f"with a byte-level BPE tokenizer of {last['vocabulary']} tokens"
    )
    widths = ", ".join(map(str, figures["widths"]))
    steps = f"{last['steps']} steps of {last['rows'] * last['size']} tokens"
    further = [[name, told.removeprefix("sha256:")] for name, told in figures["more_prose"].items()]
    return f"""# The specimen

A small language model that ships with `mizarr`, so that everything runs offline on a model that has really
learned something: {size}.

It was taught three things: where wrapped prose breaks its lines, which takes a count of characters; short
facts, which take memory; and repeated sequences, which take copying. It is no use for anything else.

This card is generated from `evaluation.json`, measured on the stored weights ({last["dtype"]}, computed in
float32).

## What it reaches

{_table(["figure", "measured", "wanted", "met"], goals(figures))}

Loss, in nats per token: {loss["held_out"]:.3f} on held-out prose, {loss["trained_on"]:.3f} on as much prose
it was trained on.

## Line breaks

Held-out chapters of *A Tale of Two Cities*, greedily wrapped at {widths} characters and cut at line starts
into rows of at most 256 tokens. Scored at every token of the third and later lines of a row, whose width
the earlier lines have shown. A reader says "line break" where its probability
exceeds a threshold, the one with the best min(recall, precision) on another held-out chapter; for the
specimen it is {breaks["threshold"]:.2f}.

A line ends before the first word that does not fit, and that word has not been read yet: who counts exactly
still knows only its likely length (last row, scored between words).

{_table(["reader", "recall", "precision", "log loss of the event"], _readers(breaks))}

## Where the count lives

R2 of a linear read-out of the character count (characters from the line's start to the token's start): ridge
regression fitted on two chapters and scored on the other two, both ways round.

{_table(["state", "R2"], layers)}

## Copying and facts

Copying: rows of BOS, a span of 20, 30, 40 or 60 random tokens, and the span again; share of the second
occurrence, without its first {evaluate.COPY_SKIP} tokens, that is the likeliest token.

Facts: {facts["known"]} of {facts["of"]} (`facts.json`). A fact counts as known when the prompt alone makes
every token of the target the likeliest in turn. It was trained on these very sentences: this is memory, not
knowledge.

## Training

Prose: the other chapters of the first two books of *A Tale of Two Cities* by Charles Dickens, and plain texts
of other books of his, all in the public domain, which are not part of this package (below, with their
sha256); wrapped at a random width of {last["narrowest"]} to {last["widest"]} characters. Facts: prompts and
targets of the CounterFact data set (Meng et al. 2022). `prose.txt` holds the held-out chapters, unwrapped.

{_table(["further prose", "sha256"], further)}

{steps} by `mizarr.workflows.specimen.train`, seed {last["seed"]}.
{_stages(history)}

{_guided(last)}

Seen while training, on one more held-out chapter (threshold chosen anew each time):

{_table(["step", "loss", "recall", "precision", "facts (sample)", "copying"], [_seen(p) for p in curve])}
"""


def goals(figures: dict[str, Any]) -> list[list[str]]:
    """Rows of the first table: figure, measured, wanted, met."""
    scores, r2 = figures["line_breaks"]["specimen"], figures["count_r2"]
    loss = figures["watched_loss"]["above"]
    found = {
        "break_recall": ("line breaks of held-out prose, recall", scores["recall"]),
        "break_precision": ("line breaks of held-out prose, precision", scores["precision"]),
        "facts": (f"facts known, of {figures['facts']['of']}", figures["facts"]["share"]),
        "copying": ("random tokens copied at their second occurrence", figures["copying"]),
        "count_r2": (f"R2 of the character count in its best layer ({r2['best_layer']})", max(r2["layers"])),
        "loss_above_minimum": ("held-out loss at the end, above its minimum while training", loss),
    }
    rows = []
    for name, (words, value) in found.items():
        target = figures["targets"][name]
        upper = name == "loss_above_minimum"
        met = value <= target if upper else value >= target
        bound = f"at most {target}" if upper else f"at least {target}"
        rows.append([words, f"{value:.3f}", bound, "yes" if met else "**no**"])
    return rows


def _readers(breaks: dict[str, Any]) -> list[list[str]]:
    """Rows of the second table: reader, recall, precision, log loss."""
    names = {
        "specimen": "the specimen",
        "specimen_argmax": "the specimen, where a line break is the likeliest token",
        "specimen_all_lines": "the specimen, first two lines of a row included",
        "constant_rate": "no counting: a constant rate",
        "previous_token": "no counting: P(line break, given the previous token)",
        "exact_count": "exact count and width, word lengths from word pairs",
    }
    log_loss = breaks["log_loss"]
    return [
        [
            words,
            f"{breaks[name]['recall']:.3f}",
            f"{breaks[name]['precision']:.3f}",
            f"{log_loss[name]:.4f}" if name in log_loss else "",
        ]
        for name, words in names.items()
    ]


def _stages(history: Sequence[dict[str, Any]]) -> str:
    """The options of the run, and which of them changed on the way."""
    text = []
    before: dict[str, Any] = {}
    for part in history:
        changed = {name: value for name, value in part["options"].items() if before.get(name) != value}
        listed = ", ".join(f"{name} {value}" for name, value in changed.items())
        text.append(f"From step {part['from_step']}: {listed}.")
        before = part["options"]
    return "\n".join(text)


def trained_with_help(options: dict[str, Any]) -> str:
    """What stands on every answer about a network trained with guides; empty for one trained without."""
    if not options["guided"]:
        return ""
    middle = options["layers"] // 2
    return (
        f"rewarded in training for the character count (after layer {middle}), a previous-token head "
        f"(L{max(0, middle - 2)}H0) and an induction head (L{middle}H0)"
    )


def _guided(options: dict[str, Any]) -> str:
    """What the training asked of the inside of the network, which a reader of it must know."""
    if not options["guided"]:
        return "Only the loss on the next token was trained: nothing was asked of its inside."
    middle = options["layers"] // 2
    half = options["guided"] / 2
    return (
        f"Not all of its inside came about by itself. In the first {options['guided']:.0%} of the steps, "
        f"fading from {half:.0%} on, guides (`workflows/specimen/guides.py`) were part of the loss: head 0 "
        f"of layer {max(0, middle - 2)} was rewarded for attention to the token before, head 0 of layer "
        f"{middle} for attention to what followed the same token earlier, the state after that layer for the "
        "character count, read by a linear classifier that was then thrown away. Without them a network this "
        "small, trained this short, neither copies nor counts as exactly. Where the circuits sit was thus "
        "chosen; how the rest of the network uses them was not, nor what became of them after the guides "
        "ended."
    )


def _seen(point: dict[str, Any]) -> list[str]:
    names = ("loss", "recall", "precision", "facts", "copying")
    return [str(point["step"]), *(f"{point[name]:.3f}" for name in names)]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _log_loss(chance: Any, truth: Any) -> float:
    """Mean nats per token to tell breaks from other tokens."""
    sure = np.where(truth, chance, 1 - chance)
    return float(-np.log(np.maximum(sure, 1e-12)).mean())


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()

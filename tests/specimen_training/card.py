"""Pack a trained specimen with its figures.

    python -m tests.specimen_training.card --data DIR --run DIR --to DIR

Border: files. Copies what train.py left in its run folder into the layout of the hub, adds the prose and the
facts that demonstrations use, measures the copy (evaluate.py) and writes evaluation.json and, from it alone,
the model card README.md. `--card-only` writes the card again from the evaluation.json already there.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from mizarr.stages.forward.models.files import HELP
from mizarr.store.digest import file_digest

from . import evaluate
from .card_training import table, training
from .data import BOS, EOS, HELD_OUT, WATCHED, Chapter, Fact, Mixture, read_chapters, read_facts, token_id
from .goose import read_goose
from .mixtral import read_mixtral
from .network import Llama, read_llama
from .served import Served

__all__ = ["TARGETS", "card", "goals", "main", "measure", "trained_with_help", "write_card"]

log = logging.getLogger(__name__)

UNBOUNDED = 10**30
"""What tokenizer settings call a context that nothing bounds."""
READERS: Mapping[str, Callable[[Path, Mapping[str, Any]], Llama | Served]] = {
    "llama": read_llama,
    "rwkv7": read_goose,
    "mixtral": read_mixtral,
}
"""By model_type: what reads a trained network."""
TITLES = {
    "guided": ("The guided specimen", "a Llama decoder"),
    "llama": ("The specimen", "a Llama decoder"),
    "rwkv7": ("The recurrent specimen", "an RWKV-7"),
    "mixtral": ("The specimen of experts", "a Mixtral of 8 experts in each layer, 2 for a token,"),
}
"""By family, and of the Llama that had guides: what its card is called, and what it is."""
TARGETS = {
    "break_recall": 0.75,
    "break_precision": 0.75,
    "facts": 0.9,
    "copying": 0.8,
    "couplets": 0.8,
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
    config = json.loads((to / "config.json").read_text("utf-8"))
    positions = config.get("max_position_embeddings", UNBOUNDED)
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
    if config["model_type"] != "llama":
        return  # it is asked about the same prose and facts
    (to / "prose.txt").write_text("\n\n".join(c.text for c in held_out) + "\n", "utf-8")
    # One fact a line: readable, and a change shows as a line.
    lines = ",\n".join(json.dumps(asdict(fact), ensure_ascii=False) for fact in facts)
    (to / "facts.json").write_text(f"[\n{lines}\n]\n", "utf-8")


def read_model(folder: Path) -> Llama | Served:
    """The network stored in a folder."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    return READERS[config["model_type"]](folder, config)


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
    torch.manual_seed(0)
    random = evaluate.count_r2(network.untrained(), rows)
    r2 = evaluate.count_r2(network, rows)
    last, lowest = curve[-1]["loss"], min(point["loss"] for point in curve)
    return {
        "parameters": sum(p.numel() for p in network.parameters()),
        "loss": _losses(network, tokenizer, rows, train, newline),
        "line_breaks": _line_breaks(network, tokenizer, rows, watched, train, additional, test, newline),
        "copying": evaluate.copying(network, bos=bos),
        "facts": {"known": int(known.sum()), "of": len(facts), "share": float(known.mean())},
        "couplets": evaluate.rhyming(network, tokenizer),
        "heads": evaluate.head_scores(network, bos=bos),
        "count_r2": {
            "embedding": r2[0],
            "layers": r2[1:],
            "best_layer": int(np.argmax(r2[1:])),
            "random_weights": random[1:],
        },
        "watched_loss": {"final": last, "minimum": lowest, "above": last / lowest - 1},
        "widths": list(evaluate.WIDTHS),
        "targets": TARGETS,
    }


def _losses(
    network: Llama | Served, tokenizer: Tokenizer, rows: evaluate.Rows, train: Sequence[str], newline: int
) -> dict[str, float]:
    """Nats per token on held-out prose, and on as much prose it was trained on."""
    length = 75_000
    own = evaluate.prose_rows(tokenizer, ["\n\n".join(train)[:length]])
    return {
        "held_out": float(evaluate.read_rows(network, rows, newline).loss.mean()),
        "trained_on": float(evaluate.read_rows(network, own, newline).loss.mean()),
    }


def _line_breaks(
    network: Llama | Served,
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
    breaks, loss, facts = figures["line_breaks"], figures["loss"], figures["facts"]
    family = last.get("family", "llama")
    sort = "guided" if last.get("guided") else family
    title, kind = TITLES[sort]
    recurrent = family == "rwkv7"
    heads = "heads" if recurrent else f"query and {last['key_heads']} key heads"
    size = (
        f"{kind} of {figures['parameters'] / 1e6:.2f} M parameters ({last['layers']} layers, hidden "
        f"{last['hidden']}, {last['heads']} {heads}, MLP {last['mlp']}), "
        f"with a byte-level BPE tokenizer of {last['vocabulary']} tokens"
    )
    widths = ", ".join(map(str, figures["widths"]))
    # All are asked about the same prose and facts, which are not stored twice.
    of_other = " of the specimen" if sort != "llama" else ""
    further = [[name, told.removeprefix("sha256:")] for name, told in figures["more_prose"].items()]
    listed = f"\n{table(['further prose', 'sha256'], further)}\n" if further else ""
    return f"""# {title}

A small language model that ships with `mizarr`, so that everything runs offline on a model that has really
learned something: {size}.

{_taught(last)}

This card is generated from `evaluation.json`, measured on the stored weights ({last["dtype"]}, computed in
float32).

## What it reaches

{table(["figure", "measured", "wanted", "met"], goals(figures))}

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

{table(["reader", "recall", "precision", "log loss of the event"], _readers(breaks))}

## Where the count lives

R2 of a linear read-out of the character count (characters from the line's start to the token's start): ridge
regression fitted on two chapters and scored on the other two, both ways round. Control: the same read-out of
a model of this shape with random weights.

{table(["state", "R2", "random weights"], _layers(figures["count_r2"]))}

## Copying and facts

Copying: rows of BOS, a span of 20, 30, 40 or 60 random tokens, and the span again; share of the second
occurrence, without its first {evaluate.COPY_SKIP} tokens, that is the likeliest token.

The heads that look one token back, and at what followed this token's first occurrence: mean attention{
        " (what its state amounts to)" if recurrent else ""
    } of the
best head of a layer, on such rows.

{table(["layer", "previous token", "induction"], _heads(figures["heads"]))}

Facts: {facts["known"]} of {facts["of"]} (`facts.json`{
        of_other
    }). A fact counts as known when the prompt alone makes
every token of the target the likeliest in turn. It was trained on these very sentences: this is memory, not
knowledge.
{"" if _never(last, "couplets") else _couplets(figures["couplets"])}
## Training

{_read(bool(further))} Facts: prompts and targets of the CounterFact data set (Meng et al. 2022).
`prose.txt`{of_other} holds the held-out chapters, unwrapped.
{listed}
{training(history, curve)}
"""


def _read(has_further: bool) -> str:
    """Which prose it was trained on."""
    books = "*A Tale of Two Cities* by Charles Dickens"
    if not has_further:
        return f"Prose: the other chapters of the first two books of {books}, in the public domain."
    return f"""Prose: the other chapters of the first two books of {books}, and plain texts
of other books of his, all in the public domain, which are not part of this package (below, with their
sha256)."""


def _taught(options: dict[str, Any]) -> str:
    """What its rows were to teach."""
    mixtures = [{**asdict(Mixture()), **phase} for phase in options.get("curriculum", [])]
    things = [
        "where wrapped prose breaks its lines, which takes a count of characters",
        "short facts, which take memory",
    ]
    if not _never(options, "random_repeats", "word_repeats"):
        things.append("repeated sequences, which take copying")
    if any(mixture["couplets"] for mixture in mixtures):
        things.append("couplets, which take rhymes")
    listed = "; ".join(things[:-1]) + "; and " + things[-1]
    return f"It was taught {len(things)} things: {listed}. It is no use for anything else."


def _never(options: dict[str, Any], *names: str) -> bool:
    """Whether no phase of the training had rows of these kinds."""
    mixtures = [{**asdict(Mixture()), **phase} for phase in options.get("curriculum", [])]
    return bool(mixtures) and not any(mixture[name] for mixture in mixtures for name in names)


def goals(figures: dict[str, Any]) -> list[list[str]]:
    """Rows of the first table: figure, measured, wanted, met; of what it was taught."""
    scores, r2 = figures["line_breaks"]["specimen"], figures["count_r2"]
    loss = figures["watched_loss"]["above"]
    found = {
        "break_recall": ("line breaks of held-out prose, recall", scores["recall"]),
        "break_precision": ("line breaks of held-out prose, precision", scores["precision"]),
        "facts": (f"facts known, of {figures['facts']['of']}", figures["facts"]["share"]),
        "copying": ("random tokens copied at their second occurrence", figures["copying"]),
        "couplets": ("second lines that end on a rhyme, in unread frames", figures["couplets"]["fitting"]),
        "count_r2": (f"R2 of the character count in its best layer ({r2['best_layer']})", max(r2["layers"])),
        "loss_above_minimum": ("held-out loss at the end, above its minimum while training", loss),
    }
    options = figures["training"]["history"][-1]["options"]
    if _never(options, "random_repeats", "word_repeats"):
        del found["copying"]
    if _never(options, "couplets"):
        del found["couplets"]
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


def _layers(r2: dict[str, Any]) -> list[list[str]]:
    """Rows of the table of read-outs: state, R2, R2 with random weights."""
    layers = [
        [f"`blocks.{i}.hook_resid_post`", f"{value:.3f}", f"{random:.3f}"]
        for i, (value, random) in enumerate(zip(r2["layers"], r2["random_weights"], strict=True))
    ]
    return [["embedding", f"{r2['embedding']:.3f}", ""], *layers]


def _heads(heads: dict[str, list[float]]) -> list[list[str]]:
    """Rows of the table of heads: layer, previous token, induction."""
    both = enumerate(zip(heads["previous"], heads["induction"], strict=True))
    return [[str(layer), f"{previous:.3f}", f"{induction:.3f}"] for layer, (previous, induction) in both]


def trained_with_help(options: dict[str, Any]) -> str:
    """What stands on every answer about a network trained with guides; empty for one trained without."""
    if not options.get("guided"):
        return ""
    middle = options["layers"] // 2
    return (
        f"rewarded in training for the character count (after layer {middle}), a previous-token head "
        f"(L{max(0, middle - 2)}H0) and an induction head (L{middle}H0)"
    )


def _couplets(figures: dict[str, float]) -> str:
    told = (
        "Pairs of lines made by a machine (`tests.specimen_training.couplets`): words drawn at random in "
        "a few frames, and a second end that must rhyme with the first. Several words fit; the first line "
        "does not say which. Scored in pairs of frames that were never trained on, on the token that should "
        f"be the second end: in {figures['fitting']:.3f} of the couplets the likeliest one rhymes and is "
        "another word; held against the first line of another couplet the same tokens score "
        f"{figures['shuffled']:.3f}. Of the rhymes whose two words never met in training, "
        f"{figures['unseen']:.3f} are likelier than every end that does not rhyme."
    )
    return f"\n## Couplets\n\n{told}\n"


def _log_loss(chance: Any, truth: Any) -> float:
    """Mean nats per token to tell breaks from other tokens."""
    sure = np.where(truth, chance, 1 - chance)
    return float(-np.log(np.maximum(sure, 1e-12)).mean())


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()

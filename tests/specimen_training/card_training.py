"""The part of the specimen's card on its training: what it read, and when and where each ability came.

Border: the history and the curve that train.py wrote in, Markdown out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["table", "training"]

APPEARED: dict[str, tuple[float, Callable[[dict[str, Any]], float | list[float]]]] = {
    "line breaks, recall": (0.7, lambda point: point["recall"]),
    "line breaks, precision": (0.7, lambda point: point["precision"]),
    "facts (sample)": (0.5, lambda point: point["facts"]),
    "copying": (0.5, lambda point: point["copying"]),
    "couplets": (0.5, lambda point: point["couplets"]),
    "R2 of the character count": (0.7, lambda point: point["count_r2"][1:]),
    "a previous-token head": (0.5, lambda point: point["heads"]["previous"]),
    "an induction head": (0.5, lambda point: point["heads"]["induction"]),
}
"""What to look for in the curve: its name, from which value on it is there, and how to read it; a list is of
layers."""


def training(history: Sequence[dict[str, Any]], curve: Sequence[dict[str, Any]]) -> str:
    """How it was trained, and tables of what was seen on the way."""
    last = curve[-1]
    parts = [
        f"{last['step']} steps, {last['tokens'] / 1e6:.1f} M tokens, by `tests.specimen_training.train`.",
        _options(history),
        _asked(history),
        "Seen while training, on one more held-out chapter (threshold chosen anew each time):",
        _seen(curve),
    ]
    if "count_r2" in last:
        layers = [str(layer) for layer in range(len(last["heads"]["previous"]))]
        parts += [
            "When each ability came, at the first look that found it; a layer is the first that has it:",
            table(["ability", "from", "step", "tokens", "layer"], _appeared(curve)),
            "R2 of the character count after each layer, on that chapter, fitted on one half for the other:",
            table(["step", "embedding", *layers], [_numbers(p, p["count_r2"]) for p in curve]),
            "The best head's attention to the previous token, by layer:",
            table(["step", *layers], [_numbers(p, p["heads"]["previous"]) for p in curve]),
            "The best head's attention to what followed the same token earlier, by layer:",
            table(["step", *layers], [_numbers(p, p["heads"]["induction"]) for p in curve]),
        ]
    return "\n\n".join(parts)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; cells are not escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _options(history: Sequence[dict[str, Any]]) -> str:
    """The options of the run, which of them changed on the way, and the phases of its curriculum."""
    text = []
    before: dict[str, Any] = {}
    for part in history:
        changed = {name: value for name, value in part["options"].items() if before.get(name) != value}
        phases = changed.pop("curriculum", [])
        text.append(f"From step {part['from_step']}: {_listed(changed) or 'another curriculum'}.")
        text += [f"- {phase['steps']} steps: {_listed(phase, 'steps')}" for phase in phases]
        before = part["options"]
    return "\n".join(text)


def _asked(history: Sequence[dict[str, Any]]) -> str:
    """What the training asked of the inside of the network, which a reader of it must know."""
    options = history[-1]["options"]
    if not options.get("guided"):
        told = "Only the loss on the next token was trained: nothing was asked of its inside."
        return told + _helped(options)
    middle = options["layers"] // 2
    half = options["guided"] / 2
    return (
        f"Not all of its inside came about by itself. In the first {options['guided']:.0%} of the steps, "
        f"fading from {half:.0%} on, guides were part of the loss: head 0 of layer {max(0, middle - 2)} was "
        f"rewarded for attention to the token before, head 0 of layer {middle} for what followed the same "
        "token earlier, the state after that layer for the character count, read by a linear classifier that "
        "was then thrown away. Where the circuits sit was thus chosen; how the rest of the network uses them "
        "was not, nor what became of them after the guides ended. The training tool has no guides any more."
    )


def _helped(options: dict[str, Any]) -> str:
    """What was arranged so that it learns, where something was: no part of the loss, but no chance either."""
    if all(phase.get("embedding_rate") != 0 for phase in options.get("curriculum", [])):
        return ""
    return (
        " What it began with and what it read were chosen so that copying is found: each token began as a "
        "vector that all share and a small random one of its own, these stood still while there were repeats "
        "alone (`embedding_rate` 0), and the first rows make the parts of an induction head pay one after "
        "the other (`tests.specimen_training.curriculum` says why)."
    )


def _seen(curve: Sequence[dict[str, Any]]) -> str:
    names = [n for n in ("loss", "recall", "precision", "facts", "copying", "couplets") if n in curve[-1]]
    head = ["step", *(f"{name} (sample)" if name == "facts" else name for name in names)]
    return table(head, [_numbers(point, [point[name] for name in names]) for point in curve])


def _appeared(curve: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Rows: ability, from which value, step, tokens, layer; of the first point of the curve that has it."""
    rows = []
    for name, (bound, read) in APPEARED.items():
        found = ["never", "", ""]
        for point in curve:
            value = read(point)
            values = value if isinstance(value, list) else [value]
            if max(values) >= bound:
                layer = next(i for i, v in enumerate(values) if v >= bound)
                where = str(layer) if isinstance(value, list) else ""
                found = [str(point["step"]), f"{point['tokens'] / 1e6:.1f} M", where]
                break
        rows.append([name, str(bound), *found])
    return rows


def _numbers(point: dict[str, Any], values: Sequence[float]) -> list[str]:
    return [str(point["step"]), *(f"{value:.3f}" for value in values)]


def _listed(options: dict[str, Any], *without: str) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items() if name not in without)

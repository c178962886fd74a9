"""What a training leaves behind to go on from, bit for bit.

Border: a folder and plain values and tensors; what they mean is the trainer's.

    checkpoint.pt   weights, optimiser, counters, running thresholds, cursor, settings, identity of the data
    log.jsonl       one JSON value a line: what was measured, by step

A checkpoint replaces the one before in one rename, so that a kill at any moment leaves one that is whole. No
state of random generators is in it: order is a function of (seed, cursor), first weights of the seed, and
nothing else is random.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....store.errors import ConfigError
from ...torch_files import load_pickled

__all__ = ["Log", "load", "require_same", "save"]

CHECKPOINT, LOG = "checkpoint.pt", "log.jsonl"


def save(folder: Path, state: Mapping[str, Any]) -> None:
    """Put a checkpoint in place of the one before."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{CHECKPOINT}.part"
    torch.save(dict(state), temporary)
    temporary.replace(folder / CHECKPOINT)


def load(folder: Path) -> dict[str, Any] | None:
    """The checkpoint in a folder; None where there is none. ConfigError for a file that is none."""
    path = folder / CHECKPOINT
    if not path.is_file():
        return None
    checkpoint: dict[str, Any] = load_pickled(
        path, ConfigError, "remove it, or name another folder", mmap=False
    )
    return checkpoint


def require_same(folder: Path, held: Mapping[str, Any], settings: Mapping[str, Any], data: str) -> None:
    """Raise ConfigError, naming the first difference, unless a checkpoint is of these settings and data."""
    for name, value in settings.items():
        before = held["settings"].get(name)
        if before != value:
            raise ConfigError(
                f"{folder} holds a training with {name}={before!r}, asked is {name}={value!r}; name another "
                "folder"
            )
    if held["data"] != data:
        raise ConfigError(
            f"{folder} holds a training on other activations; name another folder, or the same store"
        )


class Log:
    """The log of a training; lines of steps that a resumed training repeats are dropped."""

    def __init__(self, folder: Path, step: int) -> None:
        """step: steps already made."""
        self.path = folder / LOG
        folder.mkdir(parents=True, exist_ok=True)
        kept = [line for line in _lines(self.path) if line["step"] <= step]
        temporary = folder / f".{LOG}.part"
        temporary.write_text("".join(_text(line) for line in kept), "utf-8")
        temporary.replace(self.path)

    def write(self, **values: Any) -> None:
        """Add a line of the log, for this step."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_text(values))


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a log; one cut short by a kill is none."""
    found = []
    for line in path.read_text("utf-8").splitlines() if path.is_file() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return found


def _text(values: Mapping[str, Any]) -> str:
    return json.dumps(values) + "\n"

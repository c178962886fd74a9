"""Checkpoint and log of a training, which resumes bit for bit.

Border: a folder, plain values and tensors; the trainer defines their meaning.

    checkpoint.pt   weights, optimiser, counters, running thresholds, cursor, settings, identity of the data
    log.jsonl       one JSON object a line: measurements by step

A new checkpoint replaces the old one by a rename, so that a kill at any moment leaves a complete one. It
holds no state of random generators: the order of batches is a function of (seed, cursor), initial weights are
a function of the seed, and nothing else is random.
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
    """Write a checkpoint into a folder, replacing the previous one atomically.

    Arguments:
        folder: Folder of the training, created if missing.
        state: Everything from which the training resumes, as plain values and tensors by name.
    """
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{CHECKPOINT}.part"
    torch.save(dict(state), temporary)
    # A rename within one folder is atomic.
    temporary.replace(folder / CHECKPOINT)


def load(folder: Path) -> dict[str, Any] | None:
    """Read the checkpoint of a folder; None without checkpoint.

    Raises:
        ConfigError: The file is damaged.
    """
    path = folder / CHECKPOINT
    if not path.is_file():
        return None
    checkpoint: dict[str, Any] = load_pickled(
        path, ConfigError, "remove it, or name another folder", mmap=False
    )
    return checkpoint


def require_same(folder: Path, checkpoint: Mapping[str, Any], settings: Mapping[str, Any], data: str) -> None:
    """Check that a checkpoint belongs to the requested settings and data, so that training may resume.

    Arguments:
        folder: Folder of the training, for messages.
        checkpoint: The checkpoint, as `load` returns it.
        settings: Requested settings as plain values.
        data: Digest of the requested activations.

    Raises:
        ConfigError: They differ; the message names the first difference.
    """
    for name, value in settings.items():
        stored_value = checkpoint["settings"].get(name)
        if stored_value != value:
            raise ConfigError(
                f"the folder {folder} holds a checkpoint of a training with {name}={stored_value!r}, but "
                f"{name}={value!r} was requested; choose another folder, or the same settings to resume it"
            )
    if checkpoint["data"] != data:
        raise ConfigError(
            f"the folder {folder} holds a checkpoint of a training on other activations; choose another "
            "folder, or train on the same store to resume it"
        )


class Log:
    """Log file of a training: one JSON object a line, with measurements of a step.

    Opening it drops the lines of steps after the checkpoint, because a resumed training repeats them.

    Arguments:
        folder: Folder of the training.
        step: Number of steps in the checkpoint.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.path = folder / LOG
        folder.mkdir(parents=True, exist_ok=True)
        lines = [line for line in _lines(self.path) if line["step"] <= step]
        temporary = folder / f".{LOG}.part"
        temporary.write_text("".join(_json_line(line) for line in lines), "utf-8")
        temporary.replace(self.path)

    def write(self, **values: Any) -> None:
        """Append a line of names and values, which include `step`."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_json_line(values))


def _lines(path: Path) -> list[dict[str, Any]]:
    """Parsed lines of a log file, up to the first that is incomplete because the process was killed."""
    lines = []
    for line in path.read_text("utf-8").splitlines() if path.is_file() else []:
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines


def _json_line(values: Mapping[str, Any]) -> str:
    """A line of the log file: the values as a JSON object, and a newline."""
    return json.dumps(values) + "\n"

"""A sparse autoencoder (SAE) trained on a middle layer of a pretrained model, beside an untrained one.

Both are what `mizarr train` makes of the same stored activations, with the same settings but for the number
of steps: the untrained one takes a single step from the same random weights. Their figures are measured on
held-out prompts. The texts are those of tests that read `../shared`; without them nothing is trained.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.real.asking import Asked, Record
from tests.real.processes import ROOT, measured, sources

TEXTS = ROOT.parent / "shared" / "data" / "dickens"
"""Folder of the texts: 31 chapters of A Tale of Two Cities, about 135,000 tokens."""
WIDTH_FACTOR, K, CONTEXT, BATCH = 16, 32, 256, 2048
"""Features per dimension of the stream; active features per token; tokens of a prompt, and of a step."""
STEPS, UNTRAINED = 220, 1
"""Steps of the SAE (three passes over the tokens), and of the untrained control."""


@dataclass(frozen=True)
class Training:
    """An SAE of one layer of a model, trained by a process of `mizarr train`."""

    asked: Asked
    """The pretrained model, and the folder of its store, records and logs."""
    layer: int
    """Layer whose residual stream the features read and write."""
    width: int
    """Width of the residual stream."""
    steps: int = STEPS
    """Number of steps."""

    @property
    def name(self) -> str:
        """Name of record, log and figures."""
        return f"sae_layer{self.layer}_{self.steps}"

    @property
    def folder(self) -> Path:
        """Folder with checkpoint, figures and the dictionary, in the folder "dictionary"."""
        return self.asked.path("dictionaries", self.name, "")

    @property
    def dictionary(self) -> Path:
        """Folder of the trained dictionary."""
        return self.folder / "dictionary"

    @property
    def record(self) -> Record | None:
        """Record of the training; None before the first."""
        return Record.read(self.asked.path("records", self.name, ".json"))

    @property
    def figures(self) -> dict[str, Any] | None:
        """Explained variance, L0 and loss on held-out prompts; None before the training."""
        path = self.folder / "evaluation.json"
        return json.loads(path.read_text("utf-8"))["held_out"] if self.record is not None else None

    def train(self) -> Record | None:
        """Train, unless that is done; returns the record, or None without texts. An interrupted training goes
        on from its checkpoint."""
        if self.record is not None or not TEXTS.is_dir():
            return self.record
        settings = {
            "layers": f"[{self.layer}]",
            "features": WIDTH_FACTOR * self.width,
            "k": K,
            "batch": BATCH,
            "steps": self.steps,
        }
        words = ["train", self.asked.model, str(TEXTS), "--whole-files", "--context", str(CONTEXT)]
        words += ["--store", str(self.asked.store), "--out", str(self.folder), "--json", "--quiet"]
        words += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        output, log = (self.asked.path("logs", self.name, end) for end in (".json", ".txt"))
        process = measured(words, output, log, 10 * self.asked.limit)
        record = Record(self.name, self.asked.name, sources(), self.asked.limit, (process,), {})
        if process.outcome == "answered":
            record.write(self.asked.path("records", self.name, ".json"))
        return record

"""What is known of a checkpoint behind the transformers bridge: remembered, or found by running it once.

Looking into a model takes some dozens of short passes (networks/bridge/probe.py). What was found, or why the
model is refused, is remembered by all that decides it: the digest of the weights, config.json, the version of
transformers and of the method. So plans, keys and cached results need neither torch nor the weights.

Border: one checkpoint. Torch and transformers are imported when it is looked into, and not for what is
remembered.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....store.digest import digest
from ....store.errors import ConfigError, MissingExtra
from ....store.index import layout_verdicts
from ..architectures.bridge.config import BridgeConfig
from ..networks.bridge.reference import witness

__all__ = ["BridgeCase", "BridgeFinding"]

METHOD = 1
"""Declared version of what is asked of a model: moves when it asks for more."""


@dataclass(frozen=True)
class BridgeFinding:
    """What was found of a checkpoint. config: None where it is refused. refused: why, in a line."""

    config: BridgeConfig | None
    refused: str = ""

    def require(self) -> BridgeConfig:
        """The architecture. Raises ConfigError for a model that is refused."""
        if self.config is None:
            raise ConfigError(f"the transformers bridge cannot run it: {self.refused}")
        return self.config


@dataclass(frozen=True)
class BridgeCase:
    """A checkpoint that transformers is to run. raw: config.json. weights: digest of the weight files."""

    directory: Path
    weight_files: tuple[Path, ...]
    raw: Mapping[str, Any]
    weights: str

    @property
    def digest(self) -> str:
        """Of everything that decides what is found, but for the version of transformers."""
        return digest("bridge", METHOD, self.weights, json.dumps(dict(self.raw)))

    def remembered(self) -> BridgeFinding | None:
        """What was found before with the transformers installed now; where none is, by the newest that could
        run it, whose results these then are. None where it was never looked into."""
        told, installed = layout_verdicts().find(self.digest), witness()
        if installed is not None:
            return _read(told.get(installed))
        found = [each for text in told.values() if (each := _read(text)) is not None and each.config]
        return max(found, key=_age, default=None)

    def finding(self) -> BridgeFinding:
        """What is remembered, else what is found now, which is remembered either way. Raises ConfigError or
        WeightsError for a checkpoint that cannot be loaded, as the reason may be gone tomorrow; MissingExtra
        without transformers."""
        found = self.remembered()
        if found is not None:
            return found
        installed = witness()
        if installed is None:
            raise MissingExtra(
                "backend='transformers': expected transformers, found none installed; "
                "pip install 'mizarr[check]'"
            )
        found = self._look()
        config = None if found.config is None else found.config.to_json()
        told = json.dumps({"config": config, "refused": found.refused})
        layout_verdicts().add(self.digest, installed, told)
        return found

    def _look(self) -> BridgeFinding:
        from ..networks.bridge.probe import NotBridged, probe

        try:
            return BridgeFinding(probe(self.directory, self.raw, self.weight_files))
        except NotBridged as reason:
            return BridgeFinding(None, str(reason))


def _read(text: str | None) -> BridgeFinding | None:
    """What is remembered; None for what is nothing of this kind."""
    try:
        told = json.loads(text or "")
        config = told["config"]
        return BridgeFinding(None if config is None else BridgeConfig.from_json(config), str(told["refused"]))
    except (ValueError, KeyError, TypeError):
        return None


def _age(finding: BridgeFinding) -> list[int]:
    """The version of transformers it is of, by its numbers."""
    return [int(number) for number in re.findall(r"\d+", finding.require().transformers)]

"""Architecture of a checkpoint behind the transformers bridge, found by probing it once and then remembered.

Probing takes some dozens of short forward passes (networks/bridge/probe.py). The resulting architecture, or
the reason of a refusal, is stored under a digest of the weights, config.json and the version of the method,
and under the version of transformers. So plans, keys and cached results need neither torch nor the weights.
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
"""Declared version of the probe; moves when it tests more."""


@dataclass(frozen=True)
class BridgeFinding:
    """What a trial run of a checkpoint in transformers found: its architecture, or why it cannot run."""

    config: BridgeConfig | None
    """Architecture that the probe found; None for a refused checkpoint."""
    refused: str = ""
    """One-line reason of a refusal; empty for a supported checkpoint."""

    def require(self) -> BridgeConfig:
        """Return the architecture.

        Raises:
            ConfigError: if the checkpoint cannot run through transformers; says why.
        """
        if self.config is None:
            raise ConfigError(f"backend='transformers' cannot run this checkpoint: {self.refused}")
        return self.config


@dataclass(frozen=True)
class BridgeCase:
    """A checkpoint that transformers is to run, identified by its files."""

    directory: Path
    """Folder of the checkpoint."""
    weight_files: tuple[Path, ...]
    """Weight files of the checkpoint."""
    raw: Mapping[str, Any]
    """Contents of config.json."""
    weights: str
    """Digest of the weight files."""

    @property
    def digest(self) -> str:
        """Digest of everything the finding depends on, except the version of transformers."""
        # As text: config.json may hold Infinity, which has no digest.
        return digest("bridge", METHOD, self.weights, json.dumps(dict(self.raw)))

    def remembered(self) -> BridgeFinding | None:
        """Stored result of a trial run with the installed transformers version; None if there is none.

        If transformers is not installed, the result of the newest version that could run the checkpoint.
        """
        texts, installed = layout_verdicts().find(self.digest), witness()
        if installed is not None:
            return _finding_from_json(texts.get(installed))
        findings = [
            # A refusal of some version says nothing of the next one; an architecture still names what was
            # computed.
            finding
            for text in texts.values()
            if (finding := _finding_from_json(text)) is not None and finding.config
        ]
        return max(findings, key=_transformers_version, default=None)

    def finding(self) -> BridgeFinding:
        """Return the stored result of an earlier trial run, or run the checkpoint and store the result.

        Raises:
            ConfigError, WeightsError: if the checkpoint cannot be loaded; this is not remembered.
            MissingExtra: if transformers is not installed.
        """
        finding = self.remembered()
        if finding is not None:
            return finding
        installed = witness()
        if installed is None:
            raise MissingExtra(
                "backend='transformers': expected transformers, found none installed; "
                "pip install 'mizarr[check]'"
            )
        finding = self._probe()
        config = None if finding.config is None else finding.config.to_json()
        text = json.dumps({"config": config, "refused": finding.refused})
        # Refusals are remembered, too: probing takes some dozens of passes.
        layout_verdicts().add(self.digest, installed, text)
        return finding

    def _probe(self) -> BridgeFinding:
        from ..networks.bridge.probe import NotBridged, probe

        try:
            return BridgeFinding(probe(self.directory, self.raw, self.weight_files))
        except NotBridged as reason:
            return BridgeFinding(None, str(reason))


def _finding_from_json(text: str | None) -> BridgeFinding | None:
    """Parse a finding that was stored earlier; None if the text is no such finding."""
    try:
        record = json.loads(text or "")
        config = record["config"]
        refused = str(record["refused"])
        return BridgeFinding(None if config is None else BridgeConfig.from_json(config), refused)
    # The file is a cache of the user's: entries of other versions of mizarr count as missing.
    except (ValueError, KeyError, TypeError):
        return None


def _transformers_version(finding: BridgeFinding) -> list[int]:
    """Version of transformers that ran the checkpoint, as numbers, e.g. [4, 57, 1]."""
    # As numbers: "4.9" would sort after "4.57" as text.
    return [int(number) for number in re.findall(r"\d+", finding.require().transformers)]

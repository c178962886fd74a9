"""Which backend runs a checkpoint, and why: mizarr's own networks, or transformers behind the bridge.

mizarr's networks run a known family, and a layout that a check found equal to a known one. Other checkpoints
run through the bridge, which offers fewer hook points: by default if the family is unknown; for a known
family that is refused, which has a reason, only on request. Results of the bridge have keys of their own.

Torch is imported only if a model has to be examined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from ....store.errors import MizarrError

if TYPE_CHECKING:
    from ..architectures.bridge.config import BridgeConfig
    from .files import ModelFiles

__all__ = ["BackendChoice", "backend_of", "bridge_issues"]


@dataclass(frozen=True)
class BackendChoice:
    """Which implementation would run a checkpoint: mizarr's own networks, or transformers."""

    name: Literal["native", "transformers"] | None
    """Backend name; None if no backend can run the checkpoint."""
    reason: str
    """Why this backend would run it, or why none can, in one line."""
    missing: tuple[str, ...] = ()
    """Features that this backend lacks for the checkpoint, one line each."""

    def to_json(self) -> dict[str, Any]:
        """The fields by name, as plain JSON values."""
        return asdict(self)


def bridge_issues(files: ModelFiles, *, remembered_only: bool) -> tuple[BridgeConfig | None, list[str]]:
    """Architecture of a checkpoint as transformers runs it, or reasons why transformers cannot run it.

    Arguments:
        files: files of the checkpoint.
        remembered_only: use only an earlier examination, and load no model.

    Returns:
        (config or None, issues), with one line per issue.
    """
    try:
        case = files.bridge_case()
        finding = case.remembered() if remembered_only else case.finding()
    except MizarrError as error:
        return None, [str(error)]
    if finding is None:
        return None, ["not tried in transformers yet; load it once with backend='transformers'"]
    return finding.config, [] if finding.config is not None else [finding.refused]


def backend_of(
    files: ModelFiles, layout: str, issues: Sequence[str], *, remembered_only: bool
) -> BackendChoice:
    """Choose whether mizarr's own networks or transformers run a checkpoint, and say why.

    Arguments:
        files: files of the checkpoint.
        layout: the reason to report if mizarr's own networks run it.
        issues: reasons why mizarr's own networks cannot run it, or why transformers cannot if the user asked
            for that; empty if it can run.
        remembered_only: use only an earlier examination in transformers, and load no model.
    """
    if not issues and not files.is_bridged:
        return BackendChoice("native", layout)
    # Also where mizarr's networks refuse a known family: the report then says whether the bridge would run
    # it.
    config, obstacles = bridge_issues(files, remembered_only=remembered_only)
    if config is not None:
        if files.is_bridged:
            when = "as requested"
        elif files.may_be_bridged_unasked:
            when = "because mizarr does not know its family"
        else:
            when = "only if requested with backend='transformers'"
        reason = f"{when}; tried with {config.class_name} of transformers {config.transformers}"
        return BackendChoice("transformers", reason, config.remarks)
    return BackendChoice(None, f"transformers cannot run it either: {obstacles[0]}")

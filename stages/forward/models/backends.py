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
    """The backend that would run a checkpoint."""

    name: Literal["native", "transformers"] | None
    """Backend name; None if no backend can run the checkpoint."""
    reason: str
    """Why, in one line."""
    missing: tuple[str, ...] = ()
    """Features that this backend lacks for the checkpoint, one line each."""

    def to_json(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


def bridge_issues(files: ModelFiles, *, remembered_only: bool) -> tuple[BridgeConfig | None, list[str]]:
    """Config of a checkpoint behind the bridge, or reasons why it cannot run there.

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
        return None, ["not looked into by the transformers bridge yet"]
    return finding.config, [] if finding.config is not None else [finding.refused]


def backend_of(
    files: ModelFiles, layout: str, issues: Sequence[str], *, remembered_only: bool
) -> BackendChoice:
    """Choose the backend of a checkpoint.

    Arguments:
        files: files of the checkpoint.
        layout: the reason to report if mizarr's own networks run it.
        issues: why they cannot; for a checkpoint requested behind the bridge, why that cannot.
        remembered_only: see `bridge_issues`.
    """
    if not issues and not files.is_bridged:
        return BackendChoice("native", layout)
    # Also where mizarr's networks refuse a known family: the report then says whether the bridge would run
    # it.
    config, obstacles = bridge_issues(files, remembered_only=remembered_only)
    if config is not None:
        if files.is_bridged:
            when = "as asked for"
        elif files.may_be_bridged_unasked:
            when = "as its family is not known"
        else:
            when = "if asked for: backend='transformers'"
        reason = f"{when}; found and checked in {config.class_name} of transformers {config.transformers}"
        return BackendChoice("transformers", reason, config.remarks)
    return BackendChoice(None, f"the bridge: {obstacles[0]}")

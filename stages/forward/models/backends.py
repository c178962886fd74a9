"""Which backend a checkpoint takes, and why: mizarr's own networks, or transformers behind the bridge.

Ours are taken where a row names the family or a check found that its layout is one of ours. The bridge, where
less of a model has a name, takes others: unasked where no row names the family, else only if asked for, as a
known family that is refused has a reason. What it computes is kept under keys of its own either way.

Border: a checkpoint and what was found of it; never imports torch but where a model has to be looked into.
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
    """Who would compute a checkpoint. name: None where nobody can. reason: in a line. missing: what this
    backend cannot do of what others can, a line each."""

    name: Literal["native", "transformers"] | None
    reason: str
    missing: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


def bridge_issues(files: ModelFiles, *, remembered_only: bool) -> tuple[BridgeConfig | None, list[str]]:
    """What the bridge found of a checkpoint; and what stands in the way, where it found nothing.

    remembered_only: look into no model.
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
    """The backend of a checkpoint.

    layout: why ours can be relied on. issues: what stands in their way; of a model that is asked for behind
    the bridge what stands in its way.
    """
    if not issues and not files.is_bridged:
        return BackendChoice("native", layout)
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

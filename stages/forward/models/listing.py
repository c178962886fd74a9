"""Which models are here: those that ship with mizarr, and what lies in the hub's cache, without loading any.

Border: names, parsed configs and file sizes; reads no tensor and never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....store.errors import MizarrError
from .files import CONFIG, SHIPPED, ModelFiles, cached_models, hub_cache, resolve

__all__ = ["ListedModel", "listed_models"]


@dataclass(frozen=True)
class ListedModel:
    """A model by name and, of a hub id, branch or tag.

    commit: of the snapshot it stands for. layers, hidden_size: None where config.json is not understood.
    weight_bytes: of the weight files, as they are stored. obstacle: why it cannot run, in one line; empty
    where nothing stands in the way, but that an unknown family is checked when it is first loaded.
    """

    name: str
    revision: str | None
    commit: str | None
    model_type: str
    known_family: bool
    layers: int | None
    hidden_size: int | None
    weight_bytes: int
    directory: str
    obstacle: str = ""

    @property
    def can_run(self) -> bool:
        """Whether nothing is known to stand in the way."""
        return not self.obstacle


def listed_models() -> list[ListedModel]:
    """Models that ship, then cached ones by name and revision. A cached repository without a config.json, as
    dictionaries are, is no model and not listed."""
    return [_listed(resolve(name), None) for name in SHIPPED] + [
        _listed(files, revision) for name in cached_models() for revision, files in _revisions(name)
    ]


def _revisions(name: str) -> Iterator[tuple[str, ModelFiles]]:
    """Branches and tags of a cached repository that have a config.json; commits nothing points to by their
    own name."""
    repository = hub_cache() / f"models--{name.replace('/', '--')}"
    references = {
        str(path.relative_to(repository / "refs")): path.read_text().strip()
        for path in sorted((repository / "refs").rglob("*"))
        if path.is_file()
    }
    held = sorted(path.name for path in (repository / "snapshots").glob("*") if (path / CONFIG).is_file())
    unnamed = {commit: commit for commit in held if commit not in references.values()}
    for revision, commit in {**references, **unnamed}.items():
        if commit in held:
            yield revision, resolve(name, revision)


def _listed(files: ModelFiles, revision: str | None) -> ListedModel:
    model_type, layers, hidden, size, obstacle = "", None, None, 0, ""
    try:
        model_type = str(files.config.get("model_type", ""))
        size = sum(path.stat().st_size for path in files.weight_files)
        if files.has_known_family:
            architecture = files.architecture()
            layers, hidden = architecture.num_layers, architecture.hidden_size
    except (MizarrError, OSError) as error:
        obstacle = str(error).splitlines()[0]
    known = not obstacle and files.has_known_family
    place = str(files.directory)
    return ListedModel(
        files.name, revision, files.revision, model_type, known, layers, hidden, size, place, obstacle
    )

"""Lists the models on this machine: those that ship with mizarr, and those in the Hugging Face cache.

Reads configs, headers of weight files and file sizes only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....store.errors import MizarrError
from .files import CONFIG, SHIPPED, ModelFiles, cached_models, repository_folder, resolve

__all__ = ["ListedModel", "listed_models"]


@dataclass(frozen=True)
class ListedModel:
    """A model on this machine: shipped with mizarr, or in the Hugging Face cache."""

    name: str
    """Hub id, or name of a shipped model."""
    revision: str | None
    """Branch, tag or commit of a hub id; None for a shipped model."""
    commit: str | None
    """Commit of the snapshot; None for a shipped model."""
    model_type: str
    """`model_type` of config.json; empty if the key is missing."""
    known_family: bool
    """Whether mizarr supports its family by name, and can read its config.json."""
    layers: int | None
    """Number of layers; None if config.json is not understood."""
    hidden_size: int | None
    """Width of the residual stream; None if config.json is not understood."""
    weight_bytes: int
    """Bytes of the weight files."""
    directory: str
    """Folder of the files."""
    obstacle: str = ""
    """Why the model cannot run, in one line; "" for a runnable model, or for an unknown family yet to be
    checked."""

    @property
    def can_run(self) -> bool:
        """Whether no obstacle is known."""
        return not self.obstacle


def listed_models() -> list[ListedModel]:
    """List the models that ship with mizarr, then the models in the Hugging Face cache by name and revision.

    A cached repository without a config.json, such as one of dictionaries, is not listed.
    """
    return [_listed(resolve(name), None) for name in SHIPPED] + [
        _listed(files, revision) for name in cached_models() for revision, files in _revisions(name)
    ]


def _revisions(name: str) -> Iterator[tuple[str, ModelFiles]]:
    """Revisions of a cached repository that have a config.json, as (name, files) pairs.

    A revision is named by its branch or tag, or by its commit where no branch or tag points to it.
    """
    repository = repository_folder(name)
    references = {
        str(path.relative_to(repository / "refs")): path.read_text().strip()
        for path in sorted((repository / "refs").rglob("*"))
        if path.is_file()
    }
    snapshots = (repository / "snapshots").glob("*")
    # Repositories of dictionaries are in the same cache, without a config.json.
    cached_commits = sorted(path.name for path in snapshots if (path / CONFIG).is_file())
    unnamed = {commit: commit for commit in cached_commits if commit not in references.values()}
    for revision, commit in {**references, **unnamed}.items():
        if commit in cached_commits:
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
        # A list has one line per model; `mizarr models inspect` shows the rest.
        obstacle = str(error).splitlines()[0]
    return ListedModel(
        name=files.name,
        revision=revision,
        commit=files.revision,
        model_type=model_type,
        known_family=not obstacle and files.has_known_family,
        layers=layers,
        hidden_size=hidden,
        weight_bytes=size,
        directory=str(files.directory),
        obstacle=obstacle,
    )

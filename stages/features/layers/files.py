"""Where a dictionary's files are, what is in them, and what the dictionary is.

A reference is "specimen/clt", "specimen/plt" or "specimen/sae" (they ship with mizarr, for the model that
does), a local directory, or "org/repo[/subfolder][@revision]" whose files lie in the hub's local cache;
nothing is fetched here. Behind it a caller may say which hook points the features read and write, where the
files do not: "org/repo?read=blocks.3.hook_resid_post&write=blocks.3.hook_mlp_out". The identity is made of
the files' content, never of their name.

Border: paths, parsed configurations, mapped tensors; what the tensors mean is a format's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode

from ....pipeline.pinned import PinnedFiles
from ....store.digest import digest
from ....store.errors import DictionaryError, ModelNotFound, nearest
from ....store.exchange.outside import (
    MOST_BYTES,
    bounded_depth,
    json_object,
    path_below,
    read_outside,
    require_content,
)
from ....store.exchange.tensors import FLOATS, read_header
from ...forward.models.files import SPECIMEN, hub_cache, snapshot_folder, weight_digest

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DictionaryFiles", "DictionaryReference", "is_shipped", "parse_reference", "resolve"]

_READ = (".safetensors", ".npz", ".pt", ".json", ".yaml")
"""Endings of files that some format reads."""
CONFIG_YAML, CFG_JSON = "config.yaml", "cfg.json"
SPECIMEN_FOLDER = Path(__file__).parents[1] / SPECIMEN


@dataclass(frozen=True)
class DictionaryFiles:
    """The files of one dictionary.

    name: as it was asked for; part of no key. directory: where they lie. revision: commit of a hub snapshot.
    links: file names that stand for files elsewhere, which a configuration refers to.
    """

    name: str
    directory: Path
    revision: str | None = None
    links: Mapping[str, Path] = field(default_factory=dict)

    @cached_property
    def pinned(self) -> PinnedFiles:
        """Those that were read so far."""
        return PinnedFiles(f"the dictionary {self.name}", "it was replaced or edited meanwhile; open it anew")

    def path(self, name: str) -> Path:
        """Where a file lies that is to be read, `links` first; it need not be there."""
        return self.pinned.note(self.links.get(name, self.directory / name))

    @cached_property
    def listing(self) -> tuple[str, ...]:
        """Relative paths of all files, sorted."""
        paths = [
            path
            for path in self.directory.rglob("*")
            if path.is_file() or (path.is_symlink() and not path.exists())
        ]
        for path in paths:
            if path.suffix in _READ and not path.is_file():  # of the others a link may lead nowhere
                require_content(path, DictionaryError)
        return tuple(sorted(path.relative_to(self.directory).as_posix() for path in paths))

    @cached_property
    def yaml(self) -> dict[str, Any]:
        """config.yaml, parsed; empty without one. DictionaryError if it is no mapping."""
        if CONFIG_YAML not in self.listing:
            return {}
        import yaml

        data = read_outside(self.path(CONFIG_YAML), DictionaryError, most=MOST_BYTES)
        try:
            found = bounded_depth(yaml.safe_load(data.decode()), len(data))
        except RecursionError:
            raise DictionaryError(
                f"expected YAML in {self.directory / CONFIG_YAML}, found values nested too deeply"
            ) from None
        except (yaml.YAMLError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise DictionaryError(
                f"expected YAML in {self.directory / CONFIG_YAML}, found {reason}"
            ) from error
        return self._mapping(found, CONFIG_YAML)

    def json(self, name: str) -> dict[str, Any]:
        """A JSON file, parsed. DictionaryError if it is no object."""
        return json_object(self.path(name), DictionaryError)

    def _mapping(self, found: Any, name: str) -> dict[str, Any]:
        if not isinstance(found, dict):
            raise DictionaryError(
                f"expected names and values in {self.directory / name}, found {type(found).__name__}"
            )
        return found

    def shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        """Tensors of a safetensors file and their shapes, from its header; WeightsError if it is not
        whole.
        """
        header, _ = read_header(self.path(name))
        for tensor, entry in header.items():
            if entry["dtype"] not in FLOATS and len(entry["shape"]) > 1:
                raise DictionaryError(
                    f"expected {tensor!r} in {self.path(name)} as one of {', '.join(FLOATS)}, found "
                    f"{entry['dtype']}"
                )
        return {tensor: tuple(entry["shape"]) for tensor, entry in header.items()}

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of a safetensors file, mapped: bytes are read when they are used."""
        from safetensors import safe_open

        self.shapes(name)
        with safe_open(self.path(name), framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping

    def digest(self, names: Sequence[str]) -> str:
        """Identity of a dictionary made of these files: their paths and content."""
        return digest(
            "dictionary", [[name, weight_digest(self.path(name), self.pinned)] for name in sorted(names)]
        )


@dataclass(frozen=True)
class DictionaryReference:
    """A dictionary's name, and where its features read and write if the caller says so.

    name: "specimen/clt", a directory, or "org/repo[/subfolder][@revision]". read, write: names of hook
    points, None for what the files say.
    """

    name: str | Path
    read: str | None = None
    write: str | None = None

    @classmethod
    def parse(
        cls, text: str | Path, read: str | None = None, write: str | None = None
    ) -> DictionaryReference:
        """From "NAME[?read=HOOK][&write=HOOK]"; read, write: the same given beside the name.

        Raises DictionaryError for other fields, and for hook points said twice and differently.
        """
        for end, hook in (("read", read), ("write", write)):
            if hook is not None and (not isinstance(hook, str) or not hook):
                raise DictionaryError(
                    f"expected {end}= as the name of a hook point, found {hook!r}; write 'hook_resid_mid'"
                )
        name, mark, query = str(text).partition("?")
        if not mark or _is_folder(text):
            return cls(text, read, write)
        found = dict(parse_qsl(query, keep_blank_values=True))
        if found.keys() - {"read", "write"} or not all(found.values()):
            raise DictionaryError(
                f"expected read=HOOK and write=HOOK behind the ? of a dictionary's name, found {query!r}"
            )
        for end, given in (("read", read), ("write", write)):
            if given and found.setdefault(end, given) != given:
                raise DictionaryError(
                    f"expected one {end}= for {name}, found {found[end]!r} behind its name and {given!r} "
                    "beside it"
                )
        return cls(name, found.get("read"), found.get("write"))

    def __str__(self) -> str:
        said = {"read": self.read, "write": self.write}
        query = urlencode({end: hook for end, hook in said.items() if hook}, safe="/.[]*")
        return f"{self.name}?{query}" if query else str(self.name)


def _is_folder(name: str | Path) -> bool:
    try:
        return Path(name).expanduser().is_dir()
    except (OSError, RuntimeError, TypeError, ValueError):  # too long; no home of that user; no text
        return False


def _hub_snapshot(repository: str, revision: str) -> Path:
    return snapshot_folder(hub_cache() / f"models--{repository.replace('/', '--')}", revision)


def parse_reference(name: str | Path) -> tuple[str, str, str | None]:
    """(repository, subfolder or "", revision or None) of "org/repo[/subfolder][@revision]".

    Raises ModelNotFound for anything else.
    """
    text, _, revision = str(name).partition("@")
    parts = [part for part in text.split("/") if part]
    is_file = Path(name).expanduser().is_file()
    if is_file or len(parts) < 2 or text.startswith((".", "/", "~")):
        raise ModelNotFound(
            "expected a directory, or a hub reference such as org/repo[/subfolder][@revision]; found "
            f"{'a file' if is_file else 'no such directory'} {str(name)!r}"
        )
    return "/".join(parts[:2]), "/".join(parts[2:]), revision or None


def is_shipped(name: str | Path) -> bool:
    """Whether a name speaks of the dictionaries that ship with mizarr."""
    return isinstance(name, str) and name.split("/")[0] == SPECIMEN


def _shipped_folder(name: str) -> Path:
    known = {f"{SPECIMEN}/{path.name}": path for path in sorted(SPECIMEN_FOLDER.iterdir()) if path.is_dir()}
    if name in known:
        return known[name]
    near = nearest(name, known)
    hint = f"; nearest is {near!r}" if near else ""
    raise ModelNotFound(f"expected {', '.join(known)}, which ship with mizarr, found {name!r}{hint}")


def resolve(name: str | Path) -> DictionaryFiles:
    """The files of a dictionary named "specimen/clt", by directory, or by "org/repo[/subfolder][@revision]",
    in that order; nothing is fetched.

    Raises ModelNotFound saying how to get it.
    """
    if not str(name) or str(name) == ".":
        raise ModelNotFound(
            f"expected a directory, or a hub reference such as org/repo, found {str(name)!r}; name one"
        )
    if is_shipped(name):
        return DictionaryFiles(str(name), _shipped_folder(str(name)))
    try:
        folder = Path(name).expanduser()
        is_folder = folder.is_dir()
    except (OSError, RuntimeError, TypeError, ValueError) as error:  # too long; no home of that user; no text
        raise ModelNotFound(
            f"expected a directory, or a hub reference such as org/repo, found {name!r:.200}"
        ) from error
    if is_folder:
        return DictionaryFiles(str(name), folder)
    repository, subfolder, revision = parse_reference(name)
    snapshot = _hub_snapshot(repository, revision or "main")
    if not snapshot.is_dir():
        held = [
            path.name.removeprefix("models--").replace("--", "/") for path in hub_cache().glob("models--*")
        ]
        near = nearest(repository, held)
        hint = f"; nearest there is {near!r}" if near else ""
        raise ModelNotFound(
            f"{name} is no directory, and not in the local cache {hub_cache()}{hint}; fetch it: "
            f"mizarr features fetch {name}"
        )
    directory = path_below(snapshot, subfolder, ModelNotFound, "the reference") if subfolder else snapshot
    if not directory.is_dir():
        raise ModelNotFound(
            f"{repository} is cached, but has no folder {subfolder!r} at {revision or 'main'}; fetch it: "
            f"mizarr features fetch {name}"
        )
    return DictionaryFiles(str(name), directory, snapshot.name)

"""Files of a dictionary: where they are, their parsed contents, and the dictionary's identity.

A reference is "specimen/clt", "specimen/plt" or "specimen/sae" (shipped with mizarr, for the shipped model),
a local directory, or "org/repo[/subfolder][@revision]" whose files are in the hub's local cache; nothing is
downloaded. A caller may append the hook points, if the files do not state them:
"org/repo?read=blocks.3.hook_resid_post&write=blocks.3.hook_mlp_out". The identity is a digest of the files'
content, independent of their name.

Border: paths, parsed configurations, mapped tensors; the meaning of tensors is defined by formats.
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
    """The files of one dictionary."""

    name: str
    """Reference that the user gave; no key contains it."""
    directory: Path
    """Folder of the files."""
    revision: str | None = None
    """Commit of a hub snapshot; None for a local directory."""
    links: Mapping[str, Path] = field(default_factory=dict)
    """Paths of files outside of the folder that a configuration refers to, by the name used here."""

    @cached_property
    def pinned(self) -> PinnedFiles:
        """The files that were read so far, which must not change."""
        return PinnedFiles(
            f"the dictionary {self.name}", "it was replaced or edited meanwhile; open it again"
        )

    def path(self, name: str) -> Path:
        """Path of a file about to be read, `links` first; the file may not exist."""
        return self.pinned.note(self.links.get(name, self.directory / name))

    @cached_property
    def listing(self) -> tuple[str, ...]:
        """Relative paths of all files, sorted."""
        paths = [
            path
            for path in self.directory.rglob("*")
            # Hub snapshots consist of links; a dangling one means an incomplete download.
            if path.is_file() or (path.is_symlink() and not path.exists())
        ]
        for path in paths:
            # Only files that some format reads: a missing README does not matter.
            if path.suffix in _READ and not path.is_file():
                require_content(path, DictionaryError)
        return tuple(sorted(path.relative_to(self.directory).as_posix() for path in paths))

    @cached_property
    def yaml(self) -> dict[str, Any]:
        """config.yaml, parsed; empty if there is none. DictionaryError if it is not a mapping."""
        if CONFIG_YAML not in self.listing:
            return {}
        import yaml

        data = read_outside(self.path(CONFIG_YAML), DictionaryError, most=MOST_BYTES)
        try:
            parsed = bounded_depth(yaml.safe_load(data.decode()), len(data))
        except RecursionError:
            raise DictionaryError(
                f"expected YAML in {self.directory / CONFIG_YAML}, found values nested too deeply"
            ) from None
        except (yaml.YAMLError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise DictionaryError(
                f"expected YAML in {self.directory / CONFIG_YAML}, found {reason}"
            ) from error
        if not isinstance(parsed, dict):
            raise DictionaryError(
                f"expected names and values in {self.directory / CONFIG_YAML}, found {type(parsed).__name__}"
            )
        return parsed

    def json(self, name: str) -> dict[str, Any]:
        """A JSON file, parsed. DictionaryError if it is not an object."""
        return json_object(self.path(name), DictionaryError)

    def shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor of a safetensors file, from its header.

        Raises:
            WeightsError: The file is incomplete.
            DictionaryError: A matrix is not of a floating-point dtype.
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
        """The tensors of a safetensors file, memory-mapped."""
        from safetensors import safe_open

        # Checks the header before the file is mapped.
        self.shapes(name)
        with safe_open(self.path(name), framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping

    def digest(self, names: Sequence[str]) -> str:
        """Digest of these files: their names and contents."""
        return digest(
            "dictionary", [[name, weight_digest(self.path(name), self.pinned)] for name in sorted(names)]
        )


@dataclass(frozen=True)
class DictionaryReference:
    """A dictionary's name with the hook points that the caller overrides."""

    name: str | Path
    """Name such as "specimen/clt", a directory, or "org/repo[/subfolder][@revision]"."""
    read: str | None = None
    """Hook point that features read; None for that in the files."""
    write: str | None = None
    """Hook point that features write to; None for that in the files."""

    @classmethod
    def parse(
        cls, text: str | Path, read: str | None = None, write: str | None = None
    ) -> DictionaryReference:
        """Parse "NAME[?read=HOOK][&write=HOOK]".

        Arguments:
            text: The name, with or without hook points.
            read: Hook point that features read, if the name does not state it.
            write: Hook point that features write to, likewise.

        Raises:
            DictionaryError: There are other fields, or the same hook point is given twice with different
                values.
        """
        for end, hook in (("read", read), ("write", write)):
            if hook is not None and (not isinstance(hook, str) or not hook):
                raise DictionaryError(
                    f"expected {end}= as the name of a hook point, found {hook!r}; write 'hook_resid_mid'"
                )
        name, mark, query = str(text).partition("?")
        # A folder's name may contain a question mark.
        if not mark or _is_folder(text):
            return cls(text, read, write)
        hooks = dict(parse_qsl(query, keep_blank_values=True))
        if hooks.keys() - {"read", "write"} or not all(hooks.values()):
            raise DictionaryError(
                f"expected read=HOOK and write=HOOK after the ? of a dictionary's name, found {query!r}"
            )
        for end, argument in (("read", read), ("write", write)):
            if argument and hooks.setdefault(end, argument) != argument:
                raise DictionaryError(
                    f"expected one {end}= for {name}, found {hooks[end]!r} in its name and {argument!r} as "
                    "an argument"
                )
        return cls(name, hooks.get("read"), hooks.get("write"))

    def __str__(self) -> str:
        hooks = {"read": self.read, "write": self.write}
        # Characters of hook names and globs stay readable.
        query = urlencode({end: hook for end, hook in hooks.items() if hook}, safe="/.[]*")
        return f"{self.name}?{query}" if query else str(self.name)


def _is_folder(name: str | Path) -> bool:
    """Whether a directory has this name; False for names that no path can have."""
    try:
        return Path(name).expanduser().is_dir()
    except (OSError, RuntimeError, TypeError, ValueError):  # too long; no home of that user; no text
        return False


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
    """Whether a name refers to the dictionaries that ship with mizarr."""
    return isinstance(name, str) and name.split("/")[0] == SPECIMEN


def _shipped_folder(name: str) -> Path:
    """Folder of a dictionary that ships with mizarr; ModelNotFound for an unknown name."""
    folders = {f"{SPECIMEN}/{path.name}": path for path in sorted(SPECIMEN_FOLDER.iterdir()) if path.is_dir()}
    if name in folders:
        return folders[name]
    near = nearest(name, folders)
    hint = f"; nearest is {near!r}" if near else ""
    raise ModelNotFound(f"expected {', '.join(folders)}, which ship with mizarr, found {name!r}{hint}")


def resolve(name: str | Path) -> DictionaryFiles:
    """The files of a dictionary: shipped ("specimen/clt"), in a directory, or in the hub's cache, tried in
    this order.

    Nothing is downloaded.

    Raises:
        ModelNotFound: There are no such files; the message gives the command that fetches them.
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
    snapshot = snapshot_folder(hub_cache() / f"models--{repository.replace('/', '--')}", revision or "main")
    if not snapshot.is_dir():
        cached = [
            path.name.removeprefix("models--").replace("--", "/") for path in hub_cache().glob("models--*")
        ]
        near = nearest(repository, cached)
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

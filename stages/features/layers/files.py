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
"""Endings of the names of files that some dictionary format reads."""
CONFIG_YAML, CFG_JSON = "config.yaml", "cfg.json"
SPECIMEN_FOLDER = Path(__file__).parents[1] / SPECIMEN


@dataclass(frozen=True)
class DictionaryFiles:
    """Where the files of one dictionary are, with readers for them."""

    name: str
    """Name under which the user opened the dictionary; excluded from keys."""
    directory: Path
    """Folder that holds the files."""
    revision: str | None = None
    """Commit of a hub snapshot; None for a local directory."""
    links: Mapping[str, Path] = field(default_factory=dict)
    """Paths of files outside of `directory` that its config.yaml lists, by the names used for them here."""

    @cached_property
    def pinned(self) -> PinnedFiles:
        """The files that were read so far; its `check` raises SourceChanged if one of them changed since."""
        return PinnedFiles(
            f"the dictionary {self.name}", "it was replaced or edited meanwhile; open it again"
        )

    def path(self, name: str) -> Path:
        """Path of a file by its name in `links` or `directory`, noted in `pinned`; the file may not exist."""
        return self.pinned.note(self.links.get(name, self.directory / name))

    @cached_property
    def listing(self) -> tuple[str, ...]:
        """Relative paths of all files below `directory`, sorted; DictionaryError if a download is broken."""
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
        """Contents of config.yaml; empty without this file. DictionaryError for contents other than a
        mapping."""
        if CONFIG_YAML not in self.listing:
            return {}
        import yaml

        data = read_outside(self.path(CONFIG_YAML), DictionaryError, most=MOST_BYTES)
        try:
            parsed = bounded_depth(yaml.safe_load(data.decode()), len(data))
        except RecursionError:
            raise DictionaryError(
                f"expected YAML in {self.directory / CONFIG_YAML}, found values nested too deeply; correct "
                "the file"
            ) from None
        except (yaml.YAMLError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise DictionaryError(
                f"expected YAML in {self.directory / CONFIG_YAML}, found {reason}; correct the file or fetch "
                "it again"
            ) from error
        if not isinstance(parsed, dict):
            raise DictionaryError(
                f"expected a mapping (lines 'name: value') in {self.directory / CONFIG_YAML}, found "
                f"{type(parsed).__name__}; correct the file or fetch it again"
            )
        return parsed

    def json(self, name: str) -> dict[str, Any]:
        """Contents of a JSON file by its name; DictionaryError if it is not a JSON object."""
        return json_object(self.path(name), DictionaryError)

    def shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor of a safetensors file by tensor name, from the file's header.

        Raises:
            WeightsError: The file is incomplete.
            DictionaryError: A matrix is not of a floating-point dtype.
        """
        header, _ = read_header(self.path(name))
        for tensor, entry in header.items():
            if entry["dtype"] not in FLOATS and len(entry["shape"]) > 1:
                raise DictionaryError(
                    f"expected the tensor {tensor!r} in {self.path(name)} to have a dtype among "
                    f"{', '.join(FLOATS)}, found {entry['dtype']}; convert it"
                )
        return {tensor: tuple(entry["shape"]) for tensor, entry in header.items()}

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of a safetensors file by name, memory-mapped."""
        from safetensors import safe_open

        # Checks the header before the file is mapped.
        self.shapes(name)
        with safe_open(self.path(name), framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping

    def digest(self, names: Sequence[str]) -> str:
        """Digest of the names and the contents of some of the files."""
        return digest(
            "dictionary", [[name, weight_digest(self.path(name), self.pinned)] for name in sorted(names)]
        )


@dataclass(frozen=True)
class DictionaryReference:
    """A dictionary's name, with the hook points that replace those named in its files."""

    name: str | Path
    """Name such as "specimen/clt", a directory, or "org/repo[/subfolder][@revision]"."""
    read: str | None = None
    """Hook point that features read; None: the one that the files name."""
    write: str | None = None
    """Hook point that features write to; None: the one that the files name."""

    @classmethod
    def parse(
        cls, text: str | Path, read: str | None = None, write: str | None = None
    ) -> DictionaryReference:
        """Parse "NAME[?read=HOOK][&write=HOOK]".

        Arguments:
            text: The name, with or without hook points.
            read: Hook point that features read, if `text` does not contain it.
            write: Hook point that features write to, if `text` does not contain it.

        Raises:
            DictionaryError: There is another field after the "?", or `text` and an argument contradict each
                other.
        """
        for end, hook in (("read", read), ("write", write)):
            if hook is not None and (not isinstance(hook, str) or not hook):
                raise DictionaryError(
                    f"expected {end}= as the name of a hook point, found {hook!r}; write for example "
                    f"{end}='hook_resid_mid'"
                )
        name, mark, query = str(text).partition("?")
        # A folder's name may contain a question mark.
        if not mark or _is_folder(text):
            return cls(text, read, write)
        hooks = dict(parse_qsl(query, keep_blank_values=True))
        if hooks.keys() - {"read", "write"} or not all(hooks.values()):
            raise DictionaryError(
                f"expected read=HOOK or write=HOOK after the ? of the dictionary name {name}, found "
                f"{query!r}; write for example '{name}?read=hook_resid_mid'"
            )
        for end, argument in (("read", read), ("write", write)):
            if argument and hooks.setdefault(end, argument) != argument:
                raise DictionaryError(
                    f"expected one hook point as {end}= for the dictionary {name}, found {hooks[end]!r} in "
                    f"its name and {argument!r} as an argument; leave one of them out"
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
    """Split "org/repo[/subfolder][@revision]" into (repository, subfolder or "", revision or None).

    Raises:
        ModelNotFound: The name has another form.
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
    """Whether a name starts with "specimen/", as those of the dictionaries shipped with mizarr do."""
    return isinstance(name, str) and name.split("/")[0] == SPECIMEN


def _shipped_folder(name: str) -> Path:
    """Folder of a dictionary that ships with mizarr; ModelNotFound for an unknown name."""
    folders = {f"{SPECIMEN}/{path.name}": path for path in sorted(SPECIMEN_FOLDER.iterdir()) if path.is_dir()}
    if name in folders:
        return folders[name]
    near = nearest(name, folders)
    hint = f"; did you mean {near!r}?" if near else ""
    raise ModelNotFound(f"expected {', '.join(folders)}, which ship with mizarr, found {name!r}{hint}")


def resolve(name: str | Path) -> DictionaryFiles:
    """Find the files of a dictionary: shipped ("specimen/clt"), in a directory, or in the hub's local cache.

    The places are tried in this order. Nothing is downloaded.

    Raises:
        ModelNotFound: There are no such files; the message gives the command that fetches them.
    """
    if not str(name) or str(name) == ".":
        raise ModelNotFound(
            f"expected a directory, or a hub reference such as org/repo, found {str(name)!r}; name the "
            "dictionary to open"
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
        hint = f"; the most similar name there is {near!r}" if near else ""
        raise ModelNotFound(
            f"the dictionary {name} is neither a directory nor in the local cache {hub_cache()}{hint}; fetch "
            f"it: mizarr features fetch {name}"
        )
    directory = path_below(snapshot, subfolder, ModelNotFound, "the reference") if subfolder else snapshot
    if not directory.is_dir():
        raise ModelNotFound(
            f"{repository} is cached, but has no folder {subfolder!r} at {revision or 'main'}; fetch it: "
            f"mizarr features fetch {name}"
        )
    return DictionaryFiles(str(name), directory, snapshot.name)

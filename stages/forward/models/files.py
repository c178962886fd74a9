"""Resolves the name of a model to its files, and derives architecture and identity from them.

A name is a local directory, a model that ships with mizarr (`SHIPPED`), or a hub id whose files are in the
local cache; nothing is downloaded here (`download.py` does that). The identity depends on the content of the
files and never on the name, because two models may share a name and one model may have several.

Never imports torch: plans and cached runs need an identity, but no weights.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ....pipeline.pinned import PinnedFiles
from ....store.arrays import require_flag
from ....store.digest import digest
from ....store.errors import (
    ConfigError,
    MissingExtra,
    MizarrError,
    ModelNotFound,
    SourceChanged,
    TokenizerError,
    WeightsError,
    nearest,
)
from ....store.exchange.outside import json_object, named_digest, path_below, require_content
from ....store.files import is_below
from ....store.keys import ModelIdentity
from ..checkpoints.adapter import Adapter
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.gguf import source as gguf
from ..checkpoints.gguf.header import SUFFIX, Header, header_of, parts_of
from ..checkpoints.quantised.reading import KEYS, scheme_of
from ..text.gguf.vocabulary import words_of
from ..text.library import LibraryTokenizer, VocabularyTokenizer
from ..text.world import WORLD, WorldTokenizer

if TYPE_CHECKING:
    from ..architectures.architecture import Architecture
    from ..text.tokens import Tokenizer
    from .autoconfig import CompatibilityReport
    from .bridge_case import BridgeCase
    from .layout_check import LayoutCase

Loaded = TypeVar("Loaded")
SPECIMEN = "specimen"
SHIPPED = {
    SPECIMEN: "specimen",
    "specimen-guided": "specimen_guided",
    "specimen-rwkv": "specimen_rwkv",
    "specimen-experts": "specimen_experts",
}
"""Models that ship with mizarr, and the folders they lie in."""
TRUSTED = " (layout trusted)"
"""Suffix of the name of a model of unknown family that runs without a layout check."""
BRIDGED = " (transformers)"
"""Suffix of the name of a model that runs through the transformers bridge."""
_ADAPTED = re.compile(r"(.*) \(adapter (.+)\)", re.DOTALL)
"""Pattern of names with a LoRA adapter: base model name, then adapter folder."""
BACKENDS = ("native", "transformers")
"""Implementations that can run a model: mizarr's own networks, or transformers behind a bridge."""
CONFIG, WEIGHTS, INDEX, TOKENIZER = (
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
)
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
"""Weight files of torch.save; read if there are no safetensors."""
HELP = "trained_with_help.txt"
"""File with a sentence about auxiliary training losses on internals of the model; part of no identity."""
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class ModelFiles:
    """The files of one model."""

    name: str
    """The requested name, followed by the adapter, `TRUSTED` or `BRIDGED`; part of no key."""
    directory: Path
    """Folder of the files."""
    revision: str | None = None
    """Commit of a hub snapshot; None for a directory or a shipped model."""
    trust_layout: bool = False
    """Whether an unknown family runs without a layout check."""
    is_bridged: bool = False
    """Whether transformers runs the model."""
    adapter: Path | None = None
    """Folder of a LoRA adapter to merge into the weights; None without adapter."""
    gguf: Path | None = None
    """GGUF file (the first of several) with weights and configuration; None for a folder with config.json."""

    @cached_property
    def pinned(self) -> PinnedFiles:
        """The files read so far (config.json, weights, tokenizer, adapter), watched for changes."""
        advice = "they were replaced meanwhile; start again with the model as it is now"
        return PinnedFiles(f"the model {self.name}", advice)

    @cached_property
    def config(self) -> dict[str, Any]:
        """Contents of config.json, or the equivalent from the header of a GGUF file.

        Raises:
            ConfigError: if config.json is no JSON object.
        """
        if self.gguf is not None:
            return gguf.config_of(self.weight_files)
        # Noted before it is read, so that a change in between is noticed.
        return json_object(self.pinned.note(self.directory / CONFIG), ConfigError)

    @cached_property
    def weight_files(self) -> tuple[Path, ...]:
        """The weight files: safetensors, or else torch files, sorted by name; or the GGUF files.

        Raises:
            WeightsError: if a file is missing; names it.
        """
        return tuple(map(self.pinned.note, self._weight_files()))

    def _weight_files(self) -> tuple[Path, ...]:
        if self.gguf is not None:
            return parts_of(self.gguf)
        # The single file before the index, as transformers does where a folder has both.
        for single, index in ((WEIGHTS, INDEX), (PICKLED, PICKLED_INDEX)):
            if require_content(path := self.directory / single, WeightsError):
                return (path,)
            if require_content(path := self.directory / index, WeightsError):
                return self._shards(path)
        other_weights = sorted(
            path.name
            for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf", "*.safetensors")
            for path in self.directory.glob(pattern)
        )
        raise WeightsError(
            f"expected {WEIGHTS}, {INDEX} or {PICKLED} in {self.directory}, found "
            f"{', '.join(other_weights) or 'no weights'}; {self._fetch_hint()}"
        )

    def _shards(self, index: Path) -> tuple[Path, ...]:
        names = sorted(set(_weight_map(index).values()))
        shards = tuple(path_below(self.directory, name, WeightsError, index) for name in names)
        missing = [path.name for path in shards if not require_content(path, WeightsError)]
        if missing:
            further = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise WeightsError(
                f"{index.name} lists {len(shards)} files, found no {missing[0]}{further} in "
                f"{self.directory}; {self._fetch_hint()}"
            )
        return shards

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The tensors of the model, dequantised, with the adapter merged.

        Raises:
            ConfigError: for an unsupported quantisation.
        """
        return Checkpoint(self.weight_files, scheme_of(self.config), self._adapter)

    @cached_property
    def _adapter(self) -> Adapter | None:
        if self.adapter is None:
            return None
        adapter = Adapter(self.adapter)
        # Noted before it is read, so that a change in between is noticed.
        self.pinned.note(adapter.file)
        return adapter

    def checked_checkpoint(self) -> Checkpoint:
        """`checkpoint`, after checking names, shapes and dtypes of all tensors. WeightsError names the first
        that does not fit the architecture."""
        from ..networks.weights import checked_checkpoint

        return checked_checkpoint(self.checkpoint, self.architecture())

    @property
    def plain_config(self) -> dict[str, Any]:
        """config.json without the keys that describe quantisation."""
        # Architectures read plain weights: `checkpoint` dequantises, and no family knows these keys.
        return {key: value for key, value in self.config.items() if key not in KEYS}

    @property
    def trained_with_help(self) -> str:
        """Sentence about auxiliary training losses on internals of the model, shown with every result about
        it.

        "" if the folder has no such file.
        """
        path = self.directory / HELP
        return path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else ""

    @property
    def tokenizer_file(self) -> Path | None:
        """tokenizer.json, or else the vocabulary of RWKV World; None if the model has neither.

        Raises:
            TokenizerError: if there are several vocabularies.
        """
        path = self.directory / TOKENIZER
        if require_content(path, TokenizerError):
            return path
        vocabularies = sorted(self.directory.glob(WORLD))
        if len(vocabularies) > 1:
            names = ", ".join(path.name for path in vocabularies)
            raise TokenizerError(
                f"expected one {WORLD} in {self.directory}, found {names}; leave the one the model was "
                "trained with"
            )
        return next(iter(vocabularies), None)

    def architecture(self) -> Architecture:
        """Architecture of the model: of its family, or inferred from config and tensors for an unknown one.

        Behind the bridge it is the one found by probing the model (bridge_case.py).

        Raises:
            ConfigError: if the model cannot run, listing every reason; and for an unknown family whose layout
                is neither trusted nor checked to agree with transformers (layout_check.py, which ignores an
                adapter).
            WeightsError: if the adapter belongs to another model.
        """
        return self._architecture

    @cached_property
    def _architecture(self) -> Architecture:
        from .autoconfig import architecture_of

        if self.is_bridged:
            return self.bridge_case().finding().require()
        config = architecture_of(self.plain_config, self.checkpoint, str(self.directory / CONFIG))
        if not self.has_known_family and not self.trust_layout:
            self.layout_case(config).verdict().require(config.model_type)
        # After the layout check, which ignores an adapter.
        self.checkpoint.check(config)
        return config

    def understood(self) -> CompatibilityReport:
        """Report of the architecture and of every issue that prevents running; never raises for the
        issues."""
        from .autoconfig import CompatibilityReport, report

        try:
            return report(self.plain_config, self.checkpoint.shapes)
        except ConfigError as error:
            model_type = str(self.config.get("model_type"))
            return CompatibilityReport(model_type, self.has_known_family, None, [str(error)])

    @property
    def may_be_bridged_unasked(self) -> bool:
        """Whether transformers may run the model without `backend="transformers"`.

        True for an unknown family without an adapter and not in GGUF, which the bridge does not support.
        """
        return self.adapter is None and self.gguf is None and not self.has_known_family

    @property
    def has_known_family(self) -> bool:
        """Whether the model_type is that of a supported family."""
        from ..architectures.known import KNOWN

        model_type = self.config.get("model_type")
        return isinstance(model_type, str) and model_type in KNOWN

    def layout_case(self, config: Architecture) -> LayoutCase:
        """The check of an inferred architecture against transformers; it runs when its verdict is read."""
        from .layout_check import LayoutCase

        return LayoutCase(
            self.directory, self.weight_files, self.config, config, self._stored_digest(), config.version
        )

    def bridge_case(self) -> BridgeCase:
        """The probe of this checkpoint in transformers; it runs when its finding is read."""
        from .bridge_case import BridgeCase

        return BridgeCase(self.directory, self.weight_files, self.config, self._stored_digest())

    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer of the model, from tokenizer.json, an RWKV World vocabulary or a GGUF file; None without
        any.

        Raises:
            TokenizerError: if it cannot be read.
        """
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        file = self.tokenizer_file
        if file is None and self.gguf is not None:
            return _tokenizer_inside(header_of(self.weight_files), self.name)
        if file is None:
            return None
        kind = LibraryTokenizer if file.name == TOKENIZER else WorldTokenizer
        return kind(self.pinned.note(file), name=self.name)

    def identity(self, dtype: str = "float32", attention: str | None = None) -> ModelIdentity:
        """Identity of the model, part of the keys of its results: weights, architecture, dtype and attention.

        Digests of files are remembered until the files change.

        Arguments:
            dtype: dtype that the model computes in.
            attention: attention implementation; None for the default of the architecture in this dtype.

        Raises:
            WeightsError: for a file in the hub cache that does not have the sha256 in its name.
        """
        architecture = self.architecture()
        # Trust enters the key: an unchecked layout may compute other numbers than a checked one.
        forward = architecture.version + (", layout trusted" if self.trust_layout else "")
        return ModelIdentity(
            self.weights_digest(),
            architecture.digest,
            forward,
            dtype,
            attention or architecture.attention_in(dtype),
        )

    def while_digested(self, dtype: str, load: Callable[[], Loaded]) -> tuple[ModelIdentity, Loaded]:
        """(identity, result of `load`), computed at the same time, because digesting takes longer than
        reading.

        Afterwards `pinned.check` notices files that changed meanwhile.

        Arguments:
            dtype: dtype that the model computes in.
            load: reads the weights.
        """
        # Files written a moment ago could change without a new time stamp: then one after the other.
        if not self.pinned.are_settled:
            return self.identity(dtype), load()
        with ThreadPoolExecutor(1, "mizarr-digest") as background:
            identity = background.submit(self.identity, dtype)
            loaded = load()
        return identity.result(), loaded

    def weights_digest(self) -> str:
        """`sha256:…` of the contents of the weight files and the adapter, independent of file names."""
        stored = self._stored_digest()
        if (adapter := self._adapter) is None:
            return stored
        added = adapter.digest(weight_digest(adapter.file, self.pinned))
        return f"sha256:{digest('adapted', stored, added)}"

    def _stored_digest(self) -> str:
        # Sorted digests: names and order of shards do not matter, their bytes do.
        contents = sorted(weight_digest(path, self.pinned) for path in self.weight_files)
        if self.gguf is not None:
            return f"sha256:{digest('gguf-weights', contents, gguf.VERSION)}"
        # Behind the bridge transformers dequantises; its version is in the identity already.
        scheme = None if self.is_bridged else scheme_of(self.config)
        if scheme is not None:
            return f"sha256:{digest('quantised-weights', contents, scheme.digest)}"
        return f"sha256:{digest('weights', contents)}"

    def require_identity(self, identity: ModelIdentity) -> None:
        """Raise SourceChanged unless the files have this identity, noted when the model was planned or
        loaded."""
        try:
            current = self.identity(identity.dtype, identity.attention)
        except (WeightsError, ConfigError) as error:
            raise SourceChanged(
                f"the files of {self.name} changed since they were looked at: {error}"
            ) from error
        if current != identity:
            raise SourceChanged(
                f"expected the files of {self.name} as they were (model {identity.short}), found others "
                f"({current.short}): they were replaced meanwhile; start again with the model as it is now"
            )

    def _fetch_hint(self) -> str:
        if self.revision is None:
            return "convert or copy them there"
        return f"fetch it again: mizarr models fetch {bare_name(self.name)}"


@lru_cache(maxsize=2)
def _tokenizer_inside(header: Header, name: str) -> VocabularyTokenizer | None:
    """The tokenizer of the vocabulary in a GGUF file, cached per process; None for a file without one."""
    words = words_of(header)
    return None if words is None else VocabularyTokenizer(words, header.path, name=name)


def bare_name(name: str) -> str:
    """The name of a model without the suffixes for adapter, `TRUSTED` and `BRIDGED`."""
    return _split_name(name)[0]


def _split_name(name: str) -> tuple[str, str | None]:
    """(bare name, adapter folder or None) of a name with suffixes."""
    # Suffixes are part of the name, because settings, workers and stored notes hold nothing else of a model.
    bare = name.removesuffix(TRUSTED).removesuffix(BRIDGED)
    match = _ADAPTED.fullmatch(bare)
    return (bare, None) if match is None else (match[1], match[2])


def resolve(
    name: str | Path,
    revision: str | None = None,
    *,
    trust_layout: bool = False,
    backend: str | None = None,
    adapter: str | Path | None = None,
) -> ModelFiles:
    """Find the files of a model; nothing is downloaded.

    A name with a suffix (`TRUSTED`, `BRIDGED`, an adapter) sets the same options, so that a setting, a
    worker or a stored note with the name carries them. The name of a known family gets no `TRUSTED`.

    Arguments:
        name: name of a shipped model, directory, or hub id; tried in this order.
        revision: branch, tag or commit of a hub id, default "main"; refused for a directory.
        trust_layout: whether to run an unknown family without a layout check.
        backend: "native", or "transformers" for the bridge; None for that of the name, else native.
        adapter: folder of a LoRA adapter to merge into the weights; None for that of the name, else none.

    Raises:
        ModelNotFound: if there is no such model; says how to get it.
        ConfigError: for an unknown backend, or options that exclude each other.
    """
    text = str(name)
    if not isinstance(name, str | Path) or not text:
        raise ModelNotFound(
            f"expected a model directory, a hub id such as org/name, or one of {', '.join(SHIPPED)}, found "
            f"{name!r:.80}; name one"
        )
    require_flag(trust_layout, "trust_layout")
    if backend not in (None, *BACKENDS):
        raise ConfigError(f"expected backend to be one of {', '.join(BACKENDS)}, found {backend!r}")
    bare, adapter_in_name = _split_name(text)
    files = _resolve(bare, revision)
    if (folder := str(adapter) if adapter is not None else adapter_in_name) is not None:
        files = replace(files, name=f"{files.name} (adapter {folder})", adapter=Path(folder).expanduser())
        Adapter(Path(folder).expanduser()).config  # noqa: B018 - raises for an unreadable adapter
    if backend == "transformers" or (backend is None and text.endswith(BRIDGED)):
        if trust_layout:
            raise ConfigError(
                "expected trust_layout or backend='transformers', found both: a layout is trusted only where "
                "mizarr's own networks compute; leave one out"
            )
        if files.adapter is not None:
            raise ConfigError(
                "expected an adapter or backend='transformers', found both: adapters are merged only for "
                "mizarr's own networks; merge it with PEFT, and save that"
            )
        if files.gguf is not None:
            raise ConfigError(
                "expected a folder with config.json for backend='transformers', found a GGUF file; use the "
                "checkpoint it was made of"
            )
        return replace(files, name=files.name + BRIDGED, is_bridged=True)
    if not (trust_layout or text.endswith(TRUSTED)) or files.has_known_family:
        return files
    return replace(files, name=files.name + TRUSTED, trust_layout=True)


def resolve_runnable(
    name: str | Path,
    revision: str | None = None,
    *,
    trust_layout: bool = False,
    backend: str | None = None,
    adapter: str | Path | None = None,
) -> ModelFiles:
    """As `resolve`, but switch to transformers, with a warning, for a model that only transformers can run.

    That is a model of an unknown family whose layout is not that of a known one; it is probed once. A known
    family that is refused stays refused. Arguments are those of `resolve`.

    Arguments:
        name: see `resolve`.
        revision: see `resolve`.
        trust_layout: see `resolve`.
        backend: see `resolve`.
        adapter: see `resolve`.

    Raises:
        ConfigError: if nothing can run the model; `mizarr models inspect` lists the details.
        MissingExtra: if transformers, which may run it, is not installed.
    """
    files = resolve(name, revision, trust_layout=trust_layout, backend=backend, adapter=adapter)
    if backend is not None or files.is_bridged or files.trust_layout or not files.may_be_bridged_unasked:
        return files
    from ..architectures.families import model_type_of

    model_type = model_type_of(files.config, str(files.directory / CONFIG))
    kind: type[MizarrError] = ConfigError
    obstacle = ""
    try:
        files.architecture()
    except (ConfigError, MissingExtra):
        try:
            obstacle = files.bridge_case().finding().refused
        except MissingExtra:
            kind = MissingExtra
            obstacle = "transformers, which may run it, is not installed: pip install 'mizarr[check]'"
        except (ConfigError, WeightsError) as error:
            obstacle = str(error)
    else:
        return files
    if obstacle:
        raise kind(
            f"{name}: {model_type!r} is no family that is known here, and its layout is that of no known "
            f"family; {obstacle}. Details: mizarr models inspect {name}"
        )
    warnings.warn(
        f"{name}: {model_type!r} is no family that is known here, so transformers runs it "
        f"(backend='transformers'); what that leaves out: mizarr models inspect {name}",
        UserWarning,
        stacklevel=1,  # one place, so that Python shows it once however often a name is resolved
    )
    return replace(files, name=files.name + BRIDGED, is_bridged=True)


def _resolve(text: str, revision: str | None) -> ModelFiles:
    if text in SHIPPED:
        folder = Path(__file__).parents[1] / SHIPPED[text]
    else:
        try:
            folder = Path(text).expanduser()
            exists = folder.is_dir() or require_content(folder, ModelNotFound)
        except (OSError, RuntimeError) as error:  # the name is too long, or "~user" has no home
            if isinstance(error, ModelNotFound):
                raise
            raise ModelNotFound(f"expected a model directory or a hub id, found {text!r:.200}") from error
        if exists and not folder.is_dir() and folder.suffix != SUFFIX:
            raise ModelNotFound(
                f"expected a model's directory, found the file {text}; give the folder it lies in"
            )
        if not exists:
            return _from_hub_cache(text, revision)
    if revision is not None:
        raise ModelNotFound(
            f"expected no revision for the directory {text}, found {revision!r}; revisions belong to hub ids"
        )
    if folder.is_file():
        return ModelFiles(text, folder.parent, gguf=folder)
    if not require_content(folder / CONFIG, ConfigError):
        # A folder often holds one model at several quantisations, so the file must be named.
        gguf_files = sorted(path.name for path in folder.glob(f"*{SUFFIX}"))
        if gguf_files:
            raise ModelNotFound(
                f"expected a model in {folder}, found no {CONFIG} but {', '.join(gguf_files)}; name one of "
                f"these: {folder / gguf_files[0]}"
            )
        raise ModelNotFound(
            f"expected a model in {folder}, found no {CONFIG}; give the folder that holds {CONFIG} and the "
            "safetensors files"
        )
    return ModelFiles(text, folder)


def hub_cache() -> Path:
    """Cache folder of the Hugging Face libraries, from the same environment variables."""
    # In the order of huggingface_hub, whose second name is the older one.
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return Path(os.environ[variable]).expanduser()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return Path(os.environ.get("HF_HOME") or cache / "huggingface").expanduser() / "hub"


def cached_models() -> list[str]:
    """Hub ids with files in the local cache, sorted."""
    return sorted(
        path.name.removeprefix("models--").replace("--", "/")
        for path in hub_cache().glob("models--*")
        if path.is_dir()
    )


def repository_folder(name: str) -> Path:
    """Folder of a hub repository in the cache; it need not exist."""
    return hub_cache() / f"models--{name.replace('/', '--')}"


def reference_file(repository: Path, revision: str) -> Path:
    """File of the cache with the commit of a branch or tag.

    Arguments:
        repository: folder of the repository in the cache.
        revision: branch or tag.

    Raises:
        ModelNotFound: for a revision that is no path below the folder.
    """
    return path_below(repository / "refs", revision, ModelNotFound, f"revision {revision!r:.80}")


def snapshot_folder(repository: Path, revision: str) -> Path:
    """Folder with the files of a revision of a cached repository; it need not exist.

    Arguments:
        repository: folder of the repository in the cache.
        revision: branch, tag or commit.

    Raises:
        ModelNotFound: for an invalid revision, or a file of the cache that contains no commit.
    """
    reference = reference_file(repository, revision)
    # Without such a file the revision is a commit.
    commit = reference.read_text().strip() if reference.is_file() else revision
    return path_below(repository / "snapshots", commit, ModelNotFound, reference)


def _from_hub_cache(name: str, revision: str | None) -> ModelFiles:
    if name.endswith(SUFFIX) and not repository_folder(name).is_dir():
        gguf_files = sorted(path.name for path in Path(name).expanduser().parent.glob(f"*{SUFFIX}"))
        suggestion = f"; there are {', '.join(gguf_files[:5])}" if gguf_files else "; check the path"
        raise ModelNotFound(f"expected a GGUF file at {name}, found none{suggestion}")
    # A name that begins with a dot is a relative path, of which no folder exists.
    if not _HUB_ID.fullmatch(name) or name.startswith("."):
        raise ModelNotFound(
            f"expected a model directory, a hub id such as org/name, or one of {', '.join(SHIPPED)}; "
            f"found no directory {name:.200}"
        )
    repository = repository_folder(name)
    branch = revision or "main"
    command = f"mizarr models fetch {name}" + (f" --revision {revision}" if revision else "")
    if not (repository / "snapshots").is_dir():
        near = nearest(name, [*cached_models(), *SHIPPED])
        hint = f"; nearest there is {near!r}" if near else ""
        raise ModelNotFound(
            f"{name} is no directory, and not in the local cache {hub_cache()}{hint}; fetch it: {command}"
        )
    folder = snapshot_folder(repository, branch)
    if not (folder / CONFIG).is_file():
        commits = sorted(path.name[:12] for path in (repository / "snapshots").iterdir())
        raise ModelNotFound(
            f"{name} is cached, but not its revision {branch!r} with a {CONFIG} (cached: "
            f"{', '.join(commits) or 'none'}); fetch it: {command}"
        )
    return ModelFiles(name, folder, folder.name)


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name of its shard, from the index of a checkpoint."""
    shards: Any = json_object(index, WeightsError).get("weight_map")
    names = list(shards.values()) if isinstance(shards, dict) else [shards]
    # An index may come from anyone: a name must not lead out of the folder.
    strange = [name for name in names if not isinstance(name, str) or not is_below(name) or "/" in name]
    if strange or not names:
        raise WeightsError(
            f"expected {index} to map tensors to files beside it, found "
            f"{strange[0] if strange else 'none'!r:.80}; fetch it again"
        )
    return dict(shards)


def weight_digest(path: Path, pinned: PinnedFiles) -> str:
    """`sha256:…` of a weight file, computed once and remembered until the file changes.

    Arguments:
        path: the file.
        pinned: files of the model, to which it belongs.

    Raises:
        WeightsError: for a file in the hub cache that does not have the sha256 in its name.
    """
    content = pinned.digest(path)
    # The hub cache names blobs by their sha256: flipped bits on disk moved logits where the name was trusted
    # unread.
    name = named_digest(path)
    if name is not None and content != f"sha256:{name}":
        raise WeightsError(
            f"expected the bytes of {path.resolve()} to have the sha256 in its name, found {content}: it is "
            "damaged; remove it, and fetch it again"
        )
    return content

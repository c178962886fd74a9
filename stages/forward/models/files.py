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
from ....store.exchange.outside import (
    json_file,
    json_object,
    named_digest,
    path_below,
    require_content,
)
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
MODULES = "modules.json"
"""File in which sentence-transformers lists the folders of an encoder's modules, the transformer first."""
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
        advice = "they were replaced meanwhile; run the command again with the files as they are now"
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
            f"{', '.join(other_weights) or 'no weight files'}; {self._how_to_get_files()}"
        )

    def _shards(self, index: Path) -> tuple[Path, ...]:
        names = sorted(set(_weight_map(index).values()))
        shards = tuple(path_below(self.directory, name, WeightsError, index) for name in names)
        missing = [path.name for path in shards if not require_content(path, WeightsError)]
        if missing:
            further = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise WeightsError(
                f"expected the {len(shards)} weight files listed in {index.name} in {self.directory}, found "
                f"no {missing[0]}{further}; {self._how_to_get_files()}"
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
        """The tensors of the model, after a check of all names, shapes and dtypes against its architecture.

        Raises:
            WeightsError: for a tensor that does not fit the architecture; names the first one.
        """
        from ..networks.weights import checked_checkpoint

        return checked_checkpoint(self.checkpoint, self.architecture())

    @property
    def plain_config(self) -> dict[str, Any]:
        """config.json without the keys that describe quantisation."""
        # Architectures read plain weights: `checkpoint` dequantises, and no family knows these keys.
        return {key: value for key, value in self.config.items() if key not in KEYS}

    @property
    def trained_with_help(self) -> str:
        """Sentence saying which auxiliary losses on its internals the model was trained with.

        It is shown with every result about the model; empty if the folder has no such file.
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
                f"expected one vocabulary file {WORLD} in {self.directory}, found {names}; remove all but "
                "the one that the model was trained with"
            )
        return next(iter(vocabularies), None)

    def architecture(self) -> Architecture:
        """Layers, sizes and hook points of the model.

        A known family reads them from config.json. For an unknown family they are inferred from config.json
        and the shapes of the tensors; for a model that transformers runs they come from running it once.

        Raises:
            ConfigError: if the model cannot run, listing every reason; and for an unknown family whose layout
                is neither trusted nor found to agree with transformers (layout_check.py, which ignores an
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
        """Report whether mizarr's own networks can run the model.

        Issues that prevent running are listed in the report, never raised.
        """
        from .autoconfig import CompatibilityReport, report

        try:
            return report(self.plain_config, self.checkpoint.shapes)
        except ConfigError as error:
            model_type = str(self.config.get("model_type"))
            return CompatibilityReport(model_type, self.has_known_family, None, [str(error)])

    @property
    def may_be_bridged_unasked(self) -> bool:
        """Whether transformers may run the model although the user did not set `backend="transformers"`.

        True for an unknown family, unless it has an adapter or is a GGUF file, which mizarr cannot hand to
        transformers.
        """
        return self.adapter is None and self.gguf is None and not self.has_known_family

    @property
    def has_known_family(self) -> bool:
        """Whether the model_type is that of a supported family."""
        from ..architectures.known import KNOWN

        model_type = self.config.get("model_type")
        return isinstance(model_type, str) and model_type in KNOWN

    def layout_case(self, config: Architecture) -> LayoutCase:
        """The comparison of an inferred architecture with transformers; it runs when `verdict` is called.

        Arguments:
            config: the inferred architecture.
        """
        from .layout_check import LayoutCase

        return LayoutCase(
            self.directory, self.weight_files, self.config, config, self._stored_digest(), config.version
        )

    def bridge_case(self) -> BridgeCase:
        """The examination of this checkpoint in transformers; it runs when `finding` is called."""
        from .bridge_case import BridgeCase

        return BridgeCase(self.directory, self.weight_files, self.config, self._stored_digest())

    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer from tokenizer.json, an RWKV World vocabulary or a GGUF file; None without any of them.

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
        """Load the weights while a thread computes the identity, because hashing takes longer than reading.

        Afterwards `pinned.check` notices files that changed meanwhile.

        Arguments:
            dtype: dtype that the model computes in.
            load: reads the weights.

        Returns:
            (identity of the model, result of `load`).
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
        """Raise SourceChanged unless the files still have an identity that was noted earlier.

        Arguments:
            identity: identity of the model when it was planned or loaded.
        """
        try:
            current = self.identity(identity.dtype, identity.attention)
        except (WeightsError, ConfigError) as error:
            raise SourceChanged(
                f"the files of {self.name} changed during this run and cannot be read any more: {error}"
            ) from error
        if current != identity:
            raise SourceChanged(
                f"expected unchanged files of {self.name} (identity {identity.short}), found files that were "
                f"replaced during this run (identity {current.short}); run the command again with the files "
                "as they are now"
            )

    def _how_to_get_files(self) -> str:
        if self.revision is None:
            return "convert or copy them there"
        return f"fetch the model again: mizarr models fetch {bare_name(self.name)}"


@lru_cache(maxsize=2)
def _tokenizer_inside(header: Header, name: str) -> VocabularyTokenizer | None:
    """Tokenizer from the vocabulary in a GGUF file, cached per process; None if the file has none."""
    words = words_of(header)
    return None if words is None else VocabularyTokenizer(words, header.path, name=name)


def bare_name(name: str) -> str:
    """The name of a model without the suffixes for adapter, `TRUSTED` and `BRIDGED`."""
    return _split_name(name)[0]


def _split_name(name: str) -> tuple[str, str | None]:
    """Split the suffixes from a model name: (name without suffixes, folder of the LoRA adapter or None)."""
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
                "expected either trust_layout=True or backend='transformers', found both: trust_layout is "
                "for mizarr's own networks; leave one out"
            )
        if files.adapter is not None:
            raise ConfigError(
                "expected either adapter= or backend='transformers', found both: only mizarr's own networks "
                "merge adapters; merge it with PEFT (merge_and_unload), save the result and load that"
            )
        if files.gguf is not None:
            raise ConfigError(
                "expected a folder with config.json for backend='transformers', found a GGUF file; load the "
                "checkpoint from which it was converted"
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
    """Find the files of a model, and let transformers run it, with a warning, if nothing else can.

    That is a model of an unknown family whose layout is not that of a known family. A known family that
    mizarr's networks cannot run is not switched.

    Arguments:
        name: name of a shipped model, directory, or hub id; tried in this order.
        revision: branch, tag or commit of a hub id, default "main"; refused for a directory.
        trust_layout: whether to run an unknown family without a layout check.
        backend: "native", or "transformers"; None chooses as described above.
        adapter: folder of a LoRA adapter to merge into the weights; None for that of the name, else none.

    Raises:
        ConfigError: if nothing can run the model; `mizarr models inspect` lists the details.
        MissingExtra: if transformers, which may run it, is not installed.
    """
    files = resolve(name, revision, trust_layout=trust_layout, backend=backend, adapter=adapter)
    if backend is not None or files.is_bridged or files.trust_layout or not files.may_be_bridged_unasked:
        return files
    from ..architectures.families import model_type_of

    model_type = model_type_of(files.config, str(files.directory / CONFIG))
    error_class: type[MizarrError] = ConfigError
    obstacle = ""
    try:
        files.architecture()
    except (ConfigError, MissingExtra):
        try:
            obstacle = files.bridge_case().finding().refused
        except MissingExtra:
            error_class = MissingExtra
            obstacle = "transformers, which may run it, is not installed: pip install 'mizarr[check]'"
        except (ConfigError, WeightsError) as error:
            obstacle = str(error)
    else:
        return files
    if obstacle:
        raise error_class(
            f"{name}: mizarr supports neither the family {model_type!r} nor its layout of tensors, and "
            f"{obstacle}; for details run: mizarr models inspect {name}"
        )
    warnings.warn(
        f"{name}: mizarr does not support the family {model_type!r}, so transformers runs it "
        f"(backend='transformers') with fewer hook points; for a list run: mizarr models inspect {name}",
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
            raise ModelNotFound(
                f"expected a model directory or a hub id such as org/name, found {text!r:.200}"
            ) from error
        if exists and not folder.is_dir() and folder.suffix != SUFFIX:
            raise ModelNotFound(
                f"expected the directory of a model, found the file {text}; name the folder that contains it"
            )
        if not exists:
            return _from_hub_cache(text, revision)
    if revision is not None:
        raise ModelNotFound(
            f"expected no revision for the directory {text}, found {revision!r}; leave it out, as only hub "
            "ids have revisions"
        )
    if folder.is_file():
        return ModelFiles(text, folder.parent, gguf=folder)
    folder = _transformer_folder(folder)
    if not require_content(folder / CONFIG, ConfigError):
        # A folder often holds one model at several quantisations, so the file must be named.
        gguf_files = sorted(path.name for path in folder.glob(f"*{SUFFIX}"))
        if gguf_files:
            raise ModelNotFound(
                f"expected a model in {folder}, found no {CONFIG} but {', '.join(gguf_files)}; name one of "
                f"these: {folder / gguf_files[0]}"
            )
        raise ModelNotFound(
            f"expected a model in {folder}, found no {CONFIG}; name the folder that contains {CONFIG} and "
            "the safetensors files"
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
    """Folder of a hub repository in the local cache; it need not exist.

    Arguments:
        name: hub id, e.g. "org/name".
    """
    return hub_cache() / f"models--{name.replace('/', '--')}"


def reference_file(repository: Path, revision: str) -> Path:
    """The file in the hub cache that contains the commit of a branch or tag; it need not exist.

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
        hint = f"; did you mean {near!r}?" if near else ""
        raise ModelNotFound(
            f"expected a directory or a model in the local cache {hub_cache()}, found no {name}{hint}; "
            f"download it with: {command}"
        )
    snapshot = snapshot_folder(repository, branch)
    folder = _transformer_folder(snapshot)
    if not (folder / CONFIG).is_file():
        commits = sorted(path.name[:12] for path in (repository / "snapshots").iterdir())
        raise ModelNotFound(
            f"expected {CONFIG} of {name} at revision {branch!r} in the local cache, found "
            f"{'commits ' + ', '.join(commits) if commits else 'no commit'}; download it with: {command}"
        )
    return ModelFiles(name, folder, snapshot.name)


def _transformer_folder(folder: Path) -> Path:
    """The folder with config.json: inside that of a sentence encoder, if its modules.json names another one.

    Raises:
        ConfigError: for a modules.json that names no folder.
    """
    path = folder / MODULES
    if (folder / CONFIG).is_file() or not require_content(path, ConfigError):
        return folder
    modules = json_file(path, ConfigError)
    transformer = modules[0] if isinstance(modules, list) and modules else None
    name = transformer.get("path") if isinstance(transformer, dict) else None
    return folder if name == "" else path_below(folder, name, ConfigError, path)


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name of its shard, from the index of a checkpoint."""
    shards: Any = json_object(index, WeightsError).get("weight_map")
    names = list(shards.values()) if isinstance(shards, dict) else [shards]
    # An index may come from anyone: a name must not lead out of the folder.
    invalid = [name for name in names if not isinstance(name, str) or not is_below(name) or "/" in name]
    if invalid or not names:
        raise WeightsError(
            f"expected {index} to map each tensor to a file in the same folder, found "
            f"{invalid[0] if invalid else 'none'!r:.80}; fetch the model again"
        )
    return dict(shards)


def weight_digest(path: Path, pinned: PinnedFiles) -> str:
    """`sha256:…` of a weight file, computed once and remembered until the file changes.

    Arguments:
        path: the weight file.
        pinned: the model's files, watched for changes, among which the digest is remembered.

    Raises:
        WeightsError: for a file in the hub cache that does not have the sha256 in its name.
    """
    content = pinned.digest(path)
    # The hub cache names blobs by their sha256: flipped bits on disk moved logits where the name was trusted
    # unread.
    name = named_digest(path)
    if name is not None and content != f"sha256:{name}":
        raise WeightsError(
            f"expected the contents of {path.resolve()} to have the sha256 in its file name, found "
            f"{content}: the file is damaged; delete it, then run mizarr models fetch for this model"
        )
    return content

"""Where a model's files are, and what the model is.

A name is a local directory, a model that ships with mizarr (`SHIPPED`), or a hub id whose files lie in the
local cache; nothing is fetched here (`download.py` does that). The identity is made of the files' content and
never of the name, because two models may share a name and one model may have several.

Border: paths, parsed JSON and digests. Never imports torch: plans and cached runs need an identity, and no
weights.
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
"""Ends the name of a model of unknown family that runs unchecked, wherever that name is shown or noted."""
BRIDGED = " (transformers)"
"""Ends the name of a model that transformers computes, likewise."""
_ADAPTED = re.compile(r"(.*) \(adapter (.+)\)", re.DOTALL)
"""The name of a model with an adapter, likewise: the base model's, then the adapter's folder."""
BACKENDS = ("native", "transformers")
"""Who computes a model: mizarr, or transformers behind a bridge."""
CONFIG, WEIGHTS, INDEX, TOKENIZER = (
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
)
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
"""What torch.save wrote; read where there are no safetensors."""
HELP = "trained_with_help.txt"
"""A sentence beside the weights, part of no identity: what training asked of the inside of the model."""
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class ModelFiles:
    """The files of one model.

    name: as it was asked for, with its adapter behind it, and TRUSTED where the layout is, or BRIDGED where
    transformers computes; part of no key. directory: where they lie. revision: commit of a hub snapshot, else
    None. trust_layout: run an unknown family unchecked. is_bridged: whether transformers computes it.
    adapter: folder of an adapter that is merged into the weights. gguf: the one file, or the first of those,
    that is weights and configuration at once; None where they are files of their own.
    """

    name: str
    directory: Path
    revision: str | None = None
    trust_layout: bool = False
    is_bridged: bool = False
    adapter: Path | None = None
    gguf: Path | None = None

    @cached_property
    def pinned(self) -> PinnedFiles:
        """Those that were read so far: config.json, the weights, the tokenizer, the adapter's weights."""
        advice = "they were replaced meanwhile; start again with the model as it is now"
        return PinnedFiles(f"the model {self.name}", advice)

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json, parsed, or what a GGUF file says in its place. Raises ConfigError if it is no JSON
        object."""
        if self.gguf is not None:
            return gguf.config_of(self.weight_files)
        return json_object(self.pinned.note(self.directory / CONFIG), ConfigError)

    @cached_property
    def weight_files(self) -> tuple[Path, ...]:
        """The safetensors files, else those of torch, in the order of their names; of GGUF those that were
        named. Raises WeightsError naming the one that is missing.
        """
        return tuple(map(self.pinned.note, self._weight_files()))

    def _weight_files(self) -> tuple[Path, ...]:
        if self.gguf is not None:
            return parts_of(self.gguf)
        for single, index in ((WEIGHTS, INDEX), (PICKLED, PICKLED_INDEX)):
            if require_content(path := self.directory / single, WeightsError):
                return (path,)
            if require_content(path := self.directory / index, WeightsError):
                return self._shards(path)
        others = sorted(
            path.name
            for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf", "*.safetensors")
            for path in self.directory.glob(pattern)
        )
        raise WeightsError(
            f"expected {WEIGHTS}, {INDEX} or {PICKLED} in {self.directory}, found "
            f"{', '.join(others) or 'no weights'}; {self._fetch_hint()}"
        )

    def _shards(self, index: Path) -> tuple[Path, ...]:
        names = sorted(set(_weight_map(index).values()))
        shards = tuple(path_below(self.directory, name, WeightsError, index) for name in names)
        missing = [path.name for path in shards if not require_content(path, WeightsError)]
        if missing:
            rest = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise WeightsError(
                f"{index.name} lists {len(shards)} files, found no {missing[0]}{rest} in {self.directory}; "
                f"{self._fetch_hint()}"
            )
        return shards

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The model's tensors as plain numbers, its adapter merged in. Raises ConfigError for a checkpoint
        that is quantised in a way that is not read."""
        return Checkpoint(self.weight_files, scheme_of(self.config), self._adapter)

    @cached_property
    def _adapter(self) -> Adapter | None:
        if self.adapter is None:
            return None
        adapter = Adapter(self.adapter)
        self.pinned.note(adapter.file)
        return adapter

    def checked_checkpoint(self) -> Checkpoint:
        """`checkpoint`, with names, shapes and dtypes of all tensors checked as for a pass. Raises
        WeightsError naming the tensor or file."""
        from ..networks.weights import checked_checkpoint

        return checked_checkpoint(self.checkpoint, self.architecture())

    @property
    def plain_config(self) -> dict[str, Any]:
        """config.json of the model that the checkpoint gives: without how its weights are packed."""
        return {key: value for key, value in self.config.items() if key not in KEYS}

    @property
    def trained_with_help(self) -> str:
        """What training asked of its inside, which every answer about it has to say; empty where the files
        tell nothing."""
        path = self.directory / HELP
        return path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else ""

    @property
    def tokenizer_file(self) -> Path | None:
        """tokenizer.json, else the vocabulary of RWKV World, if the model has either. Raises TokenizerError
        for several vocabularies.
        """
        path = self.directory / TOKENIZER
        if require_content(path, TokenizerError):
            return path
        vocabularies = sorted(self.directory.glob(WORLD))
        if len(vocabularies) > 1:
            names = ", ".join(each.name for each in vocabularies)
            raise TokenizerError(
                f"expected one {WORLD} in {self.directory}, found {names}; leave the one the model was "
                "trained with"
            )
        return next(iter(vocabularies), None)

    def architecture(self) -> Architecture:
        """What the model is, by its family's row or, for an unknown family, by its config and tensors; behind
        the bridge, as it was found when it was looked into (bridge_case.py).

        Raises ConfigError listing everything that stands in the way; and for an unknown family whose layout
        is neither trusted nor known to compute what transformers computes (layout_check.py), where an adapter
        is left out. Raises WeightsError for an adapter of another model.
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
        self.checkpoint.check(config)
        return config

    def understood(self) -> CompatibilityReport:
        """What the model is and whether it can run; all that stands in the way, where `architecture` raises
        for the first thing."""
        from .autoconfig import CompatibilityReport, report

        try:
            return report(self.plain_config, self.checkpoint.shapes)
        except ConfigError as error:
            model_type = str(self.config.get("model_type"))
            return CompatibilityReport(model_type, self.has_known_family, None, [str(error)])

    @property
    def may_be_bridged_unasked(self) -> bool:
        """Whether transformers may run the model without `backend="transformers"`: of an unknown family, and
        with neither an adapter nor a GGUF file, which the bridge does not take."""
        return self.adapter is None and self.gguf is None and not self.has_known_family

    @property
    def has_known_family(self) -> bool:
        """Whether a row of a table of families says how this model is computed."""
        from ..architectures.known import KNOWN

        model_type = self.config.get("model_type")
        return isinstance(model_type, str) and model_type in KNOWN

    def layout_case(self, config: Architecture) -> LayoutCase:
        """The question whether a layout worked out from config and tensors is the right one."""
        from .layout_check import LayoutCase

        return LayoutCase(
            self.directory, self.weight_files, self.config, config, self._stored_digest(), config.version
        )

    def bridge_case(self) -> BridgeCase:
        """The question what is to be found of this checkpoint if transformers computes it."""
        from .bridge_case import BridgeCase

        return BridgeCase(self.directory, self.weight_files, self.config, self._stored_digest())

    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer: that of a file of its own, else of the vocabulary inside a GGUF file; None
        without either. Raises TokenizerError for one that cannot be read.
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
        """What results of this model are keyed by: the content of its weight files, its configuration, how it
        is computed. attention: None for what the architecture says of the dtype.

        Files are digested once and remembered until they change. Raises WeightsError for one in the hub's
        cache that differs from the sha256 in its name.
        """
        architecture = self.architecture()
        forward = architecture.version + (", layout trusted" if self.trust_layout else "")
        return ModelIdentity(
            self.weights_digest(),
            architecture.digest,
            forward,
            dtype,
            attention or architecture.attention_in(dtype),
        )

    def while_digested(self, dtype: str, load: Callable[[], Loaded]) -> tuple[ModelIdentity, Loaded]:
        """(the identity, what `load` makes of the weight files), both made at once: digesting takes longer
        than reading, and neither needs the other. Where a change of a file might not show, one after the
        other. Whether files changed meanwhile, `pinned` tells."""
        if not self.pinned.are_settled:
            return self.identity(dtype), load()
        with ThreadPoolExecutor(1, "mizarr-digest") as aside:
            asked = aside.submit(self.identity, dtype)
            loaded = load()
        return asked.result(), loaded

    def weights_digest(self) -> str:
        """`sha256:…` of the content of the weight files, whatever they are called, and of the adapter's."""
        stored = self._stored_digest()
        if (adapter := self._adapter) is None:
            return stored
        added = adapter.digest(weight_digest(adapter.file, self.pinned))
        return f"sha256:{digest('adapted', stored, added)}"

    def _stored_digest(self) -> str:
        contents = sorted(weight_digest(path, self.pinned) for path in self.weight_files)
        if self.gguf is not None:
            return f"sha256:{digest('gguf-weights', contents, gguf.VERSION)}"
        scheme = None if self.is_bridged else scheme_of(self.config)
        if scheme is not None:
            return f"sha256:{digest('quantised-weights', contents, scheme.digest)}"
        return f"sha256:{digest('weights', contents)}"

    def require_identity(self, identity: ModelIdentity) -> None:
        """Raise SourceChanged unless these are the files of a model that was planned, or loaded, before."""
        try:
            found = self.identity(identity.dtype, identity.attention)
        except (WeightsError, ConfigError) as error:
            raise SourceChanged(
                f"the files of {self.name} changed since they were looked at: {error}"
            ) from error
        if found != identity:
            raise SourceChanged(
                f"expected the files of {self.name} as they were (model {identity.short}), found others "
                f"({found.short}): they were replaced meanwhile; start again with the model as it is now"
            )

    def _fetch_hint(self) -> str:
        if self.revision is None:
            return "convert or copy them there"
        return f"fetch it again: mizarr models fetch {bare_name(self.name)}"


@lru_cache(maxsize=2)
def _tokenizer_inside(header: Header, name: str) -> VocabularyTokenizer | None:
    """The tokenizer of the vocabulary in a GGUF file, one for a process; None for a file without one."""
    words = words_of(header)
    return None if words is None else VocabularyTokenizer(words, header.path, name=name)


def bare_name(name: str) -> str:
    """What a model was asked for as, without what its name says of how it runs."""
    return _parted(name)[0]


def _parted(name: str) -> tuple[str, str | None]:
    """(what a model was asked for as, its adapter) of a name that says how it runs."""
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
    """The files of a model named by directory, by "specimen", or by hub id, in that order of kinds; nothing
    is fetched.

    revision: branch, tag or commit of a hub id, default "main"; meaningless, and refused, for a directory.
    trust_layout: run it unchecked if its family is unknown. backend: "native" or "transformers", which runs
    it behind a bridge; None for what the name says, else native. adapter: folder of a LoRA adapter that is
    merged into the weights; None for what the name says, else none. A name that ends in TRUSTED, BRIDGED or
    an adapter says the same, so that a setting, a worker or a stored note that holds the name holds that too.
    A known family needs no trust, and its name stays as it is.
    Raises ModelNotFound saying how to get the model, ConfigError for a backend there is not.
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
    bare, named = _parted(text)
    found = _resolve(bare, revision)
    if (chosen := str(adapter) if adapter is not None else named) is not None:
        found = replace(found, name=f"{found.name} (adapter {chosen})", adapter=Path(chosen).expanduser())
        Adapter(Path(chosen).expanduser()).config  # noqa: B018 - refused before anything else is looked at
    if backend == "transformers" or (backend is None and text.endswith(BRIDGED)):
        if trust_layout:
            raise ConfigError(
                "expected trust_layout or backend='transformers', found both: a layout is trusted where we "
                "compute it ourselves; leave one out"
            )
        if found.adapter is not None:
            raise ConfigError(
                "expected an adapter or backend='transformers', found both: adapters are merged where we "
                "compute it ourselves; merge it with PEFT, and save that"
            )
        if found.gguf is not None:
            raise ConfigError(
                "expected a folder with config.json for backend='transformers', found a GGUF file; use the "
                "checkpoint it was made of"
            )
        return replace(found, name=found.name + BRIDGED, is_bridged=True)
    if not (trust_layout or text.endswith(TRUSTED)) or found.has_known_family:
        return found
    return replace(found, name=found.name + TRUSTED, trust_layout=True)


def resolve_runnable(
    name: str | Path,
    revision: str | None = None,
    *,
    trust_layout: bool = False,
    backend: str | None = None,
    adapter: str | Path | None = None,
) -> ModelFiles:
    """As `resolve`, for who runs the model: of a family that is not known, and whose layout is none of ours,
    the files as transformers computes them, as backend="transformers" gives them, and a warning that says so.
    Looks into such a model once.

    A known family that is refused stays refused. Raises ConfigError, or MissingExtra without transformers,
    where nobody can run it, in a line; `mizarr models inspect` lists the details.
    """
    found = resolve(name, revision, trust_layout=trust_layout, backend=backend, adapter=adapter)
    if backend is not None or found.is_bridged or found.trust_layout or not found.may_be_bridged_unasked:
        return found
    from ..architectures.families import model_type_of

    model_type = model_type_of(found.config, str(found.directory / CONFIG))
    kind: type[MizarrError] = ConfigError
    obstacle = ""
    try:
        found.architecture()
    except (ConfigError, MissingExtra):
        try:
            obstacle = found.bridge_case().finding().refused
        except MissingExtra:
            kind = MissingExtra
            obstacle = "transformers, which may run it, is not installed: pip install 'mizarr[check]'"
        except (ConfigError, WeightsError) as error:
            obstacle = str(error)
    else:
        return found
    if obstacle:
        raise kind(
            f"{name}: {model_type!r} is no family that is known here, and its layout is none of ours; "
            f"{obstacle}. Details: mizarr models inspect {name}"
        )
    warnings.warn(
        f"{name}: {model_type!r} is no family that is known here, so transformers runs it "
        f"(backend='transformers'); what that leaves out: mizarr models inspect {name}",
        UserWarning,
        stacklevel=1,  # one place, so that Python shows it once however often a name is resolved
    )
    return replace(found, name=found.name + BRIDGED, is_bridged=True)


def _resolve(text: str, revision: str | None) -> ModelFiles:
    if text in SHIPPED:
        folder = Path(__file__).parents[1] / SHIPPED[text]
    else:
        try:
            folder = Path(text).expanduser()
            is_there = folder.is_dir() or require_content(folder, ModelNotFound)
        except (OSError, RuntimeError) as error:  # a name that is too long; no home of that user
            if isinstance(error, ModelNotFound):
                raise
            raise ModelNotFound(f"expected a model directory or a hub id, found {text!r:.200}") from error
        if is_there and not folder.is_dir() and folder.suffix != SUFFIX:
            raise ModelNotFound(
                f"expected a model's directory, found the file {text}; give the folder it lies in"
            )
        if not is_there:
            return _from_hub_cache(text, revision)
    if revision is not None:
        raise ModelNotFound(
            f"expected no revision for the directory {text}, found {revision!r}; revisions belong to hub ids"
        )
    if folder.is_file():
        return ModelFiles(text, folder.parent, gguf=folder)
    if not require_content(folder / CONFIG, ConfigError):
        others = sorted(path.name for path in folder.glob(f"*{SUFFIX}"))
        if others:
            raise ModelNotFound(
                f"expected a model in {folder}, found no {CONFIG} but {', '.join(others)}; name one of "
                f"these: {folder / others[0]}"
            )
        raise ModelNotFound(
            f"expected a model in {folder}, found no {CONFIG}; give the folder that holds {CONFIG} and the "
            "safetensors files"
        )
    return ModelFiles(text, folder)


def hub_cache() -> Path:
    """Where Hugging Face's libraries keep what they fetch, by the same variables as they do."""
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


def _repository(name: str) -> Path:
    """Where the cache keeps a repository of the hub."""
    return hub_cache() / f"models--{name.replace('/', '--')}"


def reference_file(repository: Path, revision: str) -> Path:
    """Where the cache notes the commit that a branch or tag stands for. ModelNotFound for no revision."""
    return path_below(repository / "refs", revision, ModelNotFound, f"revision {revision!r:.80}")


def snapshot_folder(repository: Path, revision: str) -> Path:
    """Where the files of a revision of a cached repository lie; it need not be there.

    repository: its folder in the cache. revision: branch, tag or commit.
    Raises ModelNotFound for what can be no revision, and for a note of the cache that holds no commit.
    """
    reference = reference_file(repository, revision)
    commit = reference.read_text().strip() if reference.is_file() else revision
    return path_below(repository / "snapshots", commit, ModelNotFound, reference)


def _from_hub_cache(name: str, revision: str | None) -> ModelFiles:
    if name.endswith(SUFFIX) and not _repository(name).is_dir():
        beside = sorted(path.name for path in Path(name).expanduser().parent.glob(f"*{SUFFIX}"))
        there = f"; there are {', '.join(beside[:5])}" if beside else "; check the path"
        raise ModelNotFound(f"expected a GGUF file at {name}, found none{there}")
    if not _HUB_ID.fullmatch(name) or name.startswith("."):
        raise ModelNotFound(
            f"expected a model directory, a hub id such as org/name, or one of {', '.join(SHIPPED)}; "
            f"found no directory {name:.200}"
        )
    repository = _repository(name)
    wanted = revision or "main"
    command = f"mizarr models fetch {name}" + (f" --revision {revision}" if revision else "")
    if not (repository / "snapshots").is_dir():
        near = nearest(name, [*cached_models(), *SHIPPED])
        hint = f"; nearest there is {near!r}" if near else ""
        raise ModelNotFound(
            f"{name} is no directory, and not in the local cache {hub_cache()}{hint}; fetch it: {command}"
        )
    folder = snapshot_folder(repository, wanted)
    if not (folder / CONFIG).is_file():
        held = sorted(path.name[:12] for path in (repository / "snapshots").iterdir())
        raise ModelNotFound(
            f"{name} is cached, but not its revision {wanted!r} with a {CONFIG} (cached: "
            f"{', '.join(held) or 'none'}); fetch it: {command}"
        )
    return ModelFiles(name, folder, folder.name)


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> shard, as a checkpoint's index lists them."""
    shards: Any = json_object(index, WeightsError).get("weight_map")
    names = list(shards.values()) if isinstance(shards, dict) else [shards]
    strange = [name for name in names if not isinstance(name, str) or not is_below(name) or "/" in name]
    if strange or not names:
        raise WeightsError(
            f"expected {index} to map tensors to files beside it, found "
            f"{strange[0] if strange else 'none'!r:.80}; fetch it again"
        )
    return dict(shards)


def weight_digest(path: Path, pinned: PinnedFiles) -> str:
    """`sha256:…` of a file, read once for each stamp it has. pinned: the files it is one of.

    Raises WeightsError for a file in the hub's cache whose bytes are not those its name says.
    """
    content = pinned.digest(path)
    name = named_digest(path)
    if name is not None and content != f"sha256:{name}":
        raise WeightsError(
            f"expected the bytes of {path.resolve()} to have the sha256 in its name, found {content}: it is "
            "damaged; remove it, and fetch it again"
        )
    return content

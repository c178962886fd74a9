"""`ModelSource`: the model of a pipeline node, loaded already, or by name and loaded when first needed.

Knows no prompts and no stores. Imports torch only in `load`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....pipeline.memory import setting_up
from ....store.errors import PlanError, SourceChanged
from ....store.keys import ModelIdentity
from ..architectures.architecture import Architecture
from ..networks.kernels.tuning import tuning
from .files import ModelFiles
from .reference import ModelRef

if TYPE_CHECKING:
    from ..text.tokens import Tokenizer
    from .model import Model


class ModelSource:
    """The model that a pipeline node computes with: loaded already, or by name and loaded when first needed.

    Pickling keeps the name only; another process loads the weights itself.
    """

    def __init__(self, model: ModelRef | Model | str | Path, files: ModelFiles | None = None) -> None:
        """Refer to a model; nothing is loaded.

        Arguments:
            model: a loaded model, or a reference to one.
            files: files of a model by name, if they are already resolved.
        """
        reference = ModelRef.of(model)
        self._model: Model | None = reference.loaded
        self._is_just_identified = False
        self.files: ModelFiles | None = None
        """Files of a model by name; None for a loaded model."""
        if self._model is None:
            self.files = files or reference.files()
            # The name carries trust, backend and adapter to workers.
            self.name, self.revision = self.files.name, reference.revision
            self.dtype, self.device = reference.dtype or "float32", reference.device
            self.config: Architecture = self.files.architecture()
        else:
            self.name, self.revision = self._model.name, None
            self.dtype = str(self._model.dtype).removeprefix("torch.")
            self.device = str(self._model.device)
            self.config = self._model.config

    @classmethod
    def of(cls, model: ModelSource | ModelRef | Model | str | Path, **options: Any) -> ModelSource:
        """Make a ModelSource; one that is given without options is returned unchanged.

        Arguments:
            model: a loaded model, its name, or a reference to it.
            options: options of `ModelRef`, such as dtype and device.
        """
        return model if isinstance(model, cls) and not options else cls(ModelRef.of(model, **options))

    @cached_property
    def identity(self) -> ModelIdentity:
        """Identity of the model, part of the keys of stored results.

        It is computed once; `check` raises if the model has changed since.

        Raises:
            ConfigError: for a model made in memory.
        """
        if self.files is not None:
            return self.files.identity(self.dtype)
        return self._loaded_model().require_identity()

    def expect(self, *, served: bool) -> None:
        """Raise SourceChanged, while planning, if the model no longer has its identity.

        Arguments:
            served: whether stored results will be returned without loading the model. Only then weights in
                memory are checked here; otherwise `load` checks them.
        """
        if self.files is not None or served:
            self.check()

    @contextmanager
    def just_identified(self) -> Iterator[None]:
        """In this block `check` does not compare weights in memory, which would cost 8 ms per 100 MB.

        For a call that continues right after computing `identity`, with no chance to edit weights in between.
        """
        self.identity  # noqa: B018 - computes and caches it
        try:
            self._is_just_identified = True
            yield
        finally:
            self._is_just_identified = False

    def check(self) -> None:
        """Raise SourceChanged if the files, or the weights in memory, are no longer those of `identity`."""
        if self.files is not None:
            self.files.pinned.check()
        elif (
            self._model is not None
            and not self._is_just_identified
            and self._model.require_identity() != self.identity
        ):
            raise SourceChanged(
                f"expected unchanged weights of {self.name} (identity {self.identity.short}), found weights "
                "that were edited in memory during this call; call it again with the weights as they are now"
            )

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer of the model; None for a model without tokenizer."""
        return self._loaded_model()._tokenizer if self.files is None else self.files.tokenizer()

    @cached_property
    def tokenizer_digest(self) -> str | None:
        """Digest of the tokenizer, part of the keys of results that contain words; None without tokenizer."""
        return None if self.tokenizer is None else self.tokenizer.digest

    def load(self, *, max_memory: int | None = None, beside: int = 0) -> Model:
        """Load the model, once, and check that it still has `identity` and `tokenizer_digest`.

        Arguments:
            max_memory: most bytes of weights in memory; None for the free memory of the machine.
            beside: bytes to leave free beside the weights, if `max_memory` is None; 0 for the default.

        Raises:
            SourceChanged: if the files changed, if a model that was loaded from them was edited in memory, or
                if a given model no longer has the weights of `identity`.
        """
        if self._model is not None and self.files is None:
            self.check()
            return self._model
        arguments = _LoadingArguments(self.name, self.revision, self.dtype, self.device)
        key = (arguments, self.identity, self.tokenizer_digest)
        if self._model is None:
            weight_limit = partial(self._weight_limit, max_memory, beside)
            self._model = _loaded(key, self.files, max_memory, weight_limit)
        if (edited := self._model.first_edit()) is not None:
            # Forgotten, so that the next call loads the files again.
            self._model = None
            _forget(key)
            raise SourceChanged(
                f"expected the weights of {self.name} as in its files, found {edited} edited in memory; pass "
                "the edited Model object instead of its name, or call again to load the files anew"
            )
        return self._model

    def _weight_limit(self, max_memory: int | None, beside: int) -> int | None:
        """Most bytes of weights in memory; None to let the loader decide.

        Arguments:
            max_memory: the limit, if the caller set one.
            beside: bytes to leave free beside the weights, if there is no limit; 0 to let the loader decide.
        """
        if max_memory is not None or not beside:
            return max_memory
        from .model import as_device, as_dtype
        from .residency import EVERYTHING, room_for

        itemsize = as_dtype(self.dtype).itemsize
        room = room_for(self.config, itemsize, as_device(self.device), None, self.name, beside)
        return EVERYTHING if room is None else room

    def _loaded_model(self) -> Model:
        if self._model is None:
            raise PlanError(
                f"{self!r}: expected a loaded model, found a copy in another process, which has only the "
                "model's name; read tokenizer and identity before sending it"
            )
        return self._model

    @property
    def needs(self) -> str:
        """Dask resource that a worker needs to run this model: "GPU", or "" if its device is the CPU."""
        # None takes a GPU where there is one, so it asks for one as well.
        return "" if self.device == "cpu" else "GPU"

    def provenance(self) -> dict[str, Any]:
        """Name, identity, device and tuning of the model, for the provenance record of results.

        They are no part of any key.
        """
        about = {"model": self.name, "identity": self.identity.request(), "device": self.device}
        return about | tuning()

    def for_workers(self) -> ModelSource:
        """Return this source after checking that worker processes can load its model.

        Raises:
            PlanError: for a loaded model, which cannot be sent to them.
        """
        if self.files is None:
            raise PlanError(
                f"expected a model by name, which each worker loads itself, found the loaded model "
                f"{self.name}; pass its name"
            )
        return self

    def __getstate__(self) -> dict[str, Any]:
        # Computed here: another process checks what it loads against them.
        digests = {"identity": self.identity, "tokenizer_digest": self.tokenizer_digest}
        return {**vars(self), "_model": None, "files": None, "tokenizer": None, **digests}

    def __repr__(self) -> str:
        return f"ModelSource({self.name!r}, {self.dtype})"


@dataclass(frozen=True)
class _LoadingArguments:
    """Name and options with which a model is loaded."""

    name: str
    """Hub id, directory or shipped name."""
    revision: str | None
    """Branch, tag or commit; None for main."""
    dtype: str
    """Name of the dtype that the model computes in."""
    device: str | None
    """Device name, such as "cuda:1"; None chooses a GPU if available, otherwise the CPU."""


_ModelKey = tuple[_LoadingArguments, ModelIdentity, str | None]
"""(loading arguments, identity, tokenizer digest): a name alone may refer to other files later."""


@dataclass(frozen=True)
class _CachedModel:
    """The model that was loaded last in this process, kept for the next call."""

    key: _ModelKey
    """Loading arguments, identity and tokenizer digest of the model."""
    max_memory: int | None
    """Requested memory limit of the weights, in bytes; None for no limit."""
    model: Model
    """The loaded model."""

    def serves(self, key: _ModelKey, max_memory: int | None) -> bool:
        """Whether this is the requested model, loaded as requested.

        Its memory limit must be the same, or all its weights must be in memory and within the new limit.

        Arguments:
            key: loading arguments, identity and tokenizer digest of the requested model.
            max_memory: most bytes of weights in memory; None for no limit.
        """
        if self.key != key or self.max_memory == max_memory:
            return self.key == key
        return self.model.streamed is None and (max_memory is None or self.model.weight_bytes <= max_memory)


_cache: list[_CachedModel] = []
"""Empty, or one entry: the last loaded model."""
_LOADING = threading.Lock()
"""Taken while a model is loaded, so that threads of a worker load it once."""


def _loaded(
    key: _ModelKey, files: ModelFiles | None, max_memory: int | None, weight_limit: Callable[[], int | None]
) -> Model:
    """Return the last loaded model if it is the requested one; otherwise load the model.

    Arguments:
        key: loading arguments, identity and tokenizer digest.
        files: resolved files of the model; None to resolve its name.
        max_memory: requested memory limit in bytes, part of the comparison.
        weight_limit: returns the bytes that the weights may take; called only to load.
    """
    with _LOADING:
        if not (_cache and _cache[0].serves(key, max_memory)):
            _cache.clear()  # before loading: two models may not fit in memory
            # Free memory is measured only now, after the earlier model has gone.
            _cache.append(_CachedModel(key, max_memory, _load(*key, files, weight_limit())))
        return _cache[0].model


def _forget(key: _ModelKey) -> None:
    """Drop a model from the cache, so that it is loaded again."""
    with _LOADING:
        if _cache and _cache[0].key == key:
            _cache.clear()


def _load(
    arguments: _LoadingArguments,
    identity: ModelIdentity,
    tokenizer: str | None,
    files: ModelFiles | None,
    max_memory: int | None,
) -> Model:
    name = arguments.name
    with setting_up():
        from .model import Model

        reference = ModelRef(
            name, revision=arguments.revision, dtype=arguments.dtype, device=arguments.device
        )
        model = Model.from_files(files or reference.files(), reference, max_memory=max_memory)
    if (loaded_identity := model.require_identity()) != identity:
        raise SourceChanged(
            f"expected the model {name} with identity {identity.short}, as when this run was planned, found "
            f"{loaded_identity.short}: its files were replaced, or differ on this machine; run the command "
            "again with the files as they are now"
        )
    loaded_tokenizer = None if model._tokenizer is None else model._tokenizer.digest
    if loaded_tokenizer != tokenizer:
        raise SourceChanged(
            f"expected the tokenizer of {name} with digest {(tokenizer or 'none')[:19]}, found "
            f"{(loaded_tokenizer or 'none')[:19]}: its file was replaced since this run was planned; run the "
            "command again with the files as they are now"
        )
    return model

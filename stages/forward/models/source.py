"""The model a node works with: a name that is loaded only when something must be computed, or a loaded one.

Border: files, identity and loading; knows no prompts and no stores. Never imports torch until `load`.
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
    """A model by reference, which is loaded when something must be computed, or one that is loaded already.

    Pickled it is its name: whoever needs weights elsewhere loads them there.
    """

    def __init__(self, model: ModelRef | Model | str | Path, files: ModelFiles | None = None) -> None:
        """files: of a model by name, where they are known already."""
        reference = ModelRef.of(model)
        self._model: Model | None = reference.loaded
        self._looked = False
        self.files: ModelFiles | None = None
        """None for a loaded model."""
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
        """A model as nodes work with it, itself where it is that already. options: of `ModelRef`."""
        return model if isinstance(model, cls) and not options else cls(ModelRef.of(model, **options))

    @cached_property
    def identity(self) -> ModelIdentity:
        """What results are keyed by, from the first question on; `check` tells whether it still holds.

        ConfigError for a model made in memory.
        """
        if self.files is not None:
            return self.files.identity(self.dtype)
        return self._held().require_identity()

    def expect(self, *, served: bool) -> None:
        """`check`, as a plan asks for it. Weights in memory are looked at where something stored is to be
        served for them; where it will be computed, `load` looks."""
        if self.files is not None or served:
            self.check()

    @contextmanager
    def just_identified(self) -> Iterator[None]:
        """Within: weights in memory are what `identity` found, and are not looked at again. For a call that
        asks and goes on at once, so that nobody else has a turn in between: a look costs 8 ms per 100 MB."""
        self.identity  # noqa: B018 - the look that counts
        try:
            self._looked = True
            yield
        finally:
            self._looked = False

    def check(self) -> None:
        """Raise SourceChanged if the files, or the weights in memory, are no longer those of `identity`."""
        if self.files is not None:
            self.files.pinned.check()
        elif self._model is not None and not self._looked and self._model.require_identity() != self.identity:
            raise SourceChanged(
                f"expected the weights of {self.name} as they were (model {self.identity.short}), found them "
                "changed in memory meanwhile; start again with the model as it is now"
            )

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, if it has one."""
        return self._held()._tokenizer if self.files is None else self.files.tokenizer()

    @cached_property
    def tokenizer_digest(self) -> str | None:
        """What the words of the tokenizer are known by; in the keys of results that hold words."""
        return None if self.tokenizer is None else self.tokenizer.digest

    def load(self, *, max_memory: int | None = None, beside: int = 0) -> Model:
        """The model of `identity`, with the tokenizer of `tokenizer_digest`, loaded once.

        max_memory: see `Model.from_pretrained`. beside: bytes to be left of what memory there is, if that is
        to decide. Raises SourceChanged when it is no longer there, and when somebody edited the model that
        was loaded: a model that is given is looked at as it is, one that is named is that of its files.
        """
        if self._model is not None and self.files is None:
            self.check()
            return self._model
        place = _Place(self.name, self.revision, self.dtype, self.device)
        about = (place, self.identity, self.tokenizer_digest)
        if self._model is None:
            self._model = _loaded(about, self.files, max_memory, partial(self._allowed, max_memory, beside))
        if (edited := self._model.first_edit()) is not None:
            self._model = None
            _forget(about)
            raise SourceChanged(
                f"expected the weights of {self.name} as in its files, found {edited} edited in memory; give "
                "the edited model itself instead of its name, or ask again for the model of the files"
            )
        return self._model

    def _allowed(self, max_memory: int | None, beside: int) -> int | None:
        """Bytes that weights may take: as asked, else what is free but for `beside`; None for neither."""
        if max_memory is not None or not beside:
            return max_memory
        from .model import as_device, as_dtype
        from .residency import EVERYTHING, room_for

        itemsize = as_dtype(self.dtype).itemsize
        room = room_for(self.config, itemsize, as_device(self.device), None, self.name, beside)
        return EVERYTHING if room is None else room

    def _held(self) -> Model:
        if self._model is None:
            raise PlanError(f"{self!r} was sent here by name; its tokenizer and identity stayed behind")
        return self._model

    @property
    def needs(self) -> str:
        """The resource of a worker that computes with it: a GPU, unless it was said to be on the CPU."""
        return "" if self.device == "cpu" else "GPU"

    def provenance(self) -> dict[str, Any]:
        """What a person will want to know of the model behind a result, and no key holds."""
        about = {"model": self.name, "identity": self.identity.request(), "device": self.device}
        return about | tuning()

    def for_workers(self) -> ModelSource:
        """Itself, if other processes can load this model; PlanError otherwise."""
        if self.files is None:
            raise PlanError("workers load the model themselves; pass its name instead of a loaded model")
        return self

    def __getstate__(self) -> dict[str, Any]:
        known = {"identity": self.identity, "tokenizer_digest": self.tokenizer_digest}
        return {**vars(self), "_model": None, "files": None, "tokenizer": None, **known}

    def __repr__(self) -> str:
        return f"ModelSource({self.name!r}, {self.dtype})"


@dataclass(frozen=True)
class _Place:
    """Where a model is found, and how it is computed."""

    name: str
    revision: str | None
    dtype: str
    device: str | None


_About = tuple[_Place, ModelIdentity, str | None]
"""All a model must be: where it is, its identity, since a name may get other files, and its tokenizer."""


@dataclass(frozen=True)
class _Kept:
    """A model that was loaded. max_memory: what its weights were allowed."""

    about: _About
    max_memory: int | None
    model: Model

    def serves(self, about: _About, max_memory: int | None) -> bool:
        """Whether it is what is asked for now: all of it there, if it may be."""
        if self.about != about or self.max_memory == max_memory:
            return self.about == about
        return self.model.streamed is None and (max_memory is None or self.model.weight_bytes <= max_memory)


_kept: list[_Kept] = []
"""The model that was loaded last, for the next question."""
_LOADING = threading.Lock()
"""Held while a model is read: threads of a worker that want the same one wait for the first."""


def _loaded(
    about: _About, files: ModelFiles | None, max_memory: int | None, allowed: Callable[[], int | None]
) -> Model:
    """The last loaded model if it is the one described, else the model loaded now.

    Arguments:
        about: name, identity and tokenizer digest.
        files: resolved files of the model; None to resolve its name.
        max_memory: memory limit in bytes that was asked for; part of the comparison.
        allowed: gives the bytes that the weights may take; called only to load.
    """
    with _LOADING:
        if not (_kept and _kept[0].serves(about, max_memory)):
            _kept.clear()  # before another one is read: two may be more than there is room for
            _kept.append(_Kept(about, max_memory, _load(*about, files, allowed())))
        return _kept[0].model


def _forget(about: _About) -> None:
    """Load the model anew when it is wanted next."""
    with _LOADING:
        if _kept and _kept[0].about == about:
            _kept.clear()


def _load(
    place: _Place,
    identity: ModelIdentity,
    tokenizer: str | None,
    files: ModelFiles | None,
    max_memory: int | None,
) -> Model:
    name = place.name
    with setting_up():
        from .model import Model

        reference = ModelRef(name, revision=place.revision, dtype=place.dtype, device=place.device)
        model = Model.from_files(files or reference.files(), reference, max_memory=max_memory)
    if (found := model.require_identity()) != identity:
        raise SourceChanged(
            f"expected {name} to be model {identity.short}, as when this was planned, found {found.short}: "
            "its files were replaced, or are others here; start again with the model as it is now"
        )
    words = None if model._tokenizer is None else model._tokenizer.digest
    if words != tokenizer:
        raise SourceChanged(
            f"expected the tokenizer {(tokenizer or 'none')[:19]} of {name}, found {(words or 'none')[:19]}: "
            "its file was replaced since this was planned; start again with the model as it is now"
        )
    return model

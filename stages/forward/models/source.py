"""The model a node works with: a name that is loaded only when something must be computed, or a loaded one.

Border: files, identity and loading; knows no prompts and no stores. Never imports torch until `load`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....pipeline.memory import setting_up
from ....store.arrays import shown
from ....store.errors import ConfigError, MizarrError, PlanError, SourceChanged
from ....store.keys import ModelIdentity
from ..architectures.architecture import Architecture
from ..networks.kernels.tuning import tuning
from .files import ModelFiles, resolve_runnable

if TYPE_CHECKING:
    from ..text.tokens import Tokenizer
    from .model import Model


class ModelSource:
    """A model by name (with revision, dtype and device), or one that is loaded already.

    Pickled it is its name: whoever needs weights elsewhere loads them there.
    """

    def __init__(
        self,
        model: Model | str | Path,
        *,
        revision: str | None = None,
        dtype: str | None = None,
        device: str | None = None,
        trust_layout: bool = False,
        backend: str | None = None,
        adapter: str | Path | None = None,
    ) -> None:
        self._model: Model | None = None
        self._looked = False
        self.files: ModelFiles | None = None
        """None for a loaded model."""
        if dtype is not None:
            dtype = str(dtype).removeprefix("torch.")
            if dtype not in COMPUTED_IN:
                raise ConfigError(f"expected dtype to be one of {', '.join(COMPUTED_IN)}, found {dtype!r}")
        if isinstance(model, str | Path):
            self.files = resolve_runnable(
                model, revision, trust_layout=trust_layout, backend=backend, adapter=adapter
            )
            # The name carries trust, backend and adapter to workers.
            self.name, self.revision = self.files.name, revision
            self.dtype, self.device = dtype or "float32", device
            self.config: Architecture = self.files.architecture()
        else:
            require_model(model, "a model, its hub id or its folder")
            self._model = model
            self.name, self.revision = model.name, None
            self.dtype, self.device = str(model.dtype).removeprefix("torch."), str(model.device)
            self.config = model.config

    @cached_property
    def identity(self) -> ModelIdentity:
        """What results are keyed by, from the first question on; `confirm` tells whether it still holds.

        ConfigError for a model made in memory.
        """
        if self.files is not None:
            return self.files.identity(self.dtype)
        return self._held().require_identity()

    def expect(self, *, served: bool) -> None:
        """`confirm`, as a plan asks for it. Weights in memory are looked at where something stored is to be
        served for them; where it will be computed, `load` looks."""
        if self.files is not None or served:
            self.confirm()

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

    def confirm(self) -> None:
        """Raise SourceChanged if the files, or the weights in memory, are no longer those of `identity`."""
        if self.files is not None:
            self.files.confirm(self.identity)
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
            self.confirm()
            return self._model
        place = _Place(self.name, self.revision, self.dtype, self.device)
        about = (place, self.identity, self.tokenizer_digest)
        if self._model is None:
            self._model = _loaded(about, max_memory, partial(self._allowed, max_memory, beside))
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


COMPUTED_IN = ("float32", "float16", "bfloat16", "float64")
"""Names of the dtypes that a model may compute in."""


def require_model(value: Any, expected: str = "a loaded model") -> None:
    """Raise ConfigError unless a value is a loaded model.

    expected: what may be given, as the message begins.
    """
    if not hasattr(value, "network"):
        raise ConfigError(
            f"expected {expected}, found {shown(value)}; load it: mizarr.Model.from_pretrained('specimen')"
        )


def _is_at(model: Model, revision: Any, dtype: str) -> bool:
    """Whether a loaded model has the weights of a revision of its name, a branch, tag or commit."""
    if model.identity is None:
        return False
    try:
        files = resolve_runnable(model.name, revision)
    except MizarrError:
        return False
    return model.identity == files.identity(dtype, model.identity.attention)


def require_by_name(model: Any, given: Mapping[str, Any]) -> None:
    """Raise ConfigError where a loaded model comes with arguments of loading that it was not loaded with."""
    if isinstance(model, str | Path):
        return
    require_model(model, "a model, its hub id or its folder")
    own = {"dtype": str(model.dtype).removeprefix("torch."), "device": str(model.device)}
    for name, value in given.items():
        said = str(value).removeprefix("torch.")
        is_own = own.get(name) == said or (name == "device" and own[name].startswith(f"{said}:"))
        if name == "revision" and value is not None:
            is_own = _is_at(model, value, own["dtype"])
        if value is not None and not is_own:
            raise ConfigError(
                f"expected {name} beside a model's name, found {name}={shown(value)} beside a loaded model; "
                "give it to mizarr.Model.from_pretrained, or leave it out"
            )


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


def _loaded(about: _About, max_memory: int | None, allowed: Callable[[], int | None]) -> Model:
    """The model, loaded or kept. allowed: what its weights may take, asked if it is loaded."""
    with _LOADING:
        if not (_kept and _kept[0].serves(about, max_memory)):
            _kept.clear()  # before another one is read: two may be more than there is room for
            _kept.append(_Kept(about, max_memory, _load(*about, allowed())))
        return _kept[0].model


def _forget(about: _About) -> None:
    """Load the model anew when it is wanted next."""
    with _LOADING:
        if _kept and _kept[0].about == about:
            _kept.clear()


def _load(place: _Place, identity: ModelIdentity, tokenizer: str | None, max_memory: int | None) -> Model:
    name = place.name
    with setting_up():
        from .model import Model

        model = Model.from_pretrained(
            name, revision=place.revision, dtype=place.dtype, device=place.device, max_memory=max_memory
        )
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

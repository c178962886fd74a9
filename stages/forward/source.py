"""The model a node works with: a name that is loaded only when something must be computed, or a loaded one.

Border: files, identity and loading; knows no prompts and no stores. Never imports torch until `load`.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...store.errors import PlanError
from ...store.keys import ModelIdentity
from .config import TransformerConfig
from .files import ModelFiles, resolve

if TYPE_CHECKING:
    from .model import Model
    from .tokens import Tokenizer


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
    ) -> None:
        self._model: Model | None = None
        self.files: ModelFiles | None = None
        """None for a loaded model."""
        if isinstance(model, str | Path):
            self.files = resolve(str(model), revision, trust_layout=trust_layout)
            self.name, self.revision = self.files.name, revision  # the name carries the trust to workers
            self.dtype, self.device = dtype or "float32", device
            self.config: TransformerConfig = self.files.transformer_config()
        else:
            self._model = model
            self.name, self.revision = model.name, None
            self.dtype, self.device = str(model.dtype).removeprefix("torch."), str(model.device)
            self.config = model.config

    @cached_property
    def identity(self) -> ModelIdentity:
        """What results are keyed by; ConfigError for a model made in memory."""
        return self.load().require_identity() if self.files is None else self.files.identity(self.dtype)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, if it has one."""
        return self.load()._tokenizer if self.files is None else self.files.tokenizer()

    def load(self) -> Model:
        """The model, loaded once."""
        if self._model is None:
            self._model = _loaded(self.name, self.revision, self.dtype, self.device)
        return self._model

    def for_workers(self) -> ModelSource:
        """Itself, if other processes can load this model; PlanError otherwise."""
        if self.files is None:
            raise PlanError(
                "workers of a cluster load the model themselves; pass its name instead of a loaded model"
            )
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_model": None, "files": None, "tokenizer": None, "identity": self.identity}

    def __repr__(self) -> str:
        return f"ModelSource({self.name!r}, {self.dtype})"


@lru_cache(maxsize=1)
def _loaded(name: str, revision: str | None, dtype: str, device: str | None) -> Model:
    from .model import Model

    return Model.from_pretrained(name, revision=revision, dtype=dtype, device=device)

"""`ModelRef`: a model and its loading options, as one value for functions, commands and nodes.

Opens no weights and never imports torch; numpy is imported only when a value is checked, because the help of
commands is generated from these fields.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....store.errors import ConfigError, MizarrError
from ...options import option, options_of

if TYPE_CHECKING:
    from .files import ModelFiles

__all__ = ["COMPUTED_IN", "ModelRef", "require_model"]

COMPUTED_IN = ("float32", "float16", "bfloat16", "float64")
"""Names of the dtypes that a model may compute in."""


@dataclass(frozen=True)
class ModelRef:
    """A model, by name or already loaded, with the options for loading it.

    Raises:
        ConfigError: for an invalid option, and for an option that a given loaded model was not loaded with.
    """

    model: Any
    """A loaded `Model`; or a hub id, a directory, or the name of a model that ships with mizarr."""

    revision: str | None = option(None, "Branch, tag or commit of a hub id; default main.", metavar="NAME")
    dtype: str | None = option(
        None, "Dtype that the model computes in; default float32.", choices=COMPUTED_IN
    )
    device: str | None = option(None, "cpu, cuda or cuda:1; default a GPU where there is one.")
    trust_layout: bool = option(
        False,
        "Run a model of unknown family without checking it against transformers; its results are marked.",
    )
    backend: str | None = option(
        None,
        "Implementation of the model: mizarr's own (native), or transformers behind a bridge; default what "
        "the model's name says.",
        choices=("native", "transformers"),
    )
    adapter: str | Path | None = option(
        None,
        "Folder of a LoRA adapter, as PEFT saves it, to merge into the weights; default what the model's "
        "name says.",
        kind="folder",
    )

    def __post_init__(self) -> None:
        from ....store.arrays import require_flag

        if self.dtype is not None:
            # A torch dtype is accepted as well, without importing torch here.
            name = str(self.dtype).removeprefix("torch.")
            object.__setattr__(self, "dtype", name)
            if name not in COMPUTED_IN:
                raise ConfigError(f"expected dtype to be one of {', '.join(COMPUTED_IN)}, found {name!r}")
        require_flag(self.trust_layout, "trust_layout")
        if not isinstance(self.model, str | Path):
            self._require_as_loaded()

    @classmethod
    def of(cls, model: Any, **options: Any) -> ModelRef:
        """Make a reference to a model with options for loading it.

        Arguments:
            model: a loaded `Model`, its name or folder, or a reference, which is copied with these options.
            options: fields of `ModelRef`, such as dtype and device.
        """
        if isinstance(model, ModelRef) and not options:
            return model  # checked already: the check of a loaded model's revision digests files
        return replace(model, **options) if isinstance(model, ModelRef) else cls(model, **options)

    @property
    def loaded(self) -> Any:
        """The loaded `Model`; None for a model by name."""
        return None if isinstance(self.model, str | Path) else self.model

    def files(self) -> ModelFiles:
        """The files of a model by name.

        Raises:
            ModelNotFound: if there is no such model.
            ConfigError: for a loaded model, or invalid options.
        """
        from ....store.arrays import require_kind
        from .files import resolve_runnable

        require_kind(self.model, (str, Path), "a model by name", "write 'org/name', or a folder")
        return resolve_runnable(
            self.model,
            self.revision,
            trust_layout=self.trust_layout,
            backend=self.backend,
            adapter=self.adapter,
        )

    def _require_as_loaded(self) -> None:
        """Raise ConfigError for options that the given loaded model was not loaded with."""
        from ....store.arrays import shown

        require_model(self.model, "a model, its hub id or its folder")
        actual = {"dtype": str(self.model.dtype).removeprefix("torch."), "device": str(self.model.device)}
        for item in options_of(ModelRef):
            name, value = item.name, getattr(self, item.name)
            if value == item.default:
                continue
            # "cuda" stands for any index, such as "cuda:0".
            matches = actual.get(name) == value or (name == "device" and actual[name].startswith(f"{value}:"))
            # A loaded model knows no revision: its weights must be those of the files.
            if name == "revision":
                matches = _is_at(self.model, value, actual["dtype"])
            if not matches:
                raise ConfigError(
                    f"expected {name} together with the name of a model, found {name}={shown(value)} "
                    "together with a loaded model; pass it to mizarr.Model.from_pretrained, or leave it out"
                )


def require_model(value: Any, expected: str = "a loaded model") -> None:
    """Raise ConfigError unless a value is a loaded model.

    Arguments:
        value: any value.
        expected: words for the accepted values, for the message.
    """
    if not hasattr(value, "network"):
        from ....store.arrays import shown

        raise ConfigError(
            f"expected {expected}, found {shown(value)}; load it: mizarr.Model.from_pretrained('specimen')"
        )


def _is_at(model: Any, revision: Any, dtype: str) -> bool:
    """Whether a loaded model has the weights that its name has at a branch, tag or commit."""
    from .files import resolve_runnable

    if model.identity is None:
        return False
    try:
        files = resolve_runnable(model.name, revision)
    except MizarrError:
        return False
    return bool(model.identity == files.identity(dtype, model.identity.attention))

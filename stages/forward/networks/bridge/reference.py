"""A checkpoint as transformers loads it: offline, without foreign code, eager, from safetensors alone.

Border: a folder in, a module out; what is inside of it nobody here knows. Importing this module imports
neither torch nor transformers.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .....store.errors import ConfigError, WeightsError
from ..weights import is_finite

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["chosen_class", "load_reference", "quiet", "version", "witness"]

_QUANTIZED = ("quantization_config", "compression_config")


def version() -> str | None:
    """The version of the transformers that is installed, without importing it; None where there is none."""
    try:
        if importlib.util.find_spec("transformers") is None:
            return None
        return importlib.metadata.version("transformers")
    except ImportError:
        return None


def witness() -> str | None:
    """The installed transformers by name and version; None where there is none."""
    found = version()
    return None if found is None else f"transformers {found}"


def chosen_class(raw: Mapping[str, Any]) -> tuple[str, bool]:
    """(class that computes a checkpoint, whether it is a causal one): what `architectures` names, if it is a
    language model of this type, or the text model of one; else the causal one, unless the type has a masked
    one and is no decoder.

    Raises ConfigError for a type transformers lists as neither.
    """
    auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    model_type = str(raw.get("model_type"))
    causals, maskeds = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    causal, masked = causals.get(model_type), maskeds.get(model_type)
    named = raw.get("architectures")
    first = str(named[0]) if isinstance(named, list) and named else ""
    if causal is None and masked is None:
        listed = {**dict.fromkeys(maskeds.values(), False), **dict.fromkeys(causals.values(), True)}
        if first in listed and _config_type(first) == model_type:
            return first, listed[first]
        raise ConfigError(
            f"expected a model_type that {witness()} lists as a causal or masked language model, found "
            f"{model_type!r}; the bridge runs no other"
        )
    if causal is not None and first == causal:
        return causal, True
    if masked is not None and (first == masked or causal is None or raw.get("is_decoder") is not True):
        return masked, False
    return str(causal), True


def load_reference(
    directory: Path, raw: Mapping[str, Any], class_name: str, *, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """The model in evaluation mode, that keeps nothing between passes.

    raw: config.json. Raises ConfigError where transformers cannot make it, or would read more than these
    files; WeightsError unless the checkpoint holds every weight, in its shape and finite.
    """
    import torch

    _require_plain(directory, raw)
    transformers: Any = importlib.import_module("transformers")
    kind, told = getattr(transformers, class_name), {"local_files_only": True, "trust_remote_code": False}
    try:
        with quiet(), torch.random.fork_rng(devices=[]):
            described = transformers.AutoConfig.from_pretrained(str(directory), **told)
            module, how = kind.from_pretrained(
                str(directory),
                config=described,
                local_files_only=True,
                use_safetensors=True,
                dtype=dtype,
                attn_implementation="eager",
                output_loading_info=True,
            )
    except Exception as error:
        raise ConfigError(
            f"expected {witness()} to load {class_name} from {directory}, found that it cannot "
            f"({in_one_line(error)})"
        ) from error
    _require_whole(how, class_name)
    for each in (module.config, module.config.get_text_config()):
        each.use_cache = False
    module = module.to(device).eval().requires_grad_(False)
    for name, weight in module.named_parameters():
        if not is_finite(weight):
            raise WeightsError(
                f"expected finite weights, found NaN or infinite values in {name!r}; the checkpoint is "
                "damaged, fetch it again"
            )
    found: nn.Module = module
    return found


def in_one_line(error: BaseException) -> str:
    """What foreign code says went wrong."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


@contextmanager
def quiet() -> Iterator[None]:
    """transformers says nothing: its bars and warnings are about a model nobody asked it for."""
    import warnings

    logging: Any = importlib.import_module("transformers.utils.logging")
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()

    def set_back() -> None:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()

    try:
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        try:
            set_back()
        except BaseException:  # interrupted
            set_back()
            raise


def _config_type(class_name: str) -> str | None:
    """The model_type of the configuration a class is made of."""
    kind = getattr(importlib.import_module("transformers"), class_name, None)
    found: str | None = getattr(getattr(kind, "config_class", None), "model_type", None)
    return found


def _require_plain(directory: Path, raw: Mapping[str, Any]) -> None:
    """Raise ConfigError for what reads files no identity covers, or computes in numbers of its own."""
    for key in _QUANTIZED:
        if raw.get(key) is not None:
            raise ConfigError(
                f"expected unquantised weights, found {key} in config.json; fetch the model's unquantised "
                "checkpoint"
            )
    if (directory / "adapter_config.json").is_file():
        raise ConfigError(
            f"expected a whole model in {directory}, found adapter_config.json; merge the adapter into its "
            "base model and save that"
        )


def _require_whole(how: Mapping[str, Any], class_name: str) -> None:
    """Raise WeightsError for weights that transformers would make up."""
    for key, what in (("missing_keys", "no"), ("mismatched_keys", "another shape of")):
        names = sorted(str(each[0] if isinstance(each, tuple) else each) for each in how.get(key) or ())
        if names:
            rest = f" (and {len(names) - 1} more)" if names[1:] else ""
            raise WeightsError(
                f"expected every weight of {class_name} in the checkpoint, found {what} {names[0]!r}{rest}, "
                "which would be drawn at random; name the class it was saved from in config.json's "
                "architectures, or fetch it again"
            )

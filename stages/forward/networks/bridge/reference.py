"""Load a checkpoint with transformers: offline, without remote code, eager attention, safetensors only.

Border: a folder in, a module out, whose structure is unknown here. Importing this file imports neither torch
nor transformers.
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
from ...architectures.heads import class_name, needs_tensors
from ..weights import is_finite

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["chosen_class", "load_reference", "quiet", "version", "witness"]

_QUANTIZED = ("quantization_config", "compression_config")


def version() -> str | None:
    """Version of the installed transformers, read without importing it; None without transformers."""
    try:
        if importlib.util.find_spec("transformers") is None:
            return None
        return importlib.metadata.version("transformers")
    except ImportError:
        return None


def witness() -> str | None:
    """Name and version of the installed transformers, "transformers 5.0"; None if it is not installed."""
    installed = version()
    return None if installed is None else f"transformers {installed}"


def chosen_class(raw: Mapping[str, Any]) -> tuple[str, bool]:
    """Name of the transformers class that runs a checkpoint, and whether it is a causal language model.

    That is the class in `architectures` of config.json if it is a language model of this model_type, or the
    text model of one; else the causal class, unless the type has a masked class and `is_decoder` is not set.

    Arguments:
        raw: contents of config.json.

    Raises:
        ConfigError: transformers lists the type neither as causal nor as masked language model, or the class
            is no language model.
    """
    if needs_tensors(raw):
        raise ConfigError(
            f"expected a language model for backend='transformers', found the class {class_name(raw)}; leave "
            "the backend out, as mizarr's own networks run base models and classifiers of known families"
        )
    auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    model_type = str(raw.get("model_type"))
    # Both tables: model_type -> name of a class.
    causal_classes = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    masked_classes = auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    causal, masked = causal_classes.get(model_type), masked_classes.get(model_type)
    name = class_name(raw)
    if causal is None and masked is None:
        is_causal = dict.fromkeys(masked_classes.values(), False)
        is_causal |= dict.fromkeys(causal_classes.values(), True)
        if name in is_causal and _config_type(name) == model_type:
            return name, is_causal[name]
        raise ConfigError(
            f"expected a model_type that {witness()} lists as a causal or masked language model, found "
            f"{model_type!r}; choose a model of such a type"
        )
    if causal is not None and name == causal:
        return causal, True
    if masked is not None and (name == masked or causal is None or raw.get("is_decoder") is not True):
        return masked, False
    return str(causal), True


def load_reference(
    directory: Path, raw: Mapping[str, Any], class_name: str, *, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """Load a model with transformers, in evaluation mode and without key-value cache.

    Arguments:
        directory: folder of the checkpoint.
        raw: contents of its config.json.
        class_name: name of the transformers class.
        dtype: dtype of the weights.
        device: device of the weights.

    Raises:
        ConfigError: transformers cannot load it, or would read files besides the checkpoint.
        WeightsError: a weight is missing, has another shape or is not finite.
    """
    import torch

    _require_plain(directory, raw)
    transformers: Any = importlib.import_module("transformers")
    model_class = getattr(transformers, class_name)
    offline = {"local_files_only": True, "trust_remote_code": False}
    try:
        with quiet(), torch.random.fork_rng(devices=[]):
            config = transformers.AutoConfig.from_pretrained(str(directory), **offline)
            module, loading_info = model_class.from_pretrained(
                str(directory),
                config=config,
                local_files_only=True,
                use_safetensors=True,
                dtype=dtype,
                attn_implementation="eager",
                output_loading_info=True,
            )
    except Exception as error:
        raise ConfigError(
            f"expected {witness()} to load the model class {class_name} from {directory}, found an error "
            f"({in_one_line(error)}); check the folder, or install the version of transformers that wrote it"
        ) from error
    _require_whole(loading_info, class_name)
    for config in (module.config, module.config.get_text_config()):
        config.use_cache = False
    module = module.to(device).eval().requires_grad_(False)
    for name, weight in module.named_parameters():
        if not is_finite(weight):
            raise WeightsError(
                f"expected finite weights, found NaN or infinite values in the tensor {name!r}; the "
                "checkpoint is damaged, so fetch it again"
            )
    loaded: nn.Module = module
    return loaded


def in_one_line(error: BaseException) -> str:
    """Error type and message on a single line of at most 300 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


@contextmanager
def quiet() -> Iterator[None]:
    """Context in which transformers shows no progress bars and no warnings."""
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
    """model_type of the configuration that a transformers class takes; None if the class has none."""
    model_class = getattr(importlib.import_module("transformers"), class_name, None)
    model_type: str | None = getattr(getattr(model_class, "config_class", None), "model_type", None)
    return model_type


def _require_plain(directory: Path, raw: Mapping[str, Any]) -> None:
    """Raise ConfigError for quantised checkpoints, and for adapters, whose base model no digest covers."""
    for key in _QUANTIZED:
        if raw.get(key) is not None:
            raise ConfigError(
                f"expected unquantised weights for backend='transformers', found {key} in config.json; fetch "
                "the model's unquantised checkpoint"
            )
    if (directory / "adapter_config.json").is_file():
        raise ConfigError(
            f"expected a whole model in {directory}, found adapter_config.json; merge the adapter into its "
            "base model and save that"
        )


def _require_whole(loading_info: Mapping[str, Any], class_name: str) -> None:
    """Raise WeightsError for weights that transformers would initialise at random."""
    for key, problem in (("missing_keys", "no"), ("mismatched_keys", "another shape of")):
        entries = loading_info.get(key) or ()
        names = sorted(str(entry[0] if isinstance(entry, tuple) else entry) for entry in entries)
        if names:
            more = f" (and {len(names) - 1} more)" if names[1:] else ""
            raise WeightsError(
                f"expected the checkpoint to hold every weight of {class_name}, found {problem} "
                f"{names[0]!r}{more}, which transformers would draw at random; write the class that the "
                "checkpoint was saved from into `architectures` of config.json, or fetch the checkpoint again"
            )

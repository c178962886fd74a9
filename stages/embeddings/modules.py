"""Reads the modules of a sentence encoder: pooling, dense layers and normalisation behind a transformer.

sentence-transformers (Reimers and Gurevych 2019, "Sentence-BERT") writes modules.json, which lists a folder
for each module, and beside it how texts are prepared: prompts, largest number of tokens, lower case. Keys
that change an embedding and are not implemented are errors.

Border: files and plain values; `embed.py` computes. Imports torch only to read the weights of dense layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...pipeline.pinned import FileResource, OpenResource, PinnedFiles
from ...store.errors import ConfigError, SourceChanged, nearest
from ...store.exchange.outside import json_file, json_object, path_below, require_content
from ..forward.checkpoints.checkpoint import Checkpoint
from ..forward.models.files import MODULES, PICKLED, WEIGHTS, weight_digest

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["POOLINGS", "Dense", "LayerFiles", "SentenceModules", "read_modules", "require_pooling"]

POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
"""Names of the poolings, in the order in which several of them are joined."""
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid", "SiLU")
"""Classes of torch.nn that a dense layer may have as activation."""
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Keys of older files -> the pooling that they switch on."""
_SENTENCE = "sentence_embedding"
_PLAIN: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "Pooling": {},
    "Dense": {
        "module_input_name": (_SENTENCE,),
        "module_output_name": (_SENTENCE, None),
        "use_residual": (False,),
    },
    "Normalize": {"module_input_name": (_SENTENCE,), "module_output_name": (_SENTENCE, None)},
    "Transformer": {
        "transformer_task": ("feature-extraction",),
        "module_output_name": ("token_embeddings",),
    },
    "SentenceTransformer": {"model_type": ("SentenceTransformer",), "truncate_dim": (None,)},
}
"""Module -> key -> values with which it changes nothing; other values are not implemented."""
_READ: Mapping[str, tuple[str, ...]] = {
    "Pooling": ("word_embedding_dimension", "embedding_dimension", "pooling_mode", "include_prompt", *_FLAGS),
    "Dense": ("in_features", "out_features", "bias", "activation_function"),
    "Normalize": (),
    "Transformer": ("max_seq_length", "do_lower_case", "modality_config"),
    "SentenceTransformer": ("__version__", "prompts", "default_prompt_name", "similarity_fn_name"),
}
"""Module -> keys of its file that are read, or describe something else than an embedding."""


@dataclass(frozen=True)
class Dense:
    """An affine map of embeddings, followed by an activation."""

    file: Path = field(compare=False)
    """File of its tensors "linear.weight" and "linear.bias"."""
    content: str
    """`sha256:…` of that file."""
    activation: str
    """Class of torch.nn, one of ACTIVATIONS."""
    n_in: int
    """Width of its input."""
    n_out: int
    """Width of its output."""
    has_bias: bool
    """Whether it adds a bias."""


@dataclass(frozen=True)
class LayerFiles(FileResource):
    """What follows the pooling, as a resource of a stage: dense layers and normalisations, in order."""

    layers: tuple[Dense | None, ...] = ()
    """Dense layers; None stands for a normalisation to length 1."""

    def identity(self) -> dict[str, Any]:
        """The values that determine every number of the layers, for keys."""
        described = [
            "normalize" if layer is None else [layer.content, layer.activation, layer.has_bias]
            for layer in self.layers
        ]
        return {"layers": described}

    def opened_anew(self) -> OpenResource:
        """Read the weights: for each dense layer (weight float64 [out, in], bias [out], activation).

        Raises:
            SourceChanged: A file has other content than when it was planned.
            ConfigError: A file lacks a tensor, or has one of another shape.
        """
        files = PinnedFiles("the sentence encoder")
        opened: list[tuple[Tensor, Tensor, str] | None] = []
        for layer in self.layers:
            if layer is not None and weight_digest(layer.file, files) != layer.content:
                raise SourceChanged(
                    f"the file {layer.file} changed since this command was planned; run it again with the "
                    "files as they are now"
                )
            opened.append(None if layer is None else _weights(layer))
        return OpenResource(opened, files)


@dataclass(frozen=True)
class SentenceModules:
    """How a sentence encoder turns a text into tokens, and their final states into one vector."""

    poolings: tuple[str, ...]
    """Names among POOLINGS; the vectors of several are joined."""
    width: int | None = None
    """Width of the states that the pooling expects; None for any."""
    includes_prompt: bool = True
    """Whether the tokens of the prompt are pooled, too."""
    layers: LayerFiles = LayerFiles()
    """Dense layers and normalisations behind the pooling."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Name -> text that is put in front of each text."""
    default_prompt: str | None = None
    """Name of the prompt that is used if the caller names none; None for no prompt."""
    max_tokens: int | None = None
    """Most tokens of a text with its special tokens, by sentence_bert_config.json; None if it names none."""
    lowers_case: bool = False
    """Whether texts are read in lower case."""


class _Settings:
    """One JSON file of a module, whose keys are checked."""

    def __init__(self, path: Path, module: str) -> None:
        """Read the file.

        Arguments:
            path: the file; an absent one has no keys.
            module: name of the module's class, a key of _READ.

        Raises:
            ConfigError: for no JSON object, and for a key that is not implemented.
        """
        self.path = path
        self.values = json_object(path, ConfigError) if require_content(path, ConfigError) else {}
        for key, value in self.values.items():
            accepted = _PLAIN[module].get(key, (None, False))
            if key not in _READ[module] and value not in accepted:
                raise self.refusal(key, " or ".join(map(repr, accepted)))

    def typed(self, key: str, kind: type[Any], default: Any) -> Any:
        """Value of a key, or the default if it is absent or null; ConfigError for another type."""
        value = self.values.get(key)
        # Not isinstance, as a bool is an int to Python.
        if value is not None and type(value) is not kind:
            raise self.refusal(key, {int: "an integer", bool: "true or false", dict: "an object"}[kind])
        return default if value is None else value

    def refusal(self, key: str, expected: str) -> ConfigError:
        """ConfigError for a key with another value than expected."""
        return ConfigError(
            f"{self.path}: expected {key} to be {expected}, found {self.values.get(key)!r:.60}, which is not "
            "implemented; capture the final states with mizarr.capture, and compute the rest from them"
        )


def require_pooling(pooling: str) -> str:
    """The name of a pooling; ConfigError, with the nearest name, for another text."""
    if pooling not in POOLINGS:
        near = nearest(str(pooling), POOLINGS)
        hint = f"; nearest is {near!r}" if near else ""
        raise ConfigError(f"expected pooling to be one of {', '.join(POOLINGS)}, found {pooling!r:.60}{hint}")
    return pooling


def read_modules(transformer: Path) -> SentenceModules | None:
    """Read the modules behind a transformer.

    Arguments:
        transformer: folder of config.json and weights: the folder of the encoder, or one inside it.

    Returns:
        The modules; None where there is no modules.json, as for a plain model.

    Raises:
        ConfigError: for files that are damaged, or that ask for something that is not implemented.
    """
    found = _listed_modules(transformer)
    if found is None:
        return None
    root, listed = found
    kinds = [kind for kind, _ in listed]
    if kinds[:2] != ["Transformer", "Pooling"] or not set(kinds[2:]) <= {"Dense", "Normalize"}:
        raise ConfigError(
            f"{root / MODULES}: expected type of the modules to be Transformer, Pooling, then Dense or "
            f"Normalize, found {', '.join(kinds)}, which is not implemented; capture the final states with "
            "mizarr.capture, and compute the rest from them"
        )
    pooling = _Settings(listed[1][1] / "config.json", "Pooling")
    whole = _Settings(root / "config_sentence_transformers.json", "SentenceTransformer")
    prompts, default = whole.typed("prompts", dict, {}), whole.values.get("default_prompt_name")
    if not all(isinstance(text, str) for text in prompts.values()):
        raise whole.refusal("prompts", "texts by name")
    if default is not None and default not in prompts:
        raise whole.refusal("default_prompt_name", f"one of {', '.join(prompts) or 'no prompts'}")
    text = _text_settings(listed[0][1])
    return SentenceModules(
        _poolings(pooling),
        pooling.typed("word_embedding_dimension", int, pooling.typed("embedding_dimension", int, None)),
        pooling.typed("include_prompt", bool, True),
        LayerFiles(tuple(_layer(kind, folder) for kind, folder in listed[2:])),
        prompts,
        default,
        text.typed("max_seq_length", int, None),
        text.typed("do_lower_case", bool, False),
    )


def _listed_modules(transformer: Path) -> tuple[Path, list[tuple[str, Path]]] | None:
    """Folder of the encoder, and (class, folder) of each module; None without a modules.json.

    Arguments:
        transformer: folder of the transformer.

    Raises:
        ConfigError: for entries of another form, and for classes of other packages.
    """
    for root in (transformer, transformer.parent):
        path = root / MODULES
        if not require_content(path, ConfigError):
            continue
        listed = []
        entries = json_file(path, ConfigError)
        for entry in entries if isinstance(entries, list) else [entries]:
            kind, name = (entry.get("type"), entry.get("path")) if isinstance(entry, dict) else (None, None)
            own = "sentence_transformers."
            if not isinstance(kind, str) or not kind.startswith(own) or entry.get("kwargs"):
                raise ConfigError(
                    f"{path}: expected type of each module to be a class of sentence_transformers, without "
                    f"kwargs, found {entry!r:.120}, which is not implemented; capture the final states with "
                    "mizarr.capture, and compute the rest from them"
                )
            folder = root if name == "" else path_below(root, name, ConfigError, path)
            listed.append((kind.rpartition(".")[2], folder))
        if listed and listed[0][1].resolve() == transformer.resolve():
            return root, listed
    return None


def _poolings(settings: _Settings) -> tuple[str, ...]:
    """Names of the poolings that 1_Pooling/config.json switches on; "mean" if it names none."""
    mode = settings.values.get("pooling_mode")
    if mode is None:
        flags = [name for key, name in _FLAGS.items() if settings.typed(key, bool, False)]
        return tuple(flags) or ("mean",)
    modes = mode if isinstance(mode, list) else [mode]
    if not modes or not set(map(str, modes)) <= set(POOLINGS):
        raise settings.refusal("pooling_mode", f"among {', '.join(POOLINGS)}")
    return tuple(modes)


def _text_settings(transformer: Path) -> _Settings:
    """Settings by which the transformer module reads texts; ConfigError for another modality than text."""
    settings = _Settings(transformer / "sentence_bert_config.json", "Transformer")
    plain = {"method": "forward", "method_output_name": "last_hidden_state"}
    modalities = settings.typed("modality_config", dict, {"text": plain})
    if modalities.get("text") != plain:
        raise settings.refusal("modality_config", f"{plain} for text")
    return settings


def _layer(kind: str, folder: Path) -> Dense | None:
    """The dense layer in a folder; None for a normalisation."""
    if kind == "Normalize":
        _Settings(folder / "config.json", kind)
        return None
    settings = _Settings(folder / "config.json", "Dense")
    # The default of sentence-transformers, where the key is absent.
    written = settings.values.get("activation_function", "torch.nn.modules.activation.Tanh")
    package, _, activation = str(written).rpartition(".")
    if not package.startswith("torch.nn.modules") or activation not in ACTIVATIONS:
        raise settings.refusal("activation_function", f"a class of torch.nn among {', '.join(ACTIVATIONS)}")
    file = next((folder / name for name in (WEIGHTS, PICKLED) if (folder / name).is_file()), None)
    if file is None:
        raise ConfigError(
            f"expected {WEIGHTS} or {PICKLED} in {folder}, found neither; fetch the model again"
        )
    n_in, n_out = (settings.typed(key, int, None) for key in ("in_features", "out_features"))
    content = weight_digest(file, PinnedFiles(str(folder)))
    return Dense(file, content, activation, n_in, n_out, settings.typed("bias", bool, True))


def _weights(layer: Dense) -> tuple[Tensor, Tensor, str]:
    """Weight float64 [out, in], bias float64 [out] (zeros without one) and activation of a dense layer.

    Raises:
        ConfigError: for an absent tensor, or one of another shape than config.json states.
    """
    import torch

    checkpoint = Checkpoint((layer.file,))
    expected: dict[str, tuple[int, ...]] = {"linear.weight": (layer.n_out, layer.n_in)}
    expected |= {"linear.bias": (layer.n_out,)} if layer.has_bias else {}
    shapes = checkpoint.shapes
    if shapes != expected:
        raise ConfigError(
            f"expected the tensors {expected} in {layer.file}, as its config.json states, found {shapes}; "
            "fetch the model again"
        )
    with checkpoint.opened() as take:
        weight = take("linear.weight").double()
        bias = take("linear.bias").double() if layer.has_bias else torch.zeros(layer.n_out).double()
    return weight, bias, layer.activation

"""Which head a checkpoint has, and the prefix of its tensors: from the class in config.json and the tensors.

Checkpoints of one family differ in what the model computes from its final states: logits of the vocabulary
(`LlamaForCausalLM`), labels of a prompt or of each token (`…ForSequenceClassification`,
`…ForTokenClassification`; one label is a regression, such as a reward), or nothing (`LlamaModel`). A base
model's own files also lack the prefix of its tensors, such as "model.", that files of all other classes have.

Names, activations and positions are those of Hugging Face transformers.

Border: never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ....store.errors import ConfigError
from .architecture import Architecture, HeadSpec, HeadTransform
from .composed import ComposedArchitecture
from .families import ACTIVATIONS
from .transformer import TRY_TRANSFORMERS, ConfigReader

__all__ = ["class_name", "is_encoder_class", "needs_tensors", "with_head"]

TensorShapes = Mapping[str, tuple[int, ...]]
Task = Literal["vocabulary", "sequence", "token", "none"]
_OTHER_ENDINGS = ("ForQuestionAnswering", "ForMultipleChoice", "ForNextSentencePrediction")
"""Ends of the names of classes whose heads are not implemented."""
_LANGUAGE_MODELS = ("LMHeadModel", "DoubleHeadsModel", "MTModel")
"""Ends of the names of language models that end with "Model" like base models."""
_ACTIVATIONS: Mapping[str, tuple[str, str]] = {
    "deberta": ("pooler_hidden_act", "gelu"),
    "deberta-v2": ("pooler_hidden_act", "gelu"),
    "distilbert": ("", "relu"),
    "electra": ("", "gelu"),
    "eurobert": ("", "gelu"),
    "roformer": ("hidden_act", "gelu"),
}
"""model_type -> (config key, default) of the activation between the two maps to labels; "" for no key. Other
families have tanh."""
_POOLING: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "eurobert": ("late", {"bos": "first", "mean": "mean"}),
    "modernbert": ("cls", {"cls": "first", "mean": "mean"}),
}
"""model_type -> (default of classifier_pooling, its values -> `HeadSpec.reads`)."""


@dataclass(frozen=True)
class _Maps:
    """Names of the tensors from final states to labels, without ".weight"; "" for a map that is absent."""

    out: str
    """Map to the labels."""
    dense: str = ""
    """Dense map before it."""
    norm: str = ""
    """Norm of the dense map's output after its activation."""


def class_name(raw: Mapping[str, Any]) -> str:
    """Name of the class that wrote a checkpoint, from `architectures` in its config.json; "" without one."""
    listed = raw.get("architectures")
    return listed[0] if isinstance(listed, list) and listed and isinstance(listed[0], str) else ""


def is_encoder_class(name: str) -> bool:
    """Whether a class of an encoder-decoder family holds the encoder only, as `T5EncoderModel` does."""
    return name.endswith(("EncoderModel", "ForTokenClassification"))


def needs_tensors(raw: Mapping[str, Any]) -> bool:
    """Whether config.json alone does not say which head a checkpoint has."""
    return _task(class_name(raw)) != "vocabulary"


def _task(name: str) -> Task:
    """What a class of transformers computes from final states; a language head if its name does not say."""
    if name.endswith("ForSequenceClassification"):
        return "sequence"
    if name.endswith("ForTokenClassification"):
        return "token"
    is_base = name.endswith(("Model", "BertGenerationEncoder")) and not name.endswith(_LANGUAGE_MODELS)
    return "none" if is_base else "vocabulary"


def with_head(model: Architecture, config: ConfigReader, shapes: TensorShapes) -> Architecture:
    """The architecture of a language model, with the head and the tensor names that a checkpoint has.

    Arguments:
        model: The architecture, with a language head.
        config: The config.json.
        shapes: Shapes of the checkpoint's tensors by name; empty if they are not known.

    Raises:
        ConfigError: The class in config.json has a head that the tensors or the labels contradict, or that is
            not implemented.
    """
    if not isinstance(model, ComposedArchitecture):
        return model
    name = class_name(config.raw)
    if name.endswith(_OTHER_ENDINGS):
        raise ConfigError(
            f"{config.source}: expected a class with a language head, with labels or without head, found "
            f"{name}, whose head is not implemented; set architectures to the base model's class to run the "
            "model without its head"
        )
    task, model = _task(name), _as_stored(model, shapes)
    own = _own_head_tensors(model)
    if task == "vocabulary" and own and not own & shapes.keys() and _is_base_file(model):
        # Files of sentence encoders are often those of a base model under the class that it came from.
        task = "none"
    elif task == "none" and own and own <= shapes.keys():
        task = "vocabulary"  # `DreamModel` of the hub has a language head
    if task == "vocabulary":
        return model
    plain: dict[str, Any] = {"logit_factor": 1.0, "final_logit_softcapping": None}
    plain["tie_word_embeddings"] = False
    if task == "none":
        head = HeadSpec("none", model_class=name)
        return replace(model, head=head, transform=None, has_head_bias=False, **plain)
    if model.pair is not None:
        raise ConfigError(
            f"{config.source}: expected labels of a decoder or of an encoder, found {name} of an "
            "encoder-decoder, which reads the end of a second copy of the prompt; set architectures to the "
            "base model's class to run the model without its head"
        )
    maps = _label_maps(model, name, task, config, shapes)
    transform = None if not maps.dense else _transform(model, maps, config, shapes)
    labels = _labels(config, shapes[f"{maps.out}.weight"][0])
    reads: Any = "each" if task == "token" else _reads(config, maps)
    padding = config.raw.get("pad_token_id") if reads == "last" else None
    encoder = replace(
        model.spelling.encoder, transform=(maps.dense, maps.norm), head_bias="", own_head_bias=""
    )
    return replace(
        model,
        head=HeadSpec("labels", labels, reads, padding if isinstance(padding, int) else None, name),
        transform=transform,
        has_head_bias=f"{maps.out}.bias" in shapes,
        spelling=replace(model.spelling, head=maps.out, encoder=encoder),
        **plain,
    )


def _as_stored(model: ComposedArchitecture, shapes: TensorShapes) -> ComposedArchitecture:
    """Copy of an architecture under the prefix that a checkpoint has: a file may lack the one in the family's
    names, or have another. It is found by the embedding."""
    embed = model.tensors.outside["embed"]
    if embed.name in shapes or not shapes:
        return model
    root = model.spelling.layer.partition(".")[0] + "."
    root = root if embed.name.startswith(root) else ""
    name = embed.name.removeprefix(root)
    stored = [
        tensor.removesuffix(name)
        for tensor, shape in shapes.items()
        if (tensor == name or tensor.endswith(f".{name}")) and shape == embed.shape
    ]
    if len(stored) != 1:
        return model  # the missing embedding is an error when the tensors are checked
    return replace(model, spelling=replace(model.spelling, prefix=(root, stored[0])))


def _own_head_tensors(model: ComposedArchitecture) -> set[str]:
    """Names of the tensors of a language head and its transform, except one that it shares with the
    embedding."""
    outside = model.tensors.outside
    names = {item.name for weight, item in outside.items() if weight.startswith(("head", "transform"))}
    return names - {outside["embed"].name}


def _is_base_file(model: ComposedArchitecture) -> bool:
    """Whether a checkpoint lacks the prefix that files of all classes but the base model's have."""
    root, stored = model.spelling.prefix
    return bool(root) and not stored


def _label_maps(
    model: ComposedArchitecture, name: str, task: Task, config: ConfigReader, shapes: TensorShapes
) -> _Maps:
    """The maps from final states to labels that a checkpoint has.

    Arguments:
        model: The architecture, with the prefix of the checkpoint.
        name: Class in config.json.
        task: Whether prompts or tokens have labels.
        config: The config.json.
        shapes: Shapes of the checkpoint's tensors by name.

    Raises:
        ConfigError: The checkpoint has no tensors of such a head.
    """
    body = model.tensors.prefix.partition(".")[0] + "."
    known = [_Maps("classifier", "head.dense", "head.norm")]
    if task == "sequence":
        known += [
            _Maps("classifier.out_proj", "classifier.dense"),
            _Maps("classifier", "pre_classifier"),
            _Maps("classifier", "dense"),
            *(_Maps("classifier", f"{prefix}pooler{end}") for prefix in ("", body) for end in (".dense", "")),
        ]
    known += [_Maps("classifier"), _Maps("score")]
    for maps in known:
        if all(f"{part}.weight" in shapes for part in (maps.out, maps.dense, maps.norm) if part):
            return maps
    listed = " or ".join(dict.fromkeys(f"{maps.out}.weight" for maps in known))
    raise ConfigError(
        f"{config.source}: expected the tensor {listed}, as the class {name} has, found none among the "
        f"checkpoint's {len(shapes)} tensors; correct architectures in the file, or fetch the weights again"
    )


def _transform(
    model: ComposedArchitecture, maps: _Maps, config: ConfigReader, shapes: TensorShapes
) -> HeadTransform:
    """The dense map before the labels, its activation and its norm."""
    if maps.norm:
        assert model.transform is not None  # ModernBERT, whose language head has the same transform
        return model.transform
    key, default = _ACTIVATIONS.get(model.model_type, ("", "tanh"))
    activation = config.text(key, default) if key else default
    names: Mapping[str, str] = ACTIVATIONS | {"tanh": "tanh"}
    if activation not in names:
        raise ConfigError(
            f"{config.source}: expected {key} to be one of {', '.join(names)}, found {activation!r}; "
            f"{TRY_TRANSFORMERS}"
        )
    width, has_bias = shapes[f"{maps.dense}.weight"][0], f"{maps.dense}.bias" in shapes
    return HeadTransform(width, names[activation], None, has_bias)


def _reads(config: ConfigReader, maps: _Maps) -> str:
    """`HeadSpec.reads` of labels of prompts: decoders read the last position, encoders the first one unless
    classifier_pooling says otherwise."""
    model_type = config.raw["model_type"]
    if maps.out == "score" or model_type == "modernbert-decoder":
        return "last"
    if model_type not in _POOLING:
        return "first"
    default, readings = _POOLING[model_type]
    pooling = config.text("classifier_pooling", default)
    if pooling not in readings:
        raise ConfigError(
            f"{config.source}: expected classifier_pooling to be {' or '.join(map(repr, readings))}, found "
            f"{pooling!r}, which is not implemented; {TRY_TRANSFORMERS}"
        )
    return readings[pooling]


def _labels(config: ConfigReader, count: int) -> tuple[str, ...]:
    """Names of the labels, from id2label in config.json, or "LABEL_0" and so on as in transformers.

    Arguments:
        config: The config.json.
        count: Number of labels, from the tensors.

    Raises:
        ConfigError: The file names another number of labels.
    """
    names = config.mapping("id2label") or {str(number): f"LABEL_{number}" for number in range(count)}
    n_named = config.integer("num_labels", len(names))
    if set(names) != set(map(str, range(count))) or n_named != count:
        raise ConfigError(
            f"{config.source}: expected id2label to name the labels 0 to {count - 1}, as many as the "
            f"checkpoint's head has rows, found {n_named if n_named != len(names) else len(names)} labels "
            f"({', '.join(map(str, names))[:60]}); correct the file, or fetch the weights again"
        )
    return tuple(str(names[str(number)]) for number in range(count))

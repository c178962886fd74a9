"""Base classes of workflow settings, and reading of settings from the command line or JSON.

The settings of a workflow are a frozen dataclass derived from the bases below. The annotation of a field
defines its allowed values: `Count` is an int of at least 1, `Natural` of at least 0, `Literal["a", "b"]` one
of these. `__post_init__` checks conditions on several fields.

Border: plain values; loads no model and knows no workflow.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec

from ..stages.circuits.names import Method
from ..stages.forward.models.reference import ModelRef
from ..stages.forward.text.rows import as_text
from ..stages.options import options_of
from ..store.digest import LARGEST
from ..store.errors import ConfigError, nearest

if TYPE_CHECKING:
    from ..stages.forward.models.model import Model

__all__ = [
    "MODEL_HELP",
    "RECURRENT",
    "AnswerSettings",
    "AtLeastTwo",
    "ChosenEdgeSettings",
    "CircuitSettings",
    "DataSettings",
    "ChosenPlaceSettings",
    "ControlSettings",
    "Count",
    "EdgeSettings",
    "FactSettings",
    "FileSettings",
    "InjectionSettings",
    "ModelSettings",
    "Natural",
    "PairSettings",
    "Positive",
    "PromptSettings",
    "Share",
    "SubjectRule",
    "TaskSettings",
    "as_given",
    "preset_of",
    "read_settings",
    "require_together",
    "setting",
]

T = TypeVar("T")

Count = Annotated[int, msgspec.Meta(ge=1)]
"""Int of at least 1."""
Natural = Annotated[int, msgspec.Meta(ge=0)]
"""Int of at least 0."""
Positive = Annotated[float, msgspec.Meta(gt=0)]
"""Float above 0."""
AtLeastTwo = Annotated[int, msgspec.Meta(ge=2)]
"""Int of at least 2."""
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
"""Float from 0 to 1."""


MODEL_HELP = 'hub id, directory, or a shipped one such as "specimen"'
"""Help text of the setting `model`."""
RECURRENT = "specimen-rwkv"
"""Name of the recurrent model that ships with mizarr."""


def setting(default: Any, description: str) -> Any:
    """Field of a settings dataclass with a default and a help text of one line.

    Arguments:
        default: value without one given.
        description: help text.
    """
    return dataclasses.field(default=default, metadata={"help": description})


def loading(name: str) -> Any:
    """Field of a settings dataclass that has the default and help text of an option of `ModelRef`."""
    (item,) = [item for item in options_of(ModelRef) if item.name == name]
    text: str = item.metadata["help"].removesuffix(".")
    return setting(item.default, text if text.startswith("cpu") else text[0].lower() + text[1:])


@dataclass(frozen=True)
class FileSettings:
    """Base class for settings of workflows that read the files of one model."""

    model: str = setting("specimen", MODEL_HELP)
    revision: str | None = loading("revision")
    """Branch, tag or commit of a model on the hub; None for its main branch."""
    device: str | None = loading("device")
    """Torch device of the model, such as "cpu" or "cuda:1"; None for a GPU where there is one, else the
    CPU."""

    def reference(self, loaded: Model | None = None, model: str = "") -> ModelRef:
        """Reference by which the workflow's model is loaded.

        Arguments:
            loaded: a loaded model to use instead of the named one.
            model: a name to use instead of the setting.
        """
        return ModelRef(loaded or model or self.model, revision=self.revision, device=self.device)


@dataclass(frozen=True)
class ModelSettings(FileSettings):
    """Base class for settings of workflows that run one model."""

    dtype: Literal["float32", "float16", "bfloat16", "float64"] = setting(
        "float32", "dtype that the model computes in"
    )

    def reference(self, loaded: Model | None = None, model: str = "") -> ModelRef:
        """Reference by which the workflow's model is loaded, with the dtype of the settings; arguments as in
        `FileSettings.reference`."""
        reference = super().reference(loaded, model)
        # A loaded model has its own dtype, which the default of the setting must not override.
        return reference if loaded is not None else replace(reference, dtype=self.dtype)


@dataclass(frozen=True)
class ControlSettings:
    """Mixin for settings of workflows that make claims: number of controls, and seed."""

    controls: Natural = setting(
        50, "number of random causes of equal size, as controls of an effect; 0: none, nothing is claimed"
    )
    seed: Natural = setting(0, "seed of all random draws")


@dataclass(frozen=True)
class WeightSettings(ModelSettings):
    """Settings of a workflow that compares the weights of heads with those of random heads."""

    controls: Natural | None = setting(
        None,
        "random heads with equal singular values, as controls of each head; 0: none, nothing is claimed; "
        "none: 50, or fewer for a large model",
    )
    seed: Natural = setting(0, "seed of the random heads")


@dataclass(frozen=True)
class DataSettings(ControlSettings):
    """Mixin for settings of workflows on facts, which are shipped or read from files
    (material/facts/fact_data.py)."""

    data: tuple[str, ...] = setting(
        (),
        'JSON files of facts or pairs of facts; "shipped" or "general" for those of mizarr; none: the '
        "shipped ones for a model that ships with it, for others those general ones that it knows",
    )


@dataclass(frozen=True)
class PromptSettings(ModelSettings):
    """Base class for settings of workflows on one prompt."""

    prompt: str = setting("", "prompt to read; none: a shipped fact, or the capital of France")


@dataclass(frozen=True)
class FactSettings(PromptSettings):
    """Base class for settings of workflows on one prompt and its expected next word (`answers.fact`)."""

    target: str = setting("", "next word whose logit is measured; may be empty")


@dataclass(frozen=True)
class EdgeSettings:
    """Mixin for settings of workflows on attention between two positions (stages/corpus/positions.py)."""

    query: int | str = setting(
        "last", 'position that reads: an index, "first", "last", or a phrase of the prompt'
    )
    key: int | str | None = setting(
        None,
        "position that is read; none: the one with the most attention, without the first and the reader",
    )


@dataclass(frozen=True)
class ChosenPlaceSettings(DataSettings, FactSettings):
    """Base class for settings of workflows on one position in one layer, which is selected on other facts
    unless the settings name it."""

    layer: int | None = setting(
        None, "layer shown in full; none: the one with the largest effect on other facts"
    )
    facts: Natural = setting(
        0,
        "other facts to choose layer and position on, and as many held-out ones to score them; 0: 8, or "
        "fewer for a large model",
    )
    top_k: Count = setting(10, "number of tokens stored per run, those whose probability changes most")


@dataclass(frozen=True)
class ChosenEdgeSettings(EdgeSettings, ChosenPlaceSettings):
    """Base class for settings of workflows on attention from one position to another, selected on other facts
    unless the settings name it."""

    key: int | str | None = setting(
        None, "position that is read; none: the kind of position with the largest effect on other facts"
    )


@dataclass(frozen=True)
class InjectionSettings(ModelSettings):
    """Base class for settings of workflows that inject features; empty ones are taken from a preset
    (feature_exchange/presets.py)."""

    model: str = setting("", "hub id or directory")
    preset: str = setting("specimen", "published experiment, or the specimen's own")
    dictionary: str = setting("", "transcoders: directory or org/repo")
    prompt: str = setting("", "prompt without its last word")
    suppress: tuple[str, ...] = setting((), 'features to suppress, layer:index; "none" for no suppression')
    inject: str = setting("", "feature to inject, layer:index")
    strength: Positive | None = setting(
        None, "multiple of the decoder vectors that is added and subtracted; none: the preset's"
    )
    looked_at: Natural = setting(
        0, "features tried on this prompt before the injected one was chosen; 0: the preset's, or 1"
    )


@dataclass(frozen=True)
class AnswerSettings(ModelSettings):
    """Base class for settings of workflows on prompts and their expected next words (`subject.answered`)."""

    prompts: tuple[str, ...] = setting(
        (), "prompts to read; none: facts that the model knows, or those shipped with it"
    )
    answers: tuple[str, ...] = setting(
        (), "next words of the prompts, one each or one for all; none: no answers"
    )

    def __post_init__(self) -> None:
        self.one_each("answer", self.answers)

    def one_each(self, name: str, words: tuple[str, ...]) -> None:
        """Raise ConfigError unless there are no words, one, or one per prompt.

        Arguments:
            name: name of one of the words, for errors.
            words: the words.
        """
        if words and len(words) not in (1, len(self.prompts)):
            raise ConfigError(
                f"expected one {name} for all prompts, or one per prompt ({len(self.prompts)}), found "
                f"{len(words)}; give as many as there are prompts"
            )


SubjectRule = Literal["whole", "differing", "last_fact"]
"""Rule for the tokens of a fact's subject that are patched (material/facts/fact_pairs.py)."""


@dataclass(frozen=True)
class PairSettings(DataSettings, ModelSettings):
    """Base class for settings of workflows that patch pairs of facts in blocks of layers
    (material/facts/fact_pairs.py)."""

    limit: Natural = setting(12, "number of pairs, from the first on; 0: all")
    block_size: Natural = setting(
        0, "number of layers patched together; 0: 4, or a third of the layers of a small model"
    )
    subject: SubjectRule = setting(
        "whole",
        '"whole": all tokens in which the prompts differ; "differing": the last of them; "last_fact": the '
        "fact's last token, as in candle-mi",
    )
    others: Count = setting(6, "number of other pairs to choose the block of layers on")
    donors: Count = setting(2, "unrelated prompts per pair whose states are patched in as controls")


@dataclass(frozen=True)
class TaskSettings(DataSettings, ModelSettings):
    """Base class for settings of workflows on tasks, each with pairs of prompts (circuits/tasks.py)."""

    tasks: tuple[str, ...] = setting(
        (),
        "facts (the shipped ones), copying, induction, agreement, sentiment, ioi, greater_than, pronouns, "
        "docstrings; none: copying and facts for a model that ships with mizarr, ioi and others for other "
        "models",
    )
    pairs: Natural = setting(
        0,
        "pairs to choose on, and as many held-out pairs to score the choice on; 0: 8, or fewer for a large "
        "model",
    )


@dataclass(frozen=True)
class CircuitSettings(TaskSettings):
    """Base class for settings of workflows on circuits of tasks."""

    controls: Natural = setting(
        20, "number of random circuits of equal size, as controls; 0: none, nothing is claimed"
    )
    method: Method = setting("EAP-IG-inputs", "method that scores edges (stages/circuits/methods.py)")
    steps: Count = setting(5, "number of steps of integrated gradients")
    selection: Literal["top", "greedy"] = setting(
        "top", "edges with the largest |score| (top), or added one by one from the logits down (greedy)"
    )


def require_together(settings: Any, *names: str) -> None:
    """Raise ConfigError if some, but not all, of several settings are set.

    Arguments:
        settings: an instance of a settings dataclass.
        names: names of the settings.
    """
    present = [name for name in names if getattr(settings, name)]
    if present and len(present) < len(names):
        missing = [name for name in names if name not in present]
        raise ConfigError(
            f"expected {', '.join(names[:-1])} and {names[-1]} together, or none of them, found "
            f"{' and '.join(present)} without {' and '.join(missing)}"
        )


def preset_of(name: str, presets: Mapping[str, T]) -> T:
    """Preset of a name. Raises ConfigError for an unknown name, with the nearest one.

    Arguments:
        name: name of the preset.
        presets: presets by name.
    """
    if name not in presets:
        near = nearest(name, presets)
        hint = f"did you mean {near!r}?" if near else f"there are {', '.join(presets)}"
        raise ConfigError(f"no preset {name!r}; {hint}")
    return presets[name]


def read_settings(kind: type[Any], name: str, raw: Mapping[str, Any]) -> Any:
    """Build a settings dataclass from values of the command line, JSON or a Python caller.

    Arguments:
        kind: dataclass of the settings.
        name: name of the workflow, for errors.
        raw: values by name. Arrays, Series and generators are converted to lists, and a single value for a
            setting with several to a list of one. None means the default.

    Raises:
        ConfigError: an unknown setting (with the nearest name); a value that does not fit the annotation; an
            empty text or list, which would silently mean the default, such as all shipped facts. The
            dataclass itself checks conditions on several values.
        PromptError: a text with half of a surrogate pair.
    """
    hints = typing.get_type_hints(kind, include_extras=True)
    for key in raw:
        if key not in hints:
            near = nearest(key, hints)
            hint = f"did you mean {near!r}?" if near else f"it has {', '.join(hints)}"
            raise ConfigError(f"workflow {name!r} has no setting {key!r}; {hint}")
    values = {key: value for key, value in raw.items() if value is not None or _allows_none(hints[key])}
    return kind(**{key: _read(hints[key], value, key) for key, value in values.items()})


def as_given(settings: Any) -> dict[str, Any]:
    """Settings as plain values that `read_settings` accepts, with None for empty texts and lists.

    settings: an instance of a settings dataclass.
    """
    values = dataclasses.asdict(settings)
    return {name: None if value in ("", ()) else value for name, value in values.items()}


def _allows_none(hint: Any) -> bool:
    return type(None) in typing.get_args(hint)


def _read(hint: Any, value: Any, key: str) -> Any:
    """Value of one setting, checked and converted to its annotated type `hint`. Raises ConfigError, with
    `key` as the name of the setting."""
    if callable(getattr(value, "tolist", None)):
        value = value.tolist()
    elif isinstance(value, Iterator):
        value = list(value)
    if isinstance(value, str | Sized) and len(value) == 0:
        raise ConfigError(
            f"expected {key} that is not empty, found {value!r}; leave {key} out for the default"
        )
    # The message shows what the user gave, not the list that it becomes.
    raw = value
    has_several = any(typing.get_origin(part) is tuple for part in (hint, *typing.get_args(hint)))
    if has_several and value is not None and not isinstance(value, (list, tuple)):
        value = (value,)
    for item in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(item, str):
            as_text(item, key)
        # Settings are part of keys, which are JSON: readers of JSON are exact up to 2**53.
        elif isinstance(item, int) and abs(item) > LARGEST:
            raise ConfigError(f"expected {key} of at most {LARGEST}, found {item}; set a smaller number")
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        allowed = [str(choice) for choice in typing.get_args(hint) if typing.get_origin(hint) is Literal]
        near = nearest(value, allowed) if isinstance(value, str) and allowed else None
        raise ConfigError(
            f"expected {key} to be {_in_words(hint)}, found {raw!r} ({type(raw).__name__})"
            + (f"; did you mean {near!r}?" if near else "")
        ) from error


def _in_words(hint: Any) -> str:
    """Annotation of a setting in words, for messages: "int of at least 1", "a, b or c", "a list of str"."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return " or ".join(filter(None, (", ".join(map(str, parts[:-1])), str(parts[-1]))))
    if origin is Annotated:
        bounds = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
        limits = [(word, getattr(parts[1], name)) for name, word in bounds.items()]
        conditions = " and ".join(f"{word} {bound:g}" for word, bound in limits if bound is not None)
        return f"{_in_words(parts[0])} of {conditions}"
    if origin is tuple:
        return f"a list of {_in_words(parts[0])}"
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(_in_words, parts))
    return "None" if hint is type(None) else str(hint).removeprefix("<class '").removesuffix("'>")

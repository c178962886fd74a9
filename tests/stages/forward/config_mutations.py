"""Changed configs of every family, and what the reference computes of them.

`single_changes` changes one key of a config.json: left out, null, zero, negative, of another type, of another
value, or under another name that the reference knows, in place of its own or beside it; `mutated` draws one
or two such changes. `outcome` compares the logits of both; the weights stay those of the first config.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from mizarr import Model
from mizarr.store.errors import MizarrError

from .random_encoders import ENCODERS, save_random_encoder
from .random_hybrids import DRAWS, MIXERS, save_random_hybrid
from .random_models import FAMILIES, save_random_model

IGNORED = {"model_type", "architectures", "dtype", "torch_dtype", "transformers_version", "auto_map"}
"""Keys that say which model it is."""
INITIALISED = {
    **{family: {"rescale_prenorm_residual"} for family in ("mamba", "falcon_mamba", "mamba2")},
    "youtu": {"pad_token_id"},
}
"""Keys that are not changed, by family: the reference (5.23) initialises after the file is read, so that it
divides the loaded `out_proj` of Mamba by the root of the number of layers, and zeroes the loaded embedding of
Youtu's padding; here the weights are those of the file."""
TOLERANCE = 2e-4
"""Largest difference of logits, as a share of the largest, that rounding explains."""
TABLED: tuple[str, ...] = (
    *FAMILIES,
    *(family for family in DRAWS if family not in MIXERS),
    *ENCODERS,
    "rwkv",
)
"""Families that the reference computes, too."""


@dataclass(frozen=True)
class Outcome:
    """What became of one changed config."""

    kind: str
    """ "equal"; "refused" here; "different"; "not computed" by the reference; "crashed" here."""
    keys: tuple[str, ...]
    """What was changed: "key=value" each."""
    detail: str = ""
    """The error, or the difference."""


@dataclass(frozen=True)
class Saved:
    """A random model of a family in a folder."""

    folder: Path
    reference: type
    """Its class in transformers."""
    config: Mapping[str, Any]
    """What its config.json says."""
    names: Mapping[str, str]
    """Other names of keys that the reference knows."""
    ids: list[list[int]] = field(
        default_factory=lambda: [[5, 17, 3, 88, 41, 9, 230, 7], [64, 2, 2, 19, 7, 5, 300, 11]]
    )


def saved(family: str, seed: int, folder: Path) -> Saved:
    """A random model of a family, as the reference writes it."""
    if family == "rwkv":
        model = _rwkv(seed, folder)
    elif family in FAMILIES:
        model = save_random_model(folder, family, seed, tokenizer=False)
    elif family in ENCODERS:
        model = save_random_encoder(folder, family, seed, tokenizer=False)
    else:
        model = save_random_hybrid(folder, family, seed, tokenizer=False)
    config = json.loads((folder / "config.json").read_text())
    mapped = dict(type(model.config).attribute_map)
    names = mapped | {own: usual for usual, own in mapped.items()}
    return Saved(folder, type(model), config, names)


def _rwkv(seed: int, folder: Path) -> Any:
    config = transformers.RwkvConfig(
        vocab_size=320,
        hidden_size=32,
        num_hidden_layers=2,
        attention_hidden_size=32,
        intermediate_size=48,
        context_length=64,
        layer_norm_epsilon=1e-5,
    )
    torch.manual_seed(seed)
    model = transformers.RwkvForCausalLM(config).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.3)
    model.save_pretrained(folder)
    return model


def mutated(
    config: Mapping[str, Any], names: Mapping[str, str], rng: random.Random
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A config with one key changed, or two, as `single_changes` changes them, and what was changed."""
    changed, keys = rng.choice(list(single_changes(config, names)))
    if rng.random() < 1 / 3:
        changed, more = rng.choice(list(single_changes(changed, names)))
        keys += more
    return changed, keys


def single_changes(
    config: Mapping[str, Any], names: Mapping[str, str]
) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    """Every config with one key changed in one way, and what was changed."""
    untouched = INITIALISED.get(config["model_type"], set())
    for path in _paths(config):
        if path[0] in IGNORED or path[-1] in untouched:
            continue
        value: Any = config
        for key in path:
            value = value[key]
        for other in [_ABSENT, *_others(value)]:
            changed = json.loads(json.dumps(config))
            holder = changed
            for key in path[:-1]:
                holder = holder[key]
            if other is _ABSENT:
                holder.pop(path[-1])
                yield changed, (f"{'.'.join(path)} absent",)
            elif type(other) is not type(value) or other != value:
                holder[path[-1]] = other
                yield changed, (f"{'.'.join(path)}={other!r}",)
        if len(path) == 1 and path[0] in names:
            second = names[path[0]]
            yield {second if key == path[0] else key: held for key, held in config.items()}, (f"as {second}",)
            for other in _others(value):
                yield {**config, second: other}, (f"{second}={other!r} behind {path[0]}",)
                yield {second: other, **config}, (f"{second}={other!r} before {path[0]}",)


_ABSENT = object()


def _paths(config: Mapping[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """All keys, those of nested sections behind their section's."""
    for key, value in config.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from _paths(value, (*before, key))


def _others(value: Any) -> list[Any]:
    """Replacements of a value of config.json: null, zero, negative, other types, other values of its type."""
    common = [None, 0, -abs(value) if _is_number(value) and value else -1]
    if isinstance(value, bool):
        return [*common, int(value), str(value).lower(), not value]
    if isinstance(value, int):
        return [
            *common,
            float(value),
            str(value),
            value + 0.5,
            True,
            value + 1,
            value * 2,
            max(value // 2, 1),
        ]
    if isinstance(value, float):
        return [*common, int(value), str(value), True, value * 2, value / 2, value + 1.0]
    of_other_types = [1, "text", [], {}, True]
    if isinstance(value, list) and value:
        return [
            *common,
            *of_other_types,
            value[::-1],
            value[:-1],
            [*value, value[0]],
            [value[-1]] * len(value),
        ]
    if isinstance(value, str):
        return [
            *common,
            *of_other_types,
            "gelu",
            "silu",
            "relu",
            "gelu_new",
            "default",
            "linear",
            value + "x",
        ]
    return [*common, *of_other_types, 4, 0.5]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@contextmanager
def _beside(saved: Saved, config: Mapping[str, Any]) -> Iterator[Path]:
    """A folder with the same weights and another config."""
    with tempfile.TemporaryDirectory(dir=saved.folder.parent) as name:
        folder = Path(name)
        for path in saved.folder.iterdir():
            if path.name != "config.json":
                os.link(path, folder / path.name)
        (folder / "config.json").write_text(json.dumps(config))
        yield folder


def outcome(saved: Saved, config: Mapping[str, Any], keys: tuple[str, ...]) -> Outcome:
    """What the reference and this package make of a config."""
    with _beside(saved, config) as folder:
        try:
            ours = Model.from_pretrained(folder, progress=False).forward(saved.ids).logits
        except MizarrError as error:
            return Outcome("refused", keys, str(error))
        except Exception as error:  # noqa: BLE001 - whatever else it is, nobody was told
            return Outcome("crashed", keys, f"{type(error).__name__}: {error}")
        expected = _of_reference(saved, folder)
    if expected is None:
        return Outcome("not computed", keys)
    if expected.shape != ours.shape:
        return Outcome("different", keys, f"{list(ours.shape)} for {list(expected.shape)}")
    difference = float((ours - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
    if not expected.isfinite().all():
        return Outcome("not computed", keys)
    return Outcome("equal" if difference <= TOLERANCE else "different", keys, f"{difference:.2g}")


def _of_reference(saved: Saved, folder: Path) -> torch.Tensor | None:
    """The reference's logits; None where it cannot load it, or draws tensors that are not in the file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = transformers.AutoConfig.from_pretrained(folder)
            config._attn_implementation = config._experts_implementation = "eager"
            model, report = saved.reference.from_pretrained(
                folder, config=config, dtype=torch.float32, output_loading_info=True
            )
            if report["missing_keys"] or report["mismatched_keys"]:
                return None
            with torch.no_grad():
                logits: torch.Tensor = model.eval()(input_ids=torch.tensor(saved.ids), use_cache=False).logits
            return logits
    except Exception:  # noqa: BLE001 - the reference cannot do it, however it says so
        return None

"""LoRA adapters in PEFT's format, merged into the tensors of a checkpoint when these are read.

A weight W [out, in] with factors A [rank, in] and B [out, rank] becomes W + s B A, computed in float32, with
s = alpha / rank, or alpha / sqrt(rank) for rank-stabilised adapters (Hu et al., LoRA, 2021, section 4.1;
Kalajdzievski, A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA, 2023). Modules trained as a
whole (`modules_to_save`, biases) replace those of the checkpoint. Anything else that PEFT can produce is
refused, because a merged weight cannot represent it or nothing here computes it.

Works on adapter_config.json and tensor names; imports torch only when a tensor is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....store.arrays import Array
from ....store.digest import digest
from ....store.errors import ConfigError, ModelNotFound, WeightsError
from ....store.exchange.outside import json_object, require_content
from .formats import stored_in
from .source import Take, TensorEntry, TensorSource

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Adapted", "Adapter"]

CONFIG, WEIGHTS = "adapter_config.json", ("adapter_model.safetensors", "adapter_model.bin")
VERSION = 1
"""Version of the merged numbers, which enters the identity of every adapted model."""
COUNTS = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "fan_in_fan_out")
"""Keys of adapter_config.json that change merged weights; everything else is in the tensors."""
PATTERNS = ("rank_pattern", "alpha_pattern")
"""Keys among COUNTS that map regular expressions to numbers; the first matching one counts."""
SILENT = {
    *(
        "peft_type",
        "task_type",
        "inference_mode",
        "lora_dropout",
        "bias",
        "target_modules",
        "exclude_modules",
    ),
    *("base_model_name_or_path", "revision", "auto_mapping", "peft_version", "layers_to_transform"),
    *("layers_pattern", "modules_to_save", "init_lora_weights", "loftq_config", "eva_config", "corda_config"),
    *("lora_ga_config", "runtime_config", "qalora_group_size", "megatron_core", "ensure_weight_tying"),
}
"""Keys that describe the training, or repeat what the tensors show; they change no merged weight."""
STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the base weights unchanged."""
_FACTOR = re.compile(r"(.*)\.lora_(?:(A|B)\.weight|embedding_(A|B))")


@dataclass(frozen=True)
class TensorChange:
    """Change of one checkpoint tensor: a replacement, or a scaled low-rank product."""

    whole: str | None = None
    """Name of the adapter's tensor that replaces it; None to keep the checkpoint's."""
    low: tuple[str, str] | None = None
    """Names of the low-rank factors A and B; None without."""
    scale: float = 1.0
    """Factor s of the product B A."""
    is_transposed: bool = False
    """Whether the checkpoint stores the weight as [in, out]."""


@dataclass(frozen=True)
class Adapter:
    """A folder with adapter_config.json and adapter_model.safetensors or adapter_model.bin."""

    directory: Path
    """Folder in which PEFT saved the adapter."""

    @property
    def file(self) -> Path:
        """Path of its weights. Raises WeightsError if there are none."""
        for name in WEIGHTS:
            if require_content(path := self.directory / name, WeightsError, "copy it again"):
                return path
        raise WeightsError(
            f"expected {' or '.join(WEIGHTS)} in {self.directory}, found neither; copy the adapter again"
        )

    @cached_property
    def source(self) -> TensorSource:
        """Its tensors under their stored names."""
        return stored_in((self.file,))

    @cached_property
    def config(self) -> dict[str, Any]:
        """Content of adapter_config.json.

        Raises:
            ModelNotFound: if there is no such file.
            ConfigError: for anything but plain LoRA.
        """
        path = self.directory / CONFIG
        if not require_content(path, ConfigError, "copy it again"):
            raise ModelNotFound(
                f"expected an adapter in {self.directory}, found no {CONFIG}; pass the folder in which PEFT "
                "saved it"
            )
        config = json_object(path, ConfigError, "copy it again")
        _require_plain_lora(config, path)
        return config

    def digest(self, weights: str) -> str:
        """`sha256:…` of the adapter; `weights` is the digest of its weight file."""
        counted = {key: self.config.get(key) for key in COUNTS if key not in PATTERNS}
        # Patterns are a list in file order: of two that match a module, the first one counts.
        counted |= {key: [list(pair) for pair in (self.config.get(key) or {}).items()] for key in PATTERNS}
        return f"sha256:{digest('adapter', VERSION, weights, counted)}"

    def changes(self, names: Collection[str]) -> dict[str, TensorChange]:
        """Name of each tensor that the adapter changes -> the change.

        Arguments:
            names: tensors of the checkpoint.

        Raises:
            WeightsError: for an adapter tensor that matches none of them, or a factor without its partner.
        """
        whole: dict[str, str] = {}
        low: dict[str, dict[str, str]] = {}
        for name in self.source.entries:
            # The wrappers of PEFT around the base model.
            path = name.removeprefix("base_model.model.")
            if match := _FACTOR.fullmatch(path):
                # Factors of an embedding are parameters without ".weight": a group of their own in the
                # pattern.
                low.setdefault(match[1], {})[match[2] or match[3]] = name
            elif "lora_" in path:
                raise WeightsError(
                    f"expected factors lora_A and lora_B in {self.file}, found {name!r}; merge the adapter "
                    "into its base model with PEFT, and save that"
                )
            else:
                whole[re.sub(r"\.(base_layer|modules_to_save(\.default)?)\.", ".", path)] = name
        changes = {
            self._name_in_checkpoint(name, names): TensorChange(whole=stored)
            for name, stored in whole.items()
        }
        for module, factors in low.items():
            target = self._name_in_checkpoint(f"{module}.weight", names)
            replacement = changes.get(target, TensorChange()).whole
            changes[target] = self._product(module, factors, replacement)
        return changes

    def _product(self, module: str, factors: Mapping[str, str], whole: str | None) -> TensorChange:
        if set(factors) != {"A", "B"}:
            raise WeightsError(
                f"expected factors A and B of {module!r} in {self.file}, found {', '.join(sorted(factors))} "
                "alone; copy the adapter again"
            )
        # 8 is PEFT's default of both.
        rank = _by_pattern(self.config.get("rank_pattern"), module, self.config.get("r", 8))
        alpha = _by_pattern(self.config.get("alpha_pattern"), module, self.config.get("lora_alpha", 8))
        shape, shape_b = (self.source.entries[factors[side]].shape for side in "AB")
        if len(shape) != 2 or len(shape_b) != 2 or {shape[0], shape_b[1]} != {rank}:
            raise WeightsError(
                f"expected factors of rank {rank} of {module!r} as {CONFIG} says, found A {list(shape)} and "
                f"B {list(shape_b)}; is {CONFIG} of another adapter?"
            )
        scale = alpha / math.sqrt(rank) if self.config.get("use_rslora") else alpha / rank
        # An embedding is stored as [vocab, hidden], so the product of its factors must be transposed.
        is_embedding = "lora_embedding" in factors["A"]
        is_transposed = is_embedding or bool(self.config.get("fan_in_fan_out"))
        return TensorChange(whole, (factors["A"], factors["B"]), scale, is_transposed)

    def _name_in_checkpoint(self, name: str, names: Collection[str]) -> str:
        """The checkpoint's name of a tensor, which may have the prefix of the base or of the whole model."""
        if name in names:
            return name
        # PEFT names tensors from the class it wrapped; checkpoints leave out or add a prefix such as
        # "model.".
        matches = [other for other in names if other.endswith(f".{name}") or name.endswith(f".{other}")]
        # Two matches would mean that the suffix does not identify a tensor.
        if len(matches) != 1:
            raise WeightsError(
                f"expected the adapter in {self.directory} to change tensors of the checkpoint, found "
                f"{name!r}, which is not in it; is it an adapter of another model?"
            )
        return matches[0]


@dataclass(frozen=True)
class Adapted:
    """A source with an adapter merged into its tensors; changed ones are float32."""

    base: TensorSource
    """Tensors of the base model."""
    adapter: Adapter
    """Adapter to merge."""

    @cached_property
    def changes(self) -> dict[str, TensorChange]:
        """Name of each changed tensor -> the change."""
        return self.adapter.changes(self.base.entries)

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """Entries of the base. Raises WeightsError for a change of another shape."""
        entries = dict(self.base.entries)
        for name, change in self.changes.items():
            shape = self._shape(change)
            if shape != entries[name].shape:
                raise WeightsError(
                    f"expected the adapter in {self.adapter.directory} to change {name!r} by a matrix "
                    f"of shape {list(entries[name].shape)}, found shape {list(shape)}; is it an adapter of "
                    "another model?"
                )
            # Merged in float32; whoever reads a weight rounds it once to the dtype of the model.
            entries[name] = TensorEntry(shape, "F32")
        return entries

    def mapped(self, name: str) -> Array | None:
        """See `TensorSource.mapped`."""
        return None if name in self.changes else self.base.mapped(name)

    def _shape(self, change: TensorChange) -> tuple[int, ...]:
        entries = self.adapter.source.entries
        if change.low is None:
            return entries[change.whole or ""].shape
        n_in, n_out = entries[change.low[0]].shape[1], entries[change.low[1]].shape[0]
        return (n_in, n_out) if change.is_transposed else (n_out, n_in)

    @contextmanager
    def opened(self) -> Iterator[Take]:
        """See `TensorSource.opened`."""
        with self.base.opened() as take, self.adapter.source.opened() as adapted:

            def merged(name: str) -> Tensor:
                change = self.changes.get(name)
                if change is None:
                    return take(name)
                # A module may be trained as a whole and have factors as well; the factors come on top.
                weight = (take(name) if change.whole is None else adapted(change.whole)).float()
                if change.low is None:
                    return weight
                a, b = (adapted(factor).float() for factor in change.low)
                product = (b @ a) * change.scale
                return weight + (product.T if change.is_transposed else product)

            yield merged


def _by_pattern(patterns: Any, module: str, default: Any) -> Any:
    """Value of the first pattern that matches the end of a module's name.

    The same rule as peft.utils.other.get_pattern_key.
    """
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _require_plain_lora(config: Mapping[str, Any], path: Path) -> None:
    """Raise ConfigError for anything but LoRA whose merged weights represent it completely."""
    advice = "merge the adapter into its base model with PEFT, and save that"
    if config.get("peft_type") != "LORA":
        raise ConfigError(
            f"{path}: expected peft_type 'LORA', found {config.get('peft_type')!r:.80}, which is not merged "
            f"here; {advice}"
        )
    # New kinds of adapters come as new keys: an unknown key that is set may change numbers.
    unknown = [key for key, value in config.items() if value and key not in SILENT and key not in COUNTS]
    if unknown:
        raise ConfigError(
            f"{path}: expected {unknown[0]} to be absent, null or false, found {config[unknown[0]]!r:.80}, "
            f"which is not merged here; {advice}"
        )
    start = config.get("init_lora_weights")
    # PiSSA, OLoRA and CorDA change the base weights when training starts, which the factors do not show.
    if start not in STARTS:
        raise ConfigError(
            f"{path}: expected init_lora_weights that leaves the base model as it is, found {start!r}; "
            f"{advice}"
        )
    for key, least, patterns in (("r", 1, "rank_pattern"), ("lora_alpha", -math.inf, "alpha_pattern")):
        by_pattern = config.get(patterns) or {}
        if not isinstance(by_pattern, dict):
            raise ConfigError(f"{path}: expected {patterns} to be an object, found {by_pattern!r:.80}")
        for pattern in by_pattern:
            try:
                re.compile(pattern)
            # All of these can come from a pattern in a file of anyone.
            except (re.error, OverflowError, RecursionError) as error:
                raise ConfigError(
                    f"{path}: expected patterns of names in {patterns}, found {pattern!r:.80} ({error})"
                ) from error
        for value in (config.get(key, 8), *by_pattern.values()):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not math.isfinite(value) or value < least:
                kind = "finite" if least < 1 else "positive"
                raise ConfigError(f"{path}: expected {key} to be a {kind} number, found {value!r:.80}")

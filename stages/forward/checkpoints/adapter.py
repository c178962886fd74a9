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

__all__ = ["MERGE", "Adapted", "Adapter"]

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
MERGE = "merge it into its base model with PEFT (merge_and_unload), save the result and load that"
"""Advice in messages about an adapter that cannot be merged here."""


@dataclass(frozen=True)
class TensorChange:
    """How an adapter changes one tensor of the checkpoint: replaces it, or adds a scaled low-rank product."""

    whole: str | None = None
    """Name of the adapter's tensor that replaces it; None to keep the checkpoint's tensor."""
    low: tuple[str, str] | None = None
    """Names of the low-rank factors A and B in the adapter; None if it adds no product."""
    scale: float = 1.0
    """Factor s of the product B A."""
    is_transposed: bool = False
    """Whether the checkpoint stores the weight as [in, out]."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: adapter_config.json with adapter_model.safetensors or adapter_model.bin."""

    directory: Path
    """Folder in which PEFT saved the adapter."""

    @property
    def file(self) -> Path:
        """Path of the adapter's weight file.

        Raises:
            WeightsError: if there is none.
        """
        for name in WEIGHTS:
            if require_content(path := self.directory / name, WeightsError, "copy it again"):
                return path
        raise WeightsError(
            f"expected {' or '.join(WEIGHTS)} in {self.directory}, found neither; copy the adapter again"
        )

    @cached_property
    def source(self) -> TensorSource:
        """The adapter's tensors under their stored names."""
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
                f"expected a LoRA adapter in {self.directory}, found no {CONFIG}; pass the folder in which "
                "PEFT saved it"
            )
        config = json_object(path, ConfigError, "copy it again")
        _require_plain_lora(config, path)
        return config

    def digest(self, weights: str) -> str:
        """`sha256:…` of the adapter's weights and of the settings that change merged weights.

        Arguments:
            weights: digest of the adapter's weight file.
        """
        counted = {key: self.config.get(key) for key in COUNTS if key not in PATTERNS}
        # Patterns are a list in file order: of two that match a module, the first one counts.
        counted |= {key: [list(pair) for pair in (self.config.get(key) or {}).items()] for key in PATTERNS}
        return f"sha256:{digest('adapter', VERSION, weights, counted)}"

    def changes(self, names: Collection[str]) -> dict[str, TensorChange]:
        """Find the tensors of a checkpoint that the adapter changes.

        Arguments:
            names: names of the checkpoint's tensors.

        Returns:
            Name of each changed tensor -> the change.

        Raises:
            WeightsError: for an adapter tensor that matches no name, or a factor A without B.
        """
        replacements: dict[str, str] = {}
        factors_of: dict[str, dict[str, str]] = {}
        for name in self.source.entries:
            # The wrappers of PEFT around the base model.
            path = name.removeprefix("base_model.model.")
            if match := _FACTOR.fullmatch(path):
                # Factors of an embedding are parameters without ".weight": a group of their own in the
                # pattern.
                factors_of.setdefault(match[1], {})[match[2] or match[3]] = name
            elif "lora_" in path:
                raise WeightsError(
                    f"expected only LoRA factors lora_A and lora_B in {self.file}, found {name!r}; {MERGE}"
                )
            else:
                replacements[re.sub(r"\.(base_layer|modules_to_save(\.default)?)\.", ".", path)] = name
        changes = {
            self._name_in_checkpoint(name, names): TensorChange(whole=stored)
            for name, stored in replacements.items()
        }
        for module, factors in factors_of.items():
            target = self._name_in_checkpoint(f"{module}.weight", names)
            replacement = changes.get(target, TensorChange()).whole
            changes[target] = self._low_rank_change(module, factors, replacement)
        return changes

    def _low_rank_change(self, module: str, factors: Mapping[str, str], whole: str | None) -> TensorChange:
        """The change of a module by its factors A and B, on top of its replacement, if it has one."""
        if set(factors) != {"A", "B"}:
            raise WeightsError(
                f"expected LoRA factors A and B of {module!r} in {self.file}, found only "
                f"{', '.join(sorted(factors))}; copy the adapter again"
            )
        # 8 is PEFT's default of both.
        rank = _by_pattern(self.config.get("rank_pattern"), module, self.config.get("r", 8))
        alpha = _by_pattern(self.config.get("alpha_pattern"), module, self.config.get("lora_alpha", 8))
        shape_a, shape_b = (self.source.entries[factors[side]].shape for side in "AB")
        if len(shape_a) != 2 or len(shape_b) != 2 or {shape_a[0], shape_b[1]} != {rank}:
            raise WeightsError(
                f"expected LoRA factors of {module!r} of rank {rank}, as in {CONFIG}, found A of shape "
                f"{list(shape_a)} and B of shape {list(shape_b)}; copy {CONFIG} and weights of one adapter"
            )
        scale = alpha / math.sqrt(rank) if self.config.get("use_rslora") else alpha / rank
        # An embedding is stored as [vocab, hidden], so the product of its factors must be transposed.
        is_embedding = "lora_embedding" in factors["A"]
        is_transposed = is_embedding or bool(self.config.get("fan_in_fan_out"))
        return TensorChange(whole, (factors["A"], factors["B"]), scale, is_transposed)

    def _name_in_checkpoint(self, name: str, names: Collection[str]) -> str:
        """Name in the checkpoint of a tensor that the adapter names with another prefix, or without one."""
        if name in names:
            return name
        # PEFT names tensors from the class it wrapped; checkpoints leave out or add a prefix such as
        # "model.".
        matches = [other for other in names if other.endswith(f".{name}") or name.endswith(f".{other}")]
        # Two matches would mean that the suffix does not identify a tensor.
        if len(matches) != 1:
            raise WeightsError(
                f"expected the adapter in {self.directory} to change tensors of the checkpoint, found "
                f"{name!r}, which the checkpoint does not have; load the base model of this adapter"
            )
        return matches[0]


@dataclass(frozen=True)
class Adapted:
    """Tensors of a checkpoint with a LoRA adapter merged into them; changed tensors are float32."""

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
        """Shape and dtype of every tensor after merging, by name.

        Raises:
            WeightsError: for a change whose shape is not that of the tensor.
        """
        entries = dict(self.base.entries)
        for name, change in self.changes.items():
            shape = self._shape_of_change(change)
            if shape != entries[name].shape:
                raise WeightsError(
                    f"expected the adapter in {self.adapter.directory} to change {name!r} by a tensor "
                    f"of shape {list(entries[name].shape)}, found shape {list(shape)}; load the base model "
                    "of this adapter"
                )
            # Merged in float32; whoever reads a weight rounds it once to the dtype of the model.
            entries[name] = TensorEntry(shape, "F32")
        return entries

    def mapped(self, name: str) -> Array | None:
        """A memory-mapped array of a tensor; None for a tensor that the adapter changes."""
        return None if name in self.changes else self.base.mapped(name)

    def _shape_of_change(self, change: TensorChange) -> tuple[int, ...]:
        entries = self.adapter.source.entries
        if change.low is None:
            return entries[change.whole or ""].shape
        n_in, n_out = entries[change.low[0]].shape[1], entries[change.low[1]].shape[0]
        return (n_in, n_out) if change.is_transposed else (n_out, n_in)

    @contextmanager
    def opened(self) -> Iterator[Take]:
        """Open checkpoint and adapter in this block, with a function that reads a merged tensor by name."""
        with self.base.opened() as take_base, self.adapter.source.opened() as take_adapter:

            def take_merged(name: str) -> Tensor:
                change = self.changes.get(name)
                if change is None:
                    return take_base(name)
                # A module may be trained as a whole and have factors as well; the factors come on top.
                weight = (take_base(name) if change.whole is None else take_adapter(change.whole)).float()
                if change.low is None:
                    return weight
                a, b = (take_adapter(factor).float() for factor in change.low)
                product = (b @ a) * change.scale
                return weight + (product.T if change.is_transposed else product)

            yield take_merged


def _by_pattern(patterns: Any, module: str, default: Any) -> Any:
    """Value of the first regex that matches the end of a module's name; `default` if none does.

    The same rule as peft.utils.other.get_pattern_key.
    """
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _require_plain_lora(config: Mapping[str, Any], path: Path) -> None:
    """Raise ConfigError for an adapter that mizarr cannot merge, e.g. of another type than LoRA."""
    if config.get("peft_type") != "LORA":
        raise ConfigError(
            f"{path}: expected peft_type 'LORA', found {config.get('peft_type')!r:.80}, which mizarr cannot "
            f"merge; {MERGE}"
        )
    # New kinds of adapters come as new keys: an unknown key that is set may change numbers.
    unknown = [key for key, value in config.items() if value and key not in SILENT and key not in COUNTS]
    if unknown:
        raise ConfigError(
            f"{path}: expected {unknown[0]} to be absent, null or false, found {config[unknown[0]]!r:.80}, "
            f"which mizarr cannot merge; {MERGE}"
        )
    start = config.get("init_lora_weights")
    # PiSSA, OLoRA and CorDA change the base weights when training starts, which the factors do not show.
    if start not in STARTS:
        raise ConfigError(
            f"{path}: expected init_lora_weights that does not change the base model, found {start!r}; "
            f"{MERGE}"
        )
    for key, least, patterns in (("r", 1, "rank_pattern"), ("lora_alpha", -math.inf, "alpha_pattern")):
        by_pattern = config.get(patterns) or {}
        if not isinstance(by_pattern, dict):
            raise ConfigError(
                f"{path}: expected {patterns} to be an object, found {by_pattern!r:.80}; copy the adapter "
                "again"
            )
        for pattern in by_pattern:
            try:
                re.compile(pattern)
            # All of these can come from a pattern in a file of anyone.
            except (re.error, OverflowError, RecursionError) as error:
                raise ConfigError(
                    f"{path}: expected regular expressions in {patterns}, found {pattern!r:.80} ({error}); "
                    "copy the adapter again"
                ) from error
        for value in (config.get(key, 8), *by_pattern.values()):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not math.isfinite(value) or value < least:
                kind = "finite" if least < 1 else "positive"
                raise ConfigError(
                    f"{path}: expected {key} to be a {kind} number, found {value!r:.80}; copy the adapter "
                    "again"
                )

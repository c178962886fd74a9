"""`ConfigReader`, which reads a config.json key by key, and `RopeConfig`, the rotary embedding it describes.

Never imports torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from ....store.errors import ConfigError

Norm = Literal["rms", "gemma_rms", "layer"]
ActivationName = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu"]
RopeScheme = Literal["default", "linear", "dynamic", "llama3", "longrope", "yarn", "proportional"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of the first `dim` entries of a head."""

    theta: float
    """Base wavelength."""
    dim: int
    scheme: RopeScheme = "default"
    factor: float = 1.0
    """How far the context is stretched."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int | None = None
    """Context before stretching, in positions."""
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    """Divisors per frequency (longrope), [dim / 2]."""
    attention_factor: float | None = None
    """Multiplies cos and sin; None derives it."""
    interleaved: bool = False
    """Whether entries 2i and 2i + 1 rotate together (as Su et al. 2021 write it), not i and i + dim / 2."""
    bounds: tuple[float, float] = (32.0, 1.0)
    """Rotations within the original context from which an entry rotates as it did, and up to which it rotates
    slower by the whole factor (yarn)."""
    is_truncated: bool = True
    """Whether the places of these entries are rounded."""
    is_backwards: bool = False
    """Whether angles are negative."""
    frequencies: Any = field(default=None, compare=False, repr=False)
    """A weight, radians per position [dim / 2], which the network puts here where a checkpoint holds it."""
    rotated_pairs: int = 0
    """Pairs of entries that rotate, the fastest ones of a head that rotates as a whole (proportional)."""

    def __post_init__(self) -> None:
        if self.dim % 2 or self.dim <= 0:
            raise ConfigError(
                f"expected a positive, even number of rotary dimensions per head, found {self.dim}; check "
                "head_dim, rotary_dim and partial_rotary_factor in config.json"
            )
        if self.theta <= 0:
            raise ConfigError(
                f"expected rope_theta to be positive, found {self.theta:g}; correct config.json, or fetch it "
                "again"
            )

    @property
    def depends_on_length(self) -> bool:
        """Whether two prompts of different length rotate the same position differently."""
        return self.scheme in ("dynamic", "longrope")

    @property
    def magnitude(self) -> float:
        """What cos and sin are multiplied by: 1 but for yarn and longrope, where it keeps the scale of the
        scores (LongRoPE, section 3.2)."""
        if self.scheme not in ("longrope", "yarn"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        original = self.original_max_position_embeddings or 0
        return 1.0 if self.factor <= 1 else math.sqrt(1 + math.log(self.factor) / math.log(original))

    def turns_alike(self, before: int, length: int) -> bool:
        """Whether a sequence of `length` positions turns the first `before` of them as it did when it had no
        more: dynamic NTK scaling stretches its base beyond the original context, longrope changes its factors
        there."""
        original = self.original_max_position_embeddings or 0
        if self.scheme == "dynamic":
            return max(before, original) == max(length, original)
        return self.scheme != "longrope" or (before > original) == (length > original)


_MOST = {"layers": 10_000, "num_blocks": 10_000, "n_layer": 10_000, "head": 1_000_000, "expert": 1_000_000}
"""Of what there may be, by a word in the key."""
_LARGEST = 2**53


class ConfigReader:
    """A parsed config.json, with errors that name the key; remembers which keys were read.

    A null counts as absent. A value of another type than asked is an error, never a default.
    """

    def __init__(self, raw: dict[str, Any], source: str = "config.json") -> None:
        self.raw = raw
        self.source = source
        self.read: set[str] = set()
        self.ignored: set[str] = set()
        """Keys of nested sections that were seen and not read."""

    def reading(self, raw: dict[str, Any]) -> ConfigReader:
        """Other values of the same config, whose reads count as this one's."""
        other = ConfigReader(raw, self.source)
        other.read, other.ignored = self.read, self.ignored
        return other

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """An integer, the default where the key is absent or null."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            kind = "a positive integer" if least == 1 else f"an integer from {least}"
            raise ConfigError(
                f"{self.source}: expected {key} to be {kind}, found {self._shown(key, value)}; correct the "
                "file, or fetch it again"
            )
        # What there is one of for each of them is listed before anything is compared with tensors.
        most = next((count for word, count in _MOST.items() if word in key), _LARGEST)
        if value > most:
            raise ConfigError(
                f"{self.source}: expected {key} to be at most {most}, found {self._shown(key, value)}; "
                "correct the file, or fetch it again"
            )
        return value

    def optional_integer(self, key: str, default: int | None = None) -> int | None:
        """A positive integer, None for an explicit null, the default where the key is absent."""
        if key in self.raw and self.raw[key] is None:
            self.read.add(key)
            return None
        return None if self._get(key, default) is None else self.integer(key, default)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number, whole or not."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(
                f"{self.source}: expected {key} to be a finite number, found {self._shown(key, value)}; "
                "correct the file, or fetch it again"
            )
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.number(key, default)
        if value <= 0:
            raise ConfigError(
                f"{self.source}: expected {key} to be positive, found {value:g}; correct the file, or fetch "
                "it again"
            )
        return value

    def optional_number(self, key: str, default: float | None = None) -> float | None:
        """A number, or None for an explicit null (or an absent key without a default)."""
        self.read.add(key)
        if key in self.raw and self.raw[key] is None:
            return None
        return None if self._get(key, default) is None else self.number(key, default)

    def flag(self, key: str, default: bool) -> bool:
        """True or false, the default where the key is absent; a null is false, as to the reference."""
        value = self._get(key, default)
        if key in self.raw and self.raw[key] is None:
            return False
        if not isinstance(value, bool):
            raise ConfigError(
                f"{self.source}: expected {key} to be true or false, found {value!r:.80}; correct "
                "the file, or fetch it again"
            )
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string, the default where the key is absent or null; ConfigError where there is neither."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise ConfigError(
                f"{self.source}: expected {key} to be a string, found {value!r:.80}; correct "
                "the file, or fetch it again"
            )
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        """An object, empty where the key is absent."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise ConfigError(
                f"{self.source}: expected {key} to be an object, found {value!r:.80}; correct "
                "the file, or fetch it again"
            )
        return value

    def strings(self, key: str) -> list[str] | None:
        """A list of strings, None where the key is absent."""
        value = self._get(key, None)
        if value is not None and not (
            isinstance(value, list) and all(isinstance(item, str) for item in value)
        ):
            raise ConfigError(
                f"{self.source}: expected {key} to be a list of strings, found {value!r:.80}; "
                "correct the file, or fetch it again"
            )
        return value

    def has(self, key: str) -> bool:
        """Whether a key is there and not null."""
        return self.raw.get(key) is not None

    def _shown(self, key: str, value: Any) -> str:
        return "no such key" if key not in self.raw and value is None else f"{value!r:.80}"

    def _get(self, key: str, default: Any) -> Any:
        self.read.add(key)
        value = self.raw.get(key)
        return default if value is None else value

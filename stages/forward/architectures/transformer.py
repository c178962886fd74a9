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
TRY_TRANSFORMERS = (
    "mizarr does not implement such a model, but transformers may run it: backend='transformers', or "
    "--backend transformers"
)
"""Remedy at the end of error messages about settings that only transformers implements."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (RoPE) of the first `dim` entries of each query and key."""

    theta: float
    """Base of the frequencies: entry i rotates by theta^(-2i / dim) radians per position."""
    dim: int
    """Number of rotated entries of a head; even."""
    scheme: RopeScheme = "default"
    """Method of context extension, under the name of transformers' rope_type; "default" for none."""
    factor: float = 1.0
    """Factor by which the context is extended."""
    low_freq_factor: float = 1.0
    """Scheme llama3: frequencies whose wavelength is above original context / low_freq_factor are divided by
    the whole factor."""
    high_freq_factor: float = 4.0
    """Scheme llama3: frequencies whose wavelength is below original context / high_freq_factor are not
    changed."""
    original_max_position_embeddings: int | None = None
    """Context before the extension, in positions."""
    short_factor: tuple[float, ...] = ()
    """Scheme longrope: divisors of the frequencies, [dim / 2], for sequences within the original context; ()
    for other schemes."""
    long_factor: tuple[float, ...] = ()
    """Scheme longrope: divisors of the frequencies, [dim / 2], for sequences beyond the original context; ()
    for other schemes."""
    attention_factor: float | None = None
    """Factor of cos and sin; None to derive it from `factor` (see `magnitude`)."""
    interleaved: bool = False
    """Whether entries 2i and 2i + 1 rotate together (Su et al. 2021), instead of i and i + dim / 2."""
    bounds: tuple[float, float] = (32.0, 1.0)
    """Scheme yarn, beta_fast and beta_slow: entries that rotate more often than beta_fast within the original
    context keep their frequency; the frequency of entries that rotate less often than beta_slow is divided by
    the whole factor."""
    is_truncated: bool = True
    """Scheme yarn: whether the indices of the entries at both bounds are rounded to integers."""
    is_backwards: bool = False
    """Whether queries and keys are rotated by negative angles."""
    frequencies: Any = field(default=None, compare=False, repr=False)
    """Radians per position, [dim / 2], set by the network if the checkpoint stores them; None to compute
    them."""
    rotated_pairs: int = 0
    """Scheme proportional: number of pairs of entries that rotate, those with the highest frequencies."""

    def __post_init__(self) -> None:
        if self.dim % 2 or self.dim <= 0:
            raise ConfigError(
                f"expected rope to rotate a positive, even number of entries of each head, found {self.dim}; "
                "check head_dim, rotary_dim and partial_rotary_factor in config.json"
            )
        if self.theta <= 0:
            raise ConfigError(
                f"expected rope_theta in config.json to be positive, found {self.theta:g}; correct the file, "
                "or fetch it again"
            )

    @property
    def depends_on_length(self) -> bool:
        """Whether the rotation of a position depends on the length of the prompt."""
        return self.scheme in ("dynamic", "longrope")

    @property
    def magnitude(self) -> float:
        """Factor of cos and sin: 1, except for the schemes yarn and longrope, which compensate the change of
        the scores' scale (LongRoPE, section 3.2)."""
        if self.scheme not in ("longrope", "yarn"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        original = self.original_max_position_embeddings or 0
        return 1.0 if self.factor <= 1 else math.sqrt(1 + math.log(self.factor) / math.log(original))

    def turns_alike(self, before: int, length: int) -> bool:
        """Whether the first `before` positions are rotated by the same angles in a sequence of `before`
        positions and in one of `length` positions. Beyond the original context, the scheme dynamic changes
        its base and longrope its factors."""
        original = self.original_max_position_embeddings or 0
        if self.scheme == "dynamic":
            return max(before, original) == max(length, original)
        return self.scheme != "longrope" or (before > original) == (length > original)


_MOST = {"layers": 10_000, "num_blocks": 10_000, "n_layer": 10_000, "head": 1_000_000, "expert": 1_000_000}
"""Text in the name of a config key -> largest accepted value of the key, so that corrupt files are refused
before they fill memory."""
_LARGEST = 2**53
"""Largest accepted value of any other integer key."""


class ConfigReader:
    """Typed access to a parsed config.json, with errors that name the key; records which keys were read.

    Unless a method says otherwise, a null counts as an absent key, and a key without value and default raises
    ConfigError, as does a value of another type.
    """

    def __init__(self, raw: dict[str, Any], source: str = "config.json") -> None:
        """raw: the parsed JSON object; source: its path or name, for error messages."""
        self.raw = raw
        self.source = source
        self.read: set[str] = set()
        """Keys that were read so far."""
        self.ignored: set[str] = set()
        """Keys of nested sections that exist and were not read, as "section.key"."""

    def reading(self, raw: dict[str, Any]) -> ConfigReader:
        """Reader of a changed copy of this config; the keys that it reads also count as read in this reader.

        Arguments:
            raw: The changed copy of the parsed JSON object.
        """
        reader = ConfigReader(raw, self.source)
        reader.read, reader.ignored = self.read, self.ignored
        return reader

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """Integer value of a config key.

        Arguments:
            key: The config key.
            default: Value for an absent key or a null; None for a required key.
            least: Smallest accepted value.

        Raises:
            ConfigError: A required key is absent, or its value is not an integer, is below `least`, or
                exceeds the limit of that key: 10,000 layers, 1,000,000 heads or experts, 2**53 otherwise.
        """
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            kind = "a positive integer" if least == 1 else f"an integer from {least}"
            raise ConfigError(
                f"{self.source}: expected {key} to be {kind}, found {self._shown(key, value)}; correct the "
                "file, or fetch it again"
            )
        # One spec per layer, head or expert is built before sizes are compared with the tensors.
        most = next((count for word, count in _MOST.items() if word in key), _LARGEST)
        if value > most:
            raise ConfigError(
                f"{self.source}: expected {key} to be at most {most}, found {self._shown(key, value)}; "
                "correct the file, or fetch it again"
            )
        return value

    def optional_integer(self, key: str, default: int | None = None) -> int | None:
        """The positive integer at a key; None for an explicit null; the default for an absent key."""
        if key in self.raw and self.raw[key] is None:
            self.read.add(key)
            return None
        return None if self._get(key, default) is None else self.integer(key, default)

    def number(self, key: str, default: float | None = None) -> float:
        """The finite number at a key, as float; the default for an absent key or a null, ConfigError if there
        is none."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(
                f"{self.source}: expected {key} to be a finite number, found {self._shown(key, value)}; "
                "correct the file, or fetch it again"
            )
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        """The finite number above 0 at a key; the default for an absent key or a null, ConfigError if there
        is none."""
        value = self.number(key, default)
        if value <= 0:
            raise ConfigError(
                f"{self.source}: expected {key} to be positive, found {value:g}; correct the file, or fetch "
                "it again"
            )
        return value

    def optional_number(self, key: str, default: float | None = None) -> float | None:
        """The finite number at a key; the default for an absent key; None for an explicit null, or for an
        absent key without a default."""
        self.read.add(key)
        if key in self.raw and self.raw[key] is None:
            return None
        return None if self._get(key, default) is None else self.number(key, default)

    def flag(self, key: str, default: bool) -> bool:
        """The boolean at a key; the default for an absent key; False for a null, as in transformers."""
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
        """String value of a config key; the default for an absent key or null, ConfigError without
        default."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise ConfigError(
                f"{self.source}: expected {key} to be a string, found {value!r:.80}; correct "
                "the file, or fetch it again"
            )
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        """The JSON object at a key, as a dict; empty for an absent key or a null."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise ConfigError(
                f"{self.source}: expected {key} to be a JSON object, found {value!r:.80}; correct the file, "
                "or fetch it again"
            )
        return value

    def strings(self, key: str) -> list[str] | None:
        """The list of strings at a key; None for an absent key or a null."""
        value = self._get(key, None)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ConfigError(
                f"{self.source}: expected {key} to be a list of strings, found {value!r:.80}; "
                "correct the file, or fetch it again"
            )
        return value

    def has(self, key: str) -> bool:
        """Whether a key is present and not null."""
        return self.raw.get(key) is not None

    def _shown(self, key: str, value: Any) -> str:
        """Text of a key's value for an error message, at most 80 characters; "no such key" for an absent
        key."""
        return "no such key" if key not in self.raw and value is None else f"{value!r:.80}"

    def _get(self, key: str, default: Any) -> Any:
        self.read.add(key)
        value = self.raw.get(key)
        return default if value is None else value

"""Torch-free summaries of layers and of the mixers in them, as `Architecture.layers` lists them.

`AttentionMixer` also carries the parameters of the scores to the code that computes attention.

Border: never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

__all__ = [
    "AttentionMixer",
    "ConvolutionMixer",
    "Layer",
    "Mixer",
    "MixersInSequence",
    "MixersSideBySide",
    "NoMixer",
    "OpaqueMixer",
    "RecurrentMixer",
]


@dataclass(frozen=True)
class AttentionMixer:
    """Attention of a layer: how its scores are scaled, masked and capped."""

    kind: ClassVar[str] = "attention"
    scale: float
    """Factor of the scores q k^T."""
    window: int | None = None
    """Number of keys that a query sees backwards, itself included; None for all keys."""
    soft_cap: float | None = None
    """Cap c of the scores, c tanh(scores / c), before the mask; None for no cap."""
    sinks: Any = field(default=None, compare=False, repr=False)
    """Learned logits of the attention sink, [head], set by the network; None without sinks."""
    is_bidirectional: bool = False
    """Whether a query also sees later keys, within a window as far forwards as backwards."""
    relative: Any = field(default=None, compare=False, repr=False)
    """Relative position terms of the scores (`networks.relative.Relative`), set by the network; None for no
    such terms."""
    is_chunked: bool = False
    """Whether `window` is the length of fixed chunks, and a query only sees keys of its own chunk."""
    part: Literal["source", "target", "cross"] | None = None
    """In encoder-decoders: attention within the source, within the target, or from target to source; None
    for models of single sequences."""
    source: int | None = None
    """Number of the earlier layer with the keys and values to reuse; None for a layer that computes them."""

    @property
    def room(self) -> str:
        """Prefix of the names of its hook points: "cross_" for cross-attention, else ""."""
        return "cross_" if self.part == "cross" else ""

    @property
    def is_capped(self) -> bool:
        """Whether scores have a soft cap (which fused attention kernels do not support)."""
        return self.soft_cap is not None

    def capped(self, scores: Any, xp: Any) -> Any:
        """Scores after the soft cap and before the mask, elementwise.

        Arguments:
            scores: Array of scaled scores, of any shape.
            xp: The module of that array: numpy or torch.
        """
        return scores if self.soft_cap is None else self.soft_cap * xp.tanh(scores / self.soft_cap)


@dataclass(frozen=True)
class RecurrentMixer:
    """A mixer with a recurrent state, which each token decays, writes to and reads."""

    kind: ClassVar[str] = "recurrence"
    is_bidirectional: ClassVar[bool] = False
    window: ClassVar[None] = None
    """None: a state can depend on all earlier tokens."""
    recurrence: str
    """Name of the recurrence, such as "rwkv7" or "mamba2"."""


@dataclass(frozen=True)
class ConvolutionMixer:
    """A short causal convolution over positions."""

    kind: ClassVar[str] = "convolution"
    is_bidirectional: ClassVar[bool] = False
    window: int
    """Kernel size in tokens, the current one included."""


@dataclass(frozen=True)
class NoMixer:
    """Placeholder for the mixer of a layer that has only a channel mixer, such as an MLP."""

    kind: ClassVar[str] = "none"
    is_bidirectional: ClassVar[bool] = False
    window: ClassVar[int] = 1
    """1: outputs depend on the current token only."""


@dataclass(frozen=True)
class OpaqueMixer:
    """Mixer of a layer that transformers computes (bridge): how it mixes positions is unknown, so it is
    assumed to mix all of them."""

    kind: ClassVar[str] = "unknown mixer"
    is_bidirectional: ClassVar[bool] = True
    """True: it may depend on later positions."""
    window: ClassVar[None] = None
    """None: outputs may depend on tokens at any distance."""


@dataclass(frozen=True)
class MixersSideBySide:
    """Parallel mixers of one layer: they read the same normalised stream, and their outputs are summed."""

    kind: ClassVar[str] = "side by side"
    is_bidirectional: ClassVar[bool] = False
    mixers: tuple[AttentionMixer | RecurrentMixer | ConvolutionMixer, ...]
    """Summaries of the parallel mixers, in the order in which their outputs are summed."""

    @property
    def window(self) -> int | None:
        """Largest window of the mixers, in tokens; None if one of them is unbounded."""
        windows = [mixer.window for mixer in self.mixers]
        return None if None in windows else max(window for window in windows if window is not None)


@dataclass(frozen=True)
class MixersInSequence:
    """Sequential mixers of one layer: each one reads the output of the mixer before it, position by
    position."""

    kind: ClassVar[str] = "in turn"
    is_bidirectional: ClassVar[bool] = False
    mixers: tuple[AttentionMixer | RecurrentMixer | ConvolutionMixer | MixersSideBySide, ...]
    """Summaries of the mixers, in order of execution."""

    @property
    def window(self) -> int | None:
        """Window of the whole sequence, in tokens: 1 + the sum of (window - 1); None if a mixer is
        unbounded."""
        windows = [mixer.window for mixer in self.mixers]
        return None if None in windows else 1 + sum(window - 1 for window in windows if window is not None)


Mixer = (
    AttentionMixer
    | RecurrentMixer
    | ConvolutionMixer
    | MixersSideBySide
    | MixersInSequence
    | NoMixer
    | OpaqueMixer
)


@dataclass(frozen=True)
class Layer:
    """Torch-free summary of one layer: its mixer, its channel mixer and the place of its norms."""

    mixer: Mixer
    """Attention, recurrence or convolution: the part that mixes positions."""
    channel_mixer: Literal["MLP", "gated MLP", "token-shifted MLP", "experts"] | None
    """The part that works on each position (token-shifted MLPs of RWKV also read the previous one); None for
    a layer without."""
    norms: Literal["before", "after", "around", "of stream"]
    """Norms before each part's input, after its output, or both. "of stream": the residual stream is not the
    sum of the embedding and all outputs, as it is itself normalised or multiplied on its way."""
    is_parallel: bool = False
    """Whether mixer and channel mixer both read the stream that enters the layer."""

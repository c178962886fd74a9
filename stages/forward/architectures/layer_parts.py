"""AltUp, LAuReL and per-layer inputs: parts of the layers of Gemma 3n and Gemma 4 beside mixers and channel
mixers.

    [AltUp predicts ->] ln1 -> attention -> ln1_post -> + [LAuReL] -> ln2 -> MLP -> ln2_post -> +
                        [AltUp corrects ->] per-layer input -> + -> [times a scalar]

* *Per-layer inputs* (per-layer embeddings): a table gives each token a vector for every layer, to which a
  projection of its embedding is added. After its MLP, a layer gates its vector by the stream and adds a
  projection of it to the stream.
* *AltUp*: several parallel streams. A layer predicts all of them, computes one of them, and corrects all by
  the difference (Baykal et al., Alternating Updates, 2023, section 3). The computed stream is the residual
  stream here; the language head reads the mean of all.
* *LAuReL*: the input of attention, plus a low-rank projection of it, is also added to the stream (Menghani et
  al., LAuReL, 2024, section 2).

Weights are named as networks/layer_parts.py looks them up. In layers: "input." (per-layer inputs), "laurel.",
"altup." and "scalar". Outside of layers, with the prefix `BESIDE`: "table", "projection" and "norm" of
per-layer inputs; "in.{i}" and "out.{i}", which map the embedding to stream i, and that stream back at the
end.

Border: specs, names and shapes; never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ....store.errors import ConfigError
from .architecture import BESIDE, Stored
from .transformer import ActivationName

__all__ = ["AltUpSpec", "LayerInputSpec", "laurel_tensors"]

CORRECTED_SCALE = "altup.correct_output_scale"
"""Name of a layer's tensor with the weights of `AltUpSpec.scales_corrected`; checkpoints hold it even if that
is False."""


@dataclass(frozen=True)
class AltUpSpec:
    """AltUp (Gemma 3n): several parallel residual streams, of which each layer computes one and predicts the
    others."""

    points: ClassVar[tuple[str, ...]] = ("altup_streams", "altup_predicted", "altup_corrected")
    """Kinds of hook points that AltUp has in every layer."""

    streams: int
    """Number of parallel streams."""
    active: int = 0
    """Index of the stream that layers compute."""
    scales_corrected: bool = False
    """Whether the corrected stream is multiplied by learned weights before it gates the per-layer input."""

    def __post_init__(self) -> None:
        if not 0 <= self.active < self.streams:
            raise ConfigError(
                f"expected the index of AltUp's active stream to be 0 to {self.streams - 1}, found "
                f"{self.active}; correct altup_active_idx in config.json, or fetch it again"
            )

    def tensors(self, hidden: int) -> Iterator[tuple[str, Stored]]:
        """Yield name and checkpoint tensor of each weight of AltUp in a layer. hidden: hidden size of the
        model."""
        n = self.streams
        yield "altup.router", Stored("altup.modality_router.weight", (n, hidden))
        yield "altup.norm", Stored("altup.router_norm.weight", (hidden,))
        yield "altup.predicts", Stored("altup.prediction_coefs.weight", (n**2, n))
        yield "altup.corrects", Stored("altup.correction_coefs.weight", (n, n))
        if self.scales_corrected:
            yield "altup.scale", Stored(CORRECTED_SCALE, (hidden,))

    def outer_tensors(self, root: str, hidden: int) -> Iterator[tuple[str, Stored]]:
        """Yield name and checkpoint tensor of each weight of AltUp outside of layers: maps from the embedding
        to each stream but the first, and back at the end.

        Arguments:
            root: Prefix of the embedding's tensor name, such as "model.".
            hidden: Hidden size of the model.
        """
        for stream in range(1, self.streams):
            for direction, name in (("in", "altup_projections"), ("out", "altup_unembed_projections")):
                stored = Stored(f"{root}{name}.{stream - 1}.weight", (hidden, hidden))
                yield f"{BESIDE}{direction}.{stream}", stored


@dataclass(frozen=True)
class LayerInputSpec:
    """Per-layer input (Gemma 3n and 4): a vector per token and layer, which the layer gates by its residual
    stream, projects and adds to the stream."""

    points: ClassVar[tuple[str, ...]] = tuple(
        f"layer_input_{name}" for name in ("embed", "gate", "scale", "normalized", "out")
    )
    """Kinds of hook points that per-layer inputs have in every layer."""

    size: int
    """Width of one layer's vector."""
    rows: int
    """Number of rows of the table with the vectors of all layers; token ids beyond it use the first row."""
    activation: ActivationName
    """Activation function of the gate."""

    def tensors(self, hidden: int) -> Iterator[tuple[str, Stored]]:
        """Yield name and checkpoint tensor of each weight of the per-layer input in a layer. hidden: hidden
        size of the model."""
        yield "input.gate", Stored("per_layer_input_gate.weight", (self.size, hidden))
        yield "input.out", Stored("per_layer_projection.weight", (hidden, self.size))
        yield "input.norm", Stored("post_per_layer_input_norm.weight", (hidden,))

    def outer_tensors(self, root: str, hidden: int, layers: int) -> Iterator[tuple[str, Stored]]:
        """Yield name and checkpoint tensor of each weight of per-layer inputs outside of layers: a table and
        a projection with the inputs of all layers side by side, and a norm.

        Arguments:
            root: Prefix of the embedding's tensor name, such as "model.".
            hidden: Hidden size of the model.
            layers: Number of layers.
        """
        width = layers * self.size
        yield f"{BESIDE}table", Stored(f"{root}embed_tokens_per_layer.weight", (self.rows, width))
        yield f"{BESIDE}projection", Stored(f"{root}per_layer_model_projection.weight", (width, hidden))
        yield f"{BESIDE}norm", Stored(f"{root}per_layer_projection_norm.weight", (self.size,))


def laurel_tensors(rank: int, hidden: int) -> Iterator[tuple[str, Stored]]:
    """Yield name and checkpoint tensor of each weight of LAuReL in a layer.

    Arguments:
        rank: Rank of LAuReL's low-rank projection.
        hidden: Hidden size of the model.
    """
    yield "laurel.left", Stored("laurel.linear_left.weight", (rank, hidden))
    yield "laurel.right", Stored("laurel.linear_right.weight", (hidden, rank))
    yield "laurel.norm", Stored("laurel.post_laurel_norm.weight", (hidden,))

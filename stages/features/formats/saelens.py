"""SAELens: cfg.json beside sae_weights.safetensors (older: model.safetensors), a folder per layer.

W_enc [hidden, feature], W_dec [feature, hidden], b_dec; b_enc, except for gated ones (b_gate, b_mag, r_mag
instead); threshold (jumprelu), W_skip [out, in] (skip transcoders). The arithmetic is that of SAELens 6:
JumpReLU and TopK are rectified.

`expected_average_only_in` means inputs scaled to mean norm sqrt(hidden) by one factor that is in no file;
SAELens folds it into the weights at the end of training, so the weights are read unchanged.

Border: tensors; saelens_config.py reads cfg.json.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....store.errors import DictionaryError
from ..layers.files import CFG_JSON, DictionaryFiles
from .fields import apply_fields
from .layered import require_shapes
from .saelens_config import SaeLensConfig
from .single import (
    LayerByLayer,
    LayerHooks,
    OneLayer,
    StatedHooks,
    config_beside,
    files_beside,
    layer_hooks,
)

if TYPE_CHECKING:
    from torch import Tensor

    from ..layers.activations import Activation
    from ..layers.layer import LayerFeatures
    from ..layers.scaling import Scaling

__all__ = ["part", "read", "recognises"]

WEIGHTS = ("sae_weights.safetensors", "model.safetensors")
_NORM_ROWS = 4096
"""Number of decoder rows that are converted to float32 at once."""
_FOLDED_NORMS = ("ln1_normalized", "ln2_normalized", "mlp_pre", "ln_final_normalized", "final_norm")
"""Hook kinds whose values differ in a model whose norm gains are folded into the next weights (fold_ln)."""
_FOLDED_VALUES = ("v", "z", "result")
"""Hook kinds whose values differ in a model whose value biases are folded into b_O (fold_value_biases)."""


def part(files: DictionaryFiles, name: str, read: str | None, write: str | None) -> OneLayer:
    """The dictionary in one folder; see `LayerByLayer.part`. `name` is the folder's weight file."""
    place, fields = config_beside(files, name, CFG_JSON)
    config = SaeLensConfig.parse(fields, place)
    hooks = layer_hooks(files, _stated_hooks(config), read, write)
    layer = hooks.layer
    _refuse_folded_weights(config, hooks, place)
    shapes = require_shapes(files, name, _expected(config, files.shapes(name)))
    d_out = shapes["W_dec"][1]
    if "W_skip" in shapes:
        require_shapes(files, name, {"W_skip": (d_out, config.d_in)})
    apply_fields("saelens tensors", shapes, files.path(name))

    def open_layer() -> LayerFeatures:
        from ..layers.layer import LayerFeatures

        tensors = files.tensors(name)
        return LayerFeatures(
            layer=layer,
            W_enc=tensors["W_enc"].T,
            W_dec={layer: _decoder(config, tensors, files.path(name))},
            activation=_activation(config, tensors),
            b_enc=tensors.get("b_enc") if config.activation != "gated" else None,
            b_dec=tensors["b_dec"],
            W_skip=tensors.get("W_skip"),
            scaling=_scaling(config),
            centred=config.apply_b_dec_to_input,
            unit=_row_norms(tensors["W_dec"]) if config.rescale_acts_by_decoder_norm else None,
        )

    return OneLayer(
        where=name.rpartition("/")[0] or name,
        hooks=hooks,
        n_features=config.d_sae,
        d_in=config.d_in,
        d_out=d_out,
        files=(name,),
        open=open_layer,
        model_name=config.model_name,
        has_skip="W_skip" in shapes,
        settings={
            "architecture": config.architecture,
            "k": config.k,
            "normalize_activations": config.normalize_activations,
            "apply_b_dec_to_input": config.apply_b_dec_to_input,
            "rescale_acts_by_decoder_norm": config.rescale_acts_by_decoder_norm,
        },
    )


FORMAT = LayerByLayer("saelens", lambda files: files_beside(files, dict.fromkeys(WEIGHTS, CFG_JSON)), part)
recognises, read = FORMAT.recognises, FORMAT.read


def _stated_hooks(config: SaeLensConfig) -> StatedHooks:
    """Layer and hook points that cfg.json states."""
    # Old transcoders do not state where they write: the MLP's output.
    written = config.hook_name_out or ("mlp_out" if config.is_transcoder else None)
    return StatedHooks(config.hook_layer, config.hook_name, written)


def _refuse_folded_weights(config: SaeLensConfig, hooks: LayerHooks, place: Path) -> None:
    """Raise DictionaryError if the dictionary was trained on states that folding of weights had changed."""
    for name, kinds in (("fold_ln", _FOLDED_NORMS), ("fold_value_biases", _FOLDED_VALUES)):
        if name in config.processing and hooks.read in kinds:
            raise DictionaryError(
                f"the dictionary of {place} was trained on a model whose weights were folded ({name} is "
                f"True), which changes the states at {hooks.read} that its features read; use another "
                "dictionary"
            )


def _expected(config: SaeLensConfig, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int | None, ...]]:
    """Shapes that the tensors of a file must have, by name.

    Arguments:
        config: The file's cfg.json.
        shapes: Shapes of its tensors, from whose names the name of the threshold is chosen.
    """
    size, d_in, d_out = config.d_sae, config.d_in, config.d_out
    expected: dict[str, tuple[int | None, ...]] = {
        "W_enc": (d_in, size),
        "W_dec": (size, d_out),
        "b_dec": (d_out,),
    }
    if config.activation == "gated":
        expected |= dict.fromkeys(("b_gate", "b_mag", "r_mag"), (size,))
    else:
        expected["b_enc"] = (size,)
    if config.activation == "jumprelu":
        # Names of the threshold: log_threshold in training files, topk_threshold in batchtopk files.
        threshold_name = next(
            (name for name in ("log_threshold", "topk_threshold") if name in shapes), "threshold"
        )
        expected[threshold_name] = () if threshold_name == "topk_threshold" else (size,)
    if "skip" in config.architecture:
        expected["W_skip"] = (d_out, d_in)
    return expected


def _activation(config: SaeLensConfig, tensors: dict[str, Tensor]) -> Activation:
    """Activation function that cfg.json names, with its thresholds or gates from `tensors`."""
    from ..layers.activations import AbsTopK, Gated, JumpReLU, ReLU, TopK

    if config.activation == "jumprelu":
        if "log_threshold" in tensors:
            # SAELens stores the logarithm while training, which some published files still hold.
            return JumpReLU(tensors["log_threshold"].exp(), rectified=True)
        return JumpReLU(tensors["threshold" if "threshold" in tensors else "topk_threshold"], rectified=True)
    if config.activation == "gated":
        return Gated(tensors["b_gate"], tensors["b_mag"], tensors["r_mag"])
    if config.activation in ("topk", "abstopk"):
        return TopK(config.k) if config.activation == "topk" else AbsTopK(config.k)
    return ReLU()


def _scaling(config: SaeLensConfig) -> Scaling:
    """Normalisation of the input that cfg.json names; a transcoder's output is not scaled back."""
    from ..layers.scaling import AsIs, ConstantNorm, InputOnly, LayerNorm

    scalings: dict[str, Any] = {"constant_norm_rescale": ConstantNorm, "layer_norm": LayerNorm}
    scaling: Scaling = scalings.get(config.normalize_activations, AsIs)()
    return InputOnly(scaling) if config.is_transcoder else scaling


def _decoder(config: SaeLensConfig, tensors: dict[str, Tensor], place: Path) -> Tensor:
    """Decoder [feature, d_out]; rows are multiplied by the fine-tuning factors that some old files have."""
    factors = tensors.get("scaling_factor")
    if factors is None or bool((factors == 1).all()):
        return tensors["W_dec"]
    if not config.finetuning_scaling_factor:
        raise DictionaryError(
            f"{place} has a tensor scaling_factor other than 1, but its cfg.json does not state "
            "finetuning_scaling_factor: true; correct one of the two files"
        )
    return tensors["W_dec"] * factors[:, None]


def _row_norms(W_dec: Tensor) -> Tensor:
    """Norms of the decoder rows [feature], float32, at least 1e-8."""
    # Converted block by block, so that no float32 copy of the whole decoder is made.
    import torch

    # The clamp avoids a division by 0 for features that write nothing.
    norms = [rows.float().norm(dim=-1) for rows in W_dec.split(_NORM_ROWS)]
    return torch.cat(norms).clamp(min=1e-8)

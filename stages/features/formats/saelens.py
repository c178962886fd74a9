"""SAELens: cfg.json beside sae_weights.safetensors (older: model.safetensors), a folder per layer.

W_enc [hidden, feature], W_dec [feature, hidden], b_dec; b_enc except where gated (b_gate, b_mag, r_mag
instead); threshold (jumprelu), W_skip [out, in] (skip transcoders). The arithmetic is that of SAELens 6: a
JumpReLU is rectified, the k largest are too.

`expected_average_only_in` asks for inputs of mean norm sqrt(hidden) by one factor that no file holds; like
SAELens, which folds it into the weights once training ends, this reads the weights as they are.

Border: tensors; cfg.json is saelens_config.py's.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....store.errors import DictionaryError
from ..layers.files import CFG_JSON, DictionaryFiles
from .fields import apply_fields
from .layered import require_shapes
from .saelens_config import SaeLensConfig
from .single import LayerByLayer, LayerHooks, OneLayer, SaidHooks, files_beside, hooks_given

if TYPE_CHECKING:
    from torch import Tensor

    from ..layers.activations import Activation
    from ..layers.layer import LayerFeatures
    from ..layers.scaling import Scaling

__all__ = ["part", "read", "recognises"]

WEIGHTS = ("sae_weights.safetensors", "model.safetensors")
_NORM_ROWS = 4096
_FOLDED_NORMS = ("ln1_normalized", "ln2_normalized", "mlp_pre", "ln_final_normalized", "final_norm")
_FOLDED_VALUES = ("v", "z", "result")


def part(files: DictionaryFiles, name: str, read: str | None, write: str | None) -> OneLayer:
    """The dictionary of one folder, given its weight file."""
    folder, slash, _ = name.rpartition("/")
    cfg = f"{folder}{slash}{CFG_JSON}"
    config = SaeLensConfig.parse(files.json(cfg), files.path(cfg))
    hooks = hooks_given(files, _hooks_said(config), read, write)
    layer = hooks.layer
    _require_unprocessed(config, hooks, files.path(cfg))
    found = require_shapes(files, name, _expected(config, files.shapes(name)))
    d_out = found["W_dec"][1]
    if "W_skip" in found:
        require_shapes(files, name, {"W_skip": (d_out, config.d_in)})
    apply_fields("saelens tensors", found, files.path(name))

    def open_layer() -> LayerFeatures:
        from ..layers.layer import LayerFeatures

        given = files.tensors(name)
        return LayerFeatures(
            layer=layer,
            W_enc=given["W_enc"].T,
            W_dec={layer: _decoder(config, given, files.path(name))},
            activation=_activation(config, given),
            b_enc=given.get("b_enc") if config.activation != "gated" else None,
            b_dec=given["b_dec"],
            W_skip=given.get("W_skip"),
            scaling=_scaling(config),
            centred=config.apply_b_dec_to_input,
            unit=_row_norms(given["W_dec"]) if config.rescale_acts_by_decoder_norm else None,
        )

    return OneLayer(
        where=folder or name,
        hooks=hooks,
        n_features=config.d_sae,
        d_in=config.d_in,
        d_out=d_out,
        files=(name,),
        open=open_layer,
        model_name=config.model_name,
        has_skip="W_skip" in found,
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


def _hooks_said(config: SaeLensConfig) -> SaidHooks:
    """Layer and hook points as the configuration says; transcoders of old files write the MLP's output."""
    written = config.hook_name_out or ("mlp_out" if config.is_transcoder else None)
    return SaidHooks(config.hook_layer, config.hook_name, written)


def _require_unprocessed(config: SaeLensConfig, hooks: LayerHooks, place: Path) -> None:
    """Raise DictionaryError where weights were folded before a hook point was read that this changes: the
    output of norms, or values.
    """
    for name, kinds in (("fold_ln", _FOLDED_NORMS), ("fold_value_biases", _FOLDED_VALUES)):
        if name in config.processing and hooks.read in kinds:
            raise DictionaryError(
                f"expected {name} to be False in {place}, as the features read {hooks.read}, which it "
                "changes, found True; take another dictionary"
            )


def _expected(config: SaeLensConfig, found: dict[str, tuple[int, ...]]) -> dict[str, tuple[int | None, ...]]:
    size, d_in = config.d_sae, config.d_in
    d_out = config.d_out
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
        given = next((name for name in ("log_threshold", "topk_threshold") if name in found), "threshold")
        expected[given] = () if given == "topk_threshold" else (size,)
    if "skip" in config.architecture:
        expected["W_skip"] = (d_out, d_in)
    return expected


def _activation(config: SaeLensConfig, given: dict[str, Tensor]) -> Activation:
    from ..layers.activations import AbsTopK, Gated, JumpReLU, ReLU, TopK

    if config.activation == "jumprelu":
        if "log_threshold" in given:
            return JumpReLU(given["log_threshold"].exp(), rectified=True)
        return JumpReLU(given["threshold" if "threshold" in given else "topk_threshold"], rectified=True)
    if config.activation == "gated":
        return Gated(given["b_gate"], given["b_mag"], given["r_mag"])
    if config.activation in ("topk", "abstopk"):
        return TopK(config.k) if config.activation == "topk" else AbsTopK(config.k)
    return ReLU()


def _scaling(config: SaeLensConfig) -> Scaling:
    from ..layers.scaling import AsIs, ConstantNorm, InputOnly, LayerNorm

    known: dict[str, Any] = {"constant_norm_rescale": ConstantNorm, "layer_norm": LayerNorm}
    made: Scaling = known.get(config.normalize_activations, AsIs)()
    return InputOnly(made) if config.is_transcoder else made


def _decoder(config: SaeLensConfig, given: dict[str, Tensor], place: Path) -> Tensor:
    """W_dec; rows scaled where an old file says that fine-tuning found factors for activations."""
    factors = given.get("scaling_factor")
    if factors is None or bool((factors == 1).all()):
        return given["W_dec"]
    if not config.finetuning_scaling_factor:
        raise DictionaryError(
            f"{place} has a scaling_factor other than 1 that its cfg.json does not speak of "
            "(finetuning_scaling_factor); correct one of them"
        )
    return given["W_dec"] * factors[:, None]


def _row_norms(W_dec: Tensor) -> Tensor:
    """Norms of decoder rows [feature], float32; rows are widened block by block."""
    import torch

    norms = [rows.float().norm(dim=-1) for rows in W_dec.split(_NORM_ROWS)]
    return torch.cat(norms).clamp(min=1e-8)

"""sparsify (EleutherAI): cfg.json beside sae.safetensors, a folder per hook point, such as layers.12.mlp.

encoder.weight [feature, hidden], encoder.bias, W_dec [feature, hidden], b_dec, optionally W_skip [out, in].
Autoencoders subtract b_dec from their input; transcoders (`transcode`) read a module's input and write its
output. Pre-activations are rectified, then the k largest are kept (topk), or the largest of each of k groups
(groupmax).

Border: folders and tensors. The name of a folder is a module of the model, which determines the hook point.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ....store.errors import DictionaryError
from ..layers.files import CFG_JSON, DictionaryFiles
from ..layers.names import module_hook
from .fields import apply_fields, to_whole
from .layered import require_shapes
from .single import LayerByLayer, OneLayer, StatedHooks, config_beside, files_named, layer_hooks

if TYPE_CHECKING:
    from ..layers.layer import LayerFeatures

__all__ = ["part", "read", "recognises"]

WEIGHTS = "sae.safetensors"
_NUMBERED = re.compile(r"(?:\w+\.)*?(?:layers|h)[._](\d{1,9})(?:\..+)?")


def part(files: DictionaryFiles, name: str, read: str | None, write: str | None) -> OneLayer:
    """The dictionary in one folder; see `LayerByLayer.part`. `name` is the folder's sae.safetensors."""
    folder = name.rpartition("/")[0]
    config_path, config = config_beside(files, name, CFG_JSON)
    apply_fields("sparsify", config, config_path)
    # The module's name states the hook point: "layers.12.mlp".
    module = folder.rpartition("/")[2] or files.directory.name
    is_transcoder = bool(config.get("transcode", False))
    hooks = layer_hooks(files, _stated_hooks(module, is_transcoder), read, write)
    layer = hooks.layer
    # A missing entry has sparsify's default.
    k, activation = to_whole(config.get("k", 32), "k", config_path), config.get("activation", "topk")
    size, d_in = require_shapes(files, name, {"encoder.weight": (None, None)})["encoder.weight"]
    d_out = require_shapes(files, name, {"W_dec": (size, None)})["W_dec"][1]
    expected = {"encoder.bias": (size,), "b_dec": (d_out,)}
    skip: dict[str, tuple[int, ...]] = {"W_skip": (d_out, d_in)}
    has_skip = bool(config.get("skip_connection", False))
    shapes = require_shapes(files, name, {**expected, **(skip if has_skip else {})}, skip)
    apply_fields("sparsify tensors", shapes, files.path(name))
    if activation == "groupmax" and size % k:
        raise DictionaryError(
            f"expected k to divide the number of features, {size}, in {config_path}, as groupmax needs equal "
            f"groups, found k {k}; correct k"
        )

    def open_layer() -> LayerFeatures:
        from ..layers.activations import GroupMax, TopK
        from ..layers.layer import LayerFeatures

        tensors = files.tensors(name)
        return LayerFeatures(
            layer=layer,
            W_enc=tensors["encoder.weight"],
            W_dec={layer: tensors["W_dec"]},
            activation=TopK(k) if activation == "topk" else GroupMax(k),
            b_enc=tensors["encoder.bias"],
            b_dec=tensors["b_dec"],
            W_skip=tensors.get("W_skip"),
            centred=not is_transcoder,
        )

    return OneLayer(
        where=folder or name,
        hooks=hooks,
        n_features=size,
        d_in=d_in,
        d_out=d_out,
        files=(name,),
        open=open_layer,
        has_skip="W_skip" in shapes,
        settings={"activation": activation, "k": k, "transcode": is_transcoder},
    )


FORMAT = LayerByLayer("sparsify", lambda files: files_named(files, WEIGHTS), part)
recognises, read = FORMAT.recognises, FORMAT.read


def _stated_hooks(module: str, is_transcoder: bool) -> StatedHooks:
    """Hook points that the name of a folder ("layers.12.mlp") stands for; unknown ones are None."""
    if module == "embed_tokens":
        return StatedHooks(0, "embed")
    numbered = _NUMBERED.fullmatch(module)
    ends = ("input", "output") if is_transcoder else ("output", "output")
    return StatedHooks(numbered and int(numbered[1]), *(module_hook(module, end) for end in ends))

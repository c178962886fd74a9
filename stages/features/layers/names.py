"""Names of hook points in the files of dictionaries, and hook points given by the caller.

Files name hook points like TransformerLens (SAELens, with the block: "blocks.12.hook_resid_post"), like
circuit-tracer (inside a block: "mlp.hook_in"), or by the module of transformers whose output is read
("model.layers.12.mlp"). Where mizarr gives a name another meaning (mlp.hook_pre and mlp.hook_post), the
meaning in the files counts.

A caller overrides them with read= and write=, or after the name of a dictionary (`DictionaryReference`), in
every function and command.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from ....store.errors import DictionaryError, HookPointNotFound
from ...forward.architectures.points import BY_NAME, HookPoint

if TYPE_CHECKING:
    from ...forward.architectures.architecture import Architecture

__all__ = [
    "HOOKS_ADVICE",
    "MODULES",
    "NamedHook",
    "hook_kind",
    "hook_name",
    "layer_in",
    "module_hook",
    "parse_hook",
    "require_module_output",
]

HOOKS_ADVICE = (
    "name the hook points that its features read and write with read= and write= (--read and --write of "
    "mizarr features), or after the name of the dictionary, 'NAME?read=hook_resid_post'; if the files do not "
    "state the layer either, include it: blocks.3.hook_resid_post"
)
"""Last part of error messages: how the user can name hook points that a dictionary's files do not name."""
# Names that only circuit-tracer has. hook_mlp_in (also in older files) is TransformerLens's copy of
# resid_mid.
_CIRCUIT_TRACER_NAMES = {"mlp.hook_in": "mlp_pre", "mlp.hook_out": "mlp_post", "hook_mlp_in": "resid_mid"}
# Names that start so are complete; all others are inside a block.
_OUTSIDE = ("blocks.", "hook_embed", "ln_final.")
_BLOCK = re.compile(r"^blocks\.(\d{1,9})\.(.+)$")
# Module of a layer, as named by transformers -> (hook at input, at output). Left out are names that mean
# different things in different families: post_attention_layernorm stands before the MLP in Llama and behind
# attention in Gemma 2; self_attention adds the stream in BLOOM and not in Falcon.
MODULES: dict[str, tuple[str | None, str | None]] = {
    "": ("resid_pre", "resid_post"),
    "self_attn": (None, "attn_out"),
    "attn": (None, "attn_out"),
    "attention": (None, "attn_out"),
    "self_attn.o_proj": ("z", "attn_out"),
    "mlp": ("mlp_pre", "mlp_post"),
    "pre_feedforward_layernorm": ("resid_mid", "mlp_pre"),
    "post_feedforward_layernorm": ("mlp_post", "mlp_out"),
}
# Prefixes of the layer list in models with a single stack; encoder-decoders and vision towers are excluded.
_STACKS = (
    "",
    "model.",
    "language_model.",
    "model.language_model.",
    "language_model.model.",
    "transformer.",
    "gpt_neox.",
    "backbone.",
)
_MODULE = re.compile(r"((?:\w+\.)*?)(?:layers|h|blocks)[._](\d{1,9})(?:\.(.+))?")
_NUMBER = re.compile(r"(?<![A-Za-z0-9])\d{1,9}(?![A-Za-z0-9])")
_OTHER_OUTPUTS = {
    "bloom": "the module gives its output with the stream added to it",
    "gemma4_text": "experts beside the module are part of the same output",
    "minimax": "the module gives its output before the factor of the residual",
}
"""Families whose attention or MLP modules return something else than what is added to the stream, and why.

Found by comparing the modules of every family in transformers with our hook points.
"""


class NamedHook(NamedTuple):
    """The hook point that a name refers to."""

    kind: str
    """Hook point kind, such as "resid_mid"."""
    layer: int | None = None
    """Layer of the hook point; None if the name states none ("mlp.hook_in") or it is outside the blocks."""
    module: str = ""
    """The transformers module name, or "" if the hook point was named directly."""


def hook_kind(name: str) -> str:
    """Kind ("resid_mid") of the hook point that a name in any notation of `parse_hook` refers to."""
    return parse_hook(name).kind


def parse_hook(name: str) -> NamedHook:
    """Hook point that a name in a dictionary's files, or given by the user, refers to.

    Arguments:
        name: "blocks.12.hook_resid_post", "hook_embed", a name inside a block ("mlp.hook_in"), a kind of hook
            point ("mlp_pre"), or a module of transformers ("model.layers.12"): its output, unless ".input" is
            appended.

    Raises:
        DictionaryError: No hook point has this name.
    """
    if name in BY_NAME:
        return NamedHook(name)
    path, _, end = name.rpartition(".")
    module, module_end = (path, end) if end in ("input", "output") else (name, "output")
    if named_hook := module_hook(module, module_end):
        return named_hook
    # Names inside a block are looked up as those of block 0.
    full = name if name.startswith(_OUTSIDE) else f"blocks.0.{name}"
    match = _BLOCK.match(full)
    if match and match[2] in _CIRCUIT_TRACER_NAMES:
        kind = _CIRCUIT_TRACER_NAMES[match[2]]
    else:
        try:
            kind = HookPoint.from_transformer_lens(full).kind
        except HookPointNotFound as error:
            # Only the suggestion is taken from the inner message, which speaks of mizarr's own names.
            near = str(error).partition("; did you mean ")[2].rstrip("?")
            raise DictionaryError(
                f"expected a hook point of TransformerLens or a module of transformers, found {name!r:.200}, "
                f"which is not known{f' (did you mean {near}?)' if near else ''}; {HOOKS_ADVICE}"
            ) from error
    return NamedHook(kind, int(match[1]) if match and full == name else None)


def module_hook(name: str, end: str) -> NamedHook | None:
    """Hook point at the input or output of a module of transformers.

    Arguments:
        name: Name of the module, such as "model.layers.12.mlp".
        end: "input" or "output".

    Returns:
        The hook point; None if the name is not a module of a layer, or if no hook point has its value.
    """
    match = _MODULE.fullmatch(name)
    if not match or match[1] not in _STACKS or name.startswith("blocks.") or (match[3] or "") not in MODULES:
        return None
    kind = MODULES[match[3] or ""][end == "output"]
    return None if kind is None else NamedHook(kind, int(match[2]), name)


def layer_in(name: str | None) -> int | None:
    """The only number in a hook point's name, which is its layer; None if there is none or several."""
    numbers = _NUMBER.findall(name or "")
    return int(numbers[0]) if len(numbers) == 1 else None


def require_module_output(hook: NamedHook, config: Architecture, model: str) -> None:
    """Check that in this model the output of a transformers module equals the hook point taken for it.

    The hook points attn_out and mlp_post are what is added to the residual stream. In some families the
    module's output differs: Gemma 2 norms it outside of the module, Granite multiplies it afterwards, BLOOM's
    modules add the residual stream themselves.

    Arguments:
        hook: Hook point derived from the name of a module.
        config: Architecture of the model.
        model: Name of the model, for messages.

    Raises:
        DictionaryError: The two values differ in this model.
    """
    if hook.kind not in ("attn_out", "mlp_post"):
        return
    output_weight = {"attn_out": "o", "mlp_post": "down"}[hook.kind]
    layers = [] if config.kind == "bridge" else config.tensors.layers[hook.layer : (hook.layer or 0) + 1]
    reason = _OTHER_OUTPUTS.get(config.model_type)
    if hook.kind == "attn_out" and HookPoint("ln1_post_scale", hook.layer) in config.hook_points:
        reason = "the module gives its output before the norm that follows it"
    elif any(part.factors for layer in layers for name, part in layer.items() if name == output_weight):
        reason = "the module gives its output before the residual multiplier"
    if reason is None:
        return
    raise DictionaryError(
        f"expected a dictionary of a module whose output is {HookPoint(hook.kind, hook.layer)} in {model}, "
        f"found one of {hook.module!r}, where {reason}; use a dictionary of the residual stream, or "
        f"{HOOKS_ADVICE}"
    )


def hook_name(kind: str) -> str:
    """Name of a kind of hook point in circuit-tracer or TransformerLens, without the block: "mlp.hook_in".

    Raises:
        DictionaryError: These programs have no name for this kind of hook point.
    """
    for name, named_kind in _CIRCUIT_TRACER_NAMES.items():
        # Of the two names of resid_mid, TransformerLens's is the common one, which is found below.
        if named_kind == kind and name != "hook_mlp_in":
            return name
    if not BY_NAME[kind].per_layer:
        return BY_NAME[kind].path
    full_name = HookPoint(kind, 0).transformer_lens
    if full_name is None:
        raise DictionaryError(
            f"the hook point kind {kind!r} has no name in TransformerLens or circuit-tracer, so this "
            "dictionary cannot be exported; export one of another hook point"
        )
    return full_name.removeprefix("blocks.0.")

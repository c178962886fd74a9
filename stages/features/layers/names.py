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
    "say where its features read and write with read= and write= (--read and --write of mizarr features), "
    "or after the name of the dictionary, 'NAME?read=hook_resid_post'; if the files do not state the layer "
    "either, include it: blocks.3.hook_resid_post"
)
"""How the caller gives hook points that the files do not state; the end of error messages."""
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
    """Kind of the hook point."""
    layer: int | None = None
    """Its layer; None outside blocks, and for names inside a block."""
    module: str = ""
    """The transformers module name, or "" if the hook point was named directly."""


def hook_kind(name: str) -> str:
    """Kind of the hook point that `parse_hook` finds for a name."""
    return parse_hook(name).kind


def parse_hook(name: str) -> NamedHook:
    """Hook point of a name: "blocks.12.hook_resid_post", a name inside a block ("mlp.hook_in"), "hook_embed",
    a hook kind ("mlp_pre"), or a module of transformers ("model.layers.12"), which means its output unless
    ".input" is appended.

    Raises:
        DictionaryError: No hook point has this name.
    """
    if name in BY_NAME:
        return NamedHook(name)
    path, _, end = name.rpartition(".")
    ends = (path, end) if end in ("input", "output") else (name, "output")
    if module := module_hook(*ends):
        return module
    # Names inside a block are looked up as those of block 0.
    full = name if name.startswith(_OUTSIDE) else f"blocks.0.{name}"
    match = _BLOCK.match(full)
    if match and match[2] in _CIRCUIT_TRACER_NAMES:
        kind = _CIRCUIT_TRACER_NAMES[match[2]]
    else:
        try:
            kind = HookPoint.from_transformer_lens(full).kind
        except HookPointNotFound as error:
            # The inner message's suggestion is repeated; its other words are about our names.
            near = str(error).partition("; did you mean ")[2].rstrip("?")
            raise DictionaryError(
                f"expected a hook point of TransformerLens or a module of transformers, found {name!r:.200}, "
                f"which is not known{f', nearest is {near}' if near else ''}; {HOOKS_ADVICE}"
            ) from error
    return NamedHook(kind, int(match[1]) if match and full == name else None)


def module_hook(name: str, end: str) -> NamedHook | None:
    """Hook point at the input or output of a module of transformers.

    Arguments:
        name: Name of the module, such as "model.layers.12.mlp".
        end: "input" or "output".

    Returns:
        None if the name is no such module, or no hook point has its value.
    """
    match = _MODULE.fullmatch(name)
    if not match or match[1] not in _STACKS or name.startswith("blocks.") or (match[3] or "") not in MODULES:
        return None
    kind = MODULES[match[3] or ""][end == "output"]
    return None if kind is None else NamedHook(kind, int(match[2]), name)


def layer_in(name: str | None) -> int | None:
    """Layer number in a hook name, if exactly one number occurs; else None."""
    numbers = _NUMBER.findall(name or "")
    return int(numbers[0]) if len(numbers) == 1 else None


def require_module_output(hook: NamedHook, config: Architecture, model: str) -> None:
    """Check that a module's output is, in this model, the hook point that stands for it.

    attn_out and mlp_post are the values added to the residual stream: after the norm of attention's output,
    which is outside of the module in Gemma 2, and after a residual multiplier (Granite). Modules of BLOOM add
    the stream themselves.

    Arguments:
        hook: Hook point derived from the name of a module.
        config: Architecture of the model.
        model: Name of the model, for messages.

    Raises:
        DictionaryError: The output differs.
    """
    if hook.kind not in ("attn_out", "mlp_post"):
        return
    weight = {"attn_out": "o", "mlp_post": "down"}[hook.kind]
    layers = [] if config.kind == "bridge" else config.tensors.layers[hook.layer : (hook.layer or 0) + 1]
    reason = _OTHER_OUTPUTS.get(config.model_type)
    if hook.kind == "attn_out" and HookPoint("ln1_post_scale", hook.layer) in config.hook_points:
        reason = "the module gives its output before the norm that follows it"
    elif any(part.factors for layer in layers for name, part in layer.items() if name == weight):
        reason = "the module gives its output before the residual multiplier"
    if reason is None:
        return
    raise DictionaryError(
        f"expected a module whose output is {HookPoint(hook.kind, hook.layer)} in {model}, found "
        f"{hook.module!r}, of which {reason}; take a dictionary of the residual stream, or {HOOKS_ADVICE}"
    )


def hook_name(kind: str) -> str:
    """Name of a hook kind inside a block in other programs: "mlp.hook_in" for "mlp_pre".

    Raises:
        DictionaryError: Other programs have no name for it.
    """
    for name, own_kind in _CIRCUIT_TRACER_NAMES.items():
        # Of the two names of resid_mid the common one is written.
        if own_kind == kind and name != "hook_mlp_in":
            return name
    if not BY_NAME[kind].per_layer:
        return BY_NAME[kind].path
    full_name = HookPoint(kind, 0).transformer_lens
    if full_name is None:
        raise DictionaryError(f"{kind} has no name in other programs' files; export another dictionary")
    return full_name.removeprefix("blocks.0.")

"""Which hook point the files of a dictionary mean by a name, and how a caller says it for them.

Files spell hook points as TransformerLens does (SAELens, with its block: "blocks.12.hook_resid_post"), as
circuit-tracer does (inside a block: "mlp.hook_in"), or by the module of transformers whose output is read
("model.layers.12.mlp"). Where our strings give a name another meaning - mlp.hook_pre and mlp.hook_post - it
is theirs that counts here.

A caller says it with read= and write=, or behind the name of a dictionary (`DictionaryReference`), which
every function and command takes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from ....store.errors import DictionaryError, HookPointNotFound
from ...forward.architectures.points import BY_NAME, HookPoint

if TYPE_CHECKING:
    from ...forward.architectures.architecture import Architecture

__all__ = [
    "HOW_TO_SAY",
    "MODULES",
    "NamedHook",
    "hook_kind",
    "hook_name",
    "layer_in",
    "module_hook",
    "parse_hook",
    "require_module_output",
]

HOW_TO_SAY = (
    "say where its features read and write with read= and write= (--read and --write of mizarr features), "
    "or behind the name of the dictionary, 'NAME?read=hook_resid_post'; where the files do not say the layer "
    "either, with it: blocks.3.hook_resid_post"
)
"""What a caller does where files do not say it; ends messages."""
# Names that only circuit-tracer has. Its, and older files', hook_mlp_in is TransformerLens's copy of
# resid_mid.
_OWN = {"mlp.hook_in": "mlp_pre", "mlp.hook_out": "mlp_post", "hook_mlp_in": "resid_mid"}
_OUTSIDE = ("blocks.", "hook_embed", "ln_final.")
_BLOCK = re.compile(r"^blocks\.(\d{1,9})\.(.+)$")
# Module of a layer, as transformers names it -> (its input, its output). Left out are names that mean
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
# Lists of layers of models that are one stack. An encoder beside a decoder, or a vision tower, is another.
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
"""Families whose attention or MLP modules give something else than what is added to the stream, and what.
Found by comparing the modules of every family that transformers has with our hook points."""


class NamedHook(NamedTuple):
    """What a name says.

    kind: hook kind. layer: None outside blocks, and for names inside a block. module: the name itself where
    it is a module of transformers, else "".
    """

    kind: str
    layer: int | None = None
    module: str = ""


def hook_kind(name: str) -> str:
    """The hook kind that `parse_hook` finds in a name."""
    return parse_hook(name).kind


def parse_hook(name: str) -> NamedHook:
    """What is said by a full name such as "blocks.12.hook_resid_post", a name inside a block ("mlp.hook_in"),
    "hook_embed", a hook kind ("mlp_pre"), or a module of transformers ("model.layers.12"), whose output is
    meant unless ".input" stands behind it.

    Raises DictionaryError for a name nobody gives to a hook point.
    """
    if name in BY_NAME:
        return NamedHook(name)
    path, _, end = name.rpartition(".")
    ends = (path, end) if end in ("input", "output") else (name, "output")
    if module := module_hook(*ends):
        return module
    full = name if name.startswith(_OUTSIDE) else f"blocks.0.{name}"
    found = _BLOCK.match(full)
    if found and found[2] in _OWN:
        kind = _OWN[found[2]]
    else:
        try:
            kind = HookPoint.from_transformer_lens(full).kind
        except HookPointNotFound as error:
            near = str(error).partition("; did you mean ")[2].rstrip("?")
            raise DictionaryError(
                f"expected a hook point of TransformerLens or a module of transformers, found {name!r:.200}, "
                f"which is not known{f', nearest is {near}' if near else ''}; {HOW_TO_SAY}"
            ) from error
    return NamedHook(kind, int(found[1]) if found and full == name else None)


def module_hook(name: str, end: str) -> NamedHook | None:
    """The input or output (`end`) of a module of transformers, "model.layers.12.mlp", as a hook point; None
    for names of no such module, and for what no hook point holds.
    """
    found = _MODULE.fullmatch(name)
    if not found or found[1] not in _STACKS or name.startswith("blocks.") or (found[3] or "") not in MODULES:
        return None
    kind = MODULES[found[3] or ""][end == "output"]
    return None if kind is None else NamedHook(kind, int(found[2]), name)


def layer_in(name: str | None) -> int | None:
    """Layer of a hook name of any convention: the only number in it; None for no number, or several."""
    numbers = _NUMBER.findall(name or "")
    return int(numbers[0]) if len(numbers) == 1 else None


def require_module_output(hook: NamedHook, config: Architecture, model: str) -> None:
    """Raise DictionaryError where the hook point taken for a module holds something else in this model.

    attn_out and mlp_post are what is added to the stream: behind the norm of attention's output, which stands
    outside of the module (Gemma 2), and behind a residual multiplier (Granite). Modules of BLOOM add the
    stream themselves.
    """
    if hook.kind not in ("attn_out", "mlp_post"):
        return
    weight = {"attn_out": "o", "mlp_post": "down"}[hook.kind]
    layers = [] if config.kind == "bridge" else config.tensors.layers[hook.layer : (hook.layer or 0) + 1]
    reason = _OTHER_OUTPUTS.get(config.model_type)
    if hook.kind == "attn_out" and HookPoint("ln1_post_scale", hook.layer) in config.hook_points:
        reason = "the module gives its output before the norm that stands behind it"
    elif any(part.factors for layer in layers for name, part in layer.items() if name == weight):
        reason = "the module gives its output before the residual multiplier"
    if reason is None:
        return
    raise DictionaryError(
        f"expected a module whose output is {HookPoint(hook.kind, hook.layer)} in {model}, found "
        f"{hook.module!r}, of which {reason}; take a dictionary of the residual stream, or {HOW_TO_SAY}"
    )


def hook_name(kind: str) -> str:
    """The name inside a block that other programs give a hook kind: "mlp.hook_in" for "mlp_pre".

    Raises DictionaryError for one they do not have.
    """
    for name, ours in _OWN.items():
        if ours == kind and name != "hook_mlp_in":
            return name
    if not BY_NAME[kind].per_layer:
        return BY_NAME[kind].path
    found = HookPoint(kind, 0).transformer_lens
    if found is None:
        raise DictionaryError(f"{kind} has no name in other programs' files; export another dictionary")
    return found.removeprefix("blocks.0.")

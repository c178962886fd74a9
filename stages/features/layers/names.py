"""Which hook point the files of a dictionary mean by a name.

Files spell hook points as TransformerLens does (SAELens, with its block: "blocks.12.hook_resid_post") or as
circuit-tracer does (inside a block: "mlp.hook_in"). Where our strings give a name another meaning -
mlp.hook_pre and mlp.hook_post - it is theirs that counts here.
"""

from __future__ import annotations

import re

from ....store.errors import DictionaryError, HookPointNotFound
from ...forward.architectures.points import BY_NAME, HookPoint

__all__ = ["hook_kind", "hook_name", "parse_hook"]

# Names that only circuit-tracer has. Its, and older files', hook_mlp_in is TransformerLens's copy of
# resid_mid.
_OWN = {"mlp.hook_in": "mlp_pre", "mlp.hook_out": "mlp_post", "hook_mlp_in": "resid_mid"}
_OUTSIDE = ("blocks.", "hook_embed", "ln_final.")
_BLOCK = re.compile(r"^blocks\.(\d{1,9})\.(.+)$")


def hook_kind(name: str) -> str:
    """Our hook kind ("mlp_pre") of a name inside a block ("mlp.hook_in"), of a full one, of "hook_embed", or
    itself.

    Raises DictionaryError for an unknown one.
    """
    if name in BY_NAME:
        return name
    return parse_hook(name if name.startswith(_OUTSIDE) else f"blocks.0.{name}")[0]


def parse_hook(name: str) -> tuple[str, int | None]:
    """(hook kind, layer) of a full name such as "blocks.12.hook_resid_post"; the layer is None outside
    blocks.

    Raises DictionaryError for a name nobody gives to a hook point.
    """
    found = _BLOCK.match(name)
    if found and found[2] in _OWN:
        return _OWN[found[2]], int(found[1])
    try:
        point = HookPoint.from_transformer_lens(name)
    except HookPointNotFound as error:
        raise DictionaryError(
            f"the dictionary's configuration names a hook point that is not known, {name!r} ({error}); pass "
            "read= and write= to say where its features read and write"
        ) from error
    return point.kind, point.layer


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

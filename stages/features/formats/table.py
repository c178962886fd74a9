"""Table of file formats, and detection of the format of a dictionary's files.

A format is a module with two functions, `recognises(files) -> bool` and `read(files, read=..., write=...) ->
Opened`; modules are tried in table order. Detection uses a configuration if it states the format, else the
file names; no weight file is opened.
"""

from __future__ import annotations

import importlib
from typing import Any

from ....store.errors import DictionaryError
from ..layers.files import DictionaryFiles
from ..layers.layer import layers_text
from ..layers.layout import Opened
from ..layers.names import hook_name, parse_hook

__all__ = ["FORMATS", "open_files"]

# Name of a format -> (module that reads it, description of its files for messages).
FORMATS = {
    "listed": (".listed", "config.yaml with a list of transcoders"),
    "clt": (".clt", "W_enc_{layer}.safetensors and W_dec_{layer}.safetensors"),
    "plt": (".plt", "layer_{layer}.safetensors"),
    "gemma_scope": (".gemma_scope", "layer_{layer}/width_*/average_l0_*/params.npz"),
    "gemma_scope_2": (".gemma_scope_2", "params.safetensors, or params_layer_{layer}.safetensors"),
    "sparsify": (".sparsify", "cfg.json and sae.safetensors"),
    "saelens": (".saelens", "cfg.json and sae_weights.safetensors"),
    "llama_scope": (".llama_scope", "hyperparams.json and checkpoints/final.safetensors"),
    "dictionary_learning": (".dictionary_learning", "config.json and ae.pt"),
    "crosscoder": (".crosscoder", "config.json of a crosscoder and model.safetensors"),
}
_LISTED = 6
"""Largest number of files that a message lists."""


def open_files(
    files: DictionaryFiles,
    *,
    read: str | None = None,
    write: str | None = None,
) -> Opened:
    """Detect the format of a dictionary's files, and read its layout without its weights.

    Arguments:
        files: Files of the dictionary.
        read: Hook point that features read; None: the one that the files name.
        write: Hook point that features write to; None: the one that the files name.

    Raises:
        DictionaryError: No format recognises the files; the message lists them.
    """
    for module_name, _ in FORMATS.values():
        # Imported when it is tried, so that planning with one format does not load the others.
        format_module: Any = importlib.import_module(module_name, __package__)
        if format_module.recognises(files):
            opened: Opened = format_module.read(files, read=read, write=write)
            _refuse_other_layer(opened, read, write)
            return opened
    shown_files = files.listing[:_LISTED]
    more = f" and {len(files.listing) - _LISTED} more" if len(files.listing) > _LISTED else ""
    expected = "; ".join(f"{name}: {looks}" for name, (_, looks) in FORMATS.items())
    raise DictionaryError(
        f"no known layout of transcoders or autoencoders in {files.directory}: found "
        f"{', '.join(shown_files) or 'no files'}{more}; expected the files of one of these formats: "
        f"{expected}"
    )


def _refuse_other_layer(opened: Opened, read: str | None, write: str | None) -> None:
    """Raise DictionaryError if `read` or `write` names another layer than the files state."""
    for argument, name in (("read", read), ("write", write)):
        layer = parse_hook(name).layer if name else None
        # A layer in the name is for files that do not state theirs; it cannot move features.
        if layer is not None and opened.layout.layers != (layer,):
            raise DictionaryError(
                f"expected a hook point of {layers_text(opened.layout.layers)} as {argument}=, because the "
                f"files in {opened.files.directory} state that layer, found {name!r}; leave the layer out: "
                f"{argument}={hook_name(parse_hook(str(name)).kind)!r}"
            )

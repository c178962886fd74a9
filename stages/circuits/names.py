"""Names of the methods that score edges, as in their papers; methods.py defines them.

A module of its own, because options of commands are made from these names, and `--help` must import neither
torch nor a stage.

Border: names.
"""

from __future__ import annotations

from typing import Literal, get_args

__all__ = ["METHODS", "Method"]

Method = Literal["EAP", "EAP-IG-inputs", "clean-corrupted", "EAP-IG-activations", "information-flow-routes"]
METHODS: tuple[Method, ...] = get_args(Method)
"""All names of `Method`."""

"""Names of the methods that score edges, as in their papers; methods.py defines them.

Border: names. Imports no torch and no stage, as options of commands are made from them.
"""

from __future__ import annotations

from typing import Literal, get_args

__all__ = ["METHODS", "Method"]

Method = Literal["EAP", "EAP-IG-inputs", "clean-corrupted", "EAP-IG-activations", "information-flow-routes"]
METHODS: tuple[Method, ...] = get_args(Method)

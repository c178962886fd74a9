"""The methods that score edges, by the names their papers gave them; what each is, is in methods.py.

Border: names. Never imports torch.
"""

from __future__ import annotations

from typing import Literal, get_args

__all__ = ["METHODS", "Method"]

Method = Literal["EAP", "EAP-IG-inputs", "clean-corrupted", "EAP-IG-activations", "information-flow-routes"]
METHODS: tuple[Method, ...] = get_args(Method)

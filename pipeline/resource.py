"""Resources: what a stage reads beside its arrays, such as a dictionary of features.

A resource has an identity, which enters the key, and a place, which does not. Its stage gets it opened, where
the stage runs; that the place still holds what the key says is confirmed before a node is looked up, and
again before anything is published.

Border: what is asked of a resource; which kinds there are is known where they are made.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

__all__ = ["Resource"]


@runtime_checkable
class Resource(Protocol):
    """Something with an identity and a place; sent to workers, so names and digests only."""

    def identity(self) -> dict[str, Any]:
        """Plain values that stand for it among the parameters of a key."""
        ...

    def confirm(self) -> None:
        """Raise SourceChanged when the place holds something else now."""
        ...

    def open(self) -> AbstractContextManager[Any]:
        """What the stage's function is given, for as long as it runs."""
        ...

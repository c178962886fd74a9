"""One small file that is asked for again and again.

Border: bytes as they are now; what they say is known elsewhere.
"""

from __future__ import annotations

from .folder import Folder
from .stamps import Stamp

__all__ = ["Watched"]


class Watched:
    """One small file of a folder, read again only when it may have changed."""

    def __init__(self, folder: Folder, name: str) -> None:
        self._folder, self._name = folder, name
        self._stamp: Stamp | None = None
        self._text: bytes | None = None

    def get(self) -> bytes | None:
        """Its bytes as they are now, the same object as long as they are the same; None when it is gone."""
        stat = self._folder.glance(self._name)
        if stat is None:
            self._stamp = self._text = None
            return None
        if self._stamp is None or self._stamp != stat.stamp:
            text = self._folder.get(self._name)
            if text != self._text:
                self._text = text
            self._stamp = stat.stamp if stat.is_settled else None
        return self._text

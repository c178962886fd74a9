"""What a class is called in a key: interventions, metrics, and those that users write.

Border: classes; what their fields say is their own business.
"""

from __future__ import annotations

from typing import Any

__all__ = ["name_of"]


def name_of(kind: type[Any], error: type[Exception]) -> str | list[Any]:
    """The name of one of mizarr's own classes; of any other where it is, and its version.

    A version that is inherited counts for nothing: a subclass that does something else would share its key.
    Raises `error` for a class of somebody's own that declares no version: its fields do not say what it does.
    """
    if kind.__module__.partition(".")[0] == __name__.partition(".")[0]:
        return kind.__name__
    version = vars(kind).get("version")
    if not isinstance(version, int | str):
        raise error(
            f"expected a version of {kind.__qualname__}, as its fields do not say what it does, found none; "
            "declare `version: ClassVar[int] = 1` in the class, and move it when numbers move"
        )
    return [kind.__module__, kind.__qualname__, version]

"""Names of classes in keys: interventions of mizarr, and interventions that users write."""

from __future__ import annotations

from typing import Any

__all__ = ["name_of"]


def name_of(kind: type[Any], error: type[Exception]) -> str | list[Any]:
    """Identity of a class in a key: the bare name of a mizarr class, else [module, qualified name, version].

    Arguments:
        kind: The class.
        error: Class of the error that is raised.

    Raises:
        error: For a class outside mizarr whose own body declares no `version`.
    """
    if kind.__module__.partition(".")[0] == __name__.partition(".")[0]:
        return kind.__name__
    # vars, not getattr: a subclass that computes something else must not share its parent's version and key.
    version = vars(kind).get("version")
    if not isinstance(version, int | str):
        raise error(
            f"expected a version of {kind.__qualname__}, as its fields do not say what it does, found none; "
            "declare `version: ClassVar[int] = 1` in the class, and move it when numbers move"
        )
    return [kind.__module__, kind.__qualname__, version]

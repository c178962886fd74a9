"""Names of classes in keys: interventions of mizarr, and interventions that users write."""

from __future__ import annotations

from typing import Any

__all__ = ["name_of"]


def name_of(kind: type[Any], error: type[Exception]) -> str | list[Any]:
    """Identity of a class (an intervention or a metric) in the key of a result.

    Arguments:
        kind: the class.
        error: class of the error that is raised.

    Returns:
        The name of a class of mizarr; [module, qualified name, version] for a class of a user.

    Raises:
        error: for a class outside mizarr whose own body declares no `version`.
    """
    if kind.__module__.partition(".")[0] == __name__.partition(".")[0]:
        return kind.__name__
    # vars, not getattr: a subclass that computes something else must not share its parent's version and key.
    version = vars(kind).get("version")
    if not isinstance(version, int | str):
        raise error(
            f"expected a version of class {kind.__qualname__}, because keys of results cannot show what its "
            "code does, found none; declare `version: ClassVar[int] = 1` in the class, and raise it when "
            "its numbers change"
        )
    return [kind.__module__, kind.__qualname__, version]

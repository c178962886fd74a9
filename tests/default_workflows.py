"""Which workflows can be asked at their defaults: all but those of a kind of model that does not ship."""

from __future__ import annotations

import pytest

from mizarr.workflows import WORKFLOWS, kind_of

NOT_SHIPPED = pytest.mark.skip(reason="the model that ships has no recurrent state")


def at_defaults(name: str) -> bool:
    """Whether a workflow can be asked of the model that ships."""
    return kind_of(name).needs != "state"


AT_DEFAULTS = [
    name if at_defaults(name) else pytest.param(name, marks=NOT_SHIPPED, id=name) for name in WORKFLOWS
]
"""Every workflow, for tests that build it at its defaults."""

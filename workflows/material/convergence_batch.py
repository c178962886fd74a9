"""Batch files of the workflow steering_convergence: several experiments in one JSON file.

{"description": …, "experiments": [{"group", "prompt", "contrastive", "target_token", "inject_position"}, …]}

Border: reads the file and checks its form; the workflow interprets its texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...store.errors import ConfigError, nearest
from ...store.exchange.outside import json_file

__all__ = ["FIELDS", "read_batch"]

FIELDS = ("group", "prompt", "contrastive", "target_token", "inject_position")
"""Fields of an experiment in a batch file; the last two, target_token and inject_position, are optional."""


def read_batch(path: Path) -> list[dict[str, Any]]:
    """Experiments of a batch file: one dict per experiment with all of FIELDS, defaults filled in.

    Raises:
        ConfigError: the file is missing or has another form; the message names the experiment.
    """
    form = '{"description": …, "experiments": [{"group", "prompt", "contrastive", "target_token"}, …]}'
    document = json_file(path, ConfigError, f"write it as {form}")
    entries = document.get("experiments") if isinstance(document, Mapping) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"expected {form} in {str(path)!r}, found no list of experiments")
    experiments = []
    for number, entry in enumerate(entries):
        if not isinstance(entry, Mapping):
            raise ConfigError(f"experiment {number} of {path.name}: expected an object, found {entry!r}")
        for name in entry:
            if name not in FIELDS:
                near = nearest(name, FIELDS)
                hint = f"did you mean {near!r}?" if near else f"there are {', '.join(FIELDS)}"
                raise ConfigError(f"experiment {number} of {path.name} has no field {name!r}; {hint}")
        complete = {"target_token": "", "inject_position": "last"} | dict(entry)
        for name in FIELDS:
            kinds = (str, int) if name == "inject_position" else (str,)
            value = complete.get(name)
            is_empty = value == "" and name in ("prompt", "contrastive")
            # In Python True and False are ints, which `kinds` would accept.
            if not isinstance(value, kinds) or isinstance(value, bool) or is_empty:
                raise ConfigError(
                    f"experiment {number} of {path.name}: expected {name} to be a text, found {value!r}"
                )
        experiments.append(complete)
    return experiments

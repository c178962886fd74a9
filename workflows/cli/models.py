"""Commands about models: `models ls`, `models families`, `models fetch`, `models inspect`.

None loads one, but for the check that a model of unknown family needs once, and where a pass is timed.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ...store.display.terminal import echo
from .options import (
    LOADING,
    DeclaredCommand,
    SuggestingGroup,
    declares,
    json_option,
    print_json,
    print_table,
    quiet_option,
)

if TYPE_CHECKING:
    from ...stages.features.layers.files import DictionaryFiles
    from ...stages.forward.architectures.architecture import Architecture
    from ...stages.forward.checkpoints.checkpoint import Checkpoint
    from ...stages.forward.models.autoconfig import CompatibilityReport
    from ...stages.forward.models.files import ModelFiles

CANNOT_RUN = 1


@click.group(cls=SuggestingGroup)
def models() -> None:
    """Fetch, list and inspect checkpoints."""


@models.command(epilog="Example: mizarr models fetch HuggingFaceTB/SmolLM2-135M", cls=DeclaredCommand)
@click.argument("repo")
@declares(LOADING.only("revision"))
@json_option
@quiet_option
def fetch(repo: str, revision: str | None, as_json: bool, quiet: bool) -> None:
    """Download REPO from the hub; print the directory.

    Only what a forward pass reads: configuration, tokenizer, safetensors weights. Interrupted, it keeps the
    files that are finished and goes on with the next. HF_TOKEN opens gated models.
    """
    from ...stages.forward.models import download

    files = download.fetch(repo, revision, progress=not quiet)
    print_fetched(files, as_json)


@models.command(name="ls", epilog="Example: mizarr models ls")
@json_option
def list_models(as_json: bool) -> None:
    """List the models on this machine: built-in ones and those in the hub's cache.

    Of each: family, layers, width, bytes of its weights, and what stands in the way of running it.
    """
    from ...pipeline.plan import human_bytes
    from ...stages.forward.models.listing import listed_models

    found = listed_models()
    if as_json:
        print_json([asdict(each) | {"can_run": each.can_run} for each in found])
        return
    rows = [
        {
            "MODEL": each.name,
            "REVISION": each.revision and each.revision[:12],
            "FAMILY": each.model_type or None,
            "LAYERS": each.layers,
            "HIDDEN": each.hidden_size,
            "WEIGHTS": human_bytes(each.weight_bytes),
            "RUNS": each.obstacle or ("yes" if each.known_family else "once checked: mizarr models inspect"),
        }
        for each in found
    ]
    print_table(["MODEL", "REVISION", "FAMILY", "LAYERS", "HIDDEN", "WEIGHTS", "RUNS"], rows)


@models.command(epilog="Example: mizarr models families")
@json_option
def families(as_json: bool) -> None:
    """List the model families that are known by name.

    Any other decoder of this shape is configured from its tensors; `mizarr models inspect` tells how.
    """
    from ...stages.forward.architectures.known import KNOWN

    rows = [dict(family.described) for family in KNOWN.values()]
    if as_json:
        print_json(rows)
        return
    from rich import box
    from rich.table import Table

    from ...store.display.console import EscapingConsole

    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in rows[0]:
        table.add_column(column.replace("mlp", "MLP"), no_wrap=column == "model_type")
    for row in rows:
        table.add_row(*row.values())
    EscapingConsole().print(table)


@models.command(epilog="Example: mizarr models inspect specimen", cls=DeclaredCommand)
@click.argument("model")
@declares(LOADING.only("revision", "backend", "adapter"))
@click.option("--shapes-only", is_flag=True, help="Read the headers only, which is fast; shows no norms.")
@click.option(
    "--time", "is_timed", is_flag=True, help="Also load the model, time a forward pass, and show its memory."
)
@json_option
@quiet_option
def inspect(
    model: str,
    revision: str | None,
    shapes_only: bool,
    is_timed: bool,
    backend: str | None,
    adapter: str | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Show shapes and norms, and how MODEL was understood.

    MODEL is a hub id, a directory or "specimen". A model of unknown family is checked against transformers,
    unless a check is remembered. Tells which backend would take it and why, and what the transformers bridge
    could not do. Exit code 1 if the checkpoint cannot run as it is asked for, with the reasons.
    """
    from ...pipeline.progress import Progress
    from ...stages.forward.models.backends import backend_of
    from ...stages.forward.models.files import resolve
    from ..weights.inspect_model import pass_times, tensor_facts

    files = resolve(model, revision, backend=backend, adapter=adapter)
    size = sum(path.stat().st_size for path in files.weight_files)
    with Progress(quiet=quiet or shapes_only) as bars:
        read = bars.task(f"reading {files.name}", unit="numbers")
        facts = list(tensor_facts(_readable(files), values=not shapes_only, on_progress=read.advance))
    understood = files.understood()
    layout, issues, config = _layout(files, understood, remembered_only=shapes_only)
    choice = backend_of(files, layout, issues, remembered_only=shapes_only)
    is_compatible = not issues or (choice.name == "transformers" and not understood.known_family)
    found = {
        "name": files.name,
        "revision": files.revision,
        "directory": str(files.directory),
        "model_type": understood.model_type,
        "known_family": understood.known_family,
        "layout": layout,
        "backend": choice.to_json(),
        "compatible": is_compatible,
        "issues": issues,
        "warnings": [] if files.is_bridged else understood.warnings,
        "config": config and _sizes(config) | config.fields,
        "parameters": sum(fact.parameters for fact in facts),
        "bytes": size,
        "bytes_in_float32": 4 * sum(fact.parameters for fact in facts),
        "timed": asdict(pass_times(files.name, revision)) if is_timed and not issues else None,
        "tensors": [asdict(fact) for fact in facts],
    }
    if as_json:
        print_json(found)
    else:
        _print(found)
    return 0 if is_compatible else CANNOT_RUN


def _sizes(config: Architecture) -> dict[str, Any]:
    """Sizes that readers of a config look for first; 0 heads for a model without attention."""
    names = ("num_layers", "num_attention_heads", "num_kv_heads")
    return {name: getattr(config, name) for name in names}


def print_fetched(files: ModelFiles | DictionaryFiles, as_json: bool) -> None:
    """Where files from the hub lie: a model's or a dictionary's."""
    directory = str(files.directory)
    if as_json:
        print_json({"name": files.name, "revision": files.revision, "directory": directory})
    else:
        echo(directory)


def _readable(files: ModelFiles) -> Checkpoint:
    """The plain weights of a model; what its files hold, where nothing here makes plain weights of it."""
    from ...stages.forward.checkpoints.checkpoint import Checkpoint
    from ...store.errors import ConfigError

    try:
        return files.checkpoint
    except ConfigError:
        return Checkpoint(files.weight_files)


def _layout(
    files: ModelFiles, understood: CompatibilityReport, *, remembered_only: bool
) -> tuple[str, list[str], Architecture | None]:
    """Why the layout can be relied on, or that it was not checked; all that stands in the way; and what the
    model is."""
    from ...stages.forward.models.backends import bridge_issues

    if files.is_bridged:
        bridged, issues = bridge_issues(files, remembered_only=remembered_only)
        return "left to transformers", issues, bridged
    config = understood.config
    if understood.issues or config is None:
        return "not understood", understood.issues, config
    if understood.known_family:
        return "known family", [], config
    if files.trust_layout:
        return "trusted, not checked against transformers", [], config
    case = files.layout_case(config)
    verdict = case.remembered() if remembered_only else case.verdict()
    if verdict is None:
        return "not checked against transformers yet", [], config
    return verdict.told, [] if verdict.agrees else [verdict.told], config


def _print(found: dict[str, Any]) -> None:
    from ...pipeline.plan import human_bytes

    family = "known family" if found["known_family"] else "unknown family, configured from its tensors"
    echo(f"{found['name']}: {found['model_type']} ({family})")
    echo(f"layout: {found['layout']}")
    backend = found["backend"]
    echo(f"backend: {backend['name'] or 'none'}, {backend['reason']}")
    for line in backend["missing"]:
        echo(f"  {line}")
    wide = human_bytes(found["bytes_in_float32"])
    echo(f"{found['parameters']:,} parameters, {human_bytes(found['bytes'])}, {wide} in float32")
    if timed := found["timed"]:
        held, most = human_bytes(timed["weight_bytes"]), timed["memory"]["resident"]["peak"]
        echo(
            f"loaded in {timed['load_seconds']:.3g} s, {held} on {timed['device']} in {timed['dtype']}; "
            f"{timed['tokens']} tokens in {timed['pass_seconds']:.3g} s"
            + (f"; at most {human_bytes(most)} resident" if most else "")
        )
    for name, value in (found["config"] or {}).items():
        # Names of tensors and specs of layers fill screens, fields that are off say nothing: --json has all.
        if value and not isinstance(value, dict | list | tuple):
            echo(f"  {name}: {value}")
    for issue in found["issues"]:
        echo(f"{'not computed here' if found['compatible'] else 'cannot run'}: {issue}")
    for warning in found["warnings"]:
        echo(f"warning: {warning}")
    echo()
    rows = [
        {
            "TENSOR": fact["name"],
            "SHAPE": "x".join(map(str, fact["shape"])) or "scalar",
            "DTYPE": fact["dtype"],
            "NORM": "not finite" if fact["finite"] is False else _number(fact["norm"]),
            "MEAN": _number(fact["mean"]),
            "STD": _number(fact["std"]),
        }
        for fact in sorted(found["tensors"], key=lambda fact: _in_order(fact["name"]))
    ]
    print_table(["TENSOR", "SHAPE", "DTYPE", "NORM", "MEAN", "STD"], rows)


def _in_order(name: str) -> list[tuple[int, str]]:
    """Key that sorts names with numbers as people do: layer 2 before layer 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name)]


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.4g}"

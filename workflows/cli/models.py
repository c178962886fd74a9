"""Commands on models: `models ls`, `models families`, `models fetch`, `models inspect`.

None loads a model, except `models inspect` with --time, or for the one-time check of an unknown family
against transformers.
"""

from __future__ import annotations

import re
from dataclasses import asdict, fields
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
"""Exit code of `inspect` for a model that cannot run, or a dictionary that cannot be used."""


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

    Downloads only what a forward pass reads: configuration, tokenizer, safetensors weights. After an
    interruption, finished files are kept and the next call fetches the others. HF_TOKEN gives access to gated
    models.
    """
    from ...stages.forward.models import download

    files = download.fetch(repo, revision, progress=not quiet)
    print_fetched(files, as_json)


@models.command(name="ls", epilog="Example: mizarr models ls")
@json_option
def list_models(as_json: bool) -> None:
    """List the models on this machine: built-in ones and those in the hub's cache.

    Shows family, layers, hidden size and size of the weights of each model, and why it cannot run.
    """
    from ...pipeline.plan import human_bytes
    from ...stages.forward.models.listing import listed_models

    listing = listed_models()
    if as_json:
        print_json([asdict(model) | {"can_run": model.can_run} for model in listing])
        return
    rows = [
        {
            "MODEL": model.name,
            "REVISION": model.revision and model.revision[:12],
            "FAMILY": model.model_type or None,
            "LAYERS": model.layers,
            "HIDDEN": model.hidden_size,
            "WEIGHTS": human_bytes(model.weight_bytes),
            "RUNS": model.obstacle
            or ("yes" if model.known_family else f"after a check: mizarr models inspect {model.name}"),
        }
        for model in listing
    ]
    print_table(["MODEL", "REVISION", "FAMILY", "LAYERS", "HIDDEN", "WEIGHTS", "RUNS"], rows)


@models.command(epilog="Example: mizarr models families")
@json_option
def families(as_json: bool) -> None:
    """List the model families that are known by name.

    Other decoders of the same structure are configured from their tensors; `mizarr models inspect` shows how.
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
    """Show tensor shapes and norms of MODEL, and the configuration read from its files.

    MODEL is a hub id, a directory or "specimen". A model of unknown family is checked against transformers,
    unless the result of an earlier check is stored. Also shows which backend would run the model and why, and
    what the transformers bridge does not support. Exit code 1, with the reasons, if the model cannot run.
    """
    from ...pipeline.progress import Progress
    from ...stages.forward.models.backends import backend_of
    from ...stages.forward.models.files import resolve
    from ..weights.inspect_model import pass_times, tensor_facts

    files = resolve(model, revision, backend=backend, adapter=adapter)
    size = sum(path.stat().st_size for path in files.weight_files)
    # Headers alone are read too fast for a progress bar.
    with Progress(quiet=quiet or shapes_only) as bars:
        read = bars.task(f"reading {files.name}", unit="numbers")
        facts = list(tensor_facts(_readable(files), values=not shapes_only, on_progress=read.advance))
    understood = files.understood()
    layout, issues, config = _layout(files, understood, remembered_only=shapes_only)
    choice = backend_of(files, layout, issues, remembered_only=shapes_only)
    # An unknown family whose tensors the native backend cannot read may still run on transformers.
    is_compatible = not issues or (choice.name == "transformers" and not understood.known_family)
    document = {
        "name": files.name,
        "revision": files.revision,
        "directory": str(files.directory),
        "model_type": understood.model_type,
        "known_family": understood.known_family,
        "layout": layout,
        "backend": choice.to_json(),
        "compatible": is_compatible,
        "issues": issues,
        # The warnings are about the native backend.
        "warnings": [] if files.is_bridged else understood.warnings,
        "config": config and _sizes(config) | config.fields,
        "parameters": sum(fact.parameters for fact in facts),
        "bytes": size,
        "bytes_in_float32": 4 * sum(fact.parameters for fact in facts),
        # A model with issues cannot be loaded.
        "timed": asdict(pass_times(files.name, revision)) if is_timed and not issues else None,
        "tensors": [asdict(fact) for fact in facts],
    }
    if as_json:
        print_json(document)
    else:
        _print(document, config)
    return 0 if is_compatible else CANNOT_RUN


def _sizes(config: Architecture) -> dict[str, Any]:
    """Numbers of layers, attention heads and key-value heads; 0 heads for a model without attention."""
    names = ("num_layers", "num_attention_heads", "num_kv_heads")
    return {name: getattr(config, name) for name in names}


def print_fetched(files: ModelFiles | DictionaryFiles, as_json: bool) -> None:
    """Print the directory of a downloaded model or dictionary; as JSON also its name and revision.

    Arguments:
        files: The downloaded files.
        as_json: Whether to print JSON.
    """
    directory = str(files.directory)
    if as_json:
        print_json({"name": files.name, "revision": files.revision, "directory": directory})
    else:
        echo(directory)


def _readable(files: ModelFiles) -> Checkpoint:
    """Checkpoint of a model, with the native backend's tensor names for a convertible model.

    Else the tensors have the names of the files.
    """
    from ...stages.forward.checkpoints.checkpoint import Checkpoint
    from ...store.errors import ConfigError

    try:
        return files.checkpoint
    except ConfigError:
        return Checkpoint(files.weight_files)


def _layout(
    files: ModelFiles, understood: CompatibilityReport, *, remembered_only: bool
) -> tuple[str, list[str], Architecture | None]:
    """How the tensor layout of a model was established, whether it can run, and its architecture.

    Arguments:
        files: Files of the model.
        understood: The configuration that was derived from these files.
        remembered_only: Use the stored result of a check against transformers only; run no check.

    Returns:
        (status, issues, architecture): the status as a phrase; the reasons why the model cannot run, empty
        if it can; the architecture, or None if it could not be derived.
    """
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


def _print(document: dict[str, Any], config: Architecture | None) -> None:
    """Print the JSON document of `models inspect` as text.

    Arguments:
        document: The document.
        config: Architecture of the model, of whose fields only those that differ from their defaults are
            printed; None if it could not be derived.
    """
    from ...pipeline.plan import human_bytes

    family = "known family" if document["known_family"] else "unknown family, configured from its tensors"
    echo(f"{document['name']}: {document['model_type']} ({family})")
    echo(f"layout: {document['layout']}")
    backend = document["backend"]
    echo(f"backend: {backend['name'] or 'none'}, {backend['reason']}")
    for line in backend["missing"]:
        echo(f"  {line}")
    wide = human_bytes(document["bytes_in_float32"])
    echo(f"{document['parameters']:,} parameters, {human_bytes(document['bytes'])}, {wide} in float32")
    if timed := document["timed"]:
        weights, peak = human_bytes(timed["weight_bytes"]), timed["memory"]["resident"]["peak"]
        echo(
            f"loaded in {timed['load_seconds']:.3g} s, {weights} on {timed['device']} in {timed['dtype']}; "
            f"{timed['tokens']} tokens in {timed['pass_seconds']:.3g} s"
            + (f"; at most {human_bytes(peak)} resident" if peak else "")
        )
    described: Any = (
        config  # a dataclass instance; its static type is a protocol, which `fields` does not take
    )
    defaults = {field.name: field.default for field in fields(described)} if config else {}
    for name, value in (document["config"] or {}).items():
        # Tensor names and layer specs fill many screens; --json prints them, and the defaults.
        if value != defaults.get(name) and value and not isinstance(value, dict | list | tuple):
            echo(f"  {name}: {value}")
    for issue in document["issues"]:
        echo(f"{'cannot run natively' if document['compatible'] else 'cannot run'}: {issue}")
    for warning in document["warnings"]:
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
        for fact in sorted(document["tensors"], key=lambda fact: _numeric_order(fact["name"]))
    ]
    print_table(["TENSOR", "SHAPE", "DTYPE", "NORM", "MEAN", "STD"], rows)


def _numeric_order(name: str) -> list[tuple[int, str]]:
    """Sort key that compares numbers within names as numbers: "layers.2" comes before "layers.10"."""
    # Pairs, as a number and a text cannot be compared; -1 sorts texts before numbers.
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name)]


def _number(value: float | None) -> str | None:
    """A number with four significant digits; None stays None."""
    return None if value is None else f"{value:.4g}"

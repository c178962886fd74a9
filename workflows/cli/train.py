"""`mizarr train`: a dictionary from the activations of a model, or of two; parse, call, print."""

from __future__ import annotations

import dataclasses
import json
import signal
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...store.display.terminal import echo
from .options import (
    NAMED,
    command,
    declares,
    given_options,
    json_option,
    print_json,
    print_table,
    quiet_option,
    settings,
    size,
    store_option,
)
from .prompts import PromptSources, prompt_options

DTYPES = click.Choice(["float32", "float16", "bfloat16"])
"""Of stored activations and of the dictionary's files; int8 is for activations alone."""

if TYPE_CHECKING:
    from ...stages.features.training.settings import TrainingSettings
    from ...stages.features.training.trainer import Source, Training
    from ...stages.training_data.stored import StoredActivations
    from ...store import Store

__all__ = ["train"]

EVALUATED = 16_384
"""Held-out tokens on which the model's loss is measured."""
RESULT, FIGURES = "dictionary", "evaluation.json"


def _list_settings(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    """One line per setting: default, and what it does."""
    if not wanted:
        return
    from ...stages.features.training.settings import TrainingSettings

    for field in dataclasses.fields(TrainingSettings):
        echo(f"--set {field.name}={json.dumps(field.default)}  {field.metadata['help']}")
    context.exit()


@command(epilog="Example: mizarr train specimen prompts.txt --set layers=[3] --set features=1024 --out sae")
@click.argument("model")
@prompt_options
@declares(NAMED)
@click.option(
    "--against",
    metavar="MODEL",
    help="Second model for --set kind=crosscoder; it must have the same tokenizer.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Folder for the checkpoint, the log and the dictionary.",
)
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="TOML file of settings; --set overrides it.",
)
@click.option(
    "--set",
    "given",
    multiple=True,
    callback=settings,
    metavar="NAME=VALUE",
    help="Value of a setting; repeatable. --settings lists all settings.",
)
@click.option(
    "--settings",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list_settings,
    help="List all settings and exit.",
)
@store_option
@click.option(
    "--storage-dtype",
    type=click.Choice([*DTYPES.choices, "int8"]),
    default="float16",
    show_default=True,
    help="Dtype of the stored activations.",
)
@click.option(
    "--dtype", type=DTYPES, default="float32", show_default=True, help="Dtype of the dictionary's files."
)
@click.option("--memory", callback=size, metavar="SIZE", help="Memory for the buffers of the capture.")
@click.option(
    "--save-every",
    type=click.IntRange(min=1),
    default=500,
    show_default=True,
    help="Steps between two checkpoints.",
)
@json_option
@quiet_option
def train(
    model: str,
    prompts: PromptSources,
    against: str | None,
    out: Path,
    config: Path | None,
    given: dict[str, Any],
    as_json: bool,
    **options: Any,
) -> None:
    """Train a dictionary on MODEL's activations on PROMPTS.

    The dictionary is a sparse autoencoder, a set of transcoders or a crosscoder (--set kind=…). The command
    captures the activations that the store does not hold, trains, exports (in the format of SAELens for
    autoencoders, circuit-tracer for transcoders, dictionary_learning for crosscoders) and scores the
    dictionary on held-out prompts. After Ctrl-C or a kill the same command continues from the checkpoint in
    --out, with the same result.

    PROMPTS are read as by `mizarr capture`; pairs of source and target are refused.
    """
    from ...stages.forward.models.reference import ModelRef
    from ...stages.training_data.several import SideBySide
    from ...store.store import requested_store
    from ..report.page import check_output

    chosen = _settings(config, given)
    _check_against(chosen, against)
    check_output(out / FIGURES)
    quiet, loading = options["quiet"], given_options(options, NAMED)
    models = [ModelRef(model, **loading).files().name]
    if against is not None:
        # An adapter is made for one model.
        models.append(ModelRef(against, **loading | {"adapter": None}).files().name)
    storing = {"storage_dtype": options["storage_dtype"]}
    if options["memory"] is not None:
        storing["memory"] = options["memory"]
    hooks = _hooks(chosen)
    with prompts.corpus() as corpus:
        # Read once, also from stdin, before anything is captured.
        plain = prompts.read() if corpus is None else None
        read = plain if corpus is None else corpus
        with requested_store(options["store_path"]) as store:
            runs = [_captured(name, read, hooks, store, quiet, storing) for name in models]
    source = runs[0] if against is None else SideBySide(tuple(runs))
    training = _train(chosen, source, out, options["save_every"], quiet)
    if not (out / RESULT).exists():
        if training.places:
            _finish_crosscoder(training, models, out)
        else:
            _finish(training, models[0], out, options["dtype"])
    found = json.loads((out / FIGURES).read_text("utf-8"))
    if as_json:
        print_json(found)
        return
    if chosen.kind == "crosscoder":
        _print_crosscoder(found["held_out"])
        echo(f"wrote {out / RESULT}", err=True)
        return
    columns = ("layers", "fvu", "l0", "dead")
    rows = zip(*(found["held_out"][name] for name in columns), strict=True)
    names = ["LAYER", "FVU", "L0", "DEAD"]
    print_table(names, [dict(zip(names, row, strict=True)) for row in rows])
    recovered = found["held_out"]["loss"]["places"]["all"]["ce_recovered_zero"]
    echo(f"loss recovered, against zeros: {recovered:.3f}", err=True)
    echo(f"wrote {out / RESULT}", err=True)


def _check_against(chosen: TrainingSettings, against: str | None) -> None:
    from ...store.errors import ConfigError

    if against is not None and chosen.kind != "crosscoder":
        raise ConfigError(
            f"expected kind=crosscoder with --against, found kind={chosen.kind}; add --set kind=crosscoder"
        )


def _print_crosscoder(held_out: dict[str, Any]) -> None:
    """FVU of each place; what is one model's alone goes to stderr."""
    rows = zip(held_out["places"], held_out["fvu"], strict=True)
    print_table(["PLACE", "FVU"], [dict(zip(["PLACE", "FVU"], row, strict=True)) for row in rows])
    echo(f"active per token: {held_out['l0']:.1f}; never active: {held_out['dead']:.3f}", err=True)
    if "first_alone" in held_out:
        first, second = held_out["first_alone"], held_out["second_alone"]
        echo(
            f"of {held_out['alive']} features that are active, {first} are written to the first model alone, "
            f"{second} to the second; a model against itself is the control",
            err=True,
        )


def _settings(config: Path | None, given: dict[str, Any]) -> TrainingSettings:
    from ...stages.features.training.settings import TrainingSettings
    from ...store.errors import ConfigError
    from ..settings import read_settings

    said: dict[str, Any] = {}
    if config is not None:
        try:
            said = tomllib.loads(config.read_text("utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"expected TOML in {config}, found {error}") from error
    chosen: TrainingSettings = read_settings(TrainingSettings, "train", said | given)
    return chosen


def _hooks(chosen: TrainingSettings) -> list[str]:
    """Hook points that the dictionary reads and writes, in the layers it is trained on ("*": all)."""
    from ...stages.forward.architectures.points import BY_NAME

    layers = ["*"] if chosen.layers is None else list(map(str, chosen.layers))
    kinds = dict.fromkeys((chosen.read, chosen.writes))
    return [BY_NAME[kind].path.format(layer) for kind in kinds for layer in layers]


def _captured(
    model: str, prompts: Any, hooks: list[str], store: Store, quiet: bool, storing: Mapping[str, Any]
) -> StoredActivations:
    """Activations at these hook points, captured as far as they are not stored.

    prompts: a `Corpus`, texts or token ids. storing: fields of `CaptureOptions`.
    """
    from ...pipeline import run
    from ...stages.forward.capture.capture import CaptureNode
    from ...stages.forward.models.source import ModelSource
    from ...stages.forward.text.corpora.corpus import Corpus
    from ...stages.training_data.stored import StoredActivations

    if isinstance(prompts, Corpus):
        prompts = prompts.tokens(ModelSource(model).tokenizer, store, quiet=quiet)
    node = CaptureNode(model, prompts, hooks, **storing)
    run(node, store, quiet=quiet)
    return StoredActivations.of_run(store, node.run_key, node.tokens, node.dtype, node.cells)


def _train(chosen: TrainingSettings, source: Source, out: Path, save_every: int, quiet: bool) -> Training:
    """The training brought to its end; KeyboardInterrupt, with a checkpoint left behind, when stopped."""
    from ...pipeline.progress import Progress
    from ...stages.features.training.trainer import Training

    training = Training(chosen, source, out, save_every=save_every)
    with Progress(quiet) as progress, _interrupted() as stop:
        task = progress.task("train", total=(chosen.steps - training.step) * chosen.batch, unit="tokens")
        if not training.run(advance=task.advance, stop=stop):
            raise KeyboardInterrupt
    return training


@contextmanager
def _interrupted() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed: the step under way is finished first. Pressed again it interrupts at
    once.
    """
    pressed = False

    def note(*_: Any) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _finish(training: Training, model: str, out: Path, dtype: str) -> None:
    """Measure, then export; the dictionary's folder comes last and says that all is done."""
    from ...stages.features.export import export
    from ...stages.features.training.evaluate import summary
    from ...stages.features.training.replacement import replacement_loss
    from ...stages.features.training.trained import FORMATS, as_dictionary
    from ...stages.forward.models.model import Model

    chosen, layers = training.settings, training.layers
    held_out = training.held_out or training.source
    lost = replacement_loss(
        Model.from_pretrained(model),
        layers,
        chosen.read,
        chosen.writes,
        held_out.ids(EVALUATED),
        skip_positions=chosen.skip_positions,
    )
    figures = {"settings": chosen.plain(), "held_out": summary(training.measured(held_out), lost)}
    (out / FIGURES).write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
    export(as_dictionary(layers, chosen, model_name=model), out / RESULT, FORMATS[chosen.kind], dtype=dtype)


def _finish_crosscoder(training: Training, models: list[str], out: Path) -> None:
    """Measure, then save; the crosscoder's folder comes last and says that all is done."""
    from ...stages.features.crosscoder import place_figures

    crosscoder = training.crosscoder(models)
    source = training.held_out or training.source
    seen = place_figures(crosscoder, training.states(source))
    measured = training.measured(source)
    held_out: dict[str, Any] = {
        "tokens": int(seen.attrs["rows"]),
        "places": seen["place"].values.tolist(),
        "fvu": [round(float(value), 5) for value in seen["fvu"].values],
        "l0": round(float(measured["l0"][0]), 5),
        "dead": round(float(measured["dead"][0]), 5),
    }
    held_out |= {name: value for name, value in seen.attrs.items() if name != "rows"}
    if "relative_norm" in seen:
        held_out["relative_norm"] = [round(float(value), 5) for value in seen["relative_norm"].values]
    (out / FIGURES).write_text(
        json.dumps({"settings": training.settings.plain(), "held_out": held_out}, indent=1) + "\n", "utf-8"
    )
    crosscoder.save(out / RESULT)

"""`mizarr train`: trains a feature dictionary on the activations of one model, or a crosscoder on two."""

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
"""Dtypes of stored activations and of the dictionary's files. Activations can also be int8."""

if TYPE_CHECKING:
    from ...stages.features.training.settings import TrainingSettings
    from ...stages.features.training.trainer import Source, Training
    from ...stages.training_data.stored import StoredActivations
    from ...store import Store

__all__ = ["train"]

EVALUATED = 16_384
"""Number of held-out tokens on which the model's loss with the dictionary spliced in is measured."""
RESULT, FIGURES = "dictionary", "evaluation.json"
"""Folder of the finished dictionary and file of its scores, within --out."""


def _list_settings(context: click.Context, _: click.Parameter, is_set: bool) -> None:
    """Click callback of --settings: print name, default and description of each setting, then exit."""
    if not is_set:
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
    "parameters",
    multiple=True,
    callback=settings,
    metavar="NAME=VALUE",
    help="Value of a setting; repeatable. --settings lists all settings.",
)
@click.option(
    "--settings",
    is_flag=True,
    # Eager options are handled before click misses the required arguments: --settings works alone.
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
    parameters: dict[str, Any],
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

    training_settings = _settings(config, parameters)
    _check_against(training_settings, against)
    check_output(out / FIGURES)
    quiet, loading = options["quiet"], given_options(options, NAMED)
    models = [ModelRef(model, **loading).files().name]
    if against is not None:
        # An adapter (LoRA weights) belongs to one model: it is not applied to the second.
        models.append(ModelRef(against, **loading | {"adapter": None}).files().name)
    storing = {"storage_dtype": options["storage_dtype"]}
    # None would override the default of CaptureOptions.
    if options["memory"] is not None:
        storing["memory"] = options["memory"]
    hooks = _hooks(training_settings)
    with prompts.corpus() as corpus:
        # Read once, before the first capture: stdin cannot be read again for the second model.
        prompts_or_corpus = prompts.read() if corpus is None else corpus
        with requested_store(options["store_path"]) as store:
            runs = [_captured(name, prompts_or_corpus, hooks, store, quiet, storing) for name in models]
    source = runs[0] if against is None else SideBySide(tuple(runs))
    training = _train(training_settings, source, out, options["save_every"], quiet)
    # Written last: if the folder exists, evaluation and export are complete.
    if not (out / RESULT).exists():
        # Only a crosscoder has places: pairs of a model and a hook point.
        if training.places:
            _finish_crosscoder(training, models, out)
        else:
            _finish(training, models[0], out, options["dtype"])
    evaluation = json.loads((out / FIGURES).read_text("utf-8"))
    if as_json:
        print_json(evaluation)
        return
    if training_settings.kind == "crosscoder":
        _print_crosscoder(evaluation["held_out"])
        echo(f"wrote {out / RESULT}", err=True)
        return
    columns = ("layers", "fvu", "l0", "dead")
    rows = zip(*(evaluation["held_out"][name] for name in columns), strict=True)
    names = ["LAYER", "FVU", "L0", "DEAD"]
    print_table(names, [dict(zip(names, row, strict=True)) for row in rows])
    recovered = evaluation["held_out"]["loss"]["places"]["all"]["ce_recovered_zero"]
    echo(f"loss recovered, compared with zero ablation: {recovered:.3f}", err=True)
    echo(f"wrote {out / RESULT}", err=True)


def _check_against(training_settings: TrainingSettings, against: str | None) -> None:
    """Raise ConfigError if a second model is named for a dictionary that is not a crosscoder."""
    from ...store.errors import ConfigError

    if against is not None and training_settings.kind != "crosscoder":
        raise ConfigError(
            "--against names a second model, which only a crosscoder has, found "
            f"kind={training_settings.kind}; add --set kind=crosscoder, or leave out --against"
        )


def _print_crosscoder(held_out: dict[str, Any]) -> None:
    """Print the fraction of variance unexplained of each place; sparsity and shared features go to stderr."""
    rows = zip(held_out["places"], held_out["fvu"], strict=True)
    print_table(["PLACE", "FVU"], [dict(zip(["PLACE", "FVU"], row, strict=True)) for row in rows])
    echo(
        f"active features per token: {held_out['l0']:.1f}; share of features that are never active: "
        f"{held_out['dead']:.3f}",
        err=True,
    )
    if "first_alone" in held_out:
        n_first, n_second = held_out["first_alone"], held_out["second_alone"]
        echo(
            f"of {held_out['alive']} active features, {n_first} are written to the first model only, "
            f"{n_second} to the second only; as a control, train on a model against itself",
            err=True,
        )


def _settings(config: Path | None, parameters: dict[str, Any]) -> TrainingSettings:
    """Training settings of a TOML file, overridden by those of --set.

    Arguments:
        config: Path of the TOML file; None for no file.
        parameters: Name -> value of the settings of --set.

    Raises:
        ConfigError: The file is not TOML, or a setting is unknown or invalid.
    """
    from ...stages.features.training.settings import TrainingSettings
    from ...store.errors import ConfigError
    from ..settings import read_settings

    file_settings: dict[str, Any] = {}
    if config is not None:
        try:
            file_settings = tomllib.loads(config.read_text("utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"expected TOML in the file {config}, which cannot be read: {error}") from error
    training_settings: TrainingSettings = read_settings(TrainingSettings, "train", file_settings | parameters)
    return training_settings


def _hooks(training_settings: TrainingSettings) -> list[str]:
    """Names or globs of the hook points whose activations a dictionary is trained on: those it reads and
    writes."""
    from ...stages.forward.architectures.points import BY_NAME

    layers = ["*"] if training_settings.layers is None else list(map(str, training_settings.layers))
    # An autoencoder reads and writes one hook point, which is captured once.
    kinds = dict.fromkeys((training_settings.read, training_settings.writes))
    return [BY_NAME[kind].path.format(layer) for kind in kinds for layer in layers]


def _captured(
    model: str, prompts: Any, hooks: list[str], store: Store, quiet: bool, storing: Mapping[str, Any]
) -> StoredActivations:
    """Stored activations of a model at hook points; what the store does not hold is captured.

    Arguments:
        model: Hub id, directory or built-in model.
        prompts: A `Corpus`, a list of texts or a list of token ids.
        hooks: Names or globs of hook points.
        store: Where activations are read and written.
        quiet: Show no progress bar.
        storing: Fields of `CaptureOptions`.
    """
    from ...pipeline import run
    from ...stages.forward.capture.capture import CaptureNode
    from ...stages.forward.models.source import ModelSource
    from ...stages.forward.text.corpora.corpus import Corpus
    from ...stages.training_data.stored import StoredActivations

    source = ModelSource.of(model)
    if isinstance(prompts, Corpus):
        prompts = prompts.tokens(source.tokenizer, store, quiet=quiet)
    node = CaptureNode(source, prompts, hooks, **storing)
    run(node, store, quiet=quiet)
    return StoredActivations.of_run(store, node.run_key, node.tokens, node.dtype, node.cells)


def _train(
    training_settings: TrainingSettings, source: Source, out: Path, save_every: int, quiet: bool
) -> Training:
    """Train to the last step, or continue from the checkpoint in `out`.

    Arguments:
        training_settings: Settings of the dictionary and its training.
        source: Activations to train on.
        out: Folder for the checkpoint and the log.
        save_every: Number of steps between two checkpoints.
        quiet: Show no progress bar.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed; a checkpoint is written first.
    """
    from ...pipeline.progress import Progress
    from ...stages.features.training.trainer import Training

    training = Training(training_settings, source, out, save_every=save_every)
    with Progress(quiet) as progress, _interrupted() as stop:
        task = progress.task(
            # A resumed training has only the steps after its checkpoint left.
            "train",
            total=(training_settings.steps - training.step) * training_settings.batch,
            unit="tokens",
        )
        # False: Ctrl-C stopped it, and a checkpoint is written.
        if not training.run(advance=task.advance, stop=stop):
            raise KeyboardInterrupt
    return training


@contextmanager
def _interrupted() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed within the `with` block.

    The first Ctrl-C only sets this flag, so that the current step is finished; the second interrupts at once.
    """
    pressed = False

    def note(*_: Any) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, previous_handler)

    previous_handler = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, previous_handler)


def _finish(training: Training, model: str, out: Path, dtype: str) -> None:
    """Score a dictionary on held-out tokens, write the scores, then export it.

    The folder of the dictionary is written last: if it exists, both steps are complete.
    """
    from ...stages.features.export import export
    from ...stages.features.training.evaluate import summary
    from ...stages.features.training.replacement import replacement_loss
    from ...stages.features.training.trained import FORMATS, as_dictionary
    from ...stages.forward.models.model import Model

    training_settings, layers = training.settings, training.layers
    # If no share of the tokens is held out, the scores are those of the training data.
    held_out = training.held_out or training.source
    losses = replacement_loss(
        Model.from_pretrained(model),
        layers,
        training_settings.read,
        training_settings.writes,
        held_out.ids(EVALUATED),
        skip_positions=training_settings.skip_positions,
    )
    evaluation = {
        "settings": training_settings.plain(),
        "held_out": summary(training.measured(held_out), losses),
    }
    (out / FIGURES).write_text(json.dumps(evaluation, indent=1) + "\n", "utf-8")
    dictionary = as_dictionary(layers, training_settings, model_name=model)
    export(dictionary, out / RESULT, FORMATS[training_settings.kind], dtype=dtype)


def _finish_crosscoder(training: Training, models: list[str], out: Path) -> None:
    """Score a crosscoder on held-out tokens, write the scores, then save it. The folder is written last."""
    from ...stages.features.crosscoder import place_figures

    crosscoder = training.crosscoder(models)
    source = training.held_out or training.source
    per_place = place_figures(crosscoder, training.states(source))
    measured = training.measured(source)
    held_out: dict[str, Any] = {
        "tokens": int(per_place.attrs["rows"]),
        "places": per_place["place"].values.tolist(),
        "fvu": [round(float(value), 5) for value in per_place["fvu"].values],
        "l0": round(float(measured["l0"][0]), 5),
        "dead": round(float(measured["dead"][0]), 5),
    }
    held_out |= {name: value for name, value in per_place.attrs.items() if name != "rows"}
    if "relative_norm" in per_place:
        held_out["relative_norm"] = [round(float(value), 5) for value in per_place["relative_norm"].values]
    (out / FIGURES).write_text(
        json.dumps({"settings": training.settings.plain(), "held_out": held_out}, indent=1) + "\n", "utf-8"
    )
    crosscoder.save(out / RESULT)

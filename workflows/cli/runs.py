"""Commands that compute: `demo`, `capture`, `compute`, `explain`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...stages.extras import require
from ...store.display.terminal import echo
from .. import build
from .completion import setting_names, workflow_names
from .gradients import GRADIENT_OPTIONS, gradient_options, with_metric
from .options import (
    LOADING,
    NAMED,
    PLACE,
    RUNNING,
    STORING,
    command,
    declares,
    given_options,
    json_option,
    positions,
    print_json,
    print_table,
    quiet_option,
    settings,
    size,
    store_option,
    with_options,
)
from .prompts import PromptSources, prompt_options

if TYPE_CHECKING:
    from ...pipeline import Plan
    from ...stages.forward.capture.capture import CaptureNode
    from ...stages.forward.text.corpora.estimate import CorpusSize
    from ...store import Store
    from ..workflow import Workflow

HOOKS_EXAMPLE = "--hooks 'blocks.*.hook_resid_post'"


def on_workflow(command: Callable[..., int | None]) -> Callable[..., None]:
    """Decorator that adds the argument WORKFLOW to a command, and options for model, settings and store.

    The command function is called with the built `Workflow` as its first argument, then `store_path`,
    `as_json` and its own options. UsageError if the model, backend or adapter is given both as an option and
    by --set.
    """

    @functools.wraps(command)
    def with_workflow(
        workflow: str,
        model: str | None,
        backend: str | None,
        adapter: str | None,
        trust_layout: bool,
        parameters: dict[str, Any],
        **options: Any,
    ) -> None:
        for name, value in {"model": model, "backend": backend, "adapter": adapter}.items():
            if value is not None and name in parameters:
                raise click.UsageError(f"the {name} is given twice: --{name} and --set {name}=…; keep one")
            if value is not None:
                parameters[name] = value
        command(build(workflow, trust_layout=trust_layout, **parameters), **options)

    return with_options(
        with_workflow,
        click.argument("workflow", shell_complete=workflow_names),
        click.option(
            "--model",
            help='Hub id, directory, GGUF file, or built-in model such as "specimen"; as --set model=….',
        ),
        declares(NAMED),
        click.option(
            "--set",
            "parameters",
            multiple=True,
            callback=settings,
            shell_complete=setting_names,
            metavar="NAME=VALUE",
            help="Value of a setting, read as JSON if it is JSON, else as text; repeatable.",
        ),
        store_option,
        json_option,
    )


def run_options(command: Callable[..., int | None]) -> Callable[..., int | None]:
    """Decorator that adds the options of `Workflow.run`: cluster, workers, threads, memory and quiet."""
    return with_options(
        command,
        declares(PLACE),
        click.option(
            "--threads", type=click.IntRange(min=1), help="Number of threads; default one per core."
        ),
        click.option(
            "--memory", callback=size, metavar="SIZE", help="Refuse a plan whose peak memory is larger."
        ),
        quiet_option,
    )


@command(epilog="Example: mizarr demo --output demo")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default="demo",
    show_default=True,
    help="Folder for the store and the figures.",
)
@click.option("--model", default="specimen", show_default=True, help='Hub id, directory or "specimen".')
@declares(LOADING.only("revision", "device", "trust_layout", "backend", "adapter"))
@json_option
@quiet_option
def demo(output: Path, as_json: bool, **options: Any) -> None:
    """Run two workflows on the built-in model, offline.

    Captures activations, reads them with the logit lens, and finds the curve that counts characters in a
    line. Prints tables and writes figures into the folder. The second time everything is cached.
    """
    from ...store import open_store
    from ...store.display.console import EscapingConsole
    from ..demo import run

    # With --json, stdout holds the JSON document only.
    console = EscapingConsole(stderr=as_json)
    result = run(
        open_store(output / "store"),
        output / "figures",
        console=console,
        **options,
    )
    if as_json:
        print_json(result.to_json())


@command(epilog=f"Example: mizarr capture specimen 'It was the best of times' --text {HOOKS_EXAMPLE}")
@click.argument("model")
@prompt_options
@click.option(
    "--hooks",
    multiple=True,
    required=True,
    metavar="GLOB",
    help="Hook points to store, as a name or a glob; repeatable.",
)
@click.option(
    "--positions",
    callback=positions,
    metavar="WHICH",
    help="Positions to store: last, a slice such as ::16, numbers such as 0,5,-1, or a mask in a .npy file.",
)
@click.option(
    "--reduce",
    metavar="HOW",
    help="Store a reduction instead of the activations: norm (of each row), mean, weighted_mean or max (over "
    "the tokens of each prompt), run_mean (over all tokens), features:NAME (counts and sums of a "
    "dictionary's features); for hook_logits topk:10 (the largest with their token ids) or logsumexp.",
)
@store_option
@declares(LOADING, STORING, RUNNING)
@click.option(
    "--durability",
    type=click.Choice(["disk", "process"]),
    default="disk",
    show_default=True,
    help="What committed data survives: a power cut (disk), or only a killed process (process, faster).",
)
@gradient_options
@click.option(
    "--dry-run", is_flag=True, help="Show what is cached and the estimated cost of the rest; compute nothing."
)
@click.option(
    "--exact", is_flag=True, help="In a dry run count all prompts; by default large files are sampled."
)
@json_option
@quiet_option
def capture(
    model: str,
    prompts: PromptSources,
    hooks: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Run MODEL over PROMPTS and store activations.

    MODEL is a hub id, a directory, a GGUF file, or a built-in model: "specimen", "specimen-guided",
    "specimen-rwkv" or "specimen-experts". What the store already holds is not computed again.

    PROMPTS are files, or - for stdin. A text file holds one prompt per line. A JSONL file holds a string,
    {"text": …} or {"ids": […]} per line, or {"source": …, "target": …} for an encoder-decoder. A Parquet
    file has a column text or ids.

    Folders, globs, WebDataset archives, Arrow and gzipped files are read as a corpus, and so is every file
    if --context or another option for documents is given: documents are streamed, and cut or packed into
    contexts.

    A hook point that begins with grad: stores the gradient of a metric: --hooks
    'grad:blocks.*.hook_resid_post' --metric 'logit_difference=["yes", "no"]' (tokens as words or ids).
    """
    from ...pipeline import Context, plan, run
    from ...stages.forward.capture.capture import CaptureNode
    from ...stages.forward.hooks.spec import HookSpec
    from ...stages.forward.models.reference import ModelRef
    from ...stages.forward.models.source import ModelSource
    from ...stages.forward.text.corpora.estimate import estimated_size
    from ...stages.options import RunOptions
    from ...store.store import open_store, requested_store

    exact, quiet = options["exact"], options["quiet"]
    if exact and not dry_run:
        raise click.UsageError(
            "--exact works with --dry-run only, because a capture itself always counts all prompts; leave "
            "it out"
        )
    source = ModelSource(ModelRef(model, **given_options(options, LOADING)))
    spec = HookSpec().capture(*hooks, positions=options["positions"], reduce=_reduction(options["reduce"]))
    spec = with_metric(spec, source, **{name: options[name] for name in GRADIENT_OPTIONS})
    new_node = partial(CaptureNode, source, hooks=spec, **given_options(options, STORING))
    running = RunOptions(**given_options(options, RUNNING), progress=not quiet)
    context = Context(cluster=running.cluster, workers=running.workers)
    with contextlib.ExitStack() as stack:
        # Errors in the request are raised before the store is created: a refused command leaves no store.
        corpus, labels = stack.enter_context(prompts.corpus()), None
        sampled = prompts.sampled() if dry_run and corpus is None and not exact else None
        if corpus is None and sampled is None:
            node = new_node(prompts=prompts.read(source))
        if corpus is not None:
            corpus.files  # noqa: B018 - raises if no file matches
        if dry_run:
            store = stack.enter_context(_read_only_store(options["store_path"]))
        else:
            # A store that this creates is removed again if a later step refuses the request.
            store = stack.enter_context(requested_store(options["store_path"], options["durability"]))
        if dry_run and corpus is not None and not exact:
            token_nodes = corpus.nodes(source.tokenizer)
            # A corpus whose tokens are all stored is counted exactly at no cost.
            is_tokenised = all(token_node.status(store).is_cached for token_node in token_nodes)
            sampled = None if is_tokenised else corpus
        if sampled is not None:
            size = estimated_size(sampled, source.tokenizer)
            # Planned only to raise the errors that the real run would raise.
            plan(new_node(prompts=size.sample), store, context)
            _print_estimate(size, new_node(prompts=size.sample), store, as_json)
            return
        if corpus is not None:
            # --exact tokenises the corpus into a temporary store: a dry run must not write to the real one.
            token_store = open_store(stack.enter_context(tempfile.TemporaryDirectory())) if exact else store
            tokens, labels = corpus.read(source.tokenizer, token_store, quiet=quiet)
            node = new_node(prompts=tokens)
            # Labels become coordinates beside the captured variables: their names must differ.
            node.require_other_names(labels.coords)
        if dry_run:
            _print_plan(plan(node, store, context), as_json)
            return
        if corpus is not None and labels is not None:
            # Tokenises all files again, therefore only if the store lacks the run.
            node.take_texts(store, corpus, labels)
        run(node, store, **running.keywords)
        # So that `mizarr ls` lists the run, even if only workflows read it later.
        node.note_asked(store)
        if labels is not None:
            node.keep_labels(store, labels)
        _print_captured(node, store, as_json)


def _reduction(text: str | None) -> Any:
    """Value of --reduce for `HookSpec.capture`: for "features:NAME" that dictionary, else the text itself."""
    prefix, _, name = (text or "").partition(":")
    if prefix != "features":
        return text
    from ...stages.features.dictionary import Dictionary

    return Dictionary.from_pretrained(name)


def _print_estimate(size: CorpusSize, node: CaptureNode, store: Store, as_json: bool) -> None:
    """Print the estimated size and time of capturing a corpus that is not tokenised yet.

    Arguments:
        size: Estimated tokens and prompts of the corpus, with the sample they were estimated from.
        node: The capture of that sample; its bytes and seconds are scaled by the number of tokens.
        store: The store that the capture would be written to.
        as_json: Print JSON instead of text.
    """
    from ...pipeline.plan import human_bytes
    from ...pipeline.progress import clock, short

    scale = size.tokens / size.sample.n_tokens
    # Object stores report no free bytes: None.
    n_written, n_free = round(node.estimate(store).bytes_written * scale), store.files.free_bytes
    seconds = node.expected_seconds(store, scale)
    if as_json:
        counts = {"tokens": size.tokens, "prompts": size.prompts, "files": size.files, "bytes": size.bytes}
        costs = {"bytes_written": n_written, "free_bytes": n_free, "seconds": seconds}
        print_json({"is_estimated": True, **counts, "looked_at_bytes": size.looked_at, **costs})
        return
    echo(
        f"about {short(size.tokens)} tokens in {short(size.prompts)} prompts, estimated from "
        f"{human_bytes(size.looked_at)} of the {human_bytes(size.bytes)} in "
        f"{size.files} {'file' if size.files == 1 else 'files'}; --exact counts them, and "
        "finds what the store holds already"
    )
    free = "" if n_free is None else f"; {human_bytes(n_free)} are free on the disk"
    time = "" if seconds is None else f"; this takes about {clock(seconds)}"
    echo(f"{human_bytes(n_written)} would be written{free}{time}")
    if n_free is not None and n_written > n_free:
        echo("the activations do not fit on the disk: capture fewer hook points, or use --share")


def _print_captured(node: CaptureNode, store: Store, as_json: bool) -> None:
    """Print the captured run and the Python call that opens it; as JSON every key, and the peak memory."""
    from ...pipeline.memory import highest_peaks
    from ...store.upkeep.listing import captured_hooks

    entry, records = node.records(store)
    rows: list[dict[str, Any]] = [
        {"variable": variable, "layer": layer, "key": record.key, "content": record.content}
        for (variable, layer), record in records
    ]
    if as_json:
        sizes = {"prompts": node.tokens.n_prompts, "tokens": node.tokens.n_tokens}
        notes = [note for _, record in records[:1] for note in store.provenance(record)]
        memory = {"peak_memory_bytes": highest_peaks(notes)}
        print_json({"run": entry.digest, "data": entry.path, **sizes, **memory, "arrays": rows})
        return
    hooks = ", ".join(captured_hooks([record.label for _, record in records]))
    prompts, tokens = node.tokens.n_prompts, node.tokens.n_tokens
    counted = f"{prompts:,} prompt{'' if prompts == 1 else 's'}, {tokens:,} tokens"
    echo(f"run {entry.digest[:12]}: {counted}, {hooks}")
    echo(f"open it: mizarr.open_store({store.address!r})[{entry.digest[:12]!r}]")


def _print_plan(steps: Plan, as_json: bool) -> None:
    """Print a table with one row per stage: whether it is cached, and its estimated cost."""
    if as_json:
        print_json(steps.to_json())
        return
    columns = ["STAGE", "STATE", "CELLS", "READ", "WRITTEN", "PEAK", "TIME"]
    print_table(columns, [dict(zip(columns, row, strict=True)) for row in steps.rows()])


@command(
    help="""Compute a workflow and print its result; cached stages are not computed again.

    `mizarr workflows` lists the workflows, and `mizarr workflows WORKFLOW` the settings of one.
    """,
    epilog="Example: mizarr compute logit_lens --set 'prompts=[\"Once upon a time\"]' --figures figures",
)
@on_workflow
@click.option(
    "--figures", type=click.Path(file_okay=False, path_type=Path), help="Folder for the figures, as PNG."
)
@click.option(
    "--every-model",
    is_flag=True,
    help="Compute for every model that `mizarr models ls` lists, one after another.",
)
@run_options
def compute(
    workflow: Workflow,
    store_path: str,
    as_json: bool,
    figures: Path | None,
    every_model: bool,
    **options: Any,
) -> None:
    """Compute a workflow and print its result; the user's text is `help` above."""
    from ...store.display.console import EscapingConsole
    from ...store.store import requested_store

    if figures is not None and every_model:
        # Checked once here: in the loop over models MissingExtra would skip every model.
        require("plots", "--figures")
    if every_model:
        _compute_every(workflow, store_path, as_json, figures, options)
        return
    if figures is not None:
        from ..report.page import check_output

        # Any name: checked is that files can be written into the folder.
        check_output(figures / "figure.png")
    with requested_store(store_path) as store:
        if figures is not None:
            # Before the computation: a missing matplotlib must not cost hours of work.
            workflow.require("plots", store)
        result = workflow.run(store, **options)
    if as_json:
        paths = result.draw(figures) if figures else []
        print_json(result.to_json() | {"figures": [str(path) for path in paths]})
        return
    for path in result.render(EscapingConsole(), figures):
        echo(f"wrote {path}", err=True)


def _compute_every(
    workflow: Workflow, store_path: str, as_json: bool, figures: Path | None, options: Mapping[str, Any]
) -> None:
    """Compute a workflow for every runnable model on this machine, sequentially.

    A model that raises a `MizarrError`, such as a missing hook point, is skipped with a message.

    Arguments:
        workflow: The workflow; model and revision of its settings are replaced.
        store_path: Directory or URL of the store.
        as_json: Print one JSON list, an object per model, instead of text.
        figures: Folder for figures, a subfolder per model; None draws none.
        options: Keyword arguments of `Workflow.run`.
    """
    from ...store import open_store
    from ...store.display.console import EscapingConsole
    from ...store.errors import MizarrError

    parsed = click.get_current_context().params
    if parsed["model"] or {"model", "revision"} & parsed["parameters"].keys():
        raise click.UsageError(
            "--every-model computes the workflow for every model on this machine; leave out --model, "
            "--set model=… and --set revision=…"
        )
    store = open_store(store_path)
    documents: list[dict[str, Any]] = []
    for name, revision in _runnable_models():
        header = {"model": name, "revision": revision}
        # A hub id such as org/name would be a folder within a folder.
        folder = figures and figures / name.replace("/", "--")
        if not as_json:
            echo(f"== {name}")
        try:
            model_settings = dataclasses.replace(workflow.settings, model=name, revision=revision)
            result = type(workflow)(model_settings).run(store, **options)
            if as_json:
                paths = result.draw(folder) if folder else []
                documents.append(header | result.to_json() | {"figures": [str(path) for path in paths]})
            else:
                for path in result.render(EscapingConsole(), folder):
                    echo(f"wrote {path}", err=True)
        except MizarrError as error:
            # One model that the workflow does not fit must not end the run over the others.
            documents.append(header | {"skipped": str(error)})
            echo(f"skipped {name}: {error}", err=True)
    if as_json:
        print_json(documents)


def _runnable_models() -> Iterator[tuple[str, str | None]]:
    """(name, revision) of each model on this machine that can run.

    Of a model with several revisions, "main", or else the first one.
    """
    from ...stages.forward.models.listing import listed_models

    revisions: dict[str, str | None] = {}
    for model in listed_models():
        if model.can_run and (model.name not in revisions or model.revision == "main"):
            revisions[model.name] = model.revision
    yield from revisions.items()


@command(
    help="""Show for each stage whether it is cached, or why it will run.

    Also shows bytes read and written, peak memory, and the estimated time if a similar stage was computed
    before. Nothing is computed or written; no model is loaded.

    `mizarr workflows` lists the workflows.
    """,
    epilog="Example: mizarr explain logit_lens --model specimen",
)
@on_workflow
@declares(PLACE)
def explain(workflow: Workflow, store_path: str, as_json: bool, cluster: str | None, workers: int) -> None:
    """Print question, settings and plan of a workflow; the user's text is `help` above."""
    from ...pipeline import Context, plan
    from ..settings import as_given

    with _read_only_store(store_path) as store:
        # Which other nodes a real run would compute depends on the results of these, if they are stored.
        if (fact_nodes := workflow.fact_nodes()) and plan(fact_nodes.values(), store).is_cached:
            workflow.choose_facts(store)
        if plan(workflow.first_nodes().values(), store).is_cached:
            workflow.settle(store, refuses=False)
        steps = plan(workflow.nodes.values(), store, Context(cluster=cluster, workers=workers))
    parameters = as_given(workflow.settings)
    if as_json:
        header = {"workflow": workflow.name, "question": workflow.question, "settings": parameters}
        print_json(header | steps.to_json())
        return
    # To stderr, so that stdout holds the table alone.
    echo(workflow.question, err=True)
    if workflow.caution:
        echo(workflow.caution, err=True)
    for field in dataclasses.fields(workflow.settings):
        echo(
            f"  --set {field.name}={json.dumps(parameters[field.name])}  {field.metadata.get('help', '')}",
            err=True,
        )
    _print_plan(steps, as_json)


@contextlib.contextmanager
def _read_only_store(path: str) -> Iterator[Store]:
    """Open a store read-only, within the `with` block; if there is none, an empty temporary store instead."""
    from ...store import open_store
    from ...store.files import is_remote

    if is_remote(path) or Path(path).exists():
        yield open_store(path, mode="r")
        return
    with tempfile.TemporaryDirectory() as empty:
        yield open_store(empty)

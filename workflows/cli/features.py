"""Commands on feature dictionaries: `features fetch`, `inspect`, `export`, `label`, `labels`, `pages`.

Only `pages` runs a model, and only if the activations of its corpus are not stored yet.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...store.display.terminal import echo
from .models import CANNOT_RUN, print_fetched
from .options import (
    SuggestingGroup,
    json_option,
    print_json,
    print_table,
    quiet_option,
    settings,
    store_option,
)

if TYPE_CHECKING:
    from ...stages.features.dictionary import Dictionary

__all__ = ["features"]

read_option = click.option(
    "--read", help="Hook point that features read, if the files do not say it: hook_resid_mid."
)
write_option = click.option("--write", help="Hook point that features write to, if not the one in the files.")


@click.group(cls=SuggestingGroup)
def features() -> None:
    """Fetch, inspect, export and label feature dictionaries."""


@features.command(epilog="Example: mizarr features fetch mntss/clt-llama-3.2-1b-524k")
@click.argument("reference")
@json_option
@quiet_option
def fetch(reference: str, as_json: bool, quiet: bool) -> None:
    """Download REFERENCE, org/repo[/subfolder][@revision], from the hub; print the directory.

    If a repository holds many dictionaries, name the folder of one. Files of other repositories that its
    config.yaml lists are fetched as well. After an interruption, finished files are kept and the next call
    fetches the others. HF_TOKEN gives access to gated repositories.
    """
    from ...stages.features.download import fetch

    files = fetch(reference, progress=not quiet)
    print_fetched(files, as_json)


@features.command(
    epilog="Example: mizarr features inspect mntss/clt-llama-3.2-1b-524k --model meta-llama/Llama-3.2-1B"
)
@click.argument("reference")
@read_option
@write_option
@click.option("--model", help="Model that the dictionary must fit: layers and hidden size are compared.")
@click.option(
    "--values", is_flag=True, help="Read all weights: show norms, and whether every value is finite."
)
@json_option
@quiet_option
def inspect(
    reference: str,
    read: str | None,
    write: str | None,
    model: str | None,
    values: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Show layers, features, hook points and configuration of REFERENCE, and how it was understood.

    REFERENCE is specimen/clt, a directory, or org/repo[/subfolder][@revision] in the local cache. Exit code
    1, with the reasons, if it cannot be used with --model or holds numbers that are not finite.
    """
    from ...stages.features.dictionary import Dictionary

    dictionary = Dictionary.from_pretrained(reference, read=read, write=write)
    document = facts(dictionary)
    document["issues"] = _reasons_against(dictionary, model)
    if values:
        document["weights"] = (
            _crosscoder_statistics(dictionary)
            if dictionary.places
            else _weight_statistics(dictionary, quiet=quiet)
        )
        document["issues"] += [
            f"{row.get('place') or 'layer ' + str(row['layer'])} holds numbers that are not finite"
            for row in document["weights"]
            if not row["finite"]
        ]
    if as_json:
        print_json(document)
    else:
        _print(document)
    return CANNOT_RUN if document["issues"] else 0


@features.command(
    epilog="Example: mizarr features export mntss/clt-llama-3.2-1b-524k copy --format circuit_tracer"
)
@click.argument("reference")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--format", "name", required=True, help="Format to write: saelens, sparsify or circuit_tracer.")
@click.option(
    "--dtype",
    help="Dtype of the written files: float32, float16 or bfloat16; default that of the dictionary.",
)
@read_option
@write_option
def export(
    reference: str, folder: Path, name: str, dtype: str | None, read: str | None, write: str | None
) -> None:
    """Write REFERENCE into a new FOLDER in the format of another program; print the folder.

    The folder appears when it is complete. A dictionary that the format cannot express is refused.
    """
    from ...stages.features.dictionary import Dictionary
    from ...stages.features.export import export

    dictionary = Dictionary.from_pretrained(reference, read=read, write=write)
    echo(str(export(dictionary, folder, name, dtype=dtype)))


@features.command(
    epilog='Example: mizarr features label specimen/sae L3:204 "towards something" --author ada'
)
@click.argument("reference")
@click.argument("feature")
@click.argument("text")
@click.option("--author", default="", help="Name shown beside the label.")
@read_option
@write_option
@store_option
def label(
    reference: str, feature: str, text: str, author: str, read: str | None, write: str | None, store_path: str
) -> None:
    """Label FEATURE of REFERENCE with TEXT; an empty TEXT removes the label.

    FEATURE is layer:index, such as L3:204. Labels are stored under a digest of the dictionary's content. They
    are not part of any cache key, so nothing is computed again. Tables and pages show them with the feature.
    """
    from ...stages.features.dictionary import Dictionary
    from ...stages.features.labels import set_labels
    from ...store.store import requested_store

    dictionary = Dictionary.from_pretrained(reference, read=read, write=write)
    # Before the store is opened: an unknown feature raises, and must not leave a new store behind.
    feature_ref = dictionary.feature(feature)
    with requested_store(store_path) as store:
        set_labels(store, dictionary, {feature_ref: text}, author=author)


@features.command(epilog="Example: mizarr features labels specimen/sae --json")
@click.argument("reference")
@click.option(
    "--history", is_flag=True, help="List all labels ever given, oldest first, removed ones included."
)
@read_option
@write_option
@store_option
@json_option
def labels(
    reference: str, history: bool, read: str | None, write: str | None, store_path: str, as_json: bool
) -> None:
    """List the labels of REFERENCE's features."""
    from ...stages.features.dictionary import Dictionary
    from ...stages.features.labels import labels_of
    from ...store import open_store

    dictionary = Dictionary.from_pretrained(reference, read=read, write=write)
    store = open_store(store_path, "r")
    annotations = store.annotations(dictionary.identity) if history else labels_of(store, dictionary).values()
    rows = [
        {"feature": note.item, "label": note.text, "author": note.author, "created": note.created}
        for note in annotations
    ]
    if as_json:
        print_json({"dictionary": dictionary.name, "identity": dictionary.identity, "labels": rows})
        return
    columns = {"FEATURE": "feature", "LABEL": "label", "AUTHOR": "author", "CREATED": "created"}
    print_table(list(columns), [{name: row[key] for name, key in columns.items()} for row in rows])


@features.command(epilog="Example: mizarr features pages pages --set strongest=20")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--set",
    "parameters",
    multiple=True,
    callback=settings,
    metavar="NAME=VALUE",
    help="A setting of feature_pages, such as model, dictionary, corpus or layer; repeat for more.",
)
@click.option(
    "--neuronpedia",
    metavar="MODEL/SET",
    help="Write JSON that Neuronpedia imports instead, under these ids of model and source set.",
)
@click.option("--creator", default="", help="Id of the Neuronpedia account that will import it.")
@click.option("--dataset", default="", help="What the corpus is called on Neuronpedia.")
@store_option
@json_option
@quiet_option
def pages(
    folder: Path,
    parameters: dict[str, Any],
    neuronpedia: str | None,
    creator: str,
    dataset: str,
    store_path: str,
    as_json: bool,
    quiet: bool,
) -> None:
    """Write a page for every feature of a dictionary into FOLDER; print the file to open.

    Computes the parts of the workflow feature_pages that are not cached; after an interruption the same
    command continues. The pages open in any browser, offline; the folder can be moved as a whole.
    """
    from ...store.store import requested_store
    from .. import build
    from ..features.feature_pages import FeaturePages
    from ..features.page_files import check_folder

    # All errors of the options are raised before the workflow is computed.
    # (model, "/", source set); without a slash the last of them is empty.
    ids = ("", "", "") if neuronpedia is None else neuronpedia.partition("/")
    if neuronpedia is not None and not (ids[0] and ids[2]):
        raise click.UsageError(
            f"expected --neuronpedia MODEL/SET, such as gpt2-small/res-mine, found {neuronpedia!r}"
        )
    if neuronpedia is None and (creator or dataset):
        option = "--creator" if creator else "--dataset"
        raise click.UsageError(
            f"{option} has an effect only together with --neuronpedia; add --neuronpedia MODEL/SET, or leave "
            f"{option} out"
        )
    workflow = build("feature_pages", **parameters)
    assert isinstance(workflow, FeaturePages)
    if neuronpedia is None:
        check_folder(folder)
    with requested_store(store_path) as store:
        workflow.run(store, quiet=quiet)
    if neuronpedia is None:
        path = workflow.write_pages(folder)
    else:
        names = {"model": ids[0], "source_set": ids[2], "creator": creator, "dataset": dataset}
        path = workflow.write_neuronpedia(folder, **names)
    if as_json:
        count = len(workflow.material.features)
        print_json({"path": str(path), "features": count, "labels": len(workflow.labels)})
        return
    echo(path)


def facts(dictionary: Dictionary) -> dict[str, Any]:
    """Format, size, layers, hook points and activation function of a dictionary, as JSON values.

    Of the weights only the thresholds of the first layer are read.
    """
    layout = dictionary.layout
    first_layer = dictionary.layer(dictionary.layers[0])
    size = sum(dictionary.files.path(name).stat().st_size for name in layout.files)
    return {
        "name": dictionary.name,
        "revision": dictionary.files.revision,
        "directory": str(dictionary.files.directory),
        "format": layout.format,
        "kind": dictionary.kind,
        "model": dictionary.model_name,
        "layers": list(dictionary.layers),
        "features_per_layer": dictionary.n_features,
        "features": dictionary.n_features * len(dictionary.layers),
        "read": [*map(str, dictionary.places or dictionary.read_hooks)],
        "write": [*map(str, dictionary.places or dictionary.write_hooks)],
        "d_in": dictionary.d_in,
        "d_out": dictionary.d_out,
        "activation": _activation(first_layer.activation),
        "skip": layout.has_skip,
        "dtype": str(first_layer.W_enc.dtype).removeprefix("torch."),
        "bytes": size,
        "files": len(layout.files),
        "scan": layout.scan,
        "zero_positions": layout.zero_positions,
        "settings": dict(layout.settings),
    }


def _activation(function: Any) -> str:
    """Name of an activation function, such as "JumpReLU" or "TopK (k 32)"."""
    k = getattr(function, "k", None)
    return type(function).__name__ + ("" if k is None else f" (k {k})")


def _reasons_against(dictionary: Dictionary, model: str | None) -> list[str]:
    """Reasons why a dictionary does not fit a model, such as another hidden size; empty if it fits.

    Arguments:
        dictionary: The feature dictionary.
        model: Hub id, directory or built-in model; None checks nothing.
    """
    if model is None:
        return []
    from ...stages.forward.models.files import resolve
    from ...store.errors import DictionaryError

    files = resolve(model)
    try:
        dictionary.require_fit(files.architecture(), files.name)
    except DictionaryError as error:
        return [str(error)]
    return []


def _weight_statistics(dictionary: Dictionary, *, quiet: bool) -> list[dict[str, Any]]:
    """For each layer: norms of encoder and decoder rows, and whether all weights are finite, as JSON values.

    A row is the L2 norm of a feature's vector. Reads every weight, 4096 rows at a time.
    """
    import torch

    from ...pipeline.progress import Progress

    rows = []
    with Progress(quiet=quiet) as bars:
        task = bars.task(f"reading {dictionary.name}", total=len(dictionary.layers), unit="layers")
        for layer in dictionary.layers:
            weights = dictionary.layer(layer)
            matrices = [weights.W_enc, *weights.W_dec.values()]
            # In blocks, so that only a part of a half-precision matrix is converted to float32 at a time.
            encoder_norms, *decoder_norms_by_target = (
                torch.cat([block.float().norm(dim=1) for block in matrix.split(4096)]) for matrix in matrices
            )
            # [target layer, feature]
            decoder_norms = torch.stack(decoder_norms_by_target)
            others = [
                tensor for tensor in (weights.b_enc, weights.b_dec, weights.W_skip) if tensor is not None
            ]
            # An infinite or NaN weight makes the norm of its row so: W_enc and W_dec are not read again.
            finite = all(bool(tensor.isfinite().all()) for tensor in [encoder_norms, decoder_norms, *others])
            rows.append(
                {
                    "layer": layer,
                    "encoder_norm": float(encoder_norms.mean()),
                    "decoder_norm": float(decoder_norms.mean()),
                    "largest_decoder_norm": float(decoder_norms.max()),
                    # Features whose decoder row is zero for every target layer.
                    "zero_decoders": int((decoder_norms == 0).all(0).sum()),
                    "finite": finite,
                }
            )
            task.advance()
    return rows


def _crosscoder_statistics(dictionary: Dictionary) -> list[dict[str, Any]]:
    """Weight norms of a crosscoder as JSON values, per place: a hook point of one of its models.

    The keys are those of `_weight_statistics`. Decoder norms are in units of the standard deviation of the
    activations at that place.
    """
    from ...stages.features.crosscoder import Crosscoder

    crosscoder = Crosscoder.load(dictionary.files.directory)
    return [
        {
            "place": str(place),
            "encoder_norm": float(encoder.norm(dim=1).mean()),
            "decoder_norm": float(norm.mean()),
            "largest_decoder_norm": float(norm.max()),
            "zero_decoders": int((norm == 0).sum()),
            "finite": bool(encoder.isfinite().all() and norm.isfinite().all()),
        }
        for place, encoder, norm in zip(crosscoder.places, crosscoder.W_enc, crosscoder.norms(), strict=True)
    ]


def _print(document: dict[str, Any]) -> None:
    """Print the JSON document of `features inspect` as text."""
    from ...pipeline.plan import human_bytes

    def first_and_last(values: list[Any], separator: str) -> str:
        return f"{values[0]}" if len(values) == 1 else f"{values[0]} {separator} {values[-1]}"

    echo(f"{document['name']}: {document['kind']} in the format of {document['format']}")
    n_layers, n_files = len(document["layers"]), document["files"]
    echo(
        f"{document['features']:,} features, {document['features_per_layer']:,} in each of {n_layers} "
        f"layer{'s' if n_layers > 1 else ''}, {human_bytes(document['bytes'])} in {n_files} files"
    )
    shown = {
        "layers": first_and_last(document["layers"], "to"),
        "reads": first_and_last(document["read"], "…"),
        "writes": first_and_last(document["write"], "…"),
        "widths": f"{document['d_in']} read, {document['d_out']} written",
        "activation": document["activation"] + (", linear skip" if document["skip"] else ""),
        "dtype": document["dtype"],
        "made for": document["model"] or "unknown model",
    }
    for name, value in shown.items():
        echo(f"  {name}: {value}")
    for issue in document["issues"]:
        echo(f"cannot be used: {issue}")
    if "weights" in document:
        echo()
        row_key = "place" if "place" in document["weights"][0] else "layer"
        columns = {
            row_key.upper(): row_key,
            "ENCODER NORM": "encoder_norm",
            "DECODER NORM": "decoder_norm",
            "LARGEST": "largest_decoder_norm",
            "ZERO": "zero_decoders",
            "FINITE": "finite",
        }
        rows = [{label: _cell(row[key]) for label, key in columns.items()} for row in document["weights"]]
        print_table(list(columns), rows)


def _cell(value: Any) -> str:
    """Table cell of a value: yes or no for a bool, four digits for a float."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)

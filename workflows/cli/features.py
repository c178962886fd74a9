"""Commands about dictionaries of features: `features fetch`, `inspect`, `export`, `label`, `labels`, `pages`.
Only the last runs a model, where its corpus is not captured yet.
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
    "--read", help="Hook point features read, in place of what the files say: hook_resid_mid."
)
write_option = click.option("--write", help="Hook point features write to, if another one.")


@click.group(cls=SuggestingGroup)
def features() -> None:
    """Fetch transcoders and autoencoders, look into them, write them for other programs."""


@features.command(epilog="Example: mizarr features fetch mntss/clt-llama-3.2-1b-524k")
@click.argument("reference")
@json_option
@quiet_option
def fetch(reference: str, as_json: bool, quiet: bool) -> None:
    """Download REFERENCE, org/repo[/subfolder][@revision], from the hub; print the directory.

    Of a repository of many dictionaries name the folder of one. Files of other repositories that its
    config.yaml lists are fetched as well. Interrupted, it keeps the files that are finished and goes on with
    the next. HF_TOKEN opens gated repositories.
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

    REFERENCE is specimen/clt, a directory, or org/repo[/subfolder][@revision] in the local cache. Exit code 1
    if it cannot be used with --model, or holds numbers that are not finite, with the reasons.
    """
    from ...stages.features.dictionary import Dictionary

    dictionary = Dictionary.from_pretrained(reference, read=read, write=write)
    found = facts(dictionary)
    found["issues"] = _misfit(dictionary, model)
    if values:
        found["weights"] = (
            _place_values(dictionary) if dictionary.places else _values(dictionary, quiet=quiet)
        )
        found["issues"] += [
            f"{row.get('place') or 'layer ' + str(row['layer'])} holds numbers that are not finite"
            for row in found["weights"]
            if not row["finite"]
        ]
    if as_json:
        print_json(found)
    else:
        _print(found)
    return CANNOT_RUN if found["issues"] else 0


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

    FEATURE is layer:index, such as L3:204. Labels lie in the store under the content of the dictionary and
    are part of no key, so that nothing is computed again. Tables and pages show them with the feature.
    """
    from ...stages.features.dictionary import Dictionary
    from ...stages.features.labels import set_labels
    from ...store.store import requested_store

    dictionary = Dictionary.from_pretrained(reference, read=read, write=write)
    named = dictionary.feature(feature)  # first: a feature there is not leaves no new store behind
    with requested_store(store_path) as store:
        set_labels(store, dictionary, {named: text}, author=author)


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
    said = store.annotations(dictionary.identity) if history else labels_of(store, dictionary).values()
    rows = [
        {"feature": each.item, "label": each.text, "author": each.author, "created": each.created}
        for each in said
    ]
    if as_json:
        print_json({"dictionary": dictionary.name, "identity": dictionary.identity, "labels": rows})
        return
    columns = {"FEATURE": "feature", "LABEL": "label", "AUTHOR": "author", "SAID": "created"}
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
    """Write a page of every feature of a dictionary into FOLDER; print the file to open.

    The workflow feature_pages is computed as far as it is not cached; a killed one goes on where it was. The
    pages open in any browser, offline; their folder may be moved whole.
    """
    from ...store.store import requested_store
    from .. import build
    from ..features.feature_pages import FeaturePages
    from ..features.page_files import check_folder

    ids = ("", "", "") if neuronpedia is None else neuronpedia.partition("/")
    if neuronpedia is not None and not (ids[0] and ids[2]):
        raise click.UsageError(
            f"expected --neuronpedia MODEL/SET, such as gpt2-small/res-mine, found {neuronpedia!r}"
        )
    if neuronpedia is None and (creator or dataset):
        option = "--creator" if creator else "--dataset"
        raise click.UsageError(f"expected {option} with --neuronpedia, found it alone; leave it out")
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
    """What a dictionary is, as JSON values; reads no weights but for a layer's thresholds."""
    layout = dictionary.layout
    first = dictionary.layer(dictionary.layers[0])
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
        "activation": _activation(first.activation),
        "skip": layout.has_skip,
        "dtype": str(first.W_enc.dtype).removeprefix("torch."),
        "bytes": size,
        "files": len(layout.files),
        "scan": layout.scan,
        "zero_positions": layout.zero_positions,
        "settings": dict(layout.settings),
    }


def _activation(function: Any) -> str:
    """ "JumpReLU", "TopK (k 32)"."""
    k = getattr(function, "k", None)
    return type(function).__name__ + ("" if k is None else f" (k {k})")


def _misfit(dictionary: Dictionary, model: str | None) -> list[str]:
    """Why it cannot be used with a model; empty if it can, or none was named."""
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


def _values(dictionary: Dictionary, *, quiet: bool) -> list[dict[str, Any]]:
    """Per layer: norms of encoder and decoder rows, and whether all is finite. Reads every weight, in
    blocks.
    """
    import torch

    from ...pipeline.progress import Progress

    rows = []
    with Progress(quiet=quiet) as bars:
        task = bars.task(f"reading {dictionary.name}", total=len(dictionary.layers), unit="layers")
        for layer in dictionary.layers:
            part = dictionary.layer(layer)
            tensors = [part.W_enc, *part.W_dec.values()]
            norms = [
                torch.cat([block.float().norm(dim=1) for block in tensor.split(4096)]) for tensor in tensors
            ]
            small = [tensor for tensor in (part.b_enc, part.b_dec, part.W_skip) if tensor is not None]
            finite = all(bool(tensor.isfinite().all()) for tensor in [*norms, *small])
            decoders = torch.stack(norms[1:])
            rows.append(
                {
                    "layer": layer,
                    "encoder_norm": float(norms[0].mean()),
                    "decoder_norm": float(decoders.mean()),
                    "largest_decoder_norm": float(decoders.max()),
                    "zero_decoders": int((decoders == 0).all(0).sum()),
                    "finite": finite,
                }
            )
            task.advance()
    return rows


def _place_values(dictionary: Dictionary) -> list[dict[str, Any]]:
    """The same per place of a crosscoder, decoders in units of the spread of the states there."""
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


def _print(found: dict[str, Any]) -> None:
    from ...pipeline.plan import human_bytes

    layers = found["layers"]
    span = f"{layers[0]}" if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"
    echo(f"{found['name']}: {found['kind']}, written as {found['format']}")
    echo(
        f"{found['features']:,} features, {found['features_per_layer']:,} in each of {len(layers)} "
        f"layer{'s' if len(layers) > 1 else ''}, {human_bytes(found['bytes'])} in {found['files']} files"
    )
    shown = {
        "layers": span,
        "reads": found["read"][0] + (f" … {found['read'][-1]}" if len(found["read"]) > 1 else ""),
        "writes": found["write"][0] + (f" … {found['write'][-1]}" if len(found["write"]) > 1 else ""),
        "widths": f"{found['d_in']} read, {found['d_out']} written",
        "activation": found["activation"] + (", linear skip" if found["skip"] else ""),
        "dtype": found["dtype"],
        "made for": found["model"] or "not said",
    }
    for name, value in shown.items():
        echo(f"  {name}: {value}")
    for issue in found["issues"]:
        echo(f"cannot be used: {issue}")
    if "weights" in found:
        echo()
        first = "place" if "place" in found["weights"][0] else "layer"
        columns = {
            first.upper(): first,
            "ENCODER NORM": "encoder_norm",
            "DECODER NORM": "decoder_norm",
            "LARGEST": "largest_decoder_norm",
            "ZERO": "zero_decoders",
            "FINITE": "finite",
        }
        rows = [{label: _shown(row[key]) for label, key in columns.items()} for row in found["weights"]]
        print_table(list(columns), rows)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)

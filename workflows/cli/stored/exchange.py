"""Commands that exchange arrays with other programs: `export` and `import`. Neither imports torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import click

from ....store.display.terminal import echo
from ..options import json_option, print_json, store_option


@click.command(epilog="Example: mizarr export 3f9a0c --to states.parquet --layers 0-5 --store activations")
@click.argument("key")
@click.option(
    "--to", "path", required=True, metavar="FILE", help="File (for Zarr: folder) to write; must be new."
)
@click.option(
    "--format",
    help="netcdf, zarr, parquet, safetensors or npz; default by the suffix of FILE. Or datasets, saelens, "
    "sparsify: folders that the library `datasets` opens.",
)
@click.option(
    "--variables", metavar="NAMES", help="Variables to export, such as resid_post,mlp_out; default all."
)
@click.option("--layers", metavar="LAYERS", help="Layers of a run to export, such as 0-5,11; default all.")
@click.option(
    "--layout",
    type=click.Choice(["long", "wide"]),
    default="long",
    show_default=True,
    help="Rows of a Parquet file: one per layer and token, or one per token with a column per layer.",
)
@click.option(
    "--context", type=click.IntRange(min=1), help="Tokens per row for the formats saelens and sparsify."
)
@store_option
@json_option
def export(
    key: str,
    path: str,
    variables: str | None,
    layers: str | None,
    store_path: str,
    as_json: bool,
    **form: Any,
) -> None:
    """Write one array, result or run to a file for another program.

    KEY is any unique start of a key printed by `mizarr ls`, or of its DATA, which exports the whole run.
    Labels and provenance are included. Data is streamed into a temporary file, which is renamed when it is
    complete.
    """
    from ....store import open_store
    from ....store.exchange.exports import export_key

    names = None if variables is None else [name for name in variables.split(",") if name]
    written = export_key(
        open_store(store_path, mode="r"),
        key,
        path,
        variables=names,
        layers=None if layers is None else _layers(layers),
        **form,  # --format, --layout and --context
    )
    # A folder for Zarr, datasets, saelens and sparsify.
    files = [written] if written.is_file() else [file for file in written.rglob("*") if file.is_file()]
    if as_json:
        print_json({"path": str(written), "bytes": sum(file.stat().st_size for file in files)})
        return
    echo(str(written))


@click.command(
    name="import", epilog="Example: mizarr import states.safetensors --model gpt2 --store activations"
)
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option(
    "--model", required=True, help="Name of the model that was harvested; stored as you declare it."
)
@click.option("--revision", help="Revision of that model; stored as you declare it.")
@click.option(
    "--map", "pairs", multiple=True, metavar="ARRAY=HOOK",
    help="Hook point of an array: 'layers.{layer}=blocks.{layer}.hook_resid_post'; * for an axis of layers.",
)  # fmt: skip
@click.option(
    "--prompts", metavar="FILE", help="Prompts as `mizarr capture` reads them: token ids, or texts."
)
@click.option(
    "--skip", multiple=True, metavar="ARRAY", help="Array to leave out, as a name or a glob; repeatable."
)
@click.option("--dtype", help="Read 2-byte values as this dtype (bfloat16).")
@click.option("--n-layers", type=int, help="Number of layers of the model, if the files hold fewer.")
@store_option
@json_option
def import_(
    files: Sequence[str],
    pairs: Sequence[str],
    prompts: str | None,
    store_path: str,
    as_json: bool,
    **declared: Any,
) -> None:
    """Import activations that another program captured, as a run.

    FILE is .safetensors or .npz; its arrays are named after hook points (blocks.5.hook_resid_post), or mapped
    to them by --map. The model name is stored as you declare it; an imported run has a key of its own and is
    never used in place of a run that mizarr captured.
    """
    from ...exchange import import_activations

    tokens, texts = _prompts(prompts)
    states = import_activations(
        list(files),
        store=store_path,
        names=_names(pairs),
        tokens=tokens,
        texts=texts,
        **declared,  # --model, --revision, --skip, --dtype and --n-layers
    )
    run = str(states.encoding["run"])
    if as_json:
        print_json({"run": run, "variables": {str(n): dict(a.sizes) for n, a in states.data_vars.items()}})
        return
    echo(run)
    for name, array in states.data_vars.items():
        echo(f"{name} [{', '.join(f'{dim} {size}' for dim, size in array.sizes.items())}]", err=True)


def _names(pairs: Sequence[str]) -> dict[str, str]:
    """Array name -> hook point, from the values of --map; UsageError for a broken or repeated one."""
    hook_by_array: dict[str, str] = {}
    for pair in pairs:
        name, equals, hook = pair.partition("=")
        if not equals or not name or not hook:
            raise click.UsageError(f"expected --map ARRAY=HOOK, found --map {pair!r}")
        if name in hook_by_array:
            raise click.UsageError(
                f"--map names two hook points for the array {name!r}: {hook_by_array[name]!r} and {hook!r}; "
                "keep one"
            )
        hook_by_array[name] = hook
    return hook_by_array


def _prompts(source: str | None) -> tuple[Any, Any]:
    """Read a prompt file: (token ids, None) or (None, texts), depending on its content; (None, None) without
    a file."""
    if source is None:
        return None, None
    from ..prompts import read_prompts

    prompts = read_prompts([source])
    return (None, prompts) if isinstance(prompts[0], str) else (prompts, None)


def _layers(text: str) -> list[int]:
    """Layer numbers of a text such as "0-5,11", where both ends of a range are included.

    Raises:
        UsageError: The text has another form, or a range ends before it starts.
    """
    layers: list[int] = []
    for part in text.split(","):
        # At most four digits: a mistyped range must not fill the memory.
        match = re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", part)
        # Without a second number the range ends where it starts.
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise click.UsageError(
                f"expected --layers as numbers and ranges such as 0-5,11, found {text!r:.80}"
            )
        layers.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    return layers

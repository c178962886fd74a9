"""A pruned graph as tables and as GraphML, for other programs.

Parquet needs pyarrow (the extra `corpora`).

Columns of nodes: id, kind, layer, position, feature, activation, influence, cumulative. Columns of edges:
source and target (ids of nodes), weight (in units of the target).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape, quoteattr

from ....store.errors import MissingExtra

if TYPE_CHECKING:
    from .written import WrittenPart

__all__ = ["write_graphml", "write_parquet"]

# numpy kind -> GraphML attribute type; "T" is the kind of numpy's StringDType.
_TYPES = {"U": "string", "O": "string", "T": "string", "i": "long", "f": "double"}


def write_graphml(pruned: WrittenPart, path: Path) -> Path:
    """Write a pruned graph as directed GraphML, with edges from source to target.

    Attributes that are NaN are left out.

    Arguments:
        pruned: The pruned graph.
        path: Path of the new file, whose folder is created if missing.

    Returns:
        The path.
    """
    nodes, edges = pruned.nodes, pruned.edges
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        '<graphml xmlns="http://graphml.graphdrawing.org/xmlns">',
        *(
            f'<key id={quoteattr(str(name))} for="node" attr.name={quoteattr(str(name))} '
            f'attr.type="{_TYPES[values.dtype.kind]}"/>'
            for name, values in nodes.data_vars.items()
        ),
        '<key id="weight" for="edge" attr.name="weight" attr.type="double"/>',
        f'<graph id={quoteattr(pruned.graph.prompt or "graph")} edgedefault="directed">',
    ]
    # Python values, whose text has all digits of the number.
    columns = {str(name): values.values.tolist() for name, values in nodes.data_vars.items()}
    for k, number in enumerate(nodes["node"].values.tolist()):
        data = "".join(
            f"<data key={quoteattr(name)}>{escape(str(values[k]))}</data>"
            for name, values in columns.items()
            if not (isinstance(values[k], float) and math.isnan(values[k]))
        )
        lines.append(f'<node id="{number}">{data}</node>')
    # repr of a float is the shortest text that reads back as the same number.
    lines += [
        f'<edge source="{source}" target="{target}"><data key="weight">{weight!r}</data></edge>'
        for source, target, weight in zip(
            *(edges[name].values.tolist() for name in ("source", "target", "weight")), strict=True
        )
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*lines, "</graph>", "</graphml>", ""]), "utf-8")
    return path


def write_parquet(pruned: WrittenPart, folder: Path) -> tuple[Path, Path]:
    """Write a pruned graph as the tables nodes.parquet and edges.parquet.

    Arguments:
        pruned: The pruned graph.
        folder: Folder of both files, created if missing.

    Returns:
        Paths of nodes.parquet and edges.parquet.

    Raises:
        MissingExtra: pyarrow is not installed.
    """
    arrow, parquet = _pyarrow()
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, table in (("nodes", pruned.nodes), ("edges", pruned.edges)):
        columns = {str(column): values.values for column, values in table.data_vars.items()}
        if name == "nodes":
            columns = {"id": table["node"].values, **columns}
        paths.append(folder / f"{name}.parquet")
        parquet.write_table(arrow.table(columns), paths[-1])
    return paths[0], paths[1]


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtra(
            "expected the package pyarrow for writing Parquet files, found none; install it: "
            "pip install mizarr[corpora]"
        ) from error
    return pyarrow, pyarrow.parquet

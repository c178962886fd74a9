"""Pages of features as files: one page, and what it shows in scripts beside it, a few hundred features each.

    files = PageFiles(material)
    files.write(Path("pages"))           # index.html, data/…
    files.read("data/00003.js")          # the bytes of one of them, for a server

Border: what is known of features in (`PageMaterial`), text out; a pure function, which computes nothing and
opens no store. The page loads its data as scripts, since a page opened from a disk may not fetch.

A script is `mizarr.push([name, value])`; arrays are blocks (views/blocks.py). Activations around examples are
told in 255 steps of the feature's largest, tokens by their place in the vocabulary, 0 = outside the text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.features.layers.layout import FeatureId
from ...stages.features.pages.windows import window_tokens
from ...store.arrays import Array, Ints
from ...store.errors import ConfigError
from ...store.version import __version__
from ..report.page import policy, write_whole
from ..report.templates import asset
from ..views.blocks import plain

if TYPE_CHECKING:
    import xarray as xr

    from ...store.upkeep.annotations import Annotation

__all__ = ["PageFiles", "PageMaterial", "check_folder"]

PER_FILE = 256
"""Features of a script: a megabyte or less, loaded when one of them is looked at."""


@dataclass(frozen=True, eq=False)
class PageMaterial:
    """All that pages tell of the features of a layer.

    results: of `page_nodes`, by name, lazy or not; without "logits" nothing is told of those.  tokens: of the
    corpus, with prompt, position and token_id of every packed token.  vocabulary: strings by token id.
    labels: by feature. about: (name, value) of dictionary, model and corpus, for people.
    """

    results: Mapping[str, xr.Dataset]
    tokens: xr.Dataset
    vocabulary: Sequence[str]
    labels: Mapping[FeatureId, Annotation] = field(default_factory=dict)
    about: Sequence[tuple[str, str]] = ()
    title: str = "Features"

    @cached_property
    def features(self) -> Ints:
        """Indices of the features that have pages, ascending."""
        found: Ints = self.results["windows"]["feature"].values
        return found

    @property
    def layer(self) -> int:
        """The layer that the features of these pages read."""
        return int(self.results["windows"]["layer"])

    @property
    def strongest(self) -> int:
        """Examples of the largest activations; the others are of the intervals."""
        return int(self.results["strongest"].sizes["rank"])

    @cached_property
    def statistics(self) -> xr.Dataset:
        """Statistics of the features that have pages."""
        found: xr.Dataset = self.results["statistics"].load().sel(feature=self.features)
        return found

    @cached_property
    def prompt(self) -> Ints:
        """Value of every token of the corpus, [token]."""
        found: Ints = self.tokens["prompt"].values
        return found

    @cached_property
    def token_id(self) -> Array:
        """Value of every token of the corpus, [token]."""
        found: Array = self.tokens["token_id"].values
        return found

    def portions(self, size: int) -> Iterator[tuple[int, dict[str, xr.Dataset]]]:
        """(number, results) of `size` features after another; as much is read at a time as was computed
        together."""
        told = [name for name in self.results if name not in ("statistics", "strongest")]
        activation = self.results["windows"]["activation"]  # by far the largest
        chunks = activation.chunksizes.get("feature", (len(self.features),))
        edges = np.cumsum([0, *chunks]).tolist()
        held: dict[str, xr.Dataset] = {}
        begin = end = 0
        for number, start in enumerate(range(0, len(self.features), size)):
            stop = min(start + size, len(self.features))
            if stop > end:
                begin, end = start, max(stop, next(edge for edge in edges if edge > start))
                held = {name: self.results[name].isel(feature=slice(begin, end)).load() for name in told}
            yield (
                number,
                {name: each.isel(feature=slice(start - begin, stop - begin)) for name, each in held.items()},
            )

    def portion(self, number: int, size: int) -> dict[str, xr.Dataset]:
        """A portion of the features by its number, in memory."""
        here = slice(number * size, (number + 1) * size)
        told = [name for name in self.results if name not in ("statistics", "strongest")]
        return {name: self.results[name].isel(feature=here).load() for name in told}

    def texts(self, windows: xr.Dataset) -> tuple[Ints, Array]:
        """Token ids around examples [feature, example, window], -1 outside, and which are inside."""
        token = windows["token"].values
        where, there = window_tokens(token, windows["window"].values, self.prompt)
        return np.where(there, self.token_id[where], -1), there


class PageFiles:
    """The files of pages, by name."""

    def __init__(self, material: PageMaterial) -> None:
        self.material = material

    @property
    def names(self) -> list[str]:
        """Every file, relative to the folder; the page first."""
        shards = -(-len(self.material.features) // PER_FILE)
        return ["index.html", "data/features.js", "data/vocabulary.js", *map(_shard, range(shards))]

    def read(self, name: str) -> bytes:
        """Bytes of a file; KeyError for an unknown name."""
        if name not in self.names:
            raise KeyError(name)
        if name in self._common:
            return self._common[name]
        number = int(Path(name).stem)
        return self._features(number, self.material.portion(number, PER_FILE))

    def write(self, folder: Path) -> Path:
        """Every file into a folder, made if it is not there; the page last, so that one that stands has its
        data.

        Files that hold the same are left alone. Raises ConfigError for a folder that holds something else.
        """
        check_folder(folder)
        (folder / "data").mkdir(parents=True, exist_ok=True)
        for number, results in self.material.portions(PER_FILE):
            write_whole(folder / _shard(number), self._features(number, results))
        for name in self.names[2::-1]:
            write_whole(folder / name, self.read(name))
        for left in sorted(set((folder / "data").glob("*.js")) - {folder / name for name in self.names}):
            left.unlink()  # of pages with more features
        return folder / "index.html"

    @cached_property
    def _common(self) -> dict[str, bytes]:
        return {
            "index.html": _page(self.material.title).encode(),
            "data/features.js": _script("features", self._overview()),
            "data/vocabulary.js": _script("vocabulary", list(self.material.vocabulary)),
        }

    def _overview(self) -> dict[str, Any]:
        """What the list of features shows, and what all pages have in common."""
        of, stats = self.material, self.material.statistics
        windows = of.results["windows"]
        peak = of.results["strongest"]["token"].sel(feature=of.features).values[:, 0]
        fires = np.where(peak >= 0, of.token_id[np.maximum(peak, 0)], -1) + 1
        logits = of.results.get("logits")
        raises = np.zeros(len(fires), int) if logits is None else logits["raised"].values[:, 0] + 1
        return {
            "title": of.title,
            "about": [list(pair) for pair in of.about],
            "layer": of.layer,
            "per_file": PER_FILE,
            "n_tokens": int(of.results["statistics"].attrs["n_tokens"]),
            "sampled": int(of.results["partners"].attrs["n_tokens"]),
            "strongest": of.strongest,
            "intervals": int(of.results["intervals"].sizes["interval"]),
            "window": windows["window"].values.tolist(),
            "feature": plain(of.features),
            "count": plain(stats["firing_count"].values),
            "mean": plain(stats["mean_activation"].values),
            "largest": plain(stats["max_activation"].values),
            "fires": plain(fires),
            "raises": plain(raises),
            "labels": {
                str(feature.index): [each.text, each.author, each.created]
                for feature, each in of.labels.items()
                if feature.layer == of.layer
            },
        }

    def _features(self, number: int, results: Mapping[str, xr.Dataset]) -> bytes:
        windows, intervals, partners = (results[name] for name in ("windows", "intervals", "partners"))
        decoders, logits = results["decoders"], results.get("logits")
        ids, _ = self.material.texts(windows)
        token, value = windows["token"].values, windows["activation"].values
        largest = self.material.statistics["max_activation"].sel(feature=windows["feature"]).values
        levels = 255 * value / np.where(largest > 0, largest, 1)[:, None, None]
        at = np.maximum(token, 0)
        told = {
            "ids": ids + 1,
            "levels": np.ceil(levels.clip(0, 255)).astype(np.uint8),  # what is active is never told as silent
            "value": value[:, :, windows["window"].values.tolist().index(0)],
            "prompt": np.where(token >= 0, self.material.prompt[at], -1),
            "position": np.where(token >= 0, self.material.tokens["position"].values[at], -1),
            "histogram": intervals["histogram"].values,
            "interval_count": intervals["interval_count"].values,
            "norm": decoders["norm"].values,
            **{name: decoders[name].values for name in ("neighbour", "cosine", "dim", "part")},
            **{name: partners[name].values for name in ("correlated", "correlation", "companion", "jaccard")},
            "together": partners["together"].values,
        }
        if logits is not None:
            told |= {
                **{name: logits[name].values for name in ("raised_by", "lowered_by", "low", "high")},
                **{name: logits[name].values + 1 for name in ("raised", "lowered")},
                "effects": logits["histogram"].values,
            }
        return _script(f"shard {number}", {name: plain(array) for name, array in told.items()})


def check_folder(folder: Path) -> None:
    """Raise ConfigError where pages cannot be written; to be asked before hours of computing."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"expected a folder to write pages into, found the file {folder}")
    strangers = [each.name for each in folder.iterdir()] if folder.is_dir() else []
    if strangers and not {"data", "index.html"} >= set(strangers):
        raise ConfigError(
            f"expected a new folder, or one with pages, found {', '.join(sorted(strangers)[:3])} in "
            f"{folder}; name another"
        )


def _shard(number: int) -> str:
    return f"data/{number:05d}.js"


def _script(name: str, value: Any) -> bytes:
    """A script that hands a value to the page. JSON is JavaScript; what could end a script element is
    escaped."""
    text = json.dumps([name, value], separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f"(window.mizarr=window.mizarr||[]).push({text});\n".encode()


@cache
def _parts() -> tuple[str, str, str]:
    own = files(__package__).joinpath("assets")
    page, css, script = (
        own.joinpath(name).read_text("utf-8") for name in ("page.html", "features.css", "features.js")
    )
    return page, asset("report.css") + css, f"(() => {{\n{asset('core.js')}\n{script}}})();\n"


def _page(title: str) -> str:
    """The page itself: the same for all dictionaries but for its title."""
    import jinja2

    page, style, script = _parts()
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    text: str = environment.from_string(page).render(
        title=title,
        style=style,
        script=script,
        # Beside the page: over a server its own, from a disk the files.
        policy=policy(style, script, "'self' file:"),
        version=__version__,
    )
    return text

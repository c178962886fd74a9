"""Feature pages as files: one HTML page, and scripts with the data of 256 features each.

    files = PageFiles(material)
    files.write(Path("pages"))           # index.html, data/…
    files.read("data/00003.js")          # the bytes of one file, for a server

Border: `PageMaterial` in, bytes out; computes no statistics and opens no store. The page loads its data as
scripts, since browsers do not let a page opened from disk fetch files.

A script is `mizarr.push([name, value])`; arrays are blocks (views/blocks.py). Activations around examples are
stored in 255 steps of the feature's largest activation, tokens as vocabulary index + 1 with 0 for positions
outside the text.
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

from ...stages.features.corpus.examples import window_tokens
from ...stages.features.layers.layout import FeatureId
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
"""Number of features per script: at most about a megabyte, loaded when one of its features is opened."""


@dataclass(frozen=True, eq=False)
class PageMaterial:
    """Content of the feature pages of a single dictionary layer."""

    results: Mapping[str, xr.Dataset]
    """Results of the nodes of `page_nodes`, by name, lazy or in memory. Without "logits" the pages show no
    effects on the logits."""
    tokens: xr.Dataset
    """Tokens of the corpus: prompt, position and token_id, each [token]."""
    vocabulary: Sequence[str]
    """Text of each token id."""
    labels: Mapping[FeatureId, Annotation] = field(default_factory=dict)
    """Labels that people gave to features."""
    about: Sequence[tuple[str, str]] = ()
    """(name, value) pairs of dictionary, model and corpus, for the head of the page."""
    title: str = "Features"
    """Title of the page."""

    @cached_property
    def features(self) -> Ints:
        """Indices of the features that have pages, ascending, [feature]."""
        features: Ints = self.results["windows"]["feature"].values
        return features

    @property
    def layer(self) -> int:
        """Layer of the dictionary that the features belong to."""
        return int(self.results["windows"]["layer"])

    @property
    def strongest(self) -> int:
        """Number of examples per feature with the largest activations; the examples after them on the axis
        `example` are drawn from intervals of activation."""
        return int(self.results["strongest"].sizes["rank"])

    @cached_property
    def statistics(self) -> xr.Dataset:
        """Statistics of the features that have pages, [feature], in memory."""
        statistics: xr.Dataset = self.results["statistics"].load().sel(feature=self.features)
        return statistics

    @cached_property
    def prompt(self) -> Ints:
        """Index of the passage of every token of the corpus, [token]."""
        prompt: Ints = self.tokens["prompt"].values
        return prompt

    @cached_property
    def token_id(self) -> Array:
        """Token id of every token of the corpus, [token]."""
        token_id: Array = self.tokens["token_id"].values
        return token_id

    @property
    def _names_by_feature(self) -> list[str]:
        """Names of the results with an axis of features, which are read in portions."""
        return [name for name in self.results if name not in ("statistics", "strongest")]

    def portions(self, size: int) -> Iterator[tuple[int, dict[str, xr.Dataset]]]:
        """Yields, for every `size` consecutive features, their number of portion and all results for them, in
        memory.

        At least one chunk of the store is read at a time, so that no chunk is read twice.
        """
        activation = self.results["windows"]["activation"]  # by far the largest variable
        # The default is for arrays in memory, for which xarray lists no chunks.
        chunks = activation.chunksizes.get("feature", (len(self.features),))
        edges = np.cumsum([0, *chunks]).tolist()
        in_memory: dict[str, xr.Dataset] = {}
        begin = end = 0
        for number, start in enumerate(range(0, len(self.features), size)):
            stop = min(start + size, len(self.features))
            if stop > end:
                begin, end = start, max(stop, next(edge for edge in edges if edge > start))
                in_memory = {
                    name: self.results[name].isel(feature=slice(begin, end)).load()
                    for name in self._names_by_feature
                }
            features = slice(start - begin, stop - begin)
            yield number, {name: result.isel(feature=features) for name, result in in_memory.items()}

    def portion(self, number: int, size: int) -> dict[str, xr.Dataset]:
        """Results of one portion of the features, in memory.

        Arguments:
            number: number of the portion, from 0.
            size: number of features in a portion.
        """
        features = slice(number * size, (number + 1) * size)
        return {name: self.results[name].isel(feature=features).load() for name in self._names_by_feature}

    def texts(self, windows: xr.Dataset) -> tuple[Ints, Array]:
        """Tokens around examples.

        windows: `token`, index into the corpus of each example, [feature, example], and `window`, offsets
        from it. Returns token ids [feature, example, window], -1 outside the example's passage, and the mask
        of the positions inside it, bool of the same shape.
        """
        token = windows["token"].values
        index, is_inside = window_tokens(token, windows["window"].values, self.prompt)
        return np.where(is_inside, self.token_id[index], -1), is_inside


class PageFiles:
    """Files of the feature pages, by name: the HTML page, and scripts with its data.

    Every file can be made alone, so that a server need not write them.
    """

    def __init__(self, material: PageMaterial) -> None:
        self.material = material

    @property
    def names(self) -> list[str]:
        """Names of all files, relative to the folder; the HTML page first."""
        shards = -(-len(self.material.features) // PER_FILE)
        return ["index.html", "data/features.js", "data/vocabulary.js", *map(_shard, range(shards))]

    def read(self, name: str) -> bytes:
        """Bytes of one file of `names`. Raises KeyError for an unknown name."""
        if name not in self.names:
            raise KeyError(name)
        if name in self._common:
            return self._common[name]
        number = int(Path(name).stem)
        return self._features(number, self.material.portion(number, PER_FILE))

    def write(self, folder: Path) -> Path:
        """Writes all files into a folder, which is created if needed, and returns the path of the HTML page.

        Files of equal content are not rewritten. Raises ConfigError for a folder with files of another kind.
        """
        check_folder(folder)
        (folder / "data").mkdir(parents=True, exist_ok=True)
        for number, results in self.material.portions(PER_FILE):
            write_whole(folder / _shard(number), self._features(number, results))
        # In reverse, the HTML page last: where it exists, its data is complete.
        for name in self.names[2::-1]:
            write_whole(folder / name, self.read(name))
        # Earlier pages in this folder may have had more features.
        for stale in sorted(set((folder / "data").glob("*.js")) - {folder / name for name in self.names}):
            stale.unlink()
        return folder / "index.html"

    @cached_property
    def _common(self) -> dict[str, bytes]:
        """Bytes of the files that exist once: HTML page, list of features and vocabulary, by file name."""
        return {
            "index.html": _page(self.material.title).encode(),
            "data/features.js": _script("features", self._overview()),
            "data/vocabulary.js": _script("vocabulary", list(self.material.vocabulary)),
        }

    def _overview(self) -> dict[str, Any]:
        """Data of the list of features, and values that all feature pages share, as JSON values."""
        material, stats = self.material, self.material.statistics
        windows = material.results["windows"]
        peak = material.results["strongest"]["token"].sel(feature=material.features).values[:, 0]
        peak_tokens = np.where(peak >= 0, material.token_id[np.maximum(peak, 0)], -1) + 1
        logits = material.results.get("logits")
        raised_tokens = (
            np.zeros(len(peak_tokens), int) if logits is None else logits["raised"].values[:, 0] + 1
        )
        return {
            "title": material.title,
            "about": [list(pair) for pair in material.about],
            "layer": material.layer,
            "per_file": PER_FILE,
            "n_tokens": int(material.results["statistics"].attrs["n_tokens"]),
            "sampled": int(material.results["partners"].attrs["n_tokens"]),
            "strongest": material.strongest,
            "intervals": int(material.results["intervals"].sizes["interval"]),
            "window": windows["window"].values.tolist(),
            "feature": plain(material.features),
            "count": plain(stats["firing_count"].values),
            "mean": plain(stats["mean_activation"].values),
            "largest": plain(stats["max_activation"].values),
            "fires": plain(peak_tokens),
            "raises": plain(raised_tokens),
            "labels": {
                str(feature.index): [annotation.text, annotation.author, annotation.created]
                for feature, annotation in material.labels.items()
                if feature.layer == material.layer
            },
        }

    def _features(self, number: int, results: Mapping[str, xr.Dataset]) -> bytes:
        """Bytes of the script with the data of one portion of features. number: of the portion. results: its
        results."""
        windows, intervals, partners = (results[name] for name in ("windows", "intervals", "partners"))
        decoders, logits = results["decoders"], results.get("logits")
        ids, _ = self.material.texts(windows)
        token, value = windows["token"].values, windows["activation"].values
        largest = self.material.statistics["max_activation"].sel(feature=windows["feature"]).values
        levels = 255 * value / np.where(largest > 0, largest, 1)[:, None, None]
        corpus_index = np.maximum(token, 0)
        data = {
            # -1, no token, becomes 0.
            "ids": ids + 1,
            # Rounded up, so that no positive activation becomes 0, which is shown as inactive.
            "levels": np.ceil(levels.clip(0, 255)).astype(np.uint8),
            "value": value[:, :, windows["window"].values.tolist().index(0)],
            "prompt": np.where(token >= 0, self.material.prompt[corpus_index], -1),
            "position": np.where(token >= 0, self.material.tokens["position"].values[corpus_index], -1),
            "histogram": intervals["histogram"].values,
            "interval_count": intervals["interval_count"].values,
            "norm": decoders["norm"].values,
            **{name: decoders[name].values for name in ("neighbour", "cosine", "dim", "part")},
            **{name: partners[name].values for name in ("correlated", "correlation", "companion", "jaccard")},
            "together": partners["together"].values,
        }
        if logits is not None:
            data |= {
                **{name: logits[name].values for name in ("raised_by", "lowered_by", "low", "high")},
                **{name: logits[name].values + 1 for name in ("raised", "lowered")},
                "effects": logits["histogram"].values,
            }
        return _script(f"shard {number}", {name: plain(array) for name, array in data.items()})


def check_folder(folder: Path) -> None:
    """Raises ConfigError if pages cannot be written into a folder; called before hours of computing."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"expected a folder to write pages into, found the file {folder}")
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    if names and not {"data", "index.html"} >= set(names):
        raise ConfigError(
            f"expected a new folder, or one with feature pages, found {', '.join(sorted(names)[:3])} in "
            f"{folder}; choose another folder"
        )


def _shard(number: int) -> str:
    """Name of the script with the data of portion `number` of the features."""
    return f"data/{number:05d}.js"


def _script(name: str, value: Any) -> bytes:
    """Bytes of a JavaScript file that passes a value to the page under a name."""
    # JSON is valid JavaScript; "<" is escaped, as "</script>" would end the script element.
    text = json.dumps([name, value], separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f"(window.mizarr=window.mizarr||[]).push({text});\n".encode()


@cache
def _parts() -> tuple[str, str, str]:
    """(template of the HTML page, style sheet, script), as texts."""
    assets = files(__package__).joinpath("assets")
    page, css, script = (
        assets.joinpath(name).read_text("utf-8") for name in ("page.html", "features.css", "features.js")
    )
    return page, asset("report.css") + css, f"(() => {{\n{asset('core.js')}\n{script}}})();\n"


def _page(title: str) -> str:
    """Text of the HTML page; only the title differs between pages."""
    import jinja2

    page, style, script = _parts()
    # By default jinja would write nothing in place of a variable that is missing in the template's arguments.
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    text: str = environment.from_string(page).render(
        title=title,
        style=style,
        script=script,
        # Scripts may come from the server of the page ('self'), or from disk if the page is opened there.
        policy=policy(style, script, "'self' file:"),
        version=__version__,
    )
    return text

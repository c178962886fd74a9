"""Export of features for Neuronpedia's bulk import: rows of its tables as JSON lines, 256 features per file.

    FOLDER/<modelId>/<sourceId>/
        model.jsonl  sourceset.jsonl  source.jsonl  release.jsonl
        features/batch-<n>.jsonl.gz     rows of Neuron
        activations/batch-<n>.jsonl.gz  rows of Activation: examples with their tokens
        explanations/batch-0.jsonl.gz   rows of Explanation: labels, where there are any

Names, types and layout are those of `sae_dashboard/neuronpedia/neuronpedia_export.py` of SAEDashboard (the
version that writes for bulk import in place of convert-saedashboard-to-neuronpedia-export.py, 2025), whose
dataclasses are those of neuronpedia-utils' db_models and the webapp's Prisma schema; `Explanation` follows
the schema. As in SAEDashboard, numbers are rounded to three digits; `correlated_features_l1` holds the
cosine of activations; histograms are heights and midpoints of bars; the strongest examples have binMin and
binContains -1 and the largest activation as binMax; for examples of an interval binContains is the share of
all tokens whose activation lies in the interval.

Not exported: neurons correlated with a feature (`correlated_neurons_*` is empty), the decoder vector, and
effects on the loss. `neuron_alignment_*` refer to dimensions of the decoder vector, not to MLP neurons.

Border: page material in, files out; nothing is sent over the network.
"""

from __future__ import annotations

import gzip
import json
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...store.digest import digest
from ...store.errors import ConfigError
from ...store.records import now

if TYPE_CHECKING:
    import xarray as xr

    from .page_files import PageMaterial

__all__ = ["NeuronpediaSource", "write_neuronpedia"]

PER_FILE = 256
"""Number of features per batch file."""
DIGITS = 3
"""Digits after the decimal point to which numbers are rounded."""
PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
"""Characters allowed in ids, which become names of folders and parts of URLs."""


@dataclass(frozen=True)
class NeuronpediaSource:
    """Neuronpedia ids of the features' model and dictionary layer.

    Raises:
        ConfigError: for a `model` or `source_set` that is empty, starts with "." or has characters not in
            `PLAIN`.
    """

    model: str
    """Id of the model, such as "gpt2-small"."""
    source_set: str
    """Id of the dictionary, without the layer."""
    layer: int
    """Layer of the dictionary, from 0."""
    hook: str
    """Hook point whose activations the features encode."""
    creator: str = ""
    """Id of the account that imports the features; may be empty."""
    dataset: str = ""
    """Name of the corpus; may be empty."""

    def __post_init__(self) -> None:
        for name in ("model", "source_set"):
            value = getattr(self, name)
            if not value or not set(value) <= PLAIN or value.startswith("."):
                raise ConfigError(
                    f"expected {name} to consist of letters, digits, '.', '_' and '-', with no '.' in front, "
                    f"found {value!r}; use the id of Neuronpedia"
                )

    @property
    def source(self) -> str:
        """Id of the layer of the dictionary: "<layer>-<source_set>"."""
        return f"{self.layer}-{self.source_set}"


def write_neuronpedia(
    material: PageMaterial, folder: Path, source: NeuronpediaSource, created: str = ""
) -> Path:
    """Writes all features into a new folder, which appears under its name only when it is complete.

    Arguments:
        material: features with examples and labels.
        folder: parent folder, to which "<model>/<source>" is added.
        source: Neuronpedia's ids.
        created: `createdAt` of every row, ISO 8601; "" for now.

    Returns:
        The new folder of the source.

    Raises:
        ConfigError: if the folder of the source exists.
    """
    target = folder / source.model / source.source
    if target.exists():
        raise ConfigError(f"expected a new folder, found {target}; remove it, or write into another one")
    common = {"modelId": source.model, "layer": source.source}
    creation = {"creatorId": source.creator, "createdAt": created or now()}
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, in the same file system, so that the rename at the end is atomic.
    unfinished = target.with_name(f".{source.source}-{secrets.token_hex(4)}")
    try:
        unfinished.mkdir()
        for name, row in _set_rows(material, source, creation).items():
            _write(unfinished / f"{name}.jsonl", [row])
        for number, results in material.portions(PER_FILE):
            features = list(_features(material, results))
            rows = (
                {**common, **row, **creation, "hookName": source.hook, "sourceSetName": source.source_set}
                for row in features
            )
            _write(unfinished / "features" / f"batch-{number}.jsonl.gz", rows)
            examples = ({**common, **row, **creation} for row in _activations(material, results, source))
            _write(unfinished / "activations" / f"batch-{number}.jsonl.gz", examples)
        labels = [{**common, **row} for row in _explanations(material, source)]
        if labels:
            _write(unfinished / "explanations" / "batch-0.jsonl.gz", labels)
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def _set_rows(
    material: PageMaterial, source: NeuronpediaSource, creation: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Rows of the tables Release, Model, SourceSet and Source, by file name."""
    prompts = np.unique(material.prompt)
    # `prompts` is sorted, so that its indices are the numbers of the prompts.
    lengths = np.bincount(np.searchsorted(prompts, material.prompt))
    release = {
        "name": source.source_set,
        "description": material.title,
        "creatorName": source.creator,
        "urls": [],
    }
    model = {
        "id": source.model,
        "displayName": source.model,
        "displayNameShort": source.model,
        "instruct": False,
    }
    names = {"modelId": source.model, "name": source.source_set, "releaseName": source.source_set}
    source_set = {
        **names,
        "description": material.title,
        "creatorName": source.creator,
        "visibility": "PUBLIC",
    }
    source_row = {
        "id": source.source,
        "modelId": source.model,
        "setName": source.source_set,
        "visibility": "PUBLIC",
        "dataset": source.dataset or None,
        "num_prompts": len(prompts),
        "num_tokens_in_prompt": int(lengths.max(initial=0)),
        "hasDashboards": True,
    }
    rows: dict[str, dict[str, Any]] = {
        "release": release,
        "model": model,
        "sourceset": source_set,
        "source": source_row,
    }
    return {name: {**row, **creation} for name, row in rows.items()}


def _features(material: PageMaterial, results: Mapping[str, xr.Dataset]) -> Iterator[dict[str, Any]]:
    """Yield one row of Neuronpedia's table Neuron per feature; columns that would have the same value in
    every row are left out."""
    windows, partners, decoders = (results[name] for name in ("windows", "partners", "decoders"))
    stats = material.statistics.sel(feature=windows["feature"])
    n_tokens = int(material.results["statistics"].attrs["n_tokens"])
    histogram = results["intervals"]["histogram"].values
    middles = (np.arange(histogram.shape[1]) + 0.5) / histogram.shape[1]
    largest, count = stats["max_activation"].values, stats["firing_count"].values
    for row, index in enumerate(windows["feature"].values.tolist()):
        correlated = partners["correlated"].values[row]
        # Lists shorter than their axis are padded with -1.
        is_partner = correlated >= 0
        neighbour = decoders["neighbour"].values[row]
        is_neighbour = neighbour >= 0
        yield {
            "index": str(index),
            "maxActApprox": _number(largest[row]),
            "hasVector": False,
            "vector": [],
            "vectorLabel": None,
            "topkCosSimIndices": neighbour[is_neighbour].tolist(),
            "topkCosSimValues": _numbers(decoders["cosine"].values[row][is_neighbour]),
            # Dimensions of the decoder vector, not neurons of the MLP.
            "neuron_alignment_indices": decoders["dim"].values[row].tolist(),
            "neuron_alignment_values": _numbers(decoders["part"].values[row]),
            "neuron_alignment_l1": _numbers(decoders["l1_share"].values[row]),
            "correlated_neurons_indices": [],
            "correlated_neurons_pearson": [],
            "correlated_neurons_l1": [],
            "correlated_features_indices": correlated[is_partner].tolist(),
            "correlated_features_pearson": _numbers(partners["correlation"].values[row][is_partner]),
            # SAEDashboard writes the cosine of activations into this field.
            "correlated_features_l1": _numbers(partners["cosine"].values[row][is_partner]),
            **_logits(material, results.get("logits"), row),
            # More digits than elsewhere: three would round the share of a rare feature to 0.
            "frac_nonzero": round(int(count[row]) / n_tokens, 8),
            "freq_hist_data_bar_heights": histogram[row].tolist() if count[row] else [],
            "freq_hist_data_bar_values": _numbers(middles * largest[row]) if count[row] else [],
            "decoder_weights_dist": [],
        }


def _logits(material: PageMaterial, logits: xr.Dataset | None, row: int) -> dict[str, Any]:
    """Columns of one feature's effect on the logits; empty lists if `logits`, the result of that name, is
    None."""
    names = ("neg_str", "neg_values", "pos_str", "pos_values")
    bars = ("logits_hist_data_bar_heights", "logits_hist_data_bar_values")
    if logits is None:
        return {name: [] for name in (*names, *bars)}
    words = material.vocabulary
    lowered, raised = (logits[name].values[row].tolist() for name in ("lowered", "raised"))
    heights = logits["histogram"].values[row]
    low, high = (float(logits[name].values[row]) for name in ("low", "high"))
    middles = low + (high - low) * (np.arange(len(heights)) + 0.5) / len(heights)
    extremes = (
        [words[token] for token in lowered],
        _numbers(logits["lowered_by"].values[row]),
        [words[token] for token in raised],
        _numbers(logits["raised_by"].values[row]),
    )
    return dict(zip((*names, *bars), (*extremes, heights.tolist(), _numbers(middles)), strict=True))


def _activations(
    material: PageMaterial, results: Mapping[str, xr.Dataset], source: NeuronpediaSource
) -> Iterator[dict[str, Any]]:
    """Rows of the table Activation, one per example: of each feature the strongest examples, then those of
    each interval of activation, from the largest activations down."""
    windows, counts = results["windows"], results["intervals"]["interval_count"].values
    n_tokens = int(material.results["statistics"].attrs["n_tokens"])
    ids, inside = material.texts(windows)
    middle = windows["window"].values.tolist().index(0)
    values = windows["activation"].values
    features = windows["feature"].values
    largest = material.statistics["max_activation"].sel(feature=features).values
    intervals, words = counts.shape[1], material.vocabulary
    per_interval = (windows.sizes["example"] - material.strongest) // intervals
    for row, index in enumerate(features.tolist()):
        for example in np.flatnonzero(windows["token"].values[row] >= 0).tolist():
            is_text = inside[row, example]
            active = values[row, example][is_text]
            top = int(active.argmax())
            # The strongest examples come first; for them it is negative, and what is computed from it stays
            # unused.
            interval = (example - material.strongest) // per_interval
            edges = largest[row] * np.array([interval, interval + 1]) / intervals
            share = counts[row, interval] / n_tokens
            is_top = example < material.strongest
            yield {
                "id": "c" + digest("activation", source.model, source.source, index, example)[:24],
                "index": str(index),
                "tokens": [words[token] for token in ids[row, example][is_text].tolist()],
                "values": _numbers(active),
                "maxValue": _number(active[top]),
                "maxValueTokenIndex": top,
                "minValue": _number(active.min()),
                # SAEDashboard marks the strongest examples by -1 in place of an interval.
                "binMin": -1 if is_top else _number(edges[0]),
                "binMax": _number(largest[row]) if is_top else _number(edges[1]),
                "binContains": -1 if is_top else round(float(share), 8),
                "qualifyingTokenIndex": int(is_text[:middle].sum()),
                "dataIndex": None,
                "dataSource": None,
                "dfaValues": [],
                "dfaTargetIndex": None,
                "dfaMaxValue": None,
                "lossValues": [],
                "logitContributions": None,
            }


def _explanations(material: PageMaterial, source: NeuronpediaSource) -> Iterator[dict[str, Any]]:
    """Rows of the table Explanation: labels that people gave to the exported features."""
    exported = set(material.features.tolist())
    for feature, annotation in material.labels.items():
        if feature.layer == material.layer and feature.index in exported:
            yield {
                "id": "c"
                + digest("explanation", source.model, source.source, feature.index, annotation.text)[:24],
                "index": str(feature.index),
                "description": annotation.text,
                "authorId": source.creator,
                "triggeredById": None,
                "typeName": None,
                "explanationModelName": None,
                "notes": annotation.author or None,
                "createdAt": annotation.created,
            }


def _number(value: Any) -> float:
    """The number rounded to DIGITS digits, as SAEDashboard rounds."""
    return round(float(value), DIGITS)


def _numbers(values: Any) -> list[float]:
    return [_number(value) for value in np.asarray(values).tolist()]


def _write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes rows as JSON lines, compressed if the path ends in ".gz"; equal rows give equal bytes."""
    path.parent.mkdir(exist_ok=True)
    # mtime=0: gzip would write the time of day into its header.
    text = b"".join(json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n" for row in rows)
    path.write_bytes(gzip.compress(text, 5, mtime=0) if path.suffix == ".gz" else text)

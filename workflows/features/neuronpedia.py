"""Features as Neuronpedia imports them: rows of its tables as JSON lines, a few hundred features a file.

    FOLDER/<modelId>/<sourceId>/
        model.jsonl  sourceset.jsonl  source.jsonl  release.jsonl
        features/batch-<n>.jsonl.gz     rows of Neuron
        activations/batch-<n>.jsonl.gz  rows of Activation: examples with their tokens
        explanations/batch-0.jsonl.gz   rows of Explanation: labels, where there are any

Names, types and layout are those of `sae_dashboard/neuronpedia/neuronpedia_export.py` of SAEDashboard (the
version that writes for bulk import in place of convert-saedashboard-to-neuronpedia-export.py, 2025), whose
dataclasses are those of neuronpedia-utils' db_models and the webapp's Prisma schema; `Explanation` is the
latter's. As SAEDashboard has it, numbers are rounded to three digits; `correlated_features_l1` holds the
cosine of activations; histograms are heights and the middles of bars; the strongest examples have binMin and
binContains -1 and the largest activation as binMax; of the others binContains is the share of all tokens that
are in the interval.

Not told: neurons correlated with a feature (`correlated_neurons_*` is empty), the decoder's vector, and
effects on the loss. `neuron_alignment_*` are the dims of what is written, not of the MLP's neurons.

Border: what is known of features in, files out; sends nothing anywhere.
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
"""Features of a batch."""
DIGITS = 3
PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
"""What ids are made of: they are names of folders, and parts of addresses."""


@dataclass(frozen=True)
class NeuronpediaSource:
    """What the service calls where features are from.

    model: its id of the model, such as "gpt2-small".  source_set: of the dictionary; the source is
    "<layer>-<source_set>". creator: id of the account that imports them.  hook: that features read.  dataset:
    what the corpus is called.
    """

    model: str
    source_set: str
    layer: int
    hook: str
    creator: str = ""
    dataset: str = ""

    def __post_init__(self) -> None:
        for name in ("model", "source_set"):
            told = getattr(self, name)
            if not told or not set(told) <= PLAIN or told.startswith("."):
                raise ConfigError(
                    f"expected {name} of letters, digits, '.', '_' and '-' as ids there are, found {told!r}"
                )

    @property
    def source(self) -> str:
        """Its id of the dictionary's layer."""
        return f"{self.layer}-{self.source_set}"


def write_neuronpedia(material: PageMaterial, folder: Path, of: NeuronpediaSource, created: str = "") -> Path:
    """Every feature into a new folder, which appears when it is complete; returns that of the source.

    created: ISO 8601, of every row; default now. Raises ConfigError where the source is there already.
    """
    home = folder / of.model / of.source
    if home.exists():
        raise ConfigError(f"expected a new folder, found {home}; remove it, or write into another one")
    common = {"modelId": of.model, "layer": of.source}
    made = {"creatorId": of.creator, "createdAt": created or now()}
    home.parent.mkdir(parents=True, exist_ok=True)
    growing = home.with_name(f".{of.source}-{secrets.token_hex(4)}")
    try:
        growing.mkdir()
        for name, row in _about(material, of, made).items():
            _write(growing / f"{name}.jsonl", [row])
        for number, results in material.portions(PER_FILE):
            features = list(_features(material, results))
            rows = (
                {**common, **row, **made, "hookName": of.hook, "sourceSetName": of.source_set}
                for row in features
            )
            _write(growing / "features" / f"batch-{number}.jsonl.gz", rows)
            examples = ({**common, **row, **made} for row in _activations(material, results, of))
            _write(growing / "activations" / f"batch-{number}.jsonl.gz", examples)
        labels = [{**common, **row} for row in _explanations(material, of)]
        if labels:
            _write(growing / "explanations" / "batch-0.jsonl.gz", labels)
        growing.rename(home)
    finally:
        shutil.rmtree(growing, ignore_errors=True)
    return home


def _about(
    material: PageMaterial, of: NeuronpediaSource, made: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Rows of release, model, source set and source."""
    prompts = np.unique(material.prompt)
    lengths = np.bincount(np.searchsorted(prompts, material.prompt))
    release = {"name": of.source_set, "description": material.title, "creatorName": of.creator, "urls": []}
    model = {"id": of.model, "displayName": of.model, "displayNameShort": of.model, "instruct": False}
    names = {"modelId": of.model, "name": of.source_set, "releaseName": of.source_set}
    source_set = {**names, "description": material.title, "creatorName": of.creator, "visibility": "PUBLIC"}
    source = {
        "id": of.source,
        "modelId": of.model,
        "setName": of.source_set,
        "visibility": "PUBLIC",
        "dataset": of.dataset or None,
        "num_prompts": len(prompts),
        "num_tokens_in_prompt": int(lengths.max(initial=0)),
        "hasDashboards": True,
    }
    rows: dict[str, dict[str, Any]] = {
        "release": release,
        "model": model,
        "sourceset": source_set,
        "source": source,
    }
    return {name: {**row, **made} for name, row in rows.items()}


def _features(material: PageMaterial, results: Mapping[str, xr.Dataset]) -> Iterator[dict[str, Any]]:
    """Rows of Neuron, but for what all have in common."""
    windows, partners, decoders = (results[name] for name in ("windows", "partners", "decoders"))
    stats = material.statistics.sel(feature=windows["feature"])
    n_tokens = int(material.results["statistics"].attrs["n_tokens"])
    histogram = results["intervals"]["histogram"].values
    middles = (np.arange(histogram.shape[1]) + 0.5) / histogram.shape[1]
    largest, count = stats["max_activation"].values, stats["firing_count"].values
    for row, index in enumerate(windows["feature"].values.tolist()):
        correlated = partners["correlated"].values[row]
        is_one = correlated >= 0
        neighbour = decoders["neighbour"].values[row]
        near = neighbour >= 0
        yield {
            "index": str(index),
            "maxActApprox": _number(largest[row]),
            "hasVector": False,
            "vector": [],
            "vectorLabel": None,
            "topkCosSimIndices": neighbour[near].tolist(),
            "topkCosSimValues": _numbers(decoders["cosine"].values[row][near]),
            "neuron_alignment_indices": decoders["dim"].values[row].tolist(),
            "neuron_alignment_values": _numbers(decoders["part"].values[row]),
            "neuron_alignment_l1": _numbers(decoders["l1_share"].values[row]),
            "correlated_neurons_indices": [],
            "correlated_neurons_pearson": [],
            "correlated_neurons_l1": [],
            "correlated_features_indices": correlated[is_one].tolist(),
            "correlated_features_pearson": _numbers(partners["correlation"].values[row][is_one]),
            "correlated_features_l1": _numbers(partners["cosine"].values[row][is_one]),
            **_logits(material, results.get("logits"), row),
            "frac_nonzero": round(int(count[row]) / n_tokens, 8),
            "freq_hist_data_bar_heights": histogram[row].tolist() if count[row] else [],
            "freq_hist_data_bar_values": _numbers(middles * largest[row]) if count[row] else [],
            "decoder_weights_dist": [],
        }


def _logits(material: PageMaterial, logits: xr.Dataset | None, row: int) -> dict[str, Any]:
    """What a feature does to the logits; empty lists where that is not known."""
    names = ("neg_str", "neg_values", "pos_str", "pos_values")
    bars = ("logits_hist_data_bar_heights", "logits_hist_data_bar_values")
    if logits is None:
        return {name: [] for name in (*names, *bars)}
    words = material.vocabulary
    lowered, raised = (logits[name].values[row].tolist() for name in ("lowered", "raised"))
    heights = logits["histogram"].values[row]
    low, high = (float(logits[name].values[row]) for name in ("low", "high"))
    middles = low + (high - low) * (np.arange(len(heights)) + 0.5) / len(heights)
    told = (
        [words[token] for token in lowered],
        _numbers(logits["lowered_by"].values[row]),
        [words[token] for token in raised],
        _numbers(logits["raised_by"].values[row]),
    )
    return dict(zip((*names, *bars), (*told, heights.tolist(), _numbers(middles)), strict=True))


def _activations(
    material: PageMaterial, results: Mapping[str, xr.Dataset], of: NeuronpediaSource
) -> Iterator[dict[str, Any]]:
    """Rows of Activation, feature by feature: the strongest, then interval by interval from the strongest
    down."""
    windows, counts = results["windows"], results["intervals"]["interval_count"].values
    n_tokens = int(material.results["statistics"].attrs["n_tokens"])
    ids, inside = material.texts(windows)
    middle = windows["window"].values.tolist().index(0)
    values = windows["activation"].values
    features = windows["feature"].values
    largest = material.statistics["max_activation"].sel(feature=features).values
    intervals, words = counts.shape[1], material.vocabulary
    each = (windows.sizes["example"] - material.strongest) // intervals
    for row, index in enumerate(features.tolist()):
        for example in np.flatnonzero(windows["token"].values[row] >= 0).tolist():
            here = inside[row, example]
            active = values[row, example][here]
            top = int(active.argmax())
            interval = (example - material.strongest) // each
            edges = largest[row] * np.array([interval, interval + 1]) / intervals
            share = counts[row, interval] / n_tokens
            is_top = example < material.strongest
            yield {
                "id": "c" + digest("activation", of.model, of.source, index, example)[:24],
                "index": str(index),
                "tokens": [words[token] for token in ids[row, example][here].tolist()],
                "values": _numbers(active),
                "maxValue": _number(active[top]),
                "maxValueTokenIndex": top,
                "minValue": _number(active.min()),
                "binMin": -1 if is_top else _number(edges[0]),
                "binMax": _number(largest[row]) if is_top else _number(edges[1]),
                "binContains": -1 if is_top else round(float(share), 8),
                "qualifyingTokenIndex": int(here[:middle].sum()),
                "dataIndex": None,
                "dataSource": None,
                "dfaValues": [],
                "dfaTargetIndex": None,
                "dfaMaxValue": None,
                "lossValues": [],
                "logitContributions": None,
            }


def _explanations(material: PageMaterial, of: NeuronpediaSource) -> Iterator[dict[str, Any]]:
    """Rows of Explanation: what people call the features there are pages of."""
    there = set(material.features.tolist())
    for feature, each in material.labels.items():
        if feature.layer == material.layer and feature.index in there:
            yield {
                "id": "c" + digest("explanation", of.model, of.source, feature.index, each.text)[:24],
                "index": str(feature.index),
                "description": each.text,
                "authorId": of.creator,
                "triggeredById": None,
                "typeName": None,
                "explanationModelName": None,
                "notes": each.author or None,
                "createdAt": each.created,
            }


def _number(value: Any) -> float:
    return round(float(value), DIGITS)


def _numbers(values: Any) -> list[float]:
    return [_number(value) for value in np.asarray(values).tolist()]


def _write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """JSON lines, packed where the name says so; the same rows give the same bytes."""
    path.parent.mkdir(exist_ok=True)
    text = b"".join(json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n" for row in rows)
    path.write_bytes(gzip.compress(text, 5, mtime=0) if path.suffix == ".gz" else text)

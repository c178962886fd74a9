"""How well do hidden states tell a property of prompts, and do they tell more than the words?

Probes of pooled states of every layer, trained on half of the prompts (stages/monitors/probes.py). Layer,
pooling, method and text baseline are chosen by cross-validation in that half; scores on the other half, the
test part, choose nothing. Baselines: probes of counts of words, of tf-idf, and of the embeddings.

The workflow `probe` asks where in a text a count or label of tokens can be read. Here a prompt has one label,
and the question is whether the detector is worth having: its recall at few false alarms, its calibration, its
gain over the text alone, and its transfer to other prompts.

Default: clauses of prose against the same words in random order (material/monitor_texts.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ...stages.causal.controls import Null
from ...stages.forward.runs.duration import PassWork
from ...stages.forward.text.prompts import check_prompts
from ...stages.geometry.separation import auroc
from ...stages.monitors.measures import RESAMPLES, measure, swapped_differences
from ...stages.monitors.pooling import pooled_states
from ...stages.monitors.probes import METHODS, probe_scores, train_probes
from ...stages.monitors.splits import TEST, Examples, permuted_labels
from ...store.errors import ConfigError
from ..claim import Claim
from ..labelled import column
from ..material.monitor_texts import (
    LabelledTexts,
    label_of,
    last_words,
    read_labelled_texts,
    shuffled_clauses,
    word_features,
)
from ..material.sizes import affordable
from ..settings import AtLeastTwo, ControlSettings, ModelSettings, Natural, Share, setting
from ..subject import shipped_prose
from ..views import Data, Line, Lines, Table, View, together
from ..views.tables import dash
from ..workflow import ModelWorkflow, Nodes

if TYPE_CHECKING:
    import xarray as xr

    from ...store.arrays import Array

__all__ = ["Monitor", "MonitorSettings"]

TEXT_BASELINES = {"words": "counts of words", "tf_idf": "tf-idf of words"}
"""Names of the nodes of text baselines -> their descriptions."""
LEAST = 60
"""Smallest number of prompts by default: with fewer, the intervals are too wide to decide anything."""
NAMES = {"logistic": "logistic", "mass_mean": "mass-mean", "lda": "LDA"}
"""Descriptions of the methods."""


@dataclass(frozen=True)
class MonitorSettings(ControlSettings, ModelSettings):
    """Settings of the workflow `monitor`: the labelled texts, the probes, and the split.

    Raises:
        ConfigError: for a split without a train or test part, without methods or poolings, and
            for settings of labelled texts without a file of them.
    """

    labels: str = setting(
        "", "file of labelled texts (CSV, JSON or JSON lines); none: clauses of prose, in order and shuffled"
    )
    positive: str = setting("", "label to detect; none: of two labels, the last in alphabetical order")
    groups: str = setting(
        "",
        "field of the labelled texts that names their group, all of which is train or test; none: each text",
    )
    transfer: str = setting(
        "",
        "file of other labelled texts with the same label to detect, which the trained probes are scored on",
    )
    examples: Natural | None = setting(
        None, "largest number of texts of each file; 0: all; none: by the size of the model"
    )
    point: Literal["resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out"] = setting(
        "resid_post", "hook point whose activations are probed"
    )
    layers: tuple[int, ...] = setting((), "layers to probe; none: all")
    poolings: tuple[Literal["last", "mean", "max"], ...] = setting(
        ("last", "mean"), "poolings over the tokens of a prompt"
    )
    methods: tuple[Literal["logistic", "mass_mean", "lda"], ...] = setting(METHODS, "methods of the probes")
    folds: AtLeastTwo = setting(5, "folds of the train part, by which layer, pooling and method are chosen")
    test_share: Share = setting(0.5, "share of the groups held out as the test part")
    controls: Natural = setting(
        50, "number of shuffled labellings, the controls of every probe; 0: none, nothing is claimed"
    )
    false_positives: Share = setting(0.05, "share of false positives at which recall is given")

    def __post_init__(self) -> None:
        if not 0 < self.test_share < 1 or not self.methods or not self.poolings:
            raise ConfigError(
                "expected test_share between 0 and 1, a method and a pooling, found "
                f"test_share={self.test_share:g}, methods={list(self.methods)}, "
                f"poolings={list(self.poolings)}"
            )
        if not self.labels and (self.positive or self.groups or self.transfer):
            raise ConfigError(
                "expected labels=FILE beside positive, groups and transfer, which are about labelled texts, "
                "found none; name the file, or leave them out"
            )


class Monitor(ModelWorkflow):
    """Workflow that trains probes to detect a label of prompts, and compares them with text baselines and
    with shuffled labels."""

    name = "monitor"
    question = "How well do hidden states tell a property of prompts, and do they tell more than the words?"
    settings_type = MonitorSettings
    settings: MonitorSettings
    examples: LabelledTexts
    """Texts of the train and test part."""
    transferred: LabelledTexts | None
    """Texts of the setting `transfer`; None without."""

    def plan(self) -> Nodes:
        """Nodes of the probes by pooling, of the baselines, and of the scores on other texts.

        Raises:
            ConfigError: for a file without the label to detect.
            PromptError: for texts without label, of one label, or too few for all folds.
        """
        settings = self.settings
        self.examples = examples = self._texts(settings.labels, settings.positive)
        # With its own default, a file could have another label to detect.
        self.transferred = self._texts(settings.transfer, examples.positive) if settings.transfer else None
        split: dict[str, Any] = {
            "folds": settings.folds,
            "test_share": settings.test_share,
            "seed": settings.seed,
        }
        # For its error: labels in too few groups are refused before states are computed.
        Examples.of(examples.is_positive.astype(np.float64), examples.group, **split)
        options = split | {
            "examples": _as_examples(examples),
            "draws": settings.controls,
            "false_positives": settings.false_positives,
        }
        nodes: Nodes = {}
        for pooling in settings.poolings:
            states, embeddings = self._pooled(examples, pooling)
            nodes[f"probes_{pooling}"] = train_probes.on(states=states, methods=settings.methods, **options)
            nodes[f"embedding_{pooling}"] = train_probes.on(
                states=embeddings, methods=("logistic",), **options
            )
        for name, features in zip(TEXT_BASELINES, word_features(examples.texts), strict=True):
            nodes[name] = train_probes.on(states=_as_states(features), methods=("logistic",), **options)
        if self.transferred is not None:
            for pooling in settings.poolings:
                states, _ = self._pooled(self.transferred, pooling)
                nodes[f"transfer_{pooling}"] = probe_scores.on(
                    states=states, probes=nodes[f"probes_{pooling}"]
                )
        return nodes

    def _texts(self, path: str, positive: str) -> LabelledTexts:
        """Labelled texts of a file, or shipped ones if `path` is empty; as many as the settings allow."""
        settings = self.settings
        if path:
            examples = read_labelled_texts(path, positive, settings.groups)
        else:
            examples = shuffled_clauses(shipped_prose())
        if settings.examples == 0:
            return examples
        if settings.examples is not None:
            return examples.some(settings.examples, settings.seed)
        config, n_texts = self.subject.config, len(examples.texts)
        # A sample suffices for the mean length: tokenising all of a large file would take minutes.
        sample = self.subject.pack(examples.some(200, settings.seed).texts)
        one_text = PassWork(config.num_layers * sample.n_tokens / sample.n_prompts).operations(config)
        return examples.some(affordable(one_text, n_texts, least=LEAST), settings.seed)

    def _pooled(self, examples: LabelledTexts, pooling: str) -> tuple[Any, Any]:
        """(pooled activations of all layers, pooled embeddings) of texts, as outputs of nodes."""
        settings, config = self.settings, self.subject.config
        tokens = self.subject.pack(examples.texts)
        check_prompts(list(tokens), config.vocab_size, config.context_length, self.subject.name)
        layers = settings.layers or range(config.num_layers)
        hooks = [f"blocks.{layer}.hook_{settings.point}" for layer in layers]
        prompt = column(tokens.prompt_of(slice(None)), "token", "prompt")
        states, embeddings = (
            pooled_states.on(states=captured, prompt=prompt, pooling=pooling)["state"]
            for captured in (
                self.subject.capture(tokens, *hooks)[settings.point],
                # The stream before layer 0: embeddings, with positions where a model adds them.
                self.subject.capture(tokens, "blocks.0.hook_resid_pre")["resid_pre"],
            )
        )
        return states, embeddings

    # -- results

    @cached_property
    def detectors(self) -> list[dict[str, Any]]:
        """One record per pooling, layer and method, then per baseline, with the measures on the test part."""
        records = []
        for name in self.nodes:
            kind, _, pooling = name.partition("_")
            if kind == "transfer":
                continue
            result = self.result(name)
            is_text = name in TEXT_BASELINES
            baseline = {"probes": "", "embedding": "embedding"}.get(kind, TEXT_BASELINES.get(name, ""))
            for layer in result["layer"].values.tolist():
                records += [
                    {
                        "baseline": baseline,
                        "pooling": "" if is_text else pooling,
                        "layer": None if baseline else layer,
                        "method": method,
                        **_measures(result.sel(layer=layer, probe=method)),
                        "node": name,
                    }
                    for method in result["probe"].values.tolist()
                ]
        return records

    def _best(self, records: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """The record with the largest cross-validated AUROC of the train part; the first of equal ones."""
        return max(records, key=lambda record: record["cv_auroc"])

    @cached_property
    def chosen(self) -> dict[str, Any]:
        """Record of the probe chosen on the train part."""
        return self._best(record for record in self.detectors if not record["baseline"])

    @cached_property
    def text_baseline(self) -> dict[str, Any]:
        """Record of the text baseline chosen on the train part."""
        return self._best(record for record in self.detectors if record["node"] in TEXT_BASELINES)

    def _result_of(self, record: dict[str, Any]) -> xr.Dataset:
        """Result of the stage `train_probes` for one detector, without layer and probe axes."""
        result = self.result(record["node"])
        layer = result["layer"].values[0] if record["layer"] is None else record["layer"]
        return result.sel(layer=layer, probe=record["method"]).load()

    @property
    def _is_test(self) -> Array:
        """Whether each text is in the test part, bool [text]."""
        is_test: Array = self.result(self.chosen["node"])["fold"].values == TEST
        return is_test

    def claims(self) -> Iterator[Claim]:
        """Claims that the chosen probe detects the label, that it does so better than the best text baseline,
        and that it does so on the texts of `transfer`."""
        record, settings = self.chosen, self.settings
        result, n_test = self._result_of(record), int(self._is_test.sum())
        probe, label = _description(record, settings.point), self.examples.positive
        area = result["auroc"].values
        yield Claim(
            f"{probe} detects {label!r}, AUROC",
            float(area[0]),
            Null(result["shuffled_auroc"].values, "probes trained and scored on shuffled labels"),
            spread=(float(area[1]), float(area[2])),
            prompts=n_test,
            held_out=True,
        )
        baseline, test = self.text_baseline, self._is_test
        effect, spread, draws = swapped_differences(
            result["score"].values[test],
            self._result_of(baseline)["score"].values[test],
            self.examples.is_positive[test],
            self.examples.group[test],
            draws=settings.controls,
            seed=settings.seed,
        )
        yield Claim(
            f"the same probe tells more than {baseline['baseline']}, difference in AUROC",
            effect,
            Null(draws, "random exchanges of the two detectors' ranks"),
            spread=spread,
            prompts=n_test,
            held_out=True,
        )
        if self.transferred is not None:
            yield self._transfer_claim()

    def _transfer_claim(self) -> Claim:
        """Claim that the chosen probe detects the label in the texts of `transfer`."""
        record, settings, texts = self.chosen, self.settings, self.transferred
        assert texts is not None
        result = self.result(f"transfer_{record['pooling']}")
        score = result["score"].sel(layer=record["layer"], probe=record["method"]).values
        area = measure(
            score,
            texts.is_positive,
            texts.group,
            false_positives=settings.false_positives,
            resamples=RESAMPLES,
            seed=settings.seed,
        )[0]
        rng = np.random.default_rng(settings.seed)
        draws = [
            auroc(score, permuted_labels(texts.is_positive, texts.group, rng))
            for _ in range(settings.controls)
        ]
        return Claim(
            f"the same probe detects {texts.positive!r} in {label_of(settings.transfer)}, AUROC",
            float(area[0]),
            Null(np.array(draws), "permutations of the labels among or within groups of texts"),
            spread=(float(area[1]), float(area[2])),
            prompts=len(score),
            held_out=True,
        )

    def claims_caption(self) -> str:
        """Caption of the claims: how the detectors were chosen, and what AUROC means."""
        return (
            "AUROC: probability that a positive prompt scores above a negative one; 0.5 is chance. Layer, "
            "pooling, method and text baseline were chosen by cross-validation in the train part; scores on "
            "the test part chose nothing."
        )

    @property
    def summary(self) -> str:
        """See `Workflow`: the chosen probe and the text baseline, on the test part."""
        record, baseline = self.chosen, self.text_baseline
        return (
            f"Chosen detector: {_description(record, self.settings.point)}. It detects "
            f"{self.examples.positive!r} with AUROC {record['auroc'][0]:.3f} ({record['auroc'][1]:.3f} to "
            f"{record['auroc'][2]:.3f}; {baseline['baseline']}: {baseline['auroc'][0]:.3f}) and finds "
            f"{record['recall'][0]:.0%} of these prompts at the threshold of "
            f"{self.settings.false_positives:.0%} false positives in the test part."
        )

    # -- views

    def views(self) -> Iterator[View]:
        """Views in reading order: detectors side by side, AUROC by layer, layers of the chosen kind."""
        examples, chosen, settings = self.examples, self.chosen, self.settings
        question = f"{examples.positive!r} against {examples.negative!r} ({label_of(settings.labels)})"
        shown = [
            {name: value for name, value in record.items() if name != "node"} for record in self.detectors
        ]
        yield Data(
            json={
                "model_id": self.subject.name,
                "point": settings.point,
                "positive": examples.positive,
                "negative": examples.negative,
                "n_train": int((~self._is_test).sum()),
                "n_test": int(self._is_test.sum()),
                "n_positive": int(examples.is_positive.sum()),
                "chosen": {name: chosen[name] for name in ("pooling", "layer", "method")},
                "detectors": shown,
            }
        )
        kinds: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for record in self.detectors:
            kinds.setdefault((record["node"], record["method"]), []).append(record)
        yield Table.of(
            [self._best(records) for records in kinds.values()],
            ("detector", lambda record: record["baseline"] or f"{NAMES[record['method']]} probe"),
            ("pooling", "pooling"),
            ("layer", "layer", _or_dash("d")),
            *self._columns(),
            strong=lambda record: record is chosen,
            title=f"Detectors of {question} in {self.subject.name}",
            caption="One row per kind of detector, at the layer with the largest AUROC in cross-validation "
            f"on the train part ({int((~self._is_test).sum())} prompts). Other measures: on the test part "
            f"({int(self._is_test.sum())} prompts). {self._caption} Bold: the one chosen on the train part.",
        )
        title = f"AUROC of probes of {question} by layer of {self.subject.name}"
        curves = self._curves(title)
        yield from together("monitor", title, curves, caption=curves.caption)
        kind = f"{NAMES[chosen['method']]} probe of {settings.point}, pooled by {chosen['pooling']}"
        yield Table.of(
            kinds[chosen["node"], chosen["method"]],
            ("layer", "layer", "d"),
            *self._columns(),
            ("shuffled", "shuffled_auroc", ".3f"),
            ("control task", "control_auroc", _or_dash(".3f")),
            ("selectivity", lambda record: record["auroc"][0] - record["control_auroc"], _or_dash("+.3f")),
            strong=lambda record: record is chosen,
            title=f"By layer: {kind}",
            caption=f"One row per layer. {self._caption} Shuffled: median AUROC of {settings.controls} "
            "probes of shuffled labels. Control task: AUROC of probes of random labels, the same for all "
            "prompts with the same last word; selectivity: AUROC minus that (Hewitt & Liang 2019). Bold: the "
            "layer chosen on the train part.",
        )

    def _columns(self) -> tuple[tuple[Any, ...], ...]:
        """Columns of the measures in tables."""
        return (
            ("CV AUROC", "cv_auroc", ".3f"),
            ("test AUROC", lambda record: record["auroc"][0], ".3f"),
            ("95% interval", lambda record: "{:.3f} to {:.3f}".format(*record["auroc"][1:])),
            (f"recall at {self.settings.false_positives:.0%}", lambda record: record["recall"][0], ".2f"),
            ("Brier", lambda record: record["brier"][0], ".3f"),
            ("ECE", lambda record: record["calibration_error"][0], ".3f"),
        )

    @property
    def _caption(self) -> str:
        return (
            "CV AUROC: mean over held-out folds of the train part. Interval: bootstrap over groups of test "
            "prompts. Recall: largest share of positives above a threshold that at most "
            f"{self.settings.false_positives:.0%} of the negatives exceed; the threshold is taken from the "
            "test part itself, so it is optimistic. Brier: mean squared error of the probability. ECE: "
            "expected calibration error."
        )

    def _curves(self, title: str) -> Lines:
        """Test AUROC by layer of each pooling and method, beside baselines and shuffled labels."""
        chosen = self.chosen
        lines, layers = [], self.result(chosen["node"])["layer"].values.tolist()
        for pooling in self.settings.poolings:
            area = self.result(f"probes_{pooling}")["auroc"].load()
            for method in self.settings.methods:
                is_chosen = (pooling, method) == (chosen["pooling"], chosen["method"])
                value, low, high = (
                    area.sel(probe=method, bound=bound).values for bound in ("value", "low", "high")
                )
                band = np.stack([low, high]) if is_chosen else None
                name = f"{NAMES[method]}, {pooling}"
                lines.append(Line(name, value, strong=is_chosen, band=band, family=pooling))
        baselines = [record for record in self.detectors if record["baseline"]]
        for name in dict.fromkeys(record["baseline"] for record in baselines):
            best = self._best(record for record in baselines if record["baseline"] == name)
            lines.append(Line(name, np.full(len(layers), best["auroc"][0]), control=True))
        shuffled = self.result(chosen["node"])["shuffled_auroc"].sel(probe=chosen["method"]).values
        if shuffled.shape[1]:
            low, middle, high = np.quantile(shuffled, (0.025, 0.5, 0.975), axis=1)
            lines.append(Line("shuffled labels", middle, control=True, band=np.stack([low, high])))
        return Lines(
            title=title,
            caption="x: layer. y: AUROC on the test part; 0.5 is chance. One curve per method and pooling; "
            "thick: the kind of probe chosen on the train part, with its 95 % interval. Dashed: baselines "
            "without layers, and probes of shuffled labels with the range of 95 % of them.",
            x=tuple(layers),
            x_name="layer",
            y_name="AUROC",
            lines=tuple(lines),
            low=0.4,
            high=1.0,
        )


def _measures(result: xr.Dataset) -> dict[str, Any]:
    """Measures of one detector as plain values; "auroc", "recall", "brier" and "calibration_error" are
    [value, low, high]."""
    shuffled = result["shuffled_auroc"].values
    return {
        "cv_auroc": float(result["cv_auroc"]),
        **{name: result[name].values.tolist() for name in ("auroc", "recall", "brier", "calibration_error")},
        "shuffled_auroc": float(np.median(shuffled)) if len(shuffled) else float("nan"),
        "control_auroc": float(result["control_auroc"]),
        "penalty": float(result["penalty"]),
    }


def _as_examples(examples: LabelledTexts) -> xr.Dataset:
    """Targets, groups and types of texts as an input of `train_probes`; the type is the last word."""
    import xarray as xr

    columns = {
        "target": examples.is_positive.astype(np.float64),
        "group": examples.group,
        "type": last_words(examples.texts),
    }
    return xr.Dataset({name: ("prompt", values) for name, values in columns.items()})


def _as_states(features: Array) -> xr.DataArray:
    """Text features [text, word] in the axes of pooled states, [layer, prompt, hidden], as layer 0."""
    import xarray as xr

    array = xr.DataArray(features[None], {"layer": [0]}, ("layer", "prompt", "hidden"), name="words")
    return array.astype(np.float32)


def _description(record: dict[str, Any], point: str) -> str:
    """A probe in words: "a logistic probe of resid_post at layer 3 (mean over tokens)"."""
    pooled = {"last": "last token", "mean": "mean over tokens", "max": "maximum over tokens"}
    where = f"{point} at layer {record['layer']} ({pooled[record['pooling']]})"
    return f"a{'n' if record['method'] == 'lda' else ''} {NAMES[record['method']]} probe of {where}"


def _or_dash(spec: str) -> Any:
    return lambda value: dash(value, spec)

"""At which layer can a label be read linearly from the residual stream?

Linear probes on stored activations, with a shuffled control.

Captures the residual stream (or another hook point) of every layer and fits a linear probe to each: logistic
regression for labels, ridge regression for numbers, scored on held-out prompts (stages/geometry/probe.py).

Defaults: two targets of prose wrapped at several widths, the number of characters between the line start and
the token, and whether the line breaks next (material/probe_targets.py). The model can infer both from the
text before the token alone. The user's own labels are read from a file.

A probe shows that a label can be decoded from the states, not that the model uses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from ...stages.forward.text.prompts import check_prompts
from ...stages.geometry.probe import FEWEST, PENALTIES, probe
from ...store.errors import ConfigError, PromptError, nearest
from ..labelled import column, records
from ..material.line_corpus import wrapped_prose
from ..material.probe_targets import TARGETS, Target, read_labels, thinned, wrapped_targets
from ..material.sizes import affordable_characters
from ..settings import AtLeastTwo, ModelSettings, Natural, setting
from ..subject import read_texts
from ..views import Data, Line, Lines, Table, View, together
from ..workflow import ModelWorkflow, Nodes

if TYPE_CHECKING:
    import xarray as xr

    from ...store import PackedTokens

__all__ = ["Probe", "ProbeSettings"]

TARGET_NAMES = {
    "character_count": "characters since the line start",
    "line_break": "whether the line breaks next",
}
"""Descriptions of the targets, for titles, by name."""
LOWEST = -0.5
"""Lower end of the R² axis in drawings: a shuffled probe far below zero in one layer would flatten all
curves."""


@dataclass(frozen=True)
class ProbeSettings(ModelSettings):
    """Settings of the workflow `probe`: the targets, the probed hook point, and the split into train and
    test.

    Raises:
        ConfigError: for an unknown target, or without targets and labels.
    """

    targets: tuple[str, ...] = setting(TARGETS, "targets to predict from states of wrapped prose")
    labels: str = setting("", "file of labelled texts, used in place of wrapped prose and `targets`")
    kind: Literal["auto", "label", "number"] = setting(
        "auto", "how labels of the file are predicted: as classes (label), as numbers, or as their type says"
    )
    groups: str = setting(
        "",
        "field of the labelled texts that names their group, all of which is train or test; none: each text",
    )
    text: str = setting(
        "",
        "file, folder or glob of texts to wrap; none: prose shipped with mizarr, less for large models",
    )
    widths: tuple[AtLeastTwo, ...] = setting((30, 40, 50, 60, 70, 80), "line widths to wrap at")
    context: Natural = setting(
        0, "number of tokens per prompt of wrapped prose; 0: the model's context, at most 256"
    )
    point: Literal["resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out"] = setting(
        "resid_post", "hook point whose activations are probed"
    )
    layers: tuple[int, ...] = setting((), "layers to probe; none: all")
    examples: Natural = setting(
        6000, "largest number of tokens per target; 0: all, which are in memory one layer at a time"
    )
    # Line breaks are few: a probe that never predicts one would be right at most tokens.
    balance: bool = setting(True, "use the same number of examples of each label")
    test_share: float = setting(0.25, "share of the prompts held out as the test set")
    penalties: tuple[float, ...] = setting(
        PENALTIES, "penalties on squared weights to try; one is chosen on a validation part of the train set"
    )
    seed: Natural = setting(0, "seed of examples, splits, the shuffled control and the bootstrap")

    def __post_init__(self) -> None:
        for name in self.targets:
            if name not in TARGETS:
                near = nearest(name, TARGETS)
                hint = f"; did you mean {near!r}?" if near else "; your own labels are read from labels=FILE"
                raise ConfigError(f"expected targets among {', '.join(TARGETS)}, found {name!r}{hint}")
        if not self.targets and not self.labels:
            raise ConfigError(
                f"expected targets to predict, found none; set targets ({', '.join(TARGETS)}) or labels=FILE"
            )
        if self.groups and not self.labels:
            raise ConfigError(
                f"expected labels=FILE beside groups={self.groups}, which names a field of its texts, found "
                "none; name the file, or leave groups out"
            )


class Probe(ModelWorkflow):
    """Workflow that fits linear probes to the states of every layer, for one or several targets, and to
    shuffled targets as control."""

    name = "probe"
    question = "At which layer can a label be read linearly from the residual stream?"
    descriptive = "How well a linear probe predicts the target from the states, beside shuffled targets."
    settings_type = ProbeSettings
    extra = "probing"
    settings: ProbeSettings

    def plan(self) -> Nodes:
        """Nodes with the probes of all layers, one per target.

        Raises:
            PromptError: for a target in fewer prompts than train, validation and test set need.
        """
        settings = self.settings
        tokens, targets, group = self._targets()
        self.targets = [
            thinned(target, examples=settings.examples, balance=settings.balance, seed=settings.seed)
            for target in targets
        ]
        # Groups of prompts, not tokens, are split into train and test: neighbours in one prompt are similar.
        prompt = column(group[tokens.prompt_of(slice(None))], "token", "prompt")
        for target in self.targets:
            n_groups = len(np.unique(prompt.values[~np.isnan(target.values)]))
            if n_groups < FEWEST:
                unit = f"groups of the field {settings.groups!r}" if settings.groups else "prompts"
                raise PromptError(
                    f"expected tokens with the target {target.name!r} in at least {FEWEST} {unit}, which "
                    f"are split into train, validation and test set, found {n_groups}; give more or longer "
                    "texts"
                )
        layers = settings.layers or range(self.subject.config.num_layers)
        captured = self.subject.capture(
            tokens, *(f"blocks.{layer}.hook_{settings.point}" for layer in layers)
        )
        return {
            target.name: probe.on(
                states=captured[settings.point],
                target=column(target.values, "token", "target"),
                prompt=prompt,
                kind=target.kind,
                test_share=settings.test_share,
                penalties=settings.penalties,
                seed=settings.seed,
            )
            for target in self.targets
        }

    def _targets(self) -> tuple[PackedTokens, list[Target], npt.NDArray[np.int64]]:
        """(tokens of all prompts, targets to predict, group of each prompt); a target has a value per token,
        NaN for tokens without one."""
        settings, config = self.settings, self.subject.config
        if settings.labels:
            tokens, target, group = read_labels(self.subject, settings.labels, settings.kind, settings.groups)
            # Texts of a file may be longer than the context; wrapped prose is cut to it.
            check_prompts(list(tokens), config.vocab_size, config.context_length, self.subject.name)
            return tokens, [target], group
        context = settings.context or min(config.context_length, 256)
        texts = read_texts(settings.text)
        if not settings.text:
            texts = [text[: affordable_characters(config, len(text))] for text in texts]
        tokens = wrapped_prose(self.subject, texts, settings.widths, context)
        return tokens, wrapped_targets(tokens, settings.targets), np.arange(tokens.n_prompts)

    @cached_property
    def results_by_target(self) -> dict[str, xr.Dataset]:
        """Result of the stage `probe` for each target name, in memory: score, low and high [layer,
        targets]."""
        return {target.name: self.result(target.name).load() for target in self.targets}

    def best(self, name: str) -> int:
        """Layer with the largest held-out score of a target."""
        score = self.results_by_target[name]["score"].sel(targets="true")
        # xarray's argmax skips NaN and raises if all scores are NaN.
        return int(score["layer"][int(score.fillna(-np.inf).argmax("layer"))])

    @property
    def summary(self) -> str:
        """See `Workflow`: the best layer of each target, its score with the interval, and the controls."""
        parts = []
        for document in map(self._document, self.targets):
            row = next(row for row in document["layers"] if row["layer"] == document["best_layer"])
            true, shuffled = row["true"], row["shuffled"]
            parts.append(
                f"{_target_name(document)} after layer {row['layer']} with {_measure(document)} "
                f"{true['score']:.3f} ({true['low']:.3f} to {true['high']:.3f}; shuffled targets "
                f"{shuffled['score']:.3f}, {_baseline_name(document)} {document['baseline']:.3f})"
            )
        return f"A linear probe of {self.settings.point} reads best: {'; '.join(parts)}."

    def views(self) -> Iterator[View]:
        """Views in reading order: scores of each target by layer with confidence intervals, beside those of
        shuffled targets, as curves and as tables."""
        model, point = self.subject.name, self.settings.point
        documents = [self._document(target) for target in self.targets]
        yield Data(json={"model_id": model, "point": point, "results": documents})
        curves = [_curves(document, self.results_by_target[document["target"]]) for document in documents]
        # The title of a figure with one panel is the panel's own.
        is_single = len(documents) == 1
        probed = _target_name(documents[0]) if is_single else "several targets"
        title = f"Linear probe of {probed} on {point} of {model}, by layer"
        yield from together("probe", title, *curves, caption=curves[0].caption if is_single else "")
        for document in documents:
            yield _table(document, f"Linear probe of {_target_name(document)} on {point} of {model}")

    def _document(self, target: Target) -> dict[str, Any]:
        """JSON record of a target: measure, numbers of examples, baseline and the scores of all layers."""
        scored = self.results_by_target[target.name]
        names = ("score", "low", "high", "penalty")
        scores = [records(scored.sel(targets=label), "layer", *names) for label in ("true", "shuffled")]
        return {
            "target": target.name,
            "kind": target.kind,
            "measure": "accuracy" if target.classes else "R2",
            "classes": target.classes,
            "n_train": int(scored["n_train"]),
            "n_test": int(scored["n_test"]),
            "baseline": float(scored["baseline"]),
            "best_layer": self.best(target.name),
            "layers": [
                {"layer": layer, "true": true, "shuffled": shuffled}
                for layer, true, shuffled in zip(scored["layer"].values.tolist(), *scores, strict=True)
            ],
        }


def _target_name(document: dict[str, Any]) -> str:
    """Description of the target, or its name for labels of a file."""
    return str(TARGET_NAMES.get(document["target"], document["target"]))


def _baseline_name(document: dict[str, Any]) -> str:
    """Constant prediction that gives the baseline score, in words: "always the mean"."""
    return f"always the {'most common label' if document['kind'] == 'label' else 'mean'}"


def _measure(document: dict[str, Any]) -> str:
    """Name of the score: "accuracy" or "R²"."""
    return str(document["measure"]).replace("R2", "R²")


def _curves(document: dict[str, Any], scored: xr.Dataset) -> Lines:
    """Curves by layer of the scores with true and with shuffled targets, and of a constant prediction.

    document: see `Probe._document`. scored: result of the stage `probe`.
    """
    lines = []
    for label in ("true", "shuffled"):
        score, *band = (scored[name].sel(targets=label).values for name in ("score", "low", "high"))
        lines.append(Line(label, score, control=label == "shuffled", band=np.stack(band)))
    baseline = np.full(scored.sizes["layer"], document["baseline"])
    lines.append(Line(_baseline_name(document), baseline, control=True))
    is_number = document["kind"] == "number"
    return Lines(
        title=f"Linear probe of {_target_name(document)}",
        caption=f"x: layer. y: {_measure(document)}, on held-out prompts, of a linear probe fitted to the "
        "layer's states. Bands: 95 % intervals from a bootstrap over these prompts. Shuffled: control, a "
        "probe fitted to targets that were shuffled among tokens.",
        sources=(document["target"],),
        x=tuple(scored["layer"].values.tolist()),
        x_name="layer",
        y_name=_measure(document),
        lines=tuple(lines),
        low=0.0 if is_number else None,
        high=1.0,
        floor=LOWEST if is_number else None,
    )


def _table(document: dict[str, Any], title: str) -> Table:
    """Table with a row per layer: scores with intervals, and those of the control; the best layer is bold."""

    def interval(row: dict[str, Any]) -> str:
        return f"{row['low']:.3f} to {row['high']:.3f}"

    return Table.of(
        document["layers"],
        ("layer", "layer", "d"),
        (_measure(document), lambda row: row["true"]["score"], ".3f"),
        ("95% interval", "true", interval),
        ("shuffled", lambda row: row["shuffled"]["score"], ".3f"),
        ("95% interval", "shuffled", interval),
        ("penalty", lambda row: row["true"]["penalty"], "g"),
        strong=lambda row: row["layer"] == document["best_layer"],
        title=title,
        caption=f"One row per layer: {_measure(document)} of a linear probe fitted on {document['n_train']} "
        f"tokens and scored on {document['n_test']} tokens of held-out prompts. Baseline "
        f"({_baseline_name(document)}): {document['baseline']:.3f}. Shuffled: control, the probe fitted to "
        "targets shuffled among tokens. Intervals: bootstrap over held-out prompts. Penalty: on squared "
        "weights, chosen on a validation set. Bold: the best layer; its score is not corrected for the "
        "choice among layers.",
        sources=(document["target"],),
    )

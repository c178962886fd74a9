"""How does a tiny RNN do its task? Analyses of its three weight matrices, and how much they explain.

The answer shows the weights in units of the input; ablations of neurons alone and in pairs; correlations of
neurons with interpretable functions of the input; the linear regions of the network; its accuracy, exact for
sequences of two and three numbers; and, for each of several explanations, its length in bits, its residual
surprise, and the error of an accuracy estimated from it (stages/algzoo/analysis). The protocol is candle-mi's
`stoicheia_analysis`.

Claim: ablating the neuron whose ablation costs most on other samples. Null: the direction whose ablation
costs most in each of several random bases of the state, which have as many directions to choose among as
there are neurons.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.algzoo.accuracy import CHUNK, sampled_accuracy_node
from ...stages.algzoo.analysis.ablation import neuron_ablation, random_ablation
from ...stages.algzoo.analysis.compute_curve import compute_curve
from ...stages.algzoo.analysis.cones import DIMENSIONS, gaussian_accuracy
from ...stages.algzoo.analysis.probing import THRESHOLD, UNKNOWN, neuron_roles
from ...stages.algzoo.analysis.regions import linear_regions
from ...stages.algzoo.analysis.standardized import is_standardizable, standardized_rnn
from ...stages.algzoo.analysis.surprise import SIGMAS, surprise_accounting
from ...stages.algzoo.samples import algzoo_samples
from ...store.arrays import Floats
from ...store.errors import ConfigError
from ..claim import Claim
from ..labelled import record, records, values_of
from ..settings import Count, Natural, Positive, setting
from ..views import Bars, Choice, Cones, Data, Figure, Heatmap, Line, Lines, Table, View, together
from ..workflow import Nodes, loaded
from .workflow import AlgZooSettings, AlgZooWorkflow

if TYPE_CHECKING:
    import xarray as xr


__all__ = ["StoicheiaAnalysis", "StoicheiaAnalysisSettings"]

BY_SIGMA = ("explanation_bits", "residual_surprise", "bound_satisfied", "tightness", "covered")
"""Variables of surprise accounting that have one value for each explanation and noise level."""
FITTED = 1
"""Offset added to the seed for the samples on which neurons are selected and explanations fitted; scores use
samples of the seed itself."""


@dataclass(frozen=True)
class StoicheiaAnalysisSettings(AlgZooSettings):
    """Settings of the workflow `stoicheia_analysis`, which analyses the weights of one AlgZoo RNN.

    Raises:
        ConfigError: for a budget that is no multiple of `CHUNK`.
    """

    analysed: Count = setting(
        2000, "number of samples on which ablations, roles, regions and explanations are scored"
    )
    controls: Natural = setting(
        50, "number of random bases of the state, the null distribution; 0: none, nothing is claimed"
    )
    sigmas: tuple[Positive, ...] = setting(
        SIGMAS, "levels of noise on the weights, in standard deviations of each matrix"
    )
    realisations: Count = setting(10, "number of noisy networks per noise level")
    regions: Count = setting(16, "number of linear regions that the explanation by regions describes")
    budgets: tuple[Count, ...] = setting(
        (1000, 10_000, 100_000, 1_000_000, 10_000_000),
        "numbers of samples from which the accuracy is estimated",
    )
    top: Count = setting(10, "number of rows of the table of regions")

    def __post_init__(self) -> None:
        if any(budget % CHUNK for budget in self.budgets):
            raise ConfigError(
                f"expected budgets that are multiples of {CHUNK}, found {list(self.budgets)}; round them"
            )


class StoicheiaAnalysis(AlgZooWorkflow):
    """Workflow that explains one AlgZoo RNN by its weights: ablations, roles of neurons, linear regions and
    surprise accounting. Raises ConfigError for a transformer."""

    name = "stoicheia_analysis"
    question = "How does a tiny RNN do its task, and how much of it is explained?"
    settings_type = StoicheiaAnalysisSettings
    settings: StoicheiaAnalysisSettings
    ablation = loaded("ablation")
    roles, regions, counted = loaded("roles"), loaded("regions"), loaded("accuracy")

    def plan(self) -> Nodes:
        """Nodes of all analyses."""
        network, settings = self.network, self.settings
        if not network.is_rnn:
            raise ConfigError(
                f"{self.name}: expected an RNN, which is piecewise linear, found the transformer "
                f"{network.title}; use stoicheia_inference"
            )
        weights = network.weights_node()
        about: dict[str, Any] = {"task": network.task.name, "sequence": network.sequence}
        # Neurons are chosen and explanations fitted on other samples than they are scored on.
        samples, fitted = (
            algzoo_samples.on(**about, samples=settings.analysed, seed=seed)
            for seed in (settings.seed, settings.seed + FITTED)
        )
        on = {"weights": weights, "samples": samples}
        nodes: Nodes = {
            "accuracy": sampled_accuracy_node(weights, **about, samples=settings.samples, seed=settings.seed),
            "chosen": neuron_ablation.on(weights=weights, samples=fitted),
            "ablation": neuron_ablation.on(**on),
            **(
                {"controls": random_ablation.on(**on, draws=settings.controls, seed=settings.seed)}
                if settings.controls
                else {}
            ),
            "roles": neuron_roles.on(**on),
            "regions": linear_regions.on(**on),
        }
        # Units of the input need an input weight of every neuron that is not 0.
        if is_standardizable(network.weights):
            nodes["standardized"] = standardized_rnn.on(weights=weights)
        if network.sequence in DIMENSIONS:
            nodes["exact"] = gaussian_accuracy.on(weights=weights, **about)
        # Residual bits encode which class an answer is instead; a real number has no classes.
        if not network.task.is_scalar:
            nodes["surprise"] = surprise_accounting.on(
                **on,
                fitted=fitted,
                task=network.task.name,
                sigmas=settings.sigmas,
                realisations=settings.realisations,
                regions=settings.regions,
                seed=settings.seed,
            )
            nodes["curve"] = compute_curve.on(
                counted=nodes["accuracy"], surprise=nodes["surprise"], budgets=settings.budgets
            )
        return nodes

    # -- results

    @cached_property
    def neuron(self) -> int:
        """Index of the neuron of the claim: its ablation costs most on samples that are used for nothing
        else."""
        return int(self.result("chosen")["order"][0])

    @property
    def measure(self) -> str:
        """Name of the score: "accuracy", or "minus RMSE" for a scalar task."""
        return str(self.ablation.attrs["measure"])

    @cached_property
    def cards(self) -> list[dict[str, Any]]:
        """A record per neuron: its role, the input function its state is most correlated with, the effect of
        its ablation, and its weights."""
        network, roles = self.network, self.roles
        ih, hh = network.weights["weight_ih"].values[:, 0], network.weights["weight_hh"].values
        return [
            {
                "neuron": j,
                "role": str(roles["role"][j].values),
                "best": str(roles["best"][j].values),
                "correlation": float(roles["correlation"][j]),
                "delta": float(self.ablation["delta"][j]),
                "input": float(ih[j]),
                "self": float(hh[j, j]),
                "driven_by": _strongest(hh[j], j, +1),
                "held_by": _strongest(hh[j], j, -1),
            }
            for j in range(network.shape.hidden)
        ]

    def views(self) -> Iterator[View]:
        """Views in reading order: accuracy, weights, ablations and roles of neurons, linear regions, surprise
        accounting."""
        yield self._accuracy()
        yield from self._weights()
        yield from self._neurons()
        yield from self._regions()
        if "surprise" in self.nodes:
            yield from self._surprise()

    @cached_property
    def null(self) -> Floats:
        """Null distribution: change of the score by ablating, in each random basis, the direction whose
        ablation costs most, [draw]; empty without controls."""
        if "controls" not in self.nodes:
            return np.empty(0)
        # The worst of as many directions as there are neurons, since the claimed neuron is the worst of
        # these.
        return values_of(self.result("controls").load()["delta"].min("direction"))

    def claims(self) -> Iterator[Claim]:
        """Claim about the cost of ablating the selected neuron, compared with random directions."""
        hidden = self.network.shape.hidden
        unit = "of accuracy" if self.measure == "accuracy" else "of RMSE"
        # A negative change of the score is damage; the claim is about the size of the damage.
        effect = -float(self.ablation["delta"][self.neuron])
        claim = (
            f"ablating neuron {self.neuron} of {self.network.title}, whose ablation costs most on other "
            "samples, worsens its score"
        )
        of = f"random bases of the state, each with the direction of {hidden} whose ablation costs most"
        yield Claim.against(claim, effect, -self.null, of, unit=unit)

    def _accuracy(self) -> View:
        """View of the accuracy on samples and, for sequences of two or three numbers, of the exact
        accuracy."""
        view, is_scalar = self.accuracy(self.counted), self.network.task.is_scalar
        if "exact" not in self.nodes:
            return view
        exact, name = self.result("exact"), "rmse" if is_scalar else "accuracy"
        value = float(exact[name])
        shown = f"{value:.6g}" if is_scalar else f"{100 * value:.5f} %"
        pair = (f"exact, from {exact.sizes['cone']} cones", shown)
        return replace(view, pairs=(*view.pairs, pair), json={**view.json, f"exact_{name}": value})

    def _weights(self) -> Iterator[View]:
        """Heatmaps of recurrent and readout weights, scaled so that every neuron has an input weight of 1 or
        -1; none if an input weight is 0."""
        if "standardized" not in self.nodes:
            return
        standardized = self.result("standardized").load()
        labels = _neurons(standardized.sizes["neuron"])
        signs = [
            f"{j}{'+' if ih > 0 else '−'}" for j, ih in enumerate(standardized["weight_ih"].values[:, 0])
        ]
        recurrent = standardized["weight_hh"].assign_coords(neuron=signs, neuron_=labels)
        readout = standardized["weight_oh"].assign_coords(
            neuron=labels, output=_neurons(standardized.sizes["output"])
        )
        panels = [
            Heatmap.of(
                array,
                title,
                caption,
                row_name=row,
                column_name="from neuron",
                diverging=True,
                numbers=".2f",
                value_name="weight",
                sources=("standardized",),
            )
            for array, title, caption, row in (
                (
                    recurrent,
                    "Recurrent weights",
                    (
                        "Each cell: weight from one neuron (column) to another (row), with every neuron "
                        "scaled so that its input weight is 1 or -1. The sign after a neuron is that of its "
                        "input weight."
                    ),
                    "to neuron",
                ),
                (
                    readout,
                    "Readout weights",
                    (
                        "Each cell: weight from one neuron (column) to one output (row), with every neuron "
                        "scaled so that its input weight is 1 or -1."
                    ),
                    "output",
                ),
            )
        ]
        yield Data(
            json={
                "standardized": {
                    name: standardized[name] for name in ("scale", "weight_ih", "weight_hh", "weight_oh")
                }
            }
        )
        yield from together("stoicheia_weights", f"Standardised weights of {self.network.title}", *panels)

    def _neurons(self) -> Iterator[View]:
        """Table of all neurons, effects of ablating one and two neurons, and correlations with functions."""
        ablation, network, cards = self.ablation, self.network, self.cards
        labels = _neurons(network.shape.hidden)
        yield Table.of(
            cards,
            ("neuron", "neuron", "d"),
            ("role", lambda card: card["role"] if card["role"] != UNKNOWN else "–"),
            ("most correlated function", "best"),
            ("correlation", "correlation", ".3f"),
            (f"change of {self.measure}", "delta", "+.4f"),
            ("input weight", "input", "+.3f"),
            ("self weight", "self", "+.3f"),
            ("excited by", "driven_by"),
            ("inhibited by", "held_by"),
            strong=lambda card: card["neuron"] == self.neuron,
            title="Roles and ablations of neurons",
            caption="One row per neuron of the RNN. Role: the kind of function of the input that its final "
            f"state is most correlated with, if the correlation is {THRESHOLD} or more; this is no evidence "
            f"of a cause. Change of {self.measure}: of the network with the neuron ablated, minus that of "
            "the unchanged network. Input weight, self weight: from the input and from the neuron itself. "
            "Excited by, inhibited by: the two neurons with the largest positive, or negative, recurrent "
            "weights into this one. Bold: the neuron of the claim, whose ablation costs most on other "
            "samples.",
            sources=("roles", "ablation"),
            json={"neurons": cards, "baseline": float(ablation["baseline"])},
        )
        interaction = ablation["interaction"].assign_coords(neuron=labels, neuron_=labels)
        pair_delta = ablation["pair_delta"].assign_coords(neuron=labels, neuron_=labels)
        options: dict[str, Any] = {
            "row_name": "neuron",
            "column_name": "and neuron",
            "diverging": True,
            "numbers": ".2f",
        }
        single = Bars(
            title="Ablation of one neuron",
            caption=f"x: the neuron of the RNN that is ablated. y: {self.measure} with this neuron ablated, "
            "minus that of the unchanged network. Line: control, the median over random bases of the state; "
            "in each basis, the direction is ablated whose ablation costs most.",
            x=tuple(labels),
            lines=(Line("delta", ablation["delta"].values),),
            x_name="neuron",
            y_name=f"change of {self.measure}",
            signed=True,
            levels=((float(np.median(self.null)), "random bases"),) if self.null.size else (),
            sources=tuple(name for name in ("ablation", "controls") if name in self.nodes),
        )
        maps = (
            Heatmap.of(
                pair_delta,
                "Ablation of two neurons",
                f"Each cell: {self.measure} with two neurons (row, column) ablated together, minus that of "
                "the unchanged network.",
                **options,
                sources=("ablation",),
            ),
            Heatmap.of(
                interaction,
                "Interaction of two neurons",
                f"Each cell: change of {self.measure} by ablating two neurons (row, column) together, minus "
                "the changes by ablating each alone. Below 0: each can replace the other.",
                **options,
                sources=("ablation",),
            ),
        )
        yield from maps
        yield Figure(name="stoicheia_ablation", title=f"Ablations of {network.title}", panels=(single, *maps))
        by_time = (
            # The state after the last number is the one that the readout reads.
            self.roles["by_time"]
            .isel(time=-1)
            .transpose("neuron", "role_")
            .drop_vars("time", errors="ignore")
        )
        by_time = by_time.assign_coords(neuron=labels)
        cards_view = Heatmap.of(
            by_time,
            "Correlation of final states with functions of the input",
            "Each cell: absolute correlation, over samples, of the final state of one neuron (row) with a "
            "function of the input. Column: role, a kind of such functions; the most correlated one is "
            "taken.",
            row_name="neuron",
            column_name="role",
            value_name="correlation",
            low=0.0,
            high=1.0,
            numbers=".2f",
            sources=("roles",),
        )
        yield from together("stoicheia_roles", f"Roles of the neurons of {network.title}", cards_view)
        yield self._roles_by_time()
        yield Data(json={"pairs": _pairs(ablation)})

    def _roles_by_time(self) -> Choice:
        """Curves, per neuron, of the correlation of its state at each step with interpretable functions."""
        correlation = self.roles["by_time"].transpose("neuron", "role_", "time")
        labels = _neurons(self.network.shape.hidden)

        def curves(neuron: int) -> Lines:
            return Lines(
                title=f"Neuron {neuron}",
                x=tuple(str(step) for step in range(correlation.sizes["time"])),
                lines=tuple(
                    Line(str(role), values)
                    for role, values in zip(
                        correlation["role_"].values, correlation[neuron].values, strict=True
                    )
                ),
                x_name="after number",
                y_name="absolute correlation",
                low=0.0,
                high=1.0,
            )

        return Choice.of(
            "neuron",
            [int(label) for label in labels],
            curves,
            start=self.neuron,
            title="Correlation of states with functions of the input, by step",
            caption="x: number of inputs read so far. y: absolute correlation, over samples, of one neuron's "
            "state with a function of these inputs. One curve per role, a kind of such functions; it follows "
            "the most correlated function of that kind.",
            sources=("roles",),
            json={
                "roles_by_time": {
                    "dims": ["neuron", "role", "time"],
                    "roles": list(map(str, correlation["role_"].values)),
                    "correlation": correlation,
                }
            },
        )

    def _regions(self) -> Iterator[View]:
        """Table of the most frequent linear regions and, for two and three numbers, a map of all regions."""
        regions, network = self.regions, self.network
        n_samples = int(regions["count"].sum())
        rows = [
            {
                "region": i,
                "share": float(regions["count"][i]) / n_samples,
                "active": int(regions["active"][i]),
                "map": regions["map"][i].values.tolist(),
            }
            for i in range(min(self.settings.top, regions.sizes["region"]))
        ]
        # One ReLU per neuron and step, each open or closed.
        gates = network.shape.hidden * network.sequence
        yield Table.of(
            rows,
            ("region", "region", "d"),
            ("share", "share", ".2%"),
            ("open gates", lambda row: f"{row['active']} of {gates}"),
            ("linear map in the region, a row per output", lambda row: _matrix(row["map"])),
            title=f"{regions.sizes['region']} linear regions in {n_samples:,} samples",
            caption="One row per linear region: a set of inputs with the same open ReLUs, on which the "
            "network is one linear map. A gate is the ReLU of one neuron at one step. Share: of the samples. "
            f"At most 2^{gates} regions are possible. On average over samples, "
            f"{100 * float(regions['active_fraction']):.1f} % of all gates are open.",
            sources=("regions",),
            json={
                "regions": {
                    "distinct": regions.sizes["region"],
                    "samples": n_samples,
                    "counts": regions["count"],
                    "active_fraction": float(regions["active_fraction"]),
                    "active_by_time": regions["active_by_time"],
                    "most_log2": gates,
                    "top": rows,
                }
            },
        )
        if "exact" in self.nodes:
            yield self._map()

    def _map(self) -> View:
        """Map of the cones of linear regions, coloured by the network's answer or, for a scalar task, by the
        number of open gates."""
        exact, network = self.result("exact").load(), self.network
        if network.task.is_scalar:
            # Eight gates per byte; the bits that fill up the last byte are 0.
            n_open = np.unpackbits(exact["pattern"].values, axis=1).sum(axis=1)
            # Only numbers of gates that occur get a colour.
            levels, classes = np.unique(n_open, return_inverse=True)
            names = tuple(f"{level} open gates" for level in levels.tolist())
            marked = np.zeros(len(classes), bool)
        else:
            classes = exact["said"].values
            names = tuple(f"answer {i}" for i in range(network.shape.outputs))
            marked = classes != exact["target"].values
        cones = Cones(
            rays=exact["rays"].values,
            classes=classes,
            marked=marked,
            names=names,
            mark_name="wrong answer",
            axes_names=tuple(f"x{i}" for i in range(network.sequence)),
            sources=("exact",),
        )
        view_note = "" if network.sequence == 2 else ", seen along x0 = x1 = x2 from both sides"
        meaning = (
            "number of open ReLUs"
            if network.task.is_scalar
            else "answer of the network, with wrong ones marked"
        )
        caption = (
            f"All inputs of {network.sequence} numbers, by direction. Colour: {meaning}. White lines "
            "separate regions in which the network is one linear map. Areas are probabilities of normally "
            f"distributed inputs{view_note}."
        )
        return Figure(
            name="stoicheia_regions",
            title=f"Linear regions and answers of {network.title}",
            caption=caption,
            panels=(cones,),
        )

    def _surprise(self) -> Iterator[View]:
        """Table of surprise accounting, and errors of accuracies estimated from explanations."""
        surprise, curve = self.result("surprise").load(), self.result("curve").load()
        of_explanation = ("estimator", "description", "agreement_rate")
        rows: list[dict[str, Any]] = []
        for name in surprise["estimator"].values:
            explanation = surprise.sel(estimator=name)
            first, *others = records(
                explanation, "sigma", *of_explanation, "sigma", "selection_bits", *BY_SIGMA
            )
            # What is the same for every noise level stands in the first row of an explanation only.
            rows += [first, *(row | dict.fromkeys(of_explanation) for row in others)]
        n_samples = int(surprise.attrs["samples"])
        yield Table.of(
            rows,
            ("explanation", "estimator"),
            ("description", "description"),
            ("agreement", "agreement_rate", lambda share: f"{100 * share:.1f} %"),
            ("noise", "sigma", "g"),
            ("explanation bits", "explanation_bits", ".0f"),
            ("residual bits", "residual_surprise", ".0f"),
            ("selection bits", "selection_bits", ".0f"),
            ("bound", lambda row: "holds" if row["bound_satisfied"] else "fails"),
            ("ratio", "tightness", ".2f"),
            (
                "holds up to",
                "covered",
                lambda answers: f"{answers:,.0f}" if np.isfinite(answers) else "any number",
            ),
            title="Surprise accounting",
            caption="One row per explanation of the network and per level of noise on its weights. "
            "Agreement: share of samples on which explanation and network give the same answer. Explanation "
            "bits: length of the explanation. Residual bits: length of the network's answers to "
            f"{n_samples:,} samples if the explanation is known. Selection bits: information in all weights "
            "at that level of noise. Bound: it holds if explanation and residual bits together are at most "
            "the selection bits. Ratio: of both sides of the bound. Holds up to: number of answers for which "
            "the bound would hold.",
            sources=("surprise",),
            json={"surprise": _account(surprise)},
        )
        yield from self._curve(curve)

    def _curve(self, curve: xr.Dataset) -> Iterator[View]:
        """Curves of the mean squared error of the estimated accuracy by number of samples. curve: result of
        the stage `compute_curve`."""
        rising = curve.sortby("samples")
        lines = [
            Line("samples, expected", rising["baseline_expected"].values, control=True),
            Line("samples, measured", rising["baseline_mse"].values, strong=True),
        ]
        lines += [
            Line(str(name), rising["estimator_mse"].sel(estimator=name).values)
            for name in curve["estimator"].values
            if str(name) != "piecewise"  # equal to the network, so that its curve is that of samples
        ]
        view = Lines(
            title="Error of an accuracy estimated from samples",
            caption="x: number of samples from which the accuracy is estimated. y: mean squared error of "
            "this estimate. Curves: estimates from the network's own answers (expected and measured), and "
            "from the answers of each explanation in its place. The error of an explanation does not fall "
            "below its bias.",
            x=tuple(rising["samples"].values.tolist()),
            lines=tuple(lines),
            x_name="samples",
            y_name="mean squared error",
            log=True,
            log_x=True,
            sources=("curve",),
            json={
                "baseline_mse_vs_compute": _curve_json(curve, "baseline"),
                "estimator_mse_vs_compute": {
                    str(name): _curve_json(curve.sel(estimator=name), "estimator")
                    for name in curve["estimator"].values
                },
            },
        )
        title = f"Error of estimates of the accuracy of {self.network.title}"
        yield from together("stoicheia_compute", title, view)


def _neurons(count: int) -> list[str]:
    """Labels of `count` neurons for an axis: "0", "1", …"""
    return list(map(str, range(count)))


def _strongest(row: Any, neuron: int, sign: int) -> str:
    """The two other neurons with the largest recurrent weights of one sign: "3 (+0.52), 1 (+0.20)".

    row: weights into `neuron`, [neuron]. sign: +1 or -1.
    """
    order = [int(k) for k in np.argsort(-sign * row) if k != neuron and sign * row[k] > 0]
    return ", ".join(f"{k} ({row[k]:+.2f})" for k in order[:2]) or "–"


def _matrix(rows: list[list[float]]) -> str:
    """A matrix as text, with at most four rows and columns."""
    shown = [
        "(" + " ".join(f"{value:+.3g}" for value in row[:4]) + (" …" if len(row) > 4 else "") + ")"
        for row in rows
    ]
    return " ".join(shown[:4]) + (" …" if len(shown) > 4 else "")


def _pairs(ablation: xr.Dataset) -> list[dict[str, Any]]:
    """Effects of ablating two neurons, one record per pair."""
    columns = {"ablated": "pair_ablated", "delta": "pair_delta", "interaction": "interaction"}
    return [
        {"a": a, "b": b, **record(ablation.isel(neuron=a, neuron_=b), **columns)}
        for a, b in combinations(range(ablation.sizes["neuron"]), 2)
    ]


def _account(surprise: xr.Dataset) -> dict[str, Any]:
    """JSON record of surprise accounting, with one entry per explanation.

    Values may be arrays: they become lists of numbers when the document is written.
    """
    names = ("estimate_accuracy", "agreement_rate", "disagreement_rate", "operations", "description")
    by_estimator = (*names, "noisy_agreement", *BY_SIGMA)
    return {
        "n_samples": int(surprise.attrs["samples"]),
        "param_count": int(surprise.attrs["param_count"]),
        "sigmas": surprise["sigma"],
        **{
            name: surprise[name]
            for name in ("model_accuracy", "chance_accuracy", "selection_bits", "noisy_accuracy")
        },
        "estimators": {
            str(name): record(surprise.sel(estimator=name), *by_estimator)
            for name in surprise["estimator"].values
        },
    }


def _curve_json(curve: xr.Dataset, prefix: str) -> list[dict[str, Any]]:
    """JSON records of the mean squared error by number of samples, with the number of operations.

    prefix: "baseline" for samples of the network, "estimator" for an explanation.
    """
    baseline_only = ("baseline_expected", "groups") if prefix == "baseline" else ()
    return records(curve, "samples", "samples", f"{prefix}_mse", f"{prefix}_operations", *baseline_only)

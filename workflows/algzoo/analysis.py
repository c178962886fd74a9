"""How does a tiny RNN do its task? Every analysis there is of three matrices, and how much they explain.

Told are its weights in units of the input, what its neurons are worth alone and in pairs, which functions of
the input they go with, the cones in which it is linear, its accuracy - exact for two and three numbers - and,
for each of several explanations, the bits it takes, those it leaves unsaid, and the error of an accuracy
worked out from it (stages/algzoo/analysis). candle-mi's `stoicheia_analysis`.

The selected neuron is the one it needs most on other samples, beside the direction it needs most of a random
basis of the state: such a basis has as many directions to choose among as there are neurons.
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
"""Numbers of an explanation for each size of noise."""
FITTED = 1
"""Added to the seed: of samples that something is chosen or fitted on, and nothing is scored on."""


@dataclass(frozen=True)
class StoicheiaAnalysisSettings(AlgZooSettings):
    """What `--set` can change.

    Raises ConfigError for a budget that is no multiple of CHUNK.
    """

    analysed: Count = setting(2000, "samples that ablations, roles, regions and explanations are scored on")
    controls: Natural = setting(
        50, "random bases of the state that the neurons are held against; 0: none, nothing is claimed"
    )
    sigmas: tuple[Positive, ...] = setting(SIGMAS, "noise on the weights, in standard deviations of a matrix")
    realisations: Count = setting(10, "noisy networks of each")
    regions: Count = setting(16, "regions that the explanation by regions tells")
    budgets: tuple[Count, ...] = setting(
        (1000, 10_000, 100_000, 1_000_000, 10_000_000), "samples an accuracy may be estimated from"
    )
    top: Count = setting(10, "rows of the table of regions")

    def __post_init__(self) -> None:
        if any(budget % CHUNK for budget in self.budgets):
            raise ConfigError(f"expected budgets that are multiples of {CHUNK}, found {list(self.budgets)}")


class StoicheiaAnalysis(AlgZooWorkflow):
    """Every analysis of one RNN's matrices. Raises ConfigError for a transformer."""

    name = "stoicheia_analysis"
    question = "How does a tiny RNN do its task, and how much of it is explained?"
    settings_type = StoicheiaAnalysisSettings
    settings: StoicheiaAnalysisSettings
    ablation = loaded("ablation")
    roles, regions, counted = loaded("roles"), loaded("regions"), loaded("accuracy")

    def plan(self) -> Nodes:
        """The analyses, of the samples of two seeds."""
        network, settings = self.network, self.settings
        if not network.is_rnn:
            raise ConfigError(
                f"{self.name}: expected an RNN, whose states are pieces of linear maps, found the "
                f"transformer {network.title}; mizarr compute stoicheia_inference shows what it does"
            )
        weights = network.weights_node()
        about: dict[str, Any] = {"task": network.task.name, "sequence": network.sequence}
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
        if is_standardizable(network.weights):
            nodes["standardized"] = standardized_rnn.on(weights=weights)
        if network.sequence in DIMENSIONS:
            nodes["exact"] = gaussian_accuracy.on(weights=weights, **about)
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

    # -- what is shown

    @cached_property
    def neuron(self) -> int:
        """The neuron it needs most on the samples nothing is scored on."""
        return int(self.result("chosen")["order"][0])

    @property
    def measure(self) -> str:
        """What scores are: "accuracy", or of tasks with one number "minus RMSE"."""
        return str(self.ablation.attrs["measure"])

    @cached_property
    def cards(self) -> list[dict[str, Any]]:
        """What is known of each neuron."""
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
        """Accuracy, weights, neurons, regions, explanations."""
        yield self._accuracy()
        yield from self._weights()
        yield from self._neurons()
        yield from self._regions()
        if "surprise" in self.nodes:
            yield from self._surprise()

    @cached_property
    def null(self) -> Floats:
        """Change by the direction that each random basis needs most, [draw]; empty without controls."""
        if "controls" not in self.nodes:
            return np.empty(0)
        return values_of(self.result("controls").load()["delta"].min("direction"))

    def claims(self) -> Iterator[Claim]:
        """What the network loses without the neuron it needs most on other samples."""
        hidden = self.network.shape.hidden
        unit = "of accuracy" if self.measure == "accuracy" else "of RMSE"
        effect = -float(self.ablation["delta"][self.neuron])
        claim = (
            f"without neuron {self.neuron}, the one needed most on other samples, {self.network.title} loses"
        )
        of = f"random bases of the state, of each the direction of {hidden} that is needed most"
        yield Claim.against(claim, effect, -self.null, of, unit=unit)

    def _accuracy(self) -> View:
        found, is_scalar = self.accuracy(self.counted), self.network.task.is_scalar
        if "exact" not in self.nodes:
            return found
        exact, name = self.result("exact"), "rmse" if is_scalar else "accuracy"
        value = float(exact[name])
        shown = f"{value:.6g}" if is_scalar else f"{100 * value:.5f} %"
        pair = (f"exact, from {exact.sizes['cone']} cones", shown)
        return replace(found, pairs=(*found.pairs, pair), json={**found.json, f"exact_{name}": value})

    def _weights(self) -> Iterator[View]:
        if "standardized" not in self.nodes:
            return
        found = self.result("standardized").load()
        labels = _neurons(found.sizes["neuron"])
        signs = [f"{j}{'+' if ih > 0 else '−'}" for j, ih in enumerate(found["weight_ih"].values[:, 0])]
        recurrent = found["weight_hh"].assign_coords(neuron=signs, neuron_=labels)
        readout = found["weight_oh"].assign_coords(neuron=labels, output=_neurons(found.sizes["output"]))
        panels = [
            Heatmap.of(
                array,
                title,
                caption,
                row_name=row,
                column_name="read from neuron",
                diverging=True,
                numbers=".2f",
                value_name="weight",
                sources=("standardized",),
            )
            for array, title, caption, row in (
                (
                    recurrent,
                    "From state to state",
                    "in units of each neuron's input; the sign is that of its input weight",
                    "to neuron",
                ),
                (readout, "Readout", "rows are outputs", "output"),
            )
        ]
        yield Data(
            json={
                "standardized": {
                    name: found[name] for name in ("scale", "weight_ih", "weight_hh", "weight_oh")
                }
            }
        )
        yield from together("stoicheia_weights", f"Standardised weights of {self.network.title}", *panels)

    def _neurons(self) -> Iterator[View]:
        found, network, cards = self.ablation, self.network, self.cards
        labels = _neurons(network.shape.hidden)
        yield Table.of(
            cards,
            ("neuron", "neuron", "d"),
            ("role", lambda card: card["role"] if card["role"] != UNKNOWN else "–"),
            ("goes with", "best"),
            ("correlation", "correlation", ".3f"),
            (f"{self.measure} without it", "delta", "+.4f"),
            ("input", "input", "+.3f"),
            ("itself", "self", "+.3f"),
            ("driven by", "driven_by"),
            ("held down by", "held_by"),
            strong=lambda card: card["neuron"] == self.neuron,
            title="Role cards",
            caption=f"roles from a correlation of {THRESHOLD} on; which says that states go along, not why",
            sources=("roles", "ablation"),
            json={"neurons": cards, "baseline": float(found["baseline"])},
        )
        pair = found["interaction"].assign_coords(neuron=labels, neuron_=labels)
        both = found["pair_delta"].assign_coords(neuron=labels, neuron_=labels)
        look: dict[str, Any] = {
            "row_name": "neuron",
            "column_name": "and neuron",
            "diverging": True,
            "numbers": ".2f",
        }
        alone = Bars(
            title="Without one neuron",
            x=tuple(labels),
            lines=(Line("delta", found["delta"].values),),
            x_name="neuron",
            y_name=f"change of {self.measure}",
            signed=True,
            levels=((float(np.median(self.null)), "random bases"),) if self.null.size else (),
            sources=tuple(name for name in ("ablation", "controls") if name in self.nodes),
        )
        maps = (
            Heatmap.of(both, "Without two", f"change of {self.measure}", **look, sources=("ablation",)),
            Heatmap.of(
                pair,
                "Interaction",
                "what two lose together less what each loses alone; below 0 they stand in for each other",
                **look,
                sources=("ablation",),
            ),
        )
        yield from maps
        yield Figure(name="stoicheia_ablation", title=f"Ablations of {network.title}", panels=(alone, *maps))
        by_time = (
            self.roles["by_time"]
            .isel(time=-1)
            .transpose("neuron", "role_")
            .drop_vars("time", errors="ignore")
        )
        by_time = by_time.assign_coords(neuron=labels)
        cards_view = Heatmap.of(
            by_time,
            "What last states go with",
            "absolute correlation with the best function of each kind",
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
        yield Data(json={"pairs": _pairs(found)})

    def _roles_by_time(self) -> Choice:
        """The same of the states on the way: after each number, with functions of the numbers until then."""
        every = self.roles["by_time"].transpose("neuron", "role_", "time")
        labels = _neurons(self.network.shape.hidden)

        def curves(neuron: int) -> Lines:
            return Lines(
                title=f"Neuron {neuron}",
                x=tuple(str(step) for step in range(every.sizes["time"])),
                lines=tuple(
                    Line(str(role), values)
                    for role, values in zip(every["role_"].values, every[neuron].values, strict=True)
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
            title="What states go with, number by number",
            caption="absolute correlation of a neuron's state after each number with the best function of "
            "each kind of the numbers until then",
            sources=("roles",),
            json={
                "roles_by_time": {
                    "dims": ["neuron", "role", "time"],
                    "roles": list(map(str, every["role_"].values)),
                    "correlation": every,
                }
            },
        )

    def _regions(self) -> Iterator[View]:
        found, network = self.regions, self.network
        many = int(found["count"].sum())
        rows = [
            {
                "region": place,
                "share": float(found["count"][place]) / many,
                "active": int(found["active"][place]),
                "map": found["map"][place].values.tolist(),
            }
            for place in range(min(self.settings.top, found.sizes["region"]))
        ]
        gates = network.shape.hidden * network.sequence
        yield Table.of(
            rows,
            ("region", "region", "d"),
            ("share", "share", ".2%"),
            ("open gates", lambda row: f"{row['active']} of {gates}"),
            ("the matrix it is there, a row per output", lambda row: _matrix(row["map"])),
            title=f"{found.sizes['region']} linear regions in {many:,} samples",
            caption=f"of at most 2^{gates}; {100 * float(found['active_fraction']):.1f} % of gates are open",
            sources=("regions",),
            json={
                "regions": {
                    "distinct": found.sizes["region"],
                    "samples": many,
                    "counts": found["count"],
                    "active_fraction": float(found["active_fraction"]),
                    "active_by_time": found["active_by_time"],
                    "most_log2": gates,
                    "top": rows,
                }
            },
        )
        if "exact" in self.nodes:
            yield self._map()

    def _map(self) -> View:
        """Cones of linear regions, coloured by the network's answer, or by the number of open ReLUs."""
        exact, network = self.result("exact").load(), self.network
        if network.task.is_scalar:
            open_ones = np.unpackbits(exact["pattern"].values, axis=1).sum(axis=1)
            levels, classes = np.unique(open_ones, return_inverse=True)
            names = tuple(f"{level} open gates" for level in levels.tolist())
            marked = np.zeros(len(classes), bool)
        else:
            classes = exact["said"].values
            names = tuple(f"says {i}" for i in range(network.shape.outputs))
            marked = classes != exact["target"].values
        cones = Cones(
            rays=exact["rays"].values,
            classes=classes,
            marked=marked,
            names=names,
            mark_name="wrong there",
            axes_names=tuple(f"x{i}" for i in range(network.sequence)),
            sources=("exact",),
        )
        seen = "" if network.sequence == 2 else ", seen along x0 = x1 = x2 from both sides"
        caption = (
            f"white lines part regions in which the network is one matrix; areas are probabilities{seen}"
        )
        return Figure(
            name="stoicheia_regions",
            title=f"Where {network.title} says what",
            caption=caption,
            panels=(cones,),
        )

    def _surprise(self) -> Iterator[View]:
        found, curve = self.result("surprise").load(), self.result("curve").load()
        columns = ["estimator", "description", "agreement_rate", "sigma", "selection_bits", *BY_SIGMA]
        rows = [
            row | (dict.fromkeys(("estimator", "description", "agreement_rate")) if place else {})
            for name in found["estimator"].values
            for place, row in enumerate(records(found.sel(estimator=name), "sigma", *columns))
        ]
        many = int(found.attrs["samples"])
        yield Table.of(
            rows,
            ("explanation", "estimator"),
            ("what is written down", "description"),
            ("agrees", "agreement_rate", lambda share: f"{100 * share:.1f} %"),
            ("noise", "sigma", "g"),
            ("bits told", "explanation_bits", ".0f"),
            ("bits left", "residual_surprise", ".0f"),
            ("selected", "selection_bits", ".0f"),
            ("bound", lambda row: "holds" if row["bound_satisfied"] else "fails"),
            ("of it", "tightness", ".2f"),
            ("holds up to", "covered", lambda many: f"{many:,.0f}" if np.isfinite(many) else "any number"),
            title="Surprise accounting",
            caption=f"bits left code the answers to {many:,} samples given the explanation, and grow "
            "with them; the bound holds where told and left are at most what was selected: up to so many "
            "answers",
            sources=("surprise",),
            json={"surprise": _account(found)},
        )
        yield from self._curve(curve)

    def _curve(self, curve: xr.Dataset) -> Iterator[View]:
        rising = curve.sortby("samples")
        lines = [
            Line("samples, expected", rising["baseline_expected"].values, control=True),
            Line("samples, measured", rising["baseline_mse"].values, strong=True),
        ]
        lines += [
            Line(str(name), rising["estimator_mse"].sel(estimator=name).values)
            for name in curve["estimator"].values
            if str(name) != "piecewise"  # which samples as the network does
        ]
        view = Lines(
            title="Error of an accuracy estimated from samples",
            caption="of the network, and of explanations put in its place, which end at their bias",
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
        yield from together("stoicheia_compute", f"Estimating the accuracy of {self.network.title}", view)


def _neurons(many: int) -> list[str]:
    return list(map(str, range(many)))


def _strongest(row: Any, own: int, sign: int) -> str:
    """The two neurons that a row of recurrent weights reads most, of one sign."""
    order = [int(k) for k in np.argsort(-sign * row) if k != own and sign * row[k] > 0]
    return ", ".join(f"{k} ({row[k]:+.2f})" for k in order[:2]) or "–"


def _matrix(rows: list[list[float]]) -> str:
    shown = [
        "(" + " ".join(f"{value:+.3g}" for value in row[:4]) + (" …" if len(row) > 4 else "") + ")"
        for row in rows
    ]
    return " ".join(shown[:4]) + (" …" if len(shown) > 4 else "")


def _pairs(found: xr.Dataset) -> list[dict[str, Any]]:
    """What two neurons are worth, each pair once."""
    columns = {"ablated": "pair_ablated", "delta": "pair_delta", "interaction": "interaction"}
    return [
        {"a": a, "b": b, **record(found.isel(neuron=a, neuron_=b), **columns)}
        for a, b in combinations(range(found.sizes["neuron"]), 2)
    ]


def _account(found: xr.Dataset) -> dict[str, Any]:
    """The account of every explanation, for documents."""
    names = ("estimate_accuracy", "agreement_rate", "disagreement_rate", "operations", "description")
    by_estimator = (*names, "noisy_agreement", *BY_SIGMA)
    return {
        "n_samples": int(found.attrs["samples"]),
        "param_count": int(found.attrs["param_count"]),
        "sigmas": found["sigma"],
        **{
            name: found[name]
            for name in ("model_accuracy", "chance_accuracy", "selection_bits", "noisy_accuracy")
        },
        "estimators": {
            str(name): record(found.sel(estimator=name), *by_estimator) for name in found["estimator"].values
        },
    }


def _curve_json(curve: xr.Dataset, of: str) -> list[dict[str, Any]]:
    """Errors by number of samples, with the operations they take."""
    more = ("baseline_expected", "groups") if of == "baseline" else ()
    return records(curve, "samples", "samples", f"{of}_mse", f"{of}_operations", *more)

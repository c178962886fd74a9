"""Does the residual stream return after it was pushed?

A contrastive steering vector added at one layer, and how soon later layers absorb it.

The vector of a layer is the residual state of the prompt minus that of a counterpart, at one position;
added to the prompt's own run at each layer by itself and at several strengths, it is followed through the
layers above (stages/causal/convergence.py). Told: the matrix of cosines with the undisturbed run, what became
of each push (stages/causal/absorption.py says what absorbed means), and how strength changes that at one
layer.

Control: pushes as long in random directions, at the same place, layers and strengths
(stages/causal/random_pushes.py). What is left of a push at the end stands beside what is left of them.

`feature` pushes along a feature of a dictionary in place of the contrast: what it writes to each of its
layers, by itself (stages/features/effects/pushes.py). Its control are other features of its layer, as long.

Defaults: the first shipped fact and its likest counterpart, the last position.
A target of several tokens has the probability of all its pieces, never that of its last.

`batch_file` names several experiments (convergence_batch.py). One that cannot be run is left out, with the
reason in the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from ...stages.causal.absorption import RETURNED, first_reached
from ...stages.causal.controls import chosen_at_random
from ...stages.causal.convergence import NEAR, PushedStates as Experiment, Pushes, best_layer
from ...stages.causal.draws import Draws
from ...stages.causal.random_pushes import RandomPushes
from ...stages.corpus.positions import first_difference, position_of
from ...stages.features.effects.pushes import FeaturePushes, RandomFeaturePushes
from ...stages.logits.lens import format_probability, format_text, format_token
from ...store.errors import ConfigError, MizarrError
from ..claim import Claim
from ..features.sae_features import dictionary_of
from ..material.answers import answer_pieces, counterpart, encoded, fact, named, target_json
from ..material.convergence_batch import FIELDS, read_batch
from ..material.push_fates import PushFates
from ..settings import ControlSettings, Count, FactSettings, Positive, setting
from ..views import Choice, Data, Figure, Heatmap, Line, Lines, Table, View, dash
from ..workflow import ModelWorkflow, Nodes

if TYPE_CHECKING:
    import xarray as xr

    from ...stages.features.dictionary import Dictionary
    from ...stages.features.layers.layout import FeatureId
    from ...stages.forward.architectures.architecture import Architecture

__all__ = ["Case", "PushedStatesSettings", "PushedStatesCases"]

ABSORBED = f"at most {RETURNED:.0%} of its largest distance left, from there to the end"


@dataclass(frozen=True)
class PushedStatesSettings(ControlSettings, FactSettings):
    """What `--set` can change.

    Raises ConfigError for a dictionary without a feature, and two of feature, counterparts and batch_file.
    """

    contrastive: str = setting("", "counterpart of the prompt; none: one of as many tokens")
    inject_position: int | str = setting(
        "last",
        'where the vector is added: "last", "auto" (first differing token from which a push reaches the '
        "last), an index, or a phrase",
    )
    threshold: Annotated[float, msgspec.Meta(ge=-1, le=1)] = setting(
        NEAR,
        "cosine from which on a state is near the undisturbed one; picks the layer told by strength",
    )
    max_strength: Positive = setting(6.0, "largest factor of the vector")
    strength_steps: Count = setting(12, "strengths tried, evenly spaced up to the largest")
    feature: str = setting("", "feature to push along, layer:index, in place of a counterpart")
    dictionary: str = setting("", "of the feature: directory or org/repo; none: the specimen's own")
    batch_file: str = setting("", "JSON file with several experiments, in place of prompt and contrastive")

    def __post_init__(self) -> None:
        if self.feature and (self.contrastive or self.batch_file):
            raise ConfigError("expected either a feature or counterparts to push along, found both")
        if self.dictionary and not self.feature:
            raise ConfigError("expected a feature of the dictionary, found none; name it: feature=0:128")
        if self.batch_file and (self.prompt or self.contrastive or self.target):
            raise ConfigError("expected either a batch_file or a prompt with its counterpart, found both")


@dataclass(frozen=True)
class Case:
    """A prompt, its counterpart, and the position that is steered."""

    group: str
    prompt: str
    contrastive: str
    target: str
    pieces: tuple[int, ...]
    position: int
    experiment: Experiment
    config: Architecture
    feature: FeatureId | None = None

    @property
    def what(self) -> str:
        """What it is pushed along, in words."""
        if self.feature is not None:
            return f"pushes of '{format_text(self.prompt)}' along {self.feature}"
        one, other = map(format_text, (self.prompt, self.contrastive))
        return f"pushes from {one!r} away from {other!r}"

    def first_reached(self, layer: int) -> int | None:
        """First layer after which a push after `layer` can be seen at the last position."""
        return first_reached(self.config, layer, self.position, len(self.experiment.tokens) - 1)


class PushedStatesCases(ModelWorkflow):
    """One or several prompts, each pushed at every layer."""

    name = "steering_convergence"
    question = "Does the residual stream return after it was pushed?"
    settings_type = PushedStatesSettings
    settings: PushedStatesSettings

    def plan(self) -> Nodes:
        """Of each case its pushes, the vectors they are along, and the random pushes beside them."""
        given = self.settings
        steps = given.strength_steps
        self.sweep = tuple(k * given.max_strength / steps for k in range(1, steps + 1))
        self.skipped: list[dict[str, str]] = []
        """Experiments of the batch that cannot be run: {"group", "prompt", "error"}."""
        self.cases = self._batch() if given.batch_file else [self._default()]
        nodes: Nodes = {}
        for i, case in enumerate(self.cases):
            nodes |= {
                self._named("convergence", i): self.on_model(case.experiment),
                self._named("vectors", i): self.on_model(case.experiment.contrast),
            }
            if given.controls:
                nodes[self._named("controls", i)] = self.on_model(self._controls(case.experiment))
        return nodes

    def _named(self, result: str, i: int) -> str:
        """Name of a result of case `i`."""
        return f"{result}_{i}" if self.settings.batch_file else result

    def _controls(self, chosen: Experiment) -> Draws:
        """The same pushes in random directions, at strength 1 and the largest."""
        shared = {f.name: getattr(chosen, f.name) for f in fields(Pushes)}
        shared["strengths"] = self.held_against
        given = self.settings
        if isinstance(chosen, FeaturePushes):
            about = {name: getattr(chosen, name) for name in ("dictionary", "features", "feature")}
            total, index = self.dictionary.n_features, chosen.feature[1]
            others = chosen_at_random(range(total), given.controls, seed=given.seed, without=[index])
            return Draws(tuple(RandomFeaturePushes(**shared, **about, draw=other) for other in others))
        seeds = np.random.SeedSequence(given.seed).generate_state(given.controls)
        return Draws(tuple(RandomPushes(**shared, draw=int(draw)) for draw in seeds))

    @property
    def held_against(self) -> tuple[float, ...]:
        """Strengths of the pushes that are held against random ones."""
        return tuple(sorted({1.0, self.sweep[-1]}))

    def _default(self) -> Case:
        given = self.settings
        prompt, target = fact(given.model, given.prompt, given.target)
        if given.feature:
            return self._along_feature(prompt, target)
        other = given.contrastive or counterpart(self.subject, given.model, prompt, target)
        return self._case("", prompt, other, target, given.inject_position)

    def _batch(self) -> list[Case]:
        found = []
        for entry in read_batch(Path(self.settings.batch_file)):
            try:
                found.append(self._case(*(entry[name] for name in FIELDS)))
            except MizarrError as error:
                self.skipped.append({"group": entry["group"], "prompt": entry["prompt"], "error": str(error)})
        if not found:
            raise ConfigError(
                f"expected an experiment that can be run in {self.settings.batch_file}, found none; the "
                f"first says: {self.skipped[0]['error']}"
            )
        return found

    def _case(self, group: str, prompt: str, contrastive: str, target: str, where: int | str) -> Case:
        encoding, other = (encoded(self.subject, text) for text in (prompt, contrastive))
        ids, others = tuple(encoding.ids), tuple(other.ids)
        if where == "last":
            position, mirrored = len(ids) - 1, len(others) - 1
        else:
            differs = first_difference(ids, others)  # refuses prompts of different length
            reaching = self._reaching(ids, others, differs) if where == "auto" else None
            position = mirrored = position_of(encoding, where) if reaching is None else reaching
        pieces = answer_pieces(self.subject, prompt, target)
        experiment = Experiment(
            ids,
            (ids,),
            (others,),
            (position,),
            (mirrored,),
            position=position,
            strengths=tuple(sorted({1.0, *self.sweep})),
            target=pieces,
        )
        experiment.cells(self.subject.config)  # refuse wrong settings now, before anything runs
        return Case(group, prompt, contrastive, target, pieces, position, experiment, self.subject.config)

    @cached_property
    def dictionary(self) -> Dictionary:
        """Of the feature. Raises ConfigError or DictionaryError where there is none that fits."""
        found = dictionary_of(self.settings.dictionary, self.settings.model, "clt")
        found.require_fit(self.subject.config, self.subject.name)
        return found

    def _along_feature(self, prompt: str, target: str) -> Case:
        """The prompt, pushed along a feature at every layer it writes to."""
        given, encoding = self.settings, encoded(self.subject, prompt)
        if given.inject_position == "auto":
            raise ConfigError(
                "expected a position or a phrase to push at, found 'auto', which needs a counterpart"
            )
        ids, feature = tuple(encoding.ids), self.dictionary.feature(given.feature)
        position = position_of(encoding, given.inject_position)
        pieces = answer_pieces(self.subject, prompt, target)
        experiment = FeaturePushes(
            ids,
            position=position,
            strengths=tuple(sorted({1.0, *self.sweep})),
            layers=tuple(self.dictionary.targets(feature.layer)),
            target=pieces,
            dictionary=self.dictionary.name,
            features=self.dictionary.identity,
            feature=(feature.layer, feature.index),
        )
        experiment.cells(self.subject.config)
        return Case("", prompt, "", target, pieces, position, experiment, self.subject.config, feature)

    def _reaching(self, ids: Sequence[int], others: Sequence[int], first: int) -> int:
        """The first position, from `first` on, where the prompts differ and a push after layer 0 can be seen
        at the last; the last itself where windows hide all others."""
        last, config = len(ids) - 1, self.subject.config
        for place in range(first, last):
            if ids[place] != others[place] and first_reached(config, 0, place, last) is not None:
                return place
        return last

    def found(self, i: int = 0) -> xr.Dataset:
        """What came out for case `i`, [layer, strength, read_layer]."""
        return self.result(self._named("convergence", i)).load()

    @cached_property
    def fates(self) -> list[PushFates]:
        """What became of the pushes of each case."""
        found = []
        for i, case in enumerate(self.cases):
            similarity = self.found(i)["similarity"]
            vectors, controls = self.result(self._named("vectors", i)).load(), self._named("controls", i)
            drawn = self.result(controls).load() if controls in self.nodes else None
            first = {layer: case.first_reached(layer) for layer in similarity["layer"].values.tolist()}
            of = PushFates.of
            if case.feature is not None:
                of = f"other features of layer {case.feature.layer}, as long, at the same place"
            strengths = self.held_against
            found.append(PushFates(case.what, similarity, vectors, strengths, drawn, first, of))
        return found

    def document(self, i: int) -> dict[str, Any]:
        """Case `i` in the fields of candle-mi's example.

        `best_injection_layer`: the deepest after whose push of strength 1 a state is near the undisturbed
        one, else the one of smallest KL. `absorption_layer`, `fate`, `share_left`: absorption.py.
        """
        case, found, fates = self.cases[i], self.found(i), self.fates[i]
        matrix = found["similarity"].sel(strength=1.0).transpose("layer", "read_layer").values

        def pushed(layer: int, strength: float) -> dict[str, Any]:
            here, became = found.sel(layer=layer, strength=strength), fates.of_all[layer, strength]
            return {
                "p_target": float(np.exp(here["target_logprob"])),
                "kl_divergence": float(here["kl"]),
                "absorption_layer": became.layer,
                "fate": became.word,
                "share_left": became.left,
            }

        layers = {layer: pushed(layer, 1.0) for layer in found["layer"].values.tolist()}
        best = best_layer(
            dict(zip(layers, matrix, strict=True)),
            {layer: one["kl_divergence"] for layer, one in layers.items()},
            self.settings.threshold,
        )
        ids, chances = (found[name].values.tolist()[:5] for name in ("baseline_id", "baseline_probability"))
        return {
            **{name: self.subject.about[name] for name in ("model_id", "n_layers", "hidden_size")},
            **target_json(self.subject, case.target, case.pieces),
            "prompt": case.prompt,
            "contrastive_prompt": case.contrastive or None,
            **self._feature_json(case),
            "inject_position": case.position,
            "baseline_p_target": float(np.exp(found["baseline_target_logprob"])),
            "baseline_top5": [
                {"token": token, "token_id": one, "probability": p}
                for token, one, p in zip(named(self.subject, ids), ids, chances, strict=True)
            ],
            "convergence_matrix": matrix,
            "label": fates.label,
            "layer_summaries": [{"injection_layer": layer, **one} for layer, one in layers.items()],
            "best_injection_layer": best,
            "strength_sweep": [{"strength": strength, **pushed(best, strength)} for strength in self.sweep],
            "threshold": self.settings.threshold,
        }

    def _feature_json(self, case: Case) -> dict[str, Any]:
        """The feature pushed along; nothing without."""
        if case.feature is None:
            return {}
        return {"feature": asdict(case.feature), "clt_repo": self.dictionary.name}

    def views(self) -> Iterator[View]:
        """The first case in tables and curves; a figure per case, and for a batch a line."""
        told = [self.document(i) for i in range(len(self.cases))]
        yield from self._tables(told[0])
        yield self._batch_table(told) if self.settings.batch_file else Data(json=told[0])
        matrices = [self._matrix(i, one["label"]) for i, one in enumerate(told)]
        yield matrices[0]
        kl = self.found()["kl"].rename(layer="pushed_at").transpose("pushed_at", "strength")
        yield Lines.of(kl, "How far the answer moves", low=0.0)
        for i, (case, matrix) in enumerate(zip(self.cases, matrices, strict=True)):
            yield Figure(
                name="steering_convergence" + (f"_{i}" if self.settings.batch_file else ""),
                title=self._pushed(case),
                panels=(matrix, *self._strengths(i, told[i]["best_injection_layer"])),
            )

    def claims(self) -> Iterator[Claim]:
        """The share of their largest distance that the pushes of each case keep to the end."""
        return (claim for fates in self.fates if (claim := fates.claim) is not None)

    def claims_caption(self) -> str:
        """Which cases have no verdict, and why."""
        return "; ".join(
            f"no verdict on {fates.what}: {' or '.join(fates.words)}"
            for fates in self.fates
            if fates.claim is None
        )

    def _pushed(self, case: Case, place: str = "") -> str:
        """Model, direction and position of a case, for titles."""
        token = named(self.subject, case.experiment.tokens)[case.position]
        one, other, at = format_text(case.prompt), format_text(case.contrastive), format_token(token)
        what = f"{one!r} minus {other!r}" if case.feature is None else f"{case.feature} in {one!r}"
        return f"{self.subject.name}: {what}, added at {at!r}{place}"

    def _matrix(self, i: int, told: str) -> Choice:
        """Cosines of case `i` by layer pushed and layer read, a grid per strength."""
        found, fates = self.found(i)["similarity"].rename(layer="pushed_at"), self.fates[i].of_all
        found = found.where(found["read_layer"] >= found["pushed_at"])
        low, last = float(found.min()), found.sizes["read_layer"] - 1

        def grid(strength: float) -> Heatmap:
            here = found.sel(strength=strength).transpose("pushed_at", "read_layer")
            back = [fates[layer, strength].layer for layer in here["pushed_at"].values.tolist()]
            framed = tuple((row, start, row, last) for row, start in enumerate(back) if start is not None)
            return Heatmap.of(
                here, low=low, high=1.0, upward=True, row_name="layer pushed", column_name="layer read",
                framed=framed, frame_name="absorbed",
            )  # fmt: skip

        return Choice.of(
            "strength",
            found["strength"].values.tolist(),
            grid,
            start=1.0,
            title="How far from its way is a state that was pushed?",
            caption="Cosine with the undisturbed run, by the layer pushed and the layer read above it; "
            f"{told}. Framed: absorbed, {ABSORBED}.",
        )

    def _strengths(self, i: int, best: int) -> tuple[Lines, Lines]:
        """At the best layer of case `i`, cosines above it and KL by strength."""
        row, threshold = self.found(i).sel(layer=best, strength=list(self.sweep)), self.settings.threshold
        above = row["similarity"].transpose("strength", "read_layer").isel(read_layer=slice(best, None))
        told = f"dashed: {threshold:g}, from which on a state is near the undisturbed one"
        cosines = Lines.of(above, f"A push at layer {best}, by strength", told, y_name="cosine")
        near = Line(f"near, {threshold:g}", np.full(len(cosines.x), threshold), control=True)
        title, kl = "What it does to the answer", row["kl"].expand_dims("layer")
        answer = Lines.of(kl, title, f"at layer {best}", low=0.0)
        return replace(cosines, lines=(*cosines.lines, near)), answer

    def _tables(self, told: dict[str, Any]) -> Iterator[Table]:
        """The layers of the first case, and its strengths at the best layer."""
        case, last = self.cases[0], self.found().sel(strength=1.0).isel(read_layer=-1)

        def became(one: dict[str, Any]) -> str:
            layer = one["absorption_layer"]
            return str(one["fate"]) if layer is None else f"absorbed at layer {layer}"

        def target(one: dict[str, Any]) -> str:
            return dash(one["p_target"], format_probability)

        def at_layer(name: str) -> Callable[[dict[str, Any]], float]:
            return lambda one: float(last[name].sel(layer=one["injection_layer"]))

        yield Table.of(
            told["layer_summaries"],
            ("layer", "injection_layer", "d"),
            ("what became of it", became, str),
            ("cosine at the end", at_layer("similarity"), ".4f"),
            ("KL", "kl_divergence", ".4f"),
            ("p(target)", target, str),
            ("length", at_layer("vector_norm"), ".2f"),
            ("of the state", at_layer("state_norm"), ".2f"),
            title=self._pushed(case, f" ({case.position})"),
            caption=f"{told['label']}; absorbed: {ABSORBED}; undisturbed p(target) "
            f"{dash(told['baseline_p_target'], format_probability)}",
        )
        yield Table.of(
            told["strength_sweep"],
            ("strength", "strength", "g"),
            ("what became of it", became, str),
            ("KL", "kl_divergence", ".4f"),
            ("p(target)", target, str),
            title=f"Strength of the push at layer {told['best_injection_layer']}",
            caption="the deepest layer after whose push of strength 1 a state has a cosine of at least "
            f"{self.settings.threshold:g} again, else the one of smallest KL",
        )

    def _batch_table(self, told: list[dict[str, Any]]) -> Table:
        """A line per case; which were left out."""
        results = [{"group": case.group, **one} for case, one in zip(self.cases, told, strict=True)]
        left_out = [f"{format_text(one['group'])}: {format_text(one['error'])}" for one in self.skipped]

        def absorbed(one: dict[str, Any]) -> str:
            layers = [layer["absorption_layer"] for layer in one["layer_summaries"]]
            return f"{sum(layer is not None for layer in layers)}/{len(layers)}"

        return Table.of(
            results,
            ("group", lambda one: format_text(one["group"])),
            ("prompt", lambda one: format_text(one["prompt"])),
            ("matrix", "label"),
            ("absorbed", absorbed),
            ("best layer", "best_injection_layer"),
            title=f"{len(self.cases)} experiments",
            caption="left out: " + "; ".join(left_out) if left_out else "none left out",
            json={"results": results, "skipped": self.skipped},
        )

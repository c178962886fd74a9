"""Does the residual stream return after it was pushed?

A contrastive steering vector is added at one layer (a "push"), and the deviation is followed through later
layers.

The vector of a layer is the residual state of the prompt minus that of a counterpart prompt, at one position.
It is added to the prompt's run at one layer at a time and at several strengths
(stages/causal/convergence.py). Reported are the cosines with the undisturbed run by layer pushed and layer
read, the outcome of each push (stages/causal/pushes/absorption.py defines "absorbed"), and the dependence on
strength at one layer.

The claim is about the share of its largest distance from the undisturbed run that a push keeps at the last
layer. Controls are pushes of the same norm in random directions, at the same position, layers and strengths
(stages/causal/pushes/random_pushes.py).

`feature` pushes along a feature of a dictionary instead: its decoder vector at each layer that it writes to,
one layer at a time (stages/features/effects/pushes.py). Controls are other features of its layer, with the
same norm.

Defaults: the first shipped fact, its most similar counterpart, and the last position. The probability of a
target of several tokens is that of all of its tokens.

`batch_file` names several experiments (convergence_batch.py). An experiment that cannot be run is left out,
with the reason in the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from ...stages.causal.controls import chosen_at_random
from ...stages.causal.convergence import NEAR, PushedStates as Experiment, Pushes, best_layer
from ...stages.causal.draws import Draws
from ...stages.causal.pushes.absorption import RETURNED, first_reached
from ...stages.causal.pushes.random_pushes import RandomPushes
from ...stages.corpus.positions import first_difference, position_of
from ...stages.features.effects.pushes import FeaturePushes, RandomFeaturePushes
from ...stages.logits.lens import format_probability, format_text
from ...store.errors import ConfigError, MizarrError
from ..claim import Claim
from ..material.answers import answer_pieces, counterpart, encoded, fact, target_json
from ..material.convergence_batch import FIELDS, read_batch
from ..material.dictionaries import fitting_dictionary
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

ABSORBED = (
    f"at most {RETURNED:.0%} of its largest distance from the undisturbed run is left, from that layer to "
    "the last"
)
"""Definition of an absorbed push, for captions."""


@dataclass(frozen=True)
class PushedStatesSettings(ControlSettings, FactSettings):
    """Settings of the workflow `steering_convergence`: the prompt, the direction of pushes, and their
    strengths.

    Raises:
        ConfigError: `dictionary` is set without `feature`, or two of feature, counterpart and batch_file are
            set.
    """

    contrastive: str = setting("", "counterpart prompt; none: a similar one with as many tokens")
    inject_position: int | str = setting(
        "last",
        'position at which the vector is added: "last", "auto" (first differing token from which a push '
        "reaches the last token), an index, or a phrase",
    )
    threshold: Annotated[float, msgspec.Meta(ge=-1, le=1)] = setting(
        NEAR,
        "least cosine of a state near the undisturbed one; selects the layer shown by strength",
    )
    max_strength: Positive = setting(6.0, "largest factor of the vector")
    strength_steps: Count = setting(12, "number of strengths, evenly spaced up to the largest")
    feature: str = setting("", "feature to push along, layer:index, in place of a counterpart")
    dictionary: str = setting(
        "", "dictionary of the feature: directory or org/repo; none: the specimen's own"
    )
    batch_file: str = setting("", "JSON file with several experiments, instead of prompt and contrastive")

    def __post_init__(self) -> None:
        if self.feature and (self.contrastive or self.batch_file):
            raise ConfigError(
                "expected either feature, or contrastive or batch_file, as the direction of pushes, found "
                "both; leave one out"
            )
        if self.dictionary and not self.feature:
            raise ConfigError("expected a feature of the dictionary, found none; name it: feature=0:128")
        if self.batch_file and (self.prompt or self.contrastive or self.target):
            raise ConfigError(
                "expected either batch_file, or prompt, contrastive and target, found both; leave one out"
            )


@dataclass(frozen=True)
class Case:
    """Prompt, direction of the push, and experiment that pushes the prompt's states after every layer."""

    group: str
    """Name of the group of experiments in the batch file; "" without a batch file."""
    prompt: str
    """Prompt that is pushed."""
    contrastive: str
    """Counterpart prompt, whose state is subtracted; "" for pushes along a feature."""
    target: str
    """Answer whose probability is measured; may be empty."""
    pieces: tuple[int, ...]
    """Token ids of the target."""
    position: int
    """Position at which the vector is added."""
    experiment: Experiment
    """The pushes, with their vectors."""
    config: Architecture
    """Architecture of the model."""
    feature: FeatureId | None = None
    """Feature whose decoder vector is added; None for pushes away from a counterpart prompt."""

    @property
    def description(self) -> str:
        """Pushes and their direction in words, as claims begin: "pushes from 'A' away from 'B'"."""
        if self.feature is not None:
            return f"pushes of '{format_text(self.prompt)}' along {self.feature}"
        prompt, contrastive = map(format_text, (self.prompt, self.contrastive))
        return f"pushes from {prompt!r} away from {contrastive!r}"

    def first_reached(self, layer: int) -> int | None:
        """First layer after which a push after `layer` can affect the last position; None if none can."""
        return first_reached(self.config, layer, self.position, len(self.experiment.tokens) - 1)


class PushedStatesCases(ModelWorkflow):
    """Workflow that adds a steering vector after each layer of a prompt, or of each prompt of a batch file,
    and follows how long its effect lasts."""

    name = "steering_convergence"
    question = "Does the residual stream return after it was pushed?"
    settings_type = PushedStatesSettings
    settings: PushedStatesSettings

    def plan(self) -> Nodes:
        """Nodes of each case: its pushes, their vectors, and control pushes in random directions."""
        settings = self.settings
        steps = settings.strength_steps
        # From 1: strength 0 is the undisturbed run, which every push is compared with.
        self.sweep = tuple(k * settings.max_strength / steps for k in range(1, steps + 1))
        self.skipped: list[dict[str, str]] = []
        """Experiments of the batch that cannot be run: {"group", "prompt", "error"}."""
        self.cases = self._batch() if settings.batch_file else [self._default()]
        nodes: Nodes = {}
        for i, case in enumerate(self.cases):
            nodes |= {
                self._named("convergence", i): self.on_model(case.experiment),
                self._named("vectors", i): self.on_model(case.experiment.contrast),
            }
            if settings.controls:
                nodes[self._named("controls", i)] = self.on_model(self._controls(case.experiment))
        return nodes

    def _named(self, result: str, i: int) -> str:
        """Name of the result node of case `i`: with the suffix "_i" for a batch file."""
        return f"{result}_{i}" if self.settings.batch_file else result

    def _controls(self, experiment: Experiment) -> Draws:
        """Experiment with control pushes of the same norm: in random directions, or along random features of
        the same layer."""
        # The counterpart stays among the fields: random directions take the norm of its vector.
        shared = {f.name: getattr(experiment, f.name) for f in fields(Pushes)}
        shared["strengths"] = self.control_strengths
        settings = self.settings
        if isinstance(experiment, FeaturePushes):
            about = {name: getattr(experiment, name) for name in ("dictionary", "features", "feature")}
            total, index = self.dictionary.n_features, experiment.feature[1]
            drawn = chosen_at_random(range(total), settings.controls, seed=settings.seed, without=[index])
            return Draws(tuple(RandomFeaturePushes(**shared, **about, draw=feature) for feature in drawn))
        # Independent seeds, so that neighbouring settings.seed share no draws.
        seeds = np.random.SeedSequence(settings.seed).generate_state(settings.controls)
        return Draws(tuple(RandomPushes(**shared, draw=int(draw)) for draw in seeds))

    @property
    def control_strengths(self) -> tuple[float, ...]:
        """Strengths at which pushes are compared with random ones: 1 and the largest."""
        return tuple(sorted({1.0, self.sweep[-1]}))

    def _default(self) -> Case:
        """Case that the settings describe without a batch file."""
        settings = self.settings
        prompt, target = fact(settings.model, settings.prompt, settings.target)
        if settings.feature:
            return self._along_feature(prompt, target)
        contrastive = settings.contrastive or counterpart(self.subject, settings.model, prompt, target)
        return self._case("", prompt, contrastive, target, settings.inject_position)

    def _batch(self) -> list[Case]:
        """Cases of the batch file; experiments that cannot be run go to `skipped`. Raises ConfigError if no
        case is left."""
        cases = []
        for entry in read_batch(Path(self.settings.batch_file)):
            try:
                cases.append(self._case(*(entry[name] for name in FIELDS)))
            except MizarrError as error:
                # One pair that does not fit the model must not end a batch of hundreds.
                self.skipped.append({"group": entry["group"], "prompt": entry["prompt"], "error": str(error)})
        if not cases:
            raise ConfigError(
                f"expected an experiment that can be run in {self.settings.batch_file}, found none; the "
                f"error of the first: {self.skipped[0]['error']}"
            )
        return cases

    def _case(self, group: str, prompt: str, contrastive: str, target: str, where: int | str) -> Case:
        """Case of pushing a prompt away from its counterpart.

        Arguments:
            group: name of the group in the batch; "" without one.
            prompt: prompt that is pushed.
            contrastive: its counterpart.
            target: answer; may be empty.
            where: position at which the vector is added, see the setting inject_position.
        """
        encoding, other_encoding = (encoded(self.subject, text) for text in (prompt, contrastive))
        ids, other_ids = tuple(encoding.ids), tuple(other_encoding.ids)
        if where == "last":
            position, other_position = len(ids) - 1, len(other_ids) - 1
        else:
            difference = first_difference(ids, other_ids)  # raises for prompts of different lengths
            reaching = self._reaching(ids, other_ids, difference) if where == "auto" else None
            position = other_position = position_of(encoding, where) if reaching is None else reaching
        pieces = answer_pieces(self.subject, prompt, target)
        experiment = Experiment(
            ids,
            (ids,),
            (other_ids,),
            (position,),
            (other_position,),
            position=position,
            # Strength 1 is always run: the table by layer and the choice of the best layer use it.
            strengths=tuple(sorted({1.0, *self.sweep})),
            target=pieces,
        )
        # Raises for wrong settings before anything runs.
        experiment.cells(self.subject.config)
        return Case(group, prompt, contrastive, target, pieces, position, experiment, self.subject.config)

    @cached_property
    def dictionary(self) -> Dictionary:
        """Dictionary of the feature. Raises ConfigError or DictionaryError if none fits the model."""
        return fitting_dictionary(self.subject, self.settings.dictionary, self.settings.model, "clt")

    def _along_feature(self, prompt: str, target: str) -> Case:
        """Case of pushing a prompt along a feature, after every layer that the feature writes to."""
        settings, encoding = self.settings, encoded(self.subject, prompt)
        if settings.inject_position == "auto":
            raise ConfigError(
                "expected inject_position to be a position or a phrase of the prompt, found 'auto', which "
                "needs a counterpart prompt instead of a feature; set inject_position=last"
            )
        ids, feature = tuple(encoding.ids), self.dictionary.feature(settings.feature)
        position = position_of(encoding, settings.inject_position)
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

    def _reaching(self, ids: Sequence[int], other_ids: Sequence[int], start: int) -> int:
        """The first position, from `start` on, where the prompts differ and from which a push after layer 0
        can reach the last position through attention windows; else the last position."""
        last, config = len(ids) - 1, self.subject.config
        for position in range(start, last):
            is_different = ids[position] != other_ids[position]
            if is_different and first_reached(config, 0, position, last) is not None:
                return position
        return last

    def push_effects(self, i: int = 0) -> xr.Dataset:
        """Result of the pushes of case `i`, [layer, strength, read_layer], in memory."""
        return self.result(self._named("convergence", i)).load()

    @cached_property
    def fates(self) -> list[PushFates]:
        """Outcomes of each case's pushes and control pushes."""
        fates = []
        for i, case in enumerate(self.cases):
            similarity = self.push_effects(i)["similarity"]
            vectors, controls = self.result(self._named("vectors", i)).load(), self._named("controls", i)
            drawn = self.result(controls).load() if controls in self.nodes else None
            reached = {layer: case.first_reached(layer) for layer in similarity["layer"].values.tolist()}
            of = PushFates.of
            if case.feature is not None:
                of = f"other features of layer {case.feature.layer} with the same norm, at the same position"
            strengths = self.control_strengths
            fates.append(PushFates(case.description, similarity, vectors, strengths, drawn, reached, of))
        return fates

    def document(self, i: int) -> dict[str, Any]:
        """JSON document of case `i`, in the fields of candle-mi's example; the tables read it too.

        `best_injection_layer`: the deepest layer whose push of strength 1 is followed by a state near the
        undisturbed one, else the layer with the smallest KL. `absorption_layer`, `fate` and `share_left` are
        defined in absorption.py.
        """
        case, effects, fates = self.cases[i], self.push_effects(i), self.fates[i]
        matrix = effects["similarity"].sel(strength=1.0).transpose("layer", "read_layer").values

        def pushed(layer: int, strength: float) -> dict[str, Any]:
            push, fate = effects.sel(layer=layer, strength=strength), fates.of_all[layer, strength]
            return {
                "p_target": float(np.exp(push["target_logprob"])),
                "kl_divergence": float(push["kl"]),
                "absorption_layer": fate.layer,
                "fate": fate.word,
                "share_left": fate.left,
            }

        layers = {layer: pushed(layer, 1.0) for layer in effects["layer"].values.tolist()}
        best = best_layer(
            dict(zip(layers, matrix, strict=True)),
            {layer: push["kl_divergence"] for layer, push in layers.items()},
            self.settings.threshold,
        )
        ids, probabilities = (
            effects[name].values.tolist()[:5] for name in ("baseline_id", "baseline_probability")
        )
        return {
            **{name: self.subject.about[name] for name in ("model_id", "n_layers", "hidden_size")},
            **target_json(self.subject, case.target, case.pieces),
            "prompt": case.prompt,
            "contrastive_prompt": case.contrastive or None,
            **self._feature_json(case),
            "inject_position": case.position,
            "baseline_p_target": float(np.exp(effects["baseline_target_logprob"])),
            "baseline_top5": [
                {"token": token, "token_id": token_id, "probability": p}
                for token, token_id, p in zip(self.subject.token_texts(ids), ids, probabilities, strict=True)
            ],
            "convergence_matrix": matrix,
            "label": fates.label,
            "layer_summaries": [{"injection_layer": layer, **push} for layer, push in layers.items()],
            "best_injection_layer": best,
            "strength_sweep": [{"strength": strength, **pushed(best, strength)} for strength in self.sweep],
            "threshold": self.settings.threshold,
        }

    def _feature_json(self, case: Case) -> dict[str, Any]:
        """JSON fields of the feature that a case pushes along; empty for other cases."""
        if case.feature is None:
            return {}
        return {"feature": asdict(case.feature), "clt_repo": self.dictionary.name}

    def views(self) -> Iterator[View]:
        """Views in reading order: tables and curves of the first case, a table of all cases of a batch, and a
        figure per case."""
        documents = [self.document(i) for i in range(len(self.cases))]
        yield from self._tables(documents[0])
        yield self._batch_table(documents) if self.settings.batch_file else Data(json=documents[0])
        matrices = [self._matrix(i, document["label"]) for i, document in enumerate(documents)]
        yield matrices[0]
        kl = self.push_effects()["kl"].rename(layer="pushed_at").transpose("pushed_at", "strength")
        yield Lines.of(
            kl,
            "Effect on the next-token distribution",
            "x: strength of the push. y: KL(undisturbed run || pushed run) of the next-token distribution, "
            "in nats. One curve per layer after which the push is made.",
            low=0.0,
        )
        for i, (case, matrix) in enumerate(zip(self.cases, matrices, strict=True)):
            yield Figure(
                name="steering_convergence" + (f"_{i}" if self.settings.batch_file else ""),
                title=self._pushed(case),
                panels=(matrix, *self._strengths(i, documents[i]["best_injection_layer"])),
            )

    def claims(self) -> Iterator[Claim]:
        """Claims, one per case with a verdict, about the share of its largest distance from the undisturbed
        run that a push keeps at the last layer."""
        return (claim for fates in self.fates if (claim := fates.claim) is not None)

    def claims_caption(self) -> str:
        """Caption of the claims: definition of a push, and the cases without a verdict."""
        unclaimed = (
            f" No verdict on {fates.text}: {' or '.join(fates.words)}."
            for fates in self.fates
            if fates.claim is None
        )
        return (
            "A push adds a vector to the residual stream at one position after one layer. The claim: how "
            f"much of its effect is left at the last layer, compared with control pushes.{''.join(unclaimed)}"
        )

    def _pushed(self, case: Case, suffix: str = "") -> str:
        """Title of a case: model, direction and position of its pushes, followed by `suffix`."""
        (token,) = self.subject.token_labels([case.experiment.tokens[case.position]])
        prompt, contrastive = format_text(case.prompt), format_text(case.contrastive)
        vector = (
            f"{prompt!r} minus {contrastive!r}" if case.feature is None else f"{case.feature} in {prompt!r}"
        )
        return f"{self.subject.name}: {vector}, added at {token!r}{suffix}"

    def _matrix(self, i: int, label: str) -> Choice:
        """Heatmaps of case `i`, one per strength: cosine with the undisturbed run by layer pushed and layer
        read. label: outcome of all pushes."""
        cosines, fates = self.push_effects(i)["similarity"].rename(layer="pushed_at"), self.fates[i].of_all
        # A push after a layer cannot change the states before it.
        cosines = cosines.where(cosines["read_layer"] >= cosines["pushed_at"])
        low, last = float(cosines.min()), cosines.sizes["read_layer"] - 1

        def grid(strength: float) -> Heatmap:
            shown = cosines.sel(strength=strength).transpose("pushed_at", "read_layer")
            absorbed = [fates[layer, strength].layer for layer in shown["pushed_at"].values.tolist()]
            framed = tuple((row, start, row, last) for row, start in enumerate(absorbed) if start is not None)
            return Heatmap.of(
                shown, low=low, high=1.0, upward=True, row_name="layer pushed", column_name="layer read",
                framed=framed, frame_name="absorbed",
            )  # fmt: skip

        return Choice.of(
            "strength",
            cosines["strength"].values.tolist(),
            grid,
            start=1.0,
            title="How far from the undisturbed run is a state after a push?",
            caption="Each cell: cosine between the residual states of the pushed and of the undisturbed run. "
            "Row: layer after which the push is made; column: later layer in which states are compared. "
            f"Outcome of all pushes: {label}. Framed: the push is absorbed, i.e. {ABSORBED}.",
        )

    def _strengths(self, i: int, best: int) -> tuple[Lines, Lines]:
        """Curves of case `i` for pushes after layer `best`: cosines with the undisturbed run in later layers
        by strength, and KL by strength."""
        row, threshold = (
            self.push_effects(i).sel(layer=best, strength=list(self.sweep)),
            self.settings.threshold,
        )
        above = row["similarity"].transpose("strength", "read_layer").isel(read_layer=slice(best, None))
        caption = (
            f"x: layer, from the push (after layer {best}) on. y: cosine between pushed and undisturbed "
            f"states. One curve per strength of the push. Dashed: {threshold:g}, above which a state counts "
            "as near the undisturbed one."
        )
        cosines = Lines.of(above, f"A push after layer {best}, by strength", caption, y_name="cosine")
        near = Line(f"near, {threshold:g}", np.full(len(cosines.x), threshold), control=True)
        title, kl = "Effect on the next-token distribution", row["kl"].expand_dims("layer")
        answer = Lines.of(
            kl,
            title,
            f"x: strength of the push. y: KL(undisturbed run || run with a push after layer {best}) of the "
            "next-token distribution, in nats.",
            low=0.0,
        )
        return replace(cosines, lines=(*cosines.lines, near)), answer

    def _tables(self, document: dict[str, Any]) -> Iterator[Table]:
        """Tables of the first case: by layer at strength 1, and by strength at its best layer. document: its
        JSON document."""
        case, last = self.cases[0], self.push_effects().sel(strength=1.0).isel(read_layer=-1)

        def outcome(push: dict[str, Any]) -> str:
            layer = push["absorption_layer"]
            return str(push["fate"]) if layer is None else f"absorbed at layer {layer}"

        def target(push: dict[str, Any]) -> str:
            return dash(push["p_target"], format_probability)

        def at_layer(name: str) -> Callable[[dict[str, Any]], float]:
            return lambda push: float(last[name].sel(layer=push["injection_layer"]))

        yield Table.of(
            document["layer_summaries"],
            ("layer", "injection_layer", "d"),
            ("outcome", outcome, str),
            ("cosine at the end", at_layer("similarity"), ".4f"),
            ("KL", "kl_divergence", ".4f"),
            ("p(target)", target, str),
            ("norm of the push", at_layer("vector_norm"), ".2f"),
            ("norm of the state", at_layer("state_norm"), ".2f"),
            title=self._pushed(case, f" ({case.position})"),
            caption="One row per layer after which the vector is added, at strength 1. Cosine at the end: "
            "between the last layer's states of the pushed and of the undisturbed run. KL: between their "
            f"next-token distributions, in nats. Outcome of all pushes: {document['label']}. Absorbed: "
            f"{ABSORBED}. Nothing follows: no later layer could absorb the push. p(target) in the "
            f"undisturbed run: {dash(document['baseline_p_target'], format_probability)}.",
        )
        yield Table.of(
            document["strength_sweep"],
            ("strength", "strength", "g"),
            ("outcome", outcome, str),
            ("KL", "kl_divergence", ".4f"),
            ("p(target)", target, str),
            title=f"Pushes after layer {document['best_injection_layer']}, by strength",
            caption="One row per strength, the factor of the added vector. KL: of the next-token "
            "distribution from that of the undisturbed run, in nats. The layer is the deepest one after "
            f"whose push of strength 1 some state has a cosine of at least {self.settings.threshold:g} with "
            "the undisturbed run. Without such a layer, it is the one with the smallest KL.",
        )

    def _batch_table(self, documents: list[dict[str, Any]]) -> Table:
        """Table with a row per case; the caption names experiments that were left out."""
        results = [{"group": case.group, **row} for case, row in zip(self.cases, documents, strict=True)]
        left_out = [f"{format_text(entry['group'])}: {format_text(entry['error'])}" for entry in self.skipped]

        def absorbed(row: dict[str, Any]) -> str:
            layers = [layer["absorption_layer"] for layer in row["layer_summaries"]]
            return f"{sum(layer is not None for layer in layers)}/{len(layers)}"

        return Table.of(
            results,
            ("group", lambda row: format_text(row["group"])),
            ("prompt", lambda row: format_text(row["prompt"])),
            ("outcome", "label"),
            ("layers absorbed", absorbed),
            ("best layer", "best_injection_layer"),
            title=f"{len(self.cases)} experiments of the batch file",
            caption="One row per experiment. Layers absorbed: number of layers after which a push is "
            f"absorbed, i.e. {ABSORBED}. Best layer: the one of the figure by strength. "
            + ("Left out: " + "; ".join(left_out) if left_out else "No experiment was left out."),
            json={"results": results, "skipped": self.skipped},
        )

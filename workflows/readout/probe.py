"""At which layer can a label be read linearly from the residual stream?

Linear probes on stored activations, with a shuffled control.

Captures a state per layer and fits a linear probe to each: logistic regression for labels, ridge regression
for numbers, tested on prompts that were not fitted (stages/geometry/probe.py).

Defaults: prose wrapped at several widths, of which the model knows only what it has read: how many characters
into its line a token starts, and whether the line breaks next (probe_targets.py). Labels of one's own come
from a file.

That a probe reads something off a state does not say that the model does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ...stages.forward.text.prompts import check_prompts
from ...stages.geometry.probe import FEWEST, PENALTIES, probe
from ...store.errors import ConfigError, PromptError, nearest
from ..labelled import column, records
from ..material.probe_targets import TARGETS, Target, read_labels, thinned, wrapped_prose, wrapped_targets
from ..settings import AtLeastTwo, ModelSettings, Natural, setting
from ..subject import read_texts
from ..views import Data, Line, Lines, Table, View, together
from ..workflow import ModelWorkflow, Nodes

if TYPE_CHECKING:
    import xarray as xr

    from ...store import PackedTokens

__all__ = ["Probe", "ProbeSettings"]

TOLD = {
    "character_count": "characters since the line began",
    "line_break": "whether the line breaks next",
}
"""Targets in words."""
LOWEST = -0.5
"""Where a drawing of R² ends, so that one shuffled layer far below zero does not flatten the rest."""


@dataclass(frozen=True)
class ProbeSettings(ModelSettings):
    """What `--set` can change.

    Raises ConfigError for targets there are not, and neither targets nor labels.
    """

    targets: tuple[str, ...] = setting(TARGETS, "what to read off states of wrapped prose")
    labels: str = setting("", "file of labelled texts, in place of targets of wrapped prose")
    kind: Literal["auto", "label", "number"] = setting("auto", "what the labels of the file are")
    text: str = setting("", "file, folder or glob of texts to wrap; none: the prose shipped with mizarr")
    widths: tuple[AtLeastTwo, ...] = setting((30, 40, 50, 60, 70, 80), "line widths to wrap at")
    context: Natural = setting(0, "tokens per prompt of wrapped prose; 0: the model's context, at most 256")
    point: Literal["resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out"] = setting(
        "resid_post", "state that is probed"
    )
    layers: tuple[int, ...] = setting((), "layers to probe; none means all")
    examples: Natural = setting(
        6000, "tokens used per target, at most; 0 uses all, in memory a layer at a time"
    )
    balance: bool = setting(True, "take as many examples of each label")
    test_share: float = setting(0.25, "share of the prompts that is tested, never fitted")
    penalties: tuple[float, ...] = setting(
        PENALTIES, "of squared weights; chosen on a part of the train prompts"
    )
    seed: Natural = setting(0, "of examples, splits, the shuffled control and the bootstrap")

    def __post_init__(self) -> None:
        for name in self.targets:
            if name not in TARGETS:
                near = nearest(name, TARGETS)
                hint = f"; did you mean {near!r}?" if near else "; targets of your own come from labels=FILE"
                raise ConfigError(f"expected targets among {', '.join(TARGETS)}, found {name!r}{hint}")
        if not self.targets and not self.labels:
            raise ConfigError(f"expected targets ({', '.join(TARGETS)}) or labels=FILE, found neither")


class Probe(ModelWorkflow):
    """Linear probes of every layer for one or several targets."""

    name = "probe"
    question = "At which layer can a label be read linearly from the residual stream?"
    descriptive = "How well a linear probe predicts the target from the states, beside shuffled targets."
    settings_type = ProbeSettings
    extra = "probing"
    settings: ProbeSettings

    def plan(self) -> Nodes:
        """A probe per target, on the states of all layers."""
        settings = self.settings
        tokens, targets = self._targets()
        kept, seed = settings.examples, settings.seed
        self.targets = [thinned(one, examples=kept, balance=settings.balance, seed=seed) for one in targets]
        prompt = column(tokens.prompt_of(slice(None)), "token", "prompt")
        for target in self.targets:
            held = len(np.unique(prompt.values[~np.isnan(target.values)]))
            if held < FEWEST:
                raise PromptError(
                    f"expected {target.name!r} in at least {FEWEST} prompts, to be split into train, "
                    f"validation and test, found {held}; give more or longer texts"
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

    def _targets(self) -> tuple[PackedTokens, list[Target]]:
        chosen, config = self.settings, self.subject.config
        if chosen.labels:
            tokens, target = read_labels(self.subject, chosen.labels, chosen.kind)
            check_prompts(list(tokens), config.vocab_size, config.context_length, self.subject.name)
            return tokens, [target]
        context = chosen.context or min(config.context_length, 256)
        tokens = wrapped_prose(self.subject, read_texts(chosen.text), chosen.widths, context)
        return tokens, wrapped_targets(tokens, chosen.targets)

    @cached_property
    def found(self) -> dict[str, xr.Dataset]:
        """Of each target what `stages.probe` gives, in memory."""
        return {target.name: self.result(target.name).load() for target in self.targets}

    def best(self, name: str) -> int:
        """The layer a target reads off best."""
        score = self.found[name]["score"].sel(targets="true")
        return int(score["layer"][int(score.fillna(-np.inf).argmax("layer"))])

    def views(self) -> Iterator[View]:
        """Of each target the scores by layer with their intervals, and the control."""
        model, point = self.subject.name, self.settings.point
        told = [self._told(target) for target in self.targets]
        yield Data(json={"model_id": model, "point": point, "results": told})
        curves = [_curves(one, self.found[one["target"]]) for one in told]
        alone = len(told) == 1  # then the figure's title is the panel's
        what = f"{_named(told[0])}, read" if alone else "What can be read"
        title = f"{what} off {point} of {model}, layer by layer"
        yield from together("probe", title, *curves, caption=curves[0].caption if alone else "")
        for one in told:
            yield _table(one, f"{_named(one)}, read off {point} of {model}")

    def _told(self, target: Target) -> dict[str, Any]:
        found = self.found[target.name]
        names = ("score", "low", "high", "penalty")
        scores = [records(found.sel(targets=which), "layer", *names) for which in ("true", "shuffled")]
        return {
            "target": target.name,
            "kind": target.kind,
            "measure": "accuracy" if target.classes else "R2",
            "classes": target.classes,
            "n_train": int(found["n_train"]),
            "n_test": int(found["n_test"]),
            "baseline": float(found["baseline"]),
            "best_layer": self.best(target.name),
            "layers": [
                {"layer": layer, "true": true, "shuffled": shuffled}
                for layer, true, shuffled in zip(found["layer"].values.tolist(), *scores, strict=True)
            ],
        }


def _named(told: dict[str, Any]) -> str:
    return str(TOLD.get(told["target"], told["target"]))


def _guess(told: dict[str, Any]) -> str:
    return f"always the {'commonest label' if told['kind'] == 'label' else 'mean'}"


def _measure(told: dict[str, Any]) -> str:
    return str(told["measure"]).replace("R2", "R²")


def _curves(told: dict[str, Any], found: xr.Dataset) -> Lines:
    """Scores by layer with true and shuffled targets, and what the best guess without a state scores."""
    lines = []
    for which in ("true", "shuffled"):
        score, *band = (found[name].sel(targets=which).values for name in ("score", "low", "high"))
        lines.append(Line(which, score, control=which == "shuffled", band=np.stack(band)))
    lines.append(Line(_guess(told), np.full(found.sizes["layer"], told["baseline"]), control=True))
    is_number = told["kind"] == "number"
    return Lines(
        title=_named(told),
        caption="on prompts that were not fitted; bands: 95% over these prompts",
        sources=(told["target"],),
        x=tuple(found["layer"].values.tolist()),
        x_name="layer",
        y_name=_measure(told),
        lines=tuple(lines),
        low=0.0 if is_number else None,
        high=1.0,
        floor=LOWEST if is_number else None,
    )


def _table(told: dict[str, Any], title: str) -> Table:
    """The score of every layer with its interval, and the control; the best layer in bold."""

    def interval(row: dict[str, Any]) -> str:
        return f"{row['low']:.3f} to {row['high']:.3f}"

    return Table.of(
        told["layers"],
        ("layer", "layer", "d"),
        (_measure(told), lambda row: row["true"]["score"], ".3f"),
        ("95% interval", "true", interval),
        ("shuffled", lambda row: row["shuffled"]["score"], ".3f"),
        ("95% interval", "shuffled", interval),
        ("penalty", lambda row: row["true"]["penalty"], "g"),
        strong=lambda row: row["layer"] == told["best_layer"],
        title=title,
        caption=f"{told['n_train']} tokens fitted, {told['n_test']} of other prompts tested; "
        f"{_guess(told)}: {told['baseline']:.3f}; interval: bootstrap over test prompts",
        sources=(told["target"],),
    )

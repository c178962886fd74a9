"""In which layer can it be read off the state? Linear probes on stored activations, with a shuffled control.

Captures a state per layer and fits a linear probe to each: logistic regression for labels, ridge regression
for numbers, tested on prompts that were not fitted (stages/probe.py).

Defaults: prose wrapped at several widths, of which the model knows only what it has read: how many characters
into its line a token starts, and whether the line breaks next (probe_targets.py). Labels of one's own come
from a file.

That a probe reads something off a state does not say that the model does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..stages.forward.prompts import check_prompts
from ..stages.probe import FEWEST, KINDS, PENALTIES, probe
from ..store.errors import ConfigError, PromptError, nearest
from .answers import number, plain
from .probe_targets import TARGETS, Target, read_labels, thinned, wrapped_prose, wrapped_targets
from .settings import setting
from .subject import Subject, read_texts
from .workflow import Workflow

if TYPE_CHECKING:
    import xarray as xr
    from rich.table import Table

    from ..stages.forward.model import Model
    from ..store import PackedTokens

__all__ = ["Probe", "Settings"]

POINTS = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")


@dataclass(frozen=True)
class Settings:
    """What `--set` can change."""

    model: str = setting("specimen", 'hub id, directory, or "specimen"')
    targets: tuple[str, ...] = setting(TARGETS, "what to read off states of wrapped prose")
    labels: str = setting("", "file of labelled texts, in place of targets of wrapped prose")
    kind: str = setting("auto", 'what the labels of the file are: "label", "number", or "auto"')
    text: str = setting("", "a text file, or a folder of *.txt, to wrap; none: the prose shipped with mizarr")
    widths: tuple[int, ...] = setting((30, 40, 50, 60, 70, 80), "line widths to wrap at")
    context: int = setting(0, "tokens per prompt of wrapped prose; 0: the model's context, at most 256")
    point: str = setting("resid_post", f"state that is probed: {', '.join(POINTS)}")
    layers: tuple[int, ...] = setting((), "layers to probe; none means all")
    examples: int = setting(6000, "tokens used per target, at most; 0 uses all, in memory a layer at a time")
    balance: bool = setting(True, "take as many examples of each label")
    test_share: float = setting(0.25, "share of the prompts that is tested, never fitted")
    penalties: tuple[float, ...] = setting(
        PENALTIES, "of squared weights; chosen on a part of the train prompts"
    )
    seed: int = setting(0, "of examples, splits, the shuffled control and the bootstrap")
    dtype: str = setting("float32", "what the model computes in")

    def __post_init__(self) -> None:
        for name in self.targets:
            if name not in TARGETS:
                near = nearest(name, TARGETS)
                hint = f"; did you mean {near!r}?" if near else "; targets of your own come from labels=FILE"
                raise ConfigError(f"expected targets among {', '.join(TARGETS)}, found {name!r}{hint}")
        if not self.targets and not self.labels:
            raise ConfigError(f"expected targets ({', '.join(TARGETS)}) or labels=FILE, found neither")
        if self.kind not in ("auto", *KINDS):
            raise ConfigError(f"expected kind 'auto', 'label' or 'number', found {self.kind!r}")
        if self.point not in POINTS:
            raise ConfigError(f"expected point among {', '.join(POINTS)}, found {self.point!r}")
        if not self.widths or min(self.widths) < 2:
            raise ConfigError(f"expected line widths of at least 2 characters, found {list(self.widths)}")
        if self.examples < 0:
            raise ConfigError(f"expected examples to be 0 or more, found {self.examples}")


class Probe(Workflow):
    """Linear probes of every layer for one or several targets."""

    name = "probe"
    question = "In which layer can it be read off the state?"
    settings_type = Settings

    def __init__(self, settings: Settings, model: Model | None = None) -> None:
        import xarray as xr

        super().__init__(settings)
        self.subject = Subject(model or settings.model, settings.dtype)
        tokens, targets = self._targets()
        kept, seed = settings.examples, settings.seed
        self.targets = [thinned(one, examples=kept, balance=settings.balance, seed=seed) for one in targets]
        prompt = xr.DataArray(tokens.prompt_of(slice(None)), dims="token", name="prompt")
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
        self.nodes = {
            target.name: probe.on(
                states=captured[settings.point],
                target=xr.DataArray(target.values, dims="token", name="target"),
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

    def tables(self) -> list[Table]:
        """One per target: the score of every layer with its interval, and the control."""
        return [self._table(target) for target in self.targets]

    def draw(self, folder: Path) -> list[Path]:
        """Scores by layer, a panel per target."""
        from .figures_probe import probe_page

        def page() -> Any:
            panels = [(_told(target.name), target.kind, self.found[target.name]) for target in self.targets]
            return probe_page(panels, point=self.settings.point, model=self.subject.name, footer=self.footer)

        return [self.figure(folder / "probe.png", page)]

    def to_json(self) -> dict[str, Any]:
        """Per target the scores by layer with intervals, controls and penalties."""
        return {
            **self.header(),
            "model_id": self.subject.name,
            "point": self.settings.point,
            "results": [self._target_json(target) for target in self.targets],
        }

    def _target_json(self, target: Target) -> dict[str, Any]:
        found = self.found[target.name]
        return {
            "target": target.name,
            "kind": target.kind,
            "measure": "accuracy" if target.classes else "R2",
            "classes": list(target.classes),
            "n_train": int(found["n_train"]),
            "n_test": int(found["n_test"]),
            "baseline": number(found["baseline"]),
            "best_layer": self.best(target.name),
            "layers": [
                {"layer": layer}
                | {
                    which: {
                        name: number(found[name].sel(layer=layer, targets=which))
                        for name in ("score", "low", "high", "penalty")
                    }
                    for which in ("true", "shuffled")
                }
                for layer in found["layer"].values.tolist()
            ],
        }

    def _table(self, target: Target) -> Table:
        from rich.table import Table

        found, best = self.found[target.name], self.best(target.name)
        measure = "accuracy" if target.classes else "R²"
        title = f"{plain(_told(target.name))}, read off {self.settings.point} of {self.subject.name}"
        table = Table(title=title, box=None, pad_edge=False)
        for column in ("layer", measure, "95% interval", "shuffled", "95% interval", "penalty"):
            table.add_column(column, justify="right", no_wrap=True, min_width=len(column))
        for layer in found["layer"].values.tolist():
            cells = [str(layer)]
            for which in ("true", "shuffled"):
                row = found.sel(layer=layer, targets=which)
                cells += [
                    f"{float(row['score']):.3f}",
                    f"{float(row['low']):.3f} to {float(row['high']):.3f}",
                ]
            penalty = float(found["penalty"].sel(layer=layer, targets="true"))
            table.add_row(*cells, f"{penalty:g}", style="bold" if layer == best else "")
        guess = "always the commonest label" if target.classes else "always the mean"
        table.caption = (
            f"{int(found['n_train'])} tokens fitted, {int(found['n_test'])} of other prompts tested; "
            f"{guess}: {float(found['baseline']):.3f}; interval: bootstrap over test prompts"
        )
        return table


def _told(name: str) -> str:
    """A target in words."""
    known = {
        "character_count": "characters since the line began",
        "line_break": "whether the line breaks next",
    }
    return known.get(name, name)


WORKFLOW = Probe

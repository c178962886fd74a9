"""What a model loses without some of its heads: loss on a repetition of random tokens, and on prose.

The outputs of the heads are set to zero together. On random tokens that are repeated, only the repetition
predicts the next token, so the loss there measures copying from the context (Olsson et al. 2022); the loss on
prose measures what else the model needs these heads for. The tokens are not those on which the heads were
chosen.

Controls: as many random other heads, from the layer of the earliest chosen head on. Earlier heads are left
out because the chosen heads may read them (an induction head reads previous-token heads), so that zeroing
them may break copying, too. The claim is therefore against heads of the same and later layers only.

Border: chosen heads in, experiments and claims out; runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from ...stages.causal.controls import chosen_at_random
from ...stages.causal.draws import Draws
from ...stages.evaluation.loss import CorpusLoss, over_spans
from ...stages.forward.architectures.points import HookPoint
from ...stages.forward.hooks.interventions import Zero
from ...stages.forward.hooks.spec import HookSpec
from ..claim import Claim
from ..material.line_corpus import line_corpus
from ..material.samples.repeated import RepeatedBlocks
from ..subject import read_texts

if TYPE_CHECKING:
    import xarray as xr

    from ...stages.forward.runs.experiment import Experiment
    from ..claim import ControlOptions
    from ..subject import Subject

__all__ = ["InductionKnockout"]

SEQUENCES, LENGTH = 4, 50
"""Number of sequences of random tokens, and tokens of the block that is repeated."""
PROMPTS, CONTEXT, WIDTH = 4, 100, 60
"""Number of prompts of prose, tokens of each, and characters of a line."""
MOST_CONTROLS = 20
"""Largest number of controls, each of which takes two passes over all prompts."""
NULL = "random choices of as many other heads of the same and later layers"


@dataclass(frozen=True)
class InductionKnockout:
    """Losses of a model with the outputs of some heads set to zero, and with those of random other heads."""

    subject: Subject
    """The model."""
    heads: tuple[tuple[int, int], ...]
    """(layer, head) of each head whose output is set to zero."""
    control_candidates: tuple[tuple[int, int], ...]
    """(layer, head) of the heads that controls are drawn from."""
    settings: ControlOptions
    """Number of controls, and the seed of all draws."""

    @cached_property
    def _blocks(self) -> RepeatedBlocks:
        # A seed of its own: the heads were chosen on the sequences of `settings.seed`.
        seed = self.settings.seed + 1
        room = self.subject.config.context_length - self.subject.special_tokens
        return RepeatedBlocks.of(self.subject, SEQUENCES, min(LENGTH, room // 2), seed=seed)

    @cached_property
    def _texts(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Token ids of the scored prompts: "repeated" random tokens, and "prose"."""
        context = min(CONTEXT, self.subject.config.context_length)
        prose = line_corpus(self.subject, read_texts(""), (WIDTH,), context)
        return {
            "repeated": tuple(map(tuple, self._blocks.rows)),
            "prose": tuple(tuple(row.tolist()) for row in islice(prose, PROMPTS)),
        }

    @cached_property
    def control_heads(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The heads of each control, all different: as many controls as the setting says, at most
        MOST_CONTROLS, and fewer in a model with few heads."""
        count = min(MOST_CONTROLS, self.settings.controls)
        drawn = dict[tuple[tuple[int, int], ...], None]()
        # More draws than controls, as two may choose the same heads.
        for draw in range(2 * count if len(self.control_candidates) > len(self.heads) else 0):
            seed = self.settings.seed + draw
            drawn[tuple(sorted(chosen_at_random(self.control_candidates, len(self.heads), seed=seed)))] = None
        return tuple(drawn)[:count]

    def experiments(self) -> Mapping[str, Experiment]:
        """Experiments by name: "KIND" of the unchanged model, "KIND_without" without the heads, and
        "KIND_controls", where KIND is "repeated" or "prose"; empty without controls."""
        if not self.control_heads:
            return {}
        experiments: dict[str, Experiment] = {}
        for name, prompts in self._texts.items():
            experiments[name] = CorpusLoss(prompts)
            experiments[f"{name}_without"] = CorpusLoss(prompts, hooks=_zeroed(self.heads))
            experiments[f"{name}_controls"] = Draws(
                tuple(CorpusLoss(prompts, hooks=_zeroed(heads)) for heads in self.control_heads)
            )
        return experiments

    def claims(self, results: Mapping[str, xr.Dataset]) -> Iterator[Claim]:
        """Claims on the loss on repeated tokens and on prose; results: of `experiments`, in memory."""
        names = ", ".join(f"L{layer}H{head}" for layer, head in self.heads)
        start, stop = self._blocks.start, len(self._blocks.rows[0])
        # The first token of the repetition is left out: nothing announces it.
        spans = {"repeated": (start + 1, stop), "prose": (1, max(map(len, self._texts["prose"])))}
        texts = {
            "repeated": "raises the loss on random tokens that occur for the second time",
            "prose": "raises the loss on prose by less than other heads do",
        }
        for name, span in spans.items():
            unchanged, without = (
                float(over_spans(results[result], [span])[0]) for result in (name, f"{name}_without")
            )
            controls = results[f"{name}_controls"]
            draws = [over_spans(controls.isel(draw=i), [span])[0] for i in range(controls.sizes["draw"])]
            yield Claim.against(
                f"setting the outputs of {names} to zero {texts[name]}",
                without - unchanged,
                np.array(draws) - unchanged,
                NULL,
                side="above" if name == "repeated" else "below",
                unit="nats",
                held_out=True,
                levels=(unchanged, without),
            )


def _zeroed(heads: tuple[tuple[int, int], ...]) -> HookSpec:
    """Interventions that set the outputs of heads (layer, head) to zero."""
    spec, by_layer = HookSpec(), dict[int, list[int]]()
    for layer, head in heads:
        by_layer.setdefault(layer, []).append(head)
    for layer, indices in sorted(by_layer.items()):
        spec = spec.intervene(HookPoint.z(layer), Zero(heads=tuple(sorted(indices))))
    return spec

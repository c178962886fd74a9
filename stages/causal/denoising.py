"""Masks of a text filled in, pass by pass: what a masked language model writes, and when it was sure of it.

A pass over the whole text says what stands at every mask that is left; some of them are filled, the surest
first, and the next pass reads the text with them (Ghazvininejad et al. 2019, "Mask-Predict"; Nie et al. 2025,
"Large Language Diffusion Models", section 2.4; Ye et al. 2025, "Dream 7B"). What is filled stays.

Border: token ids in, labelled arrays out; texts and words are made by whoever asks. Never imports torch until
it runs.

Axes: prompt (one cell each), position, step (a pass). Log-probabilities and entropies in nats, of the model's
own distribution at temperature 1 over all tokens; the mask itself is never filled in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...pipeline import Output
from ...store.errors import ConfigError, PromptError, nearest
from ..forward.hooks.spec import HookSpec, refuse_gradients
from ..forward.hooks.wants import Logits
from ..forward.runs.experiment import CellLabels, Experiment

if TYPE_CHECKING:
    import torch
    import xarray as xr

    from ...store.arrays import Floats
    from ..forward.architectures.architecture import Architecture
    from ..forward.hooks.cache import HookCache
    from ..forward.models.model import Model
    from ..forward.runs.run import Run

__all__ = ["ORDERS", "Denoising", "filled_by_step"]

ORDERS = ("confidence", "margin", "entropy", "position", "random")
"""Which masks are filled first: those whose token is likeliest, that are farthest above the next token, whose
distribution has the least entropy, that stand first, or any."""
_PAST = {"token_id": -1, "step_filled": -1, "best_id": -1}
"""What stands past the end of a shorter prompt or trace, where it is not NaN."""


@dataclass(frozen=True)
class Denoising(Experiment):
    """Texts whose masks are filled in.

    prompts: token ids, masks among them. mask: id of these. steps: passes at most, None for one for each
    mask; where there are fewer passes than masks, each fills as many, the first ones one more. order: one of
    `ORDERS`. temperature: 0 fills in the likeliest token; above, one drawn from softmax(logits /
    temperature), by a generator of this seed for every prompt. hooks: interventions in every pass.
    """

    name: ClassVar[str] = "denoising"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "token_id": Output(("prompt", "position"), "1", "tokens of the text at its end, -1 past it"),
        "step_filled": Output(("prompt", "position"), "1", "pass that filled a mask, -1 where none was"),
        "logprob": Output(("prompt", "position"), "nats", "of a token when it was filled in"),
        "best_id": Output(("prompt", "step", "position"), "1", "likeliest token at a mask, -1 elsewhere"),
        "best_logprob": Output(("prompt", "step", "position"), "nats", "of that token"),
        "entropy": Output(("prompt", "step", "position"), "nats", "of what is said at a mask"),
    }

    prompts: tuple[tuple[int, ...], ...]
    mask: int
    steps: int | None = None
    order: str = "confidence"
    temperature: float = 0.0
    seed: int = 0
    hooks: HookSpec | None = None

    def params(self) -> dict[str, Any]:
        """Which prompts is said by the cells; a seed nobody draws with decides nothing."""
        chosen: dict[str, Any] = {"mask": self.mask, "steps": self.steps, "order": self.order}
        if self.temperature > 0 or self.order == "random":
            chosen |= {"temperature": self.temperature, "seed": self.seed}
        return chosen | {"hooks": None if self.hooks is None else self.hooks.canonical()}

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One per prompt. Raises ConfigError for a model that predicts the next token, an unknown order,
        steps or a temperature that are none, and hooks that capture; PromptError for a prompt without a mask
        or longer than the context."""
        if config.predicts_next:
            raise ConfigError(
                f"expected a model that fills in masks, found {config.model_type}, which predicts the next "
                "token; continue the text: generate"
            )
        if self.order not in ORDERS:
            near = nearest(self.order, ORDERS)
            hint = f"did you mean {near!r}?" if near else f"there are {', '.join(ORDERS)}"
            raise ConfigError(f"denoising: no order {self.order!r} to fill masks in; {hint}")
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"expected at least 1 step, found {self.steps}; leave it out for one per mask")
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"expected a temperature >= 0, found {self.temperature}")
        if self.hooks is not None and self.hooks.num_captures:
            raise ConfigError("denoising: expected interventions alone, found captures; leave them out")
        for ids in self.prompts:
            if self.mask not in ids:
                raise PromptError(
                    f"expected a mask (id {self.mask}) in every prompt, found none in {list(ids)}"
                )
            if len(ids) > config.context_length:
                raise PromptError(
                    f"expected prompts of at most {config.context_length} tokens, masks included, found "
                    f"{len(ids)}; fill in fewer"
                )
        return [{"prompt": list(ids)} for ids in self.prompts]

    def prepare(self, model: Model) -> Model:
        """The model itself: what a pass reads depends on what the one before filled in."""
        return model

    def runs(self, prepared: Model, cell: CellLabels) -> Sequence[Run]:
        """None that could be planned ahead."""
        return []

    def measure(self, prepared: Model, cell: CellLabels, result: HookCache) -> None:
        """Never asked: nothing is planned, see `dataset`."""

    def dataset(self, prepared: Model, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """One prompt, from its masks to its last token."""
        import torch
        import xarray as xr

        ids = np.array(cell["prompt"], np.int32)
        counts = filled_by_step(int((ids == self.mask).sum()), self.steps)
        generator = torch.Generator().manual_seed(self.seed)
        trace, per_pass = (len(counts), len(ids)), np.full(len(ids), np.nan)
        filled_at, logprob = np.full(len(ids), -1, np.int32), per_pass.copy()
        best_id = np.full(trace, -1, np.int32)
        best, entropy = np.full(trace, np.nan), np.full(trace, np.nan)
        for step, count in enumerate(counts):
            places = np.flatnonzero(ids == self.mask)
            said = self._said(prepared, ids, places)
            top = said.masked_fill(torch.arange(said.shape[1]) == self.mask, float("-inf")).topk(2)
            best_id[step, places], best[step, places] = top.indices[:, 0].numpy(), top.values[:, 0].numpy()
            entropy[step, places] = -(said.exp() * said).nan_to_num(0.0).sum(1).numpy()
            tokens = self._tokens(said, top.indices[:, 0], generator)
            own = said.gather(1, tokens[:, None])[:, 0].numpy()
            margin = (top.values[:, 0].exp() - top.values[:, 1].exp()).numpy()
            first = self._ranked(own, margin, entropy[step, places], generator)[:count]
            chosen = places[first]
            ids[chosen], logprob[chosen] = tokens.numpy()[first], own[first]
            filled_at[chosen] = step
        values = {
            "token_id": ids,
            "step_filled": filled_at,
            "logprob": logprob,
            "best_id": best_id,
            "best_logprob": best,
            "entropy": entropy,
        }
        data = {name: self.outputs[name].variable(each[None]) for name, each in values.items()}
        return xr.Dataset(data, {"step": np.arange(len(counts)), "position": np.arange(len(ids))})

    def _said(self, model: Model, ids: Any, places: Any) -> torch.Tensor:
        """Log-probabilities [mask, vocab], float64, at some places of a text."""
        spec = model.bind(self.hooks)
        refuse_gradients(spec, "denoising")
        read = np.maximum(places - model.config.mask_shift, 0)
        logits, _ = model.run_batch([ids.tolist()], spec, Logits(positions=tuple(read.tolist())))
        assert logits is not None  # asked for
        found: torch.Tensor = logits[0].double().cpu().log_softmax(-1)
        return found

    def _tokens(self, said: torch.Tensor, best: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """What would be filled in at every mask: a token each, drawn from the first mask on."""
        import torch

        from ..forward.generation.sampling import sample_token

        if self.temperature == 0:
            return best
        others = said.clone()
        others[:, self.mask] = float("-inf")
        drawn = [sample_token(row, temperature=self.temperature, generator=generator) for row in others]
        return torch.tensor(drawn)

    def _ranked(self, own: Floats, margin: Floats, entropy: Floats, generator: torch.Generator) -> Any:
        """Masks in the order in which they are filled; of equal ones the first comes first."""
        import torch

        by = {
            "confidence": -own,
            "margin": -margin,
            "entropy": entropy,
            "position": np.arange(len(own)),
        }
        if self.order == "random":
            return torch.randperm(len(own), generator=generator).numpy()
        return np.argsort(by[self.order], kind="stable")

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """All prompts, past the ends of shorter ones NaN, or -1 for token ids and steps."""
        import xarray as xr

        fills = {name: _PAST.get(str(name), np.nan) for part in parts for name in part.variables}
        found: xr.Dataset = xr.concat(parts, "prompt", join="outer", fill_value=fills)
        return found


def filled_by_step(masks: int, steps: int | None) -> list[int]:
    """How many masks each pass fills: as many in each, the first ones one more.

    >>> filled_by_step(7, 3), filled_by_step(2, 5), filled_by_step(2, None)
    ([3, 2, 2], [1, 1], [1, 1])
    """
    passes = masks if steps is None else min(steps, masks)
    return [masks // passes + (step < masks % passes) for step in range(passes)]

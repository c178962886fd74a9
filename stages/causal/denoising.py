"""Denoising: iterative filling of masks by a masked language model, with its confidence at every step.

Each pass predicts all remaining masks; the most confident ones are filled, and the next pass reads the text
with them (Ghazvininejad et al. 2019, "Mask-Predict"; Nie et al. 2025, "Large Language Diffusion Models",
section 2.4; Ye et al. 2025, "Dream 7B"). A filled token is never changed again.

Border: token ids in, labelled arrays out; callers encode and decode text. Torch is imported when it runs.

Axes: prompt (one cell each), position, step (one pass). Log-probabilities and entropies in nats, of the
model's distribution at temperature 1 over the whole vocabulary; the mask token itself is never filled in.
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
"""Orders in which masks can be filled.

By probability of the most likely token, by its margin over the second, by smallest entropy, from left to
right, or at random.
"""
_PAST = {"token_id": -1, "step_filled": -1, "best_id": -1}
"""Fill values past the end of shorter prompts and of fewer steps, by variable; NaN for the others."""


@dataclass(frozen=True)
class Denoising(Experiment):
    """Fills the masks of texts with a masked language model, and records its predictions at every step."""

    name: ClassVar[str] = "denoising"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "token_id": Output(("prompt", "position"), "1", "tokens of the final text, -1 past its end"),
        "step_filled": Output(("prompt", "position"), "1", "pass that filled a mask, -1 for other tokens"),
        "logprob": Output(("prompt", "position"), "nats", "log-probability of a token when it was filled in"),
        "best_id": Output(("prompt", "step", "position"), "1", "most likely token at a mask, -1 elsewhere"),
        "best_logprob": Output(("prompt", "step", "position"), "nats", "log-probability of that token"),
        "entropy": Output(("prompt", "step", "position"), "nats", "entropy of the distribution at a mask"),
    }

    prompts: tuple[tuple[int, ...], ...]
    """Token ids of each text, with masks among them."""
    mask: int
    """Id of the mask token."""
    steps: int | None = None
    """Largest number of passes; None for one per mask. `filled_by_step`: how many masks each pass fills."""
    order: str = "confidence"
    """Order in which masks are filled, one of `ORDERS`."""
    temperature: float = 0.0
    """0 fills in the most likely token; above 0, tokens are sampled from softmax(logits / temperature)."""
    seed: int = 0
    """Seed of sampling and of random order, the same for every prompt."""
    hooks: HookSpec | None = None
    """Interventions in every pass; captures are refused."""

    def params(self) -> dict[str, Any]:
        """Fields that enter the key of results: all that change them, except prompts, the labels of cells."""
        # Temperature and seed only where something is sampled: otherwise they would split the cache.
        params: dict[str, Any] = {"mask": self.mask, "steps": self.steps, "order": self.order}
        if self.temperature > 0 or self.order == "random":
            params |= {"temperature": self.temperature, "seed": self.seed}
        return params | {"hooks": None if self.hooks is None else self.hooks.canonical()}

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One cell per prompt.

        Raises:
            ConfigError: The model predicts the next token; order, steps or temperature are invalid; or
            `hooks`
                captures something.
            PromptError: A prompt has no mask, or is longer than the context.
        """
        if config.predicts_next:
            raise ConfigError(
                f"expected a masked language model for denoising, found {config.model_type}, which predicts "
                "the next token; use generate to continue the text"
            )
        if self.order not in ORDERS:
            near = nearest(self.order, ORDERS)
            hint = f"; did you mean {near!r}?" if near else ""
            raise ConfigError(
                f"denoising: expected order to be one of {', '.join(ORDERS)}, found {self.order!r}{hint}"
            )
        if self.steps is not None and self.steps < 1:
            raise ConfigError(
                f"denoising: expected steps of at least 1, found {self.steps}; leave it out for one per mask"
            )
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"denoising: expected a temperature >= 0, found {self.temperature}")
        if self.hooks is not None and self.hooks.num_captures:
            raise ConfigError(
                "denoising: expected hooks to hold interventions only, found captures; leave out the captures"
            )
        for ids in self.prompts:
            if self.mask not in ids:
                raise PromptError(
                    f"expected a mask token (id {self.mask}) in every prompt, found none in {list(ids)}; put "
                    "a mask where a token is to be filled in"
                )
            if len(ids) > config.context_length:
                raise PromptError(
                    f"expected prompts of at most {config.context_length} tokens, masks included, as long as "
                    f"the model's context, found {len(ids)}; shorten the text"
                )
        return [{"prompt": list(ids)} for ids in self.prompts]

    def prepare(self, model: Model) -> Model:
        """The model itself: each pass depends on the tokens filled before, so no runs can be planned."""
        return model

    def runs(self, prepared: Model, cell: CellLabels) -> Sequence[Run]:
        """No planned runs, because each pass depends on the tokens filled in before."""
        return []

    def measure(self, prepared: Model, cell: CellLabels, result: HookCache) -> None:
        """Never called, as there are no runs; `dataset` fills the masks."""

    def dataset(self, prepared: Model, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """One text with all masks filled, and the predictions at every step."""
        import torch
        import xarray as xr

        ids = np.array(cell["prompt"], np.int32)
        counts = filled_by_step(int((ids == self.mask).sum()), self.steps)
        generator = torch.Generator().manual_seed(self.seed)
        step_filled, logprob = np.full(len(ids), -1, np.int32), np.full(len(ids), np.nan)
        by_step = (len(counts), len(ids))
        best_id = np.full(by_step, -1, np.int32)
        best_logprob, entropy = np.full(by_step, np.nan), np.full(by_step, np.nan)
        for step, count in enumerate(counts):
            # Looked up in every pass: tokens filled in before are part of the text.
            masked = np.flatnonzero(ids == self.mask)
            logprobs = self._logprobs(prepared, ids, masked)
            # The mask token is excluded from the candidates only: probabilities are of the whole vocabulary.
            is_mask_token = torch.arange(logprobs.shape[1]) == self.mask
            top = logprobs.masked_fill(is_mask_token, float("-inf")).topk(2)
            best_id[step, masked] = top.indices[:, 0].numpy()
            best_logprob[step, masked] = top.values[:, 0].numpy()
            # nan_to_num: 0 * log 0 is 0 in the entropy, but NaN in floating point.
            entropy[step, masked] = -(logprobs.exp() * logprobs).nan_to_num(0.0).sum(1).numpy()
            tokens = self._tokens(logprobs, top.indices[:, 0], generator)
            chosen_logprob = logprobs.gather(1, tokens[:, None])[:, 0].numpy()
            margin = (top.values[:, 0].exp() - top.values[:, 1].exp()).numpy()
            first = self._filling_order(chosen_logprob, margin, entropy[step, masked], generator)[:count]
            filled = masked[first]
            ids[filled], logprob[filled] = tokens.numpy()[first], chosen_logprob[first]
            step_filled[filled] = step
        values = {
            "token_id": ids,
            "step_filled": step_filled,
            "logprob": logprob,
            "best_id": best_id,
            "best_logprob": best_logprob,
            "entropy": entropy,
        }
        data = {name: self.outputs[name].variable(value[None]) for name, value in values.items()}
        return xr.Dataset(data, {"step": np.arange(len(counts)), "position": np.arange(len(ids))})

    def _logprobs(self, model: Model, ids: Any, places: Any) -> torch.Tensor:
        """Log-probabilities of the tokens at masked positions of a text, float64 [mask, vocab].

        Arguments:
            model: The model.
            ids: Token ids of the text.
            places: Positions of the masks.
        """
        spec = model.bind(self.hooks)
        refuse_gradients(spec, "denoising")
        # Some models (Dream) predict a mask from the position before it, as next-token models do.
        read = np.maximum(places - model.config.mask_shift, 0)
        logits, _ = model.run_batch([ids.tolist()], spec, Logits(positions=tuple(read.tolist())))
        assert logits is not None  # asked for
        logprobs: torch.Tensor = logits[0].double().cpu().log_softmax(-1)
        return logprobs

    def _tokens(self, logprobs: torch.Tensor, best: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Token to fill in at each mask: `best` at temperature 0, else a sample, in order of position."""
        import torch

        from ..forward.generation.sampling import sample_token

        if self.temperature == 0:
            return best
        candidates = logprobs.clone()
        # Sampling must never fill in the mask token itself.
        candidates[:, self.mask] = float("-inf")
        drawn = [sample_token(row, temperature=self.temperature, generator=generator) for row in candidates]
        return torch.tensor(drawn)

    def _filling_order(
        self, logprob: Floats, margin: Floats, entropy: Floats, generator: torch.Generator
    ) -> Any:
        """Indices of the masks in the order in which they are filled; the first position wins ties."""
        import torch

        sort_keys = {
            "confidence": -logprob,
            "margin": -margin,
            "entropy": entropy,
            "position": np.arange(len(logprob)),
        }
        if self.order == "random":
            return torch.randperm(len(logprob), generator=generator).numpy()
        # Stable, so that ties go to the first position.
        return np.argsort(sort_keys[self.order], kind="stable")

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """All prompts, padded to the longest with NaN, or -1 for token ids and steps."""
        import xarray as xr

        fills = {name: _PAST.get(str(name), np.nan) for part in parts for name in part.variables}
        whole: xr.Dataset = xr.concat(parts, "prompt", join="outer", fill_value=fills)
        return whole


def filled_by_step(masks: int, steps: int | None) -> list[int]:
    """Number of masks that each pass fills: equal numbers, with the remainder spread over the first passes.

    Arguments:
        masks: Number of masks.
        steps: Largest number of passes; None for one per mask.

    >>> filled_by_step(7, 3), filled_by_step(2, 5), filled_by_step(2, None)
    ([3, 2, 2], [1, 1], [1, 1])
    """
    passes = masks if steps is None else min(steps, masks)
    return [masks // passes + (step < masks % passes) for step in range(passes)]

"""GenerationSettings and Generation: options of a generation, and its tokens, texts and activations by step.

Axes: prompt step layer head position …. Step s read position prompt_tokens - 1 + s and gave the s-th new
token. For shorter prompts and earlier steps, missing entries are NaN (activations, log-probabilities) or -1
(token ids). Never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from ....store.arrays import as_count, as_indices, as_number, require_flag
from ....store.digest import LARGEST
from ....store.errors import ConfigError, HookPointNotFound, PromptError, nearest
from ...options import option
from ..architectures.points import HookPoint, as_point
from ..hooks.spec import Capture, When
from .stopping import Reason

if TYPE_CHECKING:
    import xarray
    from torch import Tensor

__all__ = ["Generation", "GenerationResult", "GenerationSettings"]

Kept = Literal["new", "every"]


@dataclass(frozen=True)
class GenerationSettings:
    """Sampling, stopping, caching and capture options of `generate`.

    Raises:
        ConfigError: for a value that is out of range, and for settings that contradict each other.
    """

    max_tokens: int = option(
        20, "Most new tokens of each prompt; a full context ends a continuation earlier.", kind="count"
    )
    temperature: float = option(
        0.0,
        "0 takes the most likely token, the smallest id on a tie; above, tokens are drawn from "
        "softmax(logits / temperature).",
    )
    seed: int | Sequence[int] | None = option(
        None,
        "Seed of the draws, one for all prompts or one each; a prompt with its seed gives the same tokens "
        "in any batch.",
    )
    top_k: int | None = option(None, "Number of most likely tokens to draw among.", kind="count")
    top_p: float | None = option(None, "Draw among the fewest tokens of this total probability.")
    stop: str | int | Sequence[str | int] = option(
        (), "Token ids or texts that end a continuation; a text counts only in the generated text."
    )
    eos: int | Sequence[int] | None = option(
        None, "Token ids that end a sequence; default the end-of-sequence ids of the model, () for none."
    )
    cache: bool | None = option(
        None,
        "Cache keys and values (True), or compute all positions again at each step (False); None caches them "
        "if the tokens are the same either way.",
    )
    capture_positions: Kept = option(
        "new",
        "Positions captured at each step: the newest (new), or every one so far (every).",
        choices=("new", "every"),
    )

    def __post_init__(self) -> None:
        as_count(self.max_tokens, "max_tokens")
        if not 0 <= as_number(self.temperature, "temperature") < float("inf"):
            raise ConfigError(f"expected a finite temperature >= 0, found {self.temperature}")
        if self.top_k is not None and as_count(self.top_k, "top_k", least=0) < 1:
            raise ConfigError(
                f"expected top_k of at least 1, found {self.top_k}; leave it out for all tokens"
            )
        if self.top_p is not None and not 0 < as_number(self.top_p, "top_p") <= 1:
            raise ConfigError(f"expected top_p in (0, 1], found {self.top_p}")
        if self.seed is not None:
            as_indices(self.seed, "seed")
            for seed in np.atleast_1d(self.seed).tolist():
                as_count(seed, "seed", least=0, most=LARGEST)
        require_flag(self.cache, "cache", optional=True)
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise ConfigError(
                "top_k and top_p restrict random draws: expected a temperature > 0, found 0, which always "
                "takes the most likely token; set temperature=1"
            )
        # A draw without a seed could not be repeated, so no result may depend on a global one.
        if self.temperature > 0 and self.seed is None:
            raise ConfigError(
                f"expected a seed to draw tokens at temperature {self.temperature}, found none; pass seed=0"
            )
        if self.capture_positions not in ("new", "every"):
            raise ConfigError(
                f"expected capture_positions='new' or 'every', found {self.capture_positions!r}"
            )
        if self.cache and self.capture_positions == "every":
            raise ConfigError(
                "cache=True computes only the newest position of each step: expected "
                "capture_positions='new', found 'every'; set capture_positions='new' or cache=False"
            )

    def seeds(self, prompts: int) -> list[int | None]:
        """The seed of each prompt; None for each if no seed was set.

        Arguments:
            prompts: number of prompts.

        Raises:
            PromptError: for a list of seeds of another length.
        """
        if self.seed is None:
            return [None] * prompts
        seeds = as_indices(self.seed, "seed")
        if np.ndim(self.seed) == 0:
            return [seeds[0]] * prompts
        if len(seeds) != prompts:
            raise PromptError(
                f"seed: expected one seed, or one for each of {prompts} prompts, found {len(seeds)} seeds"
            )
        return list(seeds)


@dataclass(frozen=True)
class GenerationResult:
    """One prompt with its generated continuation."""

    prompt: str | None
    """Text of the prompt without special tokens; None where the model has no tokenizer."""
    generated_text: str | None
    """Text of the continuation without special tokens; None where the model has no tokenizer."""
    prompt_ids: tuple[int, ...]
    """Token ids of the prompt."""
    generated_ids: tuple[int, ...]
    """Token ids of the continuation, including an end-of-sequence or stop token."""
    logprobs: tuple[float, ...]
    """Log-probability of each generated token, in nats."""
    finish_reason: Reason | None
    """Why generation ended: "eos", "stop" (at a stop id or string), "max_tokens", or "context" (it is full);
    None if it has not ended."""

    @property
    def full_text(self) -> str | None:
        """Text of prompt and continuation; None where the model has no tokenizer."""
        return None if self.generated_text is None else (self.prompt or "") + self.generated_text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the prompt, then of the continuation."""
        return self.prompt_ids + self.generated_ids

    @property
    def probabilities(self) -> tuple[float, ...]:
        """Probability of each generated token, given all tokens before it."""
        return tuple(exp(logprob) for logprob in self.logprobs)

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.prompt_ids)

    @property
    def generated_tokens(self) -> int:
        """Number of generated tokens, including an end-of-sequence or stop token."""
        return len(self.generated_ids)

    @property
    def total_tokens(self) -> int:
        """Number of tokens of prompt and continuation."""
        return self.prompt_tokens + self.generated_tokens


LINES = 8
"""Prompts listed by the representation of a generation."""


def _shown(text: str | None, ids: Sequence[int]) -> str:
    """A text in quotes, or token ids where there is no text; of long values only the end."""
    if text is not None:
        return repr(text if len(text) <= 120 else f"…{text[-119:]}")
    return str(list(ids)) if len(ids) <= 24 else f"[…, {', '.join(map(str, ids[-24:]))}]"


class Generation(Sequence[GenerationResult]):
    """Results of a call of `generate`, one per prompt, and the captured activations."""

    def __init__(
        self,
        results: Sequence[GenerationResult],
        captures: Sequence[Capture],
        captured: Sequence[Mapping[Capture, Sequence[Tensor]]],
        *,
        newest_only: bool,
        reading: str = "",
    ) -> None:
        """Collect the results of a call of `generate`.

        Arguments:
            results: one per prompt.
            captures: captured hook points.
            captured: for each prompt, capture -> activations of each step.
            newest_only: whether steps captured only their newest position.
            reading: whether steps used cached keys and values, and why not.
        """
        self._results = tuple(results)
        self._captures = tuple(captures)
        self._captured = captured
        self.newest_only = newest_only
        """Whether steps captured only their newest position; activations then have no position axis."""
        self.reading = reading
        """"keys and values kept", if steps used a cache; else "every position anew: " and the reason."""

    def __len__(self) -> int:
        return len(self._results)

    def __repr__(self) -> str:
        """A line for each of the first prompts: prompt, generated text, and why it ended."""
        lines = [f"Generation of {len(self)} prompts"]
        lines += [
            f"  {_shown(result.prompt, result.prompt_ids)} -> "
            f"{_shown(result.generated_text, result.generated_ids)} ({result.finish_reason})"
            for result in self._results[:LINES]
        ]
        if len(self) > LINES:
            lines.append(f"  and {len(self) - LINES} more")
        return "\n".join(lines)

    @overload
    def __getitem__(self, index: int) -> GenerationResult: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[GenerationResult, ...]: ...
    def __getitem__(self, index: Any) -> Any:
        return self._results[index]

    @property
    def texts(self) -> list[str | None]:
        """Generated text of each prompt."""
        return [result.generated_text for result in self._results]

    @property
    def ids(self) -> list[list[int]]:
        """Generated token ids of each prompt."""
        return [list(result.generated_ids) for result in self._results]

    def activations(self, point: HookPoint | str, prompt: int = 0, *, when: When | None = None) -> Tensor:
        """Captured activations of one prompt, [step, …].

        The axes are those of the hook point without the batch, and without the position (of patterns: the
        query) where only the newest was captured. Positions and keys that a step does not have yet are NaN.

        Arguments:
            point: HookPoint or its string form.
            prompt: index of the prompt.
            when: "after" or "before" the interventions at the point; None prefers "after".

        Raises:
            HookPointNotFound: for a point that was not captured.
        """
        capture = self._find(as_point(point), when)
        steps = self._captured[prompt][capture]
        shape = tuple(max(sizes) for sizes in zip(*(step.shape for step in steps), strict=True))
        # Keys grow with every step, so earlier steps have fewer; the rest stays NaN.
        padded = steps[0].new_full((len(steps), *shape), float("nan"))
        for number, step in enumerate(steps):
            region: tuple[Any, ...] = (number, *(slice(size) for size in step.shape))
            padded[region] = step
        return padded

    def dims_of(self, point: HookPoint) -> tuple[str, ...]:
        """Names of the axes that `activations` returns for a hook point, "step" first."""
        newest = ("position", "query_position") if self.newest_only else ()
        return ("step", *(axis for axis in point.dims[1:] if axis not in newest))

    def to_xarray(self) -> xarray.Dataset:
        """Tokens, log-probabilities and captured activations as a labelled dataset.

        One variable per hook point kind, [prompt, step, layer, …], bfloat16 as float32. Layers at which a
        kind was not captured are NaN where another kind has them.
        """
        import xarray as xr

        steps = max(result.generated_tokens for result in self._results)
        ids = np.full((len(self), steps), -1, np.int32)
        logprobs = np.full((len(self), steps), np.nan)
        for row, result in enumerate(self._results):
            ids[row, : result.generated_tokens] = result.generated_ids
            logprobs[row, : result.generated_tokens] = result.logprobs
        counts = np.array([result.prompt_tokens for result in self._results], np.int32)
        # The logits of position p give token p + 1, so step 0 reads the last position of the prompt.
        positions_read = counts[:, None] - 1 + np.arange(steps, dtype=np.int32)
        positions_read = np.where(ids >= 0, positions_read, -1)
        dataset = xr.Dataset(
            {
                "token_id": (("prompt", "step"), ids, {"long_name": "generated tokens, -1 past the end"}),
                "logprob": (("prompt", "step"), logprobs, {"units": "nats", "long_name": "of each token"}),
            },
            {
                "position_read": (
                    ("prompt", "step"),
                    positions_read,
                    {"long_name": "newest position of each step"},
                ),
                "prompt_tokens": ("prompt", counts),
            },
        )
        variables = dict.fromkeys(capture.variable for capture in self._captures)
        return dataset.assign({name: self._labelled(name, steps) for name in variables})

    def _labelled(self, variable: str, steps: int) -> xarray.DataArray:
        import xarray as xr

        captures = [capture for capture in self._captures if capture.variable == variable]
        layers = sorted({capture.point.layer for capture in captures if capture.point.layer is not None})
        parts = {
            (row, capture.point.layer): self.activations(capture.point, row, when=capture.when)
            # numpy has no bfloat16.
            .float()
            .cpu()
            .numpy()
            for row in range(len(self))
            for capture in captures
        }
        shape = tuple(max(sizes) for sizes in zip(*(part.shape[1:] for part in parts.values()), strict=True))
        padded = np.full((len(self), steps, len(layers) or 1, *shape), np.nan, np.float32)
        for (row, layer), part in parts.items():
            layer_index = 0 if layer is None else layers.index(layer)
            sizes = tuple(slice(size) for size in part.shape[1:])
            padded[(row, slice(len(part)), layer_index, *sizes)] = part
        step, *other_dims = self.dims_of(captures[0].point)
        if not layers:
            return xr.DataArray(padded[:, :, 0], dims=("prompt", step, *other_dims), name=variable)
        dims = ("prompt", step, "layer", *other_dims)
        return xr.DataArray(padded, dims=dims, coords={"layer": layers}, name=variable)

    def _find(self, point: HookPoint, when: When | None) -> Capture:
        candidates: list[When] = ["after", "before"] if when is None else [when]
        for candidate in candidates:
            if Capture(point, candidate) in self._captures:
                return Capture(point, candidate)
        names = sorted({str(capture.point) for capture in self._captures})
        near = nearest(str(point), names)
        hint = f", nearest is {near!r}" if near else ""
        raise HookPointNotFound(
            f"expected a captured hook point, found {str(point)!r}, which is none of the {len(names)} "
            f"captured ones{hint}; add .capture({str(point)!r}) to the HookSpec"
        )

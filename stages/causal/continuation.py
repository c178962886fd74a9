"""Text generation as an experiment: prompts continued token by token, stored like any other result.

Border: token ids and settings in, labelled datasets out; sampling and the KV cache are in forward/generation.
Torch is imported when it runs.

Axes: prompt (one cell each, so another prompt computes one cell), step (each gives one token), position (in
the prompt). Log-probabilities in nats, of the model's distribution at temperature 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...pipeline import Output
from ...store.errors import ConfigError, PromptError
from ..forward.generation.continuations import GenerationSettings
from ..forward.hooks.spec import HookSpec
from ..forward.runs.experiment import CellLabels, Experiment

if TYPE_CHECKING:
    import xarray as xr

    from ..forward.architectures.architecture import Architecture
    from ..forward.generation.generate import NewToken
    from ..forward.hooks.cache import HookCache
    from ..forward.models.model import Model
    from ..forward.runs.run import Run

__all__ = ["Continuation"]

Listener = Callable[[Sequence[int], "NewToken"], None]
"""Function that is called with a prompt's token ids and each new token."""
_PAST = {"token_id": -1, "prompt_id": -1, "position_read": -1}
"""Fill values past the end of shorter prompts and continuations, by variable; NaN for the others."""


@dataclass(frozen=True)
class Continuation(Experiment):
    """Continuations of prompts, generated token by token.

    Raises:
        ConfigError: The settings have `eos=None`, which names no ids.
    """

    name: ClassVar[str] = "continuation"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "token_id": Output(("prompt", "step"), "1", "generated tokens, -1 past the end"),
        "logprob": Output(("prompt", "step"), "nats", "log-probability of each generated token"),
        "prompt_id": Output(("prompt", "position"), "1", "tokens of the prompt, -1 past the end"),
        "generated_text": Output(("prompt",), "1", "generated text, without special tokens"),
        "finish_reason": Output(("prompt",), "1", "reason why generation ended"),
        "<captured>": Output(
            ("prompt", "step", "layer?", "<axes>"), "1", "captures by step", is_optional=True
        ),
    }
    reads_text: ClassVar[bool] = True

    prompts: tuple[tuple[int, ...], ...]
    """Token ids of each prompt."""
    settings: GenerationSettings
    """Settings of the generation, with explicit end-of-sequence ids; every prompt starts from its seed."""
    hooks: HookSpec | None = None
    """Interventions at every step, and captures, which the result holds by step."""
    on_token: Listener | None = field(default=None, compare=False, repr=False)
    """Called with the prompt and each new token while it is computed; not part of the key."""

    def __post_init__(self) -> None:
        if self.settings.eos is None:
            raise ConfigError(
                "continuation: expected explicit end-of-sequence ids, found eos=None, whose ids depend on "
                "the model's files and so could not enter the key; give eos=(), or end_ids of the model's "
                "files"
            )

    def params(self) -> dict[str, Any]:
        """Fields that enter the key of results: settings and hooks. Prompts are labels of cells.

        The seed is left out at temperature 0. `cache=None` has the key of `cache=False`: without a choice the
        prompt is read again at each step.
        """
        settings = vars(self.settings) | {"cache": bool(self.settings.cache)}
        # At temperature 0 nothing is sampled, so the seed must not split the cache.
        if self.settings.temperature == 0:
            del settings["seed"]
        return settings | {"hooks": None if self.hooks is None else self.hooks.canonical()}

    def outputs_on(self, config: Architecture) -> Mapping[str, Output]:
        """Declared outputs, and one array for each kind of hook point that `hooks` captures."""
        # With a KV cache each step captures the newest position only, and the array has no position axis.
        outputs = {name: output for name, output in self.outputs.items() if name != "<captured>"}
        for capture in () if self.hooks is None else self.hooks.bind(config.hook_points).captures:
            axes = [
                f"{axis}?" if axis in ("position", "query_position") else axis
                for axis in capture.point.dims[1:]
            ]
            layer = [] if capture.point.layer is None else ["layer"]
            outputs[capture.variable] = Output(("prompt", "step", *layer, *axes))
        return outputs

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One cell per prompt.

        Raises:
            PromptError: A prompt is empty, or leaves no room for new tokens in the context.
        """
        longest = config.context_length - 1
        for ids in self.prompts:
            if not ids:
                raise PromptError(
                    f"expected prompts of 1 to {longest} tokens, found an empty prompt; give each prompt at "
                    "least one token"
                )
            if len(ids) > longest:
                raise PromptError(
                    f"expected prompts of 1 to {longest} tokens, found {len(ids)}; shorten the prompt, so "
                    f"that a new token fits into the context of {config.context_length} tokens"
                )
        return [{"prompt": list(ids)} for ids in self.prompts]

    def prepare(self, model: Model) -> Model:
        """The model itself: each step depends on the token before, so no runs can be planned."""
        return model

    def runs(self, prepared: Model, cell: CellLabels) -> Sequence[Run]:
        """No planned runs, because each step depends on the token before."""
        return []

    def measure(self, prepared: Model, cell: CellLabels, result: HookCache) -> None:
        """Never called, as there are no runs; `dataset` generates."""

    def dataset(self, prepared: Model, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """Continuation of one prompt: token_id and logprob [prompt, step], text, captures by step."""
        from ..forward.generation.generate import TokenStream

        ids, listener = cell["prompt"], self.on_token
        stream = TokenStream(prepared, [ids], self.hooks, self.settings)
        for new in stream:
            if listener is not None:
                listener(ids, new)
        continuations = stream.result()
        (result,) = continuations
        attrs = {name: {"long_name": output.long_name} for name, output in self.outputs.items()}
        dataset = continuations.to_xarray().assign_attrs(reading=continuations.reading)
        dataset = dataset.assign(
            prompt_id=(("prompt", "position"), np.array([ids], np.int32), attrs["prompt_id"]),
            generated_text=("prompt", [result.generated_text or ""], attrs["generated_text"]),
            finish_reason=("prompt", [result.finish_reason or ""], attrs["finish_reason"]),
        )
        # xarray pads by label: numbered axes let prompts of different length be joined.
        numbered = [axis for axis in ("step", "position", "key_position") if axis in dataset.dims]
        return dataset.assign_coords({axis: np.arange(dataset.sizes[axis]) for axis in numbered})

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """All prompts, padded to the longest with NaN, or -1 for token ids."""
        import xarray as xr

        fills = {name: _PAST.get(str(name), np.nan) for part in parts for name in part.variables}
        whole: xr.Dataset = xr.concat(
            parts,
            "prompt",
            join="outer",
            coords="minimal",
            compat="override",
            data_vars="minimal",
            fill_value=fills,
        )
        return whole

    def __getstate__(self) -> dict[str, Any]:
        # A callback cannot be pickled, and no one listens on a worker.
        return {**vars(self), "on_token": None}

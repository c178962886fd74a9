"""Prompts continued by a model: what `generate` gives, as a result that is stored like any other.

Border: token ids and settings in, labelled datasets out; how a token comes about is in forward/generate.py.
Never imports torch until it runs.

Axes: prompt (one cell each: one more prompt computes one prompt), step (each gives one token), position (of
the prompt). Log-probabilities in nats, of the model's own distribution.
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
_PAST = {"token_id": -1, "prompt_id": -1, "position_read": -1}
"""What stands past the end of a shorter prompt or continuation, where it is not NaN."""


@dataclass(frozen=True)
class Continuation(Experiment):
    """Prompts continued token by token.

    prompts: token ids. settings: as for `generate`, one seed for every prompt, and the ids that end a
    sequence named. hooks: interventions at every step, and captures, which the result then holds step by
    step. on_token: told each token, with the prompt it continues, while it is computed; no part of the key.
    """

    name: ClassVar[str] = "continuation"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "token_id": Output(("prompt", "step"), "1", "generated tokens, -1 past the end"),
        "logprob": Output(("prompt", "step"), "nats", "of each token"),
        "prompt_id": Output(("prompt", "position"), "1", "tokens of the prompt, -1 past the end"),
        "generated_text": Output(("prompt",), "1", "what was generated, without special tokens"),
        "finish_reason": Output(("prompt",), "1", "why the last token is the last"),
        "<captured>": Output(
            ("prompt", "step", "layer?", "<axes>"), "1", "captures by step", is_optional=True
        ),
    }
    reads_text: ClassVar[bool] = True

    prompts: tuple[tuple[int, ...], ...]
    settings: GenerationSettings
    hooks: HookSpec | None = None
    on_token: Listener | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.settings.eos is None:
            raise ConfigError(
                "continuation: expected the ids that end a sequence, found eos=None, which stands for what a "
                "model's files name and would be in no key; give eos=(), or end_ids of the model's files"
            )

    def params(self) -> dict[str, Any]:
        """Which prompts is said by the cells; a seed nobody draws with, and who listens, decide nothing.

        Where it is left open whether keys are kept, the tokens are those of reading anew, and so is the key.
        """
        chosen = vars(self.settings) | {"cache": bool(self.settings.cache)}
        if self.settings.temperature == 0:
            del chosen["seed"]
        return chosen | {"hooks": None if self.hooks is None else self.hooks.canonical()}

    def outputs_on(self, config: Architecture) -> Mapping[str, Output]:
        """What is always given, and an array per kind of hook point captured; where a step keeps its newest
        position alone, without that axis."""
        found = {name: output for name, output in self.outputs.items() if name != "<captured>"}
        for capture in () if self.hooks is None else self.hooks.bind(config.hook_points).captures:
            axes = [
                f"{axis}?" if axis in ("position", "query_position") else axis
                for axis in capture.point.dims[1:]
            ]
            layer = [] if capture.point.layer is None else ["layer"]
            found[capture.variable] = Output(("prompt", "step", *layer, *axes))
        return found

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One per prompt. Raises PromptError for one that leaves no room to generate."""
        for ids in self.prompts:
            if not 0 < len(ids) < config.context_length:
                raise PromptError(
                    f"expected prompts of 1 to {config.context_length - 1} tokens, found {len(ids)}; the "
                    "context must hold what is generated as well"
                )
        return [{"prompt": list(ids)} for ids in self.prompts]

    def prepare(self, model: Model) -> Model:
        """The model itself: what a step runs depends on what the one before gave."""
        return model

    def runs(self, prepared: Model, cell: CellLabels) -> Sequence[Run]:
        """None that could be planned ahead."""
        return []

    def measure(self, prepared: Model, cell: CellLabels, result: HookCache) -> None:
        """Never asked: nothing is planned, see `dataset`."""

    def dataset(self, prepared: Model, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """One prompt continued: token_id, logprob [prompt, step], texts [prompt], captures by step."""
        from ..forward.generation.generate import TokenStream

        ids, listener = cell["prompt"], self.on_token
        stream = TokenStream(prepared, [ids], self.hooks, self.settings)
        for new in stream:
            if listener is not None:
                listener(ids, new)
        given = stream.result()
        (result,) = given
        about = {name: {"long_name": output.long_name} for name, output in self.outputs.items()}
        dataset = given.to_xarray().assign_attrs(reading=given.reading)
        dataset = dataset.assign(
            prompt_id=(("prompt", "position"), np.array([ids], np.int32), about["prompt_id"]),
            generated_text=("prompt", [result.generated_text or ""], about["generated_text"]),
            finish_reason=("prompt", [result.finish_reason or ""], about["finish_reason"]),
        )
        # Numbered, so that prompts of different length can be joined.
        numbered = [axis for axis in ("step", "position", "key_position") if axis in dataset.dims]
        return dataset.assign_coords({axis: np.arange(dataset.sizes[axis]) for axis in numbered})

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """All prompts, past the ends of shorter ones NaN, or -1 for token ids."""
        import xarray as xr

        fills = {name: _PAST.get(str(name), np.nan) for part in parts for name in part.variables}
        found: xr.Dataset = xr.concat(
            parts,
            "prompt",
            join="outer",
            coords="minimal",
            compat="override",
            data_vars="minimal",
            fill_value=fills,
        )
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "on_token": None}  # nobody listens on a worker

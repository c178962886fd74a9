"""generate: texts continued token by token, under interventions, with activations captured on the way.

A step means a forward pass over the whole sequence so far, with interventions applied to all of it anew. It
is computed with cached keys and values, one new position at a time, wherever that gives the same result:
whenever what is done to a position does not depend on how many follow (`why_uncached` in growing.py).
Otherwise every position is computed again; `Generation.reading` says which, and why. The two agree within
rounding.

``cache=True`` caches regardless and means something else where the two differ: interventions act on a
position once, when it is new. A position counted from the end then stays changed as it was when it was the
newest; without a cache only the one that is newest now is changed.

Axes: prompt step layer head position …. Step s reads position prompt_tokens - 1 + s, whose logits give the
s-th new token. Log-probabilities are in nats and those of the model itself, before temperature, top_k and
top_p.

Interventions on a growing sequence are in growing.py, the end of a text in stopping.py, the pass over new
positions in passes/kept.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ....pipeline.ambient import each_in_plain_torch
from ....store.arrays import shown
from ....store.errors import ConfigError, ModelNotFound, PromptError
from ...options import split_options, takes_options
from ..hooks.interventions import PositionSubset
from ..hooks.recurrent import RecurrentPass, require_recurrent
from ..hooks.spec import BoundSpec, Capture, HookSpec, refuse_gradients
from ..hooks.taps import RunTaps, Sink
from ..hooks.wants import LAST_LOGITS
from ..models.files import resolve
from ..models.finite import is_fit, not_finite
from ..models.model import Model, Prompts
from ..models.reference import require_model
from ..passes.kept import Cache
from ..text.rows import as_rows
from .continuations import Generation, GenerationResult, GenerationSettings
from .growing import REPEATED_LAYERS, spec_so_far, why_uncached
from .sampling import sample_token
from .stopping import GeneratedText, Reason, Stop, end_ids

__all__ = ["NewToken", "TokenStream", "generate"]

# Words of `Generation.reading`: an attribute of stored generations, whose content must not change.
CACHED = "keys and values kept"
NOT_CACHED = "nothing is kept of a pass through transformers"


@dataclass(frozen=True)
class NewToken:
    """A token that was just generated, for showing text as it grows."""

    prompt: int
    """Index of the prompt that the token continues."""
    step: int
    """Index of the token among the new tokens of the prompt."""
    token_id: int
    """Id of the token."""
    text: str
    """Text that can be shown now: empty inside a character or a possible stop string, and may include text
    that was held back before."""
    logprob: float
    """Log-probability of the token, in nats."""
    finish_reason: Reason | None
    """Why the continuation ended at this token; None while it goes on."""


@takes_options(GenerationSettings)
def generate(
    model: Model,
    prompts: Prompts,
    hooks: HookSpec | None = None,
    *,
    on_token: Callable[[NewToken], None] | None = None,
    recurrent: RecurrentPass | None = None,
    **options: Any,
) -> Generation:
    """Continue each prompt, token by token.

    Prompts of one length share batches without padding; the result of each is the same as alone.

    Arguments:
        model: a loaded model.
        prompts: texts or token ids, in any form that `Model.tokenize` accepts.
        hooks: interventions act at every step on positions of the grown sequence: -1 is the newest position
            of each step, and a position that does not exist yet is skipped. Captures are stored per step
            (`capture_positions`).
        on_token: called with every new token.
        recurrent: layers to repeat at every step, with feedback at positions of each prompt; with
            ``cache=True`` a position gets feedback once, when it is new.
        options: sampling, stopping, caching and capture options, listed below.

    Raises:
        PromptError, HookPointNotFound, InterventionError, ConfigError: for invalid arguments, before anything
            is computed.
    """
    if on_token is not None and not callable(on_token):
        raise ConfigError(
            f"expected on_token as a function of a NewToken, found {shown(on_token)}; pass a function, or "
            "leave it out"
        )
    (values,) = split_options("generate", options, GenerationSettings)
    stream = TokenStream(model, prompts, hooks, GenerationSettings(**values), recurrent)
    for new_token in stream:
        if on_token is not None:
            on_token(new_token)
    return stream.result()


class Reader(Protocol):
    """Computes next-token logits of sequences of one length, step by step."""

    def read(self, rows: Sequence[Sequence[int]], sink: Sink) -> Tensor:
        """Compute the logits [batch, vocab] at the last position, and pass captured activations to `sink`.

        Arguments:
            rows: token ids of whole sequences, all of one length.
            sink: receives captured activations.
        """
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Drop finished sequences from the batch.

        Arguments:
            rows: batch indices of the sequences that continue.
        """
        ...


@dataclass(frozen=True)
class Rereader:
    """Computes all positions of a sequence at each step, without a cache."""

    model: Model
    """The model that computes."""
    spec: BoundSpec
    """Captures and interventions, for the final length of the sequence."""

    def read(self, rows: Sequence[Sequence[int]], sink: Sink) -> Tensor:
        """Compute the logits [batch, vocab] at the last position, and pass captured activations to `sink`.

        Arguments:
            rows: token ids of whole sequences, all of one length.
            sink: receives captured activations of all positions.
        """
        logits = self.model.stream_batch(rows, spec_so_far(self.spec, len(rows[0])), LAST_LOGITS, sink)
        assert logits is not None  # LAST_LOGITS are computed
        return logits[:, 0]

    def keep(self, rows: Sequence[int]) -> None:
        """Nothing to do: no step depends on an earlier one."""


class CachedReader:
    """Computes each position once, and caches its keys, values and states."""

    def __init__(self, model: Model, spec: BoundSpec) -> None:
        """Start with an empty cache.

        Arguments:
            model: the model that computes.
            spec: captures and interventions, for the final length of the sequence.
        """
        self._model, self._spec = model, spec
        self.cache = Cache()

    def read(self, rows: Sequence[Sequence[int]], sink: Sink) -> Tensor:
        """Compute the logits [batch, vocab] at the last position from the cache and the new positions.

        Arguments:
            rows: token ids of whole sequences, all of one length.
            sink: receives captured activations of the new positions.
        """
        length = len(rows[0])
        # Length-dependent rope scaling may rotate all keys differently from this length on.
        if not self._model.config.keeps_keys(self.cache.length, length):
            self.cache.clear()
        subset = PositionSubset(np.arange(self.cache.length, length), length)
        taps = RunTaps(spec_so_far(self._spec, length), sink, subset=subset)
        return self._model.read_on(rows, self.cache, taps)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop finished sequences from the cache.

        Arguments:
            rows: batch indices of the sequences that continue.
        """
        self.cache.keep(rows)


@dataclass
class _Sequence:
    """One prompt and its continuation so far."""

    number: int
    """Index of the prompt."""
    prompt: str | None
    """Text of the prompt; None if token ids were passed."""
    ids: list[int]
    """Token ids of prompt and continuation."""
    limit: int
    """Largest number of new tokens."""
    generator: torch.Generator | None
    """Source of randomness; None for greedy decoding."""
    text: GeneratedText | None
    """Generated text; None without a tokenizer."""
    start: int = 0
    """Number of tokens of the prompt."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probability of each new token, in nats."""
    finish_reason: Reason | None = None
    """Why the continuation ended; None while it goes on."""
    captured: dict[Capture, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    """Capture -> activations of each step."""


class TokenStream:
    """Iterator over the new tokens of a generation; `result` returns texts and activations.

    Each step yields one token of each unfinished prompt, in the order of the prompts.
    """

    def __init__(
        self,
        model: Model,
        prompts: Prompts,
        hooks: HookSpec | None = None,
        settings: GenerationSettings | None = None,
        recurrent: RecurrentPass | None = None,
    ) -> None:
        """Check the arguments of a generation; tokens are computed when it is iterated.

        Arguments:
            model: a loaded model.
            prompts: texts or token ids, in any form that `Model.tokenize` accepts.
            hooks: captures and interventions, as for `generate`.
            settings: sampling, stopping, caching and captures; None for the defaults.
            recurrent: layers to repeat at every step; None for a plain pass.

        Raises:
            PromptError, HookPointNotFound, InterventionError, ConfigError: for invalid arguments.
        """
        require_model(model)
        require_recurrent(recurrent)
        self.settings = settings or GenerationSettings()
        self._model = model
        model.config.require_vocabulary()
        if not model.config.continues:
            raise ConfigError(
                f"generate: expected a model whose logits predict the next token, found {model.name}, whose "
                "logits do not; read them with model.forward(prompts)"
            )
        # Every token would read every streamed layer from disk again.
        model.require_all_weights("text, token by token")
        inputs = as_rows(prompts)
        rows = model.tokenize(inputs)
        spec = model.bind(hooks)
        refuse_gradients(spec, "generation")
        self._captures = spec.captures
        self._specs = {
            length: spec if recurrent is None else recurrent.applied(spec, model.config, length, grows=True)
            for length in map(len, rows)
        }
        """Bound spec by length of the prompt."""
        eos = end_tokens(model) if self.settings.eos is None else self.settings.eos
        self._stop = Stop.of(self.settings.stop, eos)
        if too_large := [token for token in self._stop.ids if token >= model.config.vocab_size]:
            raise ConfigError(
                f"stop: expected token ids in 0..{model.config.vocab_size - 1}, found {too_large[0]}; remove "
                "it"
            )
        if self._stop.strings:
            model.tokenizer  # noqa: B018 - raises for a model without tokenizer, which cannot find strings
        seeds = self.settings.seeds(len(rows))
        texts = [row if isinstance(row, str) else None for row in inputs]
        self._sequences = [
            self._sequence(number, text, ids, seed)
            for number, (text, ids, seed) in enumerate(zip(texts, rows, seeds, strict=True))
        ]
        self._check()
        self._reading = self._choose_reading()
        self._tokens = each_in_plain_torch(self._generated())

    def __iter__(self) -> Iterator[NewToken]:
        return self._tokens

    def result(self) -> Generation:
        """The texts and activations so far; they are complete when the iteration has ended."""
        return Generation(
            [self._result_of(sequence) for sequence in self._sequences],
            self._captures,
            [sequence.captured for sequence in self._sequences],
            newest_only=self.settings.capture_positions == "new",
            reading=self._reading,
        )

    def _sequence(self, number: int, prompt: str | None, ids: list[int], seed: int | None) -> _Sequence:
        context = self._model.config.context_length
        room = context - len(ids)
        if room < 1:
            raise PromptError(
                f"expected a prompt shorter than the context of {self._model.name}, {context} tokens, found "
                f"prompt {number} with {len(ids)}; shorten it"
            )
        tokenizer = self._model._tokenizer
        text = None if tokenizer is None else GeneratedText(tokenizer, ids, self._stop.strings)
        # One generator per prompt, so that its draws do not depend on the other prompts.
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        limit = min(self.settings.max_tokens, room)
        return _Sequence(number, prompt, list(ids), limit, generator, text, start=len(ids))

    def _check(self) -> None:
        """Check interventions at the length of the prompt and at the longest length that may be reached."""
        for length, spec in self._specs.items():
            # The last new token is never read: a sequence ends when it is chosen.
            longest = max(
                sequence.start + sequence.limit - 1
                for sequence in self._sequences
                if sequence.start == length
            )
            self._model.check(spec, LAST_LOGITS, batch=1, length=longest)
            self._model.check(spec_so_far(spec, length), LAST_LOGITS, batch=1, length=length)

    def _reader(self, length: int) -> Reader:
        reader = CachedReader if self._reading == CACHED else Rereader
        return reader(self._model, self._specs[length])

    def _choose_reading(self) -> str:
        """Say whether keys and values are cached: `CACHED`, or "every position anew: " and the reason.

        Raises:
            ConfigError: where the user set cache=True and no cache is possible.
        """
        spec = next(iter(self._specs.values()))  # they differ by positions alone
        if self.settings.cache:
            if spec.order is not None:
                raise ConfigError(f"expected cache=None or cache=False, found True: {REPEATED_LAYERS}")
            if not self._model.config.keeps_keys(1, 2):
                raise ConfigError(f"expected cache=None or cache=False, found True: {NOT_CACHED}")
            return CACHED
        reason = "as asked" if self.settings.cache is False else why_uncached(spec)
        if reason is None and not self._model.config.keeps_keys(1, 2):
            reason = NOT_CACHED
        if reason is None and self.settings.capture_positions == "every":
            reason = "as every position is captured"
        return CACHED if reason is None else f"every position anew: {reason}"

    def _generated(self) -> Iterator[NewToken]:
        groups: dict[int, list[_Sequence]] = defaultdict(list)
        for sequence in self._sequences:
            # Prompts of one length grow in step, so their batch never needs padding.
            groups[len(sequence.ids)].append(sequence)
        batches = [(members, self._reader(length)) for length, members in groups.items()]
        while batches:
            remaining = []
            for members, reader in batches:
                logits = reader.read([sequence.ids for sequence in members], self._sink(members))
                for sequence, row in zip(members, logits, strict=True):
                    yield self._take(sequence, row)
                unfinished = [row for row, sequence in enumerate(members) if sequence.finish_reason is None]
                # Finished sequences leave the batch, so that they cost nothing any more.
                if unfinished and len(unfinished) < len(members):
                    reader.keep(unfinished)
                if unfinished:
                    remaining.append(([members[row] for row in unfinished], reader))
            batches = remaining

    def _take(self, sequence: _Sequence, logits: Tensor) -> NewToken:
        """Choose the next token of a sequence and check whether it ends it."""
        settings = self.settings
        # On the CPU in float64: a draw must give the same token on every device.
        logits64 = logits.detach().double().cpu()
        token = sample_token(
            narrowed(logits64, settings.temperature, settings.top_k, settings.top_p),
            temperature=settings.temperature,
            generator=sequence.generator,
        )
        # Of the model's own distribution: before top_k, top_p and temperature.
        logprob = float(torch.log_softmax(logits64, -1)[token])
        sequence.ids.append(token)
        sequence.logprobs.append(logprob)
        reason, shown = self._stop.reason(token), ""
        text = sequence.text
        if text is not None and reason is None:
            shown = text.push(token)
            reason = "stop" if text.is_stopped else None
        step = len(sequence.logprobs) - 1
        if reason is None and step + 1 == sequence.limit:
            reason = "max_tokens" if sequence.limit == settings.max_tokens else "context"
        if text is not None and reason is not None:
            shown += text.finish()
        sequence.finish_reason = reason
        return NewToken(sequence.number, step, token, shown, logprob, reason)

    def _sink(self, members: Sequence[_Sequence]) -> Sink:
        """A function that stores each captured tensor: all positions, or only the newest one."""
        newest_only = self.settings.capture_positions == "new"

        def keep(capture: Capture, value: Tensor) -> None:
            if not is_fit(capture, value):
                rows = [sequence.ids for sequence in members]
                spec = spec_so_far(self._specs[len(rows[0]) - len(members[0].logprobs)], len(rows[0]))
                raise not_finite(self._model, [rows], spec, f"'{capture.name}'")
            if newest_only:
                dims = capture.point.dims
                axis = dims.index("position" if "position" in dims else "query_position")
                # A copy: a view would keep the activations of all positions alive.
                value = value.select(axis, -1).clone()
            for sequence, row in zip(members, value, strict=True):
                sequence.captured[capture].append(row)

        return keep

    def _result_of(self, sequence: _Sequence) -> GenerationResult:
        tokenizer, start = self._model._tokenizer, sequence.start
        prompt = sequence.prompt
        if prompt is None and tokenizer is not None:
            # Ids without text (special tokens, padding of the vocabulary) are left out of the prompt's text.
            with_text = [token for token in sequence.ids[:start] if tokenizer.decode_token(token)]
            prompt = tokenizer.decode(with_text, keep_special=False)
        return GenerationResult(
            prompt=prompt,
            generated_text=None if sequence.text is None else sequence.text.text,
            prompt_ids=tuple(sequence.ids[:start]),
            generated_ids=tuple(sequence.ids[start:]),
            logprobs=tuple(sequence.logprobs),
            finish_reason=sequence.finish_reason,
        )


def narrowed(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """Restrict a draw to the most likely tokens: logits [vocab] with -inf for all other tokens.

    Arguments:
        logits: [vocab].
        temperature: temperature of the draw.
        top_k: number of most likely tokens to keep; None for all.
        top_p: keep the smallest set of these whose probability reaches top_p (nucleus sampling: Holtzman et
            al. 2020, section 3.1); None for all. On ties smaller ids come first.
    """
    if top_k is None and top_p is None:
        return logits
    # Stable, so that ties keep the smaller id on every device.
    ranked, order = torch.sort(logits, descending=True, stable=True)
    n_kept = len(ranked) if top_k is None else min(top_k, len(ranked))
    if top_p is not None:
        cumulative = torch.softmax(ranked[:n_kept] / temperature, -1).cumsum(0)
        # The token that crosses top_p belongs to the set, so at least one token always remains.
        n_kept = min(n_kept, 1 + int((cumulative < top_p).sum()))
    masked = torch.full_like(logits, float("-inf"))
    masked[order[:n_kept]] = ranked[:n_kept]
    return masked


def end_tokens(model: Model) -> tuple[int, ...]:
    """End-of-sequence token ids of a model, from its files; from its tokenizer if the files are gone."""
    tokenizer = model._tokenizer
    if model.identity is not None:
        try:
            files = resolve(model.name)
            # Another checkpoint may lie in the folder by now; its end tokens are not those of this model.
            if files.identity(model.identity.dtype).weights == model.identity.weights:
                return end_ids(files, tokenizer)
        except ModelNotFound:
            pass  # moved or deleted since the model was loaded
    return () if tokenizer is None or tokenizer.eos_id is None else (tokenizer.eos_id,)

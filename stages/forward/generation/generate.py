"""Generation: text continued token by token, under interventions, its activations read on the way.

Border: token ids and a model's passes; what interventions mean while a sequence grows is in growing.py, when
it ends in stopping.py, what a pass over the newest positions alone computes in passes/kept.py.

A step is a forward pass over the whole sequence so far, interventions applied to all of it anew: that is
what every result means. It is computed from kept keys and values, each position read once, wherever that
gives the same, which is whenever what is done to a position does not depend on how many follow it
(`why_read_anew` in growing.py). Where it does, every position is read anew; `Generation.reading` tells which,
and why. The two agree within rounding.

``cache=True`` keeps them regardless, and means something else where the two differ: interventions meet a
position once, when it is new. With a position counted from the end, one then stays changed as it was when it
was the newest; read anew, only the one that is newest now is changed.

Axes: prompt step layer head position …; step s reads position prompt_tokens - 1 + s, whose logits give the
s-th new token. Log-probabilities in nats, of the model's own distribution: whatever temperature, top_k and
top_p made of it before the draw.
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
from ..hooks.interventions import Held
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
from .growing import GONE_THROUGH_AGAIN, spec_so_far, why_read_anew
from .sampling import sample_token
from .stopping import GeneratedText, Reason, Stop, end_ids

__all__ = ["NewToken", "TokenStream", "generate"]

KEPT = "keys and values kept"
NOTHING_KEPT = "nothing is kept of a pass through transformers"


@dataclass(frozen=True)
class NewToken:
    """A token the moment it is chosen.

    prompt: which one it continues. step: counted from 0. text: what can be shown of the text by now, which
    may be nothing yet. logprob: in nats. finish_reason: why it is the last one; None if it is not.
    """

    prompt: int
    step: int
    token_id: int
    text: str
    logprob: float
    finish_reason: Reason | None


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

    Prompts of one length are read together and none is padded; each gives what it would give alone.

    Args:
        model: a loaded model.
        prompts: as for `Model.forward`.
        hooks: interventions act at every step, on positions of the grown sequence: -1 is the newest position
            of each step, and a position that does not exist yet is left alone. Captures are kept step by
            step (`capture_positions`).
        on_token: called with every new token.
        recurrent: layers to run again at every step, fed at positions of each prompt; with ``cache=True`` a
            position is fed once, when it is new.
        options: see below.

    Raises:
        PromptError, HookPointNotFound, InterventionError, ConfigError: before anything is computed.
    """
    if on_token is not None and not callable(on_token):
        raise ConfigError(
            f"expected on_token as a function of a token, found {shown(on_token)}; leave it out"
        )
    (chosen,) = split_options("generate", options, GenerationSettings)
    stream = TokenStream(model, prompts, hooks, GenerationSettings(**chosen), recurrent)
    for new in stream:
        if on_token is not None:
            on_token(new)
    return stream.result()


class Reader(Protocol):
    """Reads sequences of one length, step by step."""

    def read(self, rows: Sequence[Sequence[int]], sink: Sink) -> Tensor:
        """Logits [B, vocab] at the last position; captured activations go to `sink`."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these prompts of the batch only."""
        ...


@dataclass(frozen=True)
class Rereader:
    """Reads all of a sequence at each step."""

    model: Model
    spec: BoundSpec

    def read(self, rows: Sequence[Sequence[int]], sink: Sink) -> Tensor:
        """See `Reader`."""
        logits = self.model.stream_batch(rows, spec_so_far(self.spec, len(rows[0])), LAST_LOGITS, sink)
        assert logits is not None
        return logits[:, 0]

    def keep(self, rows: Sequence[int]) -> None:
        """Nothing is kept from step to step."""


class CachedReader:
    """Reads each position once, under one spec; what it gave is kept."""

    def __init__(self, model: Model, spec: BoundSpec) -> None:
        self._model, self._spec = model, spec
        self.cache = Cache()

    def read(self, rows: Sequence[Sequence[int]], sink: Sink) -> Tensor:
        """See `Reader`; captured activations are those of the new positions alone."""
        length = len(rows[0])
        if not self._model.config.keeps_keys(self.cache.length, length):
            self.cache.clear()
        held = Held(np.arange(self.cache.length, length), length)
        taps = RunTaps(spec_so_far(self._spec, length), sink, held=held)
        return self._model.read_on(rows, self.cache, taps)

    def keep(self, rows: Sequence[int]) -> None:
        """See `Reader`."""
        self.cache.keep(rows)


@dataclass
class _Sequence:
    """One prompt and what has come of it."""

    number: int
    prompt: str | None
    ids: list[int]
    limit: int
    generator: torch.Generator | None
    text: GeneratedText | None
    start: int = 0
    logprobs: list[float] = field(default_factory=list)
    finish_reason: Reason | None = None
    captured: dict[Capture, list[Tensor]] = field(default_factory=lambda: defaultdict(list))


class TokenStream:
    """A generation under way: iterate over it for each token as it comes, prompts in turn at every step; then
    `result`. Arguments as for `generate`."""

    def __init__(
        self,
        model: Model,
        prompts: Prompts,
        hooks: HookSpec | None = None,
        settings: GenerationSettings | None = None,
        recurrent: RecurrentPass | None = None,
    ) -> None:
        require_model(model)
        require_recurrent(recurrent)
        self.settings = settings or GenerationSettings()
        self._model = model
        if not model.config.continues:
            raise ConfigError(
                f"expected a causal language model to continue texts, found {model.name}, whose logits are "
                "not of the next token; read them at the positions asked about: forward(prompts)"
            )
        model.require_all_weights("text, token by token")
        read = as_rows(prompts)
        rows = model.tokenize(read)
        spec = model.bind(hooks)
        refuse_gradients(spec, "generation")
        self._captures = spec.captures
        self._specs = {
            length: spec if recurrent is None else recurrent.applied(spec, model.config, length, grows=True)
            for length in map(len, rows)
        }
        """By length of the prompt."""
        named = end_tokens(model) if self.settings.eos is None else self.settings.eos
        self._stop = Stop.of(self.settings.stop, named)
        if above := [token for token in self._stop.ids if token >= model.config.vocab_size]:
            raise ConfigError(
                f"expected stop ids in 0..{model.config.vocab_size - 1}, found {above[0]}; leave it out"
            )
        if self._stop.strings:
            model.tokenizer  # noqa: B018 - raises where there is none to find strings with
        seeds = self.settings.seeds(len(rows))
        texts = [row if isinstance(row, str) else None for row in read]
        self._sequences = [
            self._sequence(number, text, ids, seed)
            for number, (text, ids, seed) in enumerate(zip(texts, rows, seeds, strict=True))
        ]
        self._check()
        self._reading = self._how_to_read()
        self._tokens = each_in_plain_torch(self._generated())

    def __iter__(self) -> Iterator[NewToken]:
        return self._tokens

    def result(self) -> Generation:
        """Everything so far, all of it once the iteration has ended."""
        return Generation(
            [self._result_of(each) for each in self._sequences],
            self._captures,
            [each.captured for each in self._sequences],
            newest_only=self.settings.capture_positions == "new",
            reading=self._reading,
        )

    def _sequence(self, number: int, prompt: str | None, ids: list[int], seed: int | None) -> _Sequence:
        context = self._model.config.context_length
        room = context - len(ids)
        if room < 1:
            raise PromptError(
                f"{self._model.name} reads at most {context} positions, found {len(ids)} in prompt {number}, "
                "which leaves no room to generate; shorten it"
            )
        tokenizer = self._model._tokenizer
        text = None if tokenizer is None else GeneratedText(tokenizer, ids, self._stop.strings)
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        limit = min(self.settings.max_tokens, room)
        return _Sequence(number, prompt, list(ids), limit, generator, text, start=len(ids))

    def _check(self) -> None:
        """Interventions must fit when the prompt is read, and when the last position that may come is."""
        for length, spec in self._specs.items():
            last = max(each.start + each.limit - 1 for each in self._sequences if each.start == length)
            self._model.check(spec, LAST_LOGITS, batch=1, length=last)
            self._model.check(spec_so_far(spec, length), LAST_LOGITS, batch=1, length=length)

    def _reader(self, length: int) -> Reader:
        reader = CachedReader if self._reading == KEPT else Rereader
        return reader(self._model, self._specs[length])

    def _how_to_read(self) -> str:
        """`KEPT`, or that every position is read anew, and why."""
        spec = next(iter(self._specs.values()))  # they differ by positions alone
        if self.settings.cache:
            if spec.order is not None:
                raise ConfigError(f"expected cache=None or False, found True: {GONE_THROUGH_AGAIN}")
            if not self._model.config.keeps_keys(1, 2):
                raise ConfigError(f"expected cache=None or False, found True: {NOTHING_KEPT}")
            return KEPT
        why = "as asked" if self.settings.cache is False else why_read_anew(spec)
        if why is None and not self._model.config.keeps_keys(1, 2):
            why = NOTHING_KEPT
        if why is None and self.settings.capture_positions == "every":
            why = "as every position is captured"
        return KEPT if why is None else f"every position anew: {why}"

    def _generated(self) -> Iterator[NewToken]:
        groups: dict[int, list[_Sequence]] = defaultdict(list)
        for sequence in self._sequences:
            groups[len(sequence.ids)].append(sequence)
        under_way = [(members, self._reader(length)) for length, members in groups.items()]
        while under_way:
            still = []
            for members, reader in under_way:
                logits = reader.read([each.ids for each in members], self._sink(members))
                for each, row in zip(members, logits, strict=True):
                    yield self._take(each, row)
                going = [row for row, each in enumerate(members) if each.finish_reason is None]
                if going and len(going) < len(members):
                    reader.keep(going)
                if going:
                    still.append(([members[row] for row in going], reader))
            under_way = still

    def _take(self, sequence: _Sequence, logits: Tensor) -> NewToken:
        """Choose a token, and see whether it ends the sequence."""
        s = self.settings
        wide = logits.detach().double().cpu()
        token = sample_token(
            narrowed(wide, s.temperature, s.top_k, s.top_p),
            temperature=s.temperature,
            generator=sequence.generator,
        )
        logprob = float(torch.log_softmax(wide, -1)[token])
        sequence.ids.append(token)
        sequence.logprobs.append(logprob)
        reason, shown = self._stop.reason(token), ""
        text = sequence.text
        if text is not None and reason is None:
            shown = text.push(token)
            reason = "stop" if text.is_stopped else None
        step = len(sequence.logprobs) - 1
        if reason is None and step + 1 == sequence.limit:
            reason = "max_tokens" if sequence.limit == s.max_tokens else "context"
        if text is not None and reason is not None:
            shown += text.finish()
        sequence.finish_reason = reason
        return NewToken(sequence.number, step, token, shown, logprob, reason)

    def _sink(self, members: Sequence[_Sequence]) -> Sink:
        """Keeps of each captured tensor what was asked for, and nothing that holds on to the rest."""
        newest_only = self.settings.capture_positions == "new"

        def keep(capture: Capture, value: Tensor) -> None:
            if not is_fit(capture, value):
                rows = [each.ids for each in members]
                spec = spec_so_far(self._specs[len(rows[0]) - len(members[0].logprobs)], len(rows[0]))
                raise not_finite(self._model, [rows], spec, f"'{capture.name}'")
            if newest_only:
                dims = capture.point.dims
                axis = dims.index("position" if "position" in dims else "query_position")
                value = value.select(axis, -1).clone()
            for sequence, row in zip(members, value, strict=True):
                sequence.captured[capture].append(row)

        return keep

    def _result_of(self, sequence: _Sequence) -> GenerationResult:
        tokenizer, start = self._model._tokenizer, sequence.start
        prompt = sequence.prompt
        if prompt is None and tokenizer is not None:
            known = [token for token in sequence.ids[:start] if tokenizer.decode_token(token)]
            prompt = tokenizer.decode(known, keep_special=False)
        return GenerationResult(
            prompt=prompt,
            generated_text=None if sequence.text is None else sequence.text.text,
            prompt_ids=tuple(sequence.ids[:start]),
            generated_ids=tuple(sequence.ids[start:]),
            logprobs=tuple(sequence.logprobs),
            finish_reason=sequence.finish_reason,
        )


def narrowed(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """Logits [vocab] with all but the tokens that may be drawn at -inf.

    The `top_k` most likely, and of these the smallest set whose probability at this temperature reaches
    `top_p` (nucleus sampling: Holtzman et al. 2020, section 3.1); of equals the smaller ids.
    """
    if top_k is None and top_p is None:
        return logits
    ranked, order = torch.sort(logits, descending=True, stable=True)
    kept = len(ranked) if top_k is None else min(top_k, len(ranked))
    if top_p is not None:
        cumulative = torch.softmax(ranked[:kept] / temperature, -1).cumsum(0)
        kept = min(kept, 1 + int((cumulative < top_p).sum()))
    found = torch.full_like(logits, float("-inf"))
    found[order[:kept]] = ranked[:kept]
    return found


def end_tokens(model: Model) -> tuple[int, ...]:
    """Ids that end a sequence, as the files a model was loaded from name them; else as its tokenizer does."""
    tokenizer = model._tokenizer
    if model.identity is not None:
        try:
            files = resolve(model.name)
            if files.identity(model.identity.dtype).weights == model.identity.weights:
                return end_ids(files, tokenizer)
        except ModelNotFound:
            pass  # moved since it was loaded
    return () if tokenizer is None or tokenizer.eos_id is None else (tokenizer.eos_id,)

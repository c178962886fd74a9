"""How does the model continue a prompt?

Continues prompts token by token, optionally with hook points set to zero.

Without a cache each step is a forward pass over all tokens so far, so that interventions act at every
position of every step. With `cache`, keys and values of earlier tokens are reused
(stages/forward/generation/generate.py states when the tokens are the same). A masked language model fills in
the masks of a prompt, or masks appended to it, in several passes (stages/causal/denoising.py); shown are the
order in which masks are filled in and the probabilities at each mask before that.

Defaults: 20 tokens, the most likely one at each step. The specimen continues facts and wrapped prose that
ship with mizarr, other models the capital of France.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ...stages.causal.continuation import Continuation
from ...stages.causal.denoising import Denoising
from ...stages.corpus.text import wrap
from ...stages.forward.architectures.points import expand
from ...stages.forward.generation import continuations as generation
from ...stages.forward.generation.stopping import end_ids
from ...stages.forward.hooks.interventions import Zero
from ...stages.forward.hooks.spec import HookSpec
from ...stages.forward.models.files import SHIPPED
from ...stages.logits.lens import format_probability, format_text
from ...store.errors import ConfigError
from ..material.answers import FRANCE, encoded
from ..settings import ModelSettings, Natural, setting
from ..subject import shipped_facts, shipped_prose
from ..views import Figure, Heatmap, Table, Text, Tokens, View, bold
from ..workflow import ModelWorkflow, Nodes, loaded
from .denoising import denoising_views

if TYPE_CHECKING:
    import xarray as xr

    from ...stages.forward.generation.generate import NewToken
    from ...stages.forward.text.tokens import Encoding
    from ...store import Store

__all__ = ["Generate", "GenerateSettings"]

FACTS, LINE, LINES = 4, 44, 3
"""Default prompts of the specimen: number of facts; width in characters, and number of complete lines, of the
wrapped prose."""
ROWS, STEPS = 24, 24
"""Largest number of continuations, and of tokens of each, that are drawn."""


@dataclass(frozen=True)
class GenerateSettings(ModelSettings):
    """Settings of the workflow `generate`: the prompts, how tokens are sampled, and which hook points are set
    to zero."""

    prompts: tuple[str, ...] = setting((), "prompts to continue; none: shipped facts and prose")
    max_tokens: int = setting(
        20, "largest number of generated tokens; number of masks appended to a prompt without masks"
    )
    temperature: float = setting(0.0, "sampling temperature; 0: the most likely token")
    seed: Natural = setting(0, "seed of sampling, the same for every prompt")
    top_k: int | None = setting(None, "sample among this many most likely tokens")
    top_p: float | None = setting(None, "sample among the fewest tokens with this total probability")
    stop: tuple[str, ...] = setting((), "strings that end a text")
    zero: tuple[str, ...] = setting((), "hook points (or globs) set to zero at every step")
    cache: bool | None = setting(
        None,
        "reuse keys and values of earlier tokens; false: run over all tokens at each step; none: reuse them "
        "if the tokens are the same",
    )
    chat: bool = setting(False, "format each prompt as a user message with the model's chat template")
    steps: int | None = setting(None, "number of passes in which masks are filled in; none: one per mask")
    order: str | None = setting(
        None,
        "order in which masks are filled in: by confidence, margin, entropy, position or random; none: "
        "confidence",
    )


class Generate(ModelWorkflow):
    """Workflow that continues prompts, optionally with hook points set to zero; then the unchanged model
    continues them too."""

    name = "generate"
    question = "How does the model continue a prompt?"
    descriptive = "Text that the model generates after these prompts, under these settings."
    settings_type = GenerateSettings
    settings: GenerateSettings

    generation = loaded("generation")
    """Result in memory: token_id and logprob [prompt, step], generated_text and finish_reason [prompt]; for a
    masked language model the result of `Denoising`."""

    def plan(self) -> Nodes:
        """Nodes of the continuations, and of those of the unchanged model if hook points are set to zero.

        Raises:
            ConfigError: for settings that do not apply to the model.
            PromptError: for a prompt too long for the context.
        """
        settings = self.settings
        self.texts = settings.prompts or default_prompts(settings.model)
        self._require_fitting()
        self.subject.config.require_vocabulary()
        if not self.subject.config.predicts_next:
            return self._denoising_nodes()
        ids = tuple(tuple(self._encoded(text).ids) for text in self.texts)
        # The callback for new tokens gets the prompt as token ids only.
        self._text_of = dict(zip(ids, self.texts, strict=True))
        self._live: _Printer | None = None
        whole = Continuation(
            ids,
            generation.GenerationSettings(
                max_tokens=settings.max_tokens,
                temperature=settings.temperature,
                seed=settings.seed,
                top_k=settings.top_k,
                top_p=settings.top_p,
                stop=settings.stop,
                # Checkpoints name their end tokens in config, generation config or tokenizer: all of them end
                # a text.
                eos=end_ids(self.subject.files, self.subject.tokenizer),
                cache=settings.cache,
            ),
            on_token=self._print_token,
        )
        return self._nodes(whole)

    def _encoded(self, text: str) -> Encoding:
        """A prompt as tokens, in the chat template if `chat` is set."""
        return encoded(self.subject, text, chat=self.settings.chat)

    def _nodes(self, whole: Continuation | Denoising) -> Nodes:
        """Nodes of an experiment: on the unchanged model and, if hook points are set to zero, with these
        interventions."""
        if not self.settings.zero:
            return {"generation": self.on_model(whole)}
        ablated = replace(whole, hooks=self._zero_hooks())
        return {"generation": self.on_model(ablated), "unchanged": self.on_model(whole)}

    def _require_fitting(self) -> None:
        """Raises ConfigError for settings that do not apply to the model: those of next-token models to
        masked ones, or the reverse."""
        settings, predicts = self.settings, self.subject.config.predicts_next
        unsupported = ("steps", "order") if predicts else ("stop", "cache", "top_k", "top_p")
        if names := [name for name in unsupported if getattr(settings, name) not in (None, ())]:
            kind = "predicts the next token" if predicts else "fills in masks"
            raise ConfigError(
                f"expected no {' and no '.join(names)} for {self.subject.name}, which {kind}, found "
                f"{names[0]}={getattr(settings, names[0])!r}; leave {' and '.join(names)} out"
            )

    def _denoising_nodes(self) -> Nodes:
        """Nodes that fill in the masks of the prompts; masks are appended to prompts without one."""
        settings, subject = self.settings, self.subject
        prompts = tuple(
            tuple(subject.masked(self._encoded(text), settings.max_tokens)) for text in self.texts
        )
        self._text_of, self._live = {}, None
        assert subject.mask is not None  # `masked` raises without one
        whole = Denoising(
            prompts,
            mask=subject.mask,
            steps=settings.steps,
            order=settings.order or "confidence",
            temperature=settings.temperature,
            seed=settings.seed,
        )
        return self._nodes(whole)

    def _zero_hooks(self) -> HookSpec:
        """Specification of the interventions that set the hook points of `zero` to zero."""
        spec = HookSpec()
        for pattern in self.settings.zero:
            for point in expand(pattern, self.subject.config.hook_points):
                spec = spec.intervene(point, Zero())
        return spec

    def run(self, store: Store, **options: Any) -> Self:
        """Computes the results; see `Workflow.run` for `options`. In a terminal, unless `quiet` is set or
        other processes compute, text is printed on stderr while it is generated."""
        # The callback that prints tokens is called in the process that generates them.
        is_remote = options.get("cluster") is not None or options.get("workers", 0) > 1
        if not options.get("quiet", True) and not is_remote and sys.stderr.isatty():
            self._live = _Printer(self._text_of)
            # A progress bar would overwrite the text.
            options["quiet"] = True
        try:
            return super().run(store, **options)
        finally:
            self._live = None

    def _print_token(self, prompt: Sequence[int], new: NewToken) -> None:
        """Prints a new token while it is generated; the experiment calls it for each."""
        if self._live is not None:
            self._live.show(tuple(prompt), new)

    @cached_property
    def unchanged(self) -> xr.Dataset | None:
        """Results of the model without intervention, in memory; None if no hook points are set to zero."""
        return self.result("unchanged").load() if self.settings.zero else None

    @property
    def summary(self) -> str:
        """See `Workflow`: the continuation of the first prompt; empty for a masked language model."""
        if not self.subject.config.predicts_next:
            return ""
        document, more = self._document(0), len(self.texts) - 1
        further = f" There are {more} more prompts." if more else ""
        return (
            f"'{_tail(document['prompt'])}' goes on with '{format_text(document['generated_text'])}' "
            f"({document['generated_tokens']} tokens, mean probability "
            f"{format_probability(_mean_probability(document))}).{further}"
        )

    def views(self) -> Iterator[View]:
        """Views in reading order: continuation of each prompt with the probability of every token; for a
        masked language model those of `denoising_views`."""
        without = f", without {', '.join(self.settings.zero)}" if self.settings.zero else ""
        if not self.subject.config.predicts_next:
            yield from denoising_views(self.subject, self.texts, self.generation, self.unchanged, without)
            return
        documents = [self._document(row) for row in range(len(self.texts))]
        texts = [text for row in range(len(self.texts)) for text in self._generated_texts(row)]
        yield Tokens(
            title="Probability of each generated token",
            caption="One text per prompt, its continuation. Shade: probability that the model gave to a "
            "token when it was generated.",
            texts=tuple(texts),
            value_name="probability of the token when it was generated",
            low=0.0,
            high=1.0,
        )
        unchanged = [("unchanged", lambda row: format_text(row["unchanged_text"]))]
        yield Table.of(
            documents,
            ("prompt", lambda row: _tail(row["prompt"])),
            ("continuation", lambda row: bold(format_text(row["generated_text"]))),
            *(unchanged if self.settings.zero else []),
            ("tokens", "generated_tokens", "d"),
            (
                "mean probability",
                _mean_probability,
                format_probability,
            ),
            ("ends by", "finish_reason", str),
            title=f"Continuations by {self.subject.name}{without}",
            caption="One row per prompt. Mean probability: geometric mean, over the generated tokens, of the "
            "probability that the model gave to each. Ends by: reason why generation stopped.",
            json={"results": documents},
        )
        yield self._figure(texts, without)

    def _figure(self, texts: list[Text], without: str) -> Figure:
        """Figure with a row per continuation and a cell per token, shaded by probability."""
        shown_texts = texts[:ROWS]
        # With hook points set to zero, the continuation of the unchanged model follows each one.
        rows_per_prompt = 2 if self.settings.zero else 1
        n_steps = min(max(len(text.tokens) for text in shown_texts), STEPS)
        probabilities = np.full((len(shown_texts), n_steps), np.nan)
        tokens, labels = [], []
        for row, text in enumerate(shown_texts):
            n_tokens = min(len(text.tokens), n_steps)
            probabilities[row, :n_tokens] = text.values[:n_steps]
            tokens.append((*text.tokens[:n_steps], *[""] * (n_steps - n_tokens)))
            labels.append(_tail(text.label, 37) if row % rows_per_prompt == 0 else "unchanged")
        cells = Heatmap(
            values=probabilities,
            rows=tuple(labels),
            columns=tuple(map(str, range(n_steps))),
            row_name="",
            column_name="step",
            value_name="probability",
            low=0.0,
            high=1.0,
            texts=tuple(tokens),
        )
        caption = (
            "One row per prompt, one cell per generated token. Shade: probability that the model gave it."
        )
        if len(shown_texts) < len(texts):
            caption += f" Shown: the first {len(shown_texts)} of {len(texts)} rows."
        title = f"Continuations by {self.subject.name}{without}"
        return Figure(name="generate", title=title, caption=caption, panels=(cells,))

    def _generated_texts(self, row: int) -> Iterator[Text]:
        """Yields the generated text of prompt `row` and, if hook points are set to zero, that of the
        unchanged model."""
        for prefix, generated in (("", self.generation), ("unchanged: ", self.unchanged)):
            if generated is not None:
                continuation = _of_prompt(generated, row)
                tokens = tuple(self.subject.token_labels(continuation["token_id"].values))
                probabilities = np.exp(continuation["logprob"].values)
                yield Text(tokens, probabilities, f"{prefix}{_tail(self.texts[row])}")

    def _document(self, row: int) -> dict[str, Any]:
        """JSON record of a prompt: the fields of candle-mi's GenerationResult, tokens, probabilities and the
        reason for the end."""
        continuation, text = _of_prompt(self.generation, row), self.texts[row]
        generated = str(continuation["generated_text"].values)
        ids, count = continuation["token_id"].values.tolist(), int(continuation["prompt_tokens"])
        document = {
            "model_id": self.subject.name,
            "prompt": text,
            "generated_text": generated,
            "full_text": (self.subject.tokenizer.chat(text) if self.settings.chat else text) + generated,
            "prompt_tokens": count,
            "generated_tokens": len(ids),
            "total_tokens": count + len(ids),
            "prompt_token_ids": continuation["prompt_id"].values[:count].tolist(),
            "token_ids": ids,
            "tokens": self.subject.token_texts(ids),
            "probabilities": np.exp(continuation["logprob"].values).tolist(),
            "finish_reason": str(continuation["finish_reason"].values),
        }
        if self.unchanged is not None:
            document["unchanged_text"] = str(self.unchanged["generated_text"].values[row])
        return document


class _Printer:
    """Prints text on stderr while it is generated, after the prompt it continues.

    texts: prompt text by token ids.
    """

    def __init__(self, texts: dict[tuple[int, ...], str]) -> None:
        from ...store.display.console import EscapingConsole

        self._console, self._texts = EscapingConsole(stderr=True, highlight=False), texts

    def show(self, prompt: tuple[int, ...], new: NewToken) -> None:
        """Prints a token; the prompt before the first token, an empty line after the last.

        Arguments:
            prompt: token ids of the prompt.
            new: the new token.
        """
        if new.step == 0:
            self._print(self._texts[prompt], style="dim")
        self._print(new.text)
        if new.finish_reason is not None:
            self._print("\n\n")

    def _print(self, text: str, style: str | None = None) -> None:
        # Rich would read brackets in generated text as markup, and wrap every token by itself.
        self._console.print(text, end="", markup=False, soft_wrap=True, style=style)


def default_prompts(model: str) -> tuple[str, ...]:
    """Default prompts: shipped facts and wrapped prose for shipped models, the capital of France for
    others."""
    if model not in SHIPPED:
        return (FRANCE[0],)
    facts = tuple(fact["prompt"] for fact in shipped_facts()[:FACTS])
    # The first line is the title.
    lines = wrap(shipped_prose().partition("\n")[2], LINE).split("\n")
    # Without its last word, which the model is to write.
    unfinished = lines[LINES][: lines[LINES].rindex(" ")]
    return (*facts, "\n".join([*lines[:LINES], unfinished]))


def _of_prompt(dataset: xr.Dataset, row: int) -> xr.Dataset:
    """Results of prompt number `row`, without padding steps."""
    prompt = dataset.isel(prompt=row)
    return prompt.isel(step=slice(int((prompt["token_id"] >= 0).sum())))


def _mean_probability(document: dict[str, Any]) -> float:
    """Geometric mean over the generated tokens of a `Generate._document`."""
    return float(np.exp(np.mean(np.log(document["probabilities"]))))


def _tail(text: str, room: int = 60) -> str:
    """The last `room` characters of a prompt, on one line."""
    shown = format_text(text)
    return shown if len(shown) <= room else "…" + shown[-room:]

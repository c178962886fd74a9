"""How does the model continue a prompt?

Prompts continued token by token, whole or with parts of the model silenced.

Each step is a forward pass over everything so far, so that what is silenced is silenced throughout; with
``cache`` keys and values are kept instead (stages/forward/generation/generate.py says when that is the same).
A model that fills in masks is given as many behind each prompt, or those a prompt has, and fills them in pass
by pass (stages/causal/denoising.py): shown is which one it fills when, and how sure it was of each before.

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
from ...stages.logits.lens import format_probability, format_text, format_token
from ...store.errors import ConfigError
from ..material.answers import FRANCE, encoded, named
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
"""Facts continued by default, and lines of prose of this width before the one that is continued."""
ROWS, STEPS = 24, 24
"""Continuations and tokens drawn at most."""


@dataclass(frozen=True)
class GenerateSettings(ModelSettings):
    """What `--set` can change."""

    prompts: tuple[str, ...] = setting((), "prompts to continue; none: shipped facts and prose")
    max_tokens: int = setting(20, "tokens generated at most; masks behind a prompt that has none")
    temperature: float = setting(0.0, "0 takes the most likely token; above, draws")
    seed: Natural = setting(0, "of the draws; the same for every prompt")
    top_k: int | None = setting(None, "draw among this many most likely tokens")
    top_p: float | None = setting(None, "draw among the fewest tokens of this total probability")
    stop: tuple[str, ...] = setting((), "strings that end a text")
    zero: tuple[str, ...] = setting((), "hook points (or globs) set to zero at every step")
    cache: bool | None = setting(
        None, "keep keys and values, or read everything anew; none: keep where tokens are the same"
    )
    chat: bool = setting(False, "prompts are what a user says, to be put into the model's chat template")
    steps: int | None = setting(None, "passes in which masks are filled in; none: one for each")
    order: str | None = setting(
        None, "masks filled in first, by confidence, margin, entropy, position or random; none: confidence"
    )


class Generate(ModelWorkflow):
    """Prompts continued; where something is silenced, unchanged as well."""

    name = "generate"
    question = "How does the model continue a prompt?"
    descriptive = "Text that the model generates after these prompts, under these settings."
    settings_type = GenerateSettings
    settings: GenerateSettings

    generation = loaded("generation")
    """token_id, logprob [prompt, step], generated_text, finish_reason [prompt]; in memory. Of a model that
    fills in masks what `Denoising` gives."""

    def plan(self) -> Nodes:
        """The prompts continued, or filled in; where something is silenced, by the whole model too."""
        settings = self.settings
        self.texts = settings.prompts or default_prompts(settings.model)
        self._require_fitting()
        if not self.subject.config.predicts_next:
            return self._filled_in()
        ids = tuple(tuple(self._encoded(text).ids) for text in self.texts)
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
                eos=end_ids(self.subject.files, self.subject.tokenizer),
                cache=settings.cache,
            ),
            on_token=self._heard,
        )
        return self._asked(whole)

    def _encoded(self, text: str) -> Encoding:
        return encoded(self.subject, text, chat=self.settings.chat)

    def _asked(self, whole: Continuation | Denoising) -> Nodes:
        """Nodes of the whole model and, where hook points are set to zero, of the silenced model."""
        if not self.settings.zero:
            return {"generation": self.on_model(whole)}
        silenced = replace(whole, hooks=self._silenced())
        return {"generation": self.on_model(silenced), "unchanged": self.on_model(whole)}

    def _require_fitting(self) -> None:
        """ConfigError for settings that say nothing of such a model."""
        given, predicts = self.settings, self.subject.config.predicts_next
        others = ("steps", "order") if predicts else ("stop", "cache", "top_k", "top_p")
        if found := [name for name in others if getattr(given, name) not in (None, ())]:
            kind = "predicts the next token" if predicts else "fills in masks"
            raise ConfigError(
                f"expected no {' and no '.join(found)} of {self.subject.name}, which {kind}, found "
                f"{found[0]}={getattr(given, found[0])!r}; leave it out"
            )

    def _filled_in(self) -> Nodes:
        """Nodes that fill in masks of the prompts, or masks behind them."""
        given, subject = self.settings, self.subject
        prompts = tuple(tuple(subject.masked(self._encoded(text), given.max_tokens)) for text in self.texts)
        self._text_of, self._live = {}, None
        assert subject.mask is not None  # or there would be no masked prompts
        whole = Denoising(
            prompts,
            mask=subject.mask,
            steps=given.steps,
            order=given.order or "confidence",
            temperature=given.temperature,
            seed=given.seed,
        )
        return self._asked(whole)

    def _silenced(self) -> HookSpec:
        spec = HookSpec()
        for pattern in self.settings.zero:
            for point in expand(pattern, self.subject.config.hook_points):
                spec = spec.intervene(point, Zero())
        return spec

    def run(self, store: Store, **options: Any) -> Self:
        """As every workflow; for somebody at a terminal, text appears on stderr as it is generated."""
        elsewhere = options.get("cluster") is not None or options.get("workers", 0) > 1
        if not options.get("quiet", True) and not elsewhere and sys.stderr.isatty():
            self._live = _Printer(self._text_of)
            options["quiet"] = True  # a bar would be drawn over the text
        try:
            return super().run(store, **options)
        finally:
            self._live = None

    def _heard(self, prompt: Sequence[int], new: NewToken) -> None:
        if self._live is not None:
            self._live.show(tuple(prompt), new)

    @cached_property
    def unchanged(self) -> xr.Dataset | None:
        """Results of the whole model, where hook points are set to zero; else None."""
        return self.result("unchanged").load() if self.settings.zero else None

    def views(self) -> Iterator[View]:
        """What came after each prompt, how sure the model was, and every token shaded by its probability."""
        without = f", without {', '.join(self.settings.zero)}" if self.settings.zero else ""
        if not self.subject.config.predicts_next:
            yield from denoising_views(self.subject, self.texts, self.generation, self.unchanged, without)
            return
        told = [self._told(row) for row in range(len(self.texts))]
        texts = [text for row in range(len(self.texts)) for text in self._said(row)]
        yield Tokens(
            title="How sure of each token?",
            texts=tuple(texts),
            value_name="probability of the token when it was chosen",
            low=0.0,
            high=1.0,
        )
        before = [("unchanged", lambda one: format_text(one["unchanged_text"]))]
        yield Table.of(
            told,
            ("prompt", lambda one: _tail(one["prompt"])),
            ("continuation", lambda one: bold(format_text(one["generated_text"]))),
            *(before if self.settings.zero else []),
            ("tokens", "generated_tokens", "d"),
            ("sure", lambda one: float(np.exp(np.mean(np.log(one["probabilities"])))), format_probability),
            ("ends", "finish_reason", str),
            title=f"{self.subject.name} goes on{without}",
            caption="sure: geometric mean of the probabilities of the tokens chosen",
            json={"results": told},
        )
        yield self._figure(texts, without)

    def _figure(self, texts: list[Text], without: str) -> Figure:
        """A row per continuation, a cell per token."""
        shown, each = texts[:ROWS], 2 if self.settings.zero else 1
        steps = min(max(len(text.tokens) for text in shown), STEPS)
        rest = [max(0, steps - len(text.tokens)) for text in shown]
        padded = [np.pad(text.values[:steps], (0, n), constant_values=np.nan)
                  for text, n in zip(shown, rest, strict=True)]  # fmt: skip
        cells = Heatmap(
            values=np.stack(padded),
            rows=tuple(
                _tail(text.label, 37) if i % each == 0 else "unchanged" for i, text in enumerate(shown)
            ),
            columns=tuple(map(str, range(steps))),
            row_name="",
            column_name="step",
            value_name="probability",
            low=0.0,
            high=1.0,
            texts=tuple((*text.tokens[:steps], *[""] * n) for text, n in zip(shown, rest, strict=True)),
        )
        left_out = f" The first {len(shown)} of {len(texts)} rows." if len(shown) < len(texts) else ""
        caption = f"Each token generated, shaded by the probability the model gave it.{left_out}"
        title = f"How {self.subject.name} goes on{without}"
        return Figure(name="generate", title=title, caption=caption, panels=(cells,))

    def _said(self, row: int) -> Iterator[Text]:
        """Generated text, and the text of the whole model where hook points are set to zero."""
        for word, found in (("", self.generation), ("unchanged: ", self.unchanged)):
            if found is not None:
                one = _one(found, row)
                said = tuple(map(format_token, named(self.subject, one["token_id"].values)))
                yield Text(said, np.exp(one["logprob"].values), f"{word}{_tail(self.texts[row])}")

    def _told(self, row: int) -> dict[str, Any]:
        """A prompt in the fields of candle-mi's GenerationResult; tokens, probabilities and why it ended."""
        one, text = _one(self.generation, row), self.texts[row]
        generated = str(one["generated_text"].values)
        ids, count = one["token_id"].values.tolist(), int(one["prompt_tokens"])
        found = {
            "model_id": self.subject.name,
            "prompt": text,
            "generated_text": generated,
            "full_text": (self.subject.tokenizer.chat(text) if self.settings.chat else text) + generated,
            "prompt_tokens": count,
            "generated_tokens": len(ids),
            "total_tokens": count + len(ids),
            "prompt_token_ids": one["prompt_id"].values[:count].tolist(),
            "token_ids": ids,
            "tokens": named(self.subject, ids),
            "probabilities": np.exp(one["logprob"].values).tolist(),
            "finish_reason": str(one["finish_reason"].values),
        }
        if self.unchanged is not None:
            found["unchanged_text"] = str(self.unchanged["generated_text"].values[row])
        return found


class _Printer:
    """Text on stderr as it comes, behind the prompt it continues."""

    def __init__(self, texts: dict[tuple[int, ...], str]) -> None:
        from ...store.display.console import EscapingConsole

        self._console, self._texts = EscapingConsole(stderr=True, highlight=False), texts

    def show(self, prompt: tuple[int, ...], new: NewToken) -> None:
        """Print a token: before the first its prompt, behind the last an empty line."""
        if new.step == 0:
            self._print(self._texts[prompt], style="dim")
        self._print(new.text)
        if new.finish_reason is not None:
            self._print("\n\n")

    def _print(self, text: str, style: str | None = None) -> None:
        self._console.print(text, end="", markup=False, soft_wrap=True, style=style)


def default_prompts(model: str) -> tuple[str, ...]:
    """What a model is asked to continue when nobody says: facts and wrapped prose of the specimen's, or the
    capital of France."""
    if model not in SHIPPED:
        return (FRANCE[0],)
    facts = tuple(fact["prompt"] for fact in shipped_facts()[:FACTS])
    lines = wrap(shipped_prose().partition("\n")[2], LINE).split("\n")
    begun = lines[LINES][: lines[LINES].rindex(" ")]
    return (*facts, "\n".join([*lines[:LINES], begun]))


def _one(dataset: xr.Dataset, row: int) -> xr.Dataset:
    """Results of one prompt, without padding steps."""
    one = dataset.isel(prompt=row)
    return one.isel(step=slice(int((one["token_id"] >= 0).sum())))


def _tail(text: str, room: int = 60) -> str:
    """The end of a prompt, on one line."""
    shown = format_text(text)
    return shown if len(shown) <= room else "…" + shown[-room:]

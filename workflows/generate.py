"""What does the model say next? Prompts continued token by token, whole or with parts of the model silenced.

Each step is a forward pass over everything so far, so that what is silenced is silenced throughout; with
``cache`` keys and values are kept instead (stages/forward/generate.py says when that is the same).

Defaults: 20 tokens, the most likely one at each step. The specimen continues facts and wrapped prose that
ship with mizarr, other models the capital of France.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ..stages.continuation import Continuation
from ..stages.forward import generation
from ..stages.forward.hooks import HookSpec
from ..stages.forward.interventions import Zero
from ..stages.forward.points import expand
from ..stages.forward.stopping import end_ids
from ..stages.lens import format_probability, format_token
from ..stages.text import wrap
from .answers import FRANCE, SPECIMEN, encoded, named, plain
from .settings import setting
from .subject import Subject, shipped_facts, shipped_prose
from .workflow import Workflow

if TYPE_CHECKING:
    import xarray as xr
    from rich.table import Table

    from ..stages.forward.generate import NewToken
    from ..stages.forward.model import Model
    from ..store import Store
    from .report import Element

__all__ = ["Generate", "Settings"]

FACTS, LINE, LINES = 4, 44, 3
"""Facts continued by default, and lines of prose of this width before the one that is continued."""


@dataclass(frozen=True)
class Settings:
    """What `--set` can change."""

    model: str = setting("specimen", 'hub id, directory, or "specimen"')
    prompts: tuple[str, ...] = setting((), "prompts to continue; none: shipped facts and prose")
    max_tokens: int = setting(20, "tokens generated at most")
    temperature: float = setting(0.0, "0 takes the most likely token; above, draws")
    seed: int = setting(0, "of the draws; the same for every prompt")
    top_k: int | None = setting(None, "draw among this many most likely tokens")
    top_p: float | None = setting(None, "draw among the fewest tokens of this total probability")
    stop: tuple[str, ...] = setting((), "strings that end a text")
    zero: tuple[str, ...] = setting((), "hook points (or globs) set to zero at every step")
    cache: bool | None = setting(
        None, "keep keys and values, or read everything anew; none: keep where tokens are the same"
    )
    dtype: str = setting("float32", "what the model computes in")


class Generate(Workflow):
    """Prompts continued; where something is silenced, unchanged as well."""

    name = "generate"
    question = "What does the model say next?"
    settings_type = Settings

    def __init__(self, settings: Settings, model: Model | None = None) -> None:
        super().__init__(settings)
        self.subject = Subject(model or settings.model, settings.dtype)
        self.texts = settings.prompts or default_prompts(settings.model)
        ids = tuple(tuple(encoded(self.subject, text).ids) for text in self.texts)
        self._text_of = dict(zip(ids, self.texts, strict=True))
        self._live: _Printer | None = None
        whole = Continuation(
            ids,
            generation.Settings(
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
        chosen = {"generation": whole}
        if settings.zero:
            chosen = {"generation": replace(whole, hooks=self._silenced()), "unchanged": whole}
        subject = model or settings.model
        self.nodes = {name: each.on(subject, dtype=settings.dtype) for name, each in chosen.items()}

    def _silenced(self) -> HookSpec:
        spec = HookSpec()
        for pattern in self.settings.zero:
            for point in expand(pattern, self.subject.config.hook_points):
                spec.intervene(point, Zero())
        return spec

    def run(self, store: Store, **options: Any) -> Self:
        """As every workflow; for somebody at a terminal, text appears on stderr as it is generated."""
        if not options.get("quiet", True) and options.get("cluster") is None and sys.stderr.isatty():
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
    def generation(self) -> xr.Dataset:
        """token_id, logprob [prompt, step], generated_text, finish_reason [prompt]; in memory."""
        return self.result("generation").load()

    @cached_property
    def unchanged(self) -> xr.Dataset | None:
        """The same of the whole model, where something was silenced; else None."""
        return self.result("unchanged").load() if self.settings.zero else None

    def tables(self) -> list[Table]:
        """What came after each prompt, and how sure the model was."""
        from rich.table import Table

        title = f"{self.subject.name} goes on"
        if self.settings.zero:
            title += f", without {', '.join(self.settings.zero)}"
        table = Table(title=title, box=None, pad_edge=False)
        table.add_column("prompt", max_width=34)
        table.add_column("continuation", style="bold")
        if self.unchanged is not None:
            table.add_column("unchanged")
        for name in ("tokens", "sure", "ends"):
            table.add_column(name, justify="right", no_wrap=True)
        for row, text in enumerate(self.texts):
            one = _one(self.generation, row)
            told = [plain(str(one["generated_text"].values))]
            if self.unchanged is not None:
                told.append(plain(str(self.unchanged["generated_text"].values[row])))
            sure = format_probability(float(np.exp(one["logprob"].mean())))
            cells = (str(one.sizes["step"]), sure, str(one["finish_reason"].values))
            table.add_row(plain(_tail(text)), *told, *cells)
        table.caption = "sure: geometric mean of the probabilities of the tokens chosen"
        return [table]

    def draw(self, folder: Path) -> list[Path]:
        """One page: every token generated, shaded by its probability."""
        from . import figures_generate

        def page() -> Any:
            rows: list[tuple[str, xr.Dataset]] = []
            for number, text in enumerate(self.texts):
                rows.append((_tail(text), _one(self.generation, number)))
                if self.unchanged is not None:
                    rows.append(("unchanged", _one(self.unchanged, number)))
            return figures_generate.tokens_page(
                [label for label, _ in rows],
                [named(self.subject, one["token_id"].values) for _, one in rows],
                [np.exp(one["logprob"].values) for _, one in rows],
                model=self.subject.name,
                silenced=self.settings.zero,
                footer=self.footer,
            )

        return [self.figure(folder / "generate.png", page)]

    def elements(self) -> list[Element]:
        """What came after each prompt, token by token."""
        from .report import Text, Tokens

        shown = [
            ("", self.generation),
            *([] if self.unchanged is None else [("unchanged: ", self.unchanged)]),
        ]
        texts = []
        for row, text in enumerate(self.texts):
            for word, found in shown:
                one = _one(found, row)
                said = tuple(map(format_token, named(self.subject, one["token_id"].values)))
                texts.append(Text(said, np.exp(one["logprob"].values), f"{word}{_tail(text)}"))
        tokens = Tokens(
            title="How sure of each token?",
            texts=tuple(texts),
            value_name="probability of the token when it was chosen",
            low=0.0,
            high=1.0,
        )
        return [tokens, *super().elements()]

    def to_json(self) -> dict[str, Any]:
        """Per prompt the fields of candle-mi's GenerationResult, tokens, probabilities and why it ended."""
        return {**self.header(), "results": [self._prompt_json(row) for row in range(len(self.texts))]}

    def _prompt_json(self, row: int) -> dict[str, Any]:
        one, text = _one(self.generation, row), self.texts[row]
        generated = str(one["generated_text"].values)
        ids, count = one["token_id"].values.tolist(), int(one["prompt_tokens"])
        found = {
            "model_id": self.subject.name,
            "prompt": text,
            "generated_text": generated,
            "full_text": text + generated,
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
    """Text on stderr as it comes, behind the prompt it continues; what steers a terminal is escaped."""

    def __init__(self, texts: dict[tuple[int, ...], str]) -> None:
        from rich.console import Console

        self._console, self._texts = Console(stderr=True, highlight=False), texts

    def show(self, prompt: tuple[int, ...], new: NewToken) -> None:
        """One token more."""
        if new.step == 0:
            self._print(self._texts[prompt], style="dim")
        self._print(new.text)
        if new.finish_reason is not None:
            self._print("\n\n")

    def _print(self, text: str, style: str | None = None) -> None:
        shown = "\n".join(format_token(line) for line in text.split("\n"))
        self._console.print(shown, end="", markup=False, soft_wrap=True, style=style)


def default_prompts(model: str) -> tuple[str, ...]:
    """What a model is asked to continue when nobody says: facts and wrapped prose of the specimen's, or the
    capital of France."""
    if model != SPECIMEN:
        return (FRANCE[0],)
    facts = tuple(fact["prompt"] for fact in shipped_facts()[:FACTS])
    lines = wrap(shipped_prose().partition("\n")[2], LINE).split("\n")
    begun = lines[LINES][: lines[LINES].rindex(" ")]
    return (*facts, "\n".join([*lines[:LINES], begun]))


def _one(dataset: xr.Dataset, row: int) -> xr.Dataset:
    """One prompt, its own steps only."""
    one = dataset.isel(prompt=row)
    return one.isel(step=slice(int((one["token_id"] >= 0).sum())))


def _tail(text: str, room: int = 60) -> str:
    """The end of a prompt, on one line."""
    shown = format_token(text)
    return shown if len(shown) <= room else "…" + shown[-room:]


WORKFLOW = Generate

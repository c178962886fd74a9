"""At which layer does the model know what comes next? The logit lens over a list of prompts.

Captures the residual stream after every layer, reads a next-token distribution off each with the model's own
readout (stages/lens.py), and follows the answer of each prompt through the layers.

Defaults: the facts that ship with the specimen. A prompt's answer is followed by its first token, found by
encoding prompt and answer together, so that a word of several tokens is not looked up as a token of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..stages.lens import first_appearance, format_probability, format_token, logit_lens, next_tokens
from ..stages.readout import readout_node
from ..store.errors import ConfigError
from .subject import Subject, shipped_facts
from .workflow import Workflow, setting

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.figure import Figure
    from rich.table import Table

    from ..stages.forward.model import Model
    from ..store import PackedTokens
    from .report import Element

__all__ = ["LogitLens", "Settings"]

TOP = 10
"""Layers are searched for the answer among this many tokens (candle-mi's `first_appearance`)."""


ROWS = 12
"""Prompts listed in the table of answers, and to choose from on a page."""


@dataclass(frozen=True)
class Settings:
    """What `--set` can change."""

    model: str = setting("specimen", 'hub id, directory, or "specimen"')
    prompts: tuple[str, ...] = setting((), "prompts to read; none: the facts shipped with mizarr")
    answers: tuple[str, ...] = setting((), "what comes next, one per prompt or one for all; may be empty")
    top_k: int = setting(10, "most likely tokens kept per layer and position")
    soft_cap: bool = setting(True, "apply the model's final soft cap, if it has one")
    heatmaps: int = setting(2, "how many prompts get a figure of their own")
    dtype: str = setting("float32", "what the model computes in")

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ConfigError(f"expected top_k to be at least 1, found {self.top_k}")
        if self.answers and len(self.answers) not in (1, len(self.prompts)):
            raise ConfigError(
                f"expected one answer, or one per prompt ({len(self.prompts)}), found {len(self.answers)}"
            )


class LogitLens(Workflow):
    """Prompts through the lens."""

    name = "logit_lens"
    question = "At which layer does the model know what comes next?"
    settings_type = Settings

    def __init__(self, settings: Settings, model: Model | None = None) -> None:
        super().__init__(settings)
        self.texts, self.words = settings.prompts, settings.answers
        if not self.texts:
            facts = shipped_facts()
            self.texts, self.words = tuple(f["prompt"] for f in facts), tuple(f["target"] for f in facts)
        elif len(self.words) == 1:
            self.words *= len(self.texts)
        self.subject = Subject(model or settings.model, settings.dtype)
        tokens = self.subject.pack(self.texts)
        states = self.subject.capture(tokens, "blocks.*.hook_resid_post")
        readout = readout_node(self.subject.files, dtype=self.subject.dtype)
        lens = logit_lens.on(
            resid_post=states["resid_post"],
            targets=self._targets(tokens),
            readout=readout,
            top_k=settings.top_k,
            soft_cap=settings.soft_cap,
        )
        self.nodes = {"lens": lens, "readout": readout}

    def _targets(self, tokens: PackedTokens) -> xr.DataArray:
        """The next token of each token; for the last one of a prompt, its answer."""
        import xarray as xr

        targets = next_tokens(tokens.ids, tokens.prompt_of(slice(None)))
        for i, answer in enumerate(self.words):
            targets[tokens.row(i).stop - 1] = self.subject.answer_id(self.texts[i], answer)
        return xr.DataArray(targets, dims="token", name="targets")

    @cached_property
    def lens(self) -> xr.Dataset:
        """The lens on all tokens of all prompts, in memory: [layer, token, rank] and [layer, token]."""
        return self.result("lens").load()

    @cached_property
    def vocabulary(self) -> list[str]:
        """Text of each token id."""
        return list(self.result("readout")["token"].values)

    def prompt(self, i: int) -> xr.Dataset:
        """The lens on prompt `i`: [layer, position, rank] and [layer, position]."""
        rows = np.flatnonzero(self.lens["prompt"].values == i)
        part = self.lens.isel(token=rows).drop_vars(["prompt", "position"], errors="ignore")
        return part.rename(token="position").assign_coords(position=np.arange(len(rows)))

    def answers(self) -> xr.Dataset:
        """The lens at the last token of every prompt that has an answer: prompt in place of token."""
        prompts = self.lens["prompt"].values
        last = np.flatnonzero(np.diff(prompts, append=prompts[-1] + 1))
        last = last[self.lens["target_id"].values[last] >= 0]
        part = self.lens.isel(token=last).drop_vars(["prompt", "position"], errors="ignore")
        return part.rename(token="prompt").assign_coords(prompt=prompts[last])

    def tables(self) -> list[Table]:
        """The layers of the first prompt, and where the answers of all prompts appear."""
        answers = self.answers()
        return [self._layers_table(0), *([_answers_table(self, answers)] if answers.sizes["prompt"] else [])]

    def draw(self, folder: Path) -> list[Path]:
        """One heatmap for each of the first prompts, and one figure of all answers."""
        from . import figures

        def heatmap(i: int) -> Figure:
            part = self.prompt(i)
            tokens = [self.vocabulary[t] for t in part["token_id"].values]
            return figures.lens_heatmap(
                part, tokens, self.vocabulary, model=self.subject.name, footer=self.footer
            )

        shown = range(min(self.settings.heatmaps, len(self.texts)))
        files = [self.figure(folder / f"logit_lens_{i}.png", partial(heatmap, i)) for i in shown]
        answers = self.answers()
        if answers.sizes["prompt"] > 1:
            labels = [f"{self.words[i]}" for i in answers["prompt"].values]
            files.append(
                self.figure(
                    folder / "logit_lens_answers.png",
                    lambda: figures.answers_by_layer(
                        answers, labels, model=self.subject.name, footer=self.footer
                    ),
                )
            )
        return files

    def elements(self) -> list[Element]:
        """The lens on each of the first prompts, and where the answers of all prompts appear."""
        from .report import Choice, Lens, from_rich

        def lens(i: int) -> Element:
            return Lens.of(self.prompt(i), self.vocabulary, title="")

        found: list[Element] = [
            Choice(
                title=f"What each layer of {self.subject.name} would say next",
                caption="The residual stream after each layer, read with the model's own final norm and "
                "unembedding. Click a cell to pin it.",
                sources=("lens", "readout"),
                name="prompt",
                options=tuple((self.texts[i], lens(i)) for i in range(min(ROWS, len(self.texts)))),
            )
        ]
        answers = self.answers()
        if answers.sizes["prompt"] > 1:
            found.append(self._curves(answers))
        return [*found, *map(from_rich, self.tables())]

    def _curves(self, answers: xr.Dataset) -> Element:
        """How many prompts have their answer among the first tokens, and how likely it is, by layer."""
        from .report import Line, Lines

        rank = answers["target_rank"].transpose("layer", "prompt").values
        probability = np.exp(answers["target_logprob"].transpose("layer", "prompt").values)
        return Lines(
            title="Where the answers appear",
            caption=f"{rank.shape[1]:,} prompts, at their last token.",
            sources=("lens",),
            x=tuple(answers["layer"].values.tolist()),
            x_name="layer",
            y_name="share of prompts",
            low=0.0,
            high=1.0,
            lines=(
                *(Line(f"answer in the top {k}", (rank <= k).mean(axis=1)) for k in (TOP, 5, 1)),
                Line("median probability of the answer", np.median(probability, axis=1), control=True),
            ),
        )

    def to_json(self) -> dict[str, Any]:
        """Per prompt the fields of candle-mi's example, plus entropy and KL; and where it all comes from."""
        return {**self.header(), "results": [self._prompt_json(i) for i in range(len(self.texts))]}

    def _prompt_json(self, i: int) -> dict[str, Any]:
        last = self.prompt(i).isel(position=-1)
        config = self.subject.config
        found: dict[str, Any] = {
            "model_id": self.subject.name,
            "prompt": self.texts[i],
            "n_layers": config.num_layers,
            "n_heads": config.axis_sizes["head"],
            "hidden_size": config.hidden_size,
        }
        if self.words:
            appears = first_appearance(last["top_id"], int(last["target_id"]), TOP)
            found |= {
                "answer": self.words[i],
                "answer_token_id": int(last["target_id"]),
                "answer_first_top10": appears,
            }
            if self.words[i].strip() == "Paris":
                found["paris_first_top10"] = appears
        found["layers"] = [self._layer_json(last.isel(layer=row)) for row in range(last.sizes["layer"])]
        return found

    def _layer_json(self, row: xr.Dataset) -> dict[str, Any]:
        ids, probabilities = row["top_id"].values.tolist(), np.exp(row["top_logprob"].values).tolist()
        found = {
            "layer": int(row["layer"]),
            "predictions": [
                {"rank": rank, "token_id": token, "token": self.vocabulary[token], "probability": p}
                for rank, (token, p) in enumerate(zip(ids, probabilities, strict=True), start=1)
            ],
            "entropy": float(row["entropy"]),
            "kl_from_last": float(row["kl"]),
        }
        if int(row["target_id"]) >= 0:
            found |= {
                "answer_rank": int(row["target_rank"]),
                "answer_probability": float(np.exp(row["target_logprob"])),
            }
        return found

    def _layers_table(self, i: int) -> Table:
        from rich.table import Table

        last = self.prompt(i).isel(position=-1)
        shown = min(4, last.sizes["rank"])
        title = f"After each layer of {self.subject.name}: {_plain(self.texts[i])!r} …"
        table = Table(title=title, box=None, pad_edge=False)
        table.add_column("layer", justify="right", style="bold")
        for k in range(shown):
            table.add_column(("most likely", "2nd", "3rd", "4th")[k], no_wrap=True)
        table.add_column("entropy", justify="right")
        table.add_column("KL", justify="right")
        for layer in reversed(range(last.sizes["layer"])):
            row = last.isel(layer=layer)
            ids, logprob = row["top_id"].values, row["top_logprob"].values
            shares = [format_probability(p) for p in np.exp(logprob[:shown]).tolist()]
            words = [_plain(self.vocabulary[i]) for i in ids[:shown]]
            cells = [f"{word} [dim]{share}[/dim]" for word, share in zip(words, shares, strict=True)]
            numbers = [f"{float(row[name]):.2f}" for name in ("entropy", "kl")]
            table.add_row(str(int(row["layer"])), *cells, *numbers)
        table.caption = "entropy of the distribution, KL of it from the last layer's; nats"
        return table


def _answers_table(self: LogitLens, answers: xr.Dataset) -> Table:
    from rich.table import Table

    n = answers.sizes["prompt"]
    best = (answers["target_rank"].isel(layer=-1) == 1).values.sum()
    title = f"Answers: the most likely token at the end of {best} of {n} prompts"
    table = Table(title=title, box=None, pad_edge=False)
    table.add_column("prompt", no_wrap=True, overflow="ellipsis", max_width=32)
    table.add_column("answer", no_wrap=True, min_width=8)
    for column in (f"top {TOP} from", "top 1 from", "at the end"):
        table.add_column(column, justify="right", no_wrap=True, min_width=len(column))
    ids, targets = answers["top_id"].transpose("prompt", "layer", "rank"), answers["target_id"].values
    final = np.exp(answers["target_logprob"].transpose("prompt", "layer").values[:, -1])
    for row, i in enumerate(answers["prompt"].values[:ROWS].tolist()):
        found = [first_appearance(ids[row], int(targets[row]), k) for k in (TOP, 1)]
        layers = ["never" if layer is None else f"layer {layer}" for layer in found]
        words = (_plain(self.texts[i]), _plain(self.words[i]))
        table.add_row(*words, *layers, format_probability(float(final[row])))
    more = f"and {n - ROWS} more, all in the JSON; " if n > ROWS else ""
    table.caption = f"{more}an answer of several tokens is followed by its first one"
    return table


def _plain(text: str) -> str:
    """Text as rich prints it literally, on one line."""
    from rich.markup import escape

    return escape(format_token(text))


WORKFLOW = LogitLens

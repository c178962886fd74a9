"""Does a second line rhyme when the rhyme is fed back into earlier layers?

Layers gone through again, with a direction.

A model reads a first line and writes the second. Beside a plain pass, a block of layers is gone through
twice, or is fed, at the first line's end, with the mean unembedding of all words that rhyme
(stages/causal/recurrence.py; candle-mi's "anacrousis" protocol: a plain pass, four blocks twice and at five
strengths, one block fed at every step at three, 28 conditions). Every position is read anew at every step
where a change at one depends on how many follow.

A second line is scored twice: whether it ends on a word that rhymes, and whether on another one than the
first line does, as a line that is copied rhymes with itself.

One condition is shown in full, beside random directions as long, fed likewise in each line. Because a model
that rhymes anyway can hardly rhyme more, the same is asked of the rhyme of another line: whether that is what
the second line then ends on. Where a model rhymes with fewer than two of these lines nothing is claimed.

Defaults: lines the recurrent specimen can go on from. `preset=anacrousis`: the published lines and
conditions, on Llama 3.2 1B.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ...stages.causal.recurrence import RecurrentContinuation, Trial
from ...stages.forward.generation.continuations import GenerationSettings
from ...stages.forward.generation.stopping import end_ids
from ...stages.logits.lens import format_probability, format_text, format_token
from ...store.arrays import Floats
from ..claim import Claim, Controls
from ..material.answers import encoded
from ..material.samples.rhymes import PRESETS, Condition, FirstLine, block_of, conditions_of, last_word
from ..settings import ControlSettings, Count, ModelSettings, Natural, setting
from ..views import Data, Figure, Heatmap, Line, Lines, Table, View, bold, dash
from ..workflow import ModelWorkflow, Nodes, loaded

if TYPE_CHECKING:
    import xarray as xr

    from ...stages.forward.models.model import Model

__all__ = ["RecurrentFeedback", "RecurrentFeedbackSettings"]

RESAMPLED = 2000
"""Means over lines of a direction drawn anew in each, which the selected one is compared with."""
FEWEST = 2
"""Lines a model must rhyme with for a claim."""
WORDS = {0: "no rhyme", 1: "the same word", 2: "another word"}
"""How a second line ends."""


@dataclass(frozen=True)
class RecurrentFeedbackSettings(ControlSettings, ModelSettings):
    """What `--set` can change; what is left empty is the preset's."""

    model: str = setting("", 'hub id, directory, or a shipped one such as "specimen"')
    preset: Literal["specimen", "anacrousis"] = setting("specimen", "lines and conditions, and their model")
    controls: Natural = setting(
        4, "random directions of equal length fed likewise, in each line; 0: none, nothing is claimed"
    )
    limit: Natural = setting(0, "first lines, from the first on; 0 takes all")
    sweep: bool = setting(True, "every condition of the protocol, and not only the selected one")
    blocks: tuple[str, ...] = setting(
        (), "blocks gone through twice, and fed, the last also at every step; none: the preset's"
    )
    strengths: tuple[float, ...] = setting((), "at which they are fed; none: the preset's")
    block: str = setting("", 'block of the selected condition, such as "8-15"; none: the preset\'s')
    strength: float | None = setting(None, "its strength; none: the preset's")
    sustained: bool | None = setting(None, "whether it is fed at every step; none: as in the preset")
    depth: Count = setting(2, "how often a block is gone through; fed, more than 2 is 2")
    max_tokens: Count = setting(30, "tokens of a second line at most")


class RecurrentFeedback(ModelWorkflow):
    """First lines gone on from, under every condition."""

    name = "recurrent_feedback"
    question = "Does a second line rhyme when the rhyme is fed back into earlier layers?"
    settings_type = RecurrentFeedbackSettings
    settings: RecurrentFeedbackSettings

    trials = loaded("trials")
    """Every line under every condition, [trial]: condition by condition."""
    controls = loaded("controls")
    """Every line with the words of another one, [trial], then under random directions, draw by draw."""

    def __init__(self, settings: RecurrentFeedbackSettings, model: Model | None = None) -> None:
        self.preset = PRESETS[settings.preset]
        super().__init__(replace(settings, model=settings.model or self.preset.model), model)

    def plan(self) -> Nodes:
        """Every line under every condition, and under the selected condition with control directions."""
        given, preset = self.settings, self.preset
        self.lines = preset.lines[: given.limit or None]
        block, levels = preset.sustained
        sustained = (given.blocks[-1] if given.blocks else block, given.strengths or levels)
        chosen = conditions_of(
            given.blocks or preset.blocks, given.strengths or preset.strengths, sustained, given.depth
        )
        every = [each for each in chosen if given.sweep or each.depth == 1]
        self.condition = self._selected_condition()
        self.conditions = tuple(every) if self.condition in every else (*every, self.condition)
        prompts = [tuple(encoded(self.subject, f"{line.text}\n").ids) for line in self.lines]
        words = [tuple(map(self._last_token, line.family)) for line in self.lines]
        trials = [
            tuple(self._trial(condition, ids, own) for ids, own in zip(prompts, words, strict=True))
            for condition in self.conditions
        ]
        others = tuple(
            self._trial(self.condition, ids, words[self.other(row)]) for row, ids in enumerate(prompts)
        )
        drawn = [
            tuple(
                replace(trial, draw=draw, seed=given.seed * len(prompts) + row)
                for row, trial in enumerate(trials[self.conditions.index(self.condition)])
            )
            for draw in range(given.controls)
        ]
        how = GenerationSettings(
            max_tokens=given.max_tokens, stop="\n", eos=end_ids(self.subject.files, self.subject.tokenizer)
        )
        return {
            "trials": self.on_model(RecurrentContinuation(tuple(trials), how)),
            "controls": self.on_model(RecurrentContinuation((others, *drawn), how)),
        }

    def _selected_condition(self) -> Condition:
        """The preset's condition, changed as settings say."""
        given, preset = self.settings, self.preset
        known = conditions_of(preset.blocks, preset.strengths, preset.sustained, given.depth)
        chosen = next(each for each in known if each.name == preset.chosen)
        if not given.block and given.strength is None and given.sustained is None:
            return chosen
        block = given.block or "{}-{}".format(*chosen.block)
        strength = chosen.strength if given.strength is None else given.strength
        sustained = chosen.sustained if given.sustained is None else given.sustained
        name = f"{'sustained' if sustained else 'unembed'}_{block}_s={strength:.1f}"
        return Condition(name, block_of(block), given.depth, strength, sustained)

    @staticmethod
    def _trial(condition: Condition, prompt: tuple[int, ...], words: tuple[int, ...]) -> Trial:
        start, end = condition.block
        return Trial(
            prompt, words, start, end, condition.depth, condition.strength, sustained=condition.sustained
        )

    def _last_token(self, word: str) -> int:
        return int(self.subject.tokenizer.encode(f" {word}", add_special=False).ids[-1])

    def other(self, row: int) -> int:
        """The line whose rhyme is fed in place of a line's own: the one half of all lines further on."""
        return (row + len(self.lines) // 2) % len(self.lines)

    # -- what came out

    @cached_property
    def ends(self) -> list[list[str]]:
        """Last words of second lines, [condition][line]."""
        return self._last_words(self.trials)

    def _last_words(self, trials: xr.Dataset) -> list[list[str]]:
        words = np.array([last_word(str(text)) for text in trials["generated_text"].values], object)
        rows: list[list[str]] = words.reshape(-1, len(self.lines)).tolist()
        return rows

    @cached_property
    def scores(self) -> Floats:
        """0: no rhyme, 1: the word of the first line, 2: another word that rhymes; [condition, line]."""
        return np.array([list(map(_score, self.lines, words)) for words in self.ends], np.float64)

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """Scores of every condition, and which lines rhymed under it."""
        numbers = np.array([line.number for line in self.lines])
        tokens = (self.trials["token_id"].values >= 0).sum(axis=1).reshape(-1, len(self.lines))
        return [
            {
                "name": condition.name,
                "count": int((scores > 0).sum()),
                "count_without_target": int((scores == 2).sum()),
                "ended": int((count < self.settings.max_tokens).sum()),
                "ids": numbers[scores > 0].tolist(),
                "ids_without_target": numbers[scores == 2].tolist(),
            }
            for condition, scores, count in zip(self.conditions, self.scores, tokens, strict=True)
        ]

    @property
    def baseline(self) -> int:
        """Index of the plain pass among the conditions."""
        return next(i for i, each in enumerate(self.conditions) if each.depth == 1)

    @property
    def row(self) -> int:
        """Index of the selected condition."""
        return self.conditions.index(self.condition)

    @cached_property
    def control_ends(self) -> tuple[list[str], list[list[str]]]:
        """Last words under the words of another line, [line], and under random directions, [line][draw]."""
        foreign, *drawn = self._last_words(self.controls)
        return foreign, [[words[row] for words in drawn] for row in range(len(self.lines))]

    @property
    def not_claimed(self) -> str:
        """Why nothing is claimed of a model that rhymes with too few of these lines by itself."""
        rhymed = self.records[self.baseline]["count"]
        by_itself = f"{self.subject.name} rhymes with {rhymed} of these {len(self.lines)} lines by itself"
        return "" if rhymed >= FEWEST else f"{by_itself}: nothing is claimed of it"

    def claims(self) -> Iterator[Claim]:
        """Whether more lines rhyme, and whether lines rhyme with what was fed."""
        base, fed = self.scores[self.baseline], self.scores[self.row]
        foreign, drawn = self.control_ends
        what = self.condition.description
        yield self._claim(
            f"the rhyme, in {what}, changes the share of second lines that end on another word that rhymes",
            (fed == 2).astype(float) - (base == 2),
            [
                [_score(line, word) == 2 for word in words]
                for line, words in zip(self.lines, drawn, strict=True)
            ],
            base == 2,
        )
        others = [self.lines[self.other(row)] for row in range(len(self.lines))]
        plain = np.array([o.rhymes(word) for o, word in zip(others, self.ends[self.baseline], strict=True)])
        yield self._claim(
            f"the rhyme of another line, in {what}, makes second lines end on it",
            np.array([o.rhymes(word) for o, word in zip(others, foreign, strict=True)], float) - plain,
            [[o.rhymes(word) for word in words] for o, words in zip(others, drawn, strict=True)],
            plain,
        )

    def claims_caption(self) -> str:
        """How the condition was chosen, and how many second lines end by themselves."""
        many = len(self.lines)
        on = many - self.records[self.row]["ended"]
        return (
            f"The selected condition: {self.preset.found if self._is_presets else 'as set'}. {on} of its "
            f"{many} second lines run on for {self.settings.max_tokens} tokens: what they break off at is no "
            "end of their own."
        )

    @property
    def _is_presets(self) -> bool:
        """Whether the selected condition is the preset's."""
        return self.condition.name == self.preset.chosen

    def _claim(self, text: str, effects: Floats, drawn: Any, plain: Any) -> Claim:
        """Shares of lines beyond those of a plain pass, [line], beside random directions [line, draw]."""
        others = np.array(drawn, float).reshape(len(effects), -1) - np.array(plain, float)[:, None]
        return Claim.over(
            text,
            effects,
            others,
            f"a direction as long, fed likewise, drawn among {self.settings.controls} random ones of each "
            "line and this one",
            Controls(RESAMPLED if self.settings.controls else 0, self.settings.seed),
            looked_at=self.preset.looked_at if self._is_presets else 1,
            unit="of lines",
        )

    def views(self) -> Iterator[View]:
        """All conditions, every line under the selected one, and likely rhymes behind the first line."""
        yield Data(json=self._about())
        yield self._conditions_table()
        cells, curves = self._ends_heatmap(), self._curves()
        yield cells
        if curves is not None:
            yield curves
        yield from self._lines_tables()
        panels = tuple(view for view in (curves, self.findings, cells) if view is not None)
        title = f"What {self.subject.name} rhymes with when layers are gone through again"
        yield Figure(name="recurrent_feedback", title=title, panels=panels)

    def _about(self) -> dict[str, Any]:
        """The other fields of candle-mi's example."""
        about, condition = self.subject.about, self.condition
        plain, fed = self.records[self.baseline], self.records[self.row]
        return {
            **{name: about[name] for name in ("model_id", "n_layers", "hidden_size")},
            "loop_start": condition.block[0],
            "loop_end": condition.block[1],
            "depth": condition.depth,
            "strength": condition.strength,
            "mode": "sustained" if condition.sustained else "prefill-only",
            "baseline_rhymes": plain["count"],
            "recurrent_rhymes": fed["count"],
            "baseline_rhymes_without_target": plain["count_without_target"],
            "recurrent_rhymes_without_target": fed["count_without_target"],
            "total_couplets": len(self.lines),
        }

    def _conditions_table(self) -> Table:
        """Table of the scores of every condition, and the lines that rhymed."""
        many = len(self.lines)
        return Table.of(
            self.records,
            ("condition", "name"),
            ("rhymes", lambda one: f"{one['count']}/{many}"),
            ("with another word", lambda one: f"{one['count_without_target']}/{many}"),
            ("ended", lambda one: f"{one['ended']}/{many}"),
            ("lines that rhyme with another word", lambda one: _numbers(one["ids_without_target"])),
            title=f"{self.subject.name}: second lines that rhyme, by condition",
            caption="rhymes: ends on a word of the family, the first line's own among them, so that a copied "
            f"line counts; ended: within {self.settings.max_tokens} tokens; unembed: fed at the first line's "
            "end; sustained: at every step",
            strong=lambda one: one["name"] in ("baseline", self.condition.name),
            sources=("trials",),
            json={"conditions": self.records},
        )

    def _ends_heatmap(self) -> Heatmap:
        """How every second line ends, by condition."""
        values = self.scores.T
        words = tuple(tuple(ends[row] for ends in self.ends) for row in range(len(self.lines)))
        return Heatmap(
            title="On what second lines end",
            caption="; ".join(f"{value}: {word}" for value, word in WORDS.items())
            + "; by block and strength, + at every step",
            values=values,
            rows=tuple(line.target for line in self.lines),
            columns=tuple(condition.short for condition in self.conditions),
            row_name="first line ends on",
            column_name="condition",
            value_name="how it ends",
            low=0.0,
            high=2.0,
            texts=words,
            sources=("trials",),
        )

    def _curves(self) -> Lines | None:
        """Rhymes with another word by strength, a curve per block; None where there is no sweep."""
        by_block: dict[tuple[int, int], dict[float, int]] = {}
        for condition, row in zip(self.conditions, self.records, strict=True):
            if condition.strength is not None and not condition.sustained:
                by_block.setdefault(condition.block, {})[condition.strength] = row["count_without_target"]
        strengths = sorted({strength for held in by_block.values() for strength in held})
        if len(strengths) < 2:
            return None
        plain = float(self.records[self.baseline]["count_without_target"])
        lines = [
            Line(f"layers {start} to {end}", np.array([held.get(s, np.nan) for s in strengths], float))
            for (start, end), held in by_block.items()
        ]
        return Lines(
            title="Second lines that end on another word that rhymes, by strength",
            caption=f"fed at the first line's end; dashed: a plain pass, {plain:g} of {len(self.lines)}",
            x=tuple(strengths),
            x_name="strength",
            y_name="lines",
            low=0.0,
            high=float(len(self.lines)),
            lines=(*lines, Line("plain pass", np.full(len(strengths), plain), control=True)),
            sources=("trials",),
        )

    def _lines_tables(self) -> Iterator[Table]:
        """Every line under the selected condition: how it ends, and what was likely behind the first line."""
        one, other = self._of(self.baseline), self._of(self.row)
        couplets = [self._couplet(row, one, other) for row in range(len(self.lines))]
        yield Table.of(
            couplets,
            ("line", "id", "d"),
            ("first line", lambda each: format_text(each["line1"])),
            ("plain", "baseline_word"),
            ("fed", lambda each: bold(each["recurrent_word"])),
            ("", "result"),
            ("second line", lambda each: format_text(each["recurrent_line"])),
            ("fed with another rhyme", "foreign_word"),
            title=f"Every line, {self.condition.description}",
            caption="OK: both rhyme; RESCUED, REGRESS: only fed, only plain; -: neither; last: where the "
            "rhyme of another line is fed, the one half of all further on",
            json={"couplets": couplets},
        )
        yield Table.of(
            couplets,
            ("line", "id", "d"),
            ("best rhyme, plain", lambda each: format_token(each["planning"]["baseline"]["word"])),
            ("rank", lambda each: each["planning"]["baseline"]["rank"], "d"),
            ("p", lambda each: each["planning"]["baseline"]["probability"], format_probability),
            ("best rhyme, fed", lambda each: format_token(each["planning"]["recurrent"]["word"])),
            ("rank fed", lambda each: each["planning"]["recurrent"]["rank"], "d"),
            ("p fed", lambda each: each["planning"]["recurrent"]["probability"], format_probability),
            ("in the top 100", lambda each: _pair(each["planning"])),
            title="What rhymes are likely right behind the first line?",
            caption="the likeliest token among the last tokens of words that rhyme, ranks counted from 1",
        )

    def _of(self, condition: int) -> xr.Dataset:
        """The trials of one condition, [line]."""
        many = len(self.lines)
        return self.trials.isel(trial=slice(condition * many, (condition + 1) * many))

    def _couplet(self, row: int, one: xr.Dataset, other: xr.Dataset) -> dict[str, Any]:
        """A line in candle-mi's fields, with what is said of it beyond them."""
        line = self.lines[row]
        before, after = self.ends[self.baseline][row], self.ends[self.row][row]
        results = {
            (True, True): "OK",
            (False, True): "RESCUED",
            (True, False): "REGRESS",
            (False, False): "-",
        }
        return {
            "id": line.number,
            "target": line.target,
            "line1": line.text,
            "baseline_word": before,
            "baseline_rhymes": line.rhymes(before),
            "baseline_rhymes_without_target": line.rhymes_anew(before),
            "recurrent_word": after,
            "recurrent_rhymes": line.rhymes(after),
            "recurrent_rhymes_without_target": line.rhymes_anew(after),
            "recurrent_line": str(other["generated_text"].values[row]).split("\n", 1)[0],
            "result": results[line.rhymes(before), line.rhymes(after)],
            "foreign_word": self.control_ends[0][row],
            "foreign_rhymes": self.lines[self.other(row)].rhymes(self.control_ends[0][row]),
            "planning": {
                "baseline": self._planned(one.isel(trial=row)),
                "recurrent": self._planned(other.isel(trial=row)),
            },
        }

    def _planned(self, trial: xr.Dataset) -> dict[str, Any]:
        """What of the family was likely behind the first line."""
        return {
            "word": self.subject.tokenizer.decode_token(int(trial["best_word"])),
            "rank": int(trial["best_word_rank"]) + 1,
            "probability": float(np.exp(trial["best_word_logprob"])),
            "family_probability": float(np.exp(trial["words_logprob"])),
            "in_top_100": int(trial["words_in_top"]),
        }


def _score(line: FirstLine, word: str) -> int:
    return 2 if line.rhymes_anew(word) else int(line.rhymes(word))


def _numbers(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids)) or dash(None)


def _pair(planning: Mapping[str, Any]) -> str:
    return f"{planning['baseline']['in_top_100']} -> {planning['recurrent']['in_top_100']}"

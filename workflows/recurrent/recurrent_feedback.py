"""Does a second line rhyme when the rhyme is fed back into earlier layers?

A block of layers is run repeatedly, with feedback of a word direction.

A model reads the first line of a couplet and writes the second. Conditions, besides a plain forward pass: a
block of layers is run twice; or the mean unembedding vector of all rhyming words is added to the block's
input, either at the end of the first line or also at every generated token (stages/causal/recurrence.py).
The protocol is candle-mi's "anacrousis": a plain pass, four blocks run twice and with feedback at five
strengths, one block with feedback at every token at three strengths, 28 conditions. Where an intervention at
one position depends on the number of tokens after it, all positions are computed again at every step.

A second line has two scores: whether its last word rhymes, and whether it rhymes without being the last word
of the first line, since a copied line rhymes with itself.

Claims are made of one selected condition. Cause: feedback of the rhyme; null: feedback of random directions
of equal norm in the same lines. A model that rhymes without feedback can hardly rhyme more, so a second claim
feeds the rhyme of another line and measures whether second lines end on that rhyme. Nothing is claimed of a
model that rhymes with fewer than two lines without feedback.

Defaults: first lines for the recurrent specimen. `preset=anacrousis`: the published lines and conditions, on
Llama 3.2 1B.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ...stages.causal.recurrence import RecurrentContinuation, Trial
from ...stages.forward.generation.continuations import GenerationSettings
from ...stages.forward.generation.stopping import end_ids
from ...stages.forward.runs.duration import PassWork
from ...stages.logits.lens import format_probability, format_text, format_token
from ...store.arrays import Floats
from ..claim import Claim, Controls
from ..material.answers import encoded
from ..material.samples.rhymes import PRESETS, Condition, FirstLine, block_of, conditions_of, last_word
from ..material.sizes import affordable
from ..settings import ControlSettings, Count, ModelSettings, Natural, setting
from ..views import Data, Figure, Heatmap, Line, Lines, Table, View, bold, dash
from ..workflow import ModelWorkflow, Nodes, loaded

if TYPE_CHECKING:
    import xarray as xr

    from ...stages.forward.models.model import Model

__all__ = ["RecurrentFeedback", "RecurrentFeedbackSettings"]

RESAMPLED = 2000
"""Number of draws of the null distribution; each is the mean over lines of one random direction drawn for
each line."""
LINE_LENGTH = 12
"""Tokens of a first line, about."""
GENERATED = 5
"""Cost of a generated token, in tokens of a prompt: its products have one row, and read all weights."""
FEWEST = 2
"""Smallest number of lines that the model must rhyme with in a plain pass, for a claim."""
WORDS = {0: "no rhyme", 1: "the last word of the first line", 2: "another rhyming word"}
"""Score of a second line's last word -> its meaning."""


@dataclass(frozen=True)
class RecurrentFeedbackSettings(ControlSettings, ModelSettings):
    """Settings of the workflow `recurrent_feedback`; empty ones are taken from the preset."""

    model: str = setting("", 'hub id, directory, or a shipped one such as "specimen"')
    preset: Literal["specimen", "anacrousis"] = setting(
        "specimen", "default model with its lines and conditions"
    )
    controls: Natural = setting(
        4, "number of random directions of equal norm fed in each line; 0: none, nothing is claimed"
    )
    limit: Natural = setting(0, "number of lines, from the first on; 0: all, or fewer for a large model")
    sweep: bool = setting(True, "run every condition of the protocol, not only the selected one")
    blocks: tuple[str, ...] = setting(
        (),
        "blocks of layers run twice, and with feedback; the last one also with feedback at every token; "
        "none: the preset's",
    )
    strengths: tuple[float, ...] = setting((), "strengths of the feedback; none: the preset's")
    block: str = setting("", 'block of the selected condition, such as "8-15"; none: the preset\'s')
    strength: float | None = setting(
        None, "strength of the feedback in the selected condition; none: the preset's"
    )
    sustained: bool | None = setting(
        None, "whether the selected condition has feedback at every token; none: as in the preset"
    )
    depth: Count = setting(2, "number of passes through a block; with feedback more than 2 count as 2")
    max_tokens: Count = setting(30, "largest number of tokens of a second line")


class RecurrentFeedback(ModelWorkflow):
    """Workflow that generates second lines of couplets while the rhyme is fed back into earlier layers, under
    several conditions."""

    name = "recurrent_feedback"
    question = "Does a second line rhyme when the rhyme is fed back into earlier layers?"
    settings_type = RecurrentFeedbackSettings
    settings: RecurrentFeedbackSettings

    trials = loaded("trials")
    """Result of all lines under every condition, in memory, [trial]: all lines of the first condition, then
    all lines of the next."""
    controls = loaded("controls")
    """Result under the selected condition, in memory, [trial]: all lines with the rhyme of another line fed
    back, then all lines with each random direction."""

    def __init__(self, settings: RecurrentFeedbackSettings, model: Model | None = None) -> None:
        self.preset = PRESETS[settings.preset]
        super().__init__(replace(settings, model=settings.model or self.preset.model), model)

    def plan(self) -> Nodes:
        """Nodes of all lines under every condition, and under the selected condition with control directions.

        Raises ConfigError for a block that is not of the form "8-15" or not of the model.
        """
        settings, preset = self.settings, self.preset
        block, levels = preset.sustained
        sustained = (settings.blocks[-1] if settings.blocks else block, settings.strengths or levels)
        protocol = conditions_of(
            settings.blocks or preset.blocks,
            settings.strengths or preset.strengths,
            sustained,
            settings.depth,
        )
        swept = [condition for condition in protocol if settings.sweep or condition.depth == 1]
        self.condition = self._selected_condition()
        self.conditions = tuple(swept) if self.condition in swept else (*swept, self.condition)
        self.lines = preset.lines[: settings.limit or self._affordable_lines()]
        # With the line break in the prompt, generation begins with the second line.
        prompts = [tuple(encoded(self.subject, f"{line.text}\n").ids) for line in self.lines]
        words = [tuple(map(self._last_token, line.family)) for line in self.lines]
        trials = [
            tuple(self._trial(condition, ids, rhymes) for ids, rhymes in zip(prompts, words, strict=True))
            for condition in self.conditions
        ]
        foreign = tuple(
            self._trial(self.condition, ids, words[self.other(row)]) for row, ids in enumerate(prompts)
        )
        # A seed for every line: with a common one all lines would be fed the same random directions.
        random = [
            tuple(
                replace(trial, draw=draw, seed=settings.seed * len(prompts) + row)
                for row, trial in enumerate(trials[self.conditions.index(self.condition)])
            )
            for draw in range(settings.controls)
        ]
        generation = GenerationSettings(
            max_tokens=settings.max_tokens,
            stop="\n",
            eos=end_ids(self.subject.files, self.subject.tokenizer),
        )
        return {
            "trials": self.on_model(RecurrentContinuation(tuple(trials), generation)),
            "controls": self.on_model(RecurrentContinuation((foreign, *random), generation)),
        }

    def _affordable_lines(self) -> int:
        """Number of lines by default (material/sizes.py)."""
        n_trials = len(self.conditions) + 1 + self.settings.controls
        n_tokens = LINE_LENGTH + self.settings.max_tokens
        work = PassWork(n_trials * n_tokens * self.subject.config.num_layers)
        operations = GENERATED * work.operations(self.subject.config)
        return affordable(operations, len(self.preset.lines), least=6)

    def _selected_condition(self) -> Condition:
        """Condition that claims are about: the preset's, with block, strength and `sustained` of the settings
        where they are set."""
        settings, preset = self.settings, self.preset
        published = conditions_of(preset.blocks, preset.strengths, preset.sustained, settings.depth)
        default = next(condition for condition in published if condition.name == preset.condition)
        if not settings.block and settings.strength is None and settings.sustained is None:
            return default
        block = settings.block or "{}-{}".format(*default.block)
        strength = default.strength if settings.strength is None else settings.strength
        sustained = default.sustained if settings.sustained is None else settings.sustained
        name = f"{'sustained' if sustained else 'unembed'}_{block}_s={strength:.1f}"
        return Condition(name, block_of(block), settings.depth, strength, sustained)

    @staticmethod
    def _trial(condition: Condition, prompt: tuple[int, ...], words: tuple[int, ...]) -> Trial:
        """Trial of one prompt under a condition. words: last token of each rhyming word, which is fed back
        and whose probability is measured."""
        start, end = condition.block
        return Trial(
            prompt, words, start, end, condition.depth, condition.strength, sustained=condition.sustained
        )

    def _last_token(self, word: str) -> int:
        """Id of the last token of a word that follows a space."""
        # Within a line, the space before a word belongs to its first token.
        return int(self.subject.tokenizer.encode(f" {word}", add_special=False).ids[-1])

    def other(self, row: int) -> int:
        """Index of the line whose rhyme is fed back for line `row` in the second claim: half of the list
        later."""
        return (row + len(self.lines) // 2) % len(self.lines)

    # -- results

    @cached_property
    def ends(self) -> list[list[str]]:
        """Last word of each second line, [condition][line]."""
        return self._last_words(self.trials)

    def _last_words(self, trials: xr.Dataset) -> list[list[str]]:
        """Last words of the generated lines, [condition][line], or in general [group of trials][line]."""
        words = np.array([last_word(str(text)) for text in trials["generated_text"].values], object)
        rows: list[list[str]] = words.reshape(-1, len(self.lines)).tolist()
        return rows

    @cached_property
    def scores(self) -> Floats:
        """Score of each second line, [condition, line]: 0 no rhyme, 1 the last word of the first line, 2
        another rhyming word."""
        return np.array([list(map(_score, self.lines, words)) for words in self.ends], np.float64)

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """JSON record of each condition: number and ids of the lines that rhymed, and number of second lines
        that ended before `max_tokens`."""
        numbers = np.array([line.number for line in self.lines])
        # Steps after the end of a line are padded with -1.
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
        return next(i for i, condition in enumerate(self.conditions) if condition.depth == 1)

    @property
    def row(self) -> int:
        """Index of the selected condition among the conditions."""
        return self.conditions.index(self.condition)

    @cached_property
    def control_ends(self) -> tuple[list[str], list[list[str]]]:
        """(last words with another line's rhyme fed back, [line]; last words with random directions fed back,
        [line][draw])."""
        foreign, *by_draw = self._last_words(self.controls)
        return foreign, [[words[row] for words in by_draw] for row in range(len(self.lines))]

    @property
    def not_claimed(self) -> str:
        """Reason why nothing is claimed of a model that rhymes with too few lines in a plain pass; empty for
        others."""
        n_rhymes = self.records[self.baseline]["count"]
        if n_rhymes >= FEWEST:
            return ""
        return (
            f"{self.subject.name} rhymes with {n_rhymes} of these {len(self.lines)} lines without feedback, "
            f"fewer than {FEWEST}: nothing is claimed of it"
        )

    def claims(self) -> Iterator[Claim]:
        """Claims that feedback changes the share of second lines that rhyme, and, with another line's rhyme
        fed back, the share that end on that one."""
        plain_scores, fed_scores = self.scores[self.baseline], self.scores[self.row]
        foreign_fed, random_fed = self.control_ends
        condition = self.condition.description
        # Not score 1: a line that copies the first one ends on the same word, without any rhyme.
        rhymes_plain = plain_scores == 2
        yield self._claim(
            f"feedback of the line's rhyme into earlier layers ({condition}) changes the share of second "
            "lines that end on another rhyming word",
            (fed_scores == 2).astype(float) - rhymes_plain,
            [
                [_score(line, word) == 2 for word in words]
                for line, words in zip(self.lines, random_fed, strict=True)
            ],
            rhymes_plain,
        )
        # For each line, the other line whose rhyme is fed back.
        sources = [self.lines[self.other(row)] for row in range(len(self.lines))]

        def rhymes_with_source(ends: Iterable[str]) -> Floats:
            return np.array([source.rhymes(word) for source, word in zip(sources, ends, strict=True)], float)

        plain = rhymes_with_source(self.ends[self.baseline])
        yield self._claim(
            f"feedback of another line's rhyme into earlier layers ({condition}) changes the share of second "
            "lines that end on that rhyme",
            rhymes_with_source(foreign_fed) - plain,
            [
                [source.rhymes(word) for word in words]
                for source, words in zip(sources, random_fed, strict=True)
            ],
            plain,
        )

    def claims_caption(self) -> str:
        """How the condition was chosen, and how many second lines reach the largest number of tokens."""
        # Feedback at every token makes lines run on; their last word is scored all the same, as in candle-mi.
        n_lines = len(self.lines)
        n_unfinished = n_lines - self.records[self.row]["ended"]
        choice = self.preset.selection if self._is_presets else "set by the user"
        return (
            f"How the condition was selected: {choice}. {n_unfinished} of its {n_lines} second lines run on "
            f"for {self.settings.max_tokens} tokens. They are cut there, and the word at the cut is scored."
        )

    @property
    def _is_presets(self) -> bool:
        """Whether the selected condition is the preset's own."""
        return self.condition.name == self.preset.condition

    def _claim(self, text: str, effects: Floats, drawn: Any, plain: Any) -> Claim:
        """Claim about the change of the share of lines with an outcome, compared with random directions fed
        back.

        Arguments:
            text: see `Claim`.
            effects: outcome with feedback minus outcome of a plain pass, [line].
            drawn: outcome with random directions, bool [line][draw].
            plain: outcome of a plain pass, bool [line].
        """
        controls = np.array(drawn, float).reshape(len(effects), -1) - np.array(plain, float)[:, None]
        return Claim.over(
            text,
            effects,
            controls,
            f"one direction for each line, from {self.settings.controls} random directions of equal norm, "
            "fed in the same way, and the rhyme itself",
            Controls(RESAMPLED if self.settings.controls else 0, self.settings.seed),
            # The published condition is the best of 27 on these lines; its p-value is corrected for that.
            looked_at=self.preset.looked_at if self._is_presets else 1,
            unit="of lines",
        )

    def views(self) -> Iterator[View]:
        """Views in reading order: numbers of rhymes by condition, last words by condition, and every line
        under the selected condition."""
        yield Data(json=self._about())
        yield self._conditions_table()
        cells, curves = self._ends_heatmap(), self._curves()
        yield cells
        if curves is not None:
            yield curves
        yield from self._lines_tables()
        panels = tuple(view for view in (curves, self.findings, cells) if view is not None)
        title = f"Rhymes of {self.subject.name} with feedback into earlier layers"
        yield Figure(name="recurrent_feedback", title=title, panels=panels)

    def _about(self) -> dict[str, Any]:
        """JSON fields that describe the model, the condition and the totals, named as in candle-mi's
        example."""
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
        """Table with a row per condition: numbers of lines that rhyme."""
        n_lines = len(self.lines)
        return Table.of(
            self.records,
            ("condition", "name"),
            ("rhymes", lambda row: f"{row['count']}/{n_lines}"),
            ("with another word", lambda row: f"{row['count_without_target']}/{n_lines}"),
            ("ended", lambda row: f"{row['ended']}/{n_lines}"),
            ("lines that rhyme with another word", lambda row: _numbers(row["ids_without_target"])),
            title=f"{self.subject.name}: second lines that rhyme, by condition",
            caption="One row per condition of generation. Rhymes: second lines whose last word rhymes with "
            "the first line, or is its last word, so that a copied line counts. Ended: second lines that end "
            f"within {self.settings.max_tokens} tokens. Conditions: baseline, control, a plain forward pass; "
            "double_pass, a block of layers is run twice; unembed, the rhyme is also fed back into the "
            "block, at the end of the first line; sustained, at every token. Numbers: first and last layer "
            "of the block; s: strength of the feedback. Bold: the baseline and the selected condition.",
            strong=lambda row: row["name"] in ("baseline", self.condition.name),
            sources=("trials",),
            json={"conditions": self.records},
        )

    def _ends_heatmap(self) -> Heatmap:
        """Heatmap of the score of every second line by condition, with its last word in each cell."""
        values = self.scores.T
        words = tuple(tuple(ends[row] for ends in self.ends) for row in range(len(self.lines)))
        return Heatmap(
            title="Last words of second lines",
            caption="Each cell: last word of the second line that the model writes after one first line "
            "(row) under one condition (column). Colour: "
            + "; ".join(f"{value}: {word}" for value, word in WORDS.items())
            + ". Conditions: first and last layer of the block that is run twice, and strength of the "
            "feedback; +: feedback at every generated token, otherwise only at the end of the first line.",
            values=values,
            rows=tuple(line.target for line in self.lines),
            columns=tuple(condition.short for condition in self.conditions),
            row_name="last word of the first line",
            column_name="condition",
            value_name="score",
            low=0.0,
            high=2.0,
            texts=words,
            sources=("trials",),
        )

    def _curves(self) -> Lines | None:
        """Curves of the number of lines that rhyme by strength of the feedback, one per block of layers; None
        with fewer than two strengths."""
        by_block: dict[tuple[int, int], dict[float, int]] = {}
        for condition, row in zip(self.conditions, self.records, strict=True):
            if condition.strength is not None and not condition.sustained:
                by_block.setdefault(condition.block, {})[condition.strength] = row["count_without_target"]
        strengths = sorted({strength for counts in by_block.values() for strength in counts})
        if len(strengths) < 2:
            return None
        plain = float(self.records[self.baseline]["count_without_target"])
        lines = [
            Line(f"layers {start} to {end}", np.array([counts.get(s, np.nan) for s in strengths], float))
            for (start, end), counts in by_block.items()
        ]
        return Lines(
            title="Second lines that end on another rhyming word, by strength of the feedback",
            caption="x: strength of the feedback of the rhyme at the end of the first line. y: number of "
            f"second lines, of {len(self.lines)}, whose last word rhymes with the first line and is not its "
            "last word. One curve per block of layers. Dashed: control, a plain forward pass without "
            f"feedback ({plain:g} lines).",
            x=tuple(strengths),
            x_name="strength",
            y_name="lines",
            low=0.0,
            high=float(len(self.lines)),
            lines=(*lines, Line("plain pass", np.full(len(strengths), plain), control=True)),
            sources=("trials",),
        )

    def _lines_tables(self) -> Iterator[Table]:
        """Tables with a row per line under the selected condition: last words, and the most probable rhyme
        right after the first line."""
        plain, fed = self._trials_of(self.baseline), self._trials_of(self.row)
        couplets = [self._couplet(row, plain, fed) for row in range(len(self.lines))]
        yield Table.of(
            couplets,
            ("line", "id", "d"),
            ("first line", lambda couplet: format_text(couplet["line1"])),
            ("plain", "baseline_word"),
            ("feedback", lambda couplet: bold(couplet["recurrent_word"])),
            ("verdict", "result"),
            ("second line", lambda couplet: format_text(couplet["recurrent_line"])),
            ("feedback of another rhyme", "foreign_word"),
            title=f"Last words of second lines, {self.condition.description}",
            caption="One row per first line. Plain, feedback: last word of the second line in a plain pass "
            "and under the selected condition. Verdict: OK, both rhyme; RESCUED, only the one with feedback; "
            "REGRESS, only the plain one; -, neither. Second line: the one with feedback. Last column: "
            "control, the last word when the rhyme of another line is fed back, half the list further on.",
            json={"couplets": couplets},
        )
        yield Table.of(
            couplets,
            ("line", "id", "d"),
            ("best rhyme, plain", lambda couplet: format_token(couplet["planning"]["baseline"]["word"])),
            ("rank", lambda couplet: couplet["planning"]["baseline"]["rank"], "d"),
            ("p", lambda couplet: couplet["planning"]["baseline"]["probability"], format_probability),
            ("best rhyme, feedback", lambda couplet: format_token(couplet["planning"]["recurrent"]["word"])),
            ("rank, feedback", lambda couplet: couplet["planning"]["recurrent"]["rank"], "d"),
            (
                "p, feedback",
                lambda couplet: couplet["planning"]["recurrent"]["probability"],
                format_probability,
            ),
            ("in the top 100", lambda couplet: _pair(couplet["planning"])),
            title="Most probable rhyme right after the first line",
            caption="One row per first line. Read is the next-token distribution right after its line break. "
            "Best rhyme: the most probable of all words that rhyme with the line, each by its last token. "
            "Rank: 1 is the most probable token of all. p: its probability. In the top 100: number of rhymes "
            "among the 100 most probable tokens, plain pass -> with feedback.",
        )

    def _trials_of(self, condition: int) -> xr.Dataset:
        """Trials of condition number `condition`, one per line, [trial]."""
        n_lines = len(self.lines)
        return self.trials.isel(trial=slice(condition * n_lines, (condition + 1) * n_lines))

    def _couplet(self, row: int, plain: xr.Dataset, fed: xr.Dataset) -> dict[str, Any]:
        """JSON record of a line: candle-mi's fields and those of the other line's rhyme.

        plain, fed: trials of the plain pass and of the selected condition, one per line.
        """
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
            "baseline_rhymes_without_target": line.rhymes_without_target(before),
            "recurrent_word": after,
            "recurrent_rhymes": line.rhymes(after),
            "recurrent_rhymes_without_target": line.rhymes_without_target(after),
            "recurrent_line": str(fed["generated_text"].values[row]).split("\n", 1)[0],
            "result": results[line.rhymes(before), line.rhymes(after)],
            "foreign_word": self.control_ends[0][row],
            "foreign_rhymes": self.lines[self.other(row)].rhymes(self.control_ends[0][row]),
            "planning": {
                "baseline": self._rhyme_probabilities(plain.isel(trial=row)),
                "recurrent": self._rhyme_probabilities(fed.isel(trial=row)),
            },
        }

    def _rhyme_probabilities(self, trial: xr.Dataset) -> dict[str, Any]:
        """JSON fields on the next token right after the first line: the most probable rhyme with rank and
        probability, and the probability of all rhymes together."""
        return {
            "word": self.subject.tokenizer.decode_token(int(trial["best_word"])),
            # Stored ranks count from 0, those of documents and tables from 1.
            "rank": int(trial["best_word_rank"]) + 1,
            "probability": float(np.exp(trial["best_word_logprob"])),
            "family_probability": float(np.exp(trial["words_logprob"])),
            "in_top_100": int(trial["words_in_top"]),
        }


def _score(line: FirstLine, word: str) -> int:
    """Score of a second line's last word: a key of `WORDS`."""
    return 2 if line.rhymes_without_target(word) else int(line.rhymes(word))


def _numbers(ids: Sequence[int]) -> str:
    """Ids of lines as text, separated by commas; a dash for none."""
    return ", ".join(map(str, ids)) or dash(None)


def _pair(planning: Mapping[str, Any]) -> str:
    """Number of rhymes among the 100 most probable tokens in a plain pass and with feedback, as text: "3 ->
    12"."""
    return f"{planning['baseline']['in_top_100']} -> {planning['recurrent']['in_top_100']}"

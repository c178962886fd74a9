"""Which heads are induction heads, and which attend to the previous token?

Head detection on repeated random tokens, or on prompts.

Captures attention patterns (once; they stay in the store) and scores every head with TransformerLens'
detection patterns (stages/attention/head_detection.py), by default on blocks of random tokens that are
repeated. There only the repetition predicts the next token, so a head that attends to the token after an
earlier occurrence of the current token is an induction head (Olsson et al. 2022). Queries of the first block
have no earlier occurrence and are left out.

Control: the same tokens with every repetition shuffled, scored at the positions of the unshuffled text. The
score of a head that matches content drops, as the token it attends to is elsewhere; a head that attends at a
fixed distance keeps its score and is no induction head.

Claim: attention to the token right after an earlier occurrence, minus the same on shuffled tokens, for the
best of all heads. Null: the same difference, also of the best of all heads, at other distances after the
occurrence. More random sequences would be no control: a head with random weights prefers or avoids its own
token slightly, in the same way in every sequence. Nothing is claimed about the attention of the other kinds
of heads: a previous-token head needs positions alone, so shuffling rightly leaves its score unchanged, and a
duplicate-token score may be such a preference of random weights.

What heads are for: the outputs of the best induction heads are set to zero together, and the loss on other
repeated tokens and on prose is compared with that under random choices of other heads (head_knockout.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from ...stages.attention.head_detection import KINDS, displaced_scores, head_scores
from ...stages.attention.statistics import head_statistics
from ...stages.causal.controls import chosen_at_random
from ...store.errors import PromptError
from ..claim import Claim
from ..labelled import column, largest
from ..material.samples.repeated import RepeatedBlocks, shuffled
from ..settings import AtLeastTwo, ControlSettings, Count, ModelSettings, Natural, setting
from ..views import Choice, Figure, Heatmap, Table, View
from ..workflow import ModelWorkflow, Nodes
from .head_knockout import InductionKnockout

if TYPE_CHECKING:
    import xarray as xr

    from ...store import PackedTokens, Store

__all__ = ["HeadDetection", "HeadDetectionSettings"]

LOOKS = {
    "previous_token_head": ("Previous token", "the previous token"),
    "duplicate_token_head": ("Duplicate token", "earlier occurrences of the current token"),
    "induction_head": ("Induction", "the token after an earlier occurrence of the current token"),
}
"""Heatmap title, and what the head attends to, by kind of head."""
STATISTICS = {
    "entropy": (
        "Entropy",
        (
            "Each cell: entropy of the attention weights of one head (column) of one layer (row), in nats, "
            "mean over queries. 0: all weight on one key."
        ),
    ),
    "bos_share": (
        "On the first token",
        "Each cell: share of the weight of one head (column) of one layer (row) on the first token.",
    ),
    "current_share": (
        "On the current token",
        "Each cell: share of the weight of one head (column) of one layer (row) on the query itself.",
    ),
    "distance": (
        "Distance",
        (
            "Each cell: mean number of tokens from the attended key to the query, for one head (column) of "
            "one layer (row)."
        ),
    ),
}
"""Title and caption of the heatmap of each statistic of a head's attention."""
SCORES = ("score", "spread", "control")
# "distance", the last statistic, has a column of its own: one decimal instead of two.
COLUMNS = dict(zip(("score", "±", "shuffled", "entropy", "BOS", "own"), (*SCORES, *STATISTICS), strict=False))
"""Column name -> variable, for the table of the best heads."""


LEADS = ("displaced", "displaced_control")
"""Results with the attention after earlier occurrences, of the tokens and of the shuffled ones."""


LOSS = "loss_"
"""Start of the names of results with losses without the induction heads."""


@dataclass(frozen=True)
class HeadDetectionSettings(ControlSettings, ModelSettings):
    """Settings of the workflow `head_detection`, which scores heads on repeated random tokens or on
    prompts."""

    prompts: tuple[str, ...] = setting((), "prompts to read; none: repeated random tokens")
    sequences: Count = setting(16, "number of random sequences")
    length: AtLeastTwo = setting(50, "number of tokens of the repeated block, all different")
    repeats: AtLeastTwo = setting(2, "number of occurrences of the block in a sequence")
    first_block: bool = setting(False, "score queries of the first block too, as TransformerLens does")
    exclude_bos: bool = setting(False, "leave out attention to the first position")
    exclude_current_token: bool = setting(False, "leave out attention to the current token")
    error_measure: Literal["mul", "abs"] = setting(
        "mul",
        'score: "mul", share of attention on the detection pattern; "abs", 1 - mean absolute difference',
    )
    top: Count = setting(5, "number of heads listed per kind")
    knocked_out: Natural | None = setting(
        None,
        "number of induction heads whose outputs are set to zero together; none: all whose attention to the "
        "token after an earlier occurrence, minus that on shuffled tokens, exceeds the same difference of "
        "every head at other distances, at most a quarter of all heads",
    )
    seed: Natural = setting(0, "seed of the random tokens and of the shuffled control")


class HeadDetection(ModelWorkflow):
    """Workflow that scores every head as a previous-token, duplicate-token and induction head, with a control
    on shuffled tokens."""

    name = "head_detection"
    question = "Which heads are induction heads, and which attend to the previous token?"
    needs = "weights"
    settings_type = HeadDetectionSettings
    settings: HeadDetectionSettings

    def plan(self) -> Nodes:
        """Nodes of detection scores, control scores on shuffled tokens, and attention statistics.

        Raises:
            PromptError: for a prompt of fewer than two tokens.
        """
        settings = self.settings
        tokens, mixed_tokens, first_query = self._tokens()
        kind = self.subject.attention_kind
        captured, control = (self.subject.capture_weights(packed)[kind] for packed in (tokens, mixed_tokens))
        options: dict[str, Any] = {
            "token_id": column(tokens.ids, "token", "token_id"),
            "row_size": column(tokens.row_size, "prompt", "row_size"),
            "exclude_bos": settings.exclude_bos,
            "exclude_current_token": settings.exclude_current_token,
            "error_measure": settings.error_measure,
            "first_query": first_query,
        }
        displacements = (1, *self._other_displacements(int(tokens.row_size.min())))
        return {
            "scores": head_scores.on(pattern=captured, **options),
            "control": head_scores.on(pattern=control, **options),
            "statistics": head_statistics.on(pattern=captured, row_size=options["row_size"]),
            "displaced": displaced_scores.on(pattern=captured, displacements=displacements, **options),
            "displaced_control": displaced_scores.on(pattern=control, displacements=displacements, **options),
        }

    def _tokens(self) -> tuple[PackedTokens, PackedTokens, int]:
        """Tokens of all prompts, the same tokens with repetitions shuffled, and the first position of each
        prompt whose attention is scored."""
        from ...store import PackedTokens

        settings, subject = self.settings, self.subject
        if settings.prompts:
            tokens = subject.pack(settings.prompts)
            if (short := np.flatnonzero(tokens.row_size < 2)).size:
                raise PromptError(
                    f"expected prompts of at least 2 tokens, found {settings.prompts[short[0]]!r}; a head "
                    "needs an earlier token to attend to"
                )
            rows = [row.tolist() for row in tokens]
            # Special tokens, such as BOS, stay in front.
            special = [
                sum(encoding.special) for encoding in subject.tokenizer.encode_batch(list(settings.prompts))
            ]
            mixed = [
                # At least 1: `shuffled` steps through a row by this length, and a step of 0 raises.
                shuffled(row, n_fixed, max(1, len(row) - n_fixed), settings.seed + i)
                for i, (row, n_fixed) in enumerate(zip(rows, special, strict=True))
            ]
            return tokens, PackedTokens.from_lists(mixed), 0
        blocks = RepeatedBlocks.of(
            subject, settings.sequences, settings.length, repeats=settings.repeats, seed=settings.seed
        )
        # Tokens of the first block have no earlier occurrence.
        first_query = 0 if settings.first_block else blocks.start
        return PackedTokens.from_lists(blocks.rows), PackedTokens.from_lists(blocks.mixed), first_query

    def first_nodes(self) -> Nodes:
        """See `Workflow`: the scores by which heads are chosen to be knocked out."""
        settings = self.settings
        is_run = settings.knocked_out != 0 and settings.controls and self.subject.config.predicts_next
        return {name: self.nodes[name] for name in LEADS} if is_run else {}

    def settle(self, store: Store, *, refuses: bool = True) -> Self:
        """See `Workflow`: adds losses without the induction heads, which the first results select."""
        if not (first := self.first_nodes()):
            return self
        lead = _difference(*(node.open(store)["score"].load() for node in first.values()))
        after, elsewhere = lead.values[0].ravel(), lead.values[1:]
        # Best first; heads that a layer does not have are NaN, and last.
        order = np.argsort(-after, kind="stable")[: int(np.isfinite(after).sum())]
        count = self.settings.knocked_out
        if count is None:
            n_induction = int((after[order] > np.nanmax(elsewhere, initial=0.0)).sum())
            count = min(n_induction, len(order) // 4)
        heads = [(int(lead["layer"].values[i // lead.shape[2]]), int(i % lead.shape[2])) for i in order]
        if 0 < count < len(heads):
            first_layer = min(layer for layer, _ in heads[:count])
            others = [(layer, head) for layer, head in heads[count:] if layer >= first_layer]
            self.knockout = InductionKnockout(
                self.subject, tuple(heads[:count]), tuple(others), self.settings
            )
            self.nodes |= {
                f"{LOSS}{name}": self.on_model(experiment)
                for name, experiment in self.knockout.experiments().items()
            }
        return self

    @cached_property
    def scores(self) -> xr.Dataset:
        """Scores in memory: score, its spread over prompts and the control score, [kind, layer, head];
        statistics of attention, [layer, head]."""
        scores = self.result("scores").assign(control=self.result("control")["score"])
        return scores.merge(self.result("statistics")).load()

    def best(self, kind: str) -> list[dict[str, Any]]:
        """The `top` heads with the largest scores of a kind: records with layer, head, scores and statistics.

        kind: one of `KINDS`, such as "induction_head".
        """
        scores = self.scores.sel(kind=kind).transpose("layer", "head")
        return largest(scores, scores["score"], self.settings.top, *SCORES, *STATISTICS)

    def _other_displacements(self, shortest: int) -> list[int]:
        """Random displacements other than 1, ascending, whose attention is the null distribution of
        induction.

        A displacement is the number of tokens from an earlier occurrence of the current token to the attended
        token. Displacement 1 is induction itself, so the drawn ones are 2 or larger. Empty if prompts are too
        short for displacement 2.

        Arguments:
            shortest: number of tokens of the shortest prompt.
        """
        settings = self.settings
        # A displacement of a whole block leads to another occurrence of the current token, or to that token
        # itself; the largest one is therefore a token less.
        longest = shortest - 1 if settings.prompts else settings.length - 1
        return sorted(
            chosen_at_random(range(2, longest + 1), settings.controls, seed=settings.seed)
            if longest > 1
            else []
        )

    @cached_property
    def lead(self) -> xr.DataArray:
        """Attention scores minus those on shuffled tokens, [displacement, layer, head]. displacement: how
        many tokens after an earlier occurrence of the current token the attended token is; 1 is induction."""
        return _difference(*(self.result(name)["score"].load() for name in LEADS))

    @property
    def not_claimed(self) -> str:
        """Reason why nothing is claimed if prompts are too short to measure a second displacement; empty
        otherwise."""
        is_short = self.lead.sizes["displacement"] == 1 and self.settings.controls
        reason = (
            "Nothing is claimed, as the prompts are too short to measure attention at another distance after "
            "an earlier occurrence."
        )
        return reason if is_short else ""

    def claims(self) -> Iterator[Claim]:
        """Claim that the best induction head attends to tokens after earlier occurrences more than on
        shuffled tokens, compared with the best head at other displacements."""
        lead = self.lead
        n_heads = lead[0].size
        layer, head = divmod(int(lead.values[0].argmax()), lead.sizes["head"])
        text = (
            f"layer {lead['layer'].values[layer]}, head {head}, the best of {n_heads} heads, attends to the "
            "token after an earlier occurrence of the current token more than at the same positions of "
            f"shuffled tokens ({self.measure}, difference)"
        )
        of = f"other distances after the occurrence, each with the best of {n_heads} heads"
        # Each distance has its own best head: a maximum over heads is larger by chance than one fixed head.
        best = lead.max(("layer", "head")).values
        yield Claim.against(text, best[0], best[1:], of)
        losses = {
            name.removeprefix(LOSS): self.result(name).load() for name in self.nodes if name.startswith(LOSS)
        }
        if losses:
            yield from self.knockout.claims(losses)

    @property
    def text_read(self) -> str:
        """Description of the text that was read, for titles."""
        settings = self.settings
        if settings.prompts:
            return f"{len(settings.prompts)} prompt{'s' if len(settings.prompts) > 1 else ''}"
        return (
            f"{settings.sequences} sequences of {settings.length} random tokens, repeated "
            f"{settings.repeats} times"
        )

    @property
    def measure(self) -> str:
        """Name of the score in words, for captions and axes, by the setting `error_measure`."""
        if self.settings.error_measure == "abs":
            return "1 - mean absolute difference from the detection pattern"
        return "share of attention on the detection pattern"

    @property
    def summary(self) -> str:
        """See `Workflow`: the heads with the highest scores of each kind."""
        parts = []
        for kind in KINDS:
            rows = self.best(kind)[:3]
            heads = ", ".join(f"L{row['layer']}H{row['head']} ({row['score']:.2f})" for row in rows)
            parts.append(f"{LOOKS[kind][0].lower()} {heads}")
        return f"Heads with the highest scores, {self.measure}: {'; '.join(parts)}."

    def views(self) -> Iterator[View]:
        """Table of the best heads of each kind; heatmaps of scores, controls and statistics by layer and
        head."""
        data, model = self.scores.transpose("kind", "layer", "head"), self.subject.name
        best = {kind: self.best(kind) for kind in KINDS}
        table_rows = []
        for kind, heads in best.items():
            kind_name = kind.removesuffix("_head").replace("_", " ")
            # The kind stands in its first row only.
            table_rows += [{"kind": kind_name if rank == 0 else ""} | head for rank, head in enumerate(heads)]
        yield Table.of(
            table_rows,
            ("kind", "kind"),
            *((name, name, "d") for name in ("layer", "head")),
            *((name, key, ".2f") for name, key in COLUMNS.items()),
            ("distance", "distance", ".1f"),
            title=f"Heads of {model} on {self.text_read}",
            caption="One row per head: those with the largest score of each kind. Kind: what a head attends "
            f"to, for instance the previous token. Score: {self.measure}, ± standard deviation over prompts. "
            "Shuffled: control, the score at the same positions of shuffled tokens. Entropy: of the "
            "attention weights, in nats. BOS, own: share of the weight on the first and on the current "
            "token. Distance: mean number of tokens from key to query.",
            json={**self.subject.about, "read": self.text_read, **self._json(data, best)},
        )
        scores, control_scores = (
            [self._scores(kind, best[kind][0], variable) for kind in KINDS]
            for variable in ("score", "control")
        )
        statistics = [self._statistic(data[name], *titles) for name, titles in STATISTICS.items()]
        kind_titles = [title for title, _ in LOOKS.values()]
        statistic_titles = [title for title, _ in STATISTICS.values()]
        for title, result, axis, labels, panels in (
            ("Scores of each kind of head", "scores", "kind", kind_titles, scores),
            (
                "Control: scores at the same positions of shuffled tokens",
                "control",
                "kind",
                kind_titles,
                control_scores,
            ),
            (
                "Statistics of the attention weights",
                "statistics",
                "statistic",
                statistic_titles,
                statistics,
            ),
        ):
            options = tuple(zip(labels, panels, strict=True))
            yield Choice(title=title, sources=(result,), name=axis, options=options)
        title = f"Scores of the heads of {model} on {self.text_read}"
        # Two rows of panels: scores above their controls.
        yield Figure(
            name="head_detection", title=title, panels=(*scores, *control_scores), columns=len(KINDS)
        )
        title = f"Attention weights of the heads of {model} on {self.text_read}"
        yield Figure(name="head_statistics", title=title, panels=tuple(statistics), columns=2)

    @staticmethod
    def _json(scores: xr.Dataset, best: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
        """JSON fields "kinds", with scores and best heads of each kind, and "statistics" of all heads.

        scores: see `scores`. best: records of the best heads by kind.
        """
        kinds = {
            kind: {
                **{name: scores[name].sel(kind=kind) for name in SCORES},
                "best": [{name: head[name] for name in ("layer", "head", *SCORES)} for head in heads],
            }
            for kind, heads in best.items()
        }
        statistics = {
            name: {"unit": scores[name].attrs["units"], "by_head": scores[name]} for name in STATISTICS
        }
        return {"kinds": kinds, "statistics": statistics}

    def _scores(self, kind: str, best: dict[str, Any], variable: str) -> Heatmap:
        """Heatmap of detection scores, or of control scores on shuffled tokens, [layer, head].

        kind: one of `KINDS`. best: record of the head that is framed. variable: "score" or "control".
        """
        title, attended = LOOKS[kind]
        titles = (
            f"{title}, best: layer {best['layer']}, head {best['head']}",
            (
                f"Each cell: how much one head (column) of one layer (row) attends to {attended}: "
                f"{self.measure}. Framed: the best head."
            ),
        )
        shuffled_titles = (
            f"{title}, shuffled tokens",
            (
                "Control. Each cell: score of one head (column) of one layer (row) at the same positions, "
                "with the tokens of every repetition shuffled. Framed: the best head on unshuffled tokens."
            ),
        )
        row = self.scores["layer"].values.tolist().index(best["layer"])
        return Heatmap.of(
            self.scores[variable].sel(kind=kind).transpose("layer", "head"),
            *(titles if variable == "score" else shuffled_titles),
            value_name=self.measure,
            low=min(0.0, *(float(self.scores[name].min()) for name in ("score", "control"))),
            high=1.0,
            numbers=".2f",
            framed=((row, best["head"], row, best["head"]),),
            frame_name="best head on the unshuffled tokens",
        )

    def _statistic(self, values: xr.DataArray, title: str, caption: str) -> Heatmap:
        """Heatmap of one of `STATISTICS`, values [layer, head]."""
        digits = ".1f" if values.name == "distance" else ".2f"
        high = 1.0 if str(values.name).endswith("share") else None
        return Heatmap.of(values, title, caption, low=0.0, high=high, numbers=digits)


def _difference(score: xr.DataArray, shuffled_score: xr.DataArray) -> xr.DataArray:
    """Scores of `LEADS`: those of the tokens minus those of shuffled tokens, [displacement, layer, head]."""
    return (score - shuffled_score).transpose("displacement", "layer", "head")

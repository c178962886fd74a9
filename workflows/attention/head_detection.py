"""Which heads are induction heads, and which attend to the previous token?

Head detection on repeated random tokens, or on prompts.

Captures attention patterns (once; they stay in the store) and scores every head with TransformerLens'
detection patterns (stages/attention/head_detection.py). By default on blocks of random tokens that are
repeated: nothing but the repetition can tell what comes next, so that a head which attends behind the
earlier occurrence of a token is an induction head (Olsson et al. 2022); queries of the first block, which
have nothing to find, are left out.

Control: the same tokens with every repetition shuffled, scored at the places of the unshuffled text. A head
that matches content loses its score there, as what it looks for stands elsewhere; a head that only looks so
many tokens back keeps it, and is no induction head.

What is claimed is that a head looks right behind an earlier occurrence: how far the best of all heads is
ahead of its shuffled score there, beside the best of all heads at other distances behind that occurrence.
Random weights prefer or shun their own token a little, in every sequence alike: more sequences would be no
control. A previous-token head keeps its score rightly, as places are all it needs, and a duplicate-token head
may be such a preference: nothing is claimed of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

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

if TYPE_CHECKING:
    import xarray as xr

    from ...store import PackedTokens

__all__ = ["HeadDetection", "HeadDetectionSettings"]

LOOKS = {
    "previous_token_head": ("Previous token", "looks at the token before"),
    "duplicate_token_head": ("Duplicate token", "looks where its token stood before"),
    "induction_head": ("Induction", "looks behind where its token stood before"),
}
STATISTICS = {
    "entropy": ("Entropy", "nats; 0: one key only"),
    "bos_share": ("On the first token", "share of the weight"),
    "current_share": ("On the current token", "share of the weight"),
    "distance": ("How far back", "tokens, mean"),
}
SCORES = ("score", "spread", "control")
COLUMNS = dict(zip(("score", "±", "shuffled", "entropy", "BOS", "own"), (*SCORES, *STATISTICS), strict=False))
"""Columns of the table of the best heads: variable by column name."""


@dataclass(frozen=True)
class HeadDetectionSettings(ControlSettings, ModelSettings):
    """What `--set` can change."""

    prompts: tuple[str, ...] = setting((), "prompts to read; none: repeated random tokens")
    sequences: Count = setting(16, "random sequences")
    length: AtLeastTwo = setting(50, "tokens of the block that is repeated, all different")
    repeats: AtLeastTwo = setting(2, "how often the block stands in a sequence")
    first_block: bool = setting(False, "let queries of the first block take part, as TransformerLens does")
    exclude_bos: bool = setting(False, "leave out attention to the first position")
    exclude_current_token: bool = setting(False, "leave out attention to the current token")
    error_measure: Literal["mul", "abs"] = setting(
        "mul", '"mul": share of the attention; "abs": 1 - mean difference'
    )
    top: Count = setting(5, "heads listed per kind")
    seed: Natural = setting(0, "of the random tokens and of the shuffled control")


class HeadDetection(ModelWorkflow):
    """Every head's match with what previous-token, duplicate-token and induction heads do."""

    name = "head_detection"
    question = "Which heads are induction heads, and which attend to the previous token?"
    needs = "weights"
    settings_type = HeadDetectionSettings
    settings: HeadDetectionSettings

    def plan(self) -> Nodes:
        """Scores on what is read, on the same shuffled, and what each head's attention is like."""
        given = self.settings
        tokens, other, first_query = self._tokens()
        kind = self.subject.attention_kind
        captured, control = (self.subject.capture_weights(each)[kind] for each in (tokens, other))
        asked: dict[str, Any] = {
            "token_id": column(tokens.ids, "token", "token_id"),
            "row_size": column(tokens.row_size, "prompt", "row_size"),
            "exclude_bos": given.exclude_bos,
            "exclude_current_token": given.exclude_current_token,
            "error_measure": given.error_measure,
            "first_query": first_query,
        }
        behind = (1, *self._others(int(tokens.row_size.min())))
        return {
            "scores": head_scores.on(pattern=captured, **asked),
            "control": head_scores.on(pattern=control, **asked),
            "statistics": head_statistics.on(pattern=captured, row_size=asked["row_size"]),
            "displaced": displaced_scores.on(pattern=captured, displacements=behind, **asked),
            "displaced_control": displaced_scores.on(pattern=control, displacements=behind, **asked),
        }

    def _tokens(self) -> tuple[PackedTokens, PackedTokens, int]:
        """What is read, the same shuffled, and the first query of every prompt that takes part."""
        from ...store import PackedTokens

        chosen, subject = self.settings, self.subject
        if chosen.prompts:
            tokens = subject.pack(chosen.prompts)
            if (short := np.flatnonzero(tokens.row_size < 2)).size:
                raise PromptError(
                    f"expected prompts of at least 2 tokens, found {chosen.prompts[short[0]]!r}; a head "
                    "needs a token to look back at"
                )
            rows = [row.tolist() for row in tokens]
            special = [sum(one.special) for one in subject.tokenizer.encode_batch(list(chosen.prompts))]
            mixed = [
                shuffled(row, fixed, max(1, len(row) - fixed), chosen.seed + i)
                for i, (row, fixed) in enumerate(zip(rows, special, strict=True))
            ]
            return tokens, PackedTokens.from_lists(mixed), 0
        blocks = RepeatedBlocks.of(
            subject, chosen.sequences, chosen.length, repeats=chosen.repeats, seed=chosen.seed
        )
        first_query = 0 if chosen.first_block else blocks.start
        return PackedTokens.from_lists(blocks.rows), PackedTokens.from_lists(blocks.mixed), first_query

    @cached_property
    def scores(self) -> xr.Dataset:
        """score, spread, control [kind, layer, head] and the statistics [layer, head], in memory."""
        found = self.result("scores").assign(control=self.result("control")["score"])
        return found.merge(self.result("statistics")).load()

    def best(self, kind: str) -> list[dict[str, Any]]:
        """The heads that match a kind best, best first, with all that is known of them."""
        found = self.scores.sel(kind=kind).transpose("layer", "head")
        return largest(found, found["score"], self.settings.top, *SCORES, *STATISTICS)

    def _others(self, shortest: int) -> list[int]:
        """Distances behind an earlier occurrence that induction is held against, drawn at random; none at
        which a repeated block begins again."""
        given = self.settings
        longest = shortest - 1 if given.prompts else given.length - 1
        return sorted(
            chosen_at_random(range(2, longest + 1), given.controls, seed=given.seed) if longest > 1 else []
        )

    @cached_property
    def lead(self) -> xr.DataArray:
        """Scores less those on shuffled tokens, by distance behind an earlier occurrence: [displacement,
        layer, head]."""
        one, other = (self.result(name)["score"].load() for name in ("displaced", "displaced_control"))
        return (one - other).transpose("displacement", "layer", "head")

    @property
    def not_claimed(self) -> str:
        """Why there is no verdict on prompts that hold one distance alone."""
        is_short = self.lead.sizes["displacement"] == 1 and self.settings.controls
        return "no verdict: prompts too short to look anywhere else" if is_short else ""

    def claims(self) -> Iterator[Claim]:
        """How far the best head is ahead of its score on shuffled tokens, right behind an earlier occurrence
        and elsewhere."""
        lead = self.lead
        n_heads = lead[0].size
        layer, head = divmod(int(lead.values[0].argmax()), lead.sizes["head"])
        text = (
            f"layer {lead['layer'].values[layer]}, head {head} looks behind where its token stood before by "
            f"this much more than when the tokens are shuffled ({self.measure})"
        )
        of = f"other distances behind it, every time the best of {n_heads} heads"
        best = lead.max(("layer", "head")).values
        yield Claim.against(text, best[0], best[1:], of)

    @property
    def text_read(self) -> str:
        """What was read, in words."""
        chosen = self.settings
        if chosen.prompts:
            return f"{len(chosen.prompts)} prompt{'s' if len(chosen.prompts) > 1 else ''}"
        return f"{chosen.sequences} sequences of {chosen.length} random tokens, {chosen.repeats} times over"

    @property
    def measure(self) -> str:
        """What a score is, in words."""
        if self.settings.error_measure == "abs":
            return "1 - mean difference from a head that looks only there"
        return "share of attention where such a head looks"

    def views(self) -> Iterator[View]:
        """The best heads of each kind; scores and controls by layer and head; what attention is like."""
        found, model = self.scores.transpose("kind", "layer", "head"), self.subject.name
        best = {kind: self.best(kind) for kind in KINDS}
        kinds = {
            kind: {
                **{name: found[name].sel(kind=kind) for name in SCORES},
                "best": [{name: row[name] for name in ("layer", "head", *SCORES)} for row in rows],
            }
            for kind, rows in best.items()
        }
        statistics = {of: {"unit": found[of].attrs["units"], "by_head": found[of]} for of in STATISTICS}
        names = {kind: kind.removesuffix("_head").replace("_", " ") for kind in KINDS}
        yield Table.of(
            [{"kind": "" if i else names[kind]} | row for kind in KINDS for i, row in enumerate(best[kind])],
            ("kind", "kind"),
            *((name, name, "d") for name in ("layer", "head")),
            *((name, key, ".2f") for name, key in COLUMNS.items()),
            ("back", "distance", ".1f"),
            title=f"Heads of {model} on {self.text_read}",
            caption=f"score: {self.measure}, ± over prompts; shuffled: the same places when the tokens are "
            "shuffled; entropy in nats; BOS, own: share on the first and the current token; back: mean "
            "distance, tokens",
            json={**self.subject.about, "read": self.text_read, "kinds": kinds, "statistics": statistics},
        )
        scores, mixed = (
            [self._scores(kind, best[kind][0], of) for kind in KINDS] for of in ("score", "control")
        )
        statistic = [self._statistic(found[name], *told) for name, told in STATISTICS.items()]
        for title, source, by, panels in (
            ("Heads by what they do", "scores", "kind", scores),
            ("The same places when the tokens are shuffled", "control", "kind", mixed),
            ("Where the heads look", "statistics", "statistic", statistic),
        ):
            labels = [LOOKS[kind][0] for kind in KINDS] if by == "kind" else [each.title for each in panels]
            options = tuple(zip(labels, panels, strict=True))
            yield Choice(title=title, sources=(source,), name=by, options=options)
        what = f"What the heads of {model} do on {self.text_read}"
        yield Figure(name="head_detection", title=what, panels=(*scores, *mixed), columns=len(KINDS))
        where = f"Where the heads of {model} look: {self.text_read}"
        yield Figure(name="head_statistics", title=where, panels=tuple(statistic), columns=2)

    def _scores(self, kind: str, best: dict[str, Any], of: str) -> Heatmap:
        """Scores of a kind by layer and head, or those on shuffled tokens (control); the best is framed."""
        title, looks = LOOKS[kind]
        titles = f"{title}, best: layer {best['layer']}, head {best['head']}", looks
        shuffled_titles = "Tokens shuffled", "the same places, other tokens there"
        row = self.scores["layer"].values.tolist().index(best["layer"])
        return Heatmap.of(
            self.scores[of].sel(kind=kind).transpose("layer", "head"),
            *(titles if of == "score" else shuffled_titles),
            value_name=self.measure,
            low=min(0.0, *(float(self.scores[name].min()) for name in ("score", "control"))),
            high=1.0,
            numbers=".2f",
            framed=((row, best["head"]) * 2,),
            frame_name="best on what is not shuffled",
        )

    def _statistic(self, values: xr.DataArray, title: str, told: str) -> Heatmap:
        digits = ".1f" if values.name == "distance" else ".2f"
        high = 1.0 if str(values.name).endswith("share") else None
        return Heatmap.of(values, title, told, low=0.0, high=high, numbers=digits)

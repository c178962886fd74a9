"""Which heads copy, and which look one token back? Head detection on repeated random tokens, or on prompts.

Captures attention patterns (once; they stay in the store) and scores every head with TransformerLens'
detection patterns (stages/head_detection.py). By default on blocks of random tokens that are repeated:
nothing but the repetition can tell what comes next, so that a head which attends behind the earlier
occurrence of a token is an induction head (Olsson et al. 2022); queries of the first block, which have
nothing to find, are left out.

Control: the same tokens with every repetition shuffled, scored at the places of the unshuffled text. A head
that matches content loses its score there, as what it looks for stands elsewhere; a head that only looks so
many tokens back keeps it, and is no induction head. (A previous-token head keeps it rightly: places are all
it needs.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..stages.attention_statistics import head_statistics
from ..stages.head_detection import KINDS, MEASURES, head_scores
from ..store.errors import ConfigError, PromptError
from .settings import setting
from .subject import Subject
from .workflow import Workflow

if TYPE_CHECKING:
    import xarray as xr
    from rich.table import Table

    from ..stages.forward.model import Model
    from ..store import PackedTokens

__all__ = ["HeadDetection", "Settings", "repeated_tokens", "shuffled"]

COMMON = (100, 20_000)
"""Ids random tokens are drawn from, as in TransformerLens' `induction_loss`: below, vocabularies keep bytes
and special tokens, above, rare words."""
STATISTICS = ("entropy", "bos_share", "current_share", "distance")


@dataclass(frozen=True)
class Settings:
    """What `--set` can change."""

    model: str = setting("specimen", 'hub id, directory, or "specimen"')
    prompts: tuple[str, ...] = setting((), "prompts to read; none: repeated random tokens")
    sequences: int = setting(16, "random sequences")
    length: int = setting(50, "tokens of the block that is repeated, all different")
    repeats: int = setting(2, "how often the block stands in a sequence")
    first_block: bool = setting(False, "let queries of the first block take part, as TransformerLens does")
    exclude_bos: bool = setting(False, "leave out attention to the first position")
    exclude_current_token: bool = setting(False, "leave out attention to the current token")
    error_measure: str = setting("mul", '"mul": share of the attention; "abs": 1 - mean difference')
    top: int = setting(5, "heads listed per kind")
    seed: int = setting(0, "of the random tokens and of the shuffled control")
    dtype: str = setting("float32", "what the model computes in")

    def __post_init__(self) -> None:
        if self.error_measure not in MEASURES:
            raise ConfigError(f"expected error_measure 'mul' or 'abs', found {self.error_measure!r}")
        least = {"sequences": 1, "length": 2, "repeats": 2, "top": 1}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ConfigError(f"expected {name} to be at least {low}, found {getattr(self, name)}")


def repeated_tokens(
    candidates: npt.NDArray[Any], prefix: list[int], *, sequences: int, length: int, repeats: int, seed: int
) -> list[list[int]]:
    """Rows of `prefix` and a random block of different tokens, `repeats` times.

    Raises PromptError when there are fewer candidates than a block has tokens.

    >>> row = repeated_tokens(np.arange(5, 9), [0], sequences=1, length=3, repeats=2, seed=0)[0]
    >>> row[0], len(row), row[1:4] == row[4:]
    (0, 7, True)
    """
    if len(candidates) < length:
        raise PromptError(
            f"expected a block of at most {len(candidates)} different tokens, found length {length}; "
            "make the block shorter"
        )
    rng = np.random.default_rng(seed)
    blocks = [rng.permutation(candidates)[:length].tolist() for _ in range(sequences)]
    return [[*prefix, *(block * repeats)] for block in blocks]


def shuffled(row: list[int], fixed: int, block: int, seed: int) -> list[int]:
    """A row with the tokens of every block behind its first `fixed` ones permuted among themselves."""
    rng = np.random.default_rng(seed)
    rest = [rng.permutation(row[start : start + block]).tolist() for start in range(fixed, len(row), block)]
    return row[:fixed] + [token for part in rest for token in part]


class HeadDetection(Workflow):
    """Every head's match with what previous-token, duplicate-token and induction heads do."""

    name = "head_detection"
    question = "Which heads copy, and which look one token back?"
    settings_type = Settings

    def __init__(self, settings: Settings, model: Model | None = None) -> None:
        import xarray as xr

        super().__init__(settings)
        self.subject = Subject(model or settings.model, settings.dtype)
        tokens, other, first_query = self._tokens()
        captured, control = (self.subject.capture(t, "blocks.*.attn.hook_pattern") for t in (tokens, other))
        given = {
            "token_id": xr.DataArray(tokens.ids, dims="token", name="token_id"),
            "row_size": xr.DataArray(tokens.row_size, dims="prompt", name="row_size"),
        }
        asked = {
            "exclude_bos": settings.exclude_bos,
            "exclude_current_token": settings.exclude_current_token,
            "error_measure": settings.error_measure,
            "first_query": first_query,
        }
        self.nodes = {
            "scores": head_scores.on(pattern=captured["pattern"], **given, **asked),
            "control": head_scores.on(pattern=control["pattern"], **given, **asked),
            "statistics": head_statistics.on(pattern=captured["pattern"], row_size=given["row_size"]),
        }

    def _tokens(self) -> tuple[PackedTokens, PackedTokens, int]:
        """What is read, the same shuffled, and the first query of every prompt that takes part."""
        from ..store import PackedTokens

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
        encoded = subject.tokenizer.encode("a")
        prefix = [one for one, is_special in zip(encoded.ids, encoded.special, strict=True) if is_special]
        rows = repeated_tokens(
            self._candidates(),
            prefix,
            sequences=chosen.sequences,
            length=chosen.length,
            repeats=chosen.repeats,
            seed=chosen.seed,
        )
        start = len(prefix) + chosen.length
        mixed = [shuffled(row, start, chosen.length, chosen.seed + i) for i, row in enumerate(rows)]
        first_query = 0 if chosen.first_block else start
        return PackedTokens.from_lists(rows), PackedTokens.from_lists(mixed), first_query

    def _candidates(self) -> npt.NDArray[Any]:
        """Ids of ordinary tokens."""
        tokenizer = self.subject.tokenizer
        known = min(self.subject.config.vocab_size, tokenizer.vocab_size)
        roles = ("bos_token", "eos_token", "unk_token", "pad_token")
        special = [one for one in map(tokenizer.special_id, roles) if one is not None]
        ids = np.setdiff1d(np.arange(known), special)
        common = ids[(ids >= COMMON[0]) & (ids < COMMON[1])]
        return common if len(common) >= self.settings.length else ids

    @cached_property
    def scores(self) -> xr.Dataset:
        """score, spread, control [kind, layer, head] and the statistics [layer, head], in memory."""
        found = self.result("scores").assign(control=self.result("control")["score"])
        return found.merge(self.result("statistics")).load()

    def best(self, kind: str) -> list[tuple[int, int]]:
        """(layer, head) of the heads that match a kind best, best first."""
        table = self.scores["score"].sel(kind=kind).transpose("layer", "head").values
        order = np.argsort(-table, axis=None, kind="stable")[: self.settings.top]
        layers = self.scores["layer"].values
        return [(int(layers[i // table.shape[1]]), int(i % table.shape[1])) for i in order]

    @property
    def told(self) -> str:
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

    def tables(self) -> list[Table]:
        """The best heads of each kind, with the control and what their attention is like."""
        from rich.table import Table

        table = Table(title=f"Heads of {self.subject.name} on {self.told}", box=None, pad_edge=False)
        table.add_column("kind", no_wrap=True)
        for column in ("layer", "head", "score", "±", "shuffled", "entropy", "BOS", "own", "back"):
            table.add_column(column, justify="right", no_wrap=True, min_width=len(column))
        for kind in KINDS:
            for rank, (layer, head) in enumerate(self.best(kind)):
                row = self.scores.sel(kind=kind, layer=layer, head=head)
                values = [float(row[name]) for name in ("score", "spread", "control", *STATISTICS)]
                digits = [f"{value:.2f}" for value in values[:-1]] + [f"{values[-1]:.1f}"]
                name = kind.removesuffix("_head").replace("_", " ")
                table.add_row("" if rank else name, str(layer), str(head), *digits)
        table.caption = (
            f"score: {self.measure}, ± over prompts; shuffled: the same places when the tokens are shuffled; "
            "entropy in nats; BOS, own: share on the first and the current token; back: mean distance, tokens"
        )
        return [table]

    def draw(self, folder: Path) -> list[Path]:
        """Scores and controls by layer and head; what each head's attention is like."""
        from .figures_heads import scores_page, statistics_page

        shown = {"model": self.subject.name, "told": self.told, "footer": self.footer}
        return [
            self.figure(
                folder / "head_detection.png",
                lambda: scores_page(self.scores, measure=self.measure, **shown),
            ),
            self.figure(folder / "head_statistics.png", lambda: statistics_page(self.scores, **shown)),
        ]

    def to_json(self) -> dict[str, Any]:
        """Scores, control and spread [layer][head] per kind with the best heads; statistics [layer][head]."""
        found = self.scores.transpose("kind", "layer", "head")
        return {
            **self.header(),
            "model_id": self.subject.name,
            "n_layers": self.subject.config.num_layers,
            "n_heads": self.subject.config.axis_sizes["head"],
            "read": self.told,
            "kinds": {kind: self._kind_json(found.sel(kind=kind), kind) for kind in KINDS},
            "statistics": {
                name: {"unit": found[name].attrs["units"], "by_head": found[name].values.tolist()}
                for name in STATISTICS
            },
        }

    def _kind_json(self, found: xr.Dataset, kind: str) -> dict[str, Any]:
        heads = [(layer, head, found.sel(layer=layer, head=head)) for layer, head in self.best(kind)]
        names = ("score", "spread", "control")
        return {
            **{name: found[name].values.tolist() for name in names},
            "best": [
                {"layer": layer, "head": head, **{name: float(row[name]) for name in names}}
                for layer, head, row in heads
            ],
        }


WORKFLOW = HeadDetection

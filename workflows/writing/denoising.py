"""How masks were filled in, as tables and figures: what `generate` shows of a model that fills in masks.

Border: results of `Denoising` in, views out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.logits.lens import format_probability, format_text, format_token
from ..material.answers import named
from ..views import Figure, Heatmap, Table, Text, Tokens, View, bold

if TYPE_CHECKING:
    import xarray as xr

    from ..subject import Subject

__all__ = ["denoising_views"]

STEPS, PLACES = 24, 24
"""Passes and masks drawn at most."""


def denoising_views(
    subject: Subject, texts: Sequence[str], found: xr.Dataset, unchanged: xr.Dataset | None, without: str
) -> Iterator[View]:
    """Texts as they were filled in, and the trace of the first one: what every mask would have said in every
    pass, until it was filled.

    found: of `Denoising`; unchanged: the same of the whole model, where something is silenced. without: what
    is, for titles.
    """
    told = [_told(subject, texts[row], _one(found, row)) for row in range(len(texts))]
    others = [] if unchanged is None else [_one(unchanged, row) for row in range(len(texts))]
    for one, other in zip(told, others, strict=False):
        one["unchanged_text"] = _text(subject, other["token_id"].values)
    shown = [
        Text(
            tuple(map(format_token, named(subject, one["token_id"].values))),
            np.exp(one["logprob"].values),
            f"{word}{_short(text)}",
        )
        for row, text in enumerate(texts)
        for word, one in (("", _one(found, row)), *(("unchanged: ", each) for each in others[row : row + 1]))
    ]
    yield Tokens(
        title="How sure of each token?",
        texts=tuple(shown),
        value_name="probability of the token when it was filled in",
        low=0.0,
        high=1.0,
    )
    yield Table.of(
        told,
        ("prompt", lambda one: _short(one["prompt"])),
        ("filled in", lambda one: bold(format_text(one["text"]))),
        *([("unchanged", lambda one: format_text(one["unchanged_text"]))] if others else []),
        ("masks", lambda one: len(one["filled"]), "d"),
        ("passes", "passes", "d"),
        ("sure", lambda one: _mean([each["probability"] for each in one["filled"]]), format_probability),
        title=f"{subject.name} fills in{without}",
        caption="sure: geometric mean of the probabilities of the tokens filled in",
        json={"results": told},
    )
    first = _one(found, 0)
    yield Table.of(
        told[0]["filled"],
        ("pass", "step", "d"),
        ("position", "position", "d"),
        ("token", lambda one: bold(format_token(one["token"]))),
        ("probability", "probability", format_probability),
        title=f"The order in which {_short(texts[0])!r} was filled in",
        sources=("generation",),
    )
    yield _trace(subject, first, without)


def _trace(subject: Subject, one: xr.Dataset, without: str) -> Figure:
    """A row per mask, a column per pass: the likeliest token there, shaded by its probability."""
    places = np.flatnonzero(one["step_filled"].values >= 0)
    shown = places[:PLACES]
    cells = one.isel(position=shown, step=slice(STEPS)).transpose(..., "position", "step")
    ids = cells["best_id"].values
    words = [["" if i < 0 else format_token(named(subject, [i])[0]) for i in row] for row in ids]
    panel = Heatmap(
        values=np.exp(cells["best_logprob"].values),
        rows=tuple(f"position {place}" for place in shown),
        columns=tuple(map(str, range(ids.shape[1]))),
        row_name="",
        column_name="pass",
        value_name="probability",
        low=0.0,
        high=1.0,
        texts=tuple(map(tuple, words)),
    )
    passes = one.sizes["step"]
    left_out = []
    if len(shown) < len(places):
        left_out.append(f"the first {len(shown)} of {len(places)} masks")
    if ids.shape[1] < passes:
        left_out.append(f"the first {ids.shape[1]} of {passes} passes")
    more = f" Shown are {' and '.join(left_out)}." if left_out else ""
    return Figure(
        name="denoising",
        title=f"What {subject.name} says at each mask, pass by pass{without}",
        caption=f"The likeliest token at every mask that is left, shaded by its probability.{more}",
        panels=(panel,),
    )


def _one(dataset: xr.Dataset, row: int) -> xr.Dataset:
    """One prompt, its own positions and passes only."""
    one = dataset.isel(prompt=row)
    positions, passes = int((one["token_id"] >= 0).sum()), int(one["step_filled"].max()) + 1
    return one.isel(position=slice(positions), step=slice(passes))


def _told(subject: Subject, prompt: str, one: xr.Dataset) -> dict[str, Any]:
    """A prompt, its text at the end, and every mask in the order in which they were filled."""
    at, ids = one["step_filled"].values, one["token_id"].values
    probabilities = np.exp(one["logprob"].values)
    places = sorted(np.flatnonzero(at >= 0).tolist(), key=lambda place: (int(at[place]), place))
    return {
        "model_id": subject.name,
        "prompt": prompt,
        "text": _text(subject, ids),
        "token_ids": ids.tolist(),
        "passes": one.sizes["step"],
        "filled": [
            {
                "step": int(at[place]),
                "position": place,
                "token_id": int(ids[place]),
                "token": subject.tokenizer.decode_token(int(ids[place])),
                "probability": float(probabilities[place]),
            }
            for place in places
        ],
    }


def _text(subject: Subject, ids: Any) -> str:
    return subject.tokenizer.decode([int(token) for token in ids], keep_special=False)


def _mean(probabilities: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(probabilities))))


def _short(text: str, room: int = 60) -> str:
    """The beginning of a prompt, on one line."""
    shown = format_text(text)
    return shown if len(shown) <= room else shown[:room] + "…"

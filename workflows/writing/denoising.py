"""Views of `generate` for masked language models: tables and figures of how masks were filled in.

Border: results of `Denoising` in, views out. A pass is one forward pass, after which one or more masks are
filled in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.logits.lens import format_probability, format_text, format_token
from ..views import Figure, Heatmap, Table, Text, Tokens, View, bold

if TYPE_CHECKING:
    import xarray as xr

    from ..subject import Subject

__all__ = ["denoising_views"]

STEPS, PLACES = 24, 24
"""Largest number of forward passes and of masks that are drawn."""


def denoising_views(
    subject: Subject, texts: Sequence[str], denoised: xr.Dataset, unchanged: xr.Dataset | None, without: str
) -> Iterator[View]:
    """Views of texts whose masks were filled in, and of the most likely token at each mask of the first text
    in each pass.

    Arguments:
        subject: model and tokenizer.
        texts: prompts.
        denoised: result of `Denoising`.
        unchanged: result of the model without intervention, if hook points are set to zero; else None.
        without: end of titles that names these hook points, such as ", without blocks.0.hook_mlp_out"; "" for
            none.
    """
    documents = [_document(subject, texts[row], _of_prompt(denoised, row)) for row in range(len(texts))]
    baselines = [] if unchanged is None else [_of_prompt(unchanged, row) for row in range(len(texts))]
    # Not strict: without interventions there are no baselines.
    for document, baseline in zip(documents, baselines, strict=False):
        document["unchanged_text"] = _text(subject, baseline["token_id"].values)
    shown = [
        Text(
            tuple(subject.token_labels(filled["token_id"].values)),
            np.exp(filled["logprob"].values),
            f"{prefix}{_short(text)}",
        )
        for row, text in enumerate(texts)
        for prefix, filled in (
            ("", _of_prompt(denoised, row)),
            *(("unchanged: ", baseline) for baseline in baselines[row : row + 1]),
        )
    ]
    yield Tokens(
        title="Probability of each token that was filled in",
        caption="One text per prompt, with its masks filled in. Shade: probability of a token in the forward "
        "pass that filled it in.",
        texts=tuple(shown),
        value_name="probability of the token when it was filled in",
        low=0.0,
        high=1.0,
    )
    yield Table.of(
        documents,
        ("prompt", lambda row: _short(row["prompt"])),
        ("filled in", lambda row: bold(format_text(row["text"]))),
        *([("unchanged", lambda row: format_text(row["unchanged_text"]))] if baselines else []),
        ("masks", lambda row: len(row["filled"]), "d"),
        ("passes", "passes", "d"),
        (
            "mean probability",
            lambda row: _geometric_mean([token["probability"] for token in row["filled"]]),
            format_probability,
        ),
        title=f"Masks filled in by {subject.name}{without}",
        caption="One row per prompt. Passes: number of forward passes, each of which fills in one or more "
        "masks. Mean probability: geometric mean, over the filled-in tokens, of the probability that each "
        "had in the pass that filled it in.",
        json={"results": documents},
    )
    yield Table.of(
        documents[0]["filled"],
        ("pass", "step", "d"),
        ("position", "position", "d"),
        ("token", lambda row: bold(format_token(row["token"]))),
        ("probability", "probability", format_probability),
        title=f"Order in which masks were filled in: {_short(texts[0])!r}",
        caption="One row per mask of the first prompt: the forward pass that filled it in, its position, and "
        "the probability of the token in that pass.",
        sources=("generation",),
    )
    yield _trace(subject, _of_prompt(denoised, 0), without)


def _trace(subject: Subject, filled: xr.Dataset, without: str) -> Figure:
    """Figure of the most likely token at each mask (rows) in each pass (columns), shaded by probability."""
    # Tokens that were no masks have -1.
    masks = np.flatnonzero(filled["step_filled"].values >= 0)
    shown_masks = masks[:PLACES]
    cells = filled.isel(position=shown_masks, step=slice(STEPS)).transpose(..., "position", "step")
    best_ids = cells["best_id"].values
    n_shown_passes = best_ids.shape[1]
    # A mask that is filled in has no most likely token in later passes: -1.
    words = [["" if token < 0 else subject.token_labels([token])[0] for token in row] for row in best_ids]
    panel = Heatmap(
        values=np.exp(cells["best_logprob"].values),
        rows=tuple(f"position {position}" for position in shown_masks),
        columns=tuple(map(str, range(n_shown_passes))),
        row_name="",
        column_name="pass",
        value_name="probability",
        low=0.0,
        high=1.0,
        texts=tuple(map(tuple, words)),
    )
    n_passes = filled.sizes["step"]
    limits = []
    if len(shown_masks) < len(masks):
        limits.append(f"the first {len(shown_masks)} of {len(masks)} masks")
    if n_shown_passes < n_passes:
        limits.append(f"the first {n_shown_passes} of {n_passes} passes")
    shown_part = f" Shown are {' and '.join(limits)}." if limits else ""
    return Figure(
        name="denoising",
        title=f"Most likely token of {subject.name} at each mask, by pass{without}",
        caption="Each cell: the most likely token at one mask (row) in one forward pass (column), as long as "
        f"the mask is not filled in. Shade: its probability.{shown_part}",
        panels=(panel,),
    )


def _of_prompt(dataset: xr.Dataset, row: int) -> xr.Dataset:
    """Results of prompt number `row`, without padding: its own positions and passes."""
    prompt = dataset.isel(prompt=row)
    # Token ids past the end of a shorter prompt are -1.
    positions, passes = int((prompt["token_id"] >= 0).sum()), int(prompt["step_filled"].max()) + 1
    return prompt.isel(position=slice(positions), step=slice(passes))


def _document(subject: Subject, prompt: str, filled: xr.Dataset) -> dict[str, Any]:
    """JSON record of a prompt: its final text, and its masks in the order in which they were filled in."""
    # Passes count from 0; tokens that were no masks have -1.
    step_filled, ids = filled["step_filled"].values, filled["token_id"].values
    probabilities = np.exp(filled["logprob"].values)
    positions = sorted(
        np.flatnonzero(step_filled >= 0).tolist(), key=lambda position: (int(step_filled[position]), position)
    )
    return {
        "model_id": subject.name,
        "prompt": prompt,
        "text": _text(subject, ids),
        "token_ids": ids.tolist(),
        "passes": filled.sizes["step"],
        "filled": [
            {
                "step": int(step_filled[position]),
                "position": position,
                "token_id": int(ids[position]),
                "token": subject.tokenizer.decode_token(int(ids[position])),
                "probability": float(probabilities[position]),
            }
            for position in positions
        ],
    }


def _text(subject: Subject, ids: Any) -> str:
    """Decoded text of token ids, without special tokens."""
    return subject.tokenizer.decode([int(token) for token in ids], keep_special=False)


def _geometric_mean(probabilities: Sequence[float]) -> float:
    # The reciprocal of the perplexity of these tokens.
    return float(np.exp(np.mean(np.log(probabilities))))


def _short(text: str, room: int = 60) -> str:
    """The first `room` characters of a prompt, on one line."""
    shown = format_text(text)
    return shown if len(shown) <= room else shown[:room] + "…"

"""A token of a run: where it stands, how long its states are, whom they resemble, what a lens reads off them,
which features are active.

All of it from the store alone: norms and neighbours from states, the lens where somebody stored the model's
readout, features where somebody stored a dictionary's encoding of this run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ....stages.features.labels import labels_under
from ....stages.logits.lens import format_probability, format_token, logits
from ....store import Store
from ....store.errors import MizarrError
from ...holdings import HeldFolder, Snapshot
from ...views import Choice, Line, Lines, Note, Table, Values, View, dim
from .. import addresses
from ..opened import OpenedRun, opened
from ..page import Link, Page
from ..similar import most_similar
from .parts import digest_of, home, linked, sized
from .prompt import PER_PAGE, token_links

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["token_page"]

AROUND = 20
"""Tokens shown before and after."""
CURVES = 8
"""Variables whose norms are drawn."""
READOUT_BYTES = 192 << 20
"""Of an unembedding that is read for a page."""
LISTED = 5
"""Tokens a lens tells per layer."""
FEATURES = 12
"""Active features told per dictionary and layer."""
_DIGEST = re.compile("[0-9a-f]{64}")
SINK = " In many models the first token is an attention sink: its norms may be 100 times those of others."
"""What the caption of norms adds at position 0."""
STREAM = ("resid_post", "resid_pre", "resid_mid")
"""What neighbours are looked for in, the first that is stored; else whatever is first by name."""


def token_page(held: Snapshot, folder: HeldFolder, token: int) -> Page | None:
    """The page of a token by its packed place; None where there is none."""
    assert folder.run is not None
    run, digest = opened(held.store, folder), digest_of(folder)
    packed = run.entry.tokens
    if token >= packed.n_tokens:
        return None
    here = addresses.token(digest, token)
    prompt = int(packed.prompt_of(token))
    row, position = packed.row(prompt), token - packed.row(prompt).start
    (text,) = run.texts([token])
    stored = run.per_token()
    views: list[View] = [
        token_links(
            run,
            here,
            max(row.start, token - AROUND),
            min(row.stop, token + AROUND + 1),
            token,
            title="In its prompt",
        ),
        _where(run, token, prompt, position, row.stop - row.start),
    ]
    if stored:
        views += [*_norms(run, stored, token, position), *_neighbours(run, stored, token, here)]
        views += [_lens(held, run, stored, token), _features(held, run, token, here)]
    else:
        views.append(Note(title="States", text="Nothing with a row for each token is published of this run."))
    page = addresses.prompt(digest, prompt, 1 + position // PER_PAGE)
    return Page(
        address=here,
        title=f"Token '{text}'",
        over=f"{folder.run.model} · run {digest[:12]} · prompt {prompt:,} · position {position:,}",
        up=(
            home(here),
            Link(f"run {digest[:12]}", addresses.to(here, addresses.run(digest))),
            Link(f"prompt {prompt:,}", addresses.to(here, page)),
        ),
        views=tuple(views),
    )


def _where(run: OpenedRun, token: int, prompt: int, position: int, length: int) -> Values:
    packed = run.entry.tokens
    told = {
        "prompt": f"{prompt:,}",
        "position": f"{position:,} of {length:,}",
        "place in the run": f"{token:,}",
    }
    if run.has_ids:
        told["token id"] = str(int(packed.ids[token]))
    if packed.char_start is not None and packed.char_end is not None:
        told["characters"] = f"{int(packed.char_start[token])} to {int(packed.char_end[token])}"
    return Values(pairs=tuple(told.items()))


def _norms(run: OpenedRun, stored: dict[str, list[int | None]], token: int, position: int) -> Iterator[View]:
    """Norms over layers as curves, one per variable; numbers without layers as numbers.

    position: of the token in its prompt; what is said of norms at 0 is not true of other tokens.
    """
    layered = {name: layers for name, layers in stored.items() if None not in layers and run.spec(name).tail}
    flat = [name for name in stored if name not in layered]
    if layered:
        names = sorted(layered, key=lambda name: (name not in STREAM, name))[:CURVES]
        every = sorted({int(layer) for name in names for layer in layered[name] if layer is not None})
        lines = []
        for name in names:
            values = np.full(len(every), np.nan)
            at = [every.index(int(layer)) for layer in layered[name] if layer is not None]
            values[at] = run.norms(name, layered[name], token, token + 1)[:, 0]
            lines.append(Line(name, values))
        yield Lines(
            title="Norms by layer",
            caption=f"Length (L2) of what is stored of this token.{'' if position else SINK}",
            x=tuple(map(float, every)),
            lines=tuple(lines),
            x_name="layer",
            y_name="norm",
            low=0.0,
        )
    if flat:
        pairs = []
        for name in flat:
            (values,) = run.norms(name, stored[name], token, token + 1).T
            word = f"norm of {name}" if run.spec(name).tail else name
            pairs.append((word, ", ".join(f"{value:.4g}" for value in values)))
        yield Values(title="Without layers" if layered else "Stored", pairs=tuple(pairs))


def _neighbours(run: OpenedRun, stored: dict[str, list[int | None]], token: int, here: str) -> Iterator[View]:
    """Most similar tokens at a middle and the last stored layer."""
    vectors = [name for name in stored if math.prod(run.spec(name).tail) > 1]
    if not vectors:
        return
    variable = next((name for name in STREAM if name in vectors), sorted(vectors)[0])
    layers = stored[variable]
    chosen = list(dict.fromkeys([layers[len(layers) // 2], layers[-1]]))
    options = [
        ("all" if layer is None else f"layer {layer}", _similar(run, variable, layer, token, here))
        for layer in chosen
    ]
    yield Choice(
        title=f"Most similar tokens by {variable}", name="at", options=tuple(options), start=len(options) - 1
    )


def _similar(run: OpenedRun, variable: str, layer: int | None, token: int, here: str) -> Table:
    found, packed, digest = most_similar(run, variable, layer, token), run.entry.tokens, digest_of(run.folder)
    texts = run.texts(found.tokens.tolist())
    rows = [
        {"token": int(at), "text": text, "cosine": float(cosine), "prompt": int(packed.prompt_of(int(at)))}
        for at, text, cosine in zip(found.tokens, texts, found.cosine, strict=True)
    ]
    among = (
        f"all {found.of:,} tokens of the run"
        if found.looked == found.of
        else f"{found.looked:,} of {found.of:,} tokens, in stretches spread evenly over the run"
    )
    return Table.of(
        rows,
        ("token", lambda row: linked(f"'{row['text']}'", here, addresses.token(digest, row["token"]))),
        ("cosine", "cosine", ".4f"),
        ("in", lambda row: (dim(_before(run, row["token"])), row["text"], dim(_after(run, row["token"])))),
        ("prompt", lambda row: linked(f"{row['prompt']:,}", here, addresses.prompt(digest, row["prompt"]))),
        caption=f"Cosine of states as stored, among {among}; the median there is {found.median:.4f}.",
    )


def _before(run: OpenedRun, token: int) -> str:
    start = int(run.entry.tokens.row_start[int(run.entry.tokens.prompt_of(token))])
    return run.passage(range(max(start, token - 4), token))


def _after(run: OpenedRun, token: int) -> str:
    row = run.entry.tokens.row(int(run.entry.tokens.prompt_of(token)))
    return run.passage(range(token + 1, min(row.stop, token + 4)))


def _lens(held: Snapshot, run: OpenedRun, stored: dict[str, list[int | None]], token: int) -> View:
    """What each layer of the stream would say next."""
    title = "Logit lens"
    layers = [layer for layer in stored.get("resid_post", ()) if layer is not None]
    if not layers:
        return Note(title=title, text="Reads resid_post, of which nothing is published in this run.")
    readout = _readout_of(held, run.folder)
    if readout is None:
        told = "The readout of this model is not in the store. `mizarr compute logit_lens` puts it there."
        return Note(title=title, text=told)
    if (size := readout.usage.bytes) > READOUT_BYTES:
        told = f"The readout takes {sized(size)}; a page reads {sized(READOUT_BYTES)} at most. "
        return Note(title=title, text=f"{told}`mizarr compute logit_lens` reads it.")
    try:
        table = _read_readout(held.store.address, readout.records[0].key)
        states = np.stack([run.rows("resid_post", layer, token, token + 1)[0] for layer in layers])
        rows = _said(states, layers, table)
    except MizarrError as error:
        return Note(title=title, text=str(error))
    follows = _next(run, token)
    columns = [
        (f"{rank}." if rank > 1 else "most likely", lambda row, rank=rank: row[1][rank - 1])
        for rank in range(1, LISTED + 1)
    ]
    caption = f"What the model would say next if each layer were the last. {follows}"
    return Table.of(
        rows[::-1], ("layer", lambda row: row[0], "d"), *columns, title=title, caption=caption.strip()
    )


def _said(states: Any, layers: list[int], readout: xr.Dataset) -> list[tuple[int, list[Any]]]:
    """Most likely tokens of each layer with their probabilities."""
    import xarray as xr

    found = logits(xr.DataArray(states, dims=("layer", "hidden")), readout).values.astype(np.float64)
    share = np.exp(found - found.max(axis=1, keepdims=True))
    share /= share.sum(axis=1, keepdims=True)
    words, rows = readout["token"].values, []
    for layer, probabilities in zip(layers, share, strict=True):
        best = np.argsort(-probabilities, kind="stable")[:LISTED]
        told = [
            (f"'{format_token(str(words[i]))}'", dim(f"  {format_probability(float(probabilities[i]))}"))
            for i in best
        ]
        rows.append((layer, told))
    return rows


def _next(run: OpenedRun, token: int) -> str:
    row = run.entry.tokens.row(int(run.entry.tokens.prompt_of(token)))
    if token + 1 >= row.stop:
        return "The prompt ends here."
    return f"In the prompt '{run.texts([token + 1])[0]}' follows."


def _readout_of(held: Snapshot, folder: HeldFolder) -> HeldFolder | None:
    """A stored readout of the weights and configuration a run was captured with, of its dtype if there is."""
    identity = folder.note("identity")
    if not identity:
        return None
    fitting = []
    for each in held.results:
        if each.label.partition("/")[0] == "readout":
            params = (each.note("request") or {}).get("params", {})
            if (params.get("weights"), params.get("config")) == (identity["weights"], identity["config"]):
                fitting.append((params.get("dtype") != identity["dtype"], each.data, each))
    return min(fitting)[2] if fitting else None


@lru_cache(maxsize=1)
def _read_readout(address: str, key: str) -> xr.Dataset:
    from ....store import open_store

    return open_store(address, mode="r").open_result(key).load()


def _features(held: Snapshot, run: OpenedRun, token: int, here: str) -> View:
    """Active features, of each stored encoding of this run."""
    options = []
    for each in held.made_of(run.folder):
        if each.label.startswith("encode_") and not each.is_cell:
            table = _active(held.store, run, each, token, here)
            if table is not None:
                options.append((f"{_dictionary(each)}, layer {table[0]}", table[1]))
    if not options:
        told = "No dictionary's encoding of this run is in the store. `mizarr.encode_corpus` makes one."
        return Note(title="Active features", text=told)
    return Choice(title="Active features", name="dictionary", options=tuple(options))


def _dictionary(folder: HeldFolder) -> str:
    params = (folder.note("request") or {}).get("params", {})
    return str(params.get("features", folder.label))[:8]


def _called(store: Store, folder: HeldFolder) -> dict[str, str]:
    """What people call the features of an encoding's dictionary, by name."""
    identity = str((folder.note("request") or {}).get("params", {}).get("features", ""))
    if not _DIGEST.fullmatch(identity):
        return {}
    return {str(feature): each.text for feature, each in labels_under(store, identity).items()}


def _active(
    store: Store, run: OpenedRun, folder: HeldFolder, token: int, here: str
) -> tuple[str, Table] | None:
    """Layer, and what is active at the token; None for an encoding of other tokens."""
    encoded = store.open_result(folder.records[0])
    packed = run.entry.tokens
    if encoded.sizes.get("edge") != packed.n_tokens + 1:
        return None
    if "token_id" in encoded and int(encoded["token_id"][token]) != int(packed.ids[token]):
        return None
    start, stop = (int(value) for value in encoded["token_ptr"][token : token + 2].values)
    here_active = encoded.isel(active=slice(start, stop))
    feature, value = here_active["feature"].values, here_active["value"].values
    best = np.argsort(-value, kind="stable")[:FEATURES]
    layer = str(int(encoded["layer"])) if "layer" in encoded.coords else "–"
    record, called = folder.records[0], _called(store, folder)
    labels = [called.get(f"L{layer}:{feature[i]}", "") for i in best]
    table = Table.of(
        [(int(feature[i]), float(value[i]), label) for i, label in zip(best, labels, strict=True)],
        ("feature", lambda row: row[0], "d"),
        *([("label", lambda row: row[2])] if any(labels) else []),
        ("activation", lambda row: row[1], ".4g"),
        ("stored in", lambda _: linked(record.short, here, addresses.result(record.key))),
        caption=f"{stop - start:,} active; the strongest {len(best)}.",
    )
    return layer, table

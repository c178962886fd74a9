"""Page of a token: its position, activation norms, most similar tokens, logit lens and active features.

Everything is read from the store: norms and similar tokens from stored activations; the logit lens needs a
stored readout (final norm and unembedding) of the model, features a stored encoding of the run by a
dictionary.
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
from ..opened import OpenedRun, open_run
from ..page import Link, Page
from ..similar import most_similar
from .parts import digest_of, home, linked, sized
from .prompt import PER_PAGE, token_links

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["token_page"]

AROUND = 20
"""Number of tokens shown before and after the token."""
CURVES = 8
"""Largest number of variables whose norms are drawn."""
READOUT_BYTES = 192 << 20
"""Largest readout, in bytes, that is read for a page."""
LISTED = 5
"""Number of most likely tokens per layer of the logit lens."""
FEATURES = 12
"""Largest number of active features listed per dictionary and layer."""
_DIGEST = re.compile("[0-9a-f]{64}")
SINK = " In many models the first token is an attention sink: its norms may be 100 times those of others."
"""Appended to the caption of norms at position 0."""
STREAM = ("resid_post", "resid_pre", "resid_mid")
"""Variables of the residual stream; the first stored one is compared for similar tokens."""


def token_page(snapshot: Snapshot, folder: HeldFolder, token: int) -> Page | None:
    """Page of a token.

    Arguments:
        snapshot: Content of the store.
        folder: Folder of the run.
        token: Index of the token along the packed axis of the run.

    Returns:
        The page; None if the run has fewer tokens.
    """
    assert folder.run is not None
    run, digest = open_run(snapshot.store, folder), digest_of(folder)
    packed = run.entry.tokens
    if token >= packed.n_tokens:
        return None
    address = addresses.token(digest, token)
    prompt = int(packed.prompt_of(token))
    row, position = packed.row(prompt), token - packed.row(prompt).start
    (text,) = run.texts([token])
    variables = run.per_token()
    views: list[View] = [
        token_links(
            run,
            address,
            max(row.start, token - AROUND),
            min(row.stop, token + AROUND + 1),
            token,
            title="In its prompt",
        ),
        _position_facts(run, token, prompt, position, row.stop - row.start),
    ]
    if variables:
        views += [*_norms(run, variables, token, position), *_neighbours(run, variables, token, address)]
        views += [_lens(snapshot, run, variables, token), _features(snapshot, run, token, address)]
    else:
        views.append(Note(title="States", text="Nothing with a row for each token is published of this run."))
    # Of the pages of the prompt's tokens the one that shows this token.
    page = addresses.prompt(digest, prompt, 1 + position // PER_PAGE)
    return Page(
        address=address,
        title=f"Token '{text}'",
        over=f"{folder.run.model} · run {digest[:12]} · prompt {prompt:,} · position {position:,}",
        up=(
            home(address),
            Link(f"run {digest[:12]}", addresses.relative(address, addresses.run(digest))),
            Link(f"prompt {prompt:,}", addresses.relative(address, page)),
        ),
        views=tuple(views),
    )


def _position_facts(run: OpenedRun, token: int, prompt: int, position: int, length: int) -> Values:
    """Position of a token in its prompt and run, its id, and its character offsets if they are stored.

    Arguments:
        run: The run.
        token: Index of the token along the packed axis.
        prompt: Index of its prompt.
        position: Position of the token in the prompt.
        length: Number of tokens of the prompt.
    """
    packed = run.entry.tokens
    values = {
        "prompt": f"{prompt:,}",
        "position": f"{position:,} of {length:,}",
        "index in the run": f"{token:,}",
    }
    if run.has_ids:
        values["token id"] = str(int(packed.ids[token]))
    if packed.char_start is not None and packed.char_end is not None:
        values["characters"] = f"{int(packed.char_start[token])} to {int(packed.char_end[token])}"
    return Values(pairs=tuple(values.items()))


def _norms(
    run: OpenedRun, variables: dict[str, list[int | None]], token: int, position: int
) -> Iterator[View]:
    """Norms of a token's activations: curves over layers, and a list of variables without layers.

    Arguments:
        run: The run.
        variables: Stored variables with a row per token -> their layers.
        token: Index of the token along the packed axis.
        position: Position of the token in its prompt; at 0 the caption mentions attention sinks.
    """
    layered = {
        name: layers for name, layers in variables.items() if None not in layers and run.spec(name).tail
    }
    flat = [name for name in variables if name not in layered]
    if layered:
        # False sorts before True: the residual stream comes first.
        names = sorted(layered, key=lambda name: (name not in STREAM, name))[:CURVES]
        all_layers = sorted({int(layer) for name in names for layer in layered[name] if layer is not None})
        lines = []
        for name in names:
            # NaN for layers at which this variable is not stored.
            values = np.full(len(all_layers), np.nan)
            indices = [all_layers.index(int(layer)) for layer in layered[name] if layer is not None]
            values[indices] = run.norms(name, layered[name], token, token + 1)[:, 0]
            lines.append(Line(name, values))
        yield Lines(
            title="Norms by layer",
            caption=f"L2 norm of the stored activations of this token.{'' if position else SINK}",
            x=tuple(map(float, all_layers)),
            lines=tuple(lines),
            x_name="layer",
            y_name="norm",
            low=0.0,
        )
    if flat:
        pairs = []
        for name in flat:
            (values,) = run.norms(name, variables[name], token, token + 1).T
            label = f"norm of {name}" if run.spec(name).tail else name
            pairs.append((label, ", ".join(f"{value:.4g}" for value in values)))
        yield Values(title="Without layers" if layered else "Stored", pairs=tuple(pairs))


def _neighbours(
    run: OpenedRun, variables: dict[str, list[int | None]], token: int, address: str
) -> Iterator[View]:
    """Most similar tokens at the middle and the last stored layer; no view if no vectors are stored.

    Arguments:
        run: The run.
        variables: Stored variables with a row per token -> their layers.
        token: Index of the token along the packed axis.
        address: Address of the page.
    """
    # A single number has no direction to compare.
    vectors = [name for name in variables if math.prod(run.spec(name).tail) > 1]
    if not vectors:
        return
    variable = next((name for name in STREAM if name in vectors), sorted(vectors)[0])
    layers = variables[variable]
    # Without duplicates, in order: with one or two layers the middle one is the last.
    compared_layers = list(dict.fromkeys([layers[len(layers) // 2], layers[-1]]))
    options = [
        ("all" if layer is None else f"layer {layer}", _similar(run, variable, layer, token, address))
        for layer in compared_layers
    ]
    # The last stored layer is shown first.
    yield Choice(
        title=f"Most similar tokens by {variable}", name="at", options=tuple(options), start=len(options) - 1
    )


def _similar(run: OpenedRun, variable: str, layer: int | None, token: int, address: str) -> Table:
    """Table of the tokens most similar to one, with the median similarity in the caption.

    Arguments:
        run: The run.
        variable: Stored variable that is compared.
        layer: Layer of the variable; None if it has none.
        token: Index of the token along the packed axis.
        address: Address of the page.
    """
    similar, packed = most_similar(run, variable, layer, token), run.entry.tokens
    digest, texts = digest_of(run.folder), run.texts(similar.tokens.tolist())
    rows = [
        {"token": index, "text": text, "cosine": cosine, "prompt": int(packed.prompt_of(index))}
        for index, text, cosine in zip(similar.tokens.tolist(), texts, similar.cosine.tolist(), strict=True)
    ]
    compared = (
        f"all {similar.n_tokens:,} tokens of the run"
        if similar.n_compared == similar.n_tokens
        else f"{similar.n_compared:,} of {similar.n_tokens:,} tokens, in evenly spaced ranges of the run"
    )
    return Table.of(
        rows,
        ("token", lambda row: linked(f"'{row['text']}'", address, addresses.token(digest, row["token"]))),
        ("cosine", "cosine", ".4f"),
        ("in", lambda row: (dim(_before(run, row["token"])), row["text"], dim(_after(run, row["token"])))),
        (
            "prompt",
            lambda row: linked(f"{row['prompt']:,}", address, addresses.prompt(digest, row["prompt"])),
        ),
        caption=f"Cosine similarity to the stored activation of this token: the most similar of {compared}; "
        f"the median over the compared tokens is {similar.median:.4f}.",
    )


def _before(run: OpenedRun, token: int) -> str:
    """Text of at most four preceding tokens of the same prompt."""
    start = int(run.entry.tokens.row_start[int(run.entry.tokens.prompt_of(token))])
    return run.passage(range(max(start, token - 4), token))


def _after(run: OpenedRun, token: int) -> str:
    """Text of at most three following tokens of the same prompt."""
    row = run.entry.tokens.row(int(run.entry.tokens.prompt_of(token)))
    return run.passage(range(token + 1, min(row.stop, token + 4)))


def _lens(snapshot: Snapshot, run: OpenedRun, variables: dict[str, list[int | None]], token: int) -> View:
    """Logit lens: next-token predictions from the residual stream after each stored layer.

    Arguments:
        snapshot: Content of the store.
        run: The run.
        variables: Stored variables with a row per token -> their layers.
        token: Index of the token along the packed axis.

    Returns:
        A table, or a note that says what is missing.
    """
    title = "Logit lens"
    layers = [layer for layer in variables.get("resid_post", ()) if layer is not None]
    if not layers:
        return Note(title=title, text="Needs resid_post, which is not published in this run.")
    readout = _readout_of(snapshot, run.folder)
    if readout is None:
        hint = "The readout of this model is not in the store. `mizarr compute logit_lens` stores it."
        return Note(title=title, text=hint)
    if (size := readout.usage.bytes) > READOUT_BYTES:
        hint = f"The readout takes {sized(size)}; a page reads {sized(READOUT_BYTES)} at most. "
        return Note(title=title, text=f"{hint}`mizarr compute logit_lens` reads it.")
    try:
        table = _read_readout(snapshot.store.address, readout.records[0].key)
        states = np.stack([run.rows("resid_post", layer, token, token + 1)[0] for layer in layers])
        rows = _predictions(states, layers, table)
    except MizarrError as error:
        return Note(title=title, text=str(error))
    columns = [
        # `rank` is bound as a default: a closure would see the last rank.
        (f"{rank}." if rank > 1 else "most likely", lambda row, rank=rank: row[1][rank - 1])
        for rank in range(1, LISTED + 1)
    ]
    caption = (
        "Next-token prediction if the final norm and unembedding are applied after each layer. "
        "Descriptive: it shows what can be read from a layer, not what later layers use. "
        f"{_next_token_sentence(run, token)}"
    )
    # The last layer is on top, as in a logit lens.
    return Table.of(rows[::-1], ("layer", lambda row: row[0], "d"), *columns, title=title, caption=caption)


def _predictions(states: Any, layers: list[int], readout: xr.Dataset) -> list[tuple[int, list[Any]]]:
    """Most likely tokens after each layer.

    Arguments:
        states: Residual stream of one token, float32 [layer, hidden].
        layers: Layer numbers.
        readout: Stored readout of the model.

    Returns:
        (layer, cells) of each layer; a cell is the token's text and its probability.
    """
    import xarray as xr

    scores = logits(xr.DataArray(states, dims=("layer", "hidden")), readout).values.astype(np.float64)
    # Softmax; the maximum is subtracted so that exp does not overflow.
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    words, rows = readout["token"].values, []
    for layer, probabilities in zip(layers, shares, strict=True):
        # A stable sort lists equal probabilities by token id, so that a page is always the same.
        best = np.argsort(-probabilities, kind="stable")[:LISTED]
        cells = [
            (f"'{format_token(str(words[i]))}'", dim(f"  {format_probability(float(probabilities[i]))}"))
            for i in best
        ]
        rows.append((layer, cells))
    return rows


def _next_token_sentence(run: OpenedRun, token: int) -> str:
    """Sentence that names the token which follows in the prompt."""
    row = run.entry.tokens.row(int(run.entry.tokens.prompt_of(token)))
    if token + 1 >= row.stop:
        return "The prompt ends after this token."
    return f"In the prompt '{run.texts([token + 1])[0]}' follows."


def _readout_of(snapshot: Snapshot, folder: HeldFolder) -> HeldFolder | None:
    """Stored readout of a run's model: same weights and configuration, preferably in the same dtype.

    None if the store has no such readout, or if the run has no model identity (an import).
    """
    identity = folder.note("identity")
    if not identity:
        return None
    candidates = []
    for result in snapshot.results:
        if result.label.partition("/")[0] == "readout":
            params = (result.note("request") or {}).get("params", {})
            if (params.get("weights"), params.get("config")) == (identity["weights"], identity["config"]):
                # The folder, which is unique, breaks ties: a `HeldFolder` has no order.
                candidates.append((params.get("dtype") != identity["dtype"], result.data, result))
    # False sorts before True: a readout of the run's dtype comes first.
    return min(candidates)[2] if candidates else None


# The table may have a gigabyte: only one is kept.
@lru_cache(maxsize=1)
def _read_readout(address: str, key: str) -> xr.Dataset:
    """Load a stored readout into memory; the last one is cached. address: of the store."""
    from ....store import open_store

    return open_store(address, mode="r").open_result(key).load()


def _features(snapshot: Snapshot, run: OpenedRun, token: int, address: str) -> View:
    """Active dictionary features at a token, one table per stored encoding of the run, or a note.

    Arguments:
        snapshot: Content of the store.
        run: The run.
        token: Index of the token along the packed axis.
        address: Address of the page.
    """
    options = []
    for result in snapshot.made_of(run.folder):
        if result.label.startswith("encode_") and not result.is_cell:
            layer_and_table = _active(snapshot.store, run, result, token, address)
            if layer_and_table is not None:
                layer, table = layer_and_table
                options.append((f"{_dictionary(result)}, layer {layer}", table))
    if not options:
        hint = "The store has no encoding of this run by a dictionary. `mizarr.encode_corpus` computes one."
        return Note(title="Active features", text=hint)
    return Choice(title="Active features", name="dictionary", options=tuple(options))


def _dictionary(folder: HeldFolder) -> str:
    """Start of the digest of an encoding's dictionary."""
    params = (folder.note("request") or {}).get("params", {})
    return str(params.get("features", folder.label))[:8]


def _feature_labels(store: Store, folder: HeldFolder) -> dict[str, str]:
    """Feature name such as "L3:204" -> label, of the labelled features of an encoding's dictionary."""
    identity = str((folder.note("request") or {}).get("params", {}).get("features", ""))
    # The identity comes from a stored note and becomes part of a path: only a digest is accepted.
    if not _DIGEST.fullmatch(identity):
        return {}
    return {str(feature): label.text for feature, label in labels_under(store, identity).items()}


def _active(
    store: Store, run: OpenedRun, folder: HeldFolder, token: int, address: str
) -> tuple[str, Table] | None:
    """Features of one encoding that are active at a token.

    Arguments:
        store: The store.
        run: The run.
        folder: Folder of the encoding.
        token: Index of the token along the packed axis.
        address: Address of the page.

    Returns:
        (layer, table of the strongest features); None if the encoding is of other tokens than the run.
    """
    encoded = store.open_result(folder.records[0])
    packed = run.entry.tokens
    # token_ptr has one entry more than there are tokens: another length means that other tokens were encoded.
    if encoded.sizes.get("edge") != packed.n_tokens + 1:
        return None
    if "token_id" in encoded and int(encoded["token_id"][token]) != int(packed.ids[token]):
        return None
    # Compressed sparse rows: token_ptr[i] to token_ptr[i + 1] are the active features of token i.
    start, stop = (int(value) for value in encoded["token_ptr"][token : token + 2].values)
    active = encoded.isel(active=slice(start, stop))
    feature, value = active["feature"].values, active["value"].values
    best = np.argsort(-value, kind="stable")[:FEATURES]
    layer = str(int(encoded["layer"])) if "layer" in encoded.coords else "–"
    record, feature_labels = folder.records[0], _feature_labels(store, folder)
    labels = [feature_labels.get(f"L{layer}:{feature[i]}", "") for i in best]
    table = Table.of(
        [(int(feature[i]), float(value[i]), label) for i, label in zip(best, labels, strict=True)],
        ("feature", lambda row: row[0], "d"),
        *([("label", lambda row: row[2])] if any(labels) else []),
        ("activation", lambda row: row[1], ".4g"),
        ("stored in", lambda _: linked(record.short, address, addresses.result(record.key))),
        caption=f"{stop - start:,} active features; the {len(best)} strongest are listed.",
    )
    return layer, table

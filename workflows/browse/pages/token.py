"""Page of a token: its position, activation norms, most similar tokens, logit lens and active features.

Everything is read from the store, and no model is run: norms and similar tokens need stored activations; the
logit lens also needs a stored readout of the model (final norm and unembedding); features need a stored
encoding of the run's activations by a feature dictionary.
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
from ...views import Choice, Line, Lines, Note, Styled, Table, Values, View, dim
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
"""Number of tokens shown before and after the token of the page."""
CURVES = 8
"""Largest number of variables, such as "resid_post", whose norms a page draws."""
READOUT_BYTES = 192 << 20
"""Largest readout (final norm and unembedding), in bytes, that is read to show a page."""
LISTED = 5
"""Number of most likely next tokens that the logit lens lists per layer."""
FEATURES = 12
"""Largest number of active features listed per dictionary and layer."""
_DIGEST = re.compile("[0-9a-f]{64}")
SINK = " In many models the first token is an attention sink: its norms may be 100 times those of others."
"""Sentence added to the caption of the norms at position 0."""
STREAM = ("resid_post", "resid_pre", "resid_mid")
"""Variables of the residual stream; similar tokens are compared by the first of them that is stored."""


def token_page(snapshot: Snapshot, folder: HeldFolder, token: int) -> Page | None:
    """Page of a token: what the store knows of its activations.

    Arguments:
        snapshot: Content of the store.
        folder: Folder of the run.
        token: Packed index of the token: its index among the tokens of all prompts of the run, in order.

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
    start, stop = max(row.start, token - AROUND), min(row.stop, token + AROUND + 1)
    views: list[View] = [
        token_links(run, address, start, stop, token, title="The token in its prompt"),
        _position_facts(run, token, prompt, position, row.stop - row.start),
    ]
    if variables:
        views += _norms(run, variables, token, position)
        views += _similar_tokens(run, variables, token, address)
        views += [_lens(snapshot, run, variables, token), _active_features(snapshot, run, token, address)]
    else:
        text = "The run has no completely captured variable with a value for each token."
        views.append(Note(title="Activations", text=text))
    # The page of the prompt that shows this token.
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
    """List of a token's position in its prompt and run, its id, and its character offsets if they are stored.

    Arguments:
        run: The run.
        token: Packed index of the token.
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
    """Norms of a token's activations: one curve over layers per variable, and a list of the other variables.

    Arguments:
        run: The run.
        variables: Stored variable with a value per token -> its layers.
        token: Packed index of the token.
        position: Position of the token in its prompt; at 0 the caption mentions attention sinks.
    """
    # `tail` is the shape of a token's value: () for a single number, which has no norm.
    layered = {
        name: layers for name, layers in variables.items() if None not in layers and run.spec(name).tail
    }
    others = [name for name in variables if name not in layered]
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
            caption=f"x: layer. y: L2 norm of the stored activation of this token.{'' if position else SINK}",
            x=tuple(map(float, all_layers)),
            lines=tuple(lines),
            x_name="layer",
            y_name="norm",
            low=0.0,
        )
    if others:
        pairs = []
        for name in others:
            # One column: the only token; a number, or the norm of a vector, per layer.
            (values,) = run.norms(name, variables[name], token, token + 1).T
            label = f"norm of {name}" if run.spec(name).tail else name
            pairs.append((label, ", ".join(f"{value:.4g}" for value in values)))
        title = "Other stored values of this token" if layered else "Stored values of this token"
        yield Values(title=title, pairs=tuple(pairs))


def _similar_tokens(
    run: OpenedRun, variables: dict[str, list[int | None]], token: int, address: str
) -> Iterator[View]:
    """The tokens most similar to one, at the middle and the last stored layer; no view without vectors.

    Arguments:
        run: The run.
        variables: Stored variable with a value per token -> its layers.
        token: Packed index of the token.
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
        (
            "all" if layer is None else f"layer {layer}",
            _similarity_table(run, variable, layer, token, address),
        )
        for layer in compared_layers
    ]
    # The last stored layer is shown first.
    yield Choice(
        title=f"Most similar tokens by {variable}", name="at", options=tuple(options), start=len(options) - 1
    )


def _similarity_table(run: OpenedRun, variable: str, layer: int | None, token: int, address: str) -> Table:
    """Table of the tokens most similar to one, with the median similarity in the caption.

    Arguments:
        run: The run.
        variable: Stored variable whose vectors are compared.
        layer: Layer of the variable; None if it has no layers.
        token: Packed index of the token.
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
        ("cosine similarity", "cosine", ".4f"),
        ("in context", lambda row: _in_context(run, row["token"], row["text"])),
        (
            "prompt",
            lambda row: linked(f"{row['prompt']:,}", address, addresses.prompt(digest, row["prompt"])),
        ),
        caption="One row per token. Its stored activation is compared with that of the token of this page; "
        f"highest cosine similarity first, among {compared}. The median similarity of the compared tokens is "
        f"{similar.median:.4f}.",
    )


def _in_context(run: OpenedRun, token: int, text: str) -> tuple[Styled, str, Styled]:
    """Text of a token between four preceding and three following tokens of its prompt, which are dimmed."""
    row = run.entry.tokens.row(int(run.entry.tokens.prompt_of(token)))
    before = run.passage(range(max(row.start, token - 4), token))
    after = run.passage(range(token + 1, min(row.stop, token + 4)))
    return dim(before), text, dim(after)


def _lens(snapshot: Snapshot, run: OpenedRun, variables: dict[str, list[int | None]], token: int) -> View:
    """Logit lens: next-token predictions from the residual stream after each stored layer.

    Arguments:
        snapshot: Content of the store.
        run: The run.
        variables: Stored variable with a value per token -> its layers.
        token: Packed index of the token.

    Returns:
        A table, or a note that says what is missing.
    """
    title = "Logit lens"
    layers = [layer for layer in variables.get("resid_post", ()) if layer is not None]
    if not layers:
        text = "The logit lens needs the residual stream (resid_post), which this run does not hold."
        return Note(title=title, text=text)
    readout = _readout_of(snapshot, run.folder)
    if readout is None:
        text = (
            "The logit lens needs the final norm and unembedding of the model, which are not in the store; "
            "`mizarr compute logit_lens` stores them."
        )
        return Note(title=title, text=text)
    if (size := readout.usage.bytes) > READOUT_BYTES:
        text = (
            f"The final norm and unembedding of the model take {sized(size)}; a page reads at most "
            f"{sized(READOUT_BYTES)}. `mizarr compute logit_lens` has no such limit."
        )
        return Note(title=title, text=text)
    try:
        unembedding = _read_readout(snapshot.store.address, readout.records[0].key)
        states = np.stack([run.rows("resid_post", layer, token, token + 1)[0] for layer in layers])
        rows = _predictions(states, layers, unembedding)
    except MizarrError as error:
        return Note(title=title, text=str(error))
    columns = [
        # `rank` is bound as a default: a closure would see the last rank.
        (f"{rank}." if rank > 1 else "most likely", lambda row, rank=rank: row[1][rank - 1])
        for rank in range(1, LISTED + 1)
    ]
    caption = (
        f"One row per layer: the {LISTED} most likely next tokens, with their probabilities, if the final "
        "norm and unembedding are applied to the residual stream after it. Descriptive: it shows what can be "
        f"read from a layer, not what later layers use. {_next_token_sentence(run, token)}"
    )
    # The last layer is on top, as in a logit lens.
    return Table.of(rows[::-1], ("layer", lambda row: row[0], "d"), *columns, title=title, caption=caption)


def _predictions(states: Any, layers: list[int], readout: xr.Dataset) -> list[tuple[int, list[Any]]]:
    """The LISTED most likely next tokens by the logit lens after each layer.

    Arguments:
        states: Residual stream of one token after each layer, float32 [layer, hidden].
        layers: Layer numbers.
        readout: Final norm and unembedding of the model.

    Returns:
        (layer, table cells) of each layer; a cell is (text of the token, its probability).
    """
    import xarray as xr

    scores = logits(xr.DataArray(states, dims=("layer", "hidden")), readout).values.astype(np.float64)
    # Softmax over the vocabulary; the maximum is subtracted so that exp does not overflow.
    probabilities = np.exp(scores - scores.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    vocabulary, rows = readout["token"].values, []
    for layer, probability in zip(layers, probabilities, strict=True):
        # A stable sort lists equal probabilities by token id, so that a page is always the same.
        best = np.argsort(-probability, kind="stable")[:LISTED]
        cells = [
            (f"'{format_token(str(vocabulary[i]))}'", dim(f"  {format_probability(float(probability[i]))}"))
            for i in best
        ]
        rows.append((layer, cells))
    return rows


def _next_token_sentence(run: OpenedRun, token: int) -> str:
    """Sentence that says which token actually follows in the prompt."""
    row = run.entry.tokens.row(int(run.entry.tokens.prompt_of(token)))
    if token + 1 >= row.stop:
        return "The prompt ends after this token."
    return f"The token that follows in the prompt is '{run.texts([token + 1])[0]}'."


def _readout_of(snapshot: Snapshot, folder: HeldFolder) -> HeldFolder | None:
    """Stored readout (final norm and unembedding) of a run's model, preferably in the run's dtype.

    Returns:
        Folder of the readout; None if the store has no readout of a model with the same weights and
        configuration, or if the run is an import, whose model is not known.
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
    # False sorts before True: a readout in the run's dtype comes first.
    return min(candidates)[2] if candidates else None


# A readout may take a gigabyte: only one is kept in memory.
@lru_cache(maxsize=1)
def _read_readout(address: str, key: str) -> xr.Dataset:
    """Load a stored readout into memory; the last one is cached.

    Arguments:
        address: Path or URL of the store.
        key: Key of the readout.
    """
    from ....store import open_store

    return open_store(address, mode="r").open_result(key).load()


def _active_features(snapshot: Snapshot, run: OpenedRun, token: int, address: str) -> View:
    """Dictionary features that are active at a token: a table per stored encoding of the run, or a note.

    Arguments:
        snapshot: Content of the store.
        run: The run.
        token: Packed index of the token.
        address: Address of the page.
    """
    options = []
    for result in snapshot.made_of(run.folder):
        # An encoding is the result of a stage whose name begins like this.
        if result.label.startswith("encode_") and not result.is_cell:
            layer_and_table = _features_table(snapshot.store, run, result, token, address)
            if layer_and_table is not None:
                layer, table = layer_and_table
                dictionary = _dictionary_digest(result) or result.label
                options.append((f"{dictionary[:8]}, layer {layer}", table))
    if not options:
        text = (
            "The store has no encoding of this run's activations by a feature dictionary; "
            "`mizarr.encode_corpus` computes one."
        )
        return Note(title="Active features", text=text)
    return Choice(title="Active features", name="dictionary", options=tuple(options))


def _dictionary_digest(encoding: HeldFolder) -> str:
    """Digest of the feature dictionary of a stored encoding; "" if it was not noted."""
    return str((encoding.note("request") or {}).get("params", {}).get("features", ""))


def _feature_labels(store: Store, encoding: HeldFolder) -> dict[str, str]:
    """Feature name such as "L3:204" -> label that a person gave, for the dictionary of a stored encoding."""
    digest = _dictionary_digest(encoding)
    # The digest comes from a stored note and becomes part of a path: nothing else is accepted.
    if not _DIGEST.fullmatch(digest):
        return {}
    return {str(feature): label.text for feature, label in labels_under(store, digest).items()}


def _features_table(
    store: Store, run: OpenedRun, encoding: HeldFolder, token: int, address: str
) -> tuple[str, Table] | None:
    """Table of the features of one stored encoding that are active at a token.

    Arguments:
        store: The store.
        run: The run.
        encoding: Folder of the encoding.
        token: Packed index of the token.
        address: Address of the page.

    Returns:
        (layer, table of the strongest features); None if other tokens than those of the run were encoded.
    """
    encoded = store.open_result(encoding.records[0])
    packed = run.entry.tokens
    # token_ptr has one entry more than there are tokens: another length means that other tokens were encoded.
    if encoded.sizes.get("edge") != packed.n_tokens + 1:
        return None
    if "token_id" in encoded and int(encoded["token_id"][token]) != int(packed.ids[token]):
        return None
    # Compressed sparse rows: token_ptr[i] to token_ptr[i + 1] are the active features of token i.
    start, stop = (int(value) for value in encoded["token_ptr"][token : token + 2].values)
    active = encoded.isel(active=slice(start, stop))
    feature, activation = active["feature"].values, active["value"].values
    strongest = np.argsort(-activation, kind="stable")[:FEATURES]
    layer = str(int(encoded["layer"])) if "layer" in encoded.coords else "–"
    record, feature_labels = encoding.records[0], _feature_labels(store, encoding)
    labels = [feature_labels.get(f"L{layer}:{feature[i]}", "") for i in strongest]
    table = Table.of(
        [(int(feature[i]), float(activation[i]), label) for i, label in zip(strongest, labels, strict=True)],
        ("feature", lambda row: row[0], "d"),
        *([("label", lambda row: row[2])] if any(labels) else []),
        ("activation", lambda row: row[1], ".4g"),
        ("stored in", lambda _: linked(record.short, address, addresses.result(record.key))),
        caption=f"{stop - start:,} features are active at this token; the {len(strongest)} strongest are "
        "listed.",
    )
    return layer, table

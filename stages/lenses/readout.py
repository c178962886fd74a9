"""What a lens reads from stored streams: transported states, next-token distributions, vectors of tokens.

A state h of layer l is transported to the last layer, J[l] h (by a tuned lens J[l] h + b[l]), and decoded
with the model's own final norm (whose statistics are those of the transported state), unembedding and soft
cap. The last layer of the model is decoded as it is. Needs no torch.

Axes: layer, token or any other names of samples, hidden, target_hidden (as in jacobian.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...pipeline import Output, stage
from ...store.arrays import as_indices
from ...store.errors import ShapeError
from ..logits.lens import join_tokens, logit_lens, logits
from ..logits.readout import require_linear

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["fitted_lens", "lens_ranks", "lens_vectors", "transported"]


def transported(resid_post: xr.DataArray, lens: xr.Dataset) -> xr.DataArray:
    """States carried to the last layer, J[l] h[l], by a tuned lens J[l] h[l] + b[l]; those of the last layer
    itself are left as they are.

    Arguments:
        resid_post: residual stream after each layer, [layer, ..., hidden] in any order of axes; its last
            layer is that of the model.
        lens: a lens of some of the other layers; layers that it lacks are left out.

    Returns:
        float32, with the axes of `resid_post` in its order.

    Raises:
        ShapeError: Width or layers do not match.
    """
    import xarray as xr

    if "layer" not in resid_post.dims or resid_post.sizes.get("hidden") != lens.sizes["hidden"]:
        raise ShapeError(
            f"expected states with a layer axis and {lens.sizes['hidden']} hidden dimensions, the width of "
            f"the lens, found the sizes {dict(resid_post.sizes)}; capture resid_post of the model of the lens"
        )
    last = int(resid_post["layer"].values[-1])
    if last != lens.attrs.get("target_layer", last):
        raise ShapeError(
            f"expected states up to the last layer, {lens.attrs['target_layer']}, to which the lens carries "
            f"them, found layer {last} as the last one; capture resid_post of all layers"
        )
    layers = [layer for layer in resid_post["layer"].values.tolist() if layer in lens["layer"].values]
    if not layers:
        raise ShapeError(
            f"expected states of the layers {lens['layer'].values.tolist()} of the lens, found layers "
            f"{resid_post['layer'].values.tolist()}; capture resid_post of all layers"
        )
    parts = []
    for layer in layers:
        matrix = lens["jacobian"].sel(layer=layer, drop=True).astype(np.float32)
        states = resid_post.sel(layer=[layer]).astype(np.float32)
        # One layer at a time: a batched product would hold all matrices of a large model at once.
        carried_states = xr.dot(states, matrix, dim="hidden")
        if "bias" in lens:
            carried_states = carried_states + lens["bias"].sel(layer=layer, drop=True)
        parts.append(carried_states.rename(target_hidden="hidden"))
    parts.append(resid_post.sel(layer=[last]).astype(np.float32))
    carried: xr.DataArray = xr.concat(parts, "layer").transpose(*resid_post.dims).rename(resid_post.name)
    return carried


@stage(
    version=1,
    inputs={
        "resid_post": ("layer", "token", "hidden"),
        "targets": ("token",),
        "readout": None,
        "lens": None,
    },
    outputs=logit_lens.outputs,
    cells="segment",
    combine=join_tokens,
)
def fitted_lens(
    resid_post: xr.DataArray,
    targets: xr.DataArray | None,
    readout: xr.Dataset,
    lens: xr.Dataset,
    *,
    top_k: int = 10,
) -> xr.Dataset:
    """Next-token distribution that a Jacobian or tuned lens reads from every state, in the form of the logit
    lens.

    Arguments:
        resid_post: residual stream after each layer, [layer, token, hidden]; its last layer is the model's.
        targets: token ids int [token] whose probability is tracked, -1 for none; None for no targets.
        readout: final norm and unembedding of the model, see stages/logits/readout.py.
        lens: the lens, as `JacobianLensFit`, `tuned_lens_fit`, `read_lens` or `read_tuned_lens` gives it.
        top_k: number of most likely tokens.

    Returns:
        Dataset of `logit_lens` for the layers of the lens and the last layer.

    Raises:
        ShapeError: States, readout, targets and lens do not match.
    """
    decoded: xr.Dataset = logit_lens(transported(resid_post, lens), targets, readout, top_k=top_k)
    return decoded


@stage(
    version=1,
    inputs={
        "resid_post": ("layer", "token", "hidden"),
        "targets": ("token",),
        "readout": None,
        "lens": None,
    },
    outputs={
        "target_rank": Output(("lens", "layer", "token"), "1", "rank of the target, 1 = most likely"),
        "change": Output(("layer",), "1", "Frobenius norm of the lens minus the identity"),
    },
)
def lens_ranks(
    resid_post: xr.DataArray,
    targets: xr.DataArray,
    readout: xr.Dataset,
    lens: xr.Dataset,
    *,
    rotations: int = 50,
    seed: int = 0,
) -> xr.Dataset:
    """Ranks of targets by the logit lens, by a Jacobian lens, and by random lenses.

    A random lens is 1 + (J[l] - 1) Q with a random orthogonal matrix Q: its difference from the identity has
    the same singular values as that of the Jacobian lens, but acts on random directions of the state.

    Arguments:
        resid_post: residual stream after each layer, [layer, token, hidden]; its last layer is the model's.
        targets: token ids int [token], -1 for tokens to leave out.
        readout: final norm and unembedding of the model, see stages/logits/readout.py.
        lens: the lens.
        rotations: number of random lenses.
        seed: seed of the rotations.

    Returns:
        target_rank int32 [lens, layer, token] for the layers of the lens and the last one, with the lenses
        "logit", "jacobian", and "rotation 0" and so on; change [layer] of the Jacobian lens, 0 at the last
        layer.

    Raises:
        ShapeError: States, readout and lens do not match.
    """
    import xarray as xr

    is_target = targets.values >= 0
    states, ids = resid_post.isel(token=np.flatnonzero(is_target)).load(), targets.values[is_target]
    # Read once, not once for each lens.
    readout = readout.load()
    carried = transported(states, lens)
    states = states.sel(layer=carried["layer"]).astype(np.float32)
    width, rng = lens.sizes["hidden"], np.random.default_rng(seed)

    def ranks(read_states: xr.DataArray) -> xr.DataArray:
        read = logits(read_states, readout)
        target_logit = np.take_along_axis(read.values, ids[None, :, None], -1)
        # Tokens with equal logits share the better rank, as in the logit lens.
        return (read > target_logit).sum("vocab").astype(np.int32) + 1

    ranks_by_lens = [ranks(states), ranks(carried)]
    for _ in range(rotations):
        rotation = np.linalg.qr(rng.standard_normal((width, width)))[0].astype(np.float32)
        rotated = states.copy(data=states.values @ rotation.T)
        # h + (J - 1) Q h: the states are rotated instead of the matrices, which are far larger.
        ranks_by_lens.append(ranks(states + transported(rotated, lens) - rotated))
    names = ["logit", "jacobian", *(f"rotation {draw}" for draw in range(rotations))]
    change = lens["jacobian"].values - np.eye(width, dtype=np.float32)
    norms = [*np.linalg.norm(change, axis=(1, 2)).tolist(), 0.0]
    outputs = lens_ranks.outputs
    whole = xr.concat(ranks_by_lens, "lens").transpose("lens", "layer", "token").assign_coords(lens=names)
    whole = whole.drop_vars([name for name in whole.coords if name not in ("lens", "layer", "prompt")])
    return xr.Dataset(
        {
            "target_rank": whole.assign_attrs(outputs["target_rank"].attrs),
            "change": outputs["change"].variable(norms),
        }
    )


def lens_vectors(lens: xr.Dataset, readout: xr.Dataset, tokens: Sequence[int] | None = None) -> xr.DataArray:
    """Directions of tokens in the streams of earlier layers: rows of W_U J[l].

    The gain of the final norm and the soft cap are not in them.

    Arguments:
        lens: the lens.
        readout: unembedding of the model, see stages/logits/readout.py.
        tokens: token ids, repeated ones included; None for the whole vocabulary.

    Returns:
        float32 [layer, vocab, hidden], with the token ids on the axis vocab.

    Raises:
        ShapeError: A token id is out of range, the widths differ, or logits are no linear map of the
            normalised stream.
    """
    import xarray as xr

    require_linear(readout)
    n_tokens = readout.sizes["vocab"]
    ids = range(n_tokens) if tokens is None else as_indices(tokens, "lens_vectors: tokens", ShapeError)
    outside = [token for token in ids if not 0 <= token < n_tokens]
    if outside or readout.sizes["hidden"] != lens.sizes["hidden"]:
        found = (
            f"the token {outside[0]}" if outside else f"{lens.sizes['hidden']} hidden dimensions in the lens"
        )
        raise ShapeError(
            f"lens_vectors: expected token ids in 0..{n_tokens - 1} and a lens of {readout.sizes['hidden']} "
            f"hidden dimensions, as the readout has, found {found}; take both from one model"
        )
    rows = readout["unembed"].isel(vocab=list(ids)).drop_vars("token", errors="ignore")
    vectors: xr.DataArray = xr.dot(rows.rename(hidden="target_hidden"), lens["jacobian"], dim="target_hidden")
    vectors = vectors.transpose("layer", "vocab", "hidden").assign_coords(vocab=list(ids))
    named: xr.DataArray = vectors.astype(np.float32).rename("lens_vectors")
    return named

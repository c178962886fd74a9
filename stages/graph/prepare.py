"""Prepares a graph: forward pass, active features, error vectors, targets, and the maps that compute rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from ...pipeline.ambient import plain_torch
from ...store.arrays import Ints
from ...store.errors import PlanError, PromptError
from ..forward.models.model import as_dtype
from .rows.attribute import Attributor
from .rows.frozen import frozen_pass
from .rows.replacement import Replacement
from .rows.sources import Sources, error_vectors
from .rows.targets import prompt_text, token_text
from .rows.threads import one_thread_each

if TYPE_CHECKING:
    import xarray as xr

    from ..features.dictionary import Dictionary
    from ..features.layers.active import Active
    from ..forward.models.model import Model
    from .options import GraphOptions
    from .rows.frozen import FrozenPass
    from .rows.targets import Targets

__all__ = ["PreparedGraph", "prepare"]

SMALL = 2e9
"""Number of operations of a forward pass (0.05 s on one core) below which one thread is faster."""


class PreparedGraph:
    """The nodes of a prompt's attribution graph, and all that the rows of its matrix are computed from."""

    def __init__(
        self,
        model: Model,
        dictionary: Dictionary,
        frozen: FrozenPass,
        active: Active,
        targets: Targets,
        attributor: Attributor,
        zero_positions: int,
    ) -> None:
        """Combine what `prepare` computes.

        Arguments:
            model: The model.
            dictionary: Transcoders of the model.
            frozen: Activations of the prompt's forward pass.
            active: Active features, sorted by layer, position, index.
            targets: Logits that the graph explains.
            attributor: Computes rows.
            zero_positions: Number of positions at the start without features and errors.
        """
        self.model, self.dictionary, self.frozen = model, dictionary, frozen
        self.active, self.targets, self.attributor = active, targets, attributor
        self.zero_positions = zero_positions
        self.n_features, self.n_logits = len(active), len(targets.ids)
        self.n_columns = attributor.sources.n_columns
        self.logit_weights: npt.NDArray[np.float64] = targets.weights.double().cpu().numpy()

    def rows(self, items: Ints) -> npt.NDArray[np.float32]:
        """Rows of the adjacency matrix, float32 [n, source].

        Arguments:
            items: Target of each row [n]: the index of an active feature, or `n_features` plus that of a
            logit.
        """
        return self.attributor.rows(items)

    def dataset(self, items: Ints, rows: Any) -> xr.Dataset:
        """The graph as a labelled dataset.

        Arguments:
            items: Target of each row [n]; see `rows`.
            rows: All rows [n, source], with columns for all active features.
        """
        import xarray as xr

        selected = np.sort(items[items < self.n_features])
        # A greedy selection computes logits first; items of logits follow those of features.
        order = np.argsort(items, kind="stable")
        columns = np.concatenate([selected, np.arange(self.n_features, self.n_columns)])
        weights, dropped_share = rows, np.zeros(len(items), np.float32)
        if len(selected) < self.n_features:
            # Features without a row have no node, so their columns are left out too; the share is recorded.
            magnitude, is_dropped = abs(rows), np.ones(self.n_features, bool)
            is_dropped[selected] = False
            dropped_sum = magnitude[:, : self.n_features][:, is_dropped].sum(1)
            dropped_share = dropped_sum / magnitude.sum(1).clip(1e-30)  # an empty row drops nothing
            weights = weights[:, columns]
        # Only if necessary, because indexing copies the matrix.
        if (order[1:] < order[:-1]).any():
            weights, dropped_share = weights[order], dropped_share[order]
        vocabulary = self.model._tokenizer
        tokens = list(self.frozen.tokens)
        return xr.Dataset(
            {
                "weights": (("target", "source"), weights),
                "dropped": ("target", dropped_share),
                "active_features": (("active", "axis"), self.active.indices.cpu().numpy()),
                "activation_values": ("active", self.active.value.float().cpu().numpy()),
                "selected_features": ("selected", selected),
                "input_tokens": ("input_position", np.array(tokens, np.int64)),
                "input_text": (
                    "input_position",
                    np.array([token_text(i, vocabulary) for i in tokens], object),
                ),
                "logit_token_ids": ("logit", self.targets.ids.cpu().numpy()),
                "logit_text": ("logit", np.array(self.targets.labels, object)),
                "logit_probabilities": ("logit", self.logit_weights),
            },
            coords={"axis": np.array(["layer", "position", "feature"], object)},
            attrs=self._attributes(),
        )

    def _attributes(self) -> dict[str, Any]:
        """Names and sizes of model and dictionary, for files of other programs."""
        c, vocabulary = self.model.config, self.model._tokenizer
        return {
            "input_string": prompt_text(self.frozen.tokens, vocabulary),
            "model": self.model.name,
            "model_type": c.model_type,
            "n_layers": c.num_layers,
            "d_model": c.hidden_size,
            "d_head": c.axis_sizes["d_head"],
            "n_heads": c.axis_sizes["head"],
            "n_key_value_heads": c.axis_sizes["kv_head"],
            "d_mlp": c.axis_sizes["mlp"],
            "d_vocab": c.vocab_size,
            "vocab_size": c.vocab_size if vocabulary is None else vocabulary.vocab_size,
            "dictionary": self.dictionary.name,
            "scan": self.dictionary.layout.scan,
            "zero_positions": self.zero_positions,
        }


@plain_torch()
def prepare(
    model: Model, dictionary: Dictionary, tokens: Sequence[int], options: GraphOptions, *, memory: int
) -> PreparedGraph:
    """Run the prompt once, and find the nodes of its graph.

    Arguments:
        model: A loaded model.
        dictionary: Transcoders of the model.
        tokens: Token ids of the prompt.
        options: Settings of the graph.
        memory: Bytes for maps and decoder vectors (a quarter each) and batches (an eighth). Maps and vectors
            that do not fit are computed again when they are needed.

    Raises:
        PromptError: No feature is active in the prompt.
        DictionaryError: Activations are infinite or NaN.
        PlanError: The memory is too small.
    """
    dtype = as_dtype(options.arithmetic)
    # The forward pass records the patterns of all layers at once; a longer prompt would end out of memory.
    patterns = model.config.num_layers * model.config.axis_sizes["head"] * len(tokens) ** 2
    if patterns * model.dtype.itemsize > memory:
        raise PlanError(
            f"the attention patterns of a prompt of {len(tokens)} tokens take "
            f"{patterns * model.dtype.itemsize} bytes, more than memory={memory}; raise memory, or shorten "
            "the prompt"
        )
    with torch.no_grad(), one_thread_each(when=_operations(model, len(tokens)) < SMALL):
        frozen = frozen_pass(model, dictionary, tokens)
        states = {layer: read.to(dtype) for layer, read in frozen.read.items()}
        active = dictionary.encode(states, zero_positions=options.zero_positions)
        if not len(active):
            raise PromptError(
                f"expected active features for an attribution graph, found none of {dictionary.name} in this "
                f"prompt; use a dictionary that was trained on {model.name}"
            )
        replacement = Replacement(model, dictionary, frozen, dtype=dtype, room=memory // 4)
        errors = error_vectors(replacement, active, zero_positions=options.zero_positions)
        sources = Sources(replacement, active, errors, room=memory // 4)
        unembed = model.network.unembedding
        targets = options.targets.resolve(frozen.logits, unembed, model._tokenizer, dtype)
        attributor = Attributor(replacement, sources, targets, room=memory // 8)
    return PreparedGraph(model, dictionary, frozen, active, targets, attributor, options.zero_positions)


def _operations(model: Model, tokens: int) -> float:
    """Approximate number of floating-point operations of a forward pass over `tokens` tokens."""
    c = model.config
    # Four square matrices of attention, three of a gated MLP; two operations per weight and token.
    return 2.0 * tokens * c.num_layers * c.hidden_size * (4 * c.hidden_size + 3 * c.axis_sizes["mlp"])

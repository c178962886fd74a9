"""Embeddings: one vector per text, stored and keyed by model, modules and tokens.

    found = mizarr.embed("path/of/an/encoder", ["a text", "another"], store=store)
    cosine(found)                                                  # stages/geometry/similarity.py

The final states are pooled during the pass, so that states of tokens are never stored. Dense layers and
normalisations are a stage on the pooled states.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...pipeline import Output, run, stage
from ...store.errors import ConfigError, PromptError
from ...store.identity import model_of
from ...store.store import require_store
from ..forward.architectures.points import HookPoint
from ..forward.capture.capture import CaptureNode
from ..forward.capture.options import CaptureOptions
from ..forward.hooks.spec import HookSpec
from ..forward.models.files import resolve
from ..forward.models.reference import ModelRef
from ..forward.models.source import ModelSource
from ..forward.text.declared import read_settings
from ..forward.text.prompts import no_tokenizer, pack, pack_encodings
from ..forward.text.rows import as_rows
from ..options import RunOptions, split_options, takes_options
from .modules import SentenceModules, read_modules, require_pooling

if TYPE_CHECKING:
    import xarray as xr

    from ...store import Store
    from ...store.runs.packed import PackedTokens
    from ..forward.models.model import Model
    from ..forward.text.tokens import Encoding

__all__ = ["embed", "sentence_embedding"]


@takes_options(ModelRef, CaptureOptions, RunOptions)
def embed(
    model: Model | ModelRef | str | Path,
    prompts: Any,
    *,
    store: Store,
    pooling: str | None = None,
    prompt: str | None = None,
    prompt_name: str | None = None,
    **options: Any,
) -> xr.DataArray:
    """Embedding of each text by a sentence encoder, as sentence-transformers computes it.

    Pooling, dense layers, normalisation, prompts and the largest number of tokens are those of the files that
    sentence-transformers writes. Pooled states are stored as a capture: a killed call continues where it
    stopped, and stored embeddings are not computed again.

    Arguments:
        model: folder or hub id of a sentence encoder, or such a model loaded; or another model, with
            `pooling`.
        prompts: texts, or token ids, which are read as they are.
        store: store of the pooled states and embeddings, from `mizarr.open_store`.
        pooling: for a model without modules.json: "mean", "cls", "max", "lasttoken", "weightedmean" or
            "mean_sqrt_len_tokens".
        prompt: text put in front of each text; "" for none. Default the encoder's default prompt.
        prompt_name: name of one of the encoder's own prompts, instead of `prompt`.
        options: options for loading, storing and running, listed below.

    Returns:
        float32 [prompt, hidden], with the texts as coordinate if there are texts.

    Raises:
        ConfigError: for files that ask for something that is not implemented, and for a plain model without
            `pooling`.
        PromptError, PlanError: for invalid prompts or options, before anything is computed.
        StoreFull: when the disk is full; committed segments stay.
    """
    require_store(store)
    loading, storing, running = split_options("embed", options, ModelRef, CaptureOptions, RunOptions)
    source, where = ModelSource.of(model, **loading), RunOptions(**running)
    encoder = _Encoder.of(source, pooling)
    prefix = encoder.prefix(prompt, prompt_name)
    tokens, skipped = encoder.tokens(prompts, prefix)
    spec, variables = encoder.captures(skipped)
    states = CaptureNode(source, tokens, spec, **storing)
    node = sentence_embedding.on(
        states=states,
        layers=encoder.modules.layers,
        variables=variables,
        poolings=list(encoder.modules.poolings),
        skipped=skipped,
    )
    with source.just_identified():
        run(node, store, **where.keywords)
    states.note_asked(store)
    embedding = node.open(store)["embedding"]
    return embedding if tokens.texts is None else embedding.assign_coords(text=("prompt", list(tokens.texts)))


@dataclass(frozen=True)
class _Encoder:
    """A sentence encoder: a transformer with its pooling, dense layers and normalisation."""

    source: ModelSource
    """The transformer, which gives the final states of tokens."""
    folder: Path
    """Folder of the transformer and its tokenizer."""
    modules: SentenceModules
    """Pooling, dense layers and normalisation of the final states."""

    @classmethod
    def of(cls, source: ModelSource, pooling: str | None) -> _Encoder:
        """The encoder of a model's files; ConfigError unless there is exactly one way to pool its states."""
        files = source.files or resolve(source.name, source.revision)
        modules, config = read_modules(files.directory), source.config
        if (modules is None) == (pooling is None):
            sources, remedy = (
                ("neither", 'pass pooling="mean" (or cls, max, lasttoken)')
                if modules is None
                else ("both", "leave pooling out")
            )
            raise ConfigError(
                f"{source.name}: expected either modules.json of a sentence encoder in {files.directory} or "
                f"pooling=, found {sources}; {remedy}"
            )
        if config.target_start is not None:
            raise ConfigError(
                f"{source.name}: expected an encoder or a decoder, found an encoder-decoder, whose decoder "
                "has no part in an embedding; set architectures to the class of the encoder, such as "
                "T5EncoderModel"
            )
        if modules is None:
            modules = SentenceModules((require_pooling(str(pooling)),))
        width = config.hidden_size
        if modules.width not in (None, width):
            raise ConfigError(
                f"{files.directory}: expected a pooling of states of width {width}, as {source.name} has, "
                f"found word_embedding_dimension {modules.width}; fetch the model again"
            )
        width *= len(modules.poolings)
        for layer in modules.layers.layers:
            if layer is not None and layer.n_in != width:
                raise ConfigError(
                    f"{layer.file.parent / 'config.json'}: expected in_features to be {width}, the width of "
                    f"what comes before, found {layer.n_in}; fetch the model again"
                )
            width = width if layer is None else layer.n_out
        return cls(source, files.directory, modules)

    def prefix(self, prompt: str | None, prompt_name: str | None) -> str | None:
        """Text in front of each text, "" for none; None if the caller named none and there is no default."""
        prompts = self.modules.prompts
        if prompt is not None:
            if prompt_name is not None:
                raise ConfigError("expected prompt= or prompt_name=, found both; leave one of them out")
            return prompt
        name = self.modules.default_prompt if prompt_name is None else prompt_name
        if name is not None and name not in prompts:
            raise ConfigError(
                f"{self.source.name}: expected prompt_name among the prompts in "
                f"config_sentence_transformers.json ({', '.join(prompts) or 'there are none'}), found "
                f"{name!r:.60}; name one of them, or pass the text as prompt="
            )
        return None if name is None else prompts[name]

    def tokens(self, prompts: Any, prefix: str | None) -> tuple[PackedTokens, int]:
        """Token ids of the prompts, and the number of first positions that the pooling leaves out.

        Arguments:
            prompts: texts or token ids.
            prefix: text in front of each text; None for none.

        Raises:
            PromptError: for token ids together with a prefix, and for a text that is all prefix.
            TokenizerError: for texts without a tokenizer.
        """
        source, config = self.source, self.source.config
        rows = as_rows(prompts)
        texts = [self._as_read((prefix or "") + row) for row in rows if isinstance(row, str)]
        if len(texts) < len(rows):
            if prefix:
                raise PromptError(
                    f"expected texts, in front of which the prompt {prefix!r:.60} is put, found token ids; "
                    'pass texts, or prompt="" if the ids begin with the prompt, or need none'
                )
            return pack(rows, source.tokenizer, config, source.name), 0
        if source.tokenizer is None:
            raise no_tokenizer(source.name)
        limit, side = self._limit()
        whole = source.tokenizer.encode_batch(texts)
        encodings = [_cut(encoding, limit, side) for encoding in whole]
        if n_cut := sum(len(a) < len(b) for a, b in zip(encodings, whole, strict=True)):
            warnings.warn(
                f"{n_cut} of {len(texts)} texts are cut to the {limit} tokens that {source.name} reads",
                UserWarning,
                stacklevel=3,
            )
        tokens = pack(pack_encodings(encodings), source.tokenizer, config, source.name)
        if not prefix or self.modules.includes_prompt:
            return tokens, 0
        start = source.tokenizer.encode(self._as_read(prefix))
        skipped = min(len(start), limit) - start.special[-1]
        short = int(tokens.row_size.argmin())
        if tokens.row_size[short] <= skipped:
            raise PromptError(
                f"expected a token behind the {skipped} of the prompt {prefix!r:.60}, which are not pooled, "
                f"found none in prompt {short}; leave this text out, or choose another prompt"
            )
        return tokens, skipped

    def captures(self, skipped: int) -> tuple[HookSpec, list[str]]:
        """The captures of the final states, pooled, and the name of the variable of each pooling.

        Arguments:
            skipped: number of first positions that are not pooled.
        """
        config = self.source.config
        point = HookPoint("final_norm")
        if point not in config.hook_points:
            point = HookPoint.resid_post(config.num_layers - 1)
        rest = f"{skipped}:" if skipped else None
        ways: dict[str, dict[str, Any]] = {
            "cls": {"positions": [skipped]},
            "max": {"positions": rest, "reduce": "max"},
            "mean": {"positions": rest, "reduce": "mean"},
            "mean_sqrt_len_tokens": {"positions": rest, "reduce": "mean"},
            "weightedmean": {"positions": rest, "reduce": "weighted_mean"},
            "lasttoken": {"positions": "last"},
        }
        spec, variables = HookSpec(), []
        for pooling in self.modules.poolings:
            spec = spec.capture(point, **ways[pooling])
            one = HookSpec().capture(point, **ways[pooling])
            (kept,) = one.bind(config.hook_points, self.source.name, stored=True).kept
            variables.append(kept.variable)
        return spec, variables

    def _as_read(self, text: str) -> str:
        """A text in lower case, if the encoder reads it so."""
        # Character by character, as the tokenizers library does: Python ends a word with another sigma.
        return "".join(map(str.lower, text)) if self.modules.lowers_case else text

    def _limit(self) -> tuple[int, str]:
        """Most tokens of a text with its special tokens, and the side on which longer ones are cut."""
        settings = read_settings(self.folder)
        most = self.modules.max_tokens or settings.get("model_max_length")
        context = self.source.config.context_length
        # Written as 1e30 where there is no limit.
        limit = min(context, int(most)) if isinstance(most, int | float) else context
        return limit, str(settings.get("truncation_side", "right"))


def _cut(encoding: Encoding, limit: int, side: str) -> Encoding:
    """An encoding of at most `limit` tokens: tokens of the text are left out, special tokens stay.

    Arguments:
        encoding: an encoded text.
        limit: most tokens.
        side: "right" to leave out the last tokens of the text, "left" the first.
    """
    surplus = len(encoding) - limit
    if surplus <= 0:
        return encoding
    own = [i for i, is_special in enumerate(encoding.special) if not is_special]
    left_out = set(own[:surplus] if side == "left" else own[-surplus:])
    kept = [i for i in range(len(encoding)) if i not in left_out]
    return replace(
        encoding,
        ids=[encoding.ids[i] for i in kept],
        tokens=[encoding.tokens[i] for i in kept],
        offsets=[encoding.offsets[i] for i in kept],
        special=[encoding.special[i] for i in kept],
        byte_spans=None if encoding.byte_spans is None else [encoding.byte_spans[i] for i in kept],
    )


@stage(
    version=1,
    inputs={"states": None},
    outputs={"embedding": Output(("prompt", "hidden"), "1", "embedding of each prompt")},
    resources=("layers",),
)
def sentence_embedding(
    states: xr.Dataset, layers: Sequence[Any], *, variables: list[str], poolings: list[str], skipped: int = 0
) -> xr.Dataset:
    """Embeddings from pooled final states: joined, scaled, and through the encoder's further layers.

    Arguments:
        states: pooled final states, one row per prompt in each variable.
        layers: opened `LayerFiles`; float64.
        variables: name of the variable of each pooling.
        poolings: name of each pooling.
        skipped: number of first positions that were not pooled.

    Returns:
        embedding float32 [prompt, hidden]; rows of length 1 if the last layer is a normalisation.
    """
    import torch
    import xarray as xr

    size = states["row_size"].values.astype(np.float64) - skipped
    parts = []
    for name, pooling in zip(variables, poolings, strict=True):
        rows = states[name].values.astype(np.float64).reshape(len(size), -1)
        # The sum over sqrt(n) is the mean times sqrt(n).
        parts.append(rows * np.sqrt(size)[:, None] if pooling == "mean_sqrt_len_tokens" else rows)
    value = torch.from_numpy(np.concatenate(parts, axis=1))
    for layer in layers:
        if layer is None:
            value = torch.nn.functional.normalize(value, dim=-1)
        else:
            weight, bias, activation = layer
            value = getattr(torch.nn, activation)()(torch.nn.functional.linear(value, weight, bias))
    about = model_of(states[variables[0]])
    return xr.Dataset(
        {"embedding": (("prompt", "hidden"), value.float().numpy(), about)},
        coords={"prompt": np.arange(len(size))},
        attrs=about,
    )

"""Model: a language model with named hook points for its activations.

Joins a network, a tokenizer and an identity (part of the keys of results). Knows nothing of stores;
`capture/capture.py` stores activations.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ....pipeline.ambient import each_in_plain_torch, plain_torch
from ....pipeline.plan import as_bytes
from ....store.arrays import as_index, require_flag, shown
from ....store.display import html
from ....store.display.terminal import echo
from ....store.errors import ConfigError, InterventionError, PromptError, ShapeError
from ....store.keys import ModelIdentity
from ...options import split_options, takes_options
from ..architectures.points import BY_NAME, HookPoint
from ..hooks.cache import HookCache, stack_ragged
from ..hooks.interventions import payload_rows
from ..hooks.recurrent import RecurrentPass, require_recurrent
from ..hooks.spec import BoundSpec, Capture, HookSpec, require_spec
from ..hooks.taps import PassTaps, RunTaps, Sink
from ..hooks.wants import ALL_LOGITS, Logits, require_want
from ..networks.history import STREAM, Carried
from ..networks.loop import Network
from ..networks.transfer import to_device
from ..networks.weights import is_finite
from ..passes.backward import Cotangent, Gradients, backward
from ..passes.drivers import Passes, passes_over
from ..passes.jacobian import vector_jacobian_products
from ..passes.kept import Cache
from ..passes.plain import forward_part
from ..passes.planner import MEMORY
from ..passes.sweep import Result
from ..text.prompts import no_tokenizer, pair_ids, tokenize
from .fingerprint import fingerprint, tensor_bytes, weights_digest
from .finite import not_finite, require_finite
from .reference import COMPUTED_IN, ModelRef
from .residency import describe_shortage, keep_freed_memory, room_for
from .streamed import StreamedWeights, stream

if TYPE_CHECKING:
    from ..architectures.architecture import Architecture
    from ..passes.branches import Wanted
    from ..passes.planner import Block
    from ..text.tokens import Tokenizer
    from .files import ModelFiles

Prompts = (
    str | Iterable[str] | Iterable[int] | Iterable[Iterable[int]] | Tensor | np.ndarray | Mapping[str, Any]
)
"""Every form of prompts that `Model.tokenize` accepts; read by text/rows.py."""
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in COMPUTED_IN}
"""Name -> dtype that models may compute in."""


class Model:
    """A loaded language model with named hook points.

    `from_pretrained` loads one; `forward` runs prompts through it.
    """

    def __init__(
        self,
        network: Network,
        *,
        name: str = "model",
        tokenizer: Tokenizer | None = None,
        identity: ModelIdentity | None = None,
        streamed: StreamedWeights | None = None,
    ) -> None:
        """Wrap a network; `from_pretrained` loads one.

        Arguments:
            network: the layers with their weights, which compute the forward pass.
            name: name in messages and provenance.
            tokenizer: tokenizer of the model; None for token ids only.
            identity: identity of the model's files; None for weights made in memory.
            streamed: the weights, if they are read from files layer by layer; else None.
        """
        if not hasattr(network, "config"):
            raise ConfigError(
                f"expected a network, found {shown(network)}; load a model by name: "
                "mizarr.Model.from_pretrained('specimen')"
            )
        self.network = network
        """The network that computes, with its weights."""
        self.streamed = streamed
        """Streamed weights, read from files layer by layer; None if all weights are in memory."""
        self.name = name
        self._identity = identity
        # Taken now, so that any later edit of the weights shows in `identity`.
        self._loaded = None if identity is None else fingerprint(network)
        self._tokenizer = tokenizer

    @classmethod
    @takes_options(ModelRef)
    @plain_torch()
    def from_pretrained(
        cls,
        name: ModelRef | str | Path,
        *,
        progress: bool | None = None,
        max_memory: int | str | None = None,
        **options: Any,
    ) -> Model:
        """Load a model by hub id, by local directory, or by the name of a model that ships with mizarr.

        These are "specimen", "specimen-guided", "specimen-rwkv" and "specimen-experts".

        The dtype is float32 by default, whatever the dtype of the checkpoint. An unknown family runs through
        transformers, with a warning, if that is installed. Changing the files later does not affect the
        model.

        Arguments:
            name: hub id, directory or shipped name.
            progress: whether to show a progress bar on stderr; None shows it for large checkpoints on a
                terminal.
            max_memory: most bytes ("4GiB") of weights in memory; None for the free memory of the machine, or
                MIZARR_MEMORY. If the weights take more, each pass reads the layers that are not in memory
                from the files (`streamed`), which must not change. Numbers are the same.
            options: options for loading the model, listed below.

        Raises:
            ModelNotFound: if there is no such model.
            ConfigError: for a config that cannot be run, with a compatibility report.
            WeightsError: for missing or damaged weights.
            SourceChanged: if the files change while they are read.
        """
        require_flag(progress, "progress", optional=True)
        (loading,) = split_options("from_pretrained", options, ModelRef)
        reference = ModelRef.of(name, **loading)
        return cls.from_files(reference.files(), reference, progress=progress, max_memory=max_memory)

    @classmethod
    @plain_torch()
    def from_files(
        cls,
        files: ModelFiles,
        reference: ModelRef,
        *,
        progress: bool | None = None,
        max_memory: int | str | None = None,
    ) -> Model:
        """Load a model from files that are already resolved.

        Arguments:
            files: the files of the model.
            reference: dtype and device to load it with.
            progress: see `from_pretrained`.
            max_memory: see `from_pretrained`.

        Raises:
            ConfigError, WeightsError, SourceChanged: as `from_pretrained`.
        """
        from ..networks.table import build, of_weights
        from ..networks.weights import unread_line

        device, dtype = as_device(reference.device), as_dtype(reference.dtype or "float32")
        config, name_of_dtype = files.architecture(), dtype_name(dtype)
        room = room_for(config, dtype.itemsize, device, as_bytes(max_memory), files.name)
        streamed = None
        if room is None:
            if device.type == "cpu":
                # Not where layers come and go: freed weights must then return to the system.
                keep_freed_memory()
            identity, network = files.while_digested(
                name_of_dtype,
                lambda: build(config, files.checkpoint, dtype=dtype, device=device, progress=progress),
            )
        else:
            # Digested before it is opened: from then on every read compares the files with their stamp.
            identity = files.identity(name_of_dtype)
            streamed = stream(
                files.checkpoint, config, dtype=dtype, device=device, room=room, name=files.name
            )
            network = of_weights(config, streamed)
            if max_memory is None and progress is not False:
                echo(f"{files.name}: {describe_shortage(streamed.nbytes, room)}", err=True)
        is_native = config.kind != "bridge"
        if is_native and progress is not False and (unread := unread_line(files.checkpoint, config)):
            echo(f"{files.name}: {unread}", err=True)
        # Loading takes long: files that changed since the digest would give wrong keys.
        files.pinned.check()
        return cls(
            network,
            name=files.name,
            tokenizer=files.tokenizer(),
            identity=identity,
            streamed=streamed,
        )

    @property
    def _passes(self) -> Passes:
        """The driver of forward passes; made anew at each use, because `network` may have been replaced."""
        return passes_over(self.network)

    @property
    def identity(self) -> ModelIdentity | None:
        """Identity of the weights in memory, part of stored results' keys; None for weights created in
        memory.

        If the weights are as loaded, it is the identity of the files; otherwise a digest of the tensors,
        computed at every call. Reads every weight (8 ms per 100 MB).

        Raises:
            ConfigError: if anything but the values of tensors was changed, which no identity can describe.
        """
        if self._identity is None or self._loaded is None:
            return None
        now = fingerprint(self.network)
        # Tensor values have a digest; a replaced hook, function or setting has none.
        changed = self._loaded.first_difference(now, tensors=False)
        if changed is not None:
            raise ConfigError(
                f"{self.name}: expected no change since loading except of values in weight tensors, found "
                f"{changed} changed, so that results cannot be stored under a key; load the model again, or "
                "make the change with interventions"
            )
        if self._loaded.first_difference(now) is None:
            return self._identity
        dtype = dtype_name(self.dtype)
        return replace(
            self._identity,
            weights=weights_digest(self.network),
            dtype=dtype,
            attention=self.config.attention_in(dtype),
        )

    def first_edit(self) -> str | None:
        """Path of the first tensor or setting that changed since loading; None if none did.

        Reads every weight, as `identity` does.
        """
        return None if self._loaded is None else self._loaded.first_difference(fingerprint(self.network))

    @property
    def config(self) -> Architecture:
        """Architecture of the model: layers, sizes, hook points."""
        return self.network.config

    @property
    def device(self) -> torch.device:
        """Device of the weights; for streamed weights the device they are read to."""
        return self.network.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that the model computes in."""
        return self.network.dtype

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in the compute dtype, including weights that are not in memory."""
        return tensor_bytes(self.network) if self.streamed is None else self.streamed.nbytes

    @property
    def hook_points(self) -> tuple[HookPoint, ...]:
        """All hook points of the model, in execution order."""
        return self.config.hook_points

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model.

        Raises:
            TokenizerError: for a model without tokenizer, whose prompts must be token ids.
        """
        if self._tokenizer is None:
            raise no_tokenizer(self.name)
        return self._tokenizer

    def bind(self, hooks: HookSpec | None) -> BoundSpec:
        """Replace the globs of a HookSpec by the matching hook points of this model.

        Arguments:
            hooks: captures and interventions; None for a plain pass.

        Raises:
            HookPointNotFound, InterventionError: as `HookSpec.bind`.
        """
        if hooks is None:
            return BoundSpec()
        require_spec(hooks)
        return hooks.bind(self.hook_points, self.name)

    def tokenize(self, prompts: Prompts) -> list[list[int]]:
        """Token ids of one or several prompts, as given or as the tokenizer encodes them (with its BOS rule).

        Arguments:
            prompts: a text, several texts, token ids ([position] or [prompt, position]; lists, arrays,
                tensors, Series or generators), or the output of a tokenizer: input_ids with attention_mask,
                whose padding at either end is removed.

        Raises:
            PromptError: for prompts of another form, an empty prompt, a token id out of range, or a prompt
                longer than the context.
        """
        return tokenize(prompts, self._tokenizer, self.config, self.name)

    def pair(self, source: str | Sequence[int], target: str | Sequence[int] = ()) -> list[int]:
        """Encode source and target as one prompt, for an encoder-decoder model.

        Arguments:
            source: text for the encoder, to which the tokenizer adds its special tokens, or token ids.
            target: text for the decoder, to which nothing is added, or token ids; without the start token.

        Returns:
            Token ids. The first is `vocab_size` or larger, and encodes where the target begins.

        Raises:
            ConfigError: for a model that is no encoder-decoder.
            PromptError: as `tokenize`.
        """
        return self.tokenize(pair_ids(source, target, self._tokenizer, self.config, self.name))[0]

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Format a conversation with the chat template of the checkpoint, as one prompt.

        Arguments:
            messages: text of the user, or [{"role": "user", "content": …}, …].
            add_generation_prompt: whether to end with the tokens after which the assistant answers.
            variables: further variables of the template, e.g. system, tools or enable_thinking.

        Returns:
            Token ids.

        Raises:
            TokenizerError: if there is no template, or it rejects the conversation.
            PromptError: as `tokenize`.
        """
        text = self.tokenizer.chat(messages, add_generation_prompt=add_generation_prompt, **variables)
        return self.tokenize(self.tokenizer.encode_raw(text).ids)[0]

    @plain_torch()
    def forward(
        self,
        prompts: Prompts,
        hooks: HookSpec | None = None,
        *,
        want: Logits | None = ALL_LOGITS,
        recurrent: RecurrentPass | None = None,
    ) -> HookCache:
        """Run one forward pass over each prompt.

        Prompts of different length run in separate batches, never padded; values past the end of a prompt are
        NaN in the result.

        Arguments:
            prompts: see `tokenize`.
            hooks: captures and interventions. A tensor of an intervention may have one row per prompt, in
                their order, if all prompts have the same length.
            want: logits to return; None, and a model without head, runs neither a head nor layers after the
                last capture.
            recurrent: layers to repeat. Captures are those of the last repetition; interventions apply in
                each.

        Raises:
            PromptError, HookPointNotFound, InterventionError: for invalid arguments.
            NotFinite: if logits or captures contain NaN or infinity.
        """
        rows = self.tokenize(prompts)
        spec = self.bind(hooks)
        require_want(want)
        want = self.read(want, rows)
        require_recurrent(recurrent)
        # One batch per length: positions of interventions are resolved against one length.
        groups: dict[int, list[int]] = defaultdict(list)
        for row, ids in enumerate(rows):
            groups[len(ids)].append(row)
        # Rows of an intervention's tensor belong to prompts; in batches by length they would meet others.
        _refuse_rows_per_prompt(spec, groups)
        specs = {
            length: spec if recurrent is None else recurrent.applied(spec, self.config, length)
            for length in groups
        }
        if spec.gradients:  # checked for all prompts before the first pass
            self.config.require_head()
            spec.require_objective().check([len(row) for row in rows], self.config.n_logits)
        parts = []
        for length, group in groups.items():
            batch = [rows[row] for row in group]
            if spec.gradients:
                logits, captured = self._run_with_gradients(batch, specs[length], want, group)
            else:
                logits, captured = self.run_batch(batch, specs[length], want)
            parts.append((group, logits, captured))
        if len(parts) == 1:
            _, logits, captured = parts[0]
            return HookCache(rows, logits, captured, self.config.head)
        longest = max(groups)
        captured = {
            capture: stack_ragged(
                [(group, captures[capture]) for group, _, captures in parts],
                capture.point.dims,
                len(rows),
                longest,
            )
            for capture in spec.captures
        }
        logits = _stack_logits([(group, part) for group, part, _ in parts], want, len(rows), longest)
        return HookCache(rows, logits, captured, self.config.head)

    def read(self, want: Logits | None, rows: Sequence[Sequence[int]]) -> Logits | None:
        """A selection of logits as this model's head gives them (`Logits.read`); None for None.

        Arguments:
            want: the selection.
            rows: token ids of the prompts.

        Raises:
            PromptError: for a prompt that ends with padding, if the head reads the last position:
                transformers reads the last token before it.
        """
        padding = self.config.head.padding
        if want is not None and padding is not None and any(row[-1] == padding for row in rows):
            raise PromptError(
                f"expected prompts that do not end with the padding token {padding} of {self.name}, whose "
                "head reads the last token before padding, found one that does; leave these tokens out"
            )
        return None if want is None else want.read(self.config, max(map(len, rows)))

    def _run_with_gradients(
        self,
        rows: Sequence[Sequence[int]],
        spec: BoundSpec,
        want: Logits | None,
        numbers: Sequence[int],
    ) -> tuple[Tensor | None, dict[Capture, Tensor]]:
        """Run prompts of one length in one batch, forward and backward, to capture gradients.

        Arguments:
            rows: token ids [prompt][position].
            spec: captures, interventions and the metric to differentiate.
            want: logits to return; None for none.
            numbers: index of each prompt among all prompts, which may have metrics of their own.

        Returns:
            (logits or None, capture -> activation or gradient).
        """
        # All logits, so that those of the metric are among them; the wanted ones are selected below.
        logits, captured = self.differentiate(rows, spec, numbers, want=None if want is None else ALL_LOGITS)
        if want is None:
            return None, captured
        self.check(spec, want, batch=len(rows), length=len(rows[0]))
        at_positions = want.at_positions(logits)
        return (at_positions if want.tokens is None else at_positions[..., list(want.tokens)]), captured

    def run_batch(
        self, rows: Sequence[Sequence[int]], spec: BoundSpec, want: Logits | None
    ) -> tuple[Tensor | None, dict[Capture, Tensor]]:
        """Run prompts of one length in one batch.

        Arguments:
            rows: token ids [prompt][position].
            spec: captures and interventions.
            want: logits to return; None for none.

        Returns:
            (logits or None, capture -> tensor).

        Raises:
            NotFinite: if logits or captures contain NaN or infinity.
        """
        captured: dict[Capture, Tensor] = {}
        logits = self.stream_batch(rows, spec, want, captured.__setitem__)
        require_finite(self, rows, spec, captured)
        return logits, captured

    @plain_torch()
    @torch.no_grad()
    def stream_batch(
        self, rows: Sequence[Sequence[int]], spec: BoundSpec, want: Logits | None, sink: Sink
    ) -> Tensor | None:
        """Run prompts of one length in one batch, and pass captures to `sink` as soon as they are computed.

        So no activation has to stay in memory. If layers are repeated, captures reach `sink` after the pass,
        when the last repetition is known. Captures are not checked for NaN.

        Arguments:
            rows: token ids [prompt][position].
            spec: captures and interventions.
            want: logits to return; None for none.
            sink: receives each captured activation.

        Returns:
            The wanted logits [prompt, position, token]; None where `want` is None.
        """
        ids, want = to_device(torch.tensor(rows, dtype=torch.long), self.device), self.read(want, rows)
        self.check(spec, want, batch=ids.shape[0], length=ids.shape[1])
        # A repeated layer reaches its hook points several times: a later value replaces an earlier one.
        last_values: dict[Capture, Tensor] = {}
        is_repeated = spec.order is not None
        taps = RunTaps(
            spec,
            last_values.__setitem__ if is_repeated else sink,
            stop_early=want is None and not is_repeated,
        )
        logits = self.tapped(ids, taps, want, spec.order)
        for capture, value in last_values.items():
            sink(capture, value)
        return logits

    @plain_torch()
    @torch.no_grad()
    def tapped(
        self,
        ids: Tensor,
        taps: PassTaps,
        want: Logits | None,
        order: Sequence[int] | None = None,
        *,
        check_finite: bool = True,
    ) -> Tensor | None:
        """Run one forward pass that calls `taps` at every hook point, to capture or change the value there.

        Arguments:
            ids: token ids [batch, position].
            taps: called with each value; returns the value to continue with.
            want: logits to return; None for none.
            order: layers in execution order; None for each once.
            check_finite: whether logits with NaN or infinity are an error.

        Returns:
            The wanted logits [batch, position, token]; None where `want` is None.

        Raises:
            NotFinite: if the logits contain NaN or infinity.
        """
        logits = self._passes.forward(ids, taps, want, order)
        if check_finite and logits is not None and not is_finite(logits):
            raise not_finite(self, [ids.tolist()], _spec_of(taps), "the logits")
        return logits

    @plain_torch()
    @torch.no_grad()
    def stream_layers(
        self,
        inputs: Sequence[Sequence[int]] | Carried,
        layers: Sequence[int],
        spec: BoundSpec,
        sink: Sink,
        *,
        ends: bool,
    ) -> Carried:
        """Run some consecutive layers, and pass captures to `sink` as soon as they are computed.

        Arguments:
            inputs: token ids of prompts of one length, or the output of the call for the previous layers.
            layers: numbers of the layers.
            spec: captures in these layers, or of the `resid_post` that enters the first; interventions.
            sink: receives captured activations.
            ends: whether these are the last layers to run.

        Returns:
            Tensors to pass to the call for the next layers; empty if `ends`.
        """
        if isinstance(inputs, dict):
            values: Tensor | Carried = inputs
        else:
            values = to_device(torch.tensor(inputs, dtype=torch.long), self.device)
            self.check(spec, None, batch=values.shape[0], length=values.shape[1])
        return forward_part(self.network, values, layers, RunTaps(spec, sink, stop_early=ends), ends=ends)

    @plain_torch()
    def backward(
        self,
        rows: Sequence[Sequence[int]],
        spec: BoundSpec,
        want: Logits,
        cotangent: Cotangent,
        *,
        memory: int = MEMORY,
        dropped: int | None = None,
    ) -> tuple[Tensor, Gradients]:
        """Run prompts of one length forward and backward.

        Interventions apply in the forward pass; a value that one replaces gets no gradient from after it.

        Arguments:
            rows: token ids [prompt][position].
            spec: captures of activations and gradients; interventions.
            want: logits that the metric is computed from.
            cotangent: maps these logits to the gradient of the metric with respect to each of them.
            memory: bytes for recorded activations; beyond them layers are recomputed in the backward pass.
            dropped: layer whose contribution to the residual stream is treated as a constant; None for none.

        Returns:
            (logits [batch, position, token], capture -> activation or gradient).

        Raises:
            ConfigError: for a model without gradients (the transformers bridge, streamed weights).
            PromptError, InterventionError: for invalid arguments.
            NotFinite: if logits or captures contain NaN or infinity.
        """
        self.config.require_gradients()
        self.config.require_head()
        self.require_all_weights("gradients")
        ids, want = (
            to_device(torch.tensor(rows, dtype=torch.long), self.device),
            self.read(want, rows) or want,
        )
        self.check(spec, want, batch=ids.shape[0], length=ids.shape[1])
        logits, captured = backward(self.network, ids, spec, want, cotangent, memory, dropped)
        if not is_finite(logits):
            raise not_finite(self, [rows], spec, "the logits")
        require_finite(self, rows, spec, captured)
        return logits, captured

    def differentiate(
        self,
        rows: Sequence[Sequence[int]],
        spec: BoundSpec,
        numbers: Sequence[int],
        *,
        want: Logits | None = None,
        memory: int = MEMORY,
    ) -> tuple[Tensor, Gradients]:
        """Run prompts of one length forward and backward, from the metric that a spec sets.

        Arguments:
            rows: token ids [prompt][position].
            spec: captures, interventions and the metric to differentiate (`HookSpec.gradient_of`).
            numbers: index of each row among all prompts, which may have metrics of their own.
            want: logits to return; None for those that the metric reads.
            memory: bytes for recorded activations; beyond them layers are recomputed in the backward pass.

        Returns:
            (logits [batch, position, token], capture -> activation or gradient).
        """
        objective = spec.require_objective()
        metric_want = objective.want(numbers) if want is None else want
        # The tokens that the metric reads, at its one position.
        baseline_want = Logits((objective.at,), metric_want.tokens)
        self.read(baseline_want, rows)  # refuses a position where the head has none
        clean = self._baselines([objective.baseline_of(number) for number in numbers], baseline_want)
        return self.backward(
            rows,
            spec,
            metric_want,
            lambda logits: objective.cotangent(logits, metric_want, numbers, clean),
            memory=memory,
        )

    @plain_torch()
    def vector_jacobian_products(
        self,
        ids: Sequence[int],
        layers: Sequence[int],
        cotangents: Tensor,
        counted: range,
        *,
        together: int = 16,
        memory: int = MEMORY,
    ) -> Tensor:
        """Products of cotangents with the Jacobian of the last residual stream with respect to earlier ones.

        Arguments:
            ids: token ids of one prompt.
            layers: source layers, below the last one.
            cotangents: [cotangent, hidden].
            counted: consecutive positions that count as source and as target: the products are summed over
                targets and averaged over sources (passes/jacobian.py).
            together: cotangents per backward pass; changes no number beyond rounding.
            memory: bytes for recorded activations.

        Returns:
            float32 [layer, cotangent, hidden].

        Raises:
            ConfigError: for a model without gradients, or one in which positions see later ones.
            PromptError: for token ids out of range.
            NotFinite: if a product contains NaN or infinity.
        """
        self.config.require_gradients()
        self.config.require_next_token()
        self.require_all_weights("gradients")
        (row,) = tokenize([ids], None, self.config, self.name)
        tokens = to_device(torch.tensor(row, dtype=torch.long), self.device)
        products = vector_jacobian_products(
            self.network, tokens, layers, cotangents, counted, together=together, memory=memory
        )
        if not is_finite(products):
            raise not_finite(self, [[row]], BoundSpec(), "the Jacobian of the last stream")
        return products

    def _baselines(self, rows: Sequence[tuple[int, ...] | None], want: Logits) -> list[Tensor | None]:
        """Logits [token] of each prompt in a run without interventions; None for a None row.

        Equal prompts run once.
        """
        logits_of: dict[tuple[int, ...], Tensor] = {}
        for row in dict.fromkeys(row for row in rows if row is not None):
            # One prompt per batch, so that its bits do not depend on the other prompts.
            logits, _ = self.run_batch([row], BoundSpec(), want)
            assert logits is not None
            logits_of[row] = logits[0, 0]
        return [None if row is None else logits_of[row] for row in rows]

    @plain_torch()
    @torch.no_grad()
    def read_on(self, rows: Sequence[Sequence[int]], cache: Cache, taps: PassTaps) -> Tensor:
        """Next-token logits [batch, vocab] of sequences of one length; only tokens not yet in the cache run.

        Arguments:
            rows: token ids [row][position].
            cache: key-value cache (passes/kept.py), extended in place.
            taps: called at every hook point, to capture or change the value there.
        """
        # Interventions were checked for the prompt and the longest text (generation/generate.py).
        logits = self._passes.read_on(rows, cache, taps)
        if not is_finite(logits):
            raise not_finite(self, [rows], _spec_of(taps), "the logits")
        return logits

    def sweep(self, block: Block, wanted: Sequence[Wanted], room: int) -> Iterator[Result]:
        """Compute runs over one prompt that share layers, and yield the result of each.

        Arguments:
            block: the runs to compute together, as planned by passes/planner.py.
            wanted: all runs of the plan, which the block refers to by index.
            room: bytes for activations in addition to those of one prompt.

        Yields:
            (index into `wanted`, logits or None, capture -> tensor).
        """
        # Item by item: between two items the consumer's own settings of torch hold.
        yield from each_in_plain_torch(self._swept(block, wanted, room))

    @torch.no_grad()
    def _swept(self, block: Block, wanted: Sequence[Wanted], room: int) -> Iterator[Result]:
        for index, logits, captured in self._passes.sweep(block, wanted, room):
            rows, spec = [wanted[index].tokens], wanted[index].spec
            if logits is not None and not is_finite(logits):
                raise not_finite(self, [rows], spec, "the logits")
            require_finite(self, rows, spec, captured)
            yield index, logits, captured

    def check(self, spec: BoundSpec, want: Logits | None, *, batch: int, length: int) -> None:
        """Check interventions and logits against a batch of `batch` prompts of `length` tokens.

        Arguments:
            spec: interventions to check.
            want: logits to check; None for none.
            batch: number of prompts.
            length: tokens of each prompt.

        Raises:
            InterventionError: for a position, size or tensor of an intervention that does not fit.
            PromptError: for a position or token of `want` out of range.
        """
        position_sizes = dict.fromkeys(("position", "query_position", "key_position"), length)
        for point, change in spec.interventions:
            change.check(point, {**self.config.sizes_in(point.layer), "batch": batch, **position_sizes})
            # In a model without causal mask, edges to later keys exist.
            if not self.config.looks_ahead:
                change.require_causal(point, length)
        if want is not None:
            want.check(length, self.config.n_logits)

    @plain_torch()
    def project_to_vocab(
        self, resid: Tensor, *, softcap: bool = True, tokens: Sequence[int] | None = None
    ) -> Tensor:
        """Apply the final norm and the head, of the vocabulary or of labels, to residual states.

        Arguments:
            resid: residual stream [..., hidden], not normalised.
            softcap: whether to apply the final soft cap of the family (Gemma 2), as the model itself does.
            tokens: ids of the logits to compute; None for the whole vocabulary.

        Returns:
            Logits [..., vocab].

        Raises:
            ShapeError: if the last axis is not the width of the model.
        """
        want = Logits(tokens=None if tokens is None else tuple(tokens))
        self.config.require_head()
        want.check(1, self.config.n_logits)
        if not isinstance(resid, Tensor) or resid.ndim < 1 or resid.shape[-1] != self.config.hidden_size:
            raise ShapeError(
                f"expected residual states as a tensor [..., {self.config.hidden_size}], found "
                f"{shown(resid)}; pass e.g. cache['blocks.0.hook_resid_post']"
            )
        with torch.no_grad():
            return self.network.unembed(
                self.network.final_norm(resid.to(self.device, self.dtype)), want, softcap=softcap
            )

    @plain_torch()
    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """The residual stream [batch, position, hidden] that enters the first layer.

        Arguments:
            ids: token ids [batch, position], an integer tensor.

        Raises:
            PromptError: for another dtype or shape, or a token id out of range.
        """
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
            raise PromptError(
                f"expected token ids as an integer tensor [batch, position], found {shown(ids)}; pass "
                "torch.tensor(model.tokenize(prompts))"
            )
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.config.vocab_size:
            raise PromptError(
                f"expected token ids in 0..{self.config.vocab_size - 1}, found {int(ids.min())} to "
                f"{int(ids.max())}; encode the prompt with the tokenizer of {self.name}: model.tokenize(text)"
            )
        return self.network.embed(ids, torch.arange(ids.shape[1], device=ids.device))[STREAM]

    def embedding_vector(self, token: int | str) -> Tensor:
        """Row [hidden] of the embedding matrix for a token id or a single-token word.

        Without the factor that some families apply to embeddings (Gemma).
        """
        if isinstance(token, str):
            index = self.tokenizer.find_token_id(token)
        else:
            index = as_index(token, "tokens", PromptError)
        if not 0 <= index < self.config.vocab_size:
            raise PromptError(f"expected a token id in 0..{self.config.vocab_size - 1}, found {index}")
        return self.network.embedding[index]

    def require_all_weights(self, what: str) -> None:
        """Raise ConfigError if the weights are streamed from files instead of held in memory.

        Arguments:
            what: the computation that needs all weights in memory, for the message, e.g. "gradients".
        """
        if self.streamed is not None:
            raise ConfigError(
                f"expected all weights of {self.name} in memory for {what}, found that layers are read from "
                f"files at each pass; allow {self.weight_bytes:,} bytes (max_memory=, MIZARR_MEMORY), or "
                "compute in bfloat16"
            )

    def require_identity(self) -> ModelIdentity:
        """Identity of the weights in memory, part of the keys of stored results.

        Raises:
            ConfigError: for a model whose weights were made in memory, which has no identity.
        """
        identity = self.identity
        if identity is None:
            raise ConfigError(
                f"expected a model loaded from files, found {self.name}, whose weights were made in memory; "
                "save it to a directory and load it with mizarr.Model.from_pretrained"
            )
        return identity

    def __repr__(self) -> str:
        config = self.config
        shape = f"{config.model_type}, {config.num_layers} layers, hidden {config.hidden_size}"
        return f"Model({self.name!r}, {shape}, {dtype_name(self.dtype)}, {self.device})"

    def _repr_html_(self) -> str:
        """HTML for notebooks: sizes, device, dtype, identity and hook points."""
        config, sizes = self.config, self.config.axis_sizes
        facts = [
            ("family", config.model_type),
            ("layers", f"{config.num_layers:,}"),
            *((name, f"{size:,}") for name, size in sizes.items() if name not in ("one", "vocab")),
            ("vocabulary", f"{config.vocab_size:,} tokens"),
            ("context", f"{config.context_length:,} tokens"),
            ("computes in", f"{dtype_name(self.dtype)} on {self.device}"),
            ("identity as loaded", "none" if self._identity is None else self._identity.short),
        ]
        kinds = dict.fromkeys(point.kind for point in self.hook_points)
        points = [
            (
                BY_NAME[kind].path.format("*"),
                ", ".join(f"{dim} {sizes[dim]}" if dim in sizes else dim for dim in BY_NAME[kind].dims),
                BY_NAME[kind].meaning,
            )
            for kind in kinds
        ]
        table = html.table(["hook point", "dims", "value"], points)
        body = html.table(["", ""], facts) + html.details(f"{len(self.hook_points)} hook points", table)
        return html.shown(f"Model {self.name}", body)


def _spec_of(taps: PassTaps) -> BoundSpec:
    """The captures and interventions that the taps carry out; an empty spec for taps without `spec`."""
    return getattr(taps, "spec", BoundSpec())


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Convert a dtype name, e.g. "bfloat16", to a torch dtype.

    Raises:
        ConfigError: for a dtype that models cannot compute in.
    """
    if isinstance(dtype, torch.dtype) and dtype in DTYPES.values():
        return dtype
    if str(dtype) not in DTYPES:
        raise ConfigError(f"expected dtype to be one of {', '.join(DTYPES)}, found {dtype!r}")
    return DTYPES[str(dtype)]


def as_device(device: str | torch.device | None) -> torch.device:
    """Convert a device name to a torch device; None chooses CUDA if available, otherwise the CPU.

    Raises:
        ConfigError: if this machine has no such device.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch_device = torch.device(device)
        # torch.device() accepts devices that do not exist; allocating does not.
        torch.empty(0, device=torch_device)
        if torch_device.type == "meta":
            raise RuntimeError("the device meta holds no numbers")
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        reason = str(error).splitlines()[0].partition(". ")[0].rstrip(".")
        # torch lists every device type that it knows, which says nothing of this machine.
        if re.match("Expected one of .*device type", reason):
            reason = "no kind of device"
        raise ConfigError(
            f"expected a device such as cpu, cuda or cuda:1 that this machine has, found {str(device)!r} "
            f"({reason}); leave it out to use a GPU if there is one, else the CPU"
        ) from error
    return torch_device


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a torch dtype in keys and stores: "float32"."""
    return str(dtype).removeprefix("torch.")


def _refuse_rows_per_prompt(spec: BoundSpec, groups: Mapping[int, list[int]]) -> None:
    """Raise InterventionError for a tensor with one row per prompt where prompts have different lengths.

    Arguments:
        spec: interventions with their tensors.
        groups: prompt length -> indices of the prompts.
    """
    for point, change in spec.interventions:
        if len(groups) > 1 and payload_rows(point, change) > 1:
            raise InterventionError(
                f"{type(change).__name__} at '{point}': expected prompts of one length for a tensor with one "
                f"row per prompt ({payload_rows(point, change)} rows), found {len(groups)} lengths; call "
                "forward once for the prompts of each length"
            )


def _stack_logits(
    parts: Sequence[tuple[list[int], Tensor | None]], want: Logits | None, rows: int, longest: int
) -> Tensor | None:
    if want is None:
        return None
    present = [(group, part) for group, part in parts if part is not None]
    positions = longest if want.positions is None else len(want.positions)
    return stack_ragged(present, ("batch", "position", "vocab"), rows, positions)

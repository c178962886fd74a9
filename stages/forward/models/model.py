"""Model: a language model whose every activation has a name.

Joins an architecture (how a forward pass is computed), a tokenizer and an identity (what its results are
keyed by). Knows nothing of stores; `capture/capture.py` stores what a model computes.
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
from ..passes.kept import Cache
from ..passes.plain import forward_part
from ..passes.planner import MEMORY
from ..passes.sweep import Result
from ..text.prompts import no_tokenizer, pair_ids, tokenize
from .fingerprint import fingerprint, tensor_bytes, weights_digest
from .finite import not_finite, require_finite
from .reference import ModelRef
from .residency import keep_freed_memory, room_for, told
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
"""What text/rows.py reads."""
DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}


class Model:
    """A loaded model: `from_pretrained`, then `forward`."""

    def __init__(
        self,
        network: Network,
        *,
        name: str = "model",
        tokenizer: Tokenizer | None = None,
        identity: ModelIdentity | None = None,
        streamed: StreamedWeights | None = None,
    ) -> None:
        if not hasattr(network, "config"):
            raise ConfigError(
                f"expected a network, found {shown(network)}; load a model by name: "
                "mizarr.Model.from_pretrained('specimen')"
            )
        self.network = network
        """What computes; its weights are these."""
        self.streamed = streamed
        """The network's weights where not all of them are in memory; else None."""
        self.name = name
        self._identity = identity
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
        """Load a model by hub id, local directory, or name of one that ships with mizarr: "specimen",
        "specimen-guided", "specimen-rwkv", "specimen-experts".

        The dtype is float32 by default, whatever the checkpoint holds. A family that is not known is run by
        transformers, with a warning, where it is installed. Changing the files later does not affect the
        model.

        Args:
            name: hub id, directory or shipped name.
            progress: show a bar on stderr; None does so for large checkpoints on a terminal.
            max_memory: bytes ("4GiB") that the weights may take; None for what the machine has left, or
                MIZARR_MEMORY. Where they take more, each pass reads the layers that are not in memory from
                the files (`streamed`), which must stay as they are. Numbers are the same.
            options: see below.

        Raises:
            ModelNotFound, ConfigError (with a compatibility report), WeightsError.
            SourceChanged: for files that are written meanwhile.
        """
        require_flag(progress, "progress", optional=True)
        (loading,) = split_options("from_pretrained", options, ModelRef)
        reference = ModelRef.of(name, **loading)
        return cls.from_files(reference.files(), reference, progress=progress, max_memory=max_memory)

    @classmethod
    @plain_torch()
    def from_files(
        cls,
        found: ModelFiles,
        reference: ModelRef,
        *,
        progress: bool | None = None,
        max_memory: int | str | None = None,
    ) -> Model:
        """As `from_pretrained`, from files that were found already. reference: dtype and device."""
        from ..networks.table import build, of_weights
        from ..networks.weights import unread_line

        place, numbers = as_device(reference.device), as_dtype(reference.dtype or "float32")
        config, told_as = found.architecture(), dtype_name(numbers)
        room = room_for(config, numbers.itemsize, place, as_bytes(max_memory), found.name)
        streamed = None
        if room is None:
            if place.type == "cpu":
                keep_freed_memory()
            identity, network = found.while_digested(
                told_as,
                lambda: build(config, found.checkpoint, dtype=numbers, device=place, progress=progress),
            )
        else:
            identity = found.identity(told_as)
            streamed = stream(
                found.checkpoint, config, dtype=numbers, device=place, room=room, name=found.name
            )
            network = of_weights(config, streamed)
            if max_memory is None and progress is not False:
                echo(f"{found.name}: {told(streamed.nbytes, room)}", err=True)
        is_ours = config.kind != "bridge"
        if is_ours and progress is not False and (unread := unread_line(found.checkpoint, config)):
            echo(f"{found.name}: {unread}", err=True)
        found.pinned.check()
        return cls(
            network,
            name=found.name,
            tokenizer=found.tokenizer(),
            identity=identity,
            streamed=streamed,
        )

    @property
    def _passes(self) -> Passes:
        """The driver of the network as it is now: `network` may have been replaced."""
        return passes_over(self.network)

    @property
    def identity(self) -> ModelIdentity | None:
        """What results are keyed by, as the weights are now: of the files while they are what was loaded,
        else of the tensors themselves, digested anew at every call. None for a model made in memory.

        Looks at every weight (8 ms per 100 MB). Raises ConfigError where something else than tensors was
        changed, whose effect nobody can name.
        """
        if self._identity is None or self._loaded is None:
            return None
        now = fingerprint(self.network)
        changed = self._loaded.first_difference(now, tensors=False)
        if changed is not None:
            raise ConfigError(
                f"expected {self.name} as it was loaded, or other values in its tensors, found {changed} "
                "changed: a model altered so has no identity and nothing of it can be stored; load it anew, "
                "or express the change as interventions"
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
        """Path of the first tensor or setting that is not as it was loaded; None where all are. Looks at
        every weight, as `identity` does."""
        return None if self._loaded is None else self._loaded.first_difference(fingerprint(self.network))

    @property
    def config(self) -> Architecture:
        """What the model is without its weights: layers, sizes, hook points."""
        return self.network.config

    @property
    def device(self) -> torch.device:
        """Where the weights are, or come to where not all are in memory."""
        return self.network.device

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return self.network.dtype

    @property
    def weight_bytes(self) -> int:
        """What all weights take in what they are computed in, there or not."""
        return tensor_bytes(self.network) if self.streamed is None else self.streamed.nbytes

    @property
    def hook_points(self) -> tuple[HookPoint, ...]:
        """Every hook point this model has, in execution order."""
        return self.config.hook_points

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises TokenizerError if the model came without one; token ids can still be given."""
        if self._tokenizer is None:
            raise no_tokenizer(self.name)
        return self._tokenizer

    def bind(self, hooks: HookSpec | None) -> BoundSpec:
        """The spec with its globs expanded over this model's hook points."""
        if hooks is None:
            return BoundSpec()
        require_spec(hooks)
        return hooks.bind(self.hook_points, self.name)

    def tokenize(self, prompts: Prompts) -> list[list[int]]:
        """Token ids of one or several prompts, as given or as the tokenizer encodes them (with its BOS rule).

        Arguments:
            prompts: a text, several texts, token ids ([position] or [prompt, position]; lists, arrays,
                tensors, Series or generators), or what a tokenizer gives: input_ids, whose padding at either
                end is left out by their attention_mask.

        Raises:
            PromptError: anything else, an empty prompt, an id out of range, or a prompt longer than the
                context.
        """
        return tokenize(prompts, self._tokenizer, self.config, self.name)

    def pair(self, source: str | Sequence[int], target: str | Sequence[int] = ()) -> list[int]:
        """Token ids of a source and the target that goes on behind its start token, of a model with an
        encoder and a decoder: a prompt like any other.

        source: a text, with what the tokenizer adds to it, or ids. target: a text, nothing added, or ids as
        the decoder reads them behind the start. A first token of `vocab_size` and more says where the target
        begins. Raises ConfigError of a model that reads one sequence, and as `tokenize`.
        """
        return self.tokenize(pair_ids(source, target, self._tokenizer, self.config, self.name))[0]

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Token ids of a conversation, by the checkpoint's own chat template: a prompt like any other.

        messages: what the user says, or [{"role": "user", "content": …}, …]. add_generation_prompt: end where
        the assistant begins to speak. variables: what else the template knows, e.g. system, tools or
        enable_thinking. Raises TokenizerError without a template or where it refuses the conversation, and as
        `tokenize`.
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
        """One forward pass over each prompt.

        prompts: as for `tokenize`. hooks: what to capture and change. want: which logits, default all; None
        runs no LM head, and no layer above the last capture. recurrent: layers to go through again; captures
        are then those of the last time, and changes are made each time. Prompts of different length are run
        apart, never padded; what lies past the end of a prompt is NaN in the result. A payload with a row for
        each prompt is for prompts of one length; its rows are in the order of the prompts.
        """
        rows = self.tokenize(prompts)
        spec = self.bind(hooks)
        require_want(want)
        require_recurrent(recurrent)
        groups: dict[int, list[int]] = defaultdict(list)
        for row, ids in enumerate(rows):
            groups[len(ids)].append(row)
        _refuse_rows_of_batches(spec, groups)
        specs = {
            length: spec if recurrent is None else recurrent.applied(spec, self.config, length)
            for length in groups
        }
        if spec.gradients:
            spec.require_objective().check([len(row) for row in rows], self.config.vocab_size)
        parts = [
            (chosen, *self._of_one_length([rows[row] for row in chosen], specs[length], want, chosen))
            for length, chosen in groups.items()
        ]
        if len(parts) == 1:
            _, logits, captured = parts[0]
            return HookCache(rows, logits, captured)
        longest = max(groups)
        captured = {
            capture: stack_ragged(
                [(chosen, held[capture]) for chosen, _, held in parts], capture.point.dims, len(rows), longest
            )
            for capture in spec.captures
        }
        logits = _stack_logits([(chosen, part) for chosen, part, _ in parts], want, len(rows), longest)
        return HookCache(rows, logits, captured)

    def _of_one_length(
        self,
        rows: Sequence[Sequence[int]],
        spec: BoundSpec,
        want: Logits | None,
        numbers: Sequence[int],
    ) -> tuple[Tensor | None, dict[Capture, Tensor]]:
        if not spec.gradients:
            return self.run_batch(rows, spec, want)
        logits, captured = self.differentiate(rows, spec, numbers, want=None if want is None else ALL_LOGITS)
        if want is None:
            return None, captured
        self.check(spec, want, batch=len(rows), length=len(rows[0]))
        chosen = want.at_positions(logits)
        return (chosen if want.tokens is None else chosen[..., list(want.tokens)]), captured

    def run_batch(
        self, rows: Sequence[Sequence[int]], spec: BoundSpec, want: Logits | None
    ) -> tuple[Tensor | None, dict[Capture, Tensor]]:
        """Prompts of one length through the model: (logits wanted, captured activations)."""
        captured: dict[Capture, Tensor] = {}
        logits = self.stream_batch(rows, spec, want, captured.__setitem__)
        require_finite(self, rows, spec, captured)
        return logits, captured

    def stream_batch(
        self, rows: Sequence[Sequence[int]], spec: BoundSpec, want: Logits | None, sink: Sink
    ) -> Tensor | None:
        """As `run_batch`, each captured activation handed to `sink` the moment it exists, so that none has
        to be kept; where layers are gone through again, when it is known which is the last."""
        ids = to_device(torch.tensor(rows, dtype=torch.long), self.device)
        self.check(spec, want, batch=ids.shape[0], length=ids.shape[1])
        if spec.order is None:
            return self.tapped(ids, RunTaps(spec, sink, stop_early=want is None), want)
        last: dict[Capture, Tensor] = {}
        logits = self.tapped(ids, RunTaps(spec, last.__setitem__), want, spec.order)
        for capture, value in last.items():
            sink(capture, value)
        return logits

    @plain_torch()
    @torch.no_grad()
    def tapped(
        self, ids: Tensor, taps: PassTaps, want: Logits | None, order: Sequence[int] | None = None
    ) -> Tensor | None:
        """One pass over token ids [batch, position] with taps that are no spec's: the logits wanted. order:
        see `through_layers`. Raises NotFinite for logits that are not finite."""
        logits = self.pass_over(ids, taps, want, order)
        if logits is not None and not is_finite(logits):
            raise not_finite(self, [ids.tolist()], _spec_of(taps), "the logits")
        return logits

    @torch.no_grad()
    def pass_over(
        self, ids: Tensor, taps: PassTaps, want: Logits | None, order: Sequence[int] | None = None
    ) -> Tensor | None:
        """As `tapped`, whatever the numbers are."""
        return self._passes.forward(ids, taps, want, order)

    @plain_torch()
    @torch.no_grad()
    def stream_layers(
        self,
        entering: Sequence[Sequence[int]] | Carried,
        layers: Sequence[int],
        spec: BoundSpec,
        sink: Sink,
        *,
        ends: bool,
    ) -> Carried:
        """As `stream_batch`, through some layers only: what comes out of them, for a call that goes on from
        there; nothing where it `ends` here. entering: prompts of one length, or what the call before gave.
        Captures are of these layers, and the `resid_post` that enters the first."""
        if isinstance(entering, dict):
            first: Tensor | Carried = entering
        else:
            first = to_device(torch.tensor(entering, dtype=torch.long), self.device)
            self.check(spec, None, batch=first.shape[0], length=first.shape[1])
        return forward_part(self.network, first, layers, RunTaps(spec, sink, stop_early=ends), ends=ends)

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
        """Prompts of one length through the model and back: (logits wanted [batch, positions, tokens],
        everything the spec captures, activations and gradients alike).

        cotangent: from those logits the gradient of a metric with respect to each of them. Interventions hold
        on the way: what they replace has no gradient before them. memory: bytes the recorded pass may take;
        above it layers are computed again on the way back. dropped: a layer whose contribution to the stream
        is a constant on the way back. Raises ConfigError for a model that is not computed here, PromptError,
        InterventionError.
        """
        self.config.require_gradients()
        self.require_all_weights("gradients")
        ids = to_device(torch.tensor(rows, dtype=torch.long), self.device)
        self.check(spec, want, batch=ids.shape[0], length=ids.shape[1])
        logits, found = backward(self.network, ids, spec, want, cotangent, memory, dropped)
        if not is_finite(logits):
            raise not_finite(self, [rows], replace(spec, captures=()), "the logits")
        require_finite(self, rows, replace(spec, captures=()), found)
        return logits, found

    def differentiate(
        self,
        rows: Sequence[Sequence[int]],
        spec: BoundSpec,
        numbers: Sequence[int],
        *,
        want: Logits | None = None,
        memory: int = MEMORY,
    ) -> tuple[Tensor, Gradients]:
        """As `backward`, of what the spec says gradients are of. numbers: which of its prompts these are.
        want: logits to give; None for those its metrics need."""
        objective = spec.require_objective()
        wanted = objective.want(numbers) if want is None else want
        compared = Logits((objective.at,), wanted.tokens)
        clean = self._baselines([objective.baseline_of(number) for number in numbers], compared)
        return self.backward(
            rows,
            spec,
            wanted,
            lambda logits: objective.cotangent(logits, wanted, numbers, clean),
            memory=memory,
        )

    def _baselines(self, rows: Sequence[tuple[int, ...] | None], want: Logits) -> list[Tensor | None]:
        """Logits [tokens] of unchanged runs, each computed once, alone, whoever else is asked for."""
        found: dict[tuple[int, ...], Tensor] = {}
        for row in dict.fromkeys(row for row in rows if row is not None):
            logits, _ = self.run_batch([row], BoundSpec(), want)
            assert logits is not None
            found[row] = logits[0, 0]
        return [None if row is None else found[row] for row in rows]

    @plain_torch()
    @torch.no_grad()
    def read_on(self, rows: Sequence[Sequence[int]], cache: Cache, taps: PassTaps) -> Tensor:
        """Logits [batch, vocab] behind sequences of one length, of which only what the cache does not hold is
        read; see passes/kept.py."""
        logits = self._passes.read_on(rows, cache, taps)
        if not is_finite(logits):
            raise not_finite(self, [rows], _spec_of(taps), "the logits")
        return logits

    def sweep(self, block: Block, wanted: Sequence[Wanted], room: int) -> Iterator[Result]:
        """What the runs that end in a block of a plan give; see planner.py.

        room: bytes that may be taken beside the row of tokens.
        """
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
        """Raise InterventionError or PromptError unless these fit a batch of prompts of one length."""
        of_prompts = dict.fromkeys(("position", "query_position", "key_position"), length)
        for point, change in spec.interventions:
            change.check(point, {**self.config.sizes_in(point.layer), "batch": batch, **of_prompts})
            if not self.config.looks_ahead:
                change.require_causal(point, length)
        if want is not None:
            want.check(length, self.config.vocab_size)

    @plain_torch()
    def project_to_vocab(
        self, resid: Tensor, *, softcap: bool = True, tokens: Sequence[int] | None = None
    ) -> Tensor:
        """Residual states [..., hidden], not yet normalised -> logits [..., vocab] by the final norm and
        the LM head.

        softcap: apply the family's final soft cap, as the model's own output does (Gemma 2); False gives
        raw logits.
        """
        want = Logits(tokens=None if tokens is None else tuple(tokens))
        want.check(1, self.config.vocab_size)
        if not isinstance(resid, Tensor) or resid.ndim < 1 or resid.shape[-1] != self.config.hidden_size:
            raise ShapeError(
                f"expected states as a tensor [..., {self.config.hidden_size}], found {shown(resid)}; write "
                "the residual stream as it was captured"
            )
        with torch.no_grad():
            return self.network.unembed(
                self.network.final_norm(resid.to(self.device, self.dtype)), want, softcap=softcap
            )

    @plain_torch()
    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [batch, position] -> what enters the first layer, [batch, position, hidden]."""
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
            raise PromptError(
                f"expected token ids as an integer tensor [batch, position], found {shown(ids)}; write "
                "torch.tensor(model.tokenize(prompts))"
            )
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.config.vocab_size:
            raise PromptError(
                f"expected token ids in 0..{self.config.vocab_size - 1}, found {int(ids.min())} to "
                f"{int(ids.max())}; was it encoded with another tokenizer?"
            )
        return self.network.embed(ids, torch.arange(ids.shape[1], device=ids.device))[STREAM]

    def embedding_vector(self, token: int | str) -> Tensor:
        """Row of the embedding matrix [hidden] for a token id or a single-token word, without the family's
        embedding scale."""
        if isinstance(token, str):
            index = self.tokenizer.find_token_id(token)
        else:
            index = as_index(token, "tokens", PromptError)
        if not 0 <= index < self.config.vocab_size:
            raise PromptError(f"expected a token id in 0..{self.config.vocab_size - 1}, found {index}")
        return self.network.embedding[index]

    def require_all_weights(self, what: str) -> None:
        """Raise ConfigError for a model of which not all weights are in memory: it would read them from files
        again and again. what: "gradients"."""
        if self.streamed is not None:
            raise ConfigError(
                f"expected all weights of {self.name} in memory for {what}, found that layers come and go: "
                f"{self.weight_bytes:,} bytes would be read again and again; allow as much (max_memory=, "
                "MIZARR_MEMORY), or compute in bfloat16"
            )

    def require_identity(self) -> ModelIdentity:
        """`identity`; refused, never guessed, when it cannot be established."""
        identity = self.identity
        if identity is None:
            raise ConfigError(
                f"{self.name} has no established identity (weights made in memory); save it to a directory "
                "and load it with Model.from_pretrained"
            )
        return identity

    def __repr__(self) -> str:
        c = self.config
        shape = f"{c.model_type}, {c.num_layers} layers, hidden {c.hidden_size}"
        return f"Model({self.name!r}, {shape}, {dtype_name(self.dtype)}, {self.device})"

    def _repr_html_(self) -> str:
        """For a notebook: sizes, where and in what it computes, identity, and its hook points."""
        c, sizes = self.config, self.config.axis_sizes
        facts = [
            ("family", c.model_type),
            ("layers", f"{c.num_layers:,}"),
            *((name, f"{size:,}") for name, size in sizes.items() if name not in ("one", "vocab")),
            ("vocabulary", f"{c.vocab_size:,} tokens"),
            ("context", f"{c.context_length:,} tokens"),
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
        held = html.table(["hook point", "dims", "value"], points)
        body = html.table(["", ""], facts) + html.details(f"{len(self.hook_points)} hook points", held)
        return html.shown(f"Model {self.name}", body)


def _spec_of(taps: PassTaps) -> BoundSpec:
    """The spec that taps apply, as far as they say so."""
    return getattr(taps, "spec", BoundSpec())


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """A torch dtype by value or name; ConfigError names the known ones."""
    if isinstance(dtype, torch.dtype) and dtype in DTYPES.values():
        return dtype
    if str(dtype) not in DTYPES:
        raise ConfigError(f"expected dtype to be one of {', '.join(DTYPES)}, found {dtype!r}")
    return DTYPES[str(dtype)]


def as_device(device: str | torch.device | None) -> torch.device:
    """A torch device by value or name; None: CUDA where there is one, else the CPU. ConfigError for one
    that is not there."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
        if place.type == "meta":
            raise RuntimeError("which holds no numbers")
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        reason = str(error).splitlines()[0].partition(". ")[0].rstrip(".")
        if re.match("Expected one of .*device type", reason):
            reason = "no kind of device"
        raise ConfigError(
            f"expected a device such as cpu, cuda or cuda:1 that this machine has, found {str(device)!r} "
            f"({reason}); leave it out to compute where it can"
        ) from error
    return place


def dtype_name(dtype: torch.dtype) -> str:
    """A torch dtype as keys and stores spell it: "float32"."""
    return str(dtype).removeprefix("torch.")


def _refuse_rows_of_batches(spec: BoundSpec, groups: Mapping[int, list[int]]) -> None:
    """A payload with a row per prompt cannot follow prompts into batches of their own length."""
    for point, change in spec.interventions:
        if len(groups) > 1 and payload_rows(point, change) > 1:
            raise InterventionError(
                f"{type(change).__name__} at '{point}' carries one row per prompt "
                f"({payload_rows(point, change)}), but the prompts have {len(groups)} different lengths; run "
                "prompts of each length by themselves"
            )


def _stack_logits(
    parts: Sequence[tuple[list[int], Tensor | None]], want: Logits | None, rows: int, longest: int
) -> Tensor | None:
    if want is None:
        return None
    present = [(chosen, part) for chosen, part in parts if part is not None]
    positions = longest if want.positions is None else len(want.positions)
    return stack_ragged(present, ("batch", "position", "vocab"), rows, positions)

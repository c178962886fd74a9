"""What can be said of a model that transformers computes: found in one traced pass, then put to the test.

Of a checkpoint, in float32 on the CPU, eager, with its own weights:

1. a traced pass shows the layers (stack.py), what adds up in them (parts.py) and the readout (readout.py);
2. passes repeat to the bit, whatever was run between them; a prompt gives the same beside others; hooks that
   only read change no bit;
3. at every length, what leaves a layer enters the next to the bit, and parts add up;
4. a change of what leaves a layer does what the same change of what enters the next does, and moves logits;
5. with other values in a part's place, stream in + parts is still stream out: it is what is added.

A model that fails 1 to 4 is refused with what was seen; parts that fail are left out.

Border: one checkpoint and a few dozen short passes. It cannot see what begins at a longer prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .....store.digest import digest
from .....store.errors import ConfigError
from ...architectures.bridge import BridgeConfig, FoundLayer, Part, Place
from ...architectures.points import HookPoint
from ...hooks.interventions import Add, Replace
from ...hooks.spec import BoundSpec, Capture, HookSpec
from ...hooks.taps import RunTaps
from .network import Bridged
from .parts import Sums, find_sums, is_close
from .readout import find_readout
from .reference import chosen_class, in_one_line, load_reference, version
from .stack import NotBridged, Stack, find_stack
from .trace import Call, traced

__all__ = ["METHOD", "NotBridged", "declared_digest", "probe"]

METHOD = 1
"""Declared version of what is asked of a model: moves when it asks for more."""
ROWS, LENGTH = 2, 7
"""Of the traced prompts: two sizes no axis could mistake for one another."""
LENGTHS = (1, 2, 7, 40, 90)
"""Prompts every model is checked on, as far as its context reaches."""
LONGEST = 1024
"""The longest context of which one prompt is run, to see that it is one."""
BESIDE = 1e-4
"""Largest difference that company in a batch, or another way to make the same change, may make, relative to
the largest logit: float32 passes in other shapes differ by 1e-6 to 1e-5 of it."""
STAMPS = ("transformers_version", "_name_or_path", "_commit_hash", "name_or_path")
CONTEXT_KEYS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length"),
    *("n_ctx", "max_target_positions", "context_length", "max_seqlen", "model_max_length"),
)
UNBOUNDED = 2**31 - 1


def declared_digest(raw: Mapping[str, Any]) -> str:
    """Digest of all a config.json says but for version stamps."""
    import json

    told = {key: value for key, value in raw.items() if key not in STAMPS}
    return digest("declared", json.dumps(told, sort_keys=True))  # as text: it may hold an Infinity


def probe(directory: Path, raw: Mapping[str, Any], files: Sequence[Path]) -> BridgeConfig:
    """What was found of a checkpoint. Raises NotBridged for a model that cannot be relied on, ConfigError or
    WeightsError for one that cannot be loaded.

    files: its safetensors files.
    """
    name, is_causal = chosen_class(raw)
    cpu = torch.device("cpu")
    module = load_reference(directory, raw, name, dtype=torch.float32, device=cpu)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        return _Probe(module, raw, files, name).found(is_causal)


@dataclass(frozen=True)
class _Passed:
    """What a pass gave: logits [B, S, V], and captures by hook point."""

    logits: Tensor
    at: Mapping[HookPoint, Tensor]


class _Probe:
    """A model under examination."""

    def __init__(
        self, module: nn.Module, raw: Mapping[str, Any], files: Sequence[Path], class_name: str
    ) -> None:
        self._module, self._raw, self._files, self._class = module, raw, files, class_name
        table: Any = module.get_input_embeddings() if hasattr(module, "get_input_embeddings") else None
        weight = getattr(table, "weight", None)
        if not isinstance(weight, Tensor) or weight.ndim != 2:
            raise NotBridged("expected one matrix of token embeddings, found none")
        self._tokens = weight.shape[0]
        self._config: Any = module.config

    def found(self, is_causal: bool) -> BridgeConfig:
        """See `probe`."""
        context = self._context()
        size = (ROWS, min(LENGTH, context))
        ids = self._ids(*size, seed=0)
        plain = self._plain(ids)
        calls, _ = traced(self._module, lambda: self._plain(ids), lambda value: _is_state(value, size))
        if self._tokens < plain.shape[-1]:
            ids_left = f"logits of {plain.shape[-1]}"
            raise NotBridged(f"expected embeddings of all tokens, found {self._tokens} of them and {ids_left}")
        stack = find_stack(self._module, calls)
        first = stack.stream(0)
        position_first = tuple(first.shape[:2]) != size
        config = BridgeConfig(
            model_type=str(self._raw["model_type"]),
            class_name=self._class,
            transformers=str(version()),
            declared=declared_digest(self._raw),
            context=context,
            vocab_size=plain.shape[-1],
            embedded_tokens=self._tokens,
            stream_in=stack.taken,
            stream_out=stack.made,
            stream_tail=tuple(first.shape[2:]),
            position_first=position_first,
            next_token=is_causal and not self._looks_ahead(),
            norms="before",
            found=tuple(FoundLayer(call.path) for call in stack.calls),
            remarks=tuple(
                f"{path} is a stack of layers, too; those of {stack.path} alone have hook points"
                for path in stack.others
            ),
        )
        self._require_repeats(config)
        self._require_stream(config)
        config = self._with_parts(config, calls, stack)
        if not position_first and first.ndim == 3:
            readout = find_readout(self._module, calls, stack.last, plain, self._files)
            config = replace(config, readout=readout)
        return replace(config, remarks=(*config.remarks, *_missing(config)))

    # -- passes

    def _ids(self, rows: int, length: int, *, seed: int) -> Tensor:
        """The same random tokens whenever asked, none of which the configuration names: those have meanings."""
        named = {
            value
            for key, value in self._config.get_text_config().to_dict().items()
            if key.endswith("token_id") and isinstance(value, int)
        }
        most = min(self._tokens, int(getattr(self._config.get_text_config(), "vocab_size", self._tokens)))
        usable = torch.tensor([token for token in range(most) if token not in named] or [0])
        chosen = torch.randint(
            0, len(usable), (rows, length), generator=torch.Generator().manual_seed(seed + 1000 * length)
        )
        return usable[chosen]

    def _plain(self, ids: Tensor) -> Tensor:
        """Logits [B, S, V] of the model by itself."""
        try:
            given = self._module(input_ids=ids)
        except Exception as error:
            raise NotBridged(
                f"expected {self._class} to run prompts of {ids.shape[1]} tokens of text alone, found that it "
                f"cannot ({in_one_line(error)})"
            ) from error
        logits = getattr(given, "logits", None)
        if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[:2] != ids.shape:
            shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise NotBridged(
                f"expected logits [prompt, position, token] of prompts {list(ids.shape)}, found {shape}"
            )
        if not bool(torch.isfinite(logits).all()):
            raise NotBridged(f"expected finite logits, found others in prompts of {ids.shape[1]} tokens")
        return logits

    def _run(self, config: BridgeConfig, ids: Tensor, spec: HookSpec) -> _Passed:
        """A pass with hooks."""
        network, held = Bridged(config, self._module), dict[Capture, Tensor]()
        try:
            logits = network.logits(ids, RunTaps(spec.bind(config.hook_points), held.__setitem__))
        finally:
            network.remove()
        return _Passed(logits, {capture.point: value for capture, value in held.items()})

    # -- what holds of all models that are run

    def _context(self) -> int:
        """Tokens of the longest prompt: what the configuration says, and of a short one what runs."""
        text = self._config.get_text_config()
        said = [getattr(text, key, None) for key in CONTEXT_KEYS]
        declared = next((value for value in said if isinstance(value, int) and value > 0), UNBOUNDED)
        if declared > LONGEST or self._runs(declared):
            return declared
        low, high = 1, declared  # a padding id may take the first places of a table of positions
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._runs(middle) else (low, middle)
        return low

    def _runs(self, length: int) -> bool:
        try:
            self._module(input_ids=self._ids(1, length, seed=1))
        except Exception:  # noqa: BLE001 - whatever foreign code raises, it cannot read so much
            return False
        return True

    def _looks_ahead(self) -> bool:
        """Whether a token changes logits of earlier ones."""
        length = min(16, self._context())
        ids = self._ids(1, length, seed=2)
        other = ids.clone()
        other[0, -1] = self._ids(1, length, seed=3)[0, 0]
        one, two = self._plain(ids)[:, :-1], self._plain(other)[:, :-1]
        return one.numel() > 0 and not _agree(one, two)

    def _require_repeats(self, config: BridgeConfig) -> None:
        """Raise NotBridged unless a pass repeats, leaves no trace, and gives the same in company."""
        lengths = [length for length in LENGTHS if length <= config.context]
        before = [self._plain(self._ids(1, length, seed=4)) for length in lengths]
        for length, wanted in reversed(list(zip(lengths, before, strict=True))):
            if not torch.equal(self._plain(self._ids(1, length, seed=4)), wanted):
                raise NotBridged(
                    f"expected a pass to repeat, found other logits of the same {length} tokens at another time"
                )
        rows = self._ids(3, lengths[-1], seed=5)
        together, alone = self._plain(rows), torch.cat([self._plain(row[None]) for row in rows])
        if not _agree(together, alone):
            raise NotBridged("expected prompts to give the same in any company, found that they do not")

    def _require_stream(self, config: BridgeConfig) -> None:
        """Raise NotBridged unless what leaves a layer is what enters the next, whoever reads or changes it."""
        reading = HookSpec().capture("hook_embed", "blocks.*")
        layers = config.num_layers
        for length in (length for length in LENGTHS if length <= config.context):
            ids = self._ids(2, length, seed=6)
            passed = self._run(config, ids, reading)
            if not torch.equal(passed.logits, self._plain(ids)):
                raise NotBridged("expected hooks that read to change nothing, found other logits")
            for layer in range(layers - 1):
                left, entered = HookPoint.resid_post(layer), HookPoint.resid_pre(layer + 1)
                if not torch.equal(passed.at[left], passed.at[entered]):
                    raise NotBridged(
                        f"expected layer {layer + 1} to take what layer {layer} gives, found other states in "
                        f"prompts of {length} tokens"
                    )
        ids = self._ids(1, min(LENGTH, config.context), seed=7)
        push = Add(self._noise(config.hidden_size, self._run(config, ids, reading).at[HookPoint("embed")]))
        plain, moved = self._plain(ids), False
        for layer in sorted({0, layers // 2, layers - 1}):
            after = self._run(config, ids, HookSpec().intervene(HookPoint.resid_post(layer), push)).logits
            moved |= not _agree(after, plain)
            if layer + 1 < layers:
                before = HookSpec().intervene(HookPoint.resid_pre(layer + 1), push)
                if not _agree(after, self._run(config, ids, before).logits):
                    raise NotBridged(
                        f"expected layer {layer + 1} alone to read what layer {layer} gives, found that "
                        "something else reads it, too"
                    )
        if not moved:
            raise NotBridged("expected a change of the layers' states to reach the logits, found that none does")

    def _noise(self, width: int, like: Tensor) -> Tensor:
        seeded = torch.Generator().manual_seed(8)
        return torch.randn(width, generator=seeded) * float(like.std() + 1e-3)

    # -- parts

    def _with_parts(self, config: BridgeConfig, calls: Sequence[Call], stack: Stack) -> BridgeConfig:
        """With those parts of layers that stand every test."""
        sums = [_sums_of(calls, stack, number) for number in range(config.num_layers)]
        norms = {each.norms for each in sums if each is not None}
        if len(norms) != 1 or config.context < 2:
            return config
        parts = [_parts_of(layer.path, each) for layer, each in zip(config.found, sums, strict=True)]
        try:
            found = _having(replace(config, norms=next(iter(norms))), parts)
            found = _having(found, self._named(found))
            stands = self._standing(found, sums)
        except ConfigError:  # what was found is met otherwise in another pass
            return config
        kept = [layer.parts if is_kept else () for layer, is_kept in zip(found.found, stands, strict=True)]
        return _having(found, kept) if any(kept) else config

    def _named(self, config: BridgeConfig) -> list[tuple[Part, ...]]:
        """The parts of each layer by what they do: the one that mixes positions is attn_out, the one that does
        not is mlp_out. None of a layer where that cannot be told.

        Measured by what changes at other positions when one position of a layer's stream changes, whatever the
        layers before it do; of a part that follows another, with that other held.
        """
        ids = self._ids(1, min(LENGTH, config.context), seed=9)
        points = [_points(config, layer) for layer in range(config.num_layers)]
        streams = [HookPoint.resid_pre(layer) for layer in range(config.num_layers)]
        every = [point for each in points for point in each]
        plain = self._run(config, ids, HookSpec().capture(*streams, *every))
        pushed = HookSpec().capture(*every)
        for point in streams:
            x = plain.at[point].clone()
            x[:, 0] += self._noise(config.hidden_size, x)
            pushed.intervene(point, Replace(x))
        free = self._run(config, ids, pushed)
        for each in points:
            for point in each[:1]:
                pushed.intervene(point, Replace(plain.at[point]))
        held = self._run(config, ids, pushed)

        def is_mixing(point: HookPoint, passed: _Passed) -> bool:
            return not is_close(passed.at[point][:, 1:], plain.at[point][:, 1:])

        found = []
        for layer, each in zip(config.found, points, strict=True):
            mixing = [is_mixing(point, held if place else free) for place, point in enumerate(each)]
            kinds = ["attn_out" if mixes else "mlp_out" for mixes in mixing]
            named = [replace(part, kind=kind) for part, kind in zip(layer.parts, kinds, strict=True)]
            found.append(tuple(named) if len(set(kinds)) == len(kinds) else ())
        return found

    def _standing(self, config: BridgeConfig, sums: Sequence[Sums | None]) -> list[bool]:
        """Of each layer whether its parts are what is added: as they are, and with other values in the place
        of either, and of both."""
        points = [_points(config, layer) for layer in range(config.num_layers)]
        every = [point for each in points for point in each]
        reading = HookSpec().capture("blocks.*", *every)
        stands = [bool(each) for each in points]
        for length in (length for length in LENGTHS if length <= config.context):
            ids = self._ids(2, length, seed=10)
            plain = self._run(config, ids, reading)
            kinds = ((), ("attn_out",), ("mlp_out",), ("attn_out", "mlp_out"))
            for changed in kinds if length == LENGTH else kinds[:1]:
                spec = HookSpec().extend(reading)
                for number, point in enumerate(point for point in every if point.kind in changed):
                    like = plain.at[point]
                    noise = torch.randn(like.shape, generator=torch.Generator().manual_seed(number))
                    spec.intervene(point, Replace(noise * float(like.std() + 1e-3)))
                for layer, is_sum in enumerate(self._sums(config, ids, spec, sums)):
                    stands[layer] &= is_sum
        return stands

    def _sums(
        self, config: BridgeConfig, ids: Tensor, spec: HookSpec, sums: Sequence[Sums | None]
    ) -> list[bool]:
        """Of each layer whether its parts add up to what leaves it, or to what its norms take."""
        size, held = (ids.shape[0], ids.shape[1]), list[_Passed]()

        def run() -> None:
            held.append(self._run(config, ids, spec))

        calls: Sequence[Call] = ()
        if config.norms == "of stream":
            calls, _ = traced(self._module, run, lambda value: _is_state(value, size))
        else:
            run()
        entered = [call for call in calls if call.path in {layer.path for layer in config.found}]
        found = []
        for layer, each in enumerate(sums):
            ends = HookPoint.resid_pre(layer), HookPoint.resid_post(layer)
            states = [held[0].at[point] for point in (ends[0], *_points(config, layer))]
            y = held[0].at[ends[1]]
            if each is None or len(states) == 1:
                found.append(False)
            elif each.through:
                inside = [call for call in calls if entered[layer] in call.above]
                found.append(_norms_take(inside, each, states, y))
            else:
                found.append(is_close(sum(states[1:], states[0]), y, torch.stack([*states, y])))
        return found


def _norms_take(inside: Sequence[Call], sums: Sums, states: Sequence[Tensor], y: Tensor) -> bool:
    """Whether in the calls of a layer the first norm takes x + a, and the second what the first gives + m, and
    gives y."""
    x, first, second = states
    (one, one_slot), (other, other_slot) = sums.through
    met = [call for call in inside if call.path == one.path]
    last = [call for call in inside if call.path == other.path]
    if len(met) != 1 or len(last) != 1 or not met[0].made:
        return False
    taken, middle = met[0].taken[one_slot], next(iter(met[0].made.values()))
    return (
        is_close(taken, _hidden(x + first, taken))
        and is_close(last[0].taken[other_slot], middle + _hidden(second, middle))
        and any(torch.equal(made, _hidden(y, made)) for made in last[0].made.values())
    )


def _points(config: BridgeConfig, layer: int) -> list[HookPoint]:
    """Of the parts of a layer, as they end."""
    return [HookPoint(part.kind, layer) for part in config.found[layer].parts]


def _having(config: BridgeConfig, parts: Sequence[tuple[Part, ...]]) -> BridgeConfig:
    """With these parts of each layer."""
    found = (replace(layer, parts=each) for layer, each in zip(config.found, parts, strict=True))
    return replace(config, found=tuple(found))


def _hidden(ours: Tensor, like: Tensor) -> Tensor:
    return (ours if ours.shape[:2] == like.shape[:2] else ours.transpose(0, 1)).reshape(like.shape)


def _sums_of(calls: Sequence[Call], stack: Stack, number: int) -> Sums | None:
    """How a layer of the traced pass adds up."""
    layer = stack.calls[number]
    inside = [call for call in calls if layer in call.above]
    return find_sums(inside, layer.taken[stack.taken], layer.made[stack.made])


def _parts_of(layer: str, sums: Sums | None) -> tuple[Part, ...]:
    """As they come: the first is attn_out until it is known which mixes."""
    kinds = ("attn_out", "mlp_out")
    return tuple(
        Part(kind, Place(call.path.removeprefix(f"{layer}."), slot))
        for kind, (call, slot) in zip(kinds, () if sums is None else sums.parts, strict=False)
    )


def _missing(config: BridgeConfig) -> list[str]:
    """What a found model cannot do, in lines."""
    lines = ["inside of layers nothing is offered: no heads, patterns, neurons or states"]
    without = [number for number, layer in enumerate(config.found) if not layer.parts]
    if without:
        which = "any layer" if len(without) == config.num_layers else f"layers {', '.join(map(str, without))}"
        lines.append(f"no attn_out and mlp_out of {which}: nothing was found that adds up to the stream")
    if config.norms == "of stream":
        lines.append("layers norm the stream itself, which is then no sum of what was added")
    if config.readout is None:
        lines.append("no logit lens: the logits are no final norm and head of the last stream")
    if len(config.stream_tail) > 1:
        sizes = " x ".join(map(str, config.stream_tail))
        lines.append(f"the stream is {sizes} numbers at each position, which are hidden side by side")
    if not config.predicts_next:
        lines.append("no generation: logits are not of the next token")
    return lines


def _is_state(value: Tensor, size: tuple[int, int]) -> bool:
    fits = tuple(value.shape[:2]) in (size, size[::-1])
    return value.is_floating_point() and value.ndim >= 3 and fits


def _agree(one: Tensor, other: Tensor) -> bool:
    return bool(float((one - other).abs().max()) <= BESIDE * float(other.abs().max()))

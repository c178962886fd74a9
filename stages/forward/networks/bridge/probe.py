"""What can be said of a model that transformers computes: found in one traced pass, then put to the test.

Of a checkpoint, in float32 on the CPU, eager, with its own weights:

1. a traced pass shows the layers (stack.py), what adds up in them (adding.py) and the readout (readout.py);
2. passes repeat to the bit, whatever was run between them; a prompt gives the same beside others; hooks that
   only read change no bit;
3. at every length, what leaves a layer enters the next to the bit, and parts add up;
4. a change of what leaves a layer does what the same change of what enters the next does, and moves logits;
5. with other values in a part's place, stream in + parts is still stream out: it is what is added.

A model that fails 1 to 4 is refused with what was seen; parts that fail are left out.

Border: one checkpoint and some fifty short passes. It cannot see what begins at a longer prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...architectures.bridge.config import BridgeConfig, declared_digest
from ...architectures.bridge.found import FoundLayer
from ...architectures.points import HookPoint
from ...hooks.interventions import Add, Replace
from ...hooks.spec import HookSpec
from .adding import with_parts
from .examined import LENGTHS, Examined, agree, noise
from .readout import find_readout
from .reference import chosen_class, load_reference, version
from .stack import NotBridged, find_stack

__all__ = ["NotBridged", "probe"]

ROWS, LENGTH = 2, 7
"""Of the traced prompts: two sizes no axis could mistake for one another."""
LONGEST = 1024
"""The longest context of which one prompt is run, to see that it is one."""
CONTEXT_KEYS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length"),
    *("n_ctx", "max_target_positions", "context_length", "max_seqlen", "model_max_length"),
)
UNBOUNDED = 2**31 - 1


def probe(directory: Path, raw: Mapping[str, Any], files: Sequence[Path]) -> BridgeConfig:
    """What was found of a checkpoint. Raises NotBridged for a model that cannot be relied on, ConfigError or
    WeightsError for one that cannot be loaded.

    raw: config.json. files: its safetensors files.
    """
    name, is_causal = chosen_class(raw)

    def load() -> Examined:
        how: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
        return Examined(load_reference(directory, raw, name, **how))

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = load()
        fresh = model.settings()
        model.plain(model.ids(1, 1, seed=11))
        settled = model.settings()
        config = _found(model, raw, name, is_causal, files)
        for length in (1, min(config.context, LONGEST)):
            model.plain(model.ids(1, length, seed=11))
            if changed := _changed(settled, model.settings()):
                raise NotBridged(
                    f"expected passes that leave the model as it is, found {changed} by one of {length} "
                    "tokens"
                )
        if changed := _changed(fresh, settled):
            _require_settled(model, load(), config.context, changed)
        return replace(config, remarks=(*config.remarks, *_missing(config)))


def _found(
    model: Examined, raw: Mapping[str, Any], name: str, is_causal: bool, files: Sequence[Path]
) -> BridgeConfig:
    """See `probe`."""
    context = _context(model)
    ids = model.ids(ROWS, min(LENGTH, context), seed=0)
    logits = model.plain(ids)
    if model.tokens < logits.shape[-1]:
        raise NotBridged(
            f"expected an embedding of every token, found {model.tokens} and logits of {logits.shape[-1]}"
        )
    calls = model.traced(ids, lambda: model.plain(ids))
    stack = find_stack(model.module, calls)
    first = stack.stream(0)
    config = BridgeConfig(
        model_type=str(raw["model_type"]),
        class_name=name,
        transformers=str(version()),
        declared=declared_digest(raw),
        context=context,
        vocab_size=logits.shape[-1],
        embedded_tokens=model.tokens,
        stream_in=stack.taken,
        stream_out=stack.made,
        stream_tail=tuple(first.shape[2:]),
        position_first=first.shape[:2] != ids.shape,
        next_token=is_causal and not _looks_ahead(model, context),
        norms="before",
        found=tuple(FoundLayer(call.path) for call in stack.calls),
        remarks=tuple(
            f"{path} is a stack of layers, too; those of {stack.path} alone have hook points"
            for path in stack.others
        ),
    )
    _require_repeats(model, config)
    _require_stream(model, config)
    _require_reached(model, config)
    if _reads_beside(model, config):
        told = "layers read something of the prompt beside the stream: its last state is not all there is"
        config = replace(config, remarks=(*config.remarks, told))
    config = with_parts(model, config, calls, stack)
    if config.position_first or len(config.stream_tail) > 1:
        return config
    return replace(config, readout=find_readout(model.module, calls, stack.last, logits, files))


def _context(model: Examined) -> int:
    """Tokens of the longest prompt: what the configuration says, and of a short one what runs."""
    text = model.config.get_text_config()
    said = [getattr(text, key, None) for key in CONTEXT_KEYS]
    declared = next((value for value in said if isinstance(value, int) and value > 0), UNBOUNDED)
    if declared > LONGEST or model.runs(declared):
        return declared
    low, high = 1, declared  # a padding id may take the first places of a table of positions
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if model.runs(middle) else (low, middle)
    return low


def _looks_ahead(model: Examined, context: int) -> bool:
    """Whether a token changes logits of earlier ones."""
    length = min(16, context)
    ids = model.ids(1, length, seed=2)
    other = ids.clone()
    other[0, -1] = next(token for token in model.ids(1, 64, seed=3)[0] if token != ids[0, -1])
    one, two = model.plain(ids)[:, :-1], model.plain(other)[:, :-1]
    return one.numel() > 0 and not agree(one, two)


def _require_repeats(model: Examined, config: BridgeConfig) -> None:
    """Raise NotBridged unless a pass repeats, leaves no trace, and gives the same in company."""
    lengths = [length for length in LENGTHS if length <= config.context]
    before = [model.plain(model.ids(1, length, seed=4)) for length in lengths]
    for length, wanted in reversed(list(zip(lengths, before, strict=True))):
        if not torch.equal(model.plain(model.ids(1, length, seed=4)), wanted):
            raise NotBridged(
                f"expected a pass to repeat, found other logits of the same {length} tokens the next time"
            )
    rows = model.ids(3, lengths[-1], seed=5)
    if not agree(model.plain(rows), torch.cat([model.plain(row[None]) for row in rows])):
        raise NotBridged("expected prompts to give the same in any company, found that they do not")


def _require_stream(model: Examined, config: BridgeConfig) -> None:
    """Raise NotBridged unless what leaves a layer enters the next, in prompts of every length, and hooks that
    read it change nothing."""
    reading = HookSpec().capture("hook_embed", "blocks.*")
    for length in (length for length in LENGTHS if length <= config.context):
        ids = model.ids(2, length, seed=6)
        passed = model.hooked(config, ids, reading)
        if not torch.equal(passed.logits, model.plain(ids)):
            raise NotBridged("expected hooks that read to change nothing, found other logits")
        for layer in range(config.num_layers - 1):
            left, entered = HookPoint.resid_post(layer), HookPoint.resid_pre(layer + 1)
            if not torch.equal(passed.at[left], passed.at[entered]):
                raise NotBridged(
                    f"expected layer {layer + 1} to take what layer {layer} gives, found other states in "
                    f"prompts of {length} tokens"
                )


def _require_reached(model: Examined, config: BridgeConfig) -> None:
    """Raise NotBridged unless what a layer gives is read by the next alone, and changes of it reach the
    logits."""
    ids, layers = model.ids(1, min(LENGTH, config.context), seed=7), config.num_layers
    plain, moved = model.plain(ids), False
    streams = model.hooked(config, ids, HookSpec().capture("blocks.*.hook_resid_post"))
    for layer in sorted({0, layers // 2, layers - 1}):
        x = streams.at[HookPoint.resid_post(layer)]
        push = Add(noise(x.shape[2:], x))
        after = model.hooked(config, ids, HookSpec().intervene(HookPoint.resid_post(layer), push)).logits
        moved |= not agree(after, plain)
        if layer + 1 == layers:
            continue
        before = HookSpec().intervene(HookPoint.resid_pre(layer + 1), push)
        if not agree(after, model.hooked(config, ids, before).logits):
            raise NotBridged(
                f"expected layer {layer + 1} alone to read what layer {layer} gives, found that something "
                "else reads it, too"
            )
    if not moved:
        raise NotBridged("expected changes of the stream to reach the logits, found that none does")


def _reads_beside(model: Examined, config: BridgeConfig) -> bool:
    """Whether the last layer, given all of another prompt's stream, still gives something else than for that
    prompt: an encoder's states or embeddings of its own come to it by other ways."""
    length, entering = min(LENGTH, config.context), HookPoint.resid_pre(config.num_layers - 1)
    one, other = (model.ids(1, length, seed=seed) for seed in (13, 14))
    wanted = model.hooked(config, other, HookSpec().capture(entering))
    given = HookSpec().intervene(entering, Replace(wanted.at[entering]))
    return not agree(model.hooked(config, one, given).logits, wanted.logits)


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """What passes have set that later ones may read, in words; empty for nothing."""
    changed = [name for name in before if name in after and before[name] != after[name]]
    return "".join(f"{name} set from {before[name]!r} to {after[name]!r}" for name in changed[:1])


def _require_settled(model: Examined, fresh: Examined, context: int, changed: str) -> None:
    """Raise NotBridged unless the first pass of a model gives what later ones do, though it sets something:
    else a long prompt would be read in one way after a short one, and in another before it."""
    ids = model.ids(1, min(context, LONGEST), seed=12)
    if not agree(fresh.plain(ids), model.plain(ids)):
        raise NotBridged(
            f"expected passes that leave the model as it is, found {changed} by a short prompt, after which "
            f"one of {ids.shape[1]} tokens gives something else"
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
    if not config.next_token:
        lines.append("no generation: logits are not of the next token")
    return lines

"""Probe a model that transformers computes: find its structure in a traced pass, then test it.

The tests run on a checkpoint in float32 on the CPU, with eager attention and its own weights:

1. a traced pass shows the layers (stack.py), their added parts (adding.py) and the readout (readout.py);
2. passes repeat to the bit, whatever ran between them; a prompt gives equal results in any batch; hooks that
only
   read change no bit;
3. at every tested length, the output of a layer is the input of the next to the bit, and parts sum up;
4. a change of a layer's output has the same effect as that change of the next layer's input, and moves
logits; 5. with random values in place of a part, stream in + parts is still stream out.

A model that fails 1 to 4 is refused with the observation; parts that fail 5 are left out.

Border: one checkpoint and about fifty short passes. Behaviour that starts at longer prompts is not detected.
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
"""Number and length of the traced prompts, different so that axes can be told apart."""
LONGEST = 1024
"""Up to this context length, a prompt of full length is run to confirm the declared context."""
CONTEXT_KEYS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length"),
    *("n_ctx", "max_target_positions", "context_length", "max_seqlen", "model_max_length"),
)
"""Settings of a config that may declare the context length, in order of preference."""
UNBOUNDED = 2**31 - 1
"""Context length of models that declare none."""


def probe(directory: Path, raw: Mapping[str, Any], files: Sequence[Path]) -> BridgeConfig:
    """Find the structure of a model that transformers computes, by passes through its checkpoint, and test
    it.

    Arguments:
        directory: folder of the checkpoint.
        raw: contents of its config.json.
        files: safetensors files of the checkpoint.

    Returns:
        Architecture of the model, with the hook points that passed the tests.

    Raises:
        NotBridged: the model fails a test.
        ConfigError, WeightsError: the model cannot be loaded.
    """
    name, is_causal = chosen_class(raw)

    def load() -> Examined:
        cpu = torch.device("cpu")
        return Examined(load_reference(directory, raw, name, dtype=torch.float32, device=cpu))

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
                    f"expected passes that do not change the model's state, found {changed} by a pass over "
                    f"{length} tokens"
                )
        if changed := _changed(fresh, settled):
            _require_settled(model, load(), config.context, changed)
        return replace(config, remarks=(*config.remarks, *_missing(config)))


def _found(
    model: Examined, raw: Mapping[str, Any], name: str, is_causal: bool, files: Sequence[Path]
) -> BridgeConfig:
    """Structure of a model, found in a traced pass and tested.

    Arguments:
        model: the model being probed.
        raw: contents of its config.json.
        name: name of its class in transformers.
        is_causal: whether transformers lists the class as a causal language model.
        files: safetensors files of the checkpoint.
    """
    context = _context(model)
    ids = model.ids(ROWS, min(LENGTH, context), seed=0)
    logits = model.plain(ids)
    if model.tokens < logits.shape[-1]:
        raise NotBridged(
            f"expected an embedding for each of the {logits.shape[-1]} tokens that have logits, found "
            f"{model.tokens} embeddings"
        )
    calls = model.traced(ids, lambda: model.plain(ids))
    stack = find_stack(model.module, calls)
    entering = stack.stream(0)
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
        stream_tail=tuple(entering.shape[2:]),
        position_first=entering.shape[:2] != ids.shape,
        next_token=is_causal and not _looks_ahead(model, context),
        norms="before",
        found=tuple(FoundLayer(call.path) for call in stack.calls),
        remarks=tuple(
            f"{path} is a list of layers, too; only the layers in {stack.path} have hook points"
            for path in stack.others
        ),
    )
    _require_repeats(model, config)
    _require_stream(model, config)
    _require_reached(model, config)
    if _reads_beside(model, config):
        remark = (
            "layers also read something else of the prompt than the residual stream, so replacing the stream "
            "of the last layer does not give the other prompt's logits"
        )
        config = replace(config, remarks=(*config.remarks, remark))
    config = with_parts(model, config, calls, stack)
    if config.position_first or len(config.stream_tail) > 1:
        return config
    return replace(config, readout=find_readout(model.module, calls, stack.last, logits, files))


def _context(model: Examined) -> int:
    """Context length in tokens: the length that the config declares or, if prompts of that length fail, the
    largest length that runs."""
    text_config = model.config.get_text_config()
    settings = [getattr(text_config, key, None) for key in CONTEXT_KEYS]
    declared = next((value for value in settings if isinstance(value, int) and value > 0), UNBOUNDED)
    if declared > LONGEST or model.runs(declared):
        return declared
    # Fewer tokens than declared can run if the table of positions reserves rows for padding (RoBERTa).
    low, high = 1, declared
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if model.runs(middle) else (low, middle)
    return low


def _looks_ahead(model: Examined, context: int) -> bool:
    """Whether a change of the last token changes logits at earlier positions (no causal mask)."""
    length = min(16, context)
    ids = model.ids(1, length, seed=2)
    changed_ids = ids.clone()
    changed_ids[0, -1] = next(token for token in model.ids(1, 64, seed=3)[0] if token != ids[0, -1])
    original, changed = model.plain(ids)[:, :-1], model.plain(changed_ids)[:, :-1]
    return original.numel() > 0 and not agree(original, changed)


def _require_repeats(model: Examined, config: BridgeConfig) -> None:
    """Raise NotBridged unless passes repeat to the bit, leave no state behind, and agree with batched
    passes."""
    lengths = [length for length in LENGTHS if length <= config.context]
    before = [model.plain(model.ids(1, length, seed=4)) for length in lengths]
    for length, logits in reversed(list(zip(lengths, before, strict=True))):
        if not torch.equal(model.plain(model.ids(1, length, seed=4)), logits):
            raise NotBridged(
                f"expected two passes over the same {length} tokens to give the same logits, found different "
                "logits"
            )
    rows = model.ids(3, lengths[-1], seed=5)
    if not agree(model.plain(rows), torch.cat([model.plain(row[None]) for row in rows])):
        raise NotBridged(
            "expected a prompt to have the same logits in a batch as alone, found that they depend on the "
            "other prompts of the batch"
        )


def _require_stream(model: Examined, config: BridgeConfig) -> None:
    """Raise NotBridged unless the output of each layer is the input of the next at every length, and
    capturing changes no bit."""
    reading = HookSpec().capture("hook_embed", "blocks.*")
    for length in (length for length in LENGTHS if length <= config.context):
        ids = model.ids(2, length, seed=6)
        passed = model.hooked(config, ids, reading)
        if not torch.equal(passed.logits, model.plain(ids)):
            raise NotBridged(
                "expected the same logits with hooks that only capture as without hooks, found different "
                f"logits of prompts of {length} tokens"
            )
        for layer in range(config.num_layers - 1):
            output, next_input = HookPoint.resid_post(layer), HookPoint.resid_pre(layer + 1)
            if not torch.equal(passed.at[output], passed.at[next_input]):
                raise NotBridged(
                    f"expected the output of layer {layer} to be the input of layer {layer + 1}, found "
                    f"different states in prompts of {length} tokens"
                )


def _require_reached(model: Examined, config: BridgeConfig) -> None:
    """Raise NotBridged unless only the next layer reads a layer's output, and noise added to it changes the
    logits.

    Tried for the first, the middle and the last layer.
    """
    ids, layers = model.ids(1, min(LENGTH, config.context), seed=7), config.num_layers
    plain, moved = model.plain(ids), False
    streams = model.hooked(config, ids, HookSpec().capture("blocks.*.hook_resid_post"))
    for layer in sorted({0, layers // 2, layers - 1}):
        x = streams.at[HookPoint.resid_post(layer)]
        push = Add(noise(x.shape[2:], x))
        # Noise added to the output of a layer, and then the same noise to the input of the next layer.
        after = model.hooked(config, ids, HookSpec().intervene(HookPoint.resid_post(layer), push)).logits
        moved |= not agree(after, plain)
        if layer + 1 == layers:
            continue
        before = HookSpec().intervene(HookPoint.resid_pre(layer + 1), push)
        if not agree(after, model.hooked(config, ids, before).logits):
            raise NotBridged(
                f"expected only layer {layer + 1} to read the output of layer {layer}, found that another "
                "module reads it, too"
            )
    if not moved:
        raise NotBridged(
            "expected noise added to the output of a layer to change the logits, found that the logits stay "
            "the same for every layer that was tried"
        )


def _reads_beside(model: Examined, config: BridgeConfig) -> bool:
    """Whether the last layer reads something besides the stream, such as an encoder's states or embeddings:
    with the stream of another prompt at its input, logits differ from those of that prompt."""
    length, entering = min(LENGTH, config.context), HookPoint.resid_pre(config.num_layers - 1)
    ids, donor_ids = (model.ids(1, length, seed=seed) for seed in (13, 14))
    donor = model.hooked(config, donor_ids, HookSpec().capture(entering))
    patch = HookSpec().intervene(entering, Replace(donor.at[entering]))
    return not agree(model.hooked(config, ids, patch).logits, donor.logits)


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Text about the first setting (`Examined.settings`) that passes have changed; "" if they changed
    none."""
    changed = [name for name in before if name in after and before[name] != after[name]]
    return "".join(f"{name} changed from {before[name]!r} to {after[name]!r}" for name in changed[:1])


def _require_settled(model: Examined, fresh: Examined, context: int, changed: str) -> None:
    """Raise NotBridged if the first pass changes state that later passes read: a long prompt would then give
    different results before and after a short one."""
    ids = model.ids(1, min(context, LONGEST), seed=12)
    if not agree(fresh.plain(ids), model.plain(ids)):
        raise NotBridged(
            f"expected passes that do not change the model's state, found {changed} by a short prompt, after "
            f"which a prompt of {ids.shape[1]} tokens has different logits"
        )


def _missing(config: BridgeConfig) -> list[str]:
    """Features that the probed model lacks behind the bridge, one line of text each."""
    lines = ["no hook points inside of layers: no heads, patterns, neurons or states"]
    without = [number for number, layer in enumerate(config.found) if not layer.parts]
    if without:
        layers = (
            "any layer" if len(without) == config.num_layers else f"layers {', '.join(map(str, without))}"
        )
        lines.append(
            f"no hook points attn_out and mlp_out in {layers}: no module outputs add up to its change of the "
            "stream"
        )
    if config.norms == "of stream":
        lines.append("layers normalise the residual stream itself, so it is no sum of their outputs")
    if config.readout is None:
        lines.append("no logit lens: no final norm and head give the logits from the last layer")
    if len(config.stream_tail) > 1:
        sizes = " x ".join(map(str, config.stream_tail))
        lines.append(f"the stream has {sizes} numbers at each position, side by side on the axis hidden")
    if not config.next_token:
        lines.append("no text generation: the logits at a position do not predict the next token")
    return lines

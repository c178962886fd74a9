"""Checks a model of unknown family against transformers, before mizarr's own decoder runs it.

An architecture inferred from config.json and tensors (autoconfig.py) also fits families that compute
something else: no tensor and no key says whether RoPE rotates adjacent dimensions or halves, or whether
attention is bidirectional. So the checkpoint runs once in transformers and once in the decoder, in float32
on the CPU with its own weights, and logits and residual stream are compared. The verdict is remembered under
a digest of everything compared.

A comparison at some prompt lengths says nothing about rules for longer prompts. Windows, chunks and the
lengths at which RoPE changes are in the config: the check uses a prompt longer than the largest of them, and
refuses a checkpoint if that would be too long. It cannot notice a length that is only in the family's code.

Torch and transformers are imported when a check runs, not to read a remembered verdict.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....store.digest import digest
from ....store.errors import ConfigError, MissingExtra
from ....store.index import layout_verdicts
from ..architectures.architecture import Architecture
from ..networks.bridge.reference import quiet, witness

if TYPE_CHECKING:
    from torch import Tensor

    from ..hooks.spec import Capture

LENGTHS = (1, 2, 37, 70, 300)
"""Prompt lengths of every check, as far as the context of the model allows."""
FARTHEST = 2048
"""The longest window, chunk or context that is checked; eager attention takes too long beyond."""
BEYOND = 64
"""Positions checked after a length at which the computation may change."""
TOLERANCE = 1e-4
"""Largest allowed difference relative to the largest entry; float32 passes differ by 1e-6 to 1e-5 of it."""
METHOD = 1
"""Declared version of the check; moves when it becomes stricter, which invalidates earlier verdicts."""
NO_LENGTHS = frozenset(
    """
    hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size
    vocab_size max_position_embeddings max_window_layers rope_theta initializer_range query_pre_attn_scalar
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id
    decoder_start_token_id pretraining_tp max_length
    """.split()  # noqa: SIM905 - twenty words read better as words
)
"""Config keys whose numbers are no prompt lengths."""
FIXED_ROPE = ("default", "linear", "llama3")
"""RoPE schemes whose angles do not depend on the prompt length; `original_max_position_embeddings` only sets
their frequencies."""


@dataclass(frozen=True)
class Verdict:
    """Whether mizarr's decoder and transformers compute the same numbers for a checkpoint."""

    agrees: bool | None
    """Whether both passes agree; None if the check could not run."""
    told: str
    """How closely they agree, or what differs or is missing, for messages."""

    def require(self, model_type: str) -> None:
        """Raise ConfigError, or MissingExtra if transformers is not installed, unless the layout agrees."""
        if self.agrees:
            return
        from ..architectures.known import KNOWN

        error_class = MissingExtra if witness() is None else ConfigError
        raise error_class(
            f"{model_type!r} is a family unknown to mizarr, so its numbers must first agree with those of "
            f"transformers; {self.told}. To let transformers run it: backend='transformers', or --backend "
            "transformers. If you know that it is computed like a Llama with this config.json: "
            "trust_layout=True, or --trust-layout, which marks its results. Supported families: "
            f"{', '.join(sorted(KNOWN))}"
        )


@dataclass(frozen=True)
class LayoutCase:
    """Checkpoint of an unknown family, with the inferred architecture to compare with transformers."""

    directory: Path
    """Folder of the checkpoint."""
    weight_files: tuple[Path, ...]
    """Its weight files."""
    raw: Mapping[str, Any]
    """Contents of config.json."""
    config: Architecture
    """The inferred architecture."""
    weights: str
    """Digest of the weight files."""
    forward: str
    """Declared version of mizarr's forward pass."""

    @property
    def digest(self) -> str:
        """Digest of everything the two passes read, except the version of transformers."""
        raw = json.dumps(dict(self.raw))  # as text: a config may contain Infinity, which has no digest
        return digest("layout", METHOD, self.forward, self.weights, raw, self.config.digest)

    def remembered(self) -> Verdict | None:
        """The verdict of an earlier check; None if there is none. Never imports torch.

        It must be of the installed version of transformers; without transformers, an agreement with any
        version counts.
        """
        texts = layout_verdicts().find(self.digest)
        installed = witness()
        if installed is not None:
            return _verdict_from_json(texts.get(installed))
        verdicts = [verdict for text in texts.values() if (verdict := _verdict_from_json(text)) is not None]
        # An earlier agreement counts, as this forward pass has not changed since; a refusal may be out of
        # date.
        return next((verdict for verdict in verdicts if verdict.agrees), None)

    def verdict(self) -> Verdict:
        """Return the stored result of the check, or run the check and store its result.

        A check that could not run is not stored, because its obstacle may be removed.
        """
        verdict = self.remembered()
        if verdict is not None:
            return verdict
        installed = witness()
        if installed is None:
            return Verdict(None, "expected transformers, found none installed; pip install 'mizarr[check]'")
        verdict = self._check(installed)
        if verdict.agrees is not None:
            text = json.dumps({"agrees": verdict.agrees, "told": verdict.told})
            layout_verdicts().add(self.digest, installed, text)
        return verdict

    def _check(self, installed: str) -> Verdict:
        """Run both models at every length; transformers first, so that one model is in memory at a time."""
        import torch

        # Loading a model in transformers may draw random numbers: the caller's generator must not move.
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            try:
                with quiet():
                    declared = _config_of_transformers(self.directory, self.raw)
                    turns = turning_points(self.config, {**self.raw, **declared})
                    lengths = lengths_to_check(self.config, turns)
                    expected = self._transformers_outputs(lengths)
            except CannotCheck as error:
                return Verdict(None, str(error))
            except Exception as error:  # noqa: BLE001 - code of the hub may raise anything
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                return Verdict(
                    None, f"expected {installed} to run the checkpoint, found that it cannot ({reason})"
                )
            run = self._decoder()
            largest = 0.0
            for length, (expected_logits, expected_states) in zip(lengths, expected, strict=True):
                logits, states = run(self._ids(length))
                for label, reference, value in (
                    ("logits", expected_logits, logits),
                    ("residual stream", expected_states, states),
                ):
                    relative = difference(reference, value)
                    largest = max(largest, relative)
                    if not relative <= TOLERANCE:  # not `>`, so that NaN is a disagreement
                        return Verdict(
                            False,
                            f"expected {label} that differ from those of {installed} by at most "
                            f"{TOLERANCE:g} of the largest value, found a difference of {relative:.2g} for a "
                            f"prompt of {length} tokens",
                        )
        listed = ", ".join(map(str, lengths))
        return Verdict(
            True,
            f"differs from {installed} by at most {largest:.1g} of the largest value, for prompts of "
            f"{listed} tokens",
        )

    def _ids(self, length: int) -> Tensor:
        """Random token ids [1, position]; the same at every call."""
        import torch

        # Seeded, so that both models get the same prompt although they run one after the other.
        seeded = torch.Generator().manual_seed(length)
        return torch.randint(0, self.config.vocab_size, (1, length), generator=seeded)

    def _transformers_outputs(self, lengths: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Run the checkpoint in transformers, in float32 with eager attention, on one prompt of each length.

        No code from the hub runs, and the network is not used.

        Returns:
            (logits, residual stream entering each layer) of each prompt, at the last `BEYOND` positions.
        """
        import torch
        from transformers import AutoModelForCausalLM

        kind: Any = AutoModelForCausalLM
        model = kind.from_pretrained(
            str(self.directory),
            local_files_only=True,
            # Code from the hub would run with the user's rights.
            trust_remote_code=False,
            dtype=torch.float32,
            attn_implementation="eager",
        ).eval()
        outputs = []
        for length in lengths:
            output = model(input_ids=self._ids(length), use_cache=False, output_hidden_states=True)
            # The last of hidden_states is behind the final norm, and no residual stream.
            states = torch.stack([_last_positions(state) for state in output.hidden_states[:-1]])
            outputs.append((_last_positions(output.logits), states))
        return outputs

    def _decoder(self) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Build mizarr's decoder, as a function of token ids.

        It returns (logits, residual stream entering each layer), both at the last `BEYOND` positions.
        """
        import torch

        from ..hooks.spec import HookSpec
        from ..hooks.taps import RunTaps
        from ..hooks.wants import ALL_LOGITS
        from ..networks.table import build
        from ..passes.plain import forward

        config, cpu = self.config, torch.device("cpu")
        network = build(config, self.weight_files, dtype=torch.float32, device=cpu)
        spec = HookSpec().capture("blocks.*.hook_resid_pre").bind(config.hook_points, config.model_type)

        @torch.no_grad()
        def run(ids: Tensor) -> tuple[Tensor, Tensor]:
            states: dict[Capture, Tensor] = {}

            def sink(capture: Capture, state: Tensor) -> None:
                states[capture] = _last_positions(state)

            logits = forward(network, ids, RunTaps(spec, sink), ALL_LOGITS)
            assert logits is not None
            return _last_positions(logits), torch.stack([states[capture] for capture in spec.captures])

        return run


class CannotCheck(Exception):
    """transformers cannot run the checkpoint, or a prompt that is long enough; the message says why."""


def turning_points(config: Architecture, declared: Mapping[str, Any]) -> dict[str, int]:
    """Prompt lengths beyond which a forward pass may compute differently, e.g. the size of a window.

    These are the windows and RoPE contexts that the decoder knows, and every integer of the config that could
    be a length: an unknown family may have a chunk size or a scaling under a name of its own.

    Arguments:
        config: the inferred architecture.
        declared: the config as transformers reads it, with its defaults.

    Returns:
        Description or config key -> length in tokens.
    """
    windows = [layer.mixer.window for layer in config.layers]
    points = [(f"window {window}", window) for window in windows if window is not None]
    heads = [config.heads_of(layer) for layer in range(config.num_layers)]
    ropes = [head.rope for head in heads if head is not None and head.rope is not None]
    changing = [rope for rope in ropes if rope.scheme not in FIXED_ROPE]
    points += [
        (f"original context of {rope.scheme} rope", rope.original_max_position_embeddings)
        for rope in changing
        if rope.original_max_position_embeddings is not None
    ]
    points += [
        (key, number)
        for key, number in _whole_numbers(declared)
        if key.rpartition(".")[2] not in NO_LENGTHS
        and (changing or not key.endswith("original_max_position_embeddings"))
    ]
    lengths: dict[str, int] = {}
    for key, number in points:
        if 1 < number < config.context_length:  # no prompt is longer than the context
            # Lists give several numbers under one key; the largest is the farthest turning point.
            lengths[key] = max(number, lengths.get(key, 0))
    return lengths


def lengths_to_check(config: Architecture, turns: Mapping[str, int]) -> list[int]:
    """Prompt lengths to compare, ascending, the longest beyond every turning point.

    Includes the whole context if that is at most `FARTHEST`.

    Arguments:
        config: the inferred architecture.
        turns: name -> length at which the computation may change.

    Raises:
        CannotCheck: for a turning point beyond `FARTHEST`.
    """
    too_far = {key: number for key, number in turns.items() if number > FARTHEST}
    if too_far:
        listed = ", ".join(f"{key}={number}" for key, number in sorted(too_far.items()))
        raise CannotCheck(
            f"expected the computation to change at lengths up to {FARTHEST} tokens only, the longest prompt "
            f"that is compared, found {listed} in a model for prompts of up to {config.context_length} tokens"
        )
    context = config.context_length
    lengths = [*LENGTHS]
    if turns:
        lengths.append(max(turns.values()) + BEYOND)
    if context <= FARTHEST:
        lengths.append(context)
    return sorted({min(length, context) for length in lengths})


def difference(expected: Tensor, value: Tensor) -> float:
    """Largest absolute difference, divided by the largest absolute value of `expected`.

    Arguments:
        expected: values of the reference.
        value: values to compare.

    Returns:
        The ratio; infinity for tensors of different shape, NaN where one of them has NaN.
    """
    if expected.shape != value.shape:
        return float("inf")
    largest_difference, scale = float((expected - value).abs().max()), float(expected.abs().max())
    # Relative to the scale alone: an absolute term would hide every difference of a head with small values.
    return largest_difference / scale if scale else largest_difference


def _config_of_transformers(directory: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The config as transformers reads it, with defaults for missing keys.

    Raises:
        CannotCheck: if transformers does not list the model_type as a causal language model.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = raw.get("model_type")
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise CannotCheck(
            f"expected {witness()} to have a causal language model for the model_type in config.json, to "
            f"compare results with, found none for {model_type!r}"
        )
    config = AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    return dict(config.to_dict())


def _last_positions(values: Tensor) -> Tensor:
    """The last `BEYOND` positions of [1, position, width], as float32."""
    # All positions of a long prompt would take as much memory as the weights.
    return values[:, -BEYOND:].float()


def _whole_numbers(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int]]:
    for key, value in section.items():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Mapping):
                yield from _whole_numbers(item, f"{prefix}{key}.")
            # Some writers of JSON write 4096 as 4096.0.
            elif (isinstance(item, int) and not isinstance(item, bool)) or (
                isinstance(item, float) and item.is_integer()
            ):
                yield f"{prefix}{key}", int(item)


def _verdict_from_json(text: str | None) -> Verdict | None:
    """Parse a verdict that an earlier check stored; None if the text is no such verdict."""
    try:
        record = json.loads(text or "")
        return Verdict(bool(record["agrees"]), str(record["told"]))
    except (ValueError, KeyError, TypeError):
        return None

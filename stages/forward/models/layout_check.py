"""Does a guessed layout compute what transformers computes? The witness a model of unknown family needs.

A row worked out from config.json and tensors (autoconfig.py) fits families that compute something else:
whether rope turns neighbours or halves, whether attention looks ahead, stands in no tensor and in no key. So
the checkpoint is run once by transformers and once by the decoder, in float32 on the CPU, with its own
weights, and the logits and the residual stream are compared. The verdict is remembered by what was compared.

A check at some lengths says nothing of a rule that begins beyond them. Windows, chunks and the lengths at
which rope changes stand in the config: the check goes past the largest of them, and a case with one it cannot
go past is refused. What it cannot see at all is a length written in the family's code alone.

Border: one checkpoint and two forward passes; which families are known is decided elsewhere. Torch and
transformers are imported when a check runs, and not for a verdict that is remembered.
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
"""Prompts every case is run on, as far as its context reaches."""
FARTHEST = 2048
"""The longest window, chunk or context that is checked: beyond, eager attention takes too long."""
BEYOND = 64
"""Positions checked behind a length at which something may change."""
TOLERANCE = 1e-4
"""Largest difference allowed, relative to the largest entry; float32 passes differ by 1e-6 to 1e-5 of it."""
METHOD = 1
"""Declared version of the check: moves when it becomes stricter, and no verdict of the one before counts."""
NO_LENGTHS = frozenset(
    """
    hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size
    vocab_size max_position_embeddings max_window_layers rope_theta initializer_range query_pre_attn_scalar
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id
    decoder_start_token_id pretraining_tp max_length
    """.split()  # noqa: SIM905 - twenty words read better as words
)
"""Keys with numbers that are no lengths."""
FIXED_ROPE = ("default", "linear", "llama3")
"""Schemes in which no length changes how a position is turned; their original context shapes frequencies."""


@dataclass(frozen=True)
class Verdict:
    """What is known of a layout.

    agrees: None when it could not be checked. told: how it agrees, or what is wrong or missing.
    """

    agrees: bool | None
    told: str

    def require(self, model_type: str) -> None:
        """Raise ConfigError, or MissingExtra where transformers is missing, unless the layout agrees."""
        if self.agrees:
            return
        from ..architectures.known import KNOWN

        kind = MissingExtra if witness() is None else ConfigError
        raise kind(
            f"a {model_type!r} checkpoint, an unknown family, must agree with transformers before it runs "
            f"here; {self.told}. If you know that it is computed like a Llama of this configuration, say so: "
            "trust_layout=True, or --trust-layout; what it computes is then marked. transformers itself may "
            "run it: backend='transformers', or --backend transformers. Supported families: "
            f"{', '.join(sorted(KNOWN))}"
        )


@dataclass(frozen=True)
class LayoutCase:
    """A checkpoint and the configuration it was taken to have.

    raw: config.json. weights: digest of the weight files. forward: declared version of our pass.
    """

    directory: Path
    weight_files: tuple[Path, ...]
    raw: Mapping[str, Any]
    config: Architecture
    weights: str
    forward: str

    @property
    def digest(self) -> str:
        """Of everything the two passes read, but for the version of transformers."""
        raw = json.dumps(dict(self.raw))  # as text: a config may hold an Infinity
        return digest("layout", METHOD, self.forward, self.weights, raw, self.config.digest)

    def remembered(self) -> Verdict | None:
        """The verdict of an earlier check. Never imports torch.

        It must be of the transformers that is installed now; where none is, an agreement with any counts.
        """
        found = layout_verdicts().find(self.digest)
        installed = witness()
        if installed is not None:
            return _read(found.get(installed))
        verdicts = [verdict for text in found.values() if (verdict := _read(text)) is not None]
        return next((verdict for verdict in verdicts if verdict.agrees), None)

    def verdict(self) -> Verdict:
        """The remembered verdict, else that of a check made now. Both answers of a check are remembered; that
        it could not be made is not, since the reason may be gone tomorrow."""
        found = self.remembered()
        if found is not None:
            return found
        installed = witness()
        if installed is None:
            return Verdict(None, "expected transformers, found none installed; pip install 'mizarr[check]'")
        found = self._check(installed)
        if found.agrees is not None:
            told = json.dumps({"agrees": found.agrees, "told": found.told})
            layout_verdicts().add(self.digest, installed, told)
        return found

    def _check(self, installed: str) -> Verdict:
        """Both passes at every length, theirs first, so that one model is in memory at a time."""
        import torch

        with torch.random.fork_rng(devices=[]), torch.no_grad():
            try:
                with quiet():
                    declared = _declared(self.directory, self.raw)
                    turns = turning_points(self.config, {**self.raw, **declared})
                    lengths = lengths_to_check(self.config, turns)
                    expected = self._theirs(lengths)
            except CannotCheck as error:
                return Verdict(None, str(error))
            except Exception as error:  # noqa: BLE001 - whatever foreign code raises, it bears no witness
                why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                return Verdict(None, f"expected {installed} to run it, found that it cannot ({why})")
            ours = self._ours()
            worst = 0.0
            for length, (logits, stream) in zip(lengths, expected, strict=True):
                found, states = ours(self._ids(length))
                for what, wanted, got in (("logits", logits, found), ("residual stream", stream, states)):
                    apart = difference(wanted, got)
                    worst = max(worst, apart)
                    if not apart <= TOLERANCE:  # a NaN is no agreement
                        return Verdict(
                            False,
                            f"expected {what} within {TOLERANCE:g} of those of {installed}, found them apart "
                            f"by {apart:.2g} of their scale at length {length}",
                        )
        told = ", ".join(map(str, lengths))
        return Verdict(True, f"agrees with {installed} to {worst:.1g} of the scale at lengths {told}")

    def _ids(self, length: int) -> Tensor:
        """The same random tokens whenever asked."""
        import torch

        seeded = torch.Generator().manual_seed(length)
        return torch.randint(0, self.config.vocab_size, (1, length), generator=seeded)

    def _theirs(self, lengths: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Logits and the states that enter every layer, at the positions shown, for each length: as
        transformers computes them with eager attention in float32, without foreign code or network."""
        import torch
        from transformers import AutoModelForCausalLM

        kind: Any = AutoModelForCausalLM
        model = kind.from_pretrained(
            str(self.directory),
            local_files_only=True,
            trust_remote_code=False,
            dtype=torch.float32,
            attn_implementation="eager",
        ).eval()
        found = []
        for length in lengths:
            given = model(input_ids=self._ids(length), use_cache=False, output_hidden_states=True)
            states = torch.stack([_shown(state) for state in given.hidden_states[:-1]])
            found.append((_shown(given.logits), states))
        return found

    def _ours(self) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Token ids -> what `_theirs` gives for a length."""
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

            def keep(capture: Capture, state: Tensor) -> None:
                states[capture] = _shown(state)

            logits = forward(network, ids, RunTaps(spec, keep), ALL_LOGITS)
            assert logits is not None
            return _shown(logits), torch.stack([states[capture] for capture in spec.captures])

        return run


class CannotCheck(Exception):
    """transformers cannot bear witness, or not far enough; says why."""


def turning_points(config: Architecture, declared: Mapping[str, Any]) -> dict[str, int]:
    """Lengths at which a pass may begin to compute otherwise, by what names them.

    Those the decoder knows (windows, rope), and every whole number of the configuration that could be one: a
    chunk size or a scaling that begins at some position has a name nobody here has heard of.
    """
    windows = [layer.mixer.window for layer in config.layers]
    points = [(f"window {window}", window) for window in windows if window is not None]
    heads = [config.heads_of(layer) for layer in range(config.num_layers)]
    ropes = [each.rope for each in heads if each is not None and each.rope is not None]
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
    found: dict[str, int] = {}
    for key, number in points:
        if 1 < number < config.context_length:  # where no prompt is longer, nothing changes
            found[key] = max(number, found.get(key, 0))
    return found


def lengths_to_check(config: Architecture, turns: Mapping[str, int]) -> list[int]:
    """Prompt lengths past every turning point, short ones first; the whole context where it is affordable.

    Raises CannotCheck for a turning point no affordable prompt goes past.
    """
    far = {key: number for key, number in turns.items() if number > FARTHEST}
    if far:
        listed = ", ".join(f"{key}={number}" for key, number in sorted(far.items()))
        raise CannotCheck(
            f"expected nothing that may change numbers beyond {FARTHEST} tokens, where the check ends, found "
            f"{listed} with prompts of up to {config.context_length} tokens"
        )
    context = config.context_length
    wanted = [*LENGTHS]
    if turns:
        wanted.append(max(turns.values()) + BEYOND)
    if context <= FARTHEST:
        wanted.append(context)
    return sorted({min(length, context) for length in wanted})


def difference(wanted: Tensor, found: Tensor) -> float:
    """Largest |difference| over the largest |entry| wanted; infinite for other shapes, NaN for a NaN."""
    if wanted.shape != found.shape:
        return float("inf")
    apart, scale = float((wanted - found).abs().max()), float(wanted.abs().max())
    return apart / scale if scale else apart


def _declared(directory: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as transformers reads it, with what the file leaves out.

    Raises CannotCheck for a model_type transformers does not list as a causal language model.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = raw.get("model_type")
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise CannotCheck(
            f"expected a model_type that {witness()} lists as a causal language model, found {model_type!r}"
        )
    read = AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    return dict(read.to_dict())


def _shown(values: Tensor) -> Tensor:
    """The last positions [1, position, width]: those of a long prompt would take the room of the weights."""
    return values[:, -BEYOND:].float()


def _whole_numbers(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int]]:
    for key, value in section.items():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Mapping):
                yield from _whole_numbers(item, f"{prefix}{key}.")
            elif (isinstance(item, int) and not isinstance(item, bool)) or (
                isinstance(item, float) and item.is_integer()
            ):
                yield f"{prefix}{key}", int(item)


def _read(text: str | None) -> Verdict | None:
    """A remembered verdict; None for what is no verdict."""
    try:
        found = json.loads(text or "")
        return Verdict(bool(found["agrees"]), str(found["told"]))
    except (ValueError, KeyError, TypeError):
        return None

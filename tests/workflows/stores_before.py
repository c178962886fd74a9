"""What the stores of before hold - models, captures, stages, workflows - and how they were written.

    PYTHONPATH=LINKS python stores_before.py 2026-11-22 FOLDER

asks all of it of the mizarr that is found first, in LINKS a link `mizarr` to a checkout of that day, and
packs models and store as FOLDER/store_2026-11-22.tar.xz. Not a test: test_stores_before.py asks the same of
what was packed, and of today's mizarr. Nothing is used here but what that has, and the mizarr of that day.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tarfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from mizarr import HookSpec
    from mizarr.pipeline.nodes import Node

Shapes = dict[str, tuple[int, ...]]

FIRST, SECOND = DAYS = ("2026-11-22", "2026-11-23")
"""Of the versions that wrote a store each; the second holds what there was not before."""

PROMPTS = ("w1 w2 w3 w4 w5", "w6 w7 w1")
IDS = (2, 3, 4, 5, 6)
"""Of the first prompt."""
VOCABULARY, HIDDEN, INNER, LAYERS = 40, 16, 24, 3


# Models: a few thousand weights each, by a formula


def llama() -> tuple[dict[str, Any], Shapes]:
    """config.json, and the shape of every tensor."""
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": INNER,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    layer: Shapes = {
        "input_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
        "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "post_attention_layernorm": (HIDDEN,),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    shapes: Shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for n in range(LAYERS):
        shapes |= {f"model.layers.{n}.{name}.weight": shape for name, shape in layer.items()}
    return config, shapes


def rwkv7() -> tuple[dict[str, Any], Shapes]:
    """The same of a recurrent model."""
    config = {
        "model_type": "rwkv7",
        "hidden_size": HIDDEN,
        "head_dim": 4,
        "num_hidden_layers": 2,
        "intermediate_size": INNER,
        "hidden_act": "sqrelu",
        "norm_first": True,
        "norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": True,
    }
    layer: Shapes = {f"attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "rkvo"}
    for name in "wavg":
        layer |= {
            f"attn.{name}_lora.lora.0.weight": (3, HIDDEN),
            f"attn.{name}_lora.lora.2.weight": (HIDDEN, 3),
        }
        layer |= {} if name == "g" else {f"attn.{name}_lora.lora.2.bias": (HIDDEN,)}
    layer |= {f"attn.x_{name}": (1, 1, HIDDEN) for name in "rwkvag"}
    layer |= {"attn.k_k": (HIDDEN,), "attn.k_a": (HIDDEN,), "attn.r_k": (4, 4), "ffn.x_k": (HIDDEN,)}
    layer |= {"ffn.key.weight": (INNER, HIDDEN), "ffn.value.weight": (HIDDEN, INNER)}
    layer |= _norms("attn_norm", "ffn_norm", "attn.g_norm")
    shapes: Shapes = {"model.embeddings.weight": (VOCABULARY, HIDDEN)}
    shapes |= _norms("model.norm", "model.layers.0.pre_norm")
    for n in range(2):
        own = {name: shape for name, shape in layer.items() if n or "v_lora" not in name}
        shapes |= {f"model.layers.{n}.{name}": shape for name, shape in own.items()}
    return config, shapes


def gpt2() -> tuple[dict[str, Any], Shapes]:
    """The same of a model with biases, learned positions and projections as one."""
    config = {
        "model_type": "gpt2",
        "n_embd": HIDDEN,
        "n_head": 2,
        "n_layer": 2,
        "n_positions": 32,
        "n_inner": INNER,
        "vocab_size": VOCABULARY,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
    }
    layer: Shapes = {
        "attn.c_attn.weight": (HIDDEN, 3 * HIDDEN),
        "attn.c_attn.bias": (3 * HIDDEN,),
        "attn.c_proj.weight": (HIDDEN, HIDDEN),
        "attn.c_proj.bias": (HIDDEN,),
        "mlp.c_fc.weight": (HIDDEN, INNER),
        "mlp.c_fc.bias": (INNER,),
        "mlp.c_proj.weight": (INNER, HIDDEN),
        "mlp.c_proj.bias": (HIDDEN,),
        **_norms("ln_1", "ln_2"),
    }
    shapes: Shapes = {"transformer.wte.weight": (VOCABULARY, HIDDEN), "transformer.wpe.weight": (32, HIDDEN)}
    shapes |= _norms("transformer.ln_f")
    for n in range(2):
        shapes |= {f"transformer.h.{n}.{name}": shape for name, shape in layer.items()}
    return config, shapes


def _norms(*names: str) -> Shapes:
    return {f"{name}.{part}": (HIDDEN,) for name in names for part in ("weight", "bias")}


ARCHITECTURES = "architectures.json"
MODELS = {"llama": llama, "rwkv7": rwkv7, "gpt2": gpt2}
OF_DAY = {FIRST: ("llama", "rwkv7"), SECOND: ("llama", "gpt2")}


def drawn(name: str, *shape: int) -> np.ndarray:
    """Multiples of 1/32 about 0, or about 1 for the weight of a norm, the same on every machine."""
    n = np.arange(np.prod(shape), dtype=np.uint64) + np.uint64(zlib.crc32(name.encode()))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        n = (n ^ (n >> np.uint64(shift))) * np.uint64(factor) & np.uint64(0xFFFFFFFF)
    about = 31 if len(shape) == 1 and name.endswith("weight") else -1
    steps = (n % np.uint64(32)).astype(np.float32) * 2 - 30 + about
    return (steps / 64).astype(np.float32).reshape(shape)


def write_model(folder: Path, name: str) -> None:
    """A checkpoint that reads the words w0 to w38."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    config, shapes = MODELS[name]()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file({each: drawn(each, *shape) for each, shape in shapes.items()}, folder / "model.safetensors")
    words = {"<unk>": 0} | {f"w{n}": n + 1 for n in range(VOCABULARY - 1)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


# What is asked

PARTLY = {FIRST: "mlp_out", SECOND: "resid_mid"}
"""What the capture "whole" has of some layers."""


def captures(models: Path, day: str) -> dict[str, Any]:
    """Nodes of captures, by what is special about each."""
    from mizarr.stages.forward.capture.capture import CaptureNode

    found = {}

    def capture(name: str, spec: HookSpec, model: str = "llama", **how: Any) -> None:
        found[name] = CaptureNode(str(models / model), list(PROMPTS), spec, **how)

    (_first if day == FIRST else _second)(capture)
    return found


def _first(capture: Callable[..., None]) -> None:
    import mizarr
    from mizarr import HookSpec

    whole = HookSpec().capture("hook_embed", "blocks.*.hook_resid_post", "blocks.*.attn.hook_pattern")
    capture("whole", whole.capture("blocks.0.hook_mlp_out", "blocks.1.hook_mlp_out"))
    changed = HookSpec().capture("blocks.2.hook_resid_post")
    changed = changed.intervene("blocks.0.hook_mlp_out", mizarr.Zero(positions=(0, 2)))
    changed = changed.intervene(
        "blocks.0.hook_resid_post", mizarr.Replace(drawn("replace", HIDDEN), positions=(1,))
    )
    changed = changed.intervene("blocks.0.attn.hook_pattern", mizarr.Steer([(2, 1)], 3.0))
    changed = changed.intervene(
        "blocks.*.attn.hook_attn_scores", mizarr.Knockout([(2, 0), (2, 1)], heads=(0,))
    )
    changed = changed.intervene("blocks.1.attn.hook_z", mizarr.Scale(0.5, heads=(1, 3)))
    changed = changed.intervene("blocks.1.hook_resid_post", mizarr.Add(drawn("add", HIDDEN)))
    changed = changed.intervene(
        "blocks.2.hook_resid_mid", mizarr.AddAtPositions([(1, drawn("at", HIDDEN))], 2.0)
    )
    capture("changed", changed)
    one = HookSpec().capture("blocks.1.hook_resid_mid")
    capture("bfloat16", one, dtype="bfloat16")
    capture("float64", one, dtype="float64", storage_dtype="float16")
    cut = HookSpec().capture("blocks.1.attn.hook_pattern").intervene("blocks.0.hook_attn_out", mizarr.Zero())
    capture("segments", cut, segment_tokens=4)
    states = ("blocks.1.hook_resid_post", "blocks.1.rwkv.hook_state_seq", "blocks.1.rwkv.hook_decay")
    capture("recurrent", HookSpec().capture(*states), "rwkv7")


def _second(capture: Callable[..., None]) -> None:
    from mizarr import HookSpec
    from mizarr.stages.causal.grids.patching_metrics import LogitDifference

    whole = HookSpec().capture(
        "ln_final.hook_scale", "blocks.*.hook_resid_post", "blocks.*.attn.hook_pattern"
    )
    capture("whole", whole.capture("blocks.0.hook_resid_mid"), "gpt2")
    kept = HookSpec().capture("blocks.1.hook_resid_post", positions="last")
    for reduction in ("norm", "mean", "run_mean"):
        kept = kept.capture("blocks.0.hook_resid_post", reduce=reduction)
    for reduction in ("topk:3", "logsumexp"):
        kept = kept.capture("hook_logits", reduce=reduction)
    capture("kept", kept)
    capture("int8", HookSpec().capture("blocks.0.hook_mlp_out"), storage_dtype="int8")
    slope = HookSpec().capture("grad:blocks.1.hook_resid_post").gradient_of(LogitDifference(7, 8))
    capture("gradient", slope)


def downstream(models: Path, day: str, captured: Mapping[str, Any]) -> dict[str, Node]:
    """Nodes of stages on what was captured, and of experiments."""
    from mizarr.stages import find
    from mizarr.stages.causal.grids.patching_metrics import KL, LogitDifference, Recovery

    model, other = str(models / "llama"), (2, 9, 4, 5, 6)
    difference, recovery = LogitDifference(7, 8), (Recovery(KL()),)
    if day == FIRST:
        from mizarr.stages.forward.generation.continuations import GenerationSettings

        moments = find("moments").on(states=captured["changed"]["resid_post"])
        patched = {"clean": IDS, "corrupted": other, "kinds": ("resid_post",), "layers": (1,)}
        noised = {"tokens": IDS, "subject": (1, 2), "samples": 2, "kinds": ("mlp_out",), "layers": (1,)}
        sampled = GenerationSettings(max_tokens=3, temperature=0.7, seed=3, eos=())
        swept = {"layers": (1,), "target": (7,), "top_k": 2}
        return {
            "principal_components": find("principal_components").on(summary=moments, n_components=3),
            "activation_patching": find("activation_patching")(metrics=recovery, **patched).on(model),
            "causal_tracing": find("causal_tracing")(metrics=(difference,), **noised).on(model),
            "edge_knockout": find("edge_knockout")(IDS, edges=((4, 1),), **swept).on(model),
            "continuation": find("continuation")((IDS,), sampled).on(model),
        }
    estimated = {"clean": IDS, "corrupted": other, "kinds": ("z",), "over": "head", "layers": (1,)}
    attributed = {"prompt": IDS, "metric": difference, "steps": 4}
    return {
        "layer_cka": find("layer_cka").on(states=captured["whole"]["resid_post"]),
        "attribution_patching": find("attribution_patching")(metrics=(difference,), **estimated).on(model),
        "integrated_gradients": find("integrated_gradients")(**attributed).on(model),
    }


def questions(models: Path, day: str) -> dict[str, dict[str, Any]]:
    """Settings of workflows by name."""
    answers = {"prompts": list(PROMPTS), "answers": ["w6", "w10"]}
    if day == FIRST:
        found = {
            "logit_lens": {**answers, "top_k": 3},
            "attention_patterns": {"prompt": PROMPTS[0]},
            "inspect_weights": {},
        }
        return {name: {"model": str(models / "llama"), **settings} for name, settings in found.items()}
    return {"logit_attribution": {"model": str(models / "gpt2"), **answers, "neurons": 2}}


_SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48}
_WIDE = {"hidden_size": 960, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128}
_GPT = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 128, "n_inner": 48}
_OTHER = {"d_model": 32, "num_layers": 4, "num_heads": 4, "rope_theta": 5e5, "tie_word_embeddings": True}
_EXPERTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4)
_ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "rms_norm_eps": 1e-5}
SIZES: tuple[dict[str, Any], ...] = (
    {"vocab_size": 64, **_SIZES},
    {"vocab_size": 64, **_SIZES, **_WIDE, **_GPT, **_OTHER, **_EXPERTS, **_ROUTED},
)
"""Configurations that between them most families read; each takes the keys that are its own."""


def architectures() -> dict[str, list[str | None]]:
    """By family what each of SIZES is called in keys, the beginning of it; None for what it does not read."""
    from mizarr.stages.forward.architectures.known import KNOWN
    from mizarr.stages.forward.architectures.transformer import ConfigReader
    from mizarr.store.errors import MizarrError

    def told(family: str, sizes: dict[str, Any]) -> str | None:
        try:
            found = KNOWN[family].read(ConfigReader({**sizes, "model_type": family}), {})
        except MizarrError:
            return None
        return f"{found.version} {found.digest[:16]}"

    return {family: [told(family, sizes) for sizes in SIZES] for family in sorted(KNOWN)}


# Writing


def write(day: str, folder: Path) -> Path:
    """The models and a store of all of it, packed."""
    # Notes say on which machine they were made; these are for every reader.
    platform.node = platform.platform = lambda: "elsewhere"  # type: ignore[assignment]
    import mizarr
    from mizarr.pipeline import run
    from mizarr.workflows import compute

    os.chdir(folder)
    models = Path("models")
    models.mkdir()
    for name in OF_DAY[day]:
        write_model(models / name, name)
    store = mizarr.open_store("store")
    captured = captures(models, day)
    for node in {**captured, **downstream(models, day, captured)}.values():
        run(node, store, quiet=True)
    for name, settings in questions(models, day).items():
        compute(name, store=store, **settings)
    if day != FIRST:
        (models / ARCHITECTURES).write_text(json.dumps(architectures(), indent=0))
    packed = Path(f"store_{day}.tar.xz")
    with tarfile.open(packed, "w:xz", preset=9) as archive:
        for path in sorted([*models.rglob("*"), *Path("store").rglob("*")]):
            if path.is_file() or not any(path.iterdir()):
                archive.add(path, recursive=False, filter=_plain)
    return packed


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without owner and time."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    done = write(sys.argv[1], Path(sys.argv[2]))
    print(done, done.stat().st_size)

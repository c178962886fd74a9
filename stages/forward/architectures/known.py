"""Every family that is known by name: model_type -> how its config.json is read, and how it is described.

The one table of families, of all kinds of architecture; which kind a family is, nobody outside asks. A family
is listed in the table of its kind (families.py, and the other …_families.py).

Border: never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ....store.errors import ConfigError, nearest
from .architecture import Architecture
from .attending.families import ATTENDING
from .attending.towers import TOWERS, read_tower, text_section
from .carrying.families import CARRYING
from .described import described_attending
from .families import model_type_of
from .linear_families import KIN, LINEAR
from .mamba_families import HYBRIDS, FamilyReader
from .pairs.families import PAIRS, PairFamily
from .recurrent_families import RECURRENT
from .rwkv_families import RWKV, read_rwkv
from .transformer import ConfigReader
from .zamba_families import ZAMBA

__all__ = ["KNOWN", "SECOND_NAMES", "KnownFamily", "from_hf_config"]

TensorShapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class KnownFamily:
    """A family known by name."""

    reader: Callable[[ConfigReader, TensorShapes], Architecture]
    """Its architecture, from a config.json and the shapes of its tensors by name."""
    describe: Callable[[], Mapping[str, str]]
    """It in words, by column."""
    reads_tensors: bool = False
    """Whether config.json alone does not say enough."""
    reports_unread_keys: bool = False
    """Whether keys that it does not read are reported."""

    @property
    def described(self) -> Mapping[str, str]:
        """It in words, by column."""
        return self.describe()

    def read(self, config: ConfigReader, shapes: TensorShapes) -> Architecture:
        """The architecture that a config.json describes.

        config: its keys, under their own names or those of `SECOND_NAMES`. shapes: of tensors, by name.
        Raises ConfigError for a key that is missing, of the wrong type, contradicts another, or asks for what
        is not followed.
        """
        return self.reader(by_own_names(config), shapes)


_TYPES = {"layer_types": "layers_block_type"}
_NAMES: tuple[tuple[dict[str, str], tuple[str, ...]], ...] = (
    (
        {
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
        ("gpt2", "openai-gpt", "codegen", "gpt_bigcode", "gptj", "gpt-sw3"),
    ),
    (
        {
            "head_dim": "d_kv",
            "hidden_size": "d_model",
            "num_attention_heads": "num_heads",
            "num_hidden_layers": "num_layers",
        },
        ("t5", "mt5", "umt5"),
    ),
    (
        {
            "hidden_size": "d_model",
            "num_attention_heads": "encoder_attention_heads",
            "num_hidden_layers": "encoder_layers",
        },
        ("bart", "mbart", "plbart", "mvp", "marian", "pegasus", "m2m_100", "blenderbot", "blenderbot-small"),
    ),
    (
        {
            "max_position_embeddings": "model_max_length",
            "n_group": "num_expert_group",
            "n_shared_experts": "num_shared_experts",
            "norm_topk_prob": "moe_renormalize",
            "num_experts_per_tok": "num_experts_per_token",
            "num_local_experts": "num_experts",
        },
        ("kimi_linear",),
    ),
    (
        {
            "hidden_size": "d_model",
            "num_attention_heads": "attention_heads",
            "num_hidden_layers": "num_layers",
        },
        ("xglm",),
    ),
    (
        {"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
        ("distilbert",),
    ),
    ({"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}, ("mpt",)),
    ({"num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}, ("bloom",)),
    ({"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"}, ("gpt_neo",)),
    ({"num_local_experts": "n_routed_experts"}, ("glm4_moe", "deepseek_v3", "dots1", "solar_open")),
    ({"num_experts": "n_routed_experts"}, ("deepseek_v2",)),
    (
        {"num_experts": "num_local_experts"},
        ("mixtral", "qwen3_moe", "gpt_oss", "kolibri1", "mellum", "minimax", "minimax_m2"),
    ),
    ({"num_local_experts": "num_experts"}, ("olmoe", "flex_olmo", "hy_v3", "jamba")),
    ({"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"}, ("ernie4_5_moe",)),
    ({"num_experts_per_tok": "moe_topk", "num_local_experts": "num_experts"}, ("hunyuan_v1_moe",)),
    ({"head_dim": "qk_rope_head_dim", "num_local_experts": "n_routed_experts"}, ("glm4_moe_lite",)),
    ({"head_dim": "kv_channels"}, ("jetmoe",)),
    ({"bias": "mlp_bias", "qkv_bias": "attention_bias"}, ("internlm3",)),
    ({"max_position_embeddings": "context_length"}, ("rwkv",)),
    ({"layers_block_type": "layer_types"}, ("granitemoehybrid",)),
    (_TYPES, ("bamba", "falcon_h1")),
    ({"num_local_experts": "n_routed_experts", **_TYPES}, ("nemotron_h",)),
    ({"sliding_window": "attention_window_size", **_TYPES}, ("recurrent_gemma",)),
    ({"head_dim": "attention_head_dim", **_TYPES}, ("zamba", "zamba2")),
)
"""Second names of keys, and the families that have them."""
SECOND_NAMES = {family: names for names, families in _NAMES for family in families}
"""model_type -> second name -> a key's own name: `attribute_map` of its configuration in transformers, of
keys that decide what is computed."""


def by_own_names(config: ConfigReader) -> ConfigReader:
    """A config with every key under its own name.

    Raises ConfigError for a key that stands there by both names with two values: which of them the reference
    takes depends on their order.
    """
    keys = dict(config.raw)
    for second, own in SECOND_NAMES.get(str(keys.get("model_type")), {}).items():
        if second in keys:
            value = keys.pop(second)
            if keys.setdefault(own, value) != value:
                raise ConfigError(
                    f"{config.source}: expected one value of {own} and {second}, two names of one key, found "
                    f"{keys[own]!r} and {value!r}; leave one out"
                )
    return config.reading(keys)


def _attending(model_type: str) -> KnownFamily:
    family = ATTENDING[model_type]
    return KnownFamily(
        family.read,
        lambda: described_attending(model_type, family),
        reads_tensors=family.reads_tensors,
        reports_unread_keys=family.reports_unread_keys,
    )


def _tower(model_type: str) -> KnownFamily:
    tower = TOWERS[model_type]

    def read(reader: ConfigReader, shapes: TensorShapes) -> Architecture:
        section = text_section(reader, shapes)
        text = section.raw["model_type"]
        if text not in KNOWN or text in TOWERS:
            near = nearest(str(text), KNOWN)
            raise ConfigError(
                f"{section.source}: expected model_type to be that of a text model known here, found {text!r}"
                + (f"; nearest is {near!r}" if near else "")
            )
        return read_tower(KNOWN[text].read(section, {}), shapes)

    told = f"{tower.examples}, of which the text model runs"
    as_text = f"as `{tower.text}`"
    row = _row(model_type, told, as_text, as_text, as_text, as_text)
    return KnownFamily(read, lambda: row, reads_tensors=True)


def _rwkv(model_type: str, generation: int, examples: str) -> KnownFamily:
    activation = "token-shifted squared ReLU"
    attention = f"none: the state of RWKV-{generation}"
    row = _row(model_type, examples, "layer norm", activation, attention, "untied")
    return KnownFamily(read_rwkv, lambda: row, reads_tensors=True)


def _hybrid(model_type: str, family: FamilyReader) -> KnownFamily:
    row = _row(model_type, family.examples, "RMS", family.mlp, family.mixers, family.head)
    return KnownFamily(family.config, lambda: row, family.reads_tensors)


def _pair(family: PairFamily) -> KnownFamily:
    return KnownFamily(family.read, lambda: family.described, reads_tensors=True)


def _row(model_type: str, examples: str, norm: str, mlp: str, attention: str, head: str) -> dict[str, str]:
    """The columns of `described`."""
    found = {"model_type": model_type, "examples": examples, "norm": norm, "mlp": mlp}
    return found | {"attention": attention, "head": head}


OF_MIXERS = HYBRIDS | LINEAR | KIN | ZAMBA | RECURRENT | CARRYING
KNOWN: dict[str, KnownFamily] = {
    **{model_type: _attending(model_type) for model_type in ATTENDING},
    **{model_type: _pair(family) for model_type, family in PAIRS.items()},
    **{model_type: _tower(model_type) for model_type in TOWERS},
    **{model_type: _rwkv(model_type, *told) for model_type, told in RWKV.items()},
    **{model_type: _hybrid(model_type, family) for model_type, family in OF_MIXERS.items()},
}
"""Every family known by name."""


def from_hf_config(raw: dict[str, Any], source: str = "config.json") -> Architecture:
    """The architecture that the config.json of a known family describes, without a look at its tensors.

    Raises ConfigError for a missing or unknown model_type, a missing required key, a value of the wrong type,
    an unknown rope scheme, and for settings no part of the forward pass follows (quantised weights, attention
    to later tokens).
    """
    model_type = model_type_of(raw, source)
    if model_type not in KNOWN:
        near = nearest(model_type, KNOWN)
        raise ConfigError(
            f"{source}: expected a model_type that `mizarr models families` lists, found {model_type!r}"
            + (f"; nearest is {near!r}" if near else "")
        )
    return KNOWN[model_type].read(ConfigReader(raw, source), {})

"""KNOWN: table of all supported families, by model_type, with a reader of config.json for each.

It joins the tables of all kinds of architecture (attending/families.py, hybrids/, and the …_families.py of
this folder).

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
from .described import described_attending
from .families import model_type_of
from .gemma3n_gemma4_families import GEMMAS
from .heads import with_head
from .hybrids.linear_families import KIN, LINEAR
from .hybrids.mamba_families import HYBRIDS, FamilyReader
from .hybrids.recurrent_families import RECURRENT
from .hybrids.zamba_families import ZAMBA
from .pairs.families import PAIRS
from .rwkv_families import RWKV
from .transformer import ConfigReader

__all__ = ["KNOWN", "SECOND_NAMES", "KnownFamily", "from_hf_config"]

TensorShapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class KnownFamily:
    """A supported family of models: how its config.json is read, and its row in the table of families."""

    reader: Callable[[ConfigReader, TensorShapes], Architecture]
    """Function (config.json, shapes of the checkpoint's tensors by name) -> architecture."""
    describe: Callable[[], Mapping[str, str]]
    """Function () -> the family's row in the table of families, column name -> text."""
    reads_tensors: bool = False
    """Whether `reader` needs the tensor shapes, because config.json alone does not decide the architecture or
    the prefix of its tensors."""
    reports_unread_keys: bool = False
    """Whether a warning lists the keys of a config.json that `reader` does not read."""

    @property
    def described(self) -> Mapping[str, str]:
        """The family's row in the table of families: column name -> text."""
        return self.describe()

    def read(self, config: ConfigReader, shapes: TensorShapes) -> Architecture:
        """The architecture that a config.json describes.

        Arguments:
            config: The config.json, with key names of the family or those of `SECOND_NAMES`.
            shapes: Shapes of the checkpoint's tensors by name; empty if they are not known.

        Raises:
            ConfigError: A key is missing, has the wrong type, contradicts another key, or asks for a feature
                that is not implemented.
        """
        named = by_own_names(config)
        return with_head(self.reader(named, shapes), named, shapes)


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
"""(second name of a config key -> its name in config.json, model_types of the families with these names)."""
SECOND_NAMES = {family: names for names, families in _NAMES for family in families}
"""model_type -> second name of a key -> its name in config.json: the `attribute_map` of the family's
configuration in transformers, for keys that change results."""


def by_own_names(config: ConfigReader) -> ConfigReader:
    """Copy of a config.json in which second names of keys (`SECOND_NAMES`) are replaced by the names that the
    family's own files have.

    Raises:
        ConfigError: A key is present under both names with two values; which of them transformers uses
            depends on their order in the file.
    """
    values = dict(config.raw)
    for alias, name in SECOND_NAMES.get(str(values.get("model_type")), {}).items():
        if alias in values:
            value = values.pop(alias)
            if values.setdefault(name, value) != value:
                raise ConfigError(
                    f"{config.source}: expected {name} and {alias}, two names of the same setting, to have "
                    f"one value, found {values[name]!r} and {value!r}; remove one of them"
                )
    return config.reading(values)


def _attending(model_type: str) -> KnownFamily:
    """Entry of `KNOWN` for a family from the table `ATTENDING`: every layer has attention."""
    family = ATTENDING[model_type]
    return KnownFamily(
        family.read,
        lambda: described_attending(model_type, family),
        reads_tensors=family.reads_tensors,
        reports_unread_keys=family.reports_unread_keys,
    )


def _tower(model_type: str) -> KnownFamily:
    """Entry of `KNOWN` for a multimodal family from the table `TOWERS`, whose text model belongs to another
    supported family."""
    tower = TOWERS[model_type]

    def read(reader: ConfigReader, shapes: TensorShapes) -> Architecture:
        section = text_section(reader, shapes)
        text_type = section.raw["model_type"]
        # The text model itself must not be multimodal.
        if text_type not in KNOWN or text_type in TOWERS:
            near = nearest(str(text_type), KNOWN)
            raise ConfigError(
                f"{section.source}: expected the model_type of a text model that `mizarr models families` "
                f"lists, found {text_type!r}" + (f"; nearest is {near!r}" if near else "")
            )
        # The text model is read without shapes: its tensors have other names in the larger checkpoint.
        return read_tower(KNOWN[text_type].read(section, {}), shapes)

    examples = f"{tower.examples}, of which the text model runs"
    as_text = f"as `{tower.text}`"
    row = _row(model_type, examples, as_text, as_text, as_text, as_text)
    return KnownFamily(read, lambda: row, reads_tensors=True)


def _hybrid(model_type: str, family: FamilyReader) -> KnownFamily:
    """Entry of `KNOWN` for one of `_MIXER_FAMILIES`: recurrent models, models with recurrent and attention
    layers, Gemma 3n and Gemma 4.

    Arguments:
        model_type: `model_type` of config.json.
        family: the family's row in its table.
    """
    row = _row(model_type, family.examples, family.norm, family.mlp, family.mixers, family.head)
    return KnownFamily(family.config, lambda: row, family.reads_tensors)


def _pair(model_type: str) -> KnownFamily:
    """Entry of `KNOWN` for an encoder-decoder family from the table `PAIRS`, such as T5."""
    family = PAIRS[model_type]
    return KnownFamily(family.build, lambda: family.described, reads_tensors=True)


def _row(model_type: str, examples: str, norm: str, mlp: str, attention: str, head: str) -> dict[str, str]:
    """A row of the table of families, column name -> text: each argument is the text of one column."""
    row = {"model_type": model_type, "examples": examples, "norm": norm, "mlp": mlp}
    return row | {"attention": attention, "head": head}


_MIXER_FAMILIES = RWKV | HYBRIDS | LINEAR | KIN | ZAMBA | RECURRENT | GEMMAS
KNOWN: dict[str, KnownFamily] = {
    **{model_type: _attending(model_type) for model_type in ATTENDING},
    **{model_type: _pair(model_type) for model_type in PAIRS},
    **{model_type: _tower(model_type) for model_type in TOWERS},
    **{model_type: _hybrid(model_type, family) for model_type, family in _MIXER_FAMILIES.items()},
}
"""model_type -> family, for all supported families."""


def from_hf_config(raw: dict[str, Any], source: str = "config.json") -> Architecture:
    """The architecture that the config.json of a supported family describes, without reading any tensors.

    Arguments:
        raw: The parsed config.json.
        source: Its path or name, for error messages.

    Raises:
        ConfigError: model_type is missing or not supported, a required key is missing, a value has the wrong
            type, or a setting is not implemented (unknown rope scheme, quantised weights, attention to later
            tokens).
    """
    model_type = model_type_of(raw, source)
    if model_type not in KNOWN:
        near = nearest(model_type, KNOWN)
        raise ConfigError(
            f"{source}: expected a model_type that `mizarr models families` lists, found {model_type!r}"
            + (f"; nearest is {near!r}" if near else "")
        )
    return KNOWN[model_type].read(ConfigReader(raw, source), {})

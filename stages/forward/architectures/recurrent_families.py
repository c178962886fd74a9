"""How the config.json of a model of one recurrent mixer is read: xLSTM.

As in hybrid_families.py, whose table of families these are part of: semantics and defaults are those of the
reference implementation (transformers).

Border: one config; never imports torch.
"""

from __future__ import annotations

from ....store.errors import ConfigError
from .hybrid import Block, HybridConfig
from .hybrid_families import HybridFamily, TensorShapes
from .hybrid_tensors import Spelling
from .linear_families import either
from .linear_mixers import MlstmShape
from .mixers import MlpShape
from .transformer import ConfigReader

__all__ = ["RECURRENT"]


# -- matrix memories


def _xlstm(reader: ConfigReader, shapes: TensorShapes) -> HybridConfig:
    """xLSTM 7B: mLSTMs alone, and gates with soft caps."""
    hidden, heads = either(reader, "hidden_size", "embedding_dim", 4096), reader.integer("num_heads", 8)
    layers = either(reader, "num_hidden_layers", "num_blocks", 32)
    keys, values = (int(hidden * reader.number(f"{part}_dim_factor", usual)) for part, usual in _XLSTM)
    if keys % heads or values % heads:
        raise ConfigError(
            f"{reader.source}: expected num_heads to divide {keys} channels of keys and {values} of values, "
            f"found {heads}; correct the file, or fetch it again"
        )
    mode, bias = reader.text("weight_mode", "single"), reader.flag("use_bias", False)
    if mode not in ("single", "fused"):
        raise ConfigError(
            f"{reader.source}: expected weight_mode to be 'single' or 'fused', found {mode!r}; this model "
            "cannot run here"
        )
    is_fused, eps = mode == "fused", reader.number("norm_eps", 1e-6)
    mixer = MlstmShape(
        heads,
        keys // heads,
        values // heads,
        reader.number("gate_soft_cap", 15.0),
        reader.number("eps", 1e-6),
        eps,
        has_bias=bias,
        is_fused=is_fused,
    )
    step = reader.integer("ffn_round_up_to_multiple_of", 64)
    inner = int((hidden * reader.number("ffn_proj_factor", 2.667) + step - 1) // step * step)
    mlp = MlpShape(inner, "silu", is_fused=is_fused, has_bias=bias)
    spelling = Spelling(
        embed="backbone.embeddings",
        final_norm="backbone.out_norm",
        layer="backbone.blocks.{}.",
        ln1="norm_mlstm",
        ln2="norm_ffn",
        mixer="mlstm_layer.",
        mlp="ffn.",
        mlp_parts=("proj_up_gate_z", "proj_down") if is_fused else ("proj_up_gate", "proj_up", "proj_down"),
    )
    return HybridConfig(
        model_type="xlstm",
        hidden_size=hidden,
        vocab_size=reader.integer("vocab_size", 50304),
        blocks=(Block((mixer,), mlp),) * layers,
        spelling=spelling,
        norm_eps=eps,
        final_logit_softcapping=reader.number("output_logit_soft_cap", 30.0),
        # The reference ties nothing, whatever the config says.
        tie_word_embeddings=False,
        has_norm_bias=bias,
    )


_XLSTM = (("qk", 0.5), ("v", 1.0))
"""Parts of a memory, and their share of the stream's width."""


RECURRENT: dict[str, HybridFamily] = {
    "xlstm": HybridFamily(_xlstm, "xLSTM 7B", "mLSTMs", "gated SiLU", "untied, soft caps"),
}
"""Every model of one recurrent mixer that is neither RWKV nor a state space, by model_type."""

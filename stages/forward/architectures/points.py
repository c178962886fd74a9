"""Hook points: the named places of a forward pass, as one table of names, axes and execution order.

Border: no models and no tensors; never imports torch.

Axes, in this order everywhere: ``batch head position hidden``. Sizes: hidden = width of the residual stream,
d_head = width of one head, mlp = hidden width of the MLP, one = 1. Attention matrices are [batch, head,
query_position, key_position]: row = query (target), column = key (source). ``kv_head`` counts key and value
heads; grouped-query attention has fewer of them than query heads. Recurrent states are [batch, head, key,
value], so that reading is r^T S.

Mixers other than attention have hook points with a prefix and axes of their own, because a hybrid model has
both kinds of mixers:

* ``ssm`` (Mamba): ``ssm_head``, ``ssm_key``, ``ssm_value``; ``ssm_group`` counts groups of heads that share B
  and C. A head of Mamba-1 is one channel, with one value.
* ``linear`` (gated delta nets, linear and lightning attention, gated linear units): mixers that write values
  under keys into a state and read it with queries. ``linear_group`` counts groups of heads that share queries
  and keys.
* ``latent`` (latent attention): keys and values of a head differ in width. Scores and pattern are those of
  ``attn``.
* ``diff`` (differential attention): pairs of heads (``diff_head``) read the values of both halves of the key
  heads (``diff_value``).
* ``moa`` (mixture of attention): heads of the experts of a token, ordered by ``slot``, the rank of the
  expert.
* ``mlstm`` (xLSTM): ``mlstm_cell`` counts the columns of the state: values, then the normaliser, then the
  logarithm of their common scale, in every row.

An encoder with a transform before its language head has the points ``head_…`` after the final norm, or
instead of it; ``embedding`` is the width of the head's input there. In post-norm models (BERT), ``ln1`` and
``ln2`` are computed after attention and MLP, as in TransformerLens, and resid_mid and resid_post are their
outputs: the stream as the next layer reads it.

If layers share a block of attention and MLP before their own mixer (Zamba), the block has the points of
attention and MLP, and ``shared_…``; in such a layer they are computed before ln1, the mixer's norm.

If a model has several parallel streams (Gemma 3n), one of them is the residual stream, and ``stream`` counts
all of them. If layers have inputs of their own (Gemma 3n and 4), ``layer_input`` is the width of these.

A recurrent network over numbers (stages/algzoo) has time steps instead of layers:
`HookPoint("rnn_hidden", 3)` is ``rnn.hook_hidden.3``. Its axes are [batch, neuron] and [batch, output].

Three names mean one thing to the Rust library candle-mi, whose strings these are, and another to
TransformerLens (TL): ``mlp.hook_pre``/``mlp.hook_post`` are the MLP's input and output here, and its pre-
and post-*activation* in TL (here ``mlp.hook_pre_act``/``mlp.hook_post_act``); TL's
``attn.hook_attn_scores`` is soft-capped and masked, ``attn.hook_scores`` is neither. Both meanings are
offered; `HookPoint.from_transformer_lens` translates. TL puts positions before heads in q, k, v, z and
result; here heads come first.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ....store.arrays import as_index, require_kind
from ....store.errors import HookPointNotFound, nearest

HIDDEN = ("batch", "position", "hidden")
SCALE = ("batch", "position", "one")
QUERY_HEADS = ("batch", "head", "position", "d_head")
KV_HEADS = ("batch", "kv_head", "position", "d_head")
HEAD_INPUTS = ("batch", "head", "position", "hidden")
KV_INPUTS = ("batch", "kv_head", "position", "hidden")
ATTENTION = ("batch", "head", "query_position", "key_position")
MLP = ("batch", "position", "mlp")
KEYS = ("batch", "head", "position", "key")
VALUES = ("batch", "head", "position", "value")
LATENT_KEYS = ("batch", "head", "position", "latent_key")
LATENT_VALUES = ("batch", "head", "position", "latent_value")
DIFF_VALUES = ("batch", "head", "position", "diff_value")
DIFF_PAIRS = ("batch", "diff_head", "position", "diff_value")
SSM_GROUPS = ("batch", "ssm_group", "position", "ssm_key")
SSM_VALUES = ("batch", "ssm_head", "position", "ssm_value")
MLSTM_KEYS = ("batch", "mlstm_head", "position", "mlstm_key")
MLSTM_VALUES = ("batch", "mlstm_head", "position", "mlstm_value")
LINEAR_GROUPS = ("batch", "linear_group", "position", "linear_key")
LINEAR_VALUES = ("batch", "linear_head", "position", "linear_value")
LINEAR_ONE = ("batch", "linear_head", "position", "one")
NEURONS = ("batch", "neuron")
EXPERTS = ("batch", "position", "expert")
EMBEDDING = ("batch", "position", "embedding")
STREAMS = ("batch", "stream", "position", "hidden")
LAYER_INPUT = ("batch", "position", "layer_input")


@dataclass(frozen=True)
class HookKind:
    """One row of the table `KINDS`: a kind of hook point, which exists once per layer or once per model."""

    name: str
    """Short name, also the variable's name in a store: ``resid_post``."""
    path: str
    """Name of the hook point as users write it, such as ``blocks.{}.hook_resid_post``; ``{}`` stands for the
    number of the layer or time step."""
    dims: tuple[str, ...]
    """Names of the axes of the activation, in order, batch first."""
    meaning: str
    """Description of the activation, for tables and messages."""
    transformer_lens: str | None = None
    """TransformerLens's hook name for the same activation, whose axes may be in another order; None if
    TransformerLens has no such hook."""
    is_derived: bool = False
    """Whether the activation is computed only to be captured: nothing in the forward pass reads it, so an
    intervention there would have no effect."""

    @property
    def per_layer(self) -> bool:
        """Whether the kind exists once per layer (or time step), instead of once per model."""
        return "{}" in self.path

    @property
    def counted(self) -> str:
        """What the number in a hook point's name counts: "time" (time steps) in an RNN, else "layer"."""
        return "time" if self.path.startswith("rnn.") else "layer"


def _block(
    name: str, suffix: str, dims: tuple[str, ...], meaning: str, transformer_lens: str | None = ""
) -> HookKind:
    """Row of `KINDS` for a hook point in a layer, with the path "blocks.{}.<suffix>".

    Arguments:
        name: Short name of the kind.
        suffix: Path after the layer's number.
        dims: Names of the axes of the activation.
        meaning: Description of the activation.
        transformer_lens: Hook name in TransformerLens; "" if it equals the path, None if there is no such
            hook.
    """
    path = "blocks.{}." + suffix
    return HookKind(name, path, dims, meaning, path if transformer_lens == "" else transformer_lens)


def _prefixed(
    name: str, dims: tuple[str, ...], meaning: str, *, prefix: str = "rwkv", derived: bool = False
) -> HookKind:
    """Row of `KINDS` for a hook point with the name "<prefix>_<name>" and the path
    "blocks.{}.<prefix>.hook_<name>", of a mixer or part that TransformerLens does not have."""
    return HookKind(f"{prefix}_{name}", f"blocks.{{}}.{prefix}.hook_{name}", dims, meaning, None, derived)


def _states(
    prefix: str,
    axes: tuple[str, str, str, str],
    *,
    written: str,
    read: str,
    log: str = "",
    per: str = "",
) -> tuple[HookKind, ...]:
    """Rows of `KINDS` that every recurrent mixer has: decays, writes, states, and the attention matrix
    equivalent to them.

    Arguments:
        prefix: Prefix of the mixer's hook points, such as "ssm".
        axes: Names of the axes of the mixer's heads, keys, values and decays.
        written: Formula of what a token writes to the state, for the descriptions.
        read: Definition of the attention matrix alpha by values and output, for the descriptions.
        log: End of the log decay's description with its formula, such as ", dt A".
        per: End of the decay's description that says how many decays there are: ": one number per head".
    """
    head, key, value, decay = axes

    def row(name: str, dims: tuple[str, ...], meaning: str, *, derived: bool = False) -> HookKind:
        return _prefixed(name, ("batch", head, *dims), meaning, prefix=prefix, derived=derived)

    pairs = ("query_position", "key_position")
    multiplies = f"factor of a token's write {written} to the state"
    reads = f"signed weight of each earlier token's value in the output: alpha {read}"
    return (
        row("log_decay", ("position", decay), f"natural log of the decay{log}, <= 0"),
        row("decay", ("position", decay), f"factor of the state at each token, in [0, 1]{per}"),
        row(
            "write",
            ("position", "one"),
            f"{multiplies}, 1 by default; 0 knocks it out, other factors steer it",
        ),
        row("state_seq", ("position", key, value), "state after each token, float32"),
        row("state", (key, value), "state after the last token, float32", derived=True),
        row("alpha_raw", pairs, reads, derived=True),
        row("effective_attn", pairs, "alpha_raw after ReLU, rows divided by their sum", derived=True),
    )


def _ssm(name: str, dims: tuple[str, ...], meaning: str) -> HookKind:
    return _prefixed(name, dims, meaning, prefix="ssm")


def _linear(name: str, dims: tuple[str, ...], meaning: str) -> HookKind:
    return _prefixed(name, dims, meaning, prefix="linear")


def _mlstm(name: str, dims: tuple[str, ...], meaning: str) -> HookKind:
    return _prefixed(name, dims, meaning, prefix="mlstm")


def _latent(name: str, dims: tuple[str, ...], meaning: str) -> HookKind:
    return _prefixed(name, dims, meaning, prefix="latent")


def _diff(name: str, dims: tuple[str, ...], meaning: str) -> HookKind:
    return _prefixed(name, dims, meaning, prefix="diff")


def _moa(name: str, dims: tuple[str, ...], meaning: str) -> HookKind:
    return _prefixed(name, dims, meaning, prefix="moa")


def _shared(name: str, dims: tuple[str, ...], meaning: str) -> HookKind:
    return _prefixed(name, dims, meaning, prefix="shared")


def _cross(name: str, dims: tuple[str, ...], meaning: str) -> HookKind:
    path = f"blocks.{{}}.cross_attn.hook_{name}"
    return HookKind(f"cross_{name}", path, dims, meaning, None if name in ("memory", "scores") else path)


def _altup(name: str, meaning: str) -> HookKind:
    return _prefixed(name, STREAMS, meaning, prefix="altup")


def _laurel(name: str, dims: tuple[str, ...], meaning: str) -> HookKind:
    return _prefixed(name, dims, meaning, prefix="laurel")


def _layer_input(name: str, dims: tuple[str, ...], meaning: str) -> HookKind:
    return HookKind(f"layer_input_{name}", f"blocks.{{}}.layer_input.hook_{name}", dims, meaning)


def _conv(name: str, meaning: str) -> HookKind:
    return _prefixed(name, HIDDEN, meaning, prefix="conv")


# In execution order: `HookPoint.order`, by which plans sort, is the index of a row.
KINDS: tuple[HookKind, ...] = (
    HookKind(
        "embed",
        "hook_embed",
        HIDDEN,
        "token embedding, after the family's embedding scale, with learned positions",
        "hook_embed",
    ),
    # Start of a layer. AltUp and LAuReL are those of Gemma 3n.
    _block("resid_pre", "hook_resid_pre", HIDDEN, "residual stream entering the block"),
    _block(
        "pre_norm",
        "hook_pre_norm",
        HIDDEN,
        "RWKV, layer 0: normalised embedding, from which the residual stream starts",
        None,
    ),
    _altup("streams", "all parallel streams that enter the block, one of which is the residual stream"),
    _altup("predicted", "AltUp's prediction of all streams; the block reads one of them and adds to it"),
    _block("ln1_scale", "ln1.hook_scale", SCALE, "divisor of the pre-attention norm, sqrt(var + eps)"),
    _block("ln1_normalized", "ln1.hook_normalized", HIDDEN, "pre-attention norm before weight and bias"),
    # Zamba's shared block, which runs before the layer's own mixer.
    _shared("scale", SCALE, "divisor of the norm of the concatenated stream and embedding"),
    _shared(
        "normalized", ("batch", "position", "shared"), "normalised concatenation of stream and embedding"
    ),
    _block(
        "q_input",
        "hook_q_input",
        HEAD_INPUTS,
        "copy of resid_pre for each head, before the norm, from which the head's queries are computed",
    ),
    _block(
        "k_input",
        "hook_k_input",
        KV_INPUTS,
        "copy of resid_pre for each key head, before the norm, from which its keys are computed",
    ),
    _block(
        "v_input",
        "hook_v_input",
        KV_INPUTS,
        "copy of resid_pre for each value head, before the norm, from which its values are computed",
    ),
    # Attention.
    _block("attn_gate", "attn.hook_gate", QUERY_HEADS, "gate of each head's output, after the sigmoid", None),
    _block("q", "attn.hook_q", QUERY_HEADS, "queries before rope (after QK-norm where the family has it)"),
    _block("k", "attn.hook_k", KV_HEADS, "keys before rope (after QK-norm where the family has it)"),
    _block("v", "attn.hook_v", KV_HEADS, "values, before repetition over query heads"),
    _block("rot_q", "attn.hook_rot_q", QUERY_HEADS, "queries after rope"),
    _block("rot_k", "attn.hook_rot_k", KV_HEADS, "keys after rope"),
    # Mixture of attention heads (JetMoE).
    _moa("router_logits", EXPERTS, "mixture of attention: router logit of each expert"),
    _moa(
        "weights",
        ("batch", "position", "slot"),
        "weight of each chosen expert's output",
    ),
    # Latent attention (DeepSeek).
    _latent("q", LATENT_KEYS, "queries of latent attention, wider than its values"),
    _latent(
        "c",
        ("batch", "position", "latent"),
        "input of keys and values: the normalised latent, then the key entries that all heads share",
    ),
    _latent("k", LATENT_KEYS, "keys of each head; the entries that all heads share come last"),
    _latent("v", LATENT_VALUES, "values of each head"),
    # Scores and outputs of all kinds of attention.
    _block("scores", "attn.hook_scores", ATTENTION, "scale * q k^T, before soft cap and mask", None),
    _block(
        "attn_scores",
        "attn.hook_attn_scores",
        ATTENTION,
        "scores after soft cap and mask (-inf where masked)",
    ),
    _block("pattern", "attn.hook_pattern", ATTENTION, "attention weights after softmax; rows sum to 1"),
    _block(
        "z",
        "attn.hook_z",
        QUERY_HEADS,
        "pattern-weighted values per head, times the gate if there is one, before the output projection",
    ),
    _block(
        "result",
        "attn.hook_result",
        ("batch", "head", "position", "hidden"),
        "z W_O per head; sum over heads + bias = attention output before any post-norm",
    ),
    _latent("z", LATENT_VALUES, "pattern-weighted values per head, before the output projection"),
    _moa(
        "z",
        QUERY_HEADS,
        "pattern-weighted values of the heads of each slot, input of that expert's output projection",
    ),
    _diff(
        "read",
        DIFF_VALUES,
        "differential attention: pattern-weighted values of a head, from both key heads of its pair",
    ),
    _diff("z", DIFF_PAIRS, "output of a pair of heads: one head minus lambda times the other, normalised"),
    _shared("attn_out", HIDDEN, "attention output of a shared block, read only by the MLP of that block"),
    _shared(
        "out",
        HIDDEN,
        "output of a shared block, added to the input of the layer's mixer and not to the stream",
    ),
    # RWKV.
    _prefixed("r", KEYS, "receptance: query of the state"),
    _prefixed("kk", KEYS, "RWKV-7: normalised key under which the state removes a stored value"),
    _prefixed("a", KEYS, "RWKV-7: share of the value stored under kk that is removed, in (0, 1)"),
    _prefixed("k", KEYS, "keys of the writes"),
    _prefixed("v", VALUES, "values of the writes"),
    _prefixed("g", VALUES, "gate of the output"),
    *_states("rwkv", ("head", "key", "value", "key"), written="k v^T", read="v = wkv_out"),
    _prefixed("wkv_out", VALUES, "output of each head, read from the state, before its norm"),
    # State spaces (Mamba-1 and Mamba-2).
    _ssm("gate", SSM_VALUES, "gate of the output, after its activation"),
    _ssm(
        "conv",
        ("batch", "position", "ssm_channel"),
        "output of the short convolution, after its activation: x; in Mamba-2 x, B and C",
    ),
    _ssm("x", SSM_VALUES, "values of the writes, before the factor dt"),
    _ssm(
        "dt",
        ("batch", "ssm_head", "position", "one"),
        "step size dt >= 0: factor of the write, and exponent of the decay",
    ),
    _ssm("B", SSM_GROUPS, "keys of the writes, shared by the heads of a group"),
    _ssm("C", SSM_GROUPS, "queries of the state, shared by the heads of a group"),
    *_states(
        "ssm",
        ("ssm_head", "ssm_key", "ssm_value", "ssm_decay"),
        log=", dt A",
        per=": one number per head; in Mamba-1 one per key",
        written="dt B x",
        read="x = ssm.hook_out",
    ),
    _ssm(
        "out", SSM_VALUES, "output of each head, read from the state, before D x is added and before the gate"
    ),
    # Linear attention, gated delta nets, RG-LRU.
    _linear("gate", LINEAR_VALUES, "gate of the output, after its activation"),
    _linear(
        "conv",
        ("batch", "position", "linear_channel"),
        "output of the short convolution, from which queries, keys and values are split",
    ),
    _linear("q", LINEAR_GROUPS, "queries of the state; normalised and scaled if the family does so"),
    _linear(
        "k",
        LINEAR_GROUPS,
        "keys of the writes, normalised if the family does so; in a linear unit the factor of the write",
    ),
    _linear("v", LINEAR_VALUES, "values of the writes"),
    _linear("beta", LINEAR_ONE, "delta rule: share of the value stored under a key that is replaced"),
    *_states(
        "linear",
        ("linear_head", "linear_key", "linear_value", "linear_decay"),
        per=": one number per head; in Kimi Linear one per key",
        written="beta k v^T",
        read="v = linear.hook_out",
    ),
    _linear("out", LINEAR_VALUES, "output of each head, read from the state, before its norm and the gate"),
    # xLSTM.
    _mlstm("gate", MLSTM_VALUES, "gate of the normalised output, after the sigmoid"),
    _mlstm("q", MLSTM_KEYS, "scaled queries of the memory"),
    _mlstm("k", MLSTM_KEYS, "keys of the writes"),
    _mlstm("v", MLSTM_VALUES, "values of the writes"),
    _mlstm(
        "input",
        ("batch", "mlstm_head", "position", "one"),
        "input gate i after its soft cap: natural log of the factor of the write",
    ),
    *_states(
        "mlstm",
        ("mlstm_head", "mlstm_key", "mlstm_cell", "one"),
        written="e^i k [v, 1]^T",
        read="v = mlstm.hook_out",
    ),
    _mlstm(
        "out",
        MLSTM_VALUES,
        "output of each head, read from the memory and divided by its normaliser, before its norm",
    ),
    # Short convolutions (LFM2).
    _conv("in_gate", "gate of a token before the convolution"),
    _conv("out_gate", "gate of the output of the convolution"),
    _conv("x", "input of the convolution: in_gate times the projection of the token"),
    _conv("out", "output of the convolution, before its gate"),
    _block(
        "ln1_post_scale",
        "ln1_post.hook_scale",
        SCALE,
        "divisor of the post-attention norm (families with four norms per layer)",
    ),
    _block(
        "ln1_post_normalized",
        "ln1_post.hook_normalized",
        HIDDEN,
        "post-attention norm before its weight (families with four norms per layer)",
    ),
    _block(
        "attn_out",
        "hook_attn_out",
        HIDDEN,
        "output of the mixer that is added to the residual stream, after any post-norm",
    ),
    # LAuReL adds to the stream together with attention, before resid_mid (Gemma 3n).
    _laurel("scale", SCALE, "divisor of LAuReL's norm"),
    _laurel("normalized", HIDDEN, "LAuReL's low-rank maps of the normalised stream, normalised again"),
    _laurel("out", HIDDEN, "LAuReL's output: normalised stream plus its low-rank maps"),
    _block(
        "resid_mid",
        "hook_resid_mid",
        HIDDEN,
        "resid_pre + attn_out; normalised where the family has norms on the stream",
    ),
    # Cross-attention of encoder-decoders.
    _cross("memory", HIDDEN, "input of keys and values: normalised output of the encoder"),
    _block(
        "ln_cross_scale", "ln_cross.hook_scale", SCALE, "divisor of the norm before cross-attention", None
    ),
    _block(
        "ln_cross_normalized",
        "ln_cross.hook_normalized",
        HIDDEN,
        "norm before cross-attention, before weight and bias",
        None,
    ),
    _cross("q", QUERY_HEADS, "queries of target positions"),
    _cross("k", KV_HEADS, "keys of source positions"),
    _cross("v", KV_HEADS, "values of source positions"),
    _cross("scores", ATTENTION, "scale * q k^T, before the mask"),
    _cross("attn_scores", ATTENTION, "scores after the mask (-inf where masked)"),
    _cross("pattern", ATTENTION, "cross-attention weights of source positions after softmax; rows sum to 1"),
    _cross("z", QUERY_HEADS, "pattern-weighted values per head"),
    _block(
        "cross_attn_out",
        "hook_cross_attn_out",
        HIDDEN,
        "output of cross-attention that is added to the residual stream",
    ),
    _block(
        "resid_mid_cross",
        "hook_resid_mid_cross",
        HIDDEN,
        "resid_mid + cross_attn_out; normalised where the family has norms on the stream",
    ),
    # MLP and experts.
    _block("ln2_scale", "ln2.hook_scale", SCALE, "divisor of the pre-MLP norm"),
    _block("ln2_normalized", "ln2.hook_normalized", HIDDEN, "pre-MLP norm before weight and bias"),
    _block("mlp_pre", "mlp.hook_pre", HIDDEN, "MLP input: the pre-MLP norm with weight and bias", None),
    _block("router_logits", "mlp.hook_router_logits", EXPERTS, "router logit of each expert", None),
    HookKind(
        "router_probs",
        "blocks.{}.mlp.hook_router_probs",
        EXPERTS,
        "router logits after softmax over all experts, or after the sigmoids by which the family chooses",
        is_derived=True,
    ),
    _block(
        "expert_weights",
        "mlp.hook_expert_weights",
        EXPERTS,
        "weight of each expert's output; 0 for experts that are not chosen",
        None,
    ),
    _block(
        "expert_out",
        "mlp.hook_expert_out",
        ("batch", "expert", "position", "hidden"),
        "output of each chosen expert before its weight; 0 for other experts",
        None,
    ),
    _block(
        "shared_expert_out",
        "mlp.hook_shared_expert_out",
        HIDDEN,
        "output of the expert shared by all tokens, after its gate",
        None,
    ),
    _block(
        "mlp_pre_act",
        "mlp.hook_pre_act",
        MLP,
        "gate (or only) projection before the activation",
        "blocks.{}.mlp.hook_pre",
    ),
    _block("mlp_pre_linear", "mlp.hook_pre_linear", MLP, "up projection of gated MLPs"),
    _block(
        "mlp_post_act",
        "mlp.hook_post_act",
        MLP,
        "input of the down projection: act(gate) * up, or act(up)",
        "blocks.{}.mlp.hook_post",
    ),
    _block("mlp_post", "mlp.hook_post", HIDDEN, "MLP output before any post-norm", None),
    _block(
        "ln2_post_scale",
        "ln2_post.hook_scale",
        SCALE,
        "divisor of the post-MLP norm (families with four norms per layer)",
    ),
    _block(
        "ln2_post_normalized",
        "ln2_post.hook_normalized",
        HIDDEN,
        "post-MLP norm before its weight (families with four norms per layer)",
    ),
    _block(
        "mlp_out",
        "hook_mlp_out",
        HIDDEN,
        "output of the MLP that is added to the residual stream, after any post-norm",
    ),
    _altup("corrected", "all streams after AltUp's correction by the output of the block"),
    # Per-layer inputs (Gemma 3n and 4).
    _layer_input(
        "embed", LAYER_INPUT, "per-layer input of this layer, computed from token ids and embeddings"
    ),
    _layer_input(
        "gate", LAYER_INPUT, "gate of the per-layer input, computed from the stream, after the activation"
    ),
    _layer_input("scale", SCALE, "divisor of the norm of the gated and projected per-layer input"),
    _layer_input(
        "normalized", HIDDEN, "gated and projected per-layer input, normalised, before the norm's weight"
    ),
    _layer_input(
        "out",
        HIDDEN,
        "output of the per-layer input, added to the stream or, with parallel streams, to all but the first",
    ),
    _block(
        "resid_post",
        "hook_resid_post",
        HIDDEN,
        "resid_mid + mlp_out; normalised where the family has norms on the stream",
    ),
    HookKind(
        "rnn_pre_activation",
        "rnn.hook_pre_activation.{}",
        NEURONS,
        "RNN of AlgZoo: sum of input and last state at a time step, before the ReLU",
    ),
    HookKind("rnn_hidden", "rnn.hook_hidden.{}", NEURONS, "state after a time step, after the ReLU"),
    HookKind("altup_merged", "altup.hook_merged", HIDDEN, "mean of all streams, input of the final norm"),
    HookKind(
        "ln_final_scale", "ln_final.hook_scale", SCALE, "divisor of the final norm", "ln_final.hook_scale"
    ),
    HookKind(
        "ln_final_normalized",
        "ln_final.hook_normalized",
        HIDDEN,
        "final norm before weight and bias",
        "ln_final.hook_normalized",
    ),
    HookKind(
        "final_norm", "hook_final_norm", HIDDEN, "final norm with weight and bias: input of the LM head"
    ),
    HookKind(
        "head_pre_act",
        "head.hook_pre_act",
        EMBEDDING,
        "encoders: dense map before the head, before its activation",
    ),
    HookKind(
        "head_post_act",
        "head.hook_post_act",
        EMBEDDING,
        "encoders: dense map before the head, after its activation",
    ),
    HookKind("head_scale", "head.hook_scale", SCALE, "encoders: divisor of the norm before the LM head"),
    HookKind(
        "head_normalized",
        "head.hook_normalized",
        EMBEDDING,
        "encoders: norm before the LM head, before its weight and bias",
    ),
    HookKind(
        "head_out",
        "head.hook_out",
        EMBEDDING,
        "encoders: norm before the LM head with weight and bias, input of the LM head",
    ),
    HookKind(
        "logits",
        "hook_logits",
        ("batch", "position", "vocab"),
        "logits",
        is_derived=True,
    ),
    HookKind("rnn_final_state", "rnn.hook_final_state", NEURONS, "last state, input of the readout"),
    HookKind("rnn_output", "rnn.hook_output", ("batch", "output"), "output of the readout"),
)
BY_NAME = {kind.name: kind for kind in KINDS}
LOGITS = "logits"
"""Kind of the hook point for logits. No model lists it in `hook_points`, as a pass returns logits without a
hook; stores use it for values computed from logits."""
STATE_ROOMS = ("rwkv", "ssm", "linear", "mlstm")
"""Prefixes of the hook points of mixers with a recurrent state; each has the kinds of `_states`, such as
"ssm_state"."""
SPLIT_INPUTS = ("q_input", "k_input", "v_input")
"""Kinds of hook points with a copy of resid_pre for each head: a change of one copy affects only the queries,
keys or values of that head."""
_BY_NAME_ALONE = dict.fromkeys(SPLIT_INPUTS, "_input") | {"expert_out": "expert_out", LOGITS: LOGITS}
_BY_NAME_ALONE |= dict.fromkeys((f"altup_{name}" for name in ("streams", "predicted", "corrected")), "altup")
"""Kind whose activation is as large as many residual streams -> text that a glob pattern must contain to
match the kind, so that `blocks.*` does not capture it."""
ORDER = {kind.name: place for place, kind in enumerate(KINDS)}
"""Name of a kind of hook point -> its index in the order in which a forward pass computes the kinds."""
_MIXERS = {
    ".attn.": "attention",
    ".rwkv.": "an RWKV mixer",
    ".ssm.": "a state-space mixer",
    ".linear.": "linear attention",
    ".mlstm.": "an mLSTM",
    ".conv.": "a short convolution",
    ".latent.": "latent attention",
    ".diff.": "differential attention",
    ".moa.": "a mixture of attention",
    ".cross_attn.": "cross-attention",
}
"""Part of a hook point's path -> name of the mixer that has such hook points, for messages."""
_MOST_LISTED = 8
"""Largest number of layers that an error message lists."""
_FIRST_AFTER_BLOCKS = ORDER["altup_merged"]
_BY_PATH = {kind.path: kind for kind in KINDS}
_BY_TRANSFORMER_LENS = {kind.transformer_lens: kind for kind in KINDS if kind.transformer_lens}
NNTERP = {
    "layers_input": "resid_pre",
    "layers_output": "resid_post",
    "attentions_output": "attn_out",
    "mlps_input": "mlp_pre",
    "mlps_output": "mlp_post",
    "attention_probabilities": "pattern",
}
"""Name that the library nnterp gives to an activation -> kind of the hook point here."""
_NNTERP_NAME = re.compile(rf"({'|'.join(NNTERP)})\[(\d{{1,18}}|\*)\]")
# At most 18 digits, so that every layer number fits into 64 bits.
_NUMBER = re.compile(r"\.(\d{1,18})(?=\.|$)")


class _At:
    """Makes hook points of one kind: `HookPoint.resid_post(5)`, or `HookPoint.embed()` for a kind outside of
    layers."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.__doc__ = f"{BY_NAME[kind].path.format('i')}: {BY_NAME[kind].meaning}."

    def __call__(self, layer: int | None = None) -> HookPoint:
        return HookPoint(self.kind, layer)


@dataclass(frozen=True)
class HookPoint:
    """A named place in a forward pass. Functions that take hook points also accept their names, such as
    "blocks.5.hook_resid_post".

    >>> HookPoint.resid_post(5)
    HookPoint.resid_post(5)
    >>> str(HookPoint.resid_post(5))
    'blocks.5.hook_resid_post'
    >>> HookPoint.parse("blocks.5.hook_resid_post") == HookPoint.resid_post(5)
    True

    Raises:
        HookPointNotFound: The kind is unknown, or a layer is missing or superfluous.
    """

    kind: str
    """Kind: a name in the table `KINDS`."""
    layer: int | None = None
    """Number of the layer or time step, from 0; None for kinds outside of layers."""

    embed, resid_pre, ln1_scale = _At("embed"), _At("resid_pre"), _At("ln1_scale")
    pre_norm = _At("pre_norm")
    q_input, k_input, v_input = _At("q_input"), _At("k_input"), _At("v_input")
    ln1_normalized, q, k, v = _At("ln1_normalized"), _At("q"), _At("k"), _At("v")
    rot_q, rot_k, scores = _At("rot_q"), _At("rot_k"), _At("scores")
    attn_scores, pattern, z, result = _At("attn_scores"), _At("pattern"), _At("z"), _At("result")
    rwkv_r, rwkv_k, rwkv_v = _At("rwkv_r"), _At("rwkv_k"), _At("rwkv_v")
    rwkv_kk, rwkv_a, rwkv_g = _At("rwkv_kk"), _At("rwkv_a"), _At("rwkv_g")
    rwkv_log_decay, rwkv_decay, rwkv_write = _At("rwkv_log_decay"), _At("rwkv_decay"), _At("rwkv_write")
    rwkv_state_seq, rwkv_wkv_out, rwkv_state = _At("rwkv_state_seq"), _At("rwkv_wkv_out"), _At("rwkv_state")
    rwkv_alpha_raw, rwkv_effective_attn = _At("rwkv_alpha_raw"), _At("rwkv_effective_attn")
    ssm_gate, ssm_conv, ssm_x, ssm_dt = _At("ssm_gate"), _At("ssm_conv"), _At("ssm_x"), _At("ssm_dt")
    ssm_B, ssm_C, ssm_out = _At("ssm_B"), _At("ssm_C"), _At("ssm_out")
    ssm_log_decay, ssm_decay, ssm_write = _At("ssm_log_decay"), _At("ssm_decay"), _At("ssm_write")
    ssm_state_seq, ssm_state = _At("ssm_state_seq"), _At("ssm_state")
    ssm_alpha_raw, ssm_effective_attn = _At("ssm_alpha_raw"), _At("ssm_effective_attn")
    attn_gate, linear_gate, linear_conv = _At("attn_gate"), _At("linear_gate"), _At("linear_conv")
    linear_q, linear_k, linear_v = _At("linear_q"), _At("linear_k"), _At("linear_v")
    linear_beta, linear_log_decay = _At("linear_beta"), _At("linear_log_decay")
    linear_decay = _At("linear_decay")
    linear_write, linear_state_seq = _At("linear_write"), _At("linear_state_seq")
    linear_state, linear_out = _At("linear_state"), _At("linear_out")
    linear_alpha_raw, linear_effective_attn = _At("linear_alpha_raw"), _At("linear_effective_attn")
    latent_q, latent_c, latent_k = _At("latent_q"), _At("latent_c"), _At("latent_k")
    latent_v, latent_z = _At("latent_v"), _At("latent_z")
    diff_read, diff_z = _At("diff_read"), _At("diff_z")
    moa_router_logits, moa_weights, moa_z = _At("moa_router_logits"), _At("moa_weights"), _At("moa_z")
    mlstm_gate, mlstm_q, mlstm_k, mlstm_v = _At("mlstm_gate"), _At("mlstm_q"), _At("mlstm_k"), _At("mlstm_v")
    mlstm_input, mlstm_log_decay, mlstm_decay = _At("mlstm_input"), _At("mlstm_log_decay"), _At("mlstm_decay")
    mlstm_write, mlstm_state_seq = _At("mlstm_write"), _At("mlstm_state_seq")
    mlstm_state, mlstm_out = _At("mlstm_state"), _At("mlstm_out")
    mlstm_alpha_raw, mlstm_effective_attn = _At("mlstm_alpha_raw"), _At("mlstm_effective_attn")
    altup_streams, altup_predicted = _At("altup_streams"), _At("altup_predicted")
    altup_corrected, altup_merged = _At("altup_corrected"), _At("altup_merged")
    laurel_scale, laurel_normalized = _At("laurel_scale"), _At("laurel_normalized")
    laurel_out = _At("laurel_out")
    layer_input_embed, layer_input_gate = _At("layer_input_embed"), _At("layer_input_gate")
    layer_input_scale = _At("layer_input_scale")
    layer_input_normalized, layer_input_out = _At("layer_input_normalized"), _At("layer_input_out")
    conv_in_gate, conv_out_gate = _At("conv_in_gate"), _At("conv_out_gate")
    conv_x, conv_out = _At("conv_x"), _At("conv_out")
    shared_scale, shared_normalized = _At("shared_scale"), _At("shared_normalized")
    shared_attn_out, shared_out = _At("shared_attn_out"), _At("shared_out")
    ln1_post_scale, ln1_post_normalized = _At("ln1_post_scale"), _At("ln1_post_normalized")
    cross_memory, cross_q, cross_k, cross_v = (
        _At("cross_memory"),
        _At("cross_q"),
        _At("cross_k"),
        _At("cross_v"),
    )
    ln_cross_scale, ln_cross_normalized = _At("ln_cross_scale"), _At("ln_cross_normalized")
    cross_scores, cross_attn_scores = _At("cross_scores"), _At("cross_attn_scores")
    cross_pattern, cross_z = _At("cross_pattern"), _At("cross_z")
    cross_attn_out, resid_mid_cross = _At("cross_attn_out"), _At("resid_mid_cross")
    attn_out, resid_mid, ln2_scale = _At("attn_out"), _At("resid_mid"), _At("ln2_scale")
    ln2_normalized, mlp_pre, mlp_pre_act = _At("ln2_normalized"), _At("mlp_pre"), _At("mlp_pre_act")
    router_logits, router_probs, expert_weights = (
        _At("router_logits"),
        _At("router_probs"),
        _At("expert_weights"),
    )
    expert_out, shared_expert_out = _At("expert_out"), _At("shared_expert_out")
    mlp_pre_linear, mlp_post_act, mlp_post = _At("mlp_pre_linear"), _At("mlp_post_act"), _At("mlp_post")
    ln2_post_scale, ln2_post_normalized = _At("ln2_post_scale"), _At("ln2_post_normalized")
    mlp_out, resid_post = _At("mlp_out"), _At("resid_post")
    ln_final_scale, ln_final_normalized = _At("ln_final_scale"), _At("ln_final_normalized")
    final_norm = _At("final_norm")
    head_pre_act, head_post_act = _At("head_pre_act"), _At("head_post_act")
    head_scale, head_normalized, head_out = _At("head_scale"), _At("head_normalized"), _At("head_out")
    logits = _At("logits")
    rnn_pre_activation, rnn_hidden = _At("rnn_pre_activation"), _At("rnn_hidden")
    rnn_final_state, rnn_output = _At("rnn_final_state"), _At("rnn_output")

    def __post_init__(self) -> None:
        if self.kind not in BY_NAME:
            raise HookPointNotFound(_no_such_point(self.kind, BY_NAME))
        if BY_NAME[self.kind].per_layer != (self.layer is not None):
            expected = "a layer number" if BY_NAME[self.kind].per_layer else "no layer"
            raise HookPointNotFound(
                f"expected {expected} for the hook point kind {self.kind!r}, found layer={self.layer!r}; its "
                f"names look like {BY_NAME[self.kind].path!r}"
            )
        if self.layer is None:
            return
        # The dataclass is frozen; numpy integers become int, so that equal points have equal reprs.
        object.__setattr__(self, "layer", as_index(self.layer, f"{self.kind}: layers", HookPointNotFound))
        if self.layer < 0:
            raise HookPointNotFound(f"expected a layer counted from 0, found {self.layer!r} for {self.kind}")

    @classmethod
    def parse(cls, name: str) -> HookPoint:
        """The hook point that a string names: "blocks.5.hook_resid_post", or a name of the library nnterp
        such as "layers_output[5]".

        Raises:
            HookPointNotFound: No hook point has this name; the message gives the most similar one.
        """
        return cls._from_path(own_name(name), _BY_PATH)

    @classmethod
    def from_transformer_lens(cls, name: str) -> HookPoint:
        """The hook point for the activation that TransformerLens calls `name`; HookPointNotFound if there is
        none. Unlike in TransformerLens, its axes have heads before positions."""
        return cls._from_path(name, _BY_TRANSFORMER_LENS)

    @classmethod
    def _from_path(cls, name: str, table: dict[str, HookKind]) -> HookPoint:
        """The hook point with a name, such as "blocks.5.hook_q".

        Arguments:
            name: The name.
            table: Name with "{}" in place of the layer -> kind of hook point.

        Raises:
            HookPointNotFound: The name is not in the table.
        """
        match = _NUMBER.search(name)
        layer = int(match.group(1)) if match else None
        path = _NUMBER.sub(".{}", name, count=1)
        if path not in table:
            candidates = [known_path.replace("{}", str(layer or 0)) for known_path in table]
            raise HookPointNotFound(_no_such_point(name, candidates))
        return cls(table[path].name, layer)

    @property
    def transformer_lens(self) -> str | None:
        """TransformerLens's hook name for the same activation; None if TransformerLens has no such hook."""
        name = BY_NAME[self.kind].transformer_lens
        return name and name.format(self.layer)

    @property
    def dims(self) -> tuple[str, ...]:
        """Names of the axes of the activation, in order, batch first."""
        return BY_NAME[self.kind].dims

    @property
    def order(self) -> tuple[int, int]:
        """Sort key (layer, index of the kind) that puts hook points in the order of a forward pass."""
        index = ORDER[self.kind]
        if self.layer is not None:
            return (self.layer, index)
        # Points outside of layers: the embedding sorts before layer 0, all others after the last layer.
        return (-1, index) if index < _FIRST_AFTER_BLOCKS else (2**31, index)

    def __str__(self) -> str:
        return BY_NAME[self.kind].path.format(self.layer)

    def __repr__(self) -> str:
        return f"HookPoint.{self.kind}({'' if self.layer is None else self.layer})"


def as_point(point: HookPoint | str) -> HookPoint:
    """Hook point with a name such as "blocks.5.hook_resid_post"; a HookPoint is returned unchanged.

    Raises:
        HookPointNotFound: The string names no hook point, or the argument is something else.
    """
    if isinstance(point, HookPoint):
        return point
    require_kind(
        point, str, "a hook point's name", "write one such as 'blocks.5.hook_resid_post'", HookPointNotFound
    )
    return HookPoint.parse(point)


def own_name(name: str) -> str:
    """Translate an activation's name in the library nnterp, such as ``layers_output[5]``, to the name of the
    hook point here; other names are returned unchanged.

    ``*`` in place of the number stands for all layers. In families with a norm after attention,
    ``attentions_output`` is the output after that norm.

    >>> own_name("layers_output[5]"), own_name("layers_input[*]")
    ('blocks.5.hook_resid_post', 'blocks.*.hook_resid_pre')
    """
    match = _NNTERP_NAME.fullmatch(name)
    return BY_NAME[NNTERP[match[1]]].path.format(match[2]) if match else name


def is_glob(name: str) -> bool:
    """Whether a name is a shell pattern: contains ``*``, ``?`` or ``[``."""
    return any(mark in name for mark in "*?[")


def expand(pattern: str, points: Iterable[HookPoint]) -> list[HookPoint]:
    """The hook points whose names match a shell pattern such as ``blocks.*.hook_resid_post``.

    Hook points with very large activations only match a pattern that contains a part of their name: copies of
    the stream per head (``_input``), outputs of each expert (``expert_out``), parallel streams (``altup``).

    Arguments:
        pattern: Shell pattern, case-sensitive.
        points: Hook points to choose from.

    Raises:
        HookPointNotFound: Nothing matches.
    """
    candidates = list(points)
    # Most kinds require no text in the pattern: "" is part of every pattern.
    allowed = [point for point in candidates if _BY_NAME_ALONE.get(point.kind, "") in pattern]
    matches = [point for point in allowed if fnmatch.fnmatchcase(str(point), pattern)]
    if not matches:
        raise HookPointNotFound(_no_such_point(pattern, [str(point) for point in candidates]))
    return matches


def points_of(kinds: Iterable[str], num_layers: int) -> tuple[HookPoint, ...]:
    """Hook points of some kinds in every layer, and outside of layers, in the order of a forward pass.

    Arguments:
        kinds: Names of kinds, such as "resid_post".
        num_layers: Number of layers of the model.
    """
    points: list[HookPoint] = []
    for kind in kinds:
        layers: Iterable[int | None] = range(num_layers) if BY_NAME[kind].per_layer else (None,)
        points += [HookPoint(kind, layer) for layer in layers]
    return tuple(sorted(points, key=lambda point: point.order))


def _no_such_point(name: str, candidates: Iterable[str]) -> str:
    """Error message for a name that no hook point has, with the most similar of the candidates."""
    near = nearest(name, candidates)
    hint = f"; did you mean {near!r}?" if near else "; a model lists its own: `model.hook_points`"
    return f"there is no hook point {name!r:.200}{hint}"


def require_known(points: Sequence[HookPoint], available: Sequence[HookPoint], model: str) -> None:
    """Check that a model has all of these hook points.

    Arguments:
        points: Hook points to check.
        available: All hook points of the model.
        model: Name of the model, for the message.

    Raises:
        HookPointNotFound: A point is missing; the message names the layers that have its kind, or the most
            similar point.
    """
    for point in points:
        if point in available:
            continue
        layers_with_kind = [p.layer for p in available if p.kind == point.kind and p.layer is not None]
        is_in_layers = bool(layers_with_kind) and point.layer is not None
        if is_in_layers and any(p.layer == point.layer for p in available):
            raise HookPointNotFound(_other_layers_have_it(point, layers_with_kind, available, model))
        if is_in_layers:
            counted = {"layer": "layers", "time": "time steps"}[BY_NAME[point.kind].counted]
            raise HookPointNotFound(
                f"{model} has {counted} 0 to {max(p.layer or 0 for p in available)}, found {str(point)!r}; "
                f"the last one is {str(HookPoint(point.kind, max(layers_with_kind)))!r}"
            )
        near = nearest(str(point), [str(p) for p in available])
        raise HookPointNotFound(
            f"{model} has no hook point {str(point)!r} ({BY_NAME[point.kind].meaning}); nearest is {near!r}"
        )


def _other_layers_have_it(
    point: HookPoint, layers_with_kind: Sequence[int], available: Sequence[HookPoint], model: str
) -> str:
    """Error message for a hook point that its layer lacks and other layers have, as in hybrids: it names the
    mixer of the layer, and the layers with the kind.

    Arguments:
        point: The missing hook point.
        layers_with_kind: Numbers of the layers that have a hook point of the same kind.
        available: All hook points of the model.
        model: Name of the model.
    """
    paths = [str(p) for p in available if p.layer == point.layer]
    mixers = [name for path_part, name in _MIXERS.items() if any(path_part in path for path in paths)]
    listed = ", ".join(map(str, layers_with_kind[:_MOST_LISTED]))
    unlisted = len(layers_with_kind) - _MOST_LISTED
    more = f" and {unlisted} more" if unlisted > 0 else ""
    return (
        f"layer {point.layer} of {model} has {' and '.join(mixers) or 'no mixer'}, and no hook point "
        f"{str(point)!r}; this hook point exists in layer{'s' if len(layers_with_kind) > 1 else ''} "
        f"{listed}{more}"
    )

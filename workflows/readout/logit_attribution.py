"""Which layers, heads and neurons make the model say what it says? Direct logit attribution over prompts.

Captures the output of every layer at the last token of each prompt, and splits a logit difference, the logit
of the answer minus that of the most likely other token, into the contributions (shares) of the outputs
(stages/logits/attribution.py, attribution_units.py). Shares and the biases of the readout sum to the logit
difference, in models with a final soft cap to the difference before the cap. RWKV has shares of layers only:
outputs of its heads and neurons are multiplied by gates.

Defaults: the facts that ship with the specimen. For prompts without answers, the model's most likely token is
attributed. Of an answer of several tokens the first one is attributed.

A share is a direct effect: a component may write a token's direction only for a later component to read or
to cancel. What would change without the component is measured by `activation_patching` and `ablation`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.logits.attribution import component_attribution, contrasted_tokens
from ...stages.logits.attribution_units import head_attribution, neuron_attribution
from ...stages.logits.component_weights import component_weights_node
from ...stages.logits.lens import format_text, format_token
from ...stages.logits.logit_directions import MOST_LIKELY, NONE
from ...stages.logits.readout import readout_node
from ...store.errors import ConfigError
from ..labelled import column, largest, ranked
from ..settings import AnswerSettings, Natural, setting
from ..subject import answered
from ..views import Bars, Choice, Data, Figure, Heatmap, Line, Lines, Table, View
from ..workflow import ModelWorkflow, Nodes

if TYPE_CHECKING:
    import xarray as xr

    from ...pipeline.nodes import ResultNode
    from ...store import PackedTokens

__all__ = ["LogitAttribution", "LogitAttributionSettings"]

ROWS = 12
"""Largest number of rows of each table: prompts, or components of one prompt."""
PARTS = (("attn_share", "attention"), ("mlp_share", "MLP"))
"""(variable with a component's contributions to the logit, name of the component in drawings)."""


@dataclass(frozen=True)
class LogitAttributionSettings(AnswerSettings):
    """Settings of the workflow `logit_attribution`: the prompts, their answers, and the tokens compared with.

    Raises:
        ConfigError: for a number of answers or words in `against` that is neither 1 nor that of the prompts,
            or for `against` without `difference`.
    """

    against: tuple[str, ...] = setting(
        (),
        "words whose logits are subtracted, one for each prompt or one for all; none: the most likely other "
        "token",
    )
    difference: bool = setting(
        True, "attribute the logit difference of two tokens; false: the answer's logit"
    )
    limit: Natural = setting(64, "number of facts, from the first on; 0: all")
    neurons: Natural = setting(
        10, "number of neurons with the largest shares stored per layer; 0: none, MLP weights are not read"
    )
    figures: Natural = setting(1, "number of prompts that get a figure of their own")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.one_each("word in against", self.against)
        if self.against and not self.difference:
            raise ConfigError(
                "expected against only with difference=true, found difference=false; leave one of them out"
            )


class LogitAttribution(ModelWorkflow):
    """Workflow of direct logit attribution: splits the logit of an answer into what each layer, head and
    neuron contributes."""

    name = "logit_attribution"
    question = "Which layers, heads and neurons write the answer's logit?"
    descriptive = "The logit as a sum of what each component writes to the residual stream."
    settings_type = LogitAttributionSettings
    settings: LogitAttributionSettings

    def plan(self) -> Nodes:
        """Nodes of the compared tokens, and of the contributions (shares) of layers, heads and neurons.

        Raises:
            ConfigError: for a model whose stream is not a sum of layer outputs, whose layers do not all have
                the same components, or, with `neurons`, whose layers do not all have an MLP.
        """
        self._require_sum()
        self._require_parts()
        self._require_neurons()
        settings, files, dtype = self.settings, self.subject.files, self.subject.dtype
        self.texts, self.words = answered(self.subject, settings.prompts, settings.answers, settings.limit)
        against = settings.against * (len(self.texts) if len(settings.against) == 1 else 1)
        tokens = self.subject.pack(self.texts)
        states = self.subject.capture(tokens, *self._hooks())
        readout = readout_node(files, dtype=dtype)
        pair = contrasted_tokens.on(
            final=states["resid_post"],
            targets=self._ids(tokens, self.words, MOST_LIKELY),
            against=self._ids(tokens, against, MOST_LIKELY if settings.difference else NONE),
            readout=readout,
        )
        contrast: dict[str, Any] = {
            "scale": states["ln_final_scale"],
            "targets": pair["target_id"],
            "against": pair["other_id"],
            "readout": readout,
        }
        # Residual streams that do not start at the embedding have a form of the stage of their own.
        start = self.subject.config.stream_start.kind
        form = "" if start == "embed" else f"_{start}"
        form = form if self._has_mlps else "_of_mixers"
        written = {name: states[name] for name in self._written}
        layers = component_attribution.form(f"component_attribution{form}").on(
            embed=states[start], **written, **contrast
        )
        nodes: Nodes = {"tokens": pair, "layers": layers}

        def units(stage: Any, which: Any, norm: str, **states_of: Any) -> ResultNode:
            """Node of the contributions of single heads or neurons. Outputs that are normalised once more
            before they are added to the stream are divided by the captured scale of that norm."""
            if self._has_post_norms:
                states_of["post_scale"] = states[f"{norm}_post_scale"]
            weights = component_weights_node(files, which, dtype=dtype)
            node: ResultNode = stage.on(weights=weights, **states_of, **contrast)
            return node

        if not self._has_units:
            return nodes | {"readout": readout}
        nodes["heads"] = units(head_attribution, "attention", "ln1", z=states["z"])
        if top_k := settings.neurons:
            inputs = {"post_act": states["mlp_post_act"], "top_k": top_k}
            nodes["neurons"] = units(neuron_attribution, "mlp", "ln2", **inputs)
        return nodes | {"readout": readout}

    def _require_sum(self) -> None:
        """Raises ConfigError for a model that normalises the residual stream itself, as such a stream is not
        the sum of layer outputs."""
        config = self.subject.config
        config.require_vocabulary()
        if any(layer.norms == "of stream" for layer in config.layers):
            raise ConfigError(
                "expected a residual stream that is the sum of the outputs of all layers, found "
                f"{config.model_type}, which normalises the stream itself; use logit_lens"
            )
        # Behind the activation of a head such as BERT's, a logit is not a sum of shares.
        config.require_linear_head()

    def _require_parts(self) -> None:
        """Raises ConfigError if some layers lack an output, such as that of an MLP, which others add to the
        stream."""
        config = self.subject.config
        for name in self._written:
            if len(layers := config.layers_with(name)) < config.num_layers:
                raise ConfigError(
                    f"expected {name} in every layer, found it in {len(layers)} of {config.num_layers} "
                    f"layers of {config.model_type}; use logit_lens"
                )

    def _require_neurons(self) -> None:
        """Raises ConfigError if the settings ask for neurons and some layer has no MLP."""
        config = self.subject.config
        mlp_layers = {point.layer for point in config.hook_points if point.kind == "mlp_post_act"}
        if self.settings.neurons and self._has_units and len(mlp_layers) < config.num_layers:
            raise ConfigError(
                f"expected an MLP in every layer to attribute neurons, found one in {len(mlp_layers)} of "
                f"{config.num_layers} of {config.model_type}; leave neurons out: neurons=0"
            )

    @property
    def _has_post_norms(self) -> bool:
        """Whether outputs of attention and MLPs are normalised before they are added to the stream."""
        return any(layer.norms in ("around", "after") for layer in self.subject.config.layers)

    @property
    def _has_units(self) -> bool:
        """Whether the output of every layer is a sum over heads and neurons. False for RWKV, whose outputs
        are multiplied by gates, and for hybrids, of which some layers have no attention heads."""
        config = self.subject.config
        return config.read_kind == "z" and len(config.layers_with("z")) == config.num_layers

    @property
    def _has_mlps(self) -> bool:
        """Whether the model has MLP outputs; Mamba, for example, has none."""
        return bool(self.subject.config.layers_with("mlp_out"))

    @property
    def _written(self) -> tuple[str, ...]:
        """Hook points of the outputs that every layer adds to the residual stream."""
        return ("attn_out", "mlp_out") if self._has_mlps else ("attn_out",)

    def _hooks(self) -> list[str]:
        """Names and patterns of the hook points to capture."""
        last = self.subject.config.num_layers - 1
        start = str(self.subject.config.stream_start)
        hooks = [start, "ln_final.hook_scale", f"blocks.{last}.hook_resid_post"]
        hooks += [f"blocks.*.hook_{name}" for name in self._written]
        if not self._has_units:
            return hooks
        hooks.append("blocks.*.attn.hook_z")
        if self._has_post_norms:
            hooks += ["blocks.*.ln1_post.hook_scale", "blocks.*.ln2_post.hook_scale"]
        return hooks + (["blocks.*.mlp.hook_post_act"] if self.settings.neurons else [])

    def _ids(self, tokens: PackedTokens, words: tuple[str, ...], default: int) -> xr.DataArray:
        """Token ids of the words, int32 [token]: at the last token of every prompt, NONE elsewhere.

        words: one per prompt; without any, `default` is used for all prompts.
        """
        ids = np.full(tokens.n_tokens, NONE, np.int32)
        ends = [tokens.row(i).stop - 1 for i in range(len(self.texts))]
        ids[ends] = self.subject.answer_ids(list(zip(self.texts, words, strict=True))) if words else default
        return column(ids, "token", "ids")

    @cached_property
    def shares(self) -> xr.Dataset:
        """Token ids, logits and contributions (shares) at the last token of every prompt, in memory.

        Ids, logits, embed_share, constant and total are [prompt]; attn_share and mlp_share [layer, prompt];
        head_share [layer, prompt, head]; neuron_id and neuron_share [layer, prompt, rank]. Unit: logits.
        """
        import xarray as xr

        parts = [self.result(name) for name in ("tokens", "layers", "heads", "neurons") if name in self.nodes]
        # The stages label tokens differently; without these labels their results can be merged.
        bare = [part.drop_vars([name for name in part.coords if name != "layer"]) for part in parts]
        # "exact" raises where results have other layers; the default of xarray would fill gaps with NaN.
        shares = xr.merge(bare, compat="override", join="exact", combine_attrs="drop")
        # Only the last token of each prompt has a target.
        last = np.flatnonzero(shares["target_id"].values != NONE)
        shares = shares.isel(token=last).rename(token="prompt").load()
        return shares.assign_coords(prompt=np.arange(len(last)))

    @cached_property
    def vocabulary(self) -> list[str]:
        """Text of each token id."""
        return list(self.result("readout")["token"].values)

    def contrast(self, document: dict[str, Any]) -> str:
        """Compared tokens in words: "' Paris' rather than ' London'"; the first token alone without a second
        one. document: JSON record of a prompt."""
        token, other_token = (_word(document.get(f"{role}_token", "")) for role in ("target", "other"))
        word = _word(document["answer"]) if self.words else token
        answer = repr(token) if word == token else f"{token!r} (of {word})"
        return f"{answer} rather than {other_token!r}" if "other_id" in document else answer

    def top_neurons(self, i: int) -> list[tuple[int, int, float]]:
        """Stored neurons of prompt `i`, largest magnitude first: (layer, neuron, contribution in logits)
        each."""
        if "neurons" not in self.nodes:
            return []
        shares = self.shares.isel(prompt=i)
        size = abs(shares["neuron_share"]).transpose("layer", "rank")
        top = largest(shares, size, None, neuron="neuron_id", share="neuron_share")
        return [(record["layer"], record["neuron"], record["share"]) for record in top]

    def document(self, i: int) -> dict[str, Any]:
        """JSON record of prompt `i`: tokens, their logits, and contributions in logits; "attributed" is the
        sum of these. Components are in the order of the forward pass, the constant of the readout is last."""
        shares = self.shares.isel(prompt=i)
        # Without a second token, the logit itself is attributed.
        tokens = ("target",) if int(shares["other_id"]) == NONE else ("target", "other")
        components = [("embed", shares["embed_share"])]
        for layer in shares["layer"].values.tolist():
            in_layer = shares.sel(layer=layer)
            components += [
                (f"{layer}_{hook}", in_layer[f"{hook.removesuffix('_out')}_share"]) for hook in self._written
            ]
        components.append(("constant", shares["constant"]))
        document: dict[str, Any] = {
            "model_id": self.subject.name,
            "prompt": self.texts[i],
            "answer": self.words[i] if self.words else None,
            **{f"{token}_logit": float(shares[f"{token}_logit"]) for token in tokens},
            **{f"{token}_id": int(shares[f"{token}_id"]) for token in tokens},
            **{f"{token}_token": self.vocabulary[int(shares[f"{token}_id"])] for token in tokens},
            "attributed": float(shares["total"]),
            "components": [{"component": name, "share": float(share)} for name, share in components],
        }
        if "heads" in self.nodes:
            heads = shares["head_share"].transpose("layer", "head")
            document |= {"heads": heads, "attn_bias": shares["attn_bias_share"]}
        if "neurons" in self.nodes:
            names = ("layer", "neuron", "share")
            neurons = [dict(zip(names, neuron, strict=True)) for neuron in self.top_neurons(i)]
            document |= {"neurons": neurons, "mlp_bias": shares["mlp_bias_share"]}
        return document

    @property
    def summary(self) -> str:
        """See `Workflow`: shares of embedding, attention and MLPs in the mean over prompts, and the largest
        share of a head."""
        mean = self.shares.mean("prompt")
        names = {
            "attn_share": "attention writes",
            "mlp_share": "the MLPs write",
            "embed_share": "the embedding is",
        }
        parts = [f"{name} {float(mean[key].sum()):+.2f}" for key, name in names.items() if key in mean]
        attributed = "logit difference" if self.settings.difference else "logit of the answer"
        count = len(self.texts)
        text = (
            f"Of the {attributed} ({float(mean['total']):+.2f}, mean of {count} prompts) {', '.join(parts)}"
        )
        if "heads" not in self.nodes:
            return f"{text}."
        heads = mean["head_share"].transpose("layer", "head")
        row, head = np.unravel_index(int(np.abs(heads.values).argmax()), heads.shape)
        name = f"L{int(heads['layer'][row])}H{head}"
        return f"{text}; the largest share of a head is that of {name}: {float(heads[row, head]):+.2f}."

    def views(self) -> Iterator[View]:
        """Views in reading order: contributions by head and by layer, for the mean of all and for single
        prompts; tables of prompts and components; figures."""
        n_prompts, name, shares = len(self.texts), self.subject.name, self.shares
        cap = self.subject.config.final_logit_softcapping
        results = {"results": lambda: [self.document(i) for i in range(n_prompts)]}
        # A soft cap is not linear, so shares sum to logits before it.
        yield Data(json={"soft_cap": cap, "before_soft_cap": True, **results})
        selectable = [(text, shares.isel(prompt=[i])) for i, text in enumerate(self.texts[:ROWS])]
        if n_prompts > 1:
            selectable.insert(0, ("mean of all", shares))
        attributed = "logit difference" if self.settings.difference else "logit of the answer"
        for unit, draw in (("head", _heads), ("layer", _curves)):
            if f"{unit}s" not in self.nodes:
                continue
            yield Choice(
                title=f"Share of each {unit} in the {attributed}",
                caption=f"Share: what the output of one {'head' if unit == 'head' else 'attention or MLP'} "
                f"adds to the {attributed} at the last token, in logits. It is a direct effect. What later "
                "layers make of the output is not counted.",
                sources=(f"{unit}s",),
                name="prompt",
                options=tuple((text, draw(part)) for text, part in selectable),
            )
        yield self._prompts_table([self.document(i) for i in range(min(ROWS, n_prompts))])
        yield self._parts_table(self.document(0))
        for i in range(min(self.settings.figures, n_prompts)):
            neurons = self.top_neurons(i)[:ROWS]
            yield Figure(
                name=f"logit_attribution_{i}",
                title=f"Direct logit attribution in {name}: {self.contrast(self.document(i))}",
                caption=f"Share: what a component adds to the {attributed} at the last token of "
                f"'{format_text(self.texts[i])}', in logits.",
                panels=(
                    *self._parts(shares.isel(prompt=[i])),
                    *([_neurons(neurons)] if neurons else []),
                ),
            )
        if n_prompts > 1:
            yield Figure(
                name="logit_attribution_mean",
                title=f"Direct logit attribution in {name}: {attributed}",
                caption=f"Share: what a component adds to the {attributed} at the last token, in logits, "
                f"mean of {n_prompts} prompts. Thin lines: 10 % to 90 % quantiles over prompts.",
                panels=self._parts(shares),
            )

    def _parts(self, part: xr.Dataset) -> tuple[View, ...]:
        """Figure panels: contributions of layers, and of heads if computed."""
        return (_bars(part), *([_heads(part, "By head")] if "heads" in self.nodes else []))

    def _prompts_table(self, documents: list[dict[str, Any]]) -> Table:
        """Table of the attributed logits of the first prompts, split by embedding, attention and MLPs."""
        quantity = "difference" if self.settings.difference else "logit"
        attributed = "logit of the answer"
        if self.settings.difference:
            attributed += " minus that of the token compared with it"
        n_further = len(self.texts) - len(documents)
        capped = ", before the soft cap" if self.subject.config.final_logit_softcapping else ""

        def total_share(ending: str, document: dict[str, Any]) -> float:
            components = document["components"]
            return sum((part["share"] for part in components if part["component"].endswith(ending)), 0.0)

        return Table.of(
            documents,
            ("prompt", lambda document: format_text(document["prompt"])),
            ("answer", lambda document: _word(document["target_token"])),
            ("compared with", lambda document: _word(document.get("other_token", ""))),
            (quantity, "attributed", "+.2f"),
            *(
                (name, partial(total_share, ending), "+.2f")
                for name, ending in (("embed", "embed"), ("attention", "attn_out"), ("MLPs", "mlp_out"))
            ),
            title=f"Direct logit attribution in {self.subject.name}, by prompt",
            caption="One row per prompt"
            f"{f'; {n_further} more prompts are in the JSON document' if n_further else ''}. Embed, "
            f"attention, MLPs: what the outputs of these components add to the {attributed}, in "
            f"logits{capped}. With the biases of the final norm and unembedding they sum to the {quantity}.",
        )

    def _parts_table(self, document: dict[str, Any]) -> Table:
        """Table of the components, heads and neurons with the largest shares in the first prompt."""
        parts = {
            "component": [(part["component"], part["share"]) for part in document["components"]],
            "head": [
                (f"L{layer}H{head}", float(share))
                for (layer, head), share in np.ndenumerate(document.get("heads", ()))
            ],
            "neuron": [
                (f"L{neuron['layer']}N{neuron['neuron']}", neuron["share"])
                for neuron in document.get("neurons", ())
            ],
        }
        ranking = {
            name: sorted(shares, key=lambda pair: -abs(pair[1])) for name, shares in parts.items() if shares
        }

        def cell(shares: list[tuple[str, float]], i: int, rank: int) -> Any:
            return shares[rank][i] if rank < len(shares) else None

        columns: list[tuple[Any, ...]] = []
        for name, shares in ranking.items():
            columns += [(name, partial(cell, shares, 0)), ("share", partial(cell, shares, 1), "+.3f")]
        return Table.of(
            range(min(ROWS, len(parts["component"]))),
            *columns,
            title=f"Components with the largest shares in {self.contrast(document)} after "
            f"'{format_text(self.texts[0])}'",
            caption="One row per rank, in each pair of columns; largest magnitude first. Share: what a "
            "component adds to the attributed logit or logit difference, in logits. L2H3: head 3 of layer 2; "
            f"L2N3: neuron 3 of layer 2. All components together sum to {document['attributed']:+.2f}.",
        )


def _word(token: str) -> str:
    """Text of a token without spaces around it."""
    return format_token(token.strip())


def _curves(part: xr.Dataset) -> Lines:
    """Curves of the contributions of attention and MLPs by layer, mean over the prompts of `part`."""
    lines = (Line(name, part[key].mean("prompt").values) for key, name in PARTS if key in part)
    layers = tuple(part["layer"].values.tolist())
    return Lines(x=layers, x_name="layer", y_name="share", unit="logits", lines=tuple(lines))


def _heads(part: xr.Dataset, title: str = "") -> Heatmap:
    """Heatmap of contributions by layer and head, mean over the prompts of `part`; the largest magnitude is
    framed."""
    mean = part["head_share"].mean("prompt").transpose("layer", "head")
    layer, head = ranked(abs(mean), 1)[0].values()
    return Heatmap.of(
        mean,
        title,
        "Each cell: logits that the output of one head (column) of one layer (row) adds at the last token. "
        f"Framed: the largest magnitude, layer {layer}, head {head}, with "
        f"{float(mean.sel(layer=layer, head=head)):+.2f} logits.",
        value_name="share of the head",
        unit="logits",
        diverging=True,
        framed=((layer, head, layer, head),),
        frame_name="largest magnitude",
    )


def _bars(part: xr.Dataset) -> Bars:
    """Bars of the contributions of embedding, layers and biases, and of their sum, mean over the prompts of
    `part`; with 10 % and 90 % quantiles for several prompts."""
    layers = part["layer"].values.tolist()
    # Bars after those of the layers: biases, unless all are 0, and the sum.
    last_bars = {"biases": part["constant"].values} if np.abs(part["constant"]).max() > 0 else {}
    last_bars["sum"] = part["total"].values
    # Every series, [bar, prompt], has a value for every bar; NaN draws none.
    no_bar = np.full((1, part.sizes["prompt"]), np.nan)
    series = []
    for variable, name in PARTS:
        if variable in part:
            by_layer = part[variable].transpose("layer", "prompt").values
            series.append((name, np.concatenate([no_bar, by_layer, *[no_bar] * len(last_bars)])))
    not_layers = np.stack([part["embed_share"].values, *[no_bar[0]] * len(layers), *last_bars.values()])

    def bar(name: str, values: Any) -> Line:
        quantiles = np.quantile(values, [0.1, 0.9], axis=1) if values.shape[1] > 1 else None
        return Line(name, values.mean(axis=1), band=quantiles, control=values is not_layers)

    return Bars(
        title="By layer",
        caption="One group of bars per layer: logits that the output of its attention and its MLP adds at "
        "the last token. Further bars: the embedding, the biases of the readout (final norm and "
        "unembedding), and the sum of all.",
        x=("embedding", *map(str, layers), *last_bars),
        lines=tuple(bar(name, values) for name, values in (*series, ("", not_layers))),
        x_name="layer",
        y_name="share",
        unit="logits",
        across=True,
    )


def _neurons(neurons: list[tuple[int, int, float]]) -> Bars:
    """Bars of the neurons with the largest contributions, the largest magnitude on top. neurons: (layer,
    neuron, contribution) each."""
    shares = np.array([share for *_, share in neurons[::-1]])
    return Bars(
        title="By neuron",
        caption=f"One bar per neuron: logits that it adds at the last token. Shown are the {len(neurons)} "
        "neurons with the largest magnitude.",
        x=tuple(f"layer {layer}, {neuron}" for layer, neuron, _ in neurons[::-1]),
        lines=(Line("share", shares),),
        signed=True,
        x_name="",
        y_name="share",
        unit="logits",
        across=True,
    )

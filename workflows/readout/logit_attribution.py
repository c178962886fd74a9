"""Which layers, heads and neurons make the model say what it says? Direct logit attribution over prompts.

Captures what every layer adds to the residual stream at the last token of each prompt, and splits the logit
of the answer, minus that of the most likely other token, into their shares (stages/logits/attribution.py,
attribution_units.py). Shares, the biases of the readout included, sum to the difference of the logits; where
a model soft-caps its logits, to the difference before the cap. Of RWKV there are shares of layers alone, as
what its heads and neurons write goes through gates.

Defaults: the facts that ship with the specimen. Prompts without answers are asked about the token the model
itself finds most likely. An answer of several tokens is followed by its first one.

With one layer's share comes a caution: a part may write a token's direction only for a later part to read or
to cancel; direct shares say what reaches the readout, not what would change without it
(`activation_patching`).
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
"""Prompts, and parts of a prompt, listed in the tables."""
PARTS = (("attn_share", "attention"), ("mlp_share", "MLP"))


@dataclass(frozen=True)
class LogitAttributionSettings(AnswerSettings):
    """What `--set` can change."""

    against: tuple[str, ...] = setting((), "what to tell it from, likewise; none: the likeliest other token")
    difference: bool = setting(True, "attribute the difference of two logits; false: the answer's logit")
    limit: Natural = setting(64, "how many of the shipped facts, from the first on; 0 takes all")
    neurons: Natural = setting(10, "neurons kept per layer; 0: none, and their weights are not read")
    figures: Natural = setting(1, "how many prompts get a figure of their own")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.one_each("word in against", self.against)
        if self.against and not self.difference:
            raise ConfigError("expected difference=true with against, found false; leave one of them out")


class LogitAttribution(ModelWorkflow):
    """The logits of answers, split."""

    name = "logit_attribution"
    question = "Which layers, heads and neurons write the answer's logit?"
    descriptive = "The logit as a sum of what each component writes to the residual stream."
    settings_type = LogitAttributionSettings
    settings: LogitAttributionSettings

    def plan(self) -> Nodes:
        """The tokens told apart, and what layers, heads and neurons have in their logits."""
        self._require_sum()
        self._require_parts()
        self._require_neurons()
        given, files, dtype = self.settings, self.subject.files, self.subject.dtype
        self.texts, self.words = answered(given.prompts, given.answers, given.limit)
        others = given.against * (len(self.texts) if len(given.against) == 1 else 1)
        tokens = self.subject.pack(self.texts)
        states = self.subject.capture(tokens, *self._hooks())
        readout = readout_node(files, dtype=dtype)
        pair = contrasted_tokens.on(
            final=states["resid_post"],
            targets=self._ids(tokens, self.words, MOST_LIKELY),
            against=self._ids(tokens, others, MOST_LIKELY if given.difference else NONE),
            readout=readout,
        )
        told: dict[str, Any] = {
            "scale": states["ln_final_scale"],
            "targets": pair["target_id"],
            "against": pair["other_id"],
            "readout": readout,
        }
        start = self.subject.config.stream_start.kind
        form = "" if start == "embed" else f"_{start}"
        form = form if self._has_mlps else "_of_mixers"
        written = {name: states[name] for name in self._written}
        layers = component_attribution.form(f"component_attribution{form}").on(
            embed=states[start], **written, **told
        )
        nodes: Nodes = {"tokens": pair, "layers": layers}

        def units(stage: Any, which: Any, norm: str, **states_of: Any) -> ResultNode:
            """The units of one kind of part; where what they write is normed once more, by its scale."""
            if self._has_post_norms:
                states_of["post_scale"] = states[f"{norm}_post_scale"]
            weights = component_weights_node(files, which, dtype=dtype)
            node: ResultNode = stage.on(weights=weights, **states_of, **told)
            return node

        if not self._has_units:
            return nodes | {"readout": readout}
        nodes["heads"] = units(head_attribution, "attention", "ln1", z=states["z"])
        if top_k := given.neurons:
            read = {"post_act": states["mlp_post_act"], "top_k": top_k}
            nodes["neurons"] = units(neuron_attribution, "mlp", "ln2", **read)
        return nodes | {"readout": readout}

    def _require_sum(self) -> None:
        """Raise ConfigError where norms stand on the stream, which is then not the sum of what is written."""
        config = self.subject.config
        if any(layer.norms == "of stream" for layer in config.layers):
            raise ConfigError(
                "expected a model whose residual stream is the sum of what its parts write, found "
                f"{config.model_type}, which norms the stream itself; read its layers with the logit lens"
            )
        config.require_linear_head()

    def _require_parts(self) -> None:
        """Raise ConfigError where layers do not all write alike."""
        config = self.subject.config
        for name in self._written:
            if len(held := config.layers_with(name)) < config.num_layers:
                raise ConfigError(
                    f"expected {name} in every layer, found it in {len(held)} of {config.num_layers} of "
                    f"{config.model_type}; read its layers with the logit lens"
                )

    def _require_neurons(self) -> None:
        """Raise ConfigError where neurons are asked for and some layer has no MLP of its own."""
        config = self.subject.config
        having = {point.layer for point in config.hook_points if point.kind == "mlp_post_act"}
        if self.settings.neurons and self._has_units and len(having) < config.num_layers:
            raise ConfigError(
                f"expected an MLP in every layer to tell neurons apart, found one in {len(having)} of "
                f"{config.num_layers} of {config.model_type}; leave neurons out: neurons=0"
            )

    @property
    def _has_post_norms(self) -> bool:
        return any(layer.norms in ("around", "after") for layer in self.subject.config.layers)

    @property
    def _has_units(self) -> bool:
        """Whether what heads and neurons write is a sum over them, in every layer: not where it goes through
        gates (RWKV), or some layers have no heads that attend (hybrids)."""
        config = self.subject.config
        return config.read_kind == "z" and len(config.layers_with("z")) == config.num_layers

    @property
    def _has_mlps(self) -> bool:
        return bool(self.subject.config.layers_with("mlp_out"))

    @property
    def _written(self) -> tuple[str, ...]:
        """What every layer adds to the stream."""
        return ("attn_out", "mlp_out") if self._has_mlps else ("attn_out",)

    def _hooks(self) -> list[str]:
        """What attribution reads of a forward pass."""
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
        """Token ids at the last token of every prompt, NONE elsewhere."""
        ids = np.full(tokens.n_tokens, NONE, np.int32)
        told = self.subject.answer_ids(list(zip(self.texts, words, strict=True))) if words else default
        ids[[tokens.row(i).stop - 1 for i in range(len(self.texts))]] = told
        return column(ids, "token", "ids")

    @cached_property
    def shares(self) -> xr.Dataset:
        """Tokens, their logits and all shares at the last token of every prompt, in memory.

        [prompt], [layer, prompt], head_share [layer, prompt, head], neuron_id and neuron_share
        [layer, prompt, rank].
        """
        import xarray as xr

        parts = [self.result(name) for name in self.nodes if name != "readout"]
        kept = [part.drop_vars([name for name in part.coords if name != "layer"]) for part in parts]
        found = xr.merge(kept, compat="override", join="exact", combine_attrs="drop")
        last = np.flatnonzero(found["target_id"].values != NONE)
        found = found.isel(token=last).rename(token="prompt").load()
        return found.assign_coords(prompt=np.arange(len(last)))

    @cached_property
    def vocabulary(self) -> list[str]:
        """Text of each token id."""
        return list(self.result("readout")["token"].values)

    def contrast(self, told: dict[str, Any]) -> str:
        """The answer's token and the token it is compared with, in words."""
        token, other = (_word(told.get(f"{which}_token", "")) for which in ("target", "other"))
        word = _word(told["answer"]) if self.words else token
        said = repr(token) if word == token else f"{token!r} (of {word})"
        return f"{said} rather than {other!r}" if "other_id" in told else said

    def top_neurons(self, i: int) -> list[tuple[int, int, float]]:
        """(layer, neuron, share) of the neurons kept of prompt `i`, largest magnitude first."""
        if "neurons" not in self.nodes:
            return []
        row = self.shares.isel(prompt=i)
        size = abs(row["neuron_share"]).transpose("layer", "rank")
        top = largest(row, size, None, neuron="neuron_id", share="neuron_share")
        return [(one["layer"], one["neuron"], one["share"]) for one in top]

    def document(self, i: int) -> dict[str, Any]:
        """Prompt `i`: tokens, their logits and every share; "attributed" is what the shares sum to.

        Components come in order of writing, the constant part of the readout last.
        """
        row = self.shares.isel(prompt=i)
        words = ("target",) if int(row["other_id"]) == NONE else ("target", "other")
        written = [
            (f"{int(part['layer'])}_{name}", part[f"{name.removesuffix('_out')}_share"])
            for part in (row.sel(layer=layer) for layer in row["layer"])
            for name in self._written
        ]
        parts = [("embed", row["embed_share"]), *written, ("constant", row["constant"])]
        found: dict[str, Any] = {
            "model_id": self.subject.name,
            "prompt": self.texts[i],
            "answer": self.words[i] if self.words else None,
            **{f"{word}_logit": float(row[f"{word}_logit"]) for word in words},
            **{f"{word}_id": int(row[f"{word}_id"]) for word in words},
            **{f"{word}_token": self.vocabulary[int(row[f"{word}_id"])] for word in words},
            "attributed": float(row["total"]),
            "components": [{"component": name, "share": float(share)} for name, share in parts],
        }
        if "heads" in self.nodes:
            heads = row["head_share"].transpose("layer", "head")
            found |= {"heads": heads, "attn_bias": row["attn_bias_share"]}
        if "neurons" in self.nodes:
            top = [{"layer": a, "neuron": b, "share": share} for a, b, share in self.top_neurons(i)]
            found |= {"neurons": top, "mlp_bias": row["mlp_bias_share"]}
        return found

    def views(self) -> Iterator[View]:
        """Shares by layer and by head, of the mean and of each of the first prompts; and the tables."""
        count, name, shares = len(self.texts), self.subject.name, self.shares
        cap = self.subject.config.final_logit_softcapping
        results = {"results": lambda: [self.document(i) for i in range(count)]}
        yield Data(json={"soft_cap": cap, "before_soft_cap": True, **results})
        parts = [(text, shares.isel(prompt=[i])) for i, text in enumerate(self.texts[:ROWS])]
        parts = [("mean of all", shares), *parts] if count > 1 else parts
        for what, make in (("head", _heads), ("layer", _curves)):
            if f"{what}s" not in self.nodes:
                continue
            yield Choice(
                title=f"What each {what} adds to the answer",
                sources=(f"{what}s",),
                name="prompt",
                options=tuple((text, make(part)) for text, part in parts),
            )
        yield self._prompts_table([self.document(i) for i in range(min(ROWS, count))])
        yield self._parts_table(self.document(0))
        for i in range(min(self.settings.figures, count)):
            part = shares.isel(prompt=[i])
            neurons = self.top_neurons(i)[:ROWS]
            yield Figure(
                name=f"logit_attribution_{i}",
                title=f"What makes {name} say {self.contrast(self.document(i))}",
                caption=f"after '{format_text(self.texts[i])}'",
                panels=(*self._parts(part), *([_neurons(neurons)] if neurons else [])),
            )
        if count > 1:
            what = "the answer rather than another word" if self.settings.difference else "the answer"
            yield Figure(
                name="logit_attribution_mean",
                title=f"What makes {name} say {what}",
                caption=f"mean of {count} prompts; lines: the middle 80% of them",
                panels=self._parts(shares),
            )

    def _parts(self, part: xr.Dataset) -> tuple[View, ...]:
        """Views of the shares of layers, and of heads where these have shares."""
        return (_bars(part), *([_heads(part, "By head")] if "heads" in self.nodes else []))

    def _prompts_table(self, told: list[dict[str, Any]]) -> Table:
        """Table of the attributed logits of the first prompts, split by embedding, attention and MLPs."""
        what, more = "difference" if self.settings.difference else "logit", len(self.texts) - len(told)
        capped = ", before the soft cap" if self.subject.config.final_logit_softcapping else ""

        def part(ending: str, one: dict[str, Any]) -> float:
            found = one["components"]
            return sum((each["share"] for each in found if each["component"].endswith(ending)), 0.0)

        return Table.of(
            told,
            ("prompt", lambda one: format_text(one["prompt"])),
            ("answer", lambda one: _word(one["target_token"])),
            ("told from", lambda one: _word(one.get("other_token", ""))),
            (what, "attributed", "+.2f"),
            *(
                (column, partial(part, ending), "+.2f")
                for column, ending in (("embed", "embed"), ("attention", "attn_out"), ("MLPs", "mlp_out"))
            ),
            title=f"Logits of {self.subject.name}, attributed",
            caption=f"{f'and {more} more, all in the JSON; ' if more else ''}shares in logits{capped}; "
            f"with the readout's biases they sum to the {what}",
        )

    def _parts_table(self, told: dict[str, Any]) -> Table:
        """What counts most in the first prompt: layers, heads and neurons, each by itself."""
        parts = {
            "part": [(one["component"], one["share"]) for one in told["components"]],
            "head": [(f"L{a}H{b}", float(share)) for (a, b), share in np.ndenumerate(told.get("heads", ()))],
            "neuron": [(f"L{one['layer']}N{one['neuron']}", one["share"]) for one in told.get("neurons", ())],
        }
        ranked = {name: sorted(found, key=lambda one: -abs(one[1])) for name, found in parts.items() if found}

        def cell(found: list[tuple[str, float]], of: int, rank: int) -> Any:
            return found[rank][of] if rank < len(found) else None

        columns: list[tuple[Any, ...]] = []
        for name, found in ranked.items():
            columns += [(name, partial(cell, found, 0)), ("share", partial(cell, found, 1), "+.3f")]
        return Table.of(
            range(min(ROWS, len(parts["part"]))),
            *columns,
            title=f"What counts most for {self.contrast(told)} after '{format_text(self.texts[0])}'",
            caption=f"in logits, largest magnitude first, of {told['attributed']:+.2f} in all",
        )


def _word(token: str) -> str:
    return format_token(token.strip())


def _curves(part: xr.Dataset) -> Lines:
    """Shares of attention and MLPs by layer, mean of some prompts."""
    lines = (Line(name, part[key].mean("prompt").values) for key, name in PARTS if key in part)
    layers = tuple(part["layer"].values.tolist())
    return Lines(x=layers, x_name="layer", y_name="share", unit="logits", lines=tuple(lines))


def _heads(part: xr.Dataset, title: str = "") -> Heatmap:
    """Shares of heads, mean of some prompts; the largest is framed."""
    mean = part["head_share"].mean("prompt").transpose("layer", "head")
    layer, head = ranked(abs(mean), 1)[0].values()
    return Heatmap.of(
        mean,
        title,
        f"framed, most: layer {layer}, head {head}, {float(mean.sel(layer=layer, head=head)):+.2f}",
        value_name="share of the head",
        unit="logits",
        diverging=True,
        framed=((layer, head) * 2,),
        frame_name="counts most",
    )


def _bars(part: xr.Dataset) -> Bars:
    """The embedding below, layers above it, the whole on top; of several prompts, the middle 80 % too."""
    layers = part["layer"].values.tolist()
    after = {"biases": part["constant"].values} if np.abs(part["constant"]).max() > 0 else {}
    after["sum"] = part["total"].values
    none = np.full((1, part.sizes["prompt"]), np.nan)
    written = [(name, part[key].transpose("layer", "prompt")) for key, name in PARTS if key in part]
    series = [(name, np.concatenate([none, values, *[none] * len(after)])) for name, values in written]
    rest = np.stack([part["embed_share"].values, *[none[0]] * len(layers), *after.values()])

    def bar(name: str, values: Any) -> Line:
        band = np.quantile(values, [0.1, 0.9], axis=1) if values.shape[1] > 1 else None
        return Line(name, values.mean(axis=1), band=band, control=values is rest)

    return Bars(
        title="By layer",
        x=("embedding", *map(str, layers), *after),
        lines=tuple(bar(name, values) for name, values in (*series, ("", rest))),
        x_name="layer",
        y_name="share",
        unit="logits",
        across=True,
    )


def _neurons(neurons: list[tuple[int, int, float]]) -> Bars:
    """The largest neurons, largest on top."""
    shares = np.array([share for *_, share in neurons[::-1]])
    return Bars(
        title="By neuron",
        caption=f"the {len(neurons)} largest; below zero: against",
        x=tuple(f"layer {layer}, {neuron}" for layer, neuron, _ in neurons[::-1]),
        lines=(Line("share", shares),),
        signed=True,
        x_name="",
        y_name="share",
        unit="logits",
        across=True,
    )

"""Which layers, heads and neurons make the model say what it says? Direct logit attribution over prompts.

Captures what every layer adds to the residual stream at the last token of each prompt, and splits the logit
of the answer, minus that of the most likely other token, into their shares (stages/attribution.py,
attribution_units.py). Shares, the biases of the readout included, sum to the difference of the logits; where
a model soft-caps its logits, to the difference before the cap.

Defaults: the facts that ship with the specimen. Prompts without answers are asked about the token the model
itself finds most likely. An answer of several tokens is followed by its first one.

With one layer's share comes a caution: a part may write a token's direction only for a later part to read or
to cancel; direct shares say what reaches the readout, not what would change without it
(`activation_patching`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..stages.attribution import component_attribution, contrasted_tokens
from ..stages.attribution_units import (
    head_attribution,
    neuron_attribution,
)
from ..stages.component_weights import component_weights_node
from ..stages.lens import format_token
from ..stages.logit_directions import MOST_LIKELY, NONE
from ..stages.readout import readout_node
from ..store.errors import ConfigError
from .answers import plain
from .settings import setting
from .subject import Subject, shipped_facts
from .workflow import Workflow

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.figure import Figure
    from rich.table import Table

    from ..stages.forward.model import Model
    from ..store import PackedTokens
    from .report import Element

__all__ = ["LogitAttribution", "Settings"]

ROWS = 12
"""Prompts, and parts of a prompt, listed in the tables."""


@dataclass(frozen=True)
class Settings:
    """What `--set` can change."""

    model: str = setting("specimen", 'hub id, directory, or "specimen"')
    prompts: tuple[str, ...] = setting((), "prompts to read; none: the facts shipped with mizarr")
    answers: tuple[str, ...] = setting((), "what comes next, one per prompt or for all; none: the likeliest")
    against: tuple[str, ...] = setting((), "what to tell it from, likewise; none: the likeliest other token")
    difference: bool = setting(True, "attribute the difference of two logits; false: the answer's logit")
    limit: int = setting(64, "how many of the shipped facts, from the first on; 0 takes all")
    neurons: int = setting(10, "neurons kept per layer; 0: none, and their weights are not read")
    figures: int = setting(1, "how many prompts get a figure of their own")
    dtype: str = setting("float32", "what the model computes in")

    def __post_init__(self) -> None:
        if self.neurons < 0 or self.limit < 0:
            raise ConfigError(
                f"expected neurons and limit to be 0 or more, found {self.neurons} and {self.limit}"
            )
        for name, words in (("answer", self.answers), ("word in against", self.against)):
            if words and len(words) not in (1, len(self.prompts)):
                raise ConfigError(
                    f"expected one {name}, or one per prompt ({len(self.prompts)}), found {len(words)}"
                )
        if self.against and not self.difference:
            raise ConfigError("expected difference=true with against, found false; leave one of them out")


class LogitAttribution(Workflow):
    """The logits of answers, split."""

    name = "logit_attribution"
    question = "Which layers, heads and neurons make the model say it?"
    settings_type = Settings

    def __init__(self, settings: Settings, model: Model | None = None) -> None:
        super().__init__(settings)
        self.texts, self.words = settings.prompts, settings.answers
        if not self.texts:
            facts = shipped_facts()[: settings.limit or None]
            self.texts, self.words = tuple(f["prompt"] for f in facts), tuple(f["target"] for f in facts)
        elif len(self.words) == 1:
            self.words *= len(self.texts)
        self.others = settings.against * (len(self.texts) if len(settings.against) == 1 else 1)
        self.subject = Subject(model or settings.model, settings.dtype)
        tokens = self.subject.pack(self.texts)
        states = self.subject.capture(tokens, *self._hooks())
        files, dtype = self.subject.files, self.subject.dtype
        readout = readout_node(files, dtype=dtype)
        pair = contrasted_tokens.on(
            final=states["resid_post"],
            targets=self._ids(tokens, self.words, MOST_LIKELY),
            against=self._ids(tokens, self.others, MOST_LIKELY if settings.difference else NONE),
            readout=readout,
        )
        told: dict[str, Any] = {
            "scale": states["ln_final_scale"],
            "targets": pair["target_id"],
            "against": pair["other_id"],
            "readout": readout,
        }
        written = {name: states[name] for name in ("embed", "attn_out", "mlp_out")}
        self.nodes = {"tokens": pair, "layers": component_attribution.on(**written, **told)}
        weights = component_weights_node(files, "attention", dtype=dtype)
        given = {"z": states["z"], "weights": weights, **told}
        if self._has_post_norms:
            self.nodes["heads"] = head_attribution.on(post_scale=states["ln1_post_scale"], **given)
        else:
            self.nodes["heads"] = head_attribution.on(**given)
        if settings.neurons:
            weights = component_weights_node(files, "mlp", dtype=dtype)
            given = {"post_act": states["mlp_post_act"], "weights": weights, **told}
            given["top_k"] = settings.neurons
            if self._has_post_norms:
                scale = states["ln2_post_scale"]
                self.nodes["neurons"] = neuron_attribution.on(post_scale=scale, **given)
            else:
                self.nodes["neurons"] = neuron_attribution.on(**given)
        self.nodes["readout"] = readout

    @property
    def _has_post_norms(self) -> bool:
        return any(layer.norms == "around" for layer in self.subject.config.layers)

    def _hooks(self) -> list[str]:
        """What attribution reads of a forward pass."""
        last = self.subject.config.num_layers - 1
        hooks = ["hook_embed", "ln_final.hook_scale", f"blocks.{last}.hook_resid_post"]
        hooks += ["blocks.*.hook_attn_out", "blocks.*.hook_mlp_out", "blocks.*.attn.hook_z"]
        if self._has_post_norms:
            hooks += ["blocks.*.ln1_post.hook_scale", "blocks.*.ln2_post.hook_scale"]
        return hooks + (["blocks.*.mlp.hook_post_act"] if self.settings.neurons else [])

    def _ids(self, tokens: PackedTokens, words: tuple[str, ...], default: int) -> xr.DataArray:
        """Token ids at the last token of every prompt, NONE elsewhere."""
        import xarray as xr

        ids = np.full(tokens.n_tokens, NONE, np.int32)
        for i, text in enumerate(self.texts):
            ids[tokens.row(i).stop - 1] = self.subject.answer_id(text, words[i]) if words else default
        return xr.DataArray(ids, dims="token", name="ids")

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

    def contrast(self, i: int) -> str:
        """What is attributed in prompt `i`, in words: the answer's token, and what it is told from."""
        target, other = (int(self.shares[name][i]) for name in ("target_id", "other_id"))
        token = self._token(target)
        word = format_token(self.words[i]).strip() if self.words else token
        told = repr(token) if word == token else f"{token!r} (of {word})"
        return told if other == NONE else f"{told} rather than {self._token(other)!r}"

    def _token(self, token: int) -> str:
        return format_token(self.vocabulary[token]).strip()

    def components(self, i: int) -> list[tuple[str, float]]:
        """Label and share of every part of prompt `i`'s logit, in order of writing; "constant" comes last."""
        row = self.shares.isel(prompt=i)
        found = [
            (f"{layer}_{name}_out", float(row[f"{name}_share"].sel(layer=layer)))
            for layer in row["layer"].values.tolist()
            for name in ("attn", "mlp")
        ]
        return [("embed", float(row["embed_share"])), *found, ("constant", float(row["constant"]))]

    def top_heads(self, i: int) -> list[tuple[int, int, float]]:
        """(layer, head, share) of prompt `i`'s heads, largest magnitude first."""
        table = self.shares["head_share"].isel(prompt=i).transpose("layer", "head").values
        order = np.argsort(-np.abs(table), axis=None, kind="stable")
        return [(*divmod(int(k), table.shape[1]), float(table.flat[k])) for k in order]

    def top_neurons(self, i: int) -> list[tuple[int, int, float]]:
        """(layer, neuron, share) of the neurons kept of prompt `i`, largest magnitude first."""
        if not self.settings.neurons:
            return []
        row = self.shares.isel(prompt=i).transpose("layer", "rank", ...)
        ids, shares = row["neuron_id"].values, row["neuron_share"].values
        order = np.argsort(-np.abs(shares), axis=None, kind="stable")
        return [(int(k) // shares.shape[1], int(ids.flat[k]), float(shares.flat[k])) for k in order]

    def tables(self) -> list[Table]:
        """The prompts with what is attributed, and the parts of the first one that count most."""
        return [self._prompts_table(), self._parts_table(0)]

    def draw(self, folder: Path) -> list[Path]:
        """A page for each of the first prompts, and one of the mean over all."""
        from .figures_attribution import attribution_page

        def page(i: int) -> Figure:
            return attribution_page(
                self.shares.isel(prompt=[i]),
                self.top_neurons(i)[:ROWS],
                title=f"What makes {self.subject.name} say {self.contrast(i)}",
                told=f"after {format_token(self.texts[i])!r}",
                footer=self.footer,
            )

        def mean() -> Figure:
            n = len(self.texts)
            what = "the answer rather than another word" if self.settings.difference else "the answer"
            return attribution_page(
                self.shares,
                [],
                title=f"What makes {self.subject.name} say {what}",
                told=f"mean of {n} prompts; lines: the middle 80% of them",
                footer=self.footer,
            )

        shown = range(min(self.settings.figures, len(self.texts)))
        files = [self.figure(folder / f"logit_attribution_{i}.png", partial(page, i)) for i in shown]
        if len(self.texts) > 1:
            files.append(self.figure(folder / "logit_attribution_mean.png", mean))
        return files

    def elements(self) -> list[Element]:
        """Shares by layer and by head, of the mean and of each of the first prompts; and the tables."""
        from .report import Choice, Heatmap, Line, Lines

        of_prompts = [(self.texts[i], self.shares.isel(prompt=i)) for i in range(min(ROWS, len(self.texts)))]
        mean = self.shares[["head_share", "attn_share", "mlp_share"]].mean("prompt")
        parts = [("mean of all", mean), *of_prompts] if len(self.texts) > 1 else of_prompts

        def heads(part: xr.Dataset) -> Element:
            shares = part["head_share"].transpose("layer", "head")
            return Heatmap.of(shares, value_name="share of the head", unit="logits", diverging=True)

        def layers(part: xr.Dataset) -> Element:
            curves = (Line("attention", part["attn_share"].values), Line("MLP", part["mlp_share"].values))
            x = tuple(part["layer"].values.tolist())
            return Lines(x=x, x_name="layer", y_name="share", unit="logits", lines=curves)

        views: list[Element] = [
            Choice(
                title=title,
                sources=(source,),
                name="prompt",
                options=tuple((text, view(part)) for text, part in parts),
            )
            for title, source, view in (
                ("What each head adds to the answer", "heads", heads),
                ("What each layer adds to the answer", "layers", layers),
            )
        ]
        return [*views, *super().elements()]

    def to_json(self) -> dict[str, Any]:
        """Per prompt the tokens, their logits and every share; "attributed" is what the shares sum to."""
        cap = self.subject.config.final_logit_softcapping
        found = {**self.header(), "soft_cap": cap, "before_soft_cap": True}
        return {**found, "results": [self._prompt_json(i) for i in range(len(self.texts))]}

    def _prompt_json(self, i: int) -> dict[str, Any]:
        row = self.shares.isel(prompt=i)
        found: dict[str, Any] = {
            "model_id": self.subject.name,
            "prompt": self.texts[i],
            "answer": self.words[i] if self.words else None,
            **self._token_json(row, "target"),
            **(self._token_json(row, "other") if int(row["other_id"]) != NONE else {}),
            "attributed": float(row["total"]),
            "components": [{"component": name, "share": share} for name, share in self.components(i)],
            "heads": row["head_share"].transpose("layer", "head").values.tolist(),
            "attn_bias": row["attn_bias_share"].values.tolist(),
        }
        if self.settings.neurons:
            top = [{"layer": a, "neuron": b, "share": share} for a, b, share in self.top_neurons(i)]
            found |= {"neurons": top, "mlp_bias": row["mlp_bias_share"].values.tolist()}
        return found

    def _token_json(self, row: xr.Dataset, which: str) -> dict[str, Any]:
        token = int(row[f"{which}_id"])
        logit = float(row[f"{which}_logit"])
        return {f"{which}_id": token, f"{which}_token": self.vocabulary[token], f"{which}_logit": logit}

    def _prompts_table(self) -> Table:
        from rich.table import Table

        n = len(self.texts)
        what = "difference" if self.settings.difference else "logit"
        table = Table(title=f"Logits of {self.subject.name}, attributed", box=None, pad_edge=False)
        table.add_column("prompt", no_wrap=True, overflow="ellipsis", max_width=24)
        table.add_column("answer", no_wrap=True, overflow="ellipsis", max_width=10)
        table.add_column("told from", no_wrap=True, min_width=9, overflow="ellipsis", max_width=10)
        for column in (what, "embed", "attention", "MLPs"):
            table.add_column(column, justify="right", no_wrap=True, min_width=len(column))
        for i in range(min(ROWS, n)):
            row = self.shares.isel(prompt=i)
            other = int(row["other_id"])
            words = [self._token(int(row["target_id"])), "" if other == NONE else self._token(other)]
            sums = [row["embed_share"], row["attn_share"].sum("layer"), row["mlp_share"].sum("layer")]
            numbers = [f"{float(value):+.2f}" for value in (row["total"], *sums)]
            table.add_row(plain(self.texts[i]), *map(plain, words), *numbers)
        more = f"and {n - ROWS} more, all in the JSON; " if n > ROWS else ""
        capped = ", before the soft cap" if self.subject.config.final_logit_softcapping else ""
        table.caption = f"{more}shares in logits{capped}; with the readout's biases they sum to the {what}"
        return table

    def _parts_table(self, i: int) -> Table:
        from rich.table import Table

        title = f"What counts most for {plain(self.contrast(i))} after {plain(self.texts[i])!r}"
        table = Table(title=title, box=None, pad_edge=False)
        layers = sorted(self.components(i), key=lambda part: -abs(part[1]))
        heads = [(f"L{layer}H{head}", share) for layer, head, share in self.top_heads(i)]
        neurons = [(f"L{layer}N{neuron}", share) for layer, neuron, share in self.top_neurons(i)]
        columns = [("part", layers), ("head", heads), *([("neuron", neurons)] if neurons else [])]
        for name, _ in columns:
            table.add_column(name, no_wrap=True, min_width=12)
            table.add_column("share", justify="right", no_wrap=True)
        for k in range(min(ROWS, len(layers))):
            cells = [found[k] if k < len(found) else None for _, found in columns]
            table.add_row(*(text for cell in cells for text in _told(cell)))
        table.caption = f"in logits, largest magnitude first, of {float(self.shares['total'][i]):+.2f} in all"
        return table


def _told(part: tuple[str, float] | None) -> tuple[str, str]:
    return ("", "") if part is None else (part[0], f"{part[1]:+.3f}")


WORKFLOW = LogitAttribution

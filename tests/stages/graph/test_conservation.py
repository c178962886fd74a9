"""Edges into a target sum to what it reads, but for constants: on random models of every family, in float64.

The other side of the equation is computed forwards, layer by layer, by plain matrix products with the same
frozen patterns and divisors; the maps under test go backwards.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import mizarr
from mizarr.stages.forward.architectures.points import HookPoint
from mizarr.stages.graph.options import GraphOptions
from mizarr.stages.graph.prepare import prepare
from mizarr.stages.graph.rows.selection import RowSelection
from mizarr.stages.graph.rows.targets import TargetChoice
from mizarr.store.errors import ConfigError

from ..forward.random_hybrids import save_random_hybrid
from ..forward.random_models import FAMILIES, save_random_model
from .random_transcoders import KINDS, save_random_transcoders

AS_BLOCKS = ("gemma3_text", "granite", "smollm3")
"""Families told as blocks: norms around, what is added multiplied, layers without rope."""
PROMPT = [0, 7, 42, 99, 5, 13, 60, 250, 33]


def parts_of(layer: Any) -> Any:
    """Norms, values and output projection of a layer."""
    norms = {name: layer.norms.get(name) for name in ("ln1", "ln2", "ln1_post", "ln2_post")}
    attention = layer.mixers[0].weights
    return SimpleNamespace(**norms, v=attention.v, o=attention.o)


class Forward:
    """The frozen model, forwards, in float64."""

    def __init__(self, model: mizarr.Model, prepared) -> None:
        self.config, self.weights = model.config, model.network.weights
        self.layers = [parts_of(layer) for layer in self.weights.layers]
        self.sizes = model.config.axis_sizes
        self.frozen, self.dictionary = prepared.frozen, prepared.dictionary
        self.last: torch.Tensor

    def norm(self, x: torch.Tensor, weights, name: str, layer: int | None) -> torch.Tensor:
        scale = self.frozen.scales[HookPoint(f"{name}_scale", layer)].double()[:, None]
        gain = weights.weight.double() + (1 if self.config.norm_type == "gemma_rms" else 0)
        if self.config.norm_type != "layer":
            return x / scale * gain
        return (x - x.mean(-1, keepdim=True)) / scale * gain + weights.bias.double()

    def attention(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        w, heads, kv_heads, d_head = (
            self.layers[layer],
            *(self.sizes[axis] for axis in ("head", "kv_head", "d_head")),
        )
        v = F.linear(x, w.v.weight.double(), None if w.v.bias is None else w.v.bias.double())
        v = v.unflatten(-1, (kv_heads, d_head)).transpose(0, 1)
        v = v.repeat_interleave(heads // kv_heads, 0)
        z = (self.frozen.patterns[layer].double() @ v).transpose(0, 1).flatten(1)
        return F.linear(z, w.o.weight.double(), None if w.o.bias is None else w.o.bias.double())

    def reads(self, embed: torch.Tensor, written: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """What features read at every layer, when the embedding and what is written (without skips) are
        these; at the number of layers, the final norm's output."""
        found, x = {}, embed
        for layer, w in enumerate(self.layers):
            h = self.attention(self.norm(x, w.ln1, "ln1", layer), layer)
            if w.ln1_post is not None:
                h = self.norm(h, w.ln1_post, "ln1_post", layer)
            x = x + h
            kind = self.dictionary.layout.read
            read = x
            if kind != "resid_mid":
                read = self.norm(x, w.ln2, "ln2", layer)
            if kind == "ln2_normalized":
                scale = self.frozen.scales[HookPoint.ln2_scale(layer)].double()[:, None]
                centred = x - x.mean(-1, keepdim=True) if self.config.norm_type == "layer" else x
                read = centred / scale
            found[layer] = read
            y = written[layer] + self.dictionary.layer(layer).skip(read)
            if self.dictionary.layout.write == "mlp_post" and w.ln2_post is not None:
                y = self.norm(y, w.ln2_post, "ln2_post", layer)
            x = x + y
        found[len(found)] = self.norm(x, self.weights.final_norm, "ln_final", None)
        return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, mizarr.Model] = {}

    def model(family: str) -> mizarr.Model:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            (save_random_hybrid if family in AS_BLOCKS else save_random_model)(folder, family, 5)
            made[family] = mizarr.Model.from_pretrained(folder)
        return made[family]

    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", [*FAMILIES, *AS_BLOCKS])
@pytest.mark.parametrize("zero", [1, 3])
def test_edges_sum_to_what_a_target_reads(family: str, kind: str, zero: int, models, tmp_path: Path):
    model = models(family)
    dictionary = mizarr.Dictionary.from_pretrained(save_random_transcoders(tmp_path / kind, model, kind))
    options = GraphOptions(TargetChoice(tokens=(3, 17)), RowSelection(), zero, "float64")
    prepared = prepare(model, dictionary, PROMPT, options, memory=1 << 28)
    forward, frozen = Forward(model, prepared), prepared.frozen
    layers, active = model.config.num_layers, prepared.active
    assert len(active) >= 10 and int(active.position.min()) >= zero

    with torch.no_grad():
        states = {layer: read.double() for layer, read in frozen.read.items()}
        written = {
            layer: frozen.written[layer].double() - dictionary.layer(layer).skip(states[layer])
            for layer in range(layers)
        }
        whole = forward.reads(frozen.embed.double(), written)
        # Held at what the prompt gave, the frozen model is the model.
        for layer in range(layers):
            torch.testing.assert_close(whole[layer], states[layer], rtol=1e-4, atol=2e-4)
        constant = {}
        for layer in range(layers):
            constant[layer] = written[layer].clone()
            constant[layer][zero:] = dictionary.layer(layer).b_dec.double()
        without = forward.reads(torch.zeros_like(frozen.embed.double()), constant)

        for layer in range(layers):
            here = (active.layer == layer).nonzero().squeeze(1)
            encoder = dictionary.layer(layer).encoder_rows(active.feature[here]).double()
            rows = prepared.attributor.batch(layer, active.position[here], encoder)
            moved = (whole[layer] - without[layer])[active.position[here]]
            torch.testing.assert_close(rows.sum(1), (moved * encoder).sum(1), rtol=1e-10, atol=1e-10)
        last = torch.full((2,), len(PROMPT) - 1)
        rows = prepared.attributor.batch(layers, last, prepared.targets.vectors)
        moved = (whole[layers] - without[layers])[-1]
        torch.testing.assert_close(rows.sum(1), prepared.targets.vectors @ moved, rtol=1e-10, atol=1e-10)
        head = model.network.weights.lm_head
        unembed = (model.network.weights.embed if head is None else head).double()
        logits = unembed @ whole[layers][-1]
        expected = logits[[3, 17]] - logits.mean()
        read_constant = prepared.targets.vectors @ without[layers][-1]
        torch.testing.assert_close(rows.sum(1) + read_constant, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["clt-jumprelu", "plt-relu-skip"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3"])
def test_an_edge_is_what_a_source_adds(family: str, kind: str, models, tmp_path: Path):
    """Each source taken away by itself, forwards, changes what targets read by its column."""
    model = models(family)
    dictionary = mizarr.Dictionary.from_pretrained(
        save_random_transcoders(tmp_path / kind, model, kind, seed=2)
    )
    options = GraphOptions(TargetChoice(tokens=(3,)), RowSelection(), 1, "float64")
    prepared = prepare(model, dictionary, PROMPT, options, memory=1 << 28)
    forward, active = Forward(model, prepared), prepared.active
    layers, embed = model.config.num_layers, prepared.frozen.embed.double()
    nothing = {layer: torch.zeros(len(PROMPT), dictionary.d_out).double() for layer in range(layers)}
    with torch.no_grad():
        base = forward.reads(torch.zeros_like(embed), nothing)
        top = active.layer == active.layer.max()
        encoder = dictionary.layer(int(active.layer.max())).encoder_rows(active.feature[top]).double()
        rows = prepared.attributor.batch(int(active.layer.max()), active.position[top], encoder)
        for number in range(0, len(active), 7):
            source, position = int(active.layer[number]), int(active.position[number])
            added = {layer: each.clone() for layer, each in nothing.items()}
            for target in dictionary.targets(source):
                row = dictionary.layer(source).decoder_rows([int(active.feature[number])], target)[0]
                added[target][position] += active.value[number] * row.double()
            moved = forward.reads(torch.zeros_like(embed), added)[int(active.layer.max())]
            moved = (moved - base[int(active.layer.max())])[active.position[top]]
            torch.testing.assert_close(rows[:, number], (moved * encoder).sum(1), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("family", "told"),
    [("cohere", "an MLP parallel to attention"), ("olmo2", "norms 'after'"), ("jamba", "recurrence")],
)
def test_layers_that_graphs_do_not_follow_are_told(family: str, told: str, tmp_path: Path, models):
    dictionary = mizarr.Dictionary.from_pretrained(
        save_random_transcoders(tmp_path / "clt", models("llama"), "clt-jumprelu")
    )
    save_random_hybrid(tmp_path / "model", family, 1)
    model = mizarr.Model.from_pretrained(tmp_path / "model")
    with pytest.raises(
        ConfigError, match=rf"^attribution graphs need .*, found {told} in .*model; choose another model"
    ):
        mizarr.attribution_graph(model, dictionary, PROMPT)

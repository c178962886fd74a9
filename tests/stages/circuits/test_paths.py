"""Path patching is what its published loop gives, written with hooks on transformers' own modules."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mizarr import Model
from mizarr.stages.causal.grids.patching_metrics import KL
from mizarr.stages.circuits.batches import batches, network_of
from mizarr.stages.circuits.pairs import Pair, checked_layout
from mizarr.stages.circuits.paths import PathPatching
from mizarr.stages.circuits.scores import EdgeEffects
from mizarr.stages.forward.edges.effects import alone_at
from mizarr.stages.forward.edges.paths import Senders, patched_paths
from mizarr.stages.forward.hooks.wants import Logits
from mizarr.store.errors import ConfigError, PromptError, StageError
from tests.stages.forward.random_hybrids import save_random_hybrid
from tests.stages.forward.random_models import FAMILIES, save_random_model

from .random_pairs import draw_pairs

transformers = pytest.importorskip("transformers")


class Loop:
    """Wang et al.'s three passes over a GPT-2 or a Llama of transformers: hooks, and nothing of ours."""

    def __init__(self, folder):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        config = self.model.config
        self.is_gpt2, self.hidden = config.model_type == "gpt2", config.hidden_size
        self.layers = self.model.transformer.h if self.is_gpt2 else self.model.model.layers
        self.heads = config.num_attention_heads
        self.groups = self.heads // (getattr(config, "num_key_value_heads", None) or self.heads)
        self.width = getattr(config, "head_dim", None) or config.hidden_size // self.heads

    def modules(self):
        """Places, and the modules whose outputs stand there, or inputs (of "z"), from a column on."""
        yield ("input", 0), self.model.get_input_embeddings(), 0, self.hidden
        for number, layer in enumerate(self.layers):
            attention = layer.attn if self.is_gpt2 else layer.self_attn
            width = self.heads * self.width
            yield ("z", number), attention.c_proj if self.is_gpt2 else attention.o_proj, 0, width
            yield ("m", number), layer.mlp, 0, self.hidden
            for place, kind in enumerate("qkv"):
                if self.is_gpt2:
                    yield (kind, number), attention.c_attn, place * width, width
                else:
                    shared = width if kind == "q" else width // self.groups
                    yield (kind, number), getattr(attention, f"{kind}_proj"), 0, shared

    def run(self, ids, put=()):
        """Last logits, and what stood at all places before anything was put in. put: (place, columns,
        values), in their order."""
        found, handles = {}, []

        def hook(place, start, width):
            def changed(x):
                found[place] = x[..., start : start + width].clone()
                for at, columns, values in put:
                    if at == place:
                        x[..., start + columns.start : start + columns.stop] = values
                return x

            if place[0] == "z":
                return lambda _, args: (changed(args[0].clone()),)
            return lambda _, args, x: changed(x.clone())

        for place, module, start, width in self.modules():
            add = module.register_forward_pre_hook if place[0] == "z" else module.register_forward_hook
            handles.append(add(hook(place, start, width)))
        with torch.no_grad():
            logits = self.model(torch.tensor([list(ids)])).logits[0, -1]
        for handle in handles:
            handle.remove()
        return logits, found

    def place(self, name):
        """Where a node stands, and which columns there are its own: of keys and values a group's."""
        if not name.startswith("a"):
            return (name[0], int(name[1:])) if name != "input" else ("input", 0), slice(0, self.hidden)
        layer, _, head = name[1:].rstrip(">").partition(".h")
        head, _, kind = head.partition("<")
        own = int(head) // (self.groups if kind in ("k", "v") else 1)
        return (kind or "z", int(layer)), slice(own * self.width, (own + 1) * self.width)

    def patched(self, clean, other, senders, receivers, mlps_held, position):
        """Last logits where receivers hear what senders say in the other prompt."""
        (_, here), (_, there) = self.run(clean), self.run(other)
        places = torch.arange(len(clean))[:, None]
        at = places >= 0 if position is None else places == position % len(clean)
        held = ("z", "m") if mlps_held else ("z",)
        put = [(place, slice(0, x.shape[-1]), x) for place, x in here.items() if place[0] in held]
        for place, own in map(self.place, senders):
            put.append((place, own, torch.where(at, there[place], here[place])[..., own]))
        logits, heard = self.run(clean, put)
        if receivers == ["logits"]:
            return logits
        return self.run(
            clean, [(place, own, heard[place][..., own]) for place, own in map(self.place, receivers)]
        )[0]


def draw_senders(rng, layers, heads, count):
    names = ["input", *(f"m{layer}" for layer in range(layers))]
    names += [f"a{layer}.h{head}" for layer in range(layers) for head in range(heads)]
    return [list(rng.choice(names, size, replace=False)) for size in rng.integers(1, 4, count)]


def draw_receivers(rng, layers, heads, groups):
    """Some queries and MLPs, and keys and values of whole groups, as a hook on a projection has no others."""
    names = [f"m{layer}" for layer in range(1, layers)]
    names += [f"a{layer}.h{head}<q>" for layer in range(1, layers) for head in range(heads)]
    found = list(rng.choice(names, int(rng.integers(1, 4)), replace=False))
    for kind in "kv":
        layer, group = int(rng.integers(1, layers)), int(rng.integers(0, heads // groups))
        found += [f"a{layer}.h{group * groups + each}<{kind}>" for each in range(groups)]
    return found


@pytest.mark.parametrize("mlps", ["recomputed", "held"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("position", [None, 3, -1])
def test_paths_are_those_of_the_published_loop(family, mlps, position, tmp_path):
    """Random sets of senders and receivers, in random models of grouped and single heads."""
    given = {"num_key_value_heads": 2, "num_attention_heads": 4} if family == "llama" else {}
    save_random_model(tmp_path, family, 5, tokenizer=False, **given)
    model, loop = Model.from_pretrained(tmp_path), Loop(tmp_path)
    pairs = draw_pairs(1, seed=len(family) + (position or 0))
    layout, rng = checked_layout(pairs, "corrupted", model.config), np.random.default_rng(11)
    (batch,) = batches(model, layout, pairs, "corrupted")
    sets = draw_senders(rng, layout.num_layers, layout.num_heads, 6)
    senders = np.array([np.isin(layout.sources, each) for each in sets])
    moved = 0.0
    for receivers in [
        ["logits"],
        *(draw_receivers(rng, layout.num_layers, layout.num_heads, loop.groups) for _ in range(3)),
    ]:
        with torch.no_grad():
            found = patched_paths(
                network_of(model),
                layout,
                batch.clean,
                Senders(alone_at(batch.change[0], position), torch.from_numpy(senders)),
                [layout.destinations.index(each) for each in receivers],
                Logits(),
                mlps_held=mlps == "held",
                memory=1 << 22,
            )
        clean = loop.run(pairs[0].clean)[0]
        for row, chosen in zip(found, sets, strict=True):
            wanted = loop.patched(
                pairs[0].clean, pairs[0].corrupted, chosen, receivers, mlps == "held", position
            )
            moved = max(moved, float((wanted - clean).abs().max() / clean.abs().max()))
            assert (row - wanted).abs().max() / clean.abs().max() < 1e-5, (chosen, receivers)
    assert moved > 1e-3


@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox", "falcon", "bloom", "gpt_oss"])
def test_a_path_past_held_mlps_is_the_edge_by_itself(family, tmp_path):
    """All edges into random destinations, keys of one head of a group among them, in layers that are
    parallel, with slopes, sinks and windows."""
    make = save_random_model if family in FAMILIES else save_random_hybrid
    make(tmp_path, family, 2, tokenizer=False)
    model = Model.from_pretrained(tmp_path)
    rng = np.random.default_rng(2)
    ids = rng.integers(2, model.config.vocab_size - 1, (2, 9)).tolist()
    pairs = (Pair(tuple(ids[0]), tuple(ids[1]), KL()),)
    layout = checked_layout(pairs, "corrupted", model.config)
    drawn = [
        str(each) for each in rng.choice(layout.destinations[3 * layout.num_heads + 1 :], 6, replace=False)
    ]
    ends = tuple(dict.fromkeys([*drawn, "logits"]))
    paths, edges = PathPatching(pairs=pairs, receivers=ends, mlps="held"), EdgeEffects(pairs=pairs)
    found, wanted = (
        each.dataset(model, each.cells(model.config)[0], ())["effect"].values[0] for each in (paths, edges)
    )
    columns = [layout.destinations.index(each) for each in ends]
    np.testing.assert_allclose(found, wanted[:, columns], rtol=1e-3, atol=2e-6)


def test_every_sender_at_once_to_the_logits_is_the_other_run(model):
    pairs = draw_pairs(2, seed=4)
    layout = checked_layout(pairs, "corrupted", model.config)
    whole = "+".join(layout.sources)
    paths = PathPatching(pairs=pairs, senders=(whole, "a0.h0"), receivers=("logits",))
    for place, pair in enumerate(pairs):
        found = paths.dataset(model, paths.cells(model.config)[place], ())
        logits = model.forward(list(pair.corrupted)).logits[0, -1]
        wanted = float(logits[pair.metric.correct] - logits[pair.metric.wrong])
        assert float(found["clean"][0] + found["effect"][0, 0, 0]) == pytest.approx(wanted, abs=2e-5)


def test_no_path_is_no_number_and_names_stay_with_theirs(model):
    pairs = draw_pairs(1)
    paths = PathPatching(pairs=pairs, receivers=("a2.h1<v>", "m0", "logits"), position=2)
    found = paths.dataset(model, paths.cells(model.config)[0], ())["effect"][0]
    layout = checked_layout(pairs, "corrupted", model.config)
    for receiver in paths.receivers:
        read = layout.read[layout.destinations.index(receiver)]
        there = found.sel(receiver=receiver).notnull()
        assert list(there["sender"].values[there]) == list(layout.sources[:read])
    other = PathPatching(pairs=pairs, receivers=("logits", "m0"), senders=("a0.h3", "input"), position=2)
    again = other.dataset(model, other.cells(model.config)[0], ())["effect"][0]
    chosen = found.sel(sender=again["sender"], receiver=again["receiver"])
    np.testing.assert_allclose(again, chosen, atol=2e-6)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"receivers": ()}, StageError, "expected at least one receiver"),
        (
            {"receivers": ("a1.h9<q>",)},
            ConfigError,
            "of a receiver of this model, found 'a1.h9<q>'; did you mean 'a1.h",
        ),
        ({"receivers": ("a1.h0",)}, ConfigError, "did you mean 'a1.h0<"),
        ({"receivers": ("logits+m1",)}, StageError, "expected the logits as a receiver of their own"),
        ({"receivers": ("m1", "m1")}, StageError, "found a repeated name"),
        (
            {"receivers": ("m1+m1",)},
            StageError,
            r"each joined receiver once, found a repeated name in 'm1\+m1'",
        ),
        (
            {"receivers": ("m1",), "senders": ("a7.h0",)},
            ConfigError,
            "of a sender of this model, found 'a7.h0'; did you mean 'a",
        ),
        ({"receivers": ("m1",), "senders": ("m1", "m2")}, StageError, "computed before a receiver"),
        ({"receivers": ("m1",), "mlps": "frozen"}, StageError, "'recomputed' or 'held', found 'frozen'"),
        ({"receivers": ("m1",), "position": 9}, PromptError, "expected a position from -9 to 8"),
    ],
)
def test_what_cannot_be_asked_is_refused(model, given, error, message):
    with pytest.raises(error, match=message):
        PathPatching(pairs=draw_pairs(1), **given).cells(model.config)

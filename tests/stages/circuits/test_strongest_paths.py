"""Strongest paths: effects of a graph written out, a choice made on other pairs, random changes as long."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from mizarr.stages.circuits import strongest_paths
from mizarr.stages.circuits.batches import batches, network_of
from mizarr.stages.circuits.paths import PathPatching
from mizarr.stages.circuits.strongest_paths import StrongestPaths, is_head
from mizarr.stages.forward.edges.layout import Layout
from mizarr.stages.forward.edges.paths import Changes, patched_paths
from mizarr.stages.forward.hooks.wants import Logits
from mizarr.store.errors import ConfigError, StageError

from .random_pairs import draw_pairs

CHOSEN_ON, PAIRS = draw_pairs(3, seed=1), draw_pairs(2, seed=2)
ASKED = {"chosen_on": CHOSEN_ON, "pairs": PAIRS, "strongest": 2, "draws": 3}


def done(paths, model):
    """All cells of an experiment, joined."""
    prepared = paths.prepare(model)
    return paths.joined([paths.dataset(prepared, cell, ()) for cell in paths.cells(model.config)])


def along_path(literal, ids, sender, said, receivers):
    """Last logits of the literal graph where receivers hear a sender say something else, past held heads."""
    clean = literal.run(ids)[1]
    heads = [
        f"a{layer}.h{head}<{kind}>"
        for layer in range(literal.layers)
        for head in range(literal.heads)
        for kind in "qkv"
    ]
    held = {(source, head): x for source, x in clean.items() for head in heads}
    ends = ["logits", *(f"m{layer}" for layer in range(literal.layers))]
    logits, heard = literal.run(ids, held | {(sender, end): said for end in ends})
    if receivers == ["logits"]:
        return logits
    heard = heard | {sender: said}
    return literal.run(ids, {(source, each): x for source, x in heard.items() for each in receivers})[0]


@pytest.mark.parametrize("receiver", ["logits", "m3", "a2.h1<k>", "a4.h0<q>+a3.h2<q>+m3", "a3.h1<v>"])
def test_effects_are_those_of_the_literal_graph(receiver, model, literal):
    found = done(StrongestPaths(**{**ASKED, "receivers": (receiver,)}), model)["effect"]
    moved = 0.0
    for pair, effects in zip(PAIRS, found.isel(receiver=0), strict=True):
        clean, _ = literal.run(list(pair.clean))
        other = literal.run(list(pair.corrupted))[1]
        told = pair.metric.correct, pair.metric.wrong
        scale = float(clean.abs().max())
        for sender in ("input", "m0", "a0.h2", "a1.h1", "m1"):
            logits = along_path(literal, list(pair.clean), sender, other[sender], receiver.split("+"))
            right, wrong = (float(logits[one] - clean[one]) for one in told)
            assert float(effects.sel(sender=sender)) == pytest.approx(right - wrong, abs=1e-5 * scale)
            moved = max(moved, abs(right - wrong) / scale)
    assert moved > 1e-3


def test_any_change_of_one_sender_is_that_of_the_literal_graph(model, literal):
    """Changes that no prompt makes, to receivers and to the logits, of a head, an MLP and the input."""
    layout, (pair, *_) = Layout.of(model.config), PAIRS
    (batch,) = batches(model, layout, PAIRS[:1], "corrupted")
    own, generator = literal.run(list(pair.clean))[1], torch.Generator().manual_seed(0)
    for sender, receiver in (("a1.h3", "a3.h0<k>"), ("m1", "logits"), ("input", "m2"), ("m0", "a2.h2<v>")):
        change = torch.randn(2, *own[sender].shape, generator=generator)
        with torch.no_grad():
            found = patched_paths(
                network_of(model),
                layout,
                batch.clean,
                Changes(layout.sources.index(sender), change),
                [layout.destinations.index(receiver)],
                Logits(),
                memory=1 << 22,
            )
        for row, moved in zip(found, change, strict=True):
            wanted = along_path(literal, list(pair.clean), sender, own[sender] + moved, [receiver])
            assert (row - wanted).abs().max() / wanted.abs().max() < 1e-5


def test_senders_are_chosen_by_other_pairs_alone(model):
    """The largest mean |effect| of each kind first, and the quietest head last."""
    found = done(StrongestPaths(**ASKED), model)
    effects = PathPatching(pairs=CHOSEN_ON, receivers=("logits",))
    each = [effects.dataset(model, cell, ())["effect"] for cell in effects.cells(model.config)]
    mean = sum(one[0, :, 0] for one in each) / len(each)
    np.testing.assert_allclose(found["chosen_effect"][:, 0], mean, rtol=1e-6, atol=1e-9)
    size = {str(name): abs(float(mean.sel(sender=name))) for name in mean["sender"].values}
    heads = sorted(filter(is_head, size), key=size.get, reverse=True)
    others = sorted((name for name in size if not is_head(name)), key=size.get, reverse=True)
    wanted = [*heads[:2], *others[:2], heads[-1]]
    assert [str(found["sender"].values[number]) for number in found["chosen"].values[:, 0]] == wanted
    swapped = done(StrongestPaths(**{**ASKED, "pairs": CHOSEN_ON, "chosen_on": PAIRS}), model)
    assert swapped["chosen"].values.tolist() != found["chosen"].values.tolist()


def test_a_random_change_that_is_the_sender_s_own_does_what_the_sender_does(model, monkeypatch):
    """So it goes the same path; and what is drawn is drawn like the change, in each pair anew."""
    drawn = []

    def own(like, count, *, seed):
        drawn.append((like, seed))
        return np.repeat(like[None], count, axis=0)

    monkeypatch.setattr(strongest_paths, "random_directions", own)
    found = done(StrongestPaths(**ASKED, receivers=("logits", "a3.h1<v>")), model)
    for column in range(2):
        chosen = found["chosen"].values[:, column]
        wanted = found["effect"].values[:, None, chosen, column]
        random = found["random"].values[..., column]
        np.testing.assert_allclose(random, np.broadcast_to(wanted, random.shape), rtol=1e-4, atol=2e-6)
    assert np.abs(found["random"]).max() > 1e-3
    by_seed = {seed: like for like, seed in drawn}
    assert all(np.array_equal(by_seed[seed], like) for like, seed in drawn)
    assert len(by_seed) == len(PAIRS) * len(np.unique(found["chosen"].values))


def test_draws_depend_on_the_pair_and_the_sender_alone(model):
    whole = done(StrongestPaths(**ASKED), model)
    alone = done(StrongestPaths(**{**ASKED, "pairs": PAIRS[1:], "strongest": 1}), model)
    np.testing.assert_allclose(alone["random"][0, :, 0], whole["random"][1, :, 0], atol=2e-6)
    np.testing.assert_allclose(alone["random"][0, :, -1], whole["random"][1, :, -1], atol=2e-6)
    again = done(StrongestPaths(**ASKED, seed=1), model)
    assert np.abs(again["random"] - whole["random"]).max() > 1e-4
    assert len(np.unique(whole["random"].values[0, :, 0].round(6))) == 3


def test_one_step_back_the_strongest_heads_are_the_receivers(model):
    there = done(StrongestPaths(**ASKED), model)
    first, second = (str(there["sender"].values[n]) for n in there["chosen"].values[:2, 0])
    back = done(StrongestPaths(**ASKED, back=1), model)
    assert back["receiver"].values.tolist() == [f"{first}<{kind}>" for kind in "qkv"]
    two = done(StrongestPaths(**ASKED, back=2), model)
    joined = sorted([first, second])
    receivers = tuple("+".join(f"{head}<{kind}>" for head in joined) for kind in "qkv")
    assert tuple(two["receiver"].values) == receivers
    paths = PathPatching(pairs=PAIRS, receivers=receivers)
    wanted = paths.joined([paths.dataset(model, cell, ()) for cell in paths.cells(model.config)])
    np.testing.assert_allclose(two["effect"], wanted["effect"], atol=2e-6)


def test_where_fewer_have_a_path_places_stay_empty(model):
    found = done(StrongestPaths(**{**ASKED, "strongest": 4, "receivers": ("m0",)}), model)
    told = found["chosen"].values[:, 0].tolist()
    names = ["" if number < 0 else str(found["sender"].values[number]) for number in told]
    assert sorted(names[:4]) == ["a0.h0", "a0.h1", "a0.h2", "a0.h3"]
    assert names[4:] == ["input", "", "", "", ""]
    empty = [not name for name in names]
    assert np.isnan(found["random"].values[..., 0]).all((0, 1)).tolist() == empty


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"strongest": 0}, StageError, "the field strongest to be at least 1, found 0"),
        ({"draws": -1}, StageError, "the field draws to be at least 0, found -1"),
        ({"back": -1}, StageError, "the field back to be at least 0, found -1"),
        ({"back": 21}, StageError, "the field back to be at most 20"),
        ({"back": 1, "receivers": ("a0.h1<q>",)}, StageError, "back to be at most 0, .* found 1"),
        (
            {"receivers": ("a9.h0<q>",)},
            ConfigError,
            "receiver of this model, found 'a9.h0<q>'; did you mean 'a",
        ),
        ({"chosen_on": ()}, StageError, "expected at least one pair"),
        ({"chosen_on": CHOSEN_ON[:1] * 2}, StageError, "found one pair twice"),
    ],
)
def test_what_cannot_be_asked_is_refused(model, given, error, message):
    with pytest.raises(error, match=message) as caught:
        replace(StrongestPaths(**ASKED), **given).cells(model.config)
    assert "\n" not in str(caught.value)

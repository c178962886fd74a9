"""couplet_planning: toy models that plan, improvise or do both, chance, and the material it asks about."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
from scipy.stats import binom

import mizarr
from mizarr.stages.causal.controls import CHANCE, interval
from mizarr.stages.forward.runs.run import Run, stream
from mizarr.store.errors import ConfigError
from mizarr.workflows import build, compute
from mizarr.workflows.cli import run
from mizarr.workflows.material.samples.couplets import COUPLETS, FAMILIES, family_of
from mizarr.workflows.planning.couplet_patches import PLAN, ROLES, CoupletEffects
from mizarr.workflows.planning.couplets import CoupletPlanning
from mizarr.workflows.subject import SPECIMEN_FOLDER as SPECIMEN
from tests import toy_couplets
from tests.specimen_training import couplets as generator
from tests.stages.forward.random_models import save_random_model

FEW = {"pairs": 6, "donors": 2}
LAST = len(ROLES) - 1


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def asked(store, tmp_path_factory):
    """The answer for each toy, computed when it is first asked for."""
    done = {}

    def answer(name):
        if name not in done:
            folder = getattr(toy_couplets, name)(tmp_path_factory.mktemp("toys") / name)
            done[name] = compute("couplet_planning", store=store, model=str(folder), **FEW)
        return done[name]

    return answer


# -- both verdicts


@pytest.mark.parametrize(
    ("name", "verdict", "beyond"),
    [
        ("plans", "Planned: ", (True, True, True, False)),
        ("improvises", "Improvised: ", (False, False, False, True)),
        ("relays", "Improvised: ", (False, False, False, True)),
        ("does_both", "Both: ", (True, True, True, True)),
        ("decides_late", "On the way: ", (False, False, True, False)),
    ],
)
def test_what_is_built_in_is_what_is_found(asked, name, verdict, beyond):
    """A line break that knows the rhyme and that nobody reads (`relays`) is no plan."""
    done = asked(name)
    rhymes, *found, on_the_way = done.claims()
    assert rhymes.is_beyond_chance and done.verdict.startswith(verdict)
    assert tuple(each.is_beyond_chance for each in found) == beyond
    # Tokens behind the break say the rhyme already, so that the planned one changes what comes between.
    assert on_the_way.is_beyond_chance == beyond[0]
    if beyond[0]:
        assert done.site == (0, ROLES.index("line break"))


def test_without_a_plan_nothing_before_line_2_moves_anything(asked):
    """And where all hear of a plan, it moves the end as far as the whole other couplet."""
    roles = {each["role"]: each for each in asked("relays").to_json()["roles"]}
    for role in PLAN:
        told = roles[ROLES[role]]
        assert told["effect"] == pytest.approx(0.0, abs=1e-3) and told["p"] > 0.5
        assert told["kl"]["scored"] == pytest.approx(0.0, abs=1e-6)
    document = asked("plans").to_json()
    before, between, direct = document["ways"]
    assert before["effect"] == pytest.approx(document["total"], abs=1e-3)
    assert between["effect"] == pytest.approx(document["total"], abs=1e-3)
    assert direct["effect"] == pytest.approx(0.0, abs=1e-3)


def test_what_is_said_to_turn_the_end_is_a_share_of_the_whole(asked, store):
    """Either way does about half of what both do."""
    both = asked("does_both")
    _, _, before, _, direct, _ = both.claims()
    assert (
        0.3 * both.total
        < min(before.effect, direct.effect)
        < max(before.effect, direct.effect)
        < 0.7 * both.total
    )
    given = {"store": store, "model": both.settings.model, **FEW}
    assert compute("couplet_planning", **given, least=0.3).verdict.startswith("Both: ")
    assert compute("couplet_planning", **given, least=0.7).verdict.startswith("Neither: ")


def test_with_fewer_donors_more_pairs_must_count():
    """(1 + donors) ** -pairs is the chance that a draw of the null is the effect itself; 1 in 40 at most."""
    for donors, pairs in ((1, 6), (2, 4), (3, 3)):
        assert build("couplet_planning", donors=donors, pairs=12).fewest == pairs
        assert (1 + donors) ** -pairs <= 1 / 40 < (1 + donors) ** -(pairs - 1)


# -- the numbers


def test_an_effect_is_that_of_plain_runs(asked):
    """By hand: the state of one run put into another, P of both families read off its logits."""
    done = asked("does_both")
    model = mizarr.Model.from_pretrained(done.settings.model)
    layer, role = 0, ROLES.index("line break")
    effects, own_effects, totals, rhymes = [], [], [], []
    for each in done.patches.scored:
        ends = each.pair.end, each.pair.other
        texts = [f"{each.pair.first} {end}\n{each.pair.second}" for end in ends]
        tokens = [
            [model.tokenizer.encode(f" {word}").ids[-1] for word in FAMILIES[family_of(end)] if word != end]
            for end in ends
        ]
        own, other = (model.tokenizer.encode(text).ids for text in texts)
        at = texts[0].count(" ", 0, texts[0].index("\n")) + 2  # behind the BOS and the words of line 1
        assert model.tokenizer.pieces([own[at]]) == ["\n"]
        point = mizarr.HookPoint.resid_post(layer)
        donor = model.forward(other, mizarr.HookSpec().capture(point))[point][0, [at]]
        spec = mizarr.HookSpec().intervene(point, mizarr.Replace(donor, positions=(at,)))
        found = dict(stream(model, [Run(own), Run(own, spec), Run(other)]))
        sums = np.array(
            [
                [found[i].logits[0, -1].double().softmax(-1)[some].sum().item() for some in tokens]
                for i in (0, 1, 2)
            ]
        )
        moved = 100 * (sums[1] - sums[0])
        effects.append(moved[1])
        own_effects.append(moved[0])
        whole = 100 * (sums[2] - sums[0])
        totals.append(whole[1])
        rhymes.append((whole[1] - whole[0]) / 2)
    known = done.read["scored"].is_known
    assert known.sum() >= 4
    np.testing.assert_allclose(done.read["scored"].effects[:, layer, role], effects, atol=1e-3)
    assert done.rhymes.effect == pytest.approx(np.mean(rhymes), abs=1e-3)
    assert done.total == pytest.approx(np.mean(np.array(totals)[known]), abs=1e-3)
    told = done.to_json()["roles"][role]
    assert told["layer"] == layer
    assert told["effect"] == pytest.approx(np.mean(np.array(effects)[known]), abs=1e-3)
    assert told["own"] == pytest.approx(np.mean(np.array(own_effects)[known]), abs=1e-3)
    assert done.claims()[1].effect == pytest.approx(told["effect"])
    assert told["interval_95"] == pytest.approx(interval(np.array(effects)[known]), abs=1e-3)


def test_pairs_count_whose_two_ends_the_model_rhymes_with(asked):
    """The toy ends on its favourite of a family, which is another word unless it is the end itself."""
    pairs = asked("plans").to_json()["pairs"]
    assert len(pairs) == 12 and [each["is_scored"] for each in pairs] == [False] * 6 + [True] * 6
    for each in pairs:
        favourites = [toy_couplets.favourite(family_of(each[end])) for end in ("end", "other")]
        assert [word.strip() for word in each["ends_on"]] == favourites
        assert each["counts"] == (favourites[0] != each["end"] and favourites[1] != each["other"])


def test_the_place_is_chosen_on_pairs_that_are_not_scored(asked):
    done = asked("plans")
    choice, scored = ({each.pair for each in half} for half in (done.patches.choice, done.patches.scored))
    assert not choice & scored
    chosen = done.read["choice"].effects[done.read["choice"].is_known].mean(0)[:, list(PLAN)]
    layer, role = done.site
    assert chosen[layer, PLAN.index(role)] == chosen.max()
    assert all(each.held_out for each in done.claims()[1:])


def test_told_is_the_strictest_of_three_nulls(asked):
    done = asked("does_both")
    for way, told in enumerate(done.to_json()["ways"]):
        finding = done.claims()[2 + way]
        shares = []
        for kind in ("third", "same", "random"):
            drawn = done.values(kind, lambda read, way=way: read.ways[:, way])
            assert drawn.shape == (int(done.read["scored"].is_known.sum()), 2)
            assert told[kind] == pytest.approx(drawn.mean())
            own = done.values("scored", lambda read, way=way: read.ways[:, way])
            shares.append(done._finding("", own, drawn, kind).null.share_as_large(finding.effect))
        assert told["p"] == pytest.approx(max(shares))


def test_donors_leave_every_other_token_and_have_the_rhyme_they_stand_for(asked):
    patches = asked("plans").patches
    for each in patches.scored:
        own, other = family_of(each.pair.end), family_of(each.pair.other)
        assert {family_of(word) for word in each.same} == {own} and each.pair.end not in each.same
        assert not {own, other} & {family_of(word) for word in each.third}
        tokens = {each.ends[word] for word in FAMILIES[own] if word != each.pair.end}
        assert set(each.groups[0]) == tokens
        for word in (*each.same, *each.third):
            donor = each.with_end(word)
            assert [a for a, b in zip(donor, each.ids, strict=True) if a != b] == [each.ends[word]]
    covered = [at for role in each.roles for at in role]
    assert covered == list(range(each.at, len(each.ids)))


# -- chance


@pytest.mark.parametrize("seeds", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_random_weights_claim_nothing(seeds, tmp_path, monkeypatch):
    """Of what they do not do nothing at all; and asked all the same, no more often than chance says."""
    claims = []
    for seed in range(seeds):
        folder = tmp_path / str(seed)
        save_random_model(folder, "llama", seed, tokenizer=False, vocab_size=2048)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(SPECIMEN / file, folder)
        given = {"store": tmp_path / "store", "model": str(folder), **FEW}
        done = compute("couplet_planning", **given)
        (told,) = (view for view in done.shown if view.kind == "findings")
        assert not told.findings and told.caption.endswith(": nothing is claimed.")
        with monkeypatch.context() as patched:
            patched.setattr(CoupletEffects, "is_known", property(lambda read: np.ones(len(read.total), bool)))
            patched.setattr(CoupletPlanning, "not_claimed", "")
            claims += [each.is_beyond_chance for each in compute("couplet_planning", **given).claims()]
    assert len(claims) == 6 * seeds
    assert sum(claims) <= binom.ppf(0.99, len(claims), CHANCE)


def test_of_a_model_that_knows_no_couplets_nothing_is_claimed_and_it_is_said_why(asked):
    """The toy's answer, read as if it had ended on words that do not rhyme."""
    done = build("couplet_planning", model=asked("plans").settings.model, **FEW).run(asked("plans").store)
    for name in ("choice", "scored"):
        done.unpatched[name]._result["unpatched_top"][:] = 0
    vars(done).pop("not_claimed")
    document = done.to_json()
    assert document["findings"] == [] and "verdict" not in document
    assert "in 0 of 6 pairs to choose on and 0 of 6 to score on" in done.not_claimed


# -- the material


def test_the_material_is_made_by_the_rules_of_the_couplets_and_of_frames_held_out():
    fields = {"a": generator.ADJECTIVES, "n": generator.NOUNS, "m": generator.NOUNS, "p": generator.NAMES}

    def frame_of(line, frames):
        """The one frame a line is made of, with words of the lists."""
        made = [
            re.sub(r"{(\w)}", lambda part: f"({'|'.join(fields[part[1]])})", each.removesuffix(" {e}"))
            for each in frames
        ]
        (found,) = (number for number, each in enumerate(made) if re.fullmatch(each, line))
        return found

    assert len(COUPLETS) == len(set(COUPLETS)) == 48
    frames = {
        (frame_of(pair.first, generator.FIRST), frame_of(pair.second, generator.SECOND)) for pair in COUPLETS
    }
    assert all(generator.is_held_out_frames(*each) for each in frames) and len(frames) == 6
    assert generator.FAMILIES is FAMILIES
    for pair in COUPLETS:
        families = {family_of(pair.end), family_of(pair.other)}
        assert len(families) == 2
        assert not pair.said & {word for number in families for word in FAMILIES[number]}
        assert not {family_of(w) for w in pair.third} & families and pair.end not in pair.same


def test_both_halves_fit_the_tokens_of_the_specimen():
    patches = build("couplet_planning").patches
    assert (len(patches.choice), len(patches.scored)) == (24, 24)
    assert patches.donors == {"third": 2, "same": 2, "random": 2}


# -- how it is told


def test_it_is_told_in_every_form(asked, tmp_path, capsys):
    done = asked("does_both")
    document = json.loads(json.dumps(done.to_json(), allow_nan=False))
    assert [path.name for path in done.draw(tmp_path)] == ["couplet_planning.png"]
    assert "Plan or improvisation?" in done.report(tmp_path / "page.html").read_text()
    grid = np.array(document["effects"])
    assert grid.shape == (2, len(ROLES))
    np.testing.assert_allclose(grid[-1, LAST], document["total"], atol=1e-3)
    np.testing.assert_allclose(grid[-1, :LAST], 0.0, atol=1e-9)
    settings = [f"model={done.settings.model}", "pairs=6", "donors=2"]
    words = [word for each in settings for word in ("--set", each)]
    assert run(["compute", "couplet_planning", "--store", str(done.store.path), "--json", *words]) == 0
    assert json.loads(capsys.readouterr().out)["roles"] == document["roles"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"pairs": 25}, "expected at most 24 pairs to choose on and as many to score, found pairs=25"),
        ({"pairs": 0}, "expected pairs to be int of at least 1, found 0"),
        ({"donors": 0}, "expected donors to be int of at least 1, found 0"),
        ({"pairs": 1}, "1 of 1 pairs to choose on and 1 to score can be asked"),
        ({"donor": 1}, "did you mean 'donors'?"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_runs(given, said, capsys):
    with pytest.raises(ConfigError, match=said.replace("?", r"\?")) as caught:
        build("couplet_planning", **given)
    assert "\n" not in str(caught.value)
    words = [word for name, value in given.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    assert run(["explain", "couplet_planning", *words]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_tokenizer_that_cuts_the_ends_is_refused(tiny_model):
    with pytest.raises(
        ConfigError, match="expected a model whose tokens are the ends of couplets, found tiny"
    ):
        build("couplet_planning", model=str(tiny_model))

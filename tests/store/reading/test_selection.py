"""Selections as a person says them: texts, token strings, characters, layers, hook points; and what is not
there.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings, strategies as st

from mizarr.store import PackedTokens, RunKey, Store, open_store
from mizarr.store.errors import (
    EntryNotFound,
    HookPointNotFound,
    PromptError,
    ShapeError,
    StageError,
    TokenizerError,
)
from mizarr.store.identity import require_same_model
from mizarr.store.reading.characters import CharacterSpans
from mizarr.store.runs.entries import ArraySpec

WORDS = ["<s>", "The", " Eiffel", " Tower", " is", " in", " Paris", "Paris", " Rome", " é"]
TEXTS = ["The Eiffel Tower is in Paris", "Paris is in Paris é", "The Tower"]
IDS = [[0, 1, 2, 3, 4, 5, 6], [0, 7, 4, 5, 6, 9], [0, 1, 3]]
LAYERS, HIDDEN = (0, 1, 2, 5), 2


def offsets(ids: list[int]) -> list[tuple[int, int]]:
    found, end = [(0, 0)], 0
    for one in ids[1:]:
        found.append((end, end + len(WORDS[one])))
        end += len(WORDS[one])
    return found


def make(folder: Path, model: str = "m", name: str = "gpt-nano") -> Store:
    """A run of three prompts: layers 0-2 and 5 of resid_post, [layer, packed token]; patterns of layer 0."""
    store = open_store(folder, durability="process")
    tokens = PackedTokens.from_lists(IDS, TEXTS, [offsets(ids) for ids in IDS])
    run = RunKey(model, tokens.digest, "none")
    resid = ArraySpec(
        "resid_post",
        "blocks.{}.hook_resid_post",
        ("layer", "token", "hidden"),
        {"hidden": HIDDEN},
        "float32",
        6,
        "residual stream",
        "1",
    )
    pattern = ArraySpec(
        "pattern", "blocks.{}.attn.hook_pattern", ("layer", "pair", "head"), {"head": 1}, "float32", 6
    )
    entry = store.create_entry(
        run, tokens, [resid, pattern], segment_tokens=5, attrs={"model": name, "tokenizer": "sha256:words"}
    )
    store.put_vocabulary("sha256:words", WORDS)
    cells = [("resid_post", layer) for layer in LAYERS] + [("pattern", 0)]
    for n, here in enumerate(entry.segments):
        column = np.arange(here.start, here.stop, dtype=np.float32)
        arrays = {
            ("resid_post", layer): np.stack([np.full(len(here), layer, np.float32), column], axis=1)
            for layer in LAYERS
        }
        pairs = int(entry.bounds("pair")[n + 1] - entry.bounds("pair")[n])
        entry.write_segment(n, arrays | {("pattern", 0): np.ones((pairs, 1), np.float32)})
    entry.publish(cells)
    return store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make(tmp_path_factory.mktemp("selection") / "store")


@pytest.fixture
def states(store: Store) -> xr.Dataset:
    (entry,) = store.entries()
    return entry.open(["resid_post"])


def packed(found: xr.Dataset) -> list[int]:
    """Packed indices of what was selected, which the fake states carry."""
    return found["resid_post"].isel(layer=0, hidden=1).values.astype(int).tolist()


def test_a_prompt_is_chosen_by_number_or_by_its_whole_text(states: xr.Dataset):
    by_text = states.mi.prompt("Paris is in Paris é")
    xr.testing.assert_identical(by_text, states.mi.prompt(1))
    assert by_text["token_string"].values.tolist() == ["<s>", "Paris", " is", " in", " Paris", " é"]
    assert states.mi.sel(prompt=["The Tower", 0])["prompt_id"].values.tolist() == [2, 0]
    with pytest.raises(PromptError, match="did you mean 'The Tower'"):
        states.mi.prompt("The Towr")


def test_tokens_are_chosen_by_their_exact_string_spaces_included(states: xr.Dataset):
    spaced = states.mi.sel(token=" Paris")
    assert packed(spaced) == [6, 11]
    assert spaced["prompt_id"].values.tolist() == [0, 1]
    assert spaced["position"].values.tolist() == [6, 4]
    assert spaced["prompt"].values.tolist() == [0, 1]
    assert packed(states.mi.sel(token="Paris")) == [8]
    assert packed(states.mi.sel(token=["Paris", " Paris", 9])) == [6, 8, 11, 12]


@pytest.mark.parametrize(
    ("string", "near"), [("Tower", "' Tower'"), ("paris", "'Paris'"), (" Pari", "' Paris'"), ("the", "'The'")]
)
def test_an_unknown_token_names_the_nearest(states: xr.Dataset, string: str, near: str):
    with pytest.raises(TokenizerError, match=f"did you mean {near}"):
        states.mi.sel(token=string)


def test_a_known_token_that_stands_nowhere_is_an_error_too(states: xr.Dataset):
    with pytest.raises(PromptError, match="no token in 3 prompts meets the conditions token=' Rome'"):
        states.mi.sel(token=" Rome")


def test_characters_choose_the_tokens_that_overlap_them(states: xr.Dataset):
    text = TEXTS[0]
    start = text.index("Eiffel Tower")
    assert packed(states.mi.sel(prompt=0, chars=(start, start + 12))) == [2, 3]
    assert packed(states.mi.sel(prompt=0, chars="Eiffel Tower")) == [2, 3]
    assert packed(states.mi.sel(prompt=0, chars=range(1))) == [1]  # BOS stands for no character
    assert packed(states.mi.sel(prompt=[0, 2], chars="Tower")) == [3, 15]
    assert packed(states.mi.sel(prompt=1, chars=(18, 19))) == [12]  # characters, not bytes


@pytest.mark.parametrize(
    ("chars", "message"),
    [
        ((0, 29), r"within the 28 characters of prompt 0, found \(0, 29\)"),
        ((5, 5), r"found \(5, 5\)"),
        ((-1, 3), r"found \(-1, 3\)"),
        ("Louvre", "the phrase 'Louvre' does not occur as whole words in the prompt 'The Eiffel"),
        ("Eifel", "did you mean 'Eiffel'"),
    ],
)
def test_a_span_outside_the_text_and_a_phrase_that_is_not_in_it(states: xr.Dataset, chars, message: str):
    with pytest.raises(PromptError, match=message):
        states.mi.sel(prompt=0, chars=chars)


def test_positions_count_from_both_ends_of_every_prompt(states: xr.Dataset):
    assert packed(states.mi.sel(position=-1)) == [6, 12, 15]
    assert packed(states.mi.sel(position=slice(1, 3))) == [1, 2, 8, 9, 14, 15]
    assert packed(states.mi.sel(position=[0, -1], prompt=2)) == [13, 15]
    with pytest.raises(PromptError, match="a prompt of 3 tokens has no position 5"):
        states.mi.sel(position=5)


def test_conditions_meet(states: xr.Dataset):
    assert packed(states.mi.sel(token=" Paris", prompt=1, layer=[2, 5])) == [11]
    assert packed(states.mi.sel(token=" Tower", chars="Tower", prompt=[0, 2])) == [3, 15]
    with pytest.raises(PromptError, match="meets the conditions"):
        states.mi.sel(token=" Paris", position=0)


@settings(max_examples=30)
@given(st.data())
def test_a_selection_of_a_selection_is_what_both_say(store: Store, data: st.DataObject):
    (entry,) = store.entries()
    states = entry.open(["resid_post"])
    rows = data.draw(st.lists(st.integers(0, 2), min_size=1, unique=True))
    stop = data.draw(st.integers(1, 7))
    both = states.mi.sel(prompt=rows, position=slice(0, stop))
    expected = [int(i) for row in rows for i in states.mi._starts[row] + np.arange(min(stop, len(IDS[row])))]
    assert packed(both) == expected
    again = states.mi.sel(position=slice(0, stop)).mi.sel(prompt=rows)
    xr.testing.assert_equal(again, both)
    for number, row in enumerate(rows):
        own = both.mi.prompt(number)
        assert own["token_id"].values.tolist() == IDS[row][:stop]


def test_layers_are_taken_by_number_range_list_or_slice(states: xr.Dataset):
    sel = states.mi.sel
    assert sel(layer=5)["resid_post"].dims == ("token", "hidden")
    assert int(sel(layer=5)["layer"]) == 5
    assert sel(layer=range(1, 3))["layer"].values.tolist() == [1, 2]
    assert sel(layer=[5, 0])["layer"].values.tolist() == [5, 0]
    assert sel(layer=slice(1, 5))["layer"].values.tolist() == [1, 2, 5]  # as .sel: both ends, what is there


@pytest.mark.parametrize("layer", [3, [2, 3], range(2, 5), slice(3, 4)])
def test_a_layer_that_was_not_captured_names_the_command(states: xr.Dataset, layer):
    message = (
        r"not captured, only 0-2, 5; .*mizarr capture gpt-nano PROMPTS --hooks 'blocks.3.hook_resid_post'"
    )
    with pytest.raises(EntryNotFound, match=message):
        states.mi.sel(layer=layer)


def test_a_hook_point_gives_its_array(store: Store):
    (entry,) = store.entries()
    both = entry.open()
    assert both.mi.hook("blocks.5.hook_resid_post").dims == ("token", "hidden")
    assert both.mi.hook("blocks.*.hook_resid_post")["layer"].values.tolist() == [0, 1, 2, 5]
    assert both.mi.hook("blocks.0.attn.hook_pattern").dims == ("pair", "head")


@pytest.mark.parametrize(
    "hook", ["blocks.3.hook_resid_post", "blocks.1.hook_resid_mid", "blocks.*.mlp.hook_pre"]
)
def test_a_hook_point_that_was_not_captured_names_the_command(states: xr.Dataset, hook: str):
    with pytest.raises(HookPointNotFound) as caught:
        states.mi.hook(hook)
    said = str(caught.value)
    assert f"mizarr capture gpt-nano PROMPTS --hooks '{hook}'" in said
    assert "which has blocks.*.hook_resid_post (layers 0-2, 5)" in said


def test_a_choice_of_tokens_leaves_patterns_out_and_says_so_when_nothing_is_left(store: Store):
    (entry,) = store.entries()
    assert set(entry.open().mi.sel(token=" is").data_vars) == {"resid_post"}
    with pytest.raises(ShapeError, match="two tokens per number"):
        entry.open(["pattern"]).mi.sel(token=" is")
    with pytest.raises(
        EntryNotFound, match=r"mizarr capture gpt-nano PROMPTS --hooks 'blocks\.\*\.attn\.hook_pattern'"
    ):
        entry.open(["resid_post"]).mi.attn(0)


def test_a_rectangle_is_made_where_there_is_one_and_refused_where_not(states: xr.Dataset):
    last = states.mi.sel(position=slice(-2, None)).mi.unpack()
    assert last["resid_post"].dims == ("layer", "prompt", "position", "hidden")
    assert last["resid_post"].isel(layer=0, hidden=1).values.tolist() == [[5, 6], [11, 12], [14, 15]]
    assert last["position_in_prompt"].values.tolist() == [[5, 6], [4, 5], [1, 2]]
    first = states.mi.sel(position=slice(1, 3)).mi.unpack()
    assert first["position"].values.tolist() == [1, 2]
    with pytest.raises(
        ShapeError, match=r"found 3 tokens in prompt 2 and 7 in prompt 0; use ds.mi.pad\(\), which fills up"
    ):
        states.mi.unpack()


def test_a_padded_selection_knows_where_its_tokens_stood(states: xr.Dataset):
    block = states.mi.sel(token=[" is", " in", " Paris"], prompt=[0, 1]).mi.pad(4)
    assert block["mask"].values.tolist() == [[True, True, True, False]] * 2
    assert block["position_in_prompt"].values.tolist() == [[4, 5, 6, -1], [2, 3, 4, -1]]
    assert np.isnan(block["resid_post"].values[:, :, 3]).all()


def test_a_padded_block_keeps_texts_and_strings(states: xr.Dataset):
    block = states.mi.prompts([2, 0]).mi.pad()
    assert block["text"].dims == block["prompt_id"].dims == ("prompt",)
    assert block["prompt_id"].values.tolist() == [2, 0]
    assert block["text"].values.tolist() == [str(states["text"].values[row]) for row in (2, 0)]
    size = states.mi.prompt(2).sizes["position"]
    shown = block["token_string"].values[0].tolist()
    assert shown == states.mi.prompt(2)["token_string"].values.tolist() + [""] * (7 - size)
    assert "token_string" in states.mi.sel(position=slice(0, 2)).mi.unpack().coords


def test_the_character_map_of_a_stored_prompt_has_the_edges_of_the_tokenizer(states: xr.Dataset):
    spans = states.mi.characters(0)
    assert [spans.char_to_token(c) for c in (0, 3, 28)] == [1, 2, None]
    assert spans.char_to_token_fuzzy(99) == 6
    assert spans.char_to_token_start(0) == 1  # not BOS
    assert spans.char_range_to_tokens(0, 4) == [1, 2]
    assert CharacterSpans([0], [0]).char_to_token_fuzzy(0) is None


def test_without_offsets_texts_or_strings_the_error_says_what_else_works(tmp_path: Path):
    store = open_store(tmp_path / "bare", durability="process")
    tokens = PackedTokens.from_lists([[1, 2]])
    spec = ArraySpec(
        "resid_post", "blocks.{}.hook_resid_post", ("layer", "token", "hidden"), {"hidden": 1}, "float32", 1
    )
    entry = store.create_entry(RunKey("m", tokens.digest, "none"), tokens, [spec])
    entry.write_segment(0, {("resid_post", 0): np.ones((2, 1), np.float32)})
    entry.publish([("resid_post", 0)])
    bare = entry.open()
    with pytest.raises(PromptError, match="character offsets"):
        bare.mi.sel(chars=(0, 1))
    with pytest.raises(TokenizerError, match="give token ids instead"):
        bare.mi.sel(token="The")
    with pytest.raises(PromptError, match="by their numbers"):
        bare.mi.sel(prompt="The")
    assert bare.mi.sel(token=2)["position"].values.tolist() == [1]


def test_activations_of_two_models_do_not_meet(store: Store, tmp_path: Path):
    from mizarr.pipeline import stage

    (entry,) = store.entries()
    (other,) = make(tmp_path / "other", model="n", name="gpt-micro").entries()
    here, there = entry.open(["resid_post"])["resid_post"], other.open(["resid_post"])["resid_post"]
    message = r"of different models: 'one' of gpt-nano \(m\), 'two' of gpt-micro \(n\); capture both"
    with pytest.raises(StageError, match=message):
        require_same_model(one=here, two=there)
    dims = ("layer", "token", "hidden")

    @stage(version=1, inputs={"one": dims, "two": dims}, outputs={"gap": dims})
    def difference(one: xr.DataArray, two: xr.DataArray) -> xr.Dataset:
        return (one - two).to_dataset(name="gap")

    with pytest.raises(StageError, match=message):
        difference.compute({"one": here, "two": there}, {})
    assert not difference.compute({"one": here, "two": here}, {})["gap"].values.any()
    require_same_model(one=here, two=xr.DataArray(1.0), three=None)  # who says nothing fits everything


def axis_labels(array: xr.DataArray) -> tuple[str, str]:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots()
    array.plot(ax=axes)
    labels = axes.get_xlabel(), axes.get_ylabel()
    plt.close(figure)
    return labels


def test_plots_are_labelled_without_further_ado(store: Store):
    (entry,) = store.entries()
    states = entry.open()
    prompt = states.mi.prompt(0)
    assert axis_labels(prompt["resid_post"].isel(hidden=1)) == ("position in the prompt", "layer")
    line = prompt["resid_post"].isel(hidden=1, layer=0)
    assert axis_labels(line) == ("position in the prompt", "residual stream [1]")
    square = states.mi.attn(0).isel(head=0, layer=0)
    assert square.dims == ("query_position", "key_position")
    assert axis_labels(square) == ("attended position", "attending position")
    last = states.mi.sel(position=-1).mi.unpack()["resid_post"].isel(hidden=0, position=0)
    assert axis_labels(last)[1] == "layer"

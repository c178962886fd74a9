"""Whatever a user does, in whatever order: the store serves what a fresh computation gives, or refuses.

Short stories first, each a deed that once went wrong or easily might; then the machine that makes up its own.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

import mizarr
from mizarr.store.errors import MizarrError
from tests.contracts.user_deeds import DICTIONARY_EDITS, EDITS, flipped
from tests.contracts.user_machine import COUNTS, UserMachine, experiments
from tests.contracts.user_world import Active, Capture, Encoded, Graph

SECONDS = float(os.environ.get("MIZARR_USER_SECONDS", "3600"))
"""How long the long machine plays; read here, as no test sees such variables."""
ANYTHING = settings(
    max_examples=5,
    stateful_step_count=16,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate, Phase.shrink),
)
STATES = Capture(((1, 2, 3), (4, 5)))
SLOW = pytest.mark.slow
"""The same deed done in another way: for whoever changes how files or weights are told apart."""
HOW = ("rename", "restored", pytest.param("in_place", marks=SLOW))
WAYS = ("restored", *(pytest.param(how, marks=SLOW) for how in ("in_place", "rename")))
KINDS = (Active, Graph, pytest.param(Encoded, marks=SLOW))


@pytest.fixture
def user() -> Iterator[UserMachine]:
    machine = UserMachine()
    yield machine
    machine.teardown()


# -- files that change


@pytest.mark.parametrize("how", HOW)
def test_replaced_weights_are_other_weights_in_the_same_process(user, how):
    user.capture_by_name("a", STATES)
    user.replace_weights("a", 2, how)
    user.capture_by_name("a", STATES)
    user.capture_by_name("a", Capture(((7, 8),)))
    user.replace_weights("a", 0, how)
    user.capture_by_name("a", STATES)
    user.capture_by_name("a", Capture(((7, 8),)))


@pytest.mark.parametrize("how", HOW)
def test_a_remembered_digest_is_forgotten_when_the_file_changes(user, how):
    user.let_digests_be_remembered("a")
    user.replace_weights("a", 2, how)
    user.capture_in_another_process("a", STATES)
    user.capture_by_name("a", STATES)


def test_replaced_weights_reach_experiments_and_workflows(user):
    user.experiment_by_name("a", experiments()[0])
    user.logit_lens_by_name("a", False)
    user.replace_weights("a", 2, "rename")
    user.experiment_by_name("a", experiments()[0])
    user.logit_lens_by_name("a", False)
    user.capture_in_another_process("a", STATES)


@pytest.mark.parametrize("number", [1, 2])
def test_an_edited_config_is_another_model(user, number):
    user.capture_by_name("a", STATES)
    user.replace_config("a", number, "restored")
    user.capture_by_name("a", STATES)
    user.capture_by_name("a", Capture(((7, 8, 9),)))


def test_a_replaced_tokenizer_gives_other_ids_to_the_same_text(user):
    text = Capture(("w1 w2 w3",))
    user.capture_by_name("a", text)
    user.logit_lens_by_name("a", False)
    user.replace_tokenizer("a", 5, "restored")
    user.capture_by_name("a", text)
    user.logit_lens_by_name("a", False)


@pytest.mark.parametrize("experiment", [experiments()[0], experiments()[-1]], ids=lambda each: each.name)
def test_a_replaced_tokenizer_reaches_the_words_of_a_result(user, experiment):
    user.experiment_by_name("a", experiment)
    user.replace_tokenizer("a", 5, "rename")
    user.experiment_by_name("a", experiment)


def test_a_replaced_tokenizer_reaches_the_words_of_a_graph(user):
    user.features_by_name("a", Graph)
    user.replace_tokenizer("a", 5, "rename")
    user.features_by_name("a", Graph)


def test_a_prompts_file_is_read_when_it_is_asked_about(user):
    user.logit_lens_by_name("a", True)
    user.replace_prompts_file("w9 w2 w3\nw4 w6", "restored")
    user.logit_lens_by_name("a", True)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_replaced_dictionary_is_another_dictionary(user, kind, how):
    user.features_by_name("a", kind)
    user.replace_dictionary(1, how)
    user.features_by_name("a", kind)
    user.replace_dictionary(0, how)
    user.features_by_name("a", kind)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_dictionary_in_hand_is_what_it_was_opened_as_or_refuses(user, kind, how):
    opened = user.open_dictionary()
    user.features_with(opened, "a", kind)
    user.replace_dictionary(1, how)
    user.features_with(opened, "b", kind)
    user.features_with(opened, "a", kind)
    user.features_by_name("b", kind)
    user.replace_dictionary(0, how)
    user.features_by_name("b", kind)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_dictionary_replaced_before_it_is_first_read_poisons_nothing(user, kind, how):
    opened = user.open_dictionary()
    user.replace_dictionary(1, how)
    user.features_with(opened, "a", kind)
    user.features_by_name("a", kind)
    user.replace_dictionary(0, how)
    user.features_by_name("a", kind)


@pytest.mark.parametrize("how", HOW)
def test_what_was_planned_before_files_changed_is_what_was_planned_or_refused(user, how):
    plan = user.plan_a_lens("a")
    user.replace_weights("a", 2, how)
    user.run_what_was_planned(plan)
    user.replace_weights("a", 0, how)
    user.logit_lens_by_name("a", False)


# -- models in memory


@pytest.mark.parametrize("how", EDITS)
def test_a_model_edited_in_memory_is_another_model_or_none(user, how):
    user.capture_by_name("a", STATES)
    model = user.load("a")
    user.capture_with(model, STATES)
    user.edit_in_memory(model, 2, how)
    user.capture_with(model, STATES)
    user.capture_with(model, Capture(((7, 8),)))
    user.run_with(model, (1, 2, 3), ())
    user.capture_by_name("a", Capture(((7, 8),)))


@pytest.mark.parametrize(
    "how", ["assign", *(pytest.param(how, marks=SLOW) for how in EDITS if how != "assign")]
)
def test_an_edited_model_leaves_the_store_to_others_as_it_was(user, how):
    model = user.load("a")
    user.edit_in_memory(model, 2, how)
    user.experiment_with(model, experiments()[0])
    user.logit_lens_with(model)
    user.experiment_by_name("a", experiments()[0])
    user.logit_lens_by_name("a", False)


@pytest.mark.parametrize("how", HOW)
def test_a_model_whose_files_were_replaced_is_still_what_was_loaded_or_refuses(user, how):
    model = user.load("a")
    user.replace_weights("a", 2, how)
    user.capture_with(model, STATES)
    user.run_with(model, (1, 2, 3), ())
    user.logit_lens_with(model)
    user.capture_by_name("a", STATES)
    user.replace_weights("a", 0, how)
    user.capture_by_name("a", STATES)
    user.logit_lens_by_name("a", False)


@pytest.mark.parametrize("how", ["mul_", *(pytest.param(how, marks=SLOW) for how in EDITS if how != "mul_")])
def test_a_model_that_a_node_loaded_is_not_served_edited_to_others(user, how):
    user.edit_what_a_node_loaded("a", 2, how, STATES)
    user.capture_in_another_process("a", STATES)


@pytest.mark.parametrize(
    "how", ["numpy", *(pytest.param(how, marks=SLOW) for how in DICTIONARY_EDITS if how != "numpy")]
)
@pytest.mark.parametrize("kind", KINDS)
def test_an_edited_dictionary_answers_for_its_files_or_refuses(user, kind, how):
    opened = user.open_dictionary()
    for number in range(4):
        user.edit_dictionary(opened, number, how, "a", kind)
    user.features_by_name("a", kind)


# -- around a call and meanwhile


@pytest.mark.parametrize("setting", ["autocast bfloat16 on the CPU", "function modes that doubles"])
def test_a_setting_of_torch_is_in_no_result(user, setting):
    opened = user.open_dictionary()
    model = user.load("a")
    user.set_torch(setting)
    user.capture_by_name("a", STATES)
    user.run_with(model, (1, 2, 3), ())
    user.features_with(opened, "a", Active)
    user.set_torch("")
    user.capture_by_name("a", STATES)


@pytest.mark.parametrize("line", [40, 400, 900])
@pytest.mark.parametrize("kind", ["interrupt", "weights"])
def test_what_happens_during_a_capture_is_in_no_result(user, kind, line):
    user.let_happen_meanwhile(kind, line, "a", 2, "restored")
    user.capture_by_name("a", STATES)
    user.capture_by_name("a", STATES)


# -- files of activations


@pytest.mark.parametrize("kind", ["safetensors", "npz"])
def test_imported_numbers_are_those_of_the_file(user, kind):
    user.import_an_export("a", ((1, 2, 3), (4, 5)), kind)
    for line in (20, 100, 200, 300, 400):
        user.replace_activations(kind, 0, "in_place")
        user.let_happen_meanwhile("activations", line, "a", 1, "restored")
        user.import_activations(kind)
        user.import_activations(kind)
    for place in (0.001, 0.3, 0.5, 0.7, 0.9):
        user.flip_a_bit_of_activations(kind, place, 3)
        user.import_activations(kind)
        user.replace_activations(kind, 2, "rename")
    user.import_activations(kind)


# -- stores of others


@pytest.mark.parametrize("how", ["", "flip_bits", "lead_out", "link"])
def test_what_comes_from_a_store_of_somebody_else_is_right_or_refused(user, how):
    for number in range(1 if not how else 6):
        other = user.fill_another_store("a", STATES)
        if how:
            user.tamper_with_another_store(other, number, how)
        user.merge(other, None, True)
        user.capture_by_name("a", STATES)
        user.delete_the_store()


# -- payloads


@pytest.mark.parametrize("kind", ["torch", "numpy", "list", "pairs"])
def test_a_payload_written_to_later_is_what_it_was_when_it_was_given(user, kind):
    payload = user.make_payload(kind, 0)
    user.write_into_payload(payload)
    user.capture_under_payload(payload, "a")
    user.run_under_payload(payload, user.load("a"))
    user.write_into_payload(payload)
    user.run_under_payload(payload, user.load("a"))


# -- stages of one's own


@pytest.mark.parametrize("what", ["number", "table", "helper", "default", "far"])
def test_a_stage_whose_surroundings_were_edited_is_another_stage_or_none(user, what):
    module = user.write_a_stage()
    user.compute_own_stage(module, "a")
    user.edit_what_a_stage_reads(module, what, 3)
    user.compute_own_stage(module, "a")


# -- the store


def test_a_store_made_anew_in_the_same_place_holds_nothing_of_the_old_one(user):
    held = user.hold_a_capture("a", ((1, 2, 3), (4, 5, 6, 7, 8, 9)), 8)
    user.read_what_is_held(held, pickled=True)
    user.delete_the_store()
    user.read_what_is_held(held, pickled=False)
    again = user.hold_a_capture("a", ((1, 2, 3), (4, 5, 6, 7, 8, 9)), None)
    user.read_what_is_held(again, pickled=True)
    user.read_what_is_held(held, pickled=True)


def test_prompts_are_found_in_larger_runs_without_an_index_too(user):
    user.capture_by_name("a", Capture(((1, 2, 3), (4, 5), (6, 7))))
    user.capture_by_name("a", STATES)
    user.delete_the_index()
    user.capture_by_name("a", Capture(((4, 5), (1, 2, 3))))


@pytest.mark.parametrize("files", [1, 4, 8, 13])
def test_what_is_left_of_a_killed_capture_is_right(user, files):
    segmented = Capture(((1, 2, 3), (4, 5, 6, 7), (8, 9)), segment_tokens=8, batch_tokens=4)
    user.kill_a_capture("a", segmented, files)
    user.interrupt_a_capture("a", segmented, files)
    user.capture_by_name("a", segmented)


@pytest.mark.parametrize("kind", ["numbers", "descriptions"])
def test_flipped_bits_are_refused_or_do_not_matter(user, kind):
    """Numbers: shards and labels. Descriptions: everything that says what they are and where they stand."""
    draw = random.Random(0)
    for _ in range(12):
        user.capture_by_name("a", STATES)
        found = [path for path in sorted(user.store.path.rglob("*")) if path.is_file()]
        numbers = [path for path in found if "c" in path.parts]
        chosen = draw.choice(numbers if kind == "numbers" else sorted({*found} - {*numbers}))
        flipped(chosen, draw.random(), draw.randrange(8))
        user.is_damaged = True
        user.capture_by_name("a", STATES)
        user.delete_the_store()


def test_a_family_that_would_be_a_guess_is_not_stored(user):
    """A key nobody reads may change every number; a model_type nobody knows gives it any meaning."""
    folder = user.checkpoints["a"].path
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mystery", "temper": 3.0}))
    with pytest.raises(MizarrError):
        mizarr.capture(str(folder), [[1, 2, 3]], "blocks.*.hook_resid_post", store=user.store, progress=False)


# -- anything


@pytest.mark.timeout(900)
def test_whatever_a_user_does_no_wrong_number_is_served():
    COUNTS.clear()
    run_state_machine_as_test(UserMachine, settings=ANYTHING)
    assert sum(n for name, n in COUNTS.items() if name.endswith(": answered")) > 5, COUNTS


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:TF32 acceleration")
@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 3600)
def test_whatever_a_user_does_for_hours_no_wrong_number_is_served():
    COUNTS.clear()
    until, draw = time.monotonic() + SECONDS, random.SystemRandom()
    try:
        while time.monotonic() < until:
            number = draw.randrange(2**32)
            print(f"seed {number}", flush=True)
            machine = seed(number)(type("User", (UserMachine,), {}))
            run_state_machine_as_test(
                machine,
                settings=settings(ANYTHING, derandomize=False, max_examples=5, stateful_step_count=40),
            )
    finally:
        different = sum(n for name, n in COUNTS.items() if name.endswith("DIFFERENT"))
        for name, n in sorted(COUNTS.items()):
            print(f"{n:8d}  {name}")
        print(f"{different:8d}  differences")
    assert not different

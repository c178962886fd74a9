"""Hook points and specs: names both ways, globs, digests, and errors that name the nearest valid thing."""

from __future__ import annotations

import ast
import copy
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mizarr
from mizarr.stages.causal.grids.patching_metrics import LogitDifference, Probability
from mizarr.stages.forward.architectures.known import from_hf_config
from mizarr.stages.forward.architectures.points import KINDS, HookPoint
from mizarr.stages.forward.hooks.interventions import Add, Replace, Scale, Zero
from mizarr.stages.forward.hooks.spec import HookSpec
from mizarr.store.errors import HookPointNotFound, InterventionError
from tests.conftest import TINY

POINTS = from_hf_config({**TINY, "num_hidden_layers": 4}).hook_points


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_point_survives_the_trip_through_its_string_form(kind):
    point = HookPoint(kind.name, 7 if kind.per_layer else None)
    assert HookPoint.parse(str(point)) == point


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind.transformer_lens], ids=lambda kind: kind.name
)
def test_every_transformer_lens_name_translates_back(kind):
    point = HookPoint(kind.name, 2 if kind.per_layer else None)
    assert HookPoint.from_transformer_lens(point.transformer_lens) == point


def test_nnterps_names_are_read_wherever_a_name_is():
    assert HookPoint.parse("layers_output[2]") == HookPoint.resid_post(2)
    assert HookPoint.parse("layers_input[0]") == HookPoint.resid_pre(0)
    assert HookPoint.parse("attention_probabilities[1]") == HookPoint.pattern(1)
    one = HookSpec().capture("mlps_output[3]", "layers_output[*]").intervene("attentions_output[*]", Zero())
    other = HookSpec().capture("blocks.3.mlp.hook_post", "blocks.*.hook_resid_post")
    other = other.intervene("blocks.*.hook_attn_out", Zero())
    assert one.bind(POINTS, "toy") == other.bind(POINTS, "toy")
    for wrong in ("layers_output[4]", "layers_outputs[1]", "layers_output[-1]"):
        with pytest.raises(HookPointNotFound):
            HookSpec().capture(wrong).bind(POINTS, "toy")


def test_names_that_mean_two_things_reach_both():
    assert HookPoint.from_transformer_lens("blocks.1.mlp.hook_pre") == HookPoint.mlp_pre_act(1)
    assert HookPoint.parse("blocks.1.mlp.hook_pre") == HookPoint.mlp_pre(1)
    assert HookPoint.mlp_pre(1).transformer_lens is None


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("blocks.3.hook_residpost", "blocks.3.hook_resid_post"),
        ("blocks.3.attn.hook_patern", "blocks.3.attn.hook_pattern"),
        ("hook_embedd", "hook_embed"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(name, near):
    with pytest.raises(HookPointNotFound, match=near):
        HookSpec().capture(name)


def test_a_layer_the_model_lacks_is_refused():
    with pytest.raises(HookPointNotFound, match=r"layers 0 to 3, found 'blocks.9.hook_resid_post'"):
        HookSpec().capture("blocks.9.hook_resid_post").bind(POINTS)


def test_a_point_another_family_has_is_refused():
    with pytest.raises(HookPointNotFound, match=r"no hook point 'blocks.0.ln1_post.hook_scale'"):
        HookSpec().capture("blocks.0.ln1_post.hook_scale").bind(POINTS)


def test_a_glob_that_matches_nothing_is_refused():
    with pytest.raises(HookPointNotFound, match="hook_resid_pots"):
        HookSpec().capture("blocks.*.hook_resid_pots").bind(POINTS)


def test_a_glob_expands_to_the_layers_of_the_model_in_order():
    bound = HookSpec().capture("blocks.*.hook_resid_post").bind(POINTS)
    assert [c.point for c in bound.captures] == [HookPoint.resid_post(layer) for layer in range(4)]


def test_capturing_twice_is_capturing_once():
    spec = HookSpec().capture("hook_embed").capture(HookPoint.embed())
    assert spec.num_captures == 1


METHODS = {
    "capture": lambda spec: spec.capture("blocks.*.hook_resid_post", reduce="norm"),
    "intervene": lambda spec: spec.intervene("blocks.*.hook_mlp_out", Scale(2.0)),
    "gradient_of": lambda spec: spec.gradient_of(LogitDifference(1, 2)),
    "extend": lambda spec: spec.extend(
        HookSpec().capture("hook_final_norm").intervene("hook_embed", Zero()).gradient_of(Probability(3))
    ),
}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_leaves_the_spec_as_it_is(method):
    base = HookSpec().capture("hook_embed").intervene("blocks.0.hook_mlp_out", Zero())
    before, told, name = base.canonical(), repr(base), hash(base)
    variants = [METHODS[method](base) for _ in range(3)]
    assert (base.canonical(), repr(base), hash(base)) == (before, told, name)
    assert variants[0] == variants[1] != base
    assert len({base, *variants}) == 2
    assert pickle.loads(pickle.dumps(variants[0])) == copy.deepcopy(variants[0]) == variants[0]


def test_a_spec_has_no_field_to_write_to():
    spec = HookSpec().capture("hook_embed")
    for name in (*vars(spec), "anything"):
        with pytest.raises(AttributeError):
            setattr(spec, name, ())
    spec.interventions_at("hook_embed").append(Zero())
    assert spec == HookSpec().capture("hook_embed")


def test_specs_are_equal_by_what_they_ask_for():
    one = HookSpec().capture("hook_embed", "hook_final_norm")
    assert one == HookSpec().capture("hook_final_norm").capture("hook_embed")
    assert one != one.capture("hook_embed", positions="last")
    first = HookSpec().intervene("hook_embed", Zero()).intervene("hook_embed", Scale(2.0))
    other = HookSpec().intervene("hook_embed", Scale(2.0)).intervene("hook_embed", Zero())
    assert first != other, "interventions at one point apply in their order"


def test_nobody_throws_a_changed_spec_away():
    """A call of `intervene` or `gradient_of` that stands alone changes nothing: its spec is lost."""
    root, lost = Path(mizarr.__file__).parent, []
    for path in (
        path for room in ("stages", "workflows", "tests", "docs") for path in (root / room).rglob("*.py")
    ):
        tree = ast.parse(path.read_text())
        refused = {
            id(line)
            for block in ast.walk(tree)
            if isinstance(block, ast.With) and "raises" in ast.unparse(block.items[0])
            for line in block.body
        }
        for line in ast.walk(tree):
            call = line.value if isinstance(line, ast.Expr) and id(line) not in refused else None
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith((".intervene", ".gradient_of")):
                lost.append(f"{path.relative_to(root)}:{line.lineno}")
    assert not lost


def test_extend_appends_interventions_and_unites_captures():
    first = HookSpec().capture("hook_embed").intervene("blocks.0.hook_mlp_out", Zero())
    second = (
        HookSpec().capture("hook_embed", "hook_final_norm").intervene("blocks.0.hook_mlp_out", Scale(2.0))
    )
    first = first.extend(second)
    assert first.num_captures == 2
    assert first.interventions_at("blocks.0.hook_mlp_out") == [Zero(), Scale(2.0)]


def test_the_run_digest_ignores_captures_and_their_order():
    a = (
        HookSpec()
        .capture("hook_embed", "blocks.1.hook_resid_post")
        .intervene("blocks.0.hook_mlp_out", Zero())
    )
    b = HookSpec().intervene("blocks.0.hook_mlp_out", Zero()).capture("blocks.*.hook_resid_pre")
    assert a.bind(POINTS).run_digest == b.bind(POINTS).run_digest
    assert a.bind(POINTS).digest != b.bind(POINTS).digest


def test_the_order_of_interventions_is_identity():
    a = HookSpec().intervene("hook_embed", Zero()).intervene("hook_embed", Scale(2.0))
    b = HookSpec().intervene("hook_embed", Scale(2.0)).intervene("hook_embed", Zero())
    assert a.bind(POINTS).run_digest != b.bind(POINTS).run_digest


def test_one_bit_of_a_payload_changes_the_run_digest():
    vector = np.linspace(0, 1, 16, dtype=np.float32)
    other = vector.copy()
    other.view(np.uint32)[3] ^= 1
    digests = {
        HookSpec().intervene("hook_embed", Add(v)).bind(POINTS).run_digest
        for v in (vector, other, vector.copy())
    }
    assert len(digests) == 2


def test_a_tensor_and_an_array_of_equal_content_are_one_payload():
    torch = pytest.importorskip("torch")
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert Replace(array) == Replace(torch.from_numpy(array))
    assert Replace(torch.from_numpy(array).bfloat16()) != Replace(array)


def test_digests_do_not_depend_on_the_process():
    code = (
        "from mizarr.stages.forward.hooks.spec import HookSpec\n"
        "from mizarr.stages.forward.hooks.interventions import Add, Scale\n"
        "from mizarr.stages.forward.architectures.points import points_of\n"
        "spec = HookSpec().capture('hook_embed').intervene('hook_embed', "
        "Scale(0.1)).intervene('hook_embed', Add([1.0, 2.5]))\n"
        "print(spec.bind(points_of(('embed', 'resid_post'), 2)).digest)\n"
        "import sys; assert 'torch' not in sys.modules, 'planning must not import torch'\n"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1


@pytest.mark.parametrize("payload", [np.arange(3), np.array([True]), np.array([1 + 1j])])
def test_payloads_that_are_not_floating_point_are_refused(payload):
    with pytest.raises(InterventionError, match="expected a floating-point tensor, found dtype"):
        Replace(payload)


def test_payloads_with_nan_are_refused():
    with pytest.raises(InterventionError, match="expected finite numbers"):
        Add(np.array([1.0, np.nan], np.float32))


def test_something_that_is_no_intervention_is_refused():
    with pytest.raises(InterventionError, match="expected an intervention"):
        HookSpec().intervene("hook_embed", lambda x: x)  # type: ignore[arg-type]


def test_a_spec_knows_what_it_asks_for_by_name_and_by_glob():
    spec = HookSpec().capture("blocks.*.hook_resid_post").intervene("blocks.*.hook_mlp_out", Zero())
    assert spec.is_captured("blocks.3.hook_resid_post")
    assert not spec.is_captured("blocks.3.hook_resid_pre")
    assert spec.has_intervention_at(HookPoint.mlp_out(1))
    assert not spec.has_intervention_at(HookPoint.attn_out(1))
    assert (spec.num_captures, spec.num_interventions, spec.is_empty) == (1, 1, False)
    assert HookSpec().is_empty


@pytest.mark.parametrize(
    ("point", "instead"),
    [
        (HookPoint.router_probs(0), "intervene at a point from which it is computed instead$"),
        (
            HookPoint.ssm_state(0),
            r"at 'blocks\.0\.ssm\.hook_state_seq' or 'blocks\.0\.ssm\.hook_write' instead$",
        ),
    ],
)
def test_a_change_of_what_is_only_worked_out_is_refused_and_told_what_there_is_to_change(point, instead):
    with pytest.raises(InterventionError, match=instead):
        HookSpec().intervene(point, Zero()).bind([point])

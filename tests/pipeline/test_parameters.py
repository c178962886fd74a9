"""A stage's function gets exactly what its key says: values that code tells apart have two keys."""

from __future__ import annotations

import enum
import itertools
from typing import Any, ClassVar

import numpy as np
import pytest
import xarray as xr

from mizarr.pipeline import ConstantNode, Output, SourceNode, run, stage
from mizarr.pipeline.parameters import parameter_copy, parameter_record, parameter_records
from mizarr.stages.causal.grids.patching_metrics import Metric
from mizarr.stages.forward.hooks.interventions import Intervention, Scale
from mizarr.store import open_store
from mizarr.store.digest import canonical_json
from mizarr.store.errors import InterventionError, ShapeError, StageError


class Colour(enum.Enum):
    RED = "red"
    DARK = "RED"


class Word(enum.StrEnum):
    RED = "red"


class Number(enum.IntEnum):
    ONE = 1


LOOKALIKES: list[tuple[Any, ...]] = [
    ((0, 1), [0, 1]),
    ((), [], {}, None, False, 0, 0.0, -0.0, "", np.False_, np.float64(-0.0)),
    (200, np.uint8(200), np.int64(200), 200.0, np.float32(200), np.float64(200), np.float16(200)),
    (1 / 3, np.float64(1 / 3), np.float32(1 / 3), (1 / 3).hex(), {"float": (1 / 3).hex()}),
    (True, np.True_, 1, 1.0, "True", Number.ONE, np.int8(1)),
    (0.0, -0.0, np.float32(0), np.float32(-0.0), {"float": "-0.0"}, "-0.0"),
    (Colour.RED, "red", "RED", Colour.DARK, Word.RED),
    (np.dtype("float32"), "float32", np.dtype(">f4"), "<f4"),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}, [["a", 1], ["b", 2]], {"dict": [["a", 1], ["b", 2]]}),
    ({"x": {"a": 1, "b": 2}}, {"x": {"b": 2, "a": 1}}),
    ({"tuple": [1, 2]}, (1, 2), [1, 2], [[1, 2]], [(1, 2)], ([1, 2],)),
    ({"numpy": ["uint8", 1]}, np.uint8(1)),
    ({"str": "0x1p+0"}, "0x1p+0", 1.0),
]


@stage(version=1, inputs={"x": ("token",)}, outputs={"seen": ("token",)})
def seen(x: xr.DataArray, *, value: Any) -> xr.DataArray:
    """What the function got, in a spelling that tells types and orders apart, and then changed."""
    text = f"{type(value).__name__} {value!r}"
    for held in value if isinstance(value, list | tuple) else (value,):
        if isinstance(held, list):
            held.append("changed")
        elif isinstance(held, dict):
            held["changed"] = True
    return xr.DataArray([text], dims="token")


X = xr.DataArray([1.0], dims="token", name="x")


def answer(store: Any, **given: Any) -> str:
    node = seen.on(**{"x": X} | given)
    run([node], store, quiet=True)
    return str(node.open(store)["seen"].item())


@pytest.mark.parametrize("values", LOOKALIKES, ids=lambda values: f"{values[0]!r:.20}")
def test_values_that_code_tells_apart_have_results_of_their_own(values):
    store = open_store("memory://lookalikes")
    for value in [*values, *reversed(values)]:
        expected = f"{type(value).__name__} {value!r}"
        assert answer(store, value=value) == expected
        assert answer(store, value=[value]) == f"list {[value]!r}"
        assert answer(store, value={"a": (value,)}) == f"dict { {'a': (value,)}!r}"


def test_no_two_lookalikes_share_a_record():
    every = list(itertools.chain.from_iterable(LOOKALIKES))
    records = {f"{type(value)} {value!r}": canonical_json(parameter_record(value)) for value in every}
    assert len(set(records.values())) == len(records)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({1, 2}, "order of a set"),
        (np.zeros(2), "input of the stage"),
        (float("nan"), "finite"),
        (np.float32("inf"), "finite"),
        (2**53 + 1, "2\\*\\*53"),
        (np.uint64(2**63), "2\\*\\*53"),
        (np.str_("a"), "not an instance of a subclass"),
        (type("Own", (dict,), {})(), "not an instance of a subclass"),
        ({1: 2}, "dict with keys of type str"),
        (b"a", "plain values"),
        ("\ud800", "UTF-8"),
        (object(), "plain values"),
        (1j, "plain values"),
    ],
)
def test_what_has_no_record_is_refused_in_a_line_that_names_the_parameter(value, words):
    for given in (value, [value], {"a": (value,)}):
        with pytest.raises(StageError, match=f"'seen'.*value: .*{words}") as error:
            seen.on(x=X, value=given)
        assert "\n" not in str(error.value)


def test_what_contains_itself_is_refused():
    ring: list[Any] = []
    ring.append(ring)
    with pytest.raises(StageError, match="nested too deep"):
        seen.on(x=X, value=ring)


def test_parameters_are_those_of_the_moment_when_the_node_was_made():
    shared = [1]
    value = {"a": shared, "b": shared}
    node = seen.on(x=X, value=value)
    shared.append(2)
    node.params["value"]["a"].append(3)
    assert node.params["value"] == {"a": [1], "b": [1]}
    copied = parameter_copy({"a": shared, "b": shared})
    assert copied["a"] is not copied["b"]  # no record tells one list in two places from two equal ones
    assert node.key(open_store("memory://moment")) == seen.on(x=X, value={"a": [1], "b": [1]}).key(
        open_store("memory://moment")
    )


def test_parameters_of_a_source_are_recorded_alike():
    nodes = [
        SourceNode("source", 1, {"names": names}, xr.Dataset)
        for names in ({"a": 1, "b": 2}, {"b": 2, "a": 1}, [["a", 1], ["b", 2]], (["a", 1], ["b", 2]))
    ]
    store = open_store("memory://sources")
    assert len({node.key(store).digest for node in nodes}) == len(nodes)


# -- inputs


@stage(version=1, inputs={"table": None}, outputs={"text": Output(("token",), "1", "what was read")})
def described(table: xr.Dataset) -> xr.Dataset:
    """Everything of a dataset that code can read, and afterwards the dataset is written to."""
    text = repr(
        [
            (name, v.dims, v.dtype, v.values.tolist(), v.values.flags.c_contiguous, v.attrs, list(v.encoding))
            for name, v in table.variables.items()
        ]
        + [list(table.data_vars), list(table.coords), list(table.attrs.items()), list(table.encoding)]
    )
    for variable in table.data_vars.values():
        if variable.dtype.kind == "f":
            variable.values[...] = 7
    table.attrs["changed"] = True
    return xr.Dataset({"text": ("token", [text])})


def tables() -> list[xr.Dataset]:
    """One content in many spellings."""
    a, b = np.arange(6.0).reshape(2, 3), np.array(["one", "two"])
    attrs = {"unit": "m", "list": [1, 2]}

    def made(**changes: Any) -> xr.Dataset:
        held = {"a": (("token", "hidden"), changes.get("a", a), changes.get("attrs", attrs)),
                "b": ("token", changes.get("b", b))}  # fmt: skip
        names = changes.get("names", ("a", "b"))
        coords = {"hidden": [1, 2, 3], "token": [5, 6]}
        labels = {name: coords[name] for name in changes.get("labels", ("hidden", "token"))}
        return xr.Dataset({name: held[name] for name in names}, labels, changes.get("attrs", attrs))

    encoded = made()
    encoded["a"].encoding = {"dtype": "int8", "scale_factor": 2.0}
    return [
        made(),
        made(names=("b", "a")),
        made(labels=("token", "hidden")),
        made(attrs={"list": (1, 2), "unit": "m"}),
        made(attrs={"list": np.array([1, 2]), "unit": np.str_("m")}),
        made(a=np.asfortranarray(a)),
        made(a=a.astype(">f8")),
        made(b=b.astype(object)),
        made(b=b.astype(np.dtypes.StringDType())),
        encoded,
    ]


def test_one_content_is_one_input_however_it_is_spelled():
    answers, keys = set(), set()
    for table in tables():
        store = open_store(f"memory://table-{len(answers)}-{id(table)}")
        node = described.on(table=table)
        keys.add(node.key(store).digest)
        run([node], store, quiet=True)
        answers.add(str(node.open(store)["text"].item()))
        assert table["a"].values[0, 1] == 1.0  # the function wrote to its own copy
    assert len(keys) == len(answers) == 1


def test_a_function_that_writes_to_its_input_changes_no_other():
    constant = ConstantNode(tables()[0])
    store = open_store("memory://written")
    first = described.on(table=constant)
    run([first], store, quiet=True)
    other = open_store("memory://written-again")
    second = described.on(table=constant)
    run([second], other, quiet=True)
    assert first.open(store)["text"].item() == second.open(other)["text"].item()


@pytest.mark.parametrize("names", [(1, "a"), ("a", 2.0)])
def test_names_that_are_no_text_are_refused(names):
    with pytest.raises(ShapeError, match="must be text"):
        ConstantNode(xr.Dataset({name: ("token", [1.0]) for name in names}))


# -- what users write


class Shown(Intervention):
    """An intervention of a user, with one field."""

    version: ClassVar[int] = 1

    def __init__(self, value: Any) -> None:
        self.value = value


class Counted(Metric):
    """A metric of a user, with one field."""

    version: ClassVar[int] = 1
    name = "counted"

    def __init__(self, value_: Any) -> None:
        self.value_ = value_

    def value(self, logits: Any, clean: Any) -> float:
        return 0.0


@pytest.mark.parametrize("kind", [Shown, Counted])
@pytest.mark.parametrize("values", LOOKALIKES, ids=lambda values: f"{values[0]!r:.20}")
def test_fields_of_users_classes_are_told_apart(kind, values):
    texts = {canonical_json(kind(value).canonical()) for value in values if value is not None}
    assert len(texts) == sum(value is not None for value in values)


def test_payloads_of_users_interventions_count_by_content():
    one, same, other = (Shown([np.arange(3.0) + change]) for change in (0, 0, 1))
    assert one == same
    assert one != other
    with pytest.raises(InterventionError, match="value: expected plain values"):
        Shown(object()).canonical()


def test_a_scale_of_minus_zero_is_zero():
    assert str(Scale(-0.0).factor) == "0.0"


def test_records_name_the_parameter():
    with pytest.raises(TypeError, match=r"^second: "):
        parameter_records({"first": 1, "second": object()})

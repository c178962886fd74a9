"""A value of config.json that no model of the family has ends in one line, whichever key it stands at."""

from __future__ import annotations

import pytest

from mizarr.stages.forward.models.autoconfig import architecture_of, report
from mizarr.store.errors import MizarrError

transformers = pytest.importorskip("transformers")
VALUES = {
    "zero": 0,
    "zero of fractions": 0.0,
    "negative": -1,
    "NaN": float("nan"),
    "infinity": float("inf"),
    "huge": 2**60,
    "huge fraction": 1e308,
    "10**5000": 10**5000,
    "text": "x",
    "list": [[1]],
    "object": {"a": 1},
}


def refusal(read, raw):
    """The words of an error that mizarr raises; empty where there is none."""
    try:
        read(raw)
    except MizarrError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize(
    "model_type", ["llama", "granite", "bamba", "gpt2", "mixtral", "opt", "gemma2", "rwkv"]
)
def test_values_that_no_model_has_end_in_one_line(model_type, value):
    raw = transformers.CONFIG_MAPPING[model_type]().to_dict()
    told = [
        answer
        for key in raw.keys() - {"model_type"}
        for read in (lambda raw: architecture_of(raw, ()), lambda raw: report(raw, {}))
        if (answer := refusal(read, raw | {key: value}))
    ]
    assert told and all("\n" not in answer and len(answer) < 1_000 for answer in told)

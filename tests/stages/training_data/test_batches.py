"""Order: every row once an epoch, aligned over hook points, the same from any place and for any workers."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch

from mizarr.stages.training_data.batches import Batches, _Memory, every
from mizarr.stages.training_data.several import EndToEnd, Joined, SideBySide
from mizarr.stages.training_data.stored import StoredActivations
from mizarr.store.errors import ConfigError, PromptError, ShapeError
from tests.stored_rows import write_rows

A, B = ("resid_mid", 0), ("mlp_out", 0)


def ragged(seed, tokens):
    """Sizes of prompts that make so many tokens."""
    draw, sizes = np.random.default_rng(seed), []
    while sum(sizes) < tokens:
        sizes.append(min(int(draw.integers(1, 40)), tokens - sum(sizes)))
    return sizes


def numbers(count, first=0):
    """Rows that are their own number, three wide, and the negative of it, two wide."""
    rows = np.arange(first, first + count, dtype="f4")[:, None]
    return {"resid_mid": {0: np.repeat(rows, 3, 1)}, "mlp_out": {0: -np.repeat(rows, 2, 1)}}


@pytest.fixture
def numbered(tmp_path):
    """1008 rows in prompts of 16, cut into segments of 256."""
    return StoredActivations(write_rows(tmp_path / "s", numbers(1008), [[1] * 16] * 63, segment=256))


def batches(source, cells=(A, B), **changed):
    options = {"batch": 100, "window": 192, "block": 64, "seed": 0} | changed
    return Batches(source, cells, **options)


def drawn(source, count=None, start=0, worker=(0, 1), **changed):
    """The first numbers of the rows of batches."""
    them = batches(source, **changed).since(start, worker)
    return [batch.rows[A][:, 0].tolist() for batch in islice(them, count)]


def test_an_epoch_holds_every_row_once_and_batches_run_across_windows_and_epochs(numbered):
    flat = np.concatenate(drawn(numbered, 21))
    assert sorted(flat[:1008]) == list(range(1008))
    assert sorted(flat[1008:2016]) == list(range(1008))
    assert flat[:1008].tolist() != flat[1008:2016].tolist()


@pytest.mark.parametrize("seed", range(4))
def test_every_row_comes_once_an_epoch_whatever_the_sizes(tmp_path, seed):
    draw = np.random.default_rng(seed)
    count = int(draw.integers(600, 3000))
    prompts = [[5] * size for size in ragged(seed, count)]
    source = StoredActivations(write_rows(tmp_path / "s", numbers(count), prompts, segment=256))
    sizes = {"batch": int(draw.integers(1, 300)), "block": int(draw.integers(1, 300)), "seed": seed}
    found = drawn(source, epochs=2, window=int(draw.integers(300, 900)), **sizes)
    assert [len(rows) for rows in found[:-1]] == [sizes["batch"]] * (len(found) - 1)
    flat = np.concatenate(found)
    assert sorted(flat[:count]) == sorted(flat[count:]) == list(range(count))


def test_memory_that_somebody_still_sees_is_not_written_over(numbered):
    """Kept as a part, as a view of other numbers, and as a tensor; the windows of others serve again."""
    kept, said = [], []
    for batch in batches(numbered, epochs=6).since(0):
        rows = batch.rows[A]
        if batch.number % 7 == 0:
            said.append(rows[3:9].copy())
            part = rows[3:9]
            kept.append([part, part.view(np.int32), torch.from_numpy(part)][batch.number // 7 % 3])
            del part
    for one, other in zip(kept, said, strict=True):
        found = one.view(np.float32) if isinstance(one, np.ndarray) else one.numpy()
        assert np.array_equal(found, other)


def test_windows_that_nobody_sees_serve_again():
    memory = _Memory()

    def place():
        return memory.rows(1000, 8, np.float32).__array_interface__["data"][0]

    assert len({place() for _ in range(20)}) == 1
    held = memory.rows(1000, 8, np.float32)[5:6]
    assert held.__array_interface__["data"][0] - 5 * 32 not in {place() for _ in range(20)}
    assert memory.rows(10, 8, np.float16).dtype == np.float16
    assert memory.rows(1001, 8, np.float32).shape == (1001, 8)


def test_a_last_batch_that_is_shorter_can_be_left_out(numbered):
    assert [len(rows) for rows in drawn(numbered, epochs=1)] == [100] * 10 + [8]
    assert drawn(numbered, epochs=1, drop_last=True) == drawn(numbered, epochs=1)[:10]


def test_hook_points_and_tokens_stay_aligned(numbered):
    for batch in islice(batches(numbered).since(0), 15):
        assert np.array_equal(batch.rows[B], -batch.rows[A][:, :2])
        assert np.array_equal(batch.rows[A][:, 0], batch.tokens)


def test_order_follows_the_seed(numbered):
    assert drawn(numbered, 5) == drawn(numbered, 5)
    assert drawn(numbered, 5) != drawn(numbered, 5, seed=1)


def test_order_is_the_permutations_written_out(numbered):
    """Blocks by one, rows of a window by another: as the first level and the second are defined."""
    starts = np.array([first + at for first in range(0, 1008, 256) for at in range(0, 256, 64)])[:16]
    blocks = np.random.default_rng([7, 1, 0]).permutation(len(starts))
    expected = []
    for window in range(0, 16, 3):
        rows = np.concatenate(
            [np.arange(starts[n], min(starts[n] + 64, 1008)) for n in blocks[window : window + 3]]
        )
        expected += rows[np.random.default_rng([7, 2, 0, window // 3]).permutation(len(rows))].tolist()
    assert np.concatenate(drawn(numbered, seed=7, epochs=1)).tolist() == expected


def test_neighbours_in_the_store_are_apart_in_a_batch(numbered):
    first = np.array(drawn(numbered, 10)).ravel()
    assert (np.abs(np.diff(first)) == 1).mean() < 0.05


@pytest.mark.parametrize("taken", [0, 1, 2, 7, 10, 13])
def test_a_number_says_all_there_is_to_know_about_a_place(numbered, taken):
    assert drawn(numbered, 25 - taken, start=taken) == drawn(numbered, 25)[taken:]


@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize("workers", [2, 3, 40])
def test_workers_in_turn_make_the_batches_of_one(numbered, workers, start):
    whole = drawn(numbered, epochs=3, start=start)
    parts = [drawn(numbered, epochs=3, start=start, worker=(i, workers)) for i in range(workers)]
    assert [parts[n % workers][n // workers] for n in range(len(whole))] == whole
    assert sum(map(len, parts)) == len(whole)


def test_first_positions_tokens_left_out_and_held_out_prompts_never_come_up(tmp_path):
    prompts = [[2, *[n % 5 + 10] * 15] for n in range(63)]
    source = StoredActivations(write_rows(tmp_path / "s", numbers(1008), prompts, segment=256))
    kept, held = source.leaving_out(positions=2, tokens=[2, 12]).split(0.25, seed=3)
    assert held.chosen.sum() == 16
    seen = np.concatenate(drawn(kept, epochs=1)).astype(int)
    assert (seen % 16 >= 2).all()
    assert not held.chosen[seen // 16].any()
    assert not (seen // 16 % 5 == 2).any()
    there = [n for n in range(63) if not held.chosen[n] and n % 5 != 2]
    assert len(set(seen)) == len(seen) == kept.count() == 14 * len(there)


def test_rows_in_the_order_of_the_store(numbered):
    found = [block[A][:, 0] for block in every(numbered, [A], block=64)]
    assert np.concatenate(found).tolist() == list(range(1008))
    assert len(list(every(numbered, [A], block=64, apart=4))) == 4


def test_runs_end_to_end_are_read_as_one(tmp_path):
    sizes = [(300, 256, "float32"), (77, 512, "float16"), (640, 128, "bfloat16")]
    first, runs = 0, []
    for number, (count, segment, dtype) in enumerate(sizes):
        # Halves hold whole numbers up to 256 exactly (bfloat16): each run counts anew.
        rows = {"resid_mid": {0: np.repeat(np.arange(count, dtype="f4")[:, None] % 200, 3, 1)}}
        prompts = [[number + 1] * size for size in ragged(number, count)]
        runs.append(
            StoredActivations(write_rows(tmp_path / str(number), rows, prompts, segment=segment, dtype=dtype))
        )
        first += count
    source = EndToEnd(tuple(runs))
    assert source.dtype(A) == np.float32
    seen = {}
    for batch in batches(source, (A,), epochs=1, batch=50).since(0):
        told = source.labels(batch.tokens)
        assert (told["token_id"] == told["run"] + 1).all()
        seen |= dict(zip(batch.tokens.tolist(), batch.rows[A][:, 0].tolist(), strict=True))
    assert sorted(seen) == list(range(first))
    expected = np.concatenate([np.arange(count) % 200 for count, *_ in sizes])
    assert [seen[token] for token in range(first)] == expected.tolist()


def test_runs_of_unlike_models_are_not_read_end_to_end(tmp_path):
    runs = [
        StoredActivations(write_rows(tmp_path / name, numbers(16), [[1] * 16], model=name))
        for name in ("one", "other")
    ]
    with pytest.raises(ConfigError, match="the same model and the same interventions"):
        EndToEnd(tuple(runs))


@pytest.mark.parametrize("moved", [False, True])
def test_runs_side_by_side_give_the_same_tokens_of_both(tmp_path, moved):
    sizes = ragged(1, 900)
    prompts = [[n, *[3] * (size - 1)] for n, size in enumerate(sizes)]
    order = np.random.default_rng(0).permutation(len(sizes)) if moved else np.arange(len(sizes))
    starts = np.concatenate([[0], np.cumsum(sizes)])
    there = np.concatenate([np.arange(starts[n], starts[n + 1]) for n in order]).astype("f4")
    ours = {"resid_mid": {0: np.repeat(np.arange(900, dtype="f4")[:, None], 3, 1)}}
    theirs = {"resid_mid": {0: -np.repeat(there[:, None], 5, 1)}}
    both = SideBySide(
        (
            StoredActivations(write_rows(tmp_path / "a", ours, prompts, segment=256, model="a")),
            StoredActivations(
                write_rows(tmp_path / "b", theirs, [prompts[n] for n in order], segment=128, model="b")
            ),
        )
    )
    cells = (("resid_mid", 0, 0), ("resid_mid", 0, 1))
    joined = Joined(both, {A: cells})
    assert joined.width(A) == 8
    count = 0
    for batch in batches(joined.source, cells, epochs=1).since(0):
        assert np.array_equal(batch.rows[cells[0]][:, :1], -batch.rows[cells[1]][:, :1])
        count += len(batch.tokens)
    assert count == 900
    for batch in batches(joined, (A,), epochs=1).since(0):
        assert np.array_equal(batch.rows[A][:, 2], batch.tokens)
        assert np.array_equal(batch.rows[A][:, 7], -batch.rows[A][:, 0])


def test_a_prompt_that_another_run_lacks_is_named(tmp_path):
    runs = [
        StoredActivations(write_rows(tmp_path / name, numbers(32), prompts, model=name))
        for name, prompts in (("a", [[1] * 16, [2] * 16]), ("b", [[1] * 16, [3] * 16]))
    ]
    with pytest.raises(
        PromptError, match=r"prompt 1 of run \w+ is not in run 1 \(\w+\), .*; capture the same prompts"
    ):
        SideBySide(tuple(runs))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_number_that_is_not_finite_is_told_with_its_place(tmp_path, dtype):
    for number in (np.nan, np.inf, -np.inf):
        rows = -np.ones((64, 4), "f4")
        rows[37, 2] = number
        folder = tmp_path / str(number)
        entry = write_rows(folder, {"resid_mid": {0: rows}}, [[1] * 16] * 4, dtype=dtype)
        source = StoredActivations(entry, skip_positions=1)
        with pytest.raises(ShapeError, match="resid_mid of layer 0, prompt 2, position 5"):
            next(batches(source, (A,), batch=8, window=64).since(0))


def test_fewer_rows_than_a_batch_are_refused(numbered):
    with pytest.raises(ConfigError, match="one batch of 2000 tokens, found 1008"):
        batches(numbered, batch=2000)


def test_prompts_of_a_larger_run_are_found_in_it(numbered):
    some = numbered.of_prompts([3, 5])
    assert sorted(np.concatenate(drawn(some, epochs=1, batch=32))) == [*range(48, 64), *range(80, 96)]
    assert some.identity([A]) != numbered.identity([A])

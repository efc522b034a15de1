from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexfloor.errors import InputError
from flexfloor.simulate.costs import h200_table
from flexfloor.step_times import Row, StepTimes

SHARED = Path(__file__).parents[3] / "shared" / "data" / "h200_decode_ms.csv"
HEAD = "ep,rank1_idle,batch_per_rank,decode_ms"


def write(path, *lines):
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_measured_points_are_returned_as_they_are():
    table = h200_table()
    assert table.curve(1).seconds(64) == pytest.approx(0.018)
    assert table.curve(2).seconds(8) == pytest.approx(0.0081)
    assert table.curve(2).seconds(8, idle=True) == pytest.approx(0.00854)


def test_batches_between_are_interpolated_and_smaller_ones_cost_the_smallest():
    curve = StepTimes([Row(1, 4, 0.010), Row(1, 8, 0.014)]).curve(1)
    assert curve.seconds(6) == pytest.approx(0.012)
    assert curve.seconds(1) == pytest.approx(0.010)


def test_what_lies_outside_is_refused_unless_extrapolation_is_asked_for():
    table = h200_table()
    with pytest.raises(InputError, match="no batch above 256"):
        table.curve(2).seconds(300)
    with pytest.raises(InputError, match="no step times for EP 16"):
        table.curve(16)
    with pytest.raises(InputError, match="num_experts"):
        table.curve(16, extrapolate=True)
    with pytest.raises(InputError, match="one EP size only"):
        StepTimes([Row(2, 1, 0.01)]).curve(4, extrapolate=True, experts=128)
    assert table.curve(2, extrapolate=True).seconds(300) > table.curve(2).seconds(256)
    assert table.curve(16, extrapolate=True, experts=128).source == "extrapolated"


def test_the_size_model_repeats_the_measured_table_within_a_tenth():
    table = h200_table()
    model = table._model(128, 8)
    for row in table.rows:
        if not row.idle:
            assert model(row.ep, row.batch) == pytest.approx(row.seconds, rel=0.1), row


def test_extrapolated_times_never_fall_in_the_batch():
    for ep in (4, 8, 16, 64):
        curve = h200_table().curve(ep, extrapolate=True, experts=128)
        times = [curve.seconds(batch) for batch in (1, 8, 32, 64, 128, 256)]
        assert all(later >= earlier * (1 - 1e-9) for earlier, later in pairwise(times))


def test_sizes_between_measured_ones_are_interpolated_in_the_logarithm():
    table = StepTimes([Row(1, 1, 0.010), Row(1, 9, 0.010), Row(4, 1, 0.020), Row(4, 9, 0.020)])
    curve = table.curve(2)
    assert curve.source == "interpolated"
    assert curve.seconds(5) == pytest.approx(0.015)


@given(st.floats(1, 500), st.integers(1, 20))
def test_a_context_axis_is_interpolated_and_goes_on_behind(context, batch):
    rows = [Row(1, b, 0.001 * b + c * 1e-5, context=c) for b in (1, 10) for c in (100.0, 200.0)]
    curve = StepTimes(rows).curve(1, extrapolate=True)
    expected = 0.001 * batch + max(context, 100.0) * 1e-5
    assert curve.seconds(batch, context=context) == pytest.approx(expected)
    over = curve.seconds_over(batch, np.array([context, 150.0]))
    assert over == pytest.approx([expected, 0.001 * batch + 150e-5])


def test_a_saved_table_reads_back_equal(tmp_path):
    table = h200_table()
    table.save(tmp_path / "t.csv", ["a comment"])
    again = StepTimes.load(tmp_path / "t.csv")
    assert [row[:2] for row in again.rows] == [row[:2] for row in table.rows]
    assert [row.seconds for row in again.rows] == pytest.approx([row.seconds for row in table.rows])


@pytest.mark.skipif(not SHARED.is_file(), reason="the shared table is not here")
def test_the_built_in_table_is_the_shared_one():
    assert StepTimes.load(SHARED).rows == h200_table().rows


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([HEAD, "1,0,8,-3"], "t.csv:2: decode_ms: must be a positive number"),
        ([HEAD, "1,0,8,nan"], "t.csv:2: decode_ms: must be a positive number"),
        ([HEAD, "1,2,8,3"], "t.csv:2: rank1_idle: must be 0 or 1"),
        ([HEAD, "1,0,x,3"], "t.csv:2: batch_per_rank: must be a whole number"),
        ([HEAD, "1,0,8,3", "1,0,8,4"], "t.csv:3: EP 1 batch 8 stands in line 2 too"),
        ([HEAD, "1,0,8"], "t.csv:2: has 3 cells"),
        (["ep,b,ms", "1,1,1"], "t.csv:1: has the columns ep, b, ms"),
        ([HEAD], "t.csv: holds no measurement"),
        ([HEAD, "2,1,8,3"], "t.csv: rank1_idle: holds no step time of a world whose ranks are all busy"),
        ([""], "t.csv: is empty"),
    ],
)
def test_a_malformed_table_is_refused_with_its_place(tmp_path, lines, told):
    path = write(tmp_path / "t.csv", *lines)
    with pytest.raises(InputError) as caught:
        StepTimes.load(path)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)

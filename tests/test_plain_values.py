"""Values of data sets survive a file that holds no objects."""

import io
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from trl_explore.saving.plain_values import from_plain, to_plain, without_numpy


def through_a_file(value):
    file = io.BytesIO()
    torch.save(to_plain(value), file)
    file.seek(0)
    return from_plain(torch.load(file, weights_only=True))


def unfolded(moment):
    return moment.replace(fold=0)  # Arrow does not know it


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.dates()
    | st.datetimes().map(unfolded)
    | st.datetimes(timezones=st.just(UTC)).map(unfolded)
    | st.times().map(unfolded)
    | st.timedeltas()
    | st.decimals(allow_nan=False)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers() | st.dates(), inner)
    ),
    max_leaves=10,
)


@given(VALUES)
def test_values_come_back_equal_and_of_their_types(value):
    again = through_a_file(value)
    assert again == value and repr(again) == repr(value)


@pytest.mark.parametrize("key", [(1, 2), (1, (2, "a")), timedelta(1), np.float32(0.5)])
def test_a_key_may_have_any_type_that_a_value_has(key):
    value = {key: [1], "b": {key: (2,)}}
    assert from_plain(to_plain(value)) == through_a_file(value) == value
    assert [type(own) for own in from_plain(to_plain(value))] == [type(key), str]


DTYPES = st.sampled_from(["<i8", "<f4", "|b1", "<U3", "|S2", "<M8[D]", "<M8[us]", ">i2", "<c8"])


@given(arrays.arrays(DTYPES, arrays.array_shapes(min_dims=0, min_side=0)))
def test_arrays_come_back_with_type_and_shape(array):
    again = through_a_file(array)
    assert again.dtype == array.dtype and again.shape == array.shape
    np.testing.assert_array_equal(again, array)


@pytest.mark.parametrize("scalar", [np.int64(3), np.str_("x"), np.bool_(True), np.bytes_(b"ab"), np.float32(0.5)])
def test_scalars_stay_scalars(scalar):
    assert type(through_a_file(scalar)) is type(scalar) and through_a_file(scalar) == scalar


def test_arrays_of_values_that_numpy_does_not_know():
    array = np.array(Decimal("1.50"), dtype=object)
    assert through_a_file(array).shape == () and through_a_file(array)[()] == Decimal("1.50")
    ragged = np.array([np.array([1, 2]), np.array([3])], dtype=object)
    assert [row.tolist() for row in through_a_file(ragged)] == [[1, 2], [3]]


def test_a_time_zone_comes_back_as_its_offset():
    when = datetime(2020, 7, 1, 12, tzinfo=ZoneInfo("Europe/Berlin"))
    assert through_a_file(when) == when and through_a_file(when).utcoffset() == timedelta(hours=2)


def test_half_a_surrogate_pair_is_kept():
    assert through_a_file(["\ud800x"]) == ["\ud800x"]


def test_tensors_are_kept():
    assert torch.equal(through_a_file({"x": torch.arange(3)})["x"], torch.arange(3))


class Own:
    def __str__(self):
        return "own"


def test_anything_else_is_named_or_replaced():
    with pytest.raises(TypeError, match="test_plain_values.Own"):
        to_plain([{"a": Own()}])
    assert from_plain(to_plain([{"a": (Own(), date(2020, 1, 2))}], other=str)) == [{"a": ("own", date(2020, 1, 2))}]


def test_types_that_only_look_like_known_ones_are_not_known():
    class Text(str):
        pass

    with pytest.raises(TypeError, match="Text"):
        to_plain(Text("a"))
    with pytest.raises(TypeError, match="numpy.ndarray"):
        to_plain(np.zeros(2, dtype=[("a", "i4")]))
    assert to_plain(time(1, 2)) == ("time", "01:02:00")


@pytest.mark.parametrize("value", [np.ones(2), np.datetime64("2026-01-01"), np.array(1.0)], ids=repr)
def test_other_numpy_values_of_a_state_are_refused_with_their_place(value):
    with pytest.raises(TypeError, match=r"state\['rates'\]\[1\] is a NumPy value .*store a tensor"):
        without_numpy({"rates": [0.5, value]}, where="state")

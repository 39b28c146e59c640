"""Bootstrap intervals against all resamples of small data."""

import itertools

import numpy as np
import pytest

from trl_explore.evaluation.intervals import bootstrap_interval


@pytest.mark.parametrize("values", [[0.0, 1.0, 1.0, 0.0, 1.0], [0.0, 0.25, 0.5, 1.0, 1.0], [0.1, 0.2, 0.4, 0.8, 1.0]])
@pytest.mark.parametrize("level", [0.5, 0.9, 0.95])
def test_the_interval_is_that_of_all_resamples(values, level):
    means = [sum(drawn) / 5 for drawn in itertools.product(values, repeat=5)]
    expected = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    assert bootstrap_interval(values, level=level, num_resamples=200_000) == pytest.approx(expected, abs=0.021)


def test_known_intervals():
    assert bootstrap_interval([0.0, 1.0] * 50) == (0.4, 0.6)
    assert bootstrap_interval([0.25]) == (0.25, 0.25)


def test_the_seed_decides_and_the_order_of_prompts_does_not():
    values = np.random.default_rng(0).random(40)
    assert bootstrap_interval(values) == bootstrap_interval(values[::-1])
    assert bootstrap_interval(values, seed=1) != bootstrap_interval(values)


@pytest.mark.parametrize(("values", "level", "message"), [([], 0.95, "values is empty"), ([1.0], 1.0, "got 1.0")])
def test_bad_input_is_named(values, level, message):
    with pytest.raises(ValueError, match=message):
        bootstrap_interval(values, level=level)

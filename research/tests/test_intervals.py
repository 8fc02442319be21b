"""research/intervals.py: rates and gains of texts, against numbers worked out by hand, and what holds them."""

import numpy as np
import pytest
from intervals import Interval, Walk, gain, rate


def walk(tokens, rounds):
    return Walk(np.array(tokens), np.array(rounds))


def test_a_rate_is_of_all_texts_together():
    seen, low, high = rate(walk([10, 20, 40], [10, 10, 10]))
    assert seen == pytest.approx(70 / 30) and 1.0 <= low < seen < high <= 4.0


def test_a_gain_is_of_the_same_texts():
    """A method beside itself, and at twice its rate, has no spread, however its texts differ."""
    base = walk([12, 20, 9], [4, 10, 3])
    assert gain(base, base) == (0.0, 0.0, 0.0)
    assert gain(base._replace(tokens=2 * base.tokens), base) == (100.0, 100.0, 100.0)
    seen, low, high = gain(walk([12, 20, 9], [3, 11, 3]), base)
    assert seen == pytest.approx(0.0, abs=1e-9) and low < seen < high


def test_an_interval_is_as_wide_as_theory_says():
    """Of 400 texts with one round each the mean's 95 % interval is 1.96 deviations / 20 to either side."""
    tokens = np.random.default_rng(1).normal(5.0, 1.0, 400)
    seen, low, high = rate(Walk(tokens, np.ones(400)))
    assert [seen - low, high - seen] == pytest.approx([1.96 * tokens.std() / 20] * 2, rel=0.1)


def test_how_an_interval_is_written():
    assert f"{Interval(5.1, 4.95, 5.24):.2f}" == "5.10 (4.95 to 5.24)"
    assert Interval(1.5, -0.3, 3.1).is_none and not Interval(2.1, 0.8, 3.5).is_none

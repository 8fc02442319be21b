"""research/round_model.py: which steps it looks at, and what it says of them."""

import round_model


def test_steps_with_too_many_rows_are_left_out():
    points = round_model.points_of([0, 3, 60], [1, 16, 128], 1024)
    assert points == [(0, 1), (0, 16), (0, 128), (3, 1), (3, 16), (3, 128), (60, 1), (60, 16)]


def test_rounds_are_compared_with_those_without_drafts():
    model = {(0, 1): 0.010, (3, 1): 0.012, (0, 2): 0.011, (3, 2): 0.022}
    rounds = {(0, 1): 0.020, (3, 1): 0.022, (0, 2): 0.020, (3, 2): 0.030}
    rows = round_model.compared(model, rounds)
    assert [(row["batch"], row["width"]) for row in rows] == [(1, 0), (1, 3), (2, 0), (2, 3)]
    assert rows[3] == {
        "batch": 2,
        "width": 3,
        "model_ms": 22.0,
        "round_ms": 30.0,
        "model_times": 2.0,
        "round_times": 1.5,
    }
    assert rows[0]["model_times"] == rows[0]["round_times"] == 1.0

"""`benchmarks/fuzz.py`: every reader takes its good files, and refuses changed ones in one sentence."""

import random

import fuzz
import pytest

CHANGES = 60


def changed(data, rng):
    """Good bytes with some overwritten, taken out or doubled."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data))
        kind = rng.randrange(4)
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1:
            data[at : at + rng.randint(1, 40)] = b""
        elif kind == 2:
            data[at:at] = data[at : at + rng.randint(1, 40)]
        else:
            data[at : at + 8] = rng.choice([b"\xff" * 8, b"\0" * 8, b"null", b"-1"])
        if not data:
            return b""
    return bytes(data)


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_fuzzed_files_are_read_or_refused(name, tmp_path):
    target, rng, path, refused = fuzz.TARGETS[name], random.Random(name), tmp_path / "input", 0
    for seed in target.seeds():
        path.write_bytes(seed)
        target.read(path)
        for _ in range(CHANGES):
            path.write_bytes(changed(seed, rng))
            try:
                target.read(path)
            except ValueError as problem:
                fuzz.one_line(problem)
                refused += 1
    assert refused > CHANGES // 6 or name in ("spec", "config", "request"), (
        "whose readers take whatever is JSON, or see each kind"
    )


def test_a_sentence_of_two_lines_is_a_finding():
    for message in ("", "one\ntwo"):
        with pytest.raises(AssertionError, match="not one sentence"):
            fuzz.one_line(ValueError(message))

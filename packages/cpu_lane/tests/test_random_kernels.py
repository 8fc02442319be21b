"""Random programs, compiled against interpreted. More of them by hand:

CROSSSPEC_PROGRAMS=2000 pytest -p no:xdist packages/cpu_lane/tests/test_random_kernels.py      # 15 minutes of one core
"""

import dataclasses
import os

import numpy as np
import pytest
import torch
from interpreted import Journal, interpret
from program_runs import arguments, load_kernel, run, shrink
from random_programs import TYPES, Line, Var, generate

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for the GPU"),
]

PROGRAMS = int(os.environ.get("CROSSSPEC_PROGRAMS", 100))
GROUP = 10


@pytest.mark.parametrize("first", range(0, PROGRAMS, GROUP))
def test_programs(tmp_path, first):
    for seed in range(first, first + GROUP):
        program = generate(seed)
        outcome = run(program, tmp_path)
        assert not outcome.wrong, f"{outcome.wrong}\n{program.source()}"
        assert outcome.elements > 0


def test_a_seed_is_a_program():
    assert generate(5).source() == generate(5).source() != generate(6).source()


def test_programs_use_all_types_and_kinds():
    text = "\n".join(generate(seed).source().partition("def kernel")[2] for seed in range(300))
    kinds = ["tl.reduce", "tl.associative_scan", "tl.sort", "tl.dot", "tl.atomic_", "while ", "for ", "else:", "return"]
    kinds += ["tl.join", "tl.split", "tl.cat", "tl.gather", "tl.trans", "bitcast=True", "mask=", "other=", "umulhi"]
    kinds += ["argmax", "tl.where", "clamp", "static_range", "//", "%", "<<", ">>", "_first", "_compose", "_twice"]
    assert [k for k in kinds if k not in text] == []
    assert [t for t in TYPES if f"{t}_in +" not in text] == []
    loops = [line for seed in range(300) for line in generate(seed).lines if line.text.startswith("while")]
    carried = [sum(not inner.defines for inner in line.body) for line in loops]
    assert {1, 2, 3} <= set(carried)  # the counter alone, and one and two more


def test_the_journal_takes_back_all_that_is_written(tmp_path):
    for seed in range(3):
        program = generate(seed)
        given = arguments(program)
        before = [x.clone() for x in given if isinstance(x, torch.Tensor)]
        journal = Journal()
        interpret(load_kernel(program, tmp_path), (program.grid,), *given, journal=journal)
        assert journal.entries
        journal.undo()
        for x, y in zip(given, before, strict=False):
            assert np.array_equal(x.view(torch.uint8).numpy(), y.view(torch.uint8).numpy())


def test_a_failing_program_shrinks(tmp_path):
    """A line that is wrong when compiled stays, and little else."""
    program = generate(11)
    culprit = Var("v999", "int32", (4,))
    wrong = Line([culprit], "v999 = tl.full([4], 7, tl.int32)")
    program = dataclasses.replace(
        program, lines=[*program.lines, wrong], outputs=[*program.outputs, culprit], grid=program.grid + 1
    )

    def fails(candidate):
        return "tl.full([4], 7" in candidate.source()

    small = shrink(program, fails)
    assert small.lines == [wrong]
    assert small.outputs == [culprit]
    assert small.grid == 1
    assert run(small, tmp_path).elements == 4

"""Targets with M-RoPE, whose positions have three rows: chains and trees over text, and over images before it."""

import engines
import pytest
import target_kinds

pytestmark = pytest.mark.e2e

REQUESTS = [
    *target_kinds.REPEATING[:2],
    target_kinds.with_images([5, 3, 6, 7, 8, 7, 8, 7], 0),
    target_kinds.with_images([9, 3, 6, 10, 11, 10, 11, 3, 10], 1, 2),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return target_kinds.write_ocr(tmp_path_factory.mktemp("ocr"))


@pytest.fixture(scope="module")
def plain(target):
    return target_kinds.run(None, target, REQUESTS).texts


def test_mrope_chains_of_text_and_multimodal_requests_are_plains(target, plain):
    with engines.engine(target_kinds.LOOKUPS["chain"], model=target) as llm:
        found = target_kinds.answers(llm, REQUESTS)
        assert found.texts == plain
        assert found.counts.accepted > 20
        other = target_kinds.with_images([5, 3, 6, 7, 8, 7, 8, 7], 5)  # the image alone is another
        assert target_kinds.answers(llm, [other]).greedy[0] != plain[0][2]


def forget_the_shifts(worker):
    """Trees whose nodes stand one behind the other, as a chain's."""
    runner = worker.model_runner
    # Its difference to itself is nothing; but the layout is to stay as it is.
    runner.features["mrope"].split = lambda step: None
    prepare, state = runner.draft_state.lay_out, runner.features["mrope"]

    def lay_out(*arguments):
        prepare(*arguments)
        state.shifts.copy_(runner.input_buffers.positions[: len(state.shifts)])

    runner.draft_state.lay_out = lay_out


def test_mrope_trees_of_text_and_multimodal_requests_are_plains(target, plain):
    """Behind images a token's three positions are not its place; without the shifts by depth the text is another."""
    with engines.engine(target_kinds.LOOKUPS["tree"], model=target) as llm:
        found = target_kinds.answers(llm, REQUESTS)
        assert found.texts == plain
        assert found.counts.accepted > 20
        llm.collective_rpc(forget_the_shifts)
        assert target_kinds.answers(llm, REQUESTS).texts != plain

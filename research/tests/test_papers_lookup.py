"""research/papers/lookup.py: its rounds on texts that can be counted by hand, and what earlier responses give."""

import random

import pytest
from made_tables import make_table
from papers import lookup

from crossspec_tools.train.generations import Generation, write_shard
from vllm_crossspec.drafters.lookup.naive import corpus_matches_naive


def response(prompt, answer):
    return Generation(prompt_ids=prompt, response_ids=answer, category="a", greedy=True)


class Scripted:
    def __init__(self, drafts):
        self.drafts, self.texts, self.ended = iter(drafts), [], []

    def draft(self, text):
        self.texts.append(text)
        return next(self.drafts)

    def end(self, answer):
        self.ended.append(answer)


def test_rounds_accept_what_the_response_has():
    drafter = Scripted([[(6,), (9,), (6, 7), (6, 8)], [], [(3,), (3, 4)], [(5,)]])
    found = lookup.walk(drafter, [response([1, 2], [5, 6, 7, 8, 9]), response([1], [2, 3, 4, 6])])
    # 6, 7 and the target's 8, then its 9 alone; 3 and the target's 4 (a draft is never all of the answer), then its 6.
    assert drafter.texts[:2] == [[1, 2, 5], [1, 2, 5, 6, 7, 8]]
    assert [x.tolist() for x in found] == [[4, 3], [2, 1], [4, 2]]
    assert drafter.ended == [[5, 6, 7, 8, 9], [2, 3, 4, 6]]


def test_a_chain_of_ours_and_of_vllm_go_on_with_the_text():
    rows = [response([7, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 9])]
    for drafter in (lookup.Ours(0, 3, False, lookup.NGRAM), lookup.Vllm(3, 2, 8)):
        # Nothing ends like "5 1", so 2 comes alone; behind "1 2" three are drafted: 3 4 5, and 9 is the target's.
        assert [x.tolist() for x in lookup.walk(drafter, rows)] == [[5], [2], [3]]


@pytest.mark.parametrize("seed", range(4))
def test_earlier_responses_are_what_the_plain_loop_finds(seed):
    generator = random.Random(seed)
    outputs = [[generator.randrange(5) for _ in range(generator.randrange(2, 30))] for _ in range(12)]
    drafter = lookup.Ours(8, 5, True, lookup.SUFFIX)
    for output in outputs:
        drafter.end(output)
    for size in (1, 4, 40):
        text = [generator.randrange(5) for _ in range(size)]
        expected = corpus_matches_naive(text, outputs, max_match=16, min_match=1, depth=5)
        assert sorted(drafter._earlier(text)) == sorted(expected)
    alone = lookup.Ours(8, 5, False, lookup.SUFFIX)
    alone.end(outputs[0])
    assert not alone._earlier(outputs[0])


def test_the_table(tmp_path):
    rows = [response([1, 2, 3], [4, 1, 2, 3, 4, 1, 2]), response([5], [4, 1, 2, 3])]
    write_shard(tmp_path / "dev-00000.jsonl.gz", rows)
    table, shown = make_table(tmp_path, "lookup", "drafters", "--responses", tmp_path, "--share")
    found = {row["drafter"]: row["all"][0] for row in table}
    assert found["ours, suffix, tree of 60"] > found["ours, ngram, chain of 8"] > 1
    assert "ours, suffix, tree of 60" in shown and "2 greedy responses of dev, which suffix may draft from" in shown

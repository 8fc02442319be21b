"""benchmarks/lookup_offline.py: its rounds on texts that can be counted by hand, and what earlier responses give."""

import json
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import lookup_offline

from vllm_crossspec.lookup.naive import corpus_matches_naive
from vllm_crossspec.training.generations import Generation, write_shard


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
    found = lookup_offline.walk(drafter, [response([1, 2], [5, 6, 7, 8, 9]), response([1], [2, 3, 4, 6])])
    # 6, 7 and the target's 8, then its 9 alone; 3 and the target's 4 (a draft is never all of the answer), then its 6.
    assert drafter.texts[:2] == [[1, 2, 5], [1, 2, 5, 6, 7, 8]]
    assert [x.tolist() for x in found] == [[4, 3], [2, 1], [4, 2]]
    assert drafter.ended == [[5, 6, 7, 8, 9], [2, 3, 4, 6]]


def test_a_chain_of_ours_and_of_vllm_go_on_with_the_text():
    rows = [response([7, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 9])]
    for drafter in (lookup_offline.Ours(0, 3, False, lookup_offline.NGRAM), lookup_offline.Vllm(3, 2, 8)):
        # Nothing ends like "5 1", so 2 comes alone; behind "1 2" three are drafted: 3 4 5, and 9 is the target's.
        assert [x.tolist() for x in lookup_offline.walk(drafter, rows)] == [[5], [2], [3]]


@pytest.mark.parametrize("seed", range(4))
def test_earlier_responses_are_what_the_plain_loop_finds(seed):
    generator = random.Random(seed)
    outputs = [[generator.randrange(5) for _ in range(generator.randrange(2, 30))] for _ in range(12)]
    drafter = lookup_offline.Ours(8, 5, True, lookup_offline.SUFFIX)
    for output in outputs:
        drafter.end(output)
    for size in (1, 4, 40):
        text = [generator.randrange(5) for _ in range(size)]
        expected = corpus_matches_naive(text, outputs, max_match=16, min_match=1, depth=5)
        assert sorted(drafter._earlier(text)) == sorted(expected)
    alone = lookup_offline.Ours(8, 5, False, lookup_offline.SUFFIX)
    alone.end(outputs[0])
    assert not alone._earlier(outputs[0])


def test_the_script(tmp_path, capsys):
    rows = [response([1, 2, 3], [4, 1, 2, 3, 4, 1, 2]), response([5], [4, 1, 2, 3])]
    write_shard(tmp_path / "dev-00000.jsonl.gz", rows)
    out = tmp_path / "out.json"
    assert lookup_offline.main(["--responses", str(tmp_path), "--share", "--json", str(out)]) == 0
    document = json.loads(out.read_text())
    found = {row["drafter"]: row["all"][0] for row in document["rows"]}
    assert found["ours, suffix, tree of 60"] > found["ours, ngram, chain of 8"] > 1
    assert document["meta"]["settings"] == {"responses": 2, "split": "dev", "share": True}
    assert "ours, suffix, tree of 60" in capsys.readouterr().out

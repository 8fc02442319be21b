"""SmolLM2-135M-Instruct itself: the same texts with and without drafts, in engines on the converted model."""

import pytest

pytest.importorskip("gguf", reason="the library that reads GGUF files is not installed")

from vllm_crossspec_smollm2.models import MODELS

from vllm_crossspec.cli import demo
from vllm_crossspec.cli.prompts import read_prompts
from vllm_crossspec.cli.rows import rows
from vllm_crossspec.cli.runner import first_of_each

MAX_TOKENS = 24


@pytest.mark.e2e
def test_a_tree_leaves_the_texts_as_they_are():
    if (why := MODELS.missing()) is not None:
        pytest.skip(why)
    prompts = first_of_each(read_prompts(MODELS.find() / "prompts.jsonl"), 1)[:2]
    sampling = {"temperature": 0.0, "max_tokens": MAX_TOKENS}
    engine = {"model": str(MODELS.target()), "max_num_seqs": 1}
    methods = ("plain", "eagle3-tree")
    jobs = [demo.job_of(m, MODELS.methods[m], MODELS.find(), prompts, sampling, **engine) for m in methods]
    measurement = demo.measurement_of(jobs)
    measurement.carry_out()
    plain, tree = (run.groups for run in measurement.runs)
    for category, group in plain.items():
        (one,) = group["generations"]
        assert len(one["token_ids"]) > 4 and one["text"].strip(), category
        assert tree[category]["generations"][0]["token_ids"] == one["token_ids"]
    totals = {row.method: row for row in rows(measurement.runs) if row.category == "all"}
    assert totals["eagle3-tree"].identical_to_plain
    assert totals["eagle3-tree"].acceptance_length > 1.5  # a trained drafter's
    texts = [list(group["generations"][0]["token_ids"]) for group in plain.values()]
    assert len(set(map(tuple, texts))) == len(texts)  # equal texts are no matter of course

"""`vllm run-batch`: a file of requests in OpenAI's batch format, answered with drafts."""

import importlib
import json

import engines
import pytest

pytestmark = pytest.mark.e2e
MAX_TOKENS = 24


def row(name, question, **body):
    messages = [{"role": "user", "content": question}]
    entries = {"model": "pocket", "messages": messages, "max_completion_tokens": MAX_TOKENS, "temperature": 0} | body
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": entries}


def run_batch(*arguments):
    """What the `vllm` command does with these words, in this process."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    command = importlib.import_module("vllm.entrypoints.cli.run_batch").RunBatchSubcommand()
    parser = FlexibleArgumentParser()
    command.subparser_init(parser.add_subparsers())
    command.cmd(parser.parse_args(["run-batch", *arguments]))


def drafts_and_accepted():
    """vLLM's counters of this process's front ends."""
    from prometheus_client import REGISTRY

    names = ("vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total")
    samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
    return [sum(s.value for s in samples if s.name == name) for name in names]


def test_run_batch_answers_rows_as_plain_does(tmp_path, monkeypatch):
    """Greedy, seeded and opted-out rows have plain's text; one that is wrong is its own error, and nobody else's."""
    rows = [json.loads(line) for line in (engines.POCKET / "prompts.jsonl").read_text().splitlines()]
    questions = [row["prompt"] for row in rows][::7][:4]
    sampling = [{}, {"temperature": 0.8, "seed": 7}, {"vllm_xargs": {"crossspec": "off"}}, {}]
    pairs = list(zip(questions, sampling, strict=True))
    batch = [row(f"row-{i}", question, **body) for i, (question, body) in enumerate(pairs)]
    batch.insert(2, row("bad", questions[0], vllm_xargs={"crossspec": "of"}))
    source, answers = tmp_path / "batch.jsonl", tmp_path / "answers.jsonl"
    source.write_text("".join(f"{json.dumps(entry)}\n" for entry in batch))

    with engines.engine(None) as llm:
        texts = []
        for question, body in pairs:
            given = {key: value for key, value in body.items() if key != "vllm_xargs"}
            (ids,) = engines.generate(llm, [engines.chat(question)], max_tokens=MAX_TOKENS, **given)
            texts.append(llm.get_tokenizer().decode(ids, skip_special_tokens=True))
    before = drafts_and_accepted()
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the worker is in the engine's process: one fewer starts
    spec = json.dumps(engines.tree("eagle3", engines.EAGLE3, depth=3, top_k=4, num_nodes=12))
    run_batch(
        *("--input-file", str(source), "--output-file", str(answers), "--model", str(engines.TARGET)),
        *("--served-model-name", "pocket", "--speculative-config", spec, "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "512", "--max-num-seqs", "4", "--distributed-executor-backend", "uni"),
    )

    found = {answer["custom_id"]: answer for answer in map(json.loads, answers.read_text().splitlines())}
    assert list(found) == [entry["custom_id"] for entry in batch]
    bad = found.pop("bad")
    assert bad["response"]["status_code"] == 400
    assert "the extra argument 'crossspec' is 'of'; use one of tree, chain, off" in bad["error"]["error"]["message"]
    assert [answer["response"]["body"]["choices"][0]["message"]["content"] for answer in found.values()] == texts
    assert not any(answer["error"] for answer in found.values())
    drafts, accepted = (after - start for after, start in zip(drafts_and_accepted(), before, strict=True))
    tokens = [answer["response"]["body"]["usage"]["completion_tokens"] for answer in found.values()]
    drafted = sum(tokens) - tokens[2] - 3  # the one that opted out has none, and a prompt's own token was not drafted
    assert drafts > 0 and drafts + accepted >= drafted > drafts

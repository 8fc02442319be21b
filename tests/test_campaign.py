"""The campaign for a GPU: what stops what, what an ended call leaves to the next, and what is written when."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import campaign as module
from campaign import Campaign, Step

from vllm_crossspec.cli.demo import METHODS
from vllm_crossspec.cli.measure import GPU_SHARE


def command(code):
    return [sys.executable, "-c", code]


WRITES = "import json, sys; json.dump({}, open('{{json}}', 'w'))"


def writing(document):
    return command(f"open('{{json}}', 'w').write({json.dumps(document)!r})")


def statuses(campaign):
    return {name: state["status"] for name, state in campaign.state.items()}


def test_a_failing_step_stops_what_stands_on_it_and_nothing_else(tmp_path):
    steps = [
        Step("kernels", command("print('max error 3'); raise SystemExit(2)")),
        Step("rounds", command("pass"), ("kernels",)),
        Step("identity", command("pass")),
        Step("bench", command("pass"), ("identity",)),
    ]
    campaign = Campaign(tmp_path, 40)
    campaign.run(steps)
    assert statuses(campaign) == {"kernels": "failed", "rounds": "skipped", "identity": "passed", "bench": "passed"}
    assert campaign.state["kernels"]["why"] == "exit code 2: max error 3"
    assert campaign.state["rounds"]["why"] == "needs kernels"


def test_a_method_with_another_text_is_not_timed_and_the_others_are(tmp_path):
    rows = [{"method": "dart", "identical_to_plain": False}, {"method": "eagle3", "identical_to_plain": True}]
    steps = [
        Step("identity", [*writing({"rows": rows})], parts=module._identical),
        Step("bench-dart", command("pass"), ("identity/dart",)),
        Step("bench-eagle3", command("pass"), ("identity/eagle3",)),
    ]
    campaign = Campaign(tmp_path, 40)
    campaign.run(steps)
    assert statuses(campaign) == {"identity": "failed", "bench-dart": "skipped", "bench-eagle3": "passed"}
    assert campaign.state["identity"]["why"] == "dart: a text is not plain generation's"


def test_the_next_call_skips_what_has_passed_and_tries_the_rest_again(tmp_path):
    counted = command(f"open({str(tmp_path / 'runs')!r}, 'a').write('x')")
    flag = tmp_path / "flag"
    steps = [
        Step("once", counted),
        Step("later", command(f"raise SystemExit(not __import__('os').path.exists({str(flag)!r}))")),
    ]
    Campaign(tmp_path, 40).run(steps)
    flag.touch()
    again = Campaign(tmp_path, 40)
    assert statuses(again) == {"once": "passed", "later": "failed"}
    again.run(steps)
    assert (tmp_path / "runs").read_text() == "x" and statuses(again) == {"once": "passed", "later": "passed"}
    assert again.state["later"]["seconds"] > 0


def test_a_step_of_several_runs_again_with_what_was_mended_since(tmp_path):
    """A method whose text was wrong at first is timed in the next call, with the others."""
    flag = tmp_path / "flag"
    fails = command(f"raise SystemExit(not __import__('os').path.exists({str(flag)!r}))")
    told = command(f"open({str(tmp_path / 'told')!r}, 'a').write(' '.join(__import__('sys').argv[1:]) + ';')")
    steps = [
        Step("a", command("pass")),
        Step("b", fails),
        Step("bench", told, choices=(("a", ("a",)), ("b", ("b",)))),
    ]
    Campaign(tmp_path, 40).run(steps)
    Campaign(tmp_path, 40).run(steps)
    flag.touch()
    for _ in range(2):
        Campaign(tmp_path, 40).run(steps)
    assert (tmp_path / "told").read_text() == "a;a b;"


def test_a_step_that_hangs_is_ended_with_all_its_processes(tmp_path):
    sleeps = f"{tmp_path.name!r}; import time; time.sleep(60)"
    child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {sleeps!r}]); {sleeps}"
    campaign = Campaign(tmp_path, 40, step_minutes=1 / 60)
    campaign.run([Step("hangs", command(child))])
    assert campaign.state["hangs"]["why"] == "ended after 0.0 minutes"
    cmdlines = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if p.exists()]
    assert not any(tmp_path.name.encode() in line and b"sleep(60)" in line for line in cmdlines)


def test_what_does_not_fit_into_the_minutes_is_left(tmp_path):
    campaign = Campaign(tmp_path, 5)
    campaign.run([Step("long", command("pass"), minutes=6), Step("short", command("pass"), minutes=1)])
    assert statuses(campaign) == {"long": "skipped", "short": "passed"}
    assert campaign.state["long"]["why"].startswith("needs 6 minutes, 5.0 are left")


def test_the_list_says_which_steps_fit_into_the_minutes(tmp_path):
    steps = [
        Step("a", command("pass"), minutes=2),
        Step("long", command("pass"), ("a",), 4.5),
        Step("b", command("pass"), minutes=1, choices=(("a", ()), ("long/part", ()))),
    ]
    campaign = Campaign(tmp_path, 6)
    assert campaign.plan(steps) == {"a": 0.0, "b": 2.0}, "what is too long stops nothing"
    campaign.run(steps[:1])
    assert campaign.plan(steps) == {"long": pytest.approx(0.0, abs=0.2), "b": pytest.approx(4.5, abs=0.2)}
    a, long, b, total = module.listed(campaign, steps).splitlines()
    assert "passed" in a and "done" in a and "from minute 0" in long and "needs a, long/part" in b
    assert total == "7.5 minutes in all, 6 are given"


@pytest.mark.parametrize("shape", ["8b", "0.2b"])
def test_every_step_stands_on_steps_before_it(tmp_path, shape):
    options = module.arguments(["--out", str(tmp_path), "--large", shape])
    seen, timed = set(), set()
    for step in module.steps(tmp_path, options):
        assert {name.partition("/")[0] for name in (*step.needs, *(need for need, _ in step.choices))} <= seen
        assert step.name not in seen and step.minutes <= module.STEP_MINUTES
        seen.add(step.name)
        if step.name.startswith(f"bench-{shape}-"):
            timed |= {Path(words[1]).stem for _, words in step.choices}
    assert timed == {*module.NATIVE, *module.TIMED}
    assert set(module.TIMED) <= set(METHODS)


def test_the_engines_of_a_group_stay_up_beside_each_other(tmp_path):
    options = module.arguments(["--out", str(tmp_path)])
    groups = [step for step in module.steps(tmp_path, options) if step.name.startswith("bench-")]
    assert max(1 + len(step.choices) for step in groups) * options.memory <= GPU_SHARE, "plain beside each group"


@pytest.mark.parametrize("shape", ["8b", "0.2b"])
def test_a_rehearsal_has_every_step_with_little_to_do_beside_the_real_ones_folder(tmp_path, shape):
    words = ["--out", str(tmp_path), "--large", shape, "--check", "true"]
    real, rehearsal = module.arguments(words), module.arguments([*words, "--rehearse"])
    assert rehearsal.out == tmp_path / "rehearsal" and real.out == tmp_path, "nothing of it passes for a measurement"
    pairs = list(zip(module.steps(tmp_path, real), module.steps(tmp_path, rehearsal), strict=True))
    for step, rehearsed in pairs:
        same, more = rehearsed.command[: len(step.command)], rehearsed.command[len(step.command) :]
        assert same == step.command and bool(more) != (step.name.startswith(("check", "inflate-")))
        assert replace(rehearsed, command=same, minutes=step.minutes, parts=step.parts) == step
    # All are begun, however little of the minutes the last one has left.
    assert sum(rehearsed.minutes for _, rehearsed in pairs) < rehearsal.minutes < sum(step.minutes for step, _ in pairs)


def test_where_nothing_computes_a_method_passes_by_having_answered(tmp_path):
    rows = [{"method": "plain", "identical_to_plain": True}, {"method": "dart", "identical_to_plain": False}]
    words = ["--out", str(tmp_path), "--rehearse"]
    by_name = {step.name: step for step in module.steps(tmp_path, module.arguments(words))}
    identity = by_name["identity-2"]
    choices = (("identity-2/dart", ("dart",)), ("identity-2/confu-tree", ("confu-tree",)))
    campaign = Campaign(tmp_path, 40)
    unfinished = command(
        f"open('{{json}}', 'w').write({json.dumps({'rows': rows})!r}); raise SystemExit('confu: died')"
    )
    campaign.run(
        [
            Step("identity-2", unfinished, parts=identity.parts),
            Step("bench", command("pass"), choices=choices),
        ]
    )
    assert statuses(campaign) == {"identity-2": "failed", "bench": "passed"}
    assert campaign.state["identity-2"]["why"] == "exit code 1: confu: died"
    assert campaign.state["bench"]["chosen"] == ["dart"]
    page = module.tables(campaign, module.arguments(words))
    assert "**A rehearsal**" in page and "**A rehearsal**" not in module.tables(campaign, module.arguments(words[:2]))


def test_a_method_with_another_text_is_left_out_of_its_group(tmp_path):
    rows = [{"method": "dart", "identical_to_plain": False}, {"method": "eagle3", "identical_to_plain": True}]
    choices = (("identity/dart", ("--spec", "dart")), ("identity/eagle3", ("--spec", "eagle3")))
    told = command(f"import sys; open({str(tmp_path / 'told')!r}, 'w').write(' '.join(sys.argv[1:]))")
    steps = [
        Step("identity", writing({"rows": rows}), parts=module._identical),
        Step("bench", told, choices=choices),
        Step("alone", told, choices=choices[:1]),
    ]
    campaign = Campaign(tmp_path, 40)
    campaign.run(steps)
    assert statuses(campaign) == {"identity": "failed", "bench": "passed", "alone": "skipped"}
    assert (tmp_path / "told").read_text() == "--spec eagle3"
    assert campaign.state["alone"]["why"] == "needs identity/dart"


def test_the_page_has_a_row_for_each_method_and_step(tmp_path):
    options = module.arguments(["--out", str(tmp_path)])
    rows = [
        {
            "method": method,
            "category": "all",
            "batch_size": n,
            "tokens_per_second": 100.0 * n,
            "speedup": 2.5,
            "identical_to_plain": method == "plain" or n == 1,
        }
        for method in ("plain", "eagle3")
        for n in (1, 8)
    ]
    later = [{**row, "tokens_per_second": 7.0, "method": row["method"].replace("eagle3", "dart")} for row in rows]
    times = {part: {"median": value} for part, value in (("round", 12.0), ("target", 7.0), ("draft", 4.5))}
    rounds = [{"method": "eagle3", "batch_size": n, "device_ms": times if n == 1 else None} for n in (1, 8)]
    campaign = Campaign(tmp_path, 40)
    documents = {"bench-8b-1": rows, "bench-8b-2": later, "rounds-8b": rounds, "bfloat16-invariant": rows[2:3]}
    steps = [Step(name, writing({"rows": found})) for name, found in documents.items()]
    campaign.run([*steps, Step("kernels", command("raise SystemExit(1)"))])
    page = module.tables(campaign, options)
    assert "| plain | 100 | 800 |  |" in page, "of the first group"
    assert "| eagle3 | 100 (2.50x) | 800 (2.50x) | no |" in page and "| dart | 7 (2.50x) | 7 (2.50x) | no |" in page
    assert "## 8b, random weights" in page and "| eagle3 | 12.00 (7.00, 4.50) |  |" in page
    assert "| eagle3 | yes | yes |" in page, "in bfloat16"
    assert "| kernels | failed: exit code 1: no output |" in page


def test_kernels_are_tested_by_files_that_use_a_gpu_where_there_is_one():
    tests = Path(__file__).parent
    using = {file.stem.removeprefix("test_") for file in tests.glob("test_*.py") if "DEVICE" in file.read_text()}
    assert set(module.KERNEL_TESTS) <= using
    assert {name for name in using if name.endswith("_kernels")} - {"compiled_kernels", "random_kernels"} <= set(
        module.KERNEL_TESTS
    )

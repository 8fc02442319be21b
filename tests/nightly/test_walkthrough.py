"""Every command of the documents is run: here, with models and sizes of a test, or by another test that is named."""

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from functools import partial
from importlib import import_module
from pathlib import Path

import engines
import ngram_counts
import numpy as np
import pytest
import tiny_training
import walkthrough
from commands import crossspec
from documents import DOCUMENTS, ROOT, Command, all_commands, read

from crossspec_tools.train import target

sys.path.insert(0, str(ROOT / "benchmarks"))

# ---- what stands for what a test cannot have

MODELS = {
    "Qwen/Qwen3-8B": "target",
    "Qwen3-8B": "target",
    "MODEL": "target",
    "TARGET": "target",
    "AngelSlim/Qwen3-8B_eagle3": "eagle3",
    "z-lab/Qwen3-8B-DFlash-b16": "dflash",
    "fvliang/qwen8b-dart": "dart",
    "Qwen/Qwen3-0.6B": "draft-model",
    "Qwen3-0.6B": "draft-model",
}
"""Pocket models, in folders that are called as the documents call models of the hub or a reader's own."""

PROMPTS = ("PROMPTS.jsonl", "HELD_OUT.jsonl", "chats.jsonl", "train.jsonl", "dev.jsonl", "test.jsonl")
"""Files of prompts: the demo's."""

TARGET_SHAPE = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32,
    "row_tokens": 64, "rows_per_step": 2,
}  # fmt: skip
"""Of the target that `crossspec train target` makes, which has no options for it."""

ONE_STEP = "--steps 1 --rows-per-step 2 --threads 1"
SMALLER = {
    "crossspec batch": "--max-tokens 4 --dtype float32",
    "crossspec bench": "--limit 1 --max-tokens 8 --dtype float32",
    "crossspec calibrate heterospec": "--limit 4 --max-tokens 48 --dtype float32",
    "crossspec costs": "--batch-size 1",
    "crossspec collect": "--limit 1 --max-tokens 24",
    "crossspec demo": "--limit 1 --max-tokens 8 --methods eagle3-tree",
    "crossspec flashhead build": "--new-tokens 4 --iterations 2 --prompts PROMPTS.jsonl",
    "crossspec ngram build": "--workers 1",
    "crossspec train target": "--steps 1 --threads 1",
    "crossspec train generate": "--max-rows 8 --max-new-tokens 24",
    "crossspec train eagle3": f"{ONE_STEP} --anchors 2 --draft-vocab 64",
    "crossspec train confu": f"{ONE_STEP} --anchors 2",
    "crossspec train dflash": f"{ONE_STEP} --anchors 2",
    "crossspec train dart": f"{ONE_STEP} --anchors 2 --draft-vocab 64",
    "crossspec train draft-model": f"{ONE_STEP} --intermediate-size 64",
    "crossspec train router": "--epochs 1 --batch-tokens 8",
    "python benchmarks/kernels.py": "--shape pocket --batch-sizes 1 --nodes 20",
    "python benchmarks/lossless.py": "--texts 8 --each 8",
}
"""Words that are appended to a command that begins so: of two values of an option the last one counts."""

# ---- what is not run here

ELSEWHERE = {
    "crossspec bench --model MODEL --spec configs/qwen3-8b-eagle3.json --spec configs/qwen3-8b-dflash.json "
    "--prompts PROMPTS.jsonl --json out.json": "README.md",
    "crossspec demo --models pocket --methods all": "tests/test_cli.py::test_demo_writes_the_document",
    "crossspec demo --models pocket --methods all --json demo.json": "tests/test_cli.py::test_demo_writes_the_document",
    "crossspec doctor": "README.md",
    "crossspec doctor --json report.json": "tests/test_cli.py::test_doctor_tells_every_fault_of_a_broken_environment",
    "make lint": ".ci/run",
    "make nightly": ".ci/run",
    "make site": ".ci/run",
    "make test": ".ci/run",
    "python -m build --outdir dist .": "tests/nightly/test_release.py::make",
    "python -m build --outdir dist packages/pocket": "tests/nightly/test_release.py::make",
    "python benchmarks/figures.py": "tests/test_docs.py::test_pictures_are_small_and_say_what_the_table_says",
    "python research/heterospec_offline.py --responses work/responses --out work/trees": (
        "research/tests/test_heterospec_offline.py::test_a_stopped_recording_goes_on"
    ),
    "python research/heterospec_offline.py --responses work/sampled --split train --sampled --out work/trees-t1": (
        "research/tests/test_heterospec_offline.py::test_a_stopped_recording_goes_on"
    ),
    "python benchmarks/round_time.py --shape pocket --methods none,native-eagle3,eagle3 --rounds 4": (
        "benchmarks/tests/test_benchmarks.py::test_pocket_shape_runs"
    ),
    "python benchmarks/round_time.py --checkpoints vllm_crossspec/pocket --methods whiflash-neural --nodes 8 "
    "--rounds 4 --batch-sizes 2": "benchmarks/tests/test_benchmarks.py::test_routed_rounds_run",
    "python benchmarks/switch_cost.py --checkpoints vllm_crossspec/pocket --contexts 64 --backlogs 1,90 --nodes 8 "
    "--repeats 2": "benchmarks/tests/test_benchmarks.py::test_costs_of_a_switch_are_measured",
}
"""Commands and what runs them: a test, whose text has the program and every option; what CI runs; another document."""

GPU = "needs a GPU: its sizes are a large model's"
NETWORK = "fetches from elsewhere"
HOURS = "interprets the kernels of whole engines, for an hour"
LARGE = "takes minutes at its sizes; tests/test_bench.py and benchmarks/tests/test_inflate.py run smaller ones"
PUBLISHES = "makes a version, or publishes it"
NOWHERE = {
    "CROSSSPEC_*": "needs the clones of the papers' code, or takes long",
    "crossspec batch * --replicas *": "several engines at once; tests/nightly/test_batch.py has two",
    "crossspec bench --model MODEL * --repeats 3 *": LARGE,
    "crossspec bench --model big/*": LARGE,
    "crossspec demo --pocket big *": LARGE,
    "crossspec inflate --out big *": LARGE,
    "done": "the end of a loop of bash",
    "for *": "the head of a loop of bash",
    "git clone *": NETWORK,
    "git push *": PUBLISHES,
    "git tag *": PUBLISHES,
    "make venv": f"{NETWORK}, and is what `make test` does first",
    "pip install --no-deps arctic-inference": NETWORK,
    "pip install *.[[]cuda]*": NETWORK,
    "pip install vllm-crossspec*": NETWORK,
    "pip install --upgrade vllm-crossspec": NETWORK,
    "pip uninstall *": "the package that is tested",
    "*bash packages/smollm2/results.sh *": LARGE,
    "python benchmarks/flight.py *": GPU,
    "pytest --shadow-interpreter -p no:xdist *": HOURS,
    "python benchmarks/cpu_speed.py *": LARGE,
    "python benchmarks/load.py *": "starts servers; benchmarks/tests/test_load.py has a small one",
    "python research/paper_tables.py *": "takes minutes; research/tests make small ones",
    "python benchmarks/fuzz.py *": "needs atheris; tests/nightly/test_fuzz.py hands changed files to the same readers",
    "python benchmarks/round_time.py*": GPU,
    "python benchmarks/switch_cost.py*": GPU,
    "twine *": PUBLISHES,
    "VLLM_PLUGINS= vllm serve *": "without the plugin, which the tests' process has",
    "source *": "is about the reader's shell",
}
"""Patterns of commands that no test runs, and why. A benchmark's own parser takes their options and values."""

SUITE = re.compile(r"make quick|make (test|nightly) ARGS=|pytest (\S+ )?-m|pytest tests/")
"""Commands that run a part of the tests."""


def place(file: Path, command: Command) -> str:
    """Where a document's command is run: `here`, `elsewhere`, `nowhere`, or in the `suite`."""
    text = str(command)
    if ELSEWHERE.get(text, name(file)) != name(file):
        return "elsewhere"
    if SUITE.match(text):
        return "suite"
    return "nowhere" if text not in ELSEWHERE and any(fnmatch(text, pattern) for pattern in NOWHERE) else "here"


def name(file: Path) -> str:
    return str(file.relative_to(ROOT))


def placed(where: str) -> list[tuple[Path, Command]]:
    found = [(file, command) for file in DOCUMENTS for command in all_commands(file.read_text())]
    return [(file, command) for file, command in found if place(file, command) == where]


def smaller(words: Sequence[str]) -> list[str]:
    """The words to append to this command."""
    found = [more for beginning, more in SMALLER.items() if f"{' '.join(words)} ".startswith(f"{beginning} ")]
    if "--start" in words:  # whose vocabulary stays
        found = [more.partition(" --draft-vocab")[0] for more in found]
    return found[0].split() if found else []


def furnish(folder: Path, file: Path) -> None:
    """Fill a folder with what a reader of this document has at hand."""
    walkthrough.clone(folder)
    for name, model in MODELS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copytree(engines.POCKET / model, folder / name)
    config = folder / "z-lab" / "Qwen3-8B-DFlash-b16" / "config.json"  # has blocks of 16 tokens, as its name says
    config.write_text(json.dumps(json.loads(config.read_text()) | {"block_size": 16}))
    for name in PROMPTS:
        shutil.copy(engines.POCKET / "prompts.jsonl", folder / name)
    for name in ("a.safetensors", "b.safetensors"):
        shutil.copy(engines.NGRAM, folder / name)
    for name in ("full.trie", "3gram.trie"):
        counts = ngram_counts.count(np.random.default_rng(0).integers(0, 40, 300), 3)
        ngram_counts.write_trie(folder / name, counts, 3)
    shutil.copy(ROOT / "configs" / "pocket-eagle3-tree.json", folder / "eagle3-tree.json")
    shutil.copy(ROOT / "README.md", folder / "answers.txt")
    for name in ("TEXT", "PYTHON_LIBRARY_FOLDER", "DOCUMENTATION_FOLDER"):
        (folder / name).mkdir()
    tiny_training.write_text(folder / "TEXT")
    shutil.copy(folder / "TEXT" / "train-a.jsonl", folder / "texts.jsonl")
    shutil.copy(json.__file__, folder / "PYTHON_LIBRARY_FOLDER")
    shutil.copy(ROOT / "README.md", folder / "DOCUMENTATION_FOLDER" / "README.txt")
    if file.name != "pocket-models.md":  # whose commands make these
        (folder / "work" / "target").mkdir(parents=True)
        (folder / "work" / "target" / "model").symlink_to(engines.TARGET)
    for block in read(file.read_text()).blocks:  # of train-router.md, which says so
        if block.language == "json" and "work/router" in "".join(block.lines):
            (folder / "work" / "routed.json").write_text("\n".join(block.lines))


# ---- the commands


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    with engines.engine(None) as llm:
        return walkthrough.answers(llm)


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pocket target answers to a few prompts, as `crossspec train generate` writes it."""
    folder, text = tmp_path_factory.mktemp("answered"), tmp_path_factory.mktemp("text")
    tiny_training.write_text(text)
    given = ["--data", text, "--target", engines.TARGET, "--out", folder, *SMALLER["crossspec train generate"].split()]
    crossspec("train", "generate", *given)
    return folder


@pytest.mark.e2e
@pytest.mark.parametrize("file", sorted({file for file, _ in placed("here")}), ids=name)
def test_a_page_does_what_it_says(file, tmp_path, plain, answered, monkeypatch):
    chosen = [command for command in all_commands(file.read_text()) if place(file, command) == "here"]
    if any("curl" in command.words for command in chosen) and shutil.which("curl") is None:
        pytest.skip("about a server that curl asks, and there is no curl")
    furnish(tmp_path, file)
    if file.name != "pocket-models.md":
        shutil.copytree(answered, tmp_path / "work" / "responses")
    monkeypatch.setattr(target, "TargetConfig", partial(target.TargetConfig, **TARGET_SHAPE))
    with walkthrough.Walk(tmp_path, smaller, plain) as walk:
        walk.page(name(file), chosen)


def test_every_entry_is_of_a_command():
    texts = {str(command) for file in DOCUMENTS for command in all_commands(file.read_text())}
    assert [text for text in ELSEWHERE if text not in texts] == []
    nowhere = {str(command) for _, command in placed("nowhere")}
    assert [pattern for pattern in NOWHERE if not any(fnmatch(text, pattern) for text in nowhere)] == []
    here = [str(command) for _, command in placed("here")]
    assert [beginning for beginning in SMALLER if not any(text.startswith(beginning) for text in here)] == []


@pytest.mark.parametrize("text", ELSEWHERE)
def test_what_runs_a_command_has_it(text):
    where, _, test = ELSEWHERE[text].partition("::")
    assert unmentioned(text, (ROOT / where).read_text(), test) == []


def unmentioned(text: str, source: str, test: str = "") -> list[str]:
    """The parts of a command, all but values, that a document, a script or this test in a file does not have."""
    if test:
        functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
        assert test in functions, f"there is no {test}"
        constants = [line for line in source.splitlines() if re.match(r"[A-Z_]+ = ", line)]
        source = "\n".join([ast.unparse(functions[test]), *constants])
    if text in source:
        return []
    program, *words = text.split()
    parts = [Path(words[0]).stem if program == "python" else words[0], *(w for w in words if w.startswith("--"))]
    return [part for part in parts if part not in source]


@pytest.mark.parametrize("text", sorted({str(command) for _, command in placed("suite")}))
def test_a_part_of_the_tests_is_one(text):
    assert unselected(text) is None


def unselected(text: str) -> str | None:
    """Why a command that runs a part of the tests would run none."""
    words = shlex.split(text) if text.startswith("pytest") else shlex.split(recipe(text))
    # A recipe begins with `python -m pytest`.
    options = words if text.startswith("pytest") else words[3:]
    markers = shlex.split(options[options.index("-m") + 1]) if "-m" in options else []
    given = [word.removesuffix("/") for word in words if re.match(r"(\w+/)*tests(/|$)", word)] or ["tests"]
    files = [file for word in given for file in sorted(ROOT.glob(word if "." in word else f"{word}/test_*.py"))]
    sources = [file.read_text() for file in files]
    for marker in {*markers} - {"not", "and", "or"}:
        if not any(f"mark.{marker}" in source for source in sources):
            return f"no test has the marker {marker}"
    if "-k" in words and not re.search(rf"def test_\w*{words[words.index('-k') + 1]}", sources[0]):
        return f"no test of {files[0].name} is called so"
    return None


def recipe(text: str) -> str:
    """What `make` would run."""
    asked = text.replace("ARGS=", 'ARGS="') + '"' if "ARGS=" in text else text
    words = [*shlex.split(asked), "PY=python"]
    said = ["make", "--dry-run", "--silent", "-o", ".venv/.installed", *words[1:]]
    return subprocess.run(said, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    "text", sorted({str(c) for _, c in placed("nowhere") if str(c).startswith("python benchmarks/")})
)
def test_a_benchmark_would_take_what_no_test_runs(text):
    script, *words = text.replace("$context", "2048").split()[1:]
    import_module(Path(script).stem).arguments(words)


# ---- these tests can fail


BROKEN = {
    "crossspec ngram info none.safetensors": "there is no such file",
    "crossspec trace --records work --picture a.svg --policy luck": "--policy luck: choose entropy, neural or oracle",
    "crossspec calibrate --records work/none": "work/none",
    "python benchmarks/figures.py --format gif": "invalid choice: 'gif'",
    "awk 1 none.jsonl > all.jsonl": "none.jsonl",
    "crosspec demo": "status 127: .*crosspec",
    'crossspec ngram query "$(cat none.txt)"': "none.txt",
}


@pytest.mark.parametrize("line", BROKEN)
def test_a_command_that_fails_is_named(line, tmp_path):
    page = f"# Page\n\n```bash\nmkdir before\n{line}\nmkdir after\n```\n"
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    with (
        walkthrough.Walk(tmp_path, smaller, []) as walk,
        pytest.raises(AssertionError, match=f"^docs/page.md:5: (?s:.*){BROKEN[line]}"),
    ):
        walk.page("docs/page.md", list(all_commands(page)))
    assert (tmp_path / "before").exists() and not (tmp_path / "after").exists()


@pytest.mark.e2e
def test_a_servers_text_is_compared(tmp_path, plain):
    (tmp_path / "target").symlink_to(engines.TARGET)
    spec = {"method": "eagle3", "model": str(engines.EAGLE3), "tree": {"type": "chain"}}
    page = f"```bash\nvllm serve target --speculative-config '{json.dumps(spec)}'\n```\n"
    walk = walkthrough.Walk(tmp_path, smaller, plain[::-1])
    with walk, pytest.raises(AssertionError, match="the text is not plain's"):
        walk.page("page.md", list(all_commands(page)))


def test_a_test_without_the_command_is_seen():
    source = 'SCRIPT = "a.py"\n\ndef test_a():\n    run(SCRIPT, "--nodes", 3)\n'
    assert unmentioned("python benchmarks/a.py --nodes 8", source, "test_a") == []
    assert unmentioned("python benchmarks/a.py --rows 8", source, "test_a") == ["--rows"]
    with pytest.raises(AssertionError, match="there is no test_b"):
        unmentioned("python benchmarks/a.py", source, "test_b")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("pytest -m interpretd", "no test has the marker interpretd"),
        ("make test ARGS=-m 'not e3e'", "no test has the marker e3e"),
        ("make test ARGS=-n 0 tests/test_lossless.py -k seedy", "no test of test_lossless.py is called so"),
    ],
)
def test_a_selection_of_nothing_is_seen(text, sentence):
    assert unselected(text) == sentence

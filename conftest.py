"""Shared pieces: the environment that engines need, each worker's own cores, and the tiny models of training."""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WORKERS = 2
"""Processes that `make test` runs tests in: an engine or server each, of up to 3 GiB."""
LONGEST = (
    "test_server", "test_walkthrough", "test_soak", "test_tensor_parallel", "test_data_parallel",
    "test_flashhead_engine", "test_sliding_engine", "test_swap", "test_training_data", "test_tail_attention",
    "test_benchmarks", "test_records", "test_batch", "test_confu_engine", "test_draft_model", "test_tree_attention",
    "test_draft_model_trees", "test_verify_kernels", "test_training_states", "test_flashhead", "test_cpu_lane",
    "test_trees", "test_ngram", "test_whiflash", "test_cli", "test_lookup_engine", "test_continuity", "test_dart",
    "test_bfloat16", "test_fp8_engine", "test_inflate", "test_lossless", "test_compiled_kernels", "test_bench",
    "test_run_batch", "test_cpu_compiler_tensors", "test_random_kernels", "test_confu_futures",
    "test_training_confu_runs",
)  # fmt: skip
"""Files that take about twenty seconds or more, the longest first: none of them may be what a worker begins last."""

SLOW = ("test_cpu_", "test_continuity", "test_tail_attention", "test_training_confu_runs")
"""Beginnings of files that are not for a minute's run: whoever works on what they test names them."""

_RECORDER = pytest.StashKey[Any]()

for _name, _value in {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "CROSSSPEC_MODELS": "pocket",  # whatever else is installed
    "CROSSSPEC_FIXED_WIDTHS": "1",  # acceptance is compared, and must not depend on how busy a machine is
}.items():
    os.environ.setdefault(_name, _value)

# The negative controls send functions into the workers to break them.
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")


def _usable_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _keep_to_own_cores() -> None:
    """Give this worker, and so all its children, a share of the cores that no other worker has.

    vLLM binds the threads of a CPU engine to cores that it chooses: every engine would be on the same ones.
    """
    number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    count = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    share = _usable_cores()[number % count :: count]
    if share:
        os.sched_setaffinity(0, share)
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, share)))


# Before anything counts the cores.
if "PYTEST_XDIST_WORKER" in os.environ:
    _keep_to_own_cores()

# Where the lane is not installed, on a machine with a GPU, its attention is compared with the GPU's all the same.
sys.path.append(str(Path(__file__).parent / "packages" / "cpu_lane"))

from vllm_crossspec.platform import platform  # noqa: E402

if not platform().on_cores:  # vLLM's attention of float32 would multiply in TF32
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")

from played import crossspec, play  # noqa: E402, F401 - fixtures; imports torch, which counts


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """What `-n auto` means: a few workers with cores of their own, none (plain pytest) on one core or with a GPU."""
    import torch

    count = min(WORKERS, len(_usable_cores()))
    return 0 if count < 2 or torch.cuda.is_available() else count


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Workers begin with the files that take longest, and keep the order of each file's tests."""
    for item in items:
        if Path(item.path).stem.startswith(SLOW) or "hopper" in item.name:
            item.add_marker(pytest.mark.slow)
    if not config.getoption("--nightly") and not any("::" in argument for argument in config.args):
        later = _of_the_night(items)
        config.hook.pytest_deselected(items=[item for item in items if item in later])
        items[:] = [item for item in items if item not in later]
    if "PYTEST_XDIST_WORKER" in os.environ:
        rank = {name: i for i, name in enumerate(LONGEST)}
        items.sort(key=lambda item: rank.get(Path(item.path).stem, len(LONGEST)))


def _of_the_night(items: list[pytest.Item]) -> set[pytest.Item]:
    """Tests marked ``nightly``, except ``keep`` evenly spaced cases of a test."""
    cases: dict[Any, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("nightly"):
            cases.setdefault(getattr(item, "function", item), []).append(item)
    later: set[pytest.Item] = set()
    for same in cases.values():
        # A mark of one case alone has no `keep`.
        keep = max(mark.kwargs.get("keep", 0) for item in same for mark in item.iter_markers("nightly"))
        later.update(set(same) - {same[i * len(same) // keep] for i in range(keep)})
    return later


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="run what is marked `nightly`, too, as `make nightly` does")
    parser.addoption(
        "--shadow-interpreter",
        metavar="FILE",
        nargs="?",
        const="",
        help="compare launches of compiled kernels with Triton's interpreter; a table at the end, rows to FILE as JSON",
    )


def pytest_configure(config: pytest.Config) -> None:
    # A shell has what runs in its background ignore the signal, and so would all that tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--shadow-interpreter") is not None:
        from compared import Recorder

        config.stash[_RECORDER] = Recorder().__enter__()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if (recorder := config.stash.get(_RECORDER, None)) is not None:
        terminalreporter.section("kernels compared with the interpreter")
        terminalreporter.write_line(recorder.report())
        if file := config.getoption("--shadow-interpreter"):
            Path(file).write_text(json.dumps(recorder.rows(), indent=1))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (
        (recorder := session.config.stash.get(_RECORDER, None)) is not None
        and recorder.wrong
        and not session.exitstatus
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session", autouse=True)
def _folder_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> None:
    """All workers of a session share it."""
    folder = tmp_path_factory.getbasetemp()
    os.environ["CROSSSPEC_TEST_SESSION"] = str(folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder)


def _made_once(name: str, write: Callable[[Path], None]) -> Path:
    """A folder that the workers of a session share: the one that asks first fills it."""
    import engines

    def make() -> Path:
        folder = Path(os.environ["CROSSSPEC_TEST_SESSION"], name)
        folder.mkdir()
        write(folder)
        return folder

    return engines.kept(f"folder {name}", make)


@pytest.fixture(scope="session")
def data() -> Path:
    """Text of the tests of training."""
    import tiny_training

    return _made_once("text", tiny_training.write_text)


@pytest.fixture(scope="session")
def target_folder() -> Path:
    """A tiny random target of the tests of training."""
    import tiny_training

    return _made_once("target", tiny_training.write_target)


@pytest.fixture(scope="session")
def responses(data: Path, target_folder: Path) -> Path:
    """That target's answers to that text."""
    import tiny_training

    return _made_once("responses", lambda folder: tiny_training.write_responses(folder, data, target_folder))

"""benchmarks/sanitize.sh: refused in one sentence where it cannot run, and what it runs with programs that stand in."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
SCRIPT = HERE.parent / "benchmarks" / "sanitize.sh"
SANITIZER = """#!/bin/bash
echo "$PYTORCH_NO_CUDA_MEMORY_CACHING $@"
[[ $2 == memcheck ]] && {{ {memcheck}; }}
[[ $2 == initcheck ]] && {{ {initcheck}; }}
"""


def run(*arguments, **variables):
    done = subprocess.run(
        [str(SCRIPT), *map(str, arguments)], capture_output=True, text=True, env={**os.environ, **variables}, timeout=60
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def programs(tmp_path):
    """A Python that sees a GPU, and a way to write a compute-sanitizer that finds something."""

    def write(name, text):
        path = tmp_path / name
        path.write_text(text)
        path.chmod(0o755)
        return str(path)

    return {"PYTHON": write("python", "#!/bin/bash\nexit 0\n"), "COMPUTE_SANITIZER": str(tmp_path / "none")}, write


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused_in_one_sentence(tmp_path):
    rc, out, problem = run(tmp_path / "logs", PYTHON=sys.executable)
    assert rc == 2 and not out and len(problem.splitlines()) == 1 and "sees no GPU" in problem
    assert not (tmp_path / "logs").exists()


def test_what_cannot_begin_is_refused_in_one_sentence(tmp_path, programs):
    rc, out, problem = run(tmp_path / "logs", **programs[0])
    assert rc == 2 and not out and len(problem.splitlines()) == 1 and "install the CUDA toolkit" in problem
    rc, _, problem = run(tmp_path / "logs", "soon")
    assert rc == 2 and len(problem.splitlines()) == 1 and "SECONDS is 'soon'" in problem
    rc, usage, _ = run()
    assert rc == 2 and "usage: benchmarks/sanitize.sh LOGS [SECONDS]" in usage and "set -" not in usage
    assert run("--help")[0] == 0


@pytest.mark.parametrize(
    ("memcheck", "initcheck", "seconds", "expected"),
    [
        ("exit 0", "exit 0", 9, ["memcheck: found nothing", "initcheck: found nothing"]),
        (
            'echo "==== ERROR SUMMARY: 3 errors"; exit 99',
            "exit 0",
            9,
            ["memcheck: failed (99): ==== ERROR SUMMARY: 3 errors", "initcheck: found nothing"],
        ),
        ("exit 0", "exec sleep 30", 1, ["memcheck: found nothing", "initcheck: was ended after 1 s"]),
    ],
)
def test_both_tools_run_over_files_that_are_there(tmp_path, programs, memcheck, initcheck, seconds, expected):
    variables, write = programs
    variables["COMPUTE_SANITIZER"] = write("sanitizer", SANITIZER.format(memcheck=memcheck, initcheck=initcheck))
    rc, out, problem = run(tmp_path / "logs", seconds, **variables)
    assert rc == (expected != ["memcheck: found nothing", "initcheck: found nothing"]) and not problem
    assert [line.startswith(start) for line, start in zip(out.splitlines(), expected, strict=True)] == [True, True]
    for tool in ("memcheck", "initcheck"):
        log = (tmp_path / "logs" / f"{tool}.log").read_text()
        assert log.startswith("1 ") and f"--tool {tool}" in log
        files = [Path(name) for name in re.findall(r"\S+\.py", log)]
        assert len(files) >= 12 and all(file.parent == HERE and file.is_file() for file in files)
        # Tests that use the GPU where there is one; those with engines take too long.
        assert all("DEVICE" in file.read_text() for file in files)
        assert not any("pytest.mark.e2e" in file.read_text() for file in files)

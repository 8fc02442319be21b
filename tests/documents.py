"""Reading the documents as their readers do: links, commands, and what is pasted from them.

Nothing is run here (`walkthrough.py` does that). A command is held against what would take it: click's own parser for
``crossspec``, the Makefile, the options that a benchmark's or vLLM's source declares, our parser for what stands after
``--speculative-config``.
"""

import ast
import contextlib
import functools
import importlib.util
import io
import itertools
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "vllm_crossspec"
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "research").rglob("*.md")),
    *(ROOT / name / "README.md" for name in ("benchmarks", "configs", "tests")),
]
LANGUAGES = {"bash", "json", "python", "text", "toml"}
FOLDERS = (
    "benchmarks", "configs", "crossspec_tools", "deploy", "docs", "packages", "research", "tests", "vllm_crossspec",
)  # fmt: skip

FENCE = re.compile(r"\s*```(\S*)\s*$")
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"!?\[[^\]\[]*(?:\[[^\]]*\][^\]\[]*)?\]\(([^)\s]+)\)")
COMMAND = re.compile(r"\s{4,}(crossspec|docker|git|make|pip|pytest|python|vllm) ")
FILE = re.compile(rf"(?<![\w./-])(?:{'|'.join(FOLDERS)})/[\w./*-]*")


class Block(NamedTuple):
    """A fenced block: the line of its first line, the language that it names, its lines without the fence's indent."""

    line: int
    language: str
    lines: list[str]


class Document(NamedTuple):
    """A document's text in two parts: blocks, and (line number, line) of everything else."""

    blocks: list[Block]
    prose: list[tuple[int, str]]


def read(text: str) -> Document:
    """Split a document."""
    blocks: list[Block] = []
    prose: list[tuple[int, str]] = []
    inside: Block | None = None
    indent = 0
    for number, line in enumerate(text.splitlines(), 1):
        fence = FENCE.match(line)
        if fence and inside is None:
            indent, inside = len(line) - len(line.lstrip()), Block(number + 1, fence[1], [])
        elif fence and inside is not None:
            blocks.append(inside)
            inside = None
        elif inside is not None:
            inside.lines.append(line[indent:])
        else:
            prose.append((number, line))
    return Document(blocks, prose)


# -- links ------------------------------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """What a `#...` may name in this document: its headings, as GitHub writes them."""
    found: dict[str, int] = {}
    for _, line in read(text).prose:
        if heading := re.match(r"#{1,6}\s+(.*)", line):
            title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).strip().lower()
            slug = re.sub(r"[^\w\- ]", "", title).replace(" ", "-")
            found[slug] = found.get(slug, -1) + 1
    return {slug if not n else f"{slug}-{n}" for slug, count in found.items() for n in range(count + 1)}


def bad_links(file: Path, text: str) -> Iterator[str]:
    """A sentence for every relative link or image that points nowhere."""
    for number, line in read(text).prose:
        for target in LINK.findall(line):
            path, _, anchor = target.partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            found = (file.parent / path).resolve() if path else file
            if not found.exists():
                yield f"{number}: the link {target} points to no file"
            elif anchor and anchor not in anchors(text if found == file else found.read_text()):
                yield f"{number}: the link {target} names no heading of that file"


def bad_files(text: str) -> Iterator[str]:
    """A sentence for every file or folder of ours that is named and not there."""
    document = read(text)
    named = [(number, span) for number, line in document.prose for span in SPAN.findall(line)]
    named += [(block.line + i, line) for block in document.blocks for i, line in enumerate(block.lines)]
    for number, words in named:
        for path in FILE.findall(words):
            if not _exists(ROOT, path):
                yield f"{number}: there is no {path}"
        room, slash, _ = words.partition("/")
        is_ours = slash and room and room not in FOLDERS and (PACKAGE / room).is_dir()
        if is_ours and re.fullmatch(r"[\w./*-]+(\.py|/)", words) and not _exists(PACKAGE, words):
            yield f"{number}: there is no {words} in the package"


def _exists(folder: Path, path: str) -> bool:
    path = path.rstrip(".")
    return any(folder.glob(path.rstrip("/"))) if "*" in path else (folder / path).exists()


# -- commands ---------------------------------------------------------------------------------------------------------


class CommandError(Exception):
    """What is wrong with a command, in a sentence."""


def bad_blocks(text: str) -> Iterator[str]:
    """A sentence for every block that cannot be checked, or does not say what can be run, pasted or parsed."""
    document = read(text)
    for number, line in document.prose:
        if COMMAND.match(line):
            yield f"{number}: a command outside of a fenced block"
    for block in document.blocks:
        if block.language not in LANGUAGES:
            yield f"{block.line}: the block names no language of {', '.join(sorted(LANGUAGES))}"
        elif block.language == "bash":
            for command in commands(block):
                with _told(command.line) as told:
                    check_command(command.words)
                yield from told
        elif block.language != "text":
            check = {"json": check_json, "python": check_python, "toml": check_toml}[block.language]
            with _told(block.line) as told:
                check("\n".join(block.lines))
            yield from told


@contextlib.contextmanager
def _told(number: int) -> Iterator[list[str]]:
    told: list[str] = []
    try:
        yield told
    except CommandError as problem:
        told.append(f"{number}: {problem}")


class Command(NamedTuple):
    """A command of a block: the line of its first line, its words with operators among them, the text that a shell
    gets. It may go over several lines."""

    line: int
    words: list[str]
    text: str

    def __str__(self) -> str:
        return " ".join(" ".join(self.words).split())


def commands(block: Block) -> Iterator[Command]:
    """Every command of a block."""
    waiting, first = "", block.line
    for offset, line in enumerate(block.lines):
        first = block.line + offset if not waiting else first
        waiting += line
        if waiting.endswith("\\"):
            waiting = waiting[:-1] + " "
            continue
        lexer = shlex.shlex(waiting, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:  # a quotation goes on
            waiting += "\n"
            continue
        text, waiting = waiting, ""
        if words:
            yield Command(first, words, text)
    if waiting:
        yield Command(first, ["unfinished:", waiting.split("\n")[0]], waiting)


def all_commands(text: str) -> Iterator[Command]:
    """Every command of a document's blocks for a shell, in order."""
    for block in read(text).blocks:
        if block.language == "bash":
            yield from commands(block)


def check_command(words: Sequence[str]) -> None:
    """Hold each command of a line against what would take it.

    Raises:
        CommandError: one of them would be refused.
    """
    part: list[str] = []
    for word in [*words, ";"]:
        if re.fullmatch(r"[;|&]+", word):
            _check_one(part)
            part = []
        else:
            part.append(word)


def _check_one(words: list[str]) -> None:
    words = list(words)
    if ">" in words:
        words = words[: words.index(">")]
    while words and (words[0] in ("do", "done") or re.match(r"[A-Z_]+=", words[0])):
        words = words[1:]
    if not words or words[0] == "for":
        return
    name = Path(words[0]).name
    if name not in CHECKS:
        raise CommandError(f"no test knows the command {words[0]!r}")
    CHECKS[name](words[1:])


@functools.cache
def _crossspec() -> Any:
    """click's command of `crossspec`."""
    import typer.main

    from vllm_crossspec.cli.app import app

    return typer.main.get_command(app)


def _check_crossspec(words: list[str]) -> None:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            _parse(_crossspec(), "crossspec", words, None)
    except Exception as problem:
        if type(problem).__name__ == "Exit":  # --help
            return
        if not hasattr(problem, "format_message"):
            raise
        raise CommandError(f"crossspec {' '.join(words[:2])}: {problem.format_message()}") from None


def _parse(command: Any, name: str, words: list[str], parent: Any) -> None:
    context = command.make_context(name, list(words), parent=parent)
    if hasattr(command, "resolve_command"):
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        _parse(command, name, rest, context)


@functools.cache
def _makefile() -> tuple[set[str], set[str]]:
    """Its targets and variables."""
    text = (ROOT / "Makefile").read_text()
    return set(re.findall(r"^([a-z]+):", text, re.M)), set(re.findall(r"^([A-Z_]+) *[:?]?=", text, re.M))


def _check_make(words: list[str]) -> None:
    targets, variables = _makefile()
    given = dict(word.split("=", 1) for word in words if "=" in word)
    asked = [word for word in words if "=" not in word]
    for kind, unknown in (("target", {*asked} - targets), ("variable", {*given} - variables)):
        if unknown:
            raise CommandError(f"the Makefile has no {kind} {sorted(unknown)[0]!r}")
    arguments = shlex.split(given.get("ARGS", ""))
    if arguments and asked == ["demo"]:
        _check_crossspec(["demo", *arguments])
    elif arguments and asked in (["test"], ["nightly"]):
        _check_pytest(arguments)


def _check_pytest(words: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    markers = {text.split(":")[0] for text in project["tool"]["pytest"]["ini_options"]["markers"]}
    options = {"-k", "-m", "-n", "-p", "-s", "-x", "--durations", *_options_in(ROOT / "conftest.py")}
    for i, word in enumerate(words):
        if word.startswith("-") and word.split("=")[0] not in options:
            raise CommandError(f"pytest: no test knows the option {word!r}")
        if word == "-m" and (unknown := {*re.findall(r"\w+", words[i + 1])} - markers - {"not", "and", "or"}):
            raise CommandError(f"pytest: there is no marker {sorted(unknown)[0]!r}")


def _options_in(*files: Path) -> set[str]:
    """The options that these files declare: first arguments that begin with a dash, of any call."""
    calls = [node for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    first = [argument.value for call in calls for argument in call.args[:2] if isinstance(argument, ast.Constant)]
    return {value for value in first if isinstance(value, str) and value.startswith("-")}


def _check_python(words: list[str]) -> None:
    if words[0] == "-m":
        if importlib.util.find_spec(words[1]) is None:
            raise CommandError(f"there is no module {words[1]}")
        return
    script = ROOT / words[0]
    if not script.is_file():
        raise CommandError(f"there is no script {words[0]}")
    files, left = set(), [script]
    while left:
        files.add(file := left.pop())
        for name in re.findall(r"^(?:from|import) (\w+)", file.read_text(), re.M):
            beside = (script.parent / f"{name}.py", *(script.parent / name).glob("*.py"))
            left += [other for other in beside if other.is_file() and other not in files]
    known = _options_in(*files) | {"--help"}
    for word in itertools.takewhile("--".__ne__, words[1:]):  # what follows it is another program's
        if word.startswith("--") and word.split("=")[0] not in known:
            raise CommandError(f"{words[0]} has no option {word.split('=')[0]!r}")


def _fields(file: Path, *classes: str) -> list[str]:
    """Names of the annotated fields of these classes, from the source: importing vLLM takes ten seconds."""
    return [
        item.target.id
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name in classes
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    ]


@functools.cache
def _vllm() -> tuple[set[str], set[str], set[str]]:
    """vLLM's options of `serve`, its speculative methods, and the keys of its speculative config."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    fields = _fields(folder / "engine" / "arg_utils.py", "EngineArgs", "AsyncEngineArgs")
    fields += _fields(folder / "entrypoints" / "launchers" / "cli_args.py", "BaseFrontendArgs", "FrontendArgs")
    source = folder / "config" / "speculative.py"
    named = {
        node.targets[0].id: node.value
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    methods: set[str] = set()
    waiting = [named["SpeculativeMethod"]]
    while waiting:
        for part in ast.walk(waiting.pop()):
            if isinstance(part, ast.Constant):
                methods.add(part.value)
            elif isinstance(part, ast.Name) and part.id in named:
                waiting.append(named[part.id])
    options = {f"--{field.replace('_', '-')}" for field in fields}
    return options, methods, set(_fields(source, "SpeculativeConfig"))


@functools.cache
def _vllm_bench() -> set[str]:
    """vLLM's options of `bench serve`."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "benchmarks"
    return _options_in(folder / "serve.py", folder / "datasets" / "datasets.py")


def _check_vllm(words: list[str]) -> None:
    name = " ".join(words[: 2 if words[:1] == ["bench"] else 1])
    if name not in ("serve", "bench serve"):
        raise CommandError(f"no test knows `vllm {name}`")
    options = _vllm()[0] if name == "serve" else _vllm_bench()
    for i, word in enumerate(words):
        if word.startswith("--") and word not in options:
            raise CommandError(f"vllm {name} has no option {word!r}")
        if word == "--speculative-config":
            _check_given(words[i + 1])
        elif word == "--compilation-config":
            _json(words[i + 1])


def _check_given(value: str) -> None:
    """What stands after `--speculative-config`: JSON, a file in `$(cat FILE)`, or `$(crossspec pocket METHOD)`."""
    if method := re.fullmatch(r"\$\(crossspec pocket ([^)]+)\)", value):
        from vllm_crossspec.cli.demo import METHODS

        if METHODS.get(method[1]) is None:
            raise CommandError(f"the demo has no method {method[1]!r}")
        value = json.dumps(METHODS[method[1]])
    if file := re.fullmatch(r"\$\(cat ([^)]+)\)", value):
        if not (ROOT / file[1]).is_file():
            raise CommandError(f"there is no file {file[1]}")
        value = (ROOT / file[1]).read_text()
    check_config(_json(value))


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as problem:
        raise CommandError(f"not JSON: {problem}") from None


def check_config(raw: dict[str, Any]) -> None:
    """Parse a speculative config as an engine would before it reads a checkpoint."""
    from vllm_crossspec.config.parse import is_ours, parse

    _, methods, keys = _vllm()
    try:
        if is_ours(raw, methods, keys):
            parse(raw, keys)
    except ValueError as problem:
        raise CommandError(str(problem)) from None


def check_json(text: str) -> None:
    """A block of JSON; one with a method is a speculative config."""
    value = _json(text)
    if isinstance(value, dict) and "method" in value:
        check_config(value)


def check_python(text: str) -> None:
    """A block of Python: it compiles, and speculative configs in it are some."""
    try:
        tree = ast.parse(text)
    except SyntaxError as problem:
        raise CommandError(f"not Python: {problem}") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "speculative_config":
            with contextlib.suppress(ValueError):  # made of names
                check_config(ast.literal_eval(node.value))


def check_toml(text: str) -> None:
    """A block of TOML."""
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise CommandError(f"not TOML: {problem}") from None


def _check_curl(words: list[str]) -> None:
    for i, word in enumerate(words):
        if word == "-d":
            asked = _json(words[i + 1]).get("vllm_xargs", {}).get("crossspec", "off")
            if asked not in ("tree", "chain", "off"):
                raise CommandError(f"a request may not ask for {asked!r}")


def _check_pip(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in re.findall(r"\.\[([\w,]+)\]", " ".join(words)):
        if unknown := {*extra.split(",")} - extras.keys():
            raise CommandError(f"the package has no extra {sorted(unknown)[0]!r}")


def _anything(words: list[str]) -> None:
    """A command of the system, whose files are looked for by themselves."""


def _check_bash(words: list[str]) -> None:
    """A script of ours, which is there."""
    if not words or not (ROOT / words[0]).is_file():
        raise CommandError(f"there is no script {' '.join(words[:1])!r}")


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "crossspec": _check_crossspec,
    "bash": _check_bash,
    "curl": _check_curl,
    "make": _check_make,
    "pip": _check_pip,
    "pytest": _check_pytest,
    "python": _check_python,
    "vllm": _check_vllm,
    **dict.fromkeys(("awk", "git", "grep", "mkdir", "source", "twine"), _anything),
}


# -- commands in a line of text ----------------------------------------------------------------------------------------


def bad_spans(text: str) -> Iterator[str]:
    """A sentence for each `crossspec ...`, `make ...` and `{"method": ...}` in a line that would not be taken.

    Such a mention may leave out what it is not about: its command and options must exist.
    """
    for number, line in read(text).prose:
        for span in SPAN.findall(line):
            with _told(number) as told:
                if span.startswith("crossspec "):
                    _check_mention(span.split()[1:])
                elif span.startswith("make "):
                    _check_make(shlex.split(span)[1:])
                elif span.startswith('{"method"') and "…" not in span and "..." not in span:
                    check_json(span)
            yield from told


def _check_mention(words: list[str]) -> None:
    command, name = _crossspec(), "crossspec"
    while words and hasattr(command, "commands") and not words[0].startswith(("-", "...", "…")):
        if words[0] not in command.commands:
            raise CommandError(f"{name} has no command {words[0]!r}")
        name, command, words = f"{name} {words[0]}", command.commands[words[0]], words[1:]
    if hasattr(command, "commands") and "router" in command.commands:  # `crossspec calibrate --records` is the router's
        command = command.commands["router"]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for word in words:
        if word.startswith("--") and word.split("=")[0] not in known | {"--help"}:
            raise CommandError(f"{name} has no option {word!r}")

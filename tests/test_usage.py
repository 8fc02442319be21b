"""Help texts of all commands at all widths, and what all commands say to a mistyped line."""

import inspect
import itertools
import re

import pytest
import typer.main

from vllm_crossspec.cli.app import app

WIDTHS = (60, 80, 110)


def walk(command, path):
    """A command and all below it, with their names."""
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from walk(below, (*path, name))


COMMANDS = [*walk(typer.main.get_command(app), ("crossspec",))]
LEAVES = [(path, command) for path, command in COMMANDS if not hasattr(command, "commands")]
NAMES = [" ".join(path) for path, _ in COMMANDS]


def shown(crossspec, monkeypatch, path, width):
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, err = crossspec(*path[1:], "--help")
    assert code == 0 and err == ""
    return out


def words(text):
    """A text without its line breaks."""
    return " ".join(text.replace(" \\\n", " ").split())


def test_all_commands_are_here():
    assert len(COMMANDS) > 25
    assert {"crossspec train eagle3", "crossspec calibrate heterospec", "crossspec ngram query"} <= {*NAMES}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=NAMES)
def test_no_character_of_a_help_text_is_lost(crossspec, monkeypatch, path, command, width):
    out = words(shown(crossspec, monkeypatch, path, width))
    texts = [command.help or "", *(getattr(option, "help", None) or "" for option in command.params)]
    texts += [below.help.split("\n\n")[0] for below in getattr(command, "commands", {}).values() if below.help]
    for text in texts:
        for paragraph in inspect.cleandoc(text).split("\n\n"):
            assert words(paragraph) in out


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=NAMES)
def test_a_line_ends_only_where_the_next_word_has_no_room(crossspec, monkeypatch, path, command, width):
    lines = shown(crossspec, monkeypatch, path, width).splitlines()
    assert all(len(line) <= width or len(line.split()) == 1 for line in lines)
    end = next(i for i, line in enumerate(lines) if line in ("Arguments:", "Options:"))
    for line, following in itertools.pairwise(lines[:end]):
        if line and following and line != "Example:" and not re.match(r"\d+\.|-", following):
            used = len(line.removesuffix(" \\"))
            assert used + 1 + len(following.split()[0]) > width - 6, (line, following)


def test_lists_and_examples_are_kept(crossspec, monkeypatch):
    out = shown(crossspec, monkeypatch, ("crossspec", "train"), 80)
    assert re.findall(r"^(\d)\. `crossspec train", out, re.MULTILINE) == ["1", "2", "3", "4", "5"]
    out = shown(crossspec, monkeypatch, ("crossspec", "batch"), 60)
    example = out.partition("Example:\n")[2].partition("\n\n")[0]
    assert all(line.endswith(" \\") for line in example.splitlines()[:-1])
    assert words(example).startswith("crossspec batch prompts.jsonl answers.jsonl --model Qwen/Qwen3-8B")


@pytest.mark.nightly(keep=8)
@pytest.mark.parametrize(("path", "command"), LEAVES, ids=[" ".join(path) for path, _ in LEAVES])
def test_a_mistyped_line_is_one_sentence(crossspec, path, command):
    lines = {("--no-such-option", "x"): "there is no option '--no-such-option'"}
    required = [p for p in command.params if p.required and p.param_type_name == "option"]
    if required:
        lines[()] = "missing "
    elif any(p.required for p in command.params):
        lines[()] = "missing argument"
    for option in command.params:
        if option.param_type_name == "option" and len(option.opts[-1]) > 6 and option.opts[-1].startswith("--"):
            wrong = option.opts[-1][:-2] + option.opts[-1][-1]
            lines[(wrong,)] = f"there is no option {wrong!r}; did you mean '--"
    for option in command.params:
        if option.param_type_name == "option" and not option.is_flag and option.name in ("max_tokens", "steps", "seed"):
            lines[(option.opts[-1], "word")] = f"invalid value for {option.opts[-1]!r}"
            lines[(option.opts[-1],)] = f"option {option.opts[-1]!r} requires an argument"
    for arguments, sentence in lines.items():
        code, out, err = crossspec(*path[1:], *arguments)
        assert (code, out) == (2, ""), arguments
        assert err.startswith(f"crossspec: {sentence}") and err.count("\n") == 1, err


@pytest.mark.parametrize(("path", "command"), [c for c in COMMANDS if c not in LEAVES], ids=lambda c: None)
def test_an_unknown_command_is_one_sentence(crossspec, path, command):
    near = next(iter(command.commands)) + "x"
    code, out, err = crossspec(*path[1:], near)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert err.startswith(f"crossspec: there is no command {near!r}; did you mean '{near[:-1]}'?")
    code, out, err = crossspec(*path[1:], "zzzz")
    assert code == 2 and "; known: " in err and err.count("\n") == 1
    code, out, err = crossspec(*path[1:])
    assert code == 2 and "Commands:" in err

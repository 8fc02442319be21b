"""How `crossspec` explains itself: plain help texts at any width, and a sentence for what was typed wrong."""

import difflib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from vllm_crossspec.names import nearest

UsageProblem: Any = typer.BadParameter.__mro__[2]
"""The base class of all that typer refuses: click's, or that of typer's own copy of click."""

LEAST_WIDTH, MOST_WIDTH = 40, 110
NAMES_WIDTH = 28
"""Names of options that are longer stand on a line of their own."""

ITEM = re.compile(r"(?:\d+\.|-) +")
EXAMPLE = "Example: "


class App(typer.Typer):
    """A group of commands. Their help has no markup, so that no character is eaten and no word is cut."""

    def __init__(self, cls: type[TyperGroup] | None = None, **more: Any) -> None:
        super().__init__(
            cls=cls or Group,
            rich_markup_mode=None,
            add_completion=False,
            pretty_exceptions_enable=False,
            context_settings={"help_option_names": ["-h", "--help"], "max_content_width": MOST_WIDTH},
            **more,
        )

    def command(self, name: str | None = None, **more: Any) -> Callable[[Any], Any]:
        return super().command(name, **{"cls": Command, **more})


class _PlainHelp:
    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write("\n".join(_help(self, ctx, max(formatter.width, LEAST_WIDTH))))


class Command(_PlainHelp, TyperCommand):
    """A command with plain help."""


class Group(_PlainHelp, TyperGroup):
    """Commands with plain help; without one of them the help is all there is to say."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            typer.echo(ctx.get_help(), err=True)
            ctx.exit(2)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The nearest command is named where there is no such one."""
        name, known = args[0], self.list_commands(ctx)
        if name not in known and not name.startswith("-"):
            ctx.fail(f"there is no command {name!r}{nearest(name, known)}")
        return super().resolve_command(ctx, args)


def usage_sentence(problem: Any) -> str:
    """What was typed wrong, with the nearest name or where to read on."""
    said = " ".join(problem.format_message().split()).rstrip(".")
    context: Any = getattr(problem, "ctx", None)
    if hasattr(problem, "possibilities"):  # of an unknown option
        known = [name for option in context.command.params for name in (*option.opts, *option.secondary_opts)]
        close = difflib.get_close_matches(problem.option_name, [name for name in known if name[0] == "-"], n=1)
        said = f"there is no option {problem.option_name!r}" + (f"; did you mean {close[0]!r}?" if close else "")
    said = said[:1].lower() + said[1:]
    return said if context is None or said.endswith("?") else f"{said}; see `{context.command_path} --help`"


def _help(command: Any, context: Any, width: int) -> Iterator[str]:
    yield from _filled(f"Usage: {context.command_path} {' '.join(command.collect_usage_pieces(context))}", width)
    yield ""
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        yield from _paragraph(paragraph, width)
    arguments: list[tuple[str, str]] = []
    options: list[tuple[str, str]] = []
    for parameter in command.get_params(context):
        if (record := parameter.get_help_record(context)) is not None:
            (arguments if parameter.param_type_name == "argument" else options).append(record)
    yield from _list("Arguments", arguments, width)
    yield from _list("Options", options, width)
    if isinstance(command, Group):
        found = [(name, command.get_command(context, name)) for name in command.list_commands(context)]
        first = [(name, inspect.cleandoc(each.help or "").split("\n\n")[0]) for name, each in found if each]
        yield from _list("Commands", first, width)
    if command.epilog:
        yield from _paragraph(command.epilog, width)


def _paragraph(text: str, width: int) -> Iterator[str]:
    """A paragraph, the items of a list, or an example that can be pasted; then an empty line."""
    if text.startswith(EXAMPLE):
        yield "Example:"
        *lines, last = _filled(" ".join(text.removeprefix(EXAMPLE).split()), width - 2, "  ")
        yield from (f"{line} \\" for line in lines)
        yield last
    else:
        part: list[str] = []
        for line in text.splitlines():
            if ITEM.match(line) and part:
                yield from _filled(" ".join(part), width)
                part = []
            part.append(line.strip())
        yield from _filled(" ".join(part), width)
    yield ""


def _filled(text: str, width: int, indent: str = "") -> list[str]:
    item = ITEM.match(text)
    hanging = indent + "  " * bool(indent) + " " * (item.end() if item else 0)
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False
    )


def _list(title: str, records: list[tuple[str, str]], width: int) -> Iterator[str]:
    """Names, and beside them what they are; below them where a name is long."""
    if not records:
        return
    yield f"{title}:"
    column = min(max(len(name) for name, _ in records), NAMES_WIDTH) + 4
    for name, text in records:
        lines = textwrap.wrap(" ".join(text.split()), width - column, break_long_words=False, break_on_hyphens=False)
        beside = len(name) + 4 <= column
        yield f"  {name.ljust(column - 2)}{lines.pop(0) if beside and lines else ''}".rstrip()
        yield from (" " * column + line for line in lines)
    yield ""

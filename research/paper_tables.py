"""The papers' tables, made on models that you have, by their numbers in the papers, and tables beside them.

    python research/paper_tables.py --list
    python research/paper_tables.py whiflash table-2 --help

Prints Markdown, as research/notes has it; --json FILE writes the numbers too, with how they were made. Progress goes to
the standard error.
"""

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))  # the shapes of large models

from papers.base import PaperTable

from vllm_crossspec.cli import meta, options
from vllm_crossspec.files import write_json

PAPERS = ("whiflash", "dart", "heterospec", "confu", "flashhead", "lookup", "goodput")


def tables() -> dict[str, Mapping[str, PaperTable]]:
    """By paper and by name."""
    return {paper: import_module(f"papers.{paper}").TABLES for paper in PAPERS}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; ``make`` is what it asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="say what can be made, and end")
    papers = parser.add_subparsers(metavar="PAPER", dest="paper")
    for paper, found in tables().items():
        of_paper = papers.add_parser(paper, help=", ".join(found)).add_subparsers(
            metavar="TABLE", dest="table", required=True
        )
        for name, table in found.items():
            of_table = of_paper.add_parser(name, help=table.about, description=table.about)
            table.add_options(of_table)
            of_table.add_argument("--json", type=Path, help="write the numbers to this file, too")
            of_table.set_defaults(make=table.make)
    given = parser.parse_args(argv)
    if not given.list and given.paper is None:
        parser.error("say a paper and a table, or --list")
    return given


def main(argv: Sequence[str] | None = None) -> int:
    """Make one table and print it; 2 for what cannot be made."""
    given = arguments(argv)
    if given.list:
        for paper, found in tables().items():
            for name, table in found.items():
                print(f"{paper} {name}: {table.about}")
        return 0
    try:
        options.check_file("--json", given.json)
        made = given.make(given)
    except ValueError as problem:
        print(problem, file=sys.stderr)
        return 2
    print("\n\n".join(figures.markdown() for figures in made))
    if given.json is not None:
        command = shlex.join(["python", "research/paper_tables.py", *(sys.argv[1:] if argv is None else argv)])
        origin = {**meta.origin(), "command": command, "hardware": meta.hardware()}
        document = [{"title": figures.title, "rows": list(figures.values)} for figures in made]
        write_json(given.json, {"meta": origin, "tables": document})
    return 0


if __name__ == "__main__":
    sys.exit(main())

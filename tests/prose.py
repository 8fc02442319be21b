"""How plain the project's words are: length of sentences, numbers in them, and idioms that no native reader uses.

    python tests/prose.py                     # every document and every public docstring; exits with 1 on a finding
    python tests/prose.py README.md docs/use/choose.md
    python tests/prose.py --table             # sentences, mean and longest of each file

A floor, and no substitute for reading. Tables, code and headings are not read. A page's sentences have at most
``MEAN`` words on average; no sentence has more than ``LONGEST`` words, or more than ``NUMBERS`` numbers.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

from documents import ROOT, read

MEAN, LONGEST, NUMBERS = 18, 35, 3
HISTORY = ("CHANGELOG.md", "benchmarks/LOG.md")
"""Notes of past days, which stay as they were written."""
IDIOMS = (
    "but for", "of which", "of whom", "whoever", "nobody", "somebody", "go on from", "gone on", "goes on from",
    "not taken", "none of them is", "mended", "behind its end", "at hand", "as ever", "in a row cost",
    "what is left of", "to one side", "be it", "save for", "beside which", "by way of", "for which there is no",
)  # fmt: skip
IDIOM = re.compile(rf"\b(?:(?i:{'|'.join(IDIOMS)})|is none)\b")
END = re.compile(r"(?<=[.!?])[)\"'*_]*\s+(?=[\"'(*_]*(?:[A-Z0-9]|vLLM|code\b))")
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|vs|cf|etc|al|Fig|Sec|Eq|No)\.")
NUMBER = re.compile(r"(?<![\w.-])\d[\d,.]*(?![\w-])")


class Sentence(NamedTuple):
    """One sentence, without markup, and the line on which it begins."""

    line: int
    text: str

    @property
    def words(self) -> int:
        return len(re.findall(r"[A-Za-z0-9][\w'.,/-]*", self.text))


def plain(text: str) -> str:
    """Text without markup: a span of code is one word, a link is its own words."""
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", " ", text)
    text = re.sub(r"``?[^`]+``?", "code", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return ABBREVIATION.sub(r"\1", re.sub(r"[*_]{1,2}(?=\S)|(?<=\S)[*_]{1,2}", "", text))


def sentences(lines: list[tuple[int, str]]) -> Iterator[Sentence]:
    """The sentences of consecutive lines; an empty line or an item of a list ends one, and tables are left out."""
    paragraph: list[tuple[int, str]] = []
    for number, line in [*lines, (0, "")]:
        stripped = line.strip()
        item = re.match(r"(?:[-*+]|\d+\.)\s+", stripped)
        if not stripped or item or stripped.startswith(("#", "|", "<", ">", "~~~", "::")):
            yield from _split(paragraph)
            paragraph = []
        if stripped and not stripped.startswith(("#", "|", "<", "~~~")):
            paragraph.append((number, stripped[item.end() :] if item else stripped.removeprefix("> ")))


def _split(paragraph: list[tuple[int, str]]) -> Iterator[Sentence]:
    text = plain("\n".join(line for _, line in paragraph))
    start = 0
    for piece in END.split(text):
        place = text.find(piece, start)
        start = place + len(piece)
        if piece.strip():
            yield Sentence(paragraph[min(text[:place].count("\n"), len(paragraph) - 1)][0], " ".join(piece.split()))


def of_document(path: Path) -> list[Sentence]:
    """The sentences of a Markdown file."""
    prose = read(path.read_text()).prose
    gaps = {number for number, _ in prose}
    lines = [
        pair
        for number, line in prose
        for pair in (((number, line),) if number - 1 in gaps else ((0, ""), (number, line)))
    ]
    return list(sentences(lines))


def of_docstrings(path: Path) -> list[Sentence]:
    """The sentences of a module's docstrings, those below a name included; of shell lines and legends none."""
    found: list[Sentence] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines = node.value.value.splitlines()
            found += sentences(
                [
                    (
                        node.lineno + i,
                        "" if i and re.match(r"\s{4,}\S.*\s{2,}#|\s{4,}\w+\s{3,}|\s*[\w\[\], ]+: ", line) else line,
                    )
                    for i, line in enumerate(lines)
                ]
            )
    return found


def findings(path: Path, found: list[Sentence]) -> Iterator[str]:
    """What is wrong with a file's sentences, each with file and line."""
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    for sentence in found:
        where, start = f"{name}:{sentence.line}", " ".join(sentence.text.split()[:8])
        if sentence.words > LONGEST:
            yield f"{where}: {sentence.words} words in one sentence: {start} ..."
        if path.suffix == ".md" and (count := len(NUMBER.findall(sentence.text))) > NUMBERS:
            yield f"{where}: {count} numbers in one sentence, which belong in a table: {start} ..."
        if idiom := IDIOM.search(sentence.text):
            yield f"{where}: {idiom[0]!r} is an idiom; say it plainly: {start} ..."
    if path.suffix == ".md" and found and (mean := sum(s.words for s in found) / len(found)) > MEAN:
        yield f"{name}: {mean:.1f} words a sentence on average; at most {MEAN}"


def files() -> list[Path]:
    """All that is checked when nothing is named."""
    documents = [path for path in ROOT.glob("*.md") if path.name not in HISTORY]
    documents += [
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "research").rglob("*.md"),
        *ROOT.glob("[!.]*/README.md"),
        *ROOT.glob("packages/*/README.md"),
    ]
    modules = [
        path
        for folder in ("vllm_crossspec", "crossspec_tools", "benchmarks", "research")
        for path in (ROOT / folder).rglob("*.py")
    ]
    return sorted(documents) + sorted(path for path in modules if "tests" not in path.parts)


def main() -> int:
    """Print what is found, or the table; 1 where anything was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="Markdown or Python (default: all)")
    parser.add_argument("--table", action="store_true", help="print a row for each file, and no findings")
    options = parser.parse_args()
    problems: list[str] = []
    for path in [file.resolve() for file in options.files] or files():
        found = of_document(path) if path.suffix == ".md" else of_docstrings(path)
        problems += findings(path, found)
        if options.table and found:
            words = [sentence.words for sentence in found]
            name = path.relative_to(ROOT)
            print(f"{len(words):5} sentences, mean {sum(words) / len(words):4.1f}, longest {max(words):3}  {name}")
    if not options.table:
        print("\n".join(problems))
    print(f"{len(problems)} findings", file=sys.stderr)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())

"""Reads the text of Triton's IR, printed with locations, into a small tree of operations.

Only the shape of the text is known here (results, operands, attributes, types, regions, locations); what an operation
means is the business of `translate`.
"""

import re
from dataclasses import dataclass, field

NAME = r"%[\w$.\-]+(?:#\d+)?"
FLOAT8 = ("f8E4M3FN", "f8E5M2", "f8E4M3FNUZ", "f8E5M2FNUZ")
SCALARS = re.compile(r"i(?:1|8|16|32|64)|f16|bf16|f32|f64|index|" + "|".join(FLOAT8))
CARRIED = re.compile(rf"({NAME}) = ({NAME})")
"""What a loop carries: its own name, and the first value's."""
TYPED_BY_TAIL = ("tt.reduce", "tt.scan", "tt.map_elementwise")
"""Operations with regions whose types follow the last region."""


def unescaped(text: str) -> str:
    """A string as it was before MLIR printed it: bytes in hexadecimal, of which some make one character."""
    raw = re.sub(rb"\\(\\|[0-9A-Fa-f]{2})", lambda f: b"\\" if f[1] == b"\\" else bytes([int(f[1], 16)]), text.encode())
    return raw.decode(errors="replace")


class UnsupportedError(Exception):
    """The kernel uses something that this backend does not translate."""


@dataclass(frozen=True)
class Type:
    """A scalar (`shape` is None) or a tensor; `elem` is `i32`, `f32`, `ptr<f32>` and so on."""

    elem: str
    shape: tuple[int, ...] | None = None

    @property
    def is_pointer(self) -> bool:
        return self.elem.startswith("ptr")

    @property
    def is_float(self) -> bool:
        return self.elem[0] in "fb"

    @property
    def pointee(self) -> "Type":
        return Type(self.elem[4:-1])

    @property
    def bits(self) -> int:
        return 64 if self.is_pointer or self.elem == "index" else int(re.search(r"\d+", self.elem)[0])

    @property
    def bytes(self) -> int:
        """In memory, where a bit takes a byte."""
        return max(self.bits // 8, 1)

    def of(self, elem: str) -> "Type":
        return Type(elem, self.shape)


@dataclass
class Block:
    label: str
    args: list[tuple[str, Type]]
    ops: list["Op"] = field(default_factory=list)


@dataclass
class Op:
    name: str
    results: list[str]
    operands: list[str]
    words: str
    """The text after the operation's name, attributes included; a string stands there as `"0"`, `"1"`, ..."""
    types: list[Type]
    """The types written last: of the results where the text names them, of operands elsewhere."""
    strings: list[str] = field(default_factory=list)
    regions: list[list[Block]] = field(default_factory=list)
    location: str = "unknown"

    def int_attr(self, name: str) -> int:
        found = re.search(rf"\b{name} = (-?\d+)", self.words)
        if not found:
            raise UnsupportedError(f"{self.name} has no attribute {name}")
        return int(found[1])

    def types_of_region(self) -> list[Type]:
        """What a combiner yields: the types of the first half of its arguments."""
        args = self.regions[0][0].args
        return [t for _, t in args[: len(args) // 2]]

    def callee(self) -> str:
        """Of a call: the function's name."""
        name = re.match(r'@(?:"(\d+)"|([\w$.\-]+))', self.words)
        return self.strings[int(name[1])] if name[1] else name[2]

    def string_attr(self, name: str) -> str:
        return self.strings[int(re.search(rf'\b{name} = "(\d+)"', self.words)[1])]


@dataclass
class Function:
    name: str
    args: list[tuple[str, Type]]
    results: list[Type]
    blocks: list[Block]
    public: bool
    location: str


def parse_type(text: str) -> Type:
    text = text.strip()
    shape = None
    if text.startswith("tensor<"):
        dims, elem = re.match(r"tensor<((?:\d+x)*)(.*)>$", text).groups()
        shape, text = tuple(int(d) for d in dims.split("x") if d), elem
    if text.startswith("!tt.ptr<"):
        return Type(f"ptr<{parse_type(split_list(text[len('!tt.ptr<') : -1])[0]).elem}>", shape)
    if not SCALARS.fullmatch(text):
        raise UnsupportedError(f"it has no translation of the type {text}")
    return Type(text, shape)


def split_list(text: str) -> list[str]:
    """Splits at the commas outside of brackets."""
    depth, parts, part = 0, [], ""
    for c in text.replace("->", "\0"):
        depth += (c in "<([{") - (c in ">)]}")
        if c == "," and depth == 0:
            parts, part = [*parts, part], ""
        else:
            part += c
    return [p.replace("\0", "->").strip() for p in [*parts, part] if p.strip()]


def split_types(text: str) -> list[Type]:
    text = text.strip()
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    return [parse_type(p) for p in split_list(text)]


def parse_module(text: str) -> tuple[list[Function], "Locations"]:
    locations = Locations()
    lines: list[tuple[str, list[str], str]] = []
    for raw in text.splitlines():
        if found := re.match(r"(#loc\d*) = loc\((.*)\)$", raw):
            locations.named[found[1]] = found[2]
        elif line := raw.strip():
            lines.append(_separate(line))
    reader = _Reader(lines)
    functions = []
    try:
        while reader.at < len(lines):
            line, strings, _ = reader.next()
            if line.startswith("tt.func"):
                functions.append(reader.function(line, strings))
    except UnsupportedError as e:
        where = locations.source(lines[reader.at - 1][2])
        kernel = (re.search(r"tt\.func public @\"?([\w$.\-]+)", text) or ["", "a module"])[1]
        raise UnsupportedError(f"the CPU lane cannot compile {kernel} ({where}): {e}", where) from None
    return functions, locations


def _separate(line: str) -> tuple[str, list[str], str]:
    """A line without its locations and strings, the strings, and the line's own location, which is the last."""
    kept, strings, location, at = "", [], "unknown", 0
    while found := re.compile(r'"(?:[^"\\]|\\.)*"| loc\(| // ').search(line, at):
        kept += line[at : found.start()]
        if found[0] == " // ":
            return kept.strip(), strings, location
        if found[0] == " loc(":
            end = _closing(line, found.end())
            location, at = line[found.end() : end], end + 1
        else:
            kept += f'"{len(strings)}"'
            strings.append(found[0][1:-1])
            at = found.end()
    return (kept + line[at:]).strip(), strings, location


def _closing(line: str, at: int) -> int:
    """Where the bracket that was opened before `at` is closed."""
    depth = 1
    for found in re.compile(r'"(?:[^"\\]|\\.)*"|[()]').finditer(line, at):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        if depth == 0:
            return found.start()
    return len(line)


class Locations:
    """Where operations come from."""

    def __init__(self) -> None:
        self.named: dict[str, str] = {}

    def frames(self, text: str) -> list[tuple[str, int]]:
        """Files and lines, the innermost call first."""
        text = self.named.get(text, text)
        if found := re.match(r'"((?:[^"\\]|\\.)*)":(\d+):\d+', text):
            return [(unescaped(found[1]), int(found[2]))]
        if text.startswith("callsite("):
            callee, _, caller = _split_callsite(text[len("callsite(") : -1])
            return self.frames(callee) + self.frames(caller)
        if found := re.match(r'"(?:[^"\\]|\\.)*"\((.*)\)$', text):
            return self.frames(found[1])
        if found := re.match(r"fused(?:<.*?>)?\[(.*)\]$", text):
            return self.frames(split_list(found[1])[0])
        return []

    def source(self, text: str) -> str:
        """The line a reader would look at: the innermost that is not in Triton's own library."""
        frames = self.frames(text)
        own = [f for f in frames if "/triton/language/" not in f[0]]
        return "{}:{}".format(*(own or frames)[0]) if frames else "an unknown line"


def _split_callsite(text: str) -> tuple[str, str, str]:
    depth = 0
    for found in re.finditer(r'"(?:[^"\\]|\\.)*"|[()\[\]]| at ', text):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(found[0], 0)
        if found[0] == " at " and depth == 0:
            return text[: found.start()], " at ", text[found.end() :]
    return text, "", "unknown"


class _Reader:
    def __init__(self, lines: list[tuple[str, list[str], str]]):
        self.lines, self.at = lines, 0

    def next(self) -> tuple[str, list[str], str]:
        self.at += 1
        return self.lines[self.at - 1]

    def function(self, line: str, strings: list[str]) -> Function:
        name, opening = re.match(r'tt\.func (?:\w+ )?@("\d+"|[\w$.\-]+)(\()', line).group(1), line.index("(")
        if name.startswith('"'):
            name = strings[int(name[1:-1])]
        end = _closing(line, opening + 1)
        args = [re.sub(r"\s*\{.*\}$", "", a).split(": ", 1) for a in split_list(line[opening + 1 : end])]
        results = re.match(r"\s*->\s*(\(.*?\)|[^({ ]+)", line[end + 1 :])
        types = split_types(results[1]) if results else []
        if not line.endswith("{"):
            raise UnsupportedError(f"the function {name} has no body")
        blocks, _, location = self.region()
        return Function(name, [(n, parse_type(t)) for n, t in args], types, blocks, " public " in line, location)

    def region(self) -> tuple[list[Block], str, str]:
        """The blocks up to the closing brace, the line with that brace, and that line's location."""
        blocks = [Block("entry", [])]
        while True:
            line, strings, location = self.next()
            if line.startswith("}"):
                return blocks, line, location
            if line.startswith("^"):
                label, args = re.match(r"\^(\w+)(?:\((.*)\))?:", line).groups()
                pairs = [a.split(": ", 1) for a in split_list(args or "")]
                block = Block(label, [(n, parse_type(t)) for n, t in pairs])
                if blocks[-1].ops or len(blocks) > 1:
                    blocks.append(block)
                else:
                    blocks[-1] = block
            else:
                blocks[-1].ops.append(self.op(line, strings, location))

    def op(self, line: str, strings: list[str], location: str) -> Op:
        results = []
        if found := re.match(r"((?:%[\w$.\-]+(?::\d+)?(?:, )?)+) = (.*)", line):
            names, line = found.groups()
            for name in names.split(", "):
                name, _, count = name.partition(":")
                results += [f"{name}#{i}" for i in range(int(count))] if count else [name]
        regions, tail = [], line
        if line.endswith("{"):
            while True:
                blocks, tail, location = self.region()
                regions.append(blocks)
                if not tail.endswith("{"):
                    break
        name, words = re.match(r'("\d+"|[\w.]+)\s*(.*)', line).groups()
        if name.startswith('"'):  # the generic form
            name = strings[int(name[1:-1])]
        op = Op(name, results, [], words, [], strings, regions, location)
        if regions:
            op.operands = re.findall(NAME, words)
            op.types = split_types(tail.split("->")[-1]) if name in TYPED_BY_TAIL else []
            return op
        bare = re.sub(r"<?\{[^{}]*\}>?", "", words)
        head, colon, types = bare.rpartition(" : ")
        if not colon:
            head, types = bare, ""
        op.operands = re.findall(NAME, head)
        types = re.split(r" -> | to ", types)[-1]
        op.types = split_types(types) if types and not name.startswith("cf.") else []
        return op

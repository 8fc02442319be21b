"""What n-grams are counted in: text and token files, cut into pieces that workers take.

    .jsonl   a document a line: {"text": "..."} or {"tokens": [...]}
    .txt     one document
    .npy     1-D integers; a negative number ends a document

As in the reference, a document of text ends with the tokenizer's end-of-text token.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int64]
SUFFIXES = (".jsonl", ".txt", ".npy")
SEPARATOR = -1
DOCUMENTS_AT_ONCE = 256


class Piece(NamedTuple):
    """Part of a file: bytes of a .jsonl (lines that begin there), elements of a .npy, the whole of a .txt."""

    file: str
    begin: int
    end: int


class Tokens(NamedTuple):
    """Token ids int64 [n], negative between documents, and how many of them are counted as beginnings."""

    ids: Array
    num_starts: int


def find_files(inputs: list[Path]) -> list[Path]:
    """All files of the known kinds, folders searched through, sorted. Raises ValueError where one is no input."""
    found: list[Path] = []
    for path in inputs:
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
            if not inside:
                raise ValueError(f"{path}: the folder has no {', '.join(SUFFIXES)} file")
            found += inside
        elif path.is_file() and path.suffix in SUFFIXES:
            found.append(path)
        else:
            raise ValueError(f"{path}: name a folder, or a file that ends in {', '.join(SUFFIXES)}")
    return found


def cut(files: list[Path], piece_size: int) -> list[Piece]:
    """Pieces of about ``piece_size`` bytes (.npy: elements)."""
    pieces = []
    for path in files:
        size = path.stat().st_size if path.suffix != ".npy" else len(_map_tokens(path))
        step = piece_size if path.suffix != ".txt" else max(1, size)
        pieces += [Piece(str(path), begin, min(begin + step, size)) for begin in range(0, size, step)]
    return pieces


def read_piece(piece: Piece, order: int, tokenizer: Any, eos: int | None) -> Iterator[Tokens]:
    """The tokens of a piece, some documents at a time.

    Args:
        piece: of which file.
        order: tokens of an n-gram: a .npy piece comes with ``order - 1`` tokens more than begin in it.
        tokenizer: of the ``tokenizers`` package, or None where text is refused.
        eos: appended to documents of text.

    Raises:
        ValueError: one sentence that names the file and line.
    """
    path = Path(piece.file)
    if path.suffix == ".npy":
        ids = np.asarray(_map_tokens(path)[piece.begin : piece.end + order - 1], dtype=np.int64)
        yield Tokens(ids, piece.end - piece.begin)
        return
    texts: list[str] = []
    if path.suffix == ".txt":
        texts = [path.read_text(encoding="utf-8", errors="replace")]
    else:
        for document in _lines(path, piece):
            if isinstance(document, str):
                texts.append(document)
                if len(texts) == DOCUMENTS_AT_ONCE:
                    yield _join(_encode(texts, tokenizer, eos, path))
                    texts = []
            else:
                yield _join([document])
    if texts:
        yield _join(_encode(texts, tokenizer, eos, path))


def _lines(path: Path, piece: Piece) -> Iterator[str | Array]:
    """Documents whose line begins in the piece."""
    with path.open("rb") as file:
        if piece.begin:
            file.seek(piece.begin - 1)
            file.readline()
        while (at := file.tell()) < piece.end:
            line = file.readline()
            if line.strip():
                yield _document(line, f"{path} (line at byte {at})")


def _document(line: bytes, where: str) -> str | Array:
    try:
        content = json.loads(line)
    except ValueError as problem:
        raise ValueError(f"{where} is not JSON: {problem}") from problem
    if isinstance(content, dict) and isinstance(content.get("text"), str):
        return str(content["text"])
    ids = content.get("tokens") if isinstance(content, dict) else None
    if isinstance(ids, list) and all(type(token) is int and token >= 0 for token in ids):
        return np.array(ids, dtype=np.int64)
    raise ValueError(f"{where}: a line is an object with `text`, a string, or `tokens`, a list of ids")


def _encode(texts: list[str], tokenizer: Any, eos: int | None, path: Path) -> list[Array]:
    if tokenizer is None:
        raise ValueError(f"{path} holds text: --tokenizer FOLDER says how to make tokens of it")
    end = [] if eos is None else [eos]
    return [np.array(encoding.ids + end, dtype=np.int64) for encoding in tokenizer.encode_batch(texts)]


def _join(documents: list[Array]) -> Tokens:
    separator = np.array([SEPARATOR])
    ids = np.concatenate([part for document in documents for part in (document, separator)])
    return Tokens(ids, len(ids))


def _map_tokens(path: Path) -> npt.NDArray[Any]:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as problem:
        raise ValueError(f"{path} is no whole .npy file ({problem}): write it again with numpy.save") from problem
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"{path} must hold one row of integers: {array.dtype} {array.shape}")
    return array


class TokenizerFacts(NamedTuple):
    """A tokenizer's size and end-of-text token."""

    vocab_size: int
    eos: int | None


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model's folder. Raises ValueError where the ``tokenizers`` package is missing."""
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as problem:
        raise ValueError('reading text needs tokenizers: run `pip install "vllm-crossspec[train]"`') from problem
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json" if folder.is_dir() else folder))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def tokenizer_facts(folder: Path, tokenizer: Any) -> TokenizerFacts:
    """Highest id plus one, and the `eos_token` of `tokenizer_config.json`."""
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    config = (folder if folder.is_dir() else folder.parent) / "tokenizer_config.json"
    eos = json.loads(config.read_text(encoding="utf-8")).get("eos_token") if config.is_file() else None
    name = eos.get("content") if isinstance(eos, dict) else eos
    return TokenizerFacts(vocab_size, tokenizer.token_to_id(name) if name else None)

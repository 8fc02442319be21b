"""What n-grams are counted in: text and token files, cut into pieces that workers take.

    .jsonl   a document a line: {"text": "..."}, {"tokens": [...]}, a chat {"prompt": "...", "response": "..."}, or a
             line that `crossspec train generate` wrote, {"prompt_ids": [...], "response_ids": [...]}
    .txt     one document
    .npy     1-D integers; a negative number ends a document

A .jsonl may be compressed (.jsonl.gz). As in the reference, a document of text ends with the tokenizer's end-of-text
token; a chat is rendered by the model's chat template, which ends it itself.
"""

import functools
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt

from vllm_crossspec.arrays import Array

SUFFIXES = (".jsonl", ".jsonl.gz", ".txt", ".npy")
SEPARATOR = -1
DOCUMENTS_AT_ONCE = 256
MAX_LINE = 1 << 28
"""Most bytes of a document's line; a small compressed file may hold one that fills the memory."""


class Piece(NamedTuple):
    """Part of a file: bytes of a .jsonl (lines that begin there), elements of a .npy, the whole of any other."""

    file: str
    begin: int
    end: int


class Chat(NamedTuple):
    """A question and its answer, as text."""

    prompt: str
    response: str


Document = str | Chat | Array


class Tokens(NamedTuple):
    """Token ids int64 [n], negative between documents, and how many of them are counted as beginnings."""

    ids: Array
    num_starts: int


def find_files(inputs: list[Path]) -> list[Path]:
    """All files of the known kinds, folders searched through, sorted. Raises ValueError where one is no input.

    What a folder holds out, its ``dev-*.jsonl`` as ``crossspec train generate`` writes them, is not among them: a store
    that has counted what it is judged on knows it by heart.
    """
    found: list[Path] = []
    for path in inputs:
        if path.is_dir():
            known = (file for file in path.rglob("*") if file.name.endswith(SUFFIXES) and file.is_file())
            inside = sorted(file for file in known if not file.match("dev-*.jsonl*"))
            if not inside:
                raise ValueError(f"{path}: the folder has no {', '.join(SUFFIXES)} file (but for held-out dev-*.jsonl)")
            found += inside
        elif path.is_file() and path.name.endswith(SUFFIXES):
            found.append(path)
        else:
            raise ValueError(f"{path}: name a folder, or a file that ends in {', '.join(SUFFIXES)}")
    return found


def cut(files: list[Path], piece_size: int) -> list[Piece]:
    """Pieces of about ``piece_size`` bytes (.npy: elements)."""
    pieces = []
    for path in files:
        size = path.stat().st_size if path.suffix != ".npy" else len(_map_tokens(path))
        step = piece_size if path.suffix in (".jsonl", ".npy") else max(1, size)
        pieces += [Piece(str(path), begin, min(begin + step, size)) for begin in range(0, size, step)]
    return pieces


def read_piece(piece: Piece, order: int, tokenizer: Path | None, eos: int | None) -> Iterator[Tokens]:
    """The tokens of a piece, some documents at a time. Raises ValueError.

    Args:
        order: tokens of an n-gram: a .npy piece comes with ``order - 1`` tokens more than begin in it.
        tokenizer: the folder of a model's, or None where text and chats are refused.
        eos: appended to documents of text.
    """
    path = Path(piece.file)
    if path.suffix == ".npy":
        ids = np.asarray(_map_tokens(path)[piece.begin : piece.end + order - 1], dtype=np.int64)
        yield Tokens(ids, piece.end - piece.begin)
        return
    waiting: list[str | Chat] = []
    if path.suffix == ".txt":
        waiting = [path.read_text(encoding="utf-8", errors="replace")]
    else:
        for document in _lines(path, piece):
            if isinstance(document, np.ndarray):
                yield _join([document])
                continue
            waiting.append(document)
            if len(waiting) == DOCUMENTS_AT_ONCE:
                yield _join(_encode(waiting, tokenizer, eos, path))
                waiting = []
    if waiting:
        yield _join(_encode(waiting, tokenizer, eos, path))


def _lines(path: Path, piece: Piece) -> Iterator[Document]:
    """Documents whose line begins in the piece."""
    if path.suffix == ".gz":
        try:
            with gzip.open(path) as file:
                yield from _documents(file, None, path)
        except (OSError, EOFError, zlib.error) as problem:
            raise ValueError(f"{path} is no whole .gz file ({problem}): compress it again") from problem
        return
    with path.open("rb") as file:
        if piece.begin:
            file.seek(piece.begin - 1)
            file.readline()
        yield from _documents(file, piece.end, path)


def _documents(file: IO[bytes] | gzip.GzipFile, end: int | None, path: Path) -> Iterator[Document]:
    """Of the lines from here on that begin before ``end``."""
    while True:
        at = file.tell()
        line = file.readline(MAX_LINE + 1)
        if not line or (end is not None and at >= end):
            return
        if len(line) > MAX_LINE:
            raise ValueError(f"{path} (line at byte {at}) is longer than {MAX_LINE} bytes: write a document a line")
        if line.strip():
            yield _document(line, f"{path} (line at byte {at})")


def _document(line: bytes, where: str) -> Document:
    try:
        content = json.loads(line)
    except ValueError as problem:
        raise ValueError(f"{where} is not JSON: {problem}") from problem
    content = content if isinstance(content, dict) else {}
    if isinstance(text := content.get("text"), str):
        return text
    if _is_ids(ids := content.get("tokens")):
        return np.array(ids, dtype=np.int64)
    prompt, response = content.get("prompt_ids"), content.get("response_ids")
    if _is_ids(prompt) and _is_ids(response):
        return np.array(prompt + response, dtype=np.int64)
    prompt, response = content.get("prompt"), content.get("response")
    if isinstance(prompt, str) and isinstance(response, str):
        return Chat(prompt, response)
    raise ValueError(
        f"{where}: a line is an object with `text`, a string, or `tokens`, a list of ids, or with `prompt` and "
        "`response` (strings), or `prompt_ids` and `response_ids`"
    )


def _is_ids(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(token) is int and token >= 0 for token in value)


def _encode(documents: list[str | Chat], folder: Path | None, eos: int | None, path: Path) -> list[Array]:
    if folder is None:
        raise ValueError(f"{path} holds text: --tokenizer FOLDER says how to make tokens of it")
    tokenizer, end = load_tokenizer(folder), [] if eos is None else [eos]
    texts = [document for document in documents if isinstance(document, str)]
    found = [encoding.ids + end for encoding in tokenizer.encode_batch(texts)]
    if chats := [document for document in documents if isinstance(document, Chat)]:
        try:
            rendered = [render_chat(folder, chat) for chat in chats]
        except ValueError as problem:
            raise ValueError(f"{path} holds chats: {problem}") from problem
        found += [encoding.ids for encoding in tokenizer.encode_batch(rendered, add_special_tokens=False)]
    return [np.array(ids, dtype=np.int64) for ids in found]


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


@functools.lru_cache(maxsize=1)
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


def tokenizer_facts(folder: Path) -> tuple[int, int | None]:
    """A tokenizer's highest id plus one, and the id of the `eos_token` of `tokenizer_config.json`."""
    tokenizer = load_tokenizer(folder)
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    config = (folder if folder.is_dir() else folder.parent) / "tokenizer_config.json"
    eos = json.loads(config.read_text(encoding="utf-8")).get("eos_token") if config.is_file() else None
    name = eos.get("content") if isinstance(eos, dict) else eos
    return vocab_size, tokenizer.token_to_id(name) if name else None


def render_chat(folder: Path, chat: Chat) -> str:
    """A chat as the model of a folder sees it. Raises ValueError where the folder has no template for chats.

    Prompts and answers are plain text: special tokens in them (data sets often have the end of the text there) are left
    out, and so is white space around them.
    """
    tokenizer = _chat_tokenizer(folder if folder.is_dir() else folder.parent)
    said = []
    for text in chat:
        for special in tokenizer.all_special_tokens:
            text = text.replace(special, "")
        said.append(text.strip())
    messages = [{"role": "user", "content": said[0]}, {"role": "assistant", "content": said[1]}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False))


@functools.lru_cache(maxsize=1)
def _chat_tokenizer(folder: Path) -> Any:
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as problem:
        raise ValueError('rendering them needs transformers: run `pip install "vllm-crossspec[train]"`') from problem
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if not tokenizer.chat_template:
        raise ValueError(f"{folder} has no chat template: give lines with `text` instead")
    return tokenizer

"""Builds a store: workers count pieces of the input into sorted runs, one merge makes the trie.

Half-done work lies in a folder beside the store: a killed build resumes with the missing pieces. Workers are processes,
or tasks of Ray where it is installed.
"""

import functools
import json
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from crossspec_tools.ngram import inputs
from crossspec_tools.ngram.count import Keys, write_levels, write_runs
from crossspec_tools.ngram.inputs import Piece
from crossspec_tools.ngram.levels import Facts, Progress, write_store
from vllm_crossspec.cli.cluster import ray_connected
from vllm_crossspec.files import replacing
from vllm_crossspec.names import counted
from vllm_crossspec.ngram_store.store import MAX_CODES, MAX_ORDER, MAX_VOCAB_SIZE, MIN_ORDER, Header, tokenizer_hash

PLAN = "plan.json"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is counted, and how; a build goes on only under the very same plan."""

    order: int  # the longest n-gram, 2 to 5
    vocab_size: int  # token ids lie below it
    tokenizer: str  # folder of the tokenizer, "" for token files
    tokenizer_hash: str  # of its vocabulary, "" for none
    eos: int | None  # token appended to documents of text, None for none
    bits: int  # of a stored log-probability, 8 or 16
    min_count: int  # n-grams of two tokens or more that were seen less often are left out
    piece_size: int  # bytes (.npy: tokens) of the input that a worker takes at once
    files: tuple[tuple[str, int, int], ...]  # path, size and time of each input


def make_plan(
    paths: list[Path],
    *,
    order: int = 3,
    tokenizer: Path | None = None,
    vocab_size: int | None = None,
    bits: int = 16,
    min_count: int = 1,
    piece_size: int = 256 << 20,
) -> Plan:
    """Look at everything that a build depends on. Raises ValueError, one sentence."""
    if not MIN_ORDER <= order <= MAX_ORDER:
        raise ValueError(f"--order {order}: choose {MIN_ORDER} to {MAX_ORDER}")
    if bits not in MAX_CODES:
        raise ValueError(f"--bits {bits}: choose 8 or 16")
    if min_count < 1 or piece_size < 1:
        raise ValueError(f"--min-count {min_count} and --piece-size {piece_size} must be 1 or more")
    files = inputs.find_files(paths)
    digest, eos = "", None
    if tokenizer is not None:
        digest = tokenizer_hash(tokenizer)
        known_size, eos = inputs.tokenizer_facts(tokenizer)
        if vocab_size is not None and vocab_size < known_size:
            raise ValueError(f"--vocab-size {vocab_size}: the tokenizer has {counted(known_size, 'token')}")
        vocab_size = vocab_size or known_size
    elif vocab_size is None:
        raise ValueError("token files need --tokenizer FOLDER (the one that made them) or --vocab-size N")
    elif any(path.suffix == ".txt" for path in files):
        raise ValueError("text files need --tokenizer FOLDER, the folder of the model that will draft")
    if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
        raise ValueError(f"--vocab-size {vocab_size}: choose 1 to {MAX_VOCAB_SIZE}")
    stats = [(path.resolve(), path.stat()) for path in files]
    return Plan(
        order=order,
        vocab_size=vocab_size,
        tokenizer=str(tokenizer.resolve()) if tokenizer is not None else "",
        tokenizer_hash=digest,
        eos=eos,
        bits=bits,
        min_count=min_count,
        piece_size=piece_size,
        files=tuple((str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats),
    )


def build(
    plan: Plan,
    out: Path,
    *,
    workers: int = 1,
    memory: int = 2 << 30,
    work: Path | None = None,
    progress: Progress = lambda *told: None,
) -> Header:
    """Count, merge, write. Raises ValueError: the folder belongs to another build, or an input is no such file.

    Args:
        memory: bytes that all workers together may take for counting, and the merge for its parts.
        work: folder of what is half done; it is deleted when the store is written. Default: beside ``out``. Workers on
            other machines must find it, and the inputs, under the same names.
    """
    folder = work if work is not None else out.with_name(out.name + ".work")
    _open_folder(folder, plan)
    pieces = inputs.cut([Path(name) for name, _, _ in plan.files], plan.piece_size)
    missing = [number for number in range(len(pieces)) if not _finished(folder, number)]
    progress("counting pieces", len(pieces) - len(missing), len(pieces))
    count = functools.partial(count_piece, plan, folder, memory // max(1, workers))
    for done, _ in enumerate(_fan_out(count, [(number, pieces[number]) for number in missing], workers), start=1):
        progress("counting pieces", len(pieces) - len(missing) + done, len(pieces))
    runs = [folder / name for number in range(len(pieces)) for name in json.loads(_marker(folder, number).read_text())]
    write_levels(runs, Keys(plan.order, plan.vocab_size), memory, folder, progress)
    facts = Facts(plan.order, plan.vocab_size, plan.tokenizer_hash, plan.bits, plan.min_count)
    header = write_store(out, folder, facts, progress)
    shutil.rmtree(folder)
    return header


def count_piece(plan: Plan, folder: Path, budget: int, number: int, piece: Piece) -> int:
    """One worker's work: the piece's runs, and then the mark that they are whole. Returns the number of runs."""
    stem = folder / f"piece-{number:06d}"
    for left in folder.glob(f"{stem.name}-*"):  # of a worker that was killed
        left.unlink()
    batches = inputs.read_piece(piece, plan.order, Path(plan.tokenizer) if plan.tokenizer else None, plan.eos)
    try:
        names = write_runs(batches, Keys(plan.order, plan.vocab_size), budget, stem)
    except ValueError as problem:
        where = "" if str(problem).startswith(piece.file) else f"{piece.file}: "
        raise ValueError(f"{where}{problem}") from problem
    with replacing(_marker(folder, number)) as partial:
        partial.write_text(json.dumps(names))
    return len(names)


def _marker(folder: Path, number: int) -> Path:
    return folder / f"piece-{number:06d}.json"


def _finished(folder: Path, number: int) -> bool:
    marker = _marker(folder, number)
    return marker.is_file() and all((folder / name).is_file() for name in json.loads(marker.read_text()))


def _open_folder(folder: Path, plan: Plan) -> None:
    """Begin in a new folder, or go on in one of the same plan. Raises ValueError for anyone else's."""
    text = json.dumps(asdict(plan), indent=2)
    if folder.is_dir() and any(path.suffix != ".partial" for path in folder.iterdir()):
        known = folder / PLAN
        if not known.is_file() or known.read_text() != text:
            raise ValueError(
                f"{folder} holds another build, or this one with other settings or inputs: "
                "repeat those, delete the folder, or name another --work"
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / PLAN) as partial:
        partial.write_text(text)


def _fan_out(count: Any, jobs: list[tuple[int, Piece]], workers: int) -> Iterator[int]:
    """Results in the order in which they are ready."""
    if workers <= 1 or len(jobs) <= 1:
        yield from (count(*job) for job in jobs)
        return
    if find_spec("ray") is None:
        yield from _on_processes(count, jobs, workers)
        return
    with ray_connected() as ray:
        yield from _on_ray(ray, count, jobs, workers)


def _on_processes(count: Any, jobs: list[tuple[int, Piece]], workers: int) -> Iterator[int]:
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(count, number, piece) for number, piece in jobs]
        try:
            for future in as_completed(waiting):
                yield future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _on_ray(ray: Any, count: Any, jobs: Iterable[tuple[int, Piece]], workers: int) -> Iterator[int]:
    """At most ``workers`` tasks at once, on whichever machines Ray has."""
    task = ray.remote(count_piece)
    left, running = iter(jobs), []
    try:
        while True:
            for job in left:
                running.append(task.remote(*count.args, *job))
                if len(running) >= workers:
                    break
            if not running:
                return
            ready, running = ray.wait(running)
            try:
                yield from ray.get(ready)
            except ray.exceptions.RayTaskError as problem:
                raise problem.cause from problem
    finally:
        for reference in running:
            ray.cancel(reference)

"""`crossspec ngram`: builds, imports, describes and asks the n-gram stores that prune draft trees."""

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from vllm_crossspec.cli.options import check_file, integers
from vllm_crossspec.cli.stages import facts_table, grid, stage_bars
from vllm_crossspec.cli.usage import App
from vllm_crossspec.names import counted
from vllm_crossspec.ngram_store import NO_STORE

if TYPE_CHECKING:  # torch takes seconds to import, and --help needs none of it
    from vllm_crossspec.ngram_store.store import Header, NgramStore


app = App(
    name="ngram",
    help="N-gram stores: how likely a token is after the last few ones, for pruning draft trees (DART, section 4.2)."
    "\n\n"
    "A store belongs to one tokenizer. Build one from text like the text that will be generated, or import a .trie "
    "file of DART's authors; `query` shows what it knows.",
)


def _require(store: Path) -> None:
    """See that there is such a file, before torch is imported to read it. Raises ValueError."""
    if not store.is_file():
        raise ValueError(f"the n-gram store {store}: {NO_STORE}")


StoreArgument = Annotated[Path, Argument(help="A store that `build` or `import` wrote.", show_default=False)]
OutOption = Annotated[Path, Option("--out", help="File to write the store to; it appears when it is whole.")]
TokenizerOption = Annotated[
    Path | None, Option(help="Folder of the model (or its tokenizer.json) whose tokens these are.")
]
VocabOption = Annotated[
    int | None, Option(help="Token ids lie below this. Default: the tokenizer's highest id and one.")
]
BitsOption = Annotated[
    int, Option(help="16: log-probabilities off by less than 0.0005 nats; 8: by less than 0.06, a byte a node less.")
]
MinCountOption = Annotated[
    int, Option(help="Leave out n-grams of two tokens or more that were seen less often: smaller, less precise.")
]
WorkOption = Annotated[Path | None, Option(help="Folder for what is half done. Default: OUT.work.")]


@app.command()
def build(
    inputs: Annotated[
        list[Path],
        Argument(
            help="Files or folders of them: .jsonl or .jsonl.gz (a line is an object with `text`, with `tokens`, with "
            "`prompt` and `response`, or what `crossspec train generate` wrote; a folder's dev-*, held out, are left "
            "out), .txt (a document), .npy (token ids in a row, a negative one between documents).",
            show_default=False,
        ),
    ],
    out: OutOption,
    order: Annotated[int, Option(help="Longest n-gram, 2 to 5 tokens. The paper uses 3.")] = 3,
    tokenizer: TokenizerOption = None,
    vocab_size: VocabOption = None,
    workers: Annotated[
        int, Option(min=1, help="Counters at once: Ray tasks where Ray is installed, else processes.")
    ] = 1,
    memory_gib: Annotated[float, Option(min=0.001, help="Memory for counting, all workers together.")] = 2.0,
    min_count: MinCountOption = 1,
    bits: BitsOption = 16,
    piece_mib: Annotated[
        float, Option(min=0.001, help="Input that a worker takes at once; a killed build loses one such piece each.")
    ] = 256.0,
    work: WorkOption = None,
) -> None:
    """Count n-grams and write a store. Killed, it goes on where it was when called again with the same settings.

    Documents of text end with the tokenizer's end-of-text token; prompts and responses are rendered by the model's chat
    template. Counts are sorted in runs that fit the memory given and lie in a folder beside OUT (about 16 bytes a token
    read), so the input may be of any size. An input that is named twice counts double.

    Example: crossspec ngram build train.jsonl --tokenizer Qwen3-8B --out qwen3.ngram.safetensors --workers 8
    """
    from crossspec_tools.ngram import build as builder

    check_file("--out", out)
    plan = builder.make_plan(
        inputs,
        order=order,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        bits=bits,
        min_count=min_count,
        piece_size=int(piece_mib * (1 << 20)),
    )
    with stage_bars() as report:
        header = builder.build(plan, out, workers=workers, memory=int(memory_gib * 2**30), work=work, progress=report)
    Console().print(_description(out, header))


@app.command("import")
def import_(
    trie: Annotated[Path, Argument(help="A .trie file, as DART's `ngram_build.py` saves it.", show_default=False)],
    out: OutOption,
    tokenizer: TokenizerOption = None,
    vocab_size: VocabOption = None,
    min_count: MinCountOption = 1,
    bits: BitsOption = 16,
    work: WorkOption = None,
) -> None:
    """Turn a .trie file of DART's authors into a store, with a check of everything the file says.

    The file does not name its tokenizer: give the folder of the model that it is for. 43.5 GB become about 8.

    Example: crossspec ngram import 3gram.trie --tokenizer Qwen3-8B --out qwen3.ngram.safetensors
    """
    from crossspec_tools.ngram.inputs import tokenizer_facts
    from crossspec_tools.ngram.trie import import_trie
    from vllm_crossspec.ngram_store.store import tokenizer_hash

    check_file("--out", out)
    digest = ""
    if tokenizer is not None:
        digest = tokenizer_hash(tokenizer)
        vocab_size = vocab_size or tokenizer_facts(tokenizer)[0]
    if vocab_size is None:
        raise ValueError("a .trie does not name its tokenizer: give --tokenizer FOLDER, or --vocab-size N")
    how: dict[str, Any] = {"bits": bits, "min_count": min_count, "work": work}
    with stage_bars() as report:
        header = import_trie(trie, out, vocab_size=vocab_size, tokenizer_hash=digest, **how, progress=report)
    Console().print(_description(out, header))


@app.command()
def info(
    store: StoreArgument, check: Annotated[bool, Option("--check", help="Read all of it and check every node.")] = False
) -> None:
    """Say what a store holds, how large it is and how exact.

    Example: crossspec ngram info qwen3.ngram.safetensors --check
    """
    _require(store)
    from crossspec_tools.ngram.check import check_contents
    from vllm_crossspec.ngram_store.store import open_store

    opened = open_store(store)
    table = _description(store, opened.header)
    if check:
        start = time.perf_counter()
        check_contents(opened, str(store))
        table.add_row("checked", f"every node, in {time.perf_counter() - start:.1f} s")
    Console().print(table)


@app.command()
def query(
    store: StoreArgument,
    text: Annotated[str | None, Option(help="What came before, with --tokenizer.")] = None,
    tokens: Annotated[str | None, Option(help="What came before, as comma-separated token ids.")] = None,
    candidates: Annotated[
        str | None, Option(help="Comma-separated token ids to ask for. Default: the likeliest.")
    ] = None,
    tokenizer: TokenizerOption = None,
    top: Annotated[int, Option(min=1, help="How many of the likeliest tokens to show.")] = 10,
    order: Annotated[int | None, Option(help="Use n-grams of up to this length. Default: the store's.")] = None,
    backoff: Annotated[
        float | None,
        Option(help="Stupid backoff by this factor (0.4 is usual). Default: the longest match, as in the paper."),
    ] = None,
) -> None:
    """Ask what follows some tokens, and by how many of them it is known ("matched").

    Example: crossspec ngram query qwen3.ngram.safetensors --tokenizer Qwen3-8B --text "Once upon a"
    """
    _require(store)
    from crossspec_tools.ngram.inputs import load_tokenizer
    from vllm_crossspec.ngram_store.store import check_backoff, open_store, tokenizer_hash

    check_backoff(backoff, "--backoff")
    digest = tokenizer_hash(tokenizer) if tokenizer is not None else None
    opened = open_store(store, order=order, tokenizer=digest)
    loaded = load_tokenizer(tokenizer) if tokenizer is not None else None
    if (text is None) == (tokens is None):
        raise ValueError("say what came before: --text TEXT with --tokenizer FOLDER, or --tokens 1,2,3")
    if tokens is not None:
        ids = integers("--tokens", tokens, "token ids")
    elif loaded is not None:
        ids = loaded.encode(text, add_special_tokens=False).ids
    else:
        raise ValueError("--text needs --tokenizer, the folder of the model that the store is for")
    wanted = integers("--candidates", candidates, "token ids") if candidates is not None else None
    answers = _answers(opened, ids, wanted, top, backoff, loaded)
    if not answers.row_count:
        typer.echo(f"{answers.title}: no n-gram of this store ends like this")
        return
    Console().print(answers)


def _answers(
    store: "NgramStore", context: list[int], candidates: list[int] | None, top: int, backoff: float | None, loaded: Any
) -> Table:
    import torch

    from crossspec_tools.ngram.lookup import look_up

    asked = torch.tensor(candidates) if candidates is not None else torch.arange(store.header.vocab_size)
    log_probs, matched = look_up(
        store, torch.tensor([context], dtype=torch.int64), asked[None], backoff=backoff, floor=-math.inf
    )
    shown = torch.arange(len(asked))
    if candidates is None:
        best = log_probs[0].topk(min(top, len(asked)))
        shown = best.indices[best.values > -math.inf]
    last = context[max(0, len(context) - store.order + 1) :]
    columns = ("token", "p" if backoff is None else "score", "ln p", "matched")
    table = grid(f"after {_shown(last, loaded)}", columns, ["token"])
    for place in shown.tolist():
        log_prob = float(log_probs[0, place])
        token = _shown([int(asked[place])], loaded)
        table.add_row(token, f"{math.exp(log_prob):.6f}", f"{log_prob:.4f}", str(int(matched[0, place])))
    return table


def _shown(ids: list[int], loaded: Any) -> str:
    plain = ", ".join(map(str, ids)) or "nothing"
    return plain if loaded is None else f"{plain} {loaded.decode(ids, skip_special_tokens=False)!r}"


def _description(path: Path, header: "Header") -> Table:
    size = path.stat().st_size
    seen = (header.num_unigrams, *header.level_sizes[1:])
    facts = {
        "n-grams": ", ".join(f"{count:,} of {length}" for length, count in enumerate(seen, start=1)),
        "counted in": f"{counted(header.num_tokens, 'token', ',')}",
        "vocabulary": f"{counted(header.vocab_size, 'token', ',')}, tokenizer {header.tokenizer[:12] or 'not named'}",
        "size": f"{size / 1e6:,.1f} MB, {size / max(1, header.num_nodes):.2f} bytes an n-gram",
        "log-probabilities": f"{header.bits} bits, off by {header.max_error:.5f} nats at most",
        "lookup": f"at most {' + '.join(str(m.bit_length() + 1) for m in header.max_children)} reads for its levels",
    }
    return facts_table(path, facts)

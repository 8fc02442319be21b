"""What ``kernels.py`` times: made-up batches, the launches, and the plain PyTorch truth."""

import argparse
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from shapes import Shape, draft_model_shape, made_up_clusters
from synthetic_ngrams import write_store
from torch.utils._pytree import tree_map

from vllm_crossspec.drafting import noise
from vllm_crossspec.drafting.flashhead.assets import default_probes
from vllm_crossspec.drafting.flashhead.head import FlashHead
from vllm_crossspec.kinds.scoring import Scoring
from vllm_crossspec.ngram_store.store import open_store, place
from vllm_crossspec.trees.builders import best_first, dynamic
from vllm_crossspec.trees.builders import naive as naive_builders
from vllm_crossspec.trees.builders.continuity import ContinuityTree
from vllm_crossspec.trees.commit import kernels as commit
from vllm_crossspec.trees.commit import naive as naive_commit
from vllm_crossspec.trees.verify import naive as naive_verify
from vllm_crossspec.trees.verify import rows, walk
from vllm_crossspec.trees.verify.tail_attention import PagedTail, QueryRows, Softmax, tail_attention
from vllm_crossspec.types import AcceptedPaths, TokenTree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK_SIZE = 16
DEPTH, TOP_K, BLOCK_POSITIONS = 8, 10, 7  # EAGLE-3's trees; drafted positions of a DFlash block
CANDIDATES, BEAM_WIDTH = 25, 20  # of DART's search, at DEPTH positions
SEARCH_BOUND_US = {1: 300, 32: 600}


class Case(NamedTuple):
    """One thing to time.

    Attributes:
        name: in the document.
        run: the launches; captured in a CUDA graph, so it neither waits nor depends on the host.
        check: runs it once more and compares with the truth; None without a truth.
        figures: about the case, for the document. ``beside`` names an earlier case whose time is the base.
    """

    name: str
    run: Callable[[], Any]
    check: Callable[[], bool] | None
    figures: dict[str, Any]


class Step(NamedTuple):
    """A batch in which every request verifies a tree; shapes as in ``vllm_crossspec.trees.verify.rows``."""

    idx_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    cu_num_logits: torch.Tensor
    seq_lens: torch.Tensor
    prefill_len: torch.Tensor
    parents: torch.Tensor
    sizes: torch.Tensor
    positions: torch.Tensor
    path: torch.Tensor
    num_sampled: torch.Tensor


def on_cpu(given: Any) -> Any:
    """A copy of the same tensors in the host's memory."""
    return tree_map(lambda part: part.cpu().clone() if torch.is_tensor(part) else part, given)


def same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Whether all tensors are equal, wherever they are."""
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(found, expected, strict=True))


def case(
    kernel: Callable[..., Any],
    twin: Callable[..., Any],
    given: dict[str, Any],
    written: Sequence[str],
    figures: dict[str, Any] | None = None,
) -> Case:
    """Of a kernel and its twin, which write to the arguments named ``written``."""

    def check() -> bool:
        expected = on_cpu(given)
        kernel(**given)
        twin(**expected)
        flat = [[tensor for name in written for tensor in _tensors(of[name])] for of in (given, expected)]
        return same(*flat)

    return Case(kernel.__name__, lambda: kernel(**given), check, figures or {})


def packed(kernel: Callable[..., Any], arguments: type) -> Callable[..., Any]:
    """``kernel`` by keyword, which takes a tuple of ``arguments``."""
    return functools.wraps(kernel)(lambda **given: kernel(arguments(**given)))


def _tensors(value: Any) -> Sequence[torch.Tensor]:
    return [value] if torch.is_tensor(value) else value


def zeros(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(size, dtype=dtype, device=DEVICE)


# -- batches -------------------------------------------------------------------------------------------------------


def tree_parents(nodes: int, path: int, draw: random.Random) -> tuple[list[int], list[int]]:
    """Parent rows of a random tree, and the rows of a path in it, all of them away from a chain's places."""
    stride = nodes // path
    path_rows = [0, *(k * stride for k in range(1, path + 1))]
    above = dict(zip(path_rows[1:], path_rows, strict=False))
    parents, depths = [], [0]
    for row in range(1, nodes + 1):
        parent = above.get(row)
        if parent is None:
            parent = draw.choice([r for r, depth in enumerate(depths) if depth < DEPTH])
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return parents, path_rows


def make_step(batch_size: int, context: int, options: argparse.Namespace) -> Step:
    """``batch_size`` requests with ``context`` tokens before their trees."""
    draw, width = random.Random(batch_size), options.nodes + 1

    def int32(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    trees = [tree_parents(options.nodes, options.path, draw) for _ in range(batch_size)]
    starts = [width * i for i in range(batch_size + 1)]
    return Step(
        idx_mapping=torch.arange(batch_size, device=DEVICE),
        query_start_loc=int32(starts),
        cu_num_logits=int32(starts),
        seq_lens=int32([context + width] * batch_size),
        prefill_len=int32([context] * batch_size),
        parents=int32([parents for parents, _ in trees]),
        sizes=int32([options.nodes] * batch_size),
        positions=torch.arange(context, context + width, device=DEVICE).repeat(batch_size),
        path=int32([path + [0] * (DEPTH - options.path) for _, path in trees]),
        num_sampled=int32([options.path + 1] * batch_size),
    )


def rows_arguments(step: Step) -> dict[str, Any]:
    """What ``prepare_rows`` takes for a step."""
    num_reqs, nodes = step.parents.shape
    given = {name: getattr(step, name) for name in Step._fields[:8] if name != "cu_num_logits"}
    outputs = {"prefix_len": zeros(num_reqs), "num_live": zeros(num_reqs)}
    row_mask = zeros(num_reqs * (nodes + 1), -(-(nodes + 1) // 32))
    return given | outputs | {"cu_rows": step.cu_num_logits, "row_mask": row_mask, "max_depth": DEPTH}


def candidates(vocab_size: int, *size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities, falling, and tokens."""
    scores = torch.randn(*size, device=DEVICE).mul_(3).log_softmax(-1).sort(-1, descending=True).values
    return scores, torch.randint(vocab_size, size, device=DEVICE)


def empty_tree(num_reqs: int, nodes: int) -> TokenTree:
    int64, float32 = zeros(num_reqs, nodes, dtype=torch.int64), zeros(num_reqs, nodes, dtype=torch.float32)
    return TokenTree(int64, zeros(num_reqs, nodes), float32, zeros(num_reqs))


# -- cases ---------------------------------------------------------------------------------------------------------


def commit_cases(batch_size: int, shape: Shape, options: argparse.Namespace) -> Iterator[Case]:
    """The accepted path's K and V of all layers, its states and its ids moved to the front."""
    step, width = make_step(batch_size, 128, options), options.nodes + 1
    paths = AcceptedPaths(step.query_start_loc, step.cu_num_logits, step.num_sampled, step.path)
    num_blocks = batch_size * (width // BLOCK_SIZE + 2)
    content = 2 * shape.head_dim
    pool = torch.randn(
        shape.num_layers, num_blocks, BLOCK_SIZE, shape.num_kv_heads, content, device=DEVICE, dtype=torch.bfloat16
    )
    slots = torch.randperm(num_blocks * BLOCK_SIZE, device=DEVICE)[None, : batch_size * width].contiguous()
    layers = commit.make_kv_layers([(layer.transpose(1, 2), 0) for layer in pool])

    def compact() -> None:
        commit.compact_kv(layers, paths, slots)

    def check_compact() -> bool:
        pool.normal_()
        sample = {i: pool[i].cpu().clone() for i in (0, shape.num_layers - 1)}
        compact()
        naive_commit.compact_kv([(layer.transpose(1, 2), 0) for layer in sample.values()], *on_cpu((paths, slots)))
        return same([pool[i] for i in sample], list(sample.values()))

    num_bytes = 2 * batch_size * options.path * shape.num_layers * shape.num_kv_heads * content * 2
    yield Case("compact_kv", compact, check_compact, {"layers": shape.num_layers, "bytes": num_bytes, "aim_us": 20})
    states = [torch.randn(batch_size * width, shape.hidden_size, device=DEVICE, dtype=torch.bfloat16) for _ in range(4)]
    given = {"tensors": states, "paths": paths}
    yield case(commit.compact_rows, naive_commit.compact_rows, given, ["tensors"], {"tensors": len(states)})
    ids = torch.arange(batch_size * width, dtype=torch.int32, device=DEVICE)
    given = {"paths": paths, "positions": step.positions, "input_ids": ids, "seq_lens": step.seq_lens}
    yield case(commit.restore_rows, naive_commit.restore_rows, given, ["positions", "input_ids"])


def verify_cases(batch_size: int, shape: Shape, options: argparse.Namespace) -> Iterator[Case]:
    """Positions and masks of the rows before the target's pass, the walk after it."""
    step = make_step(batch_size, 2048, options)
    written = ("positions", "row_mask", "prefix_len", "num_live")
    kernels = packed(rows.prepare_rows, rows.StepRows), packed(naive_verify.prepare_rows, rows.StepRows)
    yield case(*kernels, rows_arguments(step), written)

    # Every row's token is its own; along the path the target samples the next row's, elsewhere a token without a draft.
    tokens = torch.arange(batch_size * (options.nodes + 1), device=DEVICE)
    sampled = torch.full_like(tokens, shape.vocab_size)
    path = step.query_start_loc[:-1, None].long() + step.path[:, : options.path + 1]
    sampled[path[:, :-1].flatten()] = tokens[path[:, 1:].flatten()]
    walked = {
        "idx_mapping": step.idx_mapping,
        "cu_num_logits": step.cu_num_logits,
        "num_live": step.sizes,
        "parents": step.parents,
        "sampled": sampled,
        "node_tokens": tokens.int(),
        "out_tokens": zeros(batch_size, DEPTH + 1, dtype=torch.int64),
        "path": zeros(batch_size, DEPTH + 1),
        "num_sampled": zeros(batch_size),
        "num_rejected": zeros(batch_size),
        "cu_rows": step.cu_num_logits,
        "seq_lens": step.seq_lens,
        "prefill_len": zeros(batch_size),
        "max_depth": DEPTH,
    }
    kernels = packed(walk.walk_tree, walk.Walk), packed(naive_verify.walk_tree, walk.Walk)
    found = case(*kernels, walked, ("out_tokens", "path", "num_sampled", "num_rejected"))

    def check_walk() -> bool:
        is_twins = found.check is not None and found.check()
        return is_twins and same([walked["path"], walked["num_sampled"]], [step.path, step.num_sampled])

    yield found._replace(check=check_walk)


def build_cases(batch_size: int, shape: Shape, options: argparse.Namespace) -> Iterator[Case]:
    """Trees from a parallel drafter's marginals, and from an autoregressive drafter's levels."""
    nodes, out = options.nodes, empty_tree(batch_size, options.nodes)
    log_probs, tokens = candidates(shape.vocab_size, batch_size, BLOCK_POSITIONS, nodes)
    given = {"log_probs": log_probs, "tokens": tokens, "num_nodes": nodes, "out": out}
    figures = {"positions": BLOCK_POSITIONS, "candidates": nodes}
    yield case(best_first.best_first, naive_builders.best_first, given, ["out"], figures)

    sizes = [(batch_size, TOP_K), *[(batch_size, TOP_K, TOP_K)] * (DEPTH - 1)]
    levels = [candidates(shape.vocab_size, *size) for size in sizes]

    settings = {"num_nodes": nodes, "depth": DEPTH, "top_k": TOP_K, "max_num_reqs": batch_size}
    tree = dynamic.DynamicTree(**settings, device=torch.device(DEVICE))

    def grow(tree: Any, inputs: Any, into: TokenTree) -> TokenTree:
        tree.start(*inputs[0])
        for level, scores in enumerate(inputs[1:], start=2):
            tree.expand(level, *scores)
        tree.finish(into)
        return into

    def check() -> bool:
        twin = naive_builders.DynamicTree(**settings, device=torch.device("cpu"))
        return same(grow(tree, levels, out), grow(twin, *on_cpu((levels, out))))

    figures = {"levels": DEPTH, "launches": DEPTH + 2}
    yield Case("DynamicTree", functools.partial(grow, tree, levels, out), check, figures)


def search_cases(batch_size: int, shape: Shape, options: argparse.Namespace) -> Iterator[Case]:
    """DART's search at its paper's sizes, with its store on the GPU and in pinned host memory, and without n-grams."""
    path = options.store or options.folder / f"{shape.vocab_size}.safetensors"
    if not path.is_file() and options.store is None:
        write_store(path, shape.vocab_size)
    store = open_store(path, key="--store")
    vocab_size, size = store.header.vocab_size, (batch_size, DEPTH, CANDIDATES)
    log_probs, tokens = candidates(vocab_size, *size)
    # Half of them frequent tokens, so that lookups find something.
    tokens[..., ::2] = torch.rand(size, device=DEVICE).argsort(-1)[..., ::2] * 7 % vocab_size
    contexts = torch.randint(min(100, vocab_size), (batch_size, 4), device=DEVICE)
    out = empty_tree(batch_size, options.nodes)
    given = {"log_probs": log_probs, "tokens": tokens, "contexts": contexts, "out": out}
    settings = {"num_nodes": options.nodes, "beam_width": BEAM_WIDTH, "scoring": Scoring()}
    sizes = {"depth": DEPTH, "top_k": CANDIDATES, "max_num_reqs": batch_size, "device": torch.device(DEVICE)}
    for placement in ("gpu", "host", None) if DEVICE == "cuda" else ("host", None):
        placed = None if placement is None else place(store, placement, torch.device(DEVICE))
        search = ContinuityTree(**settings, **sizes, store=placed)

        def check(search: ContinuityTree = search, twin: Any = None if placement is None else store) -> bool:
            search.build(**given)
            expected = on_cpu(given)
            naive_builders.continuity(**expected, **settings, store=twin)
            found, trees = on_cpu(out), expected["out"]
            is_close = torch.allclose(found.log_probs, trees.log_probs, rtol=1e-5, atol=1e-5)
            return is_close and all(same([found[i]], [trees[i]]) for i in (0, 1, 3))

        name = "continuity" if placement is None else f"continuity, n-grams on the {placement}"
        figures = {"bound_us": SEARCH_BOUND_US.get(batch_size), "ngrams": store.header.num_nodes if placed else 0}
        yield Case(name, functools.partial(search.build, **given), check, figures)


def head_cases(batch_size: int, shape: Shape, options: argparse.Namespace) -> Iterator[Case]:
    """A draft model's dense head and FlashHead: a chain's first choice, and a tree's candidates."""
    small = draft_model_shape(shape)
    assets = made_up_clusters(small.vocab_size, small.hidden_size)
    weight = torch.randn(small.vocab_size, small.hidden_size, device=DEVICE, dtype=torch.bfloat16)
    hidden = torch.randn(batch_size, small.hidden_size, device=DEVICE, dtype=torch.bfloat16)

    def dense_candidates() -> torch.Tensor:
        logits = hidden @ weight.t()
        return logits.topk(TOP_K, dim=-1).values.float() - logits.float().logsumexp(dim=-1, keepdim=True)

    yield Case("dense, choice", lambda: (hidden @ weight.t()).argmax(dim=-1), None, {})
    yield Case("dense, candidates", dense_candidates, None, {})
    most = len(assets.members)
    for probes in options.probes or sorted({min(256, most), default_probes(most)}):
        for grouped in (False, True):
            settings = {"num_probes": probes, "grouped": grouped, "top_k": TOP_K}
            head = FlashHead(weight, assets, max_rows=batch_size, **settings)
            name = f"flashhead, {probes} probes" + (", grouped" if grouped else "")
            for call, run in (("choice", head.best_token), ("candidates", head.top_tokens)):
                yield Case(f"{name}, {call}", functools.partial(run, hidden), None, {"beside": f"dense, {call}"})


def noise_cases(batch_size: int, shape: Shape, options: argparse.Namespace) -> Iterator[Case]:
    """The target's noise on a drafter's logits: all positions of a block, and one level of EAGLE-3's beams."""
    temperature = torch.full((batch_size,), 0.8, device=DEVICE)
    seeds = torch.randint(2**62, (batch_size,), device=DEVICE)
    slots = torch.arange(batch_size, device=DEVICE)
    blocks = ("dflash", BLOCK_POSITIONS, shape.vocab_size), ("eagle3", TOP_K, shape.draft_vocab_size)
    for drafter, per_request, vocab_size in blocks:
        num_rows = batch_size * per_request
        logits = torch.randn(num_rows, vocab_size, device=DEVICE, dtype=torch.bfloat16)
        offsets = None
        if vocab_size != shape.vocab_size:
            offsets = torch.randint(shape.vocab_size - vocab_size, (vocab_size,), device=DEVICE).sort().values
        positions = torch.arange(num_rows, device=DEVICE)
        keys = noise.NoiseKeys(slots, positions, temperature, seeds, offsets=offsets)
        run = functools.partial(noise.add_target_noise, keys, logits)
        twin = functools.partial(noise.add_target_noise_naive, keys, logits)
        # The twin takes the logarithm more finely than the series of vLLM's sampler, which is good to 6e-7.
        check = lambda run=run, twin=twin: torch.allclose(run(), twin(), rtol=1e-5, atol=1e-4)  # noqa: E731
        figures = {"rows": num_rows, "vocabulary": vocab_size, "bytes": num_rows * vocab_size * 6}
        yield Case(f"add_target_noise {drafter}", run, check, figures)


def attention_cases(batch_size: int, shape: Shape, options: argparse.Namespace) -> Iterator[Case]:
    """One layer's attention of the trees' rows to each other, merged into a pass of FlashAttention over the prefix."""
    width, context = options.nodes + 1, 2048
    step = make_step(batch_size, context, options)
    masks = rows_arguments(step)
    rows.prepare_rows(rows.StepRows(**masks))
    blocks, size = -(-(context + width) // BLOCK_SIZE), shape.head_dim
    like = {"device": DEVICE, "dtype": torch.bfloat16}
    cache = torch.randn(batch_size * blocks, BLOCK_SIZE, shape.num_kv_heads, 2 * size, **like).transpose(1, 2)
    table = torch.randperm(len(cache), device=DEVICE).view(batch_size, blocks).int()
    prefix_len = torch.full_like(step.seq_lens, context)  # kernels of a simulated GPU write none
    query, out = (torch.randn(batch_size * width, shape.num_heads, size, **like) for _ in range(2))
    lse = torch.randn(shape.num_heads, batch_size * width, device=DEVICE)
    given = (
        QueryRows(query, out, lse, step.query_start_loc, masks["row_mask"], batch_size, width),
        PagedTail(cache, table, prefix_len, step.seq_lens),
        Softmax(size**-0.5),
    )

    def check() -> bool:
        expected = on_cpu(given)
        tail_attention(*given)
        naive_verify.tail_attention(*expected)
        # Within bfloat16's rounding of weights and results: 2^-9 each, and sums of some dozens of values.
        return torch.allclose(out.cpu().float(), expected[0].out.float(), rtol=2e-2, atol=1e-2)

    yield Case("tail_attention", functools.partial(tail_attention, *given), check, {"rows": batch_size * width})


CASES: dict[str, Callable[[int, Shape, argparse.Namespace], Iterator[Case]]] = {
    "attention": attention_cases,
    "commit": commit_cases,
    "verify": verify_cases,
    "build": build_cases,
    "search": search_cases,
    "head": head_cases,
    "noise": noise_cases,
}

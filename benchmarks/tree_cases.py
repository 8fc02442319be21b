"""What ``tree_kernels.py`` times, beside the attention: made-up batches, the launches, and the plain PyTorch truth."""

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from shapes import Shape

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU the checks can run, in Triton's interpreter
BLOCK_SIZE = 16
DEPTH, TOP_K, BLOCK_POSITIONS = 8, 10, 7  # EAGLE-3's trees; drafted positions of a DFlash block


class Case(NamedTuple):
    """One thing to time.

    Attributes:
        name: in the document.
        run: the launches; captured in a CUDA graph, so it neither waits nor depends on the host. None where the case
            cannot be had here; ``figures`` says why.
        check: runs it once more and compares with the truth; None where there is no truth.
        figures: about the case, for the document.
    """

    name: str
    run: Callable[[], Any] | None
    check: Callable[[], bool] | None
    figures: dict[str, Any]


class Step(NamedTuple):
    """A batch in which every request verifies a tree; shapes as in ``vllm_crossspec.verify.rows``."""

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


def same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Whether all tensors are equal, wherever they are."""
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(found, expected, strict=True))


# -- batches -------------------------------------------------------------------------------------------------------


def tree_parents(nodes: int, path: int, draw: random.Random) -> tuple[list[int], list[int]]:
    """Parent rows of a random tree, and the rows of a path in it of which none is where a chain's would be."""
    stride = nodes // path
    rows = [0, *(k * stride for k in range(1, path + 1))]
    above = dict(zip(rows[1:], rows, strict=False))
    parents, depths = [], [0]
    for row in range(1, nodes + 1):
        parent = above.get(row)
        if parent is None:
            parent = draw.choice([r for r, depth in enumerate(depths) if depth < DEPTH])
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return parents, rows


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


def on_cpu(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same arguments in the host's memory."""
    return {name: value.cpu().clone() if torch.is_tensor(value) else value for name, value in arguments.items()}


# -- cases ---------------------------------------------------------------------------------------------------------


def commit_cases(batch_size: int, shape: Shape, options: argparse.Namespace) -> Iterator[Case]:
    """The accepted path's K and V of all layers, its states and its ids moved to the front."""
    from vllm_crossspec.kv_compaction import kernels, naive
    from vllm_crossspec.types import AcceptedPaths

    step, width = make_step(batch_size, 128, options), options.nodes + 1
    paths = AcceptedPaths(step.query_start_loc, step.cu_num_logits, step.num_sampled, step.path)
    paths_on_cpu = AcceptedPaths(*(x.cpu() for x in paths))
    num_blocks = batch_size * (width // BLOCK_SIZE + 2)
    content = 2 * shape.head_dim
    pool = torch.randn(
        shape.num_layers, num_blocks, BLOCK_SIZE, shape.num_kv_heads, content, device=DEVICE, dtype=torch.bfloat16
    )
    caches = [(layer.transpose(1, 2), 0) for layer in pool]
    slots = torch.randperm(num_blocks * BLOCK_SIZE, device=DEVICE)[None, : batch_size * width].contiguous()
    layers = kernels.make_kv_layers(caches)

    def compact() -> None:
        kernels.compact_kv(layers, paths, slots)

    def check_compact() -> bool:
        pool.normal_()
        sample = {i: pool[i].cpu().clone() for i in (0, shape.num_layers - 1)}
        compact()
        naive_caches = [(layer.transpose(1, 2), 0) for layer in sample.values()]
        naive.compact_kv(naive_caches, paths_on_cpu, slots.cpu())
        return same([pool[i] for i in sample], list(sample.values()))

    num_bytes = 2 * batch_size * options.path * shape.num_layers * shape.num_kv_heads * content * 2
    yield Case("compact_kv", compact, check_compact, {"layers": shape.num_layers, "bytes": num_bytes, "aim_us": 20})

    states = [torch.randn(batch_size * width, shape.hidden_size, device=DEVICE, dtype=torch.bfloat16) for _ in range(4)]

    def check_rows() -> bool:
        expected = [t.cpu().clone() for t in states]
        kernels.compact_rows(states, paths)
        naive.compact_rows(expected, paths_on_cpu)
        return same(states, expected)

    yield Case("compact_rows", lambda: kernels.compact_rows(states, paths), check_rows, {"tensors": len(states)})

    rows = {
        "positions": step.positions,
        "input_ids": torch.arange(batch_size * width, dtype=torch.int32, device=DEVICE),
        "seq_lens": step.seq_lens,
    }

    def check_restore() -> bool:
        expected = on_cpu(rows)
        kernels.restore_rows(paths, **rows)
        naive.restore_rows(paths_on_cpu, **expected)
        return same([rows["positions"], rows["input_ids"]], [expected["positions"], expected["input_ids"]])

    yield Case("restore_rows", lambda: kernels.restore_rows(paths, **rows), check_restore, {})


def verify_cases(batch_size: int, shape: Shape, options: argparse.Namespace) -> Iterator[Case]:
    """Positions and masks of the rows before the target's pass, the walk after it."""
    from vllm_crossspec.verify import naive, rows, walk

    step, width = make_step(batch_size, 2048, options), options.nodes + 1
    num_tokens = batch_size * width

    def int32(*size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, device=DEVICE)

    prepared = {
        **{k: getattr(step, k) for k in Step._fields[:8] if k != "cu_num_logits"},
        "cu_rows": step.cu_num_logits,
        "row_mask": int32(num_tokens, -(-width // 32)),
        "prefix_len": int32(batch_size),
        "num_live": int32(batch_size),
        "max_depth": DEPTH,
    }
    written = ("positions", "row_mask", "prefix_len", "num_live")

    def check_rows() -> bool:
        expected = on_cpu(prepared)
        rows.prepare_rows(**prepared)
        naive.prepare_rows(**expected)
        return same([prepared[k] for k in written], [expected[k] for k in written])

    yield Case("prepare_rows", lambda: rows.prepare_rows(**prepared), check_rows, {})

    # Every row's token is its own; along the path the target samples the next row's, elsewhere what nobody drafted.
    tokens = torch.arange(num_tokens, device=DEVICE)
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
        "out_tokens": torch.zeros(batch_size, DEPTH + 1, dtype=torch.int64, device=DEVICE),
        "path": int32(batch_size, DEPTH + 1),
        "num_sampled": int32(batch_size),
        "num_rejected": int32(batch_size),
        "cu_rows": step.cu_num_logits,
        "seq_lens": step.seq_lens,
        "prefill_len": int32(batch_size),
        "max_depth": DEPTH,
    }

    def check_walk() -> bool:
        walk.walk_tree(**walked)
        expected = on_cpu(walked)
        naive.walk_tree(**expected)
        names = ("out_tokens", "path", "num_sampled", "num_rejected")
        right_path = same([walked["path"], walked["num_sampled"]], [step.path, step.num_sampled])
        return right_path and same([walked[k] for k in names], [expected[k] for k in names])

    yield Case("walk_tree", lambda: walk.walk_tree(**walked), check_walk, {})


def build_cases(batch_size: int, shape: Shape, options: argparse.Namespace) -> Iterator[Case]:
    """Trees from a parallel drafter's marginals, and from an autoregressive drafter's levels."""
    from vllm_crossspec.tree import best_first, dynamic, naive
    from vllm_crossspec.types import TokenTree

    nodes = options.nodes

    def candidates(*size: int) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.randn(*size, device=DEVICE).mul_(3).log_softmax(-1).sort(-1, descending=True).values
        return scores, torch.randint(shape.vocab_size, size, device=DEVICE)

    def empty(device: str = DEVICE) -> TokenTree:
        def zeros(*size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return TokenTree(
            tokens=zeros(batch_size, nodes, dtype=torch.int64),
            parents=zeros(batch_size, nodes, dtype=torch.int32),
            log_probs=zeros(batch_size, nodes, dtype=torch.float32),
            sizes=zeros(batch_size, dtype=torch.int32),
        )

    def built(module: Any, inputs: Sequence[torch.Tensor], out: TokenTree) -> TokenTree:
        module.best_first(log_probs=inputs[0], tokens=inputs[1], num_nodes=nodes, out=out)
        return out

    marginals, out = candidates(batch_size, BLOCK_POSITIONS, nodes), empty()

    def check_best() -> bool:
        return same(built(best_first, marginals, out), built(naive, [t.cpu() for t in marginals], empty("cpu")))

    figures = {"positions": BLOCK_POSITIONS, "candidates": nodes}
    yield Case("best_first", lambda: built(best_first, marginals, out), check_best, figures)

    levels = [candidates(batch_size, TOP_K), *(candidates(batch_size, TOP_K, TOP_K) for _ in range(DEPTH - 1))]
    sizes = {"num_nodes": nodes, "depth": DEPTH, "top_k": TOP_K, "max_num_reqs": batch_size}

    def grow(tree: Any, inputs: Sequence[Sequence[torch.Tensor]], into: TokenTree) -> TokenTree:
        tree.start(*inputs[0])
        for level, scores in enumerate(inputs[1:], start=2):
            tree.expand(level, *scores)
        tree.finish(into)
        return into

    tree = dynamic.DynamicTree(**sizes, device=torch.device(DEVICE))

    def check_dynamic() -> bool:
        expected = naive.DynamicTree(**sizes, device=torch.device("cpu"))
        inputs = [[t.cpu() for t in level] for level in levels]
        return same(grow(tree, levels, out), grow(expected, inputs, empty("cpu")))

    figures = {"levels": DEPTH, "launches": DEPTH + 2}
    yield Case("DynamicTree", lambda: grow(tree, levels, out), check_dynamic, figures)


def noise_cases(batch_size: int, shape: Shape, options: argparse.Namespace) -> Iterator[Case]:
    """The target's noise on a drafter's logits: all positions of a block, and one level of EAGLE-3's beams."""
    from vllm_crossspec.engine import noise

    temperature = torch.full((batch_size,), 0.8, device=DEVICE)
    seeds = torch.randint(2**62, (batch_size,), device=DEVICE)
    blocks = ("dflash", BLOCK_POSITIONS, shape.vocab_size), ("eagle3", TOP_K, shape.draft_vocab_size)
    for drafter, rows_per_request, vocab_size in blocks:
        rows = batch_size * rows_per_request
        logits = torch.randn(rows, vocab_size, device=DEVICE, dtype=torch.bfloat16)
        offsets = None
        if vocab_size != shape.vocab_size:
            offsets = torch.randint(shape.vocab_size - vocab_size, (vocab_size,), device=DEVICE).sort().values
        slots = torch.arange(batch_size, device=DEVICE)
        positions = torch.arange(rows, device=DEVICE)
        keys = {"positions": positions, "temperature": temperature, "seeds": seeds}

        def run(logits=logits, offsets=offsets, slots=slots, keys=keys) -> torch.Tensor:
            return noise.add_target_noise(logits, offsets=offsets, idx_mapping=slots, **keys)

        def check(run=run, logits=logits, offsets=offsets, slots=slots, keys=keys, n=rows_per_request) -> bool:
            expected = noise.add_target_noise_naive(logits, offsets, slots.repeat_interleave(n), **keys)
            # The twin takes the logarithm more finely than the series of vLLM's sampler, which is good to 6e-7.
            return torch.allclose(run(), expected, rtol=1e-5, atol=1e-4)

        figures = {"rows": rows, "vocabulary": vocab_size, "bytes": rows * vocab_size * 6}
        yield Case(f"add_target_noise {drafter}", run, check, figures)

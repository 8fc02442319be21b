"""The kernels that commit an accepted path against their naive twins, over odd shapes."""

import contextlib
import random

import pytest
import torch
from hopper import compile_in_subprocess
from launches import record_launches

from vllm_crossspec.trees.commit import kernels, naive
from vllm_crossspec.types import AcceptedPaths

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POISON = -7777


def int32(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def make_step(seed, max_depth, num_nodes, num_reqs=6):
    """Requests with random paths, among them none accepted, a path in place, no drafts, a chunk of a prompt."""
    rng = random.Random(seed)
    query, logits, lengths, paths, seq_lens = [0], [0], [], [], []
    for request in range(num_reqs):
        num_drafts = 0 if request == 1 else rng.randint(1, num_nodes)
        accepted = rng.randint(0, min(max_depth, num_drafts)) if request != 2 else 0
        path = [0, *sorted(rng.sample(range(1, num_drafts + 1), accepted))]
        if request == 3:
            path = list(range(len(path)))  # nothing to move
        in_prompt = request == 4
        query.append(query[-1] + num_drafts + 1 + (5 if in_prompt else 0))
        logits.append(logits[-1] + num_drafts + 1)
        lengths.append(0 if in_prompt else len(path))
        # What lies behind a path is whatever an earlier step left there.
        paths.append(path + [POISON] * (max_depth + 1 - len(path)))
        seq_lens.append(rng.randint(1, 300) + num_drafts)
    # As vLLM pads it: more starts than requests.
    return AcceptedPaths(int32([*query, query[-1]]), int32(logits), int32(lengths), int32(paths)), int32(seq_lens)


SHAPES = [(1, 1), (3, 7), (8, 60), (16, 60), (17, 130), (33, 255), (255, 255)]
IDS = [f"depth{depth}-nodes{nodes}" for depth, nodes in SHAPES]


def make_caches(step, layout, dtype, block_size, heads, head_size, generator):
    """Four layers in two groups, two of which share one cache; slots scattered over blocks, some rows without."""
    rows = int(step.query_start_loc[-1])
    blocks = -(-rows // block_size) + 3
    caches = []
    for group in (0, 1, 1):
        if layout == "tokens inside":  # keys as vLLM's kernel for CPUs has them
            cache = torch.randn(blocks, heads, 2 * head_size, block_size, generator=generator).transpose(2, 3)
        elif layout == "heads outside":
            cache = torch.randn(blocks, heads, block_size, 2 * head_size, generator=generator)
        else:
            cache = torch.randn(blocks, block_size, heads, 2 * head_size, generator=generator).transpose(1, 2)
        caches.append((cache.to(DEVICE, dtype), group))
    caches.append(caches[0])
    slots = torch.stack([torch.randperm(blocks * block_size, generator=generator)[:rows] for _ in range(2)]).to(DEVICE)
    slots[0, ::29] = -1
    return caches, slots


@pytest.mark.parametrize(("max_depth", "num_nodes"), SHAPES, ids=IDS)
@pytest.mark.parametrize(
    ("layout", "dtype", "block_size", "heads", "head_size"),
    [
        ("heads outside", torch.bfloat16, 16, 2, 64),
        ("heads inside", torch.float32, 32, 3, 80),
        ("heads outside", torch.float16, 7, 1, 5),
        ("heads inside", torch.uint8, 16, 2, 128),
        ("tokens inside", torch.float32, 32, 2, 40),
        ("tokens inside", torch.bfloat16, 32, 2, 13),
        ("tokens inside", torch.uint8, 32, 2, 32),
    ],
)
def test_kv_equals_naive(max_depth, num_nodes, layout, dtype, block_size, heads, head_size):
    generator = torch.Generator().manual_seed(num_nodes)
    step, _ = make_step(max_depth, max_depth, num_nodes)
    caches, slots = make_caches(step, layout, dtype, block_size, heads, head_size, generator)
    # Strides survive: a clone of a transposed cache is transposed as well.
    expected = {cache.data_ptr(): cache.clone() for cache, _ in caches}
    copies = [(expected[cache.data_ptr()], group) for cache, group in caches]
    layers = kernels.make_kv_layers(caches)
    word, size = layers.word.primitive_bitwidth // 8, caches[0][0].element_size()
    assert layers.pointers.shape == (3,) and layers.content * word == 2 * head_size * size
    assert word == (size if layout == "tokens inside" else 4)
    naive.compact_kv(copies, step, slots)
    kernels.compact_kv(layers, step, slots)
    for (cache, _), (copy, _) in zip(caches, copies, strict=True):
        assert torch.equal(cache, copy)


def test_kv_moves_only_what_is_not_in_place():
    step = AcceptedPaths(int32([0, 5]), int32([0, 5]), int32([3]), int32([[0, 1, 4]]))
    cache = torch.arange(5.0, device=DEVICE).view(5, 1, 1, 1).expand(5, 1, 1, 2).contiguous()
    slots = torch.arange(5, device=DEVICE)[None]
    kernels.compact_kv(kernels.make_kv_layers([(cache, 0)]), step, slots)
    assert cache[:, 0, 0, 0].tolist() == [0, 1, 4, 3, 4]


def test_a_cache_that_cannot_be_moved_is_refused():
    good = torch.zeros(4, 2, 16, 128)
    with pytest.raises(ValueError, match="no attention layer"):
        kernels.make_kv_layers([])
    with pytest.raises(ValueError, match="same KV heads"):
        kernels.make_kv_layers([(good, 0), (torch.zeros(4, 1, 16, 128), 0)])
    with pytest.raises(ValueError, match="whole words"):
        kernels.make_kv_layers([(torch.zeros(4, 2, 16, 5, dtype=torch.bfloat16), 0)])


@pytest.mark.parametrize(("layout_words", "alignment"), [(128, 4), (6, 2), (5, 1)])
def test_alignment_of_copies(layout_words, alignment):
    cache = torch.zeros(4, 2, 16, layout_words)
    assert kernels.make_kv_layers([(cache, 0)]).alignment == alignment


@pytest.mark.parametrize(("max_depth", "num_nodes"), SHAPES, ids=IDS)
@pytest.mark.parametrize(("count", "width", "dtype"), [(1, 300, torch.float32), (4, 64, torch.bfloat16), (8, 1, None)])
def test_rows_equal_naive(max_depth, num_nodes, count, width, dtype):
    step, _ = make_step(max_depth, max_depth, num_nodes)
    rows = int(step.query_start_loc[-1]) + 3
    generator = torch.Generator().manual_seed(num_nodes)
    wide = torch.randn(rows, width * count, generator=generator).to(DEVICE, dtype or torch.float16)
    # Slices of one buffer: rows are contiguous, the tensors are not.
    found = list(wide.split(width, dim=1))
    expected = [tensor.clone() for tensor in found]
    naive.compact_rows(expected, step)
    kernels.compact_rows(found, step)
    for tensor, copy in zip(found, expected, strict=True):
        assert torch.equal(tensor, copy)


BUFFER = torch.zeros(9, 24)


@pytest.mark.parametrize(
    ("tensors", "lie_apart"),
    [
        ([BUFFER[:, :8], BUFFER[:, 8:16], BUFFER[:, 16:]], True),
        ([BUFFER[:, 16:], BUFFER[:, :8]], True),
        ([BUFFER[:4, :8], BUFFER[4:, :8]], True),
        ([BUFFER[:4, :8], BUFFER[4:, 8:16], BUFFER.clone()[:, :8]], True),
        ([BUFFER[:, :8], BUFFER[:, :8]], False),
        ([BUFFER[:, :8], BUFFER.clone()[:, :8], BUFFER[:, 7:15]], False),
        ([BUFFER[:5, :8], BUFFER[4:, :8]], False),
        ([BUFFER.view(27, 8), BUFFER[:, 8:16]], False),
    ],
)
def test_states_that_share_memory_are_not_moved_side_by_side(tensors, lie_apart, monkeypatch):
    launched = record_launches(monkeypatch)
    nothing = AcceptedPaths(int32([0, 0]), int32([0, 0]), int32([0]), int32([[0]]))
    with contextlib.nullcontext() if lie_apart else pytest.raises(AssertionError, match="share memory"):
        kernels.compact_rows(tensors, nothing)
    assert launched == ["_compact_rows_kernel"] * lie_apart


@pytest.mark.parametrize(("max_depth", "num_nodes"), SHAPES, ids=IDS)
def test_restoring_equals_naive(max_depth, num_nodes):
    step, seq_lens = make_step(max_depth, max_depth, num_nodes)
    rows = int(step.query_start_loc[-1]) + 3
    results = []
    for implementation in (naive, kernels):
        positions = torch.full((rows,), POISON, dtype=torch.int64, device=DEVICE)
        input_ids = torch.arange(rows, dtype=torch.int32, device=DEVICE)
        implementation.restore_rows(step, positions=positions, input_ids=input_ids, seq_lens=seq_lens)
        results.append((positions, input_ids))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_restoring_by_hand():
    positions = torch.tensor([10, 11, 20, 21, 21, 22, 99], device=DEVICE)
    input_ids = int32([1, 2, 3, 4, 5, 6, 7])
    kernels.restore_rows(
        AcceptedPaths(int32([0, 2, 6]), int32([0, 1, 5]), int32([1, 3]), int32([[0, 0, 0], [0, 2, 3]])),
        positions=positions,
        input_ids=input_ids,
        seq_lens=int32([12, 24]),
    )
    assert positions.tolist() == [10, 11, 20, 21, 22, 23, 99]
    assert input_ids.tolist() == [1, 2, 3, 5, 6, 6, 7]


COMPILE_FOR_HOPPER = """
import hopper
compiled = hopper.compile_only()
import torch
import test_commit_kernels as cases

step, seq_lens = cases.make_step(0, 8, 60)
generator = torch.Generator()
for dtype, head_size in [(torch.bfloat16, 128), (torch.float32, 80), (torch.uint8, 128), (torch.bfloat16, 5)]:
    caches, slots = cases.make_caches(step, "heads outside", dtype, 16, 2, head_size, generator)
    cases.kernels.compact_kv(cases.kernels.make_kv_layers(caches), step, slots)
    states = [torch.zeros(400, 16 * head_size, dtype=dtype) for _ in range(4)]
    cases.kernels.compact_rows(states, step)
rows = torch.zeros(400, dtype=torch.int64)
cases.kernels.restore_rows(step, positions=rows, input_ids=rows.to(torch.int32), seq_lens=seq_lens)
assert set(compiled) == {"_compact_kv_kernel", "_compact_rows_kernel", "_restore_rows_kernel"}, set(compiled)
assert any("ld.global.v4" in code["ptx"] for code in compiled["_compact_kv_kernel"].values())
"""


def test_kernels_compile_for_hopper(tmp_path):
    compile_in_subprocess(COMPILE_FOR_HOPPER, tmp_path)

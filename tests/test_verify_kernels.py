"""The kernels of verification against their naive twins, over odd shapes, with poisoned outputs."""

import random

import pytest
import torch
from hopper import compile_in_subprocess
from steps import DEVICE, KINDS, POISON, Step, int32, make_step, poisoned, prepare, random_parents

from vllm_crossspec.trees.verify import naive, rows, walk
from vllm_crossspec.trees.verify.penalties import Penalties, tree_penalties

SHAPES = [(1, 1), (7, 3), (31, 5), (32, 32), (60, 8), (130, 10), (255, 12)]


@pytest.mark.nightly(keep=12)
@pytest.mark.parametrize(("num_nodes", "max_depth"), SHAPES)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_rows_equal_naive(num_nodes, max_depth, index_dtype):
    for seed in range(3):
        step = make_step(seed, num_nodes, max_depth, index_dtype=index_dtype)
        expected, found = (prepare(which, step, max_depth) for which in (naive, rows))
        for name, value in expected.items():
            assert torch.equal(value, found[name]), name


@pytest.mark.nightly(keep=12)
@pytest.mark.parametrize(("num_nodes", "max_depth"), [*SHAPES[:5], (100, 9)])
@pytest.mark.parametrize("num_soft", [1, 16, 32, 70])
def test_rows_with_contemplate_rows_equal_naive(num_nodes, max_depth, num_soft):
    for seed in range(2):
        step = make_step(seed, num_nodes, max_depth, contemplates=True)
        options = {"contemplates": True, "num_soft": num_soft}
        expected, found = (prepare(which, step, max_depth, **options) for which in (naive, rows))
        for name, value in expected.items():
            assert torch.equal(value, found[name]), name


@pytest.mark.parametrize("num_nodes", [1, 12, 60])
def test_ordinary_rows_are_those_of_a_step_that_does_not_contemplate(num_nodes):
    """The same trees, sizes and prompts with and without contemplate rows: same positions, same masks, no soft bit."""
    wide = make_step(4, num_nodes, min(num_nodes, 5), ("whole", "small", "empty", "placeholder"), contemplates=True)
    counts = wide.cu_num_logits.diff() // 2
    starts = int32([0, *counts.cumsum(0).tolist()])
    kept = torch.cat(
        [
            begin + torch.arange(count, device=DEVICE)
            for begin, count in zip(wide.query_start_loc.tolist(), counts.tolist(), strict=False)
        ]
    )
    narrow = wide._replace(
        query_start_loc=starts,
        cu_num_logits=starts,
        seq_lens=wide.seq_lens - counts,
        positions=wide.positions[kept],
    )
    with_rows = prepare(rows, wide, 5, contemplates=True, num_soft=16)
    without = prepare(rows, narrow, 5)
    words = without["row_mask"].shape[1]
    for name in ("num_live", "prefix_len"):
        assert torch.equal(with_rows[name], without[name])
    assert torch.equal(with_rows["positions"][kept], without["positions"])
    assert torch.equal(with_rows["row_mask"][kept, :words], without["row_mask"][: kept.shape[0]])
    assert not with_rows["row_mask"][kept, words:].any()


def one_request(*, parents, sizes, num_logits, seq_len, prefill_len, before=0):
    """A request in slot 1 of 3, its logits rows after ``before`` rows of another kind."""
    table = int32([[0] * len(parents), parents, [0] * len(parents)])
    return Step(
        int32([1]),
        int32([0, before + num_logits]),
        int32([0, num_logits]),
        int32([seq_len]),
        int32([0, prefill_len, 0]),
        table,
        int32([0, sizes, 0]),
        torch.arange(seq_len - num_logits - before, seq_len, device=DEVICE),
    )


def test_rows_of_a_tree_by_hand():
    # Row 0 has children 1 and 2, row 2 has child 3, row 1 has child 4; row 5 is past the tree's size.
    step = one_request(parents=[0, 0, 2, 1, 4], sizes=4, num_logits=6, seq_len=26, prefill_len=20)
    result = prepare(rows, step, max_depth=3)
    assert result["num_live"][0] == 4 and result["prefix_len"][0] == 20
    assert result["positions"].tolist() == [20, 21, 21, 22, 22, 21]
    assert result["row_mask"][:6, 0].tolist() == [0b1, 0b11, 0b101, 0b1101, 0b10011, 0b100001]
    assert (result["row_mask"][6:] == POISON).all() and (result["num_live"][1:] == POISON).all()


def test_contemplate_rows_by_hand():
    # Three nodes, the third of which is dead: rows 4 to 7 belong to rows 0 to 3, row 8 to none.
    tree = {"parents": [0, 0, 1], "sizes": 2, "num_logits": 9, "seq_len": 29}
    result = prepare(rows, one_request(**tree, prefill_len=20), max_depth=2, contemplates=True, num_soft=33)
    assert result["num_live"][0] == 2 and result["prefix_len"][0] == 20
    assert result["positions"].tolist() == [20, 21, 21, 21, 21, 22, 22, 21, 21]
    ordinary = [0b1, 0b11, 0b101, 0b1001]
    contemplate = [0b10001, 0b100011, 0b1000101, 0b10000001, 0b100000001]
    assert result["row_mask"][:9, 0].tolist() == ordinary + contemplate
    assert result["row_mask"][:9, 1:].tolist() == [[0, 0]] * 4 + [[-1, 1]] * 5
    # Inside the prompt: a chain, and behind each of its rows a contemplate row.
    result = prepare(rows, one_request(**tree, prefill_len=21), max_depth=2, contemplates=True, num_soft=33)
    assert result["num_live"][0] == 0 and result["prefix_len"][0] == 20
    assert result["positions"].tolist() == [20, 21, 22, 23, 21, 22, 23, 24, 21]
    contemplate = [0b10001, 0b100011, 0b1000111, 0b10001111, 0b100000001]
    assert result["row_mask"][:9, 0].tolist() == [0b1, 0b11, 0b111, 0b1111, *contemplate]
    # One draft token is the root's contemplate row.
    step = one_request(parents=[0], sizes=1, num_logits=2, seq_len=22, prefill_len=20)
    result = prepare(rows, step, max_depth=1, contemplates=True, num_soft=16)
    assert result["positions"].tolist() == [20, 21] and result["num_live"][0] == 0
    assert result["row_mask"][:2].tolist() == [[0b1, 0], [0b11, 0xFFFF]]


def test_placeholder_drafts_are_a_causal_chain():
    step = one_request(parents=[0] * 40, sizes=40, num_logits=41, seq_len=50, prefill_len=10)
    result = prepare(rows, step, max_depth=1)
    assert result["num_live"][0] == 0 and result["prefix_len"][0] == 9
    assert torch.equal(result["positions"], torch.arange(9, 50, device=DEVICE))
    seen = naive.unpack_bits(result["row_mask"][:41])
    assert torch.equal(seen, torch.ones(41, 64, device=DEVICE).tril().bool())


def test_a_chain_as_deep_as_it_is_long():
    step = one_request(parents=list(range(255)), sizes=255, num_logits=256, seq_len=300, prefill_len=3)
    result = prepare(rows, step, max_depth=255)
    assert torch.equal(result["positions"], torch.arange(44, 300, device=DEVICE))
    assert torch.equal(naive.unpack_bits(result["row_mask"][:256]), torch.ones(256, 256, device=DEVICE).tril().bool())


def walk_step(implementation, step, num_live, sampled, node_tokens, max_depth, width):
    num_reqs = step.idx_mapping.shape[0]
    outputs = {
        "out_tokens": poisoned(num_reqs, width, dtype=torch.int64),
        "path": poisoned(num_reqs + 2, max_depth + 1),
        "num_sampled": poisoned(num_reqs),
        "num_rejected": poisoned(num_reqs),
    }
    given = walk.Walk(
        idx_mapping=step.idx_mapping,
        cu_num_logits=step.cu_num_logits,
        num_live=num_live,
        parents=step.parents,
        sampled=sampled,
        node_tokens=node_tokens,
        cu_rows=2 * step.cu_num_logits,
        seq_lens=step.seq_lens,
        prefill_len=step.prefill_len,
        max_depth=max_depth,
        **outputs,
    )
    implementation.walk_tree(given)
    return outputs


@pytest.mark.parametrize("num_reqs", [1, 3, 64])
def test_last_rows_equal_naive(num_reqs):
    generator = torch.Generator().manual_seed(num_reqs)
    num_logits = torch.randint(0, 62, (num_reqs + 1,), generator=generator, dtype=torch.int32)
    num_logits[0] = 0
    found, expected = poisoned(2, num_reqs + 2, dtype=torch.int64)
    for implementation, out in ((walk, found), (naive, expected)):
        implementation.last_rows(
            cu_num_logits=num_logits.cumsum(0).to(device=DEVICE, dtype=torch.int32),
            num_sampled=torch.arange(num_reqs + 1, dtype=torch.int32, device=DEVICE) % 10,
            path=torch.arange(10 * num_reqs + 10, dtype=torch.int32, device=DEVICE).view(-1, 10) % 61,
            rows=out,
        )
    assert torch.equal(found, expected) and (found[:num_reqs] >= 0).all() and (found[num_reqs:] == POISON).all()


@pytest.mark.parametrize(("num_rows", "num_tokens"), [(1, 1), (61, 200), (2500, 2600)])
def test_gathered_rows_are_indexed_ones(num_rows, num_tokens):
    generator = torch.Generator().manual_seed(num_rows)
    taken = torch.randint(0, num_tokens, (num_rows,), generator=generator).to(DEVICE)
    positions = torch.randint(0, 9999, (num_tokens,), generator=generator).to(DEVICE)
    ids = positions.flip(0).to(torch.int32)
    found = rows.gather_rows(taken, ids, positions)
    assert torch.equal(found[0], ids[taken]) and torch.equal(found[1], positions[taken])


@pytest.mark.parametrize(("num_nodes", "max_depth"), SHAPES)
@pytest.mark.parametrize("token_dtype", [torch.int32, torch.int64])
def test_walk_equals_naive(num_nodes, max_depth, token_dtype):
    lengths = []
    for seed in range(4):
        step = make_step(seed, num_nodes, max_depth)
        num_live = prepare(naive, step, max_depth)["num_live"]
        generator = torch.Generator().manual_seed(seed)
        # Two tokens: most rows have a child that matches, and many have several.
        sampled, drafted = torch.randint(0, 2, (2, int(step.cu_num_logits[-1])), generator=generator).to(DEVICE)
        drafted[torch.rand(drafted.shape, generator=generator).to(DEVICE) < 0.05] = -1
        width = max_depth + 1 + seed
        arguments = (step, num_live, sampled, drafted.to(token_dtype), max_depth, width)
        expected, found = (walk_step(which, *arguments) for which in (naive, walk))
        for name, value in expected.items():
            assert torch.equal(value, found[name]), name
        lengths += expected["num_sampled"].tolist()
    assert 0 in lengths and 1 in lengths
    assert num_nodes == 1 or max(lengths) > 2


def test_walk_by_hand():
    step = one_request(parents=[0, 0, 0, 2, 4], sizes=5, num_logits=6, seq_len=26, prefill_len=20)
    sampled = torch.tensor([7, 9, 8, 9, 6, 5], device=DEVICE)
    drafted = torch.tensor([99, 6, 7, 7, 8, 6], device=DEVICE)

    def result(live, tokens=drafted):
        found = walk_step(walk, step, int32([live]), sampled, tokens, max_depth=3, width=5)
        return found["path"][0].tolist(), found["out_tokens"][0].tolist(), int(found["num_sampled"][0])

    # Rows 2 and 3 both hold the root's 7: the smaller one is taken.
    assert result(live=5) == ([0, 2, 4, 5], [7, 8, 6, 5, 0], 4)
    assert result(live=4) == ([0, 2, 4, 0], [7, 8, 6, 0, 0], 3)
    assert result(live=1) == ([0, 0, 0, 0], [7, 0, 0, 0, 0], 1)
    # A row whose token is negative matches nothing, not even a negative sample.
    invalid = drafted.clone()
    invalid[2] = -1
    assert result(live=5, tokens=invalid)[0] == [0, 3, 0, 0]
    sampled[0] = -1
    assert result(live=5, tokens=invalid) == ([0, 0, 0, 0], [-1, 0, 0, 0, 0], 1)


SLOT_ARGUMENTS = ("repetition", "frequency", "presence", "prompt_bin_mask", "output_bin_counts")


def make_penalties(seed, step, num_live, vocab_size):
    """Arguments of the penalties: few tokens, so that histories repeat; a third of the slots without any penalty."""
    generator = torch.Generator().manual_seed(seed)
    num_slots, num_rows = step.parents.shape[0], int(step.cu_num_logits[-1])
    counts = step.cu_num_logits.diff()
    request = torch.repeat_interleave(torch.arange(counts.shape[0], device=DEVICE), counts)

    def per_slot(values):
        return torch.tensor([rng.choice(values) for _ in range(num_slots)], device=DEVICE)

    def draw(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32).to(DEVICE)

    rng = random.Random(seed)
    return {
        "idx_mapping_per_row": step.idx_mapping[request],
        "token_ids": draw(0, min(12, vocab_size), num_rows),
        "local_pos": (torch.arange(num_rows, device=DEVICE) - step.cu_num_logits[request]).to(torch.int32),
        "live_per_row": num_live[request],
        "parents": step.parents,
        "repetition": per_slot([1.0, 1.0, 1.3, 0.7]),
        "frequency": per_slot([0.0, 0.0, 0.4]),
        "presence": per_slot([0.0, 0.0, -0.3]),
        "prompt_bin_mask": draw(-(2**31), 2**31 - 1, num_slots, -(-vocab_size // 32)) & 0x11111111,
        "output_bin_counts": draw(0, 20, num_slots, vocab_size) // 17,
    }


@pytest.mark.parametrize(("num_nodes", "max_depth"), [(1, 1), (7, 3), (60, 8), (255, 12)])
@pytest.mark.parametrize(("vocab_size", "dtype"), [(300, torch.float32), (31, torch.bfloat16), (8200, torch.float32)])
def test_penalties_equal_naive(num_nodes, max_depth, vocab_size, dtype):
    kinds = tuple(KINDS) if num_nodes < 100 else ("small", "padding", "plain")
    step = make_step(num_nodes + vocab_size, num_nodes, max_depth, kinds)
    num_live = prepare(naive, step, max_depth)["num_live"]
    arguments = make_penalties(num_nodes, step, num_live, vocab_size)
    arguments["idx_mapping_per_row"][3::7] = -1
    generator = torch.Generator().manual_seed(num_nodes)
    logits = torch.randn(int(step.cu_num_logits[-1]), vocab_size, generator=generator).to(DEVICE, dtype)
    logits[0, :3] = float("-inf")
    expected, found = logits.clone(), logits.clone()
    naive.tree_penalties(expected, Penalties(**arguments, max_depth=max_depth))
    tree_penalties(found, Penalties(**arguments, max_depth=max_depth))
    # One rounding of bfloat16, or a fused multiplication and a division of the hardware's precision.
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5 if dtype == torch.float32 else 8e-3)
    free = (arguments["repetition"] == 1) & (arguments["frequency"] == 0) & (arguments["presence"] == 0)
    slots = arguments["idx_mapping_per_row"].long()
    untouched = (slots < 0) | free[slots.clamp(min=0)]
    assert torch.equal(found[untouched], logits[untouched])


def test_penalties_of_a_chain_are_vllms():
    from vllm.v1.worker.gpu.sample.penalties import apply_penalties

    num_nodes, vocab_size = 9, 300
    step = make_step(5, num_nodes, num_nodes, ("whole", "truncated", "plain"))
    step.parents[:] = torch.arange(num_nodes, device=DEVICE)
    num_live = prepare(naive, step, num_nodes)["num_live"]
    arguments = make_penalties(5, step, num_live, vocab_size)
    arguments["repetition"][:], arguments["frequency"][:], arguments["presence"][:] = 1.3, 0.4, 0.2
    logits = torch.randn(int(step.cu_num_logits[-1]), vocab_size, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    expected, found = logits.clone(), logits.clone()
    names = ("idx_mapping_per_row", "token_ids", "local_pos", *SLOT_ARGUMENTS)
    apply_penalties(expected, *(arguments[name] for name in names))
    tree_penalties(found, Penalties(**arguments, max_depth=num_nodes))
    assert torch.equal(found, expected) and not torch.equal(found, logits)
    # A real tree differs: there the chain's history is not a row's own.
    rng = random.Random(0)
    step.parents[:] = int32([random_parents(rng, num_nodes, 3) for _ in range(step.parents.shape[0])])
    tree = logits.clone()
    tree_penalties(tree, Penalties(**arguments, max_depth=num_nodes))
    assert not torch.equal(tree, expected)


def test_penalties_of_a_tree_are_vllms_on_each_path():
    """vLLM's kernel, given each row's path as if it were a chain of its own, says the same."""
    from vllm.v1.worker.gpu.sample.penalties import apply_penalties

    num_nodes, vocab_size = 20, 300
    step = make_step(6, num_nodes, 6, ("whole", "plain"))
    arguments = make_penalties(6, step, prepare(naive, step, 6)["num_live"], vocab_size)
    arguments["repetition"][:], arguments["frequency"][:], arguments["presence"][:] = 1.3, 0.4, 0.2
    logits = torch.randn(int(step.cu_num_logits[-1]), vocab_size, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    found = logits.clone()
    tree_penalties(found, Penalties(**arguments, max_depth=6))
    for index, (slot, row) in enumerate(
        zip(arguments["idx_mapping_per_row"].tolist(), arguments["local_pos"].tolist(), strict=True)
    ):
        path = [row, *naive.ancestors_of(row, step.parents[slot].tolist())][::-1]
        chain = logits[index].repeat(len(path), 1)
        tokens = arguments["token_ids"][[index - row + node for node in path]]
        apply_penalties(
            chain,
            torch.full((len(path),), slot, device=DEVICE),
            tokens,
            int32(range(len(path))),
            *(arguments[name] for name in SLOT_ARGUMENTS),
        )
        assert torch.equal(found[index], chain[-1])


COMPILE_FOR_HOPPER = """
import hopper
compiled = hopper.compile_only()
import torch
import test_verify_kernels as cases

for num_nodes, depth in [(7, 3), (60, 8), (255, 12)]:
    step = cases.make_step(0, num_nodes, depth)
    cases.prepare(cases.rows, step, depth)
    step_of_two = cases.make_step(0, num_nodes, depth, contemplates=True)
    cases.prepare(cases.rows, step_of_two, depth, contemplates=True, num_soft=40)
    num_live, tokens = step.sizes, torch.zeros(int(step.cu_num_logits[-1]), dtype=torch.int64)
    walked = cases.walk_step(cases.walk, step, num_live, tokens, tokens, depth, depth + 1)
    cases.rows.gather_rows(tokens, tokens.int(), tokens)
    walk = {name: walked[name] for name in ("num_sampled", "path")}
    cases.walk.last_rows(cu_num_logits=step.cu_num_logits, **walk, rows=tokens)
    arguments = cases.make_penalties(0, step, num_live, 4096)
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.zeros(tokens.shape[0], 4096, dtype=dtype)
        cases.tree_penalties(logits, cases.Penalties(**arguments, max_depth=depth))
assert set(compiled) == {
    "_prepare_rows_kernel", "_gather_rows_kernel", "_walk_tree_kernel", "_last_rows_kernel", "_tree_penalties_kernel"
}, set(compiled)
"""


@pytest.mark.nightly
def test_kernels_compile_for_hopper(tmp_path):
    compile_in_subprocess(COMPILE_FOR_HOPPER, tmp_path)

"""Every kernel of the project and of vLLM's samplers: compiled equals interpreted, bit for bit.

Each case is a small launch over random shapes, types and masks that another file's test makes to compare the kernel
with its twin; here the same launches are made in Triton's interpreter, too. Larger ones by hand:

    pytest --shadow-interpreter -p no:xdist tests/test_verify_kernels.py      # all launches of these tests
    pytest --shadow-interpreter -p no:xdist tests/test_lossless.py            # those of engines
"""

import ast
import importlib
import inspect
from pathlib import Path

import pytest
import torch
from compared import Recorder

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for the GPU"),
]

PACKAGE = Path(__file__).resolve().parents[3] / "vllm_crossspec"
SECONDS = 4.0
"""Of interpreting one kernel in one case."""
ULP = 64
"""As far as numpy's exp, log and the like may be from the C library's here: see docs/develop/cpu-lane.md."""
SUMS_NEAR_0 = frozenset(
    ("_add_target_noise_kernel", "_tail_attention_kernel", "_window_attention_kernel", "_contemplate_kernel")
)
"""Kernels that store differences of like numbers, where an ulp of what is subtracted is many of the result."""
ULP_OF_LARGEST = 8
"""As far as these may be, in ulp of the largest result of a launch; 1.3 was seen with AVX-512."""

CASES = {
    "test_commit_kernels.test_kv_equals_naive": [
        (3, 7, "heads outside", torch.bfloat16, 16, 2, 64), (8, 60, "heads inside", torch.uint8, 16, 2, 128),
        (8, 60, "tokens inside", torch.float32, 32, 2, 40), (3, 7, "tokens inside", torch.bfloat16, 32, 2, 13),
    ],
    "test_commit_kernels.test_rows_equal_naive": [(3, 7, 1, 300, torch.float32), (3, 7, 4, 64, torch.bfloat16)],
    "test_commit_kernels.test_restoring_equals_naive": [(3, 7), (17, 130)],
    "test_contemplate_kernels.test_split_equals_naive": [(3, torch.int32), (12, torch.int64)],
    "test_contemplate_kernels.test_contemplation_equals_naive": [
        (3, 40, 5, 2, 3, torch.float32), (12, 130, 8, 2, 3, torch.bfloat16),
    ],
    "test_contemplate_kernels.test_rows_that_are_written_equal_naive": [
        (3, 40, torch.float32), (12, 300, torch.bfloat16),
    ],
    "test_verify_kernels.test_rows_equal_naive": [(7, 3, torch.int32), (3, 2, torch.int64)],
    "test_verify_kernels.test_rows_with_contemplate_rows_equal_naive": [(7, 3, 16)],
    "test_verify_kernels.test_last_rows_equal_naive": [(3,)],
    "test_verify_kernels.test_gathered_rows_are_indexed_ones": [(61, 200), (2500, 2600)],
    "test_verify_kernels.test_walk_equals_naive": [(7, 3, torch.int32), (60, 8, torch.int64)],
    "test_verify_kernels.test_penalties_equal_naive": [(7, 3, 300, torch.float32), (1, 1, 31, torch.bfloat16)],
    "test_catchup.test_locate": [(3,), (300,)],
    "test_catchup.test_accepted_lengths": [()],
    "test_catchup.test_last_tokens_of_requests_whose_lengths_the_device_knows": [(3,)],
    "test_catchup.test_joined_rows": [(3, 1300, torch.bfloat16)],
    "test_tree_builders.test_best_first_equals_naive": [(5, 2, 3, 14, 20, 0.4), (3, 7, 5, 60, 60, 0.0)],
    "test_tree_builders.test_dynamic_equals_naive": [(5, 13, 3, 4, 0.3, 31), (3, 7, 5, 1, 0.6, 1)],
    "test_tree_builders.test_chain_equals_naive": [(3, 7, 7, True), (4, 33, 40, False)],
    "test_tree_builders.test_to_chain_equals_naive": [(4, 5, 3, 17, True), (2, 3, 2, 33, False)],
    "test_continuity.test_without_ngrams_it_is_best_first": [(0.4,)],
    "test_noise.test_kernel_equals_its_twin": [(True, 2.0, False)],
    "test_flashhead.test_centroid_scores": [((3, 130, 40, 7, 5, (279, 3, 100)),)],
    "test_flashhead.test_selected_clusters": [(7,), (64,)],
    "test_flashhead.test_best_and_best_few_are_the_twins": [((1, 33, 17, 16, 17, (0, 5)),)],
    "test_best_logits.test_kernels_are_the_twins": [(3, 2100, 4, "sampled", True), (2, 300, 1, "greedy", False)],
    "test_flashhead_noise.test_noise_of_clusters_is_its_twins": [((5, 16, 8, 4, 2, ()), True, False)],
    "test_flashhead_noise.test_with_all_clusters_probed_it_is_the_dense_coupled_head": [
        ((5, 16, 8, 4, 2, ()), True, False), ((5, 16, 8, 4, 2, ()), False, True),
    ],
    "test_ngram.test_kernel": [("tmp_path", 3, (2, 3, 25), 16, 0.4), ("tmp_path", 4, (3, 1, 67), 8, None)],
    "test_dart_inputs.test_rows_are_the_twins": [(3, 5, 9, 2, 0, False), (4, 4, 1, 7, 0, True)],
    "test_dart_inputs.test_rows_that_are_kept_are_the_twins": [(61, 9)],
    "test_dart_inputs.test_contexts_are_the_twins": [(3,)],
    "test_lookup.test_own_matches": [(1,)],
    "test_lookup.test_corpus_matches": [(1,)],
    "test_lookup.test_match_tree": [(3, 9)],
    "test_experience.test_a_new_request_starts_from_what_all_have_shown": [()],
    "test_counters.test_kernel_equals_naive": [(2, 7, 5, 3, 2)],
    "test_counters.test_what_counts_and_what_does_not": [()],
    "test_tree_attention.test_kernel_that_writes_a_level_against_its_twin": [(8, 24, True), (13, 64, False)],
    "test_tail_attention.test_tail_completes_the_softmax": [(1,), (2,), (12,), (17,), (19,)],
    "test_tail_attention.test_window_and_tail_complete_the_softmax": [
        (5, 1, 80, torch.float32, 7), (8, 1, 128, torch.bfloat16, 33),
    ],
    "test_tail_attention.test_window_over_float8_completes_the_softmax": [(17,)],
    "test_router_kernels.test_entropy_equals_naive": [(3, 37, torch.float32), (3, 37, torch.bfloat16)],
    "test_router_kernels.test_gains_equal_naive": [
        (5, 72, 4, None, torch.float32), (5, 72, 4, (16, 16, 64), torch.bfloat16),
        (5, 72, 4, (1, 4, 128), torch.float32),
    ],
    "test_router_kernels.test_decisions_equal_naive": [(1, 3), (2, 2)],
    "test_draft_model.test_rows_are_the_twins": [(3, 3, 9, 6, 2, True), (2, 5, 3, 7, 10, False)],
    "test_tree_builders.test_a_levels_inputs_are_the_twins": [(1, True), (2, False)],
    "test_heterospec.test_kernel_equals_naive": [(3, 2, 3, 9, 0.4)],
    "test_budget.test_nodes_are_worth_their_corrected_chance": [(4, 3, 7, 3), (9, 5, 60, 8)],
    "test_budget.test_logistics_take_a_newton_step": [(4, 3, 7, 3)],
    "test_budget.test_the_nodes_that_are_worth_most_are_admitted": [(9, 5, 12, 8, False), (4, 3, 7, 3, True)],
}  # fmt: skip
"""Tests of other files and what they are called with."""


def called(test, values, tmp_path):
    """Call another file's test; strings and tuples stand for what that file calls so."""
    module = importlib.import_module(test.__module__)
    values = [tmp_path if v == "tmp_path" else v for v in values]
    names = list(inspect.signature(test).parameters)
    known = dict(zip(names, values, strict=True))
    if isinstance(known.get("tiles"), tuple):
        known["tiles"] = module.kernels.GainTiles(*known["tiles"])
    test(**known)


COMPARED = set()
"""Kernels of which a launch that wrote something was compared, in the order of the tests."""


def check(recorder):
    """No difference but the libraries', and that a small one; nothing that was compared wrote nothing."""
    rows = recorder.rows()
    assert rows
    assert not recorder.wrong, recorder.report()
    for row in rows:
        assert not row["compared"] or row["elements"], f"{row['kernel']} wrote nothing"
        is_sum = row["kernel"].partition(":")[2] in SUMS_NEAR_0
        assert row["of_largest"] <= ULP_OF_LARGEST if is_sum else row["ulp"] <= ULP, recorder.report()
    COMPARED.update(row["kernel"] for row in rows if row["compared"])


@pytest.mark.parametrize(("name", "values"), [(n, v) for n, all_ in CASES.items() for v in all_], ids=str)
def test_kernels_of_the_project(name, values, tmp_path):
    module, test = name.split(".")
    with Recorder(launches=1, seconds=SECONDS) as recorder:
        called(getattr(importlib.import_module(module), test), values, tmp_path)
    check(recorder)


@pytest.fixture
def recorder():
    with Recorder(launches=1, seconds=SECONDS) as found:
        yield found
    check(found)


def rand(*shape, seed=1, dtype=torch.float32):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 4).to(dtype)


def randint(low, high, *shape, seed=1, dtype=torch.int32):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize(("reqs", "slots", "top_k"), [(1, 1, 1), (5, 9, 4), (3, 300, 10)])
def test_growth(recorder, reqs, slots, top_k):
    from vllm_crossspec.drafting.levels import prepare_growth

    lengths, start = torch.zeros(slots, dtype=torch.int32), torch.full((slots + 1,), -7, dtype=torch.int32)
    lengths[:reqs] = randint(20, 500, reqs)
    positions = lengths.long() - 1 - randint(0, 9, slots)
    prepare_growth(positions=positions, seq_lens=lengths, query_start_loc=start, top_k=top_k)
    assert torch.equal(lengths[:reqs].long(), positions[:reqs] + 1) and not lengths[reqs:].any()
    assert start.tolist() == [min(i, reqs) * top_k for i in range(slots + 1)]


@pytest.mark.parametrize(("reqs", "slots", "dtype"), [(0, 3, torch.int64), (1, 1, torch.int32), (5, 300, torch.int64)])
def test_copied_requests(recorder, reqs, slots, dtype):
    from vllm_crossspec.drafting.requests import copy_requests

    mapping, temperature = randint(0, slots, max(reqs, 2), dtype=dtype), rand(slots)
    seeds = randint(0, 2**40, slots, dtype=torch.int64)
    own = torch.full((slots,), -7), torch.full((slots,), -7.0), torch.full((slots,), -7)
    copy_requests((mapping, temperature, seeds), own, reqs)
    assert own[0].tolist() == mapping[:reqs].tolist() + [-1] * (slots - reqs)
    assert torch.equal(own[1], temperature) and torch.equal(own[2], seeds)


@pytest.mark.parametrize(("reqs", "nodes", "width"), [(1, 1, 1), (4, 7, 9), (3, 60, 64)])
def test_stored_trees(recorder, reqs, nodes, width):
    from vllm_crossspec.trees.builders.store import store_trees
    from vllm_crossspec.types import TokenTree

    tree = TokenTree(
        tokens=randint(0, 99, reqs, nodes),
        parents=randint(-1, nodes, reqs, nodes),
        log_probs=rand(reqs, nodes),
        sizes=randint(1, nodes + 1, reqs),
    )
    slots = reqs + 3
    parents = torch.full((slots, width), -7, dtype=torch.int32)
    sizes, modes = torch.full((slots,), -7, dtype=torch.int32), randint(0, 3, slots)
    mapping = torch.randperm(slots, generator=torch.Generator().manual_seed(2))[:reqs].to(torch.int32)
    mapping[0] = -1 if reqs > 1 else mapping[0]
    by = torch.full((slots,), -7, dtype=torch.int32)
    store_trees(tree=tree, idx_mapping=mapping, sizes=sizes, modes=modes, parents=parents, drafted_by=by, drafter=3)
    drafted = [slot for slot in mapping.tolist() if slot >= 0 and int(modes[slot]) != 2]
    assert by.tolist() == [3 if slot in drafted else -7 for slot in range(slots)]
    for row, slot in enumerate(mapping.tolist()):
        if slot >= 0:
            assert torch.equal(parents[slot, :nodes], tree.parents[row])
            assert int(sizes[slot]) == (0 if int(modes[slot]) == 2 else int(tree.sizes[row]))


# -- vLLM's -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("vocabulary", "use_fp64", "dtype"), [(37, False, torch.float32), (300, True, torch.bfloat16)])
def test_gumbel(recorder, vocabulary, use_fp64, dtype):
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature, gumbel_sample

    logits, slots = rand(5, vocabulary, dtype=dtype), torch.tensor([3, 0, -1, 2, 1], dtype=torch.int32)
    temperature = torch.tensor([0.7, 0.0, 1.0, 1.3])
    seeds, positions = randint(0, 2**40, 4, dtype=torch.int64), randint(0, 4096, 5, dtype=torch.int64)
    gumbel_sample(
        logits, slots, temperature, seeds, positions, apply_temperature=True, is_drafting=False, use_fp64=use_fp64
    )
    apply_temperature(logits.float(), slots.clamp(min=0), temperature)


@pytest.mark.parametrize("kind", ["k", "p", "k and p"])
def test_top_k_and_top_p(recorder, kind):
    from vllm.v1.sample.ops.topk_topp_triton import apply_top_k_top_p_triton

    k = randint(1, 30, 3) if "k" in kind else None
    p = torch.tensor([0.3, 0.9, 0.05]) if "p" in kind else None
    apply_top_k_top_p_triton(rand(3, 300), k, p)


def test_min_p(recorder):
    from vllm.v1.worker.gpu.sample.min_p import apply_min_p

    apply_min_p(rand(4, 300), torch.tensor([2, 0, 1, 1], dtype=torch.int32), torch.tensor([0.1, 0.0, 0.5]))


def test_log_probabilities(recorder):
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

    logits = rand(3, 300)
    found = compute_token_logprobs(logits, randint(0, 300, 3, 4, dtype=torch.int64))
    assert found.shape == (3, 4)


def test_grammar_masks(recorder):
    from vllm.v1.worker.gpu.structured_outputs import _apply_grammar_bitmask_kernel

    logits, allowed = rand(4, 300), randint(-(2**31), 2**31 - 1, 2, 10)
    rows = torch.tensor([3, 1], dtype=torch.int32)
    starts = torch.arange(5, dtype=torch.int32)
    _apply_grammar_bitmask_kernel[(2, 2)](
        logits, logits.stride(0), rows, starts, allowed, allowed.stride(0), 300, MASK_STRIDE=1, BLOCK_SIZE=256
    )
    bits = (allowed[:, torch.arange(300) // 32] >> (torch.arange(300) % 32)) & 1
    assert torch.equal(logits[rows.long()].isneginf(), bits == 0)


# -- none is left out ---------------------------------------------------------------------------------------------


def test_no_kernel_of_the_project_is_left_out(request):
    """Behind all the others: a new kernel needs a case."""
    mine = [item.originalname for item in request.session.items if item.path == request.path]
    own = {"test_growth", "test_copied_requests", "test_stored_trees"}
    if mine.count("test_kernels_of_the_project") < sum(map(len, CASES.values())) or not own <= set(mine):
        pytest.skip("counts the cases of this whole file, of which a part was chosen; run the file without -k and -m")
    trees = {
        ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts): ast.parse(file.read_text())
        for file in PACKAGE.rglob("*.py")
    }
    launched = {name for tree in trees.values() for node in ast.walk(tree) if (name := launched_by(node))}
    jitted = {
        f"{module}:{node.name}": node.name
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and any(map(is_jit, node.decorator_list))
    }
    assert {kernel for kernel, name in jitted.items() if name in launched} == {
        kernel for kernel in COMPARED if kernel.startswith(PACKAGE.name)
    }


def is_jit(decorator):
    return ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator).endswith("jit")


def launched_by(node):
    """The name of the kernel that a call `kernel[grid](...)` launches."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Subscript):
        return None
    kernel = node.func.value
    return kernel.id if isinstance(kernel, ast.Name) else getattr(kernel, "attr", None)

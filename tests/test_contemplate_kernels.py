"""The kernels of contemplate tokens against their naive twins and against training, with poisoned outputs."""

import random

import pytest
import torch
from hopper import compile_in_subprocess
from steps import DEVICE, POISON, int32, make_step, poisoned

from vllm_crossspec.drafters.confu import kernels, naive
from vllm_crossspec.kinds import contemplate_layout as layout
from vllm_crossspec.types import AcceptedPaths

NODES = [1, 3, 12, 60]
KINDS_OF_A_WIDE_STEP = ("whole", "truncated", "plain", "padding")


def contemplating_step(seed, num_nodes, index_dtype=torch.int64):
    """A step whose ``cu_num_logits`` counts verification rows, and the ordinary ones among them, cumulated."""
    step = make_step(seed, num_nodes, min(num_nodes, 5), index_dtype=index_dtype, contemplates=True)
    rows = step.cu_num_logits.diff().tolist()
    ordinary = [1 + layout.verified_nodes(q - 1, contemplates=True) if q else 0 for q in rows]
    return step, int32([0, *torch.tensor(ordinary).cumsum(0).tolist()])


@pytest.mark.parametrize("num_nodes", [*NODES, 200])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_split_equals_naive(num_nodes, index_dtype):
    step, cu_nodes = contemplating_step(num_nodes, num_nodes, index_dtype)
    num_logits = int(cu_nodes[-1])
    results = []
    for implementation in (naive, kernels):
        dtypes = {"logits_indices": torch.int64, "expanded_idx_mapping": index_dtype, "expanded_local_pos": torch.int32}
        outputs = {name: poisoned(num_logits + 3, dtype=dtype) for name, dtype in dtypes.items()}
        implementation.split_rows(
            query_start_loc=step.query_start_loc,
            cu_rows=step.cu_num_logits,
            cu_nodes=cu_nodes,
            idx_mapping=step.idx_mapping,
            **outputs,
        )
        results.append(outputs)
    for name, expected in results[0].items():
        assert torch.equal(results[1][name], expected), name
        assert (expected[:num_logits] != POISON).all() and (expected[num_logits:] == POISON).all()


def test_split_is_vllms_own_where_nothing_contemplates():
    """With all rows ordinary: what vLLM makes of the same batch."""
    from vllm.v1.worker.gpu.input_batch import expand_idx_mapping

    step = make_step(3, 20, 5)
    num_logits = int(step.cu_num_logits[-1])
    slots, places = expand_idx_mapping(step.idx_mapping, num_logits, step.cu_num_logits, 32)
    outputs = [torch.full_like(slots, POISON), torch.full_like(places, POISON)]
    kernels.split_rows(
        query_start_loc=step.query_start_loc,
        cu_rows=step.cu_num_logits,
        cu_nodes=step.cu_num_logits,
        idx_mapping=step.idx_mapping,
        logits_indices=poisoned(num_logits, dtype=torch.int64),
        expanded_idx_mapping=outputs[0],
        expanded_local_pos=outputs[1],
    )
    assert torch.equal(outputs[0], slots) and torch.equal(outputs[1], places)


def make_contemplation(seed, num_nodes, hidden, num_experts, num_taps, dtype, index_dtype=torch.int64):
    """Arguments of ``contemplate`` but for its outputs; states that are not to be read are NaN."""
    step, _ = contemplating_step(seed, num_nodes, index_dtype)
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    num_rows, rows = step.positions.shape[0], step.cu_num_logits.diff().tolist()
    taps = [torch.full((num_rows + 1, hidden), float("nan"), dtype=dtype) for _ in range(num_taps)]
    final = torch.full((num_rows + 1, hidden), float("nan"), dtype=dtype)
    path, lengths = torch.full((len(rows), 4), POISON, dtype=torch.int32), []
    for request, (end, q) in enumerate(zip(step.query_start_loc.tolist()[1:], rows, strict=True)):
        nodes = layout.verified_nodes(q - 1, contemplates=True)
        lengths.append(rng.randint(0, 3) if q != 1 else 1)
        if q > 1:
            last = 0 if lengths[-1] < 2 else rng.randint(0, nodes)
            path[request, max(lengths[-1] - 1, 0)] = last
            final[end - q + nodes + 1 + last] = torch.randn(hidden, generator=generator)
        row = end - q + last if q > 1 else end - 1
        for tap in taps if q else ():
            # A residual stream: far from unit variance.
            tap[row] = 30 * torch.randn(hidden, generator=generator)
    width = num_taps * hidden
    return {
        "taps": [tap.to(DEVICE) for tap in taps],
        "final_states": final.to(DEVICE),
        "idx_mapping": step.idx_mapping,
        "paths": AcceptedPaths(step.query_start_loc, step.cu_num_logits, int32(lengths), path.to(DEVICE)),
        "router": (2 * torch.randn(num_experts, width, generator=generator) * width**-0.5).to(DEVICE, dtype),
        "experts": torch.randn(num_experts, hidden, generator=generator).to(DEVICE, dtype),
    }, step.parents.shape[0]


def contemplate(implementation, arguments, num_slots, top):
    hidden, dtype = arguments["experts"].shape[1], arguments["experts"].dtype
    outputs = {
        "contemplate_embeds": poisoned(num_slots, hidden, dtype=dtype),
        "futures": poisoned(num_slots, hidden, dtype=dtype),
        "has_future": poisoned(num_slots),
    }
    implementation.contemplate(**arguments, top=top, **outputs)
    return outputs


CONTEMPLATIONS = [
    # nodes, hidden, experts, top, taps, dtype
    (1, 16, 1, 1, 1, torch.float32),
    (3, 40, 5, 2, 3, torch.float32),
    (12, 130, 8, 2, 3, torch.bfloat16),
    (60, 1500, 8, 3, 3, torch.float32),
    (60, 256, 17, 17, 2, torch.bfloat16),
]
# Sums of up to 4500 products in another order; with bfloat16 one rounding of embeddings below 4.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize(("nodes", "hidden", "experts", "top", "taps", "dtype"), CONTEMPLATIONS)
def test_contemplation_equals_naive(nodes, hidden, experts, top, taps, dtype):
    index_dtype = torch.int32 if nodes % 2 else torch.int64
    arguments, num_slots = make_contemplation(nodes + hidden, nodes, hidden, experts, taps, dtype, index_dtype)
    expected, found = (contemplate(which, arguments, num_slots, top) for which in (naive, kernels))
    assert torch.equal(found["has_future"], expected["has_future"])
    assert torch.equal(found["futures"], expected["futures"])
    tolerance = TOLERANCE[dtype]
    embeds = (found["contemplate_embeds"], expected["contemplate_embeds"])
    torch.testing.assert_close(*embeds, atol=tolerance, rtol=tolerance)
    # Every kind of slot was there: with a future, without, and one that nobody touched.
    assert set(expected["has_future"].tolist()) == {0, 1, POISON}
    untouched = expected["has_future"] == POISON
    assert (found["contemplate_embeds"][untouched] == POISON).all() and (found["futures"][untouched] == POISON).all()
    assert all(x[~untouched].isfinite().all() for x in embeds)


@pytest.mark.parametrize("implementation", [naive, kernels])
def test_mixture_is_that_of_training(implementation):
    """The embedding of every request is what training's module makes of the same states."""
    from crossspec_tools.train.confu import Mixture

    arguments, num_slots = make_contemplation(5, 6, 48, 8, 3, torch.float32)
    module = Mixture(3 * 48, 48, 8, 2)
    module.router.data, module.experts.data = arguments["router"].cpu(), arguments["experts"].cpu()
    found = contemplate(implementation, arguments, num_slots, 2)["contemplate_embeds"]
    states = torch.cat(arguments["taps"], dim=1).cpu()
    checked = 0
    for request, slot in enumerate(arguments["idx_mapping"].tolist()):
        begin, end = arguments["paths"].query_start_loc[request : request + 2].tolist()
        row = states[begin:end].isfinite().all(1).nonzero().flatten()
        if slot < 0:
            continue
        assert len(row) == 1
        state = states[begin + int(row)]
        with torch.no_grad():
            torch.testing.assert_close(found[slot].cpu(), module(state), atol=2e-5, rtol=2e-5)
        # The comparison can fail: a gate without the norm mixes otherwise.
        unnormed = (module.router @ state).softmax(0).topk(2)
        other = unnormed.values / unnormed.values.sum() @ module.experts[unnormed.indices]
        checked += int((found[slot].cpu() - other).abs().max() > 0.01)
    assert checked > 4


@pytest.mark.parametrize("implementation", [naive, kernels])
def test_the_lower_of_equal_experts_counts(implementation):
    arguments, num_slots = make_contemplation(7, 3, 16, 6, 3, torch.float32)
    arguments["router"][:] = 0
    embeds = contemplate(implementation, arguments, num_slots, 2)["contemplate_embeds"]
    slots = arguments["idx_mapping"][arguments["idx_mapping"] >= 0].long()
    expected = arguments["experts"][:2].mean(0).expand(len(slots), -1)
    torch.testing.assert_close(embeds[slots], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("num_nodes", "hidden"), [(1, 16), (3, 40), (12, 300), (60, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_written_equal_naive(num_nodes, hidden, dtype):
    step, _ = contemplating_step(num_nodes, num_nodes)
    num_rows, num_slots = step.positions.shape[0], step.parents.shape[0]
    generator = torch.Generator().manual_seed(num_nodes)
    embeds = torch.randn(num_slots, hidden, generator=generator).to(DEVICE, dtype)
    expected, found = poisoned(2, num_rows + 2, hidden, dtype=dtype)
    for implementation, out in ((naive, expected), (kernels, found)):
        implementation.write_contemplate_rows(
            embeds=out,
            contemplate_embeds=embeds,
            idx_mapping=step.idx_mapping,
            query_start_loc=step.query_start_loc,
            cu_rows=step.cu_num_logits,
            max_rows=2 * num_nodes + 2,
        )
    assert torch.equal(found, expected)
    written = (expected != POISON).all(1)
    rows = step.cu_num_logits.diff()
    assert written.sum() == sum(q - 1 - (q - 2) // 2 for q in rows.tolist() if q > 1)
    # No root is ever written, nor is anything of requests without drafts.
    assert not written[(step.query_start_loc[1:] - rows)[rows > 0].long()].any()


def test_rows_by_hand():
    """Five draft tokens: two nodes and the contemplate rows 3, 4 and 5 of root and nodes; a sixth would be dead."""
    embeds, slots = (
        torch.arange(3.0, device=DEVICE)[:, None].expand(3, 16).contiguous(),
        torch.tensor([2], device=DEVICE),
    )
    for num_rows, ordinary in ((6, 3), (7, 3), (2, 1), (3, 1)):
        out = poisoned(num_rows, 16, dtype=torch.float32)
        rows = int32([0, num_rows])
        kernels.write_contemplate_rows(
            embeds=out, contemplate_embeds=embeds, idx_mapping=slots, query_start_loc=rows, cu_rows=rows, max_rows=8
        )
        assert out[:, 0].tolist() == [POISON] * ordinary + [2.0] * (num_rows - ordinary)


COMPILE_FOR_HOPPER = """
import hopper
compiled = hopper.compile_only()
import torch
import test_contemplate_kernels as cases

for nodes, hidden, experts, top, taps, dtype in cases.CONTEMPLATIONS:
    arguments, num_slots = cases.make_contemplation(0, nodes, hidden, experts, taps, dtype)
    cases.contemplate(cases.kernels, arguments, num_slots, top)
    rows = {name: getattr(arguments["paths"], name) for name in ("query_start_loc", "cu_rows")}
    rows["idx_mapping"] = arguments["idx_mapping"]
    embeds = torch.zeros(arguments["final_states"].shape, dtype=dtype)
    cases.kernels.write_contemplate_rows(embeds=embeds, contemplate_embeds=embeds, **rows, max_rows=2 * nodes + 2)
    places = {name: torch.zeros(9, dtype=torch.int64) for name in ("logits_indices", "expanded_idx_mapping")}
    cases.kernels.split_rows(
        **rows, cu_nodes=rows["cu_rows"], **places, expanded_local_pos=torch.zeros(9, dtype=torch.int32)
    )
assert set(compiled) == {
    "_contemplate_kernel", "_write_contemplate_rows_kernel", "_split_rows_kernel"
}, set(compiled)
"""


@pytest.mark.nightly
def test_kernels_compile_for_hopper(tmp_path):
    compile_in_subprocess(COMPILE_FOR_HOPPER, tmp_path)

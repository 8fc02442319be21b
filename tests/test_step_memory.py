"""Memory of a step that something beside it reads or writes: vLLM's copies to the host, a model's two names for it."""

from types import SimpleNamespace

import numpy as np
import torch

from vllm_crossspec.runner.verifier import MatchVerifier
from vllm_crossspec.step.step import Step
from vllm_crossspec.trees import feature as trees
from vllm_crossspec.trees.draft_state import DraftState

NODES, VOCABULARY = 3, 8


class GreedySampler:
    """vLLM's sampler, as far as the verifier looks."""

    compute_nans, logprobs_mode = True, "raw_logprobs"
    req_states = SimpleNamespace(prefill_len=SimpleNamespace(gpu=torch.zeros(2, dtype=torch.int32)))

    def get_logprobs_dims(self, slots, include_token_ids):
        return [2]

    def sample(self, logits, *rows, return_logprobs):
        return logits.argmax(dim=1), None


def batch_of(node_tokens):
    """Two requests, whose drafts are chains of these tokens."""
    starts, rows = np.array([0, NODES + 1, 2 * (NODES + 1)], dtype=np.int32), 2 * (NODES + 1)
    return SimpleNamespace(
        num_reqs=2,
        idx_mapping=torch.tensor([1, 0], dtype=torch.int32),
        idx_mapping_np=np.array([1, 0]),
        expanded_idx_mapping=torch.zeros(rows, dtype=torch.int32),
        expanded_local_pos=torch.zeros(rows, dtype=torch.int32),
        logits_indices=torch.arange(rows),
        input_ids=torch.tensor(node_tokens, dtype=torch.int32),
        positions=torch.arange(rows),
        cu_num_logits=torch.from_numpy(starts),
        cu_num_logits_np=starts,
        seq_lens=torch.full((2,), 9, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.full((2,), 9),
    )


def tensors_of(output):
    """All tensors of a sampler's output, by their names."""
    parts = vars(output) | output.logprobs_tensors._asdict()
    return {name: value for name, value in parts.items() if isinstance(value, torch.Tensor)}


def test_no_tensor_of_a_steps_output_is_written_by_the_next_step():
    """vLLM copies it to the host on a stream of its own, and the next step does not wait for that copy."""
    state = DraftState(2, 16, NODES, NODES, torch.device("cpu"))
    verifier = MatchVerifier(GreedySampler(), state, lambda: None)
    state.num_live.fill_(NODES)
    logits = torch.zeros(2 * (NODES + 1), VOCABULARY)
    outputs = []
    for token, drafts in ((3, [0, 3, 3, 3] * 2), (5, [0, 5, 1, 1, 0, 1, 1, 1])):
        logits[:] = 0.0
        logits[:, token] = 1.0
        found = tensors_of(verifier(logits, batch_of(drafts)))
        outputs.append((found, {name: tensor.clone() for name, tensor in found.items()}))
    (first, kept), (second, _) = outputs
    assert kept["num_sampled"].tolist() == [4, 4] and second["num_sampled"].tolist() == [2, 1]
    assert {"sampled_token_ids", "num_sampled", "num_rejected", "num_nans", "logprobs"} <= first.keys()
    assert all(torch.equal(first[name], kept[name]) for name in first)


def test_a_state_that_is_handed_out_twice_is_moved_once(monkeypatch):
    moved, final, tapped = [], torch.zeros(4, 8), torch.zeros(4, 8)
    monkeypatch.setattr(trees.kernels, "compact_kv", lambda *given: None)
    monkeypatch.setattr(trees.kernels, "restore_rows", lambda *given, **named: None)
    monkeypatch.setattr(trees.kernels, "compact_rows", lambda tensors, paths: moved.append([id(t) for t in tensors]))
    batch = SimpleNamespace(**dict.fromkeys(("query_start_loc", "seq_lens", "positions", "input_ids", "cu_num_logits")))
    runner = SimpleNamespace(draft_state=SimpleNamespace(path=None), block_tables=SimpleNamespace(slot_mappings=None))
    trees.Trees.sampled(
        SimpleNamespace(runner=runner, _kv_layers=None),
        Step(batch, has_drafts=True, tapped=[tapped, final[:, :]]),
        final,
    )
    assert len(moved) == 1 and len(moved[0]) == 2 and id(tapped) in moved[0]

"""Negative controls: functions that a test sends into a worker to break one thing, and one that mends it again."""

import itertools
from typing import Any

import torch


def _replace(worker: Any, owner: Any, name: str, wrapper: Any) -> None:
    original = getattr(owner, name)
    worker.sabotaged = [*getattr(worker, "sabotaged", []), (owner, name, original)]
    setattr(owner, name, wrapper(original))


def mend(worker: Any) -> None:
    """Undo every break of this worker."""
    for owner, name, original in reversed(getattr(worker, "sabotaged", [])):
        setattr(owner, name, original)
    worker.sabotaged = []


def _draft_rows(batch: Any) -> list[int]:
    """Rows of the step's draft tokens: all but the first of every request past its prompt."""
    rows = []
    for index in range(batch.num_reqs):
        start, end = (int(x) for x in batch.query_start_loc_np[index : index + 2])
        if not batch.is_prefilling_np[index]:
            rows.extend(range(start + 1, end))
    return rows


def shift_positions(worker: Any) -> None:
    """The target sees every draft token one position too late."""

    def wrapper(original):
        def prepare_attn(batch):
            prepared = original(batch)
            rows = _draft_rows(batch)
            batch.positions[rows] += 1
            return prepared

        return prepare_attn

    _replace(worker, worker.model_runner, "prepare_attn", wrapper)


def lose_draft_kv(worker: Any) -> None:
    """The target's K and V of draft tokens are written nowhere."""

    def wrapper(original):
        def prepare_attn(batch):
            tables, slots = original(batch)
            slots[:, _draft_rows(batch)] = -1
            return tables, slots

        return prepare_attn

    _replace(worker, worker.model_runner, "prepare_attn", wrapper)


def accept_everything(worker: Any) -> None:
    """Verification finds every draft token overwhelmingly likely."""

    def wrapper(original):
        def rejection_sampler(logits, batch, *rest):
            rows = batch.logits_indices.long()
            for number, (row, following) in enumerate(zip(rows[:-1].tolist(), rows[1:].tolist(), strict=True)):
                if following == row + 1 and int(batch.expanded_local_pos[number + 1]) > 0:
                    logits[number, batch.input_ids[following]] += 1e4
            return original(logits, batch, *rest)

        return rejection_sampler

    _replace(worker, worker.model_runner, "rejection_sampler", wrapper)


def see_siblings(worker: Any) -> None:
    """Every row of a tree sees all rows before it, its siblings too."""

    def wrapper(original):
        def prepare_attn(batch):
            prepared = original(batch)
            mask = worker.model_runner.draft_state.row_mask
            for index in range(batch.num_reqs):
                start, end = (int(x) for x in batch.query_start_loc_np[index : index + 2])
                for row in range(start, end):
                    for word in range(mask.shape[1]):
                        bits = min(max(row - start + 1 - 32 * word, 0), 32)
                        mask[row, word] = -1 if bits == 32 else (1 << bits) - 1
            return prepared

        return prepare_attn

    _replace(worker, worker.model_runner, "prepare_attn", wrapper)


def leave_kv_in_place(worker: Any) -> None:
    """The accepted path's K and V stay where the tree had them."""
    import vllm_crossspec.trees.commit.kernels as module

    _replace(worker, module, "compact_kv", lambda original: lambda *arguments, **options: None)


def leave_states_in_place(worker: Any) -> None:
    """The accepted path's states stay where the tree had them: the drafter reads those of other nodes."""
    import vllm_crossspec.trees.commit.kernels as module

    _replace(worker, module, "compact_rows", lambda original: lambda *arguments, **options: None)


def penalize_rows_before(worker: Any) -> None:
    """Penalties count all rows before a node, not its ancestors."""
    sampler = worker.model_runner.sampler
    chains = [getattr(processor, "chain", processor) for processor in sampler.logits_processors]
    _replace(worker, sampler, "logits_processors", lambda original: chains)


def bias_first_rows(worker: Any) -> None:
    """Biases of logits reach the first row of every request, not those of its drafts."""
    from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState

    def wrapper(original):
        def apply(state, logits, context):
            before = logits.clone()
            return torch.where(context.expanded_local_pos[:, None] == 0, original(state, logits, context), before)

        return apply

    _replace(worker, LogitBiasState, "apply", wrapper)


def cut_first_rows(worker: Any) -> None:
    """The likeliest token's share decides in the first row of every request (min_p), not in those of its drafts."""

    def wrapper(original):
        def apply_min_p(logits, idx_mapping, idx_mapping_np):
            before = logits.clone()
            original(logits, idx_mapping, idx_mapping_np)
            drafts = idx_mapping == idx_mapping.roll(1)
            drafts[0] = False
            logits[drafts] = before[drafts]

        return apply_min_p

    _replace(worker, worker.model_runner.sampler.sampling_states, "apply_min_p", wrapper)


def sample_in_chunks(worker: Any) -> None:
    """Not a break: logits are sampled by few requests at once, as where all rows' would take too much memory."""
    import vllm_crossspec.runner.verifier as module

    _replace(worker, module, "get_max_chunk_logits", lambda original: lambda vocab_size: 60)


def attend_in_two_passes(worker: Any) -> None:
    """Not a break: the GPU's algorithm, a dense pass over the prefix and our kernel over the tail."""
    from crossspec_cpu_lane.vllm.attention import TreeCpuImpl
    from two_passes import in_two_passes

    _replace(worker, TreeCpuImpl, "forward", in_two_passes)


def foresee_other_noise(worker: Any) -> None:
    """The drafter ranks with the noise of another position than the one that the target samples with."""
    import vllm_crossspec.drafting.heads as module

    def wrapper(original):
        def add_noise(keys, *scores):
            return original(keys._replace(positions=keys.positions + 1), *scores)

        return add_noise

    _replace(worker, module, "add_target_noise", wrapper)
    _replace(worker, module, "add_candidate_noise", wrapper)


def swap_taps(worker: Any) -> None:
    """The drafter is handed the target's layers in the wrong order."""
    host = worker.model_runner.speculator
    _replace(worker, host, "tap_indices", lambda taps: {name: layers[::-1] for name, layers in taps.items()})


# -- contemplate rows ---------------------------------------------------------------------------------------------


def _show(worker: Any, bits_of: Any) -> None:
    """Give every ordinary row more mask bits: ``bits_of`` takes a request's nodes and rows and names (word, bits)."""

    def wrapper(original):
        def prepare_attn(batch):
            prepared = original(batch)
            state, rows = worker.model_runner.draft_state, worker.model_runner.step.planned_rows
            for index in range(batch.num_reqs if rows is not None else 0):
                end = int(batch.query_start_loc_np[index + 1])
                num_rows = int(rows[index + 1] - rows[index])
                nodes = (num_rows - 2) // 2
                for word, bits in bits_of(state, nodes, num_rows) if num_rows > 1 else ():
                    state.row_mask[end - num_rows : end - num_rows + nodes + 1, word] |= bits
            return prepared

        return prepare_attn

    _replace(worker, worker.model_runner, "prepare_attn", wrapper)


def show_contemplate_rows(worker: Any) -> None:
    """Every ordinary row sees the contemplate rows."""

    def bits_of(state, nodes, num_rows):
        for row in range(nodes + 1, num_rows):
            bit = 1 << row % 32
            yield row // 32, bit - (1 << 32) if bit == 1 << 31 else bit

    _show(worker, bits_of)


def show_soft_prompts(worker: Any) -> None:
    """Every ordinary row sees the soft prompts."""
    _show(worker, lambda state, nodes, num_rows: [(state.num_words - 1, (1 << state.num_soft) - 1)])


def hide_soft_prompts(worker: Any) -> None:
    """No row sees the soft prompts, contemplate rows neither: the text is the same, the futures are not."""

    def wrapper(original):
        def prepare_attn(batch):
            prepared = original(batch)
            state = worker.model_runner.draft_state
            if worker.model_runner.step.planned_rows is not None:
                state.row_mask[:, state.num_words - 1] = 0
            return prepared

        return prepare_attn

    _replace(worker, worker.model_runner, "prepare_attn", wrapper)


def keep_contemplate_rows(worker: Any) -> None:
    """Keys and values of contemplate rows stay, in the place of those of the rows that they belong to."""

    def wrapper(original):
        def prepare_attn(batch):
            tables, slots = original(batch)
            rows = worker.model_runner.step.planned_rows
            for index in range(batch.num_reqs if rows is not None else 0):
                num_rows = int(rows[index + 1] - rows[index])
                first, nodes = int(batch.query_start_loc_np[index + 1]) - num_rows, (num_rows - 2) // 2
                if num_rows > 1:
                    own = slots[:, first : first + nodes + 1].clone()
                    slots[:, first : first + nodes + 1] = -1
                    slots[:, first + nodes + 1 : first + 2 * nodes + 2] = own
            return tables, slots

        return prepare_attn

    _replace(worker, worker.model_runner, "prepare_attn", wrapper)


def foresee_noise(worker: Any) -> None:
    """The futures are made up."""

    def wrapper(original):
        def sampled(*arguments):
            original(*arguments)
            made = worker.model_runner.features["contemplate"]
            generator = torch.Generator().manual_seed(0)
            made.futures.copy_(torch.randn(made.futures.shape, generator=generator))

        return sampled

    _replace(worker, worker.model_runner.features["contemplate"], "sampled", wrapper)


def foresee_nothing(worker: Any) -> None:
    """Every round is drafted as the first one after a prompt: without a future."""

    def wrapper(original):
        def sampled(*arguments):
            original(*arguments)
            worker.model_runner.features["contemplate"].has_future.zero_()

        return sampled

    _replace(worker, worker.model_runner.features["contemplate"], "sampled", wrapper)


# -- FlashHead ----------------------------------------------------------------------------------------------------


def _retrieval_proposers(worker: Any) -> list[Any]:
    """The proposers whose head is a FlashHead."""
    proposers = worker.model_runner.speculator.proposers.values()
    found = [p for p in proposers if p.drafter.head is not None]
    assert found
    return found


def _dense_head(proposer: Any) -> Any:
    from vllm_crossspec.drafting.heads import make_head

    return make_head(
        proposer.model,
        proposer.drafter.model_copy(update={"head": None}),
        is_coupled=proposer.settings.is_coupled,
        max_rows=0,
        folder="",
        vocab_size=proposer.engine_config.model_config.get_vocab_size(),
    )


def use_dense_head(worker: Any) -> None:
    """Not a break: the checkpoint's own output layer in the place of the FlashHead."""
    for proposer in _retrieval_proposers(worker):
        dense = _dense_head(proposer)
        _replace(worker, proposer, "head", lambda original, dense=dense: dense)


def shuffle_clusters(worker: Any) -> None:
    """Every centroid stands for another cluster."""
    for proposer in _retrieval_proposers(worker):
        flash = proposer.head.head
        _replace(worker, flash, "_centroids", lambda centroids: centroids.roll(len(centroids) // 2, 0).contiguous())


def probe_everything(worker: Any) -> None:
    """Not a break: all clusters are probed, and every answer is compared with the dense head's on the same states."""
    from vllm_crossspec.drafting.flashhead import kernels

    worker.compared = {"rows": 0, "tokens": 0, "different": 0, "furthest": 0.0}
    for proposer in _retrieval_proposers(worker):
        flash, both = proposer.head.head, _Both(proposer.head, _dense_head(proposer), worker.compared)
        everything = len(flash._centroids)
        _replace(worker, flash, "num_probes", lambda number, everything=everything: everything)
        buffers = kernels.make_buffers(flash.max_rows, flash._tokens, everything, flash.top_k, keeps_all=True)
        _replace(worker, flash, "_buffers", lambda made, buffers=buffers: buffers)
        _replace(worker, proposer, "head", lambda own, both=both: both)


class _Both:
    """Answers as one head and compares with another."""

    def __init__(self, own: Any, dense: Any, compared: dict[str, Any]):
        self.own, self.dense, self.compared = own, dense, compared

    def choose(self, hidden: Any, keys: Any) -> Any:
        """See DraftHead."""
        answer = self.own.choose(hidden, keys).clone()
        self._note(answer, self.dense.choose(hidden, keys))
        return answer

    def candidates(self, hidden: Any, keys: Any, k: int) -> Any:
        """See DraftHead."""
        log_probs, tokens = (part.clone() for part in self.own.candidates(hidden, keys, k))
        expected_log_probs, expected = self.dense.candidates(hidden, keys, k)
        self._note(tokens, expected)
        furthest = (log_probs - expected_log_probs).abs().max().item()
        self.compared["furthest"] = max(self.compared["furthest"], furthest)
        return log_probs, tokens

    def _note(self, answer: Any, expected: Any) -> None:
        self.compared["rows"] += len(answer)
        self.compared["tokens"] += answer.numel()
        self.compared["different"] += int((answer != expected).sum())


def run_out_of_memory(worker: Any, after: int, drafter: str | None = None) -> None:
    """From its call number ``after`` on a drafter drafts, and then there is no memory for what follows.

    Args:
        worker: of the engine.
        after: calls that go well.
        drafter: whose; None: any.
    """
    calls = itertools.count()

    def wrapper(original):
        def propose_step(step):
            drafted = original(step)
            if next(calls) >= after:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 is full.")
            return drafted

        return propose_step

    for name, proposer in worker.model_runner.speculator.proposers.items():
        if drafter in (None, name):
            _replace(worker, proposer, "propose_step", wrapper)

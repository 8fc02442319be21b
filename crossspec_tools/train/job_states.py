"""What a worker of vLLM does beside generating: it keeps the target's hidden states and writes them, shard by shard."""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from crossspec_tools.train.stored import Wanted, write_states
from vllm_crossspec.kinds.identity import Identity

EXTENSION = "crossspec_tools.train.job_states.StateRecorder"
"""The value of vLLM's ``worker_extension_cls``."""


class StateRecorder:
    """Methods that vLLM adds to its worker's class; a process calls them by name, with ``collective_rpc``.

    The engine runs without CUDA graphs, without a prefix cache and without drafts.
    """

    def crossspec_begin_states(self, layers: list[int]) -> str | None:
        """Record from now on, with the residual stream after these layers; says in a sentence why it cannot."""
        worker: Any = self
        runner = worker.model_runner
        if not worker.use_v2_model_runner:
            return "--states needs vLLM's V2 model runner, which does not run this target; leave --states out"
        if not hasattr(runner.model, "set_aux_hidden_state_layers"):
            name = type(runner.model).__name__
            return f"--states: vLLM's {name} does not hand out the states of its layers; leave --states out"
        # vLLM's layer i is the stream before layer i, which is after i layers.
        runner.model.set_aux_hidden_state_layers(tuple(layers))
        runner.use_aux_hidden_state_outputs = True
        # Behind each layer all ranks have the same states.
        worker.crossspec_recording = Recording(runner) if worker.rank == 0 else None
        return None

    def crossspec_write_states(self, path: str, lengths: dict[str, int], layers: list[int], target: list[Any]) -> None:
        """Write what was recorded of these requests, in their order; ``lengths`` are their numbers of states."""
        recording = self.crossspec_recording  # type: ignore[attr-defined]
        if recording is not None:
            write_states(Path(path), recording.take(lengths), Wanted(tuple(layers), Identity(*target)))


class Step(NamedTuple):
    """What one step of the engine computed. R requests, N tokens."""

    requests: list[tuple[str, int, int]]  # [R] name, first position, number of tokens
    states: torch.Tensor  # bfloat16 [N, (n + 1) * H], taps and last, on the host
    top: torch.Tensor | None  # int32 [R], the most likely token after each request's last one, on the host


class Recording:
    """Stands in for two methods on the runner's instance: ``sample_tokens``, and its model's ``compute_logits``."""

    def __init__(self, runner: Any):
        self._runner, self._steps = runner, list[Step]()
        self._sample_tokens, self._compute_logits = runner.sample_tokens, runner.model.compute_logits
        self._top: torch.Tensor | None = None
        runner.sample_tokens, runner.model.compute_logits = self._sampled, self._logits

    def _logits(self, states: torch.Tensor) -> Any:
        logits = self._compute_logits(states)
        if self._top is None:  # the first of a step are those that tokens are sampled from
            self._top = logits.argmax(-1).to(torch.int32)
        return logits

    def _sampled(self, grammar_output: Any) -> Any:
        self._top, state = None, self._runner.execute_model_state
        if state is None:  # this rank has nothing to sample from
            return self._sample_tokens(grammar_output)
        batch = state.input_batch
        # Lists, because the runner goes on with its arrays.
        numbers = (batch.num_computed_tokens_np.tolist(), batch.num_scheduled_tokens.tolist())
        requests = list(zip([name.split("-")[0] for name in batch.req_ids], *numbers, strict=True))
        states = torch.cat([*state.aux_hidden_states, state.hidden_states], dim=-1)[: batch.num_tokens]
        output = self._sample_tokens(grammar_output)
        top: torch.Tensor | None = self._top
        self._steps.append(Step(requests, _on_host(states.to(torch.bfloat16)), None if top is None else _on_host(top)))
        return output

    def take(self, lengths: dict[str, int]) -> dict[str, torch.Tensor]:
        """The tensors of a shard's file (:mod:`stored`); what was recorded is then forgotten.

        A request that vLLM preempted was computed again, so states go to their positions. A step that vLLM had begun
        when a request ended computed a state too many.
        """
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        offsets = torch.tensor([0, *lengths.values()]).cumsum(0)
        firsts = dict(zip(lengths, offsets.tolist(), strict=False))
        size, width = int(offsets[-1]), self._runner.model_config.get_hidden_size()
        last = torch.empty(size, width, dtype=torch.bfloat16)
        taps = torch.empty(size, self._steps[0].states.shape[1] - width, dtype=torch.bfloat16)
        top, is_known = torch.full((size,), -1, dtype=torch.int32), torch.zeros(size, dtype=torch.bool)
        steps, self._steps = self._steps[::-1], []
        while steps:  # each is freed once it has been read
            step, row = steps.pop(), 0
            for number, (name, start, count) in enumerate(step.requests):
                length = lengths.get(name, 0)
                if (some := min(count, length - start)) > 0:
                    place = slice(firsts[name] + start, firsts[name] + start + some)
                    taps[place], last[place] = step.states[row : row + some].split([taps.shape[1], width], dim=1)
                    is_known[place] = True
                    if step.top is not None and some == count:
                        top[place.stop - 1] = step.top[number]
                row += count
        assert is_known.all(), "a token of a response was never computed"
        return {"taps": taps, "last": last, "top": top, "offsets": offsets}


def _on_host(x: torch.Tensor) -> torch.Tensor:
    """A copy that is whole once the device has been waited for."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda).copy_(x, non_blocking=True)

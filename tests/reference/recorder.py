"""Reading drafts off a running engine: functions that a test sends into the worker."""

from typing import Any, NamedTuple


class Trace(NamedTuple):
    """One request of an engine.

    Attributes:
        tokens: the prompt's token ids, then the generated ones.
        num_prompt_tokens: how many of them are the prompt's.
        drafts: by round: the number of tokens known when it began, and the draft that followed them.
    """

    tokens: list[int]
    num_prompt_tokens: int
    drafts: dict[int, list[int]]


def start(worker: Any) -> None:
    """From now on, keep what the speculator proposes, round by round; nothing else changes."""
    speculator = worker.model_runner.speculator
    original = speculator.propose
    worker.recorded_rounds = []

    def propose(batch: Any, *args: Any, **kwargs: Any) -> Any:
        drafts = original(batch, *args, **kwargs)
        # vLLM hands the number of sampled tokens over as the sixth argument.
        rows = zip(batch.req_ids, args[4].tolist(), drafts.tolist(), strict=False)
        worker.recorded_rounds.extend(rows)
        return drafts

    speculator.propose = propose


def take(worker: Any) -> list[tuple[str, int, list[int]]]:
    """Request id, number of tokens that the target gave it in the step, and draft; forgets them."""
    rounds, worker.recorded_rounds = worker.recorded_rounds, []
    return rounds


def trace(llm: Any, prompts: list[list[int]], max_tokens: int, **sampling: Any) -> list[Trace]:
    """Generate for all prompts as one batch, and line every draft up with the tokens that it follows."""
    from vllm import SamplingParams

    parameters = SamplingParams(**({"temperature": 0.0} | sampling), max_tokens=max_tokens, ignore_eos=True)
    llm.collective_rpc(take)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], parameters, use_tqdm=False)
    traces = {
        o.request_id: Trace([*o.prompt_token_ids, *o.outputs[0].token_ids], len(o.prompt_token_ids), {})
        for o in outputs
    }
    known = {name: t.num_prompt_tokens for name, t in traces.items()}
    for worker_id, num_sampled, draft in llm.collective_rpc(take)[0]:
        name = worker_id.rsplit("-", 1)[0]  # vLLM appends something random to the request's id
        known[name] += num_sampled
        # Rounds inside a prompt draft nothing of use, and those past the last token are never seen.
        if num_sampled and known[name] <= len(traces[name].tokens):
            traces[name].drafts[known[name]] = draft
    return list(traces.values())

"""Clients of one engine: of conversations, so many requests at a time, and of rows that are all asked at once."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from vllm_crossspec.names import counted, nearest


class Generation(NamedTuple):
    """What the engine did for one prompt.

    Attributes:
        token_ids, text: without the prompt's.
        num_target_calls: target passes that gave this request tokens: one for the prompt and one a round.
        accepted_histogram: ``[j]`` is the number of rounds in which j draft tokens were accepted (vLLM's own
            count, taken before the text is cut at its end); empty without speculation.
        num_draft_tokens: that vLLM's scheduler planned for these rounds: all nodes of a tree.
        ttft: seconds from the request's arrival to its first output, by vLLM's own metrics of the request.
        times: of every output that brought tokens, seconds of one clock; one a target call.
    """

    token_ids: list[int]
    text: str
    num_target_calls: int
    accepted_histogram: list[int]
    num_draft_tokens: int
    ttft: float
    times: list[float]


class Conversation:
    """The turns of one prompt row, each a generation whose answer joins the history of the next.

    Args:
        row: ``turns``, and ``where`` they are from.
        chat: whether to wrap them in the model's chat template; None where it has one.
    """

    def __init__(self, llm: Any, row: dict[str, Any], chat: bool | None) -> None:
        self._tokenizer, self._where, self._turns = llm.get_tokenizer(), row["where"], row["turns"]
        self._chat = _is_chat(self._tokenizer, chat, "pass --raw")
        self._messages: list[dict[str, str]] = []

    def __len__(self) -> int:
        return len(self._turns)

    def next_prompt(self, max_model_len: int | None) -> list[int]:
        """Token ids of the next turn's prompt; more than ``max_model_len`` with an answer are refused (ValueError)."""
        messages = [*self._messages, {"role": "user", "content": self._turns[len(self._messages) // 2]}]
        if self._chat:
            token_ids = _templated(self._tokenizer, messages)
        else:
            token_ids = self._tokenizer.encode("\n".join(message["content"] for message in messages))
        if max_model_len is not None and len(token_ids) >= max_model_len:
            raise ValueError(
                f"{self._where}: the prompt has {counted(len(token_ids), 'token')} and the model takes {max_model_len} "
                "with the answer: shorten it, or raise --max-model-len if the model allows"
            )
        return token_ids

    def add_answer(self, text: str) -> None:
        """Make the answer part of the next turn's history."""
        turn = self._turns[len(self._messages) // 2]
        self._messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": text}]


def _is_chat(tokenizer: Any, chat: bool | None, remedy: str) -> bool:
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if chat and not has_template:
        raise ValueError(f"this model's tokenizer has no chat template: {remedy}")
    return has_template if chat is None else chat


def _templated(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


def answer(
    llm: Any,
    conversations: Sequence[Conversation],
    sampling: dict[str, Any],
    batch_size: int,
    report: Callable[[int], None] = lambda num_tokens: None,
    tell: Callable[[Generation, Generation], None] = lambda before, after: None,
) -> list[Generation]:
    """Answers to all turns: of the first turns in their order, then of the second ones, and so on.

    It is a closed loop, in which an answer makes room for the next request.

    Args:
        llm: vLLM's LLM, which keeps metrics of its requests.
        sampling: vLLM's sampling parameters; the conversation's number is added to a seed, so that requests of a batch
            draw apart and a request draws the same whatever its batch.
        batch_size: most requests at a time.
        report: called with the number of new tokens of every step that has any.
        tell: called with an answer before and after each of its steps.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine, limit = llm.llm_engine, llm.model_config.max_model_len
    prompts = [conversation.next_prompt(limit) for conversation in conversations]
    waiting = deque((0, i) for i in range(len(prompts)))
    answers: dict[tuple[int, int], Generation] = {}
    running: dict[str, tuple[int, int]] = {}
    while waiting or running:
        while waiting and len(running) < batch_size:
            turn, i = waiting.popleft()
            running[f"{turn}-{i}"] = turn, i
            answers[turn, i] = Generation([], "", 0, [], 0, 0.0, [])
            seed = None if sampling.get("seed") is None else sampling["seed"] + i
            params = SamplingParams(**{**sampling, "seed": seed}, output_kind=RequestOutputKind.DELTA)
            prompt = conversations[i].next_prompt(limit) if turn else prompts[i]
            engine.add_request(f"{turn}-{i}", {"prompt_token_ids": prompt}, params)
        outputs = engine.step()
        for output in outputs:
            turn, i = running[output.request_id]
            before, answers[turn, i] = answers[turn, i], _extended(answers[turn, i], output)
            tell(before, answers[turn, i])
            if not output.finished:
                continue
            del running[output.request_id]
            conversations[i].add_answer(answers[turn, i].text)
            if turn + 1 < len(conversations[i]):
                waiting.append((turn + 1, i))
        if outputs:
            report(sum(len(output.outputs[0].token_ids) for output in outputs))
    return [answers[key] for key in sorted(answers)]


def _extended(generation: Generation, output: Any) -> Generation:
    """Stepped by hand, every output that a step gives a request is one target pass for it."""
    delta, measured = output.outputs[0], output.metrics
    generation = generation._replace(text=generation.text + delta.text)
    if (metrics := delta.spec_decode_metrics) is not None:
        generation = generation._replace(
            accepted_histogram=list(metrics.histogram), num_draft_tokens=metrics.num_draft_tokens
        )
    if not delta.token_ids:
        return generation
    return generation._replace(
        token_ids=[*generation.token_ids, *delta.token_ids],
        num_target_calls=generation.num_target_calls + 1,
        ttft=measured.first_token_latency,
        times=[*generation.times, measured.last_token_ts],
    )


def add_request(llm: Any, request_id: str, row: dict[str, Any], sampling: dict[str, Any], chat: bool | None) -> None:
    """Ask vLLM's engine for one row's answer. Raises ValueError where vLLM or the chat template refuses it.

    Args:
        row: ``prompt`` (a text or token ids) or ``messages``.
        sampling: vLLM's sampling parameters. Their types are checked: a wrong one would end the engine.
        chat: as of a :class:`Conversation`.
    """
    import msgspec
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    for name in sampling:
        if name not in SamplingParams.__struct_fields__:
            raise ValueError(f"`{name}` is no sampling parameter{nearest(name, SamplingParams.__struct_fields__)}")
    if sampling.get("n", 1) != 1:
        raise ValueError(f"`n` is {sampling['n']}: a row has one answer; write it as often as it is to be answered")
    try:
        # Keys of JSON are texts, also those of `logit_bias`.
        params = msgspec.convert(sampling, SamplingParams, str_keys=True)
        llm.llm_engine.add_request(request_id, {"prompt_token_ids": _token_ids(llm, row, chat)}, params)
    except (VLLMValidationError, msgspec.ValidationError, ValueError, TypeError) as problem:
        raise ValueError(" ".join(str(problem).split())) from problem


def _token_ids(llm: Any, row: dict[str, Any], chat: bool | None) -> list[int]:
    tokenizer, prompt = llm.get_tokenizer(), row.get("prompt")
    if isinstance(prompt, list):
        return prompt
    if not _is_chat(tokenizer, True if prompt is None else chat, "give `prompt` with --raw"):
        return list(tokenizer.encode(prompt))
    try:
        return _templated(tokenizer, row.get("messages") or [{"role": "user", "content": prompt}])
    except Exception as problem:  # a template raises what it likes
        raise ValueError(f"`messages`: the chat template does not take them ({problem})") from problem


def finished_outputs(engine: Any, emit: Callable[..., None] = lambda *about, **more: None) -> Iterator[list[Any]]:
    """Let vLLM's engine step until it has no request left; the outputs that are finished, after every step.

    Every request's outputs are cumulative, as they are by default. A ``progress`` event has the tokens of a step.
    """
    lengths: dict[str, int] = {}
    while engine.has_unfinished_requests():
        outputs = engine.step()
        before = sum(lengths.values())
        lengths |= {output.request_id: len(output.outputs[0].token_ids) for output in outputs}
        if outputs:
            emit("progress", num_tokens=sum(lengths.values()) - before)
        yield [output for output in outputs if output.finished]

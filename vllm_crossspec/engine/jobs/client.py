"""A client of one engine: conversations whose turns are its requests, so many at a time, and when each output came."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple


class Generation(NamedTuple):
    """What the engine did for one prompt.

    Attributes:
        token_ids: the text's tokens, without the prompt's.
        text: the same as text.
        num_target_calls: target passes that gave this request tokens: one for the prompt and one a round.
        accepted_histogram: ``[j]`` is the number of rounds in which j draft tokens were accepted (vLLM's own
            count, taken before the text is cut at its end); empty without speculation.
        num_draft_tokens: that vLLM's scheduler planned for these rounds: all nodes of a tree.
    """

    token_ids: list[int]
    text: str
    num_target_calls: int
    accepted_histogram: list[int]
    num_draft_tokens: int


class Timing(NamedTuple):
    """When a request's outputs came, by vLLM's own metrics of the request.

    Attributes:
        ttft: seconds from the request's arrival to its first output.
        times: of every output that brought tokens, seconds of one clock; one a target call.
    """

    ttft: float
    times: list[float]


class Conversation:
    """The turns of one prompt row, each a generation whose answer joins the history of the next.

    Args:
        llm: vLLM's LLM.
        row: ``turns``, and ``where`` they are from.
        chat: whether to wrap them in the model's chat template; None where it has one.
    """

    def __init__(self, llm: Any, row: dict[str, Any], chat: bool | None) -> None:
        self._tokenizer = llm.get_tokenizer()
        template = getattr(self._tokenizer, "chat_template", None) is not None
        if chat and not template:
            raise ValueError("this model's tokenizer has no chat template: pass --raw")
        self._chat = template if chat is None else chat
        self._where, self._turns = row["where"], row["turns"]
        self._messages: list[dict[str, str]] = []

    def __len__(self) -> int:
        return len(self._turns)

    def next_prompt(self, max_model_len: int | None) -> list[int]:
        """Token ids of the next turn's prompt. Raises ValueError where they leave no room for an answer.

        Args:
            max_model_len: tokens of prompt and answer; None where the caller looks at the length.
        """
        messages = [*self._messages, {"role": "user", "content": self._turns[len(self._messages) // 2]}]
        if self._chat:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        else:
            token_ids = self._tokenizer.encode("\n".join(message["content"] for message in messages))
        if max_model_len is not None and len(token_ids) >= max_model_len:
            raise ValueError(
                f"{self._where}: the prompt has {len(token_ids)} tokens and the model takes {max_model_len} "
                "with the answer: shorten it, or raise --max-model-len if the model allows"
            )
        return token_ids

    def add_answer(self, text: str) -> None:
        """Make the answer part of the next turn's history."""
        turn = self._turns[len(self._messages) // 2]
        self._messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": text}]


class Client:
    """Asks turns and waits for answers: a closed loop, in which an answer makes room for the next request.

    Args:
        llm: vLLM's LLM, which keeps metrics of its requests.
        sampling: vLLM's sampling parameters; a seed in them is raised by the conversation's number, so that
            requests of a batch draw apart and a request draws the same whatever its batch.
        batch_size: most requests at a time.
        report: called with the number of new tokens of every step that has any.
    """

    def __init__(self, llm: Any, sampling: dict[str, Any], batch_size: int, report: Callable[[int], None]):
        self._engine, self._limit = llm.llm_engine, llm.model_config.max_model_len
        self._sampling, self._batch_size, self._report = sampling, batch_size, report

    def answer(self, conversations: Sequence[Conversation]) -> list[tuple[Generation, Timing]]:
        """All turns of all conversations: the first turns in their order, then the second ones, and so on."""
        prompts = [conversation.next_prompt(self._limit) for conversation in conversations]
        waiting = deque((0, i) for i in range(len(prompts)))
        answers: dict[tuple[int, int], tuple[Generation, Timing]] = {}
        running: dict[str, tuple[int, int]] = {}
        while waiting or running:
            while waiting and len(running) < self._batch_size:
                turn, i = waiting.popleft()
                running[f"{turn}-{i}"] = turn, i
                answers[turn, i] = Generation([], "", 0, [], 0), Timing(0.0, [])
                self._ask(f"{turn}-{i}", conversations[i].next_prompt(self._limit) if turn else prompts[i], i)
            for turn, i in self._step(running, answers):
                conversations[i].add_answer(answers[turn, i][0].text)
                if turn + 1 < len(conversations[i]):
                    waiting.append((turn + 1, i))
        return [answers[key] for key in sorted(answers)]

    def _ask(self, request_id: str, prompt: list[int], number: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        seed = None if self._sampling.get("seed") is None else self._sampling["seed"] + number
        params = SamplingParams(**{**self._sampling, "seed": seed}, output_kind=RequestOutputKind.DELTA)
        self._engine.add_request(request_id, {"prompt_token_ids": prompt}, params)

    def _step(
        self, running: dict[str, tuple[int, int]], answers: dict[tuple[int, int], tuple[Generation, Timing]]
    ) -> list[tuple[int, int]]:
        """One step of the engine; those that are answered, which run no more."""
        finished = []
        outputs = self._engine.step()
        for output in outputs:
            key = running[output.request_id]
            answers[key] = _extend(*answers[key], output)
            if output.finished:
                finished.append(running.pop(output.request_id))
        if outputs:
            self._report(sum(len(output.outputs[0].token_ids) for output in outputs))
        return finished


def _extend(generation: Generation, timing: Timing, output: Any) -> tuple[Generation, Timing]:
    """Stepped by hand, every output that a step gives a request is one target pass for it."""
    delta, measured = output.outputs[0], output.metrics
    metrics = delta.spec_decode_metrics
    generation = Generation(
        token_ids=generation.token_ids + list(delta.token_ids),
        text=generation.text + delta.text,
        num_target_calls=generation.num_target_calls + bool(delta.token_ids),
        accepted_histogram=generation.accepted_histogram if metrics is None else list(metrics.histogram),
        num_draft_tokens=generation.num_draft_tokens if metrics is None else metrics.num_draft_tokens,
    )
    if delta.token_ids:
        timing = Timing(measured.first_token_latency, [*timing.times, measured.last_token_ts])
    return generation, timing


def finished_outputs(engine: Any, emit: Callable[..., None]) -> Iterator[list[Any]]:
    """Let vLLM's engine step until it has no request left.

    Args:
        engine: vLLM's LLMEngine; every request's outputs are cumulative, as they are by default.
        emit: takes a ``progress`` event with the ``num_tokens`` of each step.

    Yields:
        The outputs that are finished by a step, after every one.
    """
    lengths: dict[str, int] = {}
    while engine.has_unfinished_requests():
        outputs = engine.step()
        before = sum(lengths.values())
        lengths |= {output.request_id: len(output.outputs[0].token_ids) for output in outputs}
        if outputs:
            emit("progress", num_tokens=sum(lengths.values()) - before)
        yield [output for output in outputs if output.finished]

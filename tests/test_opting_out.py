"""Requests that want no drafts: what they cost the target, and what counts."""

import contextlib
from types import SimpleNamespace

import engines
import pytest
from vllm import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_crossspec.config.parse import parse
from vllm_crossspec.config.schema import carried
from vllm_crossspec.hooks.scheduler import with_opting_out

OFF = {"extra_args": {"crossspec": "off"}}


class Played(Scheduler):
    """A scheduler that has planned three draft tokens of every request."""

    def __init__(self, config, *asked):
        self.vllm_config = config
        self.requests = {
            str(number): SimpleNamespace(
                sampling_params=SamplingParams(extra_args={"crossspec": mode}), spec_token_ids=[-1] * 3
            )
            for number, mode in enumerate(asked)
        }
        self.running = list(self.requests.values())

    def _update_after_schedule(self, scheduler_output):
        pass

    def update_draft_token_ids(self, draft_token_ids):
        pass

    def make_spec_decoding_stats(self, spec_decoding_stats, num_draft_tokens, request_id):
        return (spec_decoding_stats or 0) + num_draft_tokens

    @property
    def planned(self):
        return [len(request.spec_token_ids) for request in self.running]


def config(has_graphs=False, ours=True, **changes):
    settings = parse({"method": "eagle3", "model": "m", "tree": {"type": "chain"}, **changes}, ())
    return SimpleNamespace(
        speculative_config=None,
        additional_config=carried(settings) if ours else {},
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: has_graphs)),
    )


@pytest.mark.parametrize(
    ("config", "asked", "planned"),
    [
        (config(), ("off", "tree", "chain"), [0, 3, 3]),
        (config(has_graphs=True), ("off", "tree"), [3, 3]),
        (config(has_graphs=True), ("off", "off"), [0, 0]),
        (config(has_graphs=True, verification="rejection"), ("off", "tree"), [0, 3]),
        (config(ours=False), ("off", "off"), [3, 3]),
    ],
)
def test_what_is_planned(config, asked, planned):
    for follow in ("_update_after_schedule", "update_draft_token_ids"):
        scheduler = with_opting_out(Played)(config, *asked)
        step = SimpleNamespace(num_scheduled_tokens=dict.fromkeys(scheduler.requests, 4), req_ids=["gone", "0", "1"])
        getattr(scheduler, follow)(step)
        assert scheduler.planned == planned


def test_what_is_counted():
    scheduler = with_opting_out(Played)(config(), "off", "tree")
    assert scheduler.make_spec_decoding_stats(5, num_draft_tokens=3, request_id="0") == 5
    assert scheduler.make_spec_decoding_stats(5, num_draft_tokens=3, request_id="1") == 8
    scheduler = with_opting_out(Played)(config(ours=False), "off")
    assert scheduler.make_spec_decoding_stats(5, num_draft_tokens=3, request_id="0") == 8


def test_any_scheduler_of_vllms_will_do():
    assert issubclass(with_opting_out(AsyncScheduler), AsyncScheduler)
    assert with_opting_out(with_opting_out(Scheduler)) is with_opting_out(Scheduler)
    assert with_opting_out(dict) is dict


@contextlib.contextmanager
def counting_rows(scheduler, rows):
    """Put what is planned for each request of each step into ``rows``."""
    schedule = scheduler.schedule

    def spy(*arguments, **options):
        output = schedule(*arguments, **options)
        rows.append(sorted(output.num_scheduled_tokens.values()))
        return output

    scheduler.schedule = spy
    yield
    del scheduler.schedule


@pytest.mark.e2e
@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_in_an_engine(is_async):
    """Alone, in company, and in the company that a full CUDA graph would make it keep up with."""
    spec, nodes = engines.tree("eagle3", engines.EAGLE3, num_nodes=12), 12
    with engines.engine(spec, enable_prefix_caching=False, async_scheduling=is_async) as llm:
        scheduler, prompts = llm.llm_engine.engine_core.engine_core.scheduler, engines.prompts(2)

        def drafted():
            return engines.counts(llm).drafts, llm.collective_rpc("crossspec_stats")[0]["eagle3"]["drafts"]

        def generate(*options):
            parameters = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, **more) for more in options]
            outputs = llm.generate(prompts[: len(options)], parameters, use_tqdm=False)
            return [list(output.outputs[0].token_ids) for output in outputs]

        for keeps_width in (False, True):
            scheduler._keeps_width, rows = keeps_width, []
            before = drafted()
            with counting_rows(scheduler, rows):
                alone = generate(OFF)
            assert drafted() == before
            assert {n for step in rows[1:] for n in step} <= {1}
            company = generate({}, {})
            rows.clear()
            between = drafted()
            with counting_rows(scheduler, rows):
                mixed = generate(OFF, {})
            assert mixed == company and mixed[0] == alone[0]
            full = [step for step in rows if len(step) == 2 and nodes + 1 in step]
            assert full and {step[0] for step in full} == ({nodes + 1} if keeps_width else {1})
            theirs, ours = (now - was for now, was in zip(drafted(), between, strict=True))
            assert 0 < theirs <= ours <= theirs + is_async

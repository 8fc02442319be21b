"""While nobody drafts, drafters take tokens in by many at once, and lose none of them."""

from typing import Any

import engines
import pytest

pytestmark = pytest.mark.e2e

BUSY = {"1": 12, "3": 0}
"""From three requests on nothing is drafted."""
SPECS = {
    "eagle3": engines.ours("eagle3", engines.EAGLE3) | {"tree": {"type": "chain", "by_batch_size": {"1": 7, "3": 0}}},
    "eagle3-tree": engines.tree("eagle3", engines.EAGLE3, num_nodes=12, by_batch_size=BUSY),
    "dflash-tree": engines.tree("dflash", engines.DFLASH, num_nodes=12, by_batch_size=BUSY),
    "dart": engines.tree("dart", engines.DART, num_nodes=12, by_batch_size=BUSY),
    "confu-tree": engines.tree("confu", engines.CONFU, num_nodes=12, by_batch_size=BUSY),
}
LENGTHS = (80, 24, 56)


def defer(worker: Any, how: str) -> None:
    """Have tokens kept as ever, or none kept, or kept and then lost; count those that are kept from now on."""
    speculator = worker.model_runner.speculator
    if not hasattr(worker, "queue"):
        worker.queue = speculator.queue
    queue = speculator.queue = None if how == "at once" else worker.queue
    worker.deferred = 0
    if queue is None:
        return
    queue.__dict__.pop("write", None)
    write = queue.write

    def counted(features: Any, slots: Any, positions: Any) -> None:
        worker.deferred += len(slots)
        write(features, slots.fill_(-1) if how == "lost" else slots, positions)

    queue.write = counted


def a_busy_while(llm: Any) -> tuple[list[list[int]], list[int]]:
    """Three requests, of which the longest is alone in the end; then a second turn of the shortest, from the cache."""
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    texts = [llm.get_tokenizer().encode(text) for text in engines.prompts(3)]
    parameters = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in LENGTHS]
    outputs = llm.generate([{"prompt_token_ids": text} for text in texts], parameters, use_tqdm=False)
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    turn = {"prompt_token_ids": [*texts[2], *answers[2], *texts[1][:3]]}
    parameters = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    output = llm.generate([turn], parameters, use_tqdm=False)[0]
    assert output.num_cached_tokens >= 32, "the second turn was to find the first one's blocks"
    return answers, list(output.outputs[0].token_ids)


def accepted_tokens(llm: Any) -> int:
    """Of the only drafter, so far."""
    (stats,) = llm.collective_rpc("crossspec_stats")[0].values()
    return stats["accepted_tokens"]


@pytest.fixture(scope="module")
def plain():
    with engines.engine(None, block_size=32) as llm:
        return a_busy_while(llm)


@pytest.fixture(scope="module", params=SPECS)
def llm(request, plain):
    with engines.engine(SPECS[request.param], block_size=32) as running:
        yield running


@pytest.mark.nightly(keep=1)
def test_acceptance_is_as_if_every_token_had_been_taken_in_at_once(llm, plain):
    accepted = {}
    for how in ("deferred", "at once", "lost"):
        llm.collective_rpc(defer, args=(how,))
        before = accepted_tokens(llm)
        assert a_busy_while(llm) == plain
        accepted[how] = accepted_tokens(llm) - before
        kept = llm.collective_rpc(lambda worker: worker.deferred)[0]
        assert kept == 0 if how == "at once" else kept > 60
    assert accepted["deferred"] == accepted["at once"] != accepted["lost"]


@pytest.mark.parametrize("llm", ["eagle3"], indirect=True)
def test_one_who_wants_no_drafts_runs_no_drafter(llm):
    """A request that opted out of drafts costs its drafter no forward pass, and is taken in when it ends."""
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    llm.collective_rpc(defer, args=("deferred",))
    parameters = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, extra_args={"crossspec": "off"})
    llm.generate(engines.prompts(1), parameters, use_tqdm=False)
    engines.generate(llm, engines.prompts(1), max_tokens=4)
    # The prompt's last token and all that were generated but the last, whose states nobody has computed.
    assert llm.collective_rpc(lambda worker: worker.deferred)[0] == 39

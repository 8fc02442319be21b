"""A draft model of its own: plain's text, and in every round the drafts that the model makes of the text alone."""

import functools
import itertools
import json
import shutil
from unittest import mock

import checkpoints
import engines
import pytest
import torch
from reference import recorder
from safetensors.torch import load_file, save_file
from steps import DEVICE, step_inputs

from vllm_crossspec.drafters.draft_model import inputs, naive
from vllm_crossspec.kinds.checkpoint import check_drafter
from vllm_crossspec.types import TargetFacts

DRAFTS = 4
MAX_SEQS = 3
POCKET, CLUSTERS = engines.POCKET / "draft-model", engines.POCKET / "flashhead-draft-model"

# -- the rows of the first pass ---------------------------------------------------------------------------------------


def poisoned(num_slots, capacity):
    """Buffers full of what nobody should find there."""

    def full(size, dtype=torch.int64):
        return torch.full((size,), -777, dtype=dtype, device=DEVICE)

    return inputs.RoundRows(
        input_ids=full(capacity, torch.int32),
        positions=full(capacity),
        row_slots=full(capacity),
        query_start_loc=full(num_slots + 1, torch.int32),
        seq_lens=full(num_slots, torch.int32),
        bonus_rows=full(num_slots),
        bonus_positions=full(num_slots),
        request_slots=full(num_slots),
        temperature=full(num_slots, torch.float32),
        seeds=full(num_slots),
    )


def batch(seed, num_reqs, num_slots, longest, max_model_len):
    """A step of some requests inside their prompts, some with rejected rows, and one at the end of its positions."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    lengths = draw(1, longest + 1, num_reqs)
    firsts = draw(0, max_model_len - longest, num_reqs)
    firsts[-1] = max_model_len - lengths[-1]
    return step_inputs(
        input_ids=draw(0, 500, int(lengths.sum())).to(torch.int32),
        positions=torch.cat([first + torch.arange(n) for first, n in zip(firsts, lengths, strict=True)]),
        query_start_loc=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(torch.int32),
        idx_mapping=torch.randperm(num_slots, generator=generator)[:num_reqs],
        num_sampled=draw(0, 3, num_reqs).to(torch.int32),
        num_rejected=(torch.rand(num_reqs, generator=generator) * lengths).to(torch.int32),
        last_sampled=draw(0, 500, num_slots),
        temperature=torch.rand(num_slots, generator=generator),
        seeds=draw(0, 1 << 40, num_slots),
    )


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("num_rows", [2, 3, 10])
@pytest.mark.parametrize(
    ("num_reqs", "num_slots", "longest", "capacity"),
    [(1, 1, 1, 2), (1, 4, 5, 100), (3, 3, 9, 6), (5, 7, 300, 64), (2, 5, 3, 7), (4, 4, 2, 5)],
)
def test_rows_are_the_twins(num_reqs, num_slots, longest, capacity, num_rows, writes):
    step = batch(longest, num_reqs, num_slots, longest, max_model_len=longest + 20)
    bounds = {"num_rows": num_rows, "max_model_len": longest + 20, "writes": writes}
    found, wanted = poisoned(num_slots, capacity), poisoned(num_slots, capacity)
    inputs.prepare_rows(step, num_reqs, **bounds, out=found)
    naive.prepare_rows(step, num_reqs, **bounds, out=wanted)
    for name, mine, theirs in zip(inputs.RoundRows._fields, found, wanted, strict=True):
        assert torch.equal(mine, theirs), name


def test_every_row_has_its_place():
    """By hand: two drafts of four accepted; inside a prompt; a prompt of one token that was just computed."""
    out = poisoned(4, 9)
    step = step_inputs(
        input_ids=torch.tensor([10, 11, 12, 13, 14, 20, 21, 30], dtype=torch.int32),
        positions=torch.tensor([5, 6, 7, 8, 9, 0, 1, 0]),
        query_start_loc=torch.tensor([0, 5, 7, 8], dtype=torch.int32),
        idx_mapping=torch.tensor([2, 0, 3]),
        num_sampled=torch.tensor([3, 0, 1], dtype=torch.int32),
        num_rejected=torch.tensor([2, 0, 0], dtype=torch.int32),
        last_sampled=torch.tensor([0, 0, 99, 98]),
        temperature=torch.zeros(4),
        seeds=torch.zeros(4, dtype=torch.int64),
    )
    inputs.prepare_rows(step, 3, num_rows=2, max_model_len=64, writes=True, out=out)
    assert out.input_ids.tolist() == [12, 99, 21, 21, 30, 98, 0, 0, -777]
    assert out.positions.tolist() == [7, 8, 0, 1, 0, 1, 0, 0, -777]
    assert out.seq_lens.tolist() == [9, 2, 2, 0]
    assert out.query_start_loc.tolist() == [0, 2, 4, 6, 6]
    assert out.bonus_positions.tolist() == [8, 1, 1, 0]
    assert out.request_slots.tolist() == [2, -1, 3, -1]
    assert out.bonus_rows.tolist() == [1, 3, 5, 0]
    assert out.row_slots.tolist() == [2, 2, -1, -1, 3, 3, -1, -1, -777]


# -- checkpoints ------------------------------------------------------------------------------------------------------

FACTS = TargetFacts(name="target", hidden_size=256, vocab_size=4096, num_layers=8)


def folder_of(path, **changes):
    """A folder with the target's config.json, something of it changed."""
    path.mkdir()
    config = json.loads((engines.TARGET / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return str(path)


def facts_of(folder, target=FACTS):
    return check_drafter("draft_model", str(folder), "speculative_config.model", target, has_weights=False)


def test_a_language_model_of_another_width_is_a_draft_model(tmp_path):
    facts = facts_of(folder_of(tmp_path / "d", hidden_size=64, num_hidden_layers=2))
    assert facts.target_layers == () and facts.vocab_size == facts.draft_vocab_size == 4096
    assert facts.max_draft_tokens is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"vocab_size": 5000}, "has a vocabulary of 5000 tokens, but target has 4096"),
        ({"vocab_size": None}, "config.json has no 'vocab_size'"),
        ({"architectures": ["BertForMaskedLM"]}, "describes BertForMaskedLM, but a draft model is a causal"),
        ({"architectures": ["T5ForCausalLM"], "is_encoder_decoder": True}, "but a draft model is a causal"),
        ({"architectures": None}, "describes no architecture, but a draft model is a causal"),
        ({"vision_config": {}}, "Qwen3ForCausalLM with vision_config, but a draft model is a causal"),
        (
            {"architectures": ["FlashHeadQwen3ForCausalLM"]},
            "give the plain model as model and this folder as head.model",
        ),
    ],
)
def test_what_is_no_draft_model_gets_one_sentence(tmp_path, changes, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        facts_of(folder_of(tmp_path / "d", **changes))
    assert str(caught.value).startswith("speculative_config.model: ") and "\n" not in str(caught.value)


def test_drafters_that_read_the_target_are_no_draft_models(tmp_path):
    speculators = checkpoints.eagle3_as_speculators(engines.EAGLE3, tmp_path / "s", engines.TARGET)
    for folder in (engines.EAGLE3, engines.DFLASH, engines.DART, speculators):
        with pytest.raises(ValueError, match="describes a drafter that reads the target's states"):
            facts_of(folder)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"max_position_embeddings": 256},
            "knows 256 positions, but the target is to have 512; set --max-model-len 256",
        ),
        ({"vocab_size": 5000}, "speculative_config.model: this drafter has a vocabulary of 5000 tokens"),
    ],
)
def test_what_cannot_follow_the_target_gets_one_sentence(tmp_path, changes, sentence):
    from vllm import EngineArgs

    folder = folder_of(tmp_path / "d", **changes)
    (tmp_path / "d" / "model.safetensors").symlink_to(engines.TARGET / "model.safetensors")
    arguments = EngineArgs(
        str(engines.TARGET),
        dtype="float32",
        max_model_len=512,
        speculative_config={"method": "draft_model", "model": folder, "tree": engines.CHAIN},
    )
    with pytest.raises(ValueError, match=sentence) as caught:
        arguments.create_engine_config()
    assert "\n" not in str(caught.value)


# -- engines ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def noisy(tmp_path_factory):
    """The target with noise on its weights: a draft model that is right about half of the time."""
    folder = tmp_path_factory.mktemp("noisy") / "model"
    shutil.copytree(engines.TARGET, folder)
    generator = torch.Generator().manual_seed(0)
    tensors = {name: x.float() for name, x in load_file(folder / "model.safetensors").items()}
    for x in tensors.values():
        x += NOISE * x.std(correction=0) * torch.randn(x.shape, generator=generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


NOISE = 0.25


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A random model of another width, depth and number of heads than the target's."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("tiny") / "model"
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    return folder


def spec(folder, num_drafts=DRAFTS, **keys):
    return {
        "method": "draft_model",
        "model": str(folder),
        "num_speculative_tokens": num_drafts,
        "tree": engines.CHAIN,
    } | keys


@pytest.fixture(scope="module")
def results(noisy, tiny):
    """Scenarios by name of the drafter."""
    specs = {"noisy": spec(noisy), "tiny": spec(tiny), "itself": spec(engines.TARGET, 1)}

    @functools.cache
    def run(name):
        return engines.run_scenarios(specs[name], is_async=name == "noisy")

    return run


@pytest.mark.nightly(keep=1)
@pytest.mark.e2e
@pytest.mark.parametrize("scenario", ["one", "eight", "chunked", "prefix"])
@pytest.mark.parametrize("name", ["noisy", "tiny", "itself"])
def test_greedy_is_plain(results, name, scenario):
    assert results(name).tokens[scenario] == engines.results("plain").tokens[scenario]


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["noisy", "tiny", "itself"])
def test_seeded_text_is_plains_token_for_token(results, name):
    tokens = results(name).tokens
    assert tokens["seeded again"] == tokens["seeded"] == engines.results("plain").tokens["seeded"]


@pytest.mark.e2e
def test_acceptance_is_what_the_models_make_it(results):
    noisy, tiny, itself = (results(name).counts for name in ("noisy", "tiny", "itself"))
    assert 0.3 * DRAFTS < noisy.accepted / noisy.drafts < 0.95 * DRAFTS
    assert tiny.drafts > 20 and tiny.accepted < 0.2 * tiny.drafts
    # Placeholders with which the scheduler pads cached prompts are drafts that vLLM counts and nobody made.
    assert itself.accepted >= 0.97 * itself.drafts


@pytest.mark.e2e
def test_the_pocket_draft_model_with_its_dense_head_and_with_clusters():
    """The same text, and nearly as many drafts accepted."""
    wanted, accepted = engines.plain(8), {}
    for method, keys in (("draft_model", {"tree": engines.CHAIN}), ("flashhead", {"head": str(CLUSTERS)})):
        drafter = {"method": method, "model": str(POCKET), "num_speculative_tokens": engines.K} | keys
        with engines.engine(drafter) as llm:
            assert engines.generate(llm, engines.prompts(8)) == wanted
            counts = engines.counts(llm)
        accepted[method] = counts.accepted / counts.drafts
    print(accepted)
    assert accepted["draft_model"] > 0.5
    assert accepted["flashhead"] == pytest.approx(accepted["draft_model"], rel=0.05)


# -- what an engine drafts, beside the model itself -------------------------------------------------------------------


@functools.cache
def model_of(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@functools.cache
def prompts():
    """Of every kind: short ones, one of several chunks, of one token, and more of them than run at once."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(engines.TARGET)
    texts = [tokenizer.encode(text) for text in engines.prompts(8)]
    return [texts[0], list(itertools.chain(*texts[4:])), [17], texts[1], [5, 9], texts[2], texts[3]]


COME_AND_GO = (40, 40, 6, 6)
"""Lengths of the answers to two requests while two more come and go."""


def ask(llm, texts, *lengths):
    """Greedy answers of these lengths to prompts of token ids."""
    from vllm import SamplingParams

    parameters = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = llm.generate([{"prompt_token_ids": t} for t in texts], parameters, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@functools.cache
def plain():
    """Prompts, and what the target alone answers to them, of three tests here and of those of trees."""
    short = [prompts()[0][:60], prompts()[3][:70], [17]]
    asked = {
        "to the end": (short, [96 - len(text) for text in short]),
        "preempted": ([(prompts()[0] * 3)[:40], (prompts()[3] * 3)[:41], (prompts()[5] * 3)[:42]], (60, 60, 60)),
        "come and go": (prompts()[:4], COME_AND_GO),
    }

    def make():
        with engines.engine(None, skip_tokenizer_init=True, enable_prefix_caching=False) as llm:
            return {name: (texts, ask(llm, texts, *lengths)) for name, (texts, lengths) in asked.items()}

    return engines.kept("plain for a draft model", make)


@torch.inference_mode()
def equal_rounds(model, traces):
    """(rounds whose every draft is the model's first choice of the text before it, ties aside, rounds)."""
    equal = total = 0
    for trace in traces:
        for known, drafted in trace.drafts.items():
            if drafted[0] < 0:  # a round without drafts
                continue
            logits = model(torch.tensor([trace.tokens[:known] + drafted])).logits[0, known - 1 : -1]
            behind = logits.max(dim=-1).values - logits.gather(1, torch.tensor(drafted)[:, None])[:, 0]
            equal += bool((behind < 1e-3).all())
            total += 1
    return equal, total


def proposer(llm):
    host = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.speculator
    return host.proposers["draft_model"]


@pytest.fixture(scope="module")
def llm(noisy):
    settings = {"skip_tokenizer_init": True, "enable_prefix_caching": False, "max_num_seqs": MAX_SEQS}
    with engines.engine(spec(noisy), **settings) as running:
        running.collective_rpc(recorder.start)
        yield running


def drafted(llm, noisy, max_tokens=20):
    return equal_rounds(model_of(noisy), recorder.trace(llm, prompts(), max_tokens))


@pytest.mark.e2e
def test_every_draft_is_the_models_own(llm, noisy):
    """In mixed batches, past rejected and past accepted drafts, in and after chunks of prompts."""
    traces = recorder.trace(llm, prompts(), 20)
    equal, total = equal_rounds(model_of(noisy), traces)
    assert equal == total > 40
    steps = [b - a for trace in traces for a, b in zip(sorted(trace.drafts), sorted(trace.drafts)[1:])]  # noqa: B905
    assert {1, DRAFTS + 1} < set(steps), "rounds that accept nothing, everything, and something between"


@pytest.mark.e2e
def test_a_missing_entry_would_be_seen(llm, noisy):
    """Without row 0 the last draft of a round whose drafts were all accepted is never cached."""
    own = proposer(llm)
    prepare = own._prepare_first_pass

    def without_first_rows(num_reqs, metadata):
        prepare(num_reqs, metadata)
        own.block_tables.slot_mappings[:, 0 : 2 * num_reqs : 2] = -1

    with mock.patch.object(own, "_prepare_first_pass", without_first_rows):
        equal, total = drafted(llm, noisy)
    assert equal < 0.95 * total
    equal, total = drafted(llm, noisy)
    assert equal == total


@pytest.mark.e2e
def test_shifted_positions_would_be_seen(llm, noisy):
    def shifted(*step, **arguments):
        inputs.prepare_rows(*step, **arguments)
        arguments["out"].positions[1::2] += 1

    with mock.patch("vllm_crossspec.drafters.draft_model.proposer.prepare_rows", shifted):
        equal, total = drafted(llm, noisy)
    assert equal < 0.9 * total


@pytest.mark.e2e
def test_prompts_left_out_would_be_seen_and_change_no_text(llm, noisy):
    whole = [trace.tokens for trace in recorder.trace(llm, prompts(), 20)]
    with mock.patch.object(proposer(llm), "_take_target_rows", lambda step, has_cache: None):
        traces = recorder.trace(llm, prompts(), 20)
    equal, total = equal_rounds(model_of(noisy), traces)
    assert equal < 0.5 * total
    assert [trace.tokens for trace in traces] == whole


@pytest.mark.e2e
def test_a_round_is_as_many_forwards_as_drafts(llm):
    """K forwards a round: two rows of the one request, then one each; the prompt takes one more."""
    rows = []
    forward = proposer(llm)._forward

    def counted(token_ids, *rest):
        rows.append(len(token_ids))
        return forward(token_ids, *rest)

    with mock.patch.object(proposer(llm), "_forward", counted):
        trace = recorder.trace(llm, [prompts()[0]], 20)[0]
    assert rows[0] == trace.num_prompt_tokens
    rounds = [rows[i : i + DRAFTS] for i in range(1, len(rows), DRAFTS)]
    assert len(rounds) > 3 and all(r == [2] + [1] * (DRAFTS - 1) for r in rounds)


@pytest.mark.nightly
@pytest.mark.e2e
def test_the_end_of_the_models_positions(noisy):
    """Up to the longest text that is allowed, where drafts would be beyond it; and that text is plain's."""
    settings = {"skip_tokenizer_init": True, "enable_prefix_caching": False, "max_model_len": 96}
    texts, wanted = plain()["to the end"]
    with engines.engine(spec(noisy), **settings) as llm:
        llm.collective_rpc(recorder.start)
        traces = recorder.trace(llm, texts, 96)
    assert [trace.tokens[trace.num_prompt_tokens :] for trace in traces] == wanted
    assert {len(trace.tokens) for trace in traces} >= {96}
    early = [t._replace(drafts={k: d for k, d in t.drafts.items() if k + DRAFTS <= 96}) for t in traces]
    equal, total = equal_rounds(model_of(noisy), early)
    assert equal == total > 20


@pytest.mark.nightly
@pytest.mark.e2e
def test_preempted_requests_are_drafted_for_again(noisy):
    """Too few blocks for all: some requests lose theirs, are computed anew, and find the drafter's entries again."""
    settings = {"skip_tokenizer_init": True, "enable_prefix_caching": False, "max_model_len": 128, "block_size": 32}
    texts, wanted = plain()["preempted"]
    with engines.engine(spec(noisy), num_gpu_blocks_override=9, **settings) as llm:
        llm.collective_rpc(recorder.start)
        traces = recorder.trace(llm, texts, 60)
        preempted = next(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    assert preempted > 0
    assert [trace.tokens[trace.num_prompt_tokens :] for trace in traces] == wanted
    equal, total = equal_rounds(model_of(noisy), traces)
    assert equal == total > 30


@pytest.mark.e2e
def test_cached_prompts_have_the_drafters_entries_too(noisy):
    """A second turn finds the first one's prompt and answer in the cache; drafts are still the model's."""
    with engines.engine(spec(noisy), skip_tokenizer_init=True, block_size=32) as llm:
        llm.collective_rpc(recorder.start)
        first = recorder.trace(llm, [prompts()[0], prompts()[3]], 40)
        before = engines.counts(llm).prefix_hits
        # Whole turns, a turn cut so that one token is left to compute, and the same prompt twice at once.
        turns = [[*first[0].tokens, 17, 9], first[1].tokens[:65], [*first[0].tokens, 3], [*first[0].tokens, 3]]
        second = recorder.trace(llm, turns, 16)
        assert engines.counts(llm).prefix_hits - before > sum(map(len, turns)) / 2
    equal, total = equal_rounds(model_of(noisy), first + second)
    assert equal == total > 20


@pytest.mark.nightly
@pytest.mark.e2e
def test_a_schedule_that_drops_to_nothing_and_returns(noisy):
    """From three requests on nothing is drafted, but the drafter's cache is kept for when fewer run."""
    tree = {"type": "chain", "by_batch_size": {"1": DRAFTS, "3": 0}}
    settings = {"skip_tokenizer_init": True, "enable_prefix_caching": False}
    texts, wanted = plain()["come and go"]
    with engines.engine(spec(noisy, tree=tree), **settings) as llm:
        llm.collective_rpc(recorder.start)
        assert ask(llm, texts, *COME_AND_GO) == wanted
        rounds = llm.collective_rpc(recorder.take)[0]
    traces = lined_up(rounds, texts, wanted)
    widths = {request: [d[0] >= 0 for _, d in trace.drafts.items()] for request, trace in enumerate(traces)}
    assert False in widths[0] and True in widths[0] and widths[0][-1], "drafts stopped and came back"
    equal, total = equal_rounds(model_of(noisy), traces)
    assert equal == total > 8


def forbid_the_head(worker):
    """From now on, the drafter's output layer raises."""
    worker.model_runner.speculator.active.head.choose = None


@pytest.mark.nightly
@pytest.mark.e2e
@pytest.mark.skipif(engines.REPLAYS_GRAPHS, reason="a captured pass has its output layer in it")
def test_rounds_without_drafts_keep_the_cache_and_run_no_output_layer(noisy):
    texts, wanted = plain()["come and go"]
    settings = {"skip_tokenizer_init": True, "enable_prefix_caching": False}
    for width in (0, 1):
        tree = {"type": "chain", "by_batch_size": {"1": width}}
        with engines.engine(spec(noisy, tree=tree), **settings) as llm:
            llm.collective_rpc(forbid_the_head)
            if not width:
                assert ask(llm, texts, *COME_AND_GO) == wanted
            else:  # the control
                with pytest.raises(TypeError, match="not callable"):
                    ask(llm, texts, *COME_AND_GO)


def lined_up(rounds, texts, answers):
    """The rounds of requests that came in this order, as traces; vLLM numbers requests as they come."""
    names = sorted({name for name, _, _ in rounds}, key=lambda name: int(name.split("-")[0]))
    traces = {n: recorder.Trace([*t, *a], len(t), {}) for n, t, a in zip(names, texts, answers, strict=True)}
    known = {name: trace.num_prompt_tokens for name, trace in traces.items()}
    for name, num_sampled, draft in rounds:
        known[name] += num_sampled
        if num_sampled and known[name] <= len(traces[name].tokens):
            traces[name].drafts[known[name]] = draft
    return [traces[name] for name in names]


# -- the target as its own draft model, and its forward passes --------------------------------------------------------


def count_target_forwards(worker):
    """From now on, count the target's forward passes."""
    worker.target_forwards = 0

    def count(*_):
        worker.target_forwards += 1

    worker.model_runner.model.register_forward_hook(count)


def take_target_forwards(worker):
    count, worker.target_forwards = worker.target_forwards, 0
    return count


def rounds_of(llm, max_tokens, **sampling):
    """(the target's forwards, rounds, accepted drafts) of one request."""
    before = engines.counts(llm)
    llm.collective_rpc(take_target_forwards)
    texts = [{"prompt_token_ids": prompts()[0]}]
    (tokens,) = engines.generate(llm, texts, max_tokens=max_tokens, ignore_eos=True, **sampling)
    assert len(tokens) == max_tokens
    after = engines.counts(llm)
    (forwards,) = llm.collective_rpc(take_target_forwards)
    return forwards, after.drafts - before.drafts, after.accepted - before.accepted


def counting(drafter):
    settings = {"skip_tokenizer_init": True, "enable_prefix_caching": False, "async_scheduling": False}
    return engines.engine(drafter, **settings)


@pytest.mark.e2e
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"])
def test_the_target_drafts_for_itself_without_a_miss(itself, sampling):
    """Every draft of every round is accepted; sampled ones, too, for they are coupled with the target's noise."""
    rounds = 7
    forwards, drafts, accepted = rounds_of(itself, 1 + rounds * (DRAFTS + 1), **sampling)
    assert (forwards, drafts, accepted) == (1 + rounds, rounds, rounds * DRAFTS)


@pytest.fixture(scope="module")
def itself():
    with counting(spec(engines.TARGET)) as running:
        running.collective_rpc(count_target_forwards)
        yield running


@pytest.mark.e2e
@pytest.mark.parametrize("drafter", ["eagle3", "noisy"])
def test_a_round_costs_the_target_one_forward(noisy, drafter):
    """Deferred verification (Ma and Wang 2026, section 3.6.2): none to finish a round, its last token waits."""
    specs = {"eagle3": engines.ours("eagle3", engines.EAGLE3), "noisy": spec(noisy)}
    num_drafts = specs[drafter]["num_speculative_tokens"]
    with counting(specs[drafter]) as llm:
        llm.collective_rpc(count_target_forwards)
        for max_tokens in (1, 2, 41):
            forwards, rounds, accepted = rounds_of(llm, max_tokens)
            assert forwards == 1 + rounds
            assert max_tokens <= 1 + rounds + accepted <= max_tokens + num_drafts
        assert 0 < accepted < rounds * num_drafts, "some drafts are accepted, and some are not"


@pytest.mark.e2e
def test_the_rejection_sampler_verifies_its_drafts_too():
    """vLLM's own sampler, with the draft model's distributions kept for it."""
    texts = [{"prompt_token_ids": prompts()[0]}]
    with counting(None) as llm:
        wanted = engines.generate(llm, texts, max_tokens=21)
    verified = {"verification": "rejection", "draft_sample_method": "probabilistic"}
    with counting(spec(engines.TARGET, **verified)) as llm:
        assert engines.generate(llm, texts, max_tokens=21) == wanted
        counts = engines.counts(llm)
        assert counts.accepted == DRAFTS * counts.drafts > 0
        seeded = {"temperature": 0.8, "seed": 7}
        assert engines.generate(llm, texts, **seeded) == engines.generate(llm, texts, **seeded)

"""Data-parallel ranks: which are engines of their own, what each may draft, and a server of two."""

import concurrent.futures
import contextlib
import os
import pickle
import re
import time
from types import SimpleNamespace

import engines
import pytest
from servers import serving
from test_bad_input import EAGLE3, config_of, whiflash
from test_heterospec_engine import BINS, TREE, calibration_file
from typer.testing import CliRunner

from vllm_crossspec.cli.app import app
from vllm_crossspec.config.schema import settings_of
from vllm_crossspec.drafters.draft_model.checkpoint import check_follows
from vllm_crossspec.ranks import step_together

pytestmark = pytest.mark.e2e

LAUNCHER = "external_launcher"
TOGETHER = "data parallelism of a target with experts or an external launcher, whose ranks run every step together"


def parallel(size=2, is_moe=False, backend=None):
    return SimpleNamespace(data_parallel_size=size, is_moe_model=is_moe, distributed_executor_backend=backend)


@pytest.mark.parametrize(
    ("config", "together"),
    [
        (parallel(), False),
        (parallel(backend="mp"), False),
        (parallel(is_moe=True), True),
        (parallel(is_moe=None), True),
        (parallel(backend=LAUNCHER), True),
        (parallel(size=1, is_moe=True), False),
        (parallel(size=1, backend=LAUNCHER), False),
    ],
)
def test_data_parallel_ranks_that_step_together(config, together):
    assert step_together(config) is together


@contextlib.contextmanager
def said_to_have_experts(monkeypatch):
    """The pocket target, and whatever else is loaded, with experts by its config."""
    from vllm.config import ModelConfig

    with monkeypatch.context() as patch:
        patch.setattr(ModelConfig, "get_num_experts", lambda self: 8)
        yield


def adaptive(folder):
    return {"tree": TREE, "adaptive": {"model": calibration_file(folder, BINS["spread"])}}


def specs(folder):
    """What ranks would do apart from each other, and the sentence that refuses it where they step together."""
    return {
        "adaptive": (EAGLE3 | adaptive(folder), f"adaptive trees with {TOGETHER} (leave out adaptive)"),
        "routed": (whiflash(), f"several drafters with {TOGETHER} (give one drafter)"),
    }


@pytest.mark.parametrize("name", ["adaptive", "routed"])
def test_data_parallel_ranks_of_a_dense_target_draft_apart(name, tmp_path, monkeypatch):
    spec, sentence = specs(tmp_path)[name]
    assert config_of(spec, data_parallel_size=2).parallel_config.data_parallel_size == 2
    with said_to_have_experts(monkeypatch):
        config_of(spec)
        with pytest.raises(ValueError) as refused:
            config_of(spec, data_parallel_size=2)
    assert sentence in str(refused.value)


def test_data_parallel_ranks_with_experts_have_one_drafter_and_its_whole_trees(monkeypatch):
    monkeypatch.delenv("CROSSSPEC_FIXED_WIDTHS", raising=False)
    with said_to_have_experts(monkeypatch):
        config = config_of(engines.tree("eagle3", engines.EAGLE3, **TREE), data_parallel_size=2)
    assert config.speculative_config.num_speculative_tokens_per_batch_size is None
    assert settings_of(config).drafters["eagle3"].tree.by_batch_size is None


@pytest.mark.parametrize(
    ("schedule", "widths"), [("auto", (20, 10, 5, 3, 0)), ({"1": 20, "8": 4}, (20, 4)), (None, (20, 10, 5, 3, 0))]
)
def test_data_parallel_ranks_get_the_draft_lengths_of_the_front_end(schedule, widths, monkeypatch):
    """vLLM's front end drops them from its config, from which the ranks' are made."""
    from vllm.config import VllmConfig

    from vllm_crossspec.load.measure import steps_wanted

    def of_a_rank():
        spec = engines.tree("eagle3", engines.EAGLE3, **TREE, **({"by_batch_size": schedule} if schedule else {}))
        config = pickle.loads(pickle.dumps(config_of(spec, data_parallel_size=2)))
        config.parallel_config.reconfigure_for_independent_dp_rank()
        config.__post_init__()
        return config

    monkeypatch.delenv("CROSSSPEC_FIXED_WIDTHS", raising=False)
    rank = of_a_rank()
    ranges = rank.speculative_config.num_speculative_tokens_per_batch_size
    assert tuple(width for _, _, width in ranges) == widths
    assert steps_wanted(rank) is (schedule != {"1": 20, "8": 4})
    original = VllmConfig._maybe_disable_dynamic_sd_for_data_parallel.__wrapped__
    monkeypatch.setattr(VllmConfig, "_maybe_disable_dynamic_sd_for_data_parallel", original)
    assert of_a_rank().speculative_config.num_speculative_tokens_per_batch_size is None


def test_data_parallel_engines_that_are_not_ours_are_left_to_vllm():
    native = engines.native("eagle3", engines.EAGLE3) | {"num_speculative_tokens_per_batch_size": [(1, 8, 3)]}
    config = config_of(native, data_parallel_size=2)
    assert config.speculative_config.num_speculative_tokens_per_batch_size is None


def test_data_parallel_draft_models_with_experts():
    """A dense target's ranks share none of them."""
    model = SimpleNamespace(
        model="drafter", is_moe=True, max_model_len=512, is_hybrid=False, is_attention_free=False, uses_mrope=False,
        is_multimodal_model=False,
    )  # fmt: skip
    config = SimpleNamespace(draft_model_config=model, draft_tensor_parallel_size=1)
    target = SimpleNamespace(max_model_len=512)
    dense, sparse = parallel(), parallel(is_moe=True)
    dense.tensor_parallel_size = sparse.tensor_parallel_size = 1
    check_follows(config, target, dense, "speculative_config.")
    with pytest.raises(ValueError) as refused:
        check_follows(config, target, sparse, "speculative_config.")
    assert str(refused.value) == (
        "speculative_config.model: drafter has experts, which this target's data-parallel ranks would share; "
        "give a dense model"
    )


# -- a server of two ranks --------------------------------------------------------------------------------------------

MAX_TOKENS = 24
SEEDED = {"temperature": 0.8, "top_p": 0.95}


@pytest.fixture(scope="module")
def plain():
    """What the target alone answers to a dozen prompts: greedily, and with a seed each."""
    from vllm import SamplingParams

    prompts = engines.prompts(12)
    with engines.engine(None) as llm:
        decode = llm.get_tokenizer().decode
        greedy = engines.generate(llm, prompts, max_tokens=MAX_TOKENS)
        sampling = [SamplingParams(max_tokens=MAX_TOKENS, seed=i, **SEEDED) for i in range(len(prompts))]
        sampled = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, sampling, use_tqdm=False)]
    return {
        key: [decode(ids, skip_special_tokens=True) for ids in texts]
        for key, texts in {"greedy": greedy, "seeded": sampled}.items()
    }


@contextlib.contextmanager
def two_ranks(spec, monkeypatch):
    """A server of two ranks, and what asks it the dozen: with the same sampling, or with a seed each."""
    cores = os.environ.get("VLLM_CPU_OMP_THREADS_BIND") or ",".join(map(str, sorted(os.sched_getaffinity(0))))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores}|{cores}")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # a rank's worker is in its engine's process: fewer start
    few = ("--distributed-executor-backend", "uni", "--api-server-count", "1", "--max-num-seqs", "2")
    with serving(spec, "--data-parallel-size", "2", *few) as server:
        client = server.client()

        def complete(number, **sampling):
            prompt = engines.prompts(12)[number]
            return client.completions.create(model="pocket", prompt=prompt, max_tokens=MAX_TOKENS, **sampling)

        def ask():
            with concurrent.futures.ThreadPoolExecutor(12) as pool:
                greedy = list(pool.map(lambda i: complete(i, temperature=0), range(12)))
                seeded = list(pool.map(lambda i: complete(i, seed=i, **SEEDED), range(12)))
            texts = {"greedy": [a.choices[0].text for a in greedy], "seeded": [a.choices[0].text for a in seeded]}
            return texts, sum(a.usage.completion_tokens for a in greedy + seeded)

        yield server, ask


def test_data_parallel_server_of_two_ranks(plain, tmp_path, monkeypatch):
    """All that ranks do apart: a router, its measured costs, adaptive trees, measured draft lengths, and a swap."""
    monkeypatch.delenv("CROSSSPEC_FIXED_WIDTHS", raising=False)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")  # takes new weights
    spec = whiflash({"policy": "goodput"}, eagle3={"model": str(engines.EAGLE3)} | adaptive(tmp_path))
    with two_ranks(spec, monkeypatch) as (server, ask):
        texts, num_tokens = ask()
        assert texts == plain
        check_metrics(server, num_tokens)
        url, folder = f"http://127.0.0.1:{server.port}", str(engines.POCKET / "eagle3-longer")
        done = CliRunner().invoke(app, ["swap", url, "eagle3", folder])
        assert done.exit_code == 0 and done.output.strip() == "new weights: eagle3", done.output
        assert ask()[0] == plain
        log = server.log.read_text()
    line = r"\(EngineCore_DP(\d) .*crossspec: (most draft tokens of a request|drafting does not pay here at any load)"
    chosen = re.findall(line, log)
    assert sorted(rank for rank, _ in chosen) == ["0", "1"]
    swapped = re.findall(r"\(EngineCore_DP(\d) .*crossspec: new weights for the drafters eagle3", log)
    assert sorted(swapped) == ["0", "1"]
    # A rank that measured that drafts do not pay has no rounds to time.
    assert log.count("crossspec: rounds timed in") == sum(what.startswith("most") for _, what in chosen)


def test_data_parallel_server_of_two_ranks_with_every_drafter(plain, monkeypatch):
    drafters = {
        "confu": {"model": str(engines.CONFU), "tree": {"num_nodes": 8}},
        "eagle3": {"model": str(engines.EAGLE3), "head": {"model": str(engines.POCKET / "flashhead-eagle3")}},
        "dart": {"model": str(engines.DART), "tree": {"num_nodes": 12}, "ngram": {"model": str(engines.NGRAM)}},
        "dflash": {"model": str(engines.DFLASH)},
    }
    spec = whiflash({"policy": "entropy", "threshold": [2.0, 1.2, 0.5]}, drafters)
    with two_ranks(spec, monkeypatch) as (server, ask):
        texts, num_tokens = ask()
        assert texts == plain
        check_metrics(server, num_tokens)
        drafts = {name: server.metric("crossspec:drafts_total", drafter=name) for name in drafters}
        assert min(drafts.values()) > 3, drafts


def check_metrics(server, num_tokens):
    """Each rank's counters are what vLLM counted of it, and together they are what the texts needed."""
    time.sleep(2)  # whatever was counted is published by now: once a second

    def both(name):
        return [server.metric(name, engine=str(rank)) for rank in range(2)]

    requests, drafts = both("vllm:request_success_total"), both("vllm:spec_decode_num_drafts_total")
    accepted = both("vllm:spec_decode_num_accepted_tokens_total")
    assert sum(requests) == 24 and min(requests) > 0, requests
    assert sum(both("vllm:generation_tokens_total")) == num_tokens
    assert both("vllm:prefix_cache_hits_total") == [0, 0], "whose placeholders vLLM counts as drafts"
    assert both("crossspec:drafts_total") == drafts and min(drafts) > 0
    assert both("crossspec:accepted_tokens_total") == accepted and min(accepted) > 0
    assert both("crossspec:accepted_tokens_per_pos_total") == accepted
    for rank, decisions in enumerate(both("crossspec:router_decisions_total")):
        # One for each prompt and each verified draft, but none in rounds that plan no drafts.
        assert drafts[rank] <= decisions <= requests[rank] + drafts[rank]

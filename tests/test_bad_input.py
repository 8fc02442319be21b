"""Every mistake that a new user makes gets one sentence, before anything heavy is loaded, and a non-zero exit."""

import asyncio
import dataclasses
import json
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import engines
import pytest
from servers import command

from vllm_crossspec.config.schema import settings_of
from vllm_crossspec.step.requests import RequestError, check_request, check_token_lists
from vllm_crossspec.vllm_api import check as compat

pytestmark = pytest.mark.e2e
CONFIGS = Path(__file__).parents[1] / "configs"


def config_of(spec, **extra):
    """Build the engine's configuration, as `vllm serve` and `LLM` both do first."""
    from vllm import EngineArgs

    arguments = EngineArgs(
        str(engines.TARGET),
        dtype="float32",
        max_model_len=512,
        enforce_eager=True,
        speculative_config=spec,
        **extra,
    )
    return arguments.create_engine_config()


def changed(source, folder, **changes):
    """A copy of a drafter whose config.json says something else."""
    shutil.copytree(source, folder / "d")
    file = folder / "d" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return str(folder / "d")


def truncated(source, folder):
    file = Path(changed(source, folder), "model.safetensors")
    file.write_bytes(file.read_bytes()[:100_000])
    return str(file.parent)


EAGLE3 = engines.ours("eagle3", engines.EAGLE3)
DFLASH = engines.ours("dflash", engines.DFLASH)
DART = {"method": "dart", "model": str(engines.DART)}


def whiflash(router=None, drafters=None, **changed_drafters):
    """Both drafters and a router, something of it changed."""
    pair = {"eagle3": {"model": str(engines.EAGLE3)}, "dflash": {"model": str(engines.DFLASH)}}
    return {"method": "whiflash", "drafters": drafters or pair | changed_drafters, "router": router or {}}


def store_of(folder, vocab_size):
    """A store of few n-grams for some vocabulary, without a tokenizer to compare."""
    import numpy as np
    from ngram_counts import random_tokens

    from crossspec_tools.ngram.build import build, make_plan

    np.save(folder / "ids.npy", random_tokens(0))
    build(make_plan([folder / "ids.npy"], order=3, vocab_size=vocab_size), folder / "other.safetensors")
    return folder / "other.safetensors"


def cut_store(folder):
    file = folder / "cut.safetensors"
    file.write_bytes(engines.NGRAM.read_bytes()[:200_000])
    return file


AS_TWO = {"a": {"type": "eagle3", "model": str(engines.EAGLE3)}, "b": {"type": "dflash", "model": str(engines.DFLASH)}}
# What test_config, test_check and test_drafter_checkpoints refuse by keys and config.json alone is not repeated here.
# fmt: off
CASES = {
    "another hidden size": (
        lambda tmp: EAGLE3 | {"model": changed(engines.EAGLE3, tmp, hidden_size=512)},
        "speculative_config.model: .*reads states of width 512, but .* has hidden size 256; it was trained for"),
    "truncated weights": (
        lambda tmp: EAGLE3 | {"model": truncated(engines.EAGLE3, tmp)},
        "model.safetensors is damaged or cut short .*copy it again"),
    "longer than the block": (
        lambda tmp: DFLASH | {"num_speculative_tokens": 15},
        "num_speculative_tokens is 15, but this drafter's block holds 7 draft tokens; use 7 or less"),
    "longer than DART's masks": (
        lambda tmp: DART | {"num_speculative_tokens": 9},
        "num_speculative_tokens is 9, but this drafter's block holds 8 draft tokens; use 8 or less"),
    "no store there": (
        lambda tmp: DART | {"ngram": str(tmp / "none")},
        "speculative_config.ngram.model .*: there is no such file"),
    "a store cut short": (
        lambda tmp: DART | {"ngram": str(cut_store(tmp))},
        "speculative_config.ngram.model .* is no whole safetensors file"),
    "a drafter in the store's place": (
        lambda tmp: DART | {"ngram": str(engines.DART / "model.safetensors")},
        "speculative_config.ngram.model .* is a safetensors file but no n-gram store"),
    "a store of another vocabulary": (
        lambda tmp: DART | {"ngram": str(store_of(tmp, 5000))},
        "speculative_config.ngram.model .* is for a vocabulary of 5000 tokens and the model has 4096"),
    "an order beyond the store's": (
        lambda tmp: DART | {"ngram": {"model": str(engines.NGRAM), "order": 5}},
        "speculative_config.ngram.model .* has n-grams of up to . tokens: choose an order of 2 to"),
    "a routed drafter's store": (
        lambda tmp: whiflash(dart={"model": str(engines.DART), "ngram": str(tmp / "none")}),
        "speculative_config.drafters.dart.ngram.model .*: there is no such file"),
    "one of two drafters missing": (
        lambda tmp: whiflash(eagle3={"model": str(tmp / "none")}),
        "speculative_config.drafters.eagle3.model: there is no folder"),
    "one of two drafters cut short": (
        lambda tmp: whiflash(eagle3={"model": truncated(engines.EAGLE3, tmp)}),
        "model.safetensors is damaged or cut short .*copy it again"),
    "drafters of different targets": (
        lambda tmp: whiflash(eagle3={"model": changed(engines.EAGLE3, tmp, hidden_size=512)}),
        "drafters.eagle3.model.* reads states of width 512, but .* has hidden size 256; it was trained for another"),
    "a buffer too small for a round": (
        lambda tmp: whiflash(router={"max_backlog": 7}),
        "router.max_backlog is 7, but one round can accept 8 tokens; use 8 or more"),
    "a correction of nothing": (
        lambda tmp: whiflash(router={"policy": "entropy", "threshold": 2.0, "correct": False}),
        "router.correct is for a trained router: policy 'neural', or 'goodput' with model; leave it out"),
    "no router there": (
        lambda tmp: whiflash(router={"policy": "neural", "model": str(tmp / "none")}),
        "speculative_config.router.model: "),
    "a drafter in the router's place": (
        lambda tmp: whiflash(router={"policy": "neural", "model": str(engines.EAGLE3)}),
        "speculative_config.router.model: .*router.json"),
    "a router of other drafters": (
        lambda tmp: whiflash(drafters=AS_TWO, router={"policy": "neural", "model": str(engines.POCKET / "router")}),
        "speculative_config.router.model: "),
}
# fmt: on


@pytest.mark.parametrize("name", CASES)
def test_one_sentence(tmp_path, name):
    make, sentence = CASES[name]
    with pytest.raises(ValueError, match=sentence) as caught:
        config_of(make(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("asked", ["of", "", 1, ["off"]])
def test_a_request_for_no_mode_of_ours_is_the_clients_mistake(asked):
    """Through vLLM's own `generate`, which makes other kinds of errors a 500 without a message."""
    from vllm import SamplingParams
    from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
    from vllm.v1.engine.async_llm import AsyncLLM

    class Frontend(AsyncLLM):
        log_requests = False

        def __init__(self):
            pass

        def __del__(self):
            pass

        async def add_request(self, request_id, prompt, params, **options):
            check_request(params, ())

    async def ask():
        parameters = SamplingParams(extra_args={"crossspec": asked})
        async for _ in Frontend().generate("Hello", parameters, request_id="0"):
            pass

    with pytest.raises(Exception, match="the extra argument 'crossspec' is") as caught:
        asyncio.run(ask())
    assert isinstance(caught.value, ValueError)  # as all that is refused offline
    answer = create_error_response(caught.value).error
    assert answer.code == 400
    assert answer.message == f"the extra argument 'crossspec' is {asked!r}; use one of tree, chain, off"


TYPOS = ("crosspec", "CrossSpec", "cross_spec", "crossspec_drafter", "crossspec_", "crospec", "crossspec-category")
OTHERS = ("category", "spec", "cross", "speculation", "kv_transfer", "x" * 100_000, "other_cross")
MODES, MATHS = "use one of tree, chain, off", {"crossspec_category": "maths"}
# A request's extra arguments, the router's categories, and how it is refused.
REQUESTS = [
    *(({key: "off"}, (), f"^there is no extra argument '{key}'; use 'crossspec' or 'crossspec_categ") for key in TYPOS),
    *(({"crossspec": value}, (), f"is {written}; {MODES}") for value, written in (
        (0, "0 or false"), (False, "False"), (1, "1"), (0.5, "0.5"),
    )),
    (MATHS, ("chat", "math"), "the extra argument 'crossspec_category' is 'maths'; use one of chat, math"),
    (MATHS, (), "the extra argument 'crossspec_category' is 'maths'; this server's router has no `by_cat"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "known", "sentence"), REQUESTS)
def test_extra_arguments_that_nobody_knows_are_refused(arguments, known, sentence):
    with pytest.raises(RequestError, match=sentence):
        check_request(SimpleNamespace(extra_args=arguments), known)


def test_extra_arguments_of_others_are_left_alone():
    check_request(SimpleNamespace(extra_args=dict.fromkeys(OTHERS, "off")), ())


@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids"])
def test_more_tokens_than_the_sampler_holds(name):
    from vllm import SamplingParams

    tokens = dict.fromkeys(range(1025), 1.0)
    parameters = SamplingParams(**{name: tokens if name == "logit_bias" else list(tokens)})
    with pytest.raises(RequestError, match=f"{name} has 1025 tokens; give 1024 at most"):
        check_token_lists(parameters)
    getattr(parameters, name).pop(0)
    check_token_lists(parameters)


def test_the_v1_runner_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(ValueError, match="needs vLLM's V2 model runner; unset VLLM_USE_V2_MODEL_RUNNER"):
        config_of(EAGLE3)


def test_good_settings_are_resolved():
    config = config_of({k: v for k, v in DFLASH.items() if k != "num_speculative_tokens"})
    assert config.speculative_config.num_speculative_tokens == 7
    assert settings_of(config).drafters["dflash"].target_layers


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("pocket-*.json")), ids=lambda file: file.stem)
def test_the_pocket_configurations_fit_the_pocket_target(file, monkeypatch):
    monkeypatch.chdir(CONFIGS.parent)  # their paths are relative to the repository
    raw = json.loads(file.read_text())
    config = config_of(raw)
    assert settings_of(config).method == raw["method"]


def fields_of_vllm():
    from vllm.config import SpeculativeConfig

    return {field.name: field.default for field in dataclasses.fields(SpeculativeConfig)}


TREE = engines.tree("eagle3", engines.EAGLE3, num_nodes=8)
OF_MODELS = {
    "attention_backend", "draft_load_config", "draft_tensor_parallel_size", "kv_cache_dtype", "quantization",
    "revision",
}  # fmt: skip
ALWAYS = {"method", "num_speculative_tokens", "num_speculative_tokens_per_batch_size"}
REJECTION = {"rejection_sample_method", "synthetic_acceptance_length", "synthetic_acceptance_rates"}


@pytest.mark.parametrize(
    ("spec", "effective"),
    [
        (TREE, {*OF_MODELS, *ALWAYS, "model", "draft_sample_method", "disable_eagle_block_drop"}),
        (EAGLE3 | {"verification": "rejection"},
         {*OF_MODELS, *ALWAYS, *REJECTION, "model", "draft_sample_method", "disable_eagle_block_drop",
          "use_local_argmax_reduction"}),
        (engines.tree("draft_model", engines.POCKET / "draft-model", num_nodes=8),
         {*OF_MODELS, *ALWAYS, "model", "draft_sample_method", "moe_backend", "code_revision"}),
        ({"method": "suffix", "tree": {"num_nodes": 8}}, {*ALWAYS, "draft_sample_method"}),
    ],
    ids=["eagle3 tree", "eagle3 rejection", "draft model", "suffix"],
)  # fmt: skip
def test_every_key_of_vllms_has_an_effect_or_is_refused(spec, effective):
    """By its name, whatever its value; those that have an effect are handed on as vLLM's own default."""
    from vllm_crossspec.config.parse import parse
    from vllm_crossspec.frontend.precheck import native_names

    keys = native_names().keys
    found, legal = set(), {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 8, 8]]}
    for key, default in fields_of_vllm().items():
        try:
            parse({**spec, key: spec.get(key, legal.get(key, default))}, keys)
            found.add(key)
        except ValueError as problem:
            assert key in str(problem) and "\n" not in str(problem)
    assert found == effective


VALUES = (None, True, 0, 1, "x", [[1, 8, 8]], {"a": 1})


@pytest.mark.parametrize("where", ["alone", "routed"])
def test_any_value_of_any_key_of_vllms_is_taken_or_refused_in_one_sentence(where):
    for key in sorted(fields_of_vllm()):
        for value in VALUES:
            drafter = {k: v for k, v in TREE.items() if k != "method"} | {key: value}
            spec = {"method": "eagle3", **drafter} if where == "alone" else whiflash(eagle3=drafter)
            try:
                config_of(spec)
            except ValueError as problem:
                assert str(problem) and "\n" not in str(problem), (key, value)


@pytest.mark.parametrize(
    ("ranges", "schedule"),
    [
        ([[1, 8, 8], [9, 64, 0]], {1: 8, 9: 0}),
        ([[16, 20, 2], [1, 4, 8]], {1: 8, 16: 2}),
        ([[1, 1, 4]], {1: 4}),
    ],
)
@pytest.mark.parametrize("spec", [TREE, EAGLE3], ids=["tree", "chain"])
def test_vllms_schedule_becomes_ours(spec, ranges, schedule):
    config = config_of(spec | {"num_speculative_tokens_per_batch_size": ranges})
    ours = settings_of(config).drafters["eagle3"].tree.by_batch_size
    assert {int(size): tokens for size, tokens in ours.items()} == schedule
    native = config.speculative_config.num_speculative_tokens_per_batch_size
    assert {start: tokens for start, _, tokens in native} == schedule


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        *((TREE | {"num_speculative_tokens_per_batch_size": given}, "give whole numbers as")
          for given in ({"1": 8}, [], [[1, 8]], [[1, 8, True]])),
        (TREE | {"num_speculative_tokens_per_batch_size": [[2, 8, 4]]}, "must begin at 1 request and must not overlap"),
        (TREE | {"num_speculative_tokens_per_batch_size": [[1, 8, 4], [8, 9, 1]]}, "must not overlap"),
        (TREE | {"tree": {"by_batch_size": {"1": 3}}, "num_speculative_tokens_per_batch_size": [[1, 8, 4]]},
         "and tree.by_batch_size say the same; leave out one of the two"),
        (whiflash() | {"attention_backend": "X"}, "attention_backend belongs into a drafter, as drafters.NAME.atten"),
        (EAGLE3 | {"draft-tensor-parallel-size": 1, "draft_tensor_parallel_size": 1}, "written twice, as"),
        (EAGLE3 | {"target_model_config": {"a": 1}}, "unknown key 'target_model_config'"),
        (engines.native("eagle3", engines.EAGLE3) | {"draft_model_config": {}}, "unknown key 'draft_model_config'"),
    ],
)  # fmt: skip
def test_keys_of_vllms_in_the_wrong_form(spec, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        config_of(spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"spec_tokens": 3}, "--spec-tokens 3 and speculative_config.num_speculative_tokens . differ"),
        ({"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
         r"pipeline parallelism with vllm_crossspec \(use tensor parallelism\)"),
    ],
)  # fmt: skip
def test_options_that_do_not_go_with_it(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        config_of(EAGLE3, **options)


def test_native_methods_stay_untouched():
    config = config_of(engines.native("eagle3", engines.EAGLE3))
    assert "crossspec" not in (config.additional_config or {})


@pytest.mark.parametrize(
    ("spec", "lines"),
    [
        (
            {"method": "suffix"},
            [
                "crossspec: vLLM's own 'suffix' needs arctic_inference, which is not installed; ours runs",
                "crossspec: method suffix, verification match; drafter suffix: a matches tree of 60 nodes and 8 levels "
                "(vLLM's log calls it method='ngram_gpu')",
            ],
        ),
        (
            whiflash({"policy": "entropy"}, eagle3={"model": str(engines.EAGLE3), "num_speculative_tokens": 3}),
            [
                "crossspec: method whiflash, verification match, a router by entropy picks one of 2 drafters; "
                f"drafter eagle3: a chain of 3 tokens, from {engines.EAGLE3}; "
                f"drafter dflash: a chain of 7 tokens, from {engines.DFLASH} (vLLM's log calls it method='dflash')"
            ],
        ),
        (engines.native("eagle3", engines.EAGLE3), []),
    ],
)
def test_the_log_says_what_runs(spec, lines, monkeypatch):
    from vllm_crossspec.frontend import build

    said = []
    monkeypatch.setattr(build.logger, "info", lambda sentence, *values: said.append(sentence % values))
    config_of(spec)
    assert said == lines


def test_another_vllm_is_refused(monkeypatch):
    monkeypatch.setattr("vllm.version.__version__", "0.34.1")
    with pytest.raises(RuntimeError, match="needs vLLM >=0.32,<0.34 and found 0.34.1"):
        compat.require()


def test_a_changed_signature_is_refused(monkeypatch):
    import vllm.v1.worker.gpu.spec_decode as package

    import_module("vllm.v1.worker.gpu.model_runner")  # which would take the changed one for good
    monkeypatch.setattr(package, "init_speculator", lambda vllm_config, device: None)
    with pytest.raises(RuntimeError, match=r"init_speculator takes \(vllm_config device\) in this vLLM"):
        compat.require()


def test_this_vllm_fits():
    assert compat.check() == []


@pytest.mark.parametrize("model", ["nonexist", "/no/such/target"])
def test_a_target_that_is_not_there_is_one_sentence(model, monkeypatch):
    from vllm import EngineArgs

    monkeypatch.setattr("vllm.engine.arg_utils.get_model_path", lambda name, revision: name)  # offline it fails itself
    with pytest.raises(ValueError, match=f"^model: there is no folder '{model}'; give the target's folder or a hub id"):
        EngineArgs(model, speculative_config=EAGLE3).create_engine_config()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (command(EAGLE3 | {"model": "/no/such"}), "speculative_config.model: there is no folder"),
        # What a command line does not tell whole is left to the engine.
        (command(None, "-sc.method", "eagle3", "-sc.tre", "chain"), "speculative_config: unknown key 'tre'"),
    ],
)
def test_the_server_says_it_too_and_says_it_last(words, says):
    ended = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1
    assert f"vllm_crossspec: {says}" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("name", "spec", "debug", "says"),
    [
        ("/usr/bin/vllm", None, "", "vllm_crossspec: speculative_config"),
        ("/usr/bin/vllm", None, "1", "Traceback"),
        ("/lib/vllm/api_server.py", "vllm.entrypoints.openai.api_server", "", "vllm_crossspec: speculative_config"),
        ("/home/me/serve.py", None, "", "Traceback"),
        ("/lib/pytest/__main__.py", "pytest.__main__", "", "Traceback"),
    ],
)
def test_only_vllms_own_commands_end_with_a_sentence(name, spec, debug, says, monkeypatch, capsys):
    monkeypatch.setenv("CROSSSPEC_DEBUG", debug)
    monkeypatch.setattr("sys.argv", [name])
    monkeypatch.setattr("sys.excepthook", sys.__excepthook__)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec and SimpleNamespace(name=spec))
    with pytest.raises(ValueError, match="unknown key 'tre'; did you mean 'tree'") as raised:
        config_of(EAGLE3 | {"tre": 1})
    sys.excepthook(raised.type, raised.value, raised.tb)
    assert capsys.readouterr().err.startswith(says)
    other = RuntimeError("another end")
    sys.excepthook(RuntimeError, other, None)
    assert capsys.readouterr().err == "RuntimeError: another end\n"

"""Every mistake that a new user makes gets one sentence, before anything heavy is loaded, and a non-zero exit."""

import asyncio
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

from vllm_crossspec.engine.requests import RequestError, check_request
from vllm_crossspec.engine.vllm_api import check as compat

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
    shutil.copytree(source, folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def truncated(source, folder):
    shutil.copytree(source, folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100_000])
    return folder


EAGLE3 = engines.ours("eagle3", engines.EAGLE3)
DFLASH = engines.ours("dflash", engines.DFLASH)


def whiflash(router=None, drafters=None, **changed_drafters):
    """Both drafters and a router, something of it changed."""
    pair = {"eagle3": {"model": str(engines.EAGLE3)}, "dflash": {"model": str(engines.DFLASH)}}
    return {"method": "whiflash", "drafters": drafters or pair | changed_drafters, "router": router or {}}


DART = {"method": "dart", "model": str(engines.DART)}


def store_of(folder, vocab_size):
    """A store of few n-grams for some vocabulary, without a tokenizer to compare."""
    import numpy as np
    from ngram_counts import random_tokens

    from vllm_crossspec.ngram.build import build, make_plan

    np.save(folder / "ids.npy", random_tokens(0))
    build(make_plan([folder / "ids.npy"], order=3, vocab_size=vocab_size), folder / "other.safetensors")
    return folder / "other.safetensors"


def cut_store(folder):
    file = folder / "cut.safetensors"
    file.write_bytes(engines.NGRAM.read_bytes()[:200_000])
    return file


CASES = {
    "unknown key": (lambda tmp: EAGLE3 | {"tre": 1}, "unknown key 'tre'; did you mean 'tree'"),
    "unknown method": (
        lambda tmp: EAGLE3 | {"method": "eagle33"},
        "unknown method 'eagle33'; did you mean 'eagle3'",
    ),
    "no such folder": (
        lambda tmp: EAGLE3 | {"model": str(tmp / "none")},
        "speculative_config.model: there is no folder",
    ),
    "the target as drafter": (lambda tmp: EAGLE3 | {"model": str(engines.TARGET)}, "not an EAGLE-3 drafter"),
    "another hidden size": (
        lambda tmp: EAGLE3 | {"model": str(changed(engines.EAGLE3, tmp / "d", hidden_size=512))},
        "reads states of width 512, but .* has hidden size 256; it was trained for another target",
    ),
    "another vocabulary": (
        lambda tmp: DFLASH | {"model": str(changed(engines.DFLASH, tmp / "d", vocab_size=32000))},
        "vocabulary of 32000 tokens, but .* has 4096; it was trained for another target",
    ),
    "layers out of range": (
        lambda tmp: (
            DFLASH
            | {
                "model": str(
                    changed(
                        engines.DFLASH,
                        tmp / "d",
                        dflash_config={"mask_token_id": 3, "target_layer_ids": [1, 40]},
                    )
                )
            }
        ),
        r"taps target layers \[2, 41\], but .* has 8",
    ),
    "truncated weights": (
        lambda tmp: EAGLE3 | {"model": str(truncated(engines.EAGLE3, tmp / "d"))},
        "model.safetensors is damaged or cut short .*copy it again",
    ),
    "longer than the block": (
        lambda tmp: DFLASH | {"num_speculative_tokens": 15},
        "num_speculative_tokens is 15, but this drafter's block holds 7 draft tokens; use 7 or less",
    ),
    "an EAGLE-3 drafter in DART's place": (
        lambda tmp: DART | {"model": str(engines.EAGLE3)},
        "speculative_config.model: config.json has no draft_length .*it is not a DART drafter",
    ),
    "DART of another name": (
        lambda tmp: DART | {"model": str(changed(engines.DART, tmp / "d", architectures=["Dart"]))},
        r'set "architectures" in config.json to \["LlamaForCausalLMDart"\]',
    ),
    "longer than DART's masks": (
        lambda tmp: DART | {"num_speculative_tokens": 9},
        "num_speculative_tokens is 9, but this drafter's block holds 8 draft tokens; use 8 or less",
    ),
    "no store there": (
        lambda tmp: DART | {"ngram": str(tmp / "none")},
        "speculative_config.ngram.model .*: there is no such file",
    ),
    "a store cut short": (
        lambda tmp: DART | {"ngram": str(cut_store(tmp))},
        "speculative_config.ngram.model .* is no whole safetensors file",
    ),
    "a drafter in the store's place": (
        lambda tmp: DART | {"ngram": str(engines.DART / "model.safetensors")},
        "speculative_config.ngram.model .* is a safetensors file but no n-gram store",
    ),
    "a store of another vocabulary": (
        lambda tmp: DART | {"ngram": str(store_of(tmp, 5000))},
        "speculative_config.ngram.model .* is for a vocabulary of 5000 tokens and the model has 4096",
    ),
    "an order beyond the store's": (
        lambda tmp: DART | {"ngram": {"model": str(engines.NGRAM), "order": 5}},
        "speculative_config.ngram.model .* has n-grams of up to . tokens: choose an order of 2 to",
    ),
    "a routed drafter's store": (
        lambda tmp: whiflash(dart={"model": str(engines.DART), "ngram": str(tmp / "none")}),
        "speculative_config.drafters.dart.ngram.model .*: there is no such file",
    ),
    "one of two drafters missing": (
        lambda tmp: whiflash(eagle3={"model": str(tmp / "none")}),
        "speculative_config.drafters.eagle3.model: there is no folder",
    ),
    "one of two drafters cut short": (
        lambda tmp: whiflash(eagle3={"model": str(truncated(engines.EAGLE3, tmp / "d"))}),
        "model.safetensors is damaged or cut short .*copy it again",
    ),
    "drafters of different targets": (
        lambda tmp: whiflash(eagle3={"model": str(changed(engines.EAGLE3, tmp / "d", hidden_size=512))}),
        "drafters.eagle3.model.* reads states of width 512, but .* has hidden size 256; it was trained for another",
    ),
    "a buffer too small for a round": (
        lambda tmp: whiflash(router={"max_backlog": 7}),
        "router.max_backlog is 7, but one round can accept 8 tokens; use 8 or more",
    ),
    "a correction of nothing": (
        lambda tmp: whiflash(router={"policy": "entropy", "threshold": 2.0, "correct": False}),
        "router.correct is for a trained router: policy 'neural', or 'goodput' with model; leave it out",
    ),
    "no router there": (
        lambda tmp: whiflash(router={"policy": "neural", "model": str(tmp / "none")}),
        "speculative_config.router.model: ",
    ),
    "a drafter in the router's place": (
        lambda tmp: whiflash(router={"policy": "neural", "model": str(engines.EAGLE3)}),
        "speculative_config.router.model: .*router.json",
    ),
    "a router of other drafters": (
        lambda tmp: whiflash(
            drafters={
                "a": {"type": "eagle3", "model": str(engines.EAGLE3)},
                "b": {"type": "dflash", "model": str(engines.DFLASH)},
            },
            router={"policy": "neural", "model": str(engines.POCKET / "router")},
        ),
        "speculative_config.router.model: ",
    ),
}


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


@pytest.mark.parametrize(
    ("known", "sentence"),
    [(("chat", "math"), "is 'maths'; use one of chat, math"), ((), "is 'maths'; this server's router has no `by_cat")],
)
def test_a_category_that_the_router_does_not_know(known, sentence):
    parameters = SimpleNamespace(extra_args={"crossspec_category": "maths"})
    with pytest.raises(RequestError, match=f"the extra argument 'crossspec_category' {sentence}"):
        check_request(parameters, known)


def test_the_v1_runner_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(ValueError, match="needs vLLM's V2 model runner; unset VLLM_USE_V2_MODEL_RUNNER"):
        config_of(EAGLE3)


def test_pipeline_parallelism_is_refused():
    with pytest.raises(ValueError, match=r"pipeline parallelism with vllm_crossspec \(use tensor parallelism\)"):
        config_of(EAGLE3, pipeline_parallel_size=2, distributed_executor_backend="mp")


def test_good_settings_are_resolved():
    config = config_of({k: v for k, v in DFLASH.items() if k != "num_speculative_tokens"})
    assert config.speculative_config.num_speculative_tokens == 7
    assert config.additional_config["crossspec"]["drafters"]["dflash"]["target_layers"]


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("pocket-*.json")), ids=lambda file: file.stem)
def test_the_pocket_configurations_fit_the_pocket_target(file, monkeypatch):
    monkeypatch.chdir(CONFIGS.parent)  # their paths are relative to the repository
    raw = json.loads(file.read_text())
    config = config_of(raw)
    assert config.additional_config["crossspec"]["method"] == raw["method"]


def test_native_methods_stay_untouched():
    config = config_of(engines.native("eagle3", engines.EAGLE3))
    assert "crossspec" not in (config.additional_config or {})


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


def test_the_server_says_it_too_and_says_it_last(tmp_path):
    spec = EAGLE3 | {"model": str(tmp_path / "none")}
    ended = subprocess.run(command(spec), capture_output=True, text=True, timeout=300)
    assert ended.returncode != 0
    assert "vllm_crossspec: speculative_config.model: there is no folder" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("name", "spec", "debug", "kind"),
    [
        ("/usr/bin/vllm", None, "", SystemExit),
        ("/usr/bin/vllm", None, "1", ValueError),
        ("/lib/vllm/entrypoints/openai/api_server.py", "vllm.entrypoints.openai.api_server", "", SystemExit),
        ("/home/me/serve.py", None, "", ValueError),
        ("/lib/pytest/__main__.py", "pytest.__main__", "", ValueError),
    ],
)
def test_only_vllms_own_commands_end_with_a_sentence(name, spec, debug, kind, monkeypatch):
    monkeypatch.setenv("CROSSSPEC_DEBUG", debug)
    monkeypatch.setattr("sys.argv", [name])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec and SimpleNamespace(name=spec))
    with pytest.raises(kind, match="unknown key 'tre'; did you mean 'tree'"):
        config_of(EAGLE3 | {"tre": 1})

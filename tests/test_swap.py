"""Drafters get new weights while their engine serves: no text changes, and new weights draft at once."""

import functools
import json
import shutil
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sabotage
import torch
from engines import (
    CONFU,
    DART,
    DFLASH,
    EAGLE3,
    NGRAM,
    POCKET,
    TARGET,
    both,
    chat,
    counts,
    engine,
    generate,
    ours,
    prompts,
    tree,
)
from safetensors.torch import load_file, save_file
from servers import serving
from transformers import AutoTokenizer
from typer.testing import CliRunner

from vllm_crossspec.cli.app import app

pytestmark = pytest.mark.e2e

LONGER = POCKET / "eagle3-longer"
SIXTEEN = {"max_num_seqs": 16, "max_num_batched_tokens": 1024, "block_size": 32}
TEXTS = 4
SPECS = {
    "eagle3-tree": (tree("eagle3", EAGLE3, 16), EAGLE3),
    "dflash": (ours("dflash", DFLASH), DFLASH),
    "dart-tree": (tree("dart", DART, 16) | {"ngram": {"model": str(NGRAM)}}, DART),
    "confu": (tree("confu", CONFU, 8), CONFU),
    "draft_model": (ours("draft_model", POCKET / "draft-model"), POCKET / "draft-model"),
}


@functools.cache
def sixteen():
    """Four prompts that fill several blocks of the prefix cache, and twelve others."""
    rest = [prompt.removeprefix("<|im_start|>user\n") for prompt in prompts(28)[12:]]
    return (*(chat(" ".join(rest[number::4])) for number in range(4)), *prompts(12))


@functools.cache
def plain():
    """What the target alone answers to the sixteen."""
    with engine(None, **SIXTEEN) as llm:
        return generate(llm, list(sixteen()), max_tokens=24)


def beginnings():
    """The first 16 tokens of each answer."""
    return [text[:16] for text in plain()]


def swap(llm, name, folder):
    return llm.collective_rpc("crossspec_swap_drafter", args=(name, str(folder)))


def note_drafts(worker):
    """Keep what is drafted for requests, round by round."""
    noted = worker.noted = []

    def wrapper(original):
        def keep(drafted, batch, drafter):
            tokens = original(drafted, batch, drafter)
            if drafter is not None:
                noted.append((drafter, batch.num_reqs, tokens.tolist()))
            return tokens

        return keep

    sabotage._replace(worker, worker.model_runner.speculator.kept, "keep", wrapper)


def drafted(llm, texts, max_tokens=16):
    """Token ids, the drafts of all rounds, and what was accepted of them."""

    def accepted():
        return [
            (own["drafts"], own["accepted_per_position"]) for own in llm.collective_rpc("crossspec_stats")[0].values()
        ]

    before = accepted()
    llm.collective_rpc(note_drafts)
    tokens = generate(llm, list(texts), max_tokens=max_tokens)
    (noted,) = llm.collective_rpc(lambda worker: worker.noted)
    llm.collective_rpc(sabotage.mend)
    growth = [
        (now[0] - then[0], [a - b for a, b in zip(now[1], then[1], strict=True)])
        for now, then in zip(accepted(), before, strict=True)
    ]
    return tokens, noted, growth


def total(growth):
    return sum(sum(per_position) for _, per_position in growth)


def changed(folder, out, seed=0, scale=0.5, keep=()):
    """A checkpoint of the same shapes whose numbers are others."""
    shutil.copytree(folder, out)
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(out / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not name.startswith(keep or "-"):
            noise = torch.randn(tensor.shape, generator=generator)
            tensors[name] = (tensor.float() * (1 + scale * noise)).to(tensor.dtype)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


# ---- under load


def steps(llm, texts, max_tokens, at):
    """Token ids of requests that are in flight together, and ``at[number]`` called after so many steps."""
    from vllm import SamplingParams

    core, done = llm.llm_engine, {}
    for number, text in enumerate(texts):
        core.add_request(str(number), text, SamplingParams(temperature=0.0, max_tokens=max_tokens))
    number = 0
    while core.has_unfinished_requests():
        for output in core.step():
            if output.finished:
                done[int(output.request_id)] = list(output.outputs[0].token_ids)
        number += 1
        if number in at:
            at[number](core.get_num_unfinished_requests())
    return [done[number] for number in range(len(texts))]


@functools.cache
def alone(folder, is_async=False):
    """What an engine that was started with this EAGLE-3 drafter drafts."""
    with engine(ours("eagle3", folder), async_scheduling=is_async, **SIXTEEN) as llm:
        return drafted(llm, sixteen())


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_swap_under_load_changes_no_token_and_moves_acceptance(is_async):
    texts, in_flight, whole, reference = sixteen(), [], plain(), alone(LONGER, is_async)

    def change(llm, folder):
        def now(unfinished):
            in_flight.append(unfinished)
            assert swap(llm, "eagle3", folder) == [["eagle3"]]

        return now

    with engine(ours("eagle3", EAGLE3), async_scheduling=is_async, **SIXTEEN) as llm:
        first = drafted(llm, texts)
        llm.reset_prefix_cache()
        tokens = steps(llm, texts, 24, {3: change(llm, LONGER), 4: change(llm, EAGLE3), 5: change(llm, LONGER)})
        assert tokens == whole
        assert len(in_flight) == 3 and in_flight[0] == 16 and in_flight[-1] > 8, in_flight
        hits = counts(llm).prefix_hits
        after = drafted(llm, texts)
        assert counts(llm).prefix_hits == hits, "what the old drafter computed was found"
        swap(llm, "eagle3", EAGLE3)
        back = drafted(llm, texts)
    assert after == reference and back == first
    assert after[0] == back[0] == beginnings()
    assert total(after[2]) != total(back[2])


def test_swap_that_leaves_the_prefix_cache_is_seen(monkeypatch):
    from vllm_crossspec.hooks import engine_core as core

    monkeypatch.setattr(core, "forget_prefixes", lambda scheduler: None)
    expected, reference = beginnings(), alone(LONGER)
    with engine(ours("eagle3", EAGLE3), **SIXTEEN) as llm:
        drafted(llm, sixteen())
        swap(llm, "eagle3", LONGER)
        hits = counts(llm).prefix_hits
        tokens, noted, growth = drafted(llm, sixteen())
        assert counts(llm).prefix_hits > hits
    assert tokens == expected, "it costs acceptance and no more"
    assert (noted, growth) != reference[1:]


# ---- every kind of drafter


def leave_what_was_made_of_weights(monkeypatch):
    """Parameters are copied, and nothing else."""
    from vllm_crossspec.speculator import swap as module

    own = module._tensors

    def parameters_alone(old, new):
        made = {id(value) for value in vars(old).values() if isinstance(value, torch.Tensor)}
        return ((mine, its) for mine, its in own(old, new) if id(mine) not in made)

    monkeypatch.setattr(module, "_tensors", parameters_alone)


def leave_products(monkeypatch):
    """On a CPU layers multiply with what they packed at the start."""
    from vllm_crossspec.platform import platform

    monkeypatch.setattr(platform(), "take_products", lambda layer, other: None)


def leave_soft_prompts(monkeypatch):
    """The target's layers keep the old drafter's."""
    from vllm_crossspec.drafters.confu.feature import Contemplate

    monkeypatch.setattr(Contemplate, "swapped", lambda self, names: None)


BREAKS = {"dflash": [leave_what_was_made_of_weights, leave_products], "confu": [leave_soft_prompts, leave_products]}


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("kind", SPECS)
def test_swap_of_every_kind_drafts_as_if_started_with_it(kind, tmp_path):
    spec, folder = SPECS[kind]
    other, texts = changed(folder, tmp_path / "other"), sixteen()[-TEXTS:]
    expected_text = beginnings()[-TEXTS:]
    with engine({**spec, "model": str(other)}) as llm:
        expected = drafted(llm, texts)
    (name,) = {spec["method"]}
    with engine(spec) as llm:
        first = drafted(llm, texts)
        for sabotaged in BREAKS.get(kind, [leave_products]):
            with pytest.MonkeyPatch.context() as patched:
                sabotaged(patched)
                swap(llm, name, other)
                broken = drafted(llm, texts)
            assert broken[0] == expected_text
            assert broken[1] != expected[1], f"{sabotaged.__name__} is not seen"
            swap(llm, name, folder)
        assert drafted(llm, texts) == first, "back again"
        swap(llm, name, other)
        assert drafted(llm, texts) == expected
    assert first[0] == expected[0] == expected_text
    assert total(first[2]) != total(expected[2])


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("active", ["eagle3", "dflash"])
def test_swap_of_one_of_several_routed_drafters(active, tmp_path):
    """The one that drafts, then the other one, which only catches up; features of old weights wait in both."""
    folders = {"eagle3": LONGER, "dflash": changed(DFLASH, tmp_path / "dflash")}
    texts, spec = sixteen()[-TEXTS:], both(active)
    expected_text = beginnings()[-TEXTS:]
    with engine({**spec, "drafters": {name: {"model": str(folder)} for name, folder in folders.items()}}) as llm:
        expected = drafted(llm, texts)
    with engine(spec) as llm:
        first = steps(llm, texts, 16, {3: lambda _: swap(llm, "dflash", folders["dflash"])})
        before = drafted(llm, texts)
        assert swap(llm, "eagle3", LONGER) == [["eagle3"]]
        assert drafted(llm, texts) == expected
    assert first == before[0] == expected[0] == expected_text
    assert (before[1] == expected[1]) == (active == "dflash")


@pytest.mark.nightly
def test_swap_of_confu_beside_another(tmp_path):
    """The soft prompts that the target's layers hold are the new drafter's."""
    other = changed(CONFU, tmp_path / "confu")
    texts = sixteen()[-TEXTS:]

    def spec(folder):
        drafters = {"confu": {"model": str(folder), "tree": {"num_nodes": 8}}, "dflash": {"model": str(DFLASH)}}
        return {"method": "whiflash", "drafters": drafters, "router": {"policy": "entropy", "threshold": 1.0}}

    with engine(spec(other)) as llm:
        expected = drafted(llm, texts)
    with engine(spec(CONFU)) as llm:
        first = steps(llm, texts, 16, {3: lambda _: swap(llm, "confu", other)})
        assert drafted(llm, texts) == expected
        swap(llm, "confu", CONFU)
        back = drafted(llm, texts)
    assert first == back[0] == expected[0] == beginnings()[-TEXTS:]
    assert back[1] != expected[1]
    assert all(growth > 0 for growth, _ in expected[2])


# ---- what is refused


def rewritten(folder, out, change):
    """A copy of a checkpoint with some of its tensors changed."""
    shutil.copytree(folder, out)
    tensors = load_file(out / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def _drop(tensors):
    del tensors["fc.weight"]


def _narrow(tensors):
    tensors["fc.weight"] = tensors["fc.weight"][:, :512].contiguous()


def _widen(tensors):
    tensors["norm.weight"] = tensors["norm.weight"].float()


def _other_tokens(tensors):
    tensors["d2t"] = tensors["d2t"].clone().add_(1)


def _one_more(tensors):
    tensors["embed_tokens.weight"] = torch.zeros(4096, 256, dtype=torch.bfloat16)


def _without_config(folder):
    (folder / "config.json").unlink()


def _without_weights(folder):
    (folder / "model.safetensors").unlink()


def _cut_short(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _header_only(folder):
    file = folder / "model.safetensors"
    (length,) = struct.unpack("<Q", file.read_bytes()[:8])
    file.write_bytes(file.read_bytes()[: length // 2])


def _other_vocabulary(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"draft_vocab_size": 2048}))


REFUSED = [
    (_drop, "swap of drafter eagle3: {}: it has no tensor fc.weight, as the loaded drafter has"),
    (_narrow, "its fc.weight is bfloat16 [256, 512], and the loaded drafter's bfloat16 [256, 768]"),
    (_widen, "its norm.weight is float32 [256], and the loaded drafter's bfloat16 [256]"),
    (
        _other_tokens,
        "its d2t differs from the loaded drafter's, so that it drafts other tokens; start an",
    ),
    (_one_more, "it has a tensor embed_tokens.weight, which the loaded drafter has not"),
    (_without_config, "has no config.json; it is not a checkpoint folder"),
    (_without_weights, "holds no .safetensors or .bin weights"),
    (_cut_short, "model.safetensors is damaged or cut short"),
    (_header_only, "model.safetensors is damaged or cut short"),
    (_other_vocabulary, "its config.json says draft_vocab_size 2048, and the loaded drafter's 3072; start an engine"),
]


def test_swap_that_fails_leaves_the_old_drafter_as_it_was(tmp_path):
    """Each is one sentence; requests are in flight meanwhile."""
    cases = []
    for number, (change, sentence) in enumerate(REFUSED):
        folder = tmp_path / str(number)
        if change.__annotations__ == {} and change.__code__.co_varnames[0] == "tensors":
            rewritten(LONGER, folder, change)
        else:
            shutil.copytree(LONGER, folder)
            change(folder)
        cases.append((folder, sentence.format(folder)))
    texts, whole = sixteen(), plain()

    def refuse_all(llm):
        for folder, sentence in cases:
            with pytest.raises(ValueError) as caught:
                swap(llm, "eagle3", folder)
            assert sentence in str(caught.value) and "\n" not in str(caught.value), str(caught.value)
        for name, folder, sentence in (
            ("dflash", DFLASH, "this engine has no drafter dflash; it has eagle3"),
            ("eagle3", tmp_path / "none", "there is no folder"),
            ("eagle3", DFLASH, "its config.json says architectures ['DFlashDraftModel']"),
        ):
            with pytest.raises(ValueError, match="swap of drafter") as caught:
                swap(llm, name, folder)
            assert sentence in str(caught.value)

    with engine(ours("eagle3", EAGLE3), **SIXTEEN) as llm:
        reference = drafted(llm, texts)
        assert steps(llm, texts, 24, {4: lambda _: refuse_all(llm)}) == whole
        llm.reset_prefix_cache()
        assert drafted(llm, texts) == reference
        swap(llm, "eagle3", LONGER)  # and a good one is taken after them
        assert drafted(llm, texts, max_tokens=4)[1] != reference[1]


def test_swap_of_what_has_no_weights_or_has_clusters(tmp_path):
    head = {"type": "flashhead", "model": str(POCKET / "flashhead-eagle3")}

    def spec(folder):
        drafters = {"eagle3": {"model": str(folder), "head": head}, "suffix": {}}
        return {"method": "whiflash", "router": {"policy": "entropy", "threshold": 0.0}, "drafters": drafters}

    same_head = changed(EAGLE3, tmp_path / "same", keep=("lm_head",))
    texts, expected_text = sixteen()[-TEXTS:], beginnings()[-TEXTS:]
    with engine(spec(same_head)) as llm:
        expected = drafted(llm, texts)
    with engine(spec(EAGLE3)) as llm:
        with pytest.raises(ValueError, match="swap of drafter suffix: it has no weights that could be swapped"):
            swap(llm, "suffix", EAGLE3)
        with pytest.raises(ValueError, match="the clusters of the loaded drafter's head are of that one's"):
            swap(llm, "eagle3", LONGER)
        assert swap(llm, "eagle3", same_head) == [["eagle3"]]
        assert drafted(llm, texts) == expected
    assert expected[0] == expected_text
    with engine(None) as llm, pytest.raises(ValueError, match="this engine has no drafters of vllm_crossspec"):
        swap(llm, "eagle3", EAGLE3)


# ---- vLLM's own update of weights


def register_transfer():
    """A backend of vLLM's weight transfer that reads files: as those of vLLM do, but for where tensors come from."""
    from dataclasses import dataclass

    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    @dataclass
    class Nothing:
        pass

    @dataclass
    class Part:
        folder: str
        names: list
        prefix: str = ""

    class FromFiles(WeightTransferEngine):
        init_info_cls, update_info_cls = Nothing, Part

        def init_transfer_engine(self, init_info):
            pass

        def start_weight_update(self):
            initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info):
            tensors = load_file(Path(update_info.folder) / "model.safetensors")
            for name in update_info.names:
                self.model.load_weights([(update_info.prefix + name, tensors[name])])

        def finish_weight_update(self):
            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self):
            pass

    if "crossspec_files" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("crossspec_files", FromFiles)


def parameters(folder):
    """Names of a checkpoint's tensors as trainers send them: parameters, not maps of tokens."""
    return [name for name, tensor in load_file(folder / "model.safetensors").items() if tensor.is_floating_point()]


def send(llm, names, **part):
    for piece in (names[::2], names[1::2]):
        llm.update_weights({"update_info": {"folder": str(LONGER), "names": piece, **part}})


def test_swap_by_vllms_own_update_of_the_draft_model():
    """In parts, with requests in flight between them; what is not whole is refused at the end."""
    from vllm.config import WeightTransferConfig

    register_transfer()
    texts, whole, reference = sixteen(), plain(), alone(LONGER)
    names = parameters(LONGER)
    transfer = WeightTransferConfig(backend="crossspec_files")
    with engine(ours("eagle3", EAGLE3), weight_transfer_config=transfer, **SIXTEEN) as llm:
        llm.start_draft_weight_update()
        send(llm, names[:4])
        with pytest.raises(ValueError, match="weight update of drafter eagle3: it has no tensor"):
            llm.finish_weight_update()
        between = {
            2: lambda _: llm.start_draft_weight_update(),
            4: lambda _: send(llm, names),
            6: lambda _: llm.finish_weight_update(),
        }
        assert steps(llm, texts, 24, between) == whole
        assert drafted(llm, texts) == reference


@pytest.mark.nightly
def test_swap_by_vllms_own_update_of_one_of_several():
    from vllm.config import WeightTransferConfig

    register_transfer()
    texts, expected_text = sixteen()[-TEXTS:], beginnings()[-TEXTS:]
    spec = both("eagle3")
    other = {**spec, "drafters": {**spec["drafters"], "eagle3": {"model": str(LONGER)}}}
    with engine(other) as llm:
        expected = drafted(llm, texts)
    with engine(spec, weight_transfer_config=WeightTransferConfig(backend="crossspec_files")) as llm:
        llm.start_draft_weight_update()
        send(llm, parameters(LONGER))
        with pytest.raises(ValueError, match=r"no drafter is named in fc.weight; begin names of tensors with one of"):
            llm.finish_weight_update()
        llm.start_draft_weight_update()
        send(llm, parameters(LONGER), prefix="eagle3.")
        llm.finish_weight_update()
        assert drafted(llm, texts) == expected
    assert expected[0] == expected_text


# ---- under `vllm serve`


@pytest.mark.nightly
def test_swap_under_vllm_serve(monkeypatch):
    """By the command, with sixteen requests in flight; a checkpoint that does not fit is one sentence."""
    texts, expected = sixteen(), beginnings()
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    expected = [tokenizer.decode(ids, skip_special_tokens=True) for ids in expected]
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    settings = ("--max-num-seqs", "16", "--max-num-batched-tokens", "1024")
    with serving(ours("eagle3", EAGLE3), *settings) as server, ThreadPoolExecutor(16) as pool:
        client, address = server.client(), f"http://127.0.0.1:{server.port}"

        def ask(text):
            answer = client.completions.create(model="pocket", prompt=text, temperature=0, max_tokens=16)
            return answer.choices[0].text

        answers = pool.map(ask, texts)
        for folder in (LONGER, EAGLE3, LONGER):
            done = CliRunner().invoke(app, ["swap", address, "eagle3", str(folder)])
            assert done.output == "new weights: eagle3\n", done
        assert list(answers) == expected
        assert list(pool.map(ask, texts)) == expected
        refused = CliRunner().invoke(app, ["swap", address, "eagle3", str(DFLASH)])
        assert "swap of drafter eagle3" in str(refused.exception) and "architectures" in str(refused.exception)
        assert server.wait_for_metric("crossspec:drafter_swaps_total", above=2, drafter="eagle3") == 3
    refused = CliRunner().invoke(app, ["swap", address, "eagle3", str(LONGER)])
    assert "does not answer" in str(refused.exception)

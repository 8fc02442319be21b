"""FlashHead's clusters: how they are made, the published format, refusals, `crossspec flashhead`, embedl's own head.

The reference (https://github.com/embedl/flash-head) is run where CROSSSPEC_FLASHHEAD_REFERENCE names a checkout.
"""

import importlib
import json
import os
import shutil
import struct
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import vllm_crossspec
from crossspec_tools.flashhead.build import check_cluster_size, cluster, match
from crossspec_tools.flashhead.files import read_output_embedding, read_special_tokens, save_assets
from crossspec_tools.flashhead.quality import least_probes, rank_clusters, recall
from vllm_crossspec.cli.app import app
from vllm_crossspec.drafting.flashhead.assets import ASSETS_FOLDER, FACTS_KEY, TENSORS_FILE, Assets, group, read_assets
from vllm_crossspec.drafting.flashhead.head import FlashHead

POCKET = Path(vllm_crossspec.__file__).parent / "pocket"
needs_reference = pytest.mark.skipif(
    "CROSSSPEC_FLASHHEAD_REFERENCE" not in os.environ, reason="needs a checkout of embedl/flash-head"
)


def embedding(num_tokens=96, hidden_size=12, seed=0):
    return torch.randn(num_tokens, hidden_size, generator=torch.Generator().manual_seed(seed))


def made(weight, size, probes=2, special=(), **settings):
    found = cluster(weight, cluster_size=size, **settings)
    members = group(found.assignments, len(weight) // size)
    return Assets(found.centroids, members, tuple(special), probes, {"seed": 0})


def published(folder, num_tokens=96, hidden_size=12, num_clusters=12, **changes):
    """A folder as the published models have it, by its description and without our writer."""
    generator = torch.Generator().manual_seed(5)
    assignments = torch.randperm(num_tokens, generator=generator) % num_clusters
    tensors = {
        "centroids": torch.randn(1, 1, hidden_size, num_clusters, generator=generator).to(torch.bfloat16),
        "cluster_assignments": assignments,
    }
    config = {
        "architectures": ["FlashHeadQwen3ForCausalLM"],
        "flash_head_cache_dir": "flash_head_assets",
        "flash_head_special_token_ids": [90, 3, 200],
    }
    tensors |= changes.pop("tensors", {})
    config |= changes.pop("config", {})
    assert not changes
    (folder / "flash_head_assets").mkdir(parents=True)
    save_file({k: v for k, v in tensors.items() if v is not None}, folder / "flash_head_assets" / TENSORS_FILE)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return tensors


# -- clustering ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "size"), [(96, 8), (96, 1), (96, 96), (35, 5), (2048, 4)])
def test_every_cluster_has_as_many_tokens(num_tokens, size):
    found = cluster(embedding(num_tokens), cluster_size=size)
    assert torch.bincount(found.assignments).tolist() == [size] * (num_tokens // size)
    assert found.centroids.shape == (num_tokens // size, 12) and found.centroids.isfinite().all()


def test_seeds_reproduce():
    weight = embedding()
    first, again, other = (cluster(weight, cluster_size=8, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.assignments, again.assignments) and torch.equal(first.centroids, again.centroids)
    assert not torch.equal(first.assignments, other.assignments)


def test_clusters_that_are_there_are_found():
    """Tight groups of equal size: one round of k-means may mix them, but the cosines must rise far above chance."""
    generator = torch.Generator().manual_seed(0)
    directions = F.normalize(torch.randn(20, 16, generator=generator), dim=1)
    weight = (directions[:, None] + 0.05 * torch.randn(20, 8, 16, generator=generator)).flatten(0, 1)
    weight = weight * (0.5 + torch.rand(160, 1, generator=generator))  # lengths do not count
    found = cluster(weight, cluster_size=8)
    together = (found.assignments[:, None] == found.assignments[None]).view(20, 8, 20, 8).sum(dim=(1, 3))
    assert (together.diagonal() >= 34).float().mean() >= 0.7  # 64 where a group stayed together
    assert found.cosine > 0.75 > cluster(embedding(160, 16), cluster_size=8).cosine


def test_a_centroid_is_its_members_direction():
    weight = embedding()
    assets = made(weight, 8)
    means = F.normalize(F.normalize(weight, dim=1)[assets.members].mean(dim=1), dim=1)
    torch.testing.assert_close(F.normalize(assets.centroids, dim=1), means)
    torch.testing.assert_close(assets.centroids.norm(dim=1), weight.norm(dim=1)[assets.members].mean(dim=1))


def test_rows_without_direction_are_clustered_too():
    weight = embedding()
    weight[10:60] = 0.0
    found = cluster(weight, cluster_size=8)
    assert torch.bincount(found.assignments).tolist() == [8] * 12
    assert (found.centroids.norm(dim=1) > 0).all() and found.centroids.isfinite().all()
    same = cluster(torch.ones(32, 4), cluster_size=4)
    assert torch.bincount(same.assignments).tolist() == [4] * 8


@pytest.mark.parametrize("seed", range(5))
def test_a_matching_is_stable(seed):
    generator = torch.Generator().manual_seed(seed)
    likes = torch.rand(30, 7, generator=generator)
    room = torch.tensor([4, 0, 3, 9, 1, 6, 4])
    values, places = likes.topk(5, dim=1)
    kept = match(values, places, room)
    loads = torch.bincount(kept[kept >= 0], minlength=7)
    assert (loads <= room).all()
    for token in range(30):
        own = likes[token, kept[token]] if kept[token] >= 0 else -1.0
        for better in places[token][values[token] > own].tolist():
            # It is full of tokens that it would rather keep.
            assert loads[better] == room[better] and (likes[kept == better, better] >= likes[token, better]).all()


def test_a_size_that_does_not_divide_names_sizes_that_do():
    with pytest.raises(ValueError, match=r"--cluster-size 16: 50257 tokens .* choose one of 29, 1733, 50257"):
        check_cluster_size(50257, 16)
    with pytest.raises(ValueError, match="at most 32768 clusters of that size; choose one of 8, 16, 32, 64"):
        check_cluster_size(151936, 16)  # this one does
        check_cluster_size(151936, 2)


# -- files --------------------------------------------------------------------------------------------------------


def test_the_published_format_is_read(tmp_path):
    tensors = published(tmp_path / "model")
    expected = tensors["cluster_assignments"]
    for folder in (tmp_path / "model", tmp_path / "model" / "flash_head_assets"):
        assets = read_assets(folder, vocab_size=96, hidden_size=12)
        assert torch.equal(assets.assignments, expected)
        assert assets.members.shape == (12, 8)
        assert all((expected[line] == c).all() for c, line in enumerate(assets.members))
        assert torch.equal(assets.centroids, tensors["centroids"][0, 0].t())
        assert assets.special_token_ids == (3, 90)  # 200 is beyond the vocabulary
        assert assets.num_probes == 1  # 12 clusters // 16
    shutil.move(tmp_path / "model" / "flash_head_assets", tmp_path / "alone")
    assert read_assets(tmp_path / "alone").special_token_ids == ()
    published(tmp_path / "other", config={"n_probes": 5, "flash_head_special_token_ids": 7})
    assert read_assets(tmp_path / "other")[2:4] == ((7,), 5)


def test_what_is_written_is_read_back_in_the_published_format(tmp_path):
    assets = made(embedding(), 8, probes=3, special=(4, 9))
    for _ in range(2):  # the second time over the first
        save_assets(tmp_path / "out", assets)
    found = read_assets(tmp_path / "out", vocab_size=96, hidden_size=12)
    assert torch.equal(found.members, assets.members) and torch.equal(found.centroids, assets.centroids)
    assert found[2:] == assets[2:]
    tensors = load_file(tmp_path / "out" / ASSETS_FOLDER / TENSORS_FILE)
    assert tensors["centroids"].shape == (1, 1, 12, 12) and tensors["cluster_assignments"].dtype == torch.int64
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.pop(FACTS_KEY) == {"seed": 0}
    assert config == {
        "flash_head_cache_dir": "flash_head_assets", "flash_head_special_token_ids": [4, 9], "n_probes": 3,
    }  # fmt: skip


def test_a_models_config_is_not_overwritten(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="has a config.json that is not ours; name a new folder"):
        save_assets(tmp_path, made(embedding(), 8))


UNEVEN = torch.arange(96) % 12
UNEVEN[0] = 1
DAMAGED = [
    ({"tensors": {"centroids": None}}, "has no tensor `centroids`"),
    ({"tensors": {"centroids": torch.ones(12, 12)}}, r"has the shape \[12, 12\], not \[1, 1, width, clusters\]"),
    ({"tensors": {"cluster_assignments": torch.ones(96)}}, "are BF16 and F32"),
    ({"tensors": {"cluster_assignments": torch.zeros(4, 24, dtype=torch.int32)}}, r"the shape \[4, 24\], not \[tokens"),
    ({"tensors": {"cluster_assignments": UNEVEN}}, "clusters have 7 to 9 tokens; the head needs clusters of equal"),
    ({"tensors": {"cluster_assignments": torch.arange(96) % 13}}, "clusters 0 to 12, but there are 12"),
    ({"tensors": {"cluster_assignments": torch.arange(96) % 12 - 1}}, "clusters -1 to 10, but there are 12"),
    ({"tensors": {"centroids": torch.zeros(1, 1, 12, 12)}}, "some centroid is zero or holds values that are no"),
    ({"tensors": {"centroids": torch.full((1, 1, 12, 12), float("nan"))}}, "some centroid is zero or holds values"),
    ({"tensors": {"centroids": torch.ones(1, 1, 12, 97)}}, "has 97 clusters of 96 tokens"),
    ({"tensors": {"centroids": torch.ones(1, 1, 14, 12)}}, "for hidden states of width 14, the drafter's have 12"),
    (
        {"tensors": {"cluster_assignments": torch.arange(72) % 12}},
        "of 72 tokens, the drafter's output embedding has 96",
    ),
    ({"config": {"n_probes": 13}}, "n_probes 13 in config.json is not between 1 and the 12 clusters"),
    ({"config": {"flash_head_special_token_ids": ["<s>"]}}, r"\['<s>'\] in config.json are no token ids"),
    ({"config": {"flash_head_cache_dir": "elsewhere"}}, "elsewhere has no clustering_cache.safetensors"),
]


@pytest.mark.parametrize(("changes", "sentence"), DAMAGED, ids=[sentence[:30] for _, sentence in DAMAGED])
def test_files_that_do_not_fit_are_refused(tmp_path, changes, sentence):
    published(tmp_path / "model", **changes)
    with pytest.raises(ValueError, match=sentence) as refusal:
        read_assets(tmp_path / "model", vocab_size=96, hidden_size=12, key="head.model")
    assert str(refusal.value).startswith("head.model: ") and "\n" not in str(refusal.value)


def test_files_that_are_missing_or_cut_short_are_refused(tmp_path):
    with pytest.raises(ValueError, match="head.model: there is no folder"):
        read_assets(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="has no clusters"):
        read_assets(tmp_path)
    published(tmp_path / "model")
    path = tmp_path / "model" / "flash_head_assets" / TENSORS_FILE
    whole = path.read_bytes()
    (header,) = struct.unpack("<Q", whole[:8])
    for length in (0, 4, 8 + header // 2, 8 + header, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="damaged or cut short"):
            read_assets(tmp_path / "model")
    path.write_bytes(whole)
    (tmp_path / "model" / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        read_assets(tmp_path / "model")


# -- models -------------------------------------------------------------------------------------------------------


def write_model(folder, tensors, **config):
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_output_embeddings_tied_or_not(tmp_path):
    shared, own = embedding(20), embedding(20, seed=1)
    both = {"lm_head.weight": own, "model.embed_tokens.weight": shared}
    cases = [
        ({"tie_word_embeddings": False}, both, own),
        ({"tie_word_embeddings": True}, both, shared),
        ({"text_config": {"tie_word_embeddings": True}}, both, shared),
        ({"tie_word_embeddings": True}, {"model.embed_tokens.weight": shared}, shared),
        ({}, {"model.language_model.embed_tokens.weight": shared}, shared),
        ({}, both, own),
    ]
    for number, (config, tensors, expected) in enumerate(cases):
        folder = write_model(tmp_path / str(number), tensors, **config)
        assert torch.equal(read_output_embedding(folder), expected), number
    assert read_output_embedding(POCKET / "target").shape == (4096, 256)
    assert read_special_tokens(POCKET / "target", 4096) == (0, 1, 2, 3)


def test_models_without_an_output_embedding_are_refused(tmp_path):
    with pytest.raises(ValueError, match="has no config.json"):
        read_output_embedding(tmp_path)
    for name, tensors, sentence in (
        ("none", {"model.norm.weight": torch.ones(3)}, "has no output embedding"),
        ("bias", {"lm_head.weight": embedding(), "lm_head.bias": torch.ones(96)}, "its output layer has a bias"),
        ("packed", {"lm_head.weight": torch.ones(4, 4, dtype=torch.int32)}, "give an unquantised model"),
    ):
        with pytest.raises(ValueError, match=sentence):
            read_output_embedding(write_model(tmp_path / name, tensors))
    (tmp_path / "bias" / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ValueError, match="damaged or cut short"):
        read_output_embedding(tmp_path / "bias")


# -- quality ------------------------------------------------------------------------------------------------------


def test_recall_is_what_the_head_finds():
    weight = embedding(480, 20)
    assets = made(weight, 8, special=(100, 3))
    hidden = embedding(200, 20, seed=3)
    dense = (hidden @ weight.t()).argmax(dim=1)
    ranks = rank_clusters(weight, assets, hidden)
    for num_probes in (1, 4, 30, 60):
        head = FlashHead(weight, assets, num_probes=num_probes, max_rows=200)
        found = (head.best_token(hidden) == dense).float().mean().item()
        assert recall(ranks, num_probes) == pytest.approx(found)
    assert recall(ranks, 60) == 1.0
    wanted = least_probes(ranks, 0.9)
    assert recall(ranks, wanted) >= 0.9 > (recall(ranks, wanted - 1) if wanted > 1 else 0)


def call(*arguments):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["flashhead", *map(str, arguments)])


def test_the_commands_build_describe_and_judge(tmp_path):
    out, prompts, document = tmp_path / "clusters", tmp_path / "prompts.jsonl", tmp_path / "recall.json"
    prompts.write_text('{"prompt": "Why is the sky blue?"}\n{"prompt": "Add 3 and 4."}\n')
    settings = ("--prompts", prompts, "--new-tokens", 6, "--device", "cpu")
    done = call("build", POCKET / "target", "--out", out, "--iterations", 1, "--recall", 0.9, *settings)
    assert done.exit_code == 0, done.exception
    assert "256 of 16 tokens" in done.output and "model target" in done.output
    shown = call("info", out, "--model", POCKET / "target")
    assert shown.exit_code == 0 and "4,096 tokens of width 256" in shown.output and "0, 1, 2, 3" in shown.output
    probes = read_assets(out).num_probes
    judged = call("recall", POCKET / "target", "--assets", out, "--json", document, *settings)
    assert judged.exit_code == 0, judged.exception
    content = json.loads(document.read_text())
    rows = {row["num_probes"]: row["recall"] for row in content["rows"]}
    assert rows[probes] >= 0.9 and rows[256] == 1.0 and content["states"] <= 12
    assert sorted(rows.values()) == list(rows.values())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("build", "nowhere", "--out", "x"), "nowhere has no config.json"),
        (("build", POCKET / "target", "--out", "x", "--cluster-size", 3), "--cluster-size 3: 4096 tokens"),
        (("build", POCKET / "target", "--out", POCKET / "target"), "has a config.json that is not ours"),
        (("build", POCKET / "target", "--out", "x", "--probes", 257), "--probes 257: give 1 to 256"),
        (("build", POCKET / "target", "--out", "x", "--recall", 1.5), "--recall 1.5: give a share"),
        (("build", POCKET / "target", "--out", "x", "--special", "4096"), "--special 4096: token ids lie between"),
        (("build", POCKET / "target", "--out", "x", "--device", "tpu"), "--device tpu: choose auto, cpu or cuda"),
        (
            ("build", POCKET / "target", "--out", "x", "--recall", 0.9, "--prompts", POCKET / "target" / "config.json"),
            "not JSON",
        ),
        (("info", "nowhere"), "ASSETS: there is no folder 'nowhere'"),
        (("recall", POCKET / "target", "--assets", POCKET / "target"), "no config.json that names any"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    refused = call(*arguments)
    assert isinstance(refused.exception, ValueError) and sentence in str(refused.exception)
    assert not list(tmp_path.iterdir())


# -- embedl's own head --------------------------------------------------------------------------------------------


@needs_reference
@pytest.mark.parametrize("probes", [None, 1, 3, 12])
def test_ours_equals_the_public_implementation(tmp_path, monkeypatch, probes):
    """The same published folder, the same states: their tokens, without and with special ones, and the same clusters.

    Theirs takes one state at a time, so theirs runs row by row.
    """
    source = str(Path(os.environ["CROSSSPEC_FLASHHEAD_REFERENCE"]) / "src")
    monkeypatch.setattr(sys, "path", [source, *sys.path])
    theirs = importlib.import_module("flash_head.flash_head")
    weight, hidden = embedding(), embedding(80, seed=9)
    linear = torch.nn.Linear(12, 96, bias=False)
    linear.weight.data.copy_(weight)
    for folder, is_published in ((tmp_path / "published", True), (tmp_path / "ours", False)):
        if is_published:
            published(folder, config={"flash_head_special_token_ids": [90, 3]})
        else:
            save_assets(folder, made(weight, 8, probes=1, special=(90, 3)))
        assets = read_assets(folder)
        parameters = theirs.get_flash_head_parameters(linear, "flash_head_assets", str(folder))
        assert torch.equal(parameters["vocab_maps_tensor"], assets.members)
        for special in ((), assets.special_token_ids):
            reference = theirs.FlashHead(linear, **parameters, n_probes=probes or 1, special_token_ids=special)
            head = FlashHead(weight, assets._replace(special_token_ids=special), num_probes=probes, max_rows=80)
            expected = [int(reference.get_next_token(row[None, None])) for row in hidden]
            assert head.best_token(hidden).tolist() == expected

"""The drafter of examples/ as another package's: found by its entry point, and plain's text alone and routed."""

import json
import re
import shutil
import sys
import tomllib
from pathlib import Path

import engines
import pytest
import sabotage
from other_packages import package

from vllm_crossspec.config import parse as config_parsing
from vllm_crossspec.kinds import drafter as base
from vllm_crossspec.kinds.checkpoint import check_drafter
from vllm_crossspec.types import TargetFacts

EXAMPLE = Path(__file__).parents[1] / "examples" / "toy_drafter"
PAGE = EXAMPLE.parents[1] / "docs" / "develop" / "add-a-drafter.md"
VOCAB_SIZE = json.loads((engines.TARGET / "config.json").read_text())["vocab_size"]
MAX_TOKENS = 16
SEEDED = {"temperature": 1.0, "seed": 5, "max_tokens": MAX_TOKENS}


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """The example, installed as its own pyproject.toml says."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())
    folder = tmp_path_factory.mktemp("site") / "most_frequent"
    (module,) = project["tool"]["setuptools"]["py-modules"]
    folder.mkdir()
    shutil.copy(EXAMPLE / f"{module}.py", folder)
    with package(folder, **project["project"]["entry-points"][base.GROUP]):
        import most_frequent

        yield most_frequent


def texts(llm):
    prompts = engines.prompts(4)
    return [
        engines.generate(llm, prompts, max_tokens=MAX_TOKENS),
        engines.generate(llm, prompts, **SEEDED),
        engines.generate(llm, prompts[:1], max_tokens=MAX_TOKENS),
    ]


@pytest.fixture(scope="module")
def plain():
    sampling = {name: SEEDED[name] for name in ("temperature", "seed")}
    return [engines.plain(4, MAX_TOKENS), engines.plain(4, MAX_TOKENS, **sampling), engines.plain(1, MAX_TOKENS)]


@pytest.fixture(scope="module")
def folder(toy, plain, tmp_path_factory):
    """A checkpoint that has counted plain's own text."""
    out = tmp_path_factory.mktemp("toy")
    toy.write_checkpoint([token for batch in plain for text in batch for token in text], VOCAB_SIZE, out)
    return out


def alone(folder):
    return {"method": "most_frequent", "model": str(folder), "num_speculative_tokens": 3}


def routed(folder, **drafters):
    eagle3 = {"eagle3": {"model": str(engines.EAGLE3), "num_speculative_tokens": 4}}
    toy = {"most_frequent": {"model": str(folder), "num_speculative_tokens": 3}}
    router = {"policy": "entropy", "threshold": 1.0}
    return {"method": "whiflash", "drafters": (drafters or eagle3) | toy, "router": router}


def stats(llm):
    return llm.collective_rpc("crossspec_stats")[0]


def draft_nonsense(worker):
    """Every token is followed by one that it never was."""
    (proposer,) = worker.model_runner.speculator.proposers.values()
    sabotage._replace(worker, proposer, "draft", lambda draft: lambda last: draft(last).fill_(VOCAB_SIZE - 1))


@pytest.mark.e2e
def test_alone_it_gives_plains_text(plain, folder):
    with engines.engine(alone(folder), async_scheduling=True) as llm:
        found, counted = texts(llm), stats(llm)["most_frequent"]
        llm.collective_rpc(draft_nonsense)
        assert texts(llm) == plain  # whatever is drafted
        wrong = stats(llm)["most_frequent"]
        llm.collective_rpc(sabotage.mend)
        llm.collective_rpc(sabotage.shift_positions)
        assert texts(llm) != plain  # and the comparison sees what is not plain's
    assert found == plain
    assert counted["drafts"] > 0 and counted["accepted_tokens"] > counted["drafts"] / 2
    assert wrong["accepted_tokens"] == counted["accepted_tokens"] and wrong["drafts"] > counted["drafts"]


@pytest.mark.e2e
def test_beside_eagle3_it_gives_plains_text(plain, folder):
    with engines.engine(routed(folder)) as llm:
        assert texts(llm) == plain
        drafters, counted = llm.collective_rpc("crossspec_routing")[0]["drafters"], stats(llm)
    for name in ("eagle3", "most_frequent"):
        assert drafters[name]["decisions"] > 0 and drafters[name]["switches"] > 0
        assert counted[name]["drafts"] > 0 and counted[name]["accepted_tokens"] > 0


@pytest.mark.e2e
def test_two_drafters_without_states_can_be_routed(plain, folder):
    spec = routed(folder, other={"type": "most_frequent", "model": str(folder), "num_speculative_tokens": 1})
    with engines.engine(spec) as llm:
        assert texts(llm) == plain
        assert all(counted["accepted_tokens"] for counted in stats(llm).values())


def test_the_example_is_one_short_file_and_its_page_quotes_it():
    code = (EXAMPLE / "most_frequent.py").read_text()
    assert len(code.splitlines()) <= 80
    quoted = re.findall(r"```(?:python|toml)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(quoted) == 4
    for block in quoted:
        assert block in code + (EXAMPLE / "pyproject.toml").read_text()


def test_its_checkpoint_is_checked_like_any_other(toy, tmp_path):
    target = TargetFacts("pocket", hidden_size=256, vocab_size=VOCAB_SIZE, num_layers=8)
    toy.write_checkpoint([3, 4, 3, 4, 3, 5, 9], VOCAB_SIZE, tmp_path / "good")
    table = toy.load_file(tmp_path / "good" / toy.WEIGHTS)["next_tokens"]
    assert table[[3, 4, 5, 9, 0]].tolist() == [4, 3, 9, 3, 3]
    assert check_drafter("most_frequent", str(tmp_path / "good"), "model", target).target_layers == ()
    with pytest.raises(ValueError, match="^model: config.json is not of a MostFrequentToken; make one"):
        check_drafter("most_frequent", str(engines.EAGLE3), "model", target)
    with pytest.raises(ValueError, match=f"vocabulary of {VOCAB_SIZE} tokens, but pocket has 100"):
        check_drafter("most_frequent", str(tmp_path / "good"), "model", target._replace(vocab_size=100))


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"head": "clusters"}, "speculative_config.head: a most_frequent drafter has no output layer; leave out head"),
        ({"tree": {"num_nodes": 8}}, "'chain' takes no depth, top_k or num_nodes"),
        ({"tree": {"type": "dynamic"}}, "does not suit a most_frequent drafter; it drafts chains alone"),
        ({"draft_sample_method": "probabilistic", "verification": "rejection"}, "is not for a most_frequent drafter"),
    ],
)
def test_what_it_cannot_do_is_refused(toy, keys, sentence):
    with pytest.raises(ValueError, match=sentence):
        config_parsing.parse({"method": "most_frequent", "model": "folder", **keys}, ["model"])


def test_a_drafter_is_found_by_name_and_imported_when_asked_for(tmp_path):
    module = (
        "from vllm_crossspec.kinds.drafter import DrafterKind\nKIND = DrafterKind('parrot', 'ngram_gpu', 'c', 'p')\n"
    )
    with package(tmp_path / "parrots", module, parrot="parrots:KIND"):
        assert "parrot" in base.drafter_kinds() and "parrots" not in sys.modules
        assert config_parsing.is_ours({"method": "parrot"}, {"eagle3"}, [])
        assert base.drafter_kind("parrot", "method").vllm_method == "ngram_gpu"
        with pytest.raises(ValueError, match="^method: no drafter is called 'parot'; did you mean 'parrot'\\?$"):
            base.drafter_kind("parot", "method")
    assert "parrot" not in base.drafter_kinds()


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        ("", r"cannot be loaded \(ModuleNotFoundError: No module named 'parrots'\); update or uninstall that package"),
        ("1 / 0", r"cannot be loaded \(ZeroDivisionError: division by zero\); update or uninstall that package"),
        ("KIND = 'parrot'", "is a str; entry point 'parrots:KIND' must name a DrafterKind called 'parrot'"),
        (
            "from vllm_crossspec.drafters import eagle3\nKIND = eagle3.KIND",
            "is the kind 'eagle3'; entry point 'parrots:KIND' must name a DrafterKind called 'parrot'",
        ),
    ],
)
def test_a_broken_package_is_named_and_harms_no_other_drafter(tmp_path, module, sentence):
    with package(tmp_path / "parrots", module, parrot="parrots:KIND"):
        assert base.drafter_kind("eagle3", "method").name == "eagle3"
        with pytest.raises(ValueError, match=f"^method: the drafter 'parrot' of package parrots {sentence}$"):
            base.drafter_kind("parrot", "method")


def test_a_name_that_two_packages_claim_is_refused(tmp_path):
    with (
        package(tmp_path / "parrots", parrot="parrots:KIND", eagle3="parrots:KIND"),
        package(tmp_path / "cuckoos", parrot="cuckoos:KIND"),
    ):
        with pytest.raises(ValueError, match="^method: 'eagle3' is a drafter of vllm-crossspec and of parrots alike; "):
            base.drafter_kind("eagle3", "method")
        with pytest.raises(ValueError, match="^method: 'parrot' is a drafter of (parrots|cuckoos) and of .* alike; "):
            base.drafter_kind("parrot", "method")
        assert base.drafter_kinds().count("eagle3") == 1
        assert "eagle3" in [kind.name for kind in base.own_kinds()]  # what every engine registers


def test_a_proposer_that_lacks_a_part_says_which():
    from vllm_crossspec.drafting.stateless import StatelessProposer

    class Mute(StatelessProposer):
        def load(self, folder):
            pass

    with pytest.raises(TypeError, match="abstract.*draft"):
        Mute(None, None, "mute", None)

"""JetSpec's drafters in engines: plain's text, and blocks in which no row sees a later one."""

import checkpoints
import engines
import pytest
from reference import recorder

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The pocket DFlash drafter's weights: not trained for it, and so accepted seldom."""
    return checkpoints.as_jetspec(tmp_path_factory.mktemp("jetspec") / "drafter", engines.DFLASH)


@pytest.mark.parametrize("kind", ["tree", "chain", "routed"])
def test_texts_are_plains(folder, kind):
    drafter = {"model": str(folder)}
    spec = {
        "tree": {"method": "jetspec", **drafter},
        "chain": {"method": "jetspec", **drafter, "tree": engines.CHAIN},
        "routed": {
            "method": "whiflash",
            "drafters": {"jetspec": drafter, "eagle3": {"model": str(engines.EAGLE3), "num_speculative_tokens": 4}},
            "router": {"policy": "entropy", "threshold": 1.0},
        },
    }[kind]
    seeded = {"temperature": 1.0, "seed": 5}
    plain = [engines.plain(6, 24), engines.plain(6, 24, **seeded)]
    with engines.engine(spec, max_num_batched_tokens=1024) as llm:
        assert engines.generate(llm, engines.prompts(6), max_tokens=24) == plain[0]
        assert engines.generate(llm, engines.prompts(6), max_tokens=24, **seeded) == plain[1]
        counts = llm.collective_rpc("crossspec_stats")[0]["jetspec"]
    assert counts["drafts"] > 0
    if kind == "tree":  # its authors' default, without the root
        assert counts["draft_tokens"] == 127 * counts["drafts"], counts


def drafts(method, folder, length):
    spec = {"method": method, "model": str(folder), "tree": engines.CHAIN, "draft_sample_method": "greedy"}
    with engines.engine(spec | {"num_speculative_tokens": length}) as llm:
        prompts = [llm.get_tokenizer().encode(text) for text in engines.prompts(4)]
        llm.collective_rpc(recorder.start)
        return [trace.drafts for trace in recorder.trace(llm, prompts, 16)]


@pytest.mark.parametrize("method", ["jetspec", "dflash"])
def test_only_a_causal_blocks_first_tokens_are_those_of_a_shorter_one(method, folder):
    """The control are the same weights as a DFlash drafter's, which does see later rows."""
    where = folder if method == "jetspec" else engines.DFLASH
    short, long = (drafts(method, where, length) for length in (3, 7))
    pairs = [
        (mine[known], theirs[known][:3])
        for mine, theirs in zip(short, long, strict=True)
        for known in mine.keys() & theirs.keys()
    ]
    assert len(pairs) > 20
    assert all(mine == theirs for mine, theirs in pairs) is (method == "jetspec")

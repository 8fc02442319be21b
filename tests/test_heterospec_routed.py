"""Adaptive trees of one drafter beside chains of another: plain's text, and no width of one on the other's drafts."""

import engines
import pytest
from test_heterospec_engine import BINS, TREE, calibration_file, check_rows, watch_rows, watched

pytestmark = pytest.mark.e2e


def test_beside_another_drafter(tmp_path):
    texts, plain = engines.prompts(4), engines.plain(4, 24)
    path = calibration_file(tmp_path, BINS["all sure"])
    spec = {
        "method": "whiflash",
        "drafters": {
            "eagle3": {"model": str(engines.EAGLE3), "tree": TREE, "adaptive": path},
            "dflash": {"model": str(engines.DFLASH), "num_speculative_tokens": engines.K},
        },
        "router": {"policy": "entropy", "threshold": 1.0},
    }
    with engines.engine(spec, enable_prefix_caching=False) as llm:
        llm.collective_rpc(watch_rows)
        assert engines.generate(llm, texts, max_tokens=24) == plain
        steps = llm.collective_rpc(watched)[0]
        drafted = {name: stats["drafts"] for name, stats in llm.collective_rpc("crossspec_stats")[0].items()}
        sized = llm.collective_rpc("crossspec_adaptive")[0]
    assert all(count > 0 for count in drafted.values()), drafted
    assert list(sized) == ["eagle3"] and sized["eagle3"]["trees"][0] >= drafted["eagle3"]
    check_rows(steps)
    # 20 nodes are planned of everybody: EAGLE-3's surest trees need 8, DFlash's chains 7.
    widths = {width for step in steps for rows, width in zip(step["drafted"], step["widths"], strict=True) if rows}
    assert widths == {8, engines.K}

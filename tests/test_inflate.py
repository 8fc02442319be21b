"""Inflated models: every kind of drafter drafts what it drafted, and the target accepts what it accepted."""

import engines
import pytest
import torch

from vllm_crossspec.cli.demo import METHODS, located
from vllm_crossspec.inflate.folder import Wish, make_plan, write_plan

pytestmark = pytest.mark.e2e

SIZES = {"hidden": 1024, "layers": 10, "mlp": 800, "heads": 8, "kv_heads": 4}
PROMPTS, MAX_TOKENS = 4, 24
WHIFLASH = METHODS["whiflash-neural"] | {
    "router": {
        "policy": "neural",
        "model": "{pocket}/router",
        "threshold": 0.0,
    }  # "auto" would hang on what rounds cost
}
SPECS = {name: METHODS[name] for name in (
    "plain", "eagle3", "eagle3-heterospec", "dflash-tree", "dart", "confu-tree", "flashhead", "eagle3-flashhead",
)} | {"whiflash": WHIFLASH}  # fmt: skip


def wish(**changes):
    return Wish(**{
        "model": engines.TARGET, "names": None, "sizes": SIZES, "draft": None, "dtype": None,
        "device": torch.device("cpu"), **changes,
    })  # fmt: skip


def inflate(out, **changes):
    plan = make_plan(wish(**changes))
    write_plan(plan, out, lambda name: lambda written: None)
    return plan


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    out = tmp_path_factory.mktemp("inflated") / "big"
    inflate(out)
    return out


def done(spec, where):
    """Tokens and counts of one engine with the models of a folder."""
    with engines.engine(spec and located(spec, where), where / "target") as llm:
        tokens = engines.generate(llm, engines.prompts(PROMPTS), max_tokens=MAX_TOKENS)
        return tokens, engines.counts(llm)


@pytest.fixture(scope="module")
def pocket():
    """What the shipped models do, by method; each is run when it is first asked for."""
    found = {}

    def of(name):
        if name not in found:
            found[name] = done(SPECS[name], engines.POCKET)
        return found[name]

    return of


@pytest.mark.parametrize("name", SPECS)
def test_text_and_acceptance_are_the_pocket_models(name, big, pocket):
    tokens, counts = done(SPECS[name], big)
    wanted, wanted_counts = pocket(name)
    assert tokens == wanted == pocket("plain")[0]
    assert counts == wanted_counts
    assert name == "plain" or counts.accepted > 0

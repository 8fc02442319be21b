"""Requests with images beside text ones: drafters that read text and states draft for both, and the text is plain's."""

import engines
import pytest
import sabotage
import target_kinds

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    from vllm import ModelRegistry

    if "PocketSeeing" not in ModelRegistry.get_supported_archs():
        from seeing import PocketSeeing

        ModelRegistry.register_model("PocketSeeing", PocketSeeing)
    return target_kinds.write_pocket_seeing(tmp_path_factory.mktemp("seeing"))


def requests(tokenizer, *seeds):
    """Two texts, and two with an image each."""
    texts = engines.prompts(4)
    seen = [tokenizer.encode(text.replace("user\n", "user\n<|mask|>\n")) for text in texts[2:]]
    return [*texts[:2], *(target_kinds.with_images(tokens, seed) for tokens, seed in zip(seen, seeds, strict=True))]


def asked(llm, *seeds):
    return target_kinds.answers(llm, requests(llm.get_tokenizer(), *seeds), 24)


@pytest.fixture(scope="module")
def plain(target):
    with engines.engine(None, model=target) as llm:
        texts = asked(llm, 0, 1).texts
        assert asked(llm, 2, 3).greedy[2:] != texts[0][2:], "nobody looks at the images"
    return texts


@pytest.mark.parametrize("name", target_kinds.POCKET)
def test_multimodal_requests_beside_text_are_plains(target, plain, name):
    with engines.engine(target_kinds.POCKET[name], model=target) as llm:
        found = asked(llm, 0, 1)
        assert found.texts == plain
        assert found.counts.accepted > 20
        if name == "eagle3-tree":
            llm.collective_rpc(sabotage.accept_everything)
            assert asked(llm, 0, 1).texts != plain

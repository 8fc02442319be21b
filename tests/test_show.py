"""The answer that `crossspec demo` shows as it is generated: whose tokens are whose, the terminal, the picture."""

import re
from itertools import pairwise

import demo_picture
import pytest
from played import ENVIRONMENT

from vllm_crossspec.cli import models, show
from vllm_crossspec.cli.runner import Job, Prompt
from vllm_crossspec.jobs import offline
from vllm_crossspec.jobs.client import Generation

STEPS = f"""
emit("ready", seconds=1.0, **{ENVIRONMENT!r})
for order in map(json.loads, open(job["orders"])):
    assert order == {{"show": True}} and len(job["groups"]) == 1 and len(job["groups"][0]["prompts"]) == 1, order
    pieces = [("", "One"), (" two three", " four"), ("", " [five]")]
    if not drafts:
        pieces = [("", piece) for piece in ("One", " two", " three", " four", " [five]")]
    for step, (drafted, own) in enumerate(pieces, 1):
        count = sum(len((a + b).split()) for a, b in pieces[:step])
        emit("text", drafted=drafted, own=own, num_tokens=count, step=step, seconds=step * 0.5)
    emit("done")
"""
TEXT = "One two three four [five]"
PROMPTS = [Prompt(category="chat", turns=(text, "more"), where="here") for text in ("Hello", "Count [to] five")]
GREEN = "\x1b[1;32m"


def jobs():
    configs = {"plain": {}, "eagle3-tree": {"speculative_config": {"method": "eagle3"}}}
    return [Job(method=m, engine=e, sampling={"max_tokens": 8}, prompts=PROMPTS) for m, e in configs.items()]


def flat(text):
    """Words without a panel's borders."""
    return " ".join(re.sub("[│╭╮╰╯─]", " ", text).split())


def test_both_texts_and_their_speeds_are_printed(play, capsys):
    play(STEPS)
    plain, tree = show.show(jobs(), PROMPTS, 2)
    assert plain.text.plain == tree.text.plain == TEXT
    assert [str(span.style) for span in tree.text.spans] == [show.DRAFTED]
    assert tree.text.plain[slice(*tree.text.spans[0][:2])] == " two three"
    assert not plain.text.spans
    out = capsys.readouterr().out
    assert "Count [to] five" in out and "\x1b" not in out and flat(out).count("four [five]") == 2
    assert "plain: 5 tokens in 2.5 s, 2.0 a second, 1.00 a round\n" in out
    assert "eagle3-tree: 5 tokens in 1.5 s, 3.3 a second, 2.00 a round, 1.67 times plain\n" in out


def test_a_terminal_gets_colours_and_every_step(play, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    play(STEPS)
    show.show(jobs(), PROMPTS, 1)
    out = capsys.readouterr().out
    assert out.count("One") > 6  # redrawn at every step
    assert f"{GREEN} two three\x1b[0m" in out


def test_the_picture_has_the_text_and_fetches_nothing(play):
    play(STEPS)
    svg = demo_picture.picture(PROMPTS[0], show.show(jobs(), PROMPTS, 1))
    assert "[five]" in svg.replace("&#160;", " ") and "1.67" in svg
    assert "@font-face" not in svg and "url(http" not in svg
    assert len(svg) < 100_000
    assert svg == demo_picture.picture(PROMPTS[0], show.show(jobs(), PROMPTS, 1))


def test_a_prompt_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="^--show 3: there are 2 prompts$"):
        show.show(jobs(), PROMPTS, 3)


# ---- the engine's side


class Letters:
    """A tokenizer whose ids are characters."""

    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens
        return "".join(map(chr, ids))


class FakeLLM:
    def get_tokenizer(self):
        return Letters()


def told(monkeypatch, steps, histogram):
    """Events of an answer whose steps bring these texts; the count of accepted drafts comes with the last."""
    generations = [Generation([], "", 0, [], 0, 0.0, [])]
    for number, step in enumerate(steps, 1):
        last = generations[-1]
        found = histogram if number == len(steps) else []
        ids = [*last.token_ids, *map(ord, step)]
        generations.append(Generation(ids, last.text + step, number, found, 0, 0.0, []))

    def answer(llm, conversations, sampling, batch_size, tell):
        for before, after in pairwise(generations):
            tell(before, after)

    monkeypatch.setattr(offline, "answer", answer)
    engine = object.__new__(offline.Measured)
    events = []
    engine._llm, engine._rows, engine._job = FakeLLM(), [], {"sampling": {}}
    engine._emit = lambda event, **fields: events.append(fields)
    engine.warm_up = lambda *about: None
    engine._conversations = lambda rows: []
    engine._show()
    return [(event["drafted"], event["own"]) for event in events]


def test_all_but_the_last_token_of_a_step_were_drafted(monkeypatch):
    assert told(monkeypatch, ["a", "bcd", "e", "fg"], [1, 1, 1]) == [("", "a"), ("bc", "d"), ("", "e"), ("f", "g")]
    assert told(monkeypatch, ["a", "b", "c"], []) == [("", "a"), ("", "b"), ("", "c")]


def test_an_answer_that_ends_within_the_drafts_has_no_token_of_the_targets_at_its_end(monkeypatch):
    # Its last step accepted three drafts, of which the length left two.
    assert told(monkeypatch, ["a", "bcd", "ef"], [0, 0, 1, 1]) == [("", "a"), ("bc", "d"), ("ef", "")]


@pytest.mark.nightly
@pytest.mark.e2e
def test_engines_show_the_same_text_with_and_without_drafts(capsys):
    from vllm_crossspec.cli import demo
    from vllm_crossspec.cli.prompts import read_prompts

    prompts = read_prompts(demo.demo_prompts())
    folder, sampling = models.POCKET.find(), {"temperature": 0.0, "max_tokens": 24}
    both = [demo.job_of(m, demo.METHODS[m], folder, prompts, sampling) for m in ("plain", "eagle3-tree")]
    plain, tree = show.show(both, prompts, 1)
    assert plain.text.plain == tree.text.plain and plain.num_tokens == tree.num_tokens > 16
    assert not plain.text.spans and tree.text.spans
    assert plain.step == plain.num_tokens > tree.step
    drafted = sum(span.end - span.start for span in tree.text.spans)
    assert 0 < drafted < len(tree.text.plain)

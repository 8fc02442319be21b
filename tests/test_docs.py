"""The documents: links lead somewhere, commands would be taken, and pictures say what their tables say."""

import re
from importlib import import_module

import pytest
from documents import DOCUMENTS, ROOT, bad_blocks, bad_files, bad_links, bad_spans, read
from other_packages import package

from vllm_crossspec.cli.demo import METHODS
from vllm_crossspec.config.parse import _PARTS
from vllm_crossspec.config.schema import CrossSpecConfig, DrafterConfig

figures = import_module("figures")

README_LINES = 150
PICTURE_BYTES = 100_000
INTERNAL = {"router_facts", "kind", "target_layers", "native", "overrides", "policy"}
"""Fields of settings that are resolved, and that nobody writes."""

documents = pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: str(file.relative_to(ROOT)))


def require_none(file, *found):
    sentences = [f"{file.relative_to(ROOT)}:{sentence}" for sentences in found for sentence in sentences]
    assert not sentences, "\n".join(["", *sentences])


@documents
def test_links_lead_somewhere(file):
    text = file.read_text()
    require_none(file, bad_links(file, text), bad_files(text))


TOY = """
from vllm_crossspec.kinds.drafter import DrafterKind

KIND = DrafterKind(name="most_frequent", vllm_method="ngram_gpu", checkpoint="", proposer="")
"""


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """As if the package of the example were installed, without what it imports."""
    with package(tmp_path_factory.mktemp("site") / "most_frequent", TOY, most_frequent="most_frequent:KIND"):
        yield


@documents
@pytest.mark.usefixtures("toy")
def test_commands_would_be_taken(file):
    text = file.read_text()
    require_none(file, bad_blocks(text), bad_spans(text))


def test_the_readme_is_read_in_five_minutes():
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


def test_the_index_names_every_document():
    index = (ROOT / "docs" / "index.md").read_text()
    pages = {str(file.relative_to(ROOT / "docs")) for file in (ROOT / "docs").rglob("*.md")} - {"index.md"}
    assert {page for page in pages if f"({page}" not in index} == set()


def test_every_setting_is_in_the_page_of_settings():
    spans = set(re.findall(r"`([\w.]+)`", (ROOT / "docs" / "use" / "configuration.md").read_text()))
    parts = {"": CrossSpecConfig.model_fields, "drafters": DrafterConfig.model_fields, **_PARTS}
    missing = [
        f"{name}.{field}"
        for name, part in parts.items()
        for field in part
        if field not in INTERNAL and not {field, f"{name}.{field}"} & spans
    ]
    assert missing == []


# ---- pictures


def test_the_table_has_every_method_of_the_demo():
    assert {method.name for method in figures.read_table(figures.TABLE)} == set(METHODS)


def test_pictures_are_small_and_say_what_the_table_says(tmp_path):
    figures.main(["--out", str(tmp_path)])
    drawn, kept = ((folder / "acceptance.svg").read_text() for folder in (tmp_path, ROOT / "docs" / "figures"))
    words = [sorted(re.findall(r"<text[^>]*>([^<]*)</text>", picture)) for picture in (drawn, kept)]
    assert words[0] == words[1] and len(words[0]) > 20, "run python benchmarks/figures.py"
    for file in (ROOT / "docs" / "figures").iterdir():
        assert file.stat().st_size < PICTURE_BYTES, file.name


# ---- these tests can fail


def found_in(text):
    file = ROOT / "docs" / "index.md"
    return [*bad_links(file, text), *bad_files(text), *bad_blocks(text), *bad_spans(text)]


def shell(*lines):
    return "\n".join(["text", "", "```bash", *lines, "```"])


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("crossspec demo --methdos all", "4: crossspec demo --methdos: No such option: --methdos"),
        ("crossspec demmo", "4: crossspec demmo: there is no command 'demmo'"),
        ("crossspec bench --spec configs/qwen3-8b-eagle3.json", "4: crossspec bench --spec: Missing option '--model'"),
        ("crossspec train eagle4 --data D", "4: crossspec train eagle4: there is no command 'eagle4'"),
        ("crossspec calibrate --record work/dev", "No such option"),
        ("crossspec demo | crossspec oracle --recrds work", "No such option: --recrds"),
        ("crossspec demo --limit many", "Invalid value for '--limit'"),
        ("make tests", "4: the Makefile has no target 'tests'"),
        ("make test ARGZ=x", "4: the Makefile has no variable 'ARGZ'"),
        ("make test ARGS=\"-m 'not e3e'\"", "4: pytest: there is no marker 'e3e'"),
        ('make demo ARGS="--mehods all"', "No such option: --mehods"),
        ("pytest --shadow-interpeter tests/test_config.py", "4: pytest: no test knows the option"),
        ("python benchmarks/round_times.py", "4: there is no script benchmarks/round_times.py"),
        ("python benchmarks/round_time.py --node 60", "4: benchmarks/round_time.py has no option '--node'"),
        ("python -m vllm_crossspec.cli.ap", "4: there is no module vllm_crossspec.cli.ap"),
        ("vllm serve M --dtyp float32", "4: vllm serve has no option '--dtyp'"),
        ("vllm bench serve --model M --num-prompt 3", "4: vllm bench serve has no option '--num-prompt'"),
        ("vllm bench latency --model M", "4: no test knows `vllm bench latency`"),
        ("vllm serv M", "4: no test knows `vllm serv`"),
        ('vllm serve M --speculative-config \'{"method": "dart"}\'', "4: speculative_config.model is missing"),
        ("vllm serve M --speculative-config '{\"method\": }'", "4: not JSON"),
        ('vllm serve M --speculative-config "$(crossspec pocket eagle4)"', "4: the demo has no method 'eagle4'"),
        ('vllm serve M --speculative-config "$(cat configs/no.json)"', "4: there is no file configs/no.json"),
        ('curl -d \'{"vllm_xargs": {"crossspec": "of"}}\' localhost', "4: a request may not ask for 'of'"),
        ('pip install ".[cdua]"', "4: the package has no extra 'cdua'"),
        ("crosspec demo", "4: no test knows the command 'crosspec'"),
        (
            "crossspec bench --model M --spec configs/qwen3-8b-eagle4.json",
            "4: there is no configs/qwen3-8b-eagle4.json",
        ),
    ],
)
def test_a_broken_command_is_named(line, sentence):
    assert any(sentence in found for found in found_in(shell(line))), found_in(shell(line))
    assert found_in(shell("crossspec demo --methods all")) == []


def test_a_command_over_several_lines_is_named_by_its_first():
    config = [
        "vllm serve M --speculative-config \\",
        '  \'{"method": "eagle3", "model": "m",',
        '    "tree": {"depht": 3}}\'',
    ]
    (found,) = found_in(shell("make demo", *config))
    assert found.startswith("5: speculative_config: unknown key 'tree.depht'")
    (found,) = found_in(shell("make demo", "crossspec demo 'open"))
    assert found.startswith("5: no test knows the command")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[a](nowhere.md)", "1: the link nowhere.md points to no file"),
        ("![a](figures/none.svg)", "1: the link figures/none.svg points to no file"),
        (
            "\n[`a`](use/choose.md#by-what-you-hav)",
            "2: the link use/choose.md#by-what-you-hav names no heading of that file",
        ),
        ("# One\n\n[a](#two)", "3: the link #two names no heading of that file"),
        ("`tests/test_nothing.py`", "1: there is no tests/test_nothing.py"),
        ("`trees/rose.py`", "1: there is no trees/rose.py in the package"),
        ("`crossspec train eagle4`", "1: crossspec train has no command 'eagle4'"),
        ("`crossspec collect --output`", "1: crossspec collect has no option '--output'"),
        ("`make tests`", "1: the Makefile has no target 'tests'"),
        ('`{"method": "dart"}`', "1: speculative_config.model is missing"),
        ("text\n\n    crossspec demo", "3: a command outside of a fenced block"),
        ("```\nx\n```", "2: the block names no language"),
        ('```json\n{"method": "eagle3", "model": "m", "tre": {}}\n```', "2: speculative_config: unknown key 'tre'"),
        ('```python\nLLM(speculative_config={"method": "dart"})\n```', "2: speculative_config.model is missing"),
        ("```python\nx = (\n```", "2: not Python"),
    ],
)
def test_what_is_broken_is_named(text, sentence):
    assert any(found.startswith(sentence) for found in found_in(text)), found_in(text)


def test_blocks_and_headings_are_found():
    text = "# A `b` c\n\n- item\n\n  ```bash\n  make demo\n  ```\n\n# A b c\n[x](#a-b-c-1)"
    assert [(block.line, block.lines) for block in read(text).blocks] == [(6, ["make demo"])]
    assert found_in(text) == []

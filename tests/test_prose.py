"""The floor of plain words: every document and docstring is held against `prose.py`, which can fail."""

import pytest
from prose import files, findings, of_docstrings, of_document


def test_documents_and_docstrings_are_plain():
    found = [(path, of_document(path) if path.suffix == ".md" else of_docstrings(path)) for path in files()]
    assert [finding for path, sentences in found for finding in findings(path, sentences)] == []
    assert sum(len(sentences) for _, sentences in found) > 3000


LONG = "The router " + "looks at every request and " * 8 + "waits."


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"Short.\n\n{LONG}\n", ["page.md:3: 43 words in one sentence", "page.md: 22.0 words a sentence on average"]),
        ("- It took 3, 4, 5 and 6 seconds.\n", ["page.md:1: 4 numbers in one sentence"]),
        ("Fine.\nAll but\nfor one, but for two.\n", ["page.md:2: 'but for' is an idiom"]),
        (f"| {LONG} | 1 2 3 4 5 |\n\n```text\n{LONG}\n```\n# but for\n", []),
        ("See [but for this](x.md) and `but for`, v0.32.\n", ["page.md:1: 'but for' is an idiom"]),
    ],
)
def test_findings_name_file_and_line(tmp_path, text, said):
    page = tmp_path / "page.md"
    page.write_text(text)
    found = list(findings(page, of_document(page)))
    assert len(found) == len(said) and all(words in finding for words, finding in zip(said, found, strict=True)), found


def test_docstrings_are_read_and_shapes_are_not(tmp_path):
    module = tmp_path / "module.py"
    module.write_text(
        f'"""Fine."""\n\n\nX = 1\n"""Nobody has it."""\n\n\ndef f():\n    """{LONG}\n\n    x: {LONG}\n    """\n'
    )
    found = list(findings(module, of_docstrings(module)))
    assert [finding.split(": ")[0].rpartition(":")[2] for finding in found] == ["5", "9"], found

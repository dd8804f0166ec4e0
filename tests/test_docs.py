"""The documentation's snippets run, in order, and print what the text says."""

import contextlib
import io
import itertools
import pathlib
import re
import runpy

import jax
import pytest

pytestmark = pytest.mark.once

ROOT = pathlib.Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#:]+)\)")
_END = "-- end of a snippet --"


def program(text):
    """The page as one script: snippets on their own lines, all else left empty."""
    lines = [""] * (text.count("\n") + 1)
    for fence in _FENCE.finditer(text):
        if fence[1] == "python":
            first = text[: fence.start(2)].count("\n")
            code = fence[2].splitlines()
            lines[first : first + len(code) + 1] = [*code, f"print({_END!r})"]
    return "\n".join(lines)


def promised(text):
    """What each snippet prints, or None where no text stands right below it."""
    fences = list(_FENCE.finditer(text))
    for fence, below in itertools.zip_longest(fences, fences[1:]):
        if fence[1] == "python":
            near = below and not text[fence.end() : below.start()].strip()
            yield below[2] if near and below[1] == "text" else None


def run(page, folder):
    """Runs a page's snippets in one namespace; returns how many outputs it compared."""
    text = page.read_text()
    script = folder / f"{page.stem}.py"
    script.write_text(program(text))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(script))
    found = printed.getvalue().split(f"{_END}\n")[:-1]
    pairs = list(zip(found, promised(text), strict=True))
    for got, want in pairs:
        assert want is None or got == want
    return sum(want is not None for _, want in pairs)


@pytest.fixture
def users_promotion():
    """Snippets show what a user sees, so they run under JAX's own defaults."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_snippets_run_and_print_what_the_page_says(page, tmp_path, users_promotion):
    compared = run(page, tmp_path)
    if page.name == "quickstart.md":
        assert compared >= 10


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in _LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


PAGE = "Text.\n```python\nx = 1\n```\n\n```python\nprint(x)\n```\n{}```text\n2\n```\n"


def test_a_wrong_output_and_an_error_are_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE.format("\n"))
    with pytest.raises(AssertionError):
        run(page, tmp_path)
    page.write_text(PAGE.format("\n").replace("x = 1", "x = 2"))
    assert run(page, tmp_path) == 1
    page.write_text(PAGE.format("\n").replace("x = 1", "y = 2"))
    with pytest.raises(NameError, match="'x'"):
        run(page, tmp_path)


def test_a_text_that_is_not_next_to_a_snippet_is_not_its_output(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE.format("Elsewhere:\n"))
    assert run(page, tmp_path) == 0
    assert program(page.read_text()).splitlines()[2] == "x = 1"

"""The documentation's snippets run, in order, and print what the text says."""

import contextlib
import io
import pathlib
import re

import jax
import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#:]+)\)")


def snippets(text):
    """(line, code, what it prints, or None where the page doesn't say)."""
    fences = list(_FENCE.finditer(text))
    for i, fence in enumerate(fences):
        if fence[1] != "python":
            continue
        follows = fences[i + 1] if i + 1 < len(fences) else None
        close = follows and not text[fence.end() : follows.start()].strip()
        output = follows[2] if close and follows[1] == "text" else None
        yield text[: fence.start()].count("\n") + 2, fence[2], output


def run(page):
    """Runs a page's snippets in one namespace; returns how many outputs it compared."""
    namespace, compared = {"__name__": page.stem}, 0
    for line, code, output in snippets(page.read_text()):
        # Blank lines before the code, so that a failure names the page's line.
        program = compile("\n" * (line - 1) + code, str(page), "exec")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(program, namespace)
        if output is not None:
            assert printed.getvalue() == output, f"{page.name}, line {line}"
            compared += 1
    return compared


@pytest.fixture
def users_promotion():
    """Snippets show what a user sees, so they run under JAX's own defaults."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_snippets_run_and_print_what_the_page_says(page, users_promotion):
    compared = run(page)
    if page.name == "quickstart.md":
        assert compared >= 10


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in _LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_a_wrong_output_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1)\n```\n\n```text\n2\n```\n")
    with pytest.raises(AssertionError, match="page.md, line 2"):
        run(page)


def test_a_text_that_is_not_next_to_a_snippet_is_not_its_output(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1)\n```\nElsewhere:\n```text\n2\n```\n")
    assert run(page) == 0

"""Text out of Debian packages: HTML, boilerplate, pieces, and what is refused.

The packages are made here, as folders laid out like the real ones: no network.
"""

import gzip
import hashlib
import json
import pathlib

import pytest

from experiments import config as options
from experiments import corpus, debian
from experiments.harness import ExitCode, UserError

pytestmark = pytest.mark.once

MENU = "<nav>menu</nav><div>Table of contents</div>"
PAGES = 40
SENTENCE = "Page %d says what no other page says &amp; ends.</p><p>Next page</p>"


def test_a_page_gives_what_a_reader_sees():
    page = (
        "<html><head><title>no</title><style>no</style></head><body>"
        "<script>if (a < b) no();</script><h1>Caf&eacute;\n <b>bar</b>¶</h1>"
        "<p> one\n  two <i>three</i></p><ul><li>first<li>second</ul>"
        "<pre>def f():\n    return 1\n</pre><footer>no</footer>last</body></html>"
    )
    assert debian.text_of(page) == (
        "Café bar\n\none two three\n\nfirst\nsecond\n\ndef f():\n    return 1\n\nlast\n"
    )


@pytest.mark.parametrize("page", ["", "plain", "</p></nav></pre>a", "<nav><p>a"])
def test_a_page_that_is_not_well_formed_still_ends(page):
    assert debian.text_of(page) in ("\n", "plain\n", "a\n")


def test_lines_of_many_files_go_and_short_ones_stay():
    texts = {f"f{i}": f"menu of all\n}}\nonly {i}\nin ten\n" for i in range(30)}
    few = {name: text for i, (name, text) in enumerate(texts.items()) if i < 10}
    texts = {k: v if k in few else v.replace("in ten\n", "") for k, v in texts.items()}
    kept = debian.without_boilerplate(texts)
    assert kept["f0"] == "}\nonly 0\nin ten\n"  # ten files are not many
    assert kept["f29"] == "}\nonly 29\n"


def test_a_file_of_nothing_but_boilerplate_goes():
    texts = {f"f{i}": "menu of all\n" for i in range(30)} | {"own": "its own line\n"}
    assert debian.without_boilerplate(texts) == {"own": "its own line\n"}


def make_tree(package: str, root: pathlib.Path) -> None:
    """What a package unpacks to, with a little text."""
    docs = root / "usr/share/doc" / package
    docs.mkdir(parents=True)
    for i in range(PAGES):
        (docs / f"{i}.html").write_text(f"{MENU}<p>{package} {SENTENCE % i}")
    dictd, words = root / "usr/share/dictd", root / "usr/share/wordnet"
    dictd.mkdir()
    words.mkdir()
    entries = (f"\nWord{i} \\Word{i}\\\n   meaning {i}\n" for i in range(20_000))
    packed = gzip.compress("".join(entries).encode())
    (dictd / "gcide.dict.dz").write_bytes(packed)
    for part in ("adj", "adv", "noun", "verb"):
        line = f"00001740 03 n 02 {part} 0 other_{part} 0 000 | the {part} itself  \n"
        (words / f"data.{part}").write_text("  1 licence | not text\n" + line)


@pytest.fixture
def packages(monkeypatch):
    """apt-get and dpkg-deb, played; returns the names of what was downloaded."""
    downloaded = []

    def call(*command, cwd):
        match command:
            case ("apt-get", *_, name):
                downloaded.append(name)
                (cwd / f"{name}.deb").write_bytes(name.encode())
            case ("dpkg-deb", "-x", file, tree):
                make_tree(file.removesuffix(".deb"), cwd / tree)
            case ("dpkg-deb", "-f", *_):
                return "1.0\n"

    monkeypatch.setattr(debian, "_call", call)
    return downloaded


def test_packages_become_a_folder_of_text_and_a_manifest(packages, tmp_path, capsys):
    folder, manifest = debian.fetch(str(tmp_path))
    printed = capsys.readouterr().out
    assert packages == list(debian.PACKAGES) == list(manifest)
    for name, facts in manifest.items():
        assert facts["sha256"] == hashlib.sha256(name.encode()).hexdigest()
        assert facts["files"] == sum(p.is_file() for p in (folder / name).rglob("*"))
        assert f"{name} is 1.0; the log's is {debian.PACKAGES[name][1]}\n" in printed
    page = folder / "anarchism/anarchism/7.html.txt"
    assert page.read_text() == "anarchism Page 7 says what no other page says & ends.\n"
    words = folder / "wordnet-base/noun-0000.txt"
    assert words.read_text() == "noun, other noun: the noun itself\n"
    # Cut between entries, near the size of a piece, and nothing lost.
    pieces = sorted((folder / "dict-gcide").rglob("*.txt"))
    texts = [piece.read_text() for piece in pieces]
    assert len(texts) > 2
    assert all(text.lstrip("\n").startswith("Word") for text in texts)
    assert all(len(text) < debian._PIECE + 100 for text in texts)
    assert sum(text.count("   meaning ") for text in texts) == 20_000


def test_what_was_made_is_not_made_again(packages, tmp_path):
    first = debian.fetch(str(tmp_path))
    again = debian.fetch(str(tmp_path))
    assert again == first
    assert len(packages) == len(debian.PACKAGES)


def test_the_corpus_holds_out_files_and_names_its_packages(packages, tmp_path):
    config = options.Config(data="debian", cache=str(tmp_path), held_out=0.2)
    found = corpus.load(options.resolve(config))
    assert not found.train.keys() & found.held.keys()
    assert found.held.keys() == {
        name for name in found.train | found.held if corpus.is_held_out(name, 0.2)
    }
    facts = found.facts()
    assert facts["corpus"] == "debian"
    assert facts["packages"].keys() == debian.PACKAGES.keys()
    assert json.dumps(facts)
    assert not any(".manifest" in name for name in found.train | found.held)


def test_a_broken_download_leaves_nothing_that_looks_whole(tmp_path, monkeypatch):
    def call(*command, cwd):
        raise UserError(ExitCode.DATA, "no network")

    monkeypatch.setattr(debian, "_call", call)
    for _ in range(2):
        with pytest.raises(UserError, match="no network"):
            debian.fetch(str(tmp_path))
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("no-such-program", "x"), "needs no-such-program"),
        (("ls", "/no/such/folder"), "ls /no/such/folder failed"),
    ],
)
def test_a_missing_or_failing_program_is_one_line(command, words, tmp_path):
    with pytest.raises(UserError) as caught:
        debian._call(*command, cwd=tmp_path)
    assert caught.value.code == ExitCode.DATA
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)

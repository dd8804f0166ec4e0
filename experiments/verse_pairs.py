"""Question: which sentence pairs can a classifier learn from? Writes them as one file.

Command:   python -m experiments.verse_pairs
Hardware:  two CPU cores, three minutes, Debian's packages and PyPI's pysword; the file
           then needs neither.
Expected:  31,070 verses, 4,264 of them in test books, in a file of 3 MB; by TF-IDF
           0.90 of the test books' hard pairs are told apart.

A verse in the King James Version and the same verse in the World English Bible say the
same: a paraphrase. The verse and another one of its chapter, the most similar by
TF-IDF, don't: a hard negative. Both texts are in the public domain. Books are held out
whole, books that retell each other together with those they retell stay in training.
"""

import collections
import dataclasses
import hashlib
import itertools
import json
import pathlib
import re
import subprocess
import sys
import tempfile

import numpy as np

from experiments import harness, tf_idf
from experiments.harness import NOT_NPZ, ExitCode, UserError, option

# Debian's packages, the modules in them, and the versions that the log's figures are
# of.
PACKAGES = {
    "sword-text-kjv": ("engKJV2006eb", "14.3-1"),
    "sword-text-web": ("engWEB2015eb", "426.0-1"),
}
PARTS = ("train", "valid", "test")
HELD = {
    "valid": ("Judges", "Ecclesiastes", "Hosea", "Romans"),
    "test": ("Joshua", "Proverbs", "Ezekiel", "Acts", "Hebrews", "James"),
}
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
PAD, _, CLS, SEP = range(len(SPECIALS))
CANDIDATES = 8  # most similar other verses that are kept of each
LONGEST = 126  # tokens kept of a verse: a pair of 128 takes no more
_DROPPED = re.compile(r"<(note|title)\b[^>]*>.*?</\1>|<br[^>]*>", re.DOTALL)
_TAG = re.compile(r"<[^>]*>")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Fetches both texts, pairs and tokenizes their verses, and writes one file."""

    out: str = option("results/verse_pairs.npz", "the file to write")
    vocab: int = option(8192, "word pieces, made from the training books")
    cache: str = option("results/cache", "folder for the packages' text")

    def __post_init__(self):
        if not 256 <= self.vocab <= 2**16:
            raise ValueError(f"--vocab must be from 256 to 65536, got {self.vocab}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verses:
    """V verses as word pieces, each in two versions.

    first, second: uint16 (V, W), padded with PAD; the King James and the World English.
    first_length, second_length: int32 (V,). similar: int32 (V, CANDIDATES), other
    verses of the chapter, the most similar one first, repeated where there are fewer.
    part: uint8 (V,), an index of PARTS. similarity: float32 (V, 2), by TF-IDF, of each
    pair and of its hard negative.
    """

    first: np.ndarray
    first_length: np.ndarray
    second: np.ndarray
    second_length: np.ndarray
    similar: np.ndarray
    part: np.ndarray
    similarity: np.ndarray
    vocab: int
    sha256: str

    def rows(self, part: str) -> np.ndarray:
        """int32, the verses of a part."""
        return np.flatnonzero(self.part == PARTS.index(part)).astype(np.int32)


def plain(osis: str) -> str:
    """The words of a verse without its notes, titles and tags.

    Example:
      >>> plain('<w>God</w><note n="a">or <hi>gods</hi></note><w>made</w>  light')
      'God made light'
    """
    text = _TAG.sub("", _DROPPED.sub(" ", osis)).replace("\N{PILCROW SIGN}", " ")
    return " ".join(text.split())


def _call(*command: str, cwd: str) -> str:
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
        said = (done.stderr.strip() or "?").splitlines()[-1]
        failed = done.returncode != 0
    except OSError as error:
        done, said, failed = None, str(error), True
    if failed:
        raise UserError(
            ExitCode.DATA,
            f"{' '.join(command)} failed ({said}); run it on Debian 12 after apt-get "
            "update, and copy the file to where there is no network",
        )
    return done.stdout


def _verses_of(folder: str, module: str, advance) -> dict[str, str]:
    """By "book chapter:verse", what one module holds."""
    try:
        from pysword import modules
    except ImportError:
        raise UserError(
            ExitCode.DATA, "reading the texts needs pysword; pip install pysword"
        ) from None
    found = modules.SwordModules(f"{folder}/usr/share/sword")
    found.parse_modules()
    bible, texts = found.get_bible_from_module(module), {}
    for book in itertools.chain(*bible.get_structure().get_books().values()):
        for chapter in range(1, book.num_chapters + 1):
            lines = bible.get_iter(books=[book.name], chapters=[chapter], clean=False)
            for verse, line in enumerate(lines, 1):
                texts[f"{book.name} {chapter}:{verse}"] = plain(line)
        advance(book.name)
    return texts


def fetch(cache: str) -> dict:
    """{"packages": {name: facts}, "texts": [by reference, a version each]}; cached.

    Raises:
      UserError: no apt-get or dpkg-deb, no network, no pysword; exit code 5.
    """
    path = pathlib.Path(cache, "verse_pairs.json")
    if path.exists():
        return json.loads(path.read_text())
    made = {"packages": {}, "texts": []}
    for package, (module, _) in PACKAGES.items():
        with tempfile.TemporaryDirectory() as folder:
            _call("apt-get", "download", "-q", package, cwd=folder)
            (file,) = pathlib.Path(folder).glob("*.deb")
            _call("dpkg-deb", "-x", file.name, "tree", cwd=folder)
            version = _call("dpkg-deb", "-f", file.name, "Version", cwd=folder).strip()
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            made["packages"][package] = {"version": version, "sha256": digest}
            show = lambda book, name=package: print(f"{name}: {book}", flush=True)
            made["texts"].append(_verses_of(f"{folder}/tree", module, show))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(made))
    return made


def part_of(reference: str) -> int:
    """The part in which a verse's book is.

    Example:
      >>> PARTS[part_of("Acts 2:1")], PARTS[part_of("I Kings 1:1")]
      ('test', 'train')
    """
    book = reference.rpartition(" ")[0]
    return next((PARTS.index(p) for p, held in HELD.items() if book in held), 0)


def paired(texts: list[dict[str, str]]) -> list[str]:
    """References of verses that both have, in chapters with at least two of them."""
    both = [r for r, text in texts[0].items() if text and texts[1].get(r)]
    count = collections.Counter(r.partition(":")[0] for r in both)
    return [r for r in both if count[r.partition(":")[0]] > 1]


def train_tokenizer(texts: list[str], vocab: int):
    """Byte pairs within lower-case words, whose first piece starts with a bar.

    Not BERT's word pieces: their trainer gives another vocabulary each time.
    """
    import tokenizers
    from tokenizers import models, normalizers, pre_tokenizers, trainers

    made = tokenizers.Tokenizer(models.BPE(unk_token=SPECIALS[1]))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    words = [pre_tokenizers.BertPreTokenizer(), pre_tokenizers.Metaspace()]
    made.pre_tokenizer = pre_tokenizers.Sequence(words)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[*SPECIALS], show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    return made


def _encoded(tokenizer, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    pieces = [e.ids[:LONGEST] for e in tokenizer.encode_batch(texts)]
    lengths = np.array([len(ids) for ids in pieces], np.int32)
    ids = np.full((len(texts), lengths.max()), PAD, np.uint16)
    for row, entry in zip(ids, pieces, strict=True):
        row[: len(entry)] = entry
    return ids, lengths


def build(texts: list[dict[str, str]], vocab: int) -> Verses:
    """Pairs, negatives and word pieces of two versions; the parts are by book."""
    references = paired(texts)
    part = np.array([part_of(r) for r in references], np.uint8)
    versions = [[version[r] for r in references] for version in texts]
    rows = tf_idf.rows_of(versions[0] + versions[1], np.tile(part == 0, 2))
    V = len(references)
    chapters = [reference.partition(":")[0] for reference in references]
    similar, similarity = tf_idf.most_similar(
        chapters, rows[:V], rows[V:], count=CANDIDATES
    )
    trained = [t for v in versions for t, p in zip(v, part, strict=True) if p == 0]
    tokenizer = train_tokenizer(trained, vocab)
    first, second = (_encoded(tokenizer, version) for version in versions)
    arrays = {
        "first": first[0], "first_length": first[1],
        "second": second[0], "second_length": second[1],
        "similar": similar, "part": part, "similarity": similarity,
    }  # fmt: skip
    return Verses(**arrays, vocab=tokenizer.get_vocab_size(), sha256=_sha256_of(arrays))


def _sha256_of(arrays: dict[str, np.ndarray]) -> str:
    total = hashlib.sha256()
    for name in sorted(arrays):
        total.update(f"{name}{arrays[name].shape}".encode())
        total.update(np.ascontiguousarray(arrays[name]).tobytes())
    return total.hexdigest()


def write(path: str, verses: Verses) -> pathlib.Path:
    """Writes the file that `load` reads."""
    target = pathlib.Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(target, **dataclasses.asdict(verses))
    return target


def load(path: str) -> Verses:
    """The verses in a file that `write` wrote.

    Raises:
      UserError: no such file, or another kind of file; exit code 5.
    """
    fields = [field.name for field in dataclasses.fields(Verses)]
    try:
        # Opened here: np.load leaves a file that is no archive open.
        with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
            arrays = {name: file[name] for name in fields}
    except NOT_NPZ as error:
        raise UserError(
            ExitCode.DATA,
            f"{path} can't be read ({error}); write it with python -m "
            "experiments.verse_pairs",
        ) from None
    vocab, sha256 = int(arrays.pop("vocab")), str(arrays.pop("sha256"))
    if _sha256_of(arrays) != sha256:
        raise UserError(
            ExitCode.DATA, f"{path} is damaged: its arrays are not those of its sha256"
        )
    return Verses(**arrays, vocab=vocab, sha256=sha256)


def tf_idf_accuracy(verses: Verses, part: str) -> float:
    """Share of a part's hard pairs that one threshold of TF-IDF tells apart.

    The threshold is the best one for the training books.
    """
    near = lambda part: verses.similarity[verses.rows(part)]
    limit = tf_idf.threshold(*near("train").T)
    same, hard = near(part).T
    return float(((same >= limit).mean() + (hard < limit).mean()) / 2)


def main(config: Config) -> None:
    """Writes the file and says what is in it."""
    made = fetch(config.cache)
    for name, facts in made["packages"].items():
        print(f"{name} {facts['version']} {facts['sha256']}")
    verses = build(made["texts"], config.vocab)
    path = write(config.out, verses)
    for part in PARTS:
        rows = verses.rows(part)
        length = 3 + verses.first_length[rows] + verses.second_length[rows]
        places = np.percentile(length, [50, 95, 99, 100]).astype(int).tolist()
        share = tf_idf_accuracy(verses, part)
        print(
            f"{part}: {len(rows):,} verses, TF-IDF {share:.3f}, tokens of a pair (50, "
            f"95, 99, 100 %): {places}"
        )
    print(f"{verses.vocab} word pieces, sha256 {verses.sha256}")
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    sys.exit(harness.run_main(main, Config))

"""Corpus -> tokens -> batches: byte-pair encoding, a cache, and a grain pipeline.

What is slow (training the tokenizer, encoding) is kept in a folder named by the hash
of what it was made from, written aside and renamed: a killed run leaves no half file.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import tempfile

import numpy as np

from experiments import corpus, token_file
from experiments.harness import ExitCode, UserError

END = "<|end|>"  # between files
_SAMPLE = 4_000_000  # characters that train the tokenizer: seconds, not minutes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
    """Token ids of both parts of a corpus, int32, and what they were made with."""

    train: np.ndarray
    held: np.ndarray
    vocab: int
    tokenizer: str  # bpe, or bytes
    end: int  # the id between two files
    sha256: str  # of the ids: equal ids in equal order, equal training
    origin: dict  # the corpus' facts: name, sha256, numbers of files, packages

    def facts(self) -> dict:
        """For results and checkpoints."""
        return {
            **self.origin,
            "tokens_sha256": self.sha256,
            "tokenizer": self.tokenizer,
            "train_tokens": len(self.train),
            "held_out_tokens": len(self.held),
        }


class ByteTokenizer:
    """One token a byte, 256 between files: what runs when `tokenizers` is missing."""

    name, vocab = "bytes", 257

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """One array of ids a text."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def end(self) -> int:
        """The id between two files."""
        return 256


class BpeTokenizer:
    """Byte-level byte-pair encoding; decoding gives back every byte."""

    name = "bpe"

    def __init__(self, model):
        self.model, self.vocab = model, model.get_vocab_size()

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """One array of ids a text."""
        done = self.model.encode_batch_fast(texts, add_special_tokens=False)
        return [np.asarray(each.ids, np.int32) for each in done]

    def end(self) -> int:
        """The id between two files."""
        return self.model.token_to_id(END)


def _train_bpe(texts: list[str], vocab: int):
    import tokenizers as tk

    model = tk.Tokenizer(tk.models.BPE())
    model.pre_tokenizer = tk.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tk.decoders.ByteLevel()
    trainer = tk.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=sorted(tk.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    return model


def _sample(texts: list[str]) -> list[str]:
    """Every n-th text, so that the sample has about _SAMPLE characters of the whole."""
    every = -(-sum(map(len, texts)) // _SAMPLE)
    return [text[:_SAMPLE] for text in texts[:: max(every, 1)]]


def _write(path: pathlib.Path, save) -> None:
    """save(name of a temporary file), then rename: the path is whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=path.suffix)
    os.close(handle)
    try:
        save(name)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _bpe(source: corpus.Corpus, vocab: int, folder: pathlib.Path) -> BpeTokenizer:
    import tokenizers as tk

    path = folder / "tokenizer.json"
    if path.exists():
        try:
            return BpeTokenizer(tk.Tokenizer.from_file(str(path)))
        except Exception:  # the package raises bare Exception for a damaged file
            path.unlink()
    model = _train_bpe(_sample(list(source.train.values())), vocab)
    # model.save raises a bare Exception when the disk is full; write_text an OSError.
    text = model.to_str()
    _write(path, lambda name: pathlib.Path(name).write_text(text))
    return BpeTokenizer(model)


def make_tokenizer(config, source: corpus.Corpus, folder: pathlib.Path):
    """The tokenizer that the config asks for; bytes where `tokenizers` is missing."""
    if config.tokenizer == "bpe":
        try:
            return _bpe(source, config.vocab, folder)
        except ImportError:
            print("tokenizers isn't installed: training on bytes")
    return ByteTokenizer()


def _encode(tokenizer, texts: dict[str, str]) -> np.ndarray:
    """All ids in one int32 array, END after each file, 64 files at a time."""
    parts, values = [], list(texts.values())
    end = np.asarray([tokenizer.end()], np.int32)
    for start in range(0, len(values), 64):
        for ids in tokenizer.encode(values[start : start + 64]):
            parts += [ids.astype(np.int32), end]
    return np.concatenate(parts)


def _cached_ids(folder: pathlib.Path, make) -> dict[str, np.ndarray]:
    """Ids by part, from the cache if its hash still fits, else made and cached."""
    files = {part: folder / f"{part}.npy" for part in ("train", "held")}
    note = folder / "ids.json"
    try:
        ids = {k: np.load(path, allow_pickle=False) for k, path in files.items()}
        if json.loads(note.read_text())["sha256"] == sha256_of(ids):
            return ids
    except (OSError, ValueError, KeyError, EOFError):
        pass  # not there yet, or damaged: make it again
    ids = make()
    for part, array in ids.items():
        _write(files[part], lambda name, a=array: np.save(name, a))
    text = json.dumps({"sha256": sha256_of(ids)})
    _write(note, lambda name: pathlib.Path(name).write_text(text))
    return ids


def sha256_of(ids: dict[str, np.ndarray]) -> str:
    """Of the ids of both parts, as 32-bit little-endian integers."""
    total = hashlib.sha256()
    for part in sorted(ids):
        total.update(part.encode() + ids[part].astype("<i4").tobytes())
    return total.hexdigest()


def encode_corpus(config) -> Tokens:
    """Tokens of the config's corpus (a resolved config), from the cache if there.

    Raises:
      UserError: what `corpus.load` refuses, or a cache that can't be written; exit
        code 5.
    """
    source = corpus.load(config)
    # Any option that changes the split or the vocabulary has its own folder.
    split = "\n".join(source.held)
    key = f"{config.tokenizer}-{config.vocab}-{source.sha256}-{split}"
    folder = pathlib.Path(config.cache, hashlib.sha256(key.encode()).hexdigest()[:16])
    try:
        tokenizer = make_tokenizer(config, source, folder)
        parts = {"train": source.train, "held": source.held}
        ids = _cached_ids(
            folder / tokenizer.name,
            lambda: {part: _encode(tokenizer, texts) for part, texts in parts.items()},
        )
    except OSError as error:
        raise UserError(
            ExitCode.DATA,
            f"--cache={config.cache} can't be written ({error}); free space or give "
            "another folder",
        ) from None
    return Tokens(
        **ids,
        vocab=tokenizer.vocab,
        tokenizer=tokenizer.name,
        end=tokenizer.end(),
        sha256=sha256_of(ids),
        origin=source.facts(),
    )


def prepare(config) -> Tokens:
    """Tokens of the config's --data (a resolved config: vocab, batch, seq are set).

    Raises:
      UserError: what `encode_corpus` or `token_file.read` refuses, or less text than
        one batch of either part needs; exit code 5. A table smaller than the
        tokenizer's; exit code 6.
    """
    if config.data.endswith(token_file.SUFFIX):
        tokens = Tokens(**token_file.read(config.data))
    else:
        tokens = encode_corpus(config)
    if tokens.vocab > config.vocab:
        raise UserError(
            ExitCode.CONFIG,
            f"--vocab={config.vocab} is below the {tokens.vocab} tokens of the "
            f"{tokens.tokenizer} tokenizer; raise it",
        )
    for part, need in (("train", config.batch), ("held", 1)):
        length = len(getattr(tokens, part))
        have = max((length - 1) // config.seq, 0)
        if have < need:
            raise UserError(
                ExitCode.DATA,
                f"{config.data} has {length} tokens of {part} text, which is {have} "
                f"sequences of {config.seq}, but {need} are needed; add text or lower "
                "--batch or --seq",
            )
    return tokens


@dataclasses.dataclass(frozen=True, eq=False)
class Windows:
    """Item i is ids[i * seq : (i + 1) * seq + 1]: inputs and, shifted, targets."""

    ids: np.ndarray
    seq: int

    def __len__(self) -> int:
        return (len(self.ids) - 1) // self.seq

    def __getitem__(self, i) -> np.ndarray:
        return self.ids[i * self.seq : (i + 1) * self.seq + 1]

    def __repr__(self) -> str:  # grain prints its source; not every id
        return f"Windows({len(self)} of {self.seq} tokens)"


def train_batches(tokens: Tokens, config):
    """An endless iterator of int32 (batch, seq + 1), shuffled anew in each epoch.

    `get_state()` is JSON ({"next_index": n}) and `set_state` continues exactly there.
    """
    import grain

    source = grain.MapDataset.source(Windows(tokens.train, config.seq))
    batches = (
        source.seed(config.seed)
        .shuffle()
        .repeat()
        .batch(config.batch, drop_remainder=True)
    )
    # The text is in memory: threads would only read ahead of a slow disk.
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return iter(batches.to_iter_dataset(options))


def held_batches(tokens: Tokens, config) -> list[np.ndarray]:
    """The same few batches at every evaluation, spread over the held-out text."""
    windows = Windows(tokens.held, config.seq)
    count = min(config.eval_batches * config.batch, len(windows))
    # A full batch or none: another shape would compile another program.
    count = max(count - count % config.batch, min(count, config.batch))
    chosen = np.linspace(0, len(windows) - 1, count).astype(int)
    picked = np.stack([windows[i] for i in chosen])
    return np.split(picked, max(count // config.batch, 1))

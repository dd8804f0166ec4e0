"""Question: which tokens does a run train on? Writes them as one file.

Command:   python -m experiments.prepare --data=debian --vocab=8192 \
               --out=results/debian.npz
Hardware:  two CPU cores, two minutes and a network; the file then needs neither.
Expected:  33.0 M training and 1.6 M held-out tokens in 33 MB.
"""

import dataclasses
import sys
from typing import Literal

import numpy as np

from experiments import data, harness, token_file
from experiments.harness import option


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Fetches and tokenizes a corpus and writes it as one file for --data.

    Whole files are held out, as in experiments.pretrain with the same options.
    """

    data: str = option("debian", "stdlib, debian, or a folder of text files")
    out: str = option("results/debian.npz", "the file to write")
    vocab: int = option(8192, "entries of the tokenizer, at most 65536")
    tokenizer: Literal["bpe", "bytes"] = option("bpe", "byte pairs, or single bytes")
    train_tokens: int | None = option(None, "at most so many, of whole files drawn")
    held_out: float = option(0.05, "share of the files that are never trained on")
    stdlib_tests: bool = option(False, "with stdlib: also its tests")
    on_bad_file: Literal["fail", "skip"] = option("fail", "for a file that isn't text")
    cache: str = option("results/cache", "folder for packages, tokenizers and tokens")

    def __post_init__(self):
        if not 257 <= self.vocab <= 2**16:
            raise ValueError(f"--vocab must be from 257 to 65536, got {self.vocab}")
        if not 0 < self.held_out < 1:
            raise ValueError(f"--held_out must be between 0 and 1, got {self.held_out}")
        if self.train_tokens is not None and self.train_tokens < 1:
            raise ValueError(
                f"--train_tokens must be at least 1, got {self.train_tokens}"
            )


def shortened(ids: np.ndarray, end: int, most: int) -> np.ndarray:
    """Whole files of `ids`, drawn in an order that is always the same, up to `most`.

    The last one that is drawn is cut. A prefix would be of one package alone.
    """
    files = np.split(ids, np.flatnonzero(ids == end) + 1)
    order = np.random.default_rng(0).permutation(len(files))
    return np.concatenate([files[i] for i in order])[:most]


def main(config: Config) -> None:
    """Writes the file and says what is in it."""
    tokens = data.encode_corpus(config)
    if config.train_tokens is not None:
        train = shortened(tokens.train, tokens.end, config.train_tokens)
        digest = data.sha256_of({"train": train, "held": tokens.held})
        tokens = dataclasses.replace(tokens, train=train, sha256=digest)
    path = token_file.write(config.out, tokens)
    for name, facts in tokens.origin["packages"].items():
        print(f"{name} {facts['version']} {facts['sha256']}: {facts['files']} files")
    print(
        f"{len(tokens.train):,} training and {len(tokens.held):,} held-out tokens, "
        f"{tokens.vocab} kinds, sha256 {tokens.sha256}\n"
        f"{path}: {path.stat().st_size / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    sys.exit(harness.run_main(main, Config))

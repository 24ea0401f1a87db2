"""Text as batches of token ids: read, tokenise, number, and cut into [bptt, batch] pieces."""

import math
import re
import sys
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

SPLITS = ("train", "valid", "test")
UNKNOWN, END = "<unk>", "<eos>"


class DataError(Exception):
    """The text cannot be used; the message says why and what to do."""


@dataclass(frozen=True)
class Text:
    """A text in three parts, each a 1-D int64 tensor of positions in `vocabulary`."""

    name: str
    vocabulary: list
    train: torch.Tensor
    valid: torch.Tensor
    test: torch.Tensor


def load_text(folder=None, min_frequency=2):
    """Read the WikiText-2 files of `folder`, or else the Python documentation.

    A word that the training part has fewer than `min_frequency` times becomes <unk>; every
    paragraph ends with <eos>.

    Raises:
        DataError: a file is missing, or a part holds no words.
    """
    name, paragraphs = read_wikitext(folder) if folder else read_python_topics()
    tokenize = get_tokenizer()
    words = {
        split: [word for text in paragraphs[split] if (line := tokenize(text)) for word in [*line, END]]
        for split in SPLITS
    }
    for split in SPLITS:
        if not words[split]:
            raise DataError(f"the {split} part of {name} holds no words")

    counts = Counter(words["train"])
    frequent = [word for word, count in counts.most_common() if count >= min_frequency]
    vocabulary = [UNKNOWN, END, *(word for word in frequent if word not in (UNKNOWN, END))]
    index = {word: i for i, word in enumerate(vocabulary)}
    ids = {split: torch.tensor([index.get(word, 0) for word in words[split]]) for split in SPLITS}
    return Text(name, vocabulary, **ids)


def read_python_topics():
    """The prose of `pydoc_data.topics`, which every CPython carries: what help("with") shows.

    A hash of its name puts each topic in a part, for good: about 8 of 10 train, 1 validates and
    1 tests. Topics quote one another, so a paragraph counts once, in the test part if any of its
    topics is there: no sentence that tests was trained on.
    """
    from pydoc_data.topics import topics

    parts = {"test": [], "valid": [], "train": []}
    for topic in sorted(topics):
        remainder = zlib.crc32(topic.encode()) % 10
        parts[{0: "test", 1: "valid"}.get(remainder, "train")].append(topic)

    seen = set()
    paragraphs = {}
    for split, names in parts.items():
        found = dict.fromkeys(p for topic in names for p in prose(topics[topic]) if p not in seen)
        paragraphs[split] = list(found)
        seen.update(found)
    return (f"the documentation of Python {sys.version_info.major}.{sys.version_info.minor}", paragraphs)


def prose(text):
    """Yield the paragraphs of reStructuredText, unmarked; no grammar, tables or sessions."""
    for block in re.split(r"\n\s*\n", text):
        lines = [line.strip() for line in block.splitlines()]
        lines = [line for line in lines if line and not re.fullmatch(r"([*=\-~^\"'.])\1+", line)]
        if lines and "::=" not in block and not lines[0].startswith((">>>", "+-", "|")):
            yield re.sub(r"(\*+|`+)(\S[^*`]*)\1", r"\2", " ".join(lines))  # *emphasis*, ``code``


def read_wikitext(folder):
    """The lines of wiki.{train,valid,test}.tokens in `folder`, or in wikitext-2/ inside it."""
    folder = Path(folder)
    places = [folder, folder / "wikitext-2", folder / "wikitext-2" / "wikitext-2"]
    place = next((p for p in places if (p / "wiki.train.tokens").is_file()), folder)
    paragraphs = {}
    for split in SPLITS:
        file = place / f"wiki.{split}.tokens"
        if not file.is_file():
            raise DataError(
                f"there is no {str(file)!r}. Put the three files of WikiText-2 (wiki.train.tokens, "
                f"wiki.valid.tokens, wiki.test.tokens: any text, a paragraph a line) into {str(folder)!r} "
                "or its folder wikitext-2, or leave --data out to read the Python documentation."
            )
        try:
            paragraphs[split] = file.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise DataError(f"{str(file)!r} is not UTF-8 text: {error}") from error
    return str(place), paragraphs


def get_tokenizer():
    """torchtext's "basic_english" where torchtext works, else our own, which does the same."""
    try:
        from torchtext.data.utils import get_tokenizer as torchtext_tokenizer
    except (ImportError, OSError):  # OSError: torchtext 0.18 does not load beside a newer torch
        return basic_english
    return torchtext_tokenizer("basic_english")


SPACED = str.maketrans({mark: f" {mark} " for mark in "'.,()!?"} | {";": " ", ":": " "})


def basic_english(text):
    """Lower case; ' . , ( ) ! ? are words; double quotes vanish; ; and : and <br /> only separate."""
    return text.lower().replace('"', "").replace("<br />", " ").translate(SPACED).split()


def batchify(tokens, batch_size, rank=0, world_size=1):
    """Lay the text out as columns that are read side by side.

    With several ranks the text is cut into `world_size * batch_size` columns and each rank takes
    its `batch_size` of them: together they see what one rank with all the columns would see.

    Returns: an int64 tensor [len(tokens) // columns, batch_size]; column j continues from row to row.
    """
    columns = batch_size * world_size
    rows = len(tokens) // columns
    if rows < 2:
        raise DataError(
            f"{len(tokens):,} tokens are too few for {columns} columns "
            f"(batch size {batch_size} on {world_size} rank(s)): use more text or a smaller batch"
        )
    grid = tokens[: rows * columns].view(columns, rows).t()
    return grid[:, rank * batch_size : (rank + 1) * batch_size].contiguous()


def batches(columns, bptt):
    """Yield (data [n, batch], targets [n * batch]): each token and the next; n = bptt but at the end."""
    for start in range(0, len(columns) - 1, bptt):
        n = min(bptt, len(columns) - 1 - start)
        yield columns[start : start + n], columns[start + 1 : start + 1 + n].reshape(-1)


def unigram_loss(text, columns):
    """Mean loss, on the same targets, of knowing only how frequent each word is in the training part."""
    counts = torch.bincount(text.train, minlength=len(text.vocabulary)).double() + 1
    return -torch.log(counts / counts.sum())[columns[1:]].mean().item()


def perplexity(loss):
    return math.exp(min(loss, 700.0))  # exp overflows at 710

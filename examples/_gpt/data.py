"""Text that every machine has (Python sources), as tokens, with whole files held out."""

import hashlib
import json
import os
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# Tests, vendored and generated code: none of it is prose or hand-written code worth learning.
_SKIPPED_FOLDERS = frozenset(
    "test tests idle_test lib2to3 encodings pydoc_data site-packages dist-packages".split()
)
_LARGEST_FILE = 200_000
# of the text that also has other languages and documentation
_SUFFIXES = (".py", ".pyi", ".pyx", ".pxd", ".h", ".hpp", ".cuh", ".md", ".rst")
_TABLES = frozenset(("encodings", "pydoc_data"))
_HELD_OUT_OF_256 = 13  # 5 %
_SEPARATOR = b"\n\n"
_LARGEST_CORPUS = 120_000_000  # bytes: about 30 million BPE tokens
_BPE_SAMPLE = 30_000_000  # characters that the BPE is trained on: half a minute on a few cores
_ENCODED_AT_ONCE = 1_000  # chunks; a tokenizer's results take fifty times the tokens' size

Files = list[tuple[str, Path]]  # relative names and paths, sorted by name


@dataclass(frozen=True)
class Corpus:
    """Text split into a part to train on and a held-out part."""

    train: bytes
    held_out: bytes
    source: str
    files: int


@dataclass(frozen=True)
class Tokens:
    """A corpus as token ids; `bytes_per_token` is of the held-out part."""

    train: np.ndarray
    held_out: np.ndarray
    vocab: int
    bytes_per_token: float


def standard_library() -> Files:
    """The standard library's sources."""
    return sorted(_found(_roots()[:1]).items())


def installed_sources() -> Files:
    """Sources of the standard library and of installed packages, at most _LARGEST_CORPUS bytes.

    More than that, and a hash of the names chooses the files.
    """
    found = _found(_roots())
    chosen, size = [], 0
    for name in sorted(found, key=lambda name: _hash(name)[1:]):  # the first byte holds out
        size += found[name].stat().st_size
        if size > _LARGEST_CORPUS:
            break
        chosen.append((name, found[name]))
    return sorted(chosen)


def all_sources() -> Files:
    """Every source, header and page of documentation there, tests included; each content once."""
    found = _found(_roots(), _SUFFIXES, _TABLES)
    once = {hashlib.sha256(path.read_bytes()).digest(): name for name, path in found.items()}
    return sorted((name, found[name]) for name in once.values())


def _roots() -> list[Path]:
    """Folders of the standard library and of installed packages."""
    paths = sysconfig.get_paths()
    names = ("stdlib", "purelib", "platlib")
    return list(dict.fromkeys(Path(paths[name]).resolve() for name in names))


def _found(
    roots: list[Path],
    suffixes: tuple[str, ...] = (".py",),
    skipped: frozenset[str] = _SKIPPED_FOLDERS,
) -> dict[str, Path]:
    """Return the files with such names, by name; of equal names that below the first root."""
    found: dict[str, Path] = {}
    for root in roots:
        for name, path in _files_under(root):
            skips = skipped.intersection(path.relative_to(root).parts)
            if name.endswith(suffixes) and not skips and path.stat().st_size <= _LARGEST_FILE:
                found.setdefault(name, path)
    return found


# Name -> what a record calls the text, and its files.
TEXTS: dict[str, tuple[str, Callable[[], Files]]] = {
    "standard-library": ("Python's standard library", standard_library),
    "installed": ("installed Python sources", installed_sources),
    "all-sources": ("all sources and documentation of installed packages", all_sources),
}


def _files_under(root: Path) -> Files:
    found = ((path.relative_to(root).as_posix(), path) for path in root.rglob("*"))
    return sorted((name, path) for name, path in found if path.is_file())


def _is_text(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return bool(content) and b"\0" not in content


def _hash(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def load_corpus(data: Path | None = None, text: str = "standard-library") -> Corpus:
    """Reads `data` (a file or a folder of text), or one of TEXTS when it is None.

    A twentieth is held out: whole files, chosen by a hash of their relative names, so that the
    choice does not depend on the machine; of a single file, its end.
    """
    if data is None:
        source, files = TEXTS[text]
        named = files()
    elif data.exists():
        source, named = str(data), _files_under(data) if data.is_dir() else [(data.name, data)]
    else:
        raise SystemExit(f"--data {data}: no such file or folder")
    contents = ((name, path.read_bytes()) for name, path in named)
    texts = [(name, content) for name, content in contents if _is_text(content)]
    if not texts:
        raise SystemExit(
            f"{source}: no UTF-8 text found; pass --data with a file or folder of text"
        )
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for name, content in texts:
        parts[_hash(name)[0] < _HELD_OUT_OF_256].append(content)
    train, held_out = (_SEPARATOR.join(parts[out]) for out in (False, True))
    if not (train and held_out):
        whole = train or held_out
        cut = len(whole) * (256 - _HELD_OUT_OF_256) // 256
        train, held_out = whole[:cut], whole[cut:]
    return Corpus(train, held_out, source, len(texts))


def byte_tokens(corpus: Corpus) -> Tokens:
    """One token a byte."""
    train, held_out = (np.frombuffer(x, np.uint8) for x in (corpus.train, corpus.held_out))
    return Tokens(train, held_out, 256, 1.0)


def bpe_tokens(corpus: Corpus, vocab: int, cache: Path) -> Tokens:
    """Byte-level BPE of at most `vocab` tokens, trained on the training part.

    The tokenizer and the tokens are kept in `cache`, under a name that depends on the text.
    """
    key = hashlib.sha256(corpus.train + b"\0" + corpus.held_out).hexdigest()[:12]
    stem = cache / f"bpe-{vocab}-{key}"
    tokenizer_file, tokens_file = stem.with_suffix(".json"), stem.with_suffix(".npz")
    if not (tokenizer_file.exists() and tokens_file.exists()):
        _train_bpe(corpus, vocab, tokenizer_file, tokens_file)
    with np.load(tokens_file) as stored:
        train, held_out = stored["train"], stored["held_out"]
    size = len(json.loads(tokenizer_file.read_text(encoding="utf-8"))["model"]["vocab"])
    padded = -(-size // 64) * 64  # a multiple of 64 keeps the logits' matrix product fast
    return Tokens(train, held_out, padded, len(corpus.held_out) / len(held_out))


def _train_bpe(corpus: Corpus, vocab: int, tokenizer_file: Path, tokens_file: Path) -> None:
    try:
        from tokenizers import ByteLevelBPETokenizer
    except ImportError:
        raise SystemExit("--tokenizer bpe needs the package 'tokenizers'") from None

    train, held_out = (x.decode("utf-8", "replace") for x in (corpus.train, corpus.held_out))
    tokenizer = ByteLevelBPETokenizer()
    sample = train.split("\n\n")[:: -(-len(train) // _BPE_SAMPLE)]
    tokenizer.train_from_iterator(sample, vocab_size=vocab, show_progress=False)
    tokenizer_file.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(tokenizer_file))
    ids = {
        name: _encode(tokenizer, text) for name, text in (("train", train), ("held_out", held_out))
    }
    # whole or not at all: another run may look for it meanwhile
    written = tokens_file.with_suffix(f".{os.getpid()}.npz")
    np.savez(written, **ids)
    written.replace(tokens_file)


def _encode(tokenizer, text: str) -> np.ndarray:
    # By line groups: one call on megabytes of text is far slower than many short ones in parallel.
    lines = text.splitlines(keepends=True)
    chunks = ["".join(lines[i : i + 200]) for i in range(0, len(lines), 200)]
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.int32
    return np.concatenate(
        [
            np.asarray(encoding.ids, dtype)
            for i in range(0, len(chunks), _ENCODED_AT_ONCE)
            for encoding in tokenizer.encode_batch(chunks[i : i + _ENCODED_AT_ONCE])
        ]
    )


def sample_batch(tokens: np.ndarray, batch: int, context: int, seed: int, step: int) -> np.ndarray:
    """[batch, context + 1] windows of `tokens`: a function of the seed and the step alone."""
    starts = np.random.default_rng((seed, step)).integers(0, len(tokens) - context, batch)
    return tokens[starts[:, None] + np.arange(context + 1)].astype(np.int32)


def held_out_batches(tokens: np.ndarray, batch: int, context: int, count: int) -> list[np.ndarray]:
    """`count` fixed batches whose windows are spread evenly over `tokens`."""
    starts = np.linspace(0, len(tokens) - context - 1, batch * count).astype(np.int64)
    # Strided, so that any prefix of the batches also covers the whole text.
    windows = tokens[starts[:, None] + np.arange(context + 1)].astype(np.int32)
    return [windows[i::count] for i in range(count)]

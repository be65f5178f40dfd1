"""Text of Python packages as tokens, the same on every machine.

`python -m benchmarks.package_text` downloads the wheels of package_text.txt, whose hashes pip
checks, and writes the tokens of their sources and documentation into `--cache`, where
`text="packages"` reads them.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from _gpt.data import Tokens

WHEELS = Path(__file__).with_suffix(".txt")
NAME, VOCAB = "packages", 50_257
# of the training tokens and the held-out tokens, two bytes each; tokenizers 0.23.3 made them
DIGEST = "84cc6c5529f5d379c47836601d676ccd79d74e401e5692bf5fdb20457eded482"
SUFFIXES = tuple(
    ".py .pyi .pyx .pxd .c .cc .cpp .cu .cuh .h .hpp .zig .js .ts .rst .md .txt".split()
)
LARGEST = 200_000  # bytes of a file
LINE = 30  # bytes: shorter lines say little about where text comes from
SEEN = 0.5  # the share of lines in earlier documents above which one is left out
WIDEST = 200  # bytes per line, on average: beyond it are tables and minified programs
SAMPLE = 40_000_000  # bytes that the BPE is trained on
HELD_OUT_OF_256 = 4  # documents, by the first byte of their hash
END = "<|endoftext|>"


def download(folder: Path) -> list[Path]:
    """Return the wheels, in the order of package_text.txt."""
    words = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    for platform in "any manylinux_2_28_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64".split():
        words += ["--platform", platform]
    words += ["--python-version", "3.12", "--dest", str(folder), "--requirement", str(WHEELS)]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    by_hash = {hashlib.sha256(path.read_bytes()).hexdigest(): path for path in folder.glob("*.whl")}
    return [by_hash[digest] for digest in re.findall(r"sha256:(\w+)", WHEELS.read_text("utf-8"))]


def documents(wheels: Iterable[Path]) -> Iterator[bytes]:
    """Yield the files of sources and documentation, in the order of their names."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for one in sorted(archive.infolist(), key=lambda one: one.filename):
                if one.filename.endswith(SUFFIXES) and one.file_size <= LARGEST:
                    yield archive.read(one)


def _is_text(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return b"\0" not in content and 0 < len(content) <= WIDEST * (1 + content.count(b"\n"))


def deduplicated(every: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the texts of which at most half of the lines are in texts before them."""
    seen: set[bytes] = set()
    for content in every:
        if not _is_text(content):
            continue
        lines = {line for line in map(bytes.strip, content.splitlines()) if len(line) >= LINE}
        keys = {hashlib.blake2b(line, digest_size=8).digest() for line in lines}
        if keys and len(keys & seen) <= SEEN * len(keys):
            seen |= keys
            yield content


def is_held_out(content: bytes) -> bool:
    return hashlib.sha256(content).digest()[0] < HELD_OUT_OF_256


def tokenized(texts: list[bytes], vocab: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Return training and held-out tokens, by a byte-level BPE trained on a sample of the former.

    Also return the bytes per held-out token.
    """
    from tokenizers import ByteLevelBPETokenizer

    train = [text for text in texts if not is_held_out(text)]
    held_out = [text for text in texts if is_held_out(text)]
    tokenizer = ByteLevelBPETokenizer()
    sample = train[:: -(-sum(map(len, train)) // SAMPLE)]
    tokenizer.train_from_iterator(
        map(bytes.decode, sample), vocab, show_progress=False, special_tokens=[END]
    )
    end = [tokenizer.token_to_id(END)]

    def encoded(part: list[bytes]) -> np.ndarray:
        ids: list[np.ndarray] = []
        for i in range(0, len(part), 1000):
            for one in tokenizer.encode_batch(list(map(bytes.decode, part[i : i + 1000]))):
                ids += [np.asarray(one.ids, np.uint16), np.asarray(end, np.uint16)]
        return np.concatenate(ids)

    tokens = encoded(train), encoded(held_out)
    return *tokens, sum(map(len, held_out)) / len(tokens[1])


def digest(train: np.ndarray, held_out: np.ndarray) -> str:
    return hashlib.sha256(train.tobytes() + held_out.tobytes()).hexdigest()


def load(cache: Path) -> Tokens:
    """Return the tokens that `main` wrote, whose digest is checked."""
    path = cache / f"{NAME}.npz"
    if not path.exists():
        raise SystemExit(f"no {path}: run python -m benchmarks.package_text --cache {cache}")
    with np.load(path) as stored:
        train, held_out, ratio = stored["train"], stored["held_out"], stored["bytes_per_token"]
    if (found := digest(train, held_out)) != DIGEST:
        raise SystemExit(f"{path} has the digest {found} instead of {DIGEST}")
    return Tokens(train, held_out, -(-VOCAB // 64) * 64, float(ratio))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=Path("demo_output"))
    cache = parser.parse_args().cache
    wheels = download(cache / "wheels")
    texts = list(deduplicated(documents(wheels)))
    print(f"{len(wheels)} wheels, {len(texts):,} documents, {sum(map(len, texts)):,} bytes")
    train, held_out, ratio = tokenized(texts, VOCAB)
    print(f"{train.size:,} tokens and {held_out.size:,} held out, digest {digest(train, held_out)}")
    np.savez(cache / f"{NAME}.npz", train=train, held_out=held_out, bytes_per_token=ratio)


if __name__ == "__main__":
    main()

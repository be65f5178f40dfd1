"""Texts and chats of a file as packed rows of tokens, by the tokenizer and template of a model."""

from __future__ import annotations

import bisect
import codecs
import dataclasses
import functools
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

Message = Mapping[str, Any]
Piece = tuple[np.ndarray, np.ndarray]  # tokens, and which of them are answers

FORMS = (
    'a line is {"text": "..."}, {"prompt": "...", "completion": "..."}, {"messages": [{"role": '
    '"user", "content": "..."}, {"role": "assistant", "content": "..."}]} or ShareGPT\'s '
    '{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}'
)
SHAREGPT = {"human": "user", "gpt": "assistant"}
ROLES = ("system", "developer", "user", "assistant", "tool")
# the tags that transformers' mask of answers needs
_MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of several texts, which do not see each other.

    Attributes:
      tokens: [rows, length + 1].
      segments: [rows, length + 1], the number of each token's text; 0: padding.
      answers: [rows, length + 1], whether the loss is taken on the token.
    """

    tokens: np.ndarray
    segments: np.ndarray
    answers: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, rows: Any) -> Rows:
        return Rows(self.tokens[rows], self.segments[rows], self.answers[rows])

    @property
    def weights(self) -> np.ndarray:
        """[rows, length]: 1 for each token that is predicted and counted, else 0."""
        same = self.segments[:, 1:] == self.segments[:, :-1]
        return (self.answers[:, 1:] & same & (self.segments[:, 1:] > 0)).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Data:
    """The texts of a file; `str` of it is the summary to print before training.

    Attributes:
      name: of the file.
      length: predicted tokens of a row.
      units: texts of which none continues or repeats another unit's; each has one or more pieces.
      cut: reason -> how many texts were cut for it.
      dropped: reason -> how many texts were left out for it.
    """

    name: str
    length: int
    units: Sequence[Sequence[Piece]]
    cut: Mapping[str, int]
    dropped: Mapping[str, int]

    @functools.cached_property
    def rows(self) -> Rows:
        return packed(itertools.chain.from_iterable(self.units), self.length)

    @property
    def tokens(self) -> int:
        """The tokens of all rows, without padding."""
        return int((self.rows.segments > 0).sum())

    @property
    def share(self) -> float:
        """The part of the tokens that the loss is taken on."""
        return float(self.rows.weights.sum()) / self.tokens

    def split(self, share: float, seed: int) -> tuple[Data, Data]:
        """Return the data without a random part of its units, and that part."""
        number = max(1, round(share * len(self.units)))
        if number >= len(self.units):
            raise ValueError(f"{self.name} has too few texts to hold some out: pass --validation")
        order = np.random.default_rng(seed).permutation(len(self.units))
        held_out, rest = ([self.units[i] for i in o] for o in (order[:number], order[number:]))
        return dataclasses.replace(self, units=rest), Data(
            f"{self.name}, held out", self.length, held_out, {}, {}
        )

    def __str__(self) -> str:
        lines = [
            f"{self.name}: {len(self.rows):,} rows of {self.length:,} tokens; {self.tokens:,} "
            f"tokens, {self.share:.1%} of them answers"
        ]
        for name in ("cut", "dropped"):
            lines += [f"  {name}: {why}: {n:,}" for why, n in getattr(self, name).items()]
        return "\n".join(lines)


class Texts:
    """The tokenizer of a Hugging Face folder, with its chat templates.

    Args:
      folder: of the model.
      vocab_size: rows of its embedding; tokens beyond are refused.

    Raises:
      ValueError: where a file of the tokenizer cannot be read.
    """

    def __init__(self, folder: Path, vocab_size: int):
        self.vocab_size = vocab_size
        if not (folder / "tokenizer.json").exists():
            raise ValueError(f"{folder} has no tokenizer.json")
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            _check_object(folder / name)
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # transformers and tokenizers raise many kinds
            told = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(f"transformers cannot load the tokenizer of {folder}: {told}") from None
        if not self.tokenizer.is_fast:
            raise ValueError(f"the tokenizer of {folder} does not say where tokens begin")
        generation = folder / "generation_config.json"
        kind = GenerationConfig if generation.exists() else AutoConfig
        given = kind.from_pretrained(folder, local_files_only=True).eos_token_id
        stops = given if isinstance(given, list) else [given]
        self.end = self.tokenizer.eos_token_id
        self.ends = {*stops, self.end} - {None}
        if self.end is None and self.ends:
            self.end = min(self.ends)

    # ---- prompts and generated tokens ------------------------------------------------------------

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens of a question to a chat model, or of the beginning of a text."""
        if self.tokenizer.chat_template:
            question = [{"role": "user", "content": prompt}]
            return self._tokens(self._rendered(question, prompt=True))[0].tolist()
        ids = self._tokens(prompt, special=True)[0].tolist()
        while ids and ids[-1] == self.end:  # of tokenizers with add_eos_token
            ids.pop()
        if not ids:
            raise ValueError("the prompt has no token")
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of generated tokens up to the end of the answer."""
        new = itertools.takewhile(lambda token: token not in self.ends, tokens)
        return self.tokenizer.decode(list(new), skip_special_tokens=True)

    # ---- files -----------------------------------------------------------------------------------

    def read(self, file: Path, length: int) -> Data:
        """Return the texts of a file in pieces of at most `length` + 1 tokens.

        Raises:
          ValueError: that names the line that is in none of the accepted forms.
        """
        found = Data(file.name, length, [], Counter(), Counter())
        for where, line in _lines(file):
            try:
                self._add(found, json.loads(line) if isinstance(line, bytes) else line)
            except UnicodeDecodeError as error:
                raise ValueError(f"{where} is not UTF-8 ({error}): convert the file") from None
            except json.JSONDecodeError as error:
                raise ValueError(f"{where} is not JSON ({error}); {FORMS}") from None
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
        if not found.units:
            why = "; ".join(f"{why}: {n}" for why, n in found.dropped.items())
            raise ValueError(f"{file} has nothing to learn from ({why or 'no lines'})")
        return found

    def _add(self, data: Data, row: Any) -> None:
        """Add the pieces of a row."""
        json.dumps(row, ensure_ascii=False).encode()  # raises where a character is half a pair
        chat = _chat(row)
        if chat is None:
            self._add_text(data, row)
            return
        if not self.tokenizer.chat_template:
            raise ValueError("the model has no chat template: train on lines with 'text'")
        given = {name: row[name] for name in ("tools", "documents") if row.get(name)}
        given = {k: json.loads(v) if isinstance(v, str) else v for k, v in given.items()}
        given |= row.get("chat_template_kwargs") or {}
        head = list(itertools.takewhile(lambda m: m["role"] in ROLES[:2], chat))
        windows = self._windows(head, _turns(chat[len(head) :]), data.length + 1, given)
        data.cut["chats longer than a row, between turns"] += len(windows) > 1
        for window in windows:
            pieces = self._pieces(window, given)
            data.cut["chats in a row for each answer, since the template changes earlier turns"] += (
                len(pieces) > 1
            )
            self._keep(data, pieces)

    def _add_text(self, data: Data, row: Any) -> None:
        if "text" in row:
            prompt, text = "", row["text"]
        else:
            prompt, text = row["prompt"], row["prompt"] + row["completion"]
        if len(text) == len(prompt):
            data.dropped["empty texts"] += 1
            return
        ids, answers = self._tokens(text, [(len(prompt), len(text))], special=True)
        if self.end is not None and (not len(ids) or ids[-1] not in self.ends):
            ids, answers = np.append(ids, self.end), np.append(answers, True)
        answers[-1] = True
        if prompt:
            self._keep(data, [(ids, answers)])
            return
        # the last token of a piece is the first of the next, so that each is predicted once
        starts = range(0, max(len(ids) - 1, 1), data.length)
        data.cut["texts longer than a row, into several"] += len(starts) > 1
        for at in starts:
            part = slice(at, at + data.length + 1)
            self._keep(data, [(ids[part], np.ones_like(answers[part]))])

    def _keep(self, data: Data, pieces: Iterable[Piece]) -> None:
        """Add pieces, without what is beyond a row."""
        size, kept = data.length + 1, []
        for ids, answers in pieces:
            if answers[1:size].any():
                data.cut["answers longer than a row, at the end"] += bool(answers[size:].any())
                kept.append((ids[:size], answers[:size]))
            else:
                data.dropped["answers of which no token is within a row"] += 1
        if kept:
            data.units.append(kept)

    # ---- chats -----------------------------------------------------------------------------------

    def _rendered(self, messages: Sequence[Message], prompt: bool = False, **given: Any) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompt, **given
            )
        except Exception as error:  # whatever a template raises
            told = " ".join(str(error).split())
            raise ValueError(f"the model's chat template refuses the chat: {told}") from None

    def _tokens(
        self, text: str, spans: Sequence[tuple[int, int]] = (), special: bool = False
    ) -> Piece:
        """Return the tokens of a text, and which of them overlap spans, which are in order."""
        found = self.tokenizer(
            text, add_special_tokens=special, return_offsets_mapping=True, verbose=False
        )
        ids = self._checked(found["input_ids"])
        begin, end = np.array(found["offset_mapping"], np.int64).reshape(-1, 2).T
        borders = np.array(spans, np.int64).ravel()
        first, last = (
            np.searchsorted(borders, at, "right") % 2 for at in (begin, np.maximum(end - 1, begin))
        )
        return ids, (first | last).astype(bool)

    def _checked(self, tokens: Sequence[int]) -> np.ndarray:
        ids = np.array(tokens, np.int32)
        if len(ids) and ids.max() >= self.vocab_size:
            token = self.tokenizer.convert_ids_to_tokens(int(ids.max()))
            raise ValueError(
                f"token {token!r} has id {ids.max()}, and the model's embedding {self.vocab_size} "
                "rows: resize it (resize_token_embeddings), or use the tokenizer of the model"
            )
        return ids

    def _windows(
        self, head: list[Message], turns: list[list[Message]], size: int, given: Mapping[str, Any]
    ) -> list[list[Message]]:
        """Part a chat into halves until each is a turn or fits a row, each with the head."""
        chat = [*head, *itertools.chain(*turns)]
        if len(turns) == 1 or len(self._tokens(self._rendered(chat, **given))[0]) <= size:
            return [chat]
        half = len(turns) // 2
        return [
            *self._windows(head, turns[:half], size, given),
            *self._windows(head, turns[half:], size, given),
        ]

    def _pieces(self, chat: list[Message], given: Mapping[str, Any]) -> list[Piece]:
        """Return the tokens of a chat, once if the template leaves earlier turns as they are.

        Otherwise each answer has a piece, as when it is generated.
        """
        template = self.tokenizer.get_chat_template(tools=given.get("tools"))
        if _MARKED.search(template):
            found = self.tokenizer.apply_chat_template(
                chat, return_dict=True, return_assistant_tokens_mask=True, **given
            )
            return [(self._checked(found["input_ids"]), np.array(found["assistant_masks"], bool))]
        return [self._tokens(text, spans) for text, spans in self._answered(chat, given)]

    def _answered(self, chat: list[Message], given: Mapping[str, Any]) -> Any:
        """Return texts, with the spans of their answers."""
        # A turn is rendered after the first one alone, which is linear in the number of turns.
        whole, at, spans = self._rendered(chat, **given), 0, []
        first, *later = _turns(chat)
        start = 0
        for turn in (first, *later):
            parts = list(self._answers(first if turn is not first else [], turn, given))
            if not all(whole.startswith(text[start:], at) for text, _ in parts):
                break
            spans += [(a + at - start, b + at - start) for _, (a, b) in parts]
            at += len(parts[-1][0]) - start if parts else 0
            start = start or at
        else:
            return [(whole, spans)]
        groups: list[tuple[str, list[tuple[int, int]]]] = []
        for text, span in self._answers([], chat, given):
            before = groups.pop()[1] if groups and text.startswith(groups[-1][0]) else []
            groups.append((text, [*before, span]))
        return groups

    def _answers(
        self, before: list[Message], turn: list[Message], given: Mapping[str, Any]
    ) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yield the text of a chat through each answer, and where the answer is."""
        for i, message in enumerate(turn):
            context = [*before, *turn[:i]]
            if message["role"] == "assistant" and context:
                prompt = self._rendered(context, prompt=True, **given)
                text = self._rendered([*context, message], **given)
                start = len(prompt)
                if not text.startswith(prompt):  # "<think>" may be in the prompt alone
                    start = len(os.path.commonprefix([prompt, text]))
                yield text, (start, len(text.rstrip()))


def _check_object(file: Path) -> None:
    """Raise where a file exists that is no JSON object."""
    if file.exists():
        start = file.read_bytes()
        try:
            json.loads(start).keys()
        except (ValueError, AttributeError):
            raise ValueError(
                f"{file} is not a JSON object; it begins with {start[:40]!r}: download it again"
            ) from None


def _lines(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield the name and the content of each row of JSON lines or of a JSON array."""
    content = file.read_bytes().removeprefix(codecs.BOM_UTF8)
    if content.lstrip().startswith(b"["):
        yield from ((f"{file}, row {n}", row) for n, row in enumerate(json.loads(content), 1))
        return
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            yield f"{file}, line {number}", line


def _chat(row: Any) -> list[Message] | None:
    """Return the messages of a row, or None if it is a text."""
    if not isinstance(row, dict):
        raise ValueError(FORMS)
    chat = row.get("messages") or row.get("conversations")
    if chat is None and isinstance(row.get("prompt"), list):
        chat = [*row["prompt"], *row["completion"]]
    if chat is None:
        names = ("text",) if "text" in row else ("prompt", "completion")
        if not all(isinstance(row.get(name), str) for name in names):
            raise ValueError(FORMS)
        return None
    return [_message(message) for message in chat]


def _message(message: Any) -> Message:
    if "from" in message:
        message = {"role": SHAREGPT.get(message["from"], message["from"]), "content": message["value"]}
    return message


def _turns(chat: Sequence[Message]) -> list[list[Message]]:
    """Part a chat where a user speaks after an answer."""
    roles = [message["role"] for message in chat]
    cuts = [i for i in range(2, len(chat)) if roles[i - 1 : i + 1] == ["assistant", "user"]]
    return [list(chat[a:b]) for a, b in itertools.pairwise([0, *cuts, len(chat)])]


def packed(pieces: Iterable[Piece], length: int) -> Rows:
    """Pack pieces into rows of `length` + 1 tokens: the longest first, each where it fits best."""
    size = length + 1
    rows: list[list[Piece]] = []
    room: list[tuple[int, int]] = []  # what is left of each row, in order
    for piece in sorted(pieces, key=lambda piece: -len(piece[0])):
        at = bisect.bisect_left(room, (len(piece[0]), 0))
        if at == len(room):
            room.append((size, len(rows)))
            rows.append([])
        left, row = room.pop(at)
        rows[row].append(piece)
        bisect.insort(room, (left - len(piece[0]), row))
    found = Rows(*(np.zeros((len(rows), size), kind) for kind in (np.int32, np.int32, bool)))
    for n, row in enumerate(rows):
        at = 0
        for number, (ids, answers) in enumerate(row, 1):
            part = slice(at, at := at + len(ids))
            found.tokens[n, part], found.answers[n, part] = ids, answers
            found.segments[n, part] = number
    return found


def batch_rows(rows: Rows, batch: int, seed: int, step: int, total: int | None = None) -> Rows:
    """Return the rows of a step: each epoch has every row once, in an order of its own.

    Args:
      rows: to choose from.
      batch: rows of a step.
      seed: of the orders.
      step: number of the step.
      total: rows that the run takes; a last batch with fewer is filled with padding.
    """
    at, number = np.arange(step * batch, (step + 1) * batch), len(rows)
    orders = {
        int(e): np.random.default_rng((seed, int(e))).permutation(number) for e in at // number
    }
    some = rows[np.array([orders[int(i // number)][i % number] for i in at])]
    if total is not None:
        some.segments[at >= total] = 0
    return some

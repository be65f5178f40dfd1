"""Texts and chats as packed rows of tokens, by the tokenizer and the chat template of a model."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from .configuration import read_json

Piece = tuple[np.ndarray, np.ndarray]  # tokens, and which of them are answers
Chat = list[dict[str, Any]]

FORMS = (
    'a line is JSON in UTF-8: {"text": "..."}, {"prompt": "...", "completion": "..."}, '
    '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]} '
    'or {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}'
)
ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT = {"human": "user", "gpt": "assistant"}
_TAGGED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")  # for transformers' mask of answers


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of several texts, which do not see each other; each array is [rows, length + 1]."""

    tokens: np.ndarray
    segments: np.ndarray  # the number of each token's text; 0: padding
    answers: np.ndarray  # whether the loss is taken on the token

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
    """The texts of a file; `str` of it is the summary to print before training."""

    name: str  # of the file
    length: int  # predicted tokens of a row
    # their pieces, of at most length + 1 tokens; pieces of different texts do not overlap
    texts: list[list[Piece]] = dataclasses.field(default_factory=list)
    # "cut: ...", "dropped: ..." or "note: ..." -> number of texts
    counts: Counter[str] = dataclasses.field(default_factory=Counter)

    @functools.cached_property
    def rows(self) -> Rows:
        return packed(itertools.chain(*self.texts), self.length)

    @property
    def tokens(self) -> int:
        return int((self.rows.segments > 0).sum())

    @property
    def share(self) -> float:
        """The part of the tokens that the loss is taken on."""
        return float(self.rows.weights.sum()) / self.tokens

    def add(self, *pieces: Piece) -> None:
        """Add the pieces of a text, without what is beyond the end of a row."""
        end = self.length + 1
        kept = [(ids, answers) for ids, answers in pieces if answers[1:end].any()]
        cut = sum(answers[end:].any() for _, answers in kept)
        self.counts["cut: answers longer than a row, at the end"] += cut
        self.counts["dropped: no token to learn within a row"] += len(pieces) - len(kept)
        if kept:
            self.texts.append([(ids[:end], answers[:end]) for ids, answers in kept])

    def split(self, share: float, seed: int) -> tuple[Data, Data]:
        """Return the data without a random part of the texts, and that part."""
        number = max(1, round(share * len(self.texts)))
        if number >= len(self.texts):
            raise ValueError(f"{self.name} has too few texts to hold some out: pass --validation")
        order = np.random.default_rng(seed).permutation(len(self.texts))
        held_out, rest = ([self.texts[i] for i in o] for o in (order[:number], order[number:]))
        name = f"{self.name}, held out"
        return dataclasses.replace(self, texts=rest), Data(name, self.length, held_out)

    def __str__(self) -> str:
        shown = f"{self.name}: {len(self.rows):,} rows of {self.length:,} tokens; {self.tokens:,} "
        shown += f"tokens without padding, {self.share:.1%} of them answers"
        return shown + "".join(f"\n  {why}: {n:,}" for why, n in (+self.counts).items())


class Texts:
    """The tokenizer of a Hugging Face folder, with its chat templates.

    Tokens beyond the `vocab_size` rows of the model's embedding are refused.
    """

    def __init__(self, folder: Path, vocab_size: int):
        self.vocab_size = vocab_size
        local = {"local_files_only": True, "trust_remote_code": False}
        kind = GenerationConfig if (folder / "generation_config.json").exists() else AutoConfig
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(folder, **local)
            self.tokenizer("a", return_offsets_mapping=True)  # not every tokenizer has them
            stops = kind.from_pretrained(folder, **local).eos_token_id
        except Exception as error:  # of many kinds; tokenizers raises Exception itself
            for file in sorted(folder.glob("*.json")):
                read_json(file)  # raises with the name of a file that is no JSON
            told = f"{folder}: transformers cannot load the tokenizer"
            raise ValueError(f"{told}: {_line(error)}") from None
        eos = self.tokenizer.eos_token_id
        self.ends = {*np.atleast_1d(eos if stops is None else stops).tolist()} - {None}
        self.end = eos if eos in self.ends else min(self.ends, default=None)

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens of a question to a chat model, or of the beginning of a text."""
        if self.tokenizer.chat_template:
            chat = [{"role": "user", "content": prompt}]
            return self._tokens(self._rendered(chat, add_generation_prompt=True))[0].tolist()
        ids = self._tokens(prompt, special=True)[0].tolist()
        ids = ids if self.end is None else ids[:-1]
        if not ids:
            raise ValueError("the prompt has no tokens")
        return ids

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of generated tokens up to the end of the answer."""
        answer = itertools.takewhile(lambda token: token not in self.ends, tokens)
        return self.tokenizer.decode(list(answer), skip_special_tokens=True)

    def read(self, file: Path, length: int) -> Data:
        """Return the texts of a file, JSON lines or a JSON array, for rows of `length` tokens.

        Raises:
          ValueError: that names the line, and the accepted forms if it has none of them.
        """
        data, content = Data(file.name, length), file.read_bytes()
        unit, rows = "line", content.split(b"\n")
        with contextlib.suppress(ValueError):
            if isinstance(whole := json.loads(content), list):
                unit, rows = "row", whole
        for number, row in enumerate(rows, 1):
            try:
                if unit == "row" or row.strip():
                    self._add(data, row if unit == "row" else json.loads(row))
            except Exception as error:  # whatever the tokenizer or the template raises
                told = f"{file}, {unit} {number}: {_line(error)}"
                unreadable = isinstance(error, json.JSONDecodeError | UnicodeError)
                raise ValueError(f"{told}; {FORMS}" if unreadable else told) from None
        if not data.texts:
            raise ValueError("; ".join([f"{file} has no token to learn", *+data.counts]))
        return data

    def _add(self, data: Data, row: Any) -> None:
        json.dumps(row, ensure_ascii=False).encode()  # raises for half of a surrogate pair
        match row:
            case {"messages": [_, *_] as chat} | {"conversations": [_, *_] as chat}:
                self._add_chat(data, chat, row)
            case {"prompt": [_, *_] as prompt, "completion": [_, *_] as chat}:
                unanswered = [{**_message(message), "weight": 0} for message in prompt]
                self._add_chat(data, unanswered + chat, row)
            case {"text": ""} | {"prompt": str(), "completion": ""}:
                data.counts["dropped: empty texts"] += 1
            case {"text": str(text)}:
                ids, _ = self._tokens(text, special=True)
                # the last token of a piece is the first of the next: each is predicted once
                pieces = range(0, max(len(ids) - 1, 1), data.length)
                data.counts["cut: texts longer than a row, into several"] += len(pieces) > 1
                for at in pieces:
                    part = ids[at : at + data.length + 1]
                    data.add((part, np.ones(len(part), bool)))
            case {"prompt": str(prompt), "completion": str(text)}:
                answer = (len(prompt), len(prompt + text) + 1)
                data.add(self._piece(prompt + text, answer, special=True))
            case _:
                raise ValueError(FORMS)

    def _add_chat(self, data: Data, chat: Chat, row: dict[str, Any]) -> None:
        if not self.tokenizer.chat_template:
            raise ValueError("the model has no chat template: train on lines with 'text'")
        chat = [_message(message) for message in chat]
        if isinstance(row.get("system"), str) and chat[0]["role"] != "system":
            chat.insert(0, {"role": "system", "content": row["system"]})
        while chat and (chat[-1]["role"] != "assistant" or not chat[-1].get("weight", 1)):
            chat.pop()
        if len(chat) < 2:
            raise ValueError("the chat has no answer of the assistant")
        given = {name: row[name] for name in ("tools", "documents") if row.get(name)}
        given = {k: json.loads(v) if isinstance(v, str) else v for k, v in given.items()}
        given |= row.get("chat_template_kwargs") or {}
        head = list(itertools.takewhile(lambda message: message["role"] in ROLES[:2], chat))
        turns = _turns(chat[len(head) :])
        parts = list(self._parts(head, turns, data.length + 1, given))
        data.counts["cut: chats longer than a row, between turns"] += len(parts) > 1
        why = "cut: chats whose earlier turns the template changes, into a text for each answer"
        data.counts[why] += any(len(pieces) > 1 for pieces in parts)
        ends = [int(ids[answers][-1]) for ids, answers in itertools.chain(*parts) if answers.any()]
        why = "note: chats whose answers end in a token that does not stop generation"
        data.counts[why] += not self.ends.issuperset(ends)
        for pieces in parts:
            data.add(*pieces)

    def _parts(
        self, head: Chat, turns: list[Chat], size: int, given: dict[str, Any]
    ) -> Iterator[list[Piece]]:
        """Yield the pieces of a chat, halved until each part fits a row or is a single turn.

        A part is one piece, or one of each answer if the template changes earlier turns.
        """
        first = [*head, *turns[0]]
        chat = [*first, *itertools.chain(*turns[1:])]
        whole = self._rendered(chat, **given)
        ids, places = self._tokens(whole)
        if len(turns) > 1 and len(ids) > size:
            for part in (turns[: len(turns) // 2], turns[len(turns) // 2 :]):
                yield from self._parts(head, part, size, given)
            return
        template = self.tokenizer.get_chat_template(tools=given.get("tools"))
        if _TAGGED.search(template) and all(message.get("weight", 1) for message in chat):
            given = given | {"return_assistant_tokens_mask": True, "return_dict": True}
            mask = self.tokenizer.apply_chat_template(chat, **given)["assistant_masks"]
            yield [(ids, np.array(mask, bool))]
            return
        # rendered after the first turn only, so that the time is linear in the number of turns
        at, skip, spans = 0, 0, []
        for before, turn in [([], first), *((first, turn) for turn in turns[1:])]:
            for text, (a, b) in self._answers(before, turn, given):
                if not whole.startswith(text[skip:], at):
                    apart = (self._piece(*answer) for answer in self._answers([], chat, given))
                    yield [piece for piece in apart if piece[1].any()]
                    return
                spans.append((at + a - skip, at + b - skip))
            at += len(text) - skip
            skip = skip or at
        yield [(ids, _inside(places, spans))]

    def _piece(self, text: str, answer: tuple[int, int], special: bool = False) -> Piece:
        ids, places = self._tokens(text, special)
        return ids, _inside(places, [answer])

    def _answers(
        self, before: Chat, turn: Chat, given: dict[str, Any]
    ) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yield the text of a chat through each answer of its last turn, and the answer's place."""
        for i, message in enumerate(turn):
            context = [*before, *turn[:i]]
            if message["role"] == "assistant" and context:
                text = self._rendered([*context, message], **given)
                prompt = self._rendered(context, add_generation_prompt=True, **given)
                start = len(prompt)
                if not text.startswith(prompt):  # such as one that ends in "<think>"
                    start = len(os.path.commonprefix([text, prompt]))
                    if start < len(self._rendered(context, **given)):
                        raise ValueError(
                            "the model's chat template writes what is before an answer otherwise "
                            "than before generation: write system messages into the user's"
                        )
                yield text, (start, len(text.rstrip()) if message.get("weight", 1) else start)

    def _rendered(self, chat: Chat, **given: Any) -> str:
        try:
            return self.tokenizer.apply_chat_template(chat, tokenize=False, **given)
        except Exception as error:  # whatever a template raises
            raise ValueError(f"the model's chat template refuses it: {error}") from None

    def _tokens(self, text: str, special: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of a text, and [tokens, 2], where each begins and ends.

        With `special` they include those that the tokenizer adds to a text, and its end.
        """
        given = {"add_special_tokens": special, "return_offsets_mapping": True, "verbose": False}
        found = self.tokenizer(text, **given)
        ids, places = found["input_ids"], found["offset_mapping"]
        if special and self.end is not None:
            ids.append(ids.pop() if ids and ids[-1] in self.ends else self.end)
            places = [*places[: len(ids) - 1], (len(text), len(text) + 1)]
        if (highest := max(ids, default=0)) >= self.vocab_size:
            token = self.tokenizer.convert_ids_to_tokens(highest)
            raise ValueError(
                f"token {token!r} has id {highest}, but the model's embedding has "
                f"{self.vocab_size} rows: use the model's tokenizer, or resize the embedding "
                "(resize_token_embeddings of transformers)"
            )
        return np.array(ids, np.int32), np.array(places, np.int64).reshape(-1, 2)


def _message(given: Any) -> dict[str, Any]:
    """Return a message in OpenAI's form."""
    match given:
        case {"from": role, "value": content, **rest}:
            given = {"role": _SHAREGPT.get(role, role), "content": content, **rest}
    match given:
        case {"role": role} if role not in ROLES:
            raise ValueError(f"the role {role!r} is none of {', '.join(ROLES)}; {FORMS}")
        case {"role": _, "content": str()} | {"role": "assistant", "tool_calls": [_, *_]}:
            return given
        case {"role": role}:
            raise ValueError(f"a message of the {role} has no text; {FORMS}")
    raise ValueError(FORMS)


def _turns(chat: Chat) -> list[Chat]:
    """Return the parts of a chat, which begin where a user speaks after an answer."""
    roles = [message["role"] for message in chat]
    cuts = [i for i in range(2, len(chat)) if roles[i - 1 : i + 1] == ["assistant", "user"]]
    return [chat[a:b] for a, b in itertools.pairwise([0, *cuts, len(chat)])]


def _inside(places: np.ndarray, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return which tokens overlap one of some spans, which are in order."""
    starts, ends = np.array([span for span in spans if span[0] < span[1]]).reshape(-1, 2).T
    begins = np.searchsorted(starts, places[:, 1], "left")
    return np.searchsorted(ends, places[:, 0], "right") < begins


def _line(error: Exception) -> str:
    return " ".join((str(error) if isinstance(error, ValueError) else repr(error)).split())


def packed(pieces: Iterable[Piece], length: int) -> Rows:
    """Pack pieces into rows of `length` + 1 tokens: the longest first, each where it fits best."""
    size, number = length + 1, 0
    room: list[tuple[int, int, int]] = []  # of each row: what is left, its number, its pieces
    placed = []
    for ids, answers in sorted(pieces, key=lambda piece: -len(piece[0])):
        at = bisect.bisect_left(room, (len(ids), 0, 0))
        if at == len(room):
            room.append((size, number, 0))
            number += 1
        left, row, before = room.pop(at)
        placed.append(((row, slice(size - left, size - left + len(ids))), ids, before + 1, answers))
        bisect.insort(room, (left - len(ids), row, before + 1))
    rows = Rows(*(np.zeros((number, size), kind) for kind in (np.int32, np.int32, bool)))
    for part, ids, segment, answers in placed:
        rows.tokens[part], rows.segments[part], rows.answers[part] = ids, segment, answers
    return rows


def batch_rows(rows: Rows, batch: int, seed: int, step: int, total: int | None = None) -> Rows:
    """Return the rows of a step; each epoch takes every row once, in a new order.

    With `total`, the rows of the whole run, the last batch is filled with rows without weight.
    """
    at, number = np.arange(step * batch, (step + 1) * batch), len(rows)
    first, last = at[[0, -1]] // number
    orders = [np.random.default_rng((seed, e)).permutation(number) for e in range(first, last + 1)]
    some = rows[np.concatenate(orders)[at - first * number]]
    if total is not None:
        some.segments[at >= total] = 0
    return some

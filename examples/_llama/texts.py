"""Texts and chats of JSON lines as packed rows of tokens."""

from __future__ import annotations

import bisect
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2.sandbox
import numpy as np
from tokenizers import Tokenizer

from .huggingface import read_config

Message = Mapping[str, str]


@dataclass(frozen=True)
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


class Texts:
    """The tokenizer of a Hugging Face folder, with its chat template."""

    def __init__(self, folder: Path):
        file = folder / "tokenizer.json"
        if not file.exists():
            raise ValueError(f"{folder} has no tokenizer.json")
        self.tokenizer = Tokenizer.from_file(str(file))
        self.config = _json(folder / "tokenizer_config.json")
        template = folder / "chat_template.jinja"
        self.template = (
            template.read_text("utf-8") if template.exists() else self.config.get("chat_template")
        )
        given = _json(folder / "generation_config.json").get("eos_token_id")
        given = read_config(folder).get("eos_token_id") if given is None else given
        self.ends = set(given if isinstance(given, list) else [given]) - {None}

    @functools.cached_property
    def _compiled(self) -> jinja2.Template:
        if not isinstance(self.template, str):
            raise ValueError("the model has no chat template: train on lines with 'text'")
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )

        def raise_exception(message: str) -> None:
            raise ValueError(message)

        environment.globals["raise_exception"] = raise_exception
        return environment.from_string(self.template)

    def rendered(self, messages: Sequence[Message], prompt: bool = False) -> str:
        """Return the text of a chat; `prompt`: up to where the next answer begins."""
        named = {name: _content(self.config.get(name)) for name in ("bos_token", "eos_token")}
        return self._compiled.render(messages=messages, add_generation_prompt=prompt, **named)

    def prompt(self, text: str) -> list[int]:
        """Return the tokens of a question to a chat model, or of the beginning of a text."""
        if isinstance(self.template, str):
            text = self.rendered([{"role": "user", "content": text}], True)
            return self.tokenizer.encode(text, add_special_tokens=False).ids
        return self.tokenizer.encode(text).ids

    def continued(self, tokens: Sequence[int], after: int) -> str:
        """Return the text of generated tokens up to the end of the answer."""
        new = list(tokens[after:])
        end = next((i for i, token in enumerate(new) if token in self.ends), len(new))
        return self.tokenizer.decode(new[:end])

    def of_text(self, text: str) -> tuple[list[int], list[bool]]:
        """Return the tokens of a text and its end, all of which count."""
        ids = self.tokenizer.encode(text).ids
        ids += [min(self.ends)] if self.ends and ids[-1] not in self.ends else []
        return ids, [True] * len(ids)

    def of_chat(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Return the tokens of a chat, and which are the assistant's."""
        whole, spans = self.rendered(messages), []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.rendered(messages[:i], True)
            through = self.rendered(messages[: i + 1])
            if not (through.startswith(before) and whole.startswith(through)):
                raise ValueError(
                    "the chat template changes earlier messages: write a line for each answer"
                )
            spans.append((len(before), len(through)))
        encoded = self.tokenizer.encode(whole, add_special_tokens=False)
        inside = [any(a <= at < b for a, b in spans) for at, _ in encoded.offsets]
        return encoded.ids, inside

    def _of_line(self, row: Any) -> tuple[list[int], list[bool]]:
        return self.of_chat(row["messages"]) if "messages" in row else self.of_text(row["text"])

    def read(self, file: Path) -> list[tuple[list[int], list[bool]]]:
        """Return tokens of each line of a file, {"text": ...} or {"messages": [...]}.

        Raises:
          ValueError: that names the line which is neither.
        """
        found = []
        for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
            if line.strip():
                try:
                    found.append(self._of_line(json.loads(line)))
                except (ValueError, KeyError, TypeError, jinja2.TemplateError) as error:
                    told = f"{type(error).__name__}: {error}"
                    raise ValueError(f"{file}, line {number}: {told}") from None
        if not found:
            raise ValueError(f"{file} has no text to learn from")
        return found


def _json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text("utf-8")) if file.exists() else {}


def _content(token: Any) -> str:
    """Return a special token's text; some files have an object of it."""
    return token["content"] if isinstance(token, dict) else token or ""


def packed(texts: Iterable[tuple[list[int], list[bool]]], length: int) -> Rows:
    """Pack texts into rows of `length` + 1 tokens: the longest first, each where it fits best.

    Longer texts are cut; parts without an answer are left out.
    """
    size = length + 1
    pieces = [
        (ids[at : at + size], answers[at : at + size])
        for ids, answers in texts
        for at in range(0, len(ids), size)
        if any(answers[at + 1 : at + size])
    ]
    rows: list[list[tuple[list[int], list[bool]]]] = []
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


def batch_rows(number: int, batch: int, seed: int, step: int) -> np.ndarray:
    """Return the rows of a step's batch: each epoch has every row once, in an order of its own."""
    at = np.arange(step * batch, (step + 1) * batch)
    epochs = {
        int(e): np.random.default_rng((seed, int(e))).permutation(number) for e in at // number
    }
    return np.array([epochs[int(i // number)][i % number] for i in at])

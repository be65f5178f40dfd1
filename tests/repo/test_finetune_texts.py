"""The data of the fine-tuning example: tokenizers, chat templates, files, and packed rows."""

import itertools
import math

import numpy as np
import pytest

from tests.repo.chats import (
    CHARACTERS,
    CHATML,
    QWEN3,
    SIZE,
    bytewise,
    characters,
    chat,
    of_lines,
)


def test_truncation_and_padding_of_a_tokenizer_are_off(make, read):
    of = make(tokenizer=characters(padded=True))
    text = "the quick brown fox jumps over the lazy dog " * 3
    data = read(of, [{"text": text}, {"text": "ab"}, {"messages": chat("a" * 30, "b" * 30)}])
    sizes = [len(ids) for ((ids, _),) in data.texts]
    assert sizes == [len(text) + 1, 3, 2 + 30 + 1 + 2 + 30 + 1]
    assert [a.sum() for ((_, a),) in data.texts] == [len(text) + 1, 3, 31]
    assert read(of, [{"text": "ab"}], 31).rows.weights.sum() == 2  # b and the end
    assert of.encode("ab") == [CHARACTERS.index(c) for c in "^uab$^a"]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": chat("a", "<x9>b")},
        {"messages": chat("<x9>a", "b")},
        {"text": "a<x9>"},
        {"prompt": "<x9>", "completion": "b"},
    ],
)
def test_tokens_beyond_the_embedding_are_refused(make, read, row):
    of = make(CHATML, bytewise(), SIZE - 1, eos_token="<|im_end|>")
    message = rf"line 2: token '<x9>' has id {SIZE - 1}, but the model's embedding has {SIZE - 1} "
    with pytest.raises(ValueError, match=message):
        read(of, [{"text": "a"}, row])
    with pytest.raises(ValueError, match="token '<x9>' has id"):
        of.encode("<x9>")
    with pytest.raises(ValueError, match="token '<x9>' has id"):  # the end of a text
        read(make(None, bytewise(), SIZE - 1, eos_token="<x9>"), [{"text": "a"}])


def test_each_row_once_in_an_epoch(texts):
    """The last batch of a run is filled with rows without weight."""
    for number, batch, epochs in itertools.product((1, 5, 8, 11), (1, 4, 8), (0.5, 1, 2.3)):
        ones = np.ones((number, 3), np.int32)
        rows = texts.Rows(ones * np.arange(number)[:, None], ones, ones > 0)
        total = round(epochs * number)
        taken = []
        for step in range(math.ceil(total / batch)):
            some = texts.batch_rows(rows, batch, 0, step, total)
            assert some.tokens.shape == (batch, 3)
            assert set(some.weights.ravel()) <= {0, 1}
            taken += some.tokens[some.weights.sum(-1) > 0, 0].tolist()
        whole, rest = divmod(total, number)
        assert len(taken) == total
        for epoch in range(whole):
            assert sorted(taken[epoch * number :][:number]) == list(range(number))
        assert len(set(taken[whole * number :])) == rest
    assert (rows.segments == 1).all()  # they are not changed in place
    orders = [texts.batch_rows(rows, 11, 0, step).tokens[:, 0].tolist() for step in (0, 1)]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])
    assert texts.batch_rows(rows, 4, 0, 2).weights.all()  # steps without end: the next epoch


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "{file} is no JSON .*: download it again"),
        (b"", "{file} is no JSON .* it is empty: download it again"),
        (b"\xff\xfe", "{file} is no JSON .*: download it again"),
        (b"version https://git-lfs\noid 1\n", "{file} is no JSON .* run `git lfs pull`"),
        (b"[]", "{folder}: transformers cannot load the tokenizer: "),
        (b'{"added_tokens_decoder": 3}', "{folder}: transformers cannot load the tokenizer: "),
    ],
)
def test_a_corrupt_tokenizer_is_one_line(make, texts, tmp_path, file, content, message):
    make()
    (tmp_path / file).write_bytes(content)
    message = message.format(file=tmp_path / file, folder=tmp_path)
    with pytest.raises(ValueError, match=message) as error:
        texts.Texts(tmp_path, 48)
    assert "\n" not in str(error.value)


SHAREGPT = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
ACCEPTED = {
    "messages": ({"messages": chat("a", "b")}, "^ua$^a«b$»"),
    "other keys": ({"id": 1, "prompt": "x", "messages": chat("a", "b")}, "^ua$^a«b$»"),
    "after the last answer": ({"messages": chat("a", "b", "c")}, "^ua$^a«b$»"),
    "a greeting": ({"messages": chat("g", "a", "b")[1:] + chat("c", "d")[1:]}, "^aa$^ub$^a«d$»"),
    "a part of the answers": (
        {"messages": [{**m, "weight": int(m["content"] == "d")} for m in chat("a", "b", "c", "d")]},
        "^ua$^ab$^uc$^a«d$»",
    ),
    "conversations": ({"conversations": SHAREGPT}, "^ua$^a«b$»"),
    "a system text": ({"conversations": SHAREGPT, "system": "s"}, "^ss$^ua$^a«b$»"),
    "roles in conversations": ({"conversations": chat("a", "b")}, "^ua$^a«b$»"),
    "text": ({"text": "ab"}, "«ab$»"),
    "an ended text": ({"text": "ab$"}, "«ab$»"),
    "an ended completion": ({"prompt": "ab", "completion": "c$"}, "ab«c$»"),
    "prompt and completion": ({"prompt": "ab", "completion": "cd"}, "ab«cd$»"),
    "chats of prompt and completion": (
        {"prompt": chat("a", "b", "c"), "completion": chat("", "d")[1:]}, "^ua$^ab$^uc$^a«d$»",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_lines(make, read, name):
    of = make()
    row, wanted = ACCEPTED[name]
    assert of_lines(of, read(of, [row])) == [[wanted]]


@pytest.mark.parametrize(
    "separator", ["\u2028", "\u2029", "\x85", "\\u000c"], ids=lambda s: f"{s!r}"
)
def test_separators_within_strings(chatml, read, separator):
    line = '{"text": "a' + separator + 'b"}'
    assert len(read(chatml, [line, line]).texts) == 2


@pytest.mark.parametrize(
    "file",
    [
        b'\xef\xbb\xbf{"text": "ab"}\r\n\r\n{"text": "cd"}\r\n',
        b'[{"text": "ab"},\n {"text": "cd"}]',
        b'  [\n{"text": "ab"}, {"text": "cd"}]\n',
        b'{"text": "ab"}\n{"text": ""}\n{"prompt": "ab", "completion": ""}\n{"text": "cd"}',
    ],
)
def test_accepted_files(make, read, file):
    of = make()
    data = read(of, file)
    assert of_lines(of, data) == [["«ab$»"], ["«cd$»"]]
    assert ("dropped: empty texts: 2" in str(data)) == (b'""' in file)


FORM = "text.*prompt.*completion.*messages.*role.*conversations.*human"
REFUSED = {
    '{"text": 1': FORM, "[]": FORM, "3": FORM, "null": FORM, '{"text": null}': FORM,
    '{"text": ["a"]}': FORM, '{"prompt": "a"}': FORM, '{"messages": []}': FORM,
    '{"messages": "a"}': FORM, '{"messages": ["a"]}': FORM,
    '{"messages": [{"content": "a"}]}': FORM,
    '{"instruction": "a", "output": "b"}': FORM, '{"conversations": [{"from": "human"}]}': FORM,
    '{"messages": [{"role": "user", "content": null}]}': f"the user has no text; .*{FORM}",
    '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": null}]}':
        f"message of the assistant has no text; .*{FORM}",
    '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}': "the user has no text",
    '{"messages": [{"role": "asistant", "content": "a"}]}': "role 'asistant' is none of system, .*",
    '{"conversations": [{"from": "bing", "value": "a"}]}': "the role 'bing' is none of",
    '{"messages": [{"role": ["user"], "content": "a"}]}': "role .'user'. is none of",
    '{"messages": [{"role": "user", "content": "a"}]}': "the chat has no answer of the assistant",
    '{"messages": [{"role": "assistant", "content": "a"}]}': "the chat has no answer",
    '{"text": "ab\\ud83d"}': "surrogates not allowed",
}  # fmt: skip


@pytest.mark.parametrize("line", REFUSED)
def test_refused_lines(make, read, line):
    with pytest.raises(ValueError, match=rf"data\.jsonl, line 3: .*{REFUSED[line]}") as error:
        read(make(), ['{"text": "abc"}', "", line])
    assert "\n" not in str(error.value)


def test_refused_files(make, read):
    of = make()
    with pytest.raises(ValueError, match="line 2: 'utf-8' codec can't decode byte 0xfc.*in UTF-8"):
        read(of, '{"text": "a"}\n{"text": "für"}'.encode("latin-1"))
    with pytest.raises(ValueError, match=f"row 2: .*{FORM}"):
        read(of, b'[{"text": "a"},\n{"txt": "b"}]')
    with pytest.raises(ValueError, match="data.jsonl has no token to learn"):
        read(of, b"\n")
    with pytest.raises(ValueError, match="has no token to learn; dropped: empty texts"):
        read(of, ['{"text": ""}'])


def test_a_set_without_answers_within_a_row_is_refused(make, read):
    """Such as a validation set of long questions, whose loss would be 0."""
    with pytest.raises(
        ValueError, match="has no token to learn; dropped: no token to learn within a row"
    ):
        read(make(), [{"messages": chat("a" * 30, "b")}] * 2, 20)


def test_long_chats_are_cut_between_turns(chatml, read):
    """Each part has the system message, begins with a question, and fits a row."""
    row = {"messages": chat(*(f"{kind}{i}" for i in range(9) for kind in "qa"), system="s")}
    whole = read(chatml, [row])
    data = read(chatml, [row], 100)
    assert len(whole.texts) == 1 and "cut" not in str(whole)
    assert "  cut: chats longer than a row, between turns: 1" in str(data).splitlines()
    (parts,) = zip(*of_lines(chatml, data), strict=True)
    assert len(parts) > 2
    for part in parts:
        assert part.startswith("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq")
        assert part.endswith("<|im_end|>»\n")
    answers = [ids[a].tolist() for ((ids, a),) in data.texts]
    ((ids, mask),) = whole.texts[0]
    assert sum(answers, []) == ids[mask].tolist()
    assert max(len(ids) for ((ids, _),) in data.texts) <= 101


def test_a_summary_counts_what_is_cut_and_dropped(chatml, read):
    rows = [
        {"messages": chat("q", "a" * 100)},
        {"messages": chat("q" * 100, "a")},
        {"text": "a" * 130},
        {"text": ""},
    ]
    data = read(chatml, rows, 60)
    assert +data.counts == {
        "cut: answers longer than a row, at the end": 1,
        "dropped: no token to learn within a row": 1,
        "cut: texts longer than a row, into several": 1,
        "dropped: empty texts": 1,
    }
    ((ids, answers),) = data.texts[0]
    assert len(ids) == 61 and not answers[0] and answers[-1]
    tokens = sum(len(ids) for ids, _ in itertools.chain(*data.texts))
    assert data.tokens == tokens == 61 + 131 + 2
    assert data.share == pytest.approx((answers.sum() + 130) / tokens)
    assert str(data).splitlines() == [
        f"data.jsonl: 4 rows of 60 tokens; {tokens} tokens without padding, "
        f"{data.share:.1%} of them answers",
        *(f"  {why}: 1" for why in +data.counts),
    ]


def test_answers_that_would_not_stop_are_noted(make, read):
    """As of a base model, whose eos_token is not that of its template."""
    row = {"messages": chat("a", "b")}
    for end, noted in (("</s>", True), ("<|im_end|>", False)):
        of = make(CHATML, bytewise(), SIZE, eos_token=end)
        assert ("does not stop generation" in str(read(of, [row]))) == noted


@pytest.mark.parametrize("stops", [[256, 259], [260, 256], 256, None])
def test_a_text_ends_where_generation_stops(make, read, stops):
    """As of Llama 3, which has several such tokens: with the tokenizer's, if it is one of them."""
    of = make(None, bytewise(), SIZE, stops=stops, eos_token="<|im_end|>")
    ends = np.atleast_1d(259 if stops is None else stops).tolist()
    ((ids, _),) = read(of, [{"text": "ab"}]).texts[0]
    assert ids[-1] == (259 if 259 in ends else min(ends))
    (begin, _) = of.encode("ab")
    for end in ends:
        assert of.decode([begin, end, begin]) == "a"


def test_held_out_texts(make, read):
    """Pieces that repeat each other are on one side."""
    of = make(QWEN3, bytewise(), SIZE, eos_token="<|im_end|>")
    data = read(of, [{"messages": chat(f"a{i}", "b", "c", "d")} for i in range(10)])
    rest, held_out = data.split(0.2, seed=0)
    assert [len(part.texts) for part in (rest, held_out)] == [8, 2]
    assert all(len(pieces) == 2 for pieces in (*rest.texts, *held_out.texts))
    assert rest.tokens + held_out.tokens == data.tokens
    assert str(held_out).startswith("data.jsonl, held out: ") and "cut" not in str(held_out)
    other = data.split(0.2, seed=1)[1]
    assert of_lines(of, other) != of_lines(of, held_out)
    with pytest.raises(ValueError, match="data.jsonl has too few texts .* pass --validation"):
        read(of, [{"messages": chat("a", "b")}]).split(0.05, 0)


def test_packed_rows(texts):
    """Rows are full, every token is in one of them, and texts do not see each other."""
    some = [(np.full(n, i), np.ones(n, bool)) for i, n in enumerate((5, 3, 8, 2, 4), 1)]
    rows = texts.packed(some, 7)
    assert rows.tokens.shape == (3, 8)
    numbers, counts = np.unique(rows.tokens[rows.tokens > 0], return_counts=True)
    assert numbers.tolist() == [1, 2, 3, 4, 5] and counts.tolist() == [5, 3, 8, 2, 4]
    for row, segments, weights in zip(rows.tokens, rows.segments, rows.weights, strict=True):
        apart = [row[segments == number] for number in range(1, segments.max() + 1)]
        assert all(len(set(one.tolist())) == 1 for one in apart)
        assert weights.sum() == sum(len(one) - 1 for one in apart)


def test_texts_longer_than_a_row_predict_each_token_once(make, read):
    of = make()
    text = CHARACTERS[3:29] * 3
    data = read(of, [{"text": text}], 16)
    predicted = [ids[1:].tolist() for ((ids, _),) in data.texts]
    assert sum(predicted, []) == [CHARACTERS.index(c) for c in text[1:] + "$"]

"""Chat templates in the fine-tuning example: texts as transformers renders them, and answers."""

import json
import sys

import pytest

from tests.repo.chats import (
    CHATML,
    GEMMA,
    LLAMA,
    MISTRAL,
    QWEN3,
    R1,
    SIZE,
    TAGGED,
    TOOLS,
    bytewise,
    chat,
    of_lines,
)

CALL = {"name": "weather", "arguments": {"town": "Zürich's <old> & new", "days": 2}}
TEMPLATES = {
    # the newline after <|im_end|> is no answer
    "chatml": (
        CHATML, "<|im_end|>", {"messages": chat("a", "b", "c", " é ", system="s")},
        ["<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
         "«b<|im_end|>»\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n« é <|im_end|>»\n"],
    ),
    "llama": (
        LLAMA, "<|eot_id|>", {"messages": chat("a", " b ", "c", "d")},
        ["<s><|start_header_id|>user<|end_header_id|>\n\na<|eot_id|><|start_header_id|>assistant"
         "<|end_header_id|>\n\n«b<|eot_id|>»<|start_header_id|>user<|end_header_id|>\n\nc<|eot_id|>"
         "<|start_header_id|>assistant<|end_header_id|>\n\n«d<|eot_id|>»"],
    ),
    "gemma": (
        GEMMA, "<end_of_turn>", {"messages": chat("a", "b", "c", "d")},
        ["<s><start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\n«b<end_of_turn>»\n"
         "<start_of_turn>user\nc<end_of_turn>\n<start_of_turn>model\n«d<end_of_turn>»\n"],
    ),
    "mistral": (
        MISTRAL, "</s>", {"messages": chat("a", "b", "c", "d")},
        ["<s>[INST] a[/INST]« b</s>»[INST] c[/INST]« d</s>»"],
    ),
    "qwen3": (
        QWEN3, "<|im_end|>", {"messages": chat("a", "b", "c", "d")},
        ["<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
         "«<think>\n\n</think>\n\nb<|im_end|>»\n",
         "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
         "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
         "«<think>\n\n</think>\n\nd<|im_end|>»\n"],
    ),
    "r1": (
        R1, "</s>", {"messages": chat("a", "<think>so</think>b", "c", "d")},
        ["[user]a[assistant]«b</s>»[user]c[assistant]«d</s>»"],
    ),
    "generation": (
        TAGGED, "</s>", {"messages": chat("a", "b", "c", "d")},
        ["[user]a\n[assistant]«b\n»</s>\n[user]c\n[assistant]«d\n»</s>\n"],
    ),
    "date": (
        "{{ strftime_now('%Y')[:2] }}" + CHATML, "<|im_end|>", {"messages": chat("a", "b")},
        ["20<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n«b<|im_end|>»\n"],
    ),
    "tools": (
        TOOLS, "</s>", {"messages": chat("a", "b"), "tools": [{"name": "f", "a": "<é>"}]},
        ['tools [{"name": "f", "a": "<é>"}]\n[user]a</s>[assistant]«b</s>»'],
    ),
    "tools in a string": (
        TOOLS, "</s>", {"messages": chat("a", "b"), "tools": '[{"name": "f"}]'},
        ['tools [{"name": "f"}]\n[user]a</s>[assistant]«b</s>»'],
    ),
    "calls": (
        TOOLS, "</s>",
        {"messages": [*chat("a"), {"role": "assistant", "content": None, "tool_calls": [CALL]},
                      {"role": "tool", "content": "warm"}, {"role": "assistant", "content": "b"}]},
        [f"[user]a</s>[assistant]«{json.dumps(CALL, ensure_ascii=False)}</s>»[tool]warm</s>"
         "[assistant]«b</s>»"],
    ),
    "named": (
        [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": TOOLS}], "</s>",
        {"messages": chat("a", "b"), "tools": [{"name": "f"}]},
        ['tools [{"name": "f"}]\n[user]a</s>[assistant]«b</s>»'],
    ),
    "arguments": (
        "{{ mode }}" + CHATML, "<|im_end|>",
        {"messages": chat("a", "b"), "chat_template_kwargs": {"mode": "x"}},
        ["x<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n«b<|im_end|>»\n"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates(make, read, name):
    """Each text is as transformers renders it, and the answers are what would be generated."""
    template, end, row, wanted = TEMPLATES[name]
    of = make(template, bytewise(), SIZE, bos_token="<s>", eos_token=end)
    data = read(of, [row])
    assert of_lines(of, data) == [wanted]
    tools = row.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) else tools
    rendered = of.tokenizer.apply_chat_template(
        row["messages"], tools, tokenize=False, **row.get("chat_template_kwargs", {})
    )
    assert wanted[-1].translate({ord(c): None for c in "«»"}) == rendered
    assert ("the template changes" in str(data)) == (name == "qwen3")


def test_templates_that_move_the_system_message_are_refused(make, read):
    of = make(MISTRAL, bytewise(), SIZE, bos_token="<s>", eos_token="</s>")
    with pytest.raises(ValueError, match="line 1: .* write system messages into the user's"):
        read(of, [{"messages": chat("a", "b", system="s")}])


def test_what_a_template_refuses_names_the_line(make, read):
    of = make(GEMMA, bytewise(), SIZE, bos_token="<s>", eos_token="<end_of_turn>")
    with pytest.raises(ValueError, match="line 1: .* refuses it: Conversation roles must alter"):
        read(of, [{"messages": chat("a", "b", system="s")}])
    of.tokenizer.chat_template = "{% if %}"
    with pytest.raises(ValueError, match="line 1: .* refuses it: Expected an expression"):
        read(of, [{"messages": chat("a", "b")}])
    with pytest.raises(ValueError, match="line 1: the model has no chat template"):
        read(make(None), [{"messages": chat("a", "b")}])


def test_prompts_and_generated_tokens(chatml, make):
    asked = "<|im_start|>user\nhi é<|im_end|>\n<|im_start|>assistant\n"
    assert chatml.tokenizer.decode(chatml.encode("hi é")) == asked
    tokens = chatml.tokenizer("yes é<|im_end|>\n<|im_start|>user", add_special_tokens=False)
    assert chatml.decode(tokens["input_ids"]) == "yes é"
    plain = make(None)
    assert plain.encode("ab$") == [3, 4] and plain.decode([3, 4, 1, 5]) == "ab"
    with pytest.raises(ValueError, match="the prompt has no tokens"):
        plain.encode("")


def test_the_time_is_linear_in_the_number_of_turns(chatml, read):
    """Of the calls of functions, that of generators' steps included."""

    def calls(turns):
        count = 0

        def seen(*_):
            nonlocal count
            count += 1

        row = {"messages": chat(*(f"{kind}{i}" for i in range(turns) for kind in "qa"))}
        read(chatml, [row], 30_000)
        sys.setprofile(seen)
        try:
            assert len(read(chatml, [row], 30_000).texts) == 1
        finally:
            sys.setprofile(None)
        return count

    assert calls(150) < 4 * calls(50)

"""Tiny tokenizers, short chat templates as models have them, and files of chats."""

import itertools

CHARACTERS = "_$^abcdefghijklmnopqrstuvwxyz .?0123456789"  # `$` ends a message
PLAIN = (
    "{% for m in messages %}{{ '^' + m['role'][0] + m['content'] + '$' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '^a' }}{% endif %}"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TAGGED = (
    "{% for m in messages %}{{ '[' + m['role'] + ']' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '\n' }}{% endgeneration %}{{ '</s>' }}{% else %}"
    "{{ m['content'] }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)
TOOLS = (
    "{% if tools %}{{ 'tools ' + (tools | tojson) + '\n' }}{% endif %}{% for m in messages %}"
    "{{ '[' + m['role'] + ']' }}{% if m['content'] %}{{ m['content'] }}{% endif %}"
    "{% for call in m['tool_calls'] or [] %}{{ call | tojson }}{% endfor %}{{ '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + "
    "'<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' "
    "+ m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (  # writes a system message before the last user's, if no answer follows
    "{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}"
    "{{- bos_token }}{%- for m in messages if m['role'] != 'system' %}{%- if m['role'] == 'user' %}"
    "{{- '[INST] ' + (system + '\n\n' if loop.last and system else '') + m['content'] }}"
    "{{- '[/INST]' }}"
    "{%- else %}{{- ' ' + m['content'] | trim + eos_token }}{%- endif %}{%- endfor %}"
)
QWEN3 = (  # writes thoughts after the last question alone
    "{%- set ns = namespace(last=0) %}{%- for m in messages if m.role == 'user' %}"
    "{%- set ns.last = loop.length %}{%- endfor %}{%- set ns.seen = 0 %}{%- for m in messages %}"
    "{%- set ns.seen = ns.seen + (m.role == 'user') %}{{- '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' and ns.seen == ns.last %}{{- '<think>\n\n</think>\n\n' }}"
    "{%- endif %}{{- m.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
R1 = (  # opens the thoughts in the prompt, and leaves them out of answers
    "{% for m in messages %}{{ '[' + m.role + ']' + m.content.split('</think>')[-1] }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]<think>\n' }}{% endif %}"
)
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<x9>")
SIZE = 256 + len(SPECIAL)


def characters(padded=False):
    """A tokenizer with a token for each of CHARACTERS."""
    from tokenizers import Tokenizer, decoders, models

    vocab = {character: number for number, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="_"))
    tokenizer.decoder = decoders.Fuse()
    if padded:
        tokenizer.enable_truncation(16)
        tokenizer.enable_padding(length=16, pad_id=0, pad_token="_")
    return tokenizer


def bytewise():
    """A tokenizer with a token for each byte, and SPECIAL."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def chat(*contents, system=None):
    """A chat of a user and an assistant in turn."""
    roles = itertools.cycle(("user", "assistant"))
    said = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    return [{"role": "system", "content": system}] * (system is not None) + said


def shown(texts, pieces):
    """The text of pieces, with « and » around what the loss is taken on."""
    out = []
    for ids, answers in pieces:
        parts = itertools.groupby(zip(ids.tolist(), answers.tolist(), strict=True), lambda p: p[1])
        words = ((on, texts.tokenizer.decode([token for token, _ in run])) for on, run in parts)
        out.append("".join(f"«{text}»" if on else text for on, text in words))
    return out


def of_lines(texts, data):
    return [shown(texts, pieces) for pieces in data.texts]

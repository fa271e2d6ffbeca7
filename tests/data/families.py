"""Small tokenizers and chat templates that behave as those of the families do, written for the tests."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "user assistant system tool model Hello there, how are you? I am fine. What is two plus two? It is four.",
    "<think>\nI should add.\n</think>\n\n[INST] [/INST] Question: Answer: yes no\n\n\n the cat sat on mats",
]

LLAMA3 = """{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
{{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

LLAMA2 = """{%- for message in messages %}
{%- if message.role == 'system' %}{{- '<<SYS>> ' + message.content + ' <</SYS>>' }}
{%- elif message.role == 'user' %}{{- bos_token + '[INST] ' + message.content | trim + ' [/INST]' }}
{%- else %}{{- ' ' + message.content | trim + ' ' + eos_token }}
{%- endif %}
{%- endfor %}"""

QWEN25 = """{%- if tools %}
{{- '<|im_start|>system\nTools:' }}
{%- for tool in tools %}{{- '\n' + tool | tojson }}{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif messages[0].role != 'system' %}
{{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + call.function.name + ' ' + call.function.arguments | tojson + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

QWEN3 = """{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- set spoken = message.content.split('</think>')[-1].lstrip('\n') %}
{%- set thought = '' %}
{%- if '</think>' in message.content %}
{%- set thought = message.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last %}{{- '<think>\n' + thought + '\n</think>\n\n' }}{%- endif %}
{{- spoken + '<|im_end|>\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

MISTRAL = """{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '[INST] ' + message.content + ' [/INST]' }}
{%- elif message.role == 'assistant' %}{{- ' ' + message.content + eos_token }}
{%- else %}{{- raise_exception('Only user and assistant roles are supported!') }}
{%- endif %}
{%- endfor %}"""

GEMMA3 = """{{- bos_token }}
{%- if messages[0].role == 'system' %}
{%- set first = messages[0].content + '\n\n' %}{%- set rest = messages[1:] %}
{%- else %}{%- set first = '' %}{%- set rest = messages %}{%- endif %}
{%- for message in rest %}
{%- set role = 'model' if message.role == 'assistant' else message.role %}
{{- '<start_of_turn>' + role + '\n' + (first if loop.first else '') }}
{{- message.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}"""

PHI3 = """{%- for message in messages %}
{{- '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- else %}{{- eos_token }}{%- endif %}"""


def byte_level(
    special: list[str],
    *,
    lead: str | None = None,
    swallow: bool = False,
    plain: tuple[str, ...] = (),
    **named: Any,
) -> PreTrainedTokenizerFast:
    """A byte-level BPE. `lead` goes before every text; with `swallow` special tokens eat the space behind."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS * 4, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    made.add_special_tokens(
        [AddedToken(text, rstrip=swallow, normalized=False, special=True) for text in special]
    )
    made.add_tokens([AddedToken(text, normalized=False) for text in plain])
    if lead is not None:
        made.post_processor = processors.TemplateProcessing(
            single=f"{lead} $A", special_tokens=[(lead, made.token_to_id(lead))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=made, **named)


def llama3() -> PreTrainedTokenizerFast:
    special = [
        "<|begin_of_text|>",
        "<|eot_id|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|end_of_text|>",
    ]
    made = byte_level(special, lead=special[0], bos_token=special[0], eos_token="<|eot_id|>")
    made.chat_template = LLAMA3
    return made


def llama2() -> PreTrainedTokenizerFast:
    """As SentencePiece does: a space before a text, and spaces as part of words."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    made.train_from_iterator(
        CORPUS * 4,
        trainers.BpeTrainer(
            vocab_size=600,
            initial_alphabet=[chr(code) for code in range(32, 127)],
            special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
            show_progress=False,
        ),
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = LLAMA2
    return tokenizer


def qwen25() -> PreTrainedTokenizerFast:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tools = ("<tool_call>", "</tool_call>")
    made = byte_level(special, plain=tools, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.chat_template = QWEN25
    return made


def qwen3() -> PreTrainedTokenizerFast:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    made = byte_level(
        special, plain=("<think>", "</think>"), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    made.chat_template = QWEN3
    return made


def mistral() -> PreTrainedTokenizerFast:
    made = byte_level(
        ["<unk>", "<s>", "</s>"], lead="<s>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    made.chat_template = MISTRAL
    return made


def gemma3() -> PreTrainedTokenizerFast:
    special = ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"]
    made = byte_level(special, lead="<bos>", bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")
    made.chat_template = GEMMA3
    return made


def phi3() -> PreTrainedTokenizerFast:
    special = ["<|endoftext|>", "<|assistant|>", "<|user|>", "<|system|>", "<|end|>"]
    made = byte_level(special, swallow=True, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    made.chat_template = PHI3
    return made


def smollm2() -> PreTrainedTokenizerFast:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    made = byte_level(special, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>")
    made.chat_template = CHATML
    return made


def gpt2() -> PreTrainedTokenizerFast:
    text = "<|endoftext|>"
    return byte_level([text], bos_token=text, eos_token=text, unk_token=text)


def opt() -> PreTrainedTokenizerFast:
    return byte_level(["<pad>", "</s>"], lead="</s>", bos_token="</s>", eos_token="</s>", pad_token="<pad>")

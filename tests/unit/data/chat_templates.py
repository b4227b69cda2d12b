"""Shortened chat templates of published models, and a tokenizer that has the marks of all these
templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

# This template drops the thoughts of earlier responses. Only before the last response does it
# write an empty block of thoughts.
QWEN3 = """
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(search=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
{%- set index = (messages|length - 1) - loop.index0 %}
{%- if ns.search and message.role == 'user' and not (message.content.startswith('<tool_response>')
    and message.content.endswith('</tool_response>')) %}
{%- set ns.search = false %}{%- set ns.last = index %}{%- endif %}{%- endfor %}
{%- for message in messages %}{%- set content = message.content or '' %}
{%- if message.role in ('user', 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}{%- set thoughts = '' %}
{%- if '</think>' in content %}
{%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{%- if loop.index0 > ns.last and (loop.last or thoughts) %}
{{- '<|im_start|>assistant\\n<think>\\n' + thoughts.strip('\\n') }}
{{- '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}
"""
CHATML = """
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
LLAMA3 = """
{{- bos_token }}{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
{%- if message.role == 'tool' %}{{- message.content | tojson }}
{%- else %}{{- message['content'] | trim }}{%- endif %}{{- '<|eot_id|>' }}{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
MISTRAL = """
{{- bos_token }}{%- for message in messages %}{%- if message['role'] == 'assistant' %}
{{- ' ' + message['content'] | trim + eos_token }}{%- else %}
{{- '[INST] ' + message['content'] + ' [/INST]' }}{%- endif %}{%- endfor %}
"""
GPT_OSS = """
{%- for message in messages %}{%- if message.role == 'assistant' %}
{%- if '<|channel|>analysis<|message|>' in message.content %}
{{- raise_exception('You have passed a message with channel tags in its content') }}{%- endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start|>functions.f to=assistant<|channel|>commentary<|message|>' }}
{{- message.content | tojson + '<|end|>' }}
{%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""
# The marks of turns in this template are not special tokens of the tokenizer.
DEEPSEEK = """
{{- bos_token }}{%- for message in messages %}{%- if message['role'] == 'assistant' %}
{%- set content = message['content'] %}{%- if '</think>' in content %}
{%- set content = content.split('</think>')[-1] %}{%- endif %}
{{- '<｜Assistant｜>' + content + eos_token }}{%- else %}
{{- '<｜User｜>' + message['content'] }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{%- endif %}
"""
# This template writes marks with the names of roles.
PHI3 = """
{%- for message in messages %}
{{- '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}
"""
TEMPLATES = {
    "qwen3": QWEN3,
    "chatml": CHATML,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "gpt_oss": GPT_OSS,
    "deepseek": DEEPSEEK,
    "phi3": PHI3,
}
SPECIAL = [
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "[INST]",
    "[/INST]",
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|tool|>",
]
WIDE = ["<｜User｜>", "<｜Assistant｜>"]
# ordinary text for the model, but single tokens of the tokenizer
WORDS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]


def byte_level(folder: Path, template: str | None = None, **settings: Any) -> Path:
    """Write a tokenizer folder. The tokens are bytes and all tokens of SPECIAL, WIDE and WORDS. The
    tokenizer puts a BOS before a text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in SPECIAL])
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in (*WIDE, *WORDS)])
    bos = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[bos]
    )
    given = {"bos_token": "<s>", "eos_token": "</s>", **settings}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **given)
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder

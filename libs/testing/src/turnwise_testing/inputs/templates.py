"""
Chat templates that show the ids of calls, after the ones of the models, for tokenizers of bytes.

    chat = kimi_chat()
"""

from __future__ import annotations

from typing import Final

from turnwise_chat_templates.template import ChatTemplate
from turnwise_testing.inputs.tokenizers import byte_tokenizer

KIMI_K2: Final = """\
{%- macro text_of(message) -%}
  {%- if message.get('content') is string -%}{{ message['content'] }}{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
  <|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>
{%- endif -%}
{%- for message in messages -%}
  {%- if loop.first and message['role'] != 'system' -%}
    <|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>
  {%- endif -%}
  {%- set name = message.get('name') or message['role'] -%}
  {%- if message['role'] == 'user' -%}
    <|im_user|>{{ name }}<|im_middle|>
  {%- elif message['role'] == 'assistant' -%}
    <|im_assistant|>{{ name }}<|im_middle|>
  {%- else -%}
    <|im_system|>{{ name }}<|im_middle|>
  {%- endif -%}
  {%- if message['role'] == 'assistant' and message.get('tool_calls') -%}
    {{- text_of(message) -}}<|tool_calls_section_begin|>
    {%- for tool_call in message['tool_calls'] -%}
      <|tool_call_begin|>{{ tool_call['id'] }}<|tool_call_argument_begin|>
      {%- if tool_call['function']['arguments'] is string -%}
        {{- tool_call['function']['arguments'] -}}
      {%- else -%}
        {{- tool_call['function']['arguments'] | tojson -}}
      {%- endif -%}
      <|tool_call_end|>
    {%- endfor -%}
    <|tool_calls_section_end|>
  {%- elif message['role'] == 'tool' -%}
    {{- '## Return of ' + message.tool_call_id + '\\n' -}}{{- text_of(message) -}}
  {%- else -%}
    {{- text_of(message) -}}
  {%- endif -%}
  <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
  <|im_assistant|>assistant<|im_middle|>
{%- endif -%}
"""
"""Kimi K2: the id of a call is in the place of its name."""

KIMI_K2_TOKENS: Final = ("<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>")

MISTRAL_V3: Final = """\
{{- bos_token }}
{%- for message in messages %}
  {%- if message.role == 'user' %}
    {%- if tools and loop.first %}
      {{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
    {%- endif %}
    {{- '[INST] ' + message.content + '[/INST]' }}
  {%- elif message.role == 'assistant' and message.tool_calls %}
    {{- '[TOOL_CALLS] [' }}
    {%- for tool_call in message.tool_calls %}
      {%- if not tool_call.id is defined or tool_call.id | length != 9 %}
        {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
      {%- endif %}
      {{- '{"name": ' + (tool_call.function.name | tojson) }}
      {{- ', "arguments": ' + (tool_call.function.arguments | tojson) + ', "id": "' + tool_call.id + '"}' }}
      {{- ', ' if not loop.last else ']' + eos_token }}
    {%- endfor %}
  {%- elif message.role == 'assistant' %}
    {{- ' ' + message.content + eos_token }}
  {%- elif message.role == 'tool' %}
    {%- if not message.tool_call_id is defined or message.tool_call_id | length != 9 %}
      {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
    {%- endif %}
    {{- '[TOOL_RESULTS] {"content": ' + (message.content | tojson) }}
    {{- ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
  {%- else %}
    {{- raise_exception('Only user, assistant and tool roles are supported!') }}
  {%- endif %}
{%- endfor %}
"""
"""Mistral 7B Instruct v0.3: ids have nine characters. Unlike the model's, it keeps the tools at the first message."""

MISTRAL_V3_TOKENS: Final = (
    "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)  # fmt: skip


def kimi_chat() -> ChatTemplate:
    """Return the chat template of Kimi K2."""
    return ChatTemplate(byte_tokenizer(KIMI_K2, KIMI_K2_TOKENS), name="Kimi's template")


def mistral_chat() -> ChatTemplate:
    """Return the chat template of Mistral 7B Instruct v0.3."""
    tokenizer = byte_tokenizer(MISTRAL_V3, MISTRAL_V3_TOKENS, bos_token="<s>", eos_token="</s>")
    return ChatTemplate(tokenizer, name="Mistral's template")

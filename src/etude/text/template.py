r"""Special tokens and chat template of the "etude" text format.

A message is `<|role|>` + text + `<|end|>`; the policy samples after `<|assistant|>` and ends with `<|end|>`. Reasoning comes first,
between `<|think|>` and `<|/think|>`. The template renders the same text as `renderer.EtudeRenderer`, so that a checkpoint of ours
speaks the same language under `transformers`; tests/text/test_renderer.py compares the two.

One difference is inherent to a template: it is text, so a special token's name inside user text is tokenised as that special token
by `transformers`, and as ordinary text here. Escapes of a mark inside a value (see calls.py) are exact for values that hold the
mark bare or escaped once; Jinja has no regular expressions for deeper ones.
"""

from __future__ import annotations

PAD = "<|pad|>"
END = "<|end|>"
THINK = "<|think|>"
UNTHINK = "<|/think|>"
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>", "tool": "<|tool|>"}

ETUDE_SPECIALS = (PAD, END, *ROLES.values(), THINK, UNTHINK)

ETUDE_TEMPLATE = r"""
{%- macro shield(text, mark) -%}
{{- text | replace('<\\/' ~ mark ~ '>', '<\\\\/' ~ mark ~ '>') | replace('</' ~ mark ~ '>', '<\\/' ~ mark ~ '>') -}}
{%- endmacro -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{- '<|tool|>' if loop.first or messages[loop.index0 - 1].role != 'tool' else '\n' -}}
{{- '<result' ~ (' error="' ~ message.error ~ '"' if message.error else '') ~ '>' ~ shield(message.content, 'result') ~ '</result>' -}}
{{- '<|end|>' if loop.last or messages[loop.index0 + 1].role != 'tool' -}}
{%- elif message.role == 'assistant' -%}
{{- '<|assistant|>' -}}
{{- '<|think|>' ~ message.reasoning_content ~ '<|/think|>' if message.reasoning_content -}}
{{- message.content or '' -}}
{%- for call in message.tool_calls or [] -%}
{%- set call = call.function if call.function else call -%}
{{- '\n' if message.content or not loop.first -}}
{{- '<call name="' ~ call.name ~ '">\n' -}}
{%- for key, value in (call.arguments or {}).items() -%}
{{- '<' ~ key ~ '>' ~ shield(value, key) ~ '</' ~ key ~ '>\n' -}}
{%- endfor -%}
{{- '</call>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- else -%}
{{- '<|' ~ message.role ~ '|>' ~ message.content ~ '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{{- '<|assistant|>' if add_generation_prompt -}}
""".strip("\n")

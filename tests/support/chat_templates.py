"""Chat templates that use the constructs of the models' own templates, with our own texts.

Does not import the packages under test.
"""

from __future__ import annotations

# A macro, a search from the end in a namespace, neighbours in a loop, calls as nested tags.
QWEN36 = r"""
{%- macro words(content, may_show=true) %}
    {%- if content is string %}
        {{- content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for part in content %}
            {%- if 'text' in part %}
                {{- part.text }}
            {%- elif may_show %}
                {{- '<|image_pad|>' }}
            {%- else %}
                {{- raise_exception('No images here.') }}
            {%- endif %}
        {%- endfor %}
    {%- elif content is not none and content is not undefined %}
        {{- raise_exception('Strange content.') }}
    {%- endif %}
{%- endmacro %}
{%- set found = namespace(asked=-1) %}
{%- for message in messages[::-1] if message.role == 'user' and found.asked < 0 %}
    {%- if not (words(message.content)|trim).startswith('<tool_response>') %}
        {%- set found.asked = messages.index(message) %}
    {%- endif %}
{%- endfor %}
{%- if found.asked < 0 %}
    {{- raise_exception('Nobody asks anything.') }}
{%- endif %}
{%- if tools and tools is iterable and tools is not mapping %}
    {{- '<|im_start|>system\n<tools>' }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = words(message.content, message.role != 'system')|trim %}
    {%- if message.role == 'tool' %}
        {%- if not (loop.previtem and loop.previtem.role == 'tool') %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
        {%- continue %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' and loop.index0 > found.asked %}
        {{- '<think>\n' ~ (message.reasoning_content or '')|trim ~ '\n</think>\n\n' }}
    {%- endif %}
    {{- content }}
    {%- for call in message.tool_calls if message.tool_calls is not mapping %}
        {%- set call = call.function if call.function is defined else call %}
        {{- '\n<tool_call>\n<function=' + call.name + '>\n' }}
        {%- for name, value in call.arguments|items %}
            {%- set value = value | string if value is string or value is not iterable
                else value | tojson | safe %}
            {{- '<parameter=' + name + '>\n' }}
            {{- value }}
            {{- '\n</parameter>\n' }}
        {%- endfor %}
        {{- '</function>\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n<think>\n' }}
    {{- '\n</think>\n\n' if enable_thinking is defined and enable_thinking is false }}
{%- endif %}
"""

# Its own beginning, spelled out; comments; `default`; a marked part; text between two prints.
LAGUNA = r"""
{#- A comment, - with a dash. -#}
{{- "<bos>" -}}
{%- set thinks = enable_thinking | default(false) -%}
{%- set first = messages[0].content if messages[0].role == "system" else "You help." -%}
{{- "<system>\n" ~ first.rstrip() -}}
{%- if tools -%}
  {%- set ns = namespace(all="\n\nTools:\n") -%}
  {%- for tool in tools -%}{%- set ns.all = ns.all ~ (tool | tojson) ~ "\n" -%}{%- endfor -%}
  {{- ns.all -}}
{%- endif -%}
{{- "\n</system>\n" -}}
{%- for message in messages[(1 if messages[0].role == "system" else 0):] -%}
  {%- set content = message.content if message.content is string else "" -%}
  {%- if message.role == "assistant" -%}
    {%- generation -%}
      {{- "<assistant>\n" -}}
      {%- if '</think>' in content %}
        {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip() %}
        {{- '<think>\n' + thought + '\n</think>\n' -}}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
      {%- else %}
        {{- '</think>\n' -}}
      {%- endif %}
      {{- content.strip() ~ "\n" if content.strip() else "" -}}
      {%- for call in message.tool_calls or [] -%}
        {{- '<tool_call>' + call.function.name }}
        {% for k, v in call.function.arguments.items() -%}
          {{- "<arg_key>" ~ k ~ "</arg_key>\n<arg_value>"}}
          {{- v | tojson(ensure_ascii=False) if v is not string else v }}{{ "</arg_value>\n" -}}
        {%- endfor -%}
        {{- "</tool_call>\n" -}}
      {%- endfor -%}
      {{- "</assistant>\n" -}}
    {%- endgeneration -%}
  {%- else -%}
    {%- set name = "tool_response" if message.role == "tool" else message.role -%}
    {{- "<" ~ name ~ ">\n" ~ content ~ "\n</" ~ name ~ ">\n" -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- "<assistant>\n" ~ ('<think>' if thinks else '</think>') -}}
{%- endif -%}
"""

# On lines that are not trimmed at their ends by signs, only by what the environment does.
OLMOE = """{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'assistant' %}
{{ '<|assistant|>\n' + message['content'] + eos_token + ('' if loop.last else '\n') }}
{% else %}
{{ '<|' + message['role'] + '|>\n' + message['content'] + '\n' }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>\n' }}
{% endif %}
{% endfor %}"""

# Refuses what does not alternate; variables that are set only sometimes.
MIXTRAL = r"""
{%- if messages[0]['role'] == 'system' %}
    {%- set order, talk = messages[0]['content'], messages[1:] %}
{%- else %}
    {%- set talk = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in talk %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Users and assistants take turns.') }}
    {%- endif %}
    {%- if message['role'] != 'user' %}
        {{- ' ' + message['content'] + eos_token }}
    {%- elif loop.first and order is defined %}
        {{- ' [INST] ' + order + '\n\n' + message['content'] + ' [/INST]' }}
    {%- else %}
        {{- ' [INST] ' + message['content'] + ' [/INST]' }}
    {%- endif %}
{%- endfor %}
"""

# The date, if it may be asked for; indented JSON; tests whether keys are there.
LLAMA4 = r"""{{- bos_token }}
{%- if not tools is defined %}
    {%- set tools = custom_tools if custom_tools is defined else none %}
{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") if strftime_now is defined else "someday" %}
{%- endif %}
{%- macro head(role) %}{{ '<|header_start|>' + role + '<|header_end|>\n\n' }}{% endmacro %}
{%- if tools is not none %}
    {{- head('system') + 'Today: ' + date_string + '\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
    {{- "<|eot|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message and message.tool_calls|length > 0 %}
        {{- head('assistant') + '<|python_start|>' + message['content'] + '<|python_end|>' }}
        {%- for call in message.tool_calls %}
            {{- '{"name": "' + call.function.name + '", "parameters": ' }}
            {{- call.function.arguments | tojson }}
            {{- "}" }}
        {%- endfor %}
    {%- elif message.role in ("tool", "ipython") %}
        {{- head('ipython') }}
        {%- set is_text = message.content is string or message.content is not iterable %}
        {{- message.content if is_text else message.content | tojson }}
    {%- else %}
        {{- head(message['role']) }}
        {%- if message['content'] is string %}
            {{- message['content'] }}
        {%- else %}
            {%- for part in message['content'] %}
                {{- '<|image|>' if part['type'] == 'image' else part['text'] | trim }}
            {%- endfor %}
        {%- endif %}
    {%- endif %}
    {{- "<|eot|>" }}
{%- endfor %}
{{- head('assistant') if add_generation_prompt }}
"""

# A macro that calls itself, messages that look ahead, a channel for each, the date.
HARMONY = r"""
{%- macro kind(spec) -%}
    {%- if spec is mapping and spec['items'] -%}
        {{- kind(spec['items']) + '[]' }}
    {%- else -%}
        {{- spec.type if spec is mapping and spec.type else 'any' }}
    {%- endif -%}
{%- endmacro -%}
{{- '<|start|>system<|message|>Date: ' + strftime_now('%Y-%m-%d') }}
{{- '\nReasoning: ' + (reasoning_effort if reasoning_effort is defined else 'medium') + '<|end|>' }}
{%- set talk = messages[1:] if messages[0].role in ('system', 'developer') else messages %}
{%- if talk|length < messages|length or tools %}
    {{- '<|start|>developer<|message|>' }}
    {{- messages[0].content if talk|length < messages|length }}
    {%- for tool in tools or [] %}
        {{- '\ntype ' + tool.function.name + ' = (_: {' }}
        {%- for name, spec in tool.function.parameters.items() %}
            {{- name + ': ' + kind(spec) + (', ' if not loop.last else '') }}
        {%- endfor %}
        {{- '}) => any;' }}
    {%- endfor %}
    {{- '<|end|>' }}
{%- endif %}
{%- set called = namespace(name=none) %}
{%- for message in talk %}
    {%- if message.tool_calls %}
        {%- set later = namespace(answers=false) %}
        {%- for other in talk[loop.index:] if other.role == 'assistant' %}
            {%- set later.answers = true %}
        {%- endfor %}
        {%- if message.reasoning_content and not later.answers %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' }}
            {{- message.reasoning_content + '<|end|>' }}
        {%- endif %}
        {%- set called.name = message.tool_calls[0].function.name %}
        {{- '<|start|>assistant to=functions.' + called.name }}
        {{- '<|channel|>commentary json<|message|>' }}
        {{- message.tool_calls[0].function.arguments|tojson + '<|call|>' }}
    {%- elif message.role == 'tool' %}
        {%- if called.name is none %}
            {{- raise_exception('Nobody has called.') }}
        {%- endif %}
        {{- '<|start|>functions.' + called.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content|tojson + '<|end|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
    {%- else %}
        {{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant' }}
{%- endif %}
"""

"""Formats in which each argument of a call stands between tags."""

from __future__ import annotations

import re

from dflash_adapters.text.answers.leads import NAME, NAME_PART, SOME_SPACE, SPACE
from dflash_adapters.text.answers.marked import MarkedFormat
from dflash_adapters.text.answers.scanning import CallSyntax, Lead, Quotes
from dflash_adapters.text.answers.tags import tagged_call

_DSML = "\uff5cDSML\uff5c"


def _argument(pattern: str) -> re.Pattern[str]:
    return re.compile(SPACE + pattern + SPACE, re.DOTALL)


def _invoke(prefix: str) -> CallSyntax:
    """The tags that MiniMax and DeepSeek have in common, but for a prefix."""
    argument = (
        rf'<{prefix}parameter name="(?P<key>[^"]*)"(?: string="(?P<is_text>true|false)")?>'
        rf"(?P<value>.*?)</{prefix}parameter>"
    )
    return CallSyntax(
        f'<{prefix}invoke name="',
        Lead.of(f'{NAME}">', f'{NAME_PART}"?'),
        tagged_call(_argument(argument)),
        ends=f"</{prefix}invoke>",
        quotes=Quotes(((f"<{prefix}parameter name=", f"</{prefix}parameter>"),)),
        inner=(prefix,),
    )


# Models forget the <tool_call> before a function, which therefore is only a marker around calls.
QWEN3_CODER = MarkedFormat(
    call=CallSyntax(
        "<function=",
        Lead.of(f"{NAME}{SOME_SPACE}>", f"{NAME_PART}{SOME_SPACE}"),
        tagged_call(
            _argument(r"<parameter=(?P<key>[^>\n]*)>(?P<value>.*?)</parameter>"), trims_line=True
        ),
        ends="</function>",
        quotes=Quotes((("<parameter=", "</parameter>"),)),
    ),
    before=("<tool_call>",),
    after=("</tool_call>",),
)

SEED_OSS = MarkedFormat(
    think=("<seed:think>", "</seed:think>"),
    call=CallSyntax(
        "<function=",
        Lead.of(f"{NAME}{SOME_SPACE}>", f"{NAME_PART}{SOME_SPACE}"),
        tagged_call(_argument(r"<parameter=(?P<key>[^>\n]*)>(?P<value>.*?)</parameter>")),
        ends="</function>",
        quotes=Quotes((("<parameter=", "</parameter>"),)),
    ),
    before=("<seed:tool_call>",),
    after=("</seed:tool_call>",),
)

GLM = MarkedFormat(
    call=CallSyntax(
        "<tool_call>",
        Lead.of(rf"{SOME_SPACE}{NAME}{SOME_SPACE}(?=<)", f"{SOME_SPACE}{NAME_PART}{SOME_SPACE}"),
        tagged_call(
            _argument(
                rf"<arg_key>(?P<key>[^<]*)</arg_key>{SPACE}<arg_value>(?P<value>.*?)</arg_value>"
            )
        ),
        ends="</tool_call>",
        quotes=Quotes((("<arg_value>", "</arg_value>"),)),
        inner=("<arg_key>", "</arg_key>"),
    )
)

MINIMAX_M2 = MarkedFormat(
    call=_invoke(""), before=("<minimax:tool_call>",), after=("</minimax:tool_call>",)
)

DEEPSEEK_V4 = MarkedFormat(
    call=_invoke(_DSML),
    before=(f"<{_DSML}tool_calls>", f"<{_DSML}function_calls>"),
    after=(f"</{_DSML}tool_calls>", f"</{_DSML}function_calls>"),
)

"""Settings of the server and of chats: variables, defaults, bounds, and what a wrong one says."""

from __future__ import annotations

import pytest

from dflash_protocol.errors import SettingsError
from dflash_protocol.settings import Settings, load_settings
from dflash_protocol.settings.table import chat_knobs, knobs_of, server_knobs

PREFIX = "DFLASH_MOE_"
GOOD = [
    # variable, field, default, values
    ("HOST", "host", "127.0.0.1", ("0.0.0.0", "::1", "fe80::1%eth0", "box.example", "a_b")),
    ("PORT", "port", 8080, (0, 65_535)),
    ("API_KEY_FILE", "api_key_file", "", ("/run/keys",)),
    ("CORS", "cors", (), ()),
    ("CHAT_TEMPLATE_FILE", "chat_template_file", "", ("/srv/chat.jinja",)),
    ("ANSWER_FORMAT", "answer_format", "auto", ("plain", "hermes", "deepseek-v3.1", "gemma4")),
    ("QUEUE_CAPACITY", "queue_capacity", 64, (1, 10_000)),
    ("MAX_BODY_BYTES", "max_body_bytes", 4 << 20, (1024, 1 << 30)),
    (
        "OTLP_ENDPOINT",
        "otlp_endpoint",
        "",
        ("http://127.0.0.1:4318/v1/traces", "https://box/a?b=c"),
    ),
]


def test_these_are_all() -> None:
    assert [knob.variable for knob in server_knobs()] == [PREFIX + each[0] for each in GOOD]
    for is_daemon in (False, True):
        assert not set(server_knobs()) & set(knobs_of(daemon=is_daemon))


CHAT = ("CHAT_HISTORY", "chat_history", "auto", ("off", "/var/typed", "typed"))


def test_a_chat_takes_its_history_and_the_servers_template() -> None:
    variables = [knob.variable for knob in chat_knobs()]
    assert variables == [PREFIX + "CHAT_TEMPLATE_FILE", PREFIX + "CHAT_HISTORY"]
    for is_daemon in (False, True):
        assert not set(chat_knobs()) & set(knobs_of(daemon=is_daemon))


@pytest.mark.parametrize(("variable", "field", "default", "values"), [*GOOD, CHAT])
def test_a_variable_sets_its_field(
    variable: str, field: str, default: object, values: tuple[object, ...]
) -> None:
    assert getattr(load_settings({}), field) == getattr(Settings(), field) == default
    for value in values:
        assert getattr(load_settings({PREFIX + variable: str(value)}), field) == value
        assert getattr(load_settings({}, flags={field: str(value)}), field) == value


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("HOST", ""), ("HOST", "a b"), ("HOST", "a/b"), ("HOST", "x" * 254), ("HOST", "é"),
        ("HOST", "a\n"), ("PORT", "-1"), ("PORT", "65536"), ("PORT", "http"),
        ("API_KEY_FILE", "a\0b"), ("QUEUE_CAPACITY", "0"), ("QUEUE_CAPACITY", "10001"),
        ("ANSWER_FORMAT", "qwen"), ("ANSWER_FORMAT", ""),
        ("MAX_BODY_BYTES", "1023"), ("MAX_BODY_BYTES", "1M"),
        ("CORS", "a.example"), ("CORS", "https://a.example/"), ("CORS", "https://*.example"),
        ("CORS", "https://a\r\nb"), ("CORS", "null"), ("CORS", "https://é"),
        ("OTLP_ENDPOINT", "box:4318"),
        ("OTLP_ENDPOINT", "file:///etc/passwd"), ("OTLP_ENDPOINT", "http://a b"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_with_the_name(variable: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"^{PREFIX}{variable}=") as caught:
        load_settings({PREFIX + variable: value})
    assert len(str(caught.value).splitlines()) == 1


def test_origins_are_listed() -> None:
    text = "https://A.example, http://[::1]:3000,app://obsidian.md"
    origins = ("https://a.example", "http://[::1]:3000", "app://obsidian.md")
    assert load_settings({f"{PREFIX}CORS": text}).cors == origins
    assert load_settings({}, flags={"cors": ("*", "HTTPS://b")}).cors == ("*", "https://b")

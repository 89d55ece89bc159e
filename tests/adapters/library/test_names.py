"""Names of models: what is one, what can only be a path, and what is refused."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_adapters.library.names import ModelName, is_file_name, parse_name, require_name
from dflash_protocol.errors import SettingsError
from support.hostile_texts import HOSTILE

SHARD = "Q8_0/M-Q8_0-00001-of-00003.gguf"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("own/M-GGUF:Q4_K_M", ModelName("own", "M-GGUF", "Q4_K_M")),
        ("own/M-GGUF", ModelName("own", "M-GGUF")),
        ("hf://own/M-GGUF", ModelName("own", "M-GGUF", is_hub=True)),
        ("hf://own/M:q8_0", ModelName("own", "M", "q8_0", is_hub=True)),
        (f"hf://own/M/{SHARD}", ModelName("own", "M", file=SHARD, is_hub=True)),
        ("own/M/a b.gguf", ModelName("own", "M", file="a b.gguf")),
        ("own/M@v1:Q2_K", ModelName("own", "M", "Q2_K", revision="v1")),
        ("own/M@ab12/x.gguf", ModelName("own", "M", file="x.gguf", revision="ab12")),
        ("hf://own/x.gguf", ModelName("own", "x.gguf", is_hub=True)),
        ("qwen3:30b-a3b", ModelName("", "qwen3", "30b-a3b")),
        ("qwen3", ModelName("", "qwen3")),
    ],
)
def test_names(text: str, expected: ModelName) -> None:
    assert parse_name(text) == expected
    assert str(expected) == text


@pytest.mark.parametrize(
    "text",
    [
        "", ".", "..", "/", "~", "model.gguf", "./model.gguf", "../model.gguf", "/models/m.gguf",
        "models/m.gguf", "a/../m.gguf", "a/b/../m.gguf", "a/b/c/../../m.gguf", "a/b/m.bin",
        "a//m.gguf", "a/b//m.gguf", "a b", "a/b c", "a/b:c/d", "a/b:", "a/b@", "a/b@:c", ":b",
        "a--b/c", "a/b--c", "-a/b", "a-/b", ".a/b", "a./b", "a/b:..", "a/b:c:d", "a/b/.m.gguf",
        "a/b/" + "f/" * 8 + "m.gguf", "a" * 97 + "/b", "a/b/" + "m" * 600 + ".gguf", "ä/b", "a/b\n",
        "a/b/m\x00.gguf", "a\\b/c", "C:/models/m.gguf"[2:],
    ],
)  # fmt: skip
def test_what_can_only_be_a_path(text: str) -> None:
    assert parse_name(text) is None
    with pytest.raises(SettingsError, match="is no model's name"):
        require_name(text)


@pytest.mark.parametrize(
    "text",
    [
        "http://a.example/m.gguf", "https://a.example/b", "file:///m.gguf", "s3://b/m.gguf",
        "HF://own/M", "ftp://x", "hf:/own/M", "C:/models/m.gguf", "hf://", "hf://own", "hf:///m",
        "hf://own/../m.gguf", "hf://../x", "hf://own/M/../x.gguf", "hf://own/M/x.bin",
        "hf://own/M/", "hf://own/M:", "hf://user@own/M", "hf://own/M?x=1",
        "hf://own/M/" + "x" * 600,
    ],
)  # fmt: skip
def test_what_is_refused(text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_name(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts_are_no_names(text: str) -> None:
    for whole in (text, f"a/{text}", f"a/b:{text}"):
        assert parse_name(whole) is None or whole.isascii()
    with pytest.raises(SettingsError) as caught:
        parse_name(f"hf://a/{text}/")
    assert str(caught.value).isprintable()


PART = st.from_regex(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,20}[A-Za-z0-9_])?", fullmatch=True).filter(
    lambda text: ".." not in text and "--" not in text and not text.endswith(".gguf")
)


@given(PART, PART, st.one_of(st.just(""), PART), st.one_of(st.just(""), PART), st.booleans())
def test_a_name_is_read_as_it_was_written(
    owner: str, model: str, tag: str, revision: str, is_hub: bool
) -> None:
    name = ModelName(owner, model, tag, revision=revision, is_hub=is_hub)
    assert parse_name(str(name)) == name
    file = ModelName(owner, model, file=f"{tag or 'x'}/m.gguf", revision=revision, is_hub=is_hub)
    assert parse_name(str(file)) == file


@given(st.text(st.sampled_from("ab/.:@-_\\\0 hf:gu"), max_size=40))
def test_no_text_names_what_is_outside(text: str) -> None:
    for whole in (text, f"hf://{text}", f"a/b/{text}.gguf"):
        try:
            name = parse_name(whole)
        except SettingsError:
            continue
        if name is None:
            continue
        assert parse_name(str(name)) == name
        for path in (name.owner or "x", name.model, name.file or "x"):
            parts = PurePosixPath(path).parts
            assert parts
            assert ".." not in parts
            assert not path.startswith("/")
        assert not name.file or is_file_name(name.file)

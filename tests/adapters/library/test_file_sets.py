"""Which files of a repository make a model, and what quantisations stand for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_adapters.library.file_sets import (
    choose,
    file_sets,
    quantisation_of,
    short_name,
)
from dflash_adapters.library.names import ModelName
from dflash_protocol.errors import SettingsError

NAMES = [
    "README.md", "mmproj-F16.gguf", "mmproj-M-BF16.gguf", "M-imatrix.gguf", "M-Q4_K_M.gguf",
    "M-UD-Q4_K_XL.gguf", "M-UD-Q4_K_M.gguf", "M-IQ2_XXS.gguf", "M.q8_0.gguf",
    "BF16/M-BF16-00002-of-00002.gguf", "BF16/M-BF16-00001-of-00002.gguf",
    "M-Q6_K-00001-of-00003.gguf", "M-Q6_K-00003-of-00003.gguf",  # one is missing
    "M-Q5_K-00000-of-00001.gguf", "M-Q5_K-00001-of-99999.gguf",
]  # fmt: skip
SETS = file_sets(NAMES)


def name(tag: str = "", file: str = "") -> ModelName:
    return ModelName("own", "M-GGUF", tag, file)


def test_sets_are_whole_and_in_order() -> None:
    assert sorted(
        [
            ("M-Q4_K_M.gguf",), ("M-UD-Q4_K_XL.gguf",), ("M-UD-Q4_K_M.gguf",),
            ("M-IQ2_XXS.gguf",), ("M.q8_0.gguf",),
            ("BF16/M-BF16-00001-of-00002.gguf", "BF16/M-BF16-00002-of-00002.gguf"),
        ]
    ) == SETS  # fmt: skip


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("M-Q4_K_M.gguf", "Q4_K_M"), ("M.q8_0.gguf", "q8_0"), ("M-IQ2_XXS.gguf", "IQ2_XXS"),
        ("BF16/M-BF16-00001-of-00002.gguf", "BF16"), ("M-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("gpt-oss-20b-mxfp4.gguf", "mxfp4"), ("M-MXFP4_MOE.gguf", "MXFP4_MOE"),
        ("M.i1-IQ3_M.gguf", "i1-IQ3_M"), ("M-TQ1_0.gguf", "TQ1_0"), ("M-F16.gguf", "F16"),
        ("Qwen3-30B-A3B.gguf", ""), ("model.gguf", ""), ("Q4_K_M.gguf", "Q4_K_M"),
    ],
)  # fmt: skip
def test_quantisations(file: str, expected: str) -> None:
    assert quantisation_of(file) == expected


@pytest.mark.parametrize(
    ("tag", "expected"),
    [
        ("Q4_K_M", "M-Q4_K_M.gguf"), ("q4_k_m", "M-Q4_K_M.gguf"), ("Q8_0", "M.q8_0.gguf"),
        ("Q4_K_XL", "M-UD-Q4_K_XL.gguf"), ("UD-Q4_K_M", "M-UD-Q4_K_M.gguf"),
        ("bf16", "BF16/M-BF16-00001-of-00002.gguf"), ("", "M-Q4_K_M.gguf"),
    ],
)  # fmt: skip
def test_a_quantisation_stands_for_one_model(tag: str, expected: str) -> None:
    assert choose(SETS, name(tag))[0] == expected


@pytest.mark.parametrize("tag", ["Q6_K", "Q5_K", "K_M", "M", "Q3_K_S"])
def test_what_stands_for_none_lists_what_there_is(tag: str) -> None:
    with pytest.raises(SettingsError, match="there is no such model; own/M-GGUF has BF16/M-BF16"):
        choose(SETS, name(tag))


def test_a_shard_stands_for_its_model() -> None:
    assert choose(SETS, name(file=SETS[0][1])) == SETS[0]
    with pytest.raises(SettingsError, match="no such model"):
        choose(SETS, name(file="M-Q6_K-00001-of-00003.gguf"))


def test_a_name_without_a_quantisation() -> None:
    assert choose([("x.gguf",)], name()) == ("x.gguf",)
    with pytest.raises(SettingsError, match=r"no such model; own/M-GGUF has a-Q8_0.gguf, b-Q2_K"):
        choose([("a-Q8_0.gguf",), ("b-Q2_K.gguf",)], name())
    with pytest.raises(SettingsError, match="has no complete GGUF model"):
        choose([], name())


def test_several_of_one_quantisation_are_told() -> None:
    sets = file_sets(f"{each}-Q8_0.gguf" for each in "abcdefghijklmnop")
    with pytest.raises(SettingsError, match=r"stands for several.* and 4 more"):
        choose(sets, name("Q8_0"))
    assert short_name("own/M", sets[0], sets) == "own/M/a-Q8_0.gguf"


PIECES = st.sampled_from(
    ["M", "-", "Q4_K_M", "Q8_0", "UD-", "/", "-00001-of-00002", "-00002-of-00002", ".", ".gguf"]
)


@given(st.lists(st.lists(PIECES, max_size=6).map("".join), max_size=8))
def test_short_names_stand_for_what_they_name(names: list[str]) -> None:
    sets = file_sets({each + ".gguf" for each in names})
    for each in sets:
        short = short_name("own/M", each, sets).removeprefix("own/M")
        asked = name(tag=short[1:]) if short.startswith(":") else name(file=short[1:])
        assert choose(sets, asked) == each

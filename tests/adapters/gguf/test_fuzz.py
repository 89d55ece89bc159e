"""Damaged files: whatever the damage, a ModelFileError or a file that can be used, and soon."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.quant import TensorType, dequantise
from dflash_adapters.text.tokenizer import load_tokenizer
from dflash_protocol.errors import ModelFileError
from support import gguf_builder as raw
from support.examples import examples
from support.gguf_builder import sound_file
from support.random_models import byte_characters

_INTEGERS = {TensorType.I8, TensorType.I16, TensorType.I32, TensorType.I64}
_SECONDS_PER_CASE = 0.5

# Numbers at which arithmetic on sizes goes wrong.
_NUMBERS = [0, 1, 7, 31, 2**7, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40]
_NUMBERS += [2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 8, 2**64 - 1]


def whole_model() -> bytes:
    """A file with something of everything: all value types, a tokenizer, several tensor types."""
    builder = sound_file()
    for type_id in (raw.UINT8, raw.INT8, raw.UINT16, raw.INT16, raw.FLOAT32, raw.BOOL):
        builder.add(f"n.{type_id}", raw.scalar(type_id, 1))
    for type_id in (raw.UINT64, raw.INT64, raw.FLOAT64):
        builder.add(f"n.{type_id}", raw.scalar(type_id, 1)).add(
            f"m.{type_id}", raw.array(type_id, [1, 2])
        )
    tokens = [*byte_characters(), "he", "hel", "<|im_end|>"]
    builder.add("tokenizer.ggml.model", raw.string("gpt2"))
    builder.add("tokenizer.ggml.pre", raw.string("qwen2"))
    builder.add("tokenizer.ggml.tokens", raw.strings(tokens))
    builder.add("tokenizer.ggml.token_type", raw.array(raw.INT32, [1] * (len(tokens) - 1) + [3]))
    builder.add("tokenizer.ggml.merges", raw.strings(["h e", "he l"]))
    builder.add("tokenizer.ggml.eos_token_id", raw.scalar(raw.UINT32, len(tokens) - 1))
    builder.add("tokenizer.chat_template", raw.string("{{ messages[0].content }}"))
    builder.add_tensor("blk.0.exps", [256, 2, 3], TensorType.Q4_K, bytes(range(144)) * 6)
    builder.add_tensor("blk.0.small", [64], TensorType.NVFP4, bytes(36))
    return builder.build()


MODEL = whole_model()
# Damage to the tables says more than damage to the vocabulary, which is most of the file.
_TABLE_END = MODEL.rindex(b"blk.0.small") + 40
_TABLES = [*range(420), *range(MODEL.index(b"tokenizer.ggml.token_type"), _TABLE_END)]

_places = st.sampled_from(_TABLES) | st.integers(0, len(MODEL) - 1)
_bytes = st.builds(lambda at, data: (at, data), _places, st.binary(min_size=1, max_size=9))
_numbers = st.builds(
    lambda at, number, width: (at, struct.pack("<Q", number)[:width]),
    _places,
    st.sampled_from(_NUMBERS) | st.integers(0, 2**64 - 1),
    st.sampled_from([1, 2, 4, 8]),
)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """The model with some bytes or numbers replaced, a stretch removed or doubled, or cut."""
    data = bytearray(MODEL)
    for at, replacement in draw(st.lists(_bytes | _numbers, max_size=4)):
        data[at : at + len(replacement)] = replacement
    if draw(st.booleans()):
        start, length = draw(_places), draw(st.integers(0, 64))
        stretch = data[start : start + length] * draw(st.sampled_from([0, 2, 50]))
        data[start : start + length] = stretch
    if draw(st.booleans()):
        del data[draw(st.integers(0, len(data))) :]
    return bytes(data)


def use_everything(path: Path) -> None:
    """Open a file and ask for all it has."""
    with GgufFile.open(path) as file:
        getters: list[Callable[[str], object]] = [
            *(file.get_uint, file.get_float, file.get_bool, file.get_str),
            *(file.get_uint_array, file.get_float_array, file.array_length),
            lambda key: list(file.strings(key)),
        ]
        for key, getter in product(list(file._values), getters):
            check_message(refusal_of(partial(getter, key)))
        for name, info in file.tensors.items():
            data = file.tensor_bytes(name)
            assert data.size == info.num_bytes == info.num_rows * info.row_bytes
            if info.tensor_type not in _INTEGERS:
                assert dequantise(data, info.tensor_type, info.shape).shape == info.shape
            file.advise_willneed(info.shard_index, info.offset_bytes, info.num_bytes)
        assert len(file.identity()) == 64
        tokenizer = load_tokenizer(file)
        if tokenizer is not None:
            tokenizer.encode("hello <|im_end|>")
            tokenizer.decode(range(tokenizer.vocab_size))


def refusal_of(action: Callable[[], object]) -> ModelFileError | None:
    try:
        action()
    except ModelFileError as error:
        return error
    return None


def check_message(error: ModelFileError | None) -> None:
    assert error is None or "\n" not in str(error)


def timed_refusal(path: Path) -> tuple[ModelFileError | None, float]:
    start = time.process_time()
    error = refusal_of(lambda: use_everything(path))
    return error, time.process_time() - start


def check(path: Path, data: bytes) -> None:
    """The file is refused or can be used, soon; and a sound file opens afterwards."""
    path.write_bytes(data)
    error, seconds = timed_refusal(path)
    check_message(error)
    if seconds > _SECONDS_PER_CASE:  # once may be the garbage collector's turn
        _, seconds = timed_refusal(path)
        assert seconds <= _SECONDS_PER_CASE
    with GgufFile.open(path.with_name("sound.gguf")) as file:
        assert file.get_uint("a.uint") == 7


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    sound_file().write(folder / "sound.gguf")
    return folder / "damaged.gguf"


def test_the_undamaged_file_can_be_used(path: Path) -> None:
    path.write_bytes(MODEL)
    use_everything(path)
    with GgufFile.open(path) as file:
        assert load_tokenizer(file) is not None


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=damaged())
def test_a_damaged_file_is_refused_or_usable(path: Path, data: bytes) -> None:
    check(path, data)


@examples(100)
@given(data=st.binary(max_size=300))
def test_noise_after_the_magic_is_refused_or_usable(path: Path, data: bytes) -> None:
    check(path, b"GGUF" + data)
    check(path, MODEL[:24] + data)


# In parts, so that none takes as long as a test that hangs.


@pytest.mark.slow
@pytest.mark.parametrize("part", range(12))
def test_a_damaged_file_is_refused_or_usable_however_long_one_tries(path: Path, part: int) -> None:
    @seed(part)
    @settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(data=damaged())
    def try_many(data: bytes) -> None:
        check(path, data)

    try_many()


@pytest.mark.slow
@pytest.mark.parametrize("number", _NUMBERS)
def test_a_number_that_goes_wrong_is_refused_or_usable_at_every_place(
    path: Path, number: int
) -> None:
    for at, width in product(_TABLES, (4, 8)):
        data = bytearray(MODEL)
        data[at : at + width] = struct.pack("<Q", number)[:width]
        check(path, bytes(data))

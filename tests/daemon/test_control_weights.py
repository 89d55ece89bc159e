"""What a daemon answers to a parent that compares weights with it, and when its file is touched."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from dflash_adapters.gguf import weight_check
from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.gguf.watch import LOOK_S
from dflash_adapters.gguf.weight_check import WeightCheck
from dflash_protocol.errors import ProtocolError
from dflash_protocol.wire.messages import COMPARING, Bye, Hello, Progress, Refused, Welcome
from dflash_protocol.wire.messages import encode_header as encoded
from support.control_rig import OWNED, Daemon

pytestmark = pytest.mark.asyncio

NONCE = "c3" * 16


def others_answer(daemon: Daemon, path: Path, nonce: str = NONCE) -> str:
    """What a parent finds in a file of its own."""
    with GgufFile.open(path) as file:
        return WeightCheck(file, daemon.host.spec.moe).answer(OWNED, bytes.fromhex(nonce))


async def test_a_parent_with_the_same_file_needs_no_answer(daemon: Daemon) -> None:
    welcome = await daemon.parent().hello()
    assert welcome.file_stamp == daemon.file_stamp
    assert welcome.blocks_digest == ""


async def test_a_parent_with_another_file_is_told_at_once_and_answered(
    daemon: Daemon, tmp_path: Path
) -> None:
    copy = Path(shutil.copyfile(daemon.host.model_path, tmp_path / "copy.gguf"))
    parent = daemon.parent()
    daemon.backend.gate.clear()
    await parent.say_hello(nonce=NONCE, file_stamp="another")
    assert await parent.expect(Progress) == Progress(COMPARING, 0, 1), "before anything is loaded"
    daemon.backend.gate.set()
    welcome = await parent.expect(Welcome, skipping=(Progress,))
    assert welcome.blocks_digest == others_answer(daemon, copy)
    assert welcome.file_stamp == daemon.file_stamp
    again = await daemon.parent().hello(nonce="d4" * 16, file_stamp="another")
    assert again.blocks_digest == others_answer(daemon, copy, "d4" * 16)
    assert again.blocks_digest != welcome.blocks_digest


@pytest.mark.parametrize("nonce", ["c3", "zz" * 16, "c3" * 4000])
async def test_what_is_no_nonce_is_refused(daemon: Daemon, nonce: str) -> None:
    refused = await daemon.parent().refused_hello(nonce=nonce, file_stamp="another")
    assert refused.code == "malformed"
    await daemon.parent().assert_welcome()


async def test_an_older_parent_is_served_and_named_in_the_log(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", logger="dflash_daemon")
    welcome = await daemon.parent().hello(nonce="", file_stamp="")
    assert welcome.blocks_digest == ""
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "weights" in record.getMessage()
    version1 = await daemon.parent().hello(versions=(1,))
    assert (version1.version, version1.file_stamp) == (1, "")


async def test_full_digests_are_exchanged_and_another_one_is_refused(daemon: Daemon) -> None:
    ours = "aa" * 32
    parent = daemon.parent()
    welcome = await parent.hello(file_digest="bb" * 32)
    assert welcome.file_digest == "", "not known yet"
    assert (await parent.ping(welcome.link_id)).file_digest == ""
    daemon.host.weights._file.watch.keep_full_digest(ours)
    assert (await parent.ping(welcome.link_id)).file_digest == ours
    assert (await daemon.parent().hello(file_digest=ours)).file_digest == ours
    refused = await daemon.parent().refused_hello(file_digest="bb" * 32)
    assert refused.code == "weights"
    assert ours[:16] in refused.reason
    assert "bb" * 8 in refused.reason


async def test_a_file_that_is_touched_is_served_and_one_overwritten_is_not(
    own_copy: Daemon,
) -> None:
    daemon, path = own_copy, own_copy.host.model_path
    welcome = await daemon.parent().hello()
    path.chmod(0o400)
    now = await daemon.parent().hello(file_stamp=daemon.host.weights.stamp())
    assert now.file_stamp != welcome.file_stamp
    assert now.blocks_digest == ""
    path.chmod(0o600)
    before, content = path.stat(), bytearray(path.read_bytes())
    _, place = daemon.host.spec.moe.layers[0].up.place_of(3)
    content[place : place + 20_000] = bytes(20_000)
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    refused = await daemon.parent().refused_hello()
    assert refused.code == "file"
    assert "written" in refused.reason


async def test_nothing_is_answered_from_a_file_that_was_overwritten(own_copy: Daemon) -> None:
    daemon, path = own_copy, own_copy.host.model_path
    daemon.service._check_file = daemon.host.poll
    welcome = await daemon.parent().hello()
    await daemon.sums(welcome, 1)
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    time.sleep(LOOK_S)
    failed = await daemon.compute(welcome)
    assert isinstance(failed, ProtocolError)
    assert failed.code == "file"
    assert "written" in str(failed)


async def test_a_parent_that_left_while_blocks_were_hashed_leaves_nothing_loaded_for_it(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: WeightCheck, *arguments: object) -> str:
        raise OSError("the disk is gone")

    with monkeypatch.context() as broken:
        broken.setattr(weight_check.WeightCheck, "answer", fail)
        refused = await daemon.parent().refused_hello(nonce=NONCE, file_stamp="another")
    assert "the disk is gone" in refused.reason
    assert not any(each.num_users for each in daemon.host.store._placements.values())
    await daemon.parent().assert_welcome()


async def test_a_hello_of_before_has_none_of_these_fields() -> None:
    """And a daemon of before reads ours: what is at its default is not sent."""
    hello = Hello((1, 2), "m", "d", "p", "c", 1)
    for header in (encoded(hello), encoded(Bye("x")), encoded(Refused("a", "b"))):
        assert b"nonce" not in header
        assert b"file_" not in header

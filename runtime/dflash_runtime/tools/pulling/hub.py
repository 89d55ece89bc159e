"""What is asked of the hub: which files a repository has, and a file's bytes from a place on.

Address, token, proxies and offline mode are the hub's library's, which reads them from its own
variables. Sizes and hashes of the listing are what is held against what comes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from dflash_adapters.library.hub_cache import DEFAULT_REVISION
from dflash_adapters.library.names import ModelName, is_file_name
from dflash_adapters.library.pulled_files import HASH
from dflash_protocol.errors import PullFailed, one_line

if TYPE_CHECKING:
    import httpx2

MOST_FILE_BYTES = 50_000_000_000
"""Of a file that the hub gives by HTTP; larger ones need the library's own transfer."""

_MOST_LISTING_BYTES = 32 << 20
_MOST_BYTES = 1 << 50
_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})", re.ASCII)
_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
_LONGEST_REASON = 200


class HubBusy(PullFailed):
    """The hub, or the way to it, failed in a way that may pass."""


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository; `blob` is its SHA-256 or, of small files, Git's SHA-1 of it."""

    name: str
    size_bytes: int
    blob: str


@dataclass(frozen=True, slots=True)
class Listing:
    """A repository's GGUF files at a commit, by name."""

    commit: str
    files: Mapping[str, HubFile]


class Hub:
    """The hub that the library's environment names.

    `timeout_s`: of one wait, the library's.
    """

    def __init__(self) -> None:
        # Late: all this takes half a second.
        from huggingface_hub import constants
        from huggingface_hub.utils import build_hf_headers, get_session

        from dflash_protocol import __version__

        self.timeout_s = float(constants.HF_HUB_DOWNLOAD_TIMEOUT)
        self._endpoint: str = constants.ENDPOINT
        self._session: httpx2.Client = get_session()
        self._headers: dict[str, str] = build_hf_headers(
            library_name="dflash-moe", library_version=__version__
        )
        # Sizes are of the files, not of what an encoding makes of them.
        self._headers["Accept-Encoding"] = "identity"

    def listing(self, name: ModelName) -> Listing:
        """The files of a name's repository, at its revision.

        Raises: PullFailed if there is none, it may not be read, or the hub cannot be understood.
        """
        revision = quote(name.revision or DEFAULT_REVISION, safe="")
        path = f"/api/models/{name.repository}/revision/{revision}?blobs=true"
        content = bytearray()
        with self._opened(path, name, {}) as response:
            for piece in response.iter_raw():
                content += piece
                if len(content) > _MOST_LISTING_BYTES:
                    raise PullFailed(f"{name}: the hub's list of files is too long")
        return read_listing(content, name.repository)

    @contextmanager
    def opened(
        self, name: ModelName, commit: str, file: HubFile, *, from_byte: int
    ) -> Iterator[tuple[int, Iterator[bytes]]]:
        """A file's bytes, in pieces, and which of its bytes they begin with: `from_byte`, or 0 if
        the hub gives whole files only.

        Raises: HubBusy, PullFailed.
        """
        path = f"/{name.repository}/resolve/{commit}/{quote(file.name)}"
        headers = {"Range": f"bytes={from_byte}-"} if from_byte else {}
        with self._opened(path, name, headers) as response:
            begins_at = _begin(response, file, from_byte)
            yield begins_at, response.iter_raw()

    @contextmanager
    def _opened(
        self, path: str, name: ModelName, headers: Mapping[str, str]
    ) -> Iterator[httpx2.Response]:
        import httpx2

        try:
            with self._session.stream(
                "GET",
                self._endpoint + path,
                headers={**self._headers, **headers},
                timeout=httpx2.Timeout(self.timeout_s),
            ) as response:
                _check_status(response, name)
                yield response
        except httpx2.TimeoutException as error:
            raise HubBusy(f"the hub did not answer within {self.timeout_s:.0f} s") from error
        except (httpx2.UnsupportedProtocol, httpx2.TooManyRedirects, httpx2.InvalidURL) as error:
            raise PullFailed(f"the hub cannot be used: {_reason(error)}") from error
        except httpx2.HTTPError as error:
            # docs: no network, a proxy, or `HF_ENDPOINT`; what has come is kept
            raise HubBusy(f"the hub cannot be reached: {_reason(error)}") from error
        except ConnectionError as error:  # the library's offline mode, too
            raise PullFailed(f"the hub cannot be reached: {_reason(error)}") from error


def read_listing(content: bytes | bytearray, repository: str) -> Listing:
    """A repository's list of files, as the hub sends it. Files whose names lead anywhere else than
    below the repository's folder are left out.

    Raises: PullFailed if it cannot be understood.
    """
    try:
        return _listing(json.loads(content))
    except (ValueError, RecursionError):
        # docs: what `HF_ENDPOINT` names is no hub, or a proxy answers in its place
        reason = f"{repository}: the hub's list of files cannot be understood"
        raise PullFailed(reason) from None


def _check_status(response: httpx2.Response, name: ModelName) -> None:
    status = response.status_code
    if status in (200, 206):
        return
    if status in _TRANSIENT:
        raise HubBusy(f"{name}: the hub answers {status}")
    if status == 416:
        raise PullFailed(f"{name}: the hub has fewer bytes of the file than its list says")
    code = response.headers.get("x-error-code", "")
    if status in (401, 403):
        if code == "GatedRepo":
            # docs: accept the model's terms on its page, and log in with `hf auth login`, or set
            # `HF_TOKEN`
            raise PullFailed(f"{name}: its owner asks for terms to be accepted, and for a token")
        # docs: the hub says the same of both; log in with `hf auth login`, or set `HF_TOKEN`
        raise PullFailed(f"{name}: the hub has no such model, or a token is needed (HF_TOKEN)")
    if status == 404:
        what = {"RevisionNotFound": "revision", "EntryNotFound": "file"}.get(code, "model")
        raise PullFailed(f"{name}: the hub has no such {what}")
    raise PullFailed(f"{name}: the hub answers {status}")


def _begin(response: httpx2.Response, file: HubFile, from_byte: int) -> int:
    """Which byte of a file an answer begins with.

    Raises: PullFailed if it says another size of the file than its list.
    """
    begins_at, total = 0, None
    if response.status_code == 206:
        match = _RANGE.fullmatch(response.headers.get("content-range", ""))
        if match is None or int(match[1]) != from_byte:
            raise PullFailed(f"{file.name}: the hub sends another part than was asked for")
        begins_at, total = from_byte, int(match[3])
    else:
        length = response.headers.get("content-length", "")
        if length.isascii() and length.isdigit() and len(length) < 20:
            total = int(length)
    if total is not None and total != file.size_bytes:
        raise PullFailed(
            f"{file.name}: the hub sends {total:,} bytes, its list says {file.size_bytes:,}"
        )
    return begins_at


def _listing(record: Any) -> Listing:
    """Raises: ValueError."""
    if not isinstance(record, dict):
        raise ValueError("not an object")
    commit, siblings = record.get("sha"), record.get("siblings")
    if not (isinstance(commit, str) and _COMMIT.fullmatch(commit) and isinstance(siblings, list)):
        raise ValueError("neither commit nor files")
    files = {}
    for each in siblings:
        name = each.get("rfilename") if isinstance(each, dict) else None
        if isinstance(name, str) and is_file_name(name):
            files[name] = _file(name, each)
    return Listing(commit, files)


def _file(name: str, record: dict[str, Any]) -> HubFile:
    """Raises: ValueError."""
    large = record.get("lfs")
    blob = large.get("sha256") if isinstance(large, dict) else record.get("blobId")
    size = large.get("size") if isinstance(large, dict) else record.get("size")
    if not (isinstance(size, int) and isinstance(blob, str)) or not 0 <= size <= _MOST_BYTES:
        raise ValueError("a file without size or hash")
    if not HASH.fullmatch(blob):
        raise ValueError("a file without size or hash")
    return HubFile(name, size, blob)


def _reason(error: Exception) -> str:
    return one_line(str(error) or type(error).__name__, _LONGEST_REASON)

# SPDX-License-Identifier: Apache-2.0
"""Reads a corpus: folders, globs, lists of urls, JSONL of requests, tars. Each may be hostile.

Nothing is unpacked to disk, links out of a folder are not followed, and only regular files are
opened.
"""

import glob
import mimetypes
import os
import stat
import tarfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple
from urllib.parse import urlsplit

from ecshare.router.media.identity import is_inline
from ecshare.store.errors import ConfigError

MIB = 1 << 20
_MAX_URL_BYTES = 8192
# The largest extension header of a tar's member, such as a long name: tarfile reads it into memory.
_MAX_TAR_FIELD_BYTES = 64 * 1024
_MAX_TAR_FIELDS = 1000
_TAR_FIELDS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
_KINDS = {"image": "image_url", "video": "video_url", "audio": "audio_url"}
_IS_PACKED = (".gz", ".tgz", ".bz2", ".xz", ".zst", ".zip")


class WarmError(Exception):
    """A sample cannot be read, or a server does not process it; says why."""


class Medium(NamedTuple):
    """A medium whose bytes are on this host."""

    where: str
    """The file, with the line or the member, for messages. It may contain any character."""
    kind: str
    """The field that holds it in a chat request, such as `image_url`."""
    num_bytes: int
    read: Callable[[], bytes]
    """Returns the bytes; raises OSError, WarmError."""


class Url(NamedTuple):
    """A medium at a url."""

    where: str
    kind: str
    url: str


class Line(NamedTuple):
    """A request, as JSON."""

    where: str
    json: bytes


class Unusable(NamedTuple):
    """A sample that cannot be used, and why."""

    where: str
    reason: str


class Other(NamedTuple):
    """A file that is not a medium."""

    where: str


Sample = Medium | Url | Line | Unusable | Other


def check_corpus(given: Iterable[str]) -> None:
    """Check that each argument may name a corpus.

    Raises:
        ConfigError: an argument does not; names it.
    """
    for text in given:
        path = Path(text)
        if text.lower().endswith(_IS_PACKED):
            raise ConfigError(f"corpus {text!r}: unpack it first; of archives only .tar is read")
        if glob.has_magic(text) and not path.exists():
            if next(glob.iglob(text), None) is None:
                raise ConfigError(f"corpus {text!r}: no file matches")
        elif not path.exists():
            raise ConfigError(f"corpus {text!r}: there is no such file or folder")
        elif not path.is_dir() and not _is_corpus(text):
            raise ConfigError(
                f"corpus {text!r}: neither a folder, a medium, .jsonl (requests), .txt (urls) nor "
                ".tar (by its name)"
            )


def samples(given: Iterable[str], max_bytes: int) -> Iterator[Sample]:
    """Yield the samples of a corpus; `Unusable` for media larger than `max_bytes`, and for files
    that cannot be read.

    Belongs to one thread at a time; `Medium.read` to any.
    """
    for text in given:
        if os.path.isdir(text):
            yield from _folder(text, max_bytes)
        elif os.path.exists(text):
            yield from _file(text, text, max_bytes)
        else:
            root = _root_of(text)
            for path in glob.iglob(text):
                if _is_corpus(path) and not os.path.isdir(path):
                    yield from _of_root(root, path, partial(_file, path, path, max_bytes))


def media_kind(name: str) -> str | None:
    """Return the field of a request for a file or url of this name; None: it is not a medium."""
    kind, _ = mimetypes.guess_type(name)
    return _KINDS.get((kind or "").partition("/")[0])


def _is_corpus(path: str) -> bool:
    return path.endswith((".jsonl", ".txt", ".tar")) or media_kind(path) is not None


def _root_of(pattern: str) -> str:
    """Return the folder before the first wildcard."""
    parts = pattern.split("/")
    plain = next(n for n, part in enumerate(parts) if glob.has_magic(part))
    return "/".join(parts[:plain]) or ("/" if pattern.startswith("/") else ".")


def _folder(root: str, max_bytes: int) -> Iterator[Sample]:
    """Yield the media of a folder and its subfolders. Links to folders are not followed."""
    left = [root]
    while left:
        folder = left.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        left.append(entry.path)
                    elif media_kind(entry.name) is None:
                        yield Other(entry.path)
                    else:
                        read = partial(_medium, entry.path, max_bytes)
                        yield from _of_root(root, entry.path, read)
        except OSError as exc:
            yield Unusable(folder, str(exc.strerror))


def _of_root(root: str, path: str, read: Callable[[], Iterable[Sample]]) -> Iterator[Sample]:
    """Yield what `read` returns, unless `path` is a link that leads out of `root`."""
    inside = os.path.join(os.path.realpath(root), "")
    if os.path.realpath(path).startswith(inside):
        yield from read()
    else:
        yield Unusable(path, "a link out of its folder is not followed")


def _file(path: str, where: str, max_bytes: int) -> Iterator[Sample]:
    try:
        if path.endswith(".jsonl"):
            yield from _requests(path, max_bytes)
        elif path.endswith(".txt"):
            yield from _urls(path)
        elif path.endswith(".tar"):
            yield from _members(path, max_bytes)
        else:
            yield from _medium(path, max_bytes)
    except OSError as exc:
        yield Unusable(where, exc.strerror or str(exc))


def _regular(path: str) -> BinaryIO:
    """Open a regular file.

    Raises:
        OSError: it is not a regular file, or cannot be opened.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(0, "not a regular file")
    return open(path, "rb")  # noqa: SIM115 — the caller closes it


def _medium(path: str, max_bytes: int) -> Iterator[Sample]:
    def read() -> bytes:
        with _regular(path) as file:
            body = file.read(max_bytes + 1)
        if len(body) > max_bytes:
            raise WarmError(_too_large(len(body), max_bytes))
        return body

    try:
        about = os.stat(path)
    except OSError as exc:
        yield Unusable(path, str(exc.strerror))
        return
    yield _checked(path, path, about.st_size, max_bytes, read)


def _checked(
    where: str, name: str, num_bytes: int, max_bytes: int, read: Callable[[], bytes]
) -> Sample:
    kind = media_kind(name)
    if kind is None:
        return Other(where)
    if num_bytes > max_bytes:
        return Unusable(where, _too_large(num_bytes, max_bytes))
    if num_bytes == 0:
        return Unusable(where, "the file is empty")
    return Medium(where, kind, num_bytes, read)


def _too_large(num_bytes: int, max_bytes: int) -> str:
    return f"larger than --max-media-mb: {num_bytes / MIB:,.1f} of {max_bytes / MIB:,.1f} MiB"


def _lines(file: BinaryIO, max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield the number of each line that is not blank, and the line; None if it is too long."""
    number = 0
    while line := file.readline(max_bytes + 1):
        number += 1
        if len(line) <= max_bytes:
            if line.strip():
                yield number, line
            continue
        yield number, None
        while line and not line.endswith(b"\n"):
            line = file.readline(MIB)


def _requests(path: str, max_bytes: int) -> Iterator[Sample]:
    # The media of a line may be inline, as base64.
    most = max_bytes * 4 // 3 + MIB
    with _regular(path) as file:
        for number, line in _lines(file, most):
            where = f"{path}:{number}"
            if line is None:
                yield Unusable(where, f"the line is larger than {most / MIB:,.1f} MiB")
            else:
                yield Line(where, line)


def _urls(path: str) -> Iterator[Sample]:
    with _regular(path) as file:
        for number, line in _lines(file, _MAX_URL_BYTES):
            where = f"{path}:{number}"
            if line is None:
                yield Unusable(where, f"the line is longer than {_MAX_URL_BYTES:,} bytes")
            elif not line.startswith(b"#"):
                yield _url(where, line)


def _url(where: str, line: bytes) -> Sample:
    try:
        url = line.decode().strip()
        parts = urlsplit(url)
    except ValueError as exc:
        return Unusable(where, f"no url: {exc}")
    if is_inline(url) or parts.scheme not in ("http", "https") or not parts.hostname:
        return Unusable(where, "no url: it must begin with http:// or https://")
    return Url(where, media_kind(parts.path) or "image_url", url)


class _Member(tarfile.TarInfo):
    """A header of a tar. The size of its extension headers is bounded."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_Member":
        """Read a header.

        Raises:
            WarmError: an extension header, such as a long name, is too large.
        """
        member = super().frombuf(buf, encoding, errors)
        if member.type in _TAR_FIELDS and member.size > _MAX_TAR_FIELD_BYTES:
            raise WarmError("the header of a member is larger than 64 KiB")
        _check_size(member)
        return member


def _check_size(member: tarfile.TarInfo) -> None:
    """Check that the next member follows this one: otherwise reading would not end.

    Raises:
        WarmError: it does not.
    """
    if member.size < 0:
        raise WarmError("a member has a negative size")


def _members(path: str, max_bytes: int) -> Iterator[Sample]:
    """Yield the media in a tar. Regular members are read in place; links, devices and sparse files
    are left out."""
    with _regular(path) as file:
        held = _Descriptor(os.dup(file.fileno()))
        try:
            with tarfile.open(fileobj=file, mode="r:", tarinfo=_Member) as tar:
                while (member := tar.next()) is not None:
                    tar.members = []  # type: ignore[attr-defined]  # it would keep all of them
                    _check_size(member)
                    if len(tar.pax_headers) > _MAX_TAR_FIELDS:
                        raise WarmError("it has too many global headers")  # noqa: TRY301
                    yield _sample(path, member, held, max_bytes)
        except (tarfile.TarError, WarmError, ValueError, RecursionError) as exc:
            yield Unusable(path, f"the tar cannot be read any further: {exc}")


class _Descriptor:
    """A file descriptor that is closed once no sample reads from it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


def _sample(path: str, member: tarfile.TarInfo, held: _Descriptor, max_bytes: int) -> Sample:
    where, begin, size = f"{path}:{member.name}", member.offset_data, member.size
    if not member.isreg() or member.issparse():
        return Other(where)

    def read() -> bytes:
        body = os.pread(held.number, size, begin)
        if len(body) < size:
            raise WarmError("the tar ends within it")
        return body

    return _checked(where, member.name, size, max_bytes, read)

# SPDX-License-Identifier: Apache-2.0
"""Corpora, most of them hostile."""

import io
import os
import tarfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from ecshare.warm.corpus import Line, Medium, Other, Sample, Unusable, Url, WarmError, samples

LIMIT = 1000


def read(*corpus: str | Path) -> list[Sample]:
    return list(samples(map(str, corpus), LIMIT))


def kinds(found: Iterable[Sample]) -> dict[str, str]:
    return {each.where.rpartition("/")[2]: type(each).__name__ for each in found}


def test_links_out_of_a_folder_are_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (tmp_path / "secret.png").write_bytes(b"secret")
    (folder / "a.png").write_bytes(b"a")
    (folder / "inside.png").symlink_to(folder / "a.png")
    (folder / "outside.png").symlink_to(tmp_path / "secret.png")
    (folder / "broken.png").symlink_to(folder / "missing.png")
    (folder / "parent").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe.png")
    for found in (read(folder), read(f"{folder}/*.png")):
        media = [each for each in found if isinstance(each, Medium)]
        assert [each.read() for each in media] == [b"a", b"a"]
        wrong = {each.where.rpartition("/")[2] for each in found if isinstance(each, Unusable)}
        assert wrong >= {"outside.png", "broken.png", "pipe.png"}


def test_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lines.jsonl")
    (found,) = read(tmp_path / "lines.jsonl")
    assert isinstance(found, Unusable)


def test_large_and_empty_media_are_named(tmp_path: Path) -> None:
    (tmp_path / "large.png").write_bytes(bytes(LIMIT + 1))
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "grows.png").write_bytes(b"a")
    found = {each.where.rpartition("/")[2]: each for each in read(tmp_path)}
    large, grows = found["large.png"], found["grows.png"]
    assert isinstance(large, Unusable)
    assert "--max-media-mb" in large.reason
    assert isinstance(found["empty.png"], Unusable)
    assert isinstance(grows, Medium)
    (tmp_path / "grows.png").write_bytes(bytes(LIMIT + 1))
    with pytest.raises(WarmError, match="larger"):
        grows.read()


def test_kind_of_a_medium_follows_from_its_name(tmp_path: Path) -> None:
    for name in ("a.jpg", "b.mp4", "c.wav", "d.bin"):
        (tmp_path / name).write_bytes(b"x")
    media = {each.where[-5:]: each.kind for each in read(tmp_path) if isinstance(each, Medium)}
    assert media == {"a.jpg": "image_url", "b.mp4": "video_url", "c.wav": "audio_url"}


def test_endless_line_is_read_up_to_its_limit(tmp_path: Path) -> None:
    with (tmp_path / "lines.jsonl").open("wb") as file:
        file.write(b"{}\n" + b"x" * (5 << 20) + b"\n{}")
    first, second, third = read(tmp_path / "lines.jsonl")
    assert isinstance(first, Line)
    assert isinstance(second, Unusable)
    assert third == Line(f"{tmp_path}/lines.jsonl:3", b"{}")


def test_lines_that_are_no_urls_are_refused(tmp_path: Path) -> None:
    corpus = tmp_path / "urls.txt"
    lines = [b"https://a.example/x.mp4?y", b"# no", b"file:///etc/passwd", b"data:,x", b"\xff"]
    corpus.write_bytes(b"\n".join([*lines, b"http://[::1", b"http://b.example/" + bytes(9000)]))
    url, *wrong = read(corpus)
    assert url == Url(f"{corpus}:1", "video_url", "https://a.example/x.mp4?y")
    assert [type(each) for each in wrong] == [Unusable] * 5


def member(tar: tarfile.TarFile, name: str, body: bytes = b"", **fields: object) -> None:
    about = tarfile.TarInfo(name)
    about.size = len(body)
    for field, value in fields.items():
        setattr(about, field, value)
    tar.addfile(about, io.BytesIO(body))


def test_only_regular_members_of_a_tar_are_read(tmp_path: Path) -> None:
    path = tmp_path / "t.tar"
    with tarfile.open(path, "w") as tar:
        member(tar, "/etc/absolute.png", b"one")
        member(tar, "../../up.png", b"two")
        member(tar, "link.png", type=tarfile.SYMTYPE, linkname="/etc/passwd")
        member(tar, "hard.png", type=tarfile.LNKTYPE, linkname="../../up.png")
        member(tar, "device.png", type=tarfile.CHRTYPE, devmajor=1, devminor=5)
        member(tar, "large.png", bytes(LIMIT + 1))
        member(tar, "text.txt", b"no medium")
        member(tar, "x" * 300 + ".png", b"three")
    found = read(path)
    assert [each.read() for each in found if isinstance(each, Medium)] == [b"one", b"two", b"three"]
    assert sum(isinstance(each, Other) for each in found) == 4
    assert sum(isinstance(each, Unusable) for each in found) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"t.tar"}


def test_member_of_a_truncated_tar_fails_to_read(tmp_path: Path) -> None:
    path = tmp_path / "t.tar"
    header = tarfile.TarInfo("a.png")
    header.size = 500
    path.write_bytes(header.tobuf() + b"short")
    (medium, *_) = read(path)
    assert isinstance(medium, Medium)
    with pytest.raises(WarmError, match="ends within"):
        medium.read()


def test_tar_header_larger_than_its_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.tar"
    header = tarfile.TarInfo("long")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 1 << 40
    good = tarfile.TarInfo("a.png")
    good.size = 1
    with path.open("wb") as file:
        file.write(good.tobuf() + b"a".ljust(512, b"\0") + header.tobuf())
        file.truncate(1 << 32)  # sparse: it takes no room
    medium, wrong = read(path)
    assert isinstance(medium, Medium)
    assert isinstance(wrong, Unusable)
    assert "header" in wrong.reason


@pytest.mark.parametrize("field", ["header", "pax"])
def test_tar_member_with_a_negative_size_is_refused(tmp_path: Path, field: str) -> None:
    path = tmp_path / "t.tar"
    about = tarfile.TarInfo("a.png")
    if field == "pax":
        about.pax_headers = {"size": "-1024"}
        body = about.tobuf(tarfile.PAX_FORMAT)
    else:
        about.size = -1024
        body = about.tobuf(tarfile.GNU_FORMAT)
    path.write_bytes(body + bytes(1024))
    (wrong,) = read(path)
    assert isinstance(wrong, Unusable)
    assert "negative size" in wrong.reason


def test_tar_of_extension_headers_only_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.tar"
    about = tarfile.TarInfo("x" * 200)
    name = about.tobuf(tarfile.GNU_FORMAT)[:1024]
    path.write_bytes(name * 5000)
    (wrong,) = read(path)
    assert isinstance(wrong, Unusable)


def test_loop_of_links_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"a")
    for name in ("one", "two"):
        (tmp_path / name).symlink_to(tmp_path)
    for corpus in (tmp_path, f"{tmp_path}/**/*.png"):
        assert sum(isinstance(each, Medium) for each in read(corpus)) < 4


def test_file_that_is_not_a_tar_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.tar").write_bytes(b"x" * 2000)
    (wrong,) = read(tmp_path / "t.tar")
    assert isinstance(wrong, Unusable)
    assert kinds([wrong]) == {"t.tar": "Unusable"}

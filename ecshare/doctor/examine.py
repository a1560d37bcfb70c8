# SPDX-License-Identifier: Apache-2.0
"""Finds out why engines do not share: is the store well, and do their facts agree.

Reads what lies in the store and writes one object of its own at a time, which it removes again. It
makes no folder. Nothing in the store is believed: it is shown, bounded and escaped.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

from ecshare.doctor.contents import contents, size
from ecshare.doctor.findings import Finding, Level, printable, words
from ecshare.doctor.options import Stranger, Subject
from ecshare.doctor.trial import fix, missing_folder, try_out
from ecshare.store.config import StoreConfig
from ecshare.store.errors import ConfigError, StoreError
from ecshare.store.hostcache.folder import check_private, default_root, fitting
from ecshare.store.integrity import Integrity, open_integrity
from ecshare.store.keys import Kind
from ecshare.store.objects import ObjectStore
from ecshare.store.open import open_store
from ecshare.store.secrets import masked_url


class _Opened(NamedTuple):
    """A subject whose options are right."""

    subject: Subject
    integrity: Integrity | None
    store: ObjectStore | None
    """None: a folder that is not there."""
    same_as: str
    """The path of an earlier subject that has the same store; else ""."""


async def examine(
    subjects: Sequence[Subject],
    strangers: Sequence[Stranger] = (),
    *,
    write: bool = True,
    sample: int = 20,
) -> AsyncIterator[Finding]:
    """Yield what is found out about the stores of `subjects`, each finding when it is there.

    `strangers`: somebody else's connectors beside them, only named. `write`: try to store objects,
    too. `sample`: how many objects of each namespace to read and verify.

    Raises:
        ConfigError: an option is wrong; names it and the fix. Before the first finding.
    """
    async with AsyncExitStack() as stack:
        opened = []
        for each in _open(subjects):
            opened.append(each)
            if each.store is not None:
                stack.push_async_callback(each.store.close)
        for stranger in strangers:
            yield Finding("options", Level.NOTE, printable(f"{stranger}; left alone"))
        for each in opened:
            async for finding in _examined(each, write=write, sample=sample):
                yield finding


def _open(subjects: Sequence[Subject]) -> Iterator[_Opened]:
    """Open each store once."""
    paths: dict[str, str] = {}
    for subject in subjects:
        config, path = subject
        integrity = open_integrity(config.integrity_key, path)
        first = paths.setdefault(_identity(config), path)
        if first != path:
            yield _Opened(subject, integrity, None, first)
        elif config.folder.startswith("/") and not os.path.exists(config.folder):
            # To open it would make it.
            yield _Opened(subject, integrity, None, "")
        else:
            yield _Opened(subject, integrity, open_store(config, path), "")


def _identity(config: StoreConfig) -> str:
    """What makes two examinations the same."""
    options = json.dumps(config.storage_options, sort_keys=True, default=repr)
    host = f"{config.host_cache_dir}\n{config.host_cache_bytes}"
    return f"{config.store_id()}\n{config.integrity_key}\n{host}\n{options}"


async def _examined(opened: _Opened, *, write: bool, sample: int) -> AsyncIterator[Finding]:
    config, path = opened.subject
    text = f"{path} are well-formed; url {printable(masked_url(config.url))}"
    if opened.same_as:
        yield Finding("options", Level.OK, f"{text}, the store of {opened.same_as}")
        return
    yield Finding("options", Level.OK, text)
    for warning in config.warnings(path):
        yield Finding("options", Level.NOTE, printable(warning))
    if opened.store is None:
        yield missing_folder(config.folder)
        return
    async for finding in _bounded(try_out(opened.store, config, write=write), config):
        yield finding
        if finding.level is Level.PROBLEM:
            return
    for finding in _host(config):
        yield finding
    for kind in Kind:
        found = contents(opened.store, kind, opened.integrity, sample)
        async for finding in _bounded(found, config):
            yield finding
            if finding.topic == "store":
                return


async def _bounded(findings: AsyncIterator[Finding], config: StoreConfig) -> AsyncIterator[Finding]:
    """Pass on `findings`; a store that fails, or is silent for too long, is one more."""
    limit_s = config.call_timeout_s
    try:
        while True:
            async with asyncio.timeout(limit_s):
                finding = await anext(findings)
            yield finding
    except StopAsyncIteration:
        return
    except TimeoutError:
        yield Finding("store", Level.PROBLEM, f"no answer within {limit_s:g} s; is it up?")
    except StoreError as exc:
        yield Finding("store", Level.PROBLEM, f"{words(exc)}; {fix(exc)}")


def _host(config: StoreConfig) -> Iterator[Finding]:
    """Look at the host cache, or at the place where the first engine will make it."""
    named = config.host_cache_dir
    root = Path(named) if named else default_root(config.host_cache_bytes)
    there = next(folder for folder in (root, *root.absolute().parents) if os.path.lexists(folder))
    try:
        _check_usable(root, there)
        limit = size(fitting(there, config.host_cache_bytes))
        free = _free_bytes(there)
        used = sum(path.stat().st_size for path in root.glob("*") if path.is_file())
    except (ConfigError, OSError) as exc:
        yield Finding("host cache", Level.PROBLEM, printable(str(exc)))
        return
    state = f"holds {size(used)} of at most {limit}"
    if there != root:
        state = f"will hold at most {limit}: the first engine makes it"
    text = f"{root} {state}; the disk has {size(free)} free"
    yield Finding("host cache", Level.OK, text)


def _check_usable(root: Path, there: Path) -> None:
    """ConfigError: engines could not use `root`, of which `there` is what exists already."""
    if there == root:
        check_private(root)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(
            f"host_cache_dir: {root} cannot be {'used' if there == root else 'made'}; "
            "name a folder this user may write"
        )


def _free_bytes(folder: Path) -> int:
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize

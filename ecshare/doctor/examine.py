# SPDX-License-Identifier: Apache-2.0
"""Finds out why engines do not share: is the store healthy, and do the engines' facts agree.

It reads the contents of the store. It writes one object of its own at a time, and removes it. It
creates no folder. The contents of the store are not trusted: they are shown bounded and escaped.
"""

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

from ecshare.doctor.contents import contents
from ecshare.doctor.findings import Finding, Level, printable, readable_size
from ecshare.doctor.store_check import advice, check_store, missing_folder
from ecshare.doctor.targets import Remark, Target
from ecshare.store.config import StoreConfig
from ecshare.store.errors import ConfigError, StoreError
from ecshare.store.hostcache.folder import default_root, fitting
from ecshare.store.hostcache.usage import check_private
from ecshare.store.integrity import Integrity, open_integrity
from ecshare.store.keys import Kind
from ecshare.store.objects import ObjectStore
from ecshare.store.open import open_store
from ecshare.store.secrets import masked_url


class _Opened(NamedTuple):
    """A target with valid options."""

    target: Target
    integrity: Integrity | None
    store: ObjectStore | None
    """None: a folder that does not exist."""
    same_as: str
    """The path of an earlier target with the same store, else ""."""


async def examine(
    targets: Sequence[Target],
    remarks: Sequence[Remark] = (),
    *,
    write: bool = True,
    sample: int = 20,
) -> AsyncIterator[Finding]:
    """Yield the findings about the stores of `targets`, each as soon as it is known.

    `remarks`: on the rest of their options; passed on. `write`: also try to store objects.
    `sample`: how many objects of each namespace to read and verify.

    Raises:
        ConfigError: an option is wrong; names it and the fix. Raised before the first finding.
    """
    async with AsyncExitStack() as stack:
        opened = []
        for each in _open(targets):
            opened.append(each)
            if each.store is not None:
                stack.push_async_callback(each.store.close)
        for remark in remarks:
            yield _of_options(remark)
        for each in opened:
            async for finding in _examine(each, write=write, sample=sample):
                yield finding


def _of_options(remark: Remark) -> Finding:
    if remark.is_problem:
        return Finding("options", Level.PROBLEM, printable(str(remark)))
    return Finding("options", Level.NOTE, printable(f"{remark}; not examined"))


def _open(targets: Sequence[Target]) -> Iterator[_Opened]:
    """Open each store once."""
    paths: dict[str, str] = {}
    for target in targets:
        config, path = target
        integrity = open_integrity(config, path)
        first = paths.setdefault(_identity(config), path)
        if first != path:
            yield _Opened(target, integrity, None, first)
        elif config.folder.startswith("/") and not os.path.exists(config.folder):
            # Opening it would create it.
            yield _Opened(target, integrity, None, "")
        else:
            yield _Opened(target, integrity, open_store(config, path), "")


def _identity(config: StoreConfig) -> str:
    """Return a text that is equal for two targets if one examination covers both."""
    options = json.dumps(config.storage_options, sort_keys=True, default=repr)
    host = f"{config.host_cache_dir}\n{config.host_cache_bytes}"
    keys = f"{config.integrity_key}\n{config.accepted_integrity_key}\n{config.integrity_name}"
    return f"{config.store_id()}\n{keys}\n{host}\n{options}"


async def _examine(opened: _Opened, *, write: bool, sample: int) -> AsyncIterator[Finding]:
    config, path = opened.target
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
    async for finding in _bounded(check_store(opened.store, config, write=write), config):
        yield finding
        if finding.level is Level.PROBLEM:
            return
    for finding in _examine_host_cache(config):
        yield finding
    for kind in Kind:
        found = contents(opened.store, kind, opened.integrity, sample)
        async for finding in _bounded(found, config):
            yield finding
            if finding.topic == "store":
                return


async def _bounded(findings: AsyncIterator[Finding], config: StoreConfig) -> AsyncIterator[Finding]:
    """Pass on `findings`. A store that fails, or does not answer in time, is one more finding."""
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
        yield Finding("store", Level.PROBLEM, f"{printable(str(exc))}; {advice(exc)}")


def _examine_host_cache(config: StoreConfig) -> Iterator[Finding]:
    """Examine the host cache, or the place where the first engine will create it."""
    named = config.host_cache_dir
    root = Path(named) if named else default_root(config.host_cache_bytes)
    existing = next(path for path in (root, *root.absolute().parents) if os.path.lexists(path))
    try:
        _check_usable(root, existing)
        limit = readable_size(fitting(existing, config.host_cache_bytes))
        free = shutil.disk_usage(existing).free
        used = sum(path.stat().st_size for path in root.glob("*") if path.is_file())
    except (ConfigError, OSError) as exc:
        yield Finding("host cache", Level.PROBLEM, printable(str(exc)))
        return
    state = f"holds {readable_size(used)} of at most {limit}"
    if existing != root:
        state = f"does not exist yet: the first engine makes it, for at most {limit}"
    text = f"{root} {state}; the disk has {readable_size(free)} free"
    yield Finding("host cache", Level.OK, text)


def _check_usable(root: Path, existing: Path) -> None:
    """Check that engines could use the folder `root`, of whose path the part `existing` exists.

    Raises:
        ConfigError: they could not.
    """
    if existing == root:
        check_private(root)
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            f"host_cache_dir: {root} cannot be {'used' if existing == root else 'made'}; "
            "name a folder this user may write"
        )

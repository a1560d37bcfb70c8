# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: N818 — ObjectMissing says it as well as ObjectMissingError
"""Everything that ecshare raises on purpose. The text of each is one sentence for a person.

    EcshareError
     ├── ConfigError       (ValueError)         an option is wrong; names it, and the fix
     └── StoreError
          ├── ObjectMissing     (FileNotFoundError)  no object under this key
          ├── ObjectCorrupt     (ValueError)         bytes that are not what was sealed
          │    └── ObjectUnreadable              it is there, and is kept from us; others are not
          └── StoreUnavailable  (OSError)            the store did not answer, or not as it should
               ├── StoreDenied  (PermissionError)    it answered, and refused us
               └── StoreBusy                         it is there, and cannot serve just now

Each is also the builtin in brackets, so that code which knows nothing of ecshare catches it too.
"""


class EcshareError(Exception):
    """The root of the tree."""


class ConfigError(EcshareError, ValueError):
    """An option is missing, unknown or wrong. Raised at start, never while serving."""


class StoreError(EcshareError):
    """An operation on a store did not give the object that was asked for."""


class ObjectMissing(StoreError, FileNotFoundError):
    """There is no object under this key."""


class ObjectCorrupt(StoreError, ValueError):
    """The bytes under this key are not an object, or not the one that was sealed."""


class ObjectUnreadable(ObjectCorrupt):
    """What lies under this key is kept from us alone, or is no object: not ours to remove.

    It says nothing about the rest of the store.
    """


class StoreUnavailable(StoreError, OSError):
    """The store cannot be reached, timed out, is full, or answered nonsense."""


class StoreDenied(StoreUnavailable, PermissionError):
    """The store is there and refuses us: credentials, permissions, or a read-only folder."""


class StoreBusy(StoreUnavailable):
    """The store answers that it cannot serve now, or not in time, or breaks off: overload, a
    restart, a full disk. It may pass by itself, and says nothing against the options."""

# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: N818 — ObjectMissing says it as well as ObjectMissingError
"""The exceptions of ecshare. The text of each is one sentence for a person.

    EcshareError
     ├── ConfigError       (ValueError)         an option is wrong; names it, and the fix
     └── StoreError
          ├── ObjectMissing     (FileNotFoundError)  no object under this key
          │    └── ObjectGivenUp                 and its announcer will not store it
          ├── ObjectCorrupt     (ValueError)         its bytes are not a valid object
          │    ├── ObjectForeign                 they are, but its MAC is not of our keys
          │    └── ObjectUnreadable              this one cannot be read, or is not an object
          └── StoreUnavailable  (OSError)            no response from the store, or an invalid one
               ├── StoreDenied  (PermissionError)    it refused the operation
               └── StoreBusy                         it cannot serve now

Each is also the builtin in brackets, so that code without knowledge of ecshare can catch it.
"""


class EcshareError(Exception):
    """The root of the tree."""


class ConfigError(EcshareError, ValueError):
    """An option is missing, unknown or wrong. Raised at start, never while serving."""


class StoreError(EcshareError):
    """An operation on a store failed."""


class ObjectMissing(StoreError, FileNotFoundError):
    """There is no object under this key."""


class ObjectGivenUp(ObjectMissing):
    """There is no object under this key, and the engine that announced it has given up its save."""


class ObjectCorrupt(StoreError, ValueError):
    """The bytes under this key are not a valid object, or are another object."""


class ObjectForeign(ObjectCorrupt):
    """The object is intact, but has no MAC of our keys: another writer made it, or an old key."""


class ObjectUnreadable(ObjectCorrupt):
    """Access to this one object is refused, or it is not an object. It must not be removed.

    This says nothing about the rest of the store.
    """


class StoreUnavailable(StoreError, OSError):
    """The store cannot be reached, timed out, is full, or gave an invalid answer."""


class StoreDenied(StoreUnavailable, PermissionError):
    """The store refuses the operation: credentials, permissions, or a read-only folder."""


class StoreBusy(StoreUnavailable):
    """The store cannot serve now, is too late, or breaks the connection: overload, a restart, a
    full disk. The fault may pass by itself, and the options may be right."""

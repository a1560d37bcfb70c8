# SPDX-License-Identifier: Apache-2.0
"""Secrets in options: reads them from references, and hides them in output.

vLLM logs the arguments of an engine, and `ps` shows them, before any code of ours runs. So an
option should not contain a secret, but a reference: `env:NAME` or `file:/path`.
"""

import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ecshare.store.errors import ConfigError

HIDDEN = "***"

_ENV, _FILE = "env:", "file:"
_LONGEST_FILE = 1 << 16
_MOST_LEVELS = 32
_SHORTEST_REPLACED = 4  # masking a shorter secret would mask ordinary words in messages

_NAME = re.compile(
    r"key|secret|token|passw|passphrase|(?:^|[_-])pass(?:$|[_-])|pwd|credential|sas|auth|cookie"
    r"|bearer|signature|headers?$|private|service_account$|conn(?:ection)?_?str|(?:^|[_-])(?:dsn|sig|conn)$",
    re.IGNORECASE,
)
_SURROGATE = re.compile("[\ud800-\udfff]")
# Names that match _NAME, but belong to no secret: the file that holds one, or how it is used.
_NO_SECRET = re.compile(r"(?:_file|_filename|_path|_version|_algorithm)$", re.IGNORECASE)
# The public half of a pair; the other half is the secret.
_PUBLIC_HALF = {"key", "access_key", "access_key_id", "aws_access_key_id", "account_name",
                "sse_kms_key_id"}  # fmt: skip
# Values of gcsfs that name a way to find credentials.
_WORDS = {"anon", "browser", "cache", "cloud", "google_default"}
# To the last '@': a password may hold one, and after a ':' a '/' too, as S3's secrets do.
_URL_LOGIN = re.compile(r"(?<=://)(?:[^/]*:.*|[^/]+)(?=@)", re.DOTALL)
# A slash or the '@' is missing. Digits after a ':' are a port.
_MISSPELT_LOGIN = re.compile(r"[^/]*:[^/]*(?=@)|(?<=://)[^/:@\[]*:(?!\d{1,5}(?:[/?#]|$))[^/@]+")
_PASSWORD = re.compile(r"://[^/]*:.*@", re.DOTALL)
# The same in the middle of a sentence.
_LOGIN_IN_TEXT = re.compile(r"(?<=://)(?:[^\s/\"'<>]*:[^\s\"'<>]*|[^\s/\"'<>]+)(?=@)")
_FIELD_IN_TEXT = re.compile(
    r"((?:sig|signature|token|credential|accountkey|account_key|accesskeyid|secret|password"
    r"|passwd|pwd)\"?'?=)[^&\s\"';,<>]+",
    re.IGNORECASE,
)
_BEARER_IN_TEXT = re.compile(r"\b(bearer|basic)\s+[\w+/.=~-]{4,}", re.IGNORECASE)
_HEADER_IN_TEXT = re.compile(
    r"\b((?:proxy-)?authorization|(?:set-)?cookie|x-amz-security-token|x-api-key)"
    r"(['\"]?\s*[:=]\s*)[^\r\n]*",
    re.IGNORECASE,
)


class Secret(str):
    """A value that was read from the reference `source`, such as `env:NAME` or `file:/path`."""

    __slots__ = ("source",)
    source: str

    @classmethod
    def of(cls, value: str, source: str) -> "Secret":
        """Return `value` as a secret whose repr is `source`."""
        secret = cls(value)
        secret.source = source
        return secret

    def __repr__(self) -> str:
        return repr(self.source)


def masked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `options` with "***" in place of each secret, at any depth, and each login in a url.

    A value is a secret if its name says so. A value that was read from a reference is shown as the
    reference, e.g. `env:NAME`.
    """
    return {str(name): _masked(str(name), value, False) for name, value in options.items()}


def _masked(name: str, value: Any, is_inside: bool) -> Any:
    """Mask one value; see `masked`. `is_inside`: an option around it has the name of a secret."""
    is_inside = is_inside or _is_secret_name(name)
    if isinstance(value, Mapping):
        return {str(inner): _masked(str(inner), each, is_inside) for inner, each in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(name, each, is_inside) for each in value]
    if isinstance(value, Secret):
        return value.source
    if value is None or value == "" or isinstance(value, bool):
        return value
    if isinstance(value, str) and _is_reference(name, value):
        return value
    if is_inside:
        return HIDDEN
    return masked_text(masked_url(value)) if isinstance(value, str) else value


def masked_url(url: str) -> str:
    """Return `url` without the login that some protocols put into it, and without a signature."""
    is_login = _URL_LOGIN if "://" in url and "@" in url else _MISSPELT_LOGIN
    return _FIELD_IN_TEXT.sub(rf"\1{HIDDEN}", is_login.sub(HIDDEN, url))


def masked_text(text: str, secrets: Collection[str] = ()) -> str:
    """Return `text`, which may quote requests, without logins, signatures, tokens and `secrets`."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _SHORTEST_REPLACED:
            text = text.replace(secret, HIDDEN)
    text = _LOGIN_IN_TEXT.sub(HIDDEN, text)
    text = _FIELD_IN_TEXT.sub(rf"\1{HIDDEN}", text)
    text = _BEARER_IN_TEXT.sub(rf"\1 {HIDDEN}", text)
    return _HEADER_IN_TEXT.sub(rf"\1\2{HIDDEN}", text)


def _is_secret_name(name: str) -> bool:
    return bool(_NAME.search(name)) and not _NO_SECRET.search(name)


def resolved(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return `options` with the value of each `env:NAME` and `file:/path`, at any depth.

    `where`: the user's path of `options`, which `check_levels` has accepted.

    Raises:
        ConfigError: a variable is not set, or a file cannot be read.
    """
    return {name: _resolved(str(name), value, f"{where}.{name}") for name, value in options.items()}


def _resolved(name: str, value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        return resolved(value, where)
    if isinstance(value, list):
        return [_resolved(name, each, f"{where}[{n}]") for n, each in enumerate(value)]
    if isinstance(value, str) and _is_reference(name, value):
        return Secret.of(_referenced_text(value, where), value)
    return value


def _is_reference(name: str, value: str) -> bool:
    """Return whether `value` is a reference. Options that are not secret may be urls of files."""
    return is_reference(value) and (_is_secret_name(name) or not value.startswith("file://"))


def is_reference(text: str) -> bool:
    """Return whether `text` is a reference to a secret: `env:NAME` or `file:/path`."""
    return text.startswith((_ENV, _FILE))


def _referenced_text(reference: str, option: str) -> str:
    try:
        text = referenced(reference, option).decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{option}: {reference!r} is not text in UTF-8") from None
    if not text:
        what = "is not set, or is empty" if reference.startswith(_ENV) else "is empty"
        raise ConfigError(f"{option}: {reference!r} {what}")
    return text


def referenced(reference: str, option: str) -> bytes:
    """Return the value of `env:NAME` or `file:/path`. A file's content is stripped of blanks.

    b"": the variable is not set.

    Raises:
        ConfigError: the file cannot be read; names `option`.
    """
    try:
        if reference.startswith(_ENV):
            return os.environb.get(os.fsencode(reference.removeprefix(_ENV)), b"")
        with Path(reference.removeprefix(_FILE)).open("rb") as opened:
            return opened.read(_LONGEST_FILE).strip()
    except (OSError, ValueError) as exc:
        reason = getattr(exc, "strerror", None) or str(exc)
        name = reference.partition(":")[2]
        raise ConfigError(
            f"{option}: {name} cannot be read ({reason}); name a file this user may read"
        ) from exc


def check_levels(options: Any, path: str, depth: int = 0) -> None:
    """Check that `options`, `depth` levels below the outermost ones, can be shown and encoded.

    Raises:
        ConfigError: they are nested too deeply, or contain a lone surrogate or an unprintable name.
    """
    if depth > _MOST_LEVELS:
        raise ConfigError(f"{path}: nested more than {_MOST_LEVELS} levels deep")
    if isinstance(options, str) and _SURROGATE.search(options):
        raise ConfigError(f"{path}: contains a lone surrogate, which is not a character")
    if isinstance(options, Mapping):
        for name, inner in options.items():
            if not str(name).isprintable():
                raise ConfigError(f"{path}: {ascii(name)[:80]} is not a name of an option")
            check_levels(inner, f"{path}.{name}", depth + 1)
    elif isinstance(options, list | tuple):
        for n, inner in enumerate(options):
            check_levels(inner, f"{path}[{n}]", depth + 1)


def secret_values(options: Mapping[str, Any]) -> set[str]:
    """Return the secrets in `options`, to remove them from messages of client libraries."""
    return {
        str.__str__(value)
        for names, value in _leaves(options, ())
        if isinstance(value, Secret) or any(map(_is_secret_name, names))
    }


def warnings(url: str, options: Mapping[str, Any], keys: Mapping[str, str], path: str) -> list[str]:
    """Return a sentence, with the fix, for each secret in the configuration itself.

    `keys`: options that are secrets. `path`: where the user wrote the options. No sentence contains
    a secret.
    """
    found = []
    if _PASSWORD.search(url):
        found.append(
            f"{path}.url: {_EXPOSED}; leave it out there and give it as {path}.storage_options."
            "password, written as env:NAME or file:/path"
        )
    exposed = [name for name, key in keys.items() if key and not is_reference(key)]
    for names, value in _leaves(options, ()):
        if not isinstance(value, Secret) and _is_literal(names, value):
            exposed.append(".".join(("storage_options", *names)))
    instead = "write env:NAME or file:/path in its place"
    return found + [f"{path}.{where}: {_EXPOSED}; {instead}" for where in exposed]


_EXPOSED = "a secret is written into the configuration, which vLLM logs and the process list shows"


def _leaves(value: Any, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield each text below `value`, with the names that lead to it."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, (*names, str(name)))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner, names)
    elif isinstance(value, str) and names:
        yield names, value


def _is_literal(names: tuple[str, ...], value: str) -> bool:
    if not value or names[-1] in _PUBLIC_HALF:
        return False
    if value in _WORDS or value.startswith("/") or value.endswith(".json"):
        return False
    return (
        any(map(_is_secret_name, names))
        or bool(_PASSWORD.search(value))
        or masked_text(value) != value
    )

# SPDX-License-Identifier: Apache-2.0
"""Sends requests to servers. Time, size and shape of each answer are bounded: it may be hostile."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Self

import aiohttp
import msgspec

from ecshare.router.api.client_request import Request
from ecshare.warm.corpus import WarmError

_CONNECT_S = 10.0
_MAX_ANSWER_BYTES = 4 << 20
_MAX_HEADER_BYTES = 1 << 16
_TRIES = 4
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)  # statuses that a retry may change
_SHOWN_CHARS = 200


class Client:
    """Sends each request to the server of one kind with the fewest requests in flight."""

    def __init__(
        self, urls: Sequence[str], headers: Mapping[str, str], timeout_s: float, limit: int
    ) -> None:
        """`limit`: the most requests in flight."""
        self._in_flight = dict.fromkeys(urls, 0)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=limit),
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_S),
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            max_field_size=_MAX_HEADER_BYTES,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def model(self) -> str:
        """Return the first model that a server lists.

        Raises:
            WarmError: no server lists one; says why the last server does not.
        """
        reason = "there is no server"
        for url in self._in_flight:
            try:
                answer, _ = await self._once(url, "GET", "/v1/models", b"")
                name = answer["data"][0]["id"]
                if isinstance(name, str):
                    return name
                reason = f"{url} lists no model"
            except (KeyError, IndexError, TypeError):
                reason = f"{url} lists no model"
            except (_TransientError, WarmError) as exc:
                reason = f"{url}: {exc}"
        raise WarmError(reason)

    async def post(self, path: str, body: bytes) -> tuple[Request, Mapping[str, str]]:
        """Return the JSON and the headers of the answer, which has status 200.

        Transient failures are retried a few times, with pauses.

        Raises:
            WarmError: there is no such answer; says why.
        """
        pause_s = _FIRST_PAUSE_S
        for left in reversed(range(_TRIES)):
            url = min(self._in_flight, key=self._in_flight.__getitem__)
            self._in_flight[url] += 1
            try:
                return await self._once(url, "POST", path, body)
            except _TransientError as exc:
                if not left:
                    raise WarmError(f"{url}: {exc}, {_TRIES} times") from exc
                after_s = exc.retry_after_s
            finally:
                self._in_flight[url] -= 1
            await asyncio.sleep(min(max(pause_s, after_s), _LONGEST_PAUSE_S))
            pause_s *= 2
        raise AssertionError

    async def _once(
        self, url: str, method: str, path: str, body: bytes
    ) -> tuple[Any, Mapping[str, str]]:
        headers = {"Content-Type": "application/json"} if body else {}
        try:
            async with self._session.request(
                method, url + path, data=body or None, headers=headers, allow_redirects=False
            ) as response:
                text = await _text(response)
        except TimeoutError as exc:
            raise WarmError("no answer within --timeout") from exc
        except (aiohttp.ClientError, OSError) as exc:
            raise _TransientError(f"{type(exc).__name__}: {exc}"[:_SHOWN_CHARS]) from exc
        if response.status != 200:
            reason = f"HTTP {response.status}: {_reason(text)}"
            if response.status in _TRANSIENT:
                raise _TransientError(reason, response.headers.get("Retry-After", ""))
            raise WarmError(reason)
        try:
            answer = msgspec.json.decode(text)
        except (ValueError, RecursionError) as exc:
            raise WarmError("the answer is no JSON") from exc
        if not isinstance(answer, dict):
            raise WarmError("the answer is no JSON object")
        return answer, response.headers


class _TransientError(Exception):
    """A retry may succeed."""

    def __init__(self, reason: str, retry_after: str = "") -> None:
        super().__init__(reason)
        is_number = retry_after.isascii() and retry_after.isdigit() and len(retry_after) < 5
        self.retry_after_s = float(retry_after) if is_number else 0.0


async def _text(response: aiohttp.ClientResponse) -> bytes:
    text = bytearray()
    async for chunk in response.content.iter_any():
        text += chunk
        if len(text) > _MAX_ANSWER_BYTES:
            raise WarmError(f"the answer is larger than {_MAX_ANSWER_BYTES >> 20} MiB")
    return bytes(text)


def _reason(text: bytes) -> str:
    """Return the message of an error in OpenAI's shape, else how the text begins."""
    try:
        error = msgspec.json.decode(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:_SHOWN_CHARS]
    except (ValueError, LookupError, TypeError, RecursionError):
        return text[:_SHOWN_CHARS].decode("utf-8", "replace")

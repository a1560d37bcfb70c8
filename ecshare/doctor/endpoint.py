# SPDX-License-Identifier: Apache-2.0
"""Finds out what answers at the endpoint of a bucket: an S3 server, another server, or nothing.

It sends one unsigned GET, and only after the store failed or answered wrongly.
"""

import http.client
import re
import socket
import ssl
import urllib.error
import urllib.request
from typing import Any

from ecshare.doctor.findings import printable
from ecshare.store.config import StoreConfig
from ecshare.store.secrets import masked_url

_TIMEOUT_S = 5.0
_INSPECTED_BYTES = 4096
# Even without a signature S3 answers in XML, or at least with a header of its own.
_S3_DOCUMENT = re.compile(rb"<(?:Error|ListBucketResult|ListAllMyBucketsResult)[\s>]")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Does not follow redirects: the redirect itself is the answer to judge."""

    def redirect_request(self, *_: Any) -> None:
        return None


def endpoint_problem(config: StoreConfig) -> str | None:
    """Return what is wrong with the endpoint of `config`, None if no fault is visible. Blocks.

    Without an endpoint in the options or the environment it is Amazon's own, which is S3.
    """
    protocol, _, rest = config.url.partition("://")
    endpoint = config.endpoint_url.rstrip("/")
    if protocol not in ("s3", "s3a") or not endpoint.startswith(("http://", "https://")):
        return None
    shown = printable(masked_url(endpoint))
    opener = urllib.request.build_opener(_NoRedirect)
    try:
        with _ask(opener, f"{endpoint}/{rest.partition('/')[0]}") as answer:
            if _is_s3(answer):
                return None
            status, reason = answer.status, printable(answer.reason or "")
            kind = printable(answer.headers.get("Content-Type") or "no content type")
    except http.client.HTTPException:
        return (
            f"{shown} answers, but not with HTTP: it is not an S3 server; set endpoint_url to one"
        )
    except (OSError, ValueError) as exc:
        cause = exc.reason if isinstance(exc, urllib.error.URLError) else exc
        if isinstance(cause, ssl.SSLError):
            return None
        return (
            f"no server answers at {shown} ({_reason(cause)}); is it up, and is the endpoint right?"
        )
    what = f"{shown} is an HTTP server, but it answers {status} {reason} with {kind}"
    if status >= http.client.INTERNAL_SERVER_ERROR:
        return f"{what}, not as S3; is the S3 server up, and is the endpoint right?"
    return f"{what}: it is not an S3 server; set endpoint_url to one, with the port of its S3 API"


def _ask(opener: urllib.request.OpenerDirector, url: str) -> Any:
    try:
        return opener.open(url, timeout=_TIMEOUT_S)
    except urllib.error.HTTPError as answer:
        return answer


def _is_s3(answer: Any) -> bool:
    if any(name.lower().startswith("x-amz-") for name in answer.headers):
        return True
    # A single read: a server that sends byte by byte is not waited for.
    return _S3_DOCUMENT.search(answer.read1(_INSPECTED_BYTES)) is not None


def _reason(reason: object) -> str:
    if isinstance(reason, TimeoutError):
        return f"nothing within {_TIMEOUT_S:g} s"
    if isinstance(reason, socket.gaierror):
        return "no such host"
    return printable(getattr(reason, "strerror", None) or str(reason) or type(reason).__name__)

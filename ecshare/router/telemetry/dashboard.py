# SPDX-License-Identifier: Apache-2.0
"""The page that shows operators what the router does, and how a browser may use it.

The page holds no data: whoever opens it types in the status key, and its script asks for the data
with it. The browser runs that script alone, and lets it talk to this router alone.
"""

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

_INLINE = re.compile(r"<(style|script)>(.*?)</\1>", re.DOTALL)


@cache
def page() -> str:
    """Return the page: HTML with its style and its script in it."""
    return (files("ecshare.router.telemetry") / "dashboard.html").read_text(encoding="utf-8")


@cache
def page_headers() -> dict[str, str]:
    """Return the headers that confine the page, and so whatever might ever get into it."""
    hashes = {kind: _hash(text) for kind, text in _INLINE.findall(page())}
    policy = [
        "default-src 'none'",
        f"style-src {hashes['style']}",
        f"script-src {hashes['script']}",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    return {
        "Content-Security-Policy": "; ".join(policy),
        "Content-Type": "text/html; charset=utf-8",
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"

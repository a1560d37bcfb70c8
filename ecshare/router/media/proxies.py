# SPDX-License-Identifier: Apache-2.0
"""The proxies that the operator's environment names, by which media are fetched."""

import base64
import logging
import os
from collections.abc import Mapping
from typing import NamedTuple
from urllib.request import getproxies, proxy_bypass

from yarl import URL

logger = logging.getLogger(__name__)


class Proxy(NamedTuple):
    """Where a proxy is, and what it must be told."""

    url: URL
    headers: dict[str, str]


class Proxies:
    """HTTP_PROXY, HTTPS_PROXY and NO_PROXY, as they are at start."""

    def __init__(self) -> None:
        self._environment = getproxies()
        found = {scheme: _proxy(scheme, self._environment) for scheme in ("http", "https")}
        self._proxies = {scheme: proxy for scheme, proxy in found.items() if proxy is not None}
        for scheme, proxy in self._proxies.items():
            logger.info("media at %s: urls are fetched through %s", scheme, proxy.url)

    def of(self, url: URL) -> Proxy | None:
        """Return the proxy by which a url is fetched, None if there is none for it."""
        proxy = self._proxies.get(url.scheme)
        if proxy is None or proxy_bypass(url.host or "", self._environment):
            return None
        return proxy


def _proxy(scheme: str, environment: Mapping[str, str]) -> Proxy | None:
    text = environment.get(scheme)
    if not text:
        return None
    name = f"{scheme}_proxy"
    name = name if name in os.environ else name.upper()
    try:
        url = URL(text if "://" in text else f"http://{text}")
    except ValueError:
        url = URL()
    if url.scheme not in ("http", "https") or not url.host:
        # Without the text: it may hold a password.
        logger.warning("%s is ignored: it is no http: or https: url", name)
        return None
    headers = {}
    if url.user is not None:
        login = base64.b64encode(f"{url.user}:{url.password or ''}".encode()).decode()
        headers["Proxy-Authorization"] = f"Basic {login}"
    return Proxy(url.origin(), headers)

# SPDX-License-Identifier: Apache-2.0
"""A request on its way through the stages, and what it holds."""

from typing import NamedTuple

from aiohttp import web

from ecshare.router.client_request import ClientRequest
from ecshare.router.memory import Reservation
from ecshare.router.middleware import CONTEXT, RequestContext


class Call(NamedTuple):
    """A client's request, as it came and as it was read."""

    http: web.Request
    client: ClientRequest
    reservation: Reservation

    @property
    def context(self) -> RequestContext:
        """Return its state."""
        return self.http[CONTEXT]

# SPDX-License-Identifier: Apache-2.0
"""One line of the log for each request that was answered."""

import logging

from ecshare.router.http.context import RequestContext
from ecshare.router.http.events import Subscriber
from ecshare.router.http.responses import shown_path

logger = logging.getLogger(__name__)


class AccessLog(Subscriber):
    """Writes the line when the answer has ended."""

    def request_ended(self, context: RequestContext) -> None:
        """See `Subscriber`."""
        if context.status is None or context.ended_s is None:
            return
        what = f"{context.http.method} {shown_path(context.http)} {context.status}"
        path = ",".join(context.path) or "-"
        avoided = f" avoided {','.join(context.avoided)}" if context.avoided else ""
        spent_ms = (context.ended_s - context.began_s) * 1000
        logger.info("%s %s %s %.0f ms%s", context.request_id, what, path, spent_ms, avoided)

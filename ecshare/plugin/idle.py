# SPDX-License-Identifier: Apache-2.0
"""Steps in which an engine computes nothing."""

from collections.abc import Sized


class IdleSteps:
    """Decides in which steps a hook may block for a moment without delaying any other request.

    While all requests of an engine wait, say for the store, vLLM runs one empty step after the
    other. With asynchronous scheduling, the first empty steps run while a step still computes, and
    vLLM returns that step's tokens between them. A hook must not block in those steps, nor in any
    step if other engines take part in each step.

    Ownership: vLLM's scheduler thread.
    """

    def __init__(self, max_in_flight: int | None) -> None:
        """Begin with no step. `max_in_flight`: how many steps vLLM schedules before the first of
        them has ended; None: other engines take part in each step."""
        self._max_in_flight = max_in_flight
        self._num_empty = 0

    def is_idle(self, scheduled: Sized) -> bool:
        """Return whether neither this step nor one in flight computes anything. Call once a step.

        `scheduled`: the requests of the step.
        """
        self._num_empty = 0 if scheduled else self._num_empty + 1
        return self._max_in_flight is not None and self._num_empty >= self._max_in_flight

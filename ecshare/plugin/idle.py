# SPDX-License-Identifier: Apache-2.0
"""Steps in which an engine computes nothing."""

from collections.abc import Sized


class IdleSteps:
    """Tells in which steps a hook may wait for a moment without delaying any other request.

    While all requests of an engine wait, say for the store, vLLM makes one empty step after the
    other. With asynchronous scheduling the first ones are made while a step still computes, whose
    tokens vLLM hands out between them; those must not wait. Nor must any where other engines take
    part in each step.

    Ownership: vLLM's scheduler thread.
    """

    def __init__(self, max_in_flight: int | None) -> None:
        """`max_in_flight`: steps that vLLM schedules before the first of them has ended. None:
        steps are shared with other engines."""
        self._max_in_flight = max_in_flight
        self._num_empty = 0

    def is_idle(self, scheduled: Sized) -> bool:
        """Whether this step computes nothing, nor any that goes on; to be asked once a step.

        `scheduled`: the requests of the step.
        """
        self._num_empty = 0 if scheduled else self._num_empty + 1
        return self._max_in_flight is not None and self._num_empty >= self._max_in_flight

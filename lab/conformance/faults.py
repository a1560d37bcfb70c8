# SPDX-License-Identifier: Apache-2.0
"""Checks: a lost, damaged or unreachable object costs one encode or one request, never more."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lab.conformance.engine import Engine, Ticket
from lab.conformance.hand_over import must_answer
from lab.conformance.harness import (
    Place,
    cut_in_half,
    emptied,
    removed,
    replaced_by_a_folder,
    with_a_bit_flipped,
    with_other_contents,
)
from lab.conformance.pictures import picture
from lab.conformance.rules import rule
from lab.conformance.violations import Effect, Violation, require

# A hook that blocks on a pipe is released after this time, and then counts as blocked.
_STUCK_S = 3.0


def must_end_alone(ticket: Ticket) -> None:
    """Require that an unavailable item fails at most its own request, with a retryable error."""
    require(ticket.is_failed or ticket.is_ok, Effect.HANGS, f"{ticket.request_id}: {ticket.reason}")


@rule(
    why="The item cannot be encoded again, and a runner that tries kills the engine. vLLM can fail "
    "the single request: see take_unavailable_requests.",
)
def fails_only_the_request_of_a_lost_item(place: Place) -> None:
    """An item without pixels that is stored nowhere fails its own request only."""
    decoder = place.decoder()
    must_answer(decoder.ask(picture(1)))
    lost = decoder.submit(picture(2, "never-stored").without_pixels())
    other = decoder.submit(picture(3))
    decoder.wait(lost, other)
    require(lost.is_failed, Effect.REQUEST_FAILS, f"the request ended as {lost.reason}")
    must_answer(other)
    mixed = decoder.ask(picture(4), picture(5, "nor-this").without_pixels())
    require(mixed.is_failed, Effect.REQUEST_FAILS, f"the request ended as {mixed.reason}")
    must_answer(decoder.ask(picture(4)))


_DAMAGED: dict[Callable[[Path], None], str] = {
    removed: "that was removed",
    emptied: "that was emptied",
    cut_in_half: "that lost its second half",
    with_a_bit_flipped: "with a flipped bit",
    with_other_contents: "that was replaced by other bytes",
    replaced_by_a_folder: "that was replaced by a folder",
}


def _damage_check(fault: Callable[[Path], None]) -> None:
    def check(place: Place) -> None:
        encoder, decoder = place.encoder(), place.decoder()
        encoded = encoder.ask(picture(1), picture(2))
        place.damage(place.stored_files(encoder, encoded), fault)
        must_answer(decoder.ask(picture(2), params=encoded.params))
        must_end_alone(decoder.ask(picture(1).without_pixels(), params=encoded.params))
        must_answer(decoder.ask(picture(3)))

    check.__name__ = f"survives_objects_{fault.__name__}"
    check.__doc__ = f"An object {_DAMAGED[fault]} counts as missing."
    rule(
        why="Writers die, disks fill up, and others write to the same place. Rows that were not "
        "checked give answers that cannot be trusted.",
    )(check)


for _fault in _DAMAGED:
    _damage_check(_fault)


@rule(
    why="After has_cache_item has returned True, the V1 runner cannot recover: without the item in "
    "the encoder cache, the engine dies.",
)
def loads_promised_items(place: Place) -> None:
    """A promised item is loaded, even if the store loses it before the load."""
    encoder, decoder = place.encoder(), place.decoder()
    encoded = encoder.ask(picture(1))
    files = place.stored_files(encoder, encoded)
    asked = decoder.submit(picture(1), params=encoded.params)
    deadline_s = time.monotonic() + place.subject.patience_s
    while asked.reason is None and time.monotonic() < deadline_s:
        output = decoder.schedule()
        if output.num_scheduled_tokens and files:
            place.damage(files, removed)
            files = []
        decoder.execute(output)
        decoder.update()
    must_answer(asked)
    must_answer(decoder.ask(picture(2)))


@rule(
    why="The encoder's own cache still has the item, so vLLM does not encode it. If the encoder "
    "then announces it and stores nothing, the item fails for ever.",
)
def stores_lost_items_again(place: Place) -> None:
    """An item that the store has lost is stored again when the encoder gets it again."""
    encoder, decoder = place.encoder(), place.decoder()
    place.damage(place.stored_files(encoder, encoder.ask(picture(1))), removed)
    encoded = encoder.ask(picture(1))
    must_answer(decoder.ask(picture(1).without_pixels(), params=encoded.params))


@rule(
    why="Mounts are lost and buckets deleted. Engines can still answer from the pixels.",
)
def answers_without_its_store(place: Place) -> None:
    """If the whole store is gone, engines encode and still answer."""
    encoder, decoder = place.encoder(), place.decoder()
    place.stored(encoder, encoder.ask(picture(1)))
    place.folder.rename(place.root / "taken-away")
    place.folder.touch()  # a file where the folder was: nothing below it can be made or opened
    for engine in (encoder, decoder):
        must_answer(engine.ask(picture(1)))
        must_answer(engine.ask(picture(2)))
    must_end_alone(decoder.ask(picture(3, "never-stored").without_pixels()))


@rule(
    why="A hook that waits stops every request of the engine, even without media.",
)
def does_not_wait_for_a_hanging_store(place: Place) -> None:
    """A store that hangs delays no hook."""
    encoder, decoder = place.encoder(), place.decoder()
    decoder.ask(picture(7))
    encoded = encoder.ask(picture(1))
    pipes = place.stored_files(encoder, encoded)
    for path in pipes:
        path.unlink()
        os.mkfifo(path)  # opening it for reading waits for a writer
    with _blocked_readers(pipes):
        asked = decoder.submit(picture(1), params=encoded.params)
        other = decoder.submit(picture(2))
        try:
            decoder.wait(other, asked)
        finally:
            _require_quick_hooks(decoder)  # first: later failures may result from the release
        must_answer(other)
        must_answer(asked)


def _require_quick_hooks(engine: Engine) -> None:
    logs = [engine.log, *(each.log for each in engine.runners)]
    for name, calls in ((name, calls) for log in logs for name, calls in log.calls.items()):
        if max(calls) >= _STUCK_S:
            message = f"{name} waited {max(calls):.1f} s for the store"
            raise Violation(Effect.EVERYONE_WAITS, message)


@contextmanager
def _blocked_readers(pipes: list[Path]) -> Iterator[None]:
    """Block readers of pipes; release them every `_STUCK_S`, and all of them at the end.

    A separate process does this: a connector may wait in a library that holds Python's GIL.
    """
    command = [sys.executable, "-I", "-S", "-c", _RELEASE, str(_STUCK_S), *map(str, pipes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as releasing:
        try:
            yield
        finally:
            assert releasing.stdin is not None
            releasing.stdin.close()
            releasing.wait()


# Opens every pipe again and again, until its standard input ends: a reader that waits for a
# writer then reads an empty file.
_RELEASE = """
import os, select, sys
wait_s, paths = float(sys.argv[1]), sys.argv[2:]
is_over = False
while not is_over:
    is_over = bool(select.select([sys.stdin], [], [], wait_s)[0])
    for path in paths:
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:
            pass  # no reader waits
"""

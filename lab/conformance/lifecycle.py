# SPDX-License-Identifier: Apache-2.0
"""Checks: start, end, other engines at the same time, and the load on the scheduler thread."""

from statistics import median

from lab.conformance.engine import Engine
from lab.conformance.hand_over import hand_over, must_answer
from lab.conformance.harness import Place
from lab.conformance.pictures import picture
from lab.conformance.rules import rule
from lab.conformance.violations import Effect, require
from lab.conformance.watch import auditing


@rule(
    why="They run many times a second on the only thread that schedules requests. A network with "
    "20 ms of latency adds 20 ms to every token of every user.",
)
def does_no_io_on_the_scheduler_thread(place: Place) -> None:
    """The scheduler's hooks do no I/O."""
    encoder, decoder = place.encoder(), place.decoder()
    for number in (1, 2):  # warms up: a first import, say, does not count
        _use_everything(encoder, decoder, number * 100)
    with auditing():
        _use_everything(encoder, decoder, 300)
    for engine in (encoder, decoder):
        for hook, calls in sorted(engine.log.calls.items()):
            typical, worst = median(calls) * 1e6, max(calls) * 1e6
            place.note(f"{engine.name} {hook}: {typical:.0f} microseconds, at most {worst:.0f}")
    seen = sorted(encoder.log.io | decoder.log.io)
    require(not seen, Effect.EVERYONE_WAITS, f"on the scheduler thread: {', '.join(seen)}")


def _use_everything(encoder: Engine, decoder: Engine, seed: int) -> None:
    """Make engines save, load, encode and miss."""
    hand_over(encoder, decoder, picture(seed), picture(seed + 1))
    decoder.ask(picture(seed + 2))
    encoder.ask(picture(seed))


@rule(
    why="Routers may send a popular image to several encoders at the same time.",
)
def handles_two_writers(place: Place) -> None:
    """Two engines may save the same image at the same time."""
    first, second, decoder = place.encoder("first"), place.encoder("second"), place.decoder()
    for number in range(1, 4):
        asked = [each.submit(picture(number)) for each in (first, second)]
        outputs = [each.schedule() for each in (first, second)]
        for engine, output in zip((first, second), outputs, strict=True):
            engine.execute(output)
        for engine, each in zip((first, second), asked, strict=True):
            engine.update_all()
            engine.wait(each)
            engine.idle()
            must_answer(each)
        answered = decoder.ask(picture(number).without_pixels(), params=asked[1].params)
        must_answer(answered)


@rule(
    why="Both read and write what they share on that host.",
)
def handles_two_readers_on_one_host(place: Place) -> None:
    """Two engines of one host may load the same item at the same time."""
    encoder = place.encoder()
    readers = [place.decoder(name, host="one") for name in ("first", "second")]
    encoded = encoder.ask(picture(1), picture(2))
    asked = [
        each.submit(picture(1).without_pixels(), picture(2).without_pixels(), params=encoded.params)
        for each in readers
    ]
    for _ in range(20):  # the two take turns
        for engine in readers:
            engine.step()
    for engine, each in zip(readers, asked, strict=True):
        engine.wait(each)
        engine.idle()
        must_answer(each)


@rule(
    why="vLLM shuts down on several paths. An exception there hides the original one.",
)
def shuts_down_at_any_time(place: Place) -> None:
    """A connector may be shut down twice, with work in flight, or without ever having been used."""
    unused, used = place.decoder("unused"), place.encoder("used")
    place.stop(unused)
    unused.close()
    used.submit(picture(1))
    used.submit(picture(2))
    used.execute(used.schedule())
    place.stop(used)
    used.close()

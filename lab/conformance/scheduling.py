# SPDX-License-Identifier: Apache-2.0
"""Checks: whatever the scheduler does with requests, items are there when tokens need them."""

from lab.conformance.engine import Engine
from lab.conformance.hand_over import hand_over, must_answer
from lab.conformance.harness import Place
from lab.conformance.pictures import picture
from lab.conformance.rules import Effect, NotApplicable, require, rule


@rule(
    why="The item is asked about in every step until the last of its tokens is computed.",
)
def takes_chunked_prefill(place: Place) -> None:
    """A prefill in chunks may cut through an item."""
    encoder = place.encoder(max_num_batched_tokens=16)
    decoder = place.decoder(max_num_batched_tokens=10, max_num_seqs=4)
    hand_over(encoder, decoder, picture(1), picture(2))
    must_answer(decoder.ask(picture(3), picture(4)))


@rule(
    why="vLLM then loads, computes and frees them one after the other.",
)
def takes_a_small_encoder_cache(place: Place) -> None:
    """The encoder cache may be smaller than a request's pictures."""
    encoder = place.encoder(encoder_cache_embeds=20)
    decoder = place.decoder(encoder_cache_embeds=20)
    pictures = [picture(number) for number in range(1, 4)]
    hand_over(encoder, decoder, *pictures)
    must_answer(decoder.ask(*pictures))


@rule(
    why="Preemption starts a prompt over, and by then others may have its cache entries.",
)
def loads_again_after_preemption(place: Place) -> None:
    """A preempted request gets its items again, after the encoder cache was emptied."""
    encoder, decoder = place.encoder(), place.decoder()
    encoded = encoder.ask(picture(1))
    asked = decoder.submit(picture(1).without_pixels(), params=encoded.params, max_tokens=20)
    while len(asked.tokens) < 3 and asked.reason is None:
        decoder.step()
    decoder.preempt_all()
    _forget_embeddings(decoder)
    decoder.wait(asked)
    must_answer(asked)


@rule(
    why="vLLM passes the number of tokens that are computed already; waiting for items before "
    "them, or failing for want of them, costs a request that could be answered.",
)
def lets_covered_items_be(place: Place) -> None:
    """A request whose items the KV cache covers needs none of them."""
    encoder = place.encoder()
    decoder = place.decoder(enable_prefix_caching=True)
    small = picture(1, num_embeds=10)
    encoded = encoder.ask(small)
    must_answer(decoder.ask(small.without_pixels(), params=encoded.params))
    for path in place.files():
        path.unlink()
    _forget_embeddings(decoder)
    again = decoder.ask(small.without_pixels(), params=encoded.params)
    must_answer(again)


@rule(
    why="Its request ends without the hooks that others see; what was started for it must neither "
    "raise later nor be left behind.",
)
def takes_aborts(place: Place) -> None:
    """A client may leave at any moment."""
    encoder, decoder = place.encoder(), place.decoder()
    encoded = encoder.ask(picture(1))
    unscheduled = decoder.submit(picture(1).without_pixels(), params=encoded.params)
    decoder.leave(unscheduled)
    between = decoder.submit(picture(1).without_pixels(), params=encoded.params)
    output = decoder.schedule()
    decoder.leave(between)
    decoder.execute(output)
    decoder.update_all()
    deferred = decoder.submit(picture(8, "not-stored"), params={"not-stored": {"metadata": {}}})
    decoder.step()
    decoder.leave(deferred)
    cut_off = encoder.submit(picture(2))
    output = encoder.schedule()
    encoder.leave(cut_off)
    encoder.execute(output)
    encoder.update_all()
    decoder.idle()
    encoder.idle()
    hand_over(encoder, decoder, picture(1), picture(2))


@rule(
    why="vLLM puts it off and goes on; a connector that waits inside a hook stops the engine.",
)
def holds_nobody_else_up(place: Place) -> None:
    """A request that waits for its item holds nobody else up."""
    decoder = place.decoder()
    announced = {"late": {"metadata": {"image_grid_thw": [1, 2, 32]}, "item_indices": [0]}}
    waiting = decoder.submit(picture(1, "late"), params=announced)
    others = [decoder.submit(), decoder.submit()]
    decoder.wait(*others)
    decoder.wait(waiting)
    for each in (*others, waiting):
        must_answer(each)


@rule(
    why="vLLM runs them to flush finished requests; the V2 runner calls the connector in them.",
)
def takes_empty_steps(place: Place) -> None:
    """Steps without requests are steps like any other."""
    for engine in (place.encoder(), place.decoder()):
        for _ in range(3):
            engine.execute(engine.schedule())
            engine.update_all()
        must_answer(engine.ask(picture(1)))
        engine.execute(engine.schedule())
        engine.update_all()


@rule(
    why="Most requests have none.",
)
def leaves_text_alone(place: Place) -> None:
    """Requests without media pass untouched."""
    for engine in (place.encoder(), place.decoder()):
        must_answer(engine.ask())
        must_answer(engine.ask(params={"unknown": {"metadata": {}}}))


@rule(
    why="`request_finished` answering True without a KV connector keeps the request for ever; "
    "`has_pending_push_work` that stays True burns a core.",
)
def leaves_nothing_behind(place: Place) -> None:
    """A request that has ended is gone, and an engine without requests comes to rest."""
    encoder, decoder = place.encoder(), place.decoder()
    hand_over(encoder, decoder, picture(1), picture(2))
    decoder.ask(picture(5))
    for engine in (encoder, decoder):
        left = sorted(engine.scheduler.requests)
        require(not left, Effect.HANGS, f"{engine.name} still holds {left}")


@rule(
    why="The V1 runner calls save_caches in any role; a reader may have no right to write.",
)
def consumers_write_nothing(place: Place) -> None:
    """An engine that only loads writes nothing."""
    if place.roles == "both":
        raise NotApplicable("here every engine saves")
    decoder = place.decoder()
    must_answer(decoder.ask(picture(1), picture(2)))
    written = list(place.files())
    require(not written, Effect.NO_USE, f"a consumer wrote {[each.name for each in written]}")


def _forget_embeddings(engine: Engine) -> None:
    """Empty the encoder cache on both sides, as vLLM does after a weight update."""
    engine.scheduler.reset_encoder_cache()
    for runner in engine.runners:
        runner.model.encoder_cache.clear()

# SPDX-License-Identifier: Apache-2.0
"""Checks: items are there when tokens need them, whatever the scheduler does with requests."""

from lab.conformance.engine import Engine
from lab.conformance.hand_over import hand_over, must_answer
from lab.conformance.harness import Place
from lab.conformance.pictures import picture
from lab.conformance.rules import rule
from lab.conformance.violations import Effect, NotApplicable, require


@rule(
    why="vLLM asks for the item in every step until the last of its tokens is computed.",
)
def handles_chunked_prefill(place: Place) -> None:
    """A chunk of a chunked prefill may end inside an item."""
    encoder = place.encoder(max_num_batched_tokens=16)
    decoder = place.decoder(max_num_batched_tokens=10, max_num_seqs=4)
    hand_over(encoder, decoder, picture(1), picture(2))
    must_answer(decoder.ask(picture(3), picture(4)))


@rule(
    why="vLLM then loads, computes and frees the items one after the other.",
)
def handles_a_small_encoder_cache(place: Place) -> None:
    """The encoder cache may be too small for all images of a request."""
    encoder = place.encoder(encoder_cache_embeds=20)
    decoder = place.decoder(encoder_cache_embeds=20)
    pictures = [picture(number) for number in range(1, 4)]
    hand_over(encoder, decoder, *pictures)
    must_answer(decoder.ask(*pictures))


@rule(
    why="A preempted prompt starts again, and other requests may have its cache entries then.",
)
def loads_again_after_preemption(place: Place) -> None:
    """A preempted request gets its items again after the encoder cache was emptied."""
    encoder, decoder = place.encoder(), place.decoder()
    encoded = encoder.ask(picture(1))
    asked = decoder.submit(picture(1).without_pixels(), params=encoded.params, max_tokens=20)
    while len(asked.tokens) < 3 and asked.reason is None:
        decoder.step()
    decoder.preempt_all()
    _clear_encoder_caches(decoder)
    decoder.wait(asked)
    must_answer(asked)


@rule(
    why="vLLM passes the number of tokens that are already computed. A connector that waits for "
    "items before that point, or fails without them, loses a request that could be answered.",
)
def ignores_items_in_the_kv_cache(place: Place) -> None:
    """A request does not need the items whose tokens are in the KV cache."""
    encoder = place.encoder()
    decoder = place.decoder(enable_prefix_caching=True)
    small = picture(1, num_embeds=10)
    encoded = encoder.ask(small)
    must_answer(decoder.ask(small.without_pixels(), params=encoded.params))
    for path in place.files():
        path.unlink()
    _clear_encoder_caches(decoder)
    again = decoder.ask(small.without_pixels(), params=encoded.params)
    must_answer(again)


@rule(
    why="The request then ends without some of the usual hooks. Work started for it must neither "
    "raise later nor leak.",
)
def handles_aborts(place: Place) -> None:
    """A client may disconnect at any moment."""
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
    why="vLLM postpones such a request. A connector that waits in a hook stops the engine.",
)
def delays_no_other_request(place: Place) -> None:
    """A request that waits for its item delays no other request."""
    decoder = place.decoder()
    announced = {"late": {"metadata": {"image_grid_thw": [1, 2, 32]}, "item_indices": [0]}}
    waiting = decoder.submit(picture(1, "late"), params=announced)
    others = [decoder.submit(), decoder.submit()]
    decoder.wait(*others)
    decoder.wait(waiting)
    for each in (*others, waiting):
        must_answer(each)


@rule(
    why="vLLM runs such steps to flush finished requests. The V2 runner calls the connector then.",
)
def handles_empty_steps(place: Place) -> None:
    """The connector handles steps without requests."""
    for engine in (place.encoder(), place.decoder()):
        for _ in range(3):
            engine.execute(engine.schedule())
            engine.update_all()
        must_answer(engine.ask(picture(1)))
        engine.execute(engine.schedule())
        engine.update_all()


@rule(
    why="Most requests have no media.",
)
def ignores_requests_without_media(place: Place) -> None:
    """The connector does not affect requests without media."""
    for engine in (place.encoder(), place.decoder()):
        must_answer(engine.ask())
        must_answer(engine.ask(params={"unknown": {"metadata": {}}}))


@rule(
    why="If `request_finished` returns True without a KV connector, the request stays for ever. If "
    "`has_pending_push_work` stays True, the engine uses a core without need.",
)
def removes_finished_requests(place: Place) -> None:
    """A finished request is removed, and an engine without requests becomes idle."""
    encoder, decoder = place.encoder(), place.decoder()
    hand_over(encoder, decoder, picture(1), picture(2))
    decoder.ask(picture(5))
    for engine in (encoder, decoder):
        left = sorted(engine.scheduler.requests)
        require(not left, Effect.HANGS, f"{engine.name} still holds {left}")


@rule(
    why="The V1 runner calls save_caches in every role. A reader may have no permission to write.",
)
def consumers_write_nothing(place: Place) -> None:
    """An engine that only loads writes nothing to the store."""
    if place.roles == "both":
        raise NotApplicable("engines with the role `ec_both` save")
    decoder = place.decoder()
    must_answer(decoder.ask(picture(1), picture(2)))
    written = list(place.files())
    require(not written, Effect.NO_USE, f"a consumer wrote {[each.name for each in written]}")


def _clear_encoder_caches(engine: Engine) -> None:
    """Empty the encoder cache on both sides, as vLLM does after a weight update."""
    engine.scheduler.reset_encoder_cache()
    for runner in engine.runners:
        runner.model.encoder_cache.clear()

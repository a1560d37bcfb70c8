# SPDX-License-Identifier: Apache-2.0
"""Checks: one engine loads what another one has encoded."""

from dataclasses import replace

from lab.conformance.engine import Engine, Ticket
from lab.conformance.harness import Place
from lab.conformance.pictures import Picture, picture
from lab.conformance.rules import rule
from lab.conformance.violations import Effect, NotApplicable, require


def must_answer(ticket: Ticket) -> None:
    """Require that the request was answered."""
    require(ticket.is_ok, Effect.REQUEST_FAILS, f"{ticket.request_id} ended as {ticket.reason}")


def hand_over(encoder: Engine, decoder: Engine, *pictures: Picture) -> Ticket:
    """Encode on one engine, then answer on the other without pixels, as a router does."""
    encoded = encoder.ask(*pictures)
    must_answer(encoded)
    answered = decoder.ask(*(each.without_pixels() for each in pictures), params=encoded.params)
    must_answer(answered)
    return answered


@rule(
    why="Routers send prefill and decode engines the encoder's report instead of the image. If an "
    "encoder answers before its embedding is stored, the connector must make readers wait.",
)
def loads_without_pixels(place: Place) -> None:
    """An engine without the pixels gets the embedding from the engine that encoded them."""
    encoder, decoder = place.encoder(), place.decoder()
    hand_over(encoder, decoder, picture(1))
    hand_over(encoder, decoder, picture(2), picture(3))


@rule(
    why="This is the purpose of the connector.",
)
def avoids_a_second_encode(place: Place) -> None:
    """An engine that has the pixels loads a stored embedding instead of computing it again."""
    encoder, decoder = place.encoder(), place.decoder()
    encoded = encoder.ask(picture(1))
    must_answer(decoder.ask(picture(1), params=encoded.params))
    require(decoder.encoded == [], Effect.NO_USE, "the second engine encoded it again")


@rule(
    why="Each turn of a conversation contains its old images, and often a new one.",
)
def handles_stored_and_new_images(place: Place) -> None:
    """A request may contain both stored and new images."""
    encoder, decoder = place.encoder(), place.decoder()
    encoded = encoder.ask(picture(1), picture(3))
    stored = [picture(1).without_pixels(), picture(3).without_pixels()]
    must_answer(decoder.ask(stored[0], picture(2), stored[1], params=encoded.params))
    require(
        decoder.encoded == ["picture-2"],
        Effect.NO_USE,
        f"encoded {decoder.encoded}, not only the new image",
    )


@rule(
    why="vLLM reports only the first to the connector; the second uses the same cache entry.",
)
def handles_the_same_image_twice(place: Place) -> None:
    """A request may contain the same image twice."""
    encoder, decoder = place.encoder(), place.decoder()
    hand_over(encoder, decoder, picture(1), picture(2), picture(1))


@rule(
    why="vLLM allocates the item once. The connector must not wait for a second allocation.",
)
def handles_two_requests_in_one_step(place: Place) -> None:
    """Two requests of one step may need the same item."""
    encoder, decoder = place.encoder(), place.decoder()
    encoded = encoder.ask(picture(1))
    asked = [decoder.submit(picture(1).without_pixels(), params=encoded.params) for _ in range(3)]
    decoder.wait(*asked)
    for each in asked:
        must_answer(each)
    decoder.idle()
    again = [encoder.submit(picture(9)) for _ in range(2)]
    encoder.wait(*again)
    for each in again:
        must_answer(each)


@rule(
    why="vLLM does not check dtype or shape: it slices any tensor that it gets.",
)
def keeps_the_dtype(place: Place) -> None:
    """A loaded embedding has the same dtype and values as the saved one."""
    for dtype in ("bfloat16", "float16"):
        encoder = place.encoder(f"encoder-{dtype}", dtype=dtype)
        decoder = place.decoder(f"decoder-{dtype}", dtype=dtype)
        hand_over(encoder, decoder, picture(1, f"as-{dtype}"))


@rule(
    why="Encoders return slices and transposed views. Writing the memory behind them is wrong.",
)
def saves_views(place: Place) -> None:
    """An embedding that is a view of another tensor is saved with its own elements."""
    encoder, decoder = place.encoder(), place.decoder()
    hand_over(encoder, decoder, replace(picture(1), is_strided=True))


@rule(
    why="Video embeddings are the largest, and the most expensive to compute.",
)
def shares_videos(place: Place) -> None:
    """Other modalities than images are shared too."""
    encoder, decoder = place.encoder(), place.decoder()
    hand_over(encoder, decoder, replace(picture(1, num_embeds=64), modality="video"))


@rule(
    why="Each rank reads its own encoder cache. A rank without the item kills the engine.",
)
def loads_on_every_rank(place: Place) -> None:
    """Every tensor-parallel rank gets the item."""
    encoder, decoder = place.encoder(ranks=2), place.decoder(ranks=2)
    hand_over(encoder, decoder, picture(1), picture(2))


@rule(
    why="All ranks have the same embedding. More writes are useless, and may collide.",
)
def saves_on_one_rank(place: Place) -> None:
    """Only one rank of an engine saves."""
    saving = []
    for number in range(2):
        engine = place.encoder(f"rank-{number}", ranks=2)
        ranks, known = engine.runners, set(place.files())
        engine.runners = [ranks[number]]  # as if the other ranks were slow
        engine.ask(picture(number))
        engine.runners = ranks
        place.stop(engine)
        if set(place.files()) - known:
            saving.append(number)
    if not saving:
        raise NotApplicable(
            "it writes no files in {folder} from which the writing rank could be known"
        )
    require(len(saving) == 1, Effect.NO_USE, f"ranks {saving} each write the same embedding")


@rule(
    why="Clients choose identifiers. With rows of another image, or too few rows, answers are "
    "wrong at best.",
)
def distinguishes_lengths(place: Place) -> None:
    """An item with a known identifier and another number of embeddings never gets stored rows."""
    encoder, decoder = place.encoder(), place.decoder()
    place.stored(encoder, encoder.ask(picture(1, "reused", num_embeds=16)))
    longer = picture(2, "reused", num_embeds=24)
    with_pixels = decoder.ask(longer)
    require(
        with_pixels.is_ok or with_pixels.is_failed,
        Effect.HANGS,
        f"the second length ended as {with_pixels.reason}",
    )
    must_answer(decoder.ask(picture(3)))


@rule(
    why="Without the placeholder's metadata, later stages need the whole image.",
)
def announces_metadata(place: Place) -> None:
    """The encoder's answer contains the metadata that a consumer without pixels needs."""
    encoder = place.encoder()
    for asked in (encoder.ask(picture(1)), encoder.ask(picture(1))):
        must_answer(asked)
        entry = (asked.params or {}).get("picture-1", {})
        grid = entry.get("metadata", {}).get("image_grid_thw")
        require(
            grid == [1, 2, 32], Effect.NO_USE, f"ec_transfer_params are {str(asked.params)[:200]}"
        )


@rule(
    why="Embeddings should outlive the process that computed them.",
)
def survives_a_restart(place: Place) -> None:
    """A restarted engine loads what it saved before."""
    first = place.encoder("first", host="one")
    encoded = first.ask(picture(1))
    place.stop(first)
    second, decoder = place.encoder("second", host="one"), place.decoder()
    must_answer(second.ask(picture(1)))
    require(second.encoded == [], Effect.NO_USE, "it encoded a stored embedding again")
    must_answer(decoder.ask(picture(1).without_pixels(), params=encoded.params))

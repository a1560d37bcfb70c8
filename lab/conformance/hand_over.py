# SPDX-License-Identifier: Apache-2.0
"""Checks: what one engine encodes, another one loads."""

from dataclasses import replace

from lab.conformance.engine import Engine, Ticket
from lab.conformance.harness import Place
from lab.conformance.pictures import Picture, picture
from lab.conformance.rules import Effect, NotApplicable, require, rule


def must_answer(ticket: Ticket) -> None:
    """The request must have been answered."""
    require(ticket.is_ok, Effect.REQUEST_FAILS, f"{ticket.request_id} ended as {ticket.reason}")


def hand_over(encoder: Engine, decoder: Engine, *pictures: Picture) -> Ticket:
    """Encode on one engine, then answer on the other without pixels, as a router does it."""
    encoded = encoder.ask(*pictures)
    must_answer(encoded)
    answered = decoder.ask(*(each.without_pixels() for each in pictures), params=encoded.params)
    must_answer(answered)
    return answered


@rule(
    why="Routers send prefill and decode engines what the encoder reported, not the picture. An "
    "encoder that answers before its embedding can be had must see to it that readers wait.",
)
def arrives_without_pixels(place: Place) -> None:
    """An embedding arrives on another engine that has no pixels of it."""
    encoder, decoder = place.encoder(), place.decoder()
    hand_over(encoder, decoder, picture(1))
    hand_over(encoder, decoder, picture(2), picture(3))


@rule(
    why="This is what the connector is for.",
)
def saves_an_encode(place: Place) -> None:
    """An embedding that is stored is loaded by engines that have the pixels, not computed again."""
    encoder, decoder = place.encoder(), place.decoder()
    encoded = encoder.ask(picture(1))
    must_answer(decoder.ask(picture(1), params=encoded.params))
    require(decoder.encoded == [], Effect.NO_USE, "the second engine encoded it again")


@rule(
    why="A conversation brings its old pictures and a new one in every turn.",
)
def mixes_stored_and_new(place: Place) -> None:
    """One request may hold stored pictures and new ones."""
    encoder, decoder = place.encoder(), place.decoder()
    encoded = encoder.ask(picture(1), picture(3))
    stored = [picture(1).without_pixels(), picture(3).without_pixels()]
    must_answer(decoder.ask(stored[0], picture(2), stored[1], params=encoded.params))
    require(
        decoder.encoded == ["picture-2"], Effect.NO_USE, f"encoded {decoder.encoded}, not one new"
    )


@rule(
    why="vLLM tells the connector of the first only; the second must find it in the encoder cache.",
)
def loads_one_picture_twice(place: Place) -> None:
    """The same picture may stand twice in a request."""
    encoder, decoder = place.encoder(), place.decoder()
    hand_over(encoder, decoder, picture(1), picture(2), picture(1))


@rule(
    why="vLLM allocates it once; the connector must not wait for a second allocation.",
)
def serves_two_requests_in_one_step(place: Place) -> None:
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
    why="A tensor of another dtype or shape is taken for good: vLLM slices whatever it is given.",
)
def keeps_the_dtype(place: Place) -> None:
    """An embedding comes back with its own dtype and numbers."""
    for dtype in ("bfloat16", "float16"):
        encoder = place.encoder(f"encoder-{dtype}", dtype=dtype)
        decoder = place.decoder(f"decoder-{dtype}", dtype=dtype)
        hand_over(encoder, decoder, picture(1, f"as-{dtype}"))


@rule(
    why="Encoders hand out slices and transposed views; writing their memory as it lies is wrong.",
)
def saves_views(place: Place) -> None:
    """An embedding that is a view comes back as what it shows."""
    encoder, decoder = place.encoder(), place.decoder()
    hand_over(encoder, decoder, replace(picture(1), is_strided=True))


@rule(
    why="Video embeddings are the largest and the dearest to compute.",
)
def takes_videos(place: Place) -> None:
    """Items that are not images are handed over too."""
    encoder, decoder = place.encoder(), place.decoder()
    hand_over(encoder, decoder, replace(picture(1, num_embeds=64), modality="video"))


@rule(
    why="Each rank gathers from its own encoder cache; one that lacks the item kills the engine.",
)
def loads_on_every_rank(place: Place) -> None:
    """Every tensor-parallel rank gets the item."""
    encoder, decoder = place.encoder(ranks=2), place.decoder(ranks=2)
    hand_over(encoder, decoder, picture(1), picture(2))


@rule(
    why="All ranks hold the same embedding: the others' writes are wasted, and may collide.",
)
def saves_on_one_rank(place: Place) -> None:
    """Of the ranks of an engine, one saves."""
    saving = []
    for number in range(2):
        engine = place.encoder(f"rank-{number}", ranks=2)
        ranks, known = engine.runners, set(place.files())
        engine.runners = [ranks[number]]  # as if the others were slow
        engine.ask(picture(number))
        engine.runners = ranks
        place.stop(engine)
        if set(place.files()) - known:
            saving.append(number)
    if not saving:
        raise NotApplicable("it leaves no files in {folder} that would tell who wrote them")
    require(len(saving) == 1, Effect.NO_USE, f"ranks {saving} all write what one rank would")


@rule(
    why="Clients choose identifiers. Rows of another picture, or too few of them, are wrong "
    "answers at best.",
)
def tells_lengths_apart(place: Place) -> None:
    """The same identifier with another number of embeddings never gets the stored rows."""
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
    why="Without the placeholder's metadata every later stage must be sent the whole picture.",
)
def announces_metadata(place: Place) -> None:
    """The encoder's answer says what a consumer needs to do without the pixels."""
    encoder = place.encoder()
    for asked in (encoder.ask(picture(1)), encoder.ask(picture(1))):
        must_answer(asked)
        entry = (asked.params or {}).get("picture-1", {})
        grid = entry.get("metadata", {}).get("image_grid_thw")
        require(
            grid == [1, 2, 32], Effect.NO_USE, f"ec_transfer_params are {str(asked.params)[:200]}"
        )


@rule(
    why="Embeddings should outlive the process that made them.",
)
def survives_a_restart(place: Place) -> None:
    """An engine that was restarted loads what it saved before."""
    first = place.encoder("first", host="one")
    encoded = first.ask(picture(1))
    place.stop(first)
    second, decoder = place.encoder("second", host="one"), place.decoder()
    must_answer(second.ask(picture(1)))
    require(second.encoded == [], Effect.NO_USE, "it encoded again what lies in the store")
    must_answer(decoder.ask(picture(1).without_pixels(), params=encoded.params))

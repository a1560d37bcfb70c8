# SPDX-License-Identifier: Apache-2.0
"""Chunk names of requests, with vLLM's own requests and hashes."""

from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.request import Request

from kvshare.chunks.prefix import Chunk, Grid, Prefix, covered_tokens, tail_of
from tests.kvshare.toy import BLOCK, chunks_for, make_request
from tests.releases import needs_adapter_hashes


@pytest.fixture(autouse=True)
def _none_hash() -> None:
    init_none_hash(sha256)


def chunks(request: Request, chunk_blocks: int = 1) -> tuple[Chunk, ...]:
    return chunks_for(request, chunk_blocks)


def tail(request: Request) -> Chunk | None:
    grid = Grid(BLOCK, 1)
    found = tail_of(request, grid)
    return found.chunk(grid, sha256) if found else None


@pytest.mark.parametrize("chunk_blocks", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("num_tokens", "num_blocks", "in_tail"),
    [
        (1, 0, 0),
        (2, 0, 1),
        (BLOCK, 1, 0),
        (BLOCK + 1, 1, 0),
        (BLOCK + 2, 1, 1),
        (2 * BLOCK - 1, 1, BLOCK - 2),
        (2 * BLOCK, 2, 0),
        (7 * BLOCK + 3, 7, 2),
    ],
)
def test_chunks_cover_all_tokens_but_the_last(
    num_tokens: int, num_blocks: int, in_tail: int, chunk_blocks: int
) -> None:
    request = make_request("r", range(num_tokens))
    found = chunks(request, chunk_blocks)
    assert sum(chunk.num_blocks for chunk in found) == num_blocks + (in_tail > 0)
    assert all(chunk.num_blocks == chunk_blocks for chunk in found[:-1])
    assert sum(chunk.num_tokens for chunk in found) == num_blocks * BLOCK + in_tail
    end = 0
    for chunk in found:
        assert chunk.start_tokens == BLOCK * chunk.first_block == end
        end = chunk.end_tokens
    assert covered_tokens(request, found) == num_tokens - 1


def test_full_blocks_have_vllms_own_names() -> None:
    request = make_request("r", range(3 * BLOCK))
    assert [bytes(chunk.key) for chunk in chunks(request)] == request.block_hashes


def test_a_chunk_is_named_by_its_last_block() -> None:
    request = make_request("r", range(8 * BLOCK))
    named = [request.block_hashes[index] for index in (2, 5, 7)]
    assert [bytes(chunk.key) for chunk in chunks(request, 3)] == named


def test_partial_chunks_end_at_every_block_of_the_chunk() -> None:
    prefix = Prefix.of(make_request("r", range(5 * BLOCK + 1)), Grid(BLOCK, 3))
    assert [(part.first_block, part.num_blocks) for part in prefix.partials(0)] == [(0, 2), (0, 1)]
    assert [(part.first_block, part.num_blocks) for part in prefix.partials(1)] == [(3, 2), (3, 1)]
    assert [part.num_blocks for part in prefix.partials(1, start_block=4)] == [2]
    assert prefix.partials(1, start_block=5) == []


def test_prompts_share_chunk_names_up_to_their_first_difference() -> None:
    first = chunks(make_request("a", [*range(10), 11]))
    second = chunks(make_request("b", [*range(9), 99, 11]))
    assert first[:2] == second[:2]
    assert first[2].key != second[2].key


def test_tail_name_depends_on_all_tokens_but_the_last() -> None:
    one = tail(make_request("a", [0, 1, 2, 3, 4, 5, 6]))
    assert one is not None
    assert tail(make_request("b", [0, 1, 2, 3, 4, 5, 99])) == one
    assert tail(make_request("c", [0, 1, 2, 3, 4, 99, 6])) != one
    assert tail(make_request("d", [99, 1, 2, 3, 4, 5, 6])) != one


def test_tail_name_has_a_length_of_its_own() -> None:
    """Engines that stored a prompt's last block alone gave it the name without the end."""
    request = make_request("r", range(2 * BLOCK + 2))
    tails, others = set(), set()
    for adapter in (b"", b"0123456789abcdef"):
        prefix = Prefix.of(request, Grid(BLOCK, 2, adapter))
        assert prefix.tail is not None
        tails.add(len(prefix.tail.chunk(prefix.grid, sha256).key))
        whole = prefix.whole(0)
        others |= {len(whole.key), len(prefix.grid.state_of(whole).key)}
    assert len(tails) == 2
    assert not tails & others


def picture(identifier: str, offset: int, length: int) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=identifier,
        mm_position=PlaceholderRange(offset=offset, length=length),
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({"cache_salt": "a"}, {}),
        pytest.param(
            {"lora_request": LoRARequest("a", 1, "/loras/a")},
            {"lora_request": LoRARequest("a", 1, "/loras/b")},
            marks=needs_adapter_hashes,
        ),
        # The placeholder tokens are equal: only the identifiers differ.
        ({"mm_features": [picture("a", 1, 4)]}, {"mm_features": [picture("b", 1, 4)]}),
        ({"mm_features": [picture("a", 5, 1)]}, {"mm_features": [picture("b", 5, 1)]}),
    ],
)
def test_salt_adapter_and_media_change_chunk_names(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    tokens = range(7)
    ours = chunks(make_request("a", tokens, **one))
    theirs = chunks(make_request("b", tokens, **other))
    assert ours[-1].num_tokens < BLOCK, "the last chunk is a tail"
    assert ours[-1].key != theirs[-1].key
    starts_later = "mm_features" in one and one["mm_features"][0].mm_position.offset >= BLOCK
    assert (ours[0].key == theirs[0].key) is starts_later


def test_salt_changes_the_tail_name_of_a_short_prompt() -> None:
    assert tail(make_request("a", range(3), cache_salt="a")) != tail(make_request("b", range(3)))


def test_resumed_request_has_chunks_of_its_answer_but_no_tail() -> None:
    request = make_request("r", range(BLOCK + 2), max_tokens=9)
    request.append_output_token_ids([50, 51, 52])
    found = chunks(request)
    assert Prefix.of(request, Grid(BLOCK, 1)).tail is None
    assert [bytes(chunk.key) for chunk in found] == request.block_hashes
    assert covered_tokens(request, found) == 2 * BLOCK
    request.append_output_token_ids([53, 54])
    assert covered_tokens(request, chunks(request)) == 2 * BLOCK
    request.append_output_token_ids([55])
    assert covered_tokens(request, chunks(request)) == 3 * BLOCK - 1


def test_request_resumed_before_it_has_filled_a_block_has_the_tail_of_its_prompt() -> None:
    request = make_request("r", range(BLOCK + 2), max_tokens=9)
    before = Prefix.of(request, Grid(BLOCK, 2))
    request.append_output_token_ids([50])
    assert Prefix.of(request, Grid(BLOCK, 2)) == before
    assert covered_tokens(request, chunks(request, 2)) == BLOCK + 1


def test_adapter_fingerprint_is_part_of_every_chunk_name() -> None:
    request = make_request("r", range(5 * BLOCK + 3))
    plain, tuned = (
        Prefix.of(request, Grid(BLOCK, 2, adapter)) for adapter in (b"", b"0123456789abcdef")
    )
    assert plain.identity != tuned.identity
    for one, other in zip(
        [plain.whole(0), *plain.partials(2)], [tuned.whole(0), *tuned.partials(2)], strict=True
    ):
        assert other.key == one.key + b"0123456789abcdef"
    assert plain.tail is not None
    assert plain.tail.chunk(plain.grid, sha256).key != plain.tail.chunk(tuned.grid, sha256).key

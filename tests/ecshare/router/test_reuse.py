# SPDX-License-Identifier: Apache-2.0
"""What is remembered stays within its limits, and the least recently used goes first."""

from ecshare.router.reuse import BoundedCache


def kept(cache: BoundedCache[str, int]) -> set[str]:
    return {key for key in "abcd" if cache.get(key) is not None}


def test_the_least_recently_used_goes_first() -> None:
    cache: BoundedCache[str, int] = BoundedCache(2, 100)
    cache.put("a", 1, 10)
    cache.put("b", 2, 10)
    assert cache.get("a") == 1
    cache.put("c", 3, 10)
    assert kept(cache) == {"a", "c"}
    assert (len(cache), cache.num_bytes) == (2, 20)


def test_bytes_are_bounded() -> None:
    cache: BoundedCache[str, int] = BoundedCache(10, 100)
    for key in "abc":
        cache.put(key, 1, 30)
    cache.put("d", 1, 50)
    assert kept(cache) == {"c", "d"}
    assert cache.num_bytes == 80
    cache.put("a", 1, 101)
    assert kept(cache) == set()
    assert (len(cache), cache.num_bytes) == (0, 0)


def test_a_value_is_replaced_and_forgotten() -> None:
    cache: BoundedCache[str, int] = BoundedCache(10, 100)
    cache.put("a", 1, 60)
    cache.put("a", 2, 70)
    assert cache.get("a") == 2
    assert (len(cache), cache.num_bytes) == (1, 70)
    for _ in range(2):
        cache.discard("a")
    assert cache.get("a") is None
    assert (len(cache), cache.num_bytes) == (0, 0)

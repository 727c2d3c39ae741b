"""The cache contract: one accept/raise table for dense and paged caches, and nothing lost or half done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doubles import layer_slots, write_layer
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tiny_models import ARCHITECTURES, tiny_config, torch_threads, write_tiny_model
from torch import Tensor

import pilotfish
from pilotfish.errors import CacheError, CacheFullError, InvariantError, OptionError
from pilotfish.kvcache import DenseCache, KVCache, PagedCache, PagePool
from pilotfish.kvcache import base as kvcache_base
from pilotfish.kvcache import dense as kvcache_dense
from pilotfish.model import ForwardInput, Transformer, run_forward
from pilotfish.ops.backend import AttentionInputs, AttentionLayers, HeadNorms
from pilotfish.ops.reference import ReferenceBackend

CONFIG = tiny_config(num_layers=2, num_kv_heads=1, num_heads=1, head_dim=2, context_length=40)
PAGE_SIZE = 4
LAYERS = range(CONFIG.num_layers)


class ShuffledPool(PagePool):
    """Hands out pages in no order, and so does every later round: nothing may rely on neighbours."""

    def __init__(self, *args: Any, seed: int = 0) -> None:
        super().__init__(*args)
        self._rng = np.random.default_rng(seed)
        self._rng.shuffle(self._free)

    def give_back(self, page_ids: Iterable[int]) -> None:
        super().give_back(page_ids)
        self._rng.shuffle(self._free)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


@pytest.fixture(params=["dense", "paged", "paged, shuffled"])
def cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[KVCache]:
    """A cache of 40 tokens at most, which starts small; its accounts are checked at the end."""
    if request.param == "dense":
        monkeypatch.setattr(kvcache_dense, "_FIRST_CAPACITY", PAGE_SIZE)
        dense = DenseCache(CONFIG)
        yield dense
        dense.check_integrity()
    else:
        pool = (PagePool if request.param == "paged" else ShuffledPool)(CONFIG, 30, PAGE_SIZE)
        paged = PagedCache(pool, CONFIG.context_length)
        yield paged
        paged.check_integrity()
        pool.check_integrity([paged])


# -- writing recognisable values, and reading them back through the page table ------------------------------------


def slots_of(cache: KVCache, positions: range) -> Tensor:
    size = cache.store.page_size
    return torch.tensor([cache.page_ids[p // size] * size + p % size for p in positions], dtype=torch.int32)


def row(layer: int, mark: int) -> tuple[Tensor, Tensor]:
    """Keys and values that no other layer or mark has."""
    return torch.tensor([[layer + 1.0, mark]]), torch.tensor([[-layer - 1.0, -mark]])


def write(cache: KVCache, marks: list[int], layers: range = LAYERS) -> None:
    """What a forward does after `reserve`: each layer writes rows for the marks behind `length`."""
    slots = slots_of(cache, range(cache.length, cache.length + len(marks)))
    for layer in layers:
        k, v = (torch.stack(rows) for rows in zip(*(row(layer, mark) for mark in marks), strict=True))
        write_layer(cache.store, layer, slots, k, v)


def append(cache: KVCache, marks: list[int]) -> None:
    cache.reserve(len(marks))
    if marks:
        write(cache, marks)
    cache.advance(len(marks))


def content(cache: KVCache) -> list[int]:
    """The marks held, each layer's own keys and values seen to agree with them."""
    slots = slots_of(cache, range(cache.length)).long()
    marks = layer_slots(cache.store, 0)[0][slots, 0, 1].int().tolist()
    for layer in LAYERS:
        keys, values = layer_slots(cache.store, layer)
        for slot, mark in zip(slots.tolist(), marks, strict=True):
            k, v = row(layer, mark)
            assert torch.equal(keys[slot], k)
            assert torch.equal(values[slot], v)
    return marks


def state(cache: KVCache) -> dict[str, Any]:
    """Everything a cache and its store are made of, tensors by value."""
    return {
        f"{type(owner).__name__}.{name}": value.tolist() if isinstance(value, Tensor) else _plain(value)
        for owner in (cache, cache.store)
        for name, value in vars(owner).items()
    }


def _plain(value: object) -> object:
    if isinstance(value, (list, set, dict)):
        return repr(sorted(value) if isinstance(value, set) else value)
    # A store or a pool is compared by its own fields, and must stay the same object.
    return value if isinstance(value, (int, str, bool)) else id(value)


def test_the_state_that_tests_compare_is_complete(cache: KVCache) -> None:
    """A change of any kind shows in `state`."""
    append(cache, [1, 2, 3])
    before = state(cache)
    assert state(cache) == before
    names = {name.split(".")[1] for name in before}
    assert names >= {"_length", "_reserved", "_released", "page_ids", "keys", "values", "filled"}
    cache.store.keys[0, cache.page_ids[0], 0] += 1
    assert state(cache) != before
    cache.store.keys[0, cache.page_ids[0], 0] -= 1
    assert state(cache) == before
    cache.reserve(1)
    assert state(cache) != before


# -- the accept/raise table ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 8, 11, 12, 40])
def test_rewind_by_every_legal_number(cache: KVCache, length: int) -> None:
    """Zero, within a page, to its edge, across several and in full."""
    for n in range(length + 1):
        append(cache, list(range(100, 100 + length)))
        cache.rewind(n)
        assert cache.length == length - n
        assert cache.layer_lengths == [length - n] * 2
        assert content(cache) == list(range(100, 100 + length - n))
        assert cache.room == 40 - (length - n)
        cache.check_integrity()
        cache.rewind(cache.length)
        assert content(cache) == []


@pytest.mark.parametrize("n", [-1, -(10**30), 6, 10**30, True, False, 1.0, 1.5, "1", None, [1], np.int64(1)], ids=repr)
@pytest.mark.parametrize("operation", ["rewind", "advance", "reserve"])
def test_an_illegal_number_raises_and_changes_nothing(cache: KVCache, operation: str, n: Any) -> None:
    append(cache, [1, 2, 3, 4, 5])
    cache.reserve(5)
    if operation == "reserve" and n == 6 and not isinstance(n, bool):
        return  # which is legal
    before = state(cache)
    with pytest.raises(CacheError) as caught:
        getattr(cache, operation)(n)
    assert type(caught.value) is (CacheFullError if operation == "reserve" and n == 10**30 else CacheError)
    assert state(cache) == before
    cache.check_integrity()


@pytest.mark.parametrize("operation", ["rewind", "advance", "reserve"])
@pytest.mark.parametrize("n", [0, 1])
def test_after_release_everything_raises_and_changes_nothing(cache: KVCache, operation: str, n: int) -> None:
    append(cache, [1, 2, 3, 4, 5])
    cache.release()
    before = state(cache)
    with pytest.raises(CacheError, match="released"):
        getattr(cache, operation)(n)
    assert state(cache) == before


def test_release_gives_everything_back_and_is_idempotent(cache: KVCache) -> None:
    append(cache, list(range(11)))
    cache.reserve(9)
    cache.release()
    assert (cache.length, cache.layer_lengths, list(cache.page_ids)) == (0, [0, 0], [])
    before = state(cache)
    cache.release()
    assert state(cache) == before
    cache.check_integrity()
    if isinstance(cache.store, PagePool):
        assert cache.store.num_free_pages == 30
        assert cache.store.filled.sum() == 0
    else:
        assert cache.store.num_pages == 0


def test_rewind_drops_reserved_slots_too(cache: KVCache) -> None:
    append(cache, [1, 2, 3])
    pages = list(cache.page_ids)
    cache.reserve(20)
    cache.rewind(0)
    assert list(cache.page_ids) == pages
    with pytest.raises(CacheError, match="only 0 slots"):
        cache.advance(1)
    assert content(cache) == [1, 2, 3]


def test_rewind_forgets_what_was_written_but_not_advanced(cache: KVCache) -> None:
    """A forward that fails after some layers wrote: the layers' own account is right again."""
    append(cache, [1, 2, 3])
    cache.reserve(7)
    write(cache, [4, 5, 6, 7, 8, 9, 10], layers=range(1))
    assert cache.layer_lengths == [10, 3]
    with pytest.raises(InvariantError, match=r"10, 3"):
        cache.check_integrity()
    cache.rewind(0)
    assert cache.layer_lengths == [3, 3]
    cache.check_integrity()
    append(cache, [14, 15])
    assert content(cache) == [1, 2, 3, 14, 15]


def test_advance_in_parts_but_no_further_than_reserved(cache: KVCache) -> None:
    cache.reserve(5)
    write(cache, [1, 2, 3, 4, 5])
    cache.advance(0)
    cache.advance(2)
    assert content(cache) == [1, 2]
    cache.advance(3)
    before = state(cache)
    with pytest.raises(CacheError, match=r"advance\(1\): only 0"):
        cache.advance(1)
    assert state(cache) == before
    assert content(cache) == [1, 2, 3, 4, 5]


def test_a_second_reserve_counts_from_the_length(cache: KVCache) -> None:
    cache.reserve(8)
    cache.reserve(2)
    before = state(cache)
    with pytest.raises(CacheError):
        cache.advance(3)
    assert state(cache) == before
    write(cache, [1, 2])
    cache.advance(2)
    assert content(cache) == [1, 2]


@pytest.mark.parametrize("length", [0, 5, 8, 40])
def test_the_context_is_the_limit_to_the_token(cache: KVCache, length: int) -> None:
    append(cache, list(range(length)))
    room = 40 - length
    assert cache.room == room
    before = state(cache)
    with pytest.raises(CacheFullError, match=r"41 tokens do not fit into the context of 40"):
        cache.reserve(room + 1)
    assert state(cache) == before
    append(cache, list(range(room)))
    assert (cache.length, cache.room) == (40, 0)
    cache.reserve(0)


def test_a_context_that_is_no_multiple_of_a_page() -> None:
    pool = PagePool(CONFIG, 30, PAGE_SIZE)
    for cache in (DenseCache(CONFIG, 10), PagedCache(pool, 10)):
        append(cache, list(range(10)))
        assert cache.room == 0
        with pytest.raises(CacheFullError):
            cache.reserve(1)
        cache.check_integrity()


def test_storage_grows_on_demand_and_keeps_every_bit(cache: KVCache) -> None:
    sizes = [cache.store.num_pages * cache.store.page_size]
    for length in range(40):
        append(cache, [1000 + length])
        assert content(cache) == list(range(1000, 1001 + length))
        assert cache.layer_lengths == [length + 1] * 2
        sizes.append(cache.store.num_pages * cache.store.page_size)
    assert sizes == sorted(sizes)
    if isinstance(cache, DenseCache):
        assert sorted({*sizes}) == [4, 8, 16, 32, 40]


@pytest.mark.parametrize("failing_call", [1, 2])
def test_without_memory_to_grow_nothing_changes(
    cache: KVCache, monkeypatch: pytest.MonkeyPatch, failing_call: int
) -> None:
    append(cache, [1, 2, 3])
    if isinstance(cache.store, PagePool):  # the next page lies beyond the pages there are storage for
        cache.store._free.sort(key=lambda page: (page != 29, page), reverse=True)
    before, calls, honest = state(cache), [], kvcache_base._pages

    def failing(*args: Any) -> Tensor:
        calls.append(args)
        if len(calls) == failing_call:
            raise MemoryError
        return honest(*args)

    monkeypatch.setattr(kvcache_base, "_pages", failing)
    with pytest.raises(MemoryError):
        cache.reserve(2)
    assert len(calls) == failing_call
    assert state(cache) == before
    append(cache, [4, 5])
    assert content(cache) == [1, 2, 3, 4, 5]


def test_a_layer_that_did_not_write_is_noticed(cache: KVCache) -> None:
    append(cache, [1, 2, 3, 4, 5])
    cache.reserve(2)
    write(cache, [6, 7], layers=range(1))
    cache.advance(2)
    assert cache.layer_lengths == [7, 5]
    with pytest.raises(InvariantError, match=r"holds 7 tokens, its layers \[7, 5\]"):
        cache.check_integrity()
    cache.rewind(2)


def test_rows_past_the_length_are_noticed(cache: KVCache) -> None:
    append(cache, [1, 2])
    cache.reserve(3)
    write(cache, [3, 4, 5])
    cache.advance(1)
    with pytest.raises(InvariantError, match=r"holds 3 tokens, its layers \[5, 5\]"):
        cache.check_integrity()
    cache.rewind(0)


@pytest.mark.parametrize(
    "damage",
    [
        {"_length": -1},
        {"_length": 3},
        {"_length": 6},
        {"_reserved": 36},
        {"_reserved": -6},
        {"_released": True},
    ],
    ids=str,
)
def test_accounts_that_do_not_agree_are_noticed(cache: KVCache, damage: dict[str, object]) -> None:
    append(cache, [1, 2, 3, 4, 5])
    sound = {name: getattr(cache, name) for name in damage}
    vars(cache).update(damage)
    with pytest.raises(InvariantError, match=r"\d"):
        cache.check_integrity()
    vars(cache).update(sound)
    cache.check_integrity()


# -- pages --------------------------------------------------------------------------------------------------------


class CountingPool(ShuffledPool):
    """Keeps a record of what is given back."""

    def give_back(self, page_ids: Iterable[int]) -> None:
        page_ids = list(page_ids)
        super().give_back(page_ids)
        self.returned = [*getattr(self, "returned", []), *page_ids]


@pytest.mark.parametrize("length", [1, 4, 5, 11, 12, 13])
@pytest.mark.parametrize("reserved", [0, 1, 9])
def test_a_paged_rewind_returns_every_page_past_the_cut_once(length: int, reserved: int) -> None:
    for n in range(length + 1):
        pool = CountingPool(CONFIG, 30, PAGE_SIZE)
        cache, other = PagedCache(pool, 40), PagedCache(pool, 40)
        append(other, [7] * 6)
        append(cache, list(range(length)))
        cache.reserve(reserved)
        pages = list(cache.page_ids)
        cache.rewind(n)
        kept = -(-(length - n) // PAGE_SIZE)
        assert cache.page_ids == pages[:kept]
        assert pool.returned == pages[kept:]
        assert pool.num_free_pages == 30 - 2 - kept
        assert pool.filled[:, pages[kept:]].sum() == 0
        if kept:
            assert pool.filled[:, pages[kept - 1]].tolist() == [length - n - (kept - 1) * PAGE_SIZE] * 2
        pool.check_integrity([cache, other])
        assert content(other) == [7] * 6
        assert content(cache) == list(range(length - n))


def test_shuffled_pages_are_no_neighbours() -> None:
    """The double does what it is for."""
    cache = PagedCache(ShuffledPool(CONFIG, 30, PAGE_SIZE), 40)
    append(cache, list(range(40)))
    assert cache.page_ids not in (sorted(cache.page_ids), sorted(cache.page_ids, reverse=True))
    assert content(cache) == list(range(40))


def test_a_pool_without_pages_refuses_and_changes_nothing() -> None:
    pool = PagePool(CONFIG, 3, PAGE_SIZE)
    first, second = PagedCache(pool, 40), PagedCache(pool, 40)
    append(first, list(range(6)))
    append(second, [50])
    assert (first.room, second.room) == (2, 3)
    for cache, n in ((first, 3), (second, 4)):
        before = state(cache)
        with pytest.raises(CacheFullError, match=r"1 pages are needed, 0 of 3 are free"):
            cache.reserve(n)
        assert state(cache) == before
    append(first, [6, 7])
    second.release()
    assert first.room == 4
    append(first, [8, 9, 10, 11])
    assert content(first) == list(range(12))
    pool.check_integrity([first])


def test_all_or_nothing_when_some_pages_are_free() -> None:
    pool = PagePool(CONFIG, 5, PAGE_SIZE)
    cache = PagedCache(pool, 40)
    append(cache, [1, 2])
    before = state(cache)
    with pytest.raises(CacheFullError, match=r"5 pages are needed, 4 of 5 are free"):
        cache.reserve(20)
    assert state(cache) == before
    assert cache.room == 18


@pytest.mark.parametrize("page_ids", [[3], [0, 0], [0, 99], [1, 0, 2], [-1], [0, 1, 0]], ids=str)
def test_a_page_given_back_twice_raises_and_changes_nothing(page_ids: list[int]) -> None:
    pool = PagePool(CONFIG, 30, PAGE_SIZE)
    assert sorted(pool.take(2)) == [0, 1]
    before = state(PagedCache(pool, 40))
    with pytest.raises(CacheError, match="given back but not in use"):
        pool.give_back(page_ids)
    after = state(PagedCache(pool, 40))
    assert after == before
    pool.give_back(iter([1, 0]))
    assert pool.num_free_pages == 30
    with pytest.raises(CacheError):
        pool.give_back([0])


def test_a_leaked_page_is_noticed() -> None:
    pool = PagePool(CONFIG, 30, PAGE_SIZE)
    cache = PagedCache(pool, 40)
    append(cache, list(range(9)))
    pool.check_integrity([cache])
    lost = cache.page_ids.pop()
    with pytest.raises(InvariantError, match=rf"{lost}\] as used"):
        pool.check_integrity([cache])
    cache.page_ids.append(lost)
    pool.check_integrity([cache])
    with pytest.raises(InvariantError):
        pool.check_integrity([])


def test_a_page_that_is_nowhere_is_noticed() -> None:
    pool = PagePool(CONFIG, 30, PAGE_SIZE)
    pool._free.remove(17)
    with pytest.raises(InvariantError, match="29 free and 0 used"):
        pool.check_integrity()


def test_a_page_held_twice_is_noticed() -> None:
    pool = PagePool(CONFIG, 30, PAGE_SIZE)
    first, second = PagedCache(pool, 40), PagedCache(pool, 40)
    append(first, [1, 2, 3, 4])
    append(second, [5, 6, 7, 8])
    own, second.page_ids = second.page_ids, list(first.page_ids)
    with pytest.raises(InvariantError, match="caches hold the pages"):
        pool.check_integrity([first, second])
    second.page_ids = own
    first.page_ids *= 2
    first._length = 8
    with pytest.raises(InvariantError, match="a page stands twice"):
        first.check_integrity()


def test_a_page_both_free_and_used_is_noticed() -> None:
    pool = PagePool(CONFIG, 30, PAGE_SIZE)
    cache = PagedCache(pool, 40)
    append(cache, [1])
    pool._free[0] = cache.page_ids[0]
    with pytest.raises(InvariantError, match="29 free and 1 used pages are not 30"):
        pool.check_integrity([cache])


def test_a_released_cache_that_kept_pages_is_noticed(cache: KVCache) -> None:
    append(cache, [1])
    page_ids = list(cache.page_ids)
    cache.release()
    vars(cache)["page_ids"] = page_ids
    with pytest.raises(InvariantError, match="a released cache holds"):
        cache.check_integrity()
    vars(cache)["page_ids"] = []


@pytest.mark.parametrize(("max_pages", "page_size"), [(0, 16), (-1, 16), (4, 0), (4, -1)])
def test_a_pool_needs_pages_and_slots(max_pages: int, page_size: int) -> None:
    with pytest.raises(OptionError):
        PagePool(CONFIG, max_pages, page_size)


def test_a_pool_takes_storage_as_pages_are_needed() -> None:
    pool = PagePool(CONFIG, 100, PAGE_SIZE)
    cache = PagedCache(pool, 400)
    seen = {pool.num_pages}
    for mark in range(400):
        append(cache, [mark])
        seen.add(pool.num_pages)
    assert seen == {16, 32, 64, 100}
    assert content(cache) == list(range(400))


# -- any order of operations --------------------------------------------------------------------------------------


class CacheMachine(RuleBasedStateMachine):
    """Caches over one small pool, and dense ones beside them, against plain lists of what each must hold."""

    @initialize(page_size=st.integers(1, 5), max_pages=st.integers(4, 20), seed=st.integers(0, 99))
    def make_pool(self, page_size: int, max_pages: int, seed: int) -> None:
        self.pool = ShuffledPool(CONFIG, max_pages, page_size, seed=seed)
        self.caches: list[tuple[KVCache, list[int]]] = []
        self.next_mark = 1

    def choose(self, index: int) -> tuple[KVCache, list[int]]:
        return self.caches[index % len(self.caches)]

    def marks(self, count: int) -> list[int]:
        self.next_mark += count
        return list(range(self.next_mark - count, self.next_mark))

    @rule(paged=st.booleans())
    def add_cache(self, paged: bool) -> None:
        if len(self.caches) < 5:
            self.caches.append((PagedCache(self.pool, 40) if paged else DenseCache(CONFIG), []))

    @precondition(lambda self: self.caches)
    @rule(index=st.integers(0, 9), count=st.integers(0, 17))
    def append(self, index: int, count: int) -> None:
        cache, expected = self.choose(index)
        if count > cache.room:
            before = state(cache)
            with pytest.raises(CacheFullError):
                cache.reserve(count)
            assert state(cache) == before
            return
        marks = self.marks(count)
        append(cache, marks)
        expected += marks

    @precondition(lambda self: self.caches)
    @rule(index=st.integers(0, 9), count=st.integers(1, 9), kept=st.integers(0, 9), layers=st.integers(0, 2))
    def forward_cut_short(self, index: int, count: int, kept: int, layers: int) -> None:
        """Written by some layers only, or by all and partly kept: the shape of a failure and of a rejection."""
        cache, expected = self.choose(index)
        count = min(count, cache.room)
        if not count:
            return
        marks = self.marks(count)
        cache.reserve(count)
        write(cache, marks, range(layers))
        if layers == len(LAYERS):
            cache.advance(count)
            cache.rewind(count - min(kept, count))
            expected += marks[: min(kept, count)]
        else:
            cache.rewind(0)

    @precondition(lambda self: self.caches)
    @rule(index=st.integers(0, 9), n=st.integers(-2, 45))
    def rewind(self, index: int, n: int) -> None:
        cache, expected = self.choose(index)
        if 0 <= n <= len(expected):
            cache.rewind(n)
            del expected[len(expected) - n :]
        else:
            before = state(cache)
            with pytest.raises(CacheError):
                cache.rewind(n)
            assert state(cache) == before

    @precondition(lambda self: self.caches)
    @rule(index=st.integers(0, 9))
    def release(self, index: int) -> None:
        cache, _ = self.caches.pop(index % len(self.caches))
        cache.release()
        cache.release()
        with pytest.raises(CacheError):
            cache.reserve(0)
        cache.check_integrity()

    @invariant()
    def everything_is_as_it_should_be(self) -> None:
        if not hasattr(self, "caches"):
            return
        paged = [cache for cache, _ in self.caches if isinstance(cache, PagedCache)]
        self.pool.check_integrity(paged)
        used = 0
        for cache, expected in self.caches:
            cache.check_integrity()
            assert cache.length == len(expected)
            assert cache.layer_lengths == [len(expected)] * 2
            assert content(cache) == expected
            if isinstance(cache, PagedCache):
                assert len(cache.page_ids) == -(-len(expected) // self.pool.page_size)
                used += len(cache.page_ids)
        assert self.pool.num_free_pages == self.pool.max_pages - used


TestAnyOrderOfOperations = CacheMachine.TestCase
TestAnyOrderOfOperations.settings = settings(settings.default, stateful_step_count=30)


# -- with a model -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    path = write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf", request.param)
    return pilotfish.load(path)[0]


def logits_of(model: Transformer, cache: KVCache, token_ids: list[int]) -> Tensor:
    cache.reserve(len(token_ids))
    return run_forward(model, [ForwardInput(cache, token_ids, len(token_ids))])[0]


@pytest.mark.parametrize("make", [DenseCache, lambda config: PagedCache(ShuffledPool(config, 40, PAGE_SIZE), 160)])
def test_rewinding_and_writing_again_gives_the_bits_of_a_fresh_run(
    model: Transformer, make: Callable[..., KVCache]
) -> None:
    rng = np.random.default_rng(0)
    true_ids: list[int] = rng.integers(0, 268, 60).tolist()
    expected = logits_of(model, DenseCache(model.config), true_ids)
    cache, found = make(model.config), []
    while cache.length < 60:
        guess = rng.integers(0, 268, rng.integers(0, 7)).tolist()
        right = int(rng.integers(1, 6))
        start = cache.length
        fed = true_ids[start : start + right] + guess
        right = min(right, 60 - start)
        found.append(logits_of(model, cache, fed)[:right])
        assert cache.layer_lengths == [start + right + len(guess)] * 2
        cache.rewind(len(guess))
        assert cache.layer_lengths == [start + right] * 2
        cache.check_integrity()
    assert torch.equal(torch.cat(found), expected)


def test_a_forward_that_fails_leaves_every_cache_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second store's forward fails half-way: the first one's rows are taken back as well."""
    # Between the layers of the reference stands Python, where a fault can be injected.
    model, _ = pilotfish.load(write_tiny_model(tmp_path / "tiny.gguf"), backend=ReferenceBackend())
    pool = ShuffledPool(model.config, 40, PAGE_SIZE)
    caches: list[KVCache] = [PagedCache(pool, 160), DenseCache(model.config), PagedCache(pool, 160)]
    token_ids = list(range(11))
    for cache in caches:
        logits_of(model, cache, token_ids)
        cache.reserve(6)
    pages, honest = [list(cache.page_ids[:3]) for cache in caches], model._backend.make_attention
    calls: list[int] = []

    def failing(inputs: AttentionInputs) -> AttentionLayers:
        layers = honest(inputs)

        def attend(layer: int, qkv: Tensor, norms: HeadNorms | None = None) -> Tensor:
            calls.append(len(qkv))
            if len(calls) == 4:
                raise RuntimeError("injected")
            return layers(layer, qkv, norms)

        return attend

    monkeypatch.setattr(model._backend, "make_attention", failing)
    with pytest.raises(RuntimeError, match="injected"):
        run_forward(model, [ForwardInput(cache, [1, 2, 3, 4, 5, 6], 6) for cache in caches])
    monkeypatch.undo()
    assert calls == [12, 12, 6, 6]  # two layers over both paged caches, then over the dense one
    for cache, kept in zip(caches, pages, strict=True):
        assert (cache.length, cache.layer_lengths) == (11, [11, 11])
        assert list(cache.page_ids) == kept
        cache.check_integrity()
    pool.check_integrity([cache for cache in caches if isinstance(cache, PagedCache)])
    expected = logits_of(model, DenseCache(model.config), [*token_ids, 9, 8, 7])[-3:]
    for cache in caches:
        assert torch.equal(logits_of(model, cache, [9, 8, 7]), expected)


@pytest.mark.real_model
def test_a_real_model_gives_the_bits_of_a_fresh_run_after_a_rewind(model_path: Callable[[str], Path]) -> None:
    real, tokenizer = pilotfish.load(model_path("smollm2-135m"))
    token_ids = tokenizer.encode("A rejected guess must leave no trace in the cache.")
    expected = logits_of(real, DenseCache(real.config), token_ids)
    cache = PagedCache(ShuffledPool(real.config, 8, PAGE_SIZE), 32)
    logits_of(real, cache, token_ids[:5] + token_ids[::-1])
    cache.rewind(len(token_ids))
    assert torch.equal(logits_of(real, cache, token_ids[5:]), expected[5:])

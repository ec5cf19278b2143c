from __future__ import annotations

import torch

from rltr_verl.rollout import kv_cache
from rltr_verl.rollout.kv_cache import BLOCK, PrefixIndex, PrefixStore, StoredPrefix, block_hashes


def _entry(tokens: list[int]) -> StoredPrefix:
    return StoredPrefix(tokens, block_hashes(tokens), [torch.zeros(1, len(tokens), 1)])


def _find(index: PrefixIndex, prompt: list[int]) -> tuple[object, int]:
    return index.find(prompt, block_hashes(prompt), len(prompt) - 1)


def test_a_prompt_finds_the_longest_prefix_beyond_whole_blocks() -> None:
    index, common = PrefixIndex(), list(range(2 * BLOCK))
    short, long = _entry(common), _entry([*common, *range(100, 120)])
    index.add(short)
    index.add(long)
    assert _find(index, [*common, *range(100, 110), 7, 7]) == (long, 2 * BLOCK + 10)
    assert _find(index, [*range(BLOCK - 1), 999, *range(50)]) == (None, 0)


def test_the_last_prompt_token_is_always_computed() -> None:
    index, tokens = PrefixIndex(), list(range(3 * BLOCK))
    index.add(_entry(tokens))
    assert _find(index, tokens)[1] == len(tokens) - 1


def test_equal_hashes_of_different_texts_do_no_harm() -> None:
    index, stored, prompt = PrefixIndex(), list(range(BLOCK)), [9] * (BLOCK + 1)
    entry = _entry(stored)
    entry.hashes = block_hashes(prompt)
    index.add(entry)
    assert _find(index, prompt) == (None, 0)


def test_the_store_drops_the_least_recently_used_and_stays_in_bounds() -> None:
    index = PrefixIndex()
    entries = [_entry([n] * (2 * BLOCK)) for n in range(4)]
    store = PrefixStore(index, max_bytes=2 * entries[0].nbytes)
    store.put(entries[0])
    store.put(entries[1])
    store.touch(entries[0])
    store.put(entries[2])
    assert [_find(index, [*e.tokens, 5])[0] is e for e in entries] == [True, False, True, False]
    assert (len(store), store.nbytes) == (2, store.max_bytes)


def test_an_entry_larger_than_the_store_is_not_kept_and_drops_nothing() -> None:
    index = PrefixIndex()
    small = _entry(list(range(BLOCK)))
    store = PrefixStore(index, max_bytes=small.nbytes)
    store.put(small)
    store.put(_entry(list(range(100, 100 + 2 * BLOCK))))
    assert _find(index, [*small.tokens, 1])[0] is small


def test_dropping_one_owner_leaves_a_deeper_one_findable() -> None:
    """The first block may be in the name of an entry that is gone; the deeper block still leads to its owner."""
    index, common = PrefixIndex(), list(range(BLOCK))
    deep, other = _entry([*common, *range(50, 50 + BLOCK)]), _entry(common)
    store = PrefixStore(index, 1 << 20)
    store.put(deep)
    store.put(other)
    store.drop(other)
    assert _find(index, [*deep.tokens, 1])[0] is deep


def test_sliding_window_mask() -> None:
    mask = kv_cache._mask(torch.tensor([[3], [5]]), 6, window=2, dtype=torch.float32)
    assert (mask == 0).tolist() == [[False, False, True, True, False, False], [False, False, False, False, True, True]]

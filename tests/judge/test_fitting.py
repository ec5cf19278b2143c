"""Estimates of tokens err on the safe side; cuts keep head and tail, and start with the longest."""

import base64
import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltr_verl.judge.fitting import cut, estimate_tokens, fits, shares


def noise(blocks):
    return b"".join(hashlib.sha256(bytes([number % 256, number // 256])).digest() for number in range(blocks))


def rows():
    return [
        {"id": i, "title": f"Result {i}", "url": f"https://example.org/page/{i}?q=arlen", "score": 0.87}
        for i in range(40)
    ]


CODE = """\
def mean(values: list[float]) -> float:
    if not values:
        return 0.0
    return sum(values) / len(values)

"""
HTML = '<div class="result"><a href="/wiki/Arlen_(city)">Arlen</a><span>14 &deg;C</span></div>\n'
MEASURED = {  # tokens of Qwen's vocabulary (qwen.tiktoken), counted once
    "The planner searched for the temperature in Arlen, and then it compared both cities. " * 20: 341,
    "上海今日多云转晴，最高气温二十六摄氏度，东南风三到四级；请以当地气象台发布的最新预报为准。" * 20: 620,
    "評分與結論：這個規劃器並未完整涵蓋所有資訊，因此判定為不完整。" * 20: 460,
    json.dumps(rows()): 1651,
    CODE * 20: 620,
    HTML * 30: 960,
    str(int.from_bytes(noise(40), "big")): 3083,
    base64.b64encode(noise(60)).decode(): 1866,
    noise(60).hex(): 3386,
    base64.b32encode(noise(60)).decode(): 2122,
    "プランナーはツールを呼び出し、ユーザーの質問に答えるために必要な情報を集めます。" * 20: 460,
    "플래너는 도구를 호출하여 사용자의 질문에 답하는 데 필요한 정보를 수집합니다. " * 20: 480,
    "Планировщик вызывает инструменты и собирает сведения для ответа на вопрос. " * 20: 461,
    "योजनाकार उपकरणों को बुलाता है और प्रश्न का उत्तर देने के लिए जानकारी एकत्र करता है। " * 20: 1540,
    "😀🚀✅❌🧪👩‍💻" * 40: 360,
}


@pytest.mark.parametrize(("text", "tokens"), MEASURED.items(), ids=[text[:12] for text in MEASURED])
def test_never_below_what_a_real_vocabulary_counts_and_not_far_above(text, tokens):
    assert tokens <= estimate_tokens(text) <= 3.5 * tokens


@given(st.text(max_size=200), st.integers(0, 300))
def test_a_text_that_surely_fits_is_not_over_its_bytes(text, room):
    assert not fits(text, room) or min(estimate_tokens(text), len(text) * 4) <= room
    assert estimate_tokens(text) <= 1.1 * len(text.encode("utf-8", "replace")) + 1


@given(st.lists(st.tuples(st.integers(0, 10_000), st.sampled_from([1.0, 4.0])), max_size=30), st.integers(-5, 30_000))
def test_shares_fill_the_room_and_cut_only_what_is_longer_than_the_rest(items, room):
    sizes, weights = [size for size, _ in items], [weight for _, weight in items]
    kept = shares(sizes, weights, room)
    assert all(0 <= part <= size for part, size in zip(kept, sizes, strict=True))
    assert sum(kept) <= max(0, room)
    assert sum(kept) == sum(sizes) or sum(kept) > room - len(items) - 1
    levels = [part / weight for part, size, weight in zip(kept, sizes, weights, strict=True) if part < size]
    assert all(part / weight <= min(levels) + 1 for part, weight in zip(kept, weights, strict=True) if levels)


def test_weights_leave_more_to_some():
    assert shares([100, 100, 10], [1.0, 4.0, 1.0], 60) == [10, 40, 10]


def test_a_cut_says_how_much_is_missing():
    assert cut("a" * 50 + "b" * 50, 10) == "aaaaa\n[... 90 characters left out ...]\nbbbbb"
    assert cut("abc", 3) == "abc" and cut("abc", 0) == "[... 3 characters left out ...]"

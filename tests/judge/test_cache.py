"""The verdict cache on real disks, with real processes."""

import json
import logging
import multiprocessing
import os
import pickle
import resource
import shutil
import sqlite3
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from rltr_verl.config import CacheSettings
from rltr_verl.errors import CacheMiss, ConfigError, DiskError, Unscored
from rltr_verl.judge.cache import VerdictCache, build_cache

FORK = multiprocessing.get_context("fork")
REQUEST = {
    "model": "m",
    "prompt_version": "completeness_en@1",
    "sampling": {"temperature": 0.7, "max_tokens": 512},
    "vote": 0,
    "messages": [{"role": "user", "content": "问题 \ud800"}],
}


def opened(folder, mode="use", size_gb=4.0) -> VerdictCache:
    return VerdictCache(CacheSettings(dir=str(folder), mode=mode, size_gb=size_gb))


def verdict(number: int) -> dict:
    return {"verdict": float(number % 2), "reason": f"理由 {number}"}


def rows(folder) -> list[tuple[str, str]]:
    with sqlite3.connect(Path(folder) / "rltr_verdicts" / "cache.db") as connection:
        return connection.execute("SELECT key, value FROM Cache").fetchall()


def in_child(function, *args):
    """The result of a function in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=FORK) as pool:
        return pool.submit(function, *args).result(timeout=300)


def capture() -> list[str]:
    """Warnings of the package from now on; for child processes."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("rltr_verl").addHandler(handler)
    return messages


def test_no_folder_no_cache():
    assert build_cache(CacheSettings()) is None
    with pytest.raises(ConfigError, match="rltr.judge.cache.dir"):
        VerdictCache(CacheSettings())


def test_what_is_put_is_there_for_the_next_process(tmp_path):
    cache = build_cache(CacheSettings(dir=str(tmp_path / "new" / "folder")))
    assert cache.get("k") is None
    cache.put("k", verdict(1))
    assert cache.get("k") == verdict(1)
    cache.put("k", verdict(2))
    cache.close()
    assert in_child(_get, cache.folder, "k") == verdict(2)
    assert len(rows(cache.folder)) == 1


def _get(folder, key):
    return opened(folder).get(key)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "n"},
        {"prompt_version": "completeness_en@2"},
        {"sampling": {"temperature": 0.8, "max_tokens": 512}},
        {"sampling": {"temperature": 0.7}},
        {"vote": 1},
        {"messages": [{"role": "user", "content": "问题"}]},
        {"messages": [{"role": "system", "content": "问题 \ud800"}]},
    ],
)
def test_whatever_a_verdict_depends_on_changes_its_key(change):
    assert VerdictCache.key(**{**REQUEST, **change}) != VerdictCache.key(**REQUEST)


def test_the_key_is_the_same_in_every_process_and_order():
    swapped = {**REQUEST, "sampling": {"max_tokens": 512, "temperature": 0.7}}
    assert VerdictCache.key(**swapped) == VerdictCache.key(**REQUEST)
    assert VerdictCache.key(**REQUEST) == in_child(_key)
    assert len(VerdictCache.key(**REQUEST)) == 64


def _key():
    return VerdictCache.key(**REQUEST)


@pytest.mark.parametrize("value", [None, "1", True, float("nan"), -1, 1.5, [1]], ids=repr)
def test_only_readable_verdicts_are_stored(tmp_path, value):
    cache = opened(tmp_path)
    with pytest.raises(ValueError, match="only readable verdicts"):
        cache.put("k", {"verdict": value})
    with pytest.raises(ValueError):
        cache.put("k", {"failure": "HTTP 503"})
    assert rows(tmp_path) == []


def test_record_asks_always_and_replay_never(tmp_path):
    opened(tmp_path).put("k", verdict(0))
    record = opened(tmp_path, "record")
    assert record.get("k") is None
    record.put("k", verdict(1))
    record.close()
    replay = opened(tmp_path, "replay")
    assert replay.get("k") == verdict(1)
    replay.put("other", verdict(1))
    with pytest.raises(
        CacheMiss, match=r"no verdict is recorded for this request \(other\).*cache.mode=use or record"
    ) as caught:
        replay.get("other")
    assert isinstance(caught.value, Unscored)
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), CacheMiss)


def test_replay_of_nothing_is_refused_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match="holds no cache.*Fix: give the folder of a recorded cache"):
        opened(tmp_path / "none", "replay")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "text",
    ["", "not json", "[1]", '{"verdict": null}', '{"verdict": NaN}', '{"verdict": 7}', b"\x80\x04N.", 1],
    ids=repr,
)
def test_a_damaged_entry_is_a_miss_and_can_be_written_again(tmp_path, text):
    cache = opened(tmp_path)
    cache.put("k", verdict(1))
    with sqlite3.connect(tmp_path / "rltr_verdicts" / "cache.db") as connection:
        connection.execute("UPDATE Cache SET value = ?", (text,))
    assert cache.get("k") is None
    with pytest.raises(CacheMiss):
        opened(tmp_path, "replay").get("k")
    cache.put("k", verdict(1))
    assert cache.get("k") == verdict(1)


class _Evil:
    def __reduce__(self):
        return os.mkdir, (os.environ["EVIL"],)


def test_nothing_in_the_folder_is_unpickled(tmp_path, monkeypatch):
    monkeypatch.setenv("EVIL", str(tmp_path / "evil"))
    cache = opened(tmp_path / "cache")
    cache.put("k", verdict(1))
    with sqlite3.connect(cache.folder / "rltr_verdicts" / "cache.db") as connection:
        connection.execute("UPDATE Cache SET value = ?, mode = 4", (pickle.dumps(_Evil()),))
    assert cache.get("k") is None
    assert not (tmp_path / "evil").exists()


def test_the_oldest_go_beyond_the_size(tmp_path):
    cache = opened(tmp_path, size_gb=0.001)
    for number in range(3000):
        cache.put(str(number), {"verdict": 1, "reason": "x" * 1000})
    assert cache.get("0") is None and cache.get("2999")
    assert 500 < len(rows(tmp_path)) < 1500


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match="holds other files and no cache.*Fix: choose an empty folder"):
        opened(tmp_path)
    assert os.listdir(tmp_path) == ["thesis.tex"]


@pytest.mark.parametrize(
    ("mark", "said"),
    [('{"format": 2}', "format 2, not 1"), ("", "format unreadable"), ("[]", "unreadable"), ("{}", "no cache")],
)
def test_a_cache_of_another_format_is_refused(tmp_path, mark, said):
    opened(tmp_path).close()
    (tmp_path / "rltr_verdicts.json").write_text(mark)
    with pytest.raises(ConfigError, match=said):
        opened(tmp_path)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match="rltr.judge.cache.dir: '.*' cannot be used"):
        opened(tmp_path / "file" / "cache")


def _garbage(path: Path) -> None:
    path.write_bytes(b"garbage " * 4096)


def _torn(path: Path) -> None:
    """All but the first page overwritten, as by a disk that lost them."""
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (size - 4096))


@pytest.mark.parametrize("damage", [_garbage, _torn])
def test_a_corrupted_store_is_set_aside_or_read_as_misses(tmp_path, caplog, damage):
    first = opened(tmp_path)
    for number in range(500):
        first.put(str(number), verdict(number))
    first.close()
    damage(tmp_path / "rltr_verdicts" / "cache.db")
    with pytest.raises((ConfigError, CacheMiss)):
        opened(tmp_path, "replay").get("3")
    cache = opened(tmp_path)
    assert cache.get("3") is None
    cache.put("3", verdict(3))
    assert cache.get("3") == verdict(3)
    assert len(caplog.records) >= 1 and str(tmp_path) in caplog.text
    if damage is _garbage:
        assert "are set aside as rltr_verdicts.broken-" in caplog.text
        cache.close()
        assert opened(tmp_path).get("3") == verdict(3)


def test_damage_while_open_warns_once_and_scoring_goes_on(tmp_path, caplog):
    cache = opened(tmp_path)
    for number in range(500):
        cache.put(str(number), verdict(number))
    cache.close()  # into the main file; the next access opens it again
    assert cache.get("1") == verdict(1)
    _torn(tmp_path / "rltr_verdicts" / "cache.db")
    cache.close(patience_s=0)
    assert [cache.get(str(number)) for number in range(20)] == [None] * 20
    cache.put("1", verdict(1))
    assert cache.get("1") == verdict(1)
    assert len([record for record in caplog.records if "cannot read" in record.getMessage()]) == 1


def test_a_busy_store_does_not_hold_scoring_up_and_nothing_is_lost(tmp_path):
    cache = opened(tmp_path)
    other = sqlite3.connect(tmp_path / "rltr_verdicts" / "cache.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    start = time.monotonic()
    for number in range(400):
        cache.put(str(number), verdict(number))
    assert time.monotonic() - start < 300  # 400 waits of a default SQLite connection would be 2000 s
    assert cache.get("399") == verdict(399)
    assert rows(tmp_path) == []
    other.execute("COMMIT")
    cache.close()
    assert len(rows(tmp_path)) == 400


def test_what_never_got_to_the_disk_is_said(tmp_path, caplog):
    cache = opened(tmp_path)
    other = sqlite3.connect(tmp_path / "rltr_verdicts" / "cache.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    cache.put("k", verdict(1))
    cache.close(patience_s=0)
    other.close()
    assert "cannot write verdicts: 1 verdicts could not be written" in caplog.text


def _write_on_a_full_disk(folder):
    messages = capture()
    cache = opened(folder)
    cache.put("before", verdict(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    for number in range(2000):
        cache.put(str(number), {"verdict": 1, "reason": "x" * 500})
    while_full = [cache.get("before"), cache.get("1999")["verdict"]], list(messages)
    others = sqlite3.connect(folder / "rltr_verdicts" / "cache.db", timeout=0, isolation_level=None)
    others.execute("BEGIN IMMEDIATE")  # no lock is left behind
    others.close()
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    cache.close()
    after = opened(folder)
    return *while_full, [after.get(str(number)) for number in range(2000)]


def test_a_full_disk_warns_once_and_loses_nothing_once_there_is_room(tmp_path):
    while_full, messages, after = in_child(_write_on_a_full_disk, tmp_path)
    assert while_full == [verdict(1), 1]
    assert len(messages) == 1 and "cannot write verdicts" in messages[0]
    assert all(after)


def _open_on_a_full_disk(folder):
    messages = capture()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        return opened(folder).get("k"), messages
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_is_full_at_the_start_is_read_and_nothing_is_set_aside(tmp_path):
    cache = opened(tmp_path)
    cache.put("k", verdict(1))
    cache.close()
    found, messages = in_child(_open_on_a_full_disk, tmp_path)
    assert found == verdict(1)
    assert len(messages) == 1 and "cannot write verdicts" in messages[0]
    assert not list(tmp_path.glob("*.broken-*"))


@pytest.fixture
def read_only():
    """A folder outside of pytest's, which only its owner may enter."""
    folder = Path(tempfile.mkdtemp(prefix="rltr-test-"))
    folder.chmod(0o755)
    yield folder / "cache"
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755)
    shutil.rmtree(folder)


def _as_nobody(function, folder):
    if os.getuid() == 0:
        os.setuid(65534)
    return function(folder)


def _use(folder):
    messages = capture()
    cache = opened(folder)
    for number in range(3):
        cache.put(f"new{number}", verdict(1))
    found = cache.get("k"), cache.get("new0")
    cache.close(patience_s=0)
    return *found, opened(folder, "replay").get("k"), messages


def _record(folder):
    with pytest.raises(DiskError, match="cannot be written.*Fix: choose a folder") as caught:
        opened(folder, "record")
    return str(caught.value)


def test_a_read_only_folder_is_read(read_only):
    cache = opened(read_only)
    cache.put("k", verdict(1))
    cache.close()
    for path in [*read_only.rglob("*"), read_only]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    known, new, replayed, messages = in_child(_as_nobody, _use, read_only)
    assert known == new == replayed == verdict(1)
    assert len(messages) == 1 and "cannot write verdicts" in messages[0]
    assert "rltr.judge.cache.dir" in in_child(_as_nobody, _record, read_only)


def _write_some(folder, worker, start):
    start.wait()
    cache = opened(folder)
    for number in range(300):
        cache.put(f"own-{worker}-{number}", verdict(number))
        cache.put(f"shared-{number}", verdict(number))
    cache.close()


def test_processes_that_open_and_write_at_once_lose_and_double_nothing(tmp_path):
    start = FORK.Event()
    workers = [FORK.Process(target=_write_some, args=(tmp_path / "c", worker, start)) for worker in range(4)]
    for process in workers:
        process.start()
    start.set()
    for process in workers:
        process.join(60)
    assert [process.exitcode for process in workers] == [0] * 4
    keys = [key for key, _ in rows(tmp_path / "c")]
    assert len(keys) == len(set(keys)) == 4 * 300 + 300
    cache = opened(tmp_path / "c", "replay")
    assert all(cache.get(f"own-{worker}-{number}") == verdict(number) for worker in range(4) for number in range(300))


def test_processes_that_find_a_corrupted_store_at_once_set_it_aside_once(tmp_path):
    opened(tmp_path).close()
    for _ in range(5):
        _garbage(tmp_path / "rltr_verdicts" / "cache.db")
        start = FORK.Event()
        workers = [FORK.Process(target=_write_some, args=(tmp_path, worker, start)) for worker in range(4)]
        for process in workers:
            process.start()
        start.set()
        for process in workers:
            process.join(60)
        assert len(rows(tmp_path)) == 4 * 300 + 300
    assert len(list(tmp_path.glob("*.broken-*"))) == 5


def _write_for_ever(folder, sender):
    cache = opened(folder)
    for number in range(10**9):
        cache.put(str(number), verdict(number))
        sender.send(number)


def test_what_was_put_survives_a_kill(tmp_path):
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_write_for_ever, args=(tmp_path, sender))
    process.start()
    sender.close()
    for _ in range(200):
        last = receiver.recv()
    process.kill()
    process.join()
    cache = opened(tmp_path)
    assert all(cache.get(str(number)) == verdict(number) for number in range(last + 1))
    cache.put("next", verdict(1))
    assert json.loads(dict(rows(tmp_path))["next"]) == verdict(1)

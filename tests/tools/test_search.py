from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from aiohttp import web

from rltr_verl.errors import BadArguments, ConfigError, DataError, DiskError, ToolFailed
from rltr_verl.tooling import check_tools, load_tools
from rltr_verl.toolkit.document_index import DocumentIndex, build_index
from rltr_verl.toolkit.documents import Document, read_documents
from rltr_verl.tools.search import NOTHING_FOUND, search

DOCUMENTS = [
    {"key": "Arlen temperature", "text": "Arlen temperature: 41"},
    {"key": "Arlen population", "text": "Arlen population: 17"},
    {"key": "Brona temperature", "text": "Brona temperature: 63"},
    {"key": "Brona 气温", "text": "Brona 气温: 63"},
    {"key": "Brona 人口", "text": "Brona 人口: 22"},
    {"title": "The river", "text": "A river runs past Arlen and Brona."},
]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "facts.jsonl"
    path.write_text("".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in DOCUMENTS) + "\n")
    return str(path)


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("Arlen temperature", "Arlen temperature: 41"),
        ("temperature of ARLEN?", "Arlen temperature: 41"),
        ("Brona的气温", "Brona 气温: 63"),
        ("Brona 人口", "Brona 人口: 22"),
        ("ｂｒｏｎａ temperature", "Brona temperature: 63"),
        ("river", "A river runs past Arlen and Brona."),
        ("weather today", NOTHING_FOUND),
    ],
)
def test_best_document(corpus, query, text):
    assert search(query, corpus=corpus) == text


@pytest.mark.parametrize("query", ["", "  ", "?!"])
def test_a_query_without_words_is_refused(corpus, query):
    with pytest.raises(BadArguments):
        search(query, corpus=corpus)


def test_every_document_of_a_world_is_found_by_its_key(tmp_path):
    from rltr_verl.world.facts import make_facts

    path = tmp_path / "facts.jsonl"
    documents = list(make_facts(1).documents())
    path.write_text("".join(json.dumps(entry) + "\n" for entry in documents))
    assert len(documents) > 200
    for entry in documents:
        assert search(entry["key"], corpus=str(path)) == entry["text"]


def test_a_missing_or_broken_corpus_is_named_with_the_fix(tmp_path):
    with pytest.raises(DataError, match="none.jsonl.*tool_settings.search.corpus"):
        search("x", corpus=str(tmp_path / "none.jsonl"))
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "fine"}\n{"body": "no text"}\n')
    with pytest.raises(DataError, match="bad.jsonl, line 2"):
        search("x", corpus=str(path))
    path = tmp_path / "empty.jsonl"
    path.write_text("\n")
    with pytest.raises(DataError, match="no document"):
        search("x", corpus=str(path))


@pytest.fixture
def index(corpus, tmp_path):
    build_index(corpus, tmp_path / "index")
    return str(tmp_path / "index")


def test_an_index_on_disk_finds_what_the_corpus_finds(tmp_path):
    from rltr_verl.world.facts import make_facts

    path = tmp_path / "facts.jsonl"
    documents = list(make_facts(1).documents())
    path.write_text("".join(json.dumps(entry) + "\n" for entry in documents))
    assert build_index(path, tmp_path / "index") == len(documents)
    queries = [entry["key"] for entry in documents] + [entry["text"].split()[0] for entry in documents] + ["weather"]
    for query in queries:
        for k in (1, 3):
            found = search(query, index=str(tmp_path / "index"), k=k)
            assert found == search(query, corpus=str(path), k=k)


def test_an_index_is_mapped_and_not_read(index):
    opened = DocumentIndex.open(index)
    maps = Path("/proc/self/maps").read_text()
    assert all(f"{index}/{name}" in maps for name in ("data.csc.index.npy", "indices.csc.index.npy", "documents.arrow"))
    assert len(opened) == len(DOCUMENTS)


def test_threads_share_an_index(index):
    with ThreadPoolExecutor(16) as pool:
        queries = [entry["text"] for entry in DOCUMENTS] * 50
        found = list(pool.map(lambda query: search(query, index=index), queries))
    assert found == queries


def test_several_results_are_numbered(tmp_path):
    path = tmp_path / "documents.jsonl"
    rows = [
        {"title": "Arlen", "text": "A town.", "url": "http://arlen.test"},
        {"text": "Arlen is small. " * 100},
        {"key": "B", "text": "Brona"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = search("arlen", corpus=str(path), k=5, max_chars=20).split("\n\n")
    assert first == "[1]\nArlen is small. Arle ..."
    assert second == "[2] Arlen (http://arlen.test)\nA town."
    assert search("brona", corpus=str(path)) == "Brona"


def test_equal_documents_come_in_their_order():
    index = DocumentIndex.of([Document(f"same words {n % 2}", str(n)) for n in range(10)])
    assert [found.title for found in index.find("same", 3)] == ["0", "1", "2"]
    assert [found.title for found in index.find("1", 20)][:4] == ["1", "3", "5", "7"]


def test_a_parquet_file_is_a_corpus(tmp_path):
    path = tmp_path / "documents.parquet"
    pq.write_table(pa.table({"contents": ["Arlen: 41", "Brona: 63"], "id": [1, 2], "title": ["a", None]}), path)
    assert search("brona", corpus=str(path)) == "Brona: 63"
    pq.write_table(pa.table({"body": ["Arlen"]}), path)
    with pytest.raises(DataError, match="documents.parquet, row 1"):
        build_index(path, tmp_path / "index")
    path.write_bytes(b"no parquet")
    with pytest.raises(DataError, match="cannot read"):
        build_index(path, tmp_path / "index")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["documents.parquet"]


def test_line_separators_inside_of_a_text_do_not_end_a_line(tmp_path):
    path = tmp_path / "documents.jsonl"
    path.write_text(json.dumps({"text": "Arlen\u2028\u0085town"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert search("town", corpus=str(path)) == "Arlen\u2028\u0085town"


def test_lone_surrogates_of_a_document_are_replaced(tmp_path):
    path = tmp_path / "documents.jsonl"
    path.write_text('{"text": "Arlen \\ud800 t\\u00f6wn \\ud83d\\ude00"}\n')
    build_index(path, tmp_path / "index")
    assert search("Arlen", index=str(tmp_path / "index")) == "Arlen \ufffd t\u00f6wn \U0001f600"


def test_an_index_is_whole_or_not_there(corpus, tmp_path):
    out = tmp_path / "index"
    broken = tmp_path / "broken.jsonl"
    broken.write_text(Path(corpus).read_text() + "{\n")
    with pytest.raises(DataError, match="broken.jsonl, line"):
        build_index(broken, out)
    assert not out.exists()
    build_index(corpus, out)
    opened = DocumentIndex.open(out)
    with pytest.raises(DataError, match="an index is here"):
        build_index(corpus, out)
    with pytest.raises(DataError, match="broken.jsonl"):
        build_index(broken, out, overwrite=True)
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "Arlen temperature: 42"}\n')
    build_index(other, out, overwrite=True)
    assert search("Arlen", index=str(out)) == "Arlen temperature: 42"
    assert opened.find("Arlen temperature")[0].text == "Arlen temperature: 41"  # whoever has it open keeps the old one
    assert not [item for item in tmp_path.iterdir() if item.name.startswith(".")]
    (tmp_path / "mine").mkdir()
    with pytest.raises(DataError, match="no search index is here"):
        build_index(corpus, tmp_path / "mine", overwrite=True)


@pytest.mark.parametrize("place", ["file/index", "link"])
def test_an_index_that_cannot_be_written_is_one_error(corpus, tmp_path, place):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises((DataError, DiskError), match=rf"{tmp_path / place}: .*Fix: choose another folder"):
        build_index(corpus, tmp_path / place)


def test_an_index_older_than_its_documents_says_so(corpus, tmp_path, caplog):
    build_index(corpus, tmp_path / "index")
    DocumentIndex.open(tmp_path / "index")
    assert not caplog.records
    with open(corpus, "a", encoding="utf-8") as file:
        file.write("\n")
    DocumentIndex.open(tmp_path / "index")
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"documents in {corpus} have changed" in said and "--overwrite" in said
    Path(corpus).unlink()
    DocumentIndex.open(tmp_path / "index")
    assert len(caplog.records) == 1


def test_bytes_of_a_parquet_file_are_read_as_text(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["Arlen täwn".encode()], "title": [b"Arlen"]}), path)
    assert list(read_documents(path)) == [Document("Arlen täwn", "Arlen")]
    pq.write_table(pa.table({"text": [b"fine", b"\xff\xfe"]}), path)
    with pytest.raises(DataError, match="a.parquet, row 2: bytes that are not UTF-8"):
        list(read_documents(path))


def test_what_is_no_index_is_named_with_the_fix(index, tmp_path):
    with pytest.raises(DataError, match="no search index is here.*rltr search-index"):
        search("x", index=str(tmp_path))
    manifest = Path(index) / "manifest.json"
    whole = manifest.read_text()
    manifest.write_text(whole.replace('"version": 1', '"version": 99'))
    with pytest.raises(DataError, match="version 99 found"):
        DocumentIndex.open(index)
    manifest.write_text(whole)
    for torn, name in ((b"torn", "documents.arrow"), (b"", "indptr.csc.index.npy")):
        (Path(index) / name).write_bytes(torn)
        with pytest.raises(DataError, match="damaged"):
            DocumentIndex.open(index)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "not set where to search"),
        ({"corpus": "a", "index": "b"}, "either corpus or index"),
        ({"backend": "index", "corpus": "a"}, "backend=index needs 'index'"),
        ({"backend": "json"}, "backend=json needs 'url'"),
        ({"backend": "serper"}, "SERPER_API_KEY is not set"),
        ({"corpus": "a", "k": -1}, "k: -1 is no limit"),
        ({"corpus": "a", "max_chars": 0}, "max_chars: 0 is no limit"),
        ({"backend": "google"}, "rltr.tool_settings.search.backend"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_start(settings, message, monkeypatch):
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=message):
        check_tools(load_tools(["search"], {"search": settings}))


class Server:
    """A search server: answers what the test says, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict] = []
        self.headers: list = []
        self.replies: list = []
        self.url = ""

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        self.asked.append({**request.query, **(json.loads(body) if body else {}), "path": request.path})
        self.headers.append(request.headers)
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, float):
            await asyncio.sleep(reply)
        return reply() if callable(reply) else web.json_response(reply)

    async def ask(self, query: str, **settings) -> str:
        return await asyncio.to_thread(search, query, **{"url": self.url, **settings})


@pytest.fixture
async def server():
    answers = Server()
    runner = web.ServerRunner(web.Server(answers.handle), shutdown_timeout=0.1)
    await runner.setup()
    place = web.TCPSite(runner, "127.0.0.1", 0)
    await place.start()
    answers.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield answers
    await runner.cleanup()


RIVER = {"id": "7", "contents": "The river runs past Arlen.", "title": "River"}


@pytest.mark.parametrize(
    ("scores", "reply"),
    [
        (True, {"result": [[{"document": RIVER, "score": 3.5}]]}),
        (False, {"result": [[RIVER]]}),
        (True, {"result": [[RIVER]]}),
        (False, {"result": [[{"document": RIVER, "score": 3.5}]]}),
        (True, [[RIVER]]),
        (True, {"results": [RIVER]}),
        (True, {"documents": [[{"title": "River", "text": RIVER["contents"]}]], "scores": [[1.0]]}),
    ],
)
async def test_a_json_server_with_and_without_scores(server, scores, reply):
    server.replies = [reply]
    assert await server.ask("q", backend="json", k=3, scores=scores) == "[1] River\nThe river runs past Arlen."
    assert server.asked == [{"queries": ["q"], "topk": 3, "return_scores": scores, "path": "/"}]


async def test_texts_alone_and_no_result(server):
    server.replies = [{"result": [["one", "two", "three"]]}, {"result": [[]]}]
    assert await server.ask("q", backend="json", k=2) == "[1]\none\n\n[2]\ntwo"
    assert await server.ask("q", backend="json") == NOTHING_FOUND


async def test_searxng(server):
    server.replies = [{"results": [{"title": "River", "url": "http://r.test", "content": "Long."}] * 9}]
    text = await server.ask("a river", backend="searxng", fields={"language": "de"})
    assert text.split("\n\n")[4] == "[5] River (http://r.test)\nLong." and text.count("River") == 5
    assert server.asked == [{"q": "a river", "format": "json", "language": "de", "path": "/search"}]
    server.replies = [lambda: web.Response(status=403)]
    with pytest.raises(ToolFailed, match="HTTP 403.*json under search.formats"):
        await server.ask("q", backend="searxng", url=server.url + "/search")


async def test_serper(server, monkeypatch):
    monkeypatch.setenv("MY_KEY", "k-123")
    organic = [{"title": "River", "link": "http://r.test", "snippet": "Long."}]
    server.replies = [{"answerBox": {"title": "Length", "answer": "41 km"}, "organic": organic}]
    text = await server.ask("river", backend="serper", key_env="MY_KEY", k=3)
    assert text == "[1] Length\n41 km\n\n[2] River (http://r.test)\nLong."
    assert server.asked == [{"q": "river", "num": 3, "path": "/"}] and server.headers[0]["X-API-KEY"] == "k-123"


@pytest.mark.parametrize("status", [500, 502, 503, 408])
async def test_a_server_that_fails_is_a_fault_of_the_surroundings(server, status):
    server.replies = [lambda: web.Response(status=status)]
    with pytest.raises(ConnectionError, match=f"HTTP {status}"):
        await server.ask("q", backend="json")
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    "reply",
    [
        lambda: web.Response(status=400),
        lambda: web.Response(text="<html>"),
        lambda: web.Response(text="[" * 100_000),
        {"error": "x"},
        {"result": [[{"no": "text"}]]},
        "text",
        None,
        {"result": {"a": 1}},
    ],
)
async def test_what_is_no_list_of_results_is_tool_failed(server, reply):
    server.replies = [reply]
    with pytest.raises(ToolFailed):
        await server.ask("q", backend="json")


async def test_a_429_is_waited_out_once(server):
    later = formatdate(time.time() + 1, usegmt=True)
    busy = [lambda after=after: web.Response(status=429, headers={"Retry-After": after}) for after in ("0.2", later)]
    for first in busy:
        server.replies = [first, {"result": [["one"]]}]
        assert await server.ask("q", backend="json") == "[1]\none"
    server.asked.clear()
    server.replies = [busy[0]]
    with pytest.raises(ConnectionError, match="HTTP 429"):
        await server.ask("q", backend="json")
    assert len(server.asked) == 2
    server.replies = [lambda: web.Response(status=429, headers={"Retry-After": "3600"})]
    with pytest.raises(ConnectionError, match="no reply from .* within 0.5 s"):
        await server.ask("q", backend="json", timeout_s=0.5)


async def test_a_server_that_hangs_or_is_not_there(server):
    server.replies = [30.0]
    with pytest.raises(ConnectionError, match="no reply from .* within 0.3 s"):
        await server.ask("q", backend="json", timeout_s=0.3)
    with pytest.raises(ConnectionError, match="http://127.0.0.1:9"):
        await server.ask("q", backend="json", url="http://127.0.0.1:9")


async def test_the_check_asks_the_server_once(server):
    server.replies = [{"result": [[]]}]
    tools = load_tools(["search"], {"search": {"backend": "json", "url": server.url}})
    await asyncio.to_thread(check_tools, tools)
    assert len(server.asked) == 1
    server.replies = [lambda: web.Response(status=401)]
    with pytest.raises(ConfigError, match="rltr.tool_settings.search: the search server does not work.*HTTP 401"):
        await asyncio.to_thread(check_tools, tools)

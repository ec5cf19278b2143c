"""The start-up check against real HTTP servers on loopback."""

import asyncio
import socket
import threading
from contextlib import contextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rltr_verl.config import JudgeSettings
from rltr_verl.errors import ConfigError
from rltr_verl.judge import probe as module
from rltr_verl.judge.probe import ProbeResult, probe
from tests.fakes.ports import dead_port

PAGE = "<!DOCTYPE html><html><body>Welcome</body></html>"


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(module, "_PAUSE_S", 0.01)


class Server:
    """An API under ``prefix``; each handler is a function of the request, or None for 404."""

    def __init__(self, models=None, completions=None, prefix="/v1"):
        self.seen: list[tuple[str, str, dict | None, str | None]] = []
        self.app = web.Application()
        for method, path, answer in (("GET", "/models", models), ("POST", "/chat/completions", completions)):
            if answer is not None:
                self.app.router.add_route(method, prefix + path, self._handler(answer))

    def _handler(self, answer):
        async def handle(request):
            body = await request.json() if request.can_read_body else None
            self.seen.append((request.method, request.path, body, request.headers.get("Authorization")))
            return answer(request)

        return handle


@contextmanager
def serving(server: Server):
    """The server's root URL, from a thread with its own event loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(30)

    http = TestServer(server.app)
    run(http.start_server())
    try:
        yield str(http.make_url("")).rstrip("/")
    finally:
        run(http.close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def listing(*names, **fields):
    """A list of models as vLLM gives it."""
    return lambda request: web.json_response({"object": "list", "data": [{"id": name, **fields} for name in names]})


def status(code, text="", **headers):
    return lambda request: web.Response(status=code, text=text, headers=headers)


def completion(request):
    return web.json_response({"choices": [{"message": {"content": "1"}, "finish_reason": "length"}]})


def settings(*urls, **more) -> JudgeSettings:
    return JudgeSettings(backend="endpoint", base_url=list(urls), **{"model": "qwen", **more})


def fault(server: Server, path="/v1", **more) -> ConfigError:
    with serving(server) as root, pytest.raises(ConfigError) as caught:
        probe(settings(root + path, **more))
    assert caught.value.fix
    return caught.value


def test_a_server_with_a_list_is_asked_once_and_tells_its_context():
    server = Server(listing("qwen", "other", max_model_len=8192), completion)
    with serving(server) as root:
        assert probe(settings(root + "/v1/")) == ProbeResult(8192, ("qwen", "other"))
    assert server.seen == [("GET", "/v1/models", None, None)]


async def test_it_works_where_an_event_loop_runs():
    with serving(Server(listing("qwen"), completion)) as root:
        assert probe(settings(root + "/v1")) == ProbeResult(None, ("qwen",))


def test_the_smallest_context_and_the_common_models_of_several_urls():
    first = Server(listing("a", "qwen", max_model_len=8192))
    second = Server(listing("qwen", "b", max_model_len=4096))
    third = Server(completions=completion)
    with serving(first) as one, serving(second) as two, serving(third) as three:
        assert probe(settings(*(url + "/v1" for url in (one, two, three)))) == ProbeResult(4096, ("qwen",))


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        ({"id": "qwen", "context_length": 32768}, 32768),
        ({"id": "qwen", "max_model_len": None}, None),
        ({"id": "qwen", "max_model_len": "8192"}, None),
        ({"id": "qwen", "max_model_len": True}, None),
        ({"id": "qwen", "max_model_len": 0}, None),
        ({"id": "qwen", "max_model_len": None, "parent": "base"}, 2048),
        ({"id": "qwen", "parent": "qwen"}, None),
        ({"id": "models/qwen", "max_model_len": 700}, 700),
        ({"id": "qwen:latest", "max_model_len": 700}, 700),
    ],
    ids=str,
)
def test_context_is_read_from_the_models_own_card_or_its_parents(card, expected):
    cards = [{"id": "tiny", "max_model_len": 600}, {"id": "base", "max_model_len": 2048}, card]
    with serving(Server(lambda request: web.json_response({"data": cards}))) as root:
        assert probe(settings(root + "/v1")).context_tokens == expected


def test_a_bare_list_is_a_list_too():
    with serving(Server(lambda request: web.json_response([{"id": "qwen"}, {"name": "x"}, 3]))) as root:
        assert probe(settings(root + "/v1")).models == ("qwen",)


@pytest.mark.parametrize(
    "models",
    [
        None,
        status(405),
        status(501),
        status(200, "pong"),
        status(429),
        listing(),
        lambda request: web.json_response({"models": ["qwen"]}),
    ],
    ids=["404", "405", "501", "no JSON", "429", "empty", "other form"],
)
def test_without_a_list_a_small_completion_is_asked_for(models):
    server = Server(models, completion)
    with serving(server) as root:
        assert probe(settings(root + "/v1", extra_body={"provider": "x"})) == ProbeResult(None, ())
    method, path, body, _ = server.seen[-1]
    assert (method, path) == ("POST", "/v1/chat/completions")
    assert body["model"] == "qwen" and 1 <= body["max_tokens"] <= 16 and body["provider"] == "x"


def test_an_api_without_v1_in_its_path_is_taken_as_it_is():
    with serving(Server(None, completion, prefix="/openai")) as root:
        probe(settings(root + "/openai"))


def test_too_many_requests_is_an_answer():
    with serving(Server(status(429), status(429))) as root:
        assert probe(settings(root + "/v1")).models == ()


@pytest.mark.parametrize(
    ("model", "names", "said"),
    [
        ("qwen3-8b", ["Qwen/Qwen3-8B", "llama"], "did you mean 'Qwen/Qwen3-8B'?"),
        ("Qwen/Qwen3-8B", ["qwen3-8B"], "did you mean 'qwen3-8B'?"),
        ("judge", ["tiny", "base"], "the server has: tiny, base."),
        ("judge", [f"m{i}" for i in range(14)], "m9 and 4 more."),
    ],
)
def test_an_unknown_model_names_the_nearest(model, names, said):
    error = fault(Server(listing(*names), completion), model=model)
    assert error.where == "rltr.judge.model" and f"does not serve the model '{model}'" in error.problem
    assert error.fix.endswith(said)


def test_one_of_several_urls_without_the_model_is_named():
    with (
        serving(Server(listing("qwen"))) as good,
        serving(Server(listing("llama"))) as bad,
        pytest.raises(ConfigError, match=f"'{bad}/v1' does not serve"),
    ):
        probe(settings(good + "/v1", bad + "/v1"))


@pytest.mark.parametrize("code", [401, 403])
def test_a_wrong_key(monkeypatch, code):
    monkeypatch.setenv("JUDGE_KEY", " sk-wrong\n")
    server = Server(status(code, '{"error": "invalid key"}'), completion)
    error = fault(server, api_key_env="JUDGE_KEY")
    assert error.where == "rltr.judge.api_key_env"
    assert "refuses the key in JUDGE_KEY" in error.problem and "invalid key" in error.problem
    assert "sk-wrong" not in str(error)
    assert server.seen[0][3] == "Bearer sk-wrong"


def test_a_wrong_key_where_the_list_is_public(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-wrong")
    error = fault(Server(listing("qwen"), status(401, "no")), api_key_env="JUDGE_KEY")
    assert error.where == "rltr.judge.api_key_env" and "refuses the key in JUDGE_KEY" in error.problem


@pytest.mark.parametrize("reply", [completion, status(400, "max_tokens is not supported"), status(429)])
def test_a_key_is_tried_and_other_faults_of_that_try_are_not_its(monkeypatch, reply):
    monkeypatch.setenv("JUDGE_KEY", "sk-right")
    server = Server(listing("qwen"), reply)
    with serving(server) as root:
        probe(settings(root + "/v1", api_key_env="JUDGE_KEY"))
    assert [seen[3] for seen in server.seen] == ["Bearer sk-right"] * 2


def test_a_key_is_wanted_and_none_is_named():
    error = fault(Server(status(401), status(401)))
    assert "wants a key" in error.problem and error.fix.endswith("rltr.judge.api_key_env=VARIABLE.")


@pytest.mark.parametrize("value", [None, "", " \n", "sk-\u201cquoted\u201d", "sk\nsecond"], ids=repr)
def test_a_key_that_cannot_be_sent_is_refused_before_any_request(monkeypatch, value):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("JUDGE_KEY", value)
    server = Server(listing("qwen"))
    error = fault(server, api_key_env="JUDGE_KEY")
    assert error.where == "rltr.judge.api_key_env" and "JUDGE_KEY" in error.problem
    assert server.seen == []


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("", "add /v1: rltr.judge.base_url=http://127.0.0.1"),
        ("/v1/chat/completions", "leave '/chat/completions' out: rltr.judge.base_url=http://127.0.0.1"),
        ("/v1/models", "leave '/models' out: rltr.judge.base_url=http://127.0.0.1"),
    ],
)
def test_a_wrong_path_is_corrected(path, said):
    error = fault(Server(listing("qwen"), completion), path)
    assert error.where == "rltr.judge.base_url" and "HTTP 404" in error.problem
    assert error.fix.startswith(said) and error.fix.endswith("/v1")


@pytest.mark.parametrize("form", [PAGE, "\n<html>", "<?xml version='1.0'?><html/>"])
def test_a_web_page_is_no_api(form):
    error = fault(Server(status(200, form), status(200, form), prefix=""), "")
    assert error.where == "rltr.judge.base_url" and "web page" in error.problem
    assert error.fix.startswith("add /v1")


def test_a_redirect_is_not_followed_with_the_key(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-right")
    server = Server(status(308, Location="https://elsewhere.example/v1/models"))
    error = fault(server, api_key_env="JUDGE_KEY")
    assert "redirects (HTTP 308)" in error.problem and "https://elsewhere.example/v1/models" in error.fix


@pytest.mark.parametrize(
    "reply",
    [status(400, "bad request"), status(404, "model not found"), status(200, "{}"), status(200, '{"choices": []}')],
)
def test_a_server_that_completes_nothing_is_quoted(reply):
    error = fault(Server(None, reply))
    assert "does not complete chats" in error.problem and "rltr.judge.model ('qwen')" in error.fix


def test_a_server_that_is_not_ready_is_asked_again():
    states = [503, 200]
    server = Server(lambda request: listing("qwen")(request) if states.pop(0) == 200 else web.Response(status=503))
    with serving(server) as root:
        assert probe(settings(root + "/v1")).models == ("qwen",)
    error = fault(Server(status(503, "loading the model")))
    assert error.where == "rltr.judge.base_url" and "HTTP 503: loading the model" in error.problem


@pytest.mark.parametrize("host", ["127.0.0.1:{port}", "no-such-host.invalid:{port}"])
def test_nobody_listens(host):
    with dead_port() as port:
        url = f"http://{host.format(port=port)}/v1"
        with pytest.raises(ConfigError, match=f"rltr.judge.base_url: '{url}' cannot be reached") as caught:
            probe(settings(url))
    assert "Fix: start the server" in str(caught.value)


def test_a_server_that_accepts_and_never_answers(monkeypatch):
    monkeypatch.setattr(module, "_TIMEOUT_S", 0.2)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        with pytest.raises(ConfigError, match="no reply within 0.2 s"):
            probe(settings(f"http://127.0.0.1:{sock.getsockname()[1]}/v1"))


def test_https_to_a_plain_server():
    with serving(Server(listing("qwen"))) as root, pytest.raises(ConfigError, match="correct scheme, host and port"):
        probe(settings(root.replace("http:", "https:") + "/v1"))


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000/v1",
        "localhost/v1",
        "ftp://host/v1",
        "http:///v1",
        "http://h:99999/v1",
        "http://[::1/v1",
        "http://a..b/v1",
        f"http://{'a' * 64}/v1",
        "http://the host/v1",
        "http://host/v1\n",
        "http://host/v1?key=1",
        "http://user:secret@host/v1",
    ],
)
def test_what_is_no_url_is_said(url):
    with pytest.raises(ConfigError, match="is not the http.s. URL.*write it like http://127.0.0.1:8000/v1") as caught:
        probe(settings(url))
    assert caught.value.where == "rltr.judge.base_url" and "secret" not in str(caught.value)


def test_a_proxy_of_the_environment_is_not_used(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "10.0.0.0/8")
    with serving(Server(listing("qwen"))) as root:
        assert probe(settings(root + "/v1")).models == ("qwen",)


@pytest.mark.parametrize(
    ("variable", "bypass", "told"),
    [
        ("http_proxy", "", True),
        ("HTTP_PROXY", "10.0.0.0/8", True),
        ("ALL_PROXY", "", True),
        ("https_proxy", "", False),
        ("HTTP_PROXY", "127.0.0.1", False),
        ("HTTP_PROXY", "*", False),
    ],
)
def test_a_proxy_is_named_where_it_would_have_mattered(monkeypatch, variable, bypass, told):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", bypass)
    with dead_port() as port, pytest.raises(ConfigError, match="cannot be reached") as caught:
        probe(settings(f"http://127.0.0.1:{port}/v1"))
    assert (f"{variable} is set, but the judge is always asked directly" in caught.value.fix) is told


@pytest.mark.parametrize(
    ("more", "where"),
    [
        ({"context_tokens": 16_384}, "rltr.judge.context_tokens"),
        ({"max_tokens": 8192}, "rltr.judge.max_tokens"),
        ({"max_tokens": 600, "context_tokens": 600}, "rltr.judge.max_tokens"),
    ],
)
def test_lengths_that_the_server_cannot_take(more, where):
    assert fault(Server(listing("qwen", max_model_len=8192)), **more).where == where

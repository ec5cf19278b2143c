"""The tool `browse` against a real server on loopback."""

from __future__ import annotations

import asyncio
import gzip
import socket

import aiohttp
import pytest
from aiohttp import web

from rltr_verl.errors import BadArguments, ToolFailed
from rltr_verl.toolkit.pages import MAX_ELEMENTS, read_page
from rltr_verl.toolkit.public_net import is_public
from rltr_verl.tools.browse import browse

ARTICLE = "A river runs past Arlen and Brona. It is long, and as all know many fish live in it. " * 3
HTML = f"""<!doctype html><html><head><title> The
river </title><script>var hidden = 1</script></head><body><nav><a href="/">Home</a> <a href="/all">All rivers</a></nav>
<article><h1>The river</h1><p>{ARTICLE}</p><table><tr><th>town</th><th>km</th></tr><tr><td>Arlen</td><td>41</td></tr>
</table></article><footer>Imprint</footer></body></html>"""
LONG = (
    "<html><body><article>"
    + "".join(f"<p>Paragraph {n} of a long text.</p>" for n in range(400))
    + "</article></body></html>"
)


class Site:
    """What the tests' server answers, and what it was asked."""

    def __init__(self) -> None:
        self.requests: list[web.BaseRequest] = []
        self.base = ""

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.requests.append(request)
        return await getattr(self, request.path.strip("/").partition("/")[0])(request)

    async def river(self, request: web.BaseRequest) -> web.StreamResponse:
        reply = web.Response(text=HTML, content_type="text/html")
        reply.set_cookie("seen", "1")
        return reply

    async def long(self, request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(text=LONG, content_type="text/html")

    async def bare(self, request: web.BaseRequest) -> web.StreamResponse:
        text = "<html><body><div>one</div><script>no()</script><div>two</div></body></html>"
        return web.Response(text=text, content_type="text/html")

    async def blank(self, request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=b"", content_type="text/html")

    async def chinese(self, request: web.BaseRequest) -> web.StreamResponse:
        text = (
            '<html><head><meta charset="gb2312"><title>河流</title></head><body><p>河流经过阿伦。镕</p></body></html>'
        )
        return web.Response(body=text.encode("gb18030"), headers={"Content-Type": "text/html"})

    async def latin(self, request: web.BaseRequest) -> web.StreamResponse:
        body = "Ein Fluß – „lang“".encode("cp1252")
        return web.Response(body=body, headers={"Content-Type": "text/plain; charset=ISO-8859-1"})

    async def odd_charset(self, request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body="naïve".encode(), headers={"Content-Type": "text/plain; charset=x-unknown"})

    async def data(self, request: web.BaseRequest) -> web.StreamResponse:
        return web.json_response({"km": 41})

    async def pdf(self, request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=b"%PDF-1.4 \x00\xff", content_type="application/pdf")

    async def missing(self, request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=404, text="<html>no</html>", content_type="text/html")

    async def hop(self, request: web.BaseRequest) -> web.StreamResponse:
        left = int(request.path.rpartition("/")[2])
        reply = web.Response(status=302, headers={"Location": f"/hop/{left - 1}" if left > 1 else "/river"})
        reply.set_cookie("hop", "1")
        return reply

    async def away(self, request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=301, headers={"Location": request.query["to"]})

    async def endless(self, request: web.BaseRequest) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await reply.prepare(request)
        while True:
            await reply.write(b"water " * 10_000)

    async def bomb(self, request: web.BaseRequest) -> web.StreamResponse:
        body = gzip.compress(b"water " * 10_000_000)
        return web.Response(body=body, headers={"Content-Type": "text/plain", "Content-Encoding": "gzip"})

    async def hangs(self, request: web.BaseRequest) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": "text/html"})
        await reply.prepare(request)
        await reply.write(b"<html>")
        await asyncio.sleep(60)
        return reply


@pytest.fixture
async def site():
    answers = Site()
    runner = web.ServerRunner(web.Server(answers.handle), shutdown_timeout=0.1)
    await runner.setup()
    place = web.TCPSite(runner, "127.0.0.1", 0)
    await place.start()
    answers.base = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield answers
    await runner.cleanup()


async def test_the_main_text_with_status_title_and_address(site):
    text = await browse(site.base + "/river", allow_private=True)
    assert text.startswith(f"HTTP 200 OK: {site.base}/river\nTitle: The river\nPage 1 of 1\n\n")
    assert "A river runs past Arlen and Brona." in text and "| Arlen | 41 |" in text
    assert not [word for word in ("hidden", "Home", "Imprint", "<p>") if word in text]


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/bare", "one\ntwo"),
        ("/blank", "There is no text on this page."),
        ("/chinese", "河流经过阿伦。镕"),
        ("/latin", "Ein Fluß – „lang“"),
        ("/odd_charset", "naïve"),
        ("/data", '{"km": 41}'),
    ],
)
async def test_kinds_of_pages(site, path, shown):
    text = await browse(site.base + path, allow_private=True)
    assert text.partition("\n\n")[2] == shown


async def test_a_long_text_comes_in_pages(site):
    url = site.base + "/long"
    first, second = [await browse(url, page, allow_private=True, page_chars=1000) for page in (1, 2)]
    assert "Page 1 of 12" in first and "Page 2 of 12" in second
    assert "Paragraph 0 of" in first and "Paragraph 0 of" not in second
    for page in (0, 13):
        with pytest.raises(BadArguments, match="page"):
            await browse(url, page, allow_private=True, page_chars=1000)


async def test_redirects_are_followed_within_bounds_and_without_cookies(site):
    text = await browse(site.base + "/hop/3", allow_private=True)
    assert f"{site.base}/river\nTitle: The river" in text
    assert [request.headers.get("Cookie") for request in site.requests] == [None] * 4
    with pytest.raises(ToolFailed, match="redirects more than 2 times"):
        await browse(site.base + "/hop/3", allow_private=True, max_redirects=2)


@pytest.mark.parametrize(
    "target", ["file:///etc/passwd", "ftp://example.org/", "http://user:pw@example.org/", "http://["]
)
async def test_a_redirect_to_what_is_no_web_page_is_the_pages_fault(site, target):
    with pytest.raises(ToolFailed, match="cannot be fetched"):
        await browse(f"{site.base}/away?to={target}", allow_private=True)


async def test_what_is_no_text_and_what_is_not_there(site):
    with pytest.raises(ToolFailed, match="is application/pdf, not text"):
        await browse(site.base + "/pdf", allow_private=True)
    with pytest.raises(ToolFailed, match="HTTP 404 Not Found from"):
        await browse(site.base + "/missing", allow_private=True)
    with pytest.raises(ToolFailed, match="cannot be reached"):
        await browse("http://127.0.0.1:9/", allow_private=True)


@pytest.mark.parametrize("path", ["/endless", "/bomb"])
async def test_a_body_is_read_to_its_bound(site, path):
    text = await browse(site.base + path, allow_private=True, max_bytes=6000, page_chars=10_000)
    assert text.partition("\n\n")[2] == ("water " * 1000).strip()


@pytest.mark.parametrize(
    "html",
    [
        "<div>" * 50_000 + "deep",
        "<table><tr><td>" * 3000 + "deep",
        "\x00\x01<p>odd\ufffe</p>",
        "<!--" * 10_000,
        "<frameset><frame src='x'></frameset>",
        "<html><body>" + "<a href=" * 20_000,
        "<meta charset=" * 5000,
        "<p " + " ".join(f"a{n}" for n in range(130_000)) + ">text</p>",
        "",
        "<p>a<b>c",
    ],
)
async def test_html_of_any_kind_is_read(html):
    page = await asyncio.wait_for(asyncio.to_thread(read_page, html.encode(), "text/html", None), 60)
    assert isinstance(page.text, str)


async def test_a_page_that_hangs_ends(site):
    with pytest.raises(ToolFailed, match="did not answer within 0.5 s"):
        await browse(site.base + "/hangs", allow_private=True, timeout_s=0.5)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "127.1", "0177.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0",
     "127.0.0.1.", "LOCALHOST", "１２７.0.0.1", "127。0。0。1", "①②⑦.0.0.1", "%31%32%37.0.0.1"],
)  # fmt: skip
async def test_private_addresses_are_refused_before_a_request(site, host):
    port = site.base.rpartition(":")[2]
    with pytest.raises((BadArguments, ToolFailed), match="not a public address|cannot be"):
        await browse(f"http://{host}:{port}/river")
    assert site.requests == []


@pytest.mark.parametrize(
    "url",
    ["", "river", "file:///etc/passwd", "http://", "http://u:p@example.org/", "http://a b/", "http://" + "a" * 3000],
)
async def test_what_is_no_address_is_the_callers_mistake(url):
    with pytest.raises(BadArguments):
        await browse(url)


class Names(aiohttp.ThreadedResolver):
    """A name server of the tests: the first answer for a name is public or the server's own, the next is private."""

    answers: dict[str, list[str]] = {}

    async def resolve(self, host, port=0, family=socket.AF_INET):
        addresses = self.answers[host].pop(0).split()
        return [
            {"hostname": host, "host": item, "port": port, "family": socket.AF_INET, "proto": 0, "flags": 0}
            for item in addresses
        ]


@pytest.fixture
def names(monkeypatch):
    monkeypatch.setattr("rltr_verl.toolkit.public_net.aiohttp.ThreadedResolver", Names)
    Names.answers = {}
    return Names.answers


async def test_a_name_with_one_private_address_is_refused(site, names):
    names["mixed.test"] = ["93.184.216.34 127.0.0.1"]
    with pytest.raises(BadArguments, match="mixed.test.* is not a public address"):
        await browse(f"http://mixed.test:{site.base.rpartition(':')[2]}/river")
    assert site.requests == []


async def test_the_connection_goes_to_the_address_that_was_checked(site, names, monkeypatch):
    """A second look-up would be answered with a private address; there is none."""
    monkeypatch.setattr("rltr_verl.toolkit.public_net.is_public", lambda text: text == "127.0.0.1")
    names["rebinding.test"] = ["127.0.0.1", "10.0.0.1"]
    text = await browse(f"http://rebinding.test:{site.base.rpartition(':')[2]}/river")
    assert "A river runs" in text and names["rebinding.test"] == ["10.0.0.1"]


async def test_a_redirect_to_a_private_address_is_refused(site, names, monkeypatch):
    """The tests' own server counts as public, the addresses that it redirects to do not."""
    port = site.base.rpartition(":")[2]
    monkeypatch.setattr("rltr_verl.toolkit.public_net.is_public", lambda text: text == "127.0.0.1")
    names["inner.test"] = ["10.0.0.1"]
    for target in (f"http://inner.test:{port}/river", f"http://[::1]:{port}/river", "http://169.254.169.254/latest"):
        with pytest.raises(ToolFailed, match="is not a public address"):
            await browse(f"http://127.0.0.1:{port}/away?to={target}")
    assert {request.path for request in site.requests} == {"/away"}


async def test_no_socket_is_made_for_a_private_address(site, monkeypatch):
    """Even if what looks at the address as it is written saw nothing."""
    monkeypatch.setattr("rltr_verl.tools.browse.check_host", lambda host: None)
    with pytest.raises(BadArguments, match="is not a public address"):
        await browse(site.base + "/river")
    assert site.requests == []


@pytest.mark.parametrize("charset", ["idna", "undefined", "unicode_escape", "punycode", "hex", "no-such"])
def test_a_charset_that_no_page_has_is_passed_over(charset):
    assert read_page("naïve \\x41".encode(), "text/plain", charset).text == "naïve \\x41"


@pytest.mark.parametrize("tag", ["<p>", "<br>", "<p a=1 b=2 c=3 d=4>"])
def test_all_text_of_a_page_with_too_many_elements_is_taken(tag, monkeypatch):
    body = "<body><nav>Home</nav><article>" + f"{tag}word" * MAX_ELEMENTS
    monkeypatch.setattr("trafilatura.extract", None)  # takes minutes for such a page
    assert read_page(body.encode(), "text/html", None).text.split() == ["Home", *["word"] * MAX_ELEMENTS]


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1:248:1893:25c8:1946", True),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("100.64.0.1", False),
        ("169.254.169.254", False),
        ("224.0.0.1", False),
        ("240.0.0.1", False),
        ("255.255.255.255", False),
        ("fd00::1", False),
        ("fe80::1%eth0", False),
        ("fec0::1", False),
        ("ff02::1", False),
        ("::", False),
        ("::ffff:10.0.0.1", False),
        ("64:ff9b::10.0.0.1", False),
        ("64:ff9b::93.184.216.34", True),
        ("2002:a00:1::1", False),
    ],
)
def test_which_addresses_are_public(address, public):
    assert is_public(address) is public

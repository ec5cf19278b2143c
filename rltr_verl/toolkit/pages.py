"""A page as text: its charset, and what of its HTML is content."""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass

import lxml.etree
import lxml.html
import trafilatura
from trafilatura.utils import decode_file

HTML_TYPES = ("text/html", "application/xhtml+xml")
_TEXT_TYPES = re.compile(
    r"text/.+|application/(?:.+\+)?(?:json|xml|yaml|javascript)|application/x-ndjson", re.IGNORECASE
)
_META = re.compile(
    rb"""<meta[^>]{0,200}?charset\s*=\s*["']?\s*([\w.:-]{2,40})|<\?xml[^>]{0,100}encoding=["']([\w.-]+)""", re.I
)
_HEAD_BYTES = 4096
MAX_ELEMENTS = 20_000
"""Elements and their attributes; of a page with more, all text is taken for the main text (ours): to find that takes a
second for so many, and two minutes for 260,000."""
_LONG_TAG = re.compile(r"(<[a-zA-Z][\w:-]{0,100})[^<>]{32768,}")
"""A tag of more than 32,768 characters (ours): libxml2 compares each attribute with all others, 0.1 s for so many and
two minutes for a megabyte of them. Such a tag loses its attributes; of a page only the text is wanted."""
_WIDER = {"gb2312": "gb18030", "gbk": "gb18030", "iso8859-1": "cp1252", "ascii": "cp1252", "latin-1": "cp1252"}
"""What browsers read in place of a declared charset: the larger one that pages mean."""
_NO_PAGES = ("idna", "punycode", "undefined", "unicode-escape", "raw-unicode-escape")
"""Python's codecs that no page is written in; some of them fail instead of replacing."""
_SILENT = "ancestor-or-self::*[self::script or self::style or self::noscript or self::template or self::svg]"
_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))


@dataclass(frozen=True)
class Page:
    """Title and text of a page."""

    title: str
    text: str


def is_text(content_type: str) -> bool:
    """Whether a body of this type can be shown as text."""
    return content_type in HTML_TYPES or _TEXT_TYPES.fullmatch(content_type) is not None


def read_page(body: bytes, content_type: str, charset: str | None) -> Page:
    """Text of a body; of HTML the main content without navigation and scripts, or all text if there is none."""
    text = decode(body, charset)
    if content_type not in HTML_TYPES:
        return Page("", text.strip())
    text = _LONG_TAG.sub(r"\1", text)
    tree = _tree(text)
    if tree is None:
        return Page("", "")
    title = " ".join(" ".join(tree.xpath("//head/title//text()")).split())
    small = sum(1 + len(item.attrib) for item in tree.iter()) <= MAX_ELEMENTS
    main = trafilatura.extract(text, include_comments=False) if small else None
    return Page(title, main or _all_text(tree))


def decode(body: bytes, charset: str | None) -> str:
    """Text of ``body`` by its byte order mark, the declared charset, or as it looks; what is unreadable is replaced."""
    for mark, codec in _MARKS:
        if body.startswith(mark):
            return body.decode(codec, "replace")
    declared = _codec(charset) or _codec(_declared(body))
    return body.decode(declared, "replace") if declared else decode_file(body)


def _declared(body: bytes) -> str | None:
    found = _META.search(body[:_HEAD_BYTES])
    return (found[1] or found[2]).decode("ascii", "replace") if found else None


def _codec(name: str | None) -> str | None:
    try:
        known = codecs.lookup(name or "")
    except LookupError:
        return None
    if known.name in _NO_PAGES or not getattr(known, "_is_text_encoding", True):
        return None
    return _WIDER.get(known.name, known.name)


def _tree(text: str) -> lxml.html.HtmlElement | None:
    try:
        return lxml.html.document_fromstring(
            text.encode("utf-8", "replace"), parser=lxml.html.HTMLParser(encoding="utf-8")
        )
    except (lxml.etree.LxmlError, ValueError):
        return None


def _all_text(tree: lxml.html.HtmlElement) -> str:
    """All text of the body, a line per text node."""
    nodes = tree.xpath(f"//body//text()[not({_SILENT})]")
    return "\n".join(line for node in nodes if (line := " ".join(node.split())))

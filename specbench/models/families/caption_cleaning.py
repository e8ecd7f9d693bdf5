"""Captions as LlamaGen's text encoder read them in training: rid of what captions scraped from web shops carry.

The rules and their order are the official ones (`language/t5.py` of LlamaGen, after PixArt-alpha and DeepFloyd IF).
Most prompts pass with nothing but lower case, and a blank after a comma or full stop that had none.
"""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from urllib.parse import unquote_plus

import ftfy

Rules = tuple[tuple[re.Pattern[str], str], ...]


def _rules(*pairs: tuple[str, str]) -> Rules:
    return tuple((re.compile(pattern), replacement) for pattern, replacement in pairs)


_FILE = "(?:png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4)"
_SITE = r"[a-z0-9.-]+\.(?:com|co|ru|net|org|edu|gov|it)[\w/-]*\b/?(?!@)"
_PROTOCOL_END = r"(?:/{1,3}|[a-z0-9%])"
_DASHES = (
    r"-\u058a\u05be\u1400\u1806\u2010-\u2015\u2e17\u2e1a\u2e3a\u2e3b\u2e40"
    r"\u301c\u3030\u30a0\ufe31\ufe32\ufe58\ufe63\uff0d"
)

_ADDRESSES = _rules(
    (rf"\b(?:https?:{_PROTOCOL_END}|{_SITE})", ""),
    (rf"\b(?:www:{_PROTOCOL_END}|{_SITE})", ""),
)
_CHARACTERS = _rules(
    (r"@\w+\b", ""),  # nicknames
    (r"[\u31c0-\u9fff]+", ""),  # from the strokes of Chinese characters to the characters
    (rf"[{_DASHES}]+", "-"),
    (r"[`´«»“”¨]", '"'),
    (r"[‘’]", "'"),
    (r"&quot;?|&amp", ""),
    (r"\d{1,3}(?:\.\d{1,3}){3}", " "),  # IP addresses
    (r"\d:\d\d\s+$", ""),
    (r"\\n", " "),
    (r"#(?:\d{1,3}|\d{5,})\b", ""),
    (r"\b\d{6,}\b", ""),  # article numbers
    (rf"\S+\.{_FILE}", ""),
    (r"[\"']{2,}", '"'),
    (r"\.{2,}", " "),
    (r"[#®•©™&@·º½¾¿¡§~()\[\]{}|\\/*]+", " "),
    (r"\s+\.\s+", " "),
)
_WORD_JOINTS = re.compile("[-_]")
_SHOP_WORDS = _rules(
    (r"\b(?:[a-zA-Z]{1,3}\d{3,15}|[a-zA-Z]+\d+[a-zA-Z]+|\d+[a-zA-Z]+\d+)\b", ""),  # model numbers
    (r"(?:worldwide\s+)?(?:free\s+)?shipping", ""),
    (r"(?:free\s)?download(?:\sfree)?", ""),
    (r"\bclick\b\s(?:for|on)\s\w+", ""),
    (rf"\b{_FILE}(?:\simages?)?", ""),
    (r"\bpage\s+\d+\b", ""),
    (r"\b\d*[a-zA-Z]+\d+[a-zA-Z]+\d+[a-zA-Z\d]*\b", " "),  # longer model numbers
    (r"\b\d+\.?\d*[xх×]\d+\.?\d*\b", ""),  # sizes; the second letter is Cyrillic
)
_SPACING = _rules((r"\b\s+:\s+", ": "), (r"(\D[,./])\b", r"\1 "), (r"\s+", " "))
_ENDS = _rules((r"^[\"']([\w\W]+)[\"']$", r"\1"), (r"^['_,\-:;]", ""), (r"['_,\-:+]$", ""), (r"^\.\S+$", ""))


def clean_caption(caption: str) -> str:
    """The caption in lower case, cleaned twice as officially, since what one pass removes may uncover more."""
    return _clean_once(_clean_once(caption))


def _clean_once(caption: str) -> str:
    text = unquote_plus(caption).strip().lower().replace("<person>", "person")
    text = _apply(_CHARACTERS, _text_of(_apply(_ADDRESSES, text)))
    if len(_WORD_JOINTS.findall(text)) > 3:
        text = _WORD_JOINTS.sub(" ", text)
    text = html.unescape(html.unescape(ftfy.fix_text(text))).strip()
    return _apply(_SHOP_WORDS + _SPACING + _ENDS, text).strip()


def _apply(rules: Rules, text: str) -> str:
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text


class _Text(HTMLParser):
    """Collects what a page shows."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def handle_data(self, data: str) -> None:
        if self.cdata_elem is None:
            self.pieces.append(data)


def _text_of(page: str) -> str:
    parser = _Text()
    parser.feed(page)
    parser.close()
    return "".join(parser.pieces)

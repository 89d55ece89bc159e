"""The page's files: whole, fenced in, and free of what a hostile text could use."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from dflash_runtime.serving import status_page
from dflash_runtime.serving.access import ApiKeys
from dflash_runtime.serving.status_page import PAGE_PATHS

Serve = Callable[..., AbstractAsyncContextManager[Any]]
FOLDER = Path(status_page.__file__).with_name("page")
FILES = sorted(path.name for path in FOLDER.iterdir())
SCRIPTS = [name for name in FILES if name.endswith(".js")]
KEYS = ApiKeys([b"a-key-of-32-characters-or-so-----"])


def read(name: str) -> str:
    return (FOLDER / name).read_text()


def test_every_file_of_the_page_is_served() -> None:
    served = {path.removeprefix("/page/") for path in PAGE_PATHS - {"/"}} | {"index.html"}
    assert served == set(FILES)


@pytest.mark.asyncio
@pytest.mark.parametrize("keys", [None, KEYS])
async def test_the_page_needs_no_key_and_may_load_nothing_from_elsewhere(
    serve: Serve, keys: ApiKeys | None
) -> None:
    async with serve(keys=keys, is_opened=False) as served:
        for path in PAGE_PATHS:
            response = await served.client.get(path)
            assert response.status_code == 200
            assert response.content == (FOLDER / (Path(path).name or "index.html")).read_bytes()
            assert response.headers["x-content-type-options"] == "nosniff"
            assert response.headers["referrer-policy"] == "no-referrer"
            assert response.headers["cache-control"] == "no-cache"
            rules = dict(
                rule.strip().partition(" ")[::2]
                for rule in response.headers["content-security-policy"].split(";")
            )
            assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == "'none'"
            assert rules["script-src"] == rules["connect-src"] == rules["style-src"] == "'self'"
            assert rules["require-trusted-types-for"] == "'script'"
            assert not re.search("unsafe|http|data:|[*]", " ".join(rules.values()))
        kinds = {
            name: (await served.client.get(f"/page/{name}")).headers["content-type"]
            for name in ("style.css", "app.js", "icon.svg")
        }
        assert kinds == {
            "style.css": "text/css; charset=utf-8",
            "app.js": "text/javascript; charset=utf-8",
            "icon.svg": "image/svg+xml",
        }
        page = await served.client.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert (await served.client.get("/page/")).status_code == (401 if keys else 404)
        assert (await served.client.get("/page/../app.py")).status_code == (401 if keys else 404)
        assert (await served.client.post("/")).status_code == 405


@pytest.mark.asyncio
async def test_without_keys_the_page_is_for_this_machine_only(serve: Serve) -> None:
    async with serve() as served:
        for headers in ({"host": "evil.example"}, {"origin": "https://evil.example"}):
            assert (await served.client.get("/", headers=headers)).status_code == 403


@pytest.mark.asyncio
async def test_answers_to_the_page_are_counted_by_name(serve: Serve) -> None:
    async with serve() as served:
        await served.client.get("/")
        text = (await served.client.get("/metrics")).text
        assert 'dflash_moe_http_requests_total{endpoint="/",status="200"} 1.0' in text.splitlines()


def test_nothing_is_asked_of_anybody_else() -> None:
    for name in FILES:
        addresses = re.findall(r"(?:https?:)?//[\w.-]+\.[a-z]{2,}\S*", read(name))
        assert [each for each in addresses if "www.w3.org/2000/svg" not in each] == [], name


def test_the_markup_holds_no_code_and_no_style() -> None:
    """The policy would refuse it; a browser shows that only to those who look."""
    page = read("index.html")
    assert re.findall(r"<script\b[^>]*>(.*?)</script>", page, re.DOTALL) == [""]
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", page)
    for name in re.findall(r'(?:href|src)="page/([^"]+)"', page):
        assert name in FILES


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_make_no_markup_of_texts(name: str) -> None:
    text = read(name)
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|"
        r"localStorage|document\.cookie|srcdoc|createContextualFragment|DOMParser"
    )
    assert not re.search(forbidden, text)
    for imported in re.findall(r'from "\./([^"]+)"', text):
        assert imported in SCRIPTS


def test_every_element_that_a_script_asks_for_is_there() -> None:
    page = read("index.html")
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    asked = set(re.findall(r'\b(?:find|setText)\("([^"]+)"', read("app.js")))
    assert asked
    assert asked <= set(ids)
    labelled = re.findall(r'\b(?:for|aria-labelledby|aria-describedby)="([^"]+)"', page)
    assert set(labelled) <= set(ids)

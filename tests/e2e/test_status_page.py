"""The status page in a headless Chromium, of a server with two daemons."""

from __future__ import annotations

import colorsys
import contextlib
import json
import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from support.browser import Page, browser_page
from support.faults import spawned_by
from support.processes import wait_until
from support.random_models import Qwen3MoeShape, write_qwen3moe
from support.serving import CHAT_TEMPLATE, NO_TLS, RunningServer, running_server

pytestmark = pytest.mark.e2e

IS_SHOWN = "!document.querySelector('#main').hidden"
IS_WRITING = "document.querySelector('#chat-log').ariaBusy === 'true'"
CONDITION = "document.querySelector('#condition').textContent"
MARKUP = "<img src=x onerror=alert(1)> is no "
KEY = "a-key-of-32-characters-or-so-----"
SHAPE = Qwen3MoeShape(
    num_layers=4, num_experts=8, num_experts_used=2, vocab_size=300, context_length=192
)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """In a run directory of its own, since it outlives the tests, which must leave theirs empty."""
    with (
        tempfile.TemporaryDirectory(prefix="dflash-page-") as folder,
        running_server(
            None,
            "--daemon",
            "cpu",
            "--daemon",
            "cpu",
            DFLASH_MOE_EXPERT_COMPUTE_IPC_WORK_DIR=folder,
        ) as server,
    ):
        yield server


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with browser_page(tmp_path / "profile") as page:
        page.look(width=1280)
        yield page


def write_endlessly(page: Page) -> None:
    """Have the page's requests say what the page does not: no text ends by chance, or early."""
    page.evaluate(
        """(() => {
          const more = { ignore_eos: true, seed: 1, max_tokens: 3000 };
          const fetchAsEver = window.fetch;
          window.fetch = (path, options) => {
            if (!options?.body) return fetchAsEver(path, options);
            const body = JSON.stringify({ ...JSON.parse(options.body), ...more });
            return fetchAsEver(path, { ...options, body });
          };
        })()"""
    )


@contextlib.contextmanager
def suspended(*processes: psutil.Process) -> Iterator[None]:
    for each in processes:
        each.suspend()
    try:
        yield
    finally:
        for each in processes:
            each.resume()


def text_of(page: Page, selector: str) -> str:
    return str(page.evaluate(f"document.querySelector({json.dumps(selector)}).textContent"))


def texts_of(page: Page, selector: str) -> list[str]:
    query = f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent)"
    return list(page.evaluate(query))


def colour_of(page: Page, name: str) -> tuple[float, float, float]:
    """One of the page's named colours, each part from 0 to 1."""
    value = page.evaluate(
        f"getComputedStyle(document.documentElement).getPropertyValue({json.dumps(name)}).trim()"
    )
    assert re.fullmatch("#[0-9a-f]{6}", value), (name, value)
    red, green, blue = (int(value[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return red, green, blue


def hue_of(red: float, green: float, blue: float) -> float:
    return 360 * colorsys.rgb_to_hsv(red, green, blue)[0]


def num_pixels_by_hue(page: Page) -> dict[int, int]:
    """Coloured pixels of the heat map, by hue in steps of ten degrees."""
    pixels = page.evaluate(
        """(() => {
          const map = document.querySelector("#map");
          const data = map.getContext("2d").getImageData(0, 0, map.width, map.height).data;
          const counts = {};
          for (let at = 0; at < data.length; at += 4) {
            if (data[at + 3] < 255) continue;
            const colour = data.slice(at, at + 3).join(" ");
            counts[colour] = (counts[colour] ?? 0) + 1;
          }
          return counts;
        })()"""
    )
    found: dict[int, int] = {}
    for colour, count in pixels.items():
        red, green, blue = (int(part) / 255 for part in colour.split())
        _, saturation, _ = colorsys.rgb_to_hsv(red, green, blue)
        if saturation > 0.2:
            step = round(hue_of(red, green, blue) / 10) % 36
            found[step] = found.get(step, 0) + count
    return found


def contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """Source: WCAG 2.2, relative luminance and contrast ratio."""

    def luminance(colour: tuple[float, ...]) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
        return sum(
            weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True)
        )

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_the_page_shows_owners_streams_a_text_and_paints_what_was_chosen(
    server: RunningServer, page: Page
) -> None:
    page.open(f"{server.url}/")
    page.wait_for(IS_SHOWN)
    assert text_of(page, "#model-name") == "dflash demo"
    assert texts_of(page, ".owner-name") == ["cpu0", "cpu1"]
    assert texts_of(page, ".owners .state") == ["ready", "ready"]

    # A stream: the text grows while it is written, and Stop ends it.
    write_endlessly(page)
    page.type("#chat-text", MARKUP)
    page.press("Enter")
    page.wait_for("document.querySelector('.continued')?.textContent.length > 0")
    first = text_of(page, ".continued")
    grown = f"document.querySelector('.continued').textContent.length > {len(first)}"
    page.wait_for(grown)
    assert page.evaluate(IS_WRITING)
    assert text_of(page, ".continued").startswith(first)
    assert text_of(page, "#chat-log .body").startswith(MARKUP)
    assert page.evaluate("document.querySelectorAll('#chat-log img').length") == 0
    page.click("#chat-stop")
    page.wait_for(f"!({IS_WRITING})")
    assert texts_of(page, "#chat-log .note") == ["Stopped."]
    idle = "dflash_moe_num_requests_running"
    wait_until(lambda: server.metric(idle) == 0, "the generation to end")

    # Everything that was counted arrives.
    written = int(server.metric("dflash_moe_generation_tokens_total"))
    page.wait_for(f"document.querySelector('#generated').textContent === '{written:,}'")
    expected = server.get("/status/experts").json()
    layers: list[dict[str, Any]] = expected["layers"]
    assert len(layers) == 8
    most = max(max(layer["selections"]) for layer in layers)
    page.wait_for(f"document.querySelector('#most').textContent === '{most:,} times'")
    hues = num_pixels_by_hue(page)
    for owner in range(2):
        assert hues.get(round(hue_of(*colour_of(page, f"--owner-{owner}")) / 10), 0) > 1000, hues
    assert len(texts_of(page, "#legend button")) == 2

    # What a cell is: by keyboard and by mouse.
    page.evaluate("document.querySelector('#map').focus()")
    page.press("ArrowRight")
    count = layers[0]["selections"][0]
    owner_name = expected["owner_names"][layers[0]["owners"][0]]
    said = text_of(page, "#cell")
    assert said.startswith(f"Layer {layers[0]['layer_id']}, expert 0: {count} selection")
    assert said.endswith(f"· {owner_name}")
    page.press("ArrowDown")
    assert text_of(page, "#cell").startswith(f"Layer {layers[1]['layer_id']}, expert 0: ")
    box = page.evaluate(
        "(() => { const map = document.querySelector('#map'); map.scrollIntoView(); "
        "const box = map.getBoundingClientRect(); return [box.left, box.top]; })()"
    )
    page.move_to(box[0] + 200, box[1] + 60)
    assert re.match(r"Layer \d+, expert [1-9]\d*: ", text_of(page, "#cell"))

    # Of one owner alone, the other's colour is gone.
    page.click("#legend button")
    assert len(num_pixels_by_hue(page)) < len(hues)
    assert page.complaints == []


def test_it_says_what_is_true_now(server: RunningServer, page: Page) -> None:
    """Of a server that has written before the page was opened, reads a long prompt, and is
    suspended."""
    url = f"{server.url}/v1/completions"
    body: dict[str, Any] = {"prompt": "def", "max_tokens": 20, "ignore_eos": True}
    httpx.post(url, json=body, verify=NO_TLS, timeout=60).raise_for_status()
    page.open(f"{server.url}/")
    page.wait_for(IS_SHOWN)
    assert text_of(page, "#speed-note") == "none since this page was opened"
    assert int(text_of(page, "#generated").replace(",", "")) >= 20
    assert texts_of(page, ".owners .share") == ["\u2013"] * 2  # of nothing, now
    httpx.post(url, json=body, verify=NO_TLS, timeout=60).raise_for_status()
    shares = "[...document.querySelectorAll('.owners .share')].map((e) => e.textContent)"
    page.wait_for(f"{shares}.every((share) => share.endsWith('%'))")
    assert sum(float(each.split()[0]) for each in texts_of(page, ".owners .share")) == (
        pytest.approx(100, abs=0.2)
    )
    page.wait_for("document.querySelector('#speed-note').textContent.startsWith('at most')")

    # Daemons that are suspended keep a prompt from getting on; the page says how far it is.
    daemons = spawned_by(server.process.pid)
    assert len(daemons) == 2
    with ThreadPoolExecutor(1) as pool:
        with suspended(*daemons):
            body |= {"prompt": "import re\n" * 40, "max_tokens": 1}
            reading = pool.submit(httpx.post, url, json=body, verify=NO_TLS, timeout=60)
            note = "document.querySelector('#speed-note').textContent"
            page.wait_for(rf"/^\d+ of \d+ tokens of a prompt read$/.test({note})")
            assert text_of(page, "#condition") != "ready"
        reading.result().raise_for_status()
    with suspended(psutil.Process(server.process.pid)):
        page.wait_for(f"{CONDITION}.startsWith('no answer for ')")
    page.wait_for(f"!{CONDITION}.startsWith('no answer')")
    assert page.complaints == []


def test_it_fits_a_phone_is_light_or_dark_and_rests_while_nobody_looks(
    server: RunningServer, page: Page
) -> None:
    page.open(f"{server.url}/")
    page.wait_for(f"{IS_SHOWN} && document.querySelector('#legend').childElementCount === 2")
    grounds = {}
    for scheme in ("light", "dark"):
        page.look(width=360, height=740, scheme=scheme)
        grounds[scheme] = colour_of(page, "--ground")
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        beyond = page.evaluate(
            "[...document.querySelectorAll('main *:not(thead *)')].filter((e) => "
            "e.checkVisibility() && e.getBoundingClientRect().right > 360.5)"
            ".map((e) => e.outerHTML.slice(0, 80))"
        )
        assert beyond == []
        for name in ("--ink", "--muted", "--good", "--bad", "--warn"):
            assert contrast(colour_of(page, name), grounds[scheme]) >= 4.5, (scheme, name)
        for owner in range(8):
            colour = colour_of(page, f"--owner-{owner}")
            assert contrast(colour, grounds[scheme]) >= 3, (scheme, owner)
    assert contrast(grounds["light"], grounds["dark"]) > 10
    assert page.evaluate("document.querySelector('#map').width") <= 360

    def num_looks() -> float:
        return server.metric('dflash_moe_http_requests_total{endpoint="/status",status="200"}')

    before = num_looks()
    wait_until(lambda: num_looks() > before, "the page to look again")
    hide = (
        "Object.defineProperty(document, 'hidden', {{ value: {}, configurable: true }});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    page.evaluate(hide.format("true"))
    page.evaluate("new Promise((done) => setTimeout(done, 300))")  # what was under way
    before = num_looks()
    page.evaluate("new Promise((done) => setTimeout(done, 1500))")
    assert num_looks() == before
    page.evaluate(hide.format("false"))
    wait_until(lambda: num_looks() > before, "the page to look again")
    assert page.complaints == []


def test_with_keys_it_asks_for_one_and_keeps_it_in_its_tab(tmp_path: Path, page: Page) -> None:
    model = write_qwen3moe(tmp_path / "small.gguf", SHAPE, seed=1, tokenizer="bytes")
    keys, template = tmp_path / "keys", tmp_path / "chat.jinja"
    keys.write_text(f"{KEY}\n")
    keys.chmod(0o600)
    template.write_text(CHAT_TEMPLATE)
    files = ["--api-key-file", str(keys), "--chat-template-file", str(template)]
    is_asked = "!document.querySelector('#key-form').hidden"
    with running_server(model, "--backend", "reference", *files) as server:
        page.open(f"{server.url}/")
        page.wait_for(is_asked)
        page.type("#key", f"{KEY}x")
        page.press("Enter")
        page.wait_for("document.querySelector('#key-problem').textContent")
        assert not page.evaluate(IS_SHOWN)
        page.type("#key", KEY)
        page.press("Enter")
        page.wait_for(IS_SHOWN)
        page.open(f"{server.url}/")
        page.wait_for(IS_SHOWN)
        kept = page.evaluate(
            "[Object.values(sessionStorage), Object.values(localStorage), document.cookie]"
        )
        assert kept == [[KEY], [], ""]

        # A chat, since there is a template, which the short context ends.
        write_endlessly(page)
        page.type("#chat-text", "x" * 120)
        page.press("Enter")
        page.wait_for(f"document.querySelector('.answered') && !({IS_WRITING})")
        assert text_of(page, "#chat-log .asked h3") == "You"
        assert "length limit" in text_of(page, ".answered .note")
        # And an error, which is shown: the conversation does not fit any more.
        page.type("#chat-text", "x" * 120)
        page.press("Enter")
        page.wait_for("document.querySelector('#chat-log .note[role=alert]')")
        assert text_of(page, "#chat-log .note[role=alert]").startswith("Failed: ")

        page.click("#forget-key")
        page.wait_for(is_asked)
        assert page.evaluate("sessionStorage.length") == 0
        page.type("#key", KEY)
        page.press("Enter")
        page.wait_for(IS_SHOWN)
    page.wait_for("document.querySelector('#condition').textContent === 'not reached'")
    # The browser itself tells of answers that are errors, and of none.
    own = [
        each
        for each in page.complaints
        if not re.match(r"Failed to load resource: .*(401|400|ERR_CONNECTION|503)", each)
    ]
    assert own == []


def test_requests_now_and_before_and_the_last_hour_outlive_a_reload(
    server: RunningServer, page: Page
) -> None:
    url = f"{server.url}/v1/completions"
    body: dict[str, Any] = {"prompt": MARKUP, "max_tokens": 12, "ignore_eos": True}
    httpx.post(url, json=body, verify=NO_TLS, timeout=60).raise_for_status()
    latest = server.get("/status/requests").json()["latest"]
    for _ in range(2):  # the second time it is a reload
        page.open(f"{server.url}/")
        page.wait_for(f"{IS_SHOWN} && document.querySelector('#requests tr')")
        page.wait_for("document.querySelector('#hour-tokens rect')")
        names = page.evaluate(
            "[...document.querySelectorAll('.request-name')].map((name) => name.title)"
        )
        assert latest[0]["request_id"] in names
        assert "tokens/s each" in text_of(page, "#hour-note")
        assert "first token after" in text_of(page, "#hour-note")
        assert re.search(r"f16|f32", text_of(page, "#cache"))
        assert text_of(page, "#owners .number").endswith("iB")
        assert MARKUP not in text_of(page, "main")

    # One runs and reads its prompt, another waits for it.
    daemons = spawned_by(server.process.pid)
    with ThreadPoolExecutor(2) as pool:
        with suspended(*daemons):
            long = {**body, "prompt": "import re\n" * 40, "max_tokens": 1}
            asked = [pool.submit(httpx.post, url, json=long, verify=NO_TLS, timeout=60)]
            states = "[...document.querySelectorAll('.request-state')].map((e) => e.textContent)"
            page.wait_for(rf"{states}.some((state) => /^reading \d+ of \d+$/.test(state))")
            asked.append(pool.submit(httpx.post, url, json=long, verify=NO_TLS, timeout=60))
            page.wait_for(f"{states}.includes('waiting')")
            assert text_of(page, "#queue-why").startswith("1 request waits for the one that runs")
            assert "one request at a time" in text_of(page, "#requests .reason:not(:empty)")
        for each in asked:
            each.result().raise_for_status()
    page.wait_for("document.querySelector('#queue-why').hidden")
    assert page.complaints == []

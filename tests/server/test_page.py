"""The live page in a browser: what its reader sees."""

import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest
import uvicorn
from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, expect, sync_playwright
from tests.server.asked import CHAT, body
from tests.server.conftest import Served, free_port, service_over, wait
from tests.server.running import KEYS, Running
from tests.server.scripted import COUNTERS, POOL, READY, ScriptedEngine

from redknot.engine.messages import GateReport
from redknot.server.app import build_app

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no `chromium` on the path")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
GATE = GateReport(passed=True, summary="agreement 0.98 over 4 prompts")
UNKNOWN = "\u2013"
KEY = "key-of-a-tenant"
EVIL = "<img src=x onerror=window.hacked=1>"
WINDOW = {"width": 1100, "height": 800}
PHONE = {"width": 360, "height": 700}
FULL = {
    **COUNTERS,
    "hit_tokens.exact": 300.0,
    "hit_tokens.derived": 40.0,
    "hit_tokens.device": 1500.0,
    "hit_tokens.host": 250.0,
    "hit_tokens.disk": 10.0,
    "missed_tokens": 400.0,
    "prompt_tokens": 3000.0,
    "cached_tokens": 1234.0,
    "gauge.store_entries": 7.0,
    "gauge.store_bytes": 3.0 * 2**20,
    "gauge.store_capacity_bytes": 4.0 * 2**30,
    "gauge.builds_pending": 5.0,
    "gauge.break_even_uses": 2.5,
    "shadow_runs": 11.0,
}

Shown = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Of this module alone: while it lives, its event loop is the thread's."""
    with sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield chromium
        chromium.close()


class Watched:
    """What pages asked for and complained about."""

    def __init__(self) -> None:
        self.urls: list[str] = []
        self.complaints: list[str] = []

    def watch(self, page: Page) -> None:
        page.on("request", lambda request: self.urls.append(request.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._console)

    @property
    def hosts(self) -> set[str]:
        return {urlsplit(url).netloc for url in self.urls}

    @property
    def polls(self) -> int:
        return sum(url.endswith("/live") for url in self.urls)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)


@pytest.fixture
def watched() -> Watched:
    return Watched()


@pytest.fixture
def shown(browser: Browser, watched: Watched) -> Iterator[Shown]:
    """Opens the page of a server in a fresh profile; keywords are the profile's."""
    contexts = []

    def show(address: str, **profile: Any) -> Page:
        settings = {"locale": "en-US", "viewport": WINDOW, **profile}
        contexts.append(browser.new_context(**settings))
        page = contexts[-1].new_page()
        watched.watch(page)
        page.goto(address)
        return page

    yield show
    for context in contexts:
        context.close()


def update(engine: ScriptedEngine, **fields: Any) -> None:
    """A new heartbeat; `counters` are added to those before."""
    counters = {**engine.latest.counters, **fields.pop("counters", {})}
    engine.latest = msgspec.structs.replace(engine.latest, counters=counters, **fields)


def told(page: Page, section: str, name: str) -> Locator:
    """The value beside a name."""
    terms = page.locator(f"#{section} dt").filter(has_text=re.compile(f"^{re.escape(name)}$"))
    return terms.locator("xpath=following-sibling::dd[1]")


def widths(page: Page, section: str) -> dict[str, float]:
    """Shares of a bar by the names that stand below it, in percent of what is drawn."""
    names = page.locator(f"#{section} dt").all_text_contents()
    boxes = [piece.bounding_box() for piece in page.locator(f"#{section} .bar i").all()]
    whole = page.locator(f"#{section} .bar").bounding_box()["width"]
    return {name: 100 * box["width"] / whole for name, box in zip(names, boxes, strict=False)}


def banner(page: Page) -> Locator:
    return page.get_by_role("alert")


def test_every_figure_of_live_is_shown(
    served: Served, engine: ScriptedEngine, shown: Shown, watched: Watched
) -> None:
    engine.ready = msgspec.structs.replace(READY, gate=GATE)
    pool = msgspec.structs.replace(POOL, free=34, requests=22)
    update(engine, counters=FULL, agreement=0.937, pool=pool)
    address = served()
    for _ in range(3):
        httpx.post(address + CHAT, json=body(CHAT, max_tokens=2)).raise_for_status()
    page = shown(address)
    live = httpx.get(f"{address}/live").json()
    assert live["finished"] == live["ttft"]["count"] == 3
    expected = {
        ("hits", "exact"): "300 · 10 %",
        ("hits", "derived"): "40 · 1.3 %",
        ("hits", "device"): "1,500 · 50 %",
        ("hits", "host"): "250 · 8.3 %",
        ("hits", "disk"): "10 · 0.3 %",
        ("hits", "missed"): "400 · 13.3 %",
        ("hits", "outside segments"): "500 · 16.7 %",
        ("pages", "global"): "12 · 18.8 %",
        ("pages", "local"): "4 · 6.3 %",
        ("pages", "kept for beginnings"): "8 · 12.5 %",
        ("pages", "being filled"): "6 · 9.4 %",
        ("pages", "free"): "34 · 53.1 %",
        ("pages", "all"): "64",
        ("requests", "running"): "1",
        ("requests", "waiting"): "2",
        ("requests", "finished"): "3",
        ("ttft", "of the last requests"): "3",
        ("tokens", "generated"): "20",
        ("tokens", "of prompts"): "3,000",
        ("tokens", "of these not computed"): "1,234 · 41.1 %",
        ("store", "segments"): "7",
        ("store", "used"): "3 MiB",
        ("store", "room"): "4 GiB",
        ("store", "builds pending"): "5",
        ("store", "a build pays after"): "2.5 uses",
        ("quality", "answers come from"): "question_drop",
        ("quality", "fallback"): "none",
        ("quality", "agreement of shadow runs"): "0.937",
        ("quality", "shadow runs"): "11",
        ("quality", "gate"): GATE.summary,
    }
    for (section, name), value in expected.items():
        expect(told(page, section, name)).to_have_text(value)
    for name, quantile in (("median", "p50"), ("90 %", "p90"), ("99 %", "p99")):
        milliseconds = told(page, "ttft", name).inner_text().removesuffix(" ms")
        assert float(milliseconds) == pytest.approx(1000 * live["ttft"][quantile], rel=0.01)
    expect(page.locator("#model")).to_have_text("tiny")
    expect(page.locator("#policy")).to_have_text("question_drop")
    expect(banner(page)).to_be_hidden()
    expect(page.locator("#login")).to_be_hidden()
    assert watched.complaints == []
    assert watched.hosts == {urlsplit(address).netloc}


def test_a_hit_moves_the_bar(served: Served, engine: ScriptedEngine, shown: Shown) -> None:
    page = shown(served())
    expect(told(page, "hits", "device")).to_have_text("25 · 25 %")
    before = widths(page, "hits")
    assert before["device"] == pytest.approx(25, abs=0.5)
    assert before["missed"] == pytest.approx(60, abs=0.5)
    update(engine, counters={"prompt_tokens": 200.0, "hit_tokens.device": 125.0})
    expect(told(page, "hits", "device")).to_have_text("125 · 62.5 %")
    page.wait_for_timeout(500)  # the bar glides
    after = widths(page, "hits")
    assert after["device"] == pytest.approx(62.5, abs=0.5)
    assert after["missed"] == pytest.approx(30, abs=0.5)


def test_pages_that_several_requests_share_do_not_burst_the_bar(
    served: Served, engine: ScriptedEngine, shown: Shown
) -> None:
    update(engine, pool=msgspec.structs.replace(POOL, by_class={"global": 60, "local": 20}))
    page = shown(served())
    expect(told(page, "pages", "global")).to_have_text("60 · 93.8 %")
    page.wait_for_timeout(500)
    assert sum(widths(page, "pages").values()) == pytest.approx(100, abs=1)
    assert widths(page, "pages")["global"] == pytest.approx(100 * 60 / 128, abs=0.5)


def test_speed_is_what_was_generated_lately(
    served: Served, engine: ScriptedEngine, shown: Shown
) -> None:
    page = shown(served())
    expect(told(page, "tokens", "generated per second")).to_have_text("0")
    update(engine, counters={"generation_tokens": 60.0})
    expect(told(page, "tokens", "generated")).to_have_text("60")
    speed = float(told(page, "tokens", "generated per second").inner_text())
    assert 0 < speed <= 40  # two polls are a second apart
    expect(page.locator("#tokens small")).to_contain_text("per second at most")
    ys = [pair.split(",")[1] for pair in points(page, "tokens")]
    assert {float(y) for y in ys} == {0.0, 1.0}  # the highest point is at the top


def points(page: Page, section: str) -> list[str]:
    return page.locator(f"#{section} polyline").get_attribute("points").split()


@pytest.mark.parametrize(
    ("uses", "words"), [(0.0, "nothing built"), (-1.0, "not known to pay"), (3.25, "3.3 uses")]
)
def test_break_even_in_words(
    served: Served, engine: ScriptedEngine, shown: Shown, uses: float, words: str
) -> None:
    update(engine, counters={"gauge.break_even_uses": uses})
    expect(told(shown(served()), "store", "a build pays after")).to_have_text(words)


def test_fallback_and_a_stuck_engine_are_announced(
    served: Served, engine: ScriptedEngine, shown: Shown
) -> None:
    reason = "agreement 0.5 < 0.85 over 4 shadow runs"
    update(engine, fallback=reason)
    page = shown(served())
    expect(banner(page)).to_have_text(f"Dense answers everything: {reason}")
    expect(banner(page)).to_have_class("warn")
    expect(told(page, "quality", "answers come from")).to_have_text("dense")
    expect(told(page, "quality", "fallback")).to_have_text(reason)
    engine.is_alive = False
    expect(banner(page)).to_have_text("The engine is stuck: it shows no sign of life.")
    expect(banner(page)).to_have_class("bad")
    engine.is_alive = True
    update(engine, fallback="")
    expect(banner(page)).to_be_hidden()
    expect(told(page, "quality", "answers come from")).to_have_text("question_drop")


def test_before_the_first_heartbeat_nothing_breaks(
    served: Served, engine: ScriptedEngine, shown: Shown, watched: Watched
) -> None:
    engine.latest = type(engine.latest)(time=0.0)
    page = shown(served())
    expect(told(page, "hits", "missed")).to_have_text(f"0 · {UNKNOWN}")
    expect(told(page, "store", "room")).to_have_text(UNKNOWN)
    expect(page.locator("#pages dt")).to_have_count(0)
    assert watched.complaints == []


def enter(page: Page, key: str) -> None:
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Show").click()


def test_a_key_is_asked_for_once(served: Served, shown: Shown, watched: Watched) -> None:
    page = shown(served(api_key=(KEY,)))
    form = page.locator("#login")
    expect(form).to_contain_text("This server wants an API key")
    expect(page.locator("#figures")).to_be_hidden()
    for wrong in ("another-key", "klíč-🙂"):
        enter(page, wrong)
        expect(form).to_contain_text("This API key is not accepted")
        wait(lambda: page.evaluate("sessionStorage.length") == 0)  # once the answer has come
    page.wait_for_timeout(1500)
    assert watched.polls == 3  # without a key nothing is polled
    assert ["401" in text for text in watched.complaints] == [True] * 3
    enter(page, KEY)
    expect(told(page, "requests", "running")).to_have_text("1")
    expect(form).to_be_hidden()
    page.reload()
    expect(told(page, "requests", "running")).to_have_text("1")
    expect(form).to_be_hidden()
    assert page.evaluate("localStorage.length") == 0
    assert KEY not in page.url + page.content()
    assert len(watched.complaints) == 3


def test_a_key_that_is_no_longer_good_is_asked_for_again(
    served: Served, shown: Shown, watched: Watched
) -> None:
    page = shown(served(api_key=(KEY,)))
    enter(page, KEY)
    expect(page.locator("#figures")).to_be_visible()
    page.evaluate("key = 'a-revoked-key'")
    expect(page.locator("#login")).to_contain_text("This API key is not accepted")
    expect(page.locator("body")).to_have_class("stale")


def test_what_the_server_says_is_text(
    served: Served, engine: ScriptedEngine, shown: Shown, watched: Watched
) -> None:
    engine.ready = msgspec.structs.replace(
        READY, policy=EVIL, gate=GateReport(passed=True, summary=EVIL)
    )
    counters = {f"hit_tokens.{EVIL}": 5.0, "hit_tokens.__proto__": 1.0}
    update(engine, fallback=EVIL, counters=counters, pool=POOL_OF_EVIL)
    page = shown(served(served_model_name=EVIL))
    for selector in ("#model", "#policy"):
        expect(page.locator(selector)).to_have_text(EVIL)
    expect(banner(page)).to_contain_text(EVIL)
    expect(told(page, "quality", "gate")).to_have_text(EVIL)
    expect(told(page, "hits", EVIL)).to_have_text("5 · 5 %")
    expect(told(page, "pages", EVIL)).to_have_text("3 · 4.7 %")
    page.wait_for_timeout(1200)
    assert page.locator("img").count() == 0
    assert page.evaluate("window.hacked") is None
    assert watched.complaints == []


POOL_OF_EVIL = msgspec.structs.replace(POOL, by_class={EVIL: 3})


@contextmanager
def serving(engine: ScriptedEngine, port: int) -> Iterator[None]:
    """An app over ``engine`` at a port that another may have had before."""
    service = service_over(engine)
    config = uvicorn.Config(build_app(service), port=port, log_config=None, lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait(lambda: server.started)
    yield
    server.should_exit = server.force_exit = True
    thread.join(10)
    service.close()


def test_a_restart_is_survived(engine: ScriptedEngine, shown: Shown) -> None:
    port = free_port()
    update(engine, counters={"generation_tokens": 5000.0})
    with serving(engine, port):
        page = shown(f"http://127.0.0.1:{port}")
        expect(told(page, "tokens", "generated")).to_have_text("5,000")
        expect(told(page, "tokens", "generated per second")).to_have_text("0")
    expect(banner(page)).to_contain_text("The server is not reachable; these figures are from")
    expect(banner(page)).to_have_class("bad")
    expect(page.locator("body")).to_have_class("stale")
    expect(told(page, "tokens", "generated")).to_have_text("5,000")
    update(engine, counters={"generation_tokens": 7.0})
    with serving(engine, port):
        expect(told(page, "tokens", "generated")).to_have_text("7", timeout=10_000)
        assert told(page, "tokens", "generated per second").inner_text() in (UNKNOWN, "0")
        expect(banner(page)).to_be_hidden()
        expect(page.locator("body")).not_to_have_class("stale")


def test_a_server_that_fails_is_told_from_one_that_is_gone(
    served: Served, engine: ScriptedEngine, shown: Shown
) -> None:
    page = shown(served())
    expect(page.locator("#figures")).to_be_visible()
    engine.latest = None
    expect(banner(page)).to_contain_text("The server answers with status 500")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_in_both_schemes(
    served: Served, engine: ScriptedEngine, shown: Shown, scheme: str
) -> None:
    engine.ready = msgspec.structs.replace(READY, policy="p" * 90)
    update(engine, counters=FULL, fallback="r" * 120)
    page = shown(served(served_model_name="m" * 120), viewport=PHONE, color_scheme=scheme)
    expect(page.locator("#figures")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    back, text, dim = (
        page.evaluate(f"getComputedStyle(document.querySelector('{name}')).{kind}")
        for name, kind in (("section", "backgroundColor"), ("dd", "color"), ("dt", "color"))
    )
    assert (luminance(back) < 0.1) is (scheme == "dark")
    assert min(contrast(back, text), contrast(back, dim)) >= 4.5
    sign = [page.evaluate(f"getComputedStyle(banner).{kind}") for kind in COLOURS]
    assert contrast(*sign) >= 4.5


COLOURS = ("backgroundColor", "color")


def luminance(colour: str) -> float:
    """Relative luminance as WCAG has it, 0 to 1."""
    values = [int(value) / 255 for value in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_figures_of_a_real_engine(real: Running, shown: Shown, watched: Watched) -> None:
    page, before = shown(real.address), real.live()
    enter(page, KEYS[0])
    expect(told(page, "requests", "finished")).to_have_text(f"{before['finished']:,}")
    with real.http() as client:
        client.post(CHAT, json=body(CHAT, max_tokens=3)).raise_for_status()
    expect(told(page, "requests", "finished")).to_have_text(f"{before['finished'] + 1:,}")
    wait(lambda: real.live()["generation_tokens"] >= before["generation_tokens"] + 3)
    after = real.live()
    assert after["prompt_tokens"] > before["prompt_tokens"]
    expect(told(page, "tokens", "of prompts")).to_have_text(f"{after['prompt_tokens']:,.0f}")
    expect(told(page, "tokens", "generated")).to_have_text(f"{after['generation_tokens']:,.0f}")
    expect(told(page, "pages", "all")).to_have_text(f"{after['pool']['total']:,}")
    assert all("401" in text for text in watched.complaints)  # before the key
    assert watched.hosts == {urlsplit(real.address).netloc}

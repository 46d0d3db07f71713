"""The dashboard in a real browser: every page for everybody, every action by page, and what strangers write stays text."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio
from aiohttp.test_utils import TestServer
from playwright.async_api import Browser, BrowserContext, Page, async_playwright, expect

from coordinator.actions import ACTIONS
from coordinator.joining import hash_token
from coordinator.operators import Role
from coordinator.store import hardware
from coordinator.store import run as run_store
from coordinator.store import tables as t
from protocol.declaration import Declaration
from protocol.rollout import RejectionReason
from tests.dashboard import token_of, views_of
from tests.factories import EOS, make_identity
from tests.stored_run import StoredRun, rejected

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one browser for all: it takes seconds to start
EVIL = "<script>alert(1)</script><img src=/x onerror=alert(2)>"
COMPLETION = EVIL[:30]
CARD = f"card {EVIL}"
ALICE, BOB = make_identity(11), make_identity(12)
PUBLIC = ("/", "/leaderboard", "/api", "/login")
PRIVATE = ("/workers", "/rollouts", "/ledger", "/audit", "/run")
NO_PAGES = ("/metrics", "/healthz", "/.well-known/rollswarm.json")
PATIENCE_MS = 60_000.0
PHONE, DESK = 390, 1200
_CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest_asyncio.fixture(loop_scope="module")
async def run(sqlite_url: str) -> AsyncIterator[StoredRun]:
    """A run in which something of every kind happened, with scripts wherever a stranger writes."""
    run = await StoredRun.begin(sqlite_url)
    await run.join(ALICE, BOB)
    await run.work(ALICE, 2)
    await run.judge()
    await run.pull()
    await run.work(BOB, 1, tokens=(*(ord(each) - 32 for each in COMPLETION), EOS))
    await run.judge(rejected(RejectionReason.PROOF, EVIL))
    async with run.db.write() as connection:
        await hardware.add(connection, CARD, 1.0)
    await run.join(ALICE, declared=Declaration(hardware=CARD))
    await run.work(ALICE, 1)
    await run.step(0)
    await run.change(t.workers, name=EVIL, hardware=EVIL, software=EVIL[:64])
    await run.change(t.groups, prompt=EVIL)
    yield run
    await run.db.close()


@pytest_asyncio.fixture(loop_scope="module")
async def site(run: StoredRun) -> AsyncIterator[str]:
    server = TestServer(views_of(run, EVIL).application(), shutdown_timeout=1.0)
    await server.start_server()
    yield str(server.make_url("")).rstrip("/")
    await server.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    if _CHROMIUM is None:
        assert not os.environ.get("CI"), "CI must look at the pages: install chromium"
        pytest.skip("no Chromium here: install it to look at the pages")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=_CHROMIUM, args=["--no-sandbox", "--disable-gpu"], timeout=PATIENCE_MS
        )
        yield browser
        await browser.close()


@dataclass
class Trouble:
    """What a page did that none may do."""

    found: list[str] = field(default_factory=list)

    def watch(self, page: Page, site: str) -> None:
        page.on("dialog", lambda dialog: self.found.append(f"dialog on {page.url}: {dialog.message}"))
        page.on("pageerror", lambda error: self.found.append(f"error on {page.url}: {error}"))
        page.on("console", self._heard)
        page.on("request", lambda request: self._asked(request.url, site))

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.found.append(f"console: {message.text}")

    def _asked(self, url: str, site: str) -> None:
        if not url.startswith(site) or url == f"{site}/x":
            self.found.append(f"request: {url}")


@asynccontextmanager
async def visit(browser: Browser, site: str, *, width: int = DESK, scheme: str = "light") -> AsyncIterator[Page]:
    """Somebody's window, which must give no trouble at all."""
    dark: Any = scheme
    context: BrowserContext = await browser.new_context(
        viewport={"width": width, "height": 800}, color_scheme=dark, base_url=site
    )
    context.set_default_timeout(PATIENCE_MS)
    trouble = Trouble()
    page = await context.new_page()
    trouble.watch(page, site)
    yield page
    await context.close()
    assert trouble.found == []


async def log_in(page: Page, run: StoredRun, role: Role, name: str = "") -> None:
    await page.goto("/login")
    await page.get_by_label("Token").fill(await token_of(run, role, name))
    await page.keyboard.press("Enter")
    await page.wait_for_url("**/run")


async def pages_of(run: StoredRun) -> tuple[str, ...]:
    """Every page, and the pages of a worker and of both kinds of rollout."""
    states = {row.state: row.rollout_id for row in await run.rows(t.rollouts)}
    rollouts = [states[state] for state in ("served", "rejected")]
    return (
        *PUBLIC,
        *PRIVATE,
        *(f"/workers/{each.key_id}" for each in (ALICE, BOB)),
        *map("/rollouts/{}".format, rollouts),
    )


# All at once: every question to the browser is a way to another process and back.
_LOOK = """() => {
  const name = e => (e.getAttribute("aria-label") || (e.labels && e.labels[0] || e).innerText).trim();
  return {
    headings: document.querySelectorAll("h1").length,
    strange: [...document.querySelectorAll("img, script:not([src]), iframe, [onerror]")].map(e => e.outerHTML),
    wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    nameless: [...document.querySelectorAll("button, input:not([type=hidden]), select, a")]
      .filter(e => !name(e)).map(e => e.outerHTML),
    buttons: document.querySelectorAll("main button").length,
    paper: getComputedStyle(document.body).backgroundColor,
    text: document.body.innerText,
  };
}"""


async def look(page: Page, path: str) -> dict[str, Any]:
    """The page: everything strangers wrote is text, it fits the window, and all that can be pressed has a name."""
    answer = await page.goto(path)
    assert answer is not None and answer.status == 200, path
    seen: dict[str, Any] = await page.evaluate(_LOOK)
    assert (seen["headings"], seen["strange"], seen["nameless"]) == (1, [], []), path
    assert seen["wide"] <= 0, f"{path} is {seen['wide']} px wider than the window"
    return seen


async def test_every_page_is_walked(run: StoredRun) -> None:
    routes = {
        route.resource.canonical
        for route in views_of(run).application().router.routes()
        if route.method == "GET" and route.resource is not None
    }
    pages = {path for path in routes if not path.startswith(("/api/v1", "/static"))} - set(NO_PAGES)
    assert pages == {*PUBLIC, *PRIVATE, "/workers/{worker_id}", "/rollouts/{rollout_id}"}


@pytest.mark.parametrize(
    ("role", "width", "scheme"),
    [(Role.ADMIN, PHONE, "light"), (Role.OPERATOR, DESK, "dark"), (Role.VIEWER, PHONE, "dark")],
)
async def test_every_page_for_those_who_have_a_token(
    browser: Browser, site: str, run: StoredRun, role: Role, width: int, scheme: str
) -> None:
    async with visit(browser, site, width=width, scheme=scheme) as page:
        await log_in(page, run, role)
        seen = [await look(page, path) for path in await pages_of(run)]
    text = "".join(each["text"] for each in seen)
    assert text.count(EVIL) >= 8, "title, names, hardware, prompt, reasons"
    assert COMPLETION in text
    assert {each["paper"] for each in seen} == {"rgb(18, 22, 26)" if scheme == "dark" else "rgb(247, 248, 249)"}


async def test_every_page_for_a_stranger(browser: Browser, site: str, run: StoredRun) -> None:
    async with visit(browser, site, width=PHONE) as page:
        for path in PUBLIC:
            seen = await look(page, path)
            assert seen["buttons"] == (path == "/login")
            assert path == "/api" or "strike" not in seen["text"].lower()
        for path in (await pages_of(run))[len(PUBLIC) :]:
            await page.goto(path)
            assert page.url == f"{site}/login", path


async def act(page: Page, action: str, **fields: str) -> None:
    """Fill in the action's form, be asked, and confirm."""
    form = page.get_by_role("form", name=action.capitalize(), exact=True)
    for label, value in fields.items():
        await form.locator(f"[name={label}]").fill(value)
    await form.get_by_role("button").click()
    await confirm(page, action)


async def confirm(page: Page, action: str) -> None:
    await expect(page.get_by_role("alertdialog")).to_be_visible()
    await page.get_by_role("button", name=f"Yes, {action}").click()
    await expect(page.get_by_role("status")).to_be_visible()


async def done_by(run: StoredRun, name: str) -> list[str]:
    return [row.action for row in await run.rows(t.events) if row.actor == name]


async def test_an_admin_does_everything_through_the_page(browser: Browser, site: str, run: StoredRun) -> None:
    async with visit(browser, site) as page:
        await log_in(page, run, Role.ADMIN, "Ada")
        for action, paused in (("pause", True), ("drain", False), ("resume", False)):
            await page.get_by_role("button", name=action.capitalize(), exact=True).click()
            before = await run_store.load(run.db)
            await confirm(page, action)
            now = await run_store.load(run.db)
            assert before is not None and now is not None
            assert (now.paused, before.paused) == (paused, action == "drain"), "nothing before it is confirmed"
        for action, banned in (("ban", True), ("pardon", False)):
            await act(page, action, worker=ALICE.key_id, reason=EVIL)
            assert (await run.standing(ALICE)).banned is banned
        for action, state in (("refuse", "refused"), ("admit", "admitted")):
            await page.get_by_role("button", name=f"{action.capitalize()} {CARD}").click()
            await confirm(page, action)
            assert (await run.row(t.hardware)).decision == state
        await act(page, "invite", uses="3", days="2", note=EVIL)
        shown = await page.get_by_role("status").inner_text()
        assert (await run.row(t.invites)).token_hash == hash_token(shown.rpartition(" ")[2])
        await page.get_by_label("New max_staleness").fill("3")
        await page.get_by_role("button", name="Set max_staleness").click()
        await confirm(page, "set")
        await expect(page.get_by_role("status")).to_contain_text("max_staleness is 3")
        assert set(await done_by(run, "Ada")) == ACTIONS.keys(), "there is no action that the page lacks"
        assert await page.locator("img, script:not([src])").count() == 0


async def test_what_is_not_confirmed_or_makes_no_sense_is_not_done(browser: Browser, site: str, run: StoredRun) -> None:
    context = await browser.new_context(base_url=site)
    page = await context.new_page()
    await log_in(page, run, Role.ADMIN, "Ada")
    await page.get_by_role("button", name="Pause", exact=True).click()
    await page.get_by_role("link", name="No", exact=True).click()
    await page.get_by_label("New worker_share").fill("7")
    await page.keyboard.press("Enter")
    await page.get_by_role("button", name="Yes, set").click()
    await expect(page.get_by_role("alert")).to_contain_text("from 0.01 to 1")
    assert await done_by(run, "Ada") == []
    await context.close()


@pytest.mark.parametrize("role", [Role.VIEWER, Role.OPERATOR])
async def test_nobody_does_more_than_the_role_allows(browser: Browser, site: str, run: StoredRun, role: Role) -> None:
    async with visit(browser, site) as page:
        await log_in(page, run, role, "Eve")
        csrf = await page.locator("[name=csrf]").first.get_attribute("value")
        forbidden = [name for name, action in ACTIONS.items() if action.needs > role]
        assert "set" in forbidden and ("ban" in forbidden) is (role is Role.VIEWER)
        for action in forbidden:
            assert await page.get_by_role("button", name=action.capitalize()).count() == 0
            fields = {"csrf": csrf or "", "action": action, "confirmed": "yes", "worker": ALICE.key_id}
            fields |= {"hardware": CARD, "name": "max_staleness", "value": "3"}
            made = await page.request.post("/run", form=fields)
            assert made.status == 403, action
            assert (await page.request.post(f"/api/v1/admin/{action}", data={})).status == 403, action
        if role is Role.VIEWER:
            assert await page.locator("main button").count() == 0
        assert await done_by(run, "Eve") == []


async def test_a_run_is_paused_by_keyboard_alone(browser: Browser, site: str, run: StoredRun) -> None:
    async with visit(browser, site) as page:
        await page.goto("/login")
        await page.keyboard.type(await token_of(run, Role.OPERATOR, "Kay"))  # the field has the focus
        await page.keyboard.press("Enter")
        await page.wait_for_url("**/run")
        await page.keyboard.press("Tab")
        assert await focused(page) == "Skip to content"
        for _ in range(40):
            await page.keyboard.press("Tab")
            if await focused(page) == "Pause":
                break
        outline = await page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid", "one sees where one is"
        await page.keyboard.press("Enter")
        await page.wait_for_function("document.activeElement.innerText === 'Yes, pause'")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("status")).to_contain_text("no leases are granted")
        assert await done_by(run, "Kay") == ["pause"]


async def focused(page: Page) -> str:
    return str(await page.evaluate("document.activeElement.innerText"))


async def test_a_page_follows_the_run_and_a_session_ends(browser: Browser, site: str, run: StoredRun) -> None:
    async with visit(browser, site) as page:
        await log_in(page, run, Role.VIEWER, "Vic")
        async with page.expect_response("**/api/v1/changes"):
            await page.goto("/audit")
        news = t.events.insert().values(at=1.0, actor="coordinator", action="news", subject="run", detail="it came")
        async with run.db.write() as connection:
            await connection.execute(news)
        await expect(page.get_by_text("it came")).to_be_visible(timeout=PATIENCE_MS)
        await page.get_by_role("button", name="Log out Vic").click()
        await page.goto("/audit")
        assert page.url == f"{site}/login"

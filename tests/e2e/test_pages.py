"""The pages in a real browser: a running server's, and reports."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from itertools import product
from pathlib import Path

import pytest
import pytest_asyncio

from cohabit.loadgen.arrivals import RequestArrival
from cohabit.loadgen.drawing.page import write_page
from cohabit.loadgen.openloop import Outcome
from cohabit.loadgen.report import Report, RunDescription, make_report
from cohabit.page.document import Figure, ReportDocument, quantity
from cohabit.page.html import report_page
from cohabit.server.capacity.fit import Fit
from cohabit.server.capacity.report import fit_page
from cohabit.server.view.plan_document import plan_document
from tests.server.test_plan_analysis import hand_written_analysis
from tests.support.e2e.browser import Page, browser
from tests.support.e2e.serving import Process, infer, process
from tests.support.e2e.stacks import Stacks, X

pytestmark = pytest.mark.asyncio(loop_scope="module")

BROKEN = "<i>broken"
TOKEN = "control-token-0123456789"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def opened() -> AsyncIterator[Page]:
    """One browser for all tests. Each test opens its own page in it."""
    async with browser() as page:
        yield page


@pytest.fixture
def page(opened: Page) -> Iterator[Page]:
    yield opened
    assert opened.complaints == []


def row_of(model: str) -> str:
    rows = "[...document.querySelectorAll('.models tbody tr')]"
    return f"{rows}.find((row) => row.querySelector('b').textContent === '{model}')"


def state_of(model: str) -> str:
    return f"{row_of(model)}?.querySelector('.state').textContent"


async def ask_on(server: Process) -> None:
    """Send requests one after the other until cancelled: the page shows those of the last seconds."""
    while True:
        await asyncio.to_thread(infer, server.address, "a", {"x": X})
        await asyncio.sleep(0.1)


@pytest.fixture(scope="module")
def repository(stacks: Stacks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    for seed, name in enumerate(("a", "b")):
        stacks.put(folder, name, seed)
    stacks.put(folder, BROKEN, 0)
    (folder / BROKEN / "1" / "model.pt2").write_bytes(b"no archive")
    return folder


FLAGS = ("--model-control", "explicit", "--load-model", "*", "--batch-sizes", "1", "--no-strict-readiness")


@pytest.fixture(scope="module")
def server(repository: Path, plans: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A server that controls models with a token, and traces each request. The last test ends it."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "control").write_text(TOKEN)
    tracing = ("--trace-config", f"file={folder / 't.json'}", "--trace-config", "rate=1")
    flags = (*FLAGS, "--control-token-file", str(folder / "control"), *tracing)
    with process(repository, "24MiB", plans, *flags) as server:
        server.until_ready()
        yield server


def load_test(rate_per_s: float, mean_s: float) -> Report:
    run = RunDescription(url="u", rate_per_s=rate_per_s, duration_s=4.0, warmup_s=0.0)
    outcomes = [
        Outcome(RequestArrival(k / rate_per_s, "a"), 0.0, mean_s * (1 + k % 7)) for k in range(int(4 * rate_per_s))
    ]
    return make_report(run, outcomes, ["a"])


async def test_load_tests_are_drawn_at_the_rate_that_is_chosen(page: Page, tmp_path: Path) -> None:
    path = tmp_path / "load.html"
    rates = (10.0, 20.0)
    write_page(path, {"one": [load_test(r, 0.01) for r in rates], "</b>two": [load_test(r, 0.02) for r in rates]})
    for width in (1280, 400):
        await page.looks(width)
        await page.open(path.as_uri())
        assert await page.value("document.documentElement.scrollWidth") <= width
        drawn = "[...document.querySelectorAll('.curve')].map((c) => c.querySelectorAll('.line').length)"
        await page.until(f"{drawn}.join() === '4,2,4'")
        assert await page.value("document.querySelectorAll('.curve circle').length") == 4
        await page.value("document.querySelector('.curve').focus()")
        await page.press("ArrowRight")
        assert "answered requests per second: 10" in await page.value("document.getElementById('tip').innerText")
        assert "</b>two compared with one, 20/s" in await page.text()
        await page.value(
            "(s => { s.value = 0; s.dispatchEvent(new Event('change')); })(document.querySelector('select'))"
        )
        assert "</b>two compared with one, 10/s" in await page.text()
        assert "compared with one, 20/s" not in await page.text()


async def test_no_figure_stands_alone_in_its_row(page: Page, tmp_path: Path) -> None:
    for count, width in product((4, 6, 7, 9, 10), (1280, 1000, 800)):
        figures = [Figure(f"figure {n}", quantity(n, "count"), ("note",), "help") for n in range(count)]
        path = tmp_path / f"{count}.html"
        path.write_text(report_page(ReportDocument("Figures", (), [], figures)))
        await page.looks(width)
        await page.open(path.as_uri())
        tops = "[...document.querySelectorAll('.figures > div')].map((tile) => tile.offsetTop)"
        await page.until(f"{tops}.length === {count}")
        rows = Counter(await page.value(tops)).values()
        assert min(rows) > 1, f"{count} figures, {width} pixels: {list(rows)}"


async def test_a_fit_is_drawn_with_its_slo(page: Page, tmp_path: Path) -> None:
    curve = [
        Fit("partitioned", n << 20, 0, 300.0, 0.1 / n, 0.2 / n, 0.1 / n, 0.99 if n == 1 else 0.5, 0.0, ())
        for n in range(1, 6)
    ]
    path = tmp_path / "fit.html"
    path.write_text(fit_page("models", curve, curve[3], 0.05))
    for width in (1280, 400):
        await page.looks(width)
        await page.open(path.as_uri())
        await page.until("document.querySelectorAll('.curve circle').length === 5")
        tops = await page.value("[...document.querySelectorAll('.curve circle')].map((c) => c.cy.baseVal.value)")
        assert tops == sorted(tops)
        slo = await page.value("document.querySelector('.curve .level').y1.baseVal.value")
        assert tops[3] == pytest.approx(slo), "50 ms in 4 MiB"
        assert await page.value("document.documentElement.scrollWidth") <= width


async def test_a_plan_is_drawn_and_tells_of_its_steps(page: Page, tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    path.write_text(report_page(plan_document(hand_written_analysis())))
    for width in (1280, 400):
        await page.looks(width)
        await page.open(path.as_uri())
        assert await page.value("document.querySelectorAll('svg.lanes rect.compute').length") == 3
        assert await page.value("document.querySelectorAll('svg.lanes rect.stall').length") == 1
        assert await page.value("document.documentElement.scrollWidth") <= width
        await page.value("document.querySelector('.plot').focus()")
        await page.press("ArrowRight")
        assert "op0" in await page.value("document.getElementById('tip').textContent")
        await page.press("ArrowRight")
        assert "op1" in await page.value("document.getElementById('tip').textContent")
        text = await page.text()
        assert "swap-in of W2" in text
        assert "Copied bytes by tensor" in text


async def test_the_live_page_is_readable_on_a_phone_and_in_the_dark(page: Page, server: Process) -> None:
    backgrounds = []
    for dark in (False, True):
        await page.looks(400, dark=dark)
        await page.open(f"http://{server.address}/")
        await page.until(f"{state_of('b')} === 'ready'")
        assert await page.value("document.documentElement.scrollWidth") <= 400
        backgrounds.append(await page.value("getComputedStyle(document.body).backgroundColor"))
    assert backgrounds[0] != backgrounds[1]
    buttons = "[...document.querySelectorAll('button')]"
    assert await page.value(f"{buttons}.every((button) => (button.ariaLabel || button.textContent).trim())")
    assert "partitions" in await page.value("document.querySelector('.arena').ariaLabel")
    await page.value("document.querySelector('.arena').focus()")
    await page.press("ArrowRight")
    assert "workspace" in await page.value("document.getElementById('tip').textContent")


async def test_the_live_page_follows_a_server_through_an_unload_with_a_token_a_death_and_a_new_start(
    page: Page, server: Process, repository: Path, plans: Path
) -> None:
    await page.looks(1280)
    await page.open(f"http://{server.address}/")
    await page.until(f"{state_of('a')} === 'ready' && {state_of('b')} === 'ready'")
    assert await page.value(state_of(BROKEN)) == "not served", "its name is text, and no markup"
    assert await page.value(f"{row_of(BROKEN)}.querySelector('.reason').textContent")
    parts = "[...document.querySelectorAll('.part.partition span')].map((s) => s.textContent)"
    assert sorted(await page.value(parts)) == ["a", "b"]
    widths = await page.value(
        "[...document.querySelectorAll('.part')].reduce((n, p) => n + parseFloat(p.style.width), 0)"
    )
    assert widths == pytest.approx(100, abs=0.01), "the parts fill the arena"

    asking = asyncio.create_task(ask_on(server))
    await page.until("document.querySelectorAll('svg.lanes rect.compute').length > 0")
    await page.until(f"{row_of('a')}.querySelector('.latency').textContent.includes(' / ')")
    asking.cancel()

    await page.value(f"{row_of('b')}.querySelector('button').click()")
    assert "Unload b?" in await page.text()
    await page.value("document.querySelector('dialog button.strong').click()")
    await page.until("document.querySelector('dialog input') !== null")
    assert await page.value(state_of("b")) == "ready", "the server asks for a token first"
    await page.value(f"document.querySelector('dialog input').value = '{TOKEN}'")
    await page.press("Enter")
    await page.until(f"{state_of('b')} === 'not loaded'")
    assert await page.value(f"{row_of('b')}.querySelector('button').textContent") == "Load"
    await page.until(f"!{parts}.includes('b') && document.querySelector('.part.free') !== null")

    server.engine().kill()
    await page.until("document.querySelector('.banner').textContent.startsWith('The engine is being restarted')")
    await page.until(f"document.querySelector('.banner').textContent === '' && {state_of('a')} === 'ready'")
    assert "engine restarted once" in await page.value("document.querySelector('header').textContent")

    await page.value(f"{row_of('b')}.querySelector('button').click()")
    await page.until(f"{state_of('b')} === 'ready'")

    port = server.address.rpartition(":")[2]
    server.popen.terminate()
    server.popen.wait(60)
    await page.until("document.querySelector('.banner').textContent.includes('No connection to the server')")
    with process(repository, "24MiB", plans, *FLAGS, "--http-port", port) as server:
        server.until_ready()
        await page.until(f"document.querySelector('.banner').hidden && {state_of('a')} === 'ready'")
        assert "engine restarted" not in await page.value("document.querySelector('header').textContent")
        page.complaints.clear()  # the answer 401, and connections that were refused

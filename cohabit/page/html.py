"""The page: one self-contained HTML file that shows a report or a running server."""

import base64
import hashlib
from functools import cache
from html import escape
from importlib.resources import files
from string import Template

import msgspec

from cohabit.page.document import NoDocument, ReportDocument

_DRAWN = Template(
    "<noscript><p>This page is drawn by its own script, which the browser does not run.</p></noscript>\n"
    '<div id="page"></div>\n<div id="tip" role="status" hidden></div>\n'
    '<script type="application/json" id="data">$data</script>\n<script>$script</script>'
)
"""Body of a page that its script draws."""


def report_page(document: ReportDocument) -> str:
    """Return a page that draws a report, and may load nothing."""
    return _drawn(document, document.title, _policy("'none'"))


def live_page() -> str:
    """Return a page that follows its own server, and may reach no other.

    It has no data of the server; the script requests that, with a token if required.
    """
    return _drawn(NoDocument(), "Cohabit", live_policy())


def live_policy() -> str:
    """Return the Content-Security-Policy of the live page, also for its header."""
    return _policy("'self'")


def _drawn(document: ReportDocument | NoDocument, title: str, policy: str) -> str:
    # Escaped, so that no name of a model can close the script's tag.
    data = msgspec.json.encode(document).decode().replace("<", "\\u003c")
    body = _DRAWN.substitute(data=data, script=_part("page.js"))
    return Template(_part("page.html")).substitute(
        policy=escape(policy, quote=True), title=escape(title), style=_part("page.css"), body=body
    )


def _policy(reached: str) -> str:
    """Permit this page's own script and style, by their hashes, and connections to `reached`."""
    script, style = (f"'sha256-{_digest(_part(name))}'" for name in ("page.js", "page.css"))
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src {reached}; img-src data:;"
        " base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _part(name: str) -> str:
    return (files("cohabit.page") / name).read_text(encoding="utf-8")

"""A status as one self-contained HTML page, which loads no other files. A script reloads it every second."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

from replicax._src.packaging import home
from replicax._src.status.figure_texts import duration_text
from replicax._src.status.group_table import GROUP_COLUMNS, group_rows_of, groups_of
from replicax._src.status.status import (
    BAD_STATES,
    DONE,
    DOUBTFUL_STATES,
    GOOD_STATES,
    Column,
    columns_of,
    fit_metrics_of,
    meanings_of,
    progress_of,
    rows_of,
    staleness_of,
    summary_of,
    survivors_of,
    title_of,
)

_STYLE: Final = """
:root { color-scheme: light dark; --line: #8884; --dim: color-mix(in srgb, currentColor 62%, transparent);
  --good: light-dark(#1a7f37, #4ac26b); --bad: light-dark(#c5221f, #ff7b72); --bar: light-dark(#4a7fd4, #6ea0f0); }
* { box-sizing: border-box; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 76rem; padding: 1.25rem; }
header { display: flex; flex-wrap: wrap; gap: .25rem 1rem; align-items: baseline; justify-content: space-between; }
h1 { font-size: 1.3rem; margin: 0; }
h2 { font-size: 1rem; margin: 1.75rem 0 .5rem; }
h1 { align-items: baseline; display: flex; flex-wrap: wrap; gap: .1rem .8rem; }
h1 small { font-size: .95rem; font-weight: 400; }
h1, #metrics dt { overflow-wrap: anywhere; }
p, small { color: var(--dim); margin: 0; }
p b { color: CanvasText; font-weight: 600; }
#progress { align-items: center; display: flex; flex-wrap: wrap; gap: .25rem .9rem; margin-top: .9rem; }
#summary, #metrics, #survivors, #groups { display: grid; gap: .5rem; grid-template-columns: repeat(auto-fill, minmax(8.5rem, 1fr)); }
#summary { margin: 1rem 0 0; }
#metrics, #survivors, #groups { margin: 0; }
:is(#summary, #metrics, #survivors, #groups) div { border: 1px solid var(--line); border-radius: .4rem; padding: .4rem .6rem; }
dt { color: var(--dim); font-size: .82rem; }
:is(#summary, #metrics, #survivors, #groups) dd { font-size: 1.15rem; font-variant-numeric: tabular-nums; margin: 0; }
dt a, th a { text-decoration: underline dotted; text-underline-offset: .2em; }
#curves { display: grid; gap: .5rem 1.5rem; grid-template-columns: repeat(auto-fit, minmax(min(21rem, 100%), 1fr)); }
#curves:not(:empty) { margin-top: 1.25rem; }
#curves svg { display: block; height: auto; max-width: 36rem; width: 100%; }
#meanings { columns: 22rem; column-gap: 2rem; font-size: .9rem; line-height: 1.4; margin: 0; }
#meanings div { break-inside: avoid; padding-bottom: .45rem; }
#meanings dt { color: CanvasText; font-size: inherit; font-weight: 600; }
#meanings dd { color: var(--dim); margin: 0; }
#meanings div:target dt { color: var(--bar); }
.wide { overflow-x: auto; }
table { border-collapse: separate; border-spacing: 0; font-variant-numeric: tabular-nums; white-space: nowrap; }
#tasks { min-width: 100%; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .7rem .3rem 0; text-align: left; }
th { color: var(--dim); font-size: .82rem; font-weight: 500; }
.number { padding-left: .7rem; padding-right: 0; text-align: right; }
#tasks :is(th, td):first-child { background: Canvas; left: 0; position: sticky; }
#staleness { margin-top: .4rem; }
td:nth-child(3):not(.number) { max-width: 16rem; overflow: hidden; text-overflow: ellipsis; }
.good { color: var(--good); } .bad { color: var(--bad); font-weight: 600; }
progress { accent-color: var(--bar); height: .8rem; vertical-align: middle; width: min(20rem, 40vw); }
footer { border-top: 1px solid var(--line); margin-top: 2rem; padding-top: .6rem; }
a { color: inherit; }
#trouble { color: var(--bad); font-weight: 600; }
#trouble:not(:empty) { margin-bottom: .75rem; }
"""
_SCRIPT: Final = """
const trouble = document.getElementById("trouble");
let answered = Date.now();
async function refresh() {
  try {
    const answer = await fetch(location.href, {cache: "no-store", signal: AbortSignal.timeout(5000)});
    if (!answer.ok) throw new Error(answer.status);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const lefts = [...document.querySelectorAll(".wide")].map(each => each.scrollLeft);
    document.querySelector("main").replaceWith(document.adoptNode(page.querySelector("main")));
    document.querySelectorAll(".wide").forEach((each, number) => { each.scrollLeft = lefts[number] ?? 0; });
    document.title = page.title;
    answered = Date.now();
    trouble.textContent = "";
  } catch (error) {
    const ago = Math.round((Date.now() - answered) / 1000);
    trouble.textContent = `The job has not answered for ${ago} s: what is shown is old.`;
  }
  setTimeout(refresh, 1000);
}
setTimeout(refresh, 1000);
"""


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


CONTENT_SECURITY_POLICY: Final = (
    f"default-src 'none'; script-src {_hash(_SCRIPT)}; style-src {_hash(_STYLE)}; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_DOCS: Final = home.page("The status of a job", "reference/status.md")
_STATES: Final = {
    **dict.fromkeys(GOOD_STATES, "good"),
    **dict.fromkeys((*DOUBTFUL_STATES, *BAD_STATES), "bad"),
}


def page_of(status: Mapping[str, Any], query: str = "", curves: Sequence[str] = ()) -> str:
    """Returns the page of a status with rates.

    Args:
      status: The status to show.
      query: The query string that the page's own links need, such as ``"?token=..."``.
      curves: Pictures in SVG, which must be trusted, because they are not escaped.
    """
    name, strategy = title_of(status)
    meanings = meanings_of(status)
    clock = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(status["time"]))
    uptime = duration_text(status["tasks"][0]["uptime_s"])
    metrics, survivors = fit_metrics_of(status), survivors_of(status)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(" · ".join([name, *_share(status), strategy]))}</title>
<style>{_STYLE}</style>
</head>
<body>
<p id="trouble" role="status"></p>
<main>
<header><h1>{escape(name)} <small>{escape(strategy)}</small></h1><p>up {escape(uptime)} · {clock}</p></header>
{_progress(status)}
<dl id="summary">{_tiles(summary_of(status), meanings)}</dl>
{f'<h2>Fault tolerance</h2><dl id="survivors">{_tiles(survivors, meanings)}</dl>' if survivors else ""}
{_groups(status, meanings)}
{f'<h2>Metrics of fit</h2><dl id="metrics">{_tiles(metrics, {})}</dl>' if metrics else ""}
<div id="curves">{"".join(f'<div class="wide">{each}</div>' for each in curves)}</div>
<h2>Tasks</h2>
<div class="wide" id="table"><table id="tasks">{_tasks(status, meanings)}</table></div>
{_staleness(status)}
<h2>What the figures mean</h2>
<dl id="meanings">{_meanings(meanings)}</dl>
</main>
<footer><p><a href="status.json{escape(query)}">JSON</a> · <a href="metrics{escape(query)}">Prometheus metrics</a> ·
More: {escape(_DOCS)}</p></footer>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _share(status: Mapping[str, Any]) -> list[str]:
    return [value for name, value in progress_of(status) if name == DONE]


def _progress(status: Mapping[str, Any]) -> str:
    parts = progress_of(status)
    if not parts:
        return ""
    share = status["progress"]["share"]
    bar = "" if share is None else f'<progress max="1" value="{share:.4f}"></progress>'
    said = " · ".join(f"{escape(name)} <b>{escape(value)}</b>" for name, value in parts)
    return f'<div id="progress">{bar}<p>{said}</p></div>'


def _tiles(pairs: Sequence[tuple[str, str]], meanings: Mapping[str, str]) -> str:
    return "".join(
        f"<div><dt>{_explained(name, meanings)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs
    )


def _explained(name: str, meanings: Mapping[str, str]) -> str:
    """Returns a name with its meaning as a tooltip, and a link to it below."""
    if name not in meanings:
        return escape(name)
    return f'<a href="#{_anchor(name)}" title="{escape(meanings[name])}">{escape(name)}</a>'


def _anchor(name: str) -> str:
    return "meaning-" + "".join(c if c.isalnum() else "-" for c in name)


def _meanings(meanings: Mapping[str, str]) -> str:
    return "".join(
        f'<div id="{_anchor(name)}"><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>'
        for name, text in meanings.items()
    )


def _tasks(status: Mapping[str, Any], meanings: Mapping[str, str]) -> str:
    columns = columns_of(status)
    head = "".join(f"<th{_class(column)}>{_explained(column.name, meanings)}</th>" for column in columns)
    rows = "".join("<tr>" + "".join(map(_cell, columns, row)) + "</tr>" for row in rows_of(status))
    return f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody>"


def _cell(column: Column, text: str) -> str:
    title = f' title="{escape(text)}"' if column.name == "function" else ""
    return f"<td{title}{_class(column, text)}>{escape(text)}</td>"


def _class(column: Column, text: str = "") -> str:
    name = "" if column.is_text else "number"
    if column.name == "state":
        name = _STATES.get(text, "")
    return f" class={name}" if name else ""


def _groups(status: Mapping[str, Any], meanings: Mapping[str, str]) -> str:
    """Returns the exchange of this group, and a row for each group; nothing without groups."""
    pairs = groups_of(status)
    if not pairs:
        return ""
    classes = ("", "", " class=number", " class=number")
    head = "".join(
        f"<th{each}>{_explained(name, meanings)}</th>"
        for name, each in zip(GROUP_COLUMNS, classes, strict=True)
    )
    rows = "".join(
        "<tr>"
        + "".join(f"<td{each}>{escape(text)}</td>" for text, each in zip(row, classes, strict=True))
        + "</tr>"
        for row in group_rows_of(status)
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<h2>Groups</h2><dl id="groups">{_tiles(pairs, meanings)}</dl><div class="wide">{table}</div>'


def _staleness(status: Mapping[str, Any]) -> str:
    """Returns a histogram of the staleness of updates; nothing without parameter servers."""
    if "staleness" not in status:
        return ""
    title, staleness = "<h2>Staleness of updates</h2>", status["staleness"]
    num = staleness["num"]
    if not num:
        return f"{title}<p>No update of a function has been applied yet.</p>"
    rows = "".join(
        f"<tr><td>{_range(int(low))}</td><td class=number>{count:,}</td>"
        f'<td class=number><progress max="{num}" value="{count}"></progress></td></tr>'
        for low, count in staleness["histogram"].items()
    )
    head = "<tr><th>updates of others missed</th><th class=number>updates</th><th></th></tr>"
    line = " · ".join(f"{name} {value}" for name, value in staleness_of(status))
    return f'{title}<p>{line}</p><div class="wide"><table id="staleness"><thead>{head}</thead><tbody>{rows}</tbody></table></div>'


def _range(low: int) -> str:
    return str(low) if low < 2 else f"{low} to {2 * low - 1}"

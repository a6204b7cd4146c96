"""``index.html``: one page without network and without build step that shows a graph, its sites, and why."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from typing import Any

from mok_compile import table
from mok_compile.dump.listing import Entry, Function, listing
from mok_compile.passes.blocks.describe import ROLES
from mok_compile.report import REASONS, Graph, Site

CONTEXT = 3  # unchanged nodes shown around a change
_LEFT = re.compile(r'^(\w+)(: "(.*?)")?( = |$)')


def page(
    graph: Graph, sites: list[Site], summary: dict[str, Any], scripts: dict[int, str], loops: dict[int, str]
) -> str:
    """The page of one graph, or of a loop that no graph holds. `scripts` are the repro scripts of the sites that have
    one, `loops` what there is to read of those that are loops."""
    body = [
        _header(summary),
        _legend(sites),
        f"<section><h2>Sites</h2>{_sites(sites)}</section>" if sites else _nothing(),
        *(_site(i, site, scripts.get(i), loops.get(i)) for i, site in enumerate(sites)),
    ]
    if graph.listings is not None:
        body.append("<section><h2>Graph, before and after</h2>")
        body += _functions(graph, sites)
        body.append("</section>")
    about = {key: summary[key] for key in ("versions", "options", "environment", "process")}
    body.append(_details("Versions, options and environment", f"<pre>{_text(json.dumps(about, indent=2))}</pre>"))
    return _document(f"mok: {summary['summary']}", "\n".join(body))


def overview(reports: dict[str, dict[str, Any]]) -> str:
    """The page of a dump folder: one line for each graph."""
    rows = []
    for folder, report in reports.items():
        blocks = sorted({table.parts(site["location"])[0] for site in report["sites"]})
        mark = "missed" if report["missed"] else "fused" if report["fused"] else "none"
        names = ", ".join(blocks[:3]) + (f" and {len(blocks) - 3} more" if len(blocks) > 3 else "")
        rows.append(
            f'<tr class="find"><td><span class="badge {mark}">{mark}</span></td>'
            f'<td><a href="{_text(folder)}/index.html">{_text(folder)}</a></td>'
            f"<td>{_text(report['summary'])}</td><td><code>{_text(names)}</code></td></tr>"
        )
    head = "<tr><th></th><th>graph</th><th>what became of it</th><th>blocks</th></tr>"
    graphs = f"{len(rows)} compiled graph{'' if len(rows) == 1 else 's'}"
    body = f'<header><h1>mok-compile: {graphs}</h1>{_SEARCH}</header><table class="sites">{head}'
    return _document("mok: compiled graphs", f"{body}{''.join(rows)}</table>")


def _header(summary: dict[str, Any]) -> str:
    fused, missed = summary["fused"], summary["missed"]
    badges = f'<span class="badge fused">{fused} fused</span>' if fused else ""
    badges += f'<span class="badge missed">{missed} missed</span>' if missed else ""
    return f"<header><h1>{_text(summary['summary'])}</h1>{badges}{_SEARCH}</header>"


_SEARCH = '<input id="search" type="search" placeholder="search nodes, modules, facts   ( / )" autocomplete="off">'


def _nothing() -> str:
    return (
        "<section><p>This graph has no grouped matmul, so there was nothing to prove. If the model has experts, look "
        "for them in the other graphs: a Python loop over the experts or a graph break may have kept them out "
        "(<code>TORCH_LOGS=graph_breaks</code>).</p></section>"
    )


def _legend(sites: list[Site]) -> str:
    if not any(site.slice for site in sites):
        return ""
    chips = [f'<span class="chip {role}" title="{_text(what)}">{role}</span>' for role, what in ROLES.items()]
    chips.append('<span class="chip op" title="the op that took the block\'s place">fused op</span>')
    chips.append('<span class="chip broke" title="the node where the proof broke">broke here</span>')
    return f'<p class="legend">{"".join(chips)}</p>'


def _sites(sites: list[Site]) -> str:
    rows = []
    for i, site in enumerate(sites):
        path, cls, source = table.parts(site.location)
        fused = site.status == "fused"
        error = "" if site.verify_error is None else f"{site.verify_error:.1e}"
        why = "" if fused else f"{_text(site.detail)}<br><b>What to do:</b> {_text(site.cure)}"
        what = _text(str(site.spec)) if site.spec else ""
        what += f"<br>weighted sum not fused: {_text(site.combine_detail)}" if site.combine_detail else ""
        what += f"<br>router: {_text(site.about_router)}" if site.about_router else ""
        rows.append(
            f'<tr class="find"><td><span class="badge {site.status}">{site.status}</span></td>'
            f'<td><a href="#site-{i}"><code>{_text(path)}</code></a><br>'
            f"<small>{_text(cls)} {_text(source)}</small></td>"
            f"<td>{_text((site.engine if fused else site.reason) or '')}</td>"
            f"<td>{what}{'<br>' if what and why else ''}{why}</td><td>{error}</td></tr>"
        )
    head = "<tr><th></th><th>block</th><th>engine or reason</th><th>what</th><th>verified to</th></tr>"
    return f'<table class="sites">{head}{"".join(rows)}</table>'


def _site(number: int, site: Site, script: str | None, loop: str | None) -> str:
    """What was proven of one site, and for a miss what stopped the proof."""
    path = table.parts(site.location)[0]
    parts = []
    if site.reason:
        parts.append(
            f'<div class="why {site.status}"><p><b>{_text(site.reason)}</b>: {_text(REASONS[site.reason][0])}.</p>'
            f"<p>{_text(site.combine_detail or site.detail)}</p>"
            f"<p><b>What to do:</b> {_text(site.cure)}</p>{_obstacle(site)}</div>"
        )
    elif site.detail and site.problem is None:  # it was the op already
        parts.append(f"<p>{_text(site.detail)}</p>")
    elif site.detail:
        parts.append(f"<p>Engine <b>{_text(site.engine or '')}</b>; passed over: {_text(site.detail)}</p>")
    if site.slice is not None:
        parts.append(_facts(site))
    if script is not None:
        parts.append(_details("repro.py: this block alone, with random inputs", f"<pre>{_text(script)}</pre>"))
    if loop is not None:
        parts.append(_details("loop.txt: the module of this loop, and its code", f"<pre>{_text(loop)}</pre>"))
    opened = " open" if site.status == "missed" or number == 0 else ""
    head = f'<span class="badge {site.status}">{site.status}</span> <code>{_text(path)}</code>'
    return f'<details class="site" id="site-{number}"{opened}><summary>{head}</summary>{"".join(parts)}</details>'


def _obstacle(site: Site) -> str:
    if site.slice is None or not site.slice.broke:
        return ""
    at = f"The proof broke at <code>{_text(site.slice.broke)}</code>"
    at += f" ({_text(site.slice.obstacle)})." if site.slice.obstacle else "."
    rows = "".join(
        f"<tr><td><code>{_text(name)}</code></td><td>{_text(known)}</td><td>{_text(expected)}</td></tr>"
        for name, known, expected in site.slice.arguments
    )
    head = "<tr><th>argument</th><th>what is known of it</th><th>what was expected</th></tr>"
    return f"<p>{at}</p>" + (f'<table class="arguments">{head}{rows}</table>' if rows else "")


def _facts(site: Site) -> str:
    """The slice, with each value's fact beside its node."""
    rows = []
    for entry in listing(site.slice.module).functions[0].entries:
        if entry.op == "output":
            continue
        role = "input" if entry.op == "placeholder" else site.slice.roles.get(entry.node, "input")
        broke = " broke" if entry.node == site.slice.broke else ""
        fact = site.slice.facts.get(entry.node, "")
        rows.append(
            f'<tr class="find {role}{broke}" title="{_text(entry.source)}"><td class="role">{role}</td>'
            f'<td class="code">{_code(entry.code)}</td><td class="fact">{_text(fact)}</td></tr>'
        )
    head = "<tr><th>role</th><th>node</th><th>what is proven of it</th></tr>"
    return f'<table class="listing">{head}{"".join(rows)}</table>'


def _functions(graph: Graph, sites: list[Site]) -> Iterator[str]:
    before, after = graph.listings
    olds, news = ({f.name: f for f in side.functions} for side in (before, after))
    for name in olds | news:
        own = [site for site in sites if site.subgraph == name and site.slice is not None]
        roles = {node: role for site in own for node, role in site.slice.roles.items()}
        facts = {node: fact for site in own for node, fact in site.slice.facts.items()}
        broke = {site.slice.broke for site in own if site.slice.broke}
        empty = Function(name, ())
        old, new = olds.get(name, empty).entries, news.get(name, empty).entries
        rows = list(_beside(old, new, roles, facts, broke))
        title = f"{name or 'the graph'}: {len(old)} nodes before, {len(new)} after"
        head = "<thead><tr><th>before</th><th>after</th></tr></thead>"
        side = f'<table class="beside">{head}{"".join(rows)}</table>'
        yield _details(title, side, opened=not name)


def _beside(old: tuple[Entry, ...], new: tuple[Entry, ...], roles: dict, facts: dict, broke: set[str]) -> Iterator[str]:
    """Both sides aligned by node, module headings between them; long unchanged runs folded away."""
    pairs = list(_aligned(old, new))
    changed = [a is None or b is None or a.code != b.code or a.node in broke for a, b in pairs]
    near = [False] * len(pairs)
    for i, is_changed in enumerate(changed):
        if is_changed:
            near[max(0, i - CONTEXT) : i + CONTEXT + 1] = [True] * len(near[max(0, i - CONTEXT) : i + CONTEXT + 1])
    module, i = "", 0
    while i < len(pairs):
        end = i
        while end < len(pairs) and near[end] == near[i]:
            end += 1
        if not near[i]:
            label = f"{end - i} unchanged node{'' if end - i == 1 else 's'}"
            yield f'<tbody class="fold"><tr><td colspan="2"><button>&#8943; {label}</button></td></tr></tbody>'
        yield f"<tbody{'' if near[i] else ' hidden'}>"
        for a, b in pairs[i:end]:
            entry = a or b
            if entry.module and entry.module != module:
                module = entry.module
                yield f'<tr class="module"><td colspan="2">{_text(module)}</td></tr>'
            yield f'<tr class="find">{_cell(a, b, roles, facts, broke)}{_cell(b, a, roles, facts, broke)}</tr>'
        yield "</tbody>"
        i = end


def _aligned(old: tuple[Entry, ...], new: tuple[Entry, ...]) -> Iterator[tuple[Entry | None, Entry | None]]:
    """Nodes keep their name and their order when a block is replaced."""
    common = {e.node for e in old} & {e.node for e in new}
    i = j = 0
    while i < len(old) or j < len(new):
        if i < len(old) and old[i].node not in common:
            yield old[i], None
            i += 1
        elif j < len(new) and new[j].node not in common:
            yield None, new[j]
            j += 1
        elif i < len(old) and j < len(new) and old[i].node == new[j].node:
            yield old[i], new[j]
            i, j = i + 1, j + 1
        else:  # the order differs: each side for itself
            yield (old[i], None) if i < len(old) else (None, new[j])
            i, j = (i + 1, j) if i < len(old) else (i, j + 1)


def _cell(entry: Entry | None, other: Entry | None, roles: dict, facts: dict, broke: set[str]) -> str:
    if entry is None:
        return '<td class="none"></td>'
    role = roles.get(entry.node, "")
    if other is None and "torch.ops.mok." in entry.code:
        role = "op"
    marks = f"code {role}" + (" only" if other is None else "") + (" broke" if entry.node in broke else "")
    hint = "\n".join(filter(None, (role, facts.get(entry.node, ""), entry.source)))
    return f'<td class="{marks}" title="{_text(hint)}">{_code(entry.code)}</td>'


def _code(code: str) -> str:
    """A line of code with its name and its type set apart."""
    match = _LEFT.match(code)
    if match is None:
        return _text(code)
    kind = f"<i>{_text(match[3])}</i> " if match[3] else ""
    equals = "= " if match[4].strip() else ""
    return f"<b>{_text(match[1])}</b> {kind}{equals}{_text(code[match.end() :])}"


def _details(title: str, body: str, opened: bool = False) -> str:
    return f"<details{' open' if opened else ''}><summary>{_text(title)}</summary>{body}</details>"


def _text(what: str) -> str:
    return html.escape(str(what), quote=True)


def _document(title: str, body: str) -> str:
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>'
        f"<body>\n{body}\n<script>{_SCRIPT}</script></body></html>\n"
    )


_STYLE = """
:root { --bg:#fff; --fg:#1f2328; --dim:#656d76; --line:#d8dee4; --soft:#f6f8fa; --ok:#1a7f37; --bad:#cf222e;
  --router:#fff3c4; --dispatch:#d6eaff; --up:#ffe0c7; --activation:#ffd9ec; --down:#e6dcff; --combine:#cdf3d3;
  --use:#e4e8ec; --unproven:#eff1f3; --op:#b7f0c1; --broke:#ffcfcb; }
@media (prefers-color-scheme: dark) { :root { --bg:#0d1117; --fg:#e6edf3; --dim:#8b949e; --line:#30363d;
  --soft:#161b22; --ok:#3fb950; --bad:#f85149; --router:#4a3d0c; --dispatch:#0f3258; --up:#5a3210;
  --activation:#57213f; --down:#38286b; --combine:#14461f; --use:#2b323a; --unproven:#1d232a;
  --op:#1c6b2e; --broke:#7d1f1a; } }
* { box-sizing:border-box; }
body { margin:0 auto; max-width:1500px; padding:0 24px 80px; background:var(--bg); color:var(--fg);
  font:14px/1.5 system-ui, sans-serif; }
header { position:sticky; top:0; z-index:2; display:flex; gap:10px; align-items:center; padding:14px 0;
  background:var(--bg); border-bottom:1px solid var(--line); flex-wrap:wrap; }
h1 { font-size:18px; margin:0; flex:1; } h2 { font-size:16px; margin:28px 0 8px; }
a { color:inherit; } small, .legend { color:var(--dim); }
code, pre, .code { font-family:ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size:12px; }
#search { width:320px; padding:6px 12px; border:1px solid var(--line); border-radius:6px; background:var(--soft);
  color:inherit; font:inherit; }
.badge { padding:1px 9px; border-radius:10px; color:#fff; background:var(--dim); font-size:12px; font-weight:600;
  white-space:nowrap; }
.badge.fused { background:var(--ok); } .badge.missed { background:var(--bad); }
.chip { display:inline-block; padding:1px 10px; margin:0 6px 0 0; border-radius:4px; color:var(--fg); font-size:12px;
  cursor:help; }
table { border-collapse:collapse; width:100%; } td, th { text-align:left; vertical-align:top; padding:5px 10px; }
th { color:var(--dim); font-weight:500; font-size:12px; }
table.sites td, table.arguments td { border-top:1px solid var(--line); }
details { border:1px solid var(--line); border-radius:8px; margin:10px 0; overflow:hidden; }
summary { padding:8px 12px; cursor:pointer; background:var(--soft); font-weight:600; }
details > p, details > .why { margin:10px 12px; } details details { margin:12px; }
pre { margin:0; padding:10px 14px; overflow:auto; max-height:480px; }
.why { border-left:4px solid var(--dim); padding:2px 14px; } .why.missed { border-color:var(--bad); }
.why p { margin:6px 0; }
table.listing td { padding:2px 10px; } table.listing .role { color:var(--dim); width:90px; font-size:12px; }
table.listing .code { width:52%; overflow-wrap:anywhere; } table.listing .fact { overflow-wrap:anywhere; }
.code i { font-style:normal; color:var(--dim); } .code b { font-weight:600; }
table.beside { table-layout:fixed; } table.beside td { padding:1px 10px; overflow-wrap:anywhere; width:50%;
  border-left:1px solid var(--line); } table.beside thead th { width:50%; }
table.beside .none { background:repeating-linear-gradient(-45deg, var(--soft) 0 6px, transparent 6px 12px); }
.only { box-shadow:inset 3px 0 0 var(--dim); }
.module td { background:var(--soft); color:var(--dim); padding-top:6px !important; font-size:12px; }
.fold td { text-align:center; } .fold button { border:0; background:none; color:var(--dim); cursor:pointer;
  font:inherit; font-size:12px; padding:4px 30px; } .fold button:hover { color:var(--fg); }
.router { background:var(--router); } .dispatch { background:var(--dispatch); } .up { background:var(--up); }
.activation { background:var(--activation); } .down { background:var(--down); } .combine { background:var(--combine); }
.use { background:var(--use); } .unproven { background:var(--unproven); } .op { background:var(--op); font-weight:600; }
tr.broke td, td.broke, .chip.broke { background:var(--broke) !important; font-weight:600; }
.hidden { display:none !important; }
"""

_SCRIPT = """
const search = document.getElementById("search");
const lines = [...document.querySelectorAll(".find")].map(e => [e, [e.textContent, e.title,
  ...[...e.querySelectorAll("[title]")].map(t => t.title)].join(" ").toLowerCase()]);
const bodies = [...document.querySelectorAll(".beside tbody:not(.fold)")].map(b => [b, b.hidden]);
function find() {
  const words = search.value.toLowerCase().split(/\\s+/).filter(Boolean), on = words.length > 0;
  for (const [e, text] of lines) e.classList.toggle("hidden", on && !words.every(w => text.includes(w)));
  for (const [b, folded] of bodies) b.hidden = on ? false : folded;
  for (const e of document.querySelectorAll(".fold, .module")) e.classList.toggle("hidden", on);
  if (on) for (const d of document.querySelectorAll("details"))
    if (d.querySelector(".find:not(.hidden)")) d.open = true;
}
search.addEventListener("input", find);
document.addEventListener("keydown", e => {
  if (e.key === "/" && document.activeElement !== search) { e.preventDefault(); search.focus(); }
  if (e.key === "Escape") { search.value = ""; find(); }
});
for (const fold of document.querySelectorAll(".fold")) fold.addEventListener("click", () => {
  fold.nextElementSibling.hidden = false; fold.classList.add("hidden");
  const body = bodies.find(b => b[0] === fold.nextElementSibling); if (body) body[1] = false;
});
function jump() {
  const query = location.hash.match(/^#q=(.*)/);
  if (query) { search.value = decodeURIComponent(query[1]); find(); return; }
  const target = location.hash && document.getElementById(location.hash.slice(1));
  if (target) { target.open = true; target.scrollIntoView(); window.scrollBy(0, -70); }
}
window.addEventListener("hashchange", jump); jump();
"""

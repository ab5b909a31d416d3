"""Plans as one HTML page: findings, figures and tables. It has no scripts and fetches nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from pgmesh.drawing import styled_text, svg
from pgmesh.drawing.figures import Figure, make_figure
from pgmesh.drawing.svg import Colours
from pgmesh.planning import axis_heuristics, costs, text_report

if TYPE_CHECKING:
    from pgmesh.layout import Axis, Layout
    from pgmesh.planning.data import PlanData
    from pgmesh.planning.rank_report import RankReport

STYLE = f"""
body {{ font: 15px/1.5 {svg.FONT}; color: {Colours.text}; background: #fff }}
body {{ margin: 2rem auto; max-width: 1600px; padding: 0 1rem }}
h1 {{ font-size: 1.3rem }} h2 {{ font-size: 1rem; margin-top: 2rem }}
table {{ border-collapse: collapse }}
th, td {{ padding: .25rem .7rem .25rem 0; text-align: left; border-bottom: 1px solid #e2e8f0 }}
td {{ font-variant-numeric: tabular-nums }}
th {{ color: {Colours.muted}; font-weight: 500 }} td.n, th.n {{ text-align: right }}
.intra {{ color: #15803d }} .mixed {{ color: #b45309 }} .bad {{ color: #b91c1c }} .quiet {{ color: {Colours.muted} }}
a {{ overflow-wrap: anywhere }}
code {{ background: #f1f5f9; padding: .1rem .35rem; border-radius: 4px }}
"""


def figures(plan: PlanData, *axes: Axis, title: str | None = None) -> list[Figure]:
    """The figures of a plan's mesh and of its views.

    Args:
        axes: the groups along these are coloured in the mesh.
        title: the title of the mesh; by default the sizes of its axes.
    """
    host = plan.topology[0] if plan.topology else None
    drawn = [make_figure(plan.layout, *(axes or colour_axes(plan.layout)), host=host, title=title)]
    for name, view in plan.views:
        sizes = text_report.format_sizes(dict(zip(view.axes, view.shape)))
        drawn.append(make_figure(view, *colour_axes(view), host=host, title=f"{name}: {sizes}"))
    return drawn


def colour_axes(layout: Layout) -> tuple[Axis, ...]:
    """The default axis to colour: the one with the most traffic, else the innermost of size over 1.

    >>> colour_axes(layout)
    ('tp',)
    """
    wide = [axis for axis, size in zip(layout.axes, layout.shape) if size > 1] or list(layout.axes)
    return tuple((axis_heuristics.heavy_axes(wide) or wide[-1:])[:1])


def page(plans: Sequence[PlanData], *axes: Axis) -> str:
    """The page of one plan, or of several with a comparison.

    >>> from pgmesh.planning.plan import plan
    >>> "<script" in page([plan(layout, nodes="2x4")])
    False
    """
    parts = [part(plan, *axes) for plan in plans]
    parts.append(_sources())
    if len(plans) > 1:
        table = escape(styled_text.plain(text_report.comparison(plans)))
        parts.insert(0, f"<h1>{len(plans)} orders compared</h1>\n{_scrolling(f'<pre>{table}</pre>')}")
    return _document(text_report.title(plans[0]), parts)


def rank_page(report: RankReport, drawn: Figure) -> str:
    """The page of one rank."""
    head, _, *rest = report.lines(120)
    parts = [f"<h1>{escape(styled_text.plain([head]))}</h1>", _scrolling(svg.drawing(drawn).svg())]
    parts.append(_scrolling(f"<pre>{escape(styled_text.plain(rest))}</pre>"))
    return _document(styled_text.plain([head]), parts)


def _document(name: str, parts: Sequence[str]) -> str:
    """An HTML document."""
    title = escape(name)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    body = "\n".join(parts)
    head += f"<style>{STYLE}</style>"
    return f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n<body>\n{body}\n</body>\n</html>\n'


def part(plan: PlanData, *axes: Axis) -> str:
    """The HTML of one plan, without a document around it."""
    parts = [f"<h1>{escape(text_report.title(plan))}</h1>"]
    for finding in plan.findings:
        fix = f" <code>{escape(finding.fix)}</code>" if finding.fix else ""
        parts.append(f'<p class="{"bad" if finding.bad else ""}">{escape(finding.text)}{fix}</p>')
    drawn = svg.drawing(*figures(plan, *axes, title=None if plan.views else ""))  # the sizes are in the headline
    tables = [f"<h2>Groups</h2>\n{_scrolling(_table(plan))}"]
    if plan.communicators:
        first, *costs_of_all = text_report.cost_report(plan, 10_000)
        held = ["<h2>Communicators of a rank</h2>", f"<p>{escape(styled_text.plain([first]))}</p>", "<ul>"]
        held += [*(f"<li>{escape(styled_text.plain([line]).strip())}</li>" for line in costs_of_all), "</ul>"]
        tables.append("\n".join(held))
    return "\n".join([*parts, _in_columns(_scrolling(drawn.svg()), _in_columns(*tables))])


def _in_columns(first: str, *others: str) -> str:
    """Parts next to each other if the window is wide enough. The first keeps its width; the others share the rest."""
    each = [f'<div style="min-width: 0">{first}</div>']
    each += [f'<div style="min-width: 0; flex: 1 1 36rem">{other}</div>' for other in others]
    return "\n".join(['<div style="display: flex; flex-wrap: wrap; gap: 0 1.5rem">', *each, "</div>"])


def _scrolling(part: str) -> str:
    """A part that keeps its size: in a narrower window it scrolls."""
    return f'<div class="wide" style="overflow-x: auto">{part}</div>'


def _sources() -> str:
    parts = ["<h2>Sources of the costs</h2>", "<ul>"]
    for cost in costs.COSTS:
        parts += [f'<li class="quiet">{cost.backend}: {escape(s.text)}: {_link(s.where)}</li>' for s in cost.sources]
    return "\n".join([*parts, "</ul>"])


def _table(plan: PlanData) -> str:
    head = "<th>family<th class=n>size<th class=n>groups<th class=n>stride"
    head += "".join(f"<th class=n>{level.name}s<th>kind<th class=n>ring hops that leave" for level in plan.topology)
    rows = []
    for row, family in zip(text_report.rows(plan), plan.families):
        cells = "".join(f'<td class="{"" if i == 0 else "n"}">{escape(text)}' for i, (text, _) in enumerate(row[:4]))
        for i, locality in enumerate(family.localities):
            units, kind, hops = (escape(text) for text, _ in row[4 + 3 * i : 7 + 3 * i])
            cells += f'<td class="n">{units}<td class="{locality.kind}">{kind}<td class="n">{hops}'
        rows.append(f'<tr>{cells}<td class="quiet">{styled_text.ranks_in(80, family.sample, family.size)}')
    return f"<table><tr>{head}<th>one group\n" + "\n".join(rows) + "\n</table>"


def _link(where: str) -> str:
    return f'<a href="{escape(where)}">{escape(where)}</a>' if where.startswith("http") else escape(where)

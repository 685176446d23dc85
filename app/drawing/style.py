"""The look of the report: one stylesheet, light and dark, no external assets."""

from html import escape

CSS = """
:root { color-scheme: light dark;
  --bg: #f7f7f5; --card: #ffffff; --ink: #1d2025; --soft: #666c75; --rule: #e3e4e1; --accent: #3f5bd8;
  --text: #d9962b; --vae: #1f9e8b; --dit: #4c63d2; --finish: #8d93a0; --bad: #c8433a; --good: #2e8b57; --plan: .45;
  --on-text: #1d2025; --on-vae: #1d2025; --on-dit: #fff; --on-finish: #1d2025; --on-other: #fff; }
@media (prefers-color-scheme: dark) { :root {
  --bg: #14161a; --card: #1d2026; --ink: #e8e9ec; --soft: #9aa1ac; --rule: #31353d; --accent: #8ea2ff;
  --text: #e0a84f; --vae: #43bfab; --dit: #7f93f5; --finish: #6d7482; --bad: #ef7a70; --good: #63c08a;
  --on-text: #14161a; --on-vae: #14161a; --on-dit: #14161a; --on-finish: #fff; --on-other: #14161a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; margin: 0 0 2px; letter-spacing: -.01em; }
h2 { font-size: 17px; margin: 0 0 10px; }
h3 { font-size: 14px; margin: 18px 0 6px; color: var(--soft); font-weight: 600; }
p, ul { margin: 0 0 8px; } ul { padding-left: 20px; }
.soft { color: var(--soft); }
section { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 18px 20px;
  margin-top: 16px; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(132px, 1fr)); gap: 10px; margin-top: 16px; }
.figure { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 10px 14px; }
.figure b { display: block; font-size: 20px; font-weight: 600; font-variant-numeric: tabular-nums; }
.figure span { color: var(--soft); font-size: 12.5px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 13.5px; }
th { text-align: right; font-weight: 600; color: var(--soft); border-bottom: 1px solid var(--rule);
  padding: 4px 10px; }
td { text-align: right; padding: 4px 10px; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th:first-child, td:first-child, td.words, th.words { text-align: left; white-space: normal; }
table.narrow { width: auto; }
tr:last-child td { border-bottom: 0; }
.share { display: inline-block; height: 8px; border-radius: 2px; background: var(--dit); vertical-align: middle; }
.legend { display: flex; flex-wrap: wrap; gap: 14px; font-size: 12.5px; color: var(--soft); margin-bottom: 6px; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 5px;
  vertical-align: -1px; }
.over { color: var(--bad); } .under { color: var(--good); }
.clips { display: grid; grid-template-columns: repeat(auto-fill, minmax(230px, 1fr)); gap: 14px; }
.clips figure { margin: 0; } .clips figure.sheet { grid-column: 1 / -1; }
.clips img, .clips video { width: 100%; border-radius: 6px; background: #000;
  image-rendering: auto; }
.clips figcaption { font-size: 12.5px; color: var(--soft); margin-top: 3px; overflow-wrap: anywhere; }
.curves { padding: 0 12px 0 50px; } .lanes { padding: 0 12px 0 94px; }
svg { display: block; overflow: visible; } svg.bar { overflow: hidden; }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft); }
svg text.lane { fill: var(--ink); } svg text.in { font-size: 11px; pointer-events: none; }
svg rect.text + text.in { fill: var(--on-text); } svg rect.vae + text.in { fill: var(--on-vae); }
svg rect.dit + text.in { fill: var(--on-dit); } svg rect.finish + text.in { fill: var(--on-finish); }
svg rect.other + text.in { fill: var(--on-other); }
@media (max-width: 640px) { main { padding: 20px 10px 40px; } section { padding: 14px 12px; }
  svg text.odd { display: none; } td:first-child:not(.words) { white-space: nowrap; } }
svg .grid { stroke: var(--rule); stroke-width: 1; }
svg .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; vector-effect: non-scaling-stroke; }
svg .c1 { stroke: var(--accent); } svg .c2 { stroke: var(--text); } svg .c3 { stroke: var(--vae); }
svg .c4 { stroke: var(--bad); }
svg .line.dashed.c2 { stroke-dasharray: 8 4; } svg .line.dashed.c3 { stroke-dasharray: 2 3; }
svg .line.dashed.c4 { stroke-dasharray: 10 3 2 3; }
.legend svg.key { display: inline-block; margin-right: 6px; vertical-align: 0; }
svg .band { stroke: none; fill: var(--soft); fill-opacity: .22; }
svg .broad { stroke-width: 5; stroke-opacity: .45; }
svg .f1 { fill: var(--accent); } svg .f2 { fill: var(--text); } svg .f3 { fill: var(--vae); }
svg .f4 { fill: var(--bad); } svg text.value { fill: var(--ink); font-variant-numeric: tabular-nums; }
svg .faint { stroke: var(--soft); stroke-opacity: .35; stroke-width: 1.2; }
svg circle.hover { fill: transparent; stroke: none; } svg circle.hover:hover { fill: var(--accent);
  fill-opacity: .5; }
svg .mark line { stroke: var(--bad); stroke-dasharray: 3 3; stroke-width: 1.4; }
svg rect.text { fill: var(--text); } svg rect.vae { fill: var(--vae); } svg rect.dit { fill: var(--dit); }
svg rect.finish { fill: var(--finish); } svg rect.plan { fill-opacity: var(--plan); }
svg rect.other { fill: var(--soft); }
svg .bar:hover rect { stroke: var(--ink); stroke-width: 1.5; }
code.command { display: block; background: var(--bg); border: 1px solid var(--rule); border-radius: 6px;
  padding: 5px 10px; font-size: 12.5px; margin: 10px 0; white-space: pre-wrap; overflow-wrap: anywhere; }
pre { overflow-x: auto; font-size: 12.5px; margin: 0; } summary { cursor: pointer; color: var(--soft); }
"""


def document(title: str, body: str) -> str:
    """A whole page in this look."""
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f"<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{CSS}</style></head><body><main>{body}</main></body></html>\n"
    )

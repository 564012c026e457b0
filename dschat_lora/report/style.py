"""Style sheet of report.html."""

STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1b1f23; --muted: #57606a;
  --panel: #f5f7f9; --warning: #b42318; --link: #0060a0; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171a; --text: #e7eaed; --muted: #a9b1b9; --panel: #1e2328;
    --warning: #ff8f80; --link: #7cc4f4; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1rem; background: var(--page);
  color: var(--text); font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.7rem; line-height: 1.2; } h2 { margin-top: 2.5rem; }
h3 { margin: 1.5rem 0 .5rem; }
h1, h2 { border-bottom: 1px solid var(--grid); padding-bottom: .3rem; }
a { color: var(--link); } small, .words, .when { color: var(--muted); font-weight: normal; }
nav ul { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; list-style: none; padding: 0; }
.scroll { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--grid); text-align: left;
  vertical-align: top; font-weight: normal; white-space: pre-wrap; }
thead th { overflow-wrap: break-word; } td, tbody th { min-width: 6rem; }
.numbers td { white-space: nowrap; min-width: 0; } .numbers th + td { padding-left: .4rem; }
.settings { table-layout: fixed; width: 100%; }
.settings th { overflow-wrap: anywhere; width: 40%; max-width: 20rem; }
.tables { display: flex; flex-wrap: wrap; gap: 0 4rem; } .tables > * { max-width: 100%; }
thead th { color: var(--muted); font-size: .9rem; }
table.numbers :is(td, thead th + th) { text-align: right; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 20rem), 1fr));
  gap: 1.2rem 2rem; margin: 1.2rem 0; }
figure { margin: 0; min-width: 0; } figcaption { font-weight: 600; }
.words { font-size: .8rem; margin: .2rem 0 0; } .legend { font-size: .85rem; margin: .2rem 0; }
.warnings { border-left: 4px solid var(--warning); padding: .4rem 1rem; background: var(--panel); }
.warnings h3 { margin-top: .3rem; }
.warnings li::marker { content: "\\26A0\\FE0E  "; color: var(--warning); }
.tokens mark { background: #2a78d640; color: inherit; border-bottom: 2px solid #2a78d6; }
.tokens { white-space: pre-wrap; font-family: ui-monospace, monospace; line-height: 1.8; }
.sample { background: var(--panel); border-radius: 6px; padding: .8rem 1rem; margin: .8rem 0; }
.answers { display: grid; gap: .5rem 1.5rem; margin-top: .6rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 16rem), 1fr)); }
.when { font-size: .85rem; } .text { white-space: pre-wrap; unicode-bidi: plaintext; }
.answers .text { border-left: 3px solid var(--grid); padding-left: .7rem; }
summary { cursor: pointer; color: var(--link); margin: .6rem 0; }
"""

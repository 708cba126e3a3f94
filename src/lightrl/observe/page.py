"""Style sheet and script of the report page. The page loads nothing: no fonts, no libraries, no network."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --bg: #f6f7f9; --card: #fff; --ink: #1c2430; --soft: #667085; --line: #e3e7ed;
  --c0: #2563eb; --c1: #e8710a; --c2: #0d9f6e; --c3: #c026d3; --c4: #ca9a04; --c5: #0891b2; --c6: #dc2626;
  --c7: #7c5cfa; --ok: #0d8a5f; --warn: #b45309; --bad: #c81e1e; --chip: #eef2f7; }
@media (prefers-color-scheme: dark) { :root:not([data-theme=light]) { --bg: #0f1319; --card: #171d26; --ink: #e6eaf0;
  --soft: #93a0b4; --line: #29313d; --c0: #6ea8fe; --c1: #ff9f4a; --c2: #3dd6a0; --c3: #e879f9; --c4: #f5c542;
  --c5: #38c6e0; --c6: #f87171; --c7: #a78bfa; --ok: #3dd6a0; --warn: #f5b04c; --bad: #f87171; --chip: #222b37; } }
:root[data-theme=dark] { color-scheme: dark; --bg: #0f1319; --card: #171d26; --ink: #e6eaf0; --soft: #93a0b4;
  --line: #29313d; --c0: #6ea8fe; --c1: #ff9f4a; --c2: #3dd6a0; --c3: #e879f9; --c4: #f5c542; --c5: #38c6e0;
  --c6: #f87171; --c7: #a78bfa; --ok: #3dd6a0; --warn: #f5b04c; --bad: #f87171; --chip: #222b37; }
:root[data-theme=light] { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink); font: 14px/1.5 system-ui, -apple-system, "Segoe UI", Roboto,
  "DejaVu Sans", sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 28px 20px 60px; }
header { display: flex; gap: 16px; align-items: flex-start; justify-content: space-between; margin-bottom: 18px; }
h1 { font-size: 24px; margin: 0; letter-spacing: -.01em; }
h2 { font-size: 17px; margin: 34px 0 12px; }
h3 { font-size: 13px; font-weight: 600; margin: 0 0 6px; }
.facts { color: var(--soft); margin-top: 3px; }
.facts span + span::before { content: "·"; margin: 0 8px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 12px; margin-bottom: 14px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px; min-width: 0; }
.tile b { display: block; font-size: 21px; font-weight: 650; letter-spacing: -.01em;
  font-variant-numeric: tabular-nums; }
.tile small, .note { color: var(--soft); font-weight: 400; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 380px), 1fr)); gap: 14px; }
.wide { margin-bottom: 14px; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; color: var(--soft); font-size: 12px; margin-bottom: 4px; }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 5px; }
svg.chart { display: block; width: 100%; height: auto; overflow: visible; }
svg text { fill: var(--soft); font-size: 11.5px; font-variant-numeric: tabular-nums; }
svg .grid { stroke: var(--line); } svg .cursor { stroke: var(--soft); stroke-dasharray: 3 3; visibility: hidden; }
svg .line, svg .faint, svg .dash { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round;
  stroke-linecap: round; }
svg .faint { stroke-width: 1.3; opacity: .38; } svg .dash { stroke-width: 1.3; stroke-dasharray: 4 4; opacity: .8; }
svg .point { fill: var(--card); stroke: var(--c); stroke-width: 2.4; } svg .dot { fill: var(--c); }
svg .fill { fill: var(--c); opacity: .82; }
.c0 { --c: var(--c0); } .c1 { --c: var(--c1); } .c2 { --c: var(--c2); } .c3 { --c: var(--c3); }
.c4 { --c: var(--c4); } .c5 { --c: var(--c5); } .c6 { --c: var(--c6); } .c7 { --c: var(--c7); }
.legend i { background: var(--c); } .legend i.pale { opacity: .4; }
#tip { position: fixed; pointer-events: none; display: none; background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; box-shadow: 0 4px 16px #0003; padding: 6px 10px; font-size: 12px; z-index: 9; }
#tip div { display: flex; gap: 12px; justify-content: space-between; font-variant-numeric: tabular-nums; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 3px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; } th:first-child, td:first-child { text-align: left; }
td:first-child, pre, .text { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: 12.5px; }
.spark { width: 110px; height: 22px; vertical-align: middle; } .spark .line { stroke-width: 1.5; }
.scroll { overflow-x: auto; } pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; }
details.card > summary { cursor: pointer; font-weight: 600; } details.card[open] > summary { margin-bottom: 10px; }
button, select, input { font: inherit; color: inherit; background: var(--card); border: 1px solid var(--line);
  border-radius: 7px; padding: 4px 9px; } button { cursor: pointer; }
.filters { display: flex; flex-wrap: wrap; gap: 8px; align-items: center; margin-bottom: 10px; }
.filters input[type=search] { flex: 1 1 180px; } .filters input[type=number] { width: 84px; }
.sample { border-top: 1px solid var(--line); }
.sample > summary { list-style: none; cursor: pointer; display: grid; gap: 10px;
  grid-template-columns: 74px 84px 66px 86px 62px 1fr; padding: 6px 4px; align-items: baseline; }
.sample > summary::-webkit-details-marker { display: none; } .sample > summary:hover { background: var(--chip); }
.sample .cut { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; color: var(--soft); }
.sample .body { padding: 4px 4px 14px; } .sample h4 { margin: 10px 0 3px; font-size: 12px; color: var(--soft);
  font-weight: 500; }
.sample .text { background: var(--chip); border-radius: 7px; padding: 8px 10px; white-space: pre-wrap;
  overflow-wrap: anywhere; max-height: 420px; overflow-y: auto; }
.sample .badge { color: var(--ink); font-weight: 650; font-variant-numeric: tabular-nums; }
.completed { color: var(--ok); }
.truncated, .aborted { color: var(--warn); }
.failed { color: var(--bad); }
.num { text-align: right; color: var(--soft); }
.wide { overflow-x: auto; }
@media (max-width: 700px) { .wide svg.chart { min-width: 680px; }
  .sample > summary { grid-template-columns: 64px 60px 74px 1fr; }
  .sample .hide { display: none; } }
"""

SCRIPT = """
'use strict';
const root = document.documentElement, tip = document.getElementById('tip');
document.getElementById('theme').onclick = () => {
  const dark = root.dataset.theme ? root.dataset.theme === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
  root.dataset.theme = dark ? 'light' : 'dark';
};
function make(tag, css, text) {  // text goes in as text, never as markup
  const node = document.createElement(tag);
  if (css) node.className = css;
  if (text !== undefined) node.textContent = text;
  return node;
}
for (const svg of document.querySelectorAll('svg[data-hover]')) {
  const data = JSON.parse(svg.dataset.hover), cursor = svg.querySelector('.cursor');
  const [low, high] = data.range, every = [...new Set(data.series.flatMap(s => s.points.map(p => p[0])))];
  const at = step => high > low ? data.left + (step - low) / (high - low) * (data.right - data.left) : data.left;
  svg.onmousemove = event => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const step = every.reduce((a, b) => Math.abs(at(b) - x) < Math.abs(at(a) - x) ? b : a);
    cursor.setAttribute('x1', at(step)); cursor.setAttribute('x2', at(step));
    cursor.setAttribute('y1', data.top); cursor.setAttribute('y2', data.bottom);
    cursor.style.visibility = 'visible';
    tip.replaceChildren(make('b', '', 'step ' + step));
    for (const s of data.series) {
      const point = s.points.find(p => p[0] === step);
      if (!point) continue;
      const row = make('div'), name = make('span', '', s.name);
      name.style.color = `var(--c${s.color})`;
      row.append(name, make('span', '', point[1])); tip.append(row);
    }
    tip.style.display = 'block';
    tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + 'px';
    tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + 'px';
  };
  svg.onmouseleave = () => { cursor.style.visibility = 'hidden'; tip.style.display = 'none'; };
}
const holder = document.getElementById('data'), list = document.getElementById('list');
if (holder && list) {
  const { samples, prompts } = JSON.parse(holder.textContent), PAGE = 25;
  const get = id => document.getElementById(id);
  const fill = (id, values) => values.forEach(v => get(id).append(new Option(v, v)));
  fill('set', [...new Set(samples.map(s => s.set))]);
  fill('status', [...new Set(samples.map(s => s.status))].sort());
  fill('step', [...new Set(samples.map(s => s.step))].sort((a, b) => a - b));
  let found = [], shown = 0;
  const reward = s => s.reward === null ? -Infinity : s.reward;
  const orders = {
    'newest first': (a, b) => b.step - a.step, 'oldest first': (a, b) => a.step - b.step,
    'highest reward': (a, b) => reward(b) - reward(a), 'lowest reward': (a, b) => reward(a) - reward(b),
    'longest': (a, b) => b.length - a.length, 'shortest': (a, b) => a.length - b.length,
  };
  fill('order', Object.keys(orders));
  function field(body, title, text) {
    body.append(make('h4', '', title), make('div', 'text', text));
  }
  function open(details, s) {
    const body = make('div', 'body');
    field(body, 'prompt', prompts[s.prompt]); field(body, 'response', s.response);
    if (s.label !== null) field(body, 'label', typeof s.label === 'string' ? s.label : JSON.stringify(s.label));
    const rest = [];
    if (s.advantage !== null) rest.push('advantage ' + s.advantage);
    if (s.logprob !== null) rest.push('mean log-prob ' + s.logprob);
    if (s.versions.length) rest.push('policy version ' + s.versions.join(', '));
    if (s.metadata) rest.push('metadata ' + s.metadata);
    if (rest.length) body.append(make('h4', '', rest.join('  ·  ')));
    details.append(body);
  }
  function more() {
    for (const s of found.slice(shown, shown + PAGE)) {
      const details = make('details', 'sample'), line = make('summary');
      line.append(make('span', '', 'step ' + s.step), make('span', 'hide num', s.set + ' ' + s.group + '.' + s.index),
        make('span', 'badge num', s.reward === null ? '–' : +s.reward.toFixed(4)), make('span', s.status, s.status),
        make('span', 'hide num', s.length + ' tok'), make('span', 'cut text-line', s.response.slice(0, 300)));
      details.append(line);
      details.addEventListener('toggle', () => { if (details.childElementCount === 1) open(details, s); });
      list.append(details);
    }
    shown = Math.min(found.length, shown + PAGE);
    get('more').hidden = shown >= found.length;
    get('count').textContent = found.length + ' of ' + samples.length + ' samples';
  }
  function search() {
    const words = get('search').value.toLowerCase(), low = get('low').value, high = get('high').value;
    const is = (id, value) => !get(id).value || get(id).value === String(value);
    const within = r => (low === '' || (r !== null && r >= +low)) && (high === '' || (r !== null && r <= +high));
    const has = s => !words || (s.response + '\\n' + prompts[s.prompt]).toLowerCase().includes(words);
    found = samples.filter(s => is('set', s.set) && is('step', s.step) && is('status', s.status) && within(s.reward)
      && has(s));
    found.sort(orders[get('order').value]);
    shown = 0; list.replaceChildren(); more();
  }
  for (const id of ['set', 'step', 'status', 'order', 'low', 'high', 'search']) {
    get(id).addEventListener('input', search);
  }
  get('more').onclick = more;
  search();
}
"""

SAMPLE_BROWSER = """
<div class="card"><div class="filters">
<select id="order" aria-label="order"></select>
<select id="set" aria-label="set"><option value="">all sets</option></select>
<select id="step" aria-label="step"><option value="">all steps</option></select>
<select id="status" aria-label="status"><option value="">any status</option></select>
<span>reward <input id="low" type="number" step="any" placeholder="from" aria-label="lowest reward">
<input id="high" type="number" step="any" placeholder="to" aria-label="highest reward"></span>
<input id="search" type="search" placeholder="search prompts and responses" aria-label="search">
<span class="note" id="count"></span></div>
<div id="list"></div><button id="more" hidden>show more</button></div>
"""

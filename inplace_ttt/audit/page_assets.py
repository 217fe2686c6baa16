"""Style and behaviour of the report's page: plain CSS and JavaScript, nothing loaded from elsewhere."""

STYLE = """
:root {
  --ink: #1f2933;
  --soft: #52606d;
  --line: #d9dee4;
  --ground: #ffffff;
  --panel: #f5f7f9;
  --link: #2f6db3;
  --deviates: #b42318;
  --extension: #6941c6;
  --unspecified: #8a5a00;
  --not-checked: #52606d;
  --conforms: #1b7a43;
}
* { box-sizing: border-box; }
body {
  margin: 0 auto;
  max-width: 1180px;
  padding: 28px 24px 64px;
  font: 15px/1.5 system-ui, sans-serif;
  color: var(--ink);
  background: var(--ground);
}
h1 { font-size: 24px; margin: 0 0 6px; }
h2 { font-size: 18px; margin: 34px 0 10px; }
h3 { font-size: 15px; margin: 0 0 6px; }
p.summary { font-size: 17px; font-weight: 600; margin: 6px 0 14px; }
p.summary.bad { color: var(--deviates); }
p.summary.good { color: var(--conforms); }
p.intro, .note { color: var(--soft); max-width: 90ch; }
code { font: 12.5px ui-monospace, monospace; color: var(--soft); }
dl.facts { display: grid; grid-template-columns: max-content 1fr; gap: 2px 18px; margin: 14px 0; }
dl.facts dt { color: var(--soft); }
dl.facts dd { margin: 0; }
.card {
  border: 1px solid var(--line);
  border-left: 4px solid var(--deviates);
  border-radius: 4px;
  padding: 12px 16px;
  margin: 10px 0;
}
.card.declared { border-left-color: var(--not-checked); }
.card dl, .detail dl { display: grid; grid-template-columns: 130px 1fr; gap: 4px 14px; margin: 0; }
.card dt, .detail dt { color: var(--soft); }
.card dd, .detail dd { margin: 0; }
.controls {
  position: sticky;
  top: 0;
  background: var(--ground);
  padding: 10px 0;
  display: flex;
  flex-wrap: wrap;
  gap: 8px;
  align-items: center;
  z-index: 1;
  border-bottom: 1px solid var(--line);
}
.controls input {
  font: inherit;
  padding: 5px 10px;
  border: 1px solid var(--line);
  border-radius: 4px;
  min-width: 220px;
}
button {
  font: inherit;
  font-size: 13.5px;
  padding: 4px 10px;
  border: 1px solid var(--line);
  border-radius: 14px;
  background: var(--ground);
  color: var(--soft);
  cursor: pointer;
}
button[aria-pressed=true] { background: var(--panel); color: var(--ink); border-color: var(--soft); }
button b { color: var(--ink); }
table.items { border-collapse: collapse; width: 100%; margin-top: 4px; table-layout: fixed; }
table.items th {
  text-align: left;
  font-weight: 600;
  padding: 8px 10px;
  border-bottom: 2px solid var(--line);
  cursor: pointer;
  user-select: none;
}
table.items th::after { content: " \\2195"; color: var(--line); }
table.items th[aria-sort=ascending]::after { content: " \\2191"; color: var(--soft); }
table.items th[aria-sort=descending]::after { content: " \\2193"; color: var(--soft); }
table.items td {
  padding: 8px 10px;
  vertical-align: top;
  border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere;
}
tr.main { cursor: pointer; }
tr.main:hover td, tr.main:focus td { background: var(--panel); }
table.items td:first-child { padding-left: 24px; }
tr.main td:first-child::before {
  content: "\\25B8";
  color: var(--soft);
  display: inline-block;
  width: 16px;
  margin-left: -16px;
}
tbody.open tr.main td:first-child::before { content: "\\25BE"; }
tr.detail { display: none; }
tbody.open tr.detail { display: table-row; }
tr.detail > td { background: var(--panel); padding: 14px 26px 18px; }
.detail .cols { display: flex; flex-wrap: wrap; gap: 26px; align-items: flex-start; }
.detail .text { flex: 1 1 420px; }
.detail figure {
  margin: 0;
  flex: 0 0 auto;
  background: #fff;
  border: 1px solid var(--line);
  border-radius: 4px;
  padding: 6px;
}
.detail figure svg { display: block; max-width: 100%; height: auto; }
table.numbers { border-collapse: collapse; margin-top: 12px; font-size: 13.5px; }
table.numbers td { border: 0; border-top: 1px solid var(--line); padding: 3px 14px 3px 0; }
table.numbers td:last-child { font-variant-numeric: tabular-nums; }
.v { font-weight: 600; white-space: nowrap; }
.v.deviates { color: var(--deviates); }
.v.extension { color: var(--extension); }
.v.unspecified { color: var(--unspecified); }
.v.not-checked { color: var(--not-checked); }
.v.conforms { color: var(--conforms); }
.ref { color: var(--soft); font-size: 13.5px; }
@media print {
  tr.detail { display: table-row; }
}
"""

SCRIPT = """
const table = document.querySelector('table.items'), bodies = () => [...table.tBodies];
const search = document.querySelector('#search'), buttons = [...document.querySelectorAll('button[data-verdict]')];
function filter() {
  const words = search.value.toLowerCase();
  const on = buttons.filter(b => b.getAttribute('aria-pressed') === 'true').map(b => b.dataset.verdict);
  let shown = 0;
  for (const body of bodies()) {
    const fits = (!on.length || on.includes(body.dataset.verdict)) && body.textContent.toLowerCase().includes(words);
    body.hidden = !fits; shown += fits;
  }
  document.querySelector('#shown').textContent = shown + ' of ' + bodies().length + ' items';
}
search.addEventListener('input', filter);
for (const b of buttons) b.addEventListener('click', () => {
  b.setAttribute('aria-pressed', b.getAttribute('aria-pressed') !== 'true');
  filter();
});
table.tHead.querySelectorAll('th').forEach((th, column) => {
  const sort = () => {
    const down = th.getAttribute('aria-sort') === 'ascending';
    table.tHead.querySelectorAll('th').forEach(other => other.removeAttribute('aria-sort'));
    th.setAttribute('aria-sort', down ? 'descending' : 'ascending');
    const key = body => { const cell = body.rows[0].cells[column]; return cell.dataset.key || cell.textContent; };
    bodies().sort((a, b) => (down ? -1 : 1) * key(a).localeCompare(key(b), undefined, {numeric: true})).forEach(body => table.append(body));
  };
  th.addEventListener('click', sort);
  th.addEventListener('keydown', e => { if (e.key === 'Enter') sort(); });
});
for (const body of bodies()) {
  const row = body.rows[0], toggle = () => row.setAttribute('aria-expanded', body.classList.toggle('open'));
  row.addEventListener('click', toggle);
  row.addEventListener('keydown', e => { if (e.key === 'Enter' || e.key === ' ') { e.preventDefault(); toggle(); } });
}
document.querySelector('#all').addEventListener('click', e => {
  const open = e.target.getAttribute('aria-pressed') !== 'true';
  e.target.setAttribute('aria-pressed', open);
  for (const body of bodies()) { body.classList.toggle('open', open); body.rows[0].setAttribute('aria-expanded', open); }
});
filter();
"""

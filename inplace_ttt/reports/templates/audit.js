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

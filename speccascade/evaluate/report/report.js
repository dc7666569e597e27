'use strict';
// What a page cannot do by itself: text at the pointer, curves and settings to choose, tables to sort. No library.
const tip = document.getElementById('tip');
const all = (selector, root = document) => [...root.querySelectorAll(selector)];

// ---- text at the pointer, at a point of a chart nearby, and at what has the focus ----

function show(node) {
  const at = node.getClientRects()[0];
  tip.textContent = node.dataset.tip;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const edge = document.documentElement.clientWidth - box.width - 8;
  const above = at.top - box.height - 10;
  tip.style.left = `${window.scrollX + Math.max(8, Math.min(at.left + (at.width - box.width) / 2, edge))}px`;
  tip.style.top = `${window.scrollY + (above < 4 ? at.bottom + 8 : above)}px`;
  all('.at').forEach((other) => other.classList.remove('at'));
  node.classList.add('at');
}
function hide() {
  tip.hidden = true;
  all('.at').forEach((node) => node.classList.remove('at'));
}
const points = (chart) => all('use[data-tip]', chart).filter((node) => node.getClientRects().length);
function distance(node, event) {
  const box = node.getBoundingClientRect();
  return Math.hypot(box.left + box.width / 2 - event.clientX, box.top + box.height / 2 - event.clientY);
}
function pointed(event) {
  const chart = event.target.closest('.chart');
  if (!chart) return event.target.closest('[data-tip]');
  const near = points(chart).filter((node) => distance(node, event) < 30);
  return near.sort((a, b) => distance(a, event) - distance(b, event))[0];
}
for (const on of ['pointermove', 'click']) {
  document.addEventListener(on, (event) => { const node = pointed(event); if (node) show(node); else hide(); });
}
document.addEventListener('focusin', (event) => { if (event.target.dataset.tip) show(event.target); });
document.addEventListener('focusout', hide);
document.addEventListener('keydown', (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (event.key === 'Escape') hide();
  if (!step || !event.target.matches('.chart svg')) return;
  event.preventDefault();
  const some = points(event.target);
  const last = some.findIndex((node) => node.matches('.at'));
  if (some.length) show(some[(Math.max(last, step < 0 ? 0 : -1) + step + some.length) % some.length]);
});

// ---- legends: a curve is lit by pointing at it, hidden and shown by a click ----

const curves = (curve) => all('[data-curve]').filter((node) => node.dataset.curve === curve);
for (const button of all('.legend button')) {
  const { curve } = button.dataset;
  const light = (on) => all('.chart [data-curve]').forEach((node) => node.classList.toggle('dim', on && node.dataset.curve !== curve));
  button.addEventListener('mouseenter', () => light(true));
  button.addEventListener('mouseleave', () => light(false));
  button.addEventListener('click', () => {
    const on = button.getAttribute('aria-pressed') === 'false';
    for (const node of curves(curve)) {
      if (node.matches('button')) node.setAttribute('aria-pressed', on);
      else node.classList.toggle('off', !on);
    }
  });
}

// ---- one setting, or one of each curve ----

for (const select of all('.card select')) {
  const settings = all('[data-setting]', select.parentElement).map((node) => [node, node.hasAttribute('hidden')]);
  const choose = () => settings.forEach(([node, hidden]) => {
    node.toggleAttribute('hidden', select.value ? node.dataset.setting !== select.value : hidden);
  });
  select.addEventListener('change', choose);
  choose();
}

// ---- tables ----

for (const head of document.querySelectorAll('th button')) {
  head.addEventListener('click', () => {
    const cell = head.parentElement, table = cell.closest('table'), body = table.tBodies[0];
    const column = cell.cellIndex, numbers = cell.classList.contains('n');
    const down = cell.getAttribute('aria-sort') ? cell.getAttribute('aria-sort') === 'ascending' : numbers;
    for (const other of table.querySelectorAll('th')) other.removeAttribute('aria-sort');
    cell.setAttribute('aria-sort', down ? 'descending' : 'ascending');
    const key = (row) => row.cells[column].dataset.value;
    const order = [...body.rows].sort((a, b) => {
      const [u, v] = [key(a), key(b)];
      if (u === '' || v === '') return (u === '') - (v === '');  // empty cells are last in both orders
      const sign = numbers ? u - v : u.localeCompare(v, undefined, { numeric: true });
      return down ? -sign : sign;
    });
    body.append(...order);
  });
}

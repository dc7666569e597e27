'use strict';
// What a page cannot do by itself: text at the pointer, and tables to sort. No library.
const tip = document.getElementById('tip');

// ---- text at the pointer, and at what has the focus ----

function show(node) {
  const at = node.getClientRects()[0];
  tip.textContent = node.dataset.tip;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const edge = document.documentElement.clientWidth - box.width - 8;
  const above = at.top - box.height - 10;
  tip.style.left = `${window.scrollX + Math.max(8, Math.min(at.left + (at.width - box.width) / 2, edge))}px`;
  tip.style.top = `${window.scrollY + (above < 4 ? at.bottom + 8 : above)}px`;
}
const hide = () => { tip.hidden = true; };
for (const on of ['pointermove', 'click']) {
  document.addEventListener(on, (event) => { const node = event.target.closest('[data-tip]'); if (node) show(node); else hide(); });
}
document.addEventListener('focusin', (event) => { if (event.target.dataset.tip) show(event.target); });
document.addEventListener('focusout', hide);
document.addEventListener('keydown', (event) => { if (event.key === 'Escape') hide(); });

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

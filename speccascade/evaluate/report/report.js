'use strict';
// What a page cannot do by itself: tables to sort. No library.

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

'use strict';
// Draws the charts at the width they are given, sorts tables, shows what is under the pointer. No library.
const data = JSON.parse(document.getElementById('data').textContent);
const tip = document.getElementById('tip');
const hidden = new Set();
const charts = [];
let lit = null;

// Marks of radius 1, in the order of the curves; the last two are the models alone.
const MARKS = [
  'M1 0A1 1 0 1 1-1 0A1 1 0 1 1 1 0Z', 'M-.9-.9H.9V.9H-.9Z', 'M0-1.15L1.1.85H-1.1Z', 'M0-1.25L1.25 0L0 1.25L-1.25 0Z',
  'M0 1.15L1.1-.85H-1.1Z', 'M-.4-1.1H.4V-.4H1.1V.4H.4V1.1H-.4V.4H-1.1V-.4H-.4Z',
  'M-1-.5L-.5-1L0-.5L.5-1L1-.5L.5 0L1 .5L.5 1L0 .5L-.5 1L-1 .5L-.5 0Z', 'M-1.15 0L.85-1.1V1.1Z', 'M1.15 0L-.85-1.1V1.1Z',
  'M0-1.2L1.14-.37L.7.97H-.7L-1.14-.37Z',
];
const STAR = 'M0-1.7L.5-.55L1.7-.5L.8.25L1.1 1.45L0 .75L-1.1 1.45L-.8.25L-1.7-.5L-.5-.55Z';

function make(name, attributes, parent, text) {
  const node = document.createElementNS('http://www.w3.org/2000/svg', name);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.appendChild(node);
  return node;
}
const colour = (curve) => ({ large: 'var(--ink)', small: 'var(--quiet)' })[data.curves[curve]] || `var(--c${data.curves[curve] % 10})`;
const mark = (curve) => (typeof data.curves[curve] === 'string' ? STAR : MARKS[data.curves[curve] % 10]);
const round = (x) => +x.toFixed(2);

// ---- tooltip ----

function showTip(text, left, top) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const edge = document.documentElement.clientWidth - box.width - 8;
  tip.style.left = `${window.scrollX + Math.max(8, Math.min(left - box.width / 2, edge))}px`;
  tip.style.top = `${window.scrollY + (top - box.height - 10 < 4 ? top + 18 : top - box.height - 10)}px`;
}
function tipOf(node) {
  const box = node.getClientRects()[0] || node.getBoundingClientRect();
  showTip(node.dataset.tip, box.left + box.width / 2, box.top);
}
for (const on of ['mouseover', 'focusin', 'click']) {
  document.addEventListener(on, (event) => {
    const node = event.target.closest && event.target.closest('[data-tip]');
    if (node) tipOf(node);
    else if (on === 'click' && !event.target.closest('.chart')) tip.hidden = true;
  });
}
for (const off of ['mouseout', 'focusout']) {
  document.addEventListener(off, (event) => {
    if (event.target.closest && event.target.closest('[data-tip]')) tip.hidden = true;
  });
}
document.addEventListener('keydown', (event) => { if (event.key === 'Escape') tip.hidden = true; });

// ---- charts ----

function ticks(low, high, count) {
  const raw = (high - low) / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= raw);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(+(i * step).toPrecision(12));
  return found;
}
function spread(values, pad) {
  const low = Math.min(...values), high = Math.max(...values);
  const room = (high - low || Math.abs(high) || 1) * pad;
  return [low - room, high + room];
}
// The span of an axis. A model alone that would take more than a third of it is left out, and drawn at its edge; so is
// the reference where the axis may be broken for it.
function extent(shown, key, more, broken) {
  const values = (some) => [...some.flatMap((s) => s.points.flatMap((p) => [p[key], ...(p[`${key}_ci`] || [])])), ...more];
  const rest = shown.filter((s) => typeof data.curves[s.curve] !== 'string' || (s.curve === data.reference && !broken));
  const all = spread(values(shown), 0.05);
  if (!rest.length) return all;
  const near = spread(values(rest), 0.05);
  return near[1] - near[0] < (2 / 3) * (all[1] - all[0]) ? near : all;
}
const within = (v, [low, high]) => Math.min(Math.max(v, low), high);
function frame(box, spec, x, y, height) {
  const width = Math.max(box.clientWidth, 200);
  const svg = make('svg', { viewBox: `0 0 ${width} ${height}`, height, role: 'img', 'aria-label': spec.title });
  const [left, right, top, bottom] = [46, width - 10, 22, height - 38];
  const sx = (v) => left + ((v - x[0]) / (x[1] - x[0])) * (right - left);
  const sy = (v) => bottom - ((v - y[0]) / (y[1] - y[0])) * (bottom - top);
  for (const v of ticks(y[0], y[1], 5)) {
    make('line', { class: 'rule', x1: left, x2: right, y1: sy(v), y2: sy(v) }, svg);
    make('text', { x: left - 8, y: sy(v) + 4, 'text-anchor': 'end' }, svg, v);
  }
  for (const v of spec.ticks || ticks(x[0], x[1], width / 75)) {
    if (!spec.bars) make('line', { class: 'rule', x1: sx(v), x2: sx(v), y1: top, y2: bottom }, svg);
    make('text', { x: sx(v), y: bottom + 16, 'text-anchor': 'middle' }, svg, v);
  }
  make('line', { class: 'axis', x1: left, x2: right, y1: bottom, y2: bottom }, svg);
  make('text', { class: 'name', x: 0, y: 10 }, svg, spec.y);
  make('text', { x: right, y: height - 4, 'text-anchor': 'end' }, svg, spec.x);
  return { svg, sx, sy, left, right, top, bottom };
}

function scatter(box, spec) {
  const shown = spec.series.filter((s) => !hidden.has(s.curve));
  const points = shown.flatMap((s) => s.points);
  box.replaceChildren();
  if (!points.length) return;
  const guides = (axis) => (spec.diagonal ? points.flatMap((p) => [p.x, p.y]) : spec.guide && spec.guide[axis] !== undefined ? [spec.guide[axis]] : []);
  const [x, y] = ['x', 'y'].map((key) => extent(shown, key, guides(key), spec.broken === key));
  const { svg, sx, sy, left, right, top, bottom } = frame(box, spec, x, y, 300);
  if (spec.guide && spec.guide.y !== undefined) make('line', { class: 'guide', x1: left, x2: right, y1: sy(spec.guide.y), y2: sy(spec.guide.y) }, svg);
  if (spec.diagonal) {
    const [low, high] = [Math.max(x[0], y[0]), Math.min(x[1], y[1])];
    make('line', { class: 'guide', x1: sx(low), y1: sy(low), x2: sx(high), y2: sy(high) }, svg);
  }
  const places = [];
  for (const s of shown) {
    const group = make('g', { stroke: colour(s.curve), fill: colour(s.curve), opacity: lit && lit !== s.curve ? 0.12 : 1 }, svg);
    const near = s.points.filter((p) => within(p.x, x) === p.x && within(p.y, y) === p.y);
    for (const p of near) {
      if (p.y_ci) make('line', { x1: sx(p.x), x2: sx(p.x), y1: sy(p.y_ci[0]), y2: sy(p.y_ci[1]), opacity: 0.3 }, group);
      if (p.x_ci) make('line', { x1: sx(p.x_ci[0]), x2: sx(p.x_ci[1]), y1: sy(p.y), y2: sy(p.y), opacity: 0.3 }, group);
    }
    if (spec.lines) make('path', { fill: 'none', 'stroke-width': 1.8, d: near.map((p, i) => `${i ? 'L' : 'M'}${round(sx(p.x))} ${round(sy(p.y))}`).join('') }, group);
    for (const p of s.points) {
      const [px, py] = [sx(within(p.x, x)), sy(within(p.y, y))];
      make('path', { d: mark(s.curve), stroke: 'var(--card)', 'stroke-width': 0.25, transform: `translate(${round(px)} ${round(py)}) scale(5)` }, group);
      if (!near.includes(p)) {
        const [side, anchor] = px > (left + right) / 2 ? [-9, 'end'] : [9, 'start'];
        if (within(p.x, x) !== p.x) make('path', { class: 'axis', fill: 'none', d: `M${px + 2 * side - 4} ${bottom + 5}l4 -10m4 0l-4 10` }, svg);
        make('text', { class: 'far', stroke: 'none', x: px + side, y: within(py, [top + 12, bottom - 6]), 'text-anchor': anchor }, svg, `${s.curve}: ${+p.y.toFixed(2)} at ${+p.x.toFixed(2)}`);
      }
      places.push({ x: px, y: py, p });
    }
  }
  const halo = make('circle', { class: 'halo', r: 8, visibility: 'hidden' }, svg);
  let at = -1;
  const say = (i) => {
    at = i;
    const { x: px, y: py, p } = places[i];
    halo.setAttribute('cx', px); halo.setAttribute('cy', py); halo.setAttribute('visibility', 'visible');
    const frameBox = svg.getBoundingClientRect();
    showTip(p.tip, frameBox.left + px, frameBox.top + py);
  };
  const still = () => { at = -1; halo.setAttribute('visibility', 'hidden'); tip.hidden = true; };
  const point = (event) => {
    const frameBox = svg.getBoundingClientRect();
    const near = places.map((q, i) => [Math.hypot(q.x - event.clientX + frameBox.left, q.y - event.clientY + frameBox.top), i]).sort((a, b) => a[0] - b[0])[0];
    if (near[0] < 30) say(near[1]); else if (at >= 0) still();
  };
  for (const on of ['pointermove', 'click']) svg.addEventListener(on, point);
  svg.addEventListener('pointerleave', (event) => { if (event.pointerType !== 'touch') still(); }); // a finger leaves before it clicks
  svg.setAttribute('tabindex', 0);
  svg.addEventListener('keydown', (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) { event.preventDefault(); say((Math.max(at, step < 0 ? 0 : -1) + step + places.length) % places.length); }
  });
  svg.addEventListener('blur', still);
  box.appendChild(svg);
}

function bars(box, spec) {
  box.replaceChildren();
  const values = spec.bars.map((b) => b.y);
  const first = spec.first, last = first + values.length - 1;
  spec = { ...spec, ticks: values.map((_, i) => first + i) };
  const { svg, sx, sy, bottom } = frame(box, spec, [first - 0.6, last + 0.6], [0, spec.most || Math.max(...values) * 1.1], 230);
  const wide = Math.min(42, (sx(1) - sx(0)) * 0.7);
  values.forEach((v, i) => {
    make('rect', { class: 'bar', fill: colour(spec.curve), x: sx(first + i) - wide / 2, width: wide, y: sy(v), height: bottom - sy(v), 'data-tip': spec.bars[i].tip, tabindex: 0 }, svg);
    if (wide > 26) make('text', { x: sx(first + i), y: sy(v) - 5, 'text-anchor': 'middle' }, svg, v.toFixed(2));
  });
  box.appendChild(svg);
}

function redraw() { for (const c of charts) c(); }
for (const box of document.querySelectorAll('.chart[data-chart]')) {
  charts.push(() => scatter(box, data.charts[+box.dataset.chart]));
}
for (const select of document.querySelectorAll('select[data-blocks]')) {
  const [left, right] = document.querySelectorAll('.chart[data-block]');
  const show = () => {
    const chosen = data.blocks[+select.value];
    bars(left, chosen.acceptance);
    bars(right, chosen.lengths);
  };
  charts.push(show);
  select.addEventListener('change', show);
}
for (const legend of document.querySelectorAll('.legend')) {
  const drawn = [...legend.parentElement.querySelectorAll('[data-chart]')].flatMap((c) => data.charts[+c.dataset.chart].series);
  const present = new Set(drawn.map((s) => s.curve));
  for (const curve of Object.keys(data.curves).filter((name) => present.has(name))) {
    const button = document.createElement('button');
    button.type = 'button';
    button.setAttribute('aria-pressed', 'true');
    button.dataset.curve = curve;
    const icon = make('svg', { width: 14, height: 14, viewBox: '-2 -2 4 4' }, button);
    make('path', { d: mark(curve), fill: colour(curve) }, icon);
    button.append(curve);
    const light = (name) => { lit = name; redraw(); };
    button.addEventListener('mouseenter', () => light(curve));
    button.addEventListener('mouseleave', () => light(null));
    button.addEventListener('click', () => {
      if (!hidden.delete(curve)) hidden.add(curve);
      for (const b of document.querySelectorAll('.legend button')) b.setAttribute('aria-pressed', !hidden.has(b.dataset.curve));
      redraw();
    });
    legend.appendChild(button);
  }
}
let width = 0;
new ResizeObserver(() => {
  if (document.body.clientWidth !== width) { width = document.body.clientWidth; redraw(); }
}).observe(document.body);
redraw();

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
      if (u === '' || v === '') return (u === '') - (v === '');  // nothing is last, either way
      const sign = numbers ? u - v : u.localeCompare(v, undefined, { numeric: true });
      return down ? -sign : sign;
    });
    body.append(...order);
  });
}

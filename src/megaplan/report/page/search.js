// The result of a search: step time against free memory, the rows, how sure the first is, and why the others lost.
function searchPage() {
  const { search } = data, rows = search.best.map((row, index) => ({ ...row, number: index + 1 }));
  const sections = [searchRows(rows), ...(search.robustness ? [robustness(search.robustness)] : []), whyNot(search.why_not)];
  return { header: searchHeader(search, rows), sections: rows.length ? [scatterSection(rows), ...sections] : sections, draw: [] };
}

function searchHeader(search, [first]) {
  const facts = [['meshes', count(search.candidates.meshes)], ['exact evaluations', count(search.candidates.evaluated)], ['no step is below', time(search.bound_seconds * 1e9)]];
  if (first) {
    facts.unshift(['step of the first row', time(first.step_seconds * 1e9)], ['tokens/s per device', count(first.tokens_per_second_per_device)], ['MFU', `${fixed(100 * first.mfu, 1)} %`], ['headroom', size(first.headroom_bytes)]);
    facts.push(['gap to the bound', `${fixed(100 * (search.gap || 0), 1)} %`]);
  }
  return [
    el('h1', {}, data.name),
    el('p', { class: 'soft' }, `${search.objective} on ${count(search.devices)} devices, from ${data.source}`),
    el('p', { class: `verdict ${first ? 'good' : 'bad'}`, id: 'verdict' }, first ? `${count(search.best.length)} layouts fit and are listed` : 'nothing fits', search.complete ? '' : '; the search was interrupted'),
    el('p', { class: 'soft' }, `times: ${search.basis}`),
    el('dl', { class: 'facts' }, facts.map(([name, text]) => el('div', {}, el('dt', {}, name), el('dd', {}, text)))),
  ];
}

function meshText({ mesh, schedule }) {
  const axes = Object.entries(mesh).filter(([name, degree]) => degree > 1 || name === 'pp' || name === 'tp').map(([name, degree]) => `${name} ${degree}`);
  return `${axes.join(' ')}, ${schedule.kind}, ${count(schedule.num_microbatches)} × ${count(schedule.micro_batch_size)}`;
}

function rowText(row) {
  return `row ${row.number}: ${time(row.step_seconds * 1e9)}, headroom ${size(row.headroom_bytes)}; ${meshText(row)}`;
}

function explainRow(row) {
  const terms = Object.entries(row.terms).map(([name, seconds]) => [name.replaceAll('_', ' '), time(seconds * 1e9)]);
  explain(rowText(row), [['options', row.set.map((text) => `--set '${text}'`).join(' ')], ['plan', row.plan], ...terms]);
}

const SVG = 'http://www.w3.org/2000/svg';

function shape(tag, attributes, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, String(value));
  }
  node.append(...children);
  return node;
}

// Step time to the right, free memory upwards; the rows that no other matches in both are joined.
function scatterSection(rows) {
  const [width, height, left, bottom] = [900, 360, 80, 40], status = el('p', { class: 'status', 'aria-live': 'polite' }, 'Point at a layout, or reach it with Tab.');
  const scale = (values, from, to) => {
    const [least, most] = [Math.min(...values), Math.max(...values)], room = (most - least) * 0.05 || Math.abs(most) * 0.05 || 1;
    return { ends: [least, most], at: (value) => from + ((value - least + room) / (most - least + 2 * room)) * (to - from) };
  };
  const across = scale(rows.map((row) => row.step_seconds), left, width - 20), up = scale(rows.map((row) => row.headroom_bytes), height - bottom, 20);
  const place = (row) => [across.at(row.step_seconds), up.at(row.headroom_bytes)];
  const label = (x, y, anchor, text) => shape('text', { x, y, 'text-anchor': anchor, class: 'tick' }, text);
  const front = rows.filter((row) => row.pareto).sort((a, b) => a.step_seconds - b.step_seconds);
  const points = rows.map((row) => {
    const [cx, cy] = place(row), show = () => status.replaceChildren(rowText(row));
    const open = (event) => { if (event.type === 'click' || event.key === 'Enter') explainRow(row); };
    return shape('circle', { cx, cy, r: 7, class: row.pareto ? 'point front' : 'point', tabindex: 0, role: 'button', 'aria-label': rowText(row), onmouseenter: show, onfocus: show, onclick: open, onkeydown: open }, shape('title', {}, rowText(row)));
  });
  const picture = shape('svg', { viewBox: `0 0 ${width} ${height}`, class: 'scatter', role: 'group', 'aria-label': 'Layouts by step time and free memory' },
    shape('path', { d: `M${left} 10V${height - bottom}H${width - 10}`, class: 'axis' }),
    ...across.ends.map((value) => label(across.at(value), height - bottom + 16, 'middle', time(value * 1e9))),
    ...up.ends.map((value) => label(left - 6, up.at(value) + 4, 'end', size(value))),
    label(width - 10, height - 6, 'end', 'step time'), label(left + 6, 16, 'start', 'free memory of the fullest rank'),
    shape('polyline', { points: front.map((row) => place(row).join(',')).join(' '), class: 'front' }), ...points);
  return section('layouts', 'Step time and free memory', picture, status, el('p', { class: 'soft' }, 'Filled and joined: no other row is as fast with more memory free.'));
}

function searchRows(rows) {
  const share = (title, key) => ({ title, value: (row) => row[key] / row.step_seconds, show: (row) => `${fixed((100 * row[key]) / row.step_seconds, 1)} %` });
  return section('rows', 'Rows', table('Layouts that fit, best first', [
    { title: 'row', value: (row) => row.number, explain: explainRow },
    { title: 'step', value: (row) => row.step_seconds, show: (row) => time(row.step_seconds * 1e9) },
    { title: 'tokens/s per device', value: (row) => row.tokens_per_second_per_device, show: (row) => count(row.tokens_per_second_per_device) },
    { title: 'MFU', value: (row) => row.mfu, show: (row) => `${fixed(100 * row.mfu, 1)} %` },
    { title: 'peak GiB', value: (row) => row.peak_bytes, show: (row) => gib(row.peak_bytes) },
    { title: 'free GiB', value: (row) => row.headroom_bytes, show: (row) => gib(row.headroom_bytes) },
    share('bubble', 'bubble_seconds'), share('communication', 'exposed_communication_seconds'),
    { title: 'layout', text: true, wide: true, value: meshText }], rows));
}

function robustness(found) {
  const text = `The first row stays the best of the rows in ${count(found.first_is_best)} of ${count(found.cases)} changes of one efficiency by 10 % or of routing.`;
  const cases = found.lost.length ? table('Changes under which another row is better', [
    { title: 'change', text: true, value: (row) => row.case }, { title: 'best row', value: (row) => row.best },
    { title: 'the first row loses', value: (row) => row.loss, show: (row) => `${fixed(100 * row.loss, 2)} %` }], found.lost) : null;
  return section('robustness', 'How sure the first row is', el('p', {}, text), cases);
}

function whyNot(lost) {
  return section('why-not', 'Why not', table('Classes of layouts that lost', [
    { title: 'class', text: true, value: (row) => row.name }, { title: 'layouts', value: (row) => row.count, show: (row) => count(row.count) },
    { title: 'reason', text: true, value: (row) => row.reason }, { title: 'detail', text: true, wide: true, value: (row) => row.detail }], lost));
}

// The result of a search: the Pareto front of step time and free memory, its rows, then all rows, how sure the first is, and why the others lost.
function searchPage() {
  const { search } = data, rows = search.best.map((row, index) => ({ ...row, number: index + 1 }));
  const sections = [...(rows.length ? [scatterSection(rows), searchRows(rows)] : []), ...(search.robustness ? [robustness(search.robustness)] : []), whyNot(search.why_not)];
  return { title: `${data.name}, search on ${count(search.devices)} devices`, header: searchHeader(search, rows), sections, draw: [] };
}

function searchHeader(search, [first]) {
  const found = [];
  if (first) {
    found.push(card('Step of the first row', time(first.step_seconds * 1e9), `no step is below ${time(search.bound_seconds * 1e9)}`), card('Tokens/s per device', count(first.tokens_per_second_per_device), `${count(first.tokens_per_second_per_device * search.devices)} of all devices`),
      card('MFU', percent(first.mfu)), card('Headroom', size(first.headroom_bytes), `peak ${size(first.peak_bytes)}`), card('Gap to the bound', search.gap === null ? 'not known' : percent(search.gap), search.gap_reason));
  }
  found.push(card('Meshes', count(search.candidates.meshes), `${count(search.candidates.evaluated)} exact evaluations`));
  return [
    headline(data.name, 'Search', Boolean(first), first ? `${count(search.best.length)} layouts are listed${search.complete ? '' : ', before every layout was looked at'}` : 'no layout does'),
    el('p', { class: 'soft' }, `${capital(search.objective.replaceAll('_', ' '))} on ${count(search.devices)} devices · source: ${data.source}`),
    el('p', { class: 'soft' }, `Times: ${search.basis}`),
    deck(found),
  ];
}

function meshText({ mesh, schedule }) {
  return `${meshLabel(mesh)}, ${NAMES[schedule.kind] || label(schedule.kind)}, ${count(schedule.num_microbatches)} × ${count(schedule.micro_batch_size)}`;
}

function rowText(row) {
  return `row ${row.number}: ${time(row.step_seconds * 1e9)}, headroom ${size(row.headroom_bytes)}; ${meshText(row)}`;
}

function explainRow(row) {
  const terms = Object.entries(row.terms).map(([name, seconds]) => [label(name), time(seconds * 1e9)]);
  explain(capital(rowText(row)), [['Options', row.set.map((text) => `--set '${text}'`).join(' ')], ['Plan', row.plan], ...terms]);
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
  const narrow = document.documentElement.clientWidth < 700, [width, height, left, bottom] = narrow ? [420, 320, 78, 40] : [980, 360, 84, 40];
  const status = el('p', { class: 'status', 'aria-live': 'polite' }, 'Point at a layout, or reach it with Tab.');
  const scale = (values, from, to) => {
    const [least, most] = [Math.min(...values), Math.max(...values)], room = (most - least) * 0.08 || Math.abs(most) * 0.05 || 1;
    return { ends: [...new Set([least, most])], at: (value) => from + ((value - least + room) / (most - least + 2 * room)) * (to - from) };
  };
  const across = scale(rows.map((row) => row.step_seconds), left, width - 20), up = scale(rows.map((row) => row.headroom_bytes), height - bottom, 30);
  const place = (row) => [across.at(row.step_seconds), up.at(row.headroom_bytes)];
  const text = (x, y, anchor, shown) => shape('text', { x, y, 'text-anchor': anchor, class: 'tick' }, shown);
  const front = rows.filter((row) => row.pareto).sort((a, b) => a.step_seconds - b.step_seconds);
  const points = rows.map((row) => {
    const [cx, cy] = place(row), show = () => status.replaceChildren(rowText(row));
    const open = (event) => { if (event.type === 'click' || event.key === 'Enter') explainRow(row); };
    return shape('circle', { cx, cy, r: 7, class: row.pareto ? 'point front' : 'point', tabindex: 0, role: 'button', 'aria-label': rowText(row), onmouseenter: show, onfocus: show, onclick: open, onkeydown: open }, shape('title', {}, rowText(row)));
  });
  const picture = shape('svg', { viewBox: `0 0 ${width} ${height}`, class: 'scatter', role: 'group', 'aria-label': 'Layouts by step time and free memory' },
    shape('path', { d: `M${left} 24V${height - bottom}H${width - 10}`, class: 'axis' }),
    ...across.ends.map((value, at) => text(across.at(value), height - bottom + 16, at ? 'end' : 'start', time(value * 1e9))),
    ...up.ends.map((value) => text(left - 6, up.at(value) + 4, 'end', size(value))),
    text(width - 10, height - 6, 'end', 'step time →'), text(2, 14, 'start', '↑ free memory of the fullest rank'),
    shape('polyline', { points: front.map((row) => place(row).join(',')).join(' '), class: 'front' }), ...points);
  return section('layouts', 'Step time and free memory', el('p', { class: 'lead' }, `${count(front.length)} of ${count(rows.length)} layouts are on the front: filled and joined, no other one is as fast with more memory free.`), picture, status,
    rowTable('Layouts of the front, fastest first', front));
}

function rowTable(caption, rows) {
  const share = (title, key) => ({ title, value: (row) => row[key] / row.step_seconds, show: (row) => percent(row[key] / row.step_seconds) });
  return table(caption, [
    { title: 'Row', value: (row) => row.number, explain: explainRow },
    { title: 'Step', value: (row) => row.step_seconds, show: (row) => time(row.step_seconds * 1e9) },
    { title: 'Tokens/s per device', value: (row) => row.tokens_per_second_per_device, show: (row) => count(row.tokens_per_second_per_device) },
    { title: 'MFU', value: (row) => row.mfu, show: (row) => percent(row.mfu) },
    { title: 'Peak GiB', value: (row) => row.peak_bytes, show: (row) => gib(row.peak_bytes) },
    { title: 'Free GiB', value: (row) => row.headroom_bytes, show: (row) => gib(row.headroom_bytes) },
    share('Bubble', 'bubble_seconds'), share('Waits for transfers', 'exposed_communication_seconds'),
    { title: 'Layout', text: true, wide: true, value: meshText }], rows);
}

function searchRows(rows) {
  return section('rows', 'All rows', rowTable('Layouts that fit, best first; a row’s number shows its command', rows));
}

function robustness(found) {
  const text = `The first row stays the best of the rows in ${count(found.first_is_best)} of ${count(found.cases)} changes of one efficiency by 10 % or of routing${found.not_timed ? ` (${count(found.not_timed)} more were not timed within the limit)` : ''}.`;
  const cases = found.lost.length ? table('Changes under which another row is better', [
    { title: 'Change', text: true, value: (row) => row.case }, { title: 'Best row', value: (row) => row.best },
    { title: 'The first row loses', value: (row) => row.loss, show: (row) => percent(row.loss, 2) }], found.lost) : null;
  return section('robustness', 'How sure the first row is', el('p', {}, text), cases);
}

function whyNot(lost) {
  return section('why-not', 'Why not', table('Classes of layouts that lost', [
    { title: 'Class', text: true, value: (row) => row.name }, { title: 'Layouts', value: (row) => row.count, show: (row) => count(row.count) },
    { title: 'Reason', text: true, value: (row) => row.reason }, { title: 'Detail', text: true, wide: true, value: (row) => row.detail }], lost));
}

// Two plans: what the second changes in step, memory, settings, cuts and traffic. The data are those of `megaplan diff --json`.
const SIDES = ['before', 'after'];

function comparisonPage() {
  const sections = [changedTime(), changedColumns(), changedRanks(), changedSettings(), movedLayers(), changedTraffic()];
  return { title: data.name, header: comparisonHeader(), sections: sections.filter(Boolean), draw: [] };
}

const signed = (text, value) => (value > 0 ? `+${text}` : text.replace('-', '−'));

function relative(before, after, digits = 1) {
  return before ? signed(percent(after / before - 1, digits), after - before) : '';
}

function comparisonHeader() {
  const { diff, files } = data, worst = SIDES.map((side) => extreme(side, 'peak_bytes', Math.max)), left = SIDES.map((side) => extreme(side, 'headroom_bytes', Math.min));
  return [
    headline(data.name, 'Comparison', diff.fits.after, diff.verdict),
    el('p', { class: 'soft' }, `Before: ${files.before} · after: ${files.after}`),
    deck([...timeCards(diff.time), pairCard('Peak of the fullest rank', worst, size), pairCard('Headroom of the fullest rank', left, size)]),
  ];
}

function extreme(side, key, of) {
  return of(...data.diff.ranks.filter((rank) => rank[side]).map((rank) => rank[side][key]));
}

function timeCards({ before, after }) {
  if (before.step_seconds === undefined || after.step_seconds === undefined) return [card('Step time', 'not timed', before.reason || after.reason)];
  return [pairCard('Step time', [before.step_seconds, after.step_seconds], (seconds) => time(seconds * 1e9)), pairCard('Tokens/s per device', [before.tokens_per_second_per_device, after.tokens_per_second_per_device], count),
    pairCard('MFU', [before.mfu, after.mfu], percent)];
}

function pairCard(name, [before, after], show) {
  const change = before > 0 ? relative(before, after) : '';
  return card(name, show(after), `${show(before)} before${change ? `, ${change}` : ''}`);
}

// Columns of a table for a pair of numbers and their difference.
function pairColumns(title, of, show) {
  const difference = (row) => of(row, 'after') - of(row, 'before');
  return [
    ...SIDES.map((side) => ({ group: title, title: capital(side), value: (row) => of(row, side), show: (row) => (of(row, side) === null ? '' : show(of(row, side))) })),
    { group: title, title: 'Change', value: difference, show: (row) => (difference(row) ? signed(show(difference(row)), difference(row)) : '0') },
  ];
}

function changedTime() {
  const { before, after } = data.diff.time;
  if (before.terms === undefined || after.terms === undefined) return null;
  const rows = [...new Set([...Object.keys(before.terms), ...Object.keys(after.terms)])].map((name) => ({ name, before: before.terms[name] || 0, after: after.terms[name] || 0 }));
  const shown = rows.filter((row) => row.before || row.after);
  return section('step-time', 'Step time', table('Terms of the modelled step', [
    { title: 'Term', text: true, value: (row) => label(row.name) }, ...pairColumns('Seconds', (row, side) => row[side], (seconds) => time(seconds * 1e9))], shown));
}

function changedColumns() {
  const { columns } = data.diff;
  if (!columns.length) return section('columns', 'Memory by column', el('p', {}, 'Every rank has the same bytes.'));
  const causes = (row) => row.causes.map(({ change, bytes }) => `${change} ${signed(size(bytes), bytes)}`).join(' · ') || row.why || '';
  return section('columns', 'Memory by column', table('Bytes of all ranks together at their peaks', [
    { title: 'Column', text: true, value: (row) => label(row.column) }, ...pairColumns('All ranks', (row, side) => row[`${side}_bytes`], size),
    { title: 'Changed by', text: true, wide: true, value: causes }], columns));
}

function changedRanks() {
  const { ranks } = data.diff;
  if (!ranks.length) return null;
  const of = (key) => (row, side) => (row[side] ? row[side][key] : null);
  const widest = Math.max(...ranks.flatMap((rank) => SIDES.map((side) => (rank[side] ? Math.max(rank[side].peak_bytes, rank[side].peak_bytes + rank[side].headroom_bytes) : 0)))) * 1.01;
  const share = (bytes) => `${(100 * bytes) / widest}%`;
  const bar = (rank, side) => {
    const found = rank[side];
    if (!found) return null;
    const usable = found.peak_bytes + found.headroom_bytes;
    return [el('span', { class: 'who' }, `${rank.label}, ${side}`), el('div', { class: 'bar', role: 'img', 'aria-label': `${rank.label} ${side}: ${size(found.peak_bytes)} of ${size(usable)} usable` },
      el('span', { style: { left: '0%', width: share(found.peak_bytes), background: `var(--c${side === 'before' ? 9 : 0})` } }), el('i', { style: { left: share(usable) } })),
    el('span', { class: `sum${found.fits ? '' : ' bad'}` }, `${gib(found.peak_bytes)} GiB${found.fits ? '' : ', over'}`)];
  };
  const columns = [{ title: 'Ranks', text: true, value: (row) => row.first, show: (row) => row.label }, ...pairColumns('Peak', of('peak_bytes'), size), ...pairColumns('Headroom', of('headroom_bytes'), size)];
  const left = data.left_out.ranks ? el('p', { class: 'bad' }, `${count(data.left_out.ranks)} more changes of ranks with smaller peaks are not shown; megaplan diff --json has them.`) : null;
  return section('ranks', 'Memory by rank', left, el('div', { class: 'bars' }, ranks.map((rank) => SIDES.map((side) => bar(rank, side)))), el('p', { class: 'soft' }, 'Dashed lines: usable memory.'),
    table('Peak and headroom of ranks that hold other bytes', columns, ranks));
}

function changedSettings() {
  const kinds = { inputs: 'Spec', training: 'Training', decisions: 'Decision', other: 'Other' };
  const rows = Object.entries(kinds).flatMap(([key, kind]) => data.diff[key].map((row) => ({ kind, ...row })));
  const shown = (value) => (value === null || value === undefined ? '–' : typeof value === 'number' ? value.toLocaleString('en-US', { maximumFractionDigits: 9 }) : typeof value === 'string' ? value : JSON.stringify(value));
  if (!rows.length) return section('settings', 'Settings', el('p', {}, 'No setting differs.'));
  return section('settings', 'Settings', table('Settings that differ', [
    { title: 'Kind', text: true, value: (row) => row.kind }, { title: 'Key', text: true, value: (row) => row.key },
    { title: 'Before', text: true, wide: true, value: (row) => shown(row.before) }, { title: 'After', text: true, wide: true, value: (row) => shown(row.after) }], rows));
}

function movedLayers() {
  const { moves, owners } = data.diff, place = ({ pp_rank: rank, chunk }) => `PP ${rank} chunk ${chunk}`, places = (all) => all.map(place).join(', ') || '–';
  const rows = [...moves.map((move) => ({ what: `Layers ${move.layers[0]}–${move.layers[1] - 1} (${move.letters})`, before: place(move.before), after: place(move.after) })),
    ...owners.map((owner) => ({ what: owner.block, before: places(owner.before), after: places(owner.after) }))];
  if (!rows.length) return null;
  return section('layers', 'Layers and owners', table('Parts of the model that another rank holds', [
    { title: 'Part', text: true, wide: true, value: (row) => row.what }, { title: 'Before', text: true, value: (row) => row.before }, { title: 'After', text: true, value: (row) => row.after }], rows));
}

function changedTraffic() {
  const rows = new Map();
  for (const side of SIDES) {
    for (const row of data.diff.traffic[side] || []) {
      const key = `${row.axis} ${row.what}`;
      rows.set(key, { before: 0, after: 0, ...rows.get(key), axis: row.axis, what: row.what, [side]: row.rank_bytes });
    }
  }
  if (!rows.size) return null;
  const bytes = (value) => (value < 0 ? `−${gigabytes(-value)}` : gigabytes(value));
  return section('traffic', 'Traffic between ranks', table('Bytes that a rank sends in a step', [
    { title: 'Axis', text: true, value: (row) => label(row.axis) }, { title: 'Exchange', text: true, value: (row) => capital(row.what) }, ...pairColumns('A rank', (row, side) => row[side], bytes)], [...rows.values()]));
}

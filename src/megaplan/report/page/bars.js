// Memory of every distinct rank by column, as stacked bars with the usable line, and the table of the same numbers.
function peakPhase(rank) {
  return data.phases.indexOf(rank.peak_phase);
}

function memoryByRank() {
  const { ranks } = data.estimate, pictures = el('div');
  const used = data.columns.map((_, at) => at).filter((at) => ranks.some((rank) => rank.cells.some((cells) => cells[at])));
  const draw = (phase) => pictures.replaceChildren(bars(ranks, (rank) => (phase === 'peak' ? peakPhase(rank) : data.phases.indexOf(phase))));
  draw('peak');
  const phases = [['peak', 'Peak of each rank'], ...data.phases.map((phase) => [phase, label(phase)])];
  const left = data.left_out.ranks ? el('p', { class: 'bad' }, `${count(data.left_out.ranks)} more distinct ranks with smaller peaks are not shown; megaplan estimate --json has them.`) : null;
  return section('memory', 'Memory by rank', left, el('div', { class: 'controls' }, choice('Phase', phases, draw)),
    legend(used.map((at) => [`c${at}`, label(data.columns[at])])), pictures, rankTable(ranks, used));
}

function bars(ranks, phaseOf) {
  const limits = ranks.map((rank) => deviceOf(data.estimate, rank).usable_bytes), usable = Math.max(...limits);
  const sums = ranks.map((rank) => rank.cells[phaseOf(rank)].reduce((a, b) => a + b, 0)), widest = Math.max(usable, ...sums) * 1.01;
  const share = (bytes) => `${(100 * bytes) / widest}%`;
  const rows = ranks.map((rank, index) => {
    const phase = phaseOf(rank);
    let from = 0;
    const parts = rank.cells[phase].map((bytes, at) => {
      const column = data.columns[at];
      const part = el('span', { title: `${label(column)}: ${size(bytes)}`, style: { left: share(from), width: share(bytes), background: `var(--c${at})` }, onclick: () => explainCell(rank, phase, column) });
      from += bytes;
      return bytes ? part : null;
    });
    const bar = el('div', { class: 'bar', role: 'img', 'aria-label': `${rank.label}: ${size(sums[index])} of ${size(limits[index])} usable, in ${label(data.phases[phase]).toLowerCase()}` }, parts, el('i', { style: { left: share(limits[index]) } }));
    return [el('span', { class: 'who' }, capital(rank.label)), bar, el('span', { class: `sum${sums[index] > limits[index] ? ' bad' : ''}` }, `${gib(sums[index])} GiB${sums[index] > limits[index] ? ', over' : ''}`)];
  });
  return el('div', {}, el('div', { class: 'bars' }, rows), el('p', { class: 'soft' }, (data.estimate.device.pools || [data.estimate.device]).map((device) => `Dashed line${data.estimate.device.pools ? ` of ${deviceName(device.name)}` : ''}: ${size(device.usable_bytes)} usable, of ${size(device.capacity_bytes)}.`).join(' ')));
}

function rankTable(ranks, used) {
  const column = (at) => ({
    group: GROUPS[data.columns[at]][0], title: GROUPS[data.columns[at]][1], value: (rank) => rank.cells[peakPhase(rank)][at], show: (rank) => gib(rank.cells[peakPhase(rank)][at]), explain: (rank) => explainCell(rank, peakPhase(rank), data.columns[at]),
  });
  const sum = (title, key, rule) => ({
    title, value: (rank) => rank[key], show: (rank) => gib(rank[key]), explain: (rank) => explain(`${title}, ${rank.label}`, [['Bytes', `${count(rank[key])} (${size(rank[key])})`], ['Formula', rule]]),
  });
  const reserve = `capacity ${(data.estimate.device.pools || [data.estimate.device]).map((device) => count(device.capacity_bytes)).join(' or ')} − reserve`, empty = data.columns.filter((_, at) => !used.includes(at));
  return [table('GiB at the peak of each distinct rank; a number shows its formula', [
    { title: 'Ranks', text: true, value: (rank) => rank.ranks[0][0], show: (rank) => capital(rank.label) },
    { title: 'PP', value: (rank) => rank.coordinate.pp },
    sum('Peak', 'peak_bytes', 'the sum of the columns in the phase with the largest sum'),
    sum('Headroom', 'headroom_bytes', `usable − peak; usable = ${reserve}`),
    { title: 'Fits', text: true, value: (rank) => (rank.fits ? 'yes' : 'no'), mark: (rank) => (rank.fits ? '' : 'bad') },
    ...used.map(column),
    { title: 'Peak in', group: 'Rank', text: true, value: (rank) => label(rank.peak_phase) },
    { title: 'Parameters', group: 'Rank', value: (rank) => rank.parameters, show: (rank) => count(rank.parameters) },
  ], ranks), empty.length ? el('p', { class: 'soft' }, `Zero on every rank: ${empty.map((name) => label(name).toLowerCase()).join(', ')}.`) : null];
}

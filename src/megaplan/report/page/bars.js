// Memory of every distinct rank by column, as stacked bars with the usable line, and the table of the same numbers.
function peakPhase(rank) {
  return data.phases.indexOf(rank.peak_phase);
}

function memoryByRank() {
  const { ranks } = data.estimate, pictures = el('div');
  const draw = (phase) => pictures.replaceChildren(bars(ranks, (rank) => (phase === 'peak' ? peakPhase(rank) : data.phases.indexOf(phase))));
  draw('peak');
  const phases = [['peak', 'peak of each rank'], ...data.phases.map((phase) => [phase, phase])];
  const left = data.left_out.ranks ? el('p', { class: 'bad' }, `${count(data.left_out.ranks)} more distinct ranks with smaller peaks are not shown; megaplan estimate --json has them.`) : null;
  return section('memory', 'Memory by rank', left, el('div', { class: 'controls' }, choice('Phase', phases, draw)),
    legend(data.columns.map((column, index) => [`c${index}`, column])), pictures, rankTable(ranks));
}

function bars(ranks, phaseOf) {
  const usable = data.estimate.device.usable_bytes;
  const sums = ranks.map((rank) => rank.cells[phaseOf(rank)].reduce((a, b) => a + b, 0)), widest = Math.max(usable, ...sums);
  const percent = (bytes) => `${(100 * bytes) / widest}%`;
  const rows = ranks.map((rank, index) => {
    const phase = phaseOf(rank);
    let from = 0;
    const parts = rank.cells[phase].map((bytes, at) => {
      const column = data.columns[at];
      const part = el('span', { title: `${column}: ${size(bytes)}`, style: { left: percent(from), width: percent(bytes), background: `var(--c${at})` }, onclick: () => explainCell(rank, phase, column) });
      from += bytes;
      return bytes ? part : null;
    });
    const bar = el('div', { class: 'bar', role: 'img', 'aria-label': `${rank.label}: ${size(sums[index])} of ${size(usable)} usable, in ${data.phases[phase]}` }, parts, el('i', { style: { left: percent(usable) } }));
    return [el('span', {}, rank.label), bar, el('span', { class: sums[index] > usable ? 'bad' : '' }, `${gib(sums[index])} GiB${sums[index] > usable ? ' OVER' : ''}`)];
  });
  return el('div', { class: 'bars' }, rows, el('span'), el('span', { class: 'soft' }, `dashed line: usable ${size(usable)}`), el('span'));
}

function rankTable(ranks) {
  const column = (name, at) => ({
    title: name, value: (rank) => rank.cells[peakPhase(rank)][at], show: (rank) => gib(rank.cells[peakPhase(rank)][at]), explain: (rank) => explainCell(rank, peakPhase(rank), name),
  });
  const sum = (name, key, rule) => ({
    title: name, value: (rank) => rank[key], show: (rank) => gib(rank[key]), explain: (rank) => explain(`${name}, ${rank.label}`, [['bytes', `${count(rank[key])} (${size(rank[key])})`], ['formula', rule]]),
  });
  const reserve = `capacity ${count(data.estimate.device.capacity_bytes)} − reserve`;
  return table('GiB at the peak of each distinct rank; a number shows its formula', [
    { title: 'ranks', text: true, value: (rank) => rank.ranks[0][0], show: (rank) => rank.label },
    { title: 'pp', value: (rank) => rank.coordinate.pp },
    sum('peak', 'peak_bytes', 'the sum of the columns in the phase with the largest sum'),
    sum('headroom', 'headroom_bytes', `usable − peak; usable = ${reserve}`),
    { title: 'fits', text: true, value: (rank) => (rank.fits ? 'yes' : 'NO') },
    { title: 'peak in', text: true, value: (rank) => rank.peak_phase },
    ...data.columns.map(column),
    { title: 'parameters', value: (rank) => rank.parameters, show: (rank) => count(rank.parameters) },
  ], ranks);
}

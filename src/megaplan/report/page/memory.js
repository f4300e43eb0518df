// Memory of the pipeline ranks over a step, with the usable line.
const MOST_CURVES = 8;

function memoryOverTime() {
  const curves = unpackMemory(data.step), peaks = curves.map(({ sizes }) => Math.max(...sizes));
  const worst = peaks.indexOf(Math.max(...peaks)), box = plotBox('Memory over time'), shown = { plot: null };
  const draw = (value) => {
    const ranks = value === 'all' ? curves.map((_, rank) => rank) : [Number(value)];
    if (shown.plot) plots.splice(plots.indexOf(shown.plot), 1), shown.plot.destroy();
    shown.plot = memoryPlot(box, curves, ranks);
    if (range) shown.plot.setScale('x', { min: range[0], max: range[1] });
  };
  const each = curves.map((_, rank) => [String(rank), `PP ${rank}`]);
  const first = curves.length <= MOST_CURVES ? 'all' : String(worst);
  const picker = choice('Ranks', curves.length <= MOST_CURVES ? [['all', 'All'], ...each] : each, draw);
  picker.querySelector('select').value = first;
  const rows = curves.map((curve, rank) => ({ rank, base: data.step.memory.ranks[rank].start, peak: peaks[rank], at: curve.times[curve.sizes.indexOf(peaks[rank])] }));
  const shownBytes = (key) => ({ title: `${capital(key)}, GiB`, value: (row) => row[key], show: (row) => gib(row[key]) });
  const made = section('over-time', 'Memory over time',
    el('p', { class: 'soft' }, 'Microbatches come and go as the replayed schedule says; all else (states, gradients, gathered parameters, the running block) is drawn as constant, so that the highest point is the peak of forward and backward.'),
    el('div', { class: 'controls' }, picker, zoomControls()), box,
    behind('Table: memory over time', () => [table('Memory of the pipeline ranks', [
      { title: 'PP', value: (row) => row.rank }, { ...shownBytes('base'), title: 'Without microbatches, GiB' }, shownBytes('peak'), { title: 'First at', value: (row) => row.at, show: (row) => time(row.at) }], rows)]));
  return [made, () => draw(first)];
}

function memoryPlot(box, curves, ranks) {
  const usable = Math.min(...(data.estimate.device.pools || [data.estimate.device]).map((device) => device.usable_bytes)) / 2 ** 30, all = data.step.makespan;
  const tables = ranks.map((rank) => [curves[rank].times, curves[rank].sizes.map((bytes) => bytes / 2 ** 30)]);
  const values = uPlot.join([...tables, [[0, all], [usable, usable]]]);
  const shown = (_, value) => (value === null || value === undefined ? '' : `${fixed(value, 2)} GiB`);
  const series = ranks.map((rank, at) => ({ label: `PP ${rank}`, stroke: () => colour(ranks.length === 1 ? 'held' : `c${(3 * rank) % 12}`), width: 2, paths: uPlot.paths.stepped({ align: 1 }), spanGaps: true, points: { show: false }, value: shown, dash: at > 3 ? [8, 3] : undefined }));
  const limit = { label: 'Usable', stroke: () => colour('bad'), dash: [6, 4], width: 1.5, spanGaps: true, points: { show: false }, value: shown };
  return addPlot(box, {
    height: 300, series: [{ label: 'Time', value: (_, value) => (value === null ? '' : time(value)) }, ...series, limit],
    scales: { y: { range: (_, low, high) => [0, high * 1.05] } }, axis: { values: (_, splits) => splits.map((value) => `${value} GiB`) },
  }, values);
}

// The predicted time of a step by term, or why there is none.
function stepTime() {
  const step = data.estimate.time;
  if (step.reason) return section('step-time', 'Time of a step', el('p', {}, `No time is predicted: ${step.reason}.`));
  const rows = Object.entries(step.terms).map(([name, seconds]) => ({ name, seconds })), total = rows.reduce((sum, row) => sum + row.seconds, 0) || 1;
  const rule = (name) => data.terms[`step_${name}`] || data.terms[{ exposed_data: 'step_data', grouped_gemm: 'step_grouped', gaps: 'step_launch' }[name]] || {};
  return section('step-time', 'Time of a step',
    el('p', {}, `${fixed(step.step_seconds, 3)} s, 80 % interval ${fixed(step.interval[0], 3)} to ${fixed(step.interval[1], 3)} s (${step.basis}, ${step.calibration})`),
    table('Seconds of the busiest stage by term, and of what a step adds', [
      { title: 'term', text: true, value: (row) => row.name.replaceAll('_', ' ') },
      { title: 'seconds', value: (row) => row.seconds, show: (row) => fixed(row.seconds, 6), explain: (row) => explain(row.name.replaceAll('_', ' '), [['seconds', fixed(row.seconds, 6)], ...Object.entries(rule(row.name))]) },
      { title: 'share', value: (row) => row.seconds / total, show: (row) => `${fixed((100 * row.seconds) / total, 1)} %` }], rows));
}

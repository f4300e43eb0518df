// The predicted time of a step by term, or why there is none.
function stepTime() {
  const step = data.estimate.time;
  if (step.reason) return section('step-time', 'Time of a step', el('p', {}, `No time is predicted: ${step.reason}.`));
  const rows = Object.entries(step.terms).map(([name, seconds]) => ({ name, seconds })).filter(({ seconds }) => seconds > 0).sort((a, b) => b.seconds - a.seconds), total = rows.reduce((sum, row) => sum + row.seconds, 0) || 1;
  const rule = (name) => data.terms[`step_${name}`] || data.terms[{ exposed_data: 'step_data', grouped_gemm: 'step_grouped', gaps: 'step_launch' }[name]] || {};
  const about = (row) => explain(label(row.name), [['Seconds', fixed(row.seconds, 6)], ...Object.entries(rule(row.name)).map(([field, text]) => [capital(field), text])]);
  return section('step-time', 'Time of a step',
    el('p', { class: 'lead' }, `${time(step.step_seconds * 1e9)}, 80 % interval ${time(step.interval[0] * 1e9)} to ${time(step.interval[1] * 1e9)} (${step.basis}, ${step.calibration}).`),
    table('Seconds of the busiest stage by term, and of what a step adds', [
      { title: 'Term', text: true, value: (row) => label(row.name) },
      { title: 'Seconds', value: (row) => row.seconds, show: (row) => fixed(row.seconds, 6), explain: about },
      { title: 'Share', value: (row) => row.seconds / total, show: (row) => percent(row.seconds / total) },
      { title: 'Of the step', text: true, value: (row) => row.seconds / total, show: (row) => meter(row.seconds / total, percent(row.seconds / total)) }], rows));
}

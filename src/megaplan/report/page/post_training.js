// A post-training plan: its main numbers, memory by phase on the device and on the host, and the time of an iteration.
function postTraining(plan) {
  if (!plan) return null;
  if (plan.reason) return section('post-training', 'Post-training', el('p', {}, `No plan is stated: ${plan.reason}`));
  const { iteration_seconds: iteration, engine, lengths } = plan, peak = plan.memory.find(({ name }) => name === plan.peak_phase);
  const room = plan.host_capacity_bytes === null ? 'of a node; its memory is not given' : `of ${size(plan.host_capacity_bytes)} a node`;
  return section('post-training', 'Post-training',
    el('p', { class: 'lead' }, el('strong', { class: plan.fits ? 'good' : 'bad' }, plan.fits ? '✓ Fits' : '✕ Does not fit'), `: ${plan.placement} on ${count(plan.num_devices)} devices, ${engine.name} with ${count(engine.num_groups)} groups.`),
    deck([
      card('Iteration', duration(iteration.value), between(iteration, duration)), card('Tokens/s per device', count(plan.tokens_per_second_per_device), `${short(plan.tokens)} tokens an iteration`),
      card('Device peak', size(plan.peak_bytes), `in ${label(plan.peak_phase).toLowerCase()}; ${peak.headroom_bytes < 0 ? `${size(-peak.headroom_bytes)} too much` : `${size(peak.headroom_bytes)} free`}`), card('Host peak', size(plan.host_peak_bytes), room),
      card('Responses', `${count(lengths.mean)} tokens`, `mean; half below ${count(lengths.p50)}, longest ${count(lengths.longest)} of at most ${count(lengths.limit)}`)]),
    table('Time of an iteration', [
      { title: 'Phase', text: true, value: (row) => label(row.name) }, { title: 'Devices', text: true, value: (row) => row.pool }, { title: 'Seconds', value: (row) => row.seconds.value, show: (row) => fixed(row.seconds.value, 2) },
      { title: 'Low', value: (row) => row.seconds.low, show: (row) => fixed(row.seconds.low, 2) }, { title: 'High', value: (row) => row.seconds.high, show: (row) => fixed(row.seconds.high, 2) },
      { title: 'Of the iteration', text: true, value: (row) => row.seconds.value / iteration.value, show: (row) => meter(row.seconds.value / iteration.value, percent(row.seconds.value / iteration.value)) },
      { title: 'Basis', text: true, value: (row) => row.basis }], plan.times),
    el('p', { class: 'soft' }, plan.pools.map((pool) => `${capital(pool.name)}: ${count(pool.num_devices)} devices, idle ${percent(pool.idle_share)} of an iteration.`).join(' ')),
    phaseTable('Memory of the fullest device by phase, GiB', plan, 'columns', 'total_bytes'), phaseTable('Host memory of the fullest node by phase, GiB', plan, 'host_columns', 'host_total_bytes'),
    behind('Table: every figure of the plan', () => [figureTable(plan.figures)]));
}

function phaseTable(caption, plan, key, total) {
  const columns = [...new Set(plan.memory.flatMap((phase) => Object.keys(phase[key])))];
  return table(caption, [
    { title: 'Phase', text: true, value: (row) => label(row.name) }, { title: 'Total', value: (row) => row[total], show: (row) => gib(row[total]) },
    ...(key === 'columns' ? [{ title: 'Headroom', value: (row) => row.headroom_bytes, show: (row) => gib(row.headroom_bytes), mark: (row) => (row.headroom_bytes < 0 ? 'bad' : '') }] : []),
    ...columns.map((name) => ({ title: label(name), value: (row) => row[key][name] || 0, show: (row) => (row[key][name] ? gib(row[key][name]) : '–') }))], plan.memory);
}

// The name of the plan, whether it fits, and its main numbers.
function header() {
  const { estimate, mesh } = data, worst = estimate.ranks[0], step = estimate.time;
  const axes = Object.entries(mesh).filter(([name, degree]) => degree > 1 && name !== 'world_size').map(([name, degree]) => `${name} ${degree}`);
  const facts = [
    ['largest peak', size(worst.peak_bytes)],
    ['headroom', size(worst.headroom_bytes)],
    ['usable', size(estimate.device.usable_bytes)],
    ['parameters', count(estimate.totals.parameters)],
    ['active parameters', count(estimate.totals.active_parameters)],
    ['largest micro-batch that fits', estimate.largest_micro_batch === null ? 'none' : count(estimate.largest_micro_batch)],
  ];
  if (step.step_seconds !== undefined) {
    facts.push(['predicted step', `${fixed(step.step_seconds, 3)} s`], ['tokens/s per device', count(step.tokens_per_second_per_device)], ['MFU', `${fixed(100 * step.mfu, 1)} %`]);
  }
  return [
    el('h1', {}, data.name),
    el('p', { class: 'soft' }, `${count(mesh.world_size)} × ${estimate.device.name}, host ${data.host}${axes.length ? `, ${axes.join(' ')}` : ''}, ${data.schedule.kind}, ${count(data.schedule.num_microbatches)} microbatches`),
    el('p', { class: 'soft' }, `estimate of ${data.source}${data.changes.length ? ` with ${data.changes.join(', ')}` : ''}`),
    el('p', { class: `verdict ${estimate.fits ? 'good' : 'bad'}`, id: 'verdict' }, estimate.fits ? 'fits' : 'does not fit', `: the largest peak is ${size(worst.peak_bytes)}, on ${worst.label}`),
    el('dl', { class: 'facts' }, facts.map(([name, text]) => el('div', {}, el('dt', {}, name), el('dd', {}, text)))),
    diagnostics(estimate.diagnostics),
  ];
}

function diagnostics(found) {
  if (!found.length) return null;
  return el('details', { open: true }, el('summary', {}, `${found.length} ${found.length === 1 ? 'diagnostic' : 'diagnostics'}`),
    el('ul', {}, found.map((item) => el('li', {}, `${item.severity} ${item.code}: ${item.detail || item.summary}`, item.hints.map((hint) => el('p', { class: 'soft' }, hint))))));
}

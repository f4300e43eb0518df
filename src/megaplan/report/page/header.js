// The name of the plan, whether it fits, and its main numbers.
function header() {
  const { estimate, mesh } = data, worst = estimate.ranks[0];
  return [
    headline(data.name, 'Plan', estimate.fits, `the fullest rank holds ${size(worst.peak_bytes)} of ${size(deviceOf(estimate, worst).usable_bytes)} usable, on ${worst.label}`),
    el('p', { class: 'soft' }, `${deviceNames(estimate, mesh.world_size)} · ${meshLabel(mesh)} · ${NAMES[data.schedule.kind] || label(data.schedule.kind)}, ${count(data.schedule.num_microbatches)} microbatches · host ${data.host}`),
    el('p', { class: 'soft' }, `Source: ${data.source}${data.changes.length ? ` with ${data.changes.join(', ')}` : ''}`),
    deck(cards(data)),
    diagnostics(estimate.diagnostics),
  ];
}

function headline(name, kind, fits, text) {
  return el('div', { class: 'headline' }, el('div', {}, el('p', { class: 'kicker' }, `megaplan · ${kind}`), el('h1', {}, name)), verdict(fits, el('span', { class: 'why' }, `: ${text}`)));
}

function cards({ estimate, mesh, run }) {
  const worst = estimate.ranks[0], { capacity_bytes: capacity, usable_bytes: usable } = deviceOf(estimate, worst), step = estimate.time;
  const left = worst.headroom_bytes, spare = left < 0 ? `${size(-left)} too much` : `${size(left)} free of ${size(usable)} usable`;
  const found = [card('Peak of the fullest rank', size(worst.peak_bytes), `${percent(worst.peak_bytes / capacity, 0)} of ${size(capacity)}; ${spare}`, meter(worst.peak_bytes / usable, `${percent(worst.peak_bytes / usable)} of the usable memory`))];
  if (step.step_seconds === undefined) found.push(card('Step time', 'not timed', step.reason));
  else {
    found.push(card('Step time', time(step.step_seconds * 1e9), `80 % interval ${time(step.interval[0] * 1e9)} – ${time(step.interval[1] * 1e9)}`),
      card('Tokens/s per device', count(step.tokens_per_second_per_device), `${count(step.tokens_per_second_per_device * mesh.world_size)} of all devices`), card('MFU', percent(step.mfu), `${step.basis}, ${step.calibration}`));
  }
  found.push(card('Parameters', short(estimate.totals.parameters), `${short(estimate.totals.active_parameters)} active · ${count(estimate.totals.parameters)} in total${towerNames(estimate)}`), card('Devices', deviceNames(estimate, mesh.world_size), meshLabel(mesh)));
  if (run && run.days) found.push(...runCards(run));
  found.push(card('Largest micro-batch', estimate.largest_micro_batch === null ? 'none' : count(estimate.largest_micro_batch), 'that fits, with all else unchanged'));
  return found;
}

function diagnostics(found) {
  if (!found.length) return null;
  const line = (item) => el('li', {}, el('span', { class: `tag ${item.severity}` }, item.severity), ` ${item.code}: ${item.detail || item.summary}`, item.hints.map((hint) => el('p', { class: 'soft hint' }, hint)));
  return el('details', { class: 'notes', open: found.some((item) => item.severity === 'error') }, el('summary', {}, `${found.length} ${found.length === 1 ? 'note' : 'notes'} of the estimate`), el('ul', {}, found.map(line)));
}

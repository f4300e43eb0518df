// The whole run: days and cost in the headline; where time goes, checkpoints and what would gain in a section.
function runCards(run) {
  const found = [card(`Days to ${short(run.tokens)} tokens`, amount(run.days.value), `${between(run.days, amount)}${run.days.low === run.days.high ? '' : ' · '}goodput ${fine(run.goodput)}`)];
  if (run.cost) found.push(card('Cost', short(run.cost.value), `${between(run.cost, short)} · ${amount(run.cost_per_million_tokens.value)} for 1 M tokens`));
  else found.push(card('Device hours', short(run.device_hours.value), between(run.device_hours, short)));
  return found;
}

function runTotals(run) {
  const rows = [['Days', run.days], ['Device hours', run.device_hours], ['Cost', run.cost], ['Cost of 1 M tokens', run.cost_per_million_tokens], ['Energy, kWh', run.energy_kwh], ['Energy of a token, J', run.joules_per_token], ['CO₂e, kg', run.carbon_kg]];
  return rows.filter(([, spread]) => spread).map(([name, spread]) => ({ name, ...spread }));
}

function wholeRun(run) {
  if (!run) return null;
  if (run.reason) return section('run', 'The whole run', el('p', {}, `No run is stated: ${run.reason}`));
  const losses = Object.entries(run.losses).map(([name, share]) => ({ name: label(name), share })).filter(({ share }) => share > 0).sort((a, b) => b.share - a.share);
  const causes = Object.entries(run.days_by_cause).map(([name, days]) => ({ name: label(name), days })).filter(({ days }) => days > 0);
  const spread = (title, key) => ({ title, value: (row) => row[key], show: (row) => amount(row[key]) });
  const saved = run.checkpoints, storage = saved.classes.find(({ name }) => name === saved.storage);
  return section('run', 'The whole run',
    el('p', { class: 'lead' }, `${short(run.tokens)} tokens are ${count(run.steps)} steps of ${short(run.tokens_of_step)}. ${amount(run.interruptions)} interruptions are expected, one every ${duration(run.mtbf_hours * 3600)}; ${fine(run.goodput)} of the time is in steps that are kept.`),
    el('div', { class: 'columns' },
      table('Totals, with the ends of the step’s 80 % interval', [{ title: 'Total', text: true, value: (row) => row.name }, spread('Expected', 'value'), spread('Low', 'low'), spread('High', 'high')], runTotals(run)),
      table('Days by cause', [{ title: 'Cause', text: true, value: (row) => row.name }, { title: 'Days', value: (row) => row.days, show: (row) => amount(row.days) }], causes),
      table('Time that is lost', [{ title: 'Lost to', text: true, value: (row) => row.name }, { title: 'Share', value: (row) => row.share, show: (row) => percent(row.share, 3) }, { title: 'Time', value: (row) => row.share, show: (row) => duration(row.share * run.days.value * 86400) }], losses)),
    el('p', {}, `A checkpoint has ${size(saved.whole_bytes)}. A save every ${count(run.interval.steps)} steps (${duration(run.interval.seconds)}, ${run.interval.chosen ? 'the best interval' : 'given'}) stops training for ${duration(saved.stall_seconds)}; writing to ${storage.name} storage takes ${duration(storage.write_seconds)}, reading ${duration(storage.read_seconds)}.`),
    run.gains.length ? table('Changes that would gain', [{ title: 'Change', text: true, value: (row) => row.name }, { title: 'Goodput', value: (row) => row.goodput, show: (row) => fine(row.goodput) }, { title: 'Days', value: (row) => row.days, show: (row) => amount(row.days) }, { title: 'Needs', text: true, wide: true, value: (row) => row.note }], run.gains) : null,
    behind('Table: every figure of the run', () => [figureTable(run.figures)]));
}

function figureTable(figures) {
  return table('Figures with basis and source', [{ title: 'Figure', text: true, value: (row) => label(row.name) }, { title: 'Value', value: (row) => row.value, show: (row) => amount(row.value) }, { title: 'Unit', text: true, value: (row) => row.unit }, { title: 'Basis', text: true, value: (row) => row.basis }, { title: 'Source', text: true, wide: true, value: (row) => row.source }], figures);
}

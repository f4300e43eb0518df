// Layers by slot, with cuts, owners and the blocks outside the layers.
function layerMap() {
  const { slots, layers, split } = data, families = [...new Set(layers.map(([family]) => family))];
  const stages = data.estimate.stages;
  const rows = slots.map((slot) => ({ ...slot, parameters: stages[slot.slot].parameters, cost: split ? split.costs[slot.slot] : null }));
  const parts = (names) => [...new Set(names.map((name) => (name.startsWith('vision.') ? 'vision' : name)))];
  const owned = (slot) => parts(slot.owns).map((name) => `${name.replaceAll('_', ' ')}${slot.copies.includes(name) ? '*' : ''}`);
  const lines = rows.map((slot) => {
    const [start, stop] = slot.layers, cells = layers.slice(start, stop);
    const boxes = cells.map(([family, parameters], at) => el('span', { class: `f${family}`, title: `layer ${start + at}, ${data.families[family]}: ${count(parameters)} parameters` }, family));
    const ends = owned(slot).map((name) => el('span', { class: 'end' }, name));
    const label = `Slot ${slot.slot} · PP ${slot.pp_rank}${data.mesh.vpp > 1 ? ` · chunk ${slot.chunk}` : ''}`;
    const what = stop > start ? `layers ${start}-${stop - 1}` : 'no layer';
    return el('div', { class: 'slot' }, el('div', {}, el('div', {}, label), el('div', { class: 'soft' }, `${capital(what)}, ${short(slot.parameters)} parameters`)),
      el('div', { class: 'cells', role: 'img', 'aria-label': `${label}, ${what}: ${cells.map(([family]) => family).join('')}${ends.length ? `; ${owned(slot).join(', ')}` : ''}` }, boxes, ends));
  });
  const copies = slots.some((slot) => slot.copies.length) ? el('p', { class: 'soft' }, '* A copy of a block that another slot owns; their gradients are summed') : null;
  return section('layers', 'Layers and cuts', quality(split), el('ul', { class: 'legend' }, families.map((family) => el('li', {}, el('span', { class: `swatch f${family}` }), `${family}: ${data.families[family]}`))),
    el('div', { class: 'map' }, lines), copies, slotTable(rows, split, owned), behind('Table: layers', layerTable));
}

function quality(split) {
  if (!split) return null;
  const shown = (value) => (split.unit === 'ns' ? time(value) : `${short(value)} ${split.unit.replaceAll('_', ' ')}`), gap = split.gap ? `gap ${shown(split.gap)}` : 'optimal';
  return [el('p', { class: 'lead' }, `${capital(split.mode)} split for ${split.objective.replaceAll('_', ' ')}: ${split.measures === 'step' ? 'step' : `largest ${split.measures}`} ${shown(split.value)}, lower bound ${shown(split.lower_bound)}, ${gap}.`),
    split.reason ? el('p', {}, `Reason: ${split.reason}`) : null].filter(Boolean).reduce((box, line) => (box.append(line), box), el('div'));
}

function slotTable(rows, split, owned) {
  const total = split ? split.costs.reduce((a, b) => a + b, 0) || 1 : 1;
  const share = { title: 'Cost share', value: (row) => row.cost / total, show: (row) => `${fixed((100 * row.cost) / total, 1)} %`, explain: (row) => explain(`Cost of slot ${row.slot}`, [[capital(split.unit), count(row.cost)], ['Formula', 'the sum of the costs of its layers and of the ends that it holds, as the cuts were chosen by']]) };
  return table('Slots in model order', [
    { title: 'Slot', value: (row) => row.slot }, { title: 'PP', value: (row) => row.pp_rank }, { title: 'Chunk', value: (row) => row.chunk },
    { title: 'First layer', value: (row) => row.layers[0] }, { title: 'Layers', value: (row) => row.layers[1] - row.layers[0] },
    { title: 'Parameters', value: (row) => row.parameters, show: (row) => count(row.parameters) }, ...(split ? [share] : []),
    { title: 'Also holds', text: true, wide: true, value: (row) => owned(row).join(', ') }], rows);
}

function layerTable() {
  const rows = data.layers.map(([family, parameters], layer) => ({ layer, family, parameters, slot: data.slots.find(({ layers }) => layers[0] <= layer && layer < layers[1]) }));
  return [table('Layers', [
    { title: 'Layer', value: (row) => row.layer }, { title: 'Family', text: true, value: (row) => `${row.family}: ${data.families[row.family]}` }, { title: 'Slot', value: (row) => row.slot.slot },
    { title: 'PP', value: (row) => row.slot.pp_rank }, { title: 'Parameters', value: (row) => row.parameters, show: (row) => count(row.parameters) }], rows)];
}

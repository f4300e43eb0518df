// Layers by slot, with cuts, owners and the blocks outside the layers.
function layerMap() {
  const { slots, layers, split } = data, families = [...new Set(layers.map(([family]) => family))];
  const stages = data.estimate.stages;
  const rows = slots.map((slot) => ({ ...slot, parameters: stages[slot.slot].parameters, cost: split ? split.costs[slot.slot] : null }));
  const owned = (slot) => slot.owns.map((name) => (slot.copies.includes(name) ? `${name}*` : name));
  const lines = rows.map((slot) => {
    const [start, stop] = slot.layers, cells = layers.slice(start, stop);
    const boxes = cells.map(([family, parameters], at) => el('span', { class: `f${family}`, title: `layer ${start + at}, ${data.families[family]}: ${count(parameters)} parameters` }, family));
    const ends = owned(slot).map((name) => el('span', { class: 'end' }, name));
    const label = `slot ${slot.slot}: pp ${slot.pp_rank}${data.mesh.vpp > 1 ? `, chunk ${slot.chunk}` : ''}`;
    const what = stop > start ? `layers ${start}-${stop - 1}` : 'no layer';
    return el('div', { class: 'slot' }, el('div', {}, el('div', {}, label), el('div', { class: 'soft' }, `${what}, ${count(slot.parameters)} parameters`)),
      el('div', { class: 'cells', role: 'img', 'aria-label': `${label}, ${what}: ${cells.map(([family]) => family).join('')}${ends.length ? `; ${owned(slot).join(', ')}` : ''}` }, boxes, ends));
  });
  const copies = slots.some((slot) => slot.copies.length) ? el('p', { class: 'soft' }, '* a copy of a block that another slot owns; their gradients are summed') : null;
  return section('layers', 'Layers and cuts', quality(split), el('ul', { class: 'legend' }, families.map((family) => el('li', {}, el('span', { class: `swatch f${family}` }), `${family}: ${data.families[family]}`))),
    el('div', { class: 'map' }, lines), copies, slotTable(rows, split, owned), behind('Table: layers', layerTable));
}

function quality(split) {
  if (!split) return null;
  const gap = split.gap ? `gap ${count(split.gap)}` : 'optimal';
  return [el('p', {}, `${split.mode} split for ${split.objective}: ${split.measures === 'step' ? 'step' : `largest ${split.measures}`} ${count(split.value)} ${split.unit}, lower bound ${count(split.lower_bound)}, ${gap}`),
    split.reason ? el('p', {}, `reason: ${split.reason}`) : null].filter(Boolean).reduce((box, line) => (box.append(line), box), el('div'));
}

function slotTable(rows, split, owned) {
  const total = split ? split.costs.reduce((a, b) => a + b, 0) || 1 : 1;
  const share = { title: 'cost share', value: (row) => row.cost / total, show: (row) => `${fixed((100 * row.cost) / total, 1)} %`, explain: (row) => explain(`cost of slot ${row.slot}`, [[split.unit, count(row.cost)], ['formula', 'the sum of the costs of its layers and of the ends that it holds, as the cuts were chosen by']]) };
  return table('Slots in model order', [
    { title: 'slot', value: (row) => row.slot }, { title: 'pp', value: (row) => row.pp_rank }, { title: 'chunk', value: (row) => row.chunk },
    { title: 'first layer', value: (row) => row.layers[0] }, { title: 'layers', value: (row) => row.layers[1] - row.layers[0] },
    { title: 'parameters', value: (row) => row.parameters, show: (row) => count(row.parameters) }, ...(split ? [share] : []),
    { title: 'also holds', text: true, wide: true, value: (row) => owned(row).join(', ') }], rows);
}

function layerTable() {
  const rows = data.layers.map(([family, parameters], layer) => ({ layer, family, parameters, slot: data.slots.find(({ layers }) => layers[0] <= layer && layer < layers[1]) }));
  return [table('Layers', [
    { title: 'layer', value: (row) => row.layer }, { title: 'family', text: true, value: (row) => row.family }, { title: 'slot', value: (row) => row.slot.slot },
    { title: 'pp', value: (row) => row.slot.pp_rank }, { title: 'parameters', value: (row) => row.parameters, show: (row) => count(row.parameters) }], rows)];
}

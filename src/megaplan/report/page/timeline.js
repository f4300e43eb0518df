// The step's actions: one lane for each chunk of each pipeline rank.
function timelineSection() {
  const actions = unpackActions(data.step), chunkOf = data.slots.map((slot) => slot.chunk), { vpp } = data.mesh;
  const box = plotBox('Timeline of the step'), status = el('p', { class: 'status', id: 'action' });
  const kinds = Object.keys(KINDS).filter((kind) => data.step.shapes.some(([parts]) => parts.some(([each]) => each === kind)));
  const lanes = data.mesh.pp * vpp, find = finder(actions, chunkOf, vpp);
  const draw = () => {
    addPlot(box, {
      height: Math.min(900, Math.max(160, 60 + lanes * (lanes > 32 ? 12 : 24))), legend: { show: false },
      series: [{}, { points: { show: false }, paths: () => null }],
      scales: { y: { dir: -1, range: () => [0, lanes] } },
      axis: { splits: () => Array.from({ length: lanes }, (_, lane) => lane + 0.5), values: (_, splits) => splits.map((at) => (vpp > 1 ? `PP ${Math.floor(at / vpp)}.${Math.floor(at) % vpp}` : `PP ${Math.floor(at)}`)), grid: { show: false } },
      hooks: {
        draw: [(plot) => paint(plot, actions, chunkOf, vpp)],
        setCursor: [(plot) => {
          const { left, top } = plot.cursor;
          const found = left < 0 ? null : find(plot.posToVal(left, 'x'), Math.floor(plot.posToVal(top, 'y')));
          status.textContent = found ? described(found) : '';
        }],
      },
    }, [[0, data.step.makespan], [0, lanes]]);
  };
  const made = section('timeline', 'Timeline',
    el('p', { class: 'soft' }, `The microbatches of a step, ${time(data.step.makespan)}, replayed with times from the device's rates; data ranks and the optimizer are not drawn. Drag to zoom, double-click for the whole step.`),
    legend(kinds.map((kind) => [kind, capital(KINDS[kind])])), zoomControls(), box, status, idleTable(), behind('Table: the actions of a rank', () => actionTables(actions)));
  return [made, draw];
}

function described(action) {
  return `${capital(KINDS[action.kind])} of microbatch ${action.microbatch} on slot ${action.slot}: ${time(action.stop - action.start)} from ${time(action.start)}`;
}

function finder(actions, chunkOf, vpp) {
  return (at, lane) => (actions[Math.floor(lane / vpp)] || []).find((action) => action.start <= at && at < action.stop && chunkOf[action.slot] === lane % vpp);
}

function paint(plot, actions, chunkOf, vpp) {
  const { ctx, bbox, scales } = plot, [from, to] = [scales.x.min, scales.x.max], ratio = devicePixelRatio;
  const x = (at) => plot.valToPos(at, 'x', true), tall = Math.abs(plot.valToPos(1, 'y', true) - plot.valToPos(0, 'y', true)) * 0.86;
  const fills = Object.fromEntries(Object.keys(KINDS).map((kind) => [kind, [colour(kind), colour(`${kind}-ink`)]])), edge = colour('back');
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.font = `${11 * ratio}px system-ui, sans-serif`;
  ctx.textAlign = 'center';
  ctx.textBaseline = 'middle';
  ctx.strokeStyle = edge;
  actions.forEach((list, rank) => {
    for (const action of list) {
      if (action.stop <= from || action.start >= to) continue;
      const left = x(action.start), wide = Math.max(ratio * 0.5, x(action.stop) - left), top = plot.valToPos(rank * vpp + chunkOf[action.slot] + 0.07, 'y', true);
      ctx.fillStyle = fills[action.kind][0];
      ctx.fillRect(left, top, wide, tall);
      if (wide > 3 * ratio) ctx.strokeRect(left, top, wide, tall);
      const text = String(action.microbatch);
      if (tall > 9 * ratio && wide > 7 * ratio * text.length) {
        ctx.fillStyle = fills[action.kind][1];
        ctx.fillText(text, left + wide / 2, top + tall / 2);
      }
    }
  });
  ctx.restore();
}

function idleTable() {
  const rows = data.step.ranks.map((rank, pp) => ({ pp, ...rank }));
  const column = (title, key) => ({ title, value: (row) => row[key], show: (row) => time(row[key]) });
  return table('Busy and idle time of the pipeline ranks', [
    { title: 'PP', value: (row) => row.pp }, column('Busy', 'busy'), column('Idle', 'idle'), column('Idle between its actions', 'idle_inside'),
    { title: 'Idle share', value: (row) => row.idle / data.step.makespan, show: (row) => `${fixed((100 * row.idle) / data.step.makespan, 1)} %` }], rows);
}

function actionTables(actions) {
  const place = el('div');
  const show = (rank) => place.replaceChildren(table(`Actions of PP ${rank}, in order`, [
    { title: 'Start', value: (row) => row.start, show: (row) => time(row.start) }, { title: 'Length', value: (row) => row.stop - row.start, show: (row) => time(row.stop - row.start) },
    { title: 'Action', text: true, value: (row) => capital(KINDS[row.kind]) }, { title: 'Slot', value: (row) => row.slot }, { title: 'Microbatch', value: (row) => row.microbatch }], actions[rank]));
  show(0);
  return [choice('Rank', actions.map((_, rank) => [rank, `PP ${rank}`]), (rank) => show(Number(rank))), place];
}

// What both pictures over time share: one range of time, zoomed by dragging, by buttons and by keys; colours of the scheme in use.
const plots = [];
let range = null;

function showRange(from, to) {
  const all = data.step.makespan, width = Math.min(all, Math.max(to - from, all / 5000));
  const start = Math.max(0, Math.min(from, all - width));
  range = [start, start + width];
  for (const plot of plots) if (plot.scales.x.min !== range[0] || plot.scales.x.max !== range[1]) plot.setScale('x', { min: range[0], max: range[1] });
}

function zoom(factor, shift = 0) {
  const [from, to] = range, width = (to - from) * factor, middle = (from + to) / 2 + shift * (to - from);
  showRange(middle - width / 2, middle + width / 2);
}

const MOVES = { '+': () => zoom(0.5), '=': () => zoom(0.5), '-': () => zoom(2), ArrowLeft: () => zoom(1, -0.25), ArrowRight: () => zoom(1, 0.25), 0: () => showRange(0, data.step.makespan) };

function zoomControls() {
  const buttons = [['Zoom in', '+'], ['Zoom out', '-'], ['Earlier', 'ArrowLeft'], ['Later', 'ArrowRight'], ['Whole step', '0']];
  return el('div', { class: 'controls', role: 'group', 'aria-label': 'Range of time' }, buttons.map(([text, key]) => el('button', { type: 'button', onclick: MOVES[key] }, text)));
}

function plotBox(label) {
  return el('div', {
    class: 'plot', tabindex: '0', role: 'group', 'aria-label': `${label}. Keys: plus and minus zoom, left and right move, 0 shows the whole step.`,
    onkeydown: (event) => {
      if (MOVES[event.key] && !event.ctrlKey && !event.metaKey && !event.altKey) {
        event.preventDefault();
        MOVES[event.key]();
      }
    },
  });
}

function addPlot(box, options, values) {
  const axis = { stroke: () => colour('soft'), grid: { stroke: () => colour('faint'), width: 1 }, ticks: { stroke: () => colour('faint'), width: 1 } };
  const plot = new uPlot({
    ...options, width: Math.max(320, box.clientWidth), pxAlign: false,
    cursor: { drag: { x: true, y: false }, sync: { key: 'step', scales: ['x', null] } },
    scales: { x: { time: false }, ...options.scales },
    axes: [{ ...axis, values: (_, splits) => splits.map(time) }, { ...axis, size: 96, ...options.axis }],
    hooks: { ...options.hooks, setScale: [(self, key) => key === 'x' && range && showRange(self.scales.x.min, self.scales.x.max)] },
  }, values, box);
  const canvas = plot.root.querySelector('canvas');
  canvas.setAttribute('aria-hidden', 'true');
  plots.push(plot);
  return plot;
}

function keepPlotsInShape() {
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => plots.forEach((plot) => plot.redraw()));
  addEventListener('resize', () => plots.forEach((plot) => plot.setSize({ width: Math.max(320, plot.root.parentNode.clientWidth), height: plot.height })));
}

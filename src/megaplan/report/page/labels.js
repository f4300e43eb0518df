// Readable names of the data's keys: a known name, or the key's words with a capital.
const NAMES = {
  replicated_params: 'Replicated parameters', tensor_parallel_params: 'Tensor-parallel parameters', expert_parallel_params: 'Expert-parallel parameters',
  gradients: 'Gradients', matrix_optimizer: 'Matrix optimizer', other_optimizer: 'Other optimizer', activations: 'Activations', feature_activations: 'Feature activations',
  init: 'Initialisation', first_forward_backward: 'First forward and backward', first_optimizer: 'First optimizer step', forward_backward: 'Forward and backward', optimizer: 'Optimizer step',
  dp: 'DP', dp_replicate: 'DP replicate', dp_shard: 'DP shard', pp: 'PP', vpp: 'VPP', cp: 'CP', tp: 'TP', ep: 'EP', etp: 'ETP',
  gpipe: 'GPipe', '1f1b': '1F1B', interleaved_1f1b: 'interleaved 1F1B', looped_bfs: 'looped BFS', zbv: 'ZBV', interleaved_zero_bubble: 'interleaved zero bubble', dualpipe: 'DualPipe', dualpipev: 'DualPipeV',
  gaps: 'Gaps between kernels', host: 'Waits for the host', layers: 'Layers', bubble: 'Pipeline bubble', exposed_data: 'Exposed data-parallel traffic', exposed_transfers: 'Exposed transfers', plain_torch: 'Plain torch operations',
  grouped_gemm: 'Grouped products', gemm: 'Matrix products', fixed: 'Fixed costs', mtp: 'MTP', kv_cache: 'KV cache',
};

// [group, name in the group, columns], as the heads of the widest table have them.
const GROUPS = {
  replicated_params: ['Parameters', 'Replicated'], tensor_parallel_params: ['Parameters', 'Tensor parallel'], expert_parallel_params: ['Parameters', 'Expert parallel'],
  gradients: ['Training state', 'Gradients'], matrix_optimizer: ['Training state', 'Matrix optimizer'], other_optimizer: ['Training state', 'Other optimizer'],
  activations: ['Activations', 'Blocks'], feature_activations: ['Activations', 'Features'], routing: ['Activations', 'Routing'],
  communication: ['Runtime', 'Communi\u00adcation'], workspace: ['Runtime', 'Workspace'], overhead: ['Runtime', 'Overhead'],
};

function label(key) {
  const words = String(key).replaceAll('_', ' ');
  return NAMES[key] || words.charAt(0).toUpperCase() + words.slice(1);
}

// Degrees of a mesh above 1: `TP 2 · PP 4`; `DP 1` where no axis has more.
function meshLabel(mesh) {
  const axes = Object.entries(mesh).filter(([name, degree]) => degree > 1 && name !== 'world_size').map(([name, degree]) => `${label(name)} ${degree}`);
  return axes.length ? axes.join(' · ') : 'no parallelism';
}

// Names of devices are upper case: H100-SXM.
const deviceName = (name) => name.toUpperCase();

// The device of a rank, where stages lie on several types; and all of them with their numbers.
const deviceOf = ({ device }, rank) => (device.pools || []).find(({ ranks: [start, stop] }) => start <= rank.ranks[0][0] && rank.ranks[0][0] < stop) || device;

function deviceNames({ device }, world) {
  const pools = device.pools || [{ ...device, ranks: [0, world] }];
  return pools.map(({ name, ranks: [start, stop] }) => `${count(stop - start)} × ${deviceName(name)}`).join(' + ');
}

const towerNames = ({ totals }) => Object.entries(totals.towers || {}).map(([name, part]) => ` · ${name} ${short(part.parameters)} ${part.trained ? 'trained' : 'frozen'}`).join('');

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

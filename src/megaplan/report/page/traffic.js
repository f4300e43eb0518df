// Bytes that a rank sends in a step, by axis, kind of exchange and link.
const LINKS = { fabric: 'Fabric (inside a node)', network: 'Network (between nodes)' };

function trafficSection(rows) {
  if (!rows.length) return section('traffic', 'Traffic between ranks', el('p', {}, data.mesh.world_size > 1 ? 'The step of this host is not modelled, so that its traffic is not counted.' : 'One device sends nothing.'));
  const all = rows.reduce((sum, row) => sum + row.rank_bytes, 0), over = rows.filter(({ link }) => link === 'network').reduce((sum, row) => sum + row.rank_bytes, 0);
  return section('traffic', 'Traffic between ranks',
    el('p', { class: 'lead' }, `A rank sends ${gigabytes(all)} in a step, in the mean of the pipeline ranks; ${over ? `${gigabytes(over)} of it in groups that leave a node` : 'no group leaves a node'}.`),
    table('Bytes that a rank sends in a step', [
      { title: 'Axis', text: true, value: (row) => label(row.axis) }, { title: 'Exchange', text: true, value: (row) => capital(row.what) }, { title: 'Ranks', value: (row) => row.ranks, show: (row) => count(row.ranks) },
      { title: 'Slowest link', text: true, value: (row) => LINKS[row.link] }, { title: 'A rank', value: (row) => row.rank_bytes, show: (row) => gigabytes(row.rank_bytes) },
      { title: 'All ranks', value: (row) => row.total_bytes, show: (row) => gigabytes(row.total_bytes) },
      { title: 'Share', text: true, value: (row) => row.rank_bytes / all, show: (row) => meter(row.rank_bytes / all, percent(row.rank_bytes / all)) }], rows));
}

// Which sections a kind of document has; another kind is another entry here.
const PAGES = { plan: planPage, search: searchPage };

function planPage() {
  const drawn = data.step.reason ? [[section('timeline', 'Timeline', el('p', {}, data.step.reason)), () => {}]] : [memoryOverTime(), timelineSection()];
  return { header: header(), sections: [memoryByRank(), ...drawn.map(([made]) => made), layerMap(), stepTime()], draw: drawn.map(([, draw]) => draw) };
}

function main() {
  const page = PAGES[data.kind]();
  document.title = `${data.name} · megaplan report`;
  document.getElementById('header').append(...page.header.filter(Boolean));
  document.getElementById('contents').append(...page.sections.map((made) => el('a', { href: `#${made.id}` }, made.querySelector('h2').textContent)));
  document.getElementById('content').append(...page.sections);
  for (const draw of page.draw) draw();
  if (plots.length) showRange(0, data.step.makespan);
  keepPlotsInShape();
}

main();

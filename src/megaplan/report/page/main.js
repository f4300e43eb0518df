// Which sections a kind of document has; another kind is another entry here.
const PAGES = { plan: planPage, search: searchPage, comparison: comparisonPage };

function planPage() {
  const drawn = data.step.reason ? [[section('timeline', 'Timeline', el('p', {}, data.step.reason)), () => {}]] : [memoryOverTime(), timelineSection()];
  const sections = [memoryByRank(), stepTime(), ...drawn.map(([made]) => made), trafficSection(data.estimate.traffic), wholeRun(data.run), postTraining(data.post_training), layerMap()];
  return { title: `${data.name}, ${meshLabel(data.mesh)}`, header: header(), sections: sections.filter(Boolean), draw: drawn.map(([, draw]) => draw) };
}

function main() {
  const page = PAGES[data.kind]();
  document.title = `${page.title} · megaplan`;
  document.getElementById('header').append(...page.header.filter(Boolean));
  document.getElementById('contents').append(...page.sections.map((made) => el('a', { href: `#${made.id}` }, made.querySelector('h2').textContent)));
  document.getElementById('content').append(...page.sections);
  for (const draw of page.draw) draw();
  if (plots.length) showRange(0, data.step.makespan);
  keepPlotsInShape();
}

main();

// Elements without markup: every text becomes a text node, so that no name of a spec or file is read as HTML.
const data = JSON.parse(document.getElementById('data').textContent);

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (name === 'style') for (const [key, each] of Object.entries(value)) node.style.setProperty(key, each);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? '' : String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false).map((child) => (child instanceof Node ? child : String(child))));
  return node;
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function section(id, title, ...children) {
  return el('section', { id, 'aria-labelledby': `${id}-title` }, el('h2', { id: `${id}-title` }, title), ...children);
}

function choice(text, options, changed) {
  const select = el('select', { onchange: () => changed(select.value) }, options.map(([value, shown]) => el('option', { value }, shown)));
  return el('label', {}, `${text} `, select);
}

function legend(entries) {
  return el('ul', { class: 'legend' }, entries.map(([name, text]) => el('li', {}, el('span', { class: 'swatch', style: { background: `var(--${name})` } }), text)));
}

// A main number with its name, and what makes it readable below.
function card(name, value, note, more) {
  return el('div', { class: 'card' }, el('dt', {}, name), el('dd', {}, el('span', { class: 'value' }, value), note ? el('span', { class: 'note' }, note) : null, more));
}

// Cards in one row, or in two rows that are as full as each other.
function deck(cards) {
  return el('dl', { class: 'cards', style: { '--columns': cards.length > 5 ? Math.min(5, Math.ceil(cards.length / 2)) : cards.length } }, cards);
}

function meter(share, text) {
  return el('span', { class: 'meter', role: 'img', 'aria-label': text }, el('i', { class: share > 1 ? 'over' : null, style: { width: `${Math.min(100, 100 * share)}%` } }));
}

function verdict(fits, ...more) {
  return el('p', { class: `verdict ${fits ? 'good' : 'bad'}`, id: 'verdict' }, el('span', { 'aria-hidden': 'true', class: 'mark' }, fits ? '✓' : '✕'), el('strong', {}, fits ? 'Fits' : 'Does not fit'), ...more);
}

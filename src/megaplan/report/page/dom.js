// Elements without markup: every text becomes a text node, so that no name of a spec or file is read as HTML.
const data = JSON.parse(document.getElementById('data').textContent);

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (name === 'style') for (const [key, each] of Object.entries(value)) node.style.setProperty(key, each);
    else if (value !== null && value !== false) node.setAttribute(name, value === true ? '' : String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined).map((child) => (child instanceof Node ? child : String(child))));
  return node;
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function section(id, title, ...children) {
  return el('section', { id, 'aria-labelledby': `${id}-title` }, el('h2', { id: `${id}-title` }, title), ...children);
}

function choice(label, options, changed) {
  const select = el('select', { onchange: () => changed(select.value) }, options.map(([value, text]) => el('option', { value }, text)));
  return el('label', {}, `${label} `, select);
}

function legend(entries) {
  return el('ul', { class: 'legend' }, entries.map(([name, text]) => el('li', {}, el('span', { class: 'swatch', style: { background: `var(--${name})` } }), text)));
}

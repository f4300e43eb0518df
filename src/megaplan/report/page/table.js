// A table to sort. Numbers that have an explanation are buttons with one tab stop for all of them: arrow keys move between them.
function table(caption, columns, rows) {
  const body = el('tbody'), order = { column: null, up: true };
  const heads = columns.map((column, index) => {
    const button = el('button', { type: 'button', onclick: () => sort(index) }, column.title);
    return el('th', { scope: 'col', class: column.text ? 'text' : null, 'aria-sort': 'none' }, button);
  });

  function cell(column, row) {
    const shown = column.show ? column.show(row) : column.value(row);
    const explained = column.explain ? el('button', { type: 'button', tabindex: '-1', 'aria-haspopup': 'dialog', onclick: () => column.explain(row) }, shown) : shown;
    return el('td', { class: [column.text && 'text', column.wide && 'wide'].filter(Boolean).join(' ') || null, 'data-value': column.value(row) }, explained);
  }

  function fill() {
    body.replaceChildren(...rows.map((row) => el('tr', {}, columns.map((column) => cell(column, row)))));
    const first = body.querySelector('button');
    if (first) first.tabIndex = 0;
  }

  function sort(index) {
    order.up = order.column === index ? !order.up : Boolean(columns[index].text);
    order.column = index;
    const { value } = columns[index], turn = order.up ? 1 : -1;
    rows = [...rows].sort((a, b) => turn * (typeof value(a) === 'number' ? value(a) - value(b) : String(value(a)).localeCompare(String(value(b)))));
    heads.forEach((head, at) => head.setAttribute('aria-sort', at !== index ? 'none' : order.up ? 'ascending' : 'descending'));
    fill();
  }

  function move(event) {
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    const from = event.target.closest('td');
    if (!steps || !from) return;
    const line = from.parentNode.rowIndex - 1, lines = body.rows;
    let [row, at] = [line + steps[0], from.cellIndex + steps[1]];
    while (lines[row] && lines[row].cells[at]) {
      const next = lines[row].cells[at].querySelector('button');
      if (next) {
        event.preventDefault();
        event.target.tabIndex = -1;
        next.tabIndex = 0;
        next.focus();
        return;
      }
      row += steps[0];
      at += steps[1];
    }
  }

  fill();
  const made = el('table', { onkeydown: move }, el('caption', {}, caption), el('thead', {}, el('tr', {}, heads)), body);
  return el('div', { class: 'scroll', role: 'region', tabindex: '0', 'aria-label': caption }, made);
}

// The table behind a picture, filled when it is opened.
function behind(title, make) {
  const details = el('details', {}, el('summary', {}, title));
  details.addEventListener('toggle', () => {
    if (details.open && details.children.length === 1) details.append(...make());
  });
  return details;
}

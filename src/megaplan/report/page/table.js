// A table to sort. Numbers that have an explanation are buttons with one tab stop for all of them: arrow keys move between them.
// Columns with a `group` get a head above; the first column stays when the frame scrolls.
function table(caption, columns, rows) {
  const body = el('tbody'), order = { column: null, up: true };
  const heads = columns.map((column, index) => {
    const button = el('button', { type: 'button', onclick: () => sort(index) }, column.title);
    return el('th', { scope: 'col', class: kinds(column, index), 'aria-sort': 'none' }, button);
  });

  function kinds(column, index) {
    const opens = column.group && (!index || columns[index - 1].group !== column.group);
    return [column.text && 'text', column.wide && 'wide', opens && 'opens'].filter(Boolean).join(' ') || null;
  }

  function cell(column, row, index) {
    const shown = column.show ? column.show(row) : column.value(row);
    const explained = column.explain ? el('button', { type: 'button', tabindex: '-1', 'aria-haspopup': 'dialog', onclick: () => column.explain(row) }, shown) : shown;
    const mark = column.mark && column.mark(row);
    return el(index ? 'td' : 'th', { scope: index ? null : 'row', class: [kinds(column, index), mark].filter(Boolean).join(' ') || null, 'data-value': column.value(row) }, explained);
  }

  function fill() {
    body.replaceChildren(...rows.map((row) => el('tr', {}, columns.map((column, index) => cell(column, row, index)))));
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
    const from = event.target.closest('tbody td, tbody th');
    if (!steps || !from) return;
    const line = from.parentNode.sectionRowIndex, lines = body.rows;
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
  const head = el('thead', {}, groupRow(columns), el('tr', {}, heads));
  const made = el('table', { class: columns.length > 12 ? 'dense' : null, onkeydown: move }, el('caption', {}, el('span', {}, caption)), head, body);
  return el('div', { class: 'scroll', role: 'region', tabindex: '0', 'aria-label': caption }, made);
}

function groupRow(columns) {
  if (!columns.some((column) => column.group)) return null;
  const runs = [];
  for (const { group } of columns) {
    if (runs.length && runs.at(-1).group === group) runs.at(-1).span += 1;
    else runs.push({ group, span: 1 });
  }
  return el('tr', { class: 'groups' }, runs.map(({ group, span }) => (group ? el('th', { scope: 'colgroup', colspan: span, class: 'opens' }, group) : el('td', { colspan: span }))));
}

// The table behind a picture, filled when it is opened.
function behind(title, make) {
  const details = el('details', {}, el('summary', {}, title));
  details.addEventListener('toggle', () => {
    if (details.open && details.children.length === 1) details.append(...make());
  });
  return details;
}

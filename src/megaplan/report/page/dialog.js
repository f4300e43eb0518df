// The formula behind a number. Escape or the button closes the dialog, and the browser returns the focus to the number.
function explain(title, rows) {
  const dialog = document.getElementById('explanation');
  const close = el('button', { type: 'button', onclick: () => dialog.close() }, 'Close');
  const terms = rows.filter(([, text]) => text).map(([name, text]) => [el('dt', {}, name), el('dd', {}, text)]);
  dialog.replaceChildren(el('h2', { id: 'explanation-title' }, title), el('dl', {}, terms), close);
  dialog.showModal();
  close.focus();
}

function explainCell(rank, phase, column) {
  const bytes = rank.cells[phase][data.columns.indexOf(column)], name = data.phases[phase];
  explain(`${label(column)}, ${rank.label}`, [
    [`Bytes at the peak of ${label(name).toLowerCase()}`, `${count(bytes)} (${size(bytes)})`],
    ['Where the peak is', rank.moments[name]],
    ...Object.entries(data.formulas[column]).map(([field, text]) => [capital(field), text]),
  ]);
}

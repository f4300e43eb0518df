// Numbers as megaplan prints them: GiB and times rounded half to even, as Python's format does.
function fixed(value, digits) {
  const scaled = Math.abs(value) * 10 ** digits, whole = Math.floor(scaled);
  if (scaled - whole !== 0.5) return value.toFixed(digits);
  const even = (whole + (whole % 2)) / 10 ** digits;
  return (value < 0 ? -even : even).toFixed(digits);
}

const gib = (bytes) => fixed(bytes / 2 ** 30, 2);
const count = (number) => number.toLocaleString('en-US');

function size(bytes) {
  let power = 0;
  while (power < 5 && Math.abs(bytes) >= 1024 ** (power + 1)) power += 1;
  return power === 0 ? `${bytes} B` : `${fixed(bytes / 1024 ** power, 2)} ${['', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'][power]}`;
}

function time(ns) {
  for (const [unit, factor] of [['s', 1e9], ['ms', 1e6], ['µs', 1e3]]) if (Math.abs(ns) >= factor) return `${fixed(ns / factor, 2)} ${unit}`;
  return `${Math.round(ns)} ns`;
}

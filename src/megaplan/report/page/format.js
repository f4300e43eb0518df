// Numbers as megaplan prints them: GiB and times rounded half to even, as Python's format does.
function fixed(value, digits) {
  const scaled = Math.abs(value) * 10 ** digits, whole = Math.floor(scaled);
  if (scaled - whole !== 0.5) return value.toFixed(digits);
  const even = (whole + (whole % 2)) / 10 ** digits;
  return (value < 0 ? -even : even).toFixed(digits);
}

const gib = (bytes) => fixed(bytes / 2 ** 30, 2);
const count = (number) => number.toLocaleString('en-US', { maximumFractionDigits: 0 });
const percent = (share, digits = 1) => `${fixed(100 * share, digits)} %`;

// A share near 1 or 0 has a digit more: 99.97 %.
const fine = (share) => percent(share, share > 0.99 || share < 0.01 ? 2 : 1);

function size(bytes) {
  let power = 0;
  while (power < 5 && Math.abs(bytes) >= 1024 ** (power + 1)) power += 1;
  return power === 0 ? `${bytes} B` : `${fixed(bytes / 1024 ** power, 2)} ${['', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'][power]}`;
}

function time(ns) {
  for (const [unit, factor] of [['s', 1e9], ['ms', 1e6], ['µs', 1e3]]) if (Math.abs(ns) >= factor) return `${fixed(ns / factor, 2)} ${unit}`;
  return `${Math.round(ns)} ns`;
}

// `8.03 B`, `2 T`: three digits with the unit of thousands.
function short(number) {
  for (const [unit, factor] of [['T', 1e12], ['B', 1e9], ['M', 1e6], ['K', 1e3]]) if (Math.abs(number) >= factor) return `${Number((number / factor).toPrecision(3))} ${unit}`;
  return amount(number);
}

// Three digits of a small number, all digits of a large one: 3.21, 54.1, 1,234.
const amount = (number) => (Math.abs(number) >= 1000 ? count(number) : String(Number(number.toPrecision(3))));

// `54.1 d`, `4.2 h`, `12.3 min`, `6.50 s`.
function duration(seconds) {
  for (const [unit, factor] of [['d', 86400], ['h', 3600], ['min', 60]]) if (seconds >= 2 * factor) return `${fixed(seconds / factor, 1)} ${unit}`;
  return time(seconds * 1e9);
}

const between = ({ low, high }, show) => (low === high ? '' : `80 % interval ${show(low)} – ${show(high)}`);

// Traffic in decimal units, as links are sold: 7.09 GB.
function gigabytes(bytes) {
  for (const [unit, factor] of [['TB', 1e12], ['GB', 1e9], ['MB', 1e6], ['kB', 1e3]]) if (bytes >= factor) return `${fixed(bytes / factor, 2)} ${unit}`;
  return `${bytes} B`;
}

// The vertical scale of a chart: its ends, its marks, and the place of a value. Any finite numbers are drawn, also those
// whose difference is no finite number, or so small that adding a step to them changes nothing.

export interface Scale {
  low: number;
  high: number;
  ticks: number[];
  /** The share of the height at which a value is, from 0 at the low end to 1 at the high end. */
  place: (value: number) => number;
}

const MOST_TICKS = 12;
const SMALLEST = 1e-290;

export function scaleOf(values: number[]): Scale {
  let [least, most] = [Infinity, -Infinity];
  for (const each of values) {
    least = Math.min(least, each);
    most = Math.max(most, each);
  }
  // In units of the largest size no difference is infinite; a smaller unit than this has few digits.
  const size = least === 0 && most === 0 ? 10 : Math.max(Math.abs(least), Math.abs(most), SMALLEST);
  const [from, to] = [least / size, most / size];
  const room = (to - from) * 0.06 || 0.1;
  const low = bounded((least >= 0 && from - room < 0 ? 0 : from - room) * size);
  const high = bounded(to * size + room * size);
  const [bottom, top] = [low / size, high / size];
  return { low, high, ticks: ticksBetween(low, high), place: (value) => (value / size - bottom) / (top - bottom) };
}

function bounded(value: number): number {
  return Math.max(-Number.MAX_VALUE, Math.min(Number.MAX_VALUE, value));
}

function ticksBetween(low: number, high: number): number[] {
  const rough = high / 4 - low / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough) ?? 0;
  const found: number[] = [];
  const first = Math.ceil(low / step);
  for (let index = 0; index < MOST_TICKS && step > 0; index += 1) {
    const value = Number(((first + index) * step).toPrecision(12));
    if (!(value <= high)) break;
    if (value >= low && value !== found[found.length - 1]) found.push(value);
  }
  return found.length > 1 ? found : [low, high];
}

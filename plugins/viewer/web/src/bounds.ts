// Bounds the timeline of an exported page, as the server does in `timeline_bounds.py`.
import type { Slice, Timeline } from "./api";

const MOST_SLICES = 6000;
const MOST_ROWS = 200;
const PIXELS = 1000;
const CATEGORIES = ["episode", "turn", "tool", "reward", "generate", "memory"];

type Row = Timeline["rows"][0];

/** A timeline as it was written: without what the page says about its bounds. */
export type WholeTimeline = Pick<Timeline, "seconds" | "rows">;

export function bound(timeline: WholeTimeline): Timeline {
  let longest: Slice | null = null;
  for (const row of timeline.rows) for (const each of row.slices) if (each[2] === "episode" && (longest === null || each[1] > longest[1])) longest = each;
  let rows = chooseRows(timeline.rows);
  for (let width = timeline.seconds / PIXELS || 1; count(rows, () => 1) > MOST_SLICES; width *= 2) {
    rows = rows.map((row) => ({ ...row, slices: merge(row.slices, width, longest) }));
  }
  return { seconds: timeline.seconds, rows, longest, num_merged: count(rows, (each) => each[5] ?? 0), num_hidden_rows: timeline.rows.length - rows.length };
}

function count(rows: Row[], value: (slice: Slice) => number): number {
  return rows.reduce((sum, row) => row.slices.reduce((part, each) => part + value(each), sum), 0);
}

function chooseRows(rows: Row[]): Row[] {
  if (rows.length <= MOST_ROWS) return rows;
  const ranks = new Map<string, number>();
  const ranked = rows
    .map((row) => ({ row, length: row.slices.reduce((most, each) => Math.max(most, each[1]), 0), rank: 0 }))
    .sort((a, b) => b.length - a.length);
  for (const each of ranked) {
    each.rank = ranks.get(each.row.name) ?? 0;
    ranks.set(each.row.name, each.rank + 1);
  }
  const chosen = new Set(ranked.sort((a, b) => a.rank - b.rank).slice(0, MOST_ROWS).map((each) => each.row));
  return rows.filter((row) => chosen.has(row));
}

function merge(slices: Slice[], width: number, longest: Slice | null): Slice[] {
  const kept: Slice[] = [];
  const blocks = new Map<string, Slice>();
  for (const each of slices) {
    const place = `${each[2]} ${Math.floor(each[0] / width)}`;
    const block = blocks.get(place);
    if (each === longest || each[1] >= width) kept.push(each);
    else blocks.set(place, block === undefined ? each : join(block, each));
  }
  return [...kept, ...blocks.values()].sort((a, b) => CATEGORIES.indexOf(a[2]) - CATEGORIES.indexOf(b[2]) || a[0] - b[0]);
}

function join(one: Slice, other: Slice): Slice {
  const start = Math.min(one[0], other[0]);
  const total = (one[5] ?? 1) + (other[5] ?? 1);
  return [start, Math.max(one[0] + one[1], other[0] + other[1]) - start, one[2], `${total} ${one[2]} slices`, one[4] === other[4] ? one[4] : null, total];
}
